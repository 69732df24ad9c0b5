"""Comparisons of RLDS conditions: the crossed bootstrap, curves at equal cost, the walker, the sentences."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from racelab.analysis import rlds_curves as rc
from racelab.analysis.rlds_walker import blind_walker, walk_blindly
from racelab.configs.compose import compose
from racelab.configs.schema_rlds import RldsRunConfig
from racelab.experiments.errors import DataError, RunFolderError

IDS = tuple(f"{letter}{i}" for i in range(3) for letter in "abcd")
"""Of which the results are given four by four, so that there are enough for an interval."""


@pytest.fixture(scope="module")
def config() -> RldsRunConfig:
    words = ["task=frozenlake", "task.train_examples=40", "task.validation_examples=30"]
    found = compose(words).config
    assert isinstance(found, RldsRunConfig)
    return found


def curve(
    config: RldsRunConfig, condition: str, seed: int, results: tuple[float, ...], **more: Any
) -> rc.Curve:
    """Evaluations after 0, 10 and 20 updates with rewards 0, 0.4 and the mean of `results`."""
    updates = np.array([0.0, 10.0, 20.0])
    plain = rc.Curve(
        task="frozenlake",
        condition=condition,
        label=condition,
        seed=seed,
        replicates=200,
        at={"updates": updates, "tokens": 100.0 * updates, "cpu_s": 0.5 * updates},
        reward=np.array([0.0, 0.4, float(np.mean(results))]),
        result=dict(zip(IDS, results * 3, strict=True)),
        n_last=2,
        retries=0 if condition == "rlvr" else 7,
        pairs=0 if condition in ("rlvr", "rlds-no-aux") else 3,
        config=config,
    )
    return replace(plain, **more)


def with_method(config: RldsRunConfig, **changes: Any) -> RldsRunConfig:
    return config.model_copy(update={"method": config.method.model_copy(update=changes)})


@pytest.mark.parametrize(
    ("at", "value"), [(0, 0.1), (5, 0.3), (10, 0.5), (20, 0.6), (30, 0.7), (30.1, None), (-1, None)]
)
def test_curves_are_linear_between_evaluations_and_end_where_they_end(at: float, value: float | None) -> None:
    found = rc.interpolate(np.array([0.0, 10.0, 30.0]), np.array([0.1, 0.5, 0.7]), at)
    assert found == (None if value is None else pytest.approx(value))
    assert rc.interpolate(np.zeros(0), np.zeros(0), 0.0) is None


def test_the_crossed_bootstrap_of_two_seeds_and_two_examples_by_hand() -> None:
    """Values [[0, 0], [0, 1]]: a replicate is (share of seed 2) * (share of example 2).

    Both shares are 0, 1/2, 1 with chances 1/4, 1/2, 1/4. So P(0) = 7/16, P(1/4) = 1/4, P(1/2) = 1/4, P(1) = 1/16.
    The 2.5 % quantile is 0, the 97.5 % one is 1 (as 1/16 > 0.025), the mean 1/4.
    """
    values = np.array([[0.0, 0.0], [0.0, 1.0]])
    found = rc.bootstrap(values, np.random.default_rng(0), 4000)
    assert found == {"value": 0.25, "low": 0.0, "high": 1.0}


def test_one_seed_is_the_bootstrap_over_examples_alone() -> None:
    """One seed, examples 0 and 1: the mean of a replicate is 0, 1/2, 1 with chances 1/4, 1/2, 1/4."""
    found = rc.bootstrap(np.array([[0.0, 1.0]]), np.random.default_rng(0), 2000)
    assert found == {"value": 0.5, "low": 0.0, "high": 1.0}


def test_equal_examples_leave_the_seeds_alone_and_their_draws_are_those_of_a_mean() -> None:
    """Three seeds with 0, 0.3, 0.9: the extreme replicates, 3 times the same seed, have a chance of 1/27 > 0.025."""
    values = np.repeat(np.array([[0.0], [0.3], [0.9]]), 5, axis=1)
    found = rc.bootstrap(values, np.random.default_rng(3), 4000)
    assert found["value"] == pytest.approx(0.4)
    assert (found["low"], found["high"]) == (pytest.approx(0.0), pytest.approx(0.9))


def test_a_constant_has_no_width_and_nothing_cannot_be_compared() -> None:
    found = rc.bootstrap(np.full((3, 4), 0.5), np.random.default_rng(0), 50)
    assert set(found.values()) == {0.5}
    for shape in ((0, 4), (2, 0)):
        with pytest.raises(DataError, match="nothing to compare"):
            rc.bootstrap(np.zeros(shape), np.random.default_rng(0), 50)


def test_conditions_are_paired_over_the_seeds_and_examples_they_share(config: RldsRunConfig) -> None:
    """Seed 1 only: differences of the examples are 1, -1, 0.5, 0.5 for the rollout and 0.5 each for SDAE."""
    scalar = with_method(config, group_size=10)
    curves = [
        curve(scalar, "rlvr", 0, (9.0, 9.0, 9.0, 9.0)),
        curve(scalar, "rlvr", 1, (0.0, 0.0, 1.0, 1.0)),
        curve(config, "base-reflection", 1, (1.0, -1.0, 1.5, 1.5)),
        curve(config, "rlds", 1, (1.5, -0.5, 2.0, 2.0)),
    ]
    found = rc.compare(curves)["frozenlake"]
    assert set(found["differences"]) == {"base-reflection - rlvr", "rlds - rlvr", "rlds - base-reflection"}
    retries, sdae = (
        found["differences"]["base-reflection - rlvr"],
        found["differences"]["rlds - base-reflection"],
    )
    assert retries["seeds"] == [1]
    assert retries["value"] == 0.25
    assert retries["low"] < 0 < retries["high"]
    assert not retries["resolved"]
    assert sdae == {
        "value": 0.5, "low": pytest.approx(0.5), "high": pytest.approx(0.5), "resolved": True, "seeds": [1],
        "examples": 12,
    }  # fmt: skip
    assert found["verdicts"] == [
        "SDAE changes the reward by +0.500 [+0.500, +0.500] against the same retries with GRPO.",
        "The reflect-retry rollout with its auxiliary loss (G = 6 + retries against 10) changes the reward by +0.250 "
        f"[{retries['low']:+.3f}, {retries['high']:+.3f}] (not resolved) against scalar GRPO.",
    ]
    assert found["conditions"]["rlvr"]["seeds"] == [0, 1]
    assert found["conditions"]["rlds"]["best"] == found["conditions"]["rlds"]["last"] == 1.25
    assert found["conditions"]["rlvr"]["last_five"]["low"] is not None
    assert rc.compare(curves) == rc.compare(curves)


def test_random_grades_are_named_and_nothing_is_said_of_what_was_not_run(config: RldsRunConfig) -> None:
    both = [curve(config, c, 0, (0.0, 1.0, 0.0, 1.0)) for c in ("rlds", "rlds-random-grades")]
    found = rc.compare(both)["frozenlake"]
    assert found["verdicts"] == [
        "SDAE changes the reward by +0.000 [+0.000, +0.000] (not resolved) against itself with random grades and "
        "pivots."
    ]
    assert rc.compare(both[:1])["frozenlake"]["verdicts"] == []
    apart = [curve(config, "rlvr", 0, (0.0,) * 4), curve(config, "rlds", 1, (0.0,) * 4)]
    assert rc.compare(apart)["frozenlake"]["differences"] == {}


def test_below_ten_examples_no_difference_is_resolved(config: RldsRunConfig) -> None:
    """One example on which the difference is 0.5: there is no other to draw."""
    one = {"result": {"a": 0.0}}, {"result": {"a": 0.5}}
    curves = [
        curve(config, c, 0, (0.0,) * 4, **r) for c, r in zip(("base-reflection", "rlds"), one, strict=True)
    ]
    found = rc.compare(curves)["frozenlake"]
    (cell,) = found["differences"].values()
    assert (cell["value"], cell["low"], cell["high"], cell["resolved"]) == (0.5, None, None, False)
    assert found["conditions"]["rlds"]["last_five"] == {"value": 0.5, "low": None, "high": None}
    assert found["verdicts"] == [
        "SDAE changes the reward by +0.500 (1 example is too few for an interval) against the same retries with GRPO."
    ]


@pytest.mark.parametrize(
    ("made", "said", "noted"),
    [
        ((0, 0), [], ["base-reflection, rlds: no retry was made, so nothing is said of what retries add"]),
        (
            (7, 0),
            ["The reflect-retry rollout"],
            ["rlds: no retry was made, so nothing is said of what retries add"],
        ),
        ((0, 7), [], ["base-reflection: no retry was made, so nothing is said of what retries add"]),
        ((7, 7), ["SDAE", "The reflect-retry rollout"], []),
    ],
)
def test_nothing_is_said_of_retries_that_were_not_made(
    config: RldsRunConfig, made: tuple[int, int], said: list[str], noted: list[str]
) -> None:
    names = ("rlvr", "base-reflection", "rlds")
    curves = [
        curve(config, c, 0, (0.0, 1.0, 0.0, 1.0), retries=n) for c, n in zip(names, (0, *made), strict=True)
    ]
    found = rc.compare(curves)["frozenlake"]
    assert [v.partition(" changes")[0].partition(" with")[0] for v in found["verdicts"]] == said
    assert [note for note in found["notes"] if "no retry was made" in note] == noted


def test_arms_say_what_the_auxiliary_loss_and_the_kernel_do(config: RldsRunConfig) -> None:
    """rlds 0.5; 0.25 without L_aux, 0.625 without the kernel. Without a pair to learn from L_aux did nothing."""
    rlds, no_aux, no_kernel = (
        curve(config, c, 0, (r,) * 4)
        for c, r in (("rlds", 0.5), ("rlds-no-aux", 0.25), ("rlds-no-kernel", 0.625))
    )
    assert rc.compare([rlds, no_aux, no_kernel])["frozenlake"]["verdicts"] == [
        "Without the auxiliary loss rlds loses 0.250 [0.250, 0.250].",
        "The pivot kernel changes the reward by -0.125 [-0.125, -0.125].",
    ]
    better = replace(no_aux, result=dict(zip(IDS, (0.75, 1.0, 0.75, 1.0) * 3, strict=True)))
    found = rc.compare([rlds, better])["frozenlake"]
    low, high = (found["differences"]["rlds - rlds-no-aux"][k] for k in ("low", "high"))
    assert low < high < 0
    assert found["verdicts"] == [f"Without the auxiliary loss rlds gains 0.375 [{-high:.3f}, {-low:.3f}]."]
    assert rc.compare([replace(rlds, pairs=0), better])["frozenlake"]["verdicts"] == []


def test_the_untrained_model_is_not_the_best_checkpoint(config: RldsRunConfig) -> None:
    one = curve(config, "rlds", 0, (0.3,) * 4, reward=np.array([0.9, 0.4, 0.3]))
    assert one.best == 0.4
    only = replace(one, at={axis: x[:1] for axis, x in one.at.items()}, reward=one.reward[:1])
    assert only.best == 0.9


def test_at_equal_updates_only_what_was_measured_is_shown(config: RldsRunConfig) -> None:
    """Evaluations after 0, 10, 20 and after 0, 20, 40 updates; of 20 steps of one every fourth up to the last."""
    other = np.array([0.0, 20.0, 40.0])
    curves = [
        curve(config, "rlvr", 0, (0.8,) * 4),
        curve(config, "rlds", 0, (0.8,) * 4, at={"updates": other, "tokens": other, "cpu_s": other}),
    ]
    found = rc.compare(curves)["frozenlake"]["curves"]["updates"]
    assert found["at"] == [10.0, 20.0, 40.0]
    assert found["reward"] == {
        "rlvr": [0.4, pytest.approx(0.8), None], "rlds": [None, 0.4, pytest.approx(0.8)],
    }  # fmt: skip
    many = np.arange(0.0, 501.0, 25.0)
    long = curve(config, "rlds", 0, (0.8,) * 4, at=dict.fromkeys(rc.AXES, many), reward=many / 500)
    both = [long, replace(long, condition="rlvr", label="rlvr")]
    found = rc.compare(both)["frozenlake"]["curves"]["updates"]
    assert found["at"] == [100.0, 200.0, 300.0, 400.0, 500.0]
    assert found["reward"]["rlds"] == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_equal_cost_ends_where_a_seed_ends(config: RldsRunConfig) -> None:
    """rlds goes twice as far in tokens: the grid is 4000/6, ...; rlvr ends at 2000, the third of six."""
    long = {"updates": np.array([0.0, 10.0, 20.0]), "tokens": np.array([0.0, 2000.0, 4000.0])}
    curves = [
        curve(config, "rlvr", 0, (0.8,) * 4),
        curve(config, "rlds", 0, (0.8,) * 4, at={**long, "cpu_s": long["updates"]}),
    ]
    found = rc.compare(curves)["frozenlake"]["curves"]
    assert found["tokens"]["at"] == pytest.approx([4000 * k / 6 for k in range(1, 7)])
    assert found["tokens"]["reward"]["rlvr"] == [
        pytest.approx(0.8 * 2 / 3 / 2), pytest.approx(0.4 + 0.4 / 3), pytest.approx(0.8), None, None, None,
    ]  # fmt: skip
    assert found["updates"]["reward"]["rlvr"] == found["updates"]["reward"]["rlds"]


def test_labels_tell_apart_what_conditions_do_not(config: RldsRunConfig) -> None:
    curves = [curve(config, "rlds", 0, (0.0,) * 4, label=f"rlds-{lr}") for lr in ("slow", "quick")]
    assert set(rc.named(curves)) == {"rlds-slow", "rlds-quick"}
    assert set(rc.named(curves[:1])) == {"rlds"}


def cells(*rows: str) -> Any:
    return np.array([["FHG".index(c) for c in row] for row in rows], dtype=np.int8)


@pytest.mark.parametrize(
    ("rows", "start", "turns", "chance"),
    [
        (("FF", "FG"), 0, 10, 1.0),
        (("FH", "FG"), 0, 10, 0.5),
        (("FH", "HG"), 0, 10, 0.0),
        (("FF", "FG"), 0, 1, 0.0),
        # one right, two down: of the ways RDD, DRD, DDR (1/2, 1/4, 1/4) the hole in the middle of the left column
        # stops both that begin with D
        (("FF", "HF", "FG"), 0, 10, 0.5),
        (("FFF", "FHF", "FFG"), 0, 10, 0.5),
        (("GFF", "FFF", "FFF"), 8, 10, 1.0),
    ],
)
def test_the_blind_walker_by_hand(rows: tuple[str, ...], start: int, turns: int, chance: float) -> None:
    side = max(len(rows), len(rows[0]))
    board = np.full((side, side), 3, dtype=np.int8)
    board[: len(rows), : len(rows[0])] = cells(*rows)
    assert walk_blindly(board, start // len(rows[0]) * side + start % len(rows[0]), turns) == chance


def test_the_blind_walkers_chance_is_what_walks_come_to() -> None:
    rng, board = np.random.default_rng(0), cells("FFFF", "FHFF", "FFHF", "FFFG")
    won = 0
    for _ in range(4000):
        row, column = 0, 0
        while (row, column) != (3, 3) and board[row, column] != 1:
            down = row < 3 and (column == 3 or rng.random() < 0.5)
            row, column = row + down, column + (not down)
        won += board[row, column] != 1
    assert walk_blindly(board, 0, 10) == pytest.approx(won / 4000, abs=0.03)


def test_the_line_is_that_of_the_validation_boards_and_of_frozenlake_only(config: RldsRunConfig) -> None:
    found = blind_walker(config)
    assert found is not None
    assert 0.3 < found < 0.9
    other = compose(["task=hotpotqa"]).config
    assert isinstance(other, RldsRunConfig)
    assert blind_walker(other) is None


def test_the_captions_of_the_picture_say_what_is_measured_and_what_tokens_leave_out(
    config: RldsRunConfig,
) -> None:
    from racelab.analysis.rlds_plot import picture

    curves = [curve(config, c, s, (0.5,) * 4) for c, s in product(("rlvr", "rlds"), (0, 1))]
    shown = picture(curves, rc.compare(curves), "a title")
    caption = shown.get_supxlabel()
    assert (
        "thin: single seeds; the mean ends where the first seed ends; time and tokens of updates only"
        in " ".join(caption.split())
    )
    assert "NOTE: rlvr, rlds: the scripted grader and reflector sample nothing" in caption
    updates = shown.axes[0].get_lines()[2]
    assert updates.get_label() == "rlvr"
    assert list(updates.get_xdata()) == [0.0, 10.0, 20.0]
    assert updates.get_marker() != "None"
    for axis in shown.axes[1:]:
        *seeds, mean = axis.get_lines()[:3]
        assert [line.get_marker() != "None" for line in (*seeds, mean)] == [True, True, False]
        assert list(seeds[0].get_ydata()) == [0.0, 0.4, 0.5]
    one = picture(curves[::2], rc.compare(curves[::2]), "a title").axes[1].get_lines()[0]
    assert (one.get_label(), one.get_marker(), len(one.get_xdata())) == ("rlvr", "o", 3)


def test_a_tool_task_in_which_no_tool_was_called_is_noted(config: RldsRunConfig) -> None:
    curves = [curve(config, c, 0, (0.5,) * 4, tool_calls=n) for c, n in (("rlvr", 0), ("rlds", 3))]
    notes = rc.compare(curves)["frozenlake"]["notes"]
    assert "rlvr: no tool was called in this run: retriever/search were not exercised" in notes
    plain = rc.compare([replace(c, tool_calls=None) for c in curves])["frozenlake"]["notes"]
    assert not any("tool" in note for note in plain)


def test_the_picture_is_a_png_of_all_tasks(config: RldsRunConfig, tmp_path: Path) -> None:
    from racelab.analysis.rlds_plot import plot

    curves = [
        curve(config, c, s, (0.5,) * 4, task=t)
        for t, c, s in product(("frozenlake", "hotpotqa"), ("rlvr", "rlds"), (0, 1))
    ]
    plot(curves, rc.compare(curves), "a title", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RunFolderError, match="cannot write"):
        plot(curves, rc.compare(curves), "a title", tmp_path / "missing" / "p.png")
