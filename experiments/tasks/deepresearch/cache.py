"""A least-recently-used cache that threads share; equal requests under way at the same time are made once.

Only successes are kept: a server that was busy may answer the next time.

Deviation: the paper's cache is an actor shared by all rollout workers; this one belongs to the process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from racelab.experiments.tasks.deepresearch.faults import Deadline, FaultError

T = TypeVar("T")


class _Pending(Generic[T]):
    """A request under way."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: T | None = None
        self.fault: FaultError | None = None


class SharedCache(Generic[T]):
    """Values by key."""

    def __init__(self, entries: int) -> None:
        """Empty; holds at most `entries` (>= 1)."""
        self._entries = entries
        self._known: OrderedDict[Hashable, T] = OrderedDict()
        self._pending: dict[Hashable, _Pending[T]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Values held."""
        return len(self._known)

    def get(self, key: Hashable, make: Callable[[], T], deadline: Deadline) -> tuple[T, bool]:
        """The value, and whether somebody else had asked for it.

        Args:
            key: equal keys have equal values.
            make: asks for it; a FaultError goes to all who wait for this request, and is not kept.
            deadline: of the waiting.

        Raises:
            FaultError: as `make`, or the deadline passed while another thread asked.
        """
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key], True
            pending = self._pending.get(key)
            if pending is None:
                mine: _Pending[T] = _Pending()
                self._pending[key] = mine
        if pending is not None:
            return self._await(pending, deadline), True
        return self._make(key, make, mine), False

    def _await(self, pending: _Pending[T], deadline: Deadline) -> T:
        if not pending.done.wait(deadline.left):
            raise FaultError("timeout", "it took too long")
        if pending.fault is not None:
            raise pending.fault.copy()
        return pending.value  # type: ignore[return-value]

    def _make(self, key: Hashable, make: Callable[[], T], mine: _Pending[T]) -> T:
        try:
            mine.value = make()
        except BaseException as error:
            mine.fault = error if isinstance(error, FaultError) else FaultError("internal", "it failed")
            raise
        else:
            with self._lock:
                self._known[key] = mine.value
                while len(self._known) > self._entries:
                    self._known.popitem(last=False)
            return mine.value
        finally:
            with self._lock:
                del self._pending[key]
            mine.done.set()
