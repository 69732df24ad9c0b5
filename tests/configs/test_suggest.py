"""Near names."""

from __future__ import annotations

import pytest

from racelab.configs.suggest import by_tail, did_you_mean, near, near_keys

KEYS = ["method.trqc.q_target", "method.phase.policy_target", "run.seed", "data.seed", "method.pool.min_pool"]


@pytest.mark.parametrize(
    ("word", "found"),
    [("trian", ["train"]), ("TRAIN", ["train"]), ("zzz", []), ("rnus", ["runs"])],
)
def test_near(word: str, found: list[str]) -> None:
    assert near(word, ["train", "runs", "doctor"]) == found


@pytest.mark.parametrize(
    ("key", "first"),
    [
        ("q_target", "method.trqc.q_target"),
        ("trqc.q_target", "method.trqc.q_target"),
        ("method.trqc.q_tagret", "method.trqc.q_target"),
        ("method.phase.q_target", "method.trqc.q_target"),
        ("min_pol", "method.pool.min_pool"),
    ],
)
def test_near_keys_finds_the_home_of_a_key(key: str, first: str) -> None:
    assert near_keys(key, KEYS)[0] == first


def test_near_keys_gives_all_homes_of_a_shared_name_and_at_most_three() -> None:
    assert near_keys("seed", KEYS) == ["run.seed", "data.seed"]
    assert len(near_keys("x", [f"a{i}.x" for i in range(9)])) == 3


def test_names_far_behind_the_best_are_left_out() -> None:
    """`prset` is 10/11 of `preset` and 6/10 of `probe`."""
    assert near("prset", ["probe", "preset"]) == ["preset"]
    assert near("prset", ["probe"]) == ["probe"]


def test_copies_of_a_key_that_lie_deeper_and_keys_of_other_methods_stand_back() -> None:
    known = [
        "method.trqc.q_target",
        "method.sensitivity.short.q_target",
        "method.fixed",
        "method.phase.fixed",
        "a.b.fixed",
    ]
    assert near_keys("q_target", known) == ["method.trqc.q_target"]
    assert near_keys("fixed", known) == by_tail("fixed", known) == ["method.fixed", "a.b.fixed"]
    assert near_keys("fixed", known, prefer={"method.phase.fixed"}) == ["method.phase.fixed"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "; did you mean a?"),
        (["a", "b"], "; did you mean a or b?"),
        (["a", "b", "c"], "; did you mean a, b or c?"),
    ],
)
def test_did_you_mean(names: list[str], text: str) -> None:
    assert did_you_mean(names) == text
