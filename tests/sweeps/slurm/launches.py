"""Small launches, as the commands would make them, and programs that stand in for Slurm's."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from racelab.configs.compose import compose
from racelab.configs.schema_launcher import SlurmLauncherConfig
from racelab.sweeps.slurm.model import After, Batch, Launch, Task

UID = "20260102T030405-0a1b2c"


@functools.cache
def slurm_launcher(*words: str) -> SlurmLauncherConfig:
    """What `launcher=slurm` and further words give, with the backend's nodes and GPUs filled in."""
    config = compose(["launcher=slurm", *words]).config
    assert isinstance(config.launcher, SlurmLauncherConfig)
    return config.launcher.resolved(config.backend)


def run_tasks(count: int) -> tuple[Task, ...]:
    """Runs `run-0`, `run-1`, ..."""
    return tuple(Task("run", run=f"run-{i}", title=f"race-s{i}") for i in range(count))


def make_batch(
    *words: str,
    runs: int = 1,
    stage: str = "cells",
    tasks: Sequence[Task] = (),
    after: Sequence[After] = (),
    **asked: object,
) -> Batch:
    """A batch of `runs` runs, or of the given tasks.

    `words` are overrides beside launcher=slurm; `asked` are keys of the launcher set afterwards, as a config whose
    backend fits would have them (nodes=2, gpus_per_node=8).
    """
    launcher = slurm_launcher(*words).model_copy(update=asked)
    return Batch(stage, stage, tuple(tasks) or run_tasks(runs), launcher, tuple(after))


def make_launch(
    root: Path,
    *batches: Batch,
    name: str = "demo",
    uid: str = UID,
    cwd: Path | None = None,
    code: Path | None = None,
    depth: int = 0,
) -> Launch:
    """A launch of the batches, or of one batch with one run; it starts in `root` and its code is in `root/code`."""
    launch = Launch(
        uid=uid,
        name=name,
        command=f"racelab ablate name={name} launcher=slurm",
        root=str(root),
        cwd=str(cwd or root),
        batches=batches or (make_batch(),),
        code=str(code or root / "code"),
        created="2026-01-02T03:04:05.000+00:00",
    )
    return replace(launch, depth=depth)


def program(folder: Path, name: str, text: str) -> Path:
    """An executable shell script in a folder."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def first_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, made, and first on PATH: for programs that stand in for sbatch, srun, squeue."""
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder
