"""The summary of a run, from a spool whose numbers are known."""

from __future__ import annotations

from typing import Any

import pytest

from racelab.analysis.summary import summarise
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


def probe(label: str, prompt: str, criterion: str | None, grounded: bool) -> Row:
    return {
        "step": 0,
        "checkpoint": label,
        "prompt_id": prompt,
        "json_valid": criterion is not None,
        "criterion": criterion,
        "grounded": grounded,
        "specific": False,
        "text": criterion or "noise",
    }


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
        tracker.metrics(step, policy)
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
            probe("untrained", "x", "Is short", False),
            probe("untrained", "y", None, False),
            probe("trained", "x", "Names x", True),
            probe("trained", "x", "Is short", False),
        ],
    )
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
    updates, rubrics = summary["rubric_updates"], summary["rubrics"]
    assert (updates["reward"], updates["gain"], updates["usable_frac"]) == ([0.5], [0.1], [0.75])
    assert updates["positive_margin_frac"] == 0.5
    assert rubrics["untrained"]["usable_frac"] == 0.5
    assert (rubrics["trained"]["usable_frac"], rubrics["trained"]["grounded_frac"]) == (1.0, 0.5)
    assert [t["prompt_id"] for t in rubrics["texts"]] == ["x"]


def test_what_is_not_finite_is_said(summary: dict[str, Any]):
    assert summary["health"]["nonfinite"] == ["health/nonfinite/train/optim/grad_norm"]
