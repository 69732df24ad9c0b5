"""How tasks stand: real launch folders and runs, and the scheduler's own commands, asked of a cluster in a file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from racelab.experiments.errors import RunFolderError, UnreachableError
from racelab.sweeps.slurm.model import After, Assignment, Task
from racelab.sweeps.slurm.scheduler import Scheduler
from racelab.sweeps.slurm.status import TaskStatus, owners, survey

from .fake_slurm import FakeSlurm
from .launches import make_batch
from .world import Launched, launched, work


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm.install(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs of mine"


def tools(slurm: FakeSlurm) -> list[str]:
    """Which of them were called since the last time."""
    called = [words[0] for words in slurm.calls()]
    slurm.forget_calls()
    return called


def look(*launches: Launched, since: datetime | None = None) -> list[TaskStatus]:
    return survey([launch.folder for launch in launches], Scheduler(), since)


def states(*launches: Launched) -> list[str]:
    return [status.state for status in look(*launches)]


def utc(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S}"


def test_an_array_in_all_its_states(slurm: FakeSlurm, root: Path) -> None:
    """Six cells: one running, one that finished and squeue has forgotten, one failed, three waiting as a whole."""
    sweep = launched(root, runs=6)
    sweep.submit(slurm.add("12", name=sweep.name(), tasks=6, reason="JobArrayTaskLimit"))
    began = "2026-01-02T03:05:00"
    slurm.set("12_0", state="RUNNING", nodes="node3", start=began, reason="None", restarts=1)
    slurm.set("12_1", state="COMPLETED", nodes="node1", start=began, end="2026-01-02T03:09:00", queue=False)
    slurm.set("12_2", state="FAILED", nodes="node1", start=began, end="2026-01-02T03:09:00", exit="1:0")
    with sweep.run(0).lock():
        work(sweep.run(0), steps=4, reward=0.25)
        work(sweep.run(1), steps=40, reward=0.75, status="finished")
        sweep.end("finished", 1, step=40)
        work(sweep.run(2), steps=3, status="failed")
        sweep.end("failed", 2, reason="the loss is not finite", exit_code=1, step=3)
        running, finished, failed, *waiting = look(sweep)

    assert tools(slurm) == ["squeue", "sacct"]
    assert (running.state, running.live, running.reason) == ("running", True, "")
    assert (running.run_id, running.title, running.path) == ("run-0", "race-s0", f"{root}/run-0")
    assert (running.launch, running.batch, running.index, running.number) == (sweep.launch.uid, "cells", 0, 1)
    assert (running.job_id, running.slurm_state, running.node) == ("12_0", "RUNNING", "node3")
    assert (running.attempt, running.restarts, running.step, running.budget) == (1, 1, 4, 40)
    assert running.eta_s == 360.0  # 10 s an update, 36 left
    assert (running.metric, running.value) == ("train/reward/mean", 0.25)
    assert running.ended == ""

    assert (finished.state, finished.live, finished.slurm_state) == ("finished", False, "COMPLETED")
    assert (finished.step, finished.value, finished.eta_s, finished.mend) == (40, 0.75, None, "")

    assert (failed.state, failed.live, failed.reason) == ("failed", False, "the loss is not finite")
    assert failed.mend == "racelab logs run-2 shows why; racelab resume run-2"

    assert [status.job_id for status in waiting] == ["12_3", "12_4", "12_5"]
    for status in waiting:
        assert (status.state, status.live) == ("pending", True)
        assert status.reason == "launcher.max_parallel tasks are running (JobArrayTaskLimit)"
        assert (status.attempt, status.step, status.value, status.node) == (None, None, None, "")


def test_an_array_that_was_cancelled_while_it_waited(slurm: FakeSlurm, root: Path) -> None:
    """Slurm keeps no trace of a task that is cancelled alone, and one record of those cancelled together."""
    sweep = launched(root, runs=3)
    sweep.submit(slurm.add("12", name=sweep.name(), tasks=3, reason="Priority"))
    assert states(sweep) == ["pending"] * 3
    Scheduler().cancel(["12_2"])
    assert states(sweep) == ["pending", "pending", "cancelled"]
    Scheduler().cancel(["12"])
    assert states(sweep) == ["cancelled"] * 3
    slurm.set("12", queue=False)
    assert states(sweep) == ["cancelled"] * 3


def test_slurms_expected_start_and_a_waiting_job_without_one(slurm: FakeSlurm, root: Path) -> None:
    one = launched(root)
    soon = datetime.now(UTC) + timedelta(hours=2)
    one.submit(slurm.add("12", name=one.name(), reason="Resources", start=utc(soon)))
    (status,) = look(one)
    assert (status.state, status.reason) == ("pending", "waits for free nodes (Resources)")
    assert status.eta_s == pytest.approx(7200, abs=60)
    slurm.set("12", start="")
    (status,) = look(one)
    assert status.eta_s is None


def test_a_requeued_job_and_one_whose_node_is_lost(slurm: FakeSlurm, root: Path) -> None:
    """Slurm knows both, and neither is over. Without a requeue the node's loss is the end."""
    one = launched(root)
    one.submit(slurm.add("12", name=one.name(), reason="BeginTime", restarts=1))
    one.end("requeued", reason="preempted", step=7)
    (status,) = look(one)
    assert (status.state, status.live, status.restarts) == ("requeued", True, 1)
    assert status.reason == "preempted; may not start yet (BeginTime)"

    lost_at = datetime.now(UTC) - timedelta(seconds=20)
    lost = {"state": "NODE_FAIL", "nodes": "node1", "start": "2026-01-02T03:05:00", "end": utc(lost_at)}
    slurm.set("12", **lost)
    (status,) = look(one)
    assert (status.state, status.live) == ("node_fail", True)
    slurm.set("12", queue=False)
    (status,) = look(one)
    assert (status.state, status.live) == ("node_fail", False)

    stays = launched(root / "other", make_batch("launcher.requeue=false"))
    stays.submit(slurm.add("13", name=stays.name(), **lost))
    (status,) = look(stays)
    assert (status.state, status.live, status.mend) == ("node_fail", False, "racelab resume run-0")


def test_success_and_failure_without_accounting(slurm: FakeSlurm, root: Path) -> None:
    """squeue has forgotten the jobs, sacct has nothing: the run, the job's word and the folder decide."""
    slurm.setting(accounting=False)
    sweep = launched(root, runs=4)
    sweep.submit("12")
    work(sweep.run(0), 40, status="finished")
    sweep.end("failed", 1, reason="no memory", exit_code=1)
    work(sweep.run(2), 3, status="interrupted")
    sweep.end("stopped", 2, step=3)
    finished, failed, stopped, silent = look(sweep)
    assert [s.state for s in (finished, failed, stopped, silent)] == [
        "finished",
        "failed",
        "interrupted",
        "lost",
    ]
    assert failed.reason == "no memory"
    assert stopped.reason == "asked to stop, after step 3"
    assert (
        silent.reason
        == "Slurm does not know job 12_3 any more and keeps no accounts: it ended without a word"
    )
    assert not any(s.live for s in (finished, failed, stopped, silent))
    assert len(tools(slurm)) <= 3


def test_a_job_that_the_controller_lost(slurm: FakeSlurm, root: Path) -> None:
    """Its state was lost with the cluster: accounting calls it running for ever."""
    one = launched(root)
    running = {"state": "RUNNING", "nodes": "node1", "start": "2026-01-02T03:05:00"}
    one.submit(slurm.add("12", name=one.name(), queue=False, **running))
    (status,) = look(one)
    assert (status.state, status.live) == ("lost", False)
    assert status.reason.startswith("accounting says RUNNING, but the controller does not know job 12")


def test_a_job_id_that_now_belongs_to_another_job(slurm: FakeSlurm, root: Path) -> None:
    """A cluster that lost its state counts from 1 again: the name tells whose job it is."""
    one = launched(root)
    one.submit(slurm.add("12", name="demo.20270101T000000-ffffff.cells.1", state="RUNNING", nodes="node1"))
    (status,) = look(one)
    assert (status.state, status.slurm_state) == ("lost", "")


def test_a_submitter_that_died(slurm: FakeSlurm, root: Path) -> None:
    """Before its first sbatch; between the intent and sbatch; and after sbatch, when the job is found by its name."""
    one = launched(root)
    (status,) = look(one)
    assert (status.state, status.live, status.number, status.job_id) == ("unsubmitted", True, 0, "")

    one.submit("", submitted="")
    (status,) = look(one)
    assert (status.state, status.live, status.number) == ("unsubmitted", True, 1)
    assert status.reason == "its submitter died before Slurm had it"

    slurm.add("12", name=one.name(), reason="Priority")
    (status,) = look(one)
    assert (status.state, status.job_id, status.slurm_state) == ("pending", "12", "PENDING")

    slurm.set("12", queue=False, record=False)  # long over, and forgotten
    one.end("failed", reason="no memory")
    (status,) = look(one)
    assert (status.state, status.job_id, status.reason) == ("failed", "12", "no memory")


def test_the_word_of_a_replaced_submission_is_no_word_of_the_newest(slurm: FakeSlurm, root: Path) -> None:
    one = launched(root)
    one.submit("12")
    one.end("failed", reason="no memory")
    one.submit("", number=2, submitted="")
    (status,) = look(one)
    assert (status.state, status.number, status.job_id) == ("unsubmitted", 2, "")
    one.submit(slurm.add("15", name=one.name(number=2), state="RUNNING", nodes="node1"), number=2)
    (status,) = look(one)
    assert (status.state, status.job_id) == ("running", "15")


def test_while_a_live_process_submits(slurm: FakeSlurm, root: Path) -> None:
    """The lock tells: it goes away with its process."""
    one = launched(root)
    holder = (
        "import sys, pathlib; from racelab.sweeps.slurm.folder import LaunchFolder\n"
        "with LaunchFolder(pathlib.Path(sys.argv[1])).submitting() as mine: print(mine, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(one.folder.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert states(one) == ["submitting"]
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert states(one) == ["unsubmitted"]


def test_refused_and_cancelled_before_sbatch(slurm: FakeSlurm, root: Path) -> None:
    one = launched(root)
    one.submit("", submitted="", error="sbatch refuses it: invalid partition specified: nope")
    (status,) = look(one)
    assert (status.state, status.live) == ("refused", False)
    assert status.reason == "sbatch refuses it: invalid partition specified: nope"
    one.folder.cancel("cells", 0)
    assert states(one) == ["cancelled"]


def test_a_run_that_a_later_launch_has(slurm: FakeSlurm, root: Path) -> None:
    """Its old job may even still wait: it would find that the run is not its own."""
    first = launched(root, uid="20260101T000000-aaaaaa")
    first.submit(slurm.add("12", name=first.name(), reason="Priority"))
    launched(root, make_batch(tasks=[Task("run", "other", title="o")]), uid="20260102T000000-bbbbbb")
    first.run().update(launch=Assignment("20260102T000000-bbbbbb", "cells", 0, 1).to_json())
    (status,) = look(first)
    assert (status.state, status.live, status.slurm_state) == ("superseded", False, "PENDING")
    assert status.leftover
    first.run().update(status="finished")
    assert states(first) == ["superseded"]


def test_a_graph_says_what_a_stage_waits_for(slurm: FakeSlurm, root: Path) -> None:
    train = make_batch(stage="train")
    command = Task("command", words=("show", "run-0"), title="eval")
    evaluate = make_batch(stage="eval", tasks=[command], after=[After("train", "ok")])
    report = make_batch(stage="report", tasks=[command], after=[After("train", "any"), After("eval", "any")])
    graph = launched(root, train, evaluate, report)
    for number, job in enumerate(("12", "13", "14")):
        graph.submit(slurm.add(job, name=graph.name(number), reason="Dependency"), batch=number)
    slurm.set("12", state="RUNNING", nodes="node1", reason="None", start="2026-01-02T03:05:00")
    running, evaluation, reporting = look(graph)
    assert running.state == "running"
    assert (evaluation.state, evaluation.reason) == ("pending", "waits for train (Dependency)")
    assert (reporting.state, reporting.reason) == ("pending", "waits for train, eval (Dependency)")
    assert (evaluation.run_id, evaluation.path) == ("", "")
    assert evaluation.name == f"{graph.launch.uid}:eval"

    # train fails: Slurm cancels eval, which could never run, and starts the report
    graph.end("failed", reason="no memory", exit_code=1)
    over = "2026-01-02T03:09:00"
    slurm.set("12", state="FAILED", exit="1:0", end=over)
    slurm.set("13", state="CANCELLED", reason="DependencyNeverSatisfied", end=over)
    slurm.set("14", state="RUNNING", nodes="node4", reason="None", start=over)
    for known in (True, False):
        slurm.set("13", queue=known, reason="DependencyNeverSatisfied" if known else "None")
        failed, never, reporting = look(graph)
        assert (failed.state, reporting.state) == ("failed", "running")
        assert (never.state, never.reason) == ("cancelled", "never started: train did not end well")
        assert never.mend == f"racelab resume {graph.launch.uid}"

    log = graph.folder.path / "log" / "report.14.0.out"
    log.write_text("a table\n")
    assert look(graph)[2].log == str(log)


def test_a_dependency_that_can_never_be_satisfied(slurm: FakeSlurm, root: Path) -> None:
    """On a cluster that leaves such a job in the queue."""
    command = Task("command", words=("runs",), title="eval")
    graph = launched(root, make_batch(stage="eval", tasks=[command]))
    graph.submit(slurm.add("13", name=graph.name(), reason="DependencyNeverSatisfied"))
    (status,) = look(graph)
    assert (status.state, status.live) == ("blocked", True)
    assert (
        status.reason == "what it waits for did not end well, so it can never run (DependencyNeverSatisfied)"
    )
    uid = graph.launch.uid
    assert status.mend == f"racelab cancel {uid}:eval; racelab resume {uid}"


def test_the_newest_log_of_a_run(slurm: FakeSlurm, root: Path) -> None:
    one = launched(root)
    one.submit(slurm.add("12", name=one.name(), state="RUNNING", nodes="node1"))
    assert look(one)[0].log == ""
    for age, name in enumerate(("12-r0.log", "12-r1.log")):
        (one.run().path / "attempts" / name).write_text("x")
        os.utime(one.run().path / "attempts" / name, (age, age))
    assert look(one)[0].log == str(one.run().path / "attempts" / "12-r1.log")


def test_a_run_whose_folder_is_gone(slurm: FakeSlurm, root: Path) -> None:
    one = launched(root)
    one.submit("12")
    (one.root / "run-0" / "run.json").unlink()
    assert states(one) == ["lost"]
    slurm.add("12", name=one.name(), state="RUNNING", nodes="node1")
    (status,) = look(one)
    assert (status.state, status.budget) == ("running", None)


def test_one_table_for_all_launches_in_the_order_of_launching(slurm: FakeSlurm, root: Path) -> None:
    first = launched(root / "a", runs=2, uid="20260101T000000-aaaaaa")
    second = launched(root / "b", uid="20260102T000000-bbbbbb")
    ended = {"nodes": "node1", "start": "2026-01-01T03:05:00", "end": "2026-01-01T03:09:00", "queue": False}
    first.submit(slurm.add("12", name=first.name(), tasks=2, state="TIMEOUT", **ended))
    second.submit(slurm.add("20", name=second.name(), state="RUNNING", nodes="node1"))
    assert [(s.launch[-6:], s.index, s.state) for s in look(first, second)] == [
        ("aaaaaa", 0, "timeout"), ("aaaaaa", 1, "timeout"), ("bbbbbb", 0, "running"),
    ]  # fmt: skip
    assert tools(slurm) == ["squeue", "sacct"]
    assert survey([], Scheduler()) == []
    assert tools(slurm) == []


def test_launches_that_ended_long_ago_are_not_looked_at(slurm: FakeSlurm, root: Path) -> None:
    """Unless one has a job after all: its task was to go on, and waits for days."""
    old = launched(root, runs=2, uid="20260101T000000-aaaaaa")
    old.submit("12")
    old.end("finished", 0)
    past = (time.time() - 90_000,) * 2

    def age() -> None:
        for name in ("ends", "cancelled", "submissions.json"):
            os.utime(old.folder.path / name, past)

    day = datetime.now(UTC) - timedelta(hours=24)
    age()
    assert len(look(old, since=day)) == 2  # one task has not said how it ended

    old.end("requeued", 1, reason="preempted")
    age()
    tools(slurm)
    assert look(old, since=day) == []
    assert tools(slurm) == ["squeue"]  # accounting need not remember it

    slurm.add("12", name=old.name(), tasks=2, reason="Priority", restarts=1)
    slurm.set("12_0", state="COMPLETED", nodes="node1", start="2026-01-01T01:00:00", queue=False)
    assert [s.state for s in look(old, since=day)] == ["finished", "requeued"]
    assert len(tools(slurm)) <= 3
    assert len(look(old)) == 2


def test_owners_are_the_live_tasks_that_runs_are_assigned_to(slurm: FakeSlurm, root: Path) -> None:
    sweep = launched(root, runs=3)
    sweep.submit(slurm.add("12", name=sweep.name(), tasks=3, reason="Priority"))
    slurm.set("12_0", state="RUNNING", nodes="node1", start="2026-01-02T03:05:00")
    slurm.set("12_1", state="FAILED", nodes="node1", start="2026-01-02T03:05:00", exit="1:0")
    launched(root, make_batch(tasks=[Task("run", "other", title="o")]), uid="20250101T000000-cccccc")
    sweep.run(2).update(launch=Assignment("20250101T000000-cccccc", "cells", 0, 1).to_json())
    found = owners(root, ["run-0", "run-1", "run-2", "none"], Scheduler())
    assert {run: status.job_id for run, status in found.items()} == {"run-0": "12_0"}
    tools(slurm)
    for index in (1, 2):
        sweep.run(index).update(launch=None)
    assert owners(root, ["run-1", "run-2"], Scheduler()) == {}
    assert tools(slurm) == []  # no launch of theirs is there


def test_jobs_of_another_user(slurm: FakeSlurm, root: Path) -> None:
    """In a folder that several people launch from."""
    theirs = launched(root)
    theirs.submit(slurm.add("12", name=theirs.name(), reason="Priority", mine=False))
    (status,) = look(theirs)
    assert (status.state, status.live) == ("pending", True)
    assert len(tools(slurm)) <= 3


SEALED = """
import os, sys
from pathlib import Path
from racelab.sweeps.slurm.folder import LaunchFolder, all_launches
from racelab.sweeps.slurm.scheduler import Scheduler
from racelab.sweeps.slurm.status import owners
from racelab.sweeps.slurm.targets import find
os.chdir(sys.argv[1])
if os.getuid() == 0:
    os.setuid(65534)
root, closed = Path("."), LaunchFolder(Path(".launches") / sys.argv[2])
assert not os.access(closed.path, os.X_OK)
print([folder.uid for folder in all_launches(root)])
print(find(root, "run-0").launches, owners(root, ["run-0"], Scheduler()), closed.is_there())
"""


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A folder that every user may enter; pytest's are closed."""
    with TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place) / "runs"


def test_a_launch_that_another_user_has_closed_is_passed_over(open_root: Path) -> None:
    """By a process without root's rights; the run that the closed launch has can be read."""
    root = open_root
    closed = launched(root, uid="20260101T000000-aaaaaa")
    launched(root, make_batch(tasks=[Task("run", "other", title="o")]), uid="20260102T000000-bbbbbb")
    for run in root.iterdir():
        run.chmod(0o755)
    for file in root.rglob("*.json"):
        file.chmod(0o644)
    closed.folder.path.chmod(0)
    try:
        words = [sys.executable, "-c", SEALED, str(root), closed.launch.uid]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    finally:
        closed.folder.path.chmod(0o755)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["['20260102T000000-bbbbbb']", "() {} True"]


def test_a_damaged_list_of_submissions_and_a_folder_that_cannot_be_written(root: Path) -> None:
    one = launched(root)
    (one.folder.path / "submissions.json").write_text('[{"batch": "cells", "numero": 1}]')
    with pytest.raises(RunFolderError, match=r"submissions\.json is damaged .*numero"):
        one.folder.submissions()
    (one.folder.path / "submit.lock").mkdir()
    with pytest.raises(RunFolderError, match="cannot write in "), one.folder.submitting():
        pass


def test_a_scheduler_that_does_not_answer_is_an_error(slurm: FakeSlurm, root: Path) -> None:
    one = launched(root)
    one.submit("12")
    slurm.setting(unreachable=True)
    with pytest.raises(UnreachableError, match="Unable to contact slurm controller"):
        look(one)


def test_a_thousand_tasks_take_no_more_calls_than_one(slurm: FakeSlurm, root: Path) -> None:
    sweep = launched(root, runs=1000)
    sweep.submit(slurm.add("12", name=sweep.name(), tasks=1000, reason="Priority"))
    assert states(sweep) == ["pending"] * 1000
    assert tools(slurm) == ["squeue"]
