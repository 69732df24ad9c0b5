"""`racelab logs`: what a task printed, from files as the entry and Slurm leave them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from racelab.experiments.fsio import write_json_atomic
from racelab.sweeps.slurm.model import After, Task

from ..sweeps.slurm.fake_slurm import FakeSlurm
from ..sweeps.slurm.launches import make_batch
from ..sweeps.slurm.world import Launched, launched, write_run
from .conftest import Result

Call = Callable[..., Result]
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: the loss is not finite\n'


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm.install(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def runs(home: Path) -> Path:
    return home / "runs"


def write(path: Path, text: str, age_s: float = 0) -> Path:
    path.write_text(text)
    when = time.time() - age_s
    os.utime(path, (when, when))
    return path


def log(launch: Launched, job: str, text: str, index: int = 0, age_s: float = 0) -> Path:
    """What an attempt of a run printed; `job` as `12-r0`."""
    return write(launch.run(index).path / "attempts" / f"{job}.log", text, age_s)


def around(launch: Launched, name: str, text: str, age_s: float = 0) -> Path:
    """What a job printed beside its run; `name` as `cells.12.0`."""
    return write(launch.folder.path / "log" / f"{name}.out", text, age_s)


def attempts(launch: Launched, *entries: dict[str, Any], index: int = 0) -> None:
    base = {"from_step": 0, "slurm_restart": 0, "launch": launch.launch.uid}
    whole = [{**base, "attempt": number, **entry} for number, entry in enumerate(entries, 1)]
    write_json_atomic(launch.run(index).path / "attempts.json", whole)


# --- what is there ------------------------------------------------------------------------------------------


def test_the_newest_log_with_what_was_printed_around_it(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    """The scheduler is not asked for what lies on the disk."""
    one = launched(runs)
    one.submit("12")
    log(one, "12-r0", "first\n", age_s=60)
    own = log(one, "12-r1", TRACEBACK)
    cut = around(
        one, "cells.12.0", "slurmstepd: error: *** CANCELLED AT 2026-01-02T04:00:00 DUE TO TIME LIMIT ***\n"
    )
    done = call("logs", "run-0")
    assert done.code == 0
    assert done.out == cut.read_text() + TRACEBACK
    assert done.err.splitlines() == [f"--- {cut}", f"--- {own}"]
    assert slurm.calls() == []


def test_a_log_with_nothing_around_it_and_signs_that_are_no_utf8(
    call: Call, slurm: FakeSlurm, runs: Path
) -> None:
    one = launched(runs, runs=11)
    one.submit("12")
    around(one, "cells.12_1.0", "")
    around(one, "cells.12_10.0", "of the other task\n")
    own = log(one, "12_1-r0", "", index=1)
    own.write_bytes(b"step 1\r\x1b[Kstep 2 \xff\n")
    done = call("logs", str(runs / "run-1"))
    assert done.out == "step 1\r\x1b[Kstep 2 �\n"
    assert done.err == f"--- {own}\n"


def test_a_setup_line_that_fails_is_all_there_is(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    """The newest job never came to the run; the log of an earlier one is not taken for its own."""
    one = launched(runs)
    one.submit("15")
    log(one, "12-r0", "of an earlier launch\n", age_s=600)
    failed = around(one, "cells.15.0", "module: command not found\n")
    done = call("logs", "run-0")
    assert (done.out, done.err) == ("module: command not found\n", f"--- {failed}\n")


def test_another_node(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    one = launched(runs)
    one.submit("12")
    around(one, "cells.12.0", "first node\n")
    around(one, "cells.12.1", "second node\n")
    log(one, "12-r0", "the run\n")
    assert call("logs", "run-0", "--rank", "1").out == "second node\n"
    assert call("logs", "run-0", "--rank", "0").out == "first node\nthe run\n"
    done = call("logs", "run-0", "--rank", "2")
    assert (done.code, done.out) == (2, "")
    assert "has printed nothing on a node 2; --rank counts from 0" in done.err


def test_an_earlier_attempt(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    """Attempt 1 was by hand; job 12 of an earlier launch made attempt 2 and, requeued, attempt 3; job 3 attempt 4."""
    earlier = launched(runs / "x", uid="20250101T000000-eeeeee")
    (runs / ".launches").mkdir(parents=True)
    moved = runs / ".launches" / earlier.launch.uid
    earlier.folder.path.rename(moved)
    one = launched(runs)
    one.submit("3")
    attempts(
        one,
        {"slurm_job_id": None, "slurm_restart": None, "launch": None},
        {"slurm_job_id": "12", "launch": earlier.launch.uid},
        {"slurm_job_id": "12", "slurm_restart": 1, "launch": earlier.launch.uid},
        {"slurm_job_id": "3"},
    )
    write(moved / "log" / "cells.12.0.out", "preempted\n", age_s=90)
    log(one, "12-r0", "second\n", age_s=90)
    log(one, "12-r1", "third\n", age_s=60)
    around(one, "cells.3.0", "")
    log(one, "3-r0", "fourth\n")
    assert call("logs", "run-0").out == "fourth\n"
    assert call("logs", "run-0", "--attempt", "4").out == "fourth\n"
    assert call("logs", "run-0", "--attempt", "3").out == "preempted\nthird\n"
    assert call("logs", "run-0", "--attempt", "2").out == "preempted\nsecond\n"
    by_hand = call("logs", "run-0", "--attempt", "1")
    assert (by_hand.code, by_hand.out) == (2, "")
    assert "attempt 1 of run-0 was no job: it printed in the terminal it was started in" in by_hand.err
    none = call("logs", "run-0", "--attempt", "5")
    assert none.code == 2
    assert "run-0 has no attempt 5; it has 1, 2, 3, 4" in none.err


def test_a_command_of_a_graph(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    command = Task("command", words=("show", "run-0"), title="report")
    report = make_batch(stage="report", tasks=[command], after=[After("cells", "any")])
    graph = launched(runs, make_batch(runs=2), report)
    graph.submit("13", batch=1)
    around(graph, "report.13.0", "a table\n")
    uid = graph.launch.uid
    assert call("logs", f"{uid}:report").out == "a table\n"
    several = call("logs", uid)
    assert several.code == 2
    assert f"launch {uid} has 3 tasks; name one: racelab logs run-0, run-1, {uid}:report" in several.err
    assert f"stage cells of launch {uid} has 2 tasks" in call("logs", f"{uid}:cells").err
    assert "is a command; --attempt is for runs" in call("logs", f"{uid}:report", "--attempt", "1").err


def test_a_launch_of_one_task_names_it(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    one = launched(runs)
    around(one, "cells.12.0", "")
    log(one, "12-r0", "the run\n")
    assert call("logs", one.launch.uid).out == "the run\n"


def test_json_says_where_the_logs_are(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    one = launched(runs)
    one.submit("12")
    out, own = around(one, "cells.12.0", "preempted\n"), log(one, "12-r1", "step 1\n")
    attempts(one, {"slurm_job_id": "12"}, {"slurm_job_id": "12", "slurm_restart": 1})
    done = call("logs", "run-0", "--json")
    assert (done.code, done.err) == (0, "")
    job = {"job_id": "12", "rank": 0}
    assert done.json() == [
        {"file": str(out), "bytes": 10, **job, "restart": None, "attempt": None},
        {"file": str(own), "bytes": 7, **job, "restart": 1, "attempt": 2},
    ]
    assert "--json says where the logs are" in call("logs", "run-0", "--json", "-f").err
    assert slurm.calls() == []


# --- what is not --------------------------------------------------------------------------------------------


def test_a_run_that_waits_says_why(call: Call, slurm: FakeSlurm, runs: Path) -> None:
    one = launched(runs)
    one.submit(slurm.add("12", name=one.name(), reason="PartitionTimeLimit"))
    done = call("logs", "run-0")
    assert (done.code, done.out) == (0, "")
    assert done.err.splitlines() == [
        "run-0 (race-s0): blocked (job 12): a limit above the partition's (PartitionTimeLimit)",
        "run-0 blocked: racelab cancel run-0; racelab resume run-0 launcher.time_min=N",
    ]


def test_commands_to_type_name_the_folder_of_the_runs(call: Call, slurm: FakeSlurm, tmp_path: Path) -> None:
    root = tmp_path / "elsewhere"
    one = launched(root, runs=2)
    one.submit(slurm.add("12", name=one.name(), tasks=2, reason="PartitionTimeLimit"))
    (mend,) = call("logs", str(root / "run-0")).err.splitlines()[1:]
    assert mend == (
        f"run-0 blocked: racelab cancel run-0 --root {root}; racelab resume run-0 --root {root} launcher.time_min=N"
    )
    several = call("logs", one.launch.uid, "--root", str(root))
    assert f"name one: racelab logs --root {root} run-0, run-1" in several.err


def test_a_run_that_waits_to_go_on_shows_what_it_printed_before(
    call: Call, slurm: FakeSlurm, runs: Path
) -> None:
    one = launched(runs)
    one.submit(slurm.add("15", name=one.name(), reason="Priority"))
    before = log(one, "12-r0", "of an earlier launch\n", age_s=600)
    done = call("logs", "run-0")
    assert done.out == "of an earlier launch\n"
    assert done.err.splitlines() == [
        "run-0 (race-s0): pending (job 15): waits behind other jobs (Priority)",
        f"--- {before}",
    ]


def test_runs_that_were_started_here(call: Call, runs: Path) -> None:
    """A cell of a sweep has a log; what was typed alone printed in its terminal; nobody has begun with the third."""
    cell = write_run(runs / "cell", "cell", None, status="finished")
    write(cell.path / "attempts" / "cell.log", "step 1\n")
    write_run(runs / "alone", "alone", None, status="finished")
    write_run(runs / "waits", "waits", None)
    assert call("logs", "cell").out == "step 1\n"
    alone = call("logs", "alone")
    assert alone.code == 2
    assert "alone was started in a terminal and printed there; `racelab show alone` shows it" in alone.err
    waits = call("logs", "waits")
    assert (waits.code, waits.err) == (0, "waits: queued; it has printed nothing yet\n")


def test_a_sweep_names_its_cells(call: Call, runs: Path) -> None:
    sweep = write_run(runs / "sweep-x", "x", None, kind="sweep")
    write_run(runs / "a-s0", "a-s0", None)
    (sweep.path / "config" / "composed.yaml").write_text(
        "cells:\n- {cell: a-s0, run_id: a-s0, label: a, seed: 0}\n"
    )
    done = call("logs", "sweep-x")
    assert done.code == 2
    assert "sweep-x is a sweep; name one of its cells: a-s0" in done.err


def test_following_and_an_attempt_do_not_go_together(call: Call, runs: Path) -> None:
    write_run(runs / "cell", "cell", None)
    assert "-f follows the newest attempt" in call("logs", "cell", "-f", "--attempt", "1").err


# --- following ----------------------------------------------------------------------------------------------


class Follower:
    """`racelab logs RUN -f` in a process of its own."""

    def __init__(self, run: str, folder: Path, *words: str) -> None:
        self.out, self.err = folder / "followed.out", folder / "followed.err"
        with open(self.out, "wb") as out, open(self.err, "wb") as err:
            command = [sys.executable, "-m", "racelab.cli.main", "logs", run, "-f", *words]
            self.process = subprocess.Popen(command, stdout=out, stderr=err)

    def sees(self, text: str) -> None:
        self._waits_for(self.out, text)

    def says(self, text: str) -> None:
        self._waits_for(self.err, text)

    def _waits_for(self, file: Path, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in (seen := file.read_text(encoding="utf-8", errors="replace")):
            assert time.monotonic() < deadline, seen
            time.sleep(0.02)

    def ends(self) -> tuple[str, str]:
        """(all that it printed, all that it said)."""
        self.process.wait(60)
        return self.out.read_text(encoding="utf-8"), self.err.read_text(encoding="utf-8")


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[..., Follower]]:
    started: list[Follower] = []

    def start(run: str, *words: str) -> Follower:
        started.append(Follower(run, tmp_path, *words))
        return started[-1]

    yield start
    for follower in started:
        follower.process.kill()
        follower.process.wait(30)


def append(path: Path, text: str) -> None:
    with open(path, "a", encoding="utf-8") as handle:
        handle.write(text)


def test_following_from_the_queue_over_a_requeue_to_the_end(
    slurm: FakeSlurm, runs: Path, follow: Callable[[str], Follower]
) -> None:
    one = launched(runs)
    one.submit(slurm.add("12", name=one.name(), reason="Priority"))
    follower = follow("run-0")
    follower.says("pending")
    slurm.set("12", state="RUNNING", nodes="node1", start="2026-01-02T03:05:00")
    out = around(one, "cells.12.0", "")
    first = log(one, "12-r0", "step 1\n")
    follower.sees("step 1\n")
    append(first, "step 2, naï")
    append(first, "ve\n")
    follower.sees("naïve\n")
    one.end("requeued", reason="preempted")
    append(out, "slurmstepd: error: *** PREEMPTED ***\n")
    follower.sees("PREEMPTED")
    second = log(one, "12-r1", "step 3\n")
    follower.sees("step 3\n")
    append(second, TRACEBACK)
    one.end("failed", reason="the loss is not finite", restart=1, exit_code=1)
    printed, said = follower.ends()
    assert follower.process.returncode == 0
    assert printed == ("step 1\nstep 2, naïve\nslurmstepd: error: *** PREEMPTED ***\nstep 3\n" + TRACEBACK)
    assert said.splitlines() == [
        "run-0 (race-s0): pending (job 12): waits behind other jobs (Priority)",
        f"--- {first}",
        f"--- {out}",
        f"--- {second}",
        "run-0: failed: the loss is not finite",
    ]


def test_following_another_node_waits_for_its_first_line(
    call: Call, slurm: FakeSlurm, runs: Path, follow: Callable[..., Follower]
) -> None:
    """The first node has begun, the second has not; a third there will never be."""
    one = launched(runs, make_batch(nodes=2))
    one.submit(slurm.add("12", name=one.name(), state="RUNNING", nodes="node[1-2]"))
    around(one, "cells.12.0", "first node\n")
    follower = follow("run-0", "--rank", "1")
    follower.says("running")
    around(one, "cells.12.1", "second node\n")
    follower.sees("second node\n")
    one.end("finished")
    assert follower.ends()[0] == "second node\n"
    assert follower.process.returncode == 0
    none = call("logs", "run-0", "-f", "--rank", "2")
    assert (none.code, none.out) == (2, "")
    assert "has printed nothing on a node 2" in none.err


def test_following_a_job_that_dies_without_a_word(
    slurm: FakeSlurm, runs: Path, follow: Callable[[str], Follower]
) -> None:
    """The scheduler tells; it is asked at once, and then every ten seconds."""
    one = launched(runs)
    ended = {"nodes": "node1", "start": "2026-01-02T03:05:00", "end": "2026-01-02T03:06:00"}
    one.submit(slurm.add("12", name=one.name(), state="OUT_OF_MEMORY", exit="0:125", **ended))
    around(one, "cells.12.0", "slurmstepd: error: Detected 1 oom_kill event\n")
    printed, said = follow("run-0").ends()
    assert printed == "slurmstepd: error: Detected 1 oom_kill event\n"
    assert said.splitlines()[0] == "run-0 (race-s0): out_of_memory (job 12): out of memory"


def test_following_where_no_scheduler_answers(
    slurm: FakeSlurm, runs: Path, follow: Callable[[str], Follower]
) -> None:
    """On a node without Slurm's tools, say: the job's own word is enough."""
    slurm.setting(unreachable=True)
    one = launched(runs)
    one.submit("12")
    around(one, "cells.12.0", "")
    log(one, "12-r0", "step 1\n")
    follower = follow("run-0")
    follower.sees("step 1\n")
    one.end("finished")
    printed, said = follower.ends()
    assert printed == "step 1\n"
    assert said.splitlines()[-1] == "run-0: finished"


def test_following_a_run_that_was_started_here(runs: Path, follow: Callable[[str], Follower]) -> None:
    cell = write_run(runs / "cell", "cell", None)
    file = write(cell.path / "attempts" / "cell.log", "step 1\n")
    with cell.lock():
        cell.update(status="running")
        follower = follow("cell")
        follower.sees("step 1\n")
        append(file, "step 2\n")
        follower.sees("step 2\n")
        cell.update(status="finished")
    printed, said = follower.ends()
    assert printed == "step 1\nstep 2\n"
    assert said.splitlines() == [f"--- {file}", "cell: finished"]
