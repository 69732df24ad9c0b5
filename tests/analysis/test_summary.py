"""The summary of a run, from a spool whose numbers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from racelab.analysis.summary import summarise, windup
from racelab.cli.summary import print_summary
from racelab.configs.compose import compose
from racelab.experiments.runfolder import RunFolder, write_json_atomic
from racelab.experiments.tracking.tracker import SpoolTracker

Row = dict[str, object]


def group(step: int, rewards: list[float | None], route: str) -> Row:
    return {"step": step, "policy_step": step, "rewards": rewards, "route": route}


def view(model: str, temperature: float, example: str, passed: float, reward: float | None) -> Row:
    return {
        "step": 0,
        "model": model,
        "temperature": temperature,
        "example_id": example,
        "passed": passed,
        "reward": reward,
        "finished": True,
    }


def probe(label: str, step: int, prompt: str, criterion: str | None) -> Row:
    return {
        "step": step,
        "checkpoint": label,
        "prompt_id": prompt,
        "json_valid": criterion is not None,
        "criterion": criterion,
        "text": criterion or "noise",
    }


def calls(step: int) -> dict[str, float]:
    """Sixteen answers a step as printed; step 2 learns from half, and its judge was asked once too often."""
    counts = {"policy_gen": (16, 16, 16), "judge_eval": (16 + (step == 2), 16, 16)}
    metrics = {"cost/calls/external_calls": 1.0, "cost/calls/external_calls_expected": 1.0}
    counts["learner_samples"] = (8, 8, 16) if step == 2 else (16, 16, 16)
    for kind, values in counts.items():
        names = (f"cost/calls/{kind}", f"cost/calls/{kind}_expected", f"cost/calls/{kind}_printed")
        metrics |= dict(zip(names, map(float, values), strict=True))
    return {**metrics, "health/cost_mismatch": float(step == 2)}


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four training prompts, two a step: steps 1-2 are the first epoch, step 3 the second."""
    words = ["method.prompts_per_step=2", "data.limit=4", "validation.temperatures=[1.0,0.4]"]
    composed = compose(words)
    run = RunFolder.create(
        tmp_path_factory.mktemp("runs"),
        "known",
        composed_yaml=composed.yaml,
        overrides=words,
        info={"seed": 0},
    )
    write_json_atomic(run.path / "setup.json", {"train_ids": ["a", "b", "c", "d"]})
    tracker = SpoolTracker(run, run.begin_attempt(), ship=False)
    policy = {
        "train/clock/phase_kind": 0.0,
        "race/route/quarantine_rate": 0.5,
        "race/signal/sigma_zero_frac": 0.25,
    }
    for step in (1, 2, 3):
        clock = {"train/clock/policy_step": float(step)}
        tracker.metrics(step, {**policy, **clock, "race/trqc/saturated": float(step > 1), **calls(step)})
    tracker.metrics(
        4,
        {
            "train/clock/phase_kind": 1.0,
            "race/rubric_reward/mean": 0.5,
            "race/rubric_reward/gain_mean": 0.1,
            "race/rubric_reward/unusable_frac": 0.25,
            "health/nonfinite/train/optim/grad_norm": 1.0,
        },
    )
    tracker.rows(
        "groups",
        [
            group(1, [0.25, None, 0.75], "informative"),
            group(2, [1.0, 1.0], "diversity_collapsed"),
            group(3, [0.5], "rubric_failed"),
        ],
    )
    tracker.rows(
        "phases",
        [
            {"step": 3, "index": 0, "kind": "policy", "length": 3, "end_reason": "saturation"},
            {"step": 4, "index": 1, "kind": "rubric", "length": 1, "end_reason": "budget"},
        ],
    )
    tracker.rows("rubric_groups", [{"step": 4, "m_old": 0.0}, {"step": 4, "m_old": 0.3}])
    rows = []
    for example, before, after in (("x", 0.0, 1.0), ("y", 0.0, 1.0), ("z", 1.0, 1.0)):
        rows += [view("untrained", 1.0, example, before, 0.2), view("trained", 1.0, example, after, 0.7)]
        rows += [view("untrained", 0.4, example, 1.0, 0.5), view("trained", 0.4, example, 0.0, None)]
    tracker.rows("val_examples", rows)
    tracker.rows(
        "rubric_probe",
        [
            probe("start", 0, "x", "Is short"),
            probe("start", 0, "y", None),
            probe("start", 0, "math-035", "Is short"),
            probe("end", 4, "x", "Names x"),
            probe("end", 4, "x", "Is short"),
            probe("end", 4, "math-035", "Gives 144"),
        ],
    )
    tracker.metrics(0, {"race/probe/json_valid_frac": 0.5, "race/probe/n_prompts": 2.0})
    tracker.metrics(4, {"race/probe/json_valid_frac": 1.0, "race/probe/redundant_frac": 0.25})
    tracker.metrics(4, {"race/probe/group_size": 2.0, "race/probe/sigma_zero_frac": 0.5})
    tracker.close("finished")
    return summarise(run)


def test_counts(summary: dict[str, Any]):
    assert summary["steps"] == {"policy": 3, "rubric": 1}
    assert summary["routes"] == {"informative": 1, "diversity_collapsed": 1, "rubric_failed": 1, "invalid": 0}
    assert [(p["kind"], p["end_reason"]) for p in summary["phases"]] == [
        ("policy", "saturation"),
        ("rubric", "budget"),
    ]
    assert (summary["quarantine_rate"], summary["collapse_rate"]) == (0.5, 0.25)


def test_an_epoch_is_a_pass_over_the_training_prompts(summary: dict[str, Any]):
    """First pass: (0.25 + 0.75 + 1 + 1) / 4 = 3/4; second: 1/2."""
    assert summary["reward_by_epoch"] == [0.75, 0.5]


def test_missing_scores_are_no_zeros_in_the_paired_view(summary: dict[str, Any]):
    """Two of three prompts go from 0 to 1: before 1/3, after 1, difference 2/3; judged 0.2 to 0.7."""
    cell = summary["validation"]["rule_success"]
    assert (cell["n"], cell["before"], cell["after"]) == (3, pytest.approx(1 / 3), 1.0)
    assert cell["difference"] == pytest.approx(2 / 3)
    assert 0.0 <= cell["low"] < cell["difference"] < cell["high"] <= 1.0
    assert summary["validation"]["judged_reward"]["difference"] == pytest.approx(0.5)
    assert summary["sharpening"]["rows"][1]["trained_judged"] is None


def test_the_control_is_the_best_untrained_temperature(summary: dict[str, Any]):
    """At 0.4 the untrained model passes everything, so training gained nothing beyond sharpening."""
    control = summary["sharpening"]
    assert control["best_untrained_temperature"] == 0.4
    assert (control["beyond"]["before"], control["beyond"]["after"], control["beyond"]["difference"]) == (
        1.0,
        1.0,
        0.0,
    )


def test_rubric_role(summary: dict[str, Any]):
    updates = summary["rubric_updates"]
    assert (updates["reward"], updates["gain"], updates["usable_frac"]) == ([0.5], [0.1], [0.75])
    assert updates["positive_margin_frac"] == 0.5


def test_the_probe_has_a_row_per_checkpoint_and_the_rectangle_first(summary: dict[str, Any]):
    """At the end three criteria of three texts; at the start two of one: distinct 1 and 1/2."""
    start, end = summary["probe"]["checkpoints"]
    assert start == {
        "checkpoint": "start",
        "step": 0,
        "json_valid_frac": 0.5,
        "n_prompts": 2.0,
        "distinct_frac": 0.5,
    }
    assert (end["checkpoint"], end["step"], end["redundant_frac"], end["distinct_frac"]) == (
        "end",
        4,
        0.25,
        1.0,
    )
    assert summary["probe"]["texts"] == [
        {"prompt_id": "math-035", "first": "Is short", "last": "Gives 144"},
        {"prompt_id": "x", "first": "Is short", "last": "Is short"},
    ]


def test_costs_are_totals_and_what_was_saved(summary: dict[str, Any]):
    """Three steps of 16: learner 16 + 8 + 16 = 40 of 48, 8 saved; the judge once too often: 49, 1 below 0."""
    costs = summary["costs"]
    whole = {"measured": 48, "expected": 48, "printed": 48, "saved": 0}
    assert costs["calls"] == {
        "policy_gen": whole,
        "judge_eval": {**whole, "measured": 49, "saved": -1},
        "learner_samples": {"measured": 40, "expected": 40, "printed": 48, "saved": 8},
        "external_calls": {"measured": 3, "expected": 3, "printed": None, "saved": None},
    }
    assert (costs["mismatches"], costs["mismatch_steps"]) == (1, [2])
    assert summary["health"]["cost_mismatch"] == 1


def test_the_windup_audit_counts_from_the_first_held_step(summary: dict[str, Any]):
    assert summary["saturated"]["trqc"] == {"adaptations": 3, "held": 2, "first_step": 2}
    assert summary["saturated"]["switch"] == {"adaptations": 0, "held": 0, "first_step": None}


TRQC_ON = {"eta_sigma": 0.0, "eta_tau": 0.003, "calibrate_steps": 0}


def seen(step: int, **more: float) -> dict[str, float]:
    """A policy step that was held at a bound."""
    named = {f"race/switch/{k}": v for k, v in more.items()}
    clock = {"step": float(step), "train/clock/policy_step": float(step)}
    return {**clock, "race/route/quarantine_rate": 0.5, "race/trqc/saturated": 1.0, **named}


@pytest.mark.parametrize(
    ("trqc", "adaptations", "first"),
    [
        (TRQC_ON, 2, 1),
        ({**TRQC_ON, "calibrate_steps": 1}, 1, 2),  # step 1 is the warm-up
        ({**TRQC_ON, "calibrate_steps": 2}, 0, None),
        ({**TRQC_ON, "eta_tau": 0.0}, 0, None),
    ],
)
def test_trqc_adapts_with_a_gain_after_the_warm_up_where_groups_were_seen(
    trqc: dict[str, float], adaptations: int, first: int | None
):
    """Of three policy steps the last saw no group."""
    nothing = {k: v for k, v in seen(3).items() if k != "race/route/quarantine_rate"}
    found = windup([seen(1), seen(2), {**nothing, "race/trqc/saturated": 0.0}], {"trqc": trqc})
    assert found["trqc"] == {"adaptations": adaptations, "held": adaptations, "first_step": first}


def test_the_phase_lengths_adapt_once_a_window_is_full_and_a_gain_is_set():
    """Three phases end: one while the window fills, one of either kind after; eta_R = 0 leaves tau_imp alone."""
    steps = [
        seen(1, saturated=0.0),
        seen(2, saturated=1.0, err_policy_len=0.5),
        seen(3, saturated=0.0, err_rubric_len=0.5),
    ]
    found = windup(steps, {"phase": {"eta_policy": 0.04, "eta_rubric": 0.0}})
    assert found["switch"] == {"adaptations": 1, "held": 1, "first_step": 2}
    found = windup(steps, {"phase": {"eta_policy": 0.0, "eta_rubric": 0.005}})
    assert found["switch"] == {"adaptations": 1, "held": 0, "first_step": None}


def test_for_people_a_mismatch_is_an_error_and_saturation_is_said(
    summary: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    text = printed(summary, capsys)
    assert "TRQC was held at a bound in 2 of 3 adaptations, first at step 2." in text
    assert "phase-length controller" not in text
    assert "ERROR: 1 counts differ from what is expected; first at steps 2." in text
    assert "rubrics that parse          " in text
    assert "groups with equal rewards (2 responses each)" in text
    assert "start (0)" in text
    assert "learner samples        40        40       48      8" in text


def printed(summary: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    folder = RunFolder.open(Path(summary["path"]))
    print_summary(summary, {"wall_s": 60.0, "peak_gib": 1.0}, folder, "racelab", "r")
    return capsys.readouterr().out


def test_a_method_without_thresholds_rubrics_and_pool_has_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """As Rubric-ARM leaves its spool: three kinds of phases, no m_old, no probe; nothing is made up."""
    words = ["method=rubric-arm", "method.prompts_per_step=2", "data.limit=4"]
    composed = compose(words)
    run = RunFolder.create(tmp_path, "arm", composed_yaml=composed.yaml, overrides=words, info={"seed": 0})
    write_json_atomic(run.path / "setup.json", {"train_ids": ["a", "b", "c", "d"]})
    tracker = SpoolTracker(run, run.begin_attempt(), ship=False)
    for step, kind in enumerate((1.0, 1.0, 0.0), 1):
        calls = {"cost/calls/judge_eval": 10.0 * step, "cost/calls/judge_eval_expected": 10.0 * step}
        printed_too = {"cost/calls/judge_eval_printed": 32.0} if kind == 0.0 else {}
        tracker.metrics(step, {"train/clock/phase_kind": kind, **calls, **printed_too})
    tracker.rows(
        "phases",
        [
            {"step": i, "index": i, "kind": kind, "length": 1, "end_reason": "fixed"}
            for i, kind in enumerate(("generator", "judge", "policy"))
        ],
    )
    tracker.rows("groups", [group(3, [0.25, 0.75], "informative")])
    tracker.rows("rubric_groups", [{"step": 1, "rewards": [1.0]}])
    tracker.close("finished")
    found = summarise(run)
    assert found["steps"] == {"policy": 1, "rubric": 2}
    assert [p["kind"] for p in found["phases"]] == ["generator", "judge", "policy"]
    assert (found["rubric_updates"]["entries"], found["rubric_updates"]["positive_margin_frac"]) == (0, None)
    assert found["probe"] == {"checkpoints": [], "texts": []}
    # 10 + 20 + 30 calls; only the last step has a formula: 32 - 30 saved
    assert found["costs"]["calls"]["judge_eval"] == {
        "measured": 60,
        "expected": 60,
        "printed": 32,
        "saved": 2,
    }
    text = printed(found, capsys)
    assert "generator 1 (fixed), judge 1 (fixed), policy 1 (fixed)" in text
    assert "Rubric probe" not in text
    assert "ERROR" not in text


def test_what_is_not_finite_is_said(summary: dict[str, Any]):
    assert summary["health"]["nonfinite"] == ["health/nonfinite/train/optim/grad_norm"]
