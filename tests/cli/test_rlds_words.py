"""What `racelab task` refuses, and the words of an RLDS summary and comparison: numbers, headings, one of a thing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from racelab.analysis import rlds_summary as rs
from racelab.analysis.rlds_validation import validation
from racelab.cli.summary_rlds import print_rlds
from racelab.cli.sweep_rlds import print_comparison
from racelab.experiments.runfolder import RunFolder

Call = Callable[..., Any]
TASK = ("task", "--name", "frozenlake", "--condition")
NO_RETRIES = "method.reflect.max_retries=0"


@pytest.mark.parametrize(
    ("condition", "refused"),
    [
        ("base-reflection", "base-reflection"),
        ("rlds", "rlds"),
        ("all", "base-reflection"),
        ("arms", "rlds-random-grades"),
    ],
)
def test_a_condition_with_retries_is_not_left_without(call: Call, condition: str, refused: str) -> None:
    found = call(*TASK, condition, NO_RETRIES, "method.reflect.failure_share=0.25", "--dry-run")
    assert found.code == 2
    assert found.err.startswith(
        f"error: {NO_RETRIES}: the condition {refused} retries failures, and would not with that; leave it out, or run "
        f"it under a name of its own: `racelab train task=frozenlake condition={refused} {NO_RETRIES}`"
    )
    assert len(found.err.splitlines()) == 1


def test_neither_a_share_of_no_failures_nor_switched_off_grading_gets_around_it(call: Call) -> None:
    for words in (["method.reflect.failure_share=0"], ["method.grading=off", NO_RETRIES]):
        found = call(*TASK, "base-reflection", *words, "--dry-run")
        assert found.code == 2
        assert "the condition base-reflection retries failures" in found.err


def test_without_retries_rlvr_is_what_it_is(call: Call) -> None:
    assert call(*TASK, "rlvr", NO_RETRIES, "--dry-run").code == 0


def test_a_comma_at_the_end_names_nothing(call: Call) -> None:
    found = call("task", "--name", "frozenlake,", "--condition", ",rlvr,", "--dry-run", "--json")
    assert [row["label"] for row in found.json()] == ["frozenlake-rlvr"]
    found = call("task", "--name", ",", "--condition", "rlvr", "--dry-run")
    assert found.code == 2
    assert "--name is missing" in found.err


def test_a_dry_run_calls_updates_as_the_config_does_and_has_no_empty_fields(call: Call) -> None:
    found = call("train", "task=frozenlake", "run.updates=500", "--dry-run")
    words = found.out.split()
    assert "updates=500" in words
    assert not any(word.endswith("=") or word.startswith("policy_updates") for word in words)


def test_a_key_of_race_runs_and_a_value_that_is_no_number_are_said_in_a_line(call: Call) -> None:
    found = call("train", "task=frozenlake", "run.policy_updates=8", "--dry-run")
    assert found.err.strip().endswith("or leave task= and condition= out; RLDS runs have run.updates")
    found = call("train", "task=frozenlake", "run.updates=abc", "--dry-run")
    assert found.err == "error: run.updates=abc: must be a valid integer\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["task=frozenlake"], "  condition=rlds (the default)"),
        (["task=frozenlake", "condition=rlds"], ""),
        (["preset=embedded"], ""),
    ],
)
def test_the_first_line_of_a_run_names_a_condition_that_nobody_chose(words: list[str], said: str) -> None:
    from racelab.cli.train import _by_default
    from racelab.configs.compose import compose

    assert _by_default(compose(words)) == said


def test_show_of_a_run_that_stopped_before_its_first_update_says_how_to_go_on(
    call: Call, home: Path, tmp_path: Path
) -> None:
    """A run of its own goes on by itself, a cell by the command of its sweep."""
    from racelab.sweeps.cells import Spec, make_cells, open_cell
    from racelab.sweeps.run import make_plan, open_sweep

    cells = make_cells([Spec("a", 0, ("task=frozenlake", "tracking=none"))])
    plan = make_plan("tiny", "racelab task --name frozenlake", home / "runs", cells, False)
    cell = open_cell(plan.root, cells[0], plan.run_ids[0], open_sweep(plan).run_id)
    cell.update(status="interrupted")
    out = call("show", cell.run_id).out
    assert "--rollout" not in out
    assert "Go on with: racelab task --name frozenlake\n" in out
    cell.update(sweep="")
    assert f"train --resume {cell.run_id}\n" in call("show", cell.run_id).out


def rows(step: int, model: str, reward: float, n: int) -> list[dict[str, Any]]:
    return [
        {"step": step, "model": model, "example_id": f"e{i}", "reward": reward, "solved": reward == 1.0}
        for i in range(n)
    ]


def summary(n_steps: int, n_examples: int, **more: float) -> dict[str, Any]:
    """Of a run with one retry, one reflection and one kind of everything a step."""
    step = {
        "train/reward/mean": 0.5, "rlds/reflect/n_candidates": 1.0, "rlds/reflect/n_retries": 1.0,
        "rlds/reflect/n_retry_pairs": 1.0, "rlds/reflect/n_reflect_pairs": 1.0, "rlds/reflect/replay_fail": 1.0,
        **{f"task/t/{name}": value for name, value in more.items()},
    }  # fmt: skip
    steps = [{"step": float(k + 1), **step} for k in range(n_steps)]
    samples = rows(0, "untrained", 0.75, n_examples) + rows(n_steps, "trained", 0.5, n_examples)
    return {
        "task": "t", "condition": "rlds", "notes": [], "steps": {"policy": n_steps}, "seconds": {}, "cpu_s": 0.0,
        "validation": validation(samples, 20, 0), "train_reward": rs._thirds(steps, "train/reward/mean"),
        "retries": rs.retries(steps), "parse": rs.parse(steps), "collapse_rate": 0.0, "mixed_rate": 0.0,
        "fallbacks": {}, "stages": rs.stages(steps), "subtasks": [], "costs": rs.costs(steps),
        "task_counters": rs.counters(steps, "t"), "health": {"cost_mismatch": 0, "nonfinite": []},
    }  # fmt: skip


def shown(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    print_rlds(found, {})
    return capsys.readouterr().out


def test_one_of_a_thing_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(summary(1, 1), capsys)
    for words in (
        "t, rlds: 1 update;",
        "Training reward of the originals: 0.500.",
        "1 made of 1 failure picked",
        "L_aux had 1 retry and 1 reflection;",
        "1 replay failed.",
        "1 example is too few for an interval",
    ):
        assert words in out, words
    assert "third" not in out
    assert "[" not in out
    assert "Best of" not in out
    out = shown(summary(2, 12), capsys)
    for words in (
        "2 updates;", "first and last update: 0.500 → 0.500", "2 retries and 2 reflections", "2 replays failed",
        "-0.250 [-0.250, -0.250]",
    ):  # fmt: skip
        assert words in out, words
    assert "first and last third of the updates: 0.500 → 0.500" in shown(summary(6, 12), capsys)


def test_totals_rates_and_means_stand_under_their_own_headings(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(summary(2, 12, env_steps=10.0, env_steps_per_s=70.5, turns=3.0), capsys)
    assert "  Counted, a rollout (mean over all rollouts, retries included): turns 3.\n" in out
    assert "  Counted, in all: env_steps 20.\n" in out
    assert "  Rates and gauges, mean over the updates: env_steps_per_s 70.500.\n" in out


def test_solved_originals_stand_apart_and_one_of_two_equal_counts_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(summary(2, 12, solved_frac=0.25, end_hole_frac=0.5, fell=0.5, end_goal_frac=0.25), capsys)
    assert "  Solved (originals): 0.250.\n" in out
    assert "retries included): end_goal_frac 0.250, fell 0.500.\n" in out


def test_the_time_of_a_run_adds_up_and_says_of_which_attempts_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """20 s in updates, 12.5 s in validation, 72 s in all: 39.5 s are left."""
    found = summary(2, 12) | {
        "seconds": {"step_s": 20.0, "gen_s": 15.0, "validate_s": 12.5},
        "engine": "grid",
    }
    print_rlds(found, {"wall_s": 72.0, "attempts": 1})
    out = capsys.readouterr().out
    assert (
        "  Seconds: 20.0 in updates (originals 15.0); 12.5 in validation; 39.5 the rest: start, warm-up, tables.\n"
        in out
    )
    print_rlds(found, {"wall_s": 17.0, "attempts": 2})
    out = capsys.readouterr().out
    assert "17s, peak memory - GiB (the last attempt)." in out
    assert "  Seconds (all attempts): 20.0 in updates (originals 15.0); 12.5 in validation.\n" in out


def test_nulls_are_counted_and_fewer_than_five_are_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """20 nulls, all with p = 0.005 from 199 draws."""
    name = "stage1/sign_disagreement_rows"
    cell = {"mean": 0.5, "null_excess": 0.2, "null_p_median": 0.005, "null_p_low_frac": 1.0, "n_nulls": 20}
    found = summary(2, 12) | {"stages": {"metrics": {name: cell}, "informative": None}, "null_draws": 199}
    out = shown(found, capsys)
    assert "20 of 20\n" in out
    assert "By chance p ≤ 0.05 in 1 of 20; p is two-sided and cannot be below 1/(draws + 1) = 1/200." in out
    cell["n_nulls"] = 1
    out = shown(found, capsys)
    assert "Stage diagnostics are left out: 1 permutation null of at least 5 that they need" in out
    assert "rows whose subtasks disagree" not in out


def test_a_condition_that_never_asks_has_no_lines_of_grades_and_retries(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = {"policy_gen": {"measured": 60, "expected": 60}, "grade_gen": {"measured": 0, "expected": 0}}
    found = summary(2, 12) | {
        "roles": {}, "retries_asked": False,
        "seconds": {"step_s": 1.0, "gen_s": 0.5, "judge_s": 0.25, "gen_retry_s": 0.25},
    }  # fmt: skip
    found["costs"] |= {"calls": calls}
    out = shown(found, capsys)
    assert "in updates (originals 0.5)" in out
    assert "  Calls: policy gen 60; as many" in out
    assert "Retries" not in out


def test_the_summary_of_an_older_run_is_still_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = summary(2, 12, turns=3.0)
    del found["validation"]["n_checkpoints"], found["train_reward"]["n"], found["train_reward"]["n_steps"]
    del found["task_counters"]["state"]
    assert "first and last third" in shown(found, capsys)


def compared(n_examples: int, low: float | None, high: float | None) -> dict[str, Any]:
    condition = {
        "seeds": [0], "examples": n_examples, "evaluations": 1, "best": 0.5, "last": 0.5,
        "last_five": {"value": 0.5, "low": low, "high": high},
    }  # fmt: skip
    difference = {
        "value": 0.25,
        "low": low,
        "high": high,
        "resolved": False,
        "seeds": [0],
        "examples": n_examples,
    }
    return {
        "notes": [], "token_notes": ["rlds: the scripted grader samples nothing"], "verdicts": [], "blind_walker": None,
        "conditions": {"rlvr": condition, "rlds": condition}, "differences": {"rlds - rlvr": difference},
        "curves": {
            "updates": {"at": [1.0, 2.0], "reward": {"rlvr": [0.1, 0.2], "rlds": [0.1, None]}},
            "tokens": {"at": [50.0, 100.0], "reward": {"rlvr": [0.1, 0.2], "rlds": [0.1, None]}},
            "cpu_s": {"at": [11.25, 22.5], "reward": {"rlvr": [0.1, 0.2], "rlds": [0.1, None]}},
        },
    }  # fmt: skip


def test_a_comparison_says_what_was_measured_and_whose_tokens_leave_work_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_comparison({"frozenlake": compared(12, 0.125, 0.75)}, RunFolder(tmp_path, "sweep"))
    out = capsys.readouterr().out
    assert "on 12 examples (95 % intervals over seeds and examples, paired)" in out
    assert "0.500 [0.125, 0.750]" in out
    assert "+0.250 [+0.125, +0.750]" in out
    assert (
        "At equal updates (measured; mean over seeds; -: no evaluation there)\ncondition      1      2\n"
        in out
    )
    tokens = out[out.index("At equal sampled tokens") : out.index("At equal CPU seconds")]
    assert tokens.startswith("At equal sampled tokens (linear between evaluations; mean over seeds;")
    assert "  NOTE: rlds: the scripted grader samples nothing.\n" in tokens
    assert out.count("NOTE") == 1
    assert "condition   11.2   22.5\n" in out


def test_a_comparison_on_one_example_has_no_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_comparison({"frozenlake": compared(1, None, None)}, RunFolder(tmp_path, "sweep"))
    out = capsys.readouterr().out
    assert "on 1 example (1 example is too few for an interval)" in out
    assert "[" not in out
    assert "With one seed" not in out
