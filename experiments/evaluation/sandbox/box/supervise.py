"""Starts the program in a process of its own, watches over it, ends it and all that it started, and reports.

In namespaces this is process 1 of the run: when it ends, the kernel ends every other. Else the program and its
descendants are one process group, which they cannot leave (`filter.py`), and orphans come to this process.
"""

from __future__ import annotations

import os
import resource
import select
import time
from collections.abc import Callable
from typing import NoReturn, TypedDict

from racelab.experiments.evaluation.sandbox.box import linux
from racelab.experiments.evaluation.sandbox.box.program import OUT_OF_MEMORY, run
from racelab.experiments.evaluation.sandbox.box.stored import holds_more

_TICK_S, _TICK_OUTSIDE_S = 0.02, 0.1
_SLACK = 256
BOX_FILES = 8
"""All files of a program together hold this many times what one may."""


class Job(TypedDict):
    """What the parent sends."""

    program: str
    means: str
    folder: str
    python: list[str]
    packages: list[str]
    report: int
    timeout_s: float
    cpu_s: int
    memory_mb: int
    file_mb: int
    processes: int


class Report:
    """The pipe to the parent: `refused`, or `started` and then `ended`, one line each."""

    def __init__(self, place: int) -> None:
        """Takes the pipe."""
        self.place = place

    def send(self, word: str, *facts: object) -> None:
        """Writes one line; a parent that is gone is none of its business."""
        line = " ".join([word, *map(str, facts)]).replace("\n", " ") + "\n"
        try:
            os.write(self.place, line.encode("utf-8", "replace"))
        except OSError:
            return


def supervise(
    job: Job, report: Report, watch: int, confine: Callable[[], None], alone: bool, user: int | None
) -> None:
    """Runs the program to its end, or to the end of its limits.

    Args:
        job: program and limits.
        report: where the outcome goes.
        watch: a pipe that closes when the parent is gone.
        confine: called in the program's process; gives up what it must not have.
        alone: no namespaces; processes are told apart by their group.
        user: the run's own user id, if it has one.
    """
    asked, nonce = os.pipe()
    heard, reply = os.pipe()
    opened, opener = os.pipe()
    child = os.fork()
    if child == 0:
        _be_program(job, (asked, reply), opener, confine, _others(alone, user))
    for place in (asked, reply, opener):
        os.close(place)
    token = os.urandom(24).hex().encode()
    os.write(nonce, token)
    refusal = b"".join(iter(lambda: os.read(opened, 4096), b""))
    if refusal:
        os.waitpid(child, 0)
        report.send("refused", refusal.decode())
        return
    report.send("started", child if alone else 0)
    reason, status, cpu = _watch(child, job, watch, alone)
    if alone:
        last = _end_all(child, user)
        status, cpu = last or (status, cpu)
    os.set_blocking(heard, False)
    try:
        said = os.read(heard, 256)
    except OSError:
        said = b""
    if said == OUT_OF_MEMORY:
        reason = reason or "memory"
    if cpu >= job["cpu_s"] and (status is None or os.WIFSIGNALED(status)):
        reason = reason or "cpu"
    report.send("ended", -1 if status is None else status, reason or "-", int(said == token))


def _be_program(
    job: Job, ends: tuple[int, int], opener: int, confine: Callable[[], None], others: int | None
) -> NoReturn:
    """The program's own process: gives everything up, then runs it. Never returns."""
    try:
        try:
            os.setpgid(0, 0)
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            confine()
            _limit(job, others)
            _close_all_but({0, 1, 2, *ends, opener, *_held})
        except BaseException as error:
            os.write(opener, f"{type(error).__name__}: {error}"[:400].encode("utf-8", "replace"))
            raise
        os.close(opener)
        os._exit(run(job["program"], *ends))
    finally:
        os._exit(1)


_held: set[int] = set()
"""Folders that stay open because their paths cannot be walked any more (see `launch.py`)."""


def hold(place: int) -> None:
    """Keeps a file open in the program's process."""
    _held.add(place)


def _limit(job: Job, others: int | None) -> None:
    """Limits of this process and, each for itself, of those that it starts; the number of processes is of all."""
    mega = 1 << 20
    for limit, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_FSIZE, job["file_mb"] * mega),
        (resource.RLIMIT_AS, job["memory_mb"] * mega),
    ):
        _lower(limit, most, most)
    _lower(resource.RLIMIT_CPU, job["cpu_s"], job["cpu_s"] + 1)
    if others is None:
        _lower_loosely(job["processes"])
    else:
        most = job["processes"] + others
        _lower(resource.RLIMIT_NPROC, most, most)


def _lower(limit: int, soft: int, hard: int) -> None:
    """Sets a limit; one that is lower already stays."""
    bound = resource.getrlimit(limit)[1]
    if bound != resource.RLIM_INFINITY:
        soft, hard = min(soft, bound), min(hard, bound)
    resource.setrlimit(limit, (soft, hard))


def _lower_loosely(processes: int) -> None:
    """Where the kernel counts all that the user runs, bounds what may come on top of that.

    How many there are is not to be seen from everywhere (containers), so it is tried; the exact number is held by
    `_watch`, and this bounds what may be made between two of its looks.
    """
    bound = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    extra = processes + _SLACK
    most = extra
    while bound == resource.RLIM_INFINITY or most < bound:
        resource.setrlimit(resource.RLIMIT_NPROC, (most, bound))
        if _can_fork():
            most += extra
            break
        most *= 2
    _lower(resource.RLIMIT_NPROC, most, most)


def _can_fork() -> bool:
    try:
        child = os.fork()
    except BlockingIOError:
        return False
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


def _others(alone: bool, user: int | None) -> int | None:
    """How many processes the kernel counts with the program's; None: all of the user's.

    A user of its own has no others. In a user namespace of its own (counted apart since Linux 5.14) there are the
    first process and the supervisor.
    """
    if user is not None:
        return 0
    release = os.uname().release.split(".")
    try:
        return 2 if not alone and (int(release[0]), int(release[1])) >= (5, 14) else None
    except (ValueError, IndexError):
        return None


def _close_all_but(kept: set[int]) -> None:
    last = -1
    for place in (*sorted(kept), 1 << 16):
        if place > last + 1:  # closerange(0, 0) would close everything
            os.closerange(last + 1, place)
        last = place


def _watch(child: int, job: Job, watch: int, alone: bool) -> tuple[str, int | None, float]:
    """Waits for the program.

    Returns:
        Why it must end ("" if it ended by itself), its wait status if it has ended, its seconds of CPU.
    """
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    tick = _TICK_OUTSIDE_S if alone else _TICK_S
    try:
        poll.register(os.pidfd_open(child), select.POLLIN)
    except OSError:
        tick = 0.005
    end = time.monotonic() + job["timeout_s"]
    due = 0.0
    while True:
        ready = {place for place, _ in poll.poll(1000 * max(0.0, min(tick, end - time.monotonic())))}
        ended = _reap(child)
        if ended is not None:
            return ("", *ended)
        now = time.monotonic()
        if watch in ready:
            return "abandoned", None, 0.0
        if now >= end:
            return "wall", None, 0.0
        if now >= due:
            tasks, resident = _census(child if alone else None)
            if tasks > job["processes"]:
                return "processes", None, 0.0
            if resident > job["memory_mb"] << 20:
                return "memory", None, 0.0
            if alone and holds_more(job["folder"], BOX_FILES * job["file_mb"] << 20):
                return "files", None, 0.0
            due = now + tick


def _reap(child: int) -> tuple[int, float] | None:
    """Buries what has ended; status and seconds of CPU of the program's first process if it is among it."""
    found = None
    while True:
        try:
            who, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if who == 0:
            return found
        if who == child:
            found = status, usage.ru_utime + usage.ru_stime


def _census(group: int | None) -> tuple[int, int]:
    """Threads and resident bytes of the run: of a process group, or of all in this namespace but process 1."""
    page = resource.getpagesize()
    tasks = resident = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or (group is None and name == "1"):
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                fields = file.read(4096).rpartition(b") ")[2].split()
        except OSError:
            continue
        if group is None or int(fields[2]) == group:
            tasks += int(fields[17])
            resident += int(fields[21]) * page
    return tasks, resident


def _end_all(group: int, user: int | None) -> tuple[int, float] | None:
    """Kills the run's process group, and as root all of its user; buries them."""
    if user is not None:
        killer = os.fork()
        if killer == 0:
            try:
                linux.become(user)
                os.kill(-1, linux.SIGKILL)
            finally:
                os._exit(0)
    found = None
    try:
        os.killpg(group, linux.SIGKILL)
    except OSError:
        found = None  # all gone
    while True:
        try:
            who, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return found
        if who == group:
            found = status, usage.ru_utime + usage.ru_stime
