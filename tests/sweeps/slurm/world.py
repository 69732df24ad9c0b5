"""Launches on disk with their runs, as the submitter, the jobs and the trainer leave them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import SpoolWriter
from racelab.sweeps.slurm.folder import End, LaunchFolder
from racelab.sweeps.slurm.model import Assignment, Batch, Launch, Submission, job_name, task_job_id

from .launches import UID, make_batch, make_launch

WHEN = "2026-01-02T03:04:06+00:00"


@dataclass(frozen=True)
class Launched:
    """A launch with its runs."""

    folder: LaunchFolder
    launch: Launch

    @property
    def root(self) -> Path:
        return Path(self.launch.root)

    def name(self, batch: int = 0, number: int = 1) -> str:
        """Of its jobs."""
        return job_name(self.launch, self.launch.batches[batch], number)

    def run(self, index: int = 0) -> RunFolder:
        return RunFolder.open(self.root / f"run-{index}")

    def submit(self, job_id: str = "12", batch: int = 0, **changes: Any) -> Submission:
        """Records a submission as the submitter does."""
        name = self.launch.batches[batch].name
        submission = replace(Submission(name, 1, job_id, WHEN, WHEN), **changes)
        self.folder.record(submission)
        return submission

    def end(self, status: str, index: int = 0, batch: int = 0, job: str = "12", **changes: Any) -> None:
        """The job's last word."""
        of = self.launch.batches[batch]
        now = datetime.now(UTC).isoformat()
        words = End(status, 0, "", task_job_id(job, of, index), 0, "node2", now)
        self.folder.write_end(of.name, index, replace(words, **changes))


def launched(root: Path, *batches: Batch, runs: int = 1, uid: str = UID, name: str = "demo") -> Launched:
    """A launch, and its runs, queued and assigned to it."""
    made = make_launch(root, *(batches or (make_batch(runs=runs),)), uid=uid, name=name)
    folder = LaunchFolder.create(made)
    for batch, index, task in made.tasks():
        if task.run:
            write_run(root / task.run, task.title, Assignment(made.uid, batch.name, index, 1))
    return Launched(folder, made)


def write_run(path: Path, name: str, assigned: Assignment | None, **facts: Any) -> RunFolder:
    """A run's folder without what costs time: git, the environment."""
    for part in ("attempts", "spool", "checkpoints", "config"):
        (path / part).mkdir(parents=True)
    record = {
        "schema": 1, "run_id": path.name, "name": name, "uid": "0" * 32, "status": "queued", "reason": "",
        "started": WHEN, "seed": 0, "steps": 0, "kind": "train", "policy_updates": 40,
        "launch": assigned.to_json() if assigned is not None else None, **facts,
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(record))  # a thousand runs would wait for the disk otherwise
    (path / "attempts.json").write_text("[]")
    return RunFolder.open(path)


def work(run: RunFolder, steps: int, reward: float = 0.5, attempt: int = 1, status: str = "running") -> None:
    """What an attempt leaves: a record of `steps` policy steps, 10 s apart, and a status."""
    writer = SpoolWriter(run.spool_dir / f"{attempt}.jsonl", clock=iter(range(0, 10**9, 10_000)).__next__)
    for step in range(1, steps + 1):
        values = {
            "train/clock/policy_step": float(step),
            "train/clock/phase_kind": 0.0,
            "train/reward/mean": reward,
        }
        writer.append([{"kind": "metrics", "step": step, "values": values}])
    writer.close()
    run.update(status=status)
