"""The launcher with children that do in a moment what a training does in minutes: same folders, locks and exit codes.

Only the command line of the child is replaced; everything else is real, processes and signals too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import PARENT_VARIABLE, StopRequest
from racelab.sweeps import launch
from racelab.sweeps.cells import Cell, Spec, make_cells, open_cell
from racelab.sweeps.launch import CellState, InlineLauncher, child_environment, last_line

CHILD = """
import os, signal, sys, time
from pathlib import Path
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import StopRequest

run = RunFolder.open(sys.argv[1])
what = (run.path / "what").read_text() if (run.path / "what").exists() else "finish"
if what == "refuse":
    sys.exit("error: no model in there")
with StopRequest() as stop, run.lock():
    run.begin_attempt()
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "fail":
        run.update(status="failed", reason="the loss is not finite")
        sys.exit("error: the loss is not finite")
    if what == "lose":
        run.update(status="failed", reason="3 examples got no answer")
        print("{\\n}")
        sys.exit(4)
    end = time.monotonic() + (60 if what == "long" else 0.3)
    while time.monotonic() < end and not stop.signum:
        time.sleep(0.02)
    run.update(status="interrupted" if stop.signum else "finished", steps=1)
sys.exit(stop.exit_code)
"""


class Note:
    """A watch that remembers, and may act at a moment."""

    def __init__(self, act: Callable[[Sequence[CellState]], None] | None = None) -> None:
        self.words: list[tuple[str, str]] = []
        self.most = 0
        self.act = act

    def changed(self, state: CellState) -> None:
        self.words.append((state.cell.label, state.status))

    def tick(self, states: Sequence[CellState]) -> None:
        self.most = max(self.most, sum(state.status == "running" for state in states))
        if self.act is not None:
            self.act(states)


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return make_cells([Spec(name, seed, ()) for seed, name in enumerate("abcd")])


@pytest.fixture
def states(tmp_path: Path, cells: list[Cell], monkeypatch: pytest.MonkeyPatch) -> list[CellState]:
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))
    monkeypatch.setattr(launch, "child_words", lambda folder: [sys.executable, str(script), str(folder.path)])
    monkeypatch.setattr(launch, "POLL_S", 0.02)
    return [CellState(cell, open_cell(tmp_path / "runs", cell, cell.cell_id, "s")) for cell in cells]


def ask(state: CellState, what: str) -> None:
    (state.folder.path / "what").write_text(what)


def run(states: Sequence[CellState], jobs: int = 4, watch: Note | None = None) -> list[str]:
    with StopRequest() as stop:
        InlineLauncher(jobs, stop, watch or Note()).run(states)
    return [state.status for state in states]


def test_no_end_of_one_cell_touches_another(states: list[CellState]) -> None:
    for state, what in zip(states, ("fail", "die", "refuse", "finish"), strict=True):
        ask(state, what)
    assert run(states) == ["failed", "failed", "failed", "finished"]
    assert [state.reason for state in states] == [
        "the loss is not finite",
        "killed by SIGKILL (out of memory?)",
        "no model in there",
        "",
    ]
    assert [state.folder.status() for state in states] == ["failed", "stale", "failed", "finished"]
    assert states[2].folder.info()["reason"] == "no model in there"


def test_the_reason_is_the_runs_own_where_this_child_gave_one(states: list[CellState]) -> None:
    """The last lines of the log are the result's JSON; a child that does not come so far leaves an old reason."""
    ask(states[0], "lose")
    assert run(states[:1]) == ["failed"]
    assert (states[0].reason, states[0].code) == ("3 examples got no answer", 4)
    ask(states[0], "refuse")
    states[0].set("waiting")
    assert run(states[:1]) == ["failed"]
    assert (states[0].reason, states[0].code) == ("no model in there", 1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_more_than_the_jobs_run_at_once_and_in_order(states: list[CellState], jobs: int) -> None:
    watch = Note()
    assert run(states, jobs, watch) == ["finished"] * 4
    assert watch.most == jobs
    assert [name for name, status in watch.words if status == "running"] == list("abcd")


def test_what_did_not_finish_runs_when_it_is_started_again_and_the_rest_does_not(
    states: list[CellState],
) -> None:
    ask(states[1], "fail")
    run(states)
    ask(states[1], "finish")
    again = [
        CellState(s.cell, s.folder, "finished" if s.folder.status() == "finished" else "waiting")
        for s in states
    ]
    watch = Note()
    assert run(again, watch=watch) == ["finished"] * 4
    assert {name for name, _ in watch.words} == {"b"}
    assert [len(state.folder.attempts()) for state in states] == [1, 2, 1, 1]


def test_a_signal_is_passed_on_and_nothing_new_starts(states: list[CellState]) -> None:
    for state in states:
        ask(state, "long")
    sent = []

    def act(now: Sequence[CellState]) -> None:
        if not sent and all(state.folder.status() == "running" for state in now[:2]):
            sent.append(os.kill(os.getpid(), signal.SIGTERM))

    assert run(states, 2, Note(act)) == ["interrupted", "interrupted", "waiting", "waiting"]
    assert [state.folder.status() for state in states] == ["interrupted", "interrupted", "queued", "queued"]


def test_a_second_interrupt_kills(states: list[CellState]) -> None:
    ask(states[0], "long")
    pids: list[int] = []

    def act(now: Sequence[CellState]) -> None:
        if not pids and now[0].folder.status() == "running":
            pids.append(int((now[0].folder.holder() or {})["pid"]))
            os.kill(pids[0], signal.SIGSTOP)  # it cannot obey, as one that hangs
            os.kill(os.getpid(), signal.SIGINT)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        run(states[:1], 1, Note(act))
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert states[0].folder.status() == "stale"


def test_a_cell_that_another_process_has_is_waited_for_and_its_outcome_taken(states: list[CellState]) -> None:
    other = states[0].folder
    held = threading.Event()

    def work() -> None:
        with other.lock():
            other.begin_attempt()
            held.set()
            time.sleep(0.5)
            other.update(status="finished")

    thread = threading.Thread(target=work)
    thread.start()
    held.wait()
    watch = Note()
    assert run(states[:2], 1, watch) == ["finished", "finished"]
    thread.join()
    assert watch.words[0] == ("a", "elsewhere")
    assert ("a", "running") not in watch.words
    assert len(other.attempts()) == 1


def test_a_cell_that_another_process_leaves_unfinished_is_taken_over(states: list[CellState]) -> None:
    claim = launch._claim(states[0].folder)
    assert claim is not None
    threading.Timer(0.4, os.close, (claim,)).start()
    watch = Note()
    assert run(states[:1], 1, watch) == ["finished"]
    assert [status for _, status in watch.words] == ["elsewhere", "waiting", "running", "finished"]


SWEEP = """
import sys
from pathlib import Path
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import StopRequest
from racelab.sweeps import launch
from racelab.sweeps.cells import Spec, make_cells, open_cell

root, script, at = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
launch.child_words = lambda folder: [sys.executable, script, str(folder.path)]
cells = make_cells([Spec(name, seed, ()) for seed, name in enumerate("abcd")])
states = [launch.CellState(cell, open_cell(root, cell, cell.cell_id, "s")) for cell in cells]

class Watch:
    def changed(self, state): print(state.cell.label, state.status, flush=True)
    def tick(self, states): pass

with StopRequest() as stop:
    launch.InlineLauncher(2, stop, Watch()).run(states)
print(*(state.status for state in states))
"""


def sweep_process(tmp_path: Path) -> subprocess.Popen[str]:
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP)
    words = [sys.executable, str(script), str(tmp_path / "runs"), str(tmp_path / "child.py"), "0"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_children_stop_by_themselves_when_the_sweep_is_killed(
    tmp_path: Path, states: list[CellState]
) -> None:
    for state in states:
        ask(state, "long")
    process = sweep_process(tmp_path)
    wait(lambda: sum(state.folder.status() == "running" for state in states) == 2)
    process.kill()
    process.wait()
    wait(lambda: [state.folder.status() for state in states] == ["interrupted"] * 2 + ["queued"] * 2)


def test_two_sweeps_at_once_run_every_cell_once_and_both_see_all_of_them(
    tmp_path: Path, states: list[CellState]
) -> None:
    said = [process.communicate(timeout=60)[0] for process in [sweep_process(tmp_path) for _ in range(2)]]
    assert [text.splitlines()[-1] for text in said] == ["finished finished finished finished"] * 2
    assert [len(state.folder.attempts()) for state in states] == [1] * 4


def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def test_children_share_the_cores_unless_the_user_says_otherwise() -> None:
    """8 cores for 3 children: 8 // 3 = 2 threads each; for 16 children at least 1."""
    parent = str(os.getpid())
    assert child_environment({}, 1, 8) == {PARENT_VARIABLE: parent}
    assert child_environment({}, 3, 8) == {PARENT_VARIABLE: parent, "OMP_NUM_THREADS": "2"}
    assert child_environment({}, 16, 8)["OMP_NUM_THREADS"] == "1"
    assert child_environment({"OMP_NUM_THREADS": "7"}, 3, 8)["OMP_NUM_THREADS"] == "7"


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "cell.log"
    assert last_line(log) == ""
    log.write_text("x" * 10_000 + "\nwarning: one\nerror: the disk is full\n\n")
    assert last_line(log) == "the disk is full"


def test_a_run_stops_with_the_process_that_it_was_started_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getppid()))
    with StopRequest() as stop:
        time.sleep(0.1)
        assert stop.signum == 0
    monkeypatch.setenv(PARENT_VARIABLE, "1" if os.getppid() != 1 else "2")
    with StopRequest() as stop:
        wait(lambda: stop.signum == signal.SIGTERM)
        assert stop.exit_code == 143


def test_the_progress_of_a_cell_is_read_from_its_record(tmp_path: Path, states: list[CellState]) -> None:
    """From the first record on one policy update took 4 s, and 8 of 10 are to go: 8 * 4 = 32 s."""
    from racelab.experiments.tracking.spool import SpoolWriter
    from racelab.sweeps.progress import Progress, SpoolTail

    run = states[0].folder
    tail = SpoolTail(run, 10)
    assert tail.read() == Progress()
    clock = iter([1_000, 3_000, 5_000])
    writer = SpoolWriter(run.spool_dir / "1.jsonl", lambda: next(clock))
    for step, policy, kind, reward in ((1, 1, 0.0, 0.25), (2, 2, 0.0, 0.5), (3, 2, 1.0, None)):
        values = {"train/clock/policy_step": policy, "train/clock/phase_kind": kind}
        values |= {} if reward is None else {"train/reward/mean": reward}
        writer.append([{"kind": "metrics", "step": step, "values": values}])
        tail.read()
    assert tail.read() == Progress(3, 2, "rubric", 0.5, 32.0)
    SpoolWriter(run.spool_dir / "2.jsonl", lambda: 9_000).append(
        [
            {
                "kind": "metrics",
                "step": 2,
                "values": {"train/clock/policy_step": 2, "train/clock/phase_kind": 0.0},
            }
        ]
    )
    assert tail.read() == Progress(2, 2, "policy", 0.5, None)


def test_a_folder_that_cannot_be_written_is_an_error(states: list[CellState]) -> None:
    from racelab.experiments.errors import RunFolderError

    folder = RunFolder(Path("/nowhere/at/all"), "x")
    with pytest.raises(RunFolderError, match="cannot lock"):
        launch._claim(folder)
