"""Cancelling: the mark before scancel, arrays as a whole, and who writes down how the runs ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from racelab.experiments.errors import UnreachableError
from racelab.experiments.fsio import write_json_atomic
from racelab.experiments.tracking.spool import SpoolWriter, last_end
from racelab.sweeps.slurm.cancel import CANCELLED, cancel, downstream, with_downstream
from racelab.sweeps.slurm.folder import intent
from racelab.sweeps.slurm.model import After, Batch, Task
from racelab.sweeps.slurm.scheduler import Scheduler
from racelab.sweeps.slurm.status import TaskStatus
from racelab.sweeps.slurm.submit import recover
from racelab.sweeps.slurm.targets import Target, find, with_earlier

from .fake_slurm import FakeSlurm
from .hooks import hook, submitted
from .launches import make_batch, make_launch
from .world import Launched, launched

LOOK = Task("command", words=("runs",), title="look")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    return FakeSlurm.install(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def sweep(slurm: FakeSlurm, tmp_path: Path) -> Launched:
    """Three cells as array 12, all waiting."""
    made = launched(tmp_path / "runs of mine", runs=3)
    made.submit("12")
    slurm.add("12", name=made.name(), tasks=3)
    return made


def stop(made: Launched, *runs: str) -> list[TaskStatus]:
    """Cancels these runs, or all of the launch."""
    scheduler = Scheduler()
    target = Target(None, (made.folder,), runs=frozenset(runs))
    return cancel(target, target.tasks(scheduler)[0], scheduler)


def marks(made: Launched) -> list[str]:
    return sorted(path.name for path in (made.folder.path / "cancelled").iterdir())


def stands(made: Launched, *indices: int) -> list[str]:
    return [made.run(index).status() for index in indices]


def test_the_mark_is_there_before_scancel_is_called(
    slurm: FakeSlurm, sweep: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a job that is stopped might requeue itself. The runs' ends come after it."""
    then = tmp_path / "then"
    folder = sweep.folder.path / "cancelled"
    status = f"grep -ho queued '{sweep.root}'/run-*/run.json"
    hook(slurm, "scancel", monkeypatch, before=f"ls '{folder}' > '{then}'; {status} >> '{then}'")
    done = stop(sweep)
    assert [s.run_id for s in done] == ["run-0", "run-1", "run-2"]
    assert then.read_text().split() == ["cells.0", "cells.1", "cells.2", *["queued"] * 3]
    assert slurm.calls("scancel") == [["12"]]
    assert stands(sweep, 0, 1, 2) == ["interrupted"] * 3
    assert sweep.run(0).info()["reason"] == CANCELLED


def test_single_tasks_of_an_array_leave_the_others(slurm: FakeSlurm, sweep: Launched) -> None:
    stop(sweep, "run-0", "run-2")
    assert slurm.calls("scancel") == [["12_0", "12_2"]]
    assert marks(sweep) == ["cells.0", "cells.2"]
    assert slurm.job("12_1")["state"] == "PENDING"
    assert stands(sweep, 0, 1, 2) == ["interrupted", "queued", "interrupted"]


def test_of_an_array_that_has_ended_in_part_the_rest_is_named(slurm: FakeSlurm, sweep: Launched) -> None:
    sweep.run(1).update(status="finished")
    slurm.set("12_1", state="COMPLETED", nodes="node1")
    assert [s.index for s in stop(sweep)] == [0, 2]
    assert slurm.calls("scancel") == [["12_0", "12_2"]]
    assert marks(sweep) == ["cells.0", "cells.2"]
    assert stands(sweep, 1) == ["finished"]


def test_a_run_at_work_says_itself_how_it_ended(slurm: FakeSlurm, sweep: Launched) -> None:
    """Its process gets the signal, saves and writes the end."""
    slurm.set("12_0", state="RUNNING", nodes="node1", start="2026-11-30T08:00:00")
    with sweep.run(0).lock():
        sweep.run(0).begin_attempt()
        stop(sweep, "run-0")
        assert stands(sweep, 0) == ["running"]
    assert slurm.job("12_0")["state"] == "CANCELLED"


def test_a_run_whose_job_waits_to_go_on_after_its_node_died_gets_its_end(
    slurm: FakeSlurm, sweep: Launched
) -> None:
    """Nobody else will write it; with the end record MLflow hears of it too."""
    run = sweep.run(0)
    write_json_atomic(run.path / "attempts.json", [])
    with run.lock():
        attempt = run.begin_attempt()
        SpoolWriter(run.spool_dir / f"{attempt}.jsonl").append(
            [{"kind": "metrics", "step": 4, "values": {"x": 1.0}}]
        )
    assert run.status() == "stale"
    slurm.set("12_0", reason="BeginTime", restarts=1)
    stop(sweep, "run-0")
    assert (run.status(), run.info()["reason"]) == ("interrupted", CANCELLED)
    end = last_end(run)
    assert end is not None
    assert (end["step"], end["status"], end["reason"]) == (4, "interrupted", CANCELLED)


def test_a_run_that_was_taken_by_hand_meanwhile_is_left_alone(slurm: FakeSlurm, sweep: Launched) -> None:
    scheduler = Scheduler()
    target = Target(None, (sweep.folder,))
    meant, _ = target.tasks(scheduler)
    sweep.run(1).update(launch=None)
    cancel(target, meant, scheduler)
    assert stands(sweep, 0, 1, 2) == ["interrupted", "queued", "interrupted"]


def test_a_job_whose_run_was_taken_by_hand_can_be_cancelled(slurm: FakeSlurm, sweep: Launched) -> None:
    """By the launch and by the run, which no launch has any more; the run is not touched."""
    scheduler = Scheduler()
    sweep.run(1).update(launch=None)
    assert find(sweep.root, "run-1").launches == ()
    by_run, by_launch = with_earlier(find(sweep.root, "run-1")), find(sweep.root, sweep.launch.uid)
    for target in (by_run, by_launch):
        _, everything = target.tasks(scheduler)
        assert [s.run_id for s in target.leftovers(everything)] == ["run-1"]
    _, everything = by_run.tasks(scheduler)
    cancel(by_run, by_run.leftovers(everything), scheduler)
    assert slurm.calls("scancel") == [["12_1"]]
    assert stands(sweep, 0, 1, 2) == ["queued"] * 3
    _, everything = by_run.tasks(scheduler)
    assert by_run.leftovers(everything) == []


def test_nothing_live_is_nothing_done(slurm: FakeSlurm, sweep: Launched) -> None:
    slurm.set("12", state="CANCELLED")
    assert stop(sweep) == []
    assert slurm.calls("scancel") == []
    assert marks(sweep) == []
    assert stands(sweep, 0) == ["queued"]  # `settle` closes it


def test_without_an_answer_the_marks_stay_and_cancelling_again_is_safe(
    slurm: FakeSlurm, sweep: Launched
) -> None:
    scheduler = Scheduler()
    target = Target(None, (sweep.folder,))
    meant, _ = target.tasks(scheduler)
    slurm.setting(unreachable=True)
    with pytest.raises(UnreachableError):
        cancel(target, meant, scheduler)
    assert marks(sweep) == ["cells.0", "cells.1", "cells.2"]
    assert stands(sweep, 0, 1, 2) == ["queued"] * 3
    slurm.setting(unreachable=False)
    assert len(stop(sweep)) == 3
    assert slurm.job("12_0")["state"] == "CANCELLED"


def test_what_was_never_submitted_is_not_submitted_any_more(slurm: FakeSlurm, tmp_path: Path) -> None:
    made = launched(tmp_path / "runs", runs=2)
    made.folder.record(intent(made.launch.batches[0], 1))
    assert [s.state for s in stop(made)] == ["unsubmitted"] * 2
    assert slurm.calls("scancel") == []
    assert stands(made, 0, 1) == ["interrupted"] * 2
    recover(made.folder, Scheduler())
    assert submitted(slurm) == 0
    assert [s.state for s in Target(None, (made.folder,)).tasks(Scheduler())[0]] == ["cancelled"] * 2


def test_an_intent_whose_job_is_found_by_its_name_is_cancelled_there(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    made = launched(tmp_path / "runs")
    made.folder.record(intent(made.launch.batches[0], 1))
    slurm.add("7", name=made.name())
    assert [s.job_id for s in stop(made)] == ["7"]
    assert slurm.job("7")["state"] == "CANCELLED"


def stage(name: str, *after: After) -> Batch:
    return make_batch(tasks=(LOOK,), stage=name, after=after)


def test_downstream_is_what_waits_directly_or_not(tmp_path: Path) -> None:
    """a <- b (ok) <- d (any); c waits for nothing."""
    batches = [stage("a"), stage("b", After("a", "ok")), stage("c"), stage("d", After("b", "any"))]
    launch = make_launch(tmp_path, *batches)
    assert downstream(launch, ["a"]) == ["b", "d"]
    assert downstream(launch, ["b", "c"]) == ["d"]
    assert downstream(launch, ["d"]) == []


def graph(slurm: FakeSlurm, root: Path) -> Launched:
    """run <- eval (ok) <- report (any), as jobs 12 (array), 13, 14."""
    made = launched(
        root, make_batch(runs=2, stage="run"), stage("eval", After("run", "ok")), stage("report", After("eval", "any"))
    )  # fmt: skip
    for number, job in enumerate(("12", "13", "14")):
        made.submit(job, batch=number)
        slurm.add(job, name=made.name(number), tasks=0 if number else 2)
    return made


@pytest.mark.parametrize(
    ("named", "ids"),
    [("run-0", ["12_0", "13", "14"]), ("UID:eval", ["13", "14"]), ("UID:report", ["14"]), ("UID", ["12", "13", "14"])],
)  # fmt: skip
def test_with_downstream_what_waits_goes_too(
    slurm: FakeSlurm, tmp_path: Path, named: str, ids: Sequence[str]
) -> None:
    made = graph(slurm, tmp_path / "runs")
    scheduler = Scheduler()
    target = find(made.root, named.replace("UID", made.launch.uid))
    meant, everything = target.tasks(scheduler)
    done = cancel(target, with_downstream(target, meant, everything), scheduler)
    assert slurm.calls("scancel") == [list(ids)]
    assert len(done) == len({(status.batch, status.index) for status in done})
