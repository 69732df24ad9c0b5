"""`racelab sync` and what `racelab ui` delivers first: runs and sweeps that jobs of a cluster have left."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from racelab.cli.sync import deliver_launched
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.shipper import backlog
from racelab.experiments.tracking.tracker import SHIP_VARIABLE, SpoolTracker
from racelab.sweeps.run import members
from racelab.sweeps.slurm.folder import all_launches

from ..sweeps.slurm.fake_slurm import FakeSlurm
from .conftest import Result, policy_step

Call = Callable[..., Result]
SWEEP = ("task", "--name", "frozenlake", "--condition", "rlvr", "--seeds", "0,1", "launcher=slurm")
STARTED = {"nodes": "node1", "start": "2026-11-30T08:00:00", "end": "2026-11-30T08:10:00"}
AWAY = "tracking.uri=http://127.0.0.1:9"


@pytest.fixture
def slurm(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm.install(home / "slurm", monkeypatch)


def swept(slurm: FakeSlurm, call: Call, home: Path, *words: str) -> tuple[RunFolder, list[RunFolder], str]:
    """A sweep of two cells whose array waits, the cells, the array's id."""
    assert call(*SWEEP, *words).code == 0
    (path,) = (home / "runs").glob("sweep-*")
    (folder,) = all_launches(home / "runs")
    sweep = RunFolder.open(path)
    cells = [RunFolder.open(home / "runs" / str(member["run_id"])) for member in members(sweep)]
    return sweep, cells, folder.newest()["cells"].job_id


def work(run: RunFolder, status: str, monkeypatch: pytest.MonkeyPatch, uri: str | None = None) -> None:
    """What a job leaves that may not write to the store; with status running, one that was killed at work."""
    with monkeypatch.context() as patch, run.lock():
        patch.setenv(SHIP_VARIABLE, "0")
        tracker = SpoolTracker(run, run.begin_attempt(), uri=uri)
        tracker.record(policy_step(1, 0.5))
        if status != "running":
            tracker.close(status, "")


@pytest.mark.slow
def test_a_sweep_of_jobs_reaches_mlflow_with_its_cells_and_how_it_ended(
    slurm: FakeSlurm, call: Call, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cell has finished, the other's job was killed for its memory. `racelab jobs` sees it, sync delivers it."""
    import mlflow

    sweep, (one, two), job = swept(slurm, call, home)
    work(one, "finished", monkeypatch)
    work(two, "running", monkeypatch)
    slurm.set(f"{job}_0", state="COMPLETED", **STARTED)
    slurm.set(f"{job}_1", state="OUT_OF_MEMORY", **STARTED)
    assert call("jobs").code == 0
    assert [run.status() for run in (one, two, sweep)] == ["finished", "failed", "failed"]
    assert not (home / "runs" / "mlflow.db").exists()

    done = call("sync", "--json")
    assert done.code == 0, done.err
    assert {row["run_id"]: row["backlog"] for row in done.json()} == {
        run.run_id: 0 for run in (one, two, sweep)
    }
    client = mlflow.MlflowClient(f"sqlite:///{home / 'runs' / 'mlflow.db'}")
    parent = client.get_run(sweep.info()["mlflow_run_id"])
    assert (parent.info.run_name, parent.info.status) == ("task", "FAILED")
    assert parent.data.tags["racelab.end_reason"] == f"not finished: {two.run_id}"
    assert parent.data.metrics["cells/finished"] == 1.0
    for run, status, reason in (
        (one, "FINISHED", "finished"),
        (two, "FAILED", "out of memory"),
    ):
        child = client.get_run(run.info()["mlflow_run_id"])
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert (child.info.status, child.data.tags["racelab.end_reason"]) == (status, reason)
        assert child.data.metrics["train/reward/mean"] == 0.5
    experiment = client.get_experiment_by_name("racelab")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 3


@pytest.mark.slow
def test_one_sync_closes_the_last_cell_and_records_the_sweep(
    slurm: FakeSlurm, call: Call, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a look at the jobs: a cell whose process died is closed as interrupted, and so is the sweep."""
    sweep, (one, two), _ = swept(slurm, call, home)
    work(one, "finished", monkeypatch)
    work(two, "running", monkeypatch)
    rows = call("sync", "--json").json()
    assert {row["run_id"]: row["closed_stale"] for row in rows} == {
        one.run_id: False, two.run_id: True, sweep.run_id: False,
    }  # fmt: skip
    assert [run.status() for run in (one, two, sweep)] == ["finished", "interrupted", "interrupted"]
    assert backlog(sweep) == 0


@pytest.mark.slow
def test_the_pages_come_with_all_that_can_be_delivered(
    slurm: FakeSlurm, call: Call, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one run the record is damaged, of the oldest the place of a lock is taken; the third comes through."""
    sweep, (one, two), _ = swept(slurm, call, home)
    for run in (one, two):
        work(run, "finished", monkeypatch)
    spool = one.spool_dir / "1.jsonl"
    first, *rest = spool.read_text().splitlines(keepends=True)
    spool.write_text("".join([first, "{no json\n", *rest]))
    (sweep.spool_dir / "ship.lock").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ("ui", "--no-open", "--port", str(taken.getsockname()[1]))
        said = call(*words)
        assert said.code == 2  # the port; what is delivered comes first
        assert f"warning: {spool}" in said.err
        assert "delivering 2 runs that jobs have left" in said.err
        assert f"warning: cannot lock {sweep.spool_dir / 'ship.lock'}" in said.err
        assert (backlog(two), two.info()["mlflow_run_id"] is not None) == (0, True)
        (sweep.spool_dir / "ship.lock").rmdir()
        assert "delivering 1 run that jobs have left" in call(*words).err
    assert backlog(sweep) == 0


def test_a_store_that_is_away_is_said_once(
    slurm: FakeSlurm,
    call: Call,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The pages come up all the same."""
    _, cells, _ = swept(slurm, call, home, AWAY, "tracking.wait_s=0")
    for run in cells:
        work(run, "finished", monkeypatch, "http://127.0.0.1:9")
    capsys.readouterr()
    deliver_launched(home / "runs")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "delivering 3 runs that jobs have left"
    (warning,) = [line for line in lines if line.startswith("warning: no tracking server")]
    assert warning.endswith("; racelab sync tries again")


def test_what_runs_wait_for_or_need_no_store_is_left_alone(
    slurm: FakeSlurm,
    call: Call,
    home: Path,
    make_run: Callable[..., RunFolder],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Jobs that wait, and a run that was started here and has not been delivered: `racelab sync` is for that."""
    swept(slurm, call, home)
    here = make_run(overrides=())
    assert backlog(here) > 0
    capsys.readouterr()
    deliver_launched(home / "runs")
    assert capsys.readouterr().err == ""
    assert not (home / "runs" / "mlflow.db").exists()


def test_a_run_of_jobs_that_died_is_closed_where_nothing_is_tracked(
    slurm: FakeSlurm, call: Call, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (one, two), _ = swept(slurm, call, home, "tracking=none")
    work(one, "running", monkeypatch)
    old = time.time() - 1000
    os.utime(one.path / "heartbeat", (old, old))
    assert one.status() == "stale"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    done: Any = call("sync")
    assert done.code == 4
    assert (one.status(), two.status()) == ("interrupted", "queued")
