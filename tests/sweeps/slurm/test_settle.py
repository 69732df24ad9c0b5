"""What jobs could not write down themselves: the ends of their runs, and the record of the sweep."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import SpoolWriter, last_end
from racelab.sweeps.cells import Cell, Spec, make_cells
from racelab.sweeps.run import Plan, make_plan
from racelab.sweeps.slurm.folder import LaunchFolder
from racelab.sweeps.slurm.model import Assignment, Submission, job_name
from racelab.sweeps.slurm.runs import make_cells as make_folders
from racelab.sweeps.slurm.runs import plan_launch, todo
from racelab.sweeps.slurm.scheduler import Scheduler
from racelab.sweeps.slurm.settle import settle
from racelab.sweeps.slurm.status import survey
from racelab.sweeps.slurm.submit import assignments

from .fake_slurm import FakeSlurm
from .world import Launched, launched


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    return FakeSlurm.install(tmp_path / "slurm", monkeypatch)


def submit(slurm: FakeSlurm, root: Path, runs: int) -> Launched:
    made = launched(root, runs=runs)
    made.submit("12")
    slurm.add("12", name=made.name(), tasks=runs)
    return made


def look(*folders: LaunchFolder) -> list[str]:
    return settle(folders, survey(folders, Scheduler()))


def stands(run: RunFolder) -> tuple[str, str]:
    return run.status(), run.info()["reason"]


def begin(run: RunFolder, step: int) -> None:
    """An attempt that is at work."""
    attempt = run.begin_attempt()
    writer = SpoolWriter(run.spool_dir / f"{attempt}.jsonl")
    writer.append([{"kind": "metrics", "step": step, "values": {"x": 1.0}}])


def test_every_run_that_no_job_has_any_more_gets_its_end(slurm: FakeSlurm, tmp_path: Path) -> None:
    """In order: failed before its start, cancelled, lost, waiting, at work, finished."""
    made = submit(slurm, tmp_path / "runs", 6)
    start = {"nodes": "node1", "start": "2026-11-30T08:00:00"}
    slurm.set("12_0", state="FAILED", exit="1:0", **start)
    slurm.set("12_1", state="CANCELLED", by="0", **start)
    slurm.set("12_2", queue=False, record=False)
    slurm.set("12_4", state="RUNNING", **start)
    slurm.set("12_5", state="COMPLETED", **start)
    slurm.setting(accounting=False)
    made.run(5).update(status="finished")
    with made.run(4).lock():
        begin(made.run(4), 3)
        assert look(made.folder) == []
        assert [made.run(i).status() for i in range(6)] == [
            "failed",
            "interrupted",
            "failed",
            "queued",
            "running",
            "finished",
        ]
    assert stands(made.run(0)) == (
        "failed",
        "its job failed, exit code 1, without a word of its own",
    )
    assert stands(made.run(1)) == ("interrupted", "by scancel or the site")
    assert made.run(2).info()["reason"].startswith("Slurm does not know job 12_2 any more")


def test_a_refused_launch_leaves_no_run_waiting(slurm: FakeSlurm, tmp_path: Path) -> None:
    made = launched(tmp_path / "runs")
    made.folder.record(Submission("cells", 1, error="no such account"))
    look(made.folder)
    assert stands(made.run()) == ("failed", "no such account")


def test_a_run_that_was_killed_at_work_gets_an_end_record(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Without it MLflow would show it running for ever."""
    made = submit(slurm, tmp_path / "runs", 2)
    with made.run(0).lock():
        begin(made.run(0), 7)
    slurm.set(
        "12_0", state="OUT_OF_MEMORY", nodes="node1", start="2026-11-30T08:00:00", end="2026-11-30T08:01:00"
    )
    look(made.folder)
    assert stands(made.run(0)) == ("failed", "out of memory")
    end = last_end(made.run(0))
    assert end is not None
    assert (end["status"], end["step"], end["reason"]) == ("failed", 7, "out of memory")
    look(made.folder)
    lines = (made.run(0).spool_dir / "1.jsonl").read_text().splitlines()
    assert sum('"end"' in line for line in lines) == 1


def test_a_job_that_slurm_may_requeue_has_not_ended(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Its node has just failed: the run looks dead, and will go on."""
    made = submit(slurm, tmp_path / "runs", 2)
    with made.run(0).lock():
        begin(made.run(0), 7)
    slurm.set("12_0", state="NODE_FAIL", nodes="node1", start="2026-11-30T08:00:00")
    assert [status.live for status in survey([made.folder], Scheduler())] == [True, True]
    look(made.folder)
    assert made.run(0).status() == "stale"


def test_a_run_that_has_gone_to_another_task_meanwhile_is_left_alone(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    """Between the look and the writing: one was launched anew, one was taken by hand."""
    made = submit(slurm, tmp_path / "runs", 3)
    slurm.set("12", state="CANCELLED", nodes="node1")
    statuses = survey([made.folder], Scheduler())
    made.run(0).update(launch=Assignment("20270101T000000-ffffff", "cells", 0, 1).to_json())
    made.run(1).update(launch=None)
    settle([made.folder], statuses)
    assert [made.run(i).status() for i in range(3)] == ["queued", "queued", "interrupted"]


def test_a_damaged_folder_is_a_line_and_keeps_nobody_else_from_their_end(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    made = submit(slurm, tmp_path / "runs", 2)
    slurm.set("12", state="CANCELLED", nodes="node1")
    (made.run(0).path / "run.json").write_text("{")
    (problem,) = dict.fromkeys(look(made.folder))
    assert "run-0/run.json is not JSON" in problem
    assert made.run(1).status() == "interrupted"


def test_the_runs_of_another_users_launch_are_left_alone(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may hide the jobs of others: what looks lost need not be."""
    made = submit(slurm, tmp_path / "runs", 2)
    slurm.set("12", queue=False, record=False)
    with monkeypatch.context() as other:
        other.setattr("os.getuid", lambda: made.folder.path.stat().st_uid + 1)
        assert look(made.folder) == []
        assert made.run().status() == "queued"
    look(made.folder)
    assert made.run().status() == "failed"


def test_a_run_that_looks_lost_but_has_just_shown_life_is_left_alone(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    made = submit(slurm, tmp_path / "runs", 2)
    slurm.set("12", queue=False, record=False)
    heartbeat = made.run().path / "heartbeat"
    heartbeat.touch()
    look(made.folder)
    assert made.run().status() == "queued"
    os.utime(heartbeat, (0, 0))
    look(made.folder)
    assert made.run().status() == "failed"


def test_a_run_that_was_removed_is_no_problem(slurm: FakeSlurm, tmp_path: Path) -> None:
    made = submit(slurm, tmp_path / "runs", 2)
    slurm.set("12", state="CANCELLED", nodes="node1")
    shutil.rmtree(made.run(0).path)
    assert look(made.folder) == []
    assert made.run(1).status() == "interrupted"


def test_why_it_failed_is_the_same_at_the_second_look(slurm: FakeSlurm, tmp_path: Path) -> None:
    made = submit(slurm, tmp_path / "runs", 2)
    slurm.set("12_0", state="FAILED", exit="1:0", nodes="node1", start="2026-11-30T08:00:00")
    first, _ = survey([made.folder], Scheduler())
    look(made.folder)
    second, _ = survey([made.folder], Scheduler())
    assert made.run().status() == "failed"
    assert second.reason == first.reason == "its job failed, exit code 1, without a word of its own"


# --- the record of a sweep ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    words = ("task=frozenlake", "tracking=none", "launcher=slurm")
    return make_cells([Spec("a", seed, words) for seed in (0, 1)])


def swept(slurm: FakeSlurm, root: Path, cells: list[Cell]) -> tuple[Plan, LaunchFolder]:
    """A sweep of two cells as array 12."""
    plan = make_plan("grid", "racelab sweep grid.yaml", root, cells, fresh=False)
    left = todo(plan, None)
    launch = plan_launch(plan, left)
    make_folders(plan, left.cells, assignments(launch))
    folder = LaunchFolder.create(launch)
    folder.record(Submission("cells", 1, "12"))
    slurm.add("12", name=job_name(launch, launch.batches[0], 1), tasks=2)
    return plan, folder


@pytest.mark.parametrize("named", [True, False])
def test_a_sweep_gets_its_record_once_its_last_job_has_ended(
    slurm: FakeSlurm, tmp_path: Path, cells: list[Cell], named: bool
) -> None:
    """One cell finishes, the other's job dies without a word; whether the launch or the runs name the sweep."""
    root = tmp_path / "runs"
    plan, folder = swept(slurm, root, cells)
    if not named:
        record = (folder.path / "launch.json").read_text()
        (folder.path / "launch.json").write_text(record.replace(f'"sweep": "{plan.run_id}"', '"sweep": ""'))
        assert folder.launch().sweep == ""
    first, second = (RunFolder.open(root / run_id) for run_id in plan.run_ids)
    sweep = RunFolder.open(root / plan.run_id)
    first.update(status="finished")
    slurm.set("12_0", state="COMPLETED", nodes="node1")
    look(folder)
    assert sweep.status() == "queued"
    second.update(status="interrupted")
    slurm.set("12_1", restarts=1, reason="BeginTime")
    look(folder)  # preempted: all have ended, as it seems, but this one goes on
    assert sweep.status() == "queued"
    second.update(status="queued")
    slurm.set("12_1", state="FAILED", exit="1:0", nodes="node1", start="2026-11-30T08:00:00")
    look(folder)
    assert second.status() == "failed"
    assert stands(sweep) == ("failed", f"not finished: {second.run_id}")
    look(folder)
    assert len(sweep.attempts()) == 1
