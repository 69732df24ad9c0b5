"""What a run's folder says at a glance: the ends of its record, written by the real writer, numbers worked by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from racelab.experiments.fsio import write_json_atomic
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import SpoolWriter
from racelab.sweeps.progress import Progress
from racelab.sweeps.slurm.glance import glance, run_logs
from racelab.sweeps.slurm.model import Assignment

MINE = Assignment("20260102T030405-0a1b2c", "cells", 3, 1)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    info = {"kind": "train", "policy_updates": 40, "launch": MINE.to_json()}
    return RunFolder.create(tmp_path, "demo", composed_yaml="", overrides=[], info=info, run_id="demo-s0")


def metrics(step: int, policy_step: int, reward: float | None) -> dict[str, object]:
    values = {"train/clock/policy_step": float(policy_step), "train/clock/phase_kind": float(reward is None)}
    return {
        "kind": "metrics",
        "step": step,
        "values": values if reward is None else {**values, "train/reward/mean": reward},
    }


def rows(step: int, length: int) -> dict[str, object]:
    """Texts of the samples; one of them quotes a metric."""
    row = {"text": 'the key "train/clock/policy_step":9 and "train/reward/mean":9', "more": "x" * length}
    return {"kind": "rows", "step": step, "table": "samples", "rows": [row]}


def write(run: RunFolder, *records: dict[str, object], attempt: int = 1) -> None:
    """A record; its lines are 10 s apart."""
    writer = SpoolWriter(run.spool_dir / f"{attempt}.jsonl", clock=iter(range(0, 10**9, 10_000)).__next__)
    for record in records:
        writer.append([record])
    writer.close()


def test_a_queued_run_is_its_run_json(run: RunFolder) -> None:
    found = glance(run.path)
    assert found is not None
    assert (found.assigned, found.status, found.budget) == (MINE, "queued", 40)
    assert (found.attempt, found.progress) == (None, Progress())


def test_a_queued_run_that_is_to_go_on_has_come_so_far(run: RunFolder) -> None:
    write(run, metrics(1, 1, 0.25), metrics(2, 2, 0.5))
    run.update(status="queued", steps=2)
    found = glance(run.path)
    assert found is not None
    assert (found.status, found.attempt) == ("queued", 1)
    assert (found.progress.policy_step, found.progress.reward) == (2, 0.5)


@pytest.mark.parametrize("length", [10, 30_000, 300_000])
def test_progress_from_the_first_and_the_last_step(run: RunFolder, length: int) -> None:
    """Metrics and texts are written in turn, 10 s apart: step n ends at 20 n s. 40 updates are asked for.

    From update 1 at 20 s to update 4 at 80 s: 20 s an update, 36 left: 720 s.
    """
    run.update(status="running")
    write(
        run,
        rows(0, length),
        rows(0, length),
        *(record for n in (1, 2, 3, 4) for record in (metrics(n, n, n / 8), rows(n, length))),
        rows(4, length),
    )
    found = glance(run.path)
    assert found is not None
    assert found.attempt == 1
    progress = found.progress
    assert (progress.step, progress.policy_step, progress.phase) == (4, 4, "policy")
    assert (progress.reward, progress.eta_s) == (0.5, 720.0)


def test_the_reward_is_that_of_the_last_policy_step(run: RunFolder) -> None:
    """Steps 3 and 4 trained the rubrics."""
    run.update(status="interrupted", reason="stopped")
    write(run, metrics(1, 1, 0.25), metrics(2, 2, 0.75), metrics(3, 2, None), metrics(4, 2, None))
    found = glance(run.path)
    assert found is not None
    assert (found.status, found.reason) == ("interrupted", "stopped")
    assert (found.progress.step, found.progress.policy_step, found.progress.phase) == (4, 2, "rubric")
    assert found.progress.reward == 0.75


def test_a_reward_that_is_far_from_the_end_is_not_known(run: RunFolder) -> None:
    """And above all is not that of the first step, which is at hand."""
    run.update(status="running")
    write(run, metrics(1, 1, 0.25), metrics(2, 2, 0.75), rows(3, 1 << 21), metrics(3, 2, None))
    found = glance(run.path)
    assert found is not None
    assert (found.progress.policy_step, found.progress.reward) == (2, None)


def test_the_newest_attempt_counts_and_a_torn_line_does_not(run: RunFolder) -> None:
    run.update(status="running")
    write(run, metrics(1, 1, 0.25), metrics(9, 9, 0.5))
    write(run, metrics(5, 5, 0.125), metrics(6, 6, 0.375), attempt=2)
    with open(run.spool_dir / "2.jsonl", "ab") as handle:
        handle.write(
            b'{"kind":"metrics","step":7,"values":{"train/clock/policy_step":7.0,"train/reward/mean":1'
        )
    found = glance(run.path)
    assert found is not None
    assert found.attempt == 2
    assert (found.progress.policy_step, found.progress.reward) == (6, 0.375)
    assert found.progress.eta_s == 340.0  # 10 s an update, 34 left


def test_an_attempt_that_has_not_come_to_a_step(run: RunFolder) -> None:
    run.update(status="running")
    write(run, rows(0, 10))
    found = glance(run.path)
    assert found is not None
    assert (found.attempt, found.progress) == (1, Progress())


def test_a_run_that_nobody_works_on_any_more_is_stale(run: RunFolder) -> None:
    with run.lock():
        run.update(status="running")
        alive = glance(run.path)
    gone = glance(run.path)
    assert alive is not None
    assert gone is not None
    assert (alive.status, gone.status) == ("running", "stale")


def test_a_folder_that_says_nothing(run: RunFolder, tmp_path: Path) -> None:
    assert glance(tmp_path / "none") is None
    (run.path / "run.json").write_text("{")
    assert glance(run.path) is None
    write_json_atomic(run.path / "run.json", {"status": "queued", "launch": {"uid": "x"}})
    assert glance(run.path) is None


def test_logs_are_in_the_order_they_were_written(run: RunFolder) -> None:
    """Job 9 came after job 12: a cluster that lost its state starts counting anew."""
    names = ["12_3-r0.log", "12_3-r1.log", "9-r0.log"]
    for age, name in enumerate(names):
        (run.path / "attempts" / name).write_text("x")
        os.utime(run.path / "attempts" / name, (age, age))
    (run.path / "attempts" / "cell.log").write_text("x")
    (run.path / "attempts" / "1").mkdir()
    assert [path.name for path in run_logs(run.path)] == names


def test_a_run_was_last_heard_of_when_its_folder_changed(run: RunFolder) -> None:
    """The record, or `run.json`, whichever is newer; never, before its first attempt."""
    queued = glance(run.path)
    write(run, metrics(1, 1, 0.25))
    run.update(status="failed")
    os.utime(run.path / "run.json", (2000, 2000))
    os.utime(run.spool_dir / "1.jsonl", (1000, 1000))
    failed = glance(run.path)
    os.utime(run.spool_dir / "1.jsonl", (3000, 3000))
    written = glance(run.path)
    assert [facts and facts.ended for facts in (queued, failed, written)] == [None, 2000.0, 3000.0]
