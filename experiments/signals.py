"""Stopping between steps: SIGTERM and SIGINT are noted, the step in hand is finished and saved."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType


class StopRequest:
    """A context manager that turns the first SIGTERM or SIGINT into a request; a second SIGINT interrupts at once.

    Attributes:
        signum: the signal that asked to stop, or 0.
    """

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.signum = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        """Installs the handlers."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Puts the former handlers back."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signum:
            self.signum = signum
            os.write(2, b"stopping at the next safe point; Ctrl-C (again) stops at once\n")

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells say it: 143 for SIGTERM, 130 for SIGINT; 0 if nobody asked."""
        return 128 + self.signum if self.signum else 0
