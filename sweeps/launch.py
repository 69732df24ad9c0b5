"""Running cells on this machine: a child process each, so that no end of one can touch another.

A cell is claimed (a lock file in its folder) before its child starts. What another sweep has claimed, or another
process works on, is `elsewhere`: it is waited for, its outcome is taken, and if it is left unfinished it is taken over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Protocol

from racelab.experiments.errors import RunFolderError
from racelab.experiments.fsio import explain, is_locked, try_flock
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import PARENT_VARIABLE, StopRequest
from racelab.sweeps.cells import Cell
from racelab.sweeps.progress import Progress, SpoolTail

POLL_S: Final = 0.2
_LOG_TAIL: Final = 8_192
_STOPPED: Final = frozenset({128 + signal.SIGINT, 128 + signal.SIGTERM})
Status = Literal["waiting", "running", "elsewhere", "finished", "failed", "interrupted"]


@dataclass(slots=True)
class CellState:
    """A cell and how it stands in this sweep.

    Attributes:
        cell: what it is.
        folder: its run.
        status: waiting for a free place, running in a child, elsewhere (another process has it), or how it ended.
        skipped: it had finished before the sweep started.
        attempts: of its run, before the sweep started.
        started: clock (monotonic, s) at its last start; None if it never was.
        took_s: seconds from there to its end.
        reason: why it failed, one line.
        code: its child's exit code; None while there was none.
        tail: reads its progress.
    """

    cell: Cell
    folder: RunFolder
    status: Status = "waiting"
    skipped: bool = False
    attempts: int = 0
    started: float | None = None
    took_s: float | None = None
    reason: str = ""
    code: int | None = None
    tail: SpoolTail | None = None

    @property
    def label(self) -> str:
        """Of the cell."""
        return self.cell.label

    @property
    def log(self) -> Path:
        """What the child printed."""
        return self.folder.path / "attempts" / "cell.log"

    def progress(self) -> Progress:
        """How far it is."""
        if self.tail is None:
            self.tail = SpoolTail(self.folder, self.cell.config.budget)
        return self.tail.read()

    def elapsed(self) -> float | None:
        """Seconds since its start, or from start to end."""
        if self.started is None or self.took_s is not None:
            return self.took_s
        return time.monotonic() - self.started

    def set(self, status: Status, reason: str = "") -> None:
        """A new status; the clock stops when it ends."""
        if status in ("finished", "failed", "interrupted"):
            self.took_s = self.elapsed()
        self.status, self.reason = status, reason


class Watch(Protocol):
    """Who is told what happens."""

    def changed(self, state: CellState) -> None:
        """A cell has another status."""

    def tick(self, states: Sequence[CellState]) -> None:
        """A moment has passed."""


@dataclass(slots=True)
class _Child:
    state: CellState
    process: subprocess.Popen[bytes]
    claim: int
    attempts: int
    """Of the run, before it started."""


@dataclass(slots=True)
class InlineLauncher:
    """Runs at most `jobs` cells at once.

    Attributes:
        jobs: how many children at once.
        stop: when asked, the children get a SIGTERM and are waited for, and nothing new is started.
        watch: is told.
    """

    jobs: int
    stop: StopRequest
    watch: Watch
    _children: list[_Child] = field(default_factory=list)
    _passed_on: bool = False

    def run(self, states: Sequence[CellState]) -> None:
        """Until every cell has ended, or the stop has been obeyed.

        Raises:
            KeyboardInterrupt: a second SIGINT; the children are killed.
        """
        try:
            while self._goes_on(states):
                if self.stop.signum and not self._passed_on:
                    self._signal(signal.SIGTERM)
                    self._passed_on = True
                self._reap()
                if not self.stop.signum:
                    self._look_elsewhere(states)
                    self._fill(states)
                self.watch.tick(states)
                time.sleep(POLL_S)
        except BaseException as error:
            self._signal(signal.SIGKILL if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            for child in self._children:
                child.process.wait()
                os.close(child.claim)
            self._children = []
            raise

    def _goes_on(self, states: Sequence[CellState]) -> bool:
        if self.stop.signum:
            return bool(self._children)
        return any(state.status in ("waiting", "running", "elsewhere") for state in states)

    def _signal(self, signum: int) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signum)

    def _fill(self, states: Sequence[CellState]) -> None:
        for state in states:
            if len(self._children) >= self.jobs:
                return
            if state.status == "waiting":
                self._start(state)
                self.watch.changed(state)

    def _start(self, state: CellState) -> None:
        """Starts a child, unless another process has the cell or has just finished it."""
        claim = _claim(state.folder)
        if claim is None or state.folder.is_held():
            if claim is not None:
                os.close(claim)
            state.set("elsewhere")
            return
        if state.folder.status() == "finished":
            os.close(claim)
            state.set("finished")
            return
        state.started, state.took_s, state.code = time.monotonic(), None, None
        attempts = len(state.folder.attempts())
        try:
            process = _spawn(state, self.jobs)
        except OSError as error:
            os.close(claim)
            state.set("failed", f"could not be started: {explain(error)}")
            return
        self._children.append(_Child(state, process, claim, attempts))
        state.set("running")

    def _reap(self) -> None:
        for child in list(self._children):
            code = child.process.poll()
            if code is None:
                continue
            self._children.remove(child)
            self._judge(child, code)
            os.close(child.claim)
            self.watch.changed(child.state)

    def _judge(self, child: _Child, code: int) -> None:
        """How a cell ended, from its folder first and its child's exit code second."""
        state = child.state
        state.code = code
        status = state.folder.status()
        if status == "finished":
            state.set("finished")
        elif status == "running":  # by a process that is no child of ours, and was quicker
            state.set("elsewhere")
        elif code in _STOPPED or (self.stop.signum and status != "failed"):
            state.set("interrupted", f"stopped by signal {self.stop.signum or code - 128}")
        else:
            own = status == "failed" and len(state.folder.attempts()) > child.attempts
            said = _reason(state.folder) if own else ""  # else it is an earlier attempt's
            reason = f"killed by {_signal_name(-code)}" if code < 0 else said or last_line(state.log)
            state.set("failed", reason or f"exit code {code}")
            if status == "queued":  # it never came as far as to say so itself
                state.folder.update(status="failed", reason=state.reason)

    def _look_elsewhere(self, states: Sequence[CellState]) -> None:
        for state in states:
            if state.status != "elsewhere":
                continue
            if is_locked(_claim_file(state.folder)) or state.folder.is_held():
                continue
            status = state.folder.status()
            if status == "finished":
                state.set("finished")
            elif status == "failed" and len(state.folder.attempts()) > state.attempts:
                state.set("failed", _reason(state.folder) or last_line(state.log))
            else:  # left unfinished
                state.set("waiting")
            self.watch.changed(state)


def _claim_file(folder: RunFolder) -> Path:
    return folder.path / ".claim"


def _claim(folder: RunFolder) -> int | None:
    """The open lock of a cell, None if another sweep has it. It goes away with this process.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    path = _claim_file(folder)
    try:
        claim = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunFolderError(f"cannot lock {path}: {explain(error)}") from error
    if try_flock(claim, 0.05):
        return claim
    os.close(claim)
    return None


def child_words(folder: RunFolder) -> list[str]:
    """The command line of a child; `-P` keeps the working directory out of its imports."""
    return [sys.executable, "-P", "-m", "racelab.cli.main", "train", "--resume", str(folder.path), "--json"]


def _spawn(state: CellState, jobs: int) -> subprocess.Popen[bytes]:
    state.log.parent.mkdir(parents=True, exist_ok=True)
    with open(state.log, "ab") as log:
        # its own session: Ctrl-C in the terminal is for the sweep, which passes it on
        return subprocess.Popen(
            child_words(state.folder), env=child_environment(os.environ, jobs), stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def child_environment(present: Mapping[str, str], jobs: int, cores: int | None = None) -> dict[str, str]:
    """The environment of a child: it names its parent, and shares the cores with the other children.

    Example: with 8 cores and 3 jobs OMP_NUM_THREADS is 2, unless it is set already.
    """
    found = {**present, PARENT_VARIABLE: str(os.getpid())}
    if jobs > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, (cores or len(os.sched_getaffinity(0))) // jobs)))
    return found


def _reason(folder: RunFolder) -> str:
    """What a run says of its own end."""
    return str(folder.info().get("reason") or "")


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (out of memory?)" if number == signal.SIGKILL else name


def last_line(log: Path) -> str:
    """The last line of a log that says something, without the word `error:`; "" if there is none."""
    try:
        with open(log, "rb") as handle:
            handle.seek(max(0, log.stat().st_size - _LOG_TAIL))
            lines = handle.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return said[-1].removeprefix("error: ") if said else ""
