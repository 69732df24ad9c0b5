"""The numbers of an RLDS run's summary, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from racelab.analysis import rlds_summary as rs
from racelab.configs.compose import compose
from racelab.configs.schema_rlds import RldsRunConfig


def rows(step: int, model: str, rewards: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {"step": step, "model": model, "example_id": i, "reward": r, "solved": r == 1.0}
        for i, r in rewards.items()
    ]


def test_before_after_best_last_and_the_mean_of_the_last_five() -> None:
    """Evaluations after 0, 1, ..., 6 updates; example a rises 0.0, 0.1, ..., 0.6, b is 1.0 but for the last (0.0).

    Means: 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.3. Best 0.75 after 5; the last five (2 to 6): a 0.4, b 0.8, mean 0.6.
    """
    samples = []
    for step in range(7):
        model = {0: "untrained", 6: "trained"}.get(step, f"step {step}")
        samples += rows(step, model, {"a": 0.1 * step, "b": 1.0 if step < 6 else 0.0})
    found = rs.validation(samples, 500, 0)
    assert found["n_evaluations"] == 7
    assert found["reward"]["before"] == 0.5
    assert found["reward"]["after"] == pytest.approx(0.3)
    assert found["reward"]["difference"] == pytest.approx(-0.2)
    assert (found["reward"]["low"], found["reward"]["high"]) == (pytest.approx(-1.0), pytest.approx(0.6))
    assert found["solved"]["before"] == 0.5
    assert (found["best"]["step"], found["best"]["reward"]) == (5, 0.75)
    assert (found["last"]["step"], found["last"]["model"]) == (6, "trained")
    assert found["last_five"]["steps"] == [2, 3, 4, 5, 6]
    assert found["last_five"]["reward"]["mean"] == pytest.approx(0.6)
    assert found["last_five"]["reward"]["low"] == pytest.approx(0.4)
    assert found["last_five"]["reward"]["high"] == pytest.approx(0.8)
    assert [round(c["reward"], 9) for c in found["curve"]] == [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.3]
    assert rs.validation(samples, 500, 0) == found


def test_the_untrained_evaluation_counts_among_the_last_only_if_there_is_no_other() -> None:
    first = rows(0, "untrained", {"a": 0.0})
    assert rs.validation(first, 50, 0)["last_five"]["steps"] == [0]
    both = rs.validation([*first, *rows(2, "trained", {"a": 1.0})], 50, 0)
    assert both["last_five"]["steps"] == [2]
    assert rs.validation([], 50, 0) == {"n_evaluations": 0}


def test_rates_of_retries_weigh_steps_by_the_retries_they_made() -> None:
    """2 retries, one better; 6 retries, none better: 1 / 8 are; a step without any has no rate."""
    steps = [
        {"rlds/reflect/n_candidates": 2.0, "rlds/reflect/n_retries": 2.0, "rlds/reflect/success_frac": 0.5,
         "rlds/reflect/reward_delta_mean": 0.5},
        {"rlds/reflect/n_candidates": 8.0, "rlds/reflect/n_retries": 6.0, "rlds/reflect/success_frac": 0.0,
         "rlds/reflect/reward_delta_mean": 0.0},
        {"rlds/reflect/n_candidates": 0.0, "rlds/reflect/n_retries": 0.0},
    ]  # fmt: skip
    found = rs.retries(steps)
    assert (found["candidates"], found["made"]) == (10, 8)
    assert found["success_frac"] == 0.125
    assert found["delta_mean"] == 0.125
    assert found["solved_frac"] is None
    assert rs.retries([{"train/reward/mean": 0.5}]) == {}


def test_replies_that_cannot_be_read_are_counted_and_are_no_grades() -> None:
    """4 gradings of which 3 are ok, then 2 of which none is: 3 of 6."""
    steps = [
        {"rlds/parse/graded_frac": 0.75, "rlds/parse/grade_ok": 3.0, "rlds/parse/grade_bad_json": 1.0},
        {"rlds/parse/graded_frac": 0.0, "rlds/parse/grade_cut": 2.0, "rlds/parse/reflect_ok": 1.0},
    ]
    found = rs.parse(steps)
    assert found["grades"] == {"bad_json": 1, "cut": 2, "ok": 3}
    assert found["reflections"] == {"ok": 1}
    assert found["graded_frac"] == 0.5
    assert found["failures_counted_as_grades"] == 0
    steps[1]["rlds/parse/graded_frac"] = 0.5
    assert rs.parse(steps)["failures_counted_as_grades"] == 1
    assert rs.parse([{}])["graded_frac"] is None


def test_stage_metrics_stand_beside_their_nulls_and_a_forced_correlation_is_flagged() -> None:
    null = "rlds/null/sign_disagreement_rows"
    steps = [
        {"rlds/stage1/sign_disagreement_rows": 0.25, f"{null}_excess": 0.1, f"{null}_p": 0.04,
         "rlds/stage2/informative": 0.0},
        {"rlds/stage1/sign_disagreement_rows": 0.75, f"{null}_excess": 0.3, f"{null}_p": 0.5},
    ]  # fmt: skip
    found = rs.stages(steps)
    assert found["informative"] is False
    assert found["metrics"] == {
        "stage1/sign_disagreement_rows": {
            "mean": 0.5, "null_excess": 0.2, "null_p_median": 0.27, "null_p_low_frac": 0.5, "n_nulls": 2,
        }
    }  # fmt: skip
    assert rs.stages([{}]) == {"metrics": {}, "informative": None}


def test_counters_of_the_task_are_summed_and_those_of_rollouts_averaged() -> None:
    """An end that did not occur in a step has no metric there: 0.5 over two steps is 0.25."""
    steps = [
        {
            "task/t/turns": 2.0,
            "task/t/end_goal_frac": 0.5,
            "task/t/jvm_fault_dead": 1.0,
            "task/t/jvm_fault": 0.25,
        },
        {
            "task/t/turns": 4.0,
            "task/t/jvm_fault_dead": 2.0,
            "task/t/jvm_fault": 0.0,
            "task/t/retriever_calls": 3.0,
        },
    ]
    assert rs.counters(steps, "t") == {
        "faults": {"jvm_fault a rollout": 0.125, "jvm_fault_dead": 3.0},
        "totals": {"retriever_calls": 3.0},
        "means": {"end_goal_frac": 0.25, "turns": 3.0},
    }


def noted(*words: str) -> str:
    config = compose(words).config
    assert isinstance(config, RldsRunConfig)
    return " | ".join(rs.notes(config))


def test_what_is_no_evidence_says_so() -> None:
    grid = ("task=frozenlake",)
    assert "grader and reflector = scripted" in noted(*grid, "condition=rlds")
    assert "no evidence for self-reflection" in noted(*grid, "condition=rlds")
    random = noted(*grid, "condition=rlds-random-grades")
    assert "grader = random" in random
    assert "reflector = scripted" in random
    assert noted(*grid, "condition=rlvr") == ""
    assert "a mechanism check" in noted("task=hotpotqa", "condition=rlvr")
    assert "mechanism" not in noted("task=hotpotqa", "condition=rlds", "preset=paper")
