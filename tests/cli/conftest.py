"""A run on disk as a training leaves it, and ways to call the command."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from racelab.configs.compose import compose
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import StepRecord

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Result:
    """What a command line gave."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh RACELAB_HOME and working directory."""
    monkeypatch.setenv("RACELAB_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs a command line in this process."""
    from racelab.cli.main import _main

    def run(*words: str) -> Result:
        capsys.readouterr()
        code = _main(list(words))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def command(home: Path) -> Callable[..., Result]:
    """Runs a command line in a process of its own."""
    return _command


def _command(*words: str, **environment: str) -> Result:
    done = subprocess.run(
        [sys.executable, "-m", "racelab.cli.main", *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def group_row(step: int, route: str, mean: float) -> Row:
    return {
        "step": step, "policy_step": step, "phase_index": 0, "prompt_id": f"p{step}", "rubric_sha": "abc",
        "rewards": [mean, None], "mean": mean, "std": 0.1, "tie_rate": 0.5, "d_tri": 0.9, "d_emb": 0.3,
        "route": route, "saturated": False, "sigma_rt": 0.08, "tau_tie": 0.5, "d_tri_star": 0.6,
        "d_emb_star": 0.25,
    }  # fmt: skip


def sample_row(step: int, group: int, idx: int, role: str, text: str, score: float | None) -> Row:
    return {
        "step": step, "group": group, "idx": idx, "role": role, "prompt": f"What is {step}?", "text": text,
        "rubric_text": "- names the number", "score": score,
    }  # fmt: skip


def policy_step(step: int, reward: float) -> StepRecord:
    samples = [
        sample_row(step, 0, 0, "policy", f"It is {step}.\nReally.", reward),
        sample_row(step, 0, 1, "policy", "", None),
    ]
    tables = {"groups": [group_row(step, "rubric_failed", reward)], "samples": samples}
    metrics = {"train/reward/mean": reward, "race/pool/size": float(step), "perf/time/step_s": 2.0}
    return StepRecord(step, metrics, tables)


def rubric_step(step: int) -> StepRecord:
    tables = {
        "samples": [sample_row(step, 0, i, "rubric", f"- candidate {i}", 0.25 * i) for i in range(2)],
        "phases": [
            {"step": step, "index": 0, "kind": "policy", "start": 1, "end": step - 1, "length": step - 1,
             "end_reason": "saturation"},
        ],
    }  # fmt: skip
    return StepRecord(step, {"race/rubric_reward/mean": 0.125, "perf/time/step_s": 1.0}, tables)


@pytest.fixture
def make_run(home: Path) -> Callable[..., RunFolder]:
    """Makes runs under `home`."""
    return functools.partial(_make_run, home)


def _make_run(
    home: Path,
    name: str = "tiny",
    rewards: tuple[float, ...] = (0.25, 0.5),
    status: str = "finished",
    overrides: tuple[str, ...] = ("tracking=none",),
) -> RunFolder:
    """A run with a policy step per reward and one rubric step; `status` running leaves it without an end."""
    composed = compose(overrides)
    info = {"kind": "train", "method": "race", "variant": "full", "seed": 0, "steps": len(rewards) + 1}
    run = RunFolder.create(
        home / "runs", name, composed_yaml=composed.yaml, overrides=list(overrides), info=info
    )
    with run.lock():
        attempt = run.begin_attempt()
        tracker = SpoolTracker(run, attempt, ship=False, uri=f"sqlite:///{home}/runs/mlflow.db")
        for step, reward in enumerate(rewards, 1):
            tracker.record(policy_step(step, reward))
        tracker.record(rubric_step(len(rewards) + 1))
        if status != "running":
            tracker.close(status, "")
    return run
