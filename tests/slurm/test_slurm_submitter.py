"""The submitter dies at the worst moments: no run is lost, and none is worked on by two jobs."""

from __future__ import annotations

import os
import signal
from typing import Literal

from .desk import Desk, stalling_sbatch

RUN_S = 120.0
SHORT = {"run.max_steps": 2, "probe.prompts": 1}


def killed_while_submitting(desk: Desk, when: Literal["before", "after"]) -> tuple[str, int]:
    """The command line is killed while sbatch stands still; the run, and the pid of that sbatch, which lives on."""
    words = ["train", *desk.tiny(**SHORT), "launcher=slurm"]
    stalled = desk.folder / "stalled"
    with desk.start(*words, **stalling_sbatch(desk.folder, when)) as submitter:
        try:
            desk.cluster.wait(
                lambda: stalled.exists() and stalled.read_text(), 60, (desk.folder / "said").read_text()
            )
        finally:
            submitter.kill()
            submitter.wait(20)
    (run,) = desk.runs()
    return run, int(stalled.read_text())


def jobs_of(desk: Desk) -> dict[str, str]:
    """Every job that Slurm has had of this desk's launch: id -> name."""
    (launch,) = desk.launches()
    rows = [row for row in desk.cluster.sacct() if launch.name in row["JobName"]]
    return {row["JobID"]: row["JobName"] for row in rows}


def test_killed_between_intent_and_sbatch(desk: Desk) -> None:
    run, sbatch = killed_while_submitting(desk, "before")
    os.kill(sbatch, signal.SIGKILL)  # as its whole session would be with the login node
    assert desk.attempts(run) == []

    (task,) = desk.succeed(run, RUN_S)
    assert task["number"] == 2
    assert [attempt["slurm_job_id"] for attempt in desk.attempts(run)] == [task["job_id"]]
    assert set(jobs_of(desk)) == {task["job_id"]}


def test_killed_just_after_sbatch(desk: Desk) -> None:
    run, sbatch = killed_while_submitting(desk, "after")
    os.kill(sbatch, signal.SIGKILL)

    (task,) = desk.succeed(run, RUN_S)
    assert task["number"] == 1
    assert [attempt["slurm_job_id"] for attempt in desk.attempts(run)] == [task["job_id"]]
    assert set(jobs_of(desk)) == {task["job_id"]}


def test_a_job_that_comes_after_its_launch_was_recovered_does_nothing(desk: Desk) -> None:
    """sbatch itself outlives its caller, and submits only when another job has the run."""
    run, _ = killed_while_submitting(desk, "before")
    (task,) = desk.jobs(run)
    assert (task["number"], task["live"]) == (2, True)
    (desk.folder / "go").touch()

    desk.cluster.wait(lambda: len(jobs_of(desk)) == 2, 30, "the late job")
    (task,) = desk.succeed(run, RUN_S)
    assert [attempt["slurm_job_id"] for attempt in desk.attempts(run)] == [task["job_id"]]
    (late,) = set(jobs_of(desk)) - {task["job_id"]}
    desk.cluster.wait_state(late, {"COMPLETED", "FAILED", "CANCELLED"}, 60)
    assert jobs_of(desk)[task["job_id"]].endswith(".2")
    assert jobs_of(desk)[late].endswith(".1")
    assert desk.job(run)["job_id"] == task["job_id"]
