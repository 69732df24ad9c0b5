"""Jobs that Slurm stops: preempted and requeued, preempted and cancelled, at their time limit. Nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .conftest import LONG, Reference, new_desk
from .desk import Desk
from .lab import Cluster, Options

RUN_S = 180.0
CANCELLING = Options(preempt="CANCEL", nodes=1)
WHOLE_NODE = ["launcher.nodelist=node1", "launcher.cpus_per_task=32"]


def preempt(desk: Desk, job: str) -> None:
    """A job in `high` takes node1 for a second; until the other has lost it."""
    winner = desk.cluster.wrap("sleep 1", "-p", "high", "-w", "node1", "--exclusive")
    desk.cluster.wait_state(winner, "COMPLETED", 90)
    assert desk.cluster.state(job) != "RUNNING" or desk.cluster.job(job)["Restarts"] == "1"


def starts(desk: Desk, run: str) -> list[tuple[str, int, str]]:
    """(job, restart, node) of every attempt."""
    return [(a["slurm_job_id"], a["slurm_restart"], a["node"]) for a in desk.attempts(run)]


def in_mlflow(desk: Desk, run: str) -> tuple[str, ...]:
    """Job, node and attempt that MLflow has for a run."""
    tags = desk.mlflow(run)
    return tuple(tags[f"racelab.{name}"] for name in ("slurm_job_id", "node", "attempt"))


def went_on(desk: Desk, run: str, reference: Reference) -> None:
    """The second attempt began where the first had saved, and the whole is what an unbroken run gives."""
    assert desk.attempts(run)[1]["from_step"] >= LONG["checkpoint.every"]
    assert desk.weights(run) == reference.weights
    assert desk.metrics(run) == reference.metrics


def test_a_preempted_run_goes_on_in_its_job_and_gives_the_same_weights(
    desk: Desk, reference: Reference
) -> None:
    run = desk.train(*WHOLE_NODE, **LONG, tracking="mlflow")
    desk.wait_checkpoint(run, 5)
    job = desk.job(run)["job_id"]
    preempt(desk, job)

    (task,) = desk.succeed(run, RUN_S)
    assert (task["job_id"], task["restarts"], task["attempt"]) == (job, 1, 2)
    assert starts(desk, run) == [(job, 0, "node1"), (job, 1, "node1")]
    went_on(desk, run, reference)
    told = ["REQUEUED", "COMPLETED"]
    desk.cluster.wait(lambda: [row["State"] for row in desk.cluster.sacct(job)] == told, 30, f"sacct: {told}")

    desk.well("sync")
    assert in_mlflow(desk, run) == (job, "node1", "2")


def test_a_site_that_sends_no_signal_of_ours_and_keeps_no_accounts(
    further: Callable[[Options], Cluster], tiny_model: Path, reference: Reference
) -> None:
    """SIGTERM is all that a victim gets there."""
    desk = new_desk(further(Options(signal="off", accounting="none", nodes=1)), tiny_model)
    run = desk.train(*WHOLE_NODE, **LONG)
    desk.wait_checkpoint(run, 5)
    job = desk.job(run)["job_id"]
    preempt(desk, job)

    desk.succeed(run, RUN_S)
    assert starts(desk, run) == [(job, 0, "node1"), (job, 1, "node1")]
    went_on(desk, run, reference)


def test_a_site_that_cancels_what_it_preempts_requeues_who_asks_in_time(
    further: Callable[[Options], Cluster], tiny_model: Path, reference: Reference
) -> None:
    desk = new_desk(further(CANCELLING), tiny_model)
    run = desk.train(*WHOLE_NODE, **LONG)
    desk.wait_checkpoint(run, 5)
    job = desk.job(run)["job_id"]
    preempt(desk, job)

    desk.succeed(run, RUN_S)
    assert starts(desk, run) == [(job, 0, "node1"), (job, 1, "node1")]
    went_on(desk, run, reference)


def test_a_run_that_is_not_to_be_requeued_waits_for_resume(
    further: Callable[[Options], Cluster], tiny_model: Path, reference: Reference
) -> None:
    """It stops within the grace time, so Slurm itself calls it failed; racelab does not."""
    desk = new_desk(further(CANCELLING), tiny_model)
    run = desk.train(*WHOLE_NODE, "launcher.requeue=false", **LONG, tracking="mlflow")
    desk.wait_checkpoint(run, 5)
    job = desk.job(run)["job_id"]
    preempt(desk, job)

    (task,) = desk.finish(run, 60)
    assert task["state"] in ("interrupted", "preempted")
    assert task["mend"] == f"racelab resume {run}"
    desk.well("sync")
    number = desk.read(run, "run.json")["mlflow_run_id"]
    assert in_mlflow(desk, run) == (job, "node1", "1")

    desk.well("resume", run)
    (task,) = desk.succeed(run, RUN_S)
    second = task["job_id"]
    assert second != job
    assert starts(desk, run) == [(job, 0, "node1"), (second, 0, "node1")]
    went_on(desk, run, reference)
    desk.well("sync")
    assert desk.read(run, "run.json")["mlflow_run_id"] == number
    assert in_mlflow(desk, run) == (second, "node1", "2")


def test_at_the_time_limit_a_run_saves_and_goes_on_in_its_job(desk: Desk) -> None:
    """The limit is a minute, and Slurm tells the run 20 s before; it would need several minutes.

    It writes to MLflow itself. A first attempt that a busy machine did not let come to a step saves nothing.
    """
    limit = ["launcher.time_min=1", "launcher.signal_delay_s=20", "launcher.max_idle_requeues=9"]
    endless = {"run.max_steps": 5000, "checkpoint.every": 1000, "run.policy_updates": 5000}
    run = desk.train(*limit, "launcher.ship=always", **endless, tracking="mlflow")
    job = desk.job(run)["job_id"]
    number = desk.cluster.wait(lambda: desk.read(run, "run.json")["mlflow_run_id"], 90, "an id in MLflow")
    # saved because it was told to stop, long before the next regular checkpoint
    again = desk.cluster.wait(
        lambda: [a for a in desk.attempts(run)[1:] if a["from_step"] > 0], 240, "it to go on"
    )
    assert {job_id for job_id, _, _ in starts(desk, run)} == {job}
    attempt = again[0]["attempt"]
    assert again[0]["slurm_restart"] == attempt - 1
    desk.cluster.wait(lambda: b'"kind":"metrics"' in desk.spool(run, attempt), 90, "a step of that attempt")

    desk.well("cancel", run)
    (task,) = desk.finish(run, 90)
    assert (task["state"], task["job_id"], task["attempt"]) == ("cancelled", job, attempt)
    desk.well("sync")
    assert desk.read(run, "run.json")["mlflow_run_id"] == number
    assert in_mlflow(desk, run) == (job, again[0]["node"], str(attempt))
