"""Nodes and daemons that die, clusters without accounting: runs end correctly, replaced processes write nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from .conftest import LONG, Reference, new_desk
from .desk import Desk
from .lab import Cluster, Node, Options, alive, processes

RUN_S = 180.0
LOST_S = 120.0
"""Slurm notices a lost node within 25 s; a requeued job starts some seconds later."""
SHORT = {"run.max_steps": 2, "probe.prompts": 1}


def workers(node: Node) -> list[int]:
    """What racelab runs inside a node: the step's srun, the supervisor, and the process that trains."""
    found = node.pids("racelab")
    assert any("train --resume" in processes()[pid] for pid in found)
    return found


def started(desk: Desk, *words: str, **more: object) -> tuple[str, Node, list[int]]:
    """A run that has saved its first checkpoint: its id, its node, its processes."""
    run = desk.train(*words, **more)
    desk.wait_checkpoint(run, 5)
    node = desk.cluster.node(desk.attempts(run)[0]["node"])
    return run, node, workers(node)


def test_power_loss_of_a_node(desk: Desk, reference: Reference) -> None:
    run, node, pids = started(desk, **LONG)
    job = desk.job(run)["job_id"]
    node.kill()
    assert not any(alive(pid) for pid in pids)

    second = desk.wait_attempt(run, 2, LOST_S)
    assert (second["slurm_job_id"], second["slurm_restart"]) == (job, 1)
    assert second["node"] != node.name
    assert second["from_step"] >= 5
    (task,) = desk.succeed(run, RUN_S)
    assert (task["node"], task["restarts"]) == (second["node"], 1)
    assert desk.weights(run) == reference.weights
    assert desk.metrics(run) == reference.metrics


def test_a_process_that_outlives_its_slurmd_is_replaced_and_writes_nothing(desk: Desk) -> None:
    """It is at work all the time, so it sees its fence fall by itself."""
    endless = {"run.max_steps": 5000, "run.policy_updates": 5000, "checkpoint.every": 5}
    run, node, pids = started(desk, **endless)
    node.stop()
    assert all(alive(pid) for pid in pids)

    second = desk.wait_attempt(run, 2, LOST_S)
    assert second["node"] != node.name
    left = desk.spool(run, 1)
    desk.cluster.wait(lambda: not any(alive(pid) for pid in pids), 20, "the replaced processes to end")
    last = second["from_step"]
    desk.wait_checkpoint(run, last + 10)
    desk.well("cancel", run)
    (task,) = desk.finish(run, 90)
    assert (task["state"], task["attempt"]) == ("cancelled", 2)
    assert desk.spool(run, 1) == left
    steps = sorted({step for step, _ in desk.metrics(run)})  # which refuses a step that is there twice
    assert steps == list(range(steps[-1] + 1))
    assert steps[-1] >= last + 10


def test_a_suspended_process_that_wakes_after_its_run_was_taken_over_writes_nothing(
    desk: Desk, reference: Reference
) -> None:
    run, node, pids = started(desk, **LONG)
    node.stop()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    left = desk.spool(run, 1)

    def taken() -> dict[str, Any] | None:
        fence = desk.read(run, "fence")
        return fence if fence["restart"] == 1 else None

    fence = desk.cluster.wait(taken, LOST_S, "another node to take the fence")
    assert fence["node"] != node.name
    assert all(alive(pid) for pid in pids)
    assert len(desk.attempts(run)) == 1  # it waits: the suspended process has the lock
    for pid in pids:
        os.kill(pid, signal.SIGCONT)

    desk.cluster.wait(lambda: not any(alive(pid) for pid in pids), 30, "the replaced processes to end")
    assert desk.spool(run, 1) == left
    (task,) = desk.succeed(run, RUN_S)
    assert (task["node"], task["attempt"]) == (fence["node"], 2)
    assert desk.spool(run, 1) == left
    assert desk.weights(run) == reference.weights
    assert desk.metrics(run) == reference.metrics


def test_without_accounting_success_and_failure_are_reported_within_ten_seconds(
    further: Callable[[Options], Cluster], tiny_model: Path
) -> None:
    desk = new_desk(further(Options(accounting="none", nodes=2)), tiny_model)
    good = desk.train(**SHORT)
    bad = desk.train(**SHORT, **{"model.train_from_layer": 99})
    ended: dict[str, tuple[str, float]] = {}

    def both() -> bool:
        for task in desk.jobs():
            if not task["live"] and task["run_id"] not in ended:
                over = desk.cluster.job(task["job_id"])["EndTime"]
                late = time.time() - datetime.fromisoformat(over).timestamp()
                ended[task["run_id"]] = (task["state"], late)
        return len(ended) == 2

    desk.cluster.wait(both, 120, "both runs to end")
    assert (ended[good][0], ended[bad][0]) == ("finished", "failed")
    assert max(late for _, late in ended.values()) < 10
