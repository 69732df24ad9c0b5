"""A model as text in, text out: what the methods ask of a stronger model, wherever it runs.

`ApiModel` (`models/api.py`) asks a server; `LocalChat` here asks a `LanguageModel` of this process, so that a method
needs no server where there is none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from racelab.experiments.models.judge_prompted import closed_thought
from racelab.experiments.models.text import before_stop, defang
from racelab.experiments.ports import LanguageModel
from racelab.experiments.rng import torch_generator
from racelab.experiments.types import GenerationRequest, Sample


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One reply, please. Equal requests have equal replies.

    Attributes:
        system: the system's turn, or None.
        user: the user's turn.
        max_tokens: the reply is cut there; None: only where the model's window ends.
        temperature: > 0 samples; 0 is greedy.
        top_p: nucleus; 1.0 keeps the whole distribution.
        draw: another number asks for another reply to the same turns (a second try). It only matters where the
            temperature is > 0.
        stop: the reply also ends before one of these strings.
        seed: of the draws, for a server that heeds one; None: none is sent. A local model's seed is its own.
        thinking: whether a model that can think is let to; None: as its template has it.
    """

    system: str | None
    user: str
    max_tokens: int | None
    temperature: float = 0.0
    top_p: float = 1.0
    draw: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    thinking: bool | None = None

    def identity(self) -> dict[str, Any]:
        """All that decides the reply (JSON values).

        The fields that came later are left out where they ask for nothing: what was drawn and cached for such requests
        stays what it was.
        """
        unset = {f.name for f in fields(self) if f.name in _LATER and getattr(self, f.name) == f.default}
        return {name: value for name, value in asdict(self).items() if name not in unset}


_LATER = frozenset({"stop", "seed", "thinking"})


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back.

    Attributes:
        text: None if no reply came; `error` then says why.
        finished: False if it was cut at `max_tokens`, or never came.
        cached: nobody was asked: it was read from the disk, or an equal request in the same call had it.
        error: one line, empty where there is a text.
        reasoning: what a server hands over apart from the text as the model's thinking; "" if it does not.
        n_tokens: generated, thinking included, as the server counts; 0 where it does not say.
        too_long: no reply came because the request does not fit the model's window; it never will.
    """

    text: str | None
    finished: bool = True
    cached: bool = False
    error: str = ""
    reasoning: str = ""
    n_tokens: int = field(default=0, compare=False)
    too_long: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Calls:
    """Counts since the model was opened; `made + cached` is the number of requests.

    Attributes:
        made: requests put to the model, the failed ones included, each counted once.
        cached: requests for which nobody was asked.
        failed: of `made`, those without a reply.
        retried: further tries of requests in `made`.
        prompt_tokens: of the replies in `made`, as the model counts.
        completion_tokens: likewise.
    """

    made: int = 0
    cached: int = 0
    failed: int = 0
    retried: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Calls) -> Calls:
        """Count by count."""
        return Calls(*(a + b for a, b in zip(self._counts(), other._counts(), strict=True)))

    def __sub__(self, earlier: Calls) -> Calls:
        """What happened since `earlier`."""
        return Calls(*(a - b for a, b in zip(self._counts(), earlier._counts(), strict=True)))

    def _counts(self) -> tuple[int, ...]:
        return tuple(asdict(self).values())


@runtime_checkable
class ChatModel(Protocol):
    """A frozen model that is spoken to in text."""

    @property
    def calls(self) -> Calls:
        """What was asked so far."""

    def complete(self, requests: Sequence[ChatRequest]) -> list[Reply]:
        """One reply per request, in order. A request that fails is a reply without a text.

        Raises:
            UnreachableError: no request can succeed (no server, wrong key, no such model).
        """

    def describe(self) -> dict[str, object]:
        """All that is needed to ask the same again (JSON values), secrets left out."""


class LocalChat:
    """A language model of this process; implements `ChatModel`.

    A sampled reply depends on its request and the seed, and not on what else is asked: each has a generator of its
    own. Greedy replies draw nothing, so they are decoded together; there the batch can change the last bits of a
    logit.
    """

    def __init__(self, model: LanguageModel, *, seed: int = 0, model_id: str = "", batch: int = 64) -> None:
        """Keeps the parts.

        Args:
            model: frozen, or its replies change as it does.
            seed: of the sampled replies.
            model_id: name or hash, for `describe`.
            batch: greedy requests decoded at a time; bounds the memory.
        """
        self._model, self._seed, self._model_id, self._batch = model, seed, model_id, batch
        self._calls = Calls()

    @property
    def calls(self) -> Calls:
        """What was asked so far; a request beyond the window counts as made and failed."""
        return self._calls

    def describe(self) -> dict[str, object]:
        """Kind, model and seed (JSON values)."""
        return {"kind": "local", "model": self._model_id, "seed": self._seed}

    def complete(self, requests: Sequence[ChatRequest]) -> list[Reply]:
        """One reply per request, in order; one that does not fit the model's window fails."""
        prefixes = [self._prefix(r) for r in requests]
        window = self._model.window
        fits = [i for i, r in enumerate(requests) if len(prefixes[i]) + (r.max_tokens or 1) <= window]
        samples: dict[int, Sample] = {}
        for part in self._batches(requests, fits):
            wanted = [_generation(requests[i], prefixes[i], window) for i in part]
            drawn = self._model.generate(wanted, torch_generator(self._seed, _purpose(requests[part[0]])))
            samples.update((i, group[0]) for i, group in zip(part, drawn, strict=True))
        self._calls += Calls(
            made=len(requests),
            failed=len(requests) - len(fits),
            prompt_tokens=sum(len(prefixes[i]) for i in fits),
            completion_tokens=sum(len(s.tokens) for s in samples.values()),
        )
        return [
            Reply(before_stop(samples[i].text, r.stop), samples[i].finished, n_tokens=len(samples[i].tokens))
            if i in samples
            else Reply(
                None, finished=False, error=self._too_long(len(prefixes[i]), r.max_tokens), too_long=True
            )
            for i, r in enumerate(requests)
        ]

    def _prefix(self, request: ChatRequest) -> tuple[int, ...]:
        system = None if request.system is None else defang(request.system)
        closing = closed_thought(self._model, thinking=request.thinking is not False)
        return (*self._model.chat(defang(request.user), system), *closing)

    def _batches(self, requests: Sequence[ChatRequest], fits: Sequence[int]) -> list[list[int]]:
        """Indices decoded together: a sampled request alone, greedy ones in parts of `batch`."""
        greedy = [i for i in fits if requests[i].temperature == 0]
        parts = [greedy[k : k + self._batch] for k in range(0, len(greedy), self._batch)]
        return parts + [[i] for i in fits if requests[i].temperature > 0]

    def _too_long(self, n_prompt: int, max_tokens: int | None) -> str:
        return (
            f"{n_prompt} tokens of prompt + {max_tokens or 1} to generate exceed the model's window of "
            f"{self._model.window}"
        )


def _generation(request: ChatRequest, prefix: tuple[int, ...], window: int) -> GenerationRequest:
    r = request
    room = window - len(prefix)
    return GenerationRequest(
        prefix, 1, room if r.max_tokens is None else r.max_tokens, r.temperature, r.top_p, r.stop
    )


def _purpose(request: ChatRequest) -> str:
    """Names the request's own stream of draws."""
    body = json.dumps(request.identity(), sort_keys=True)
    return f"chat:{hashlib.sha256(body.encode()).hexdigest()}"
