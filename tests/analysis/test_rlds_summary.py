"""The numbers of an RLDS run's summary, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from racelab.analysis import rlds_summary as rs
from racelab.analysis import rlds_validation as rv
from racelab.analysis.rlds_words import notes, unpaid
from racelab.configs.compose import compose
from racelab.configs.schema_rlds import RldsRunConfig


def rows(step: int, model: str, rewards: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {"step": step, "model": model, "example_id": i, "reward": r, "solved": r == 1.0}
        for i, r in rewards.items()
    ]


def test_before_after_best_last_and_the_mean_of_the_last_five() -> None:
    """Evaluations after 0, 1, ..., 6 updates; examples a* rise 0.0, 0.1, ..., 0.6, b* are 1.0 but for the last (0.0).

    Means: 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.3. Best 0.75 after 5; the last five (2 to 6): a 0.4, b 0.8, mean 0.6.
    Differences of the last and the first: +0.6 and -1. All intervals lie inside the two kinds' values.
    """
    samples = []
    for step in range(7):
        model = {0: "untrained", 6: "trained"}.get(step, f"step {step}")
        for i in range(5):
            samples += rows(step, model, {f"a{i}": 0.1 * step, f"b{i}": 1.0 if step < 6 else 0.0})
    found = rv.validation(samples, 500, 0)
    assert found["n_evaluations"] == 7
    assert found["n_checkpoints"] == 6
    assert found["reward"]["n"] == 10
    assert found["reward"]["before"] == 0.5
    assert found["reward"]["after"] == pytest.approx(0.3)
    assert found["reward"]["difference"] == pytest.approx(-0.2)
    assert -1.0 < found["reward"]["low"] < -0.2 < found["reward"]["high"] < 0.6
    assert found["solved"]["before"] == 0.5
    assert (found["best"]["step"], found["best"]["reward"]) == (5, 0.75)
    assert (found["last"]["step"], found["last"]["model"]) == (6, "trained")
    assert found["last_five"]["steps"] == [2, 3, 4, 5, 6]
    assert found["last_five"]["reward"]["mean"] == pytest.approx(0.6)
    assert 0.4 < found["last_five"]["reward"]["low"] < 0.6 < found["last_five"]["reward"]["high"] < 0.8
    assert [round(c["reward"], 9) for c in found["curve"]] == [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.3]
    assert rv.validation(samples, 500, 0) == found


@pytest.mark.parametrize(("n", "has_interval"), [(1, False), (9, False), (10, True)])
def test_below_ten_examples_there_is_no_interval(n: int, has_interval: bool) -> None:
    ids = [f"e{i}" for i in range(n)]
    samples = rows(0, "untrained", dict.fromkeys(ids, 0.25)) + rows(2, "trained", dict.fromkeys(ids, 0.75))
    found = rv.validation(samples, 50, 0)
    assert found["reward"]["difference"] == 0.5
    for cell in (found["reward"], found["solved"], *(found["last_five"][k] for k in ("reward", "solved"))):
        assert (cell["low"] is not None, cell["high"] is not None) == (has_interval, has_interval)


def test_the_untrained_model_is_the_best_one_only_if_there_is_no_other() -> None:
    first = rows(0, "untrained", {"a": 0.9})
    found = rv.validation([*first, *rows(5, "step 5", {"a": 0.5}), *rows(10, "trained", {"a": 0.25})], 50, 0)
    assert (found["best"]["step"], found["best"]["reward"], found["n_checkpoints"]) == (5, 0.5, 2)
    alone = rv.validation(first, 50, 0)
    assert (alone["best"]["step"], alone["n_checkpoints"]) == (0, 1)


def test_the_untrained_evaluation_counts_among_the_last_only_if_there_is_no_other() -> None:
    first = rows(0, "untrained", {"a": 0.0})
    assert rv.validation(first, 50, 0)["last_five"]["steps"] == [0]
    both = rv.validation([*first, *rows(2, "trained", {"a": 1.0})], 50, 0)
    assert both["last_five"]["steps"] == [2]
    assert rv.validation([], 50, 0) == {"n_evaluations": 0}


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
        "state": {},
        "means": {"end_goal_frac": 0.25, "turns": 3.0},
    }


def test_counts_of_a_pool_are_no_means_and_rates_and_gauges_have_a_heading_of_their_own() -> None:
    """What tasks log of themselves, two steps: 10 and 20 steps of the pool are 30; rates and gauges are averaged.

    HotpotQA's episodes count `retriever_faults`: a mean over rollouts, though the retriever's counters are called
    alike. An episode that fails (ScienceWorld's `failed`) is no fault of a simulator.
    """
    names = {
        "env_steps": (10.0, 20.0), "env_steps_per_s": (60.0, 80.0), "jvm_started": (2.0, 0.0),
        "tools/google_search": (3.0, 1.0), "tools/cache_entries": (2.0, 4.0), "tools/seconds": (0.5, 1.5),
        "tools/failed": (1.0, 0.0), "retriever_calls": (4.0, 4.0), "retriever_ms": (1.0, 3.0),
        "retriever_ms_p95": (2.0, 6.0), "retriever_faults": (0.5, 0.0), "failed": (0.5, 0.0),
        "end_failed_frac": (0.5, 0.25),
    }  # fmt: skip
    steps = [{f"task/t/{name}": pair[k] for name, pair in names.items()} for k in (0, 1)]
    assert rs.counters(steps, "t") == {
        "faults": {"retriever_faults a rollout": 0.25, "tools/failed": 1.0},
        "totals": {"env_steps": 30.0, "jvm_started": 2.0, "retriever_calls": 8.0, "tools/google_search": 4.0},
        "state": {
            "env_steps_per_s": 70.0, "retriever_ms": 2.0, "retriever_ms_p95": 4.0, "tools/cache_entries": 3.0,
            "tools/seconds": 1.0,
        },
        "means": {"end_failed_frac": 0.375, "failed": 0.25},
    }  # fmt: skip


def noted(*words: str) -> str:
    config = compose(words).config
    assert isinstance(config, RldsRunConfig)
    return " | ".join(notes(config))


def test_what_is_no_evidence_says_so() -> None:
    grid = ("task=frozenlake",)
    assert "grader and reflector = scripted" in noted(*grid, "condition=rlds")
    assert "no evidence for self-reflection" in noted(*grid, "condition=rlds")
    random = noted(*grid, "condition=rlds-random-grades")
    assert "grader = random" in random
    assert "reflector = scripted" in random
    assert noted(*grid, "condition=rlvr", "model.grid.warmup_steps=300") == (
        "untrained: before RL, after the warm-up of 300 steps on random walks"
    )
    assert "there is no warm-up" in noted(*grid, "condition=rlvr", "model.grid.warmup_steps=0")
    assert "untrained" not in noted("task=hotpotqa", "condition=rlvr")
    assert "a mechanism check" in noted("task=hotpotqa", "condition=rlvr")
    assert "mechanism" not in noted("task=hotpotqa", "condition=rlds", "preset=paper")
    assert "worked examples" not in noted(*grid, "condition=rlvr")
    shown = noted("task=frozenlake", "model=smollm2-135m", "condition=rlvr", "task.demonstration=true")
    assert (
        "task.demonstration=true: worked examples stand before the first observation (not in the paper)"
        in shown
    )


def methods(*words: str) -> dict[str, Any]:
    found = {}
    for condition in ("rlvr", "base-reflection", "rlds", "rlds-random-grades"):
        config = compose(["task=frozenlake", f"condition={condition}", *words]).config
        assert isinstance(config, RldsRunConfig)
        found[condition] = config.method
    return found


def test_whose_tokens_leave_grading_and_reflection_out_is_said() -> None:
    scripted, mixed = unpaid(methods())
    assert scripted.startswith(
        "base-reflection, rlds: the scripted grader and reflector sample nothing, so grading and reflection cost no "
        "tokens here"
    )
    assert mixed.startswith("rlds-random-grades: the random grader and the scripted reflector sample nothing")
    policy = unpaid(methods("model=smollm2-135m", "method.reflector=policy"))
    assert (
        "base-reflection, rlds: the scripted grader samples nothing, so grading costs no tokens" in policy[0]
    )
    del (found := methods("model=smollm2-135m", "method.grader=policy", "method.reflector=policy"))[
        "rlds-random-grades"
    ]
    assert unpaid(found) == []
