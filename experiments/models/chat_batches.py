"""Requests that come one by one, decoded together: what a server does with a model of its own.

One thread decodes. It takes what is waiting, oldest first, up to `rows` replies, and decodes it in one batch; what
comes meanwhile is the next batch. Before each it gives others a few milliseconds to come.

Each reply draws from a generator of its own, made from its request's seed and messages and its place among the
request's replies. So neither the batch nor `n` decides what it draws. A batch of another size can still change the last
bits of a logit, as with every engine that batches; `rows=1` leaves nothing to chance.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from racelab.experiments.models.chat_wire import Completion, WireError, too_long
from racelab.experiments.rng import derived_seed
from racelab.experiments.types import GenerationRequest, Sample

if TYPE_CHECKING:
    from torch import Generator, Tensor

_GATHER_S: Final = 0.005
_BLOCK: Final = 64  # draws made at a time for one reply


class ServedModel(Protocol):
    """What is asked of a model; `backends.local.model.LocalModel` has it."""

    window: int

    def converse(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any] = ...) -> list[int]:
        """Token ids of a conversation up to and including the assistant's header."""

    def generate(
        self, requests: Sequence[GenerationRequest], rng: Callable[[], Tensor]
    ) -> list[list[Sample]]:
        """Decodes in one batch; `rng` is a function that gives each step's uniforms [rows]."""


class BusyError(Exception):
    """Too many requests are waiting.

    Attributes:
        wait_s: seconds after which it makes sense to ask again.
    """

    def __init__(self, wait_s: int) -> None:
        """Keeps the seconds."""
        super().__init__(f"too many requests are waiting; ask again in {wait_s} s")
        self.wait_s = wait_s


class StoppedError(Exception):
    """The decoding was ended before it was done."""


@dataclass(slots=True)
class Job:
    """A request and what came of it."""

    generation: GenerationRequest
    seed: int
    """Of its draws, the messages already in it."""
    result: Future[list[Sample]] = field(default_factory=Future)
    gone: bool = False
    """Nobody waits for the replies any more."""


class Batches:
    """A queue of requests and the thread that answers them."""

    def __init__(self, model: ServedModel, *, rows: int = 16, waiting: int = 256) -> None:
        """Starts the thread.

        Args:
            model: its tokenizer is used from any thread, its weights from one.
            rows: replies decoded at a time; bounds the memory.
            waiting: requests that wait at most, those under way left out.
        """
        self._model, self._rows, self._most = model, rows, waiting
        self._queue: deque[Job] = deque()
        self._change = threading.Condition()
        self._text = threading.Lock()  # not every tokenizer can be used by two threads
        self._stopping = False
        self._last_s = 1.0
        self.batches = self.answered = self.tokens = 0
        self._thread = threading.Thread(target=self._work, name="decode", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def submit(self, request: Completion) -> Job:
        """Queues a request.

        Raises:
            WireError: its messages leave no room in the model's window.
            DataError: the model's chat template refuses it.
            BusyError: the queue is full.
        """
        self._admit()
        with self._text:
            prefix = tuple(self._model.converse(request.messages, request.template or {}))
        room = self._model.window - len(prefix)
        if room < 1:
            raise too_long(len(prefix), self._model.window)
        wanted = min(request.max_tokens or room, room)
        if request.n > self._rows:
            raise WireError(f"n: must be a whole number from 1 to {self._rows}", field="n")
        messages = hashlib.sha256(str(prefix).encode()).hexdigest()
        seed = derived_seed(secrets.randbits(63) if request.seed is None else request.seed, messages)
        how = (request.n, wanted, request.temperature, request.top_p, request.stop)
        job = Job(GenerationRequest(prefix, *how), seed)
        with self._change:
            self._admit()
            self._queue.append(job)
            self._change.notify()
        return job

    def close(self, patience_s: float = 10.0) -> None:
        """Ends the thread after the step that it is at; whoever waits gets a StoppedError."""
        with self._change:
            self._stopping = True
            while self._queue:
                self._queue.popleft().result.set_exception(StoppedError())
            self._change.notify()
        self._thread.join(patience_s)

    def _admit(self) -> None:
        if self._stopping:
            raise StoppedError
        if len(self._queue) >= self._most:
            batches = 1 + self._most // self._rows
            raise BusyError(min(60, max(1, round(self._last_s * batches / 2))))

    def _work(self) -> None:
        while (jobs := self._next()) is not None:
            if jobs:
                self._decode(jobs)

    def _next(self) -> list[Job] | None:
        """What is decoded together next; None at the end."""
        with self._change:
            self._change.wait_for(lambda: self._stopping or self._queue)
            self._change.wait_for(self._is_full, _GATHER_S)
            if self._stopping:
                return None
            jobs: list[Job] = []
            room = self._rows
            while self._queue and (self._queue[0].gone or self._queue[0].generation.n <= room):
                job = self._queue.popleft()
                if not job.gone:
                    room -= job.generation.n
                    jobs.append(job)
            return jobs

    def _is_full(self) -> bool:
        return self._stopping or sum(job.generation.n for job in self._queue) >= self._rows

    def _decode(self, jobs: Sequence[Job]) -> None:
        start = time.monotonic()
        try:
            drawn = self._model.generate([job.generation for job in jobs], self._draws(jobs))
        except BaseException as error:  # whatever it is, those who wait must hear of it
            if len(jobs) > 1 and not isinstance(
                error, StoppedError
            ):  # one must not fail for another, or for space
                for job in jobs:
                    self._decode([job])
                return
            jobs[0].result.set_exception(error)
            for job in jobs[1:]:
                job.result.set_exception(StoppedError())
            return
        self._last_s = time.monotonic() - start
        self.batches += 1
        self.answered += len(jobs)
        self.tokens += sum(len(s.tokens) for samples in drawn for s in samples)
        for job, samples in zip(jobs, drawn, strict=True):
            job.result.set_result(samples)

    def _draws(self, jobs: Sequence[Job]) -> Draws:
        places = [(job.seed, i) for job in jobs for i in range(job.generation.n)]

        def check() -> None:
            if self._stopping or all(job.gone for job in jobs):
                raise StoppedError

        return Draws(places, check)


class Draws:
    """The uniforms of a batch, step by step: each row's from a generator of its own."""

    def __init__(self, places: Sequence[tuple[int, int]], check: Callable[[], None]) -> None:
        """One (seed, place) per row; `check` is called at every step and may raise."""
        self._places, self._check = places, check
        self._generators: list[Generator] = []
        self._block: Tensor | None = None
        self._used = _BLOCK

    def __call__(self) -> Tensor:
        """The next step's [rows], float64 in [0, 1)."""
        import torch

        self._check()
        if not self._generators:
            seeds = (derived_seed(seed, "served reply", place) for seed, place in self._places)
            self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        if self._used == _BLOCK or self._block is None:
            draws = [torch.rand(_BLOCK, generator=g, dtype=torch.float64) for g in self._generators]
            self._block, self._used = torch.stack(draws, 1), 0
        self._used += 1
        return self._block[self._used - 1]
