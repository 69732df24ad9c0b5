"""Who works on a run: one process, known by its lock, its heartbeat and, where a launcher started it, its fence.

`flock` is the truth between processes of one host. Between hosts some network filesystems carry it and some do not, so
a holder on another host is believed as long as its heartbeat is fresh. A process with a fence knows more: its launcher
has given the run to it, so the holder is being stopped or is gone, and can write nothing more (`fence.py`). It waits
for that instead of giving up.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from racelab.experiments import fence
from racelab.experiments.errors import FencedError, InUseError, RunFolderError
from racelab.experiments.fsio import now_iso, rename, try_flock, unwritten

if TYPE_CHECKING:
    from racelab.experiments.runfolder import RunFolder

HEARTBEAT_S: Final = 10.0
"""Seconds between two touches of the heartbeat file."""
STALE_S: Final = 120.0
"""A heartbeat older than this many seconds means that nobody works on the run any more."""
_SILENT_S: Final = 2 * HEARTBEAT_S
"""So long must a fenced holder on another host have been silent before it is passed over."""
_LOCK_WAIT_S: Final = 0.5  # `status` probes the lock for an instant; an attempt must not fail because of it
_POLL_S: Final = 0.1


def _open(run: RunFolder) -> int:
    try:
        return os.open(run.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritten(f"cannot lock {run.path}", error) from error


class RunLock:
    """The exclusive right to work in a run folder, with a thread that touches the heartbeat.

    A context manager. The lock is a `flock`: it goes away with the process, however that ends.
    """

    def __init__(self, run: RunFolder) -> None:
        """Takes the lock: at once, or with a fence of the run within `fence.wait_s()`.

        Raises:
            InUseError: another process has it.
            RunFolderError: the folder cannot be written.
            FencedError: this process was replaced, perhaps while it waited.
        """
        self.run = run
        fence.check(run.path)
        self._token = fence.held(run.path)
        self._wait_s = fence.wait_s() if self._token else _LOCK_WAIT_S
        deadline = time.monotonic() + self._wait_s
        self._fd = _open(run)
        try:
            self._wait_for_flock(deadline)
            self._wait_for_other_host(deadline)
            if not self._token:
                self._retire_holder()
            self._sign()
        except BaseException:
            os.close(self._fd)
            raise
        (run.path / "heartbeat").touch()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="racelab-heartbeat", daemon=True)
        self._thread.start()

    def _wait_for_flock(self, deadline: float) -> None:
        """A process that was replaced and does not even end (suspended, stuck in the kernel) keeps the old file."""
        while not try_flock(self._fd, _POLL_S):
            fence.check(self.run.path)
            if time.monotonic() < deadline:
                continue
            holder = self.run.holder() or {}
            if not self._is_replaced(holder):
                raise self._in_use(holder)
            os.close(self._fd)
            with contextlib.suppress(FileNotFoundError):
                rename(self.run.path / "lock", self.run.path / ".lock.replaced")
            self._fd = _open(self.run)
            deadline = time.monotonic() + _LOCK_WAIT_S

    def _is_replaced(self, holder: dict[str, Any]) -> bool:
        """Whether the holder had a fence that this process has taken over: nothing that it writes counts any more."""
        return bool(self._token) and holder.get("fence") not in (None, self._token)

    def _wait_for_other_host(self, deadline: float) -> None:
        """The flock is ours, but a holder on another host may never hear of it."""
        while True:
            holder, age = self.run.holder(), self.run.heartbeat_age()
            if holder is None or age is None or holder.get("host") == socket.gethostname():
                return
            is_fenced = self._is_replaced(holder)
            if age >= (_SILENT_S if is_fenced else STALE_S):
                return
            fence.check(self.run.path)
            if time.monotonic() >= deadline or not self._token:
                if is_fenced:
                    return  # it shows signs of life, but nothing that it writes counts any more
                raise self._in_use(holder, age)
            time.sleep(_POLL_S)

    def _in_use(self, holder: dict[str, Any], age: float | None = None) -> InUseError:
        pid, host = holder.get("pid", "?"), holder.get("host", "?")
        mend = f"wait for it, or stop it there with `kill {pid}`"
        if age is not None:
            mend += f"; if it is dead already, try again in {STALE_S - age:.0f} s"
        after = f" after {self._wait_s:.0f} s of waiting" if self._token else ""
        return InUseError(f"run {self.run.run_id} is in use by pid {pid} on host {host}{after}; {mend}")

    def _retire_holder(self) -> None:
        """A holder on another host that is silent may only be suspended: it must not go on beside this process.

        The fence of a job that is just being started is another than the holder's, and is left alone.
        """
        holder = self.run.holder()
        if holder is not None and holder.get("fence") and holder.get("host") != socket.gethostname():
            fence.retire(self.run.path, str(holder["fence"]))

    def _sign(self) -> None:
        fence.check(self.run.path)
        token = fence.held(self.run.path) or None
        self._holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now_iso(), "fence": token}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(self._holder).encode(), 0)

    @contextlib.contextmanager
    def by_hand(self) -> Iterator[None]:
        """Inside the block a run that a launcher has had is this process's, though no launcher started it.

        `launch` becomes null, so that no job begins on the run any more; a new fence, held by this process, stops one
        that has begun. Nothing happens to a run that no launcher has had, or in the process of a job itself.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        path = self.run.path
        assigned = bool(self.run.info().get("launch"))
        if self._token or not (assigned or fence.read(path)):
            yield
            return
        if assigned:
            self.run.update(launch=None)
        token = fence.new_token()
        fence.take(path, token, {"by_hand": True})
        with fence.hold(path, token):
            self._sign()
            yield

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            try:
                fence.check(self.run.path)
                os.utime(self.run.path / "heartbeat")
            except FencedError:
                return  # the sign of life would be taken for that of the process that has the run now
            except (RunFolderError, OSError):
                continue  # a disk that does not answer must not end the thread; utime needs no space

    def release(self) -> None:
        """Lets go; a second call does nothing.

        A replaced process does so, too: the one that waits for it wants to know. What that one wrote into the lock
        stays.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        if self.run.holder() == self._holder:
            os.ftruncate(self._fd, 0)
        os.close(self._fd)

    def __enter__(self) -> RunLock:
        """Itself; the lock is already taken."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Releases."""
        self.release()
