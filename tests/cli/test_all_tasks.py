"""Every task under every condition, through the real command: simulator, retriever, replay server, SmolLM2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from racelab.analysis.load import load_metrics, load_table
from racelab.configs.schema_rlds import TASKS
from racelab.experiments.runfolder import RunFolder

pytestmark = pytest.mark.slow
CONDITIONS = ("rlvr", "base-reflection", "rlds")
SMALL_FROZENLAKE = ["run.updates=2", "run.transcripts_every=1", "tracking=none"]


def racelab(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "racelab.cli.main", *words, f"run.root={root}"],
        capture_output=True, text=True, timeout=3000, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], RunFolder]:
    """(task, condition) -> the cell of one sweep over all of them."""
    root = tmp_path_factory.mktemp("tasks")
    done = racelab(
        root, "task", "--name", "all", "--condition", "all", "--jobs", "2", "--json", *SMALL_FROZENLAKE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for cell in json.loads(done.stdout)["cells"]:
        run = RunFolder.open(Path(cell["path"]))
        info = run.info()
        found[str(info["task"]), str(info["condition"])] = run
    return found


def one(cells: dict[tuple[str, str], RunFolder], task: str, condition: str) -> tuple[Any, dict[str, Any]]:
    run = cells[task, condition]
    assert run.status() == "finished"
    return load_metrics(run), {
        name: load_table(run, name) for name in ("rollouts", "retry_pairs", "val_examples")
    }


@pytest.mark.parametrize("task", TASKS)
def test_every_condition_ends(cells: dict[tuple[str, str], RunFolder], task: str) -> None:
    for condition in CONDITIONS:
        metrics, tables = one(cells, task, condition)
        assert metrics["health/cost_mismatch"].fillna(0).eq(0).all()
        assert tables["rollouts"]["step"].nunique() == 2
        assert set(tables["val_examples"]["model"]) == {"untrained", "trained"}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("condition", ["base-reflection", "rlds"])
def test_there_are_grades_and_retries(
    cells: dict[tuple[str, str], RunFolder], task: str, condition: str
) -> None:
    metrics, tables = one(cells, task, condition)
    rollouts, pairs = tables["rollouts"], tables["retry_pairs"]
    graded = rollouts[rollouts["parse_status"] == "ok"]
    assert len(graded)
    assert all(1 <= grade <= 5 for grades in graded["grades"] for grade in grades)
    assert rollouts.loc[rollouts["parse_status"] != "ok", "grades"].isna().all()
    assert len(pairs)
    assert rollouts["is_retry"].sum() == len(pairs)
    used = pairs[pairs["used"]]
    assert (used["delta_R"] > 0).all()
    assert not pairs.loc[pairs["delta_R"] <= 0, "used"].any()
    per_step = used.groupby("step")["weight"].sum()
    assert ((per_step - 1).abs() < 1e-9).all()
    assert (
        metrics["rlds/reflect/n_retry_pairs"].sum() if "rlds/reflect/n_retry_pairs" in metrics else 0
    ) == len(used)


@pytest.mark.parametrize("task", TASKS)
def test_rlvr_has_neither(cells: dict[tuple[str, str], RunFolder], task: str) -> None:
    _, tables = one(cells, task, "rlvr")
    assert not tables["rollouts"]["is_retry"].any()
    assert tables["rollouts"]["grades"].isna().all()
    assert len(tables["retry_pairs"]) == 0


def test_auxiliary_pairs_are_learnt_from_where_a_retry_was_better(
    cells: dict[tuple[str, str], RunFolder],
) -> None:
    """With a model of this size that is a matter of luck on HotpotQA; the other tasks have graded rewards."""
    for task in ("frozenlake", "scienceworld", "deepresearch"):
        used = sum(int(one(cells, task, c)[1]["retry_pairs"]["used"].sum()) for c in CONDITIONS[1:])
        assert used, task


def test_self_grading_in_free_form_reports_its_parse_rate(tmp_path: Path) -> None:
    """SmolLM2 cannot write the grader's JSON: every failure is counted, none is a grade."""
    words = ["model=smollm2-135m", "method.grader=policy", "method.reflector=policy", "learner.lr=1e-5",
             "model.train_from_layer=28", "run.updates=1", "task.prompts_per_step=1", "method.group_size=2",
             "task.max_turns=2", "task.max_turn_tokens=24", "task.validation_examples=1",
             "method.reflect.max_tokens=48", "tracking=none"]  # fmt: skip
    done = racelab(tmp_path, "task", "--name", "frozenlake", "--condition", "rlds", "--json", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    (cell,) = json.loads(done.stdout)["cells"]
    run = RunFolder.open(Path(cell["path"]))
    rollouts, metrics = load_table(run, "rollouts"), load_metrics(run)
    failed = rollouts[rollouts["parse_status"] != "ok"]
    assert failed["grades"].isna().all()
    rate = metrics["rlds/parse/graded_frac"].dropna().iloc[0]
    assert rate == pytest.approx((rollouts["parse_status"] == "ok").mean())
    summary = json.loads((run.path / "summary.json").read_text())
    assert "parse" in json.dumps(summary)
