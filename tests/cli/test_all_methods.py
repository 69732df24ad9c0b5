"""Every baseline and every ablation through the real commands, on a tiny model: all finish, and do what names them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from racelab.analysis.load import load_metrics, load_table
from racelab.experiments.runfolder import RunFolder

from ..experiments.api_server import ApiServer
from ..experiments.tiny_run import overrides, write_tiny_model

pytestmark = pytest.mark.slow

UPDATES = 4  # EvoLM: three policy steps, three rubric steps, one policy step
COMMON = {
    "model.train_from_layer": 1,
    "run.threads": 1,
    "run.policy_updates": UPDATES,
    "judge": "digit",  # noise has no usable rubric to calibrate the other one on
    "method.prompts_per_step": 2,
    "method.group_size": 4,
    "method.response.max_tokens": 6,
    "method.rubric.max_tokens": 8,
    "learner.lr": 0.01,
    "data.limit": 4,
    "data.heldout": 3,
    "data.max_prompt_tokens": 400,
    "data.on_long_prompt": "drop",
    "validation.samples": 1,
    "validation.temperatures": "[1.0]",
    "validation.judge_report": "false",
    "probe.prompts": 2,
    "probe.group_size": 2,
    "tracking": "none",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def racelab(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "racelab.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **environment},
    )


def cells(done: subprocess.CompletedProcess[str], root: Path) -> dict[str, RunFolder]:
    """Label -> run folder, all of them finished."""
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["cells"]
    assert {row["status"] for row in rows} == {"finished"}
    return {row["label"]: RunFolder.open(root / row["run_id"]) for row in rows}


def steps(run: RunFolder) -> pd.DataFrame:
    """Metrics of the training steps."""
    metrics = load_metrics(run)
    return metrics[metrics["train/clock/phase_kind"].notna()]


def test_all_baselines_finish_and_those_with_a_rubric_role_train_it(model: Path, tmp_path: Path) -> None:
    words = [f"{k}={v}" for k, v in {**COMMON, "model.source": model, "run.root": tmp_path}.items()]
    with ApiServer() as server:
        done = racelab(
            "baseline", "--method", "all", "--seeds", "0", "--json", *words,
            OPENAI_BASE_URL=server.url, OPENAI_API_KEY="none", RACELAB_CACHE=str(tmp_path / "cache"),
        )  # fmt: skip
        asked = len(server.requests)
    runs = cells(done, tmp_path)
    assert set(runs) == {
        "evolm", "rlcer", "rubric-arm", "rar", "rrd", "prompted-api", "prompted-policy", "scalar-rm",
    }  # fmt: skip
    external = 0.0
    for label, run in runs.items():
        table = steps(run)
        policy = table["train/clock/phase_kind"] == 0.0
        assert policy.sum() == UPDATES, label
        assert (table["health/cost_mismatch"] == 0.0).all(), label
        assert (~policy).any() == (label in {"evolm", "rlcer", "rubric-arm"}), label
        for name, sign in (("cost/calls/external_calls", 1), ("cost/api/cached", -1)):
            external += sign * table.get(name, pd.Series(dtype=float)).sum()
    assert asked == external > 0
    assert steps(runs["rubric-arm"])["train/clock/rubric_step"].max() >= 2  # generator and judge
    assert len(load_table(runs["rar"], "static_rubrics")) >= 2
    assert len(load_table(runs["rrd"], "rrd_rounds")) >= 2


def test_all_ablations_finish_and_all_train_both_roles(model: Path, tmp_path: Path) -> None:
    """The tiny model's rewards saturate nothing, so thresholds are set such that every group does."""
    words = overrides(
        model,
        tmp_path,
        **{
            "run.policy_updates": 4,
            "run.max_steps": "null",
            "method.phase.mode": "event",
            "method.phase.mu_sat": 0.0,
            "method.phase.sigma_sw": 1.0,
            "method.phase.tau_sat": 0.1,
            "method.phase.max_rubric_steps": 4,
            "method.phase.fixed": "[1,1]",
            "method.sensitivity.short_phases.policy_target": 1,
            "method.sensitivity.low_quarantine.policy_target": 1,
            "method.routing.sigma_rt": 0.4,
            "validation.samples": 1,
            "validation.temperatures": "[1.0]",
        },
    )
    # variants set these themselves, so they stand below them, in a preset
    presets = tmp_path / "mine" / "preset"
    presets.mkdir(parents=True)
    text = "# @package _global_\ndefaults: [embedded]\nmethod: {phase: {policy_target: 1}}\n"
    (presets / "short.yaml").write_text(text)
    words += ["preset=short", "--config-dir", str(presets.parent)]
    own = ("method.pool.fill=", "method.phase.mode=")
    words = [word for word in words if not word.startswith(own)]
    done = racelab("ablate", "--variant", "all", "--seeds", "0", "--json", *words)
    runs = cells(done, tmp_path)
    assert len(runs) == 9
    for label, run in runs.items():
        phases = load_table(run, "phases")
        assert {"policy", "rubric"} <= set(phases["kind"]), label
        assert "policy" in set(phases["kind"][phases["index"] >= 2]), label
        assert (steps(run)["health/cost_mismatch"] == 0.0).all(), label
