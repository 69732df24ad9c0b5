"""A fixed number of simulators that live as long as the run: lent to one episode each, replaced when they fail."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Final

from racelab.experiments.errors import UnreachableError
from racelab.experiments.tasks.scienceworld.installation import INSTALL_JAVA
from racelab.experiments.tasks.scienceworld.jvm import FaultKind, Simulator, SimulatorFaultError, State

_TRIES: Final = 3  # of a start, before the run is told that there is no simulator
_BACKOFF_S: Final = 1.0  # before the next one; a machine out of memory may need a moment


class JvmPool:
    """Lends simulators; any number of threads may ask. A simulator that has failed is ended and replaced.

    Counters since the last `take_counters`: `started`, `restarts` (started in the place of one that failed),
    `fault_dead`, `fault_hung`, `fault_error`, `fault_start`, `steps`, and `step_s` (seconds spent in steps).
    """

    def __init__(self, start: Callable[[], Simulator], size: int) -> None:
        """Starts nothing yet.

        Args:
            start: makes a simulator, or raises SimulatorFaultError.
            size: simulators at once.
        """
        self._start, self._size = start, size
        self._changed = threading.Condition()
        self._idle: list[Simulator] = []
        self._lent: set[Simulator] = set()
        self._starting = 0
        self._owed = 0  # simulators that failed and have no successor yet
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._step_s = 0.0
        # Held weakly, so that a pool that is no longer used can go.
        reference = weakref.ref(self)
        self._at_exit: Callable[[], None] = lambda: _close(reference)
        atexit.register(self._at_exit)

    def lease(self) -> Simulator:
        """A simulator that nobody else has; waits while all are lent.

        Raises:
            UnreachableError: none could be started, several times in a row.
            RuntimeError: the pool is closed.
        """
        with self._changed:
            while True:
                if self._closed:
                    raise RuntimeError("the pool of simulators is closed")
                while self._idle:
                    simulator = self._idle.pop()
                    if simulator.alive:
                        self._lent.add(simulator)
                        return simulator
                    self._fail("dead")  # ended while nobody used it
                    simulator.close()
                if len(self._lent) + self._starting < self._size:
                    self._starting += 1
                    break
                self._changed.wait()
        try:
            simulator = self._started()
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify()
        with self._changed:
            if self._closed:  # closed while this one came up
                simulator.close()
                raise RuntimeError("the pool of simulators is closed")
            self._counts["started"] += 1
            if self._owed:
                self._owed -= 1
                self._counts["restarts"] += 1
            self._lent.add(simulator)
        return simulator

    def give_back(self, simulator: Simulator) -> None:
        """Ends a lease; one that has failed is not lent again."""
        with self._changed:
            if simulator not in self._lent:
                return
            self._lent.discard(simulator)
            if simulator.fault or self._closed:
                self._owed += bool(simulator.fault)
                simulator.close()
            else:
                self._idle.append(simulator)
            self._changed.notify()

    def replace(self, simulator: Simulator) -> Simulator:
        """Another one for a failed one; raises what `lease` does."""
        self.give_back(simulator)
        return self.lease()

    def count_fault(self, kind: FaultKind) -> None:
        """Notes that a simulator failed its episode."""
        with self._changed:
            self._counts[f"fault_{kind}"] += 1

    def step(self, simulator: Simulator, command: str) -> State:
        """`Simulator.step`, timed and counted."""
        began = time.perf_counter()
        state = simulator.step(command)
        with self._changed:
            self._counts["steps"] += 1
            self._step_s += time.perf_counter() - began
        return state

    def take_counters(self) -> dict[str, float]:
        """All counters, which start again at zero."""
        names = ("started", "restarts", "fault_dead", "fault_hung", "fault_error", "fault_start", "steps")
        with self._changed:
            counts = {name: float(self._counts[name]) for name in names} | {"step_s": self._step_s}
            self._counts.clear()
            self._step_s = 0.0
        return counts

    def close(self) -> None:
        """Ends all simulators, those that are lent as well. May be called twice."""
        with self._changed:
            self._closed = True
            simulators = [*self._idle, *self._lent]
            self._idle.clear()
            self._lent.clear()
            self._changed.notify_all()
        for simulator in simulators:
            simulator.close()
        atexit.unregister(self._at_exit)

    def _fail(self, kind: FaultKind) -> None:
        """Counts one that failed outside of an episode; the lock is held."""
        self._counts[f"fault_{kind}"] += 1
        self._owed += 1

    def _started(self) -> Simulator:
        error: SimulatorFaultError | None = None
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_BACKOFF_S)
            try:
                return self._start()
            except SimulatorFaultError as failed:
                error = failed
                self.count_fault("start")
        raise UnreachableError(
            f"no ScienceWorld simulator can be started ({error}); check `java -version` ({INSTALL_JAVA}), "
            "free memory, or lower task.jvms or task.heap_mb"
        ) from error


def _close(reference: weakref.ref[JvmPool]) -> None:
    pool = reference()
    if pool is not None:
        with contextlib.suppress(Exception):
            pool.close()
