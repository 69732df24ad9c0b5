"""Near names."""

from __future__ import annotations

import pytest

from racelab.configs.suggest import did_you_mean, near, near_keys

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
