"""`racelab jobs`: launches on disk, a cluster in a file, and what people and programs read."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from racelab.cli import jobs_view
from racelab.experiments.fsio import write_json_atomic
from racelab.sweeps.slurm.folder import new_uid
from racelab.sweeps.slurm.model import After, Assignment, Task
from racelab.sweeps.slurm.status import TaskStatus

from ..sweeps.slurm.fake_slurm import FakeSlurm
from ..sweeps.slurm.launches import UID, make_batch
from ..sweeps.slurm.world import Launched, launched, work, write_run
from .conftest import Result

Call = Callable[..., Result]
BEGAN = "2026-01-02T03:05:00"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm.install(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def runs(home: Path) -> Path:
    return home / "runs"


def now(**ago: float) -> str:
    """UTC, as squeue prints it."""
    return f"{datetime.now(UTC) - timedelta(**ago):%Y-%m-%dT%H:%M:%S}"


def running(node: str = "node1") -> dict[str, Any]:
    return {"state": "RUNNING", "nodes": node, "start": BEGAN, "reason": "None"}


def over(state: str, exit_code: str = "0:0", **more: Any) -> dict[str, Any]:
    return {
        "state": state,
        "exit": exit_code,
        "nodes": "node1",
        "start": BEGAN,
        "end": now(minutes=1),
        **more,
    }


@pytest.fixture
def sweep(slurm: FakeSlurm, runs: Path) -> Iterator[Launched]:
    """Four cells: one running, one finished, one failed, one waiting."""
    made = launched(runs, runs=4, uid=new_uid())
    made.submit(slurm.add("12", name=made.name(), tasks=4, reason="Resources"))
    slurm.set("12_0", **running())
    slurm.set("12_1", **over("COMPLETED"))
    slurm.set("12_2", **over("FAILED", "1:0"))
    work(made.run(1), 40, reward=0.75, status="finished")
    made.end("finished", 1)
    work(made.run(2), 3, status="failed")
    made.end("failed", 2, reason="the loss is not finite", exit_code=1)
    with made.run(0).lock():
        work(made.run(0), 4, reward=0.25)
        yield made


def lines(text: str) -> list[list[str]]:
    """The cells of a plain table."""
    return [re.split(r" {2,}", line) for line in text.splitlines()]


# --- once ---------------------------------------------------------------------------------------------------


def test_a_line_for_every_task_and_the_mend_of_what_failed(call: Call, sweep: Launched) -> None:
    done = call("jobs")
    assert done.code == 0
    assert lines(done.out) == [
        ["run", "state", "reason", "node", "job", "attempt", "step", "ETA", "reward"],
        ["run-0 (race-s0)", "running", "-", "node1", "12_0", "1", "4/40", "6m00s", "0.250"],
        ["run-1 (race-s1)", "finished", "-", "node1", "12_1", "1", "40/40", "-", "0.750"],
        ["run-2 (race-s2)", "failed", "the loss is not finite", "node1", "12_2", "1", "3/40", "-", "0.500"],
        ["run-3 (race-s3)", "pending", "waits for free nodes (Resources)", "-", "12_3", "-", "-", "-", "-"],
    ]
    assert done.err.splitlines() == [
        "4 jobs: 1 finished, 1 running, 1 pending, 1 failed",
        "run-2 failed: racelab logs run-2 shows why; racelab resume run-2",
    ]


def test_json_has_every_fact(call: Call, sweep: Launched) -> None:
    done = call("jobs", "--json")
    assert done.err == ""
    rows = done.json()
    assert [row["state"] for row in rows] == ["running", "finished", "failed", "pending"]
    first = rows[0]
    assert set(first) == {"name", *TaskStatus.__dataclass_fields__}
    assert (first["name"], first["launch"], first["run_id"]) == ("run-0", sweep.launch.uid, "run-0")
    assert (first["job_id"], first["node"], first["step"], first["budget"]) == ("12_0", "node1", 4, 40)
    assert (first["eta_s"], first["metric"], first["value"]) == (360.0, "train/reward/mean", 0.25)


def test_a_name_restricts_to_a_launch_a_stage_or_a_run(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    command = Task("command", words=("runs",), title="report")
    report = make_batch(stage="report", tasks=[command], after=[After("cells", "any")])
    graph = launched(runs, make_batch(runs=2), report, uid="20260102T030405-aaaaaa")
    graph.submit(slurm.add("12", name=graph.name(), tasks=2, reason="Priority"))
    graph.submit(slurm.add("13", name=graph.name(1), reason="Dependency"), batch=1)
    write_run(runs / "inline", "by hand", None)

    def names(*words: str) -> list[str]:
        return [row["name"] for row in call("jobs", *words, "--json").json()]

    uid = graph.launch.uid
    assert names() == ["run-0", "run-1", f"{uid}:report"]
    assert names(uid) == names("20260102T03") == names()
    assert names(f"{uid}:report") == [f"{uid}:report"]
    assert names("run-1") == names(str(runs / "run-1")) == ["run-1"]
    unknown = call("jobs", "nothing")
    assert (unknown.code, unknown.out) == (2, "")
    assert "no run 'nothing'" in unknown.err
    by_hand = call("jobs", "inline")
    assert by_hand.code == 2
    assert "inline was not launched as a job; `racelab show inline` says how it stands" in by_hand.err


def test_what_ended_long_ago_and_what_a_later_job_replaced_is_shown_on_demand(
    call: Call, slurm: FakeSlurm, runs: Path
) -> None:
    old = launched(runs, runs=2, uid=UID)
    gone = {"start": BEGAN, "nodes": "node1", "queue": False}
    old.submit(slurm.add("12", name=old.name(), tasks=2, **gone))
    slurm.set("12_0", state="TIMEOUT", end="2026-01-02T07:05:00")
    slurm.set("12_1", state="TIMEOUT", end=now(hours=23))

    def shown(*words: str) -> list[tuple[str, str]]:
        return [(row["run_id"], row["state"]) for row in call("jobs", *words, "--json").json()]

    assert shown() == [("run-1", "timeout")]
    assert shown(UID) == [("run-0", "timeout"), ("run-1", "timeout")]
    assert shown("--all") == shown(UID)

    old.run(1).update(launch=None)  # its job is over, too
    assert shown() == []
    assert call("jobs").err == (
        "nothing is live, and nothing has ended in the last 24 hours; --all shows what was launched before\n"
    )
    assert shown("--all") == [("run-0", "timeout"), ("run-1", "superseded")]


def test_all_of_a_run_shows_the_jobs_that_it_had_before(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    first = launched(runs, uid=UID)
    first.submit(slurm.add("12", name=first.name(), **over("TIMEOUT")))
    uid = new_uid()
    again = launched(runs / "x", uid=uid)  # made elsewhere, so that the run is made once
    (runs / "x" / ".launches" / uid).rename(runs / ".launches" / uid)
    folder = replace(again.folder, path=runs / ".launches" / uid)
    record = json.loads((folder.path / "launch.json").read_text())
    write_json_atomic(folder.path / "launch.json", {**record, "root": str(runs)})
    first.run().update(launch=Assignment(uid, "cells", 0, 1).to_json())
    replace(again, folder=folder).submit(slurm.add("20", name=again.name(), **running()))

    def shown(*words: str) -> list[tuple[str, str]]:
        return [(row["job_id"], row["state"]) for row in call("jobs", *words, "--json").json()]

    assert shown("run-0") == [("20", "running")]
    assert shown("run-0", "--all") == [("12", "superseded"), ("20", "running")]


def test_nothing_was_launched(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    """The scheduler is not even asked."""
    done = call("jobs")
    assert (done.code, done.out) == (0, "")
    assert (
        done.err
        == f"nothing was launched from {runs}; a command with launcher=slurm does, or `racelab launch`\n"
    )
    assert call("jobs", "--json").json() == []
    assert slurm.calls() == []


def test_without_slurm_launches_are_an_error_and_none_are_not(
    call: Call, runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert call("jobs").code == 0
    launched(runs).submit("12")
    done = call("jobs")
    assert (done.code, done.out) == (4, "")
    assert done.err.startswith("error: squeue is not installed here; run this where Slurm's commands are")


def test_a_damaged_launch_hides_no_other(call: Call, sweep: Launched, runs: Path) -> None:
    bad = launched(runs / "x", uid="20260101T000000-aaaaaa").folder.path.rename(
        runs / ".launches" / "20260101T000000-aaaaaa"
    )
    (bad / "launch.json").write_text('{"schema": 99}')
    done = call("jobs")
    assert done.code == 0
    assert len(done.out.splitlines()) == 5
    assert "launch.json has schema 99" in done.err.splitlines()[0]


def test_another_root(call: Call, slurm: FakeSlurm, tmp_path: Path) -> None:
    """The mend can be typed as it stands."""
    root = tmp_path / "else where"
    one = launched(root, uid=new_uid())
    one.submit(slurm.add("12", name=one.name(), **over("FAILED", "3:0")))
    done = call("jobs", "--root", str(root))
    assert done.err.splitlines()[1] == (
        f"run-0 failed: racelab logs run-0 --root '{root}' shows why; racelab resume run-0 --root '{root}'"
    )


def test_a_path_to_another_root_is_enough_for_the_mend(call: Call, slurm: FakeSlurm, tmp_path: Path) -> None:
    root = tmp_path / "elsewhere"
    one = launched(root, uid=new_uid())
    one.submit(slurm.add("12", name=one.name(), **over("TIMEOUT")))
    done = call("jobs", str(root / "run-0"))
    assert done.err.splitlines()[1] == (
        f"run-0 timeout: racelab resume run-0 --root {root}, with launcher.time_min=N for a longer limit"
    )


def test_a_job_whose_run_was_taken_by_hand_is_shown_until_it_is_gone(
    call: Call, slurm: FakeSlurm, runs: Path
) -> None:
    one = launched(runs, uid=new_uid())
    one.submit(slurm.add("12", name=one.name(), reason="Priority"))
    one.run().update(launch=None)
    done = call("jobs")
    assert lines(done.out)[1][:2] == ["run-0 (race-s0)", "superseded"]
    assert done.err.splitlines() == [
        "1 job: 1 superseded",
        f"run-0 superseded: racelab cancel {one.launch.uid} removes the job",
    ]
    assert call("jobs", "--wait").code == 0  # it is no part of what is waited for
    slurm.set("12", state="CANCELLED")
    assert call("jobs", "--json").json() == []


def test_a_run_that_was_removed_is_not_told_of_for_ever(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    old = launched(runs, runs=2, uid=UID)
    old.submit("12")
    shutil.rmtree(old.run(0).path)
    done = call("jobs")
    assert [line[0] for line in lines(done.out)[1:]] == ["run-1 (race-s1)"]
    assert "warning" not in done.err
    assert [line[:2] for line in lines(call("jobs").out)[1:]] == [["run-1 (race-s1)", "failed"]]
    assert [row["state"] for row in call("jobs", "--all", "--json").json()] == ["lost", "failed"]


def test_all_of_a_run_is_shown_beside_a_damaged_launch(call: Call, sweep: Launched, runs: Path) -> None:
    for number, (file, text) in enumerate(
        (("launch.json", '{"schema": 99}'), ("submissions.json", '[{"numero": 1}]')), 1
    ):
        uid = f"20260101T000000-aaaaa{number}"
        bad = launched(runs / uid, uid=uid).folder.path.rename(runs / ".launches" / uid)
        (bad / file).write_text(text)
    done = call("jobs", "run-1", "--all")
    assert (done.code, lines(done.out)[1][0]) == (0, "run-1 (race-s1)")


def test_options_that_do_not_go_together(call: Call) -> None:
    for words in (("--watch", "--wait"), ("--watch", "--json")):
        done = call("jobs", *words)
        assert done.code == 2
        assert "--watch is for people to look at" in done.err


def test_a_submitter_that_died_is_made_up_for(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    """sbatch had taken the first launch before its submitter died; of the second Slurm never heard."""
    taken = launched(runs, runs=2, uid="20260102T030405-aaaaaa")
    taken.submit("", submitted="")
    slurm.add("12", name=taken.name(), tasks=2, reason="Priority")
    never = launched(
        runs,
        make_batch(stage="more", tasks=[Task("run", "other", title="race-s9")]),
        uid="20260102T030406-bbbbbb",
    )
    done = call("jobs")
    assert done.code == 0
    first, second, *_ = done.err.splitlines()
    assert first == (f"launch {taken.launch.uid}: its submitter had died; job 12 found and adopted (cells)")
    assert second == f"launch {never.launch.uid}: its submitter had died; submitted now as job 13 (more)"
    assert [line[:2] for line in lines(done.out)[1:]] == [
        ["run-0 (race-s0)", "pending"],
        ["run-1 (race-s1)", "pending"],
        ["other (race-s9)", "pending"],
    ]
    assert slurm.job("13")["name"] == never.name()
    slurm.forget_calls()
    assert call("jobs").code == 0
    assert [words[0] for words in slurm.calls()] == ["squeue"]  # all is well now


def test_a_launch_that_slurm_refuses_hides_no_other(
    call: Call, sweep: Launched, slurm: FakeSlurm, runs: Path
) -> None:
    batch = make_batch("launcher.partition=nope", stage="more", tasks=[Task("run", "other", title="other")])
    refused = launched(runs, batch, uid=new_uid())
    done = call("jobs")
    assert done.code == 0
    rows = {line[0]: line[1] for line in lines(done.out)}
    assert (rows["other"], rows["run-0 (race-s0)"]) == ("refused", "running")
    assert f"warning: launch {refused.launch.uid}: sbatch refuses" in done.err
    assert f"other refused: racelab resume {refused.launch.uid} launcher.KEY=VALUE" in done.err


# --- until nothing is live ----------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("racelab.cli.jobs.POLL_S", 0.05)


def after(slurm: FakeSlurm, calls: int, do: Callable[[], None]) -> threading.Thread:
    """Does something once squeue has been asked so often."""

    def run() -> None:
        deadline = time.monotonic() + 30
        while len(slurm.calls("squeue")) < calls:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        do()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(("exit_code", "state", "code"), [("0:0", "finished", 0), ("1:0", "failed", 1)])
def test_wait_ends_when_nothing_is_live(
    call: Call, slurm: FakeSlurm, runs: Path, quick: None, exit_code: str, state: str, code: int
) -> None:
    one = launched(runs, uid=new_uid())
    one.submit(slurm.add("12", name=one.name(), reason="Priority"))

    def starts() -> None:
        slurm.set("12", **running("node3"))

    def ends() -> None:
        if state == "finished":
            one.run().update(status="finished")
        slurm.set("12", **over("COMPLETED" if state == "finished" else "FAILED", exit_code))

    threads = [after(slurm, 2, starts), after(slurm, 5, ends)]
    done = call("jobs", "run-0", "--wait")
    for thread in threads:
        thread.join(30)
    assert done.code == code
    assert lines(done.out)[1][:2] == ["run-0 (race-s0)", state]
    said = done.err.splitlines()
    assert said[0] == "1 job: 1 pending"
    assert said[1] == "run-0 (race-s0): running on node3 (job 12): starting"
    assert said[2].startswith(f"run-0 (race-s0): {state} (job 12)")
    assert said[3] == f"1 job: 1 {state}"


def test_wait_without_a_name_does_not_count_what_had_ended_before(
    call: Call, slurm: FakeSlurm, runs: Path, quick: None
) -> None:
    one = launched(runs, runs=2, uid=new_uid())
    one.submit(slurm.add("12", name=one.name(), tasks=2, **running()))
    slurm.set("12_0", **over("FAILED", "1:0"))

    def ends() -> None:
        one.run(1).update(status="finished")
        slurm.set("12_1", **over("COMPLETED"))

    thread = after(slurm, 2, ends)
    done = call("jobs", "--wait")
    thread.join(30)
    assert (done.code, [line[1] for line in lines(done.out)[1:]]) == (0, ["failed", "finished"])
    assert call("jobs", one.launch.uid, "--wait").code == 1


def test_wait_outlives_a_controller_that_is_away(
    call: Call, slurm: FakeSlurm, runs: Path, quick: None
) -> None:
    one = launched(runs, uid=new_uid())
    one.submit(slurm.add("12", name=one.name(), **running()))

    def back() -> None:
        one.run().update(status="finished")
        slurm.setting(unreachable=False)

    threads = [after(slurm, 2, lambda: slurm.setting(unreachable=True)), after(slurm, 8, back)]
    done = call("jobs", "--wait", "--json")
    for thread in threads:
        thread.join(30)
    assert (done.code, done.err) == (0, "")
    assert [row["state"] for row in done.json()] == ["finished"]


def test_a_controller_that_is_away_at_first_ends_the_wait(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    launched(runs).submit("12")
    slurm.setting(unreachable=True)
    assert call("jobs", "--wait").code == 4


def test_watch_off_a_terminal_is_a_line_per_change(
    call: Call, slurm: FakeSlurm, runs: Path, quick: None
) -> None:
    sweep = launched(runs, runs=2, uid=new_uid())
    sweep.submit(slurm.add("12", name=sweep.name(), tasks=2, reason="Priority"))

    def reason_only() -> None:
        slurm.set("12", reason="Resources")

    def end() -> None:
        slurm.set("12", state="CANCELLED", end=now(), by="0")

    threads = [after(slurm, 2, reason_only), after(slurm, 5, end)]
    done = call("jobs", "--watch")
    for thread in threads:
        thread.join(30)
    assert done.code == 0
    assert done.out.splitlines() == [
        "run-0 (race-s0): pending (job 12_0): waits behind other jobs (Priority)",
        "run-1 (race-s1): pending (job 12_1): waits behind other jobs (Priority)",
        "run-0 (race-s0): cancelled (job 12_0): by scancel or the site",
        "run-1 (race-s1): cancelled (job 12_1): by scancel or the site",
    ]
    assert done.err.splitlines() == [
        "2 jobs: 2 cancelled",
        "2 cancelled: racelab resume RUN (of run-0, run-1)",
    ]


def test_watch_on_a_terminal_draws_a_table_until_ctrl_c(sweep: Launched) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": "140", "LINES": "20", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "racelab.cli.main", "jobs", "--watch"],
        stdout=follower, stderr=subprocess.PIPE, stdin=follower, env=environment,
    )  # fmt: skip
    os.close(follower)
    try:
        seen = read_until(leader, "waits for free nodes")
        assert "4 jobs: 1 finished, 1 running, 1 pending, 1 failed" in seen
        assert "╭" in seen
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (130, b"")
    finally:
        process.kill()
        os.close(leader)


def read_until(leader: int, text: str) -> str:
    """What a terminal shows, until `text` is there."""
    seen = b""
    deadline = time.monotonic() + 60
    while text.encode() not in seen:
        assert time.monotonic() < deadline, seen.decode()
        seen += os.read(leader, 65536)
    return seen.decode()


# --- how it is shown ----------------------------------------------------------------------------------------


def status(number: int = 0, **changes: Any) -> TaskStatus:
    base = TaskStatus(
        launch="L", batch="cells", index=number, number=1, kind="run", title=f"full-s{number}",
        run_id=f"full-s{number}-0123456789", path="/r", state="pending", live=True, reason="", mend="",
        job_id=f"12_{number}", slurm_state="PENDING", node="", attempt=None, restarts=None, step=None, budget=None,
        eta_s=None, metric="", value=None, submitted="", log="",
    )  # fmt: skip
    return replace(base, **changes)


def test_when_a_waiting_job_starts() -> None:
    noon = datetime(2026, 1, 2, 12, 5, tzinfo=UTC)
    assert jobs_view.row(status(eta_s=7200.0), noon)[7] == "starts ~14:05"
    assert jobs_view.row(status(eta_s=86400.0), noon)[7] == "starts ~2026-01-03 12:05"
    assert jobs_view.row(status(eta_s=185.0, state="running"), noon)[7] == "3m05s"
    assert jobs_view.row(status(), noon)[7] == "-"


def test_mends_that_many_tasks_share_are_said_once() -> None:
    failed = [
        status(n, state="failed", mend=f"racelab logs full-s{n}-0123456789 shows why") for n in range(5)
    ]
    held = [status(n, state="blocked", mend=f"scontrol release 12_{n}") for n in (5, 6)]
    alone = status(7, state="refused", mend="racelab resume L launcher.KEY=VALUE")
    assert list(jobs_view.mends([*failed, *held, alone, status(8)])) == [
        "5 failed: racelab logs RUN shows why (of full-s0-0123456789, full-s1-0123456789, full-s2-0123456789 and "
        "2 more)",
        "2 blocked: scontrol release JOB (of full-s5-0123456789, full-s6-0123456789)",
        "full-s7-0123456789 refused: racelab resume L launcher.KEY=VALUE",
    ]


def test_thousands_are_written_alike() -> None:
    many = [status(n, state="blocked", mend=f"scontrol release 12_{n}") for n in range(1003)]
    assert jobs_view.counts(many) == "1,003 jobs: 1,003 blocked"
    (line,) = jobs_view.mends(many)
    assert line.startswith("1,003 blocked: scontrol release JOB (of ")
    assert line.endswith(" and 1,000 more)")


def test_a_low_terminal_shows_what_matters_first() -> None:
    """Five rows fit: the running ones, the failed one and the blocked one, in the order of launching."""
    from rich.console import Console

    many = [status(n) for n in range(10)]
    many[3] = status(3, state="blocked")
    many[5] = status(5, state="running")
    many[7] = status(7, state="failed", live=False)
    many[8] = status(8, state="running")
    many[9] = status(9, state="finished", live=False)
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(jobs_view.table(many, room=4))
    text = console.export_text()
    assert re.findall(r"full-s(\d)", text) == ["3", "5", "7", "8"]
    assert "10 jobs: 1 finished, 2 running, 5 pending, 1 blocked, 1 failed" in text
    assert "6 jobs are not shown: 1 finished, 5 pending" in text
