"""What can go wrong outside, by kind; tries, waits and deadlines that the tools share."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

KINDS: Final = (
    "429",
    "5xx",
    "4xx",
    "timeout",
    "connection",
    "bad_reply",
    "paywall",
    "too_large",
    "not_text",
    "unreadable",
    "refused_address",
    "redirects",
    "internal",
)
"""429, 5xx, 4xx: HTTP answers; bad_reply: no JSON of the expected shape; paywall: a page in place of a PDF; not_text:
a body of another type; unreadable: a document that its parser cannot read; redirects: too many of them; internal: an
error of this program or of a parser, which must not end the run."""


class FaultError(Exception):
    """One try that failed. The text is ours and is shown to the agent: it never holds what a server said.

    Attributes:
        kind: one of `KINDS`.
        again: another try may succeed.
        wait_s: seconds that the server asks to wait before it.
        absent: nothing answers at the address, or it has no such service.
        counted: it is in a counter already.
    """

    def __init__(
        self, kind: str, text: str, *, again: bool = False, wait_s: float = 0.0, absent: bool = False
    ) -> None:
        """Keeps the parts."""
        super().__init__(text)
        self.kind, self.again, self.wait_s, self.absent = kind, again, wait_s, absent
        self.counted = False

    def copy(self) -> FaultError:
        """The same, to be raised by another thread; it counts where it happened."""
        copy = FaultError(self.kind, str(self), again=self.again, wait_s=self.wait_s, absent=self.absent)
        copy.counted = True
        return copy


def new_counter() -> Counter[str]:
    """All kinds at 0. Its keys never change, so that another thread may read it at any time."""
    return Counter(dict.fromkeys(KINDS, 0))


def count(fault: FaultError, faults: Counter[str]) -> None:
    """Counts it once."""
    if not fault.counted:
        faults[fault.kind] += 1
        fault.counted = True


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the monotonic clock."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """So many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until then, not below 0."""
        return max(0.0, self.at - time.monotonic())

    def check(self) -> None:
        """Raises FaultError once it has passed."""
        if not self.left:
            raise FaultError("timeout", "it took too long")


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long to try again.

    Attributes:
        max_retries: tries after the first.
        backoff_s: before the first of them, twice as long before each next one, or what Retry-After asks for.
        sleep: waits.
    """

    max_retries: int
    backoff_s: float
    sleep: Callable[[float], object] = time.sleep

    def persist(self, attempt: Callable[[], T], *, deadline: Deadline, faults: Counter[str]) -> T:
        """Tries until it succeeds, there is no hope, no try left, or no time to wait for the next.

        Every failed try counts in `faults`, also when a later one succeeds.

        Raises:
            FaultError: of the last try.
        """
        for tries in itertools.count():
            try:
                return attempt()
            except FaultError as fault:
                count(fault, faults)
                wait = max(self.backoff_s * 2.0 ** min(tries, 16), fault.wait_s)
                if not fault.again or tries >= self.max_retries or wait >= deadline.left:
                    raise
            self.sleep(wait)
        raise AssertionError("unreachable")


class Gate:
    """At most so many at a time; waiting for a place ends at the deadline."""

    def __init__(self, places: int) -> None:
        """All free."""
        self._places = threading.BoundedSemaphore(places)

    def run(self, work: Callable[[], T], deadline: Deadline) -> T:
        """`work()` in one of the places."""
        if not self._places.acquire(timeout=deadline.left):
            raise FaultError("timeout", "it took too long: too many requests are under way")
        try:
            return work()
        finally:
            self._places.release()


class _Box(Generic[T]):
    """What a thread leaves behind."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: T | None = None
        self.error: BaseException | None = None


def within(seconds: float, work: Callable[[], T], name: str) -> T:
    """`work()` in a thread of its own, waited for no longer than that.

    A parser or a name server cannot be interrupted; whoever is late is left behind and ends by itself.

    Raises:
        FaultError: kind `timeout`; or whatever `work` raises.
    """
    box: _Box[T] = _Box()

    def run() -> None:
        try:
            box.value = work()
        except BaseException as error:  # handed to the waiting thread
            box.error = error
        finally:
            box.done.set()

    threading.Thread(target=run, name=name, daemon=True).start()
    if not box.done.wait(seconds):
        raise FaultError("timeout", f"no result within {seconds:g} s")
    if box.error is not None:
        raise box.error
    return box.value  # type: ignore[return-value]
