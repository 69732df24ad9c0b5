"""Stopping between steps: SIGTERM and SIGINT are noted, the step in hand is finished and saved.

A run that was started for another process (a cell of a sweep) also stops when that process is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Final

PARENT_VARIABLE: Final = "RACELAB_PARENT_PID"
"""Environment variable: the process that the run is started for and may not outlive."""
_PARENT_POLL_S: Final = 0.5


class StopAtOnce(BaseException):
    """Asked to stop where nothing is lost by it, in `StopRequest.at_once`; no `Exception`, for it is no fault."""


class StopRequest:
    """A context manager that turns the first SIGTERM or SIGINT into a request; a second SIGINT interrupts at once.

    Attributes:
        signum: the signal that asked to stop, or 0.
    """

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.signum = 0
        self._before: dict[int, object] = {}
        self._over = threading.Event()
        self._at_once = False

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a request ends the work in hand instead of waiting for its end; nothing may be half written there.

        Raises:
            StopAtOnce: the request, also one that came before.
        """
        self._at_once = True
        try:
            if self.signum:
                raise StopAtOnce
            yield
        finally:
            self._at_once = False

    def __enter__(self) -> StopRequest:
        """Installs the handlers."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._before[signum] = signal.signal(signum, self._note)
        parent = os.environ.get(PARENT_VARIABLE, "")
        if parent.isdecimal():
            watch = threading.Thread(
                target=self._watch, args=(int(parent),), name="racelab-parent", daemon=True
            )
            watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Puts the former handlers back."""
        self._over.set()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signum:
            self.signum = signum
            with contextlib.suppress(OSError):  # whoever read along may have got the Ctrl-C, too, and be gone
                os.write(2, b"stopping at the next safe point; Ctrl-C (again) stops at once\n")
            if self._at_once:
                raise StopAtOnce

    def _watch(self, parent: int) -> None:
        """A parent that is gone has the effect of a SIGTERM; nobody is left who could send one."""
        while not self.signum:
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)  # the handler runs in the main thread, wherever that is
            if self._over.wait(_PARENT_POLL_S):
                return

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells say it: 143 for SIGTERM, 130 for SIGINT; 0 if nobody asked."""
        return 128 + self.signum if self.signum else 0
