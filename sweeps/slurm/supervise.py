"""The child that does a task's work: its environment, its output, and watching it until it ends or has to end."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from racelab.experiments.errors import RunFolderError
from racelab.experiments.fsio import explain, now_iso
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import PARENT_VARIABLE
from racelab.experiments.tracking.address import stored_config
from racelab.experiments.tracking.mlflow_store import tracking_uri
from racelab.sweeps.launch import last_line
from racelab.sweeps.slurm.asked import Asked
from racelab.sweeps.slurm.model import Task
from racelab.sweeps.slurm.nodes import Identity

POLL_S: Final = 0.2
FENCE_S: Final = 1.0
"""Seconds between two looks at the run's fence."""
STOPPED: Final = frozenset({128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT})
"""Codes of a child that was told to stop: after it has saved, or before it had anything to save."""
TERM_BUSY_S: Final = 3.0
"""How long after SIGTERM a job is handed back although its child still works, where Slurm does not say how long the
grace time of a preempted job is. The requeue leaves the child KillWait (usually 30 s) to save."""
_SPARE_S: Final = 30
_MARK: Final = "--- job "

Seen = Literal["ended", "fenced", "busy"]
Words = Callable[[Task, Path], list[str]]
"""Task and its run's folder -> command line of the child."""


def child_words(task: Task, run: Path) -> list[str]:
    """The command line of a task; `-P` keeps the working directory out of its imports."""
    words = ["train", "--resume", str(run), "--json"] if task.kind == "run" else list(task.words)
    return [sys.executable, "-P", "-m", "racelab.cli.main", *words]


class Child:
    """A process in a process group of its own, in a session of its own. Slurm's signals reach it all the same."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path | None) -> None:
        """Starts it.

        Args:
            words: its command line.
            environment: all of it.
            log: what it prints is appended there; None: it prints where this process does.

        Raises:
            RunFolderError: the log cannot be written, or the process not be started.
        """
        try:
            with contextlib.ExitStack() as stack:
                output = None if log is None else stack.enter_context(open(log, "ab"))
                self._process = subprocess.Popen(
                    words, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True, preexec_fn=_ignore_user_signal,
                )  # fmt: skip
        except OSError as error:
            raise RunFolderError(f"cannot start {words[0]} (output: {log}): {explain(error)}") from error

    def has_ended(self) -> bool:
        """Whether it has; it stays a zombie until `code`, so that nobody else gets its process group's number."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._process.returncode is not None or bool(os.waitid(os.P_PID, self._process.pid, options))

    def ask(self) -> None:
        """Asks it to save and stop. It gets Slurm's own signal too; a second one is the same to it."""
        if not self.has_ended():
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Kills what is left of its process group, and it, and returns its code: of its exit, or -signal."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def _ignore_user_signal() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # for this process and all it starts


def watch(
    child: Child,
    asked: Asked,
    is_fenced: Callable[[], bool],
    busy_s: float | None,
    note: Callable[[], None] | None = None,
    term_s: Callable[[], float] = lambda: TERM_BUSY_S,
) -> Seen:
    """Until the child has ended, somebody else has its run, or it does not stop.

    Args:
        child: is asked to stop as soon as this process is.
        asked: the signals.
        is_fenced: looks at the run's fence.
        busy_s: seconds after a SIGUSR2 at which the child is called busy; None: it may take as long as it is let.
        note: called once the child has been asked to stop.
        term_s: gives the same for a SIGTERM; asked once, when the first has come.
    """
    told = False
    patience: float | None = None
    next_look = time.monotonic()
    while not child.has_ended():
        now = time.monotonic()
        if now >= next_look:
            if is_fenced():
                return "fenced"
            next_look = now + FENCE_S
        if asked.at is not None and not told:
            child.ask()
            told = True
            if note is not None:
                note()
        if busy_s is not None and asked.term is not None and patience is None:
            patience = term_s()
        if busy_s is not None and _is_busy(asked, now, busy_s, patience):
            return "busy"
        time.sleep(POLL_S)
    return "fenced" if is_fenced() else "ended"


def term_patience(partition: str) -> float:
    """How long after SIGTERM a child may go on saving before its job is handed back.

    Where preempted jobs are requeued there is no hurry: Slurm does that itself at the end of the grace time, all of
    which is for saving. Where they are cancelled the job must have asked before that.

    Args:
        partition: of the job; "" if unknown.

    Example: partition with PreemptMode=CANCEL and GraceTime=60: 30 s; with PreemptMode=REQUEUE: for ever.
    """
    from racelab.experiments.errors import UnreachableError
    from racelab.sweeps.slurm.scheduler import Scheduler

    try:
        limits = Scheduler(timeout_s=5).limits()
    except (UnreachableError, LookupError, ValueError):  # an answer that nobody can read is none
        return TERM_BUSY_S
    found = limits.partitions.get(partition)
    if found is None:
        return TERM_BUSY_S
    if "REQUEUE" in found.preempt_mode:
        return math.inf
    return max(TERM_BUSY_S, found.grace_s / 2)


def _is_busy(asked: Asked, now: float, busy_s: float, term_s: float | None) -> bool:
    by_user = asked.user is not None and now - asked.user > busy_s
    return by_user or (asked.term is not None and term_s is not None and now - asked.term > term_s)


def busy_after_s(signal_delay_s: int) -> float:
    """How long after SIGUSR2 a job is handed back although its child still works.

    Slurm may give SIGUSR2 up to 60 s early, never late: at least `signal_delay_s` are left. 30 s of them are for
    asking the scheduler, half of them where they are few.

    Example: 120 gives 90, 40 gives 20.
    """
    return max(signal_delay_s / 2, float(signal_delay_s - _SPARE_S))


def child_environment(present: Mapping[str, str], cores: int | None = None) -> dict[str, str]:
    """What every child gets: it names its parent, prints tracebacks, and takes no more threads than the task has cores.

    Example: with SLURM_CPUS_PER_TASK=8 and 4 usable cores OMP_NUM_THREADS is 4, unless it is set already.
    """
    found = {**present, PARENT_VARIABLE: str(os.getpid()), "RACELAB_DEBUG": "1"}
    asked = present.get("SLURM_CPUS_PER_TASK", "")
    if asked.isdecimal():
        usable = len(os.sched_getaffinity(0)) if cores is None else cores
        found.setdefault("OMP_NUM_THREADS", str(max(1, min(int(asked), usable))))
    return found


def shipping(run: RunFolder, ship: Literal["auto", "always", "never"]) -> dict[str, str]:
    """Whether the child may write to MLflow (RACELAB_SHIP). Several nodes must not write one sqlite file.

    Raises:
        ConfigError: the address of the run's store is none.
    """
    from racelab.experiments.tracking.tracker import SHIP_VARIABLE

    if ship == "always":
        return {SHIP_VARIABLE: "1"}
    if ship == "auto":
        tracking = stored_config(run).get("tracking")
        configured = tracking.get("uri") if isinstance(tracking, dict) else None
        if not tracking_uri(run.path.parent, configured or None).startswith("sqlite:"):
            return {}
    return {SHIP_VARIABLE: "0"}


def header(me: Identity, words: Sequence[str]) -> str:
    """A line before what a child prints."""
    return f"{_MARK}{me.job}, restart {me.restart}, rank {me.rank} on {me.node}, {now_iso()}: {shlex.join(words)}"


def said_last(log: Path | None) -> str:
    """The last line that a child printed; "" if it said nothing or nobody knows where."""
    line = "" if log is None else last_line(log)
    return "" if line.startswith(_MARK) else line


def own_output() -> Path | None:
    """The file that this process prints to; None if it is none, as a pipe or a terminal."""
    try:
        path = Path(os.readlink("/proc/self/fd/1"))
    except OSError:
        return None
    return path if path.is_file() else None


def signal_name(number: int) -> str:
    """For people."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (out of memory?)" if number == signal.SIGKILL else name
