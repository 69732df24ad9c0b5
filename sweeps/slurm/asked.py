"""The signals that have come to a job's process. It imports nothing of racelab, to be ready before the first comes."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class Asked:
    """The signals that have come. The handlers note them and do nothing else.

    Attributes:
        at: clock (monotonic, s) of the first, None if none has come.
        user: clock of the first SIGUSR2.
        term: clock of the first SIGTERM or SIGINT.
        terms: how many SIGTERM or SIGINT have come.
    """

    def __init__(self) -> None:
        """None has come."""
        self.at: float | None = None
        self.user: float | None = None
        self.term: float | None = None
        self.terms = 0

    def listen(self) -> None:
        """Installs the handlers, for the rest of the process's life."""
        for signum in _SIGNALS:
            signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self.at = now if self.at is None else self.at
        if signum == signal.SIGUSR2:
            self.user = now if self.user is None else self.user
        else:
            self.term = now if self.term is None else self.term
            self.terms += 1
