"""Command lines that launch, and what they leave: for the tests of the commands that look after jobs."""

from __future__ import annotations

from pathlib import Path

from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.slurm.folder import LaunchFolder, all_launches

ASK = ("launcher=slurm", "tracking=none")
TRAIN = ("train", "task=frozenlake", *ASK)
SWEEP = ("task", "--name", "frozenlake", "--condition", "rlvr", "--seeds", "0,1,2", *ASK)
TINY = (
    "run.updates=1", "model.grid.warmup_steps=1", "run.threads=1", "task.train_examples=100",
    "task.validation_examples=20", "task.prompts_per_step=2", "validation.every=2",
)  # fmt: skip
"""Words that make a run one of a few seconds."""
STARTED = {"nodes": "node1", "start": "2026-11-30T08:00:00"}
"""Of a job that has run."""


def runs(home: Path, kind: str = "train") -> list[RunFolder]:
    """All of a kind, by id."""
    found = [RunFolder.open(path.parent) for path in sorted((home / "runs").glob("*/run.json"))]
    return [run for run in found if run.info()["kind"] == kind]


def launches(home: Path) -> list[LaunchFolder]:
    """All, as they were made; ids of one second are not in order."""
    return sorted(
        all_launches(home / "runs"), key=lambda folder: (folder.path / "launch.json").stat().st_mtime_ns
    )
