"""The decoding loop: one batch for all requests, rows leave it as soon as they are done.

The loop is the same for the fast and the plain path; a `Stepper` hides how logits are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from racelab.experiments.backends.local.sampling import choose
from racelab.experiments.errors import DataError
from racelab.experiments.types import GenerationRequest

Draws: TypeAlias = torch.Generator | Callable[[], Tensor]
"""Where a step's uniforms come from: a generator that all rows share, or a function that gives them, float64 in [0, 1),
one for each row of the batch (rows that have ended included). What it raises ends the decoding."""


class Stepper(Protocol):
    """Decoding state of a batch of rows."""

    def start(self, prefixes: Sequence[Sequence[int]], owner: Tensor, room: int) -> Tensor:
        """Prefill each prefix once; row r continues prefixes[owner[r]], by at most `room` tokens.

        Returns logits [rows, vocab].
        """

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token per row; logits [rows, vocab]."""

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""


@dataclass(slots=True)
class Row:
    """One sequence while it is being decoded."""

    request: int
    limit: int
    stop: tuple[str, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


class StopFinder:
    """Decides from text whether a row has produced one of its stop strings.

    Only the last tokens are decoded, and only if the newest token's own text can end a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` turns ids into text, special tokens included."""
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def hit(self, tokens: Sequence[int], stops: Sequence[str]) -> bool:
        """True if the newest token completes a stop string."""
        piece = self._pieces.get(tokens[-1])
        if piece is None:
            piece = self._pieces[tokens[-1]] = self._decode([tokens[-1]])
        # a replacement character: the token holds part of a character, only the joined text tells
        if "\ufffd" not in piece and not any(s[-1] in piece for s in stops):
            return False
        tail = max(len(s.encode()) for s in stops) + 4  # every token holds at least one byte
        text = self._decode(tokens[-tail:])
        return any(s in text for s in stops)


def check(requests: Sequence[GenerationRequest], window: int, vocab: int) -> None:
    """Raise DataError for a request that cannot be served."""
    for j, r in enumerate(requests):
        where = f"generation request {j}"
        if not r.prefix:
            raise DataError(f"{where}: the prefix is empty; give at least one token")
        if len(r.prefix) > window - 1:
            raise DataError(
                f"{where}: the prefix has {len(r.prefix)} tokens and needs room for one more, but the "
                f"model's window holds {window}; shorten the prompt"
            )
        if min(r.prefix) < 0 or max(r.prefix) >= vocab:
            raise DataError(f"{where}: the prefix holds a token id outside 0..{vocab - 1}")
        if r.n < 1 or r.max_tokens < 1:
            raise DataError(f"{where}: n and max_tokens must be at least 1, got {r.n} and {r.max_tokens}")
        if r.temperature < 0 or not 0 < r.top_p <= 1:
            raise DataError(
                f"{where}: temperature must be >= 0 and top_p in (0, 1], got {r.temperature} and {r.top_p}"
            )
        if any(not s for s in r.stop):
            raise DataError(f"{where}: an empty stop string; remove it")


def run(
    requests: Sequence[GenerationRequest],
    rng: Draws,
    stepper: Stepper,
    finder: StopFinder,
    end_ids: frozenset[int],
    window: int,
    device: str,
) -> list[list[Row]]:
    """Decode every request; see `LanguageModel.generate`.

    One uniform per original row is drawn from `rng` at every step, so a row's draws do not depend on when
    other rows end. Rows stand in the order of the requests, those of one request together.
    """
    rows = [
        Row(j, min(r.max_tokens, window - len(r.prefix)), r.stop)
        for j, r in enumerate(requests)
        for _ in range(r.n)
    ]
    owner = torch.tensor([row.request for row in rows])
    temperature = torch.tensor([requests[row.request].temperature for row in rows])
    top_p = torch.tensor([requests[row.request].top_p for row in rows])
    live = torch.arange(len(rows))
    with torch.inference_mode():
        logits = stepper.start([r.prefix for r in requests], owner, max(row.limit for row in rows))
        while True:
            uniform = _uniforms(rng, len(rows))[live]
            args = (t.to(device) for t in (temperature[live], top_p[live], uniform))
            tokens, logprobs = choose(logits, *args)
            kept = _record([rows[r] for r in live.tolist()], tokens, logprobs, finder, end_ids)
            if not kept:
                break
            if len(kept) < len(live):
                index = torch.tensor(kept)
                live, tokens = live[index], tokens[index.to(device)]
                stepper.keep(index.to(device))
            logits = stepper.step(tokens)
    grouped: list[list[Row]] = [[] for _ in requests]
    for row in rows:
        grouped[row.request].append(row)
    return grouped


def _uniforms(rng: Draws, rows: int) -> Tensor:
    """One per row [rows], on the CPU."""
    if isinstance(rng, torch.Generator):
        return torch.rand(rows, generator=rng, dtype=torch.float64, device=rng.device).cpu()
    return rng()


def _record(
    rows: Sequence[Row], tokens: Tensor, logprobs: Tensor, finder: StopFinder, end_ids: frozenset[int]
) -> list[int]:
    """Append the step's tokens to the live rows; the indices of those that go on."""
    kept = []
    for r, (row, token, logprob) in enumerate(zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)):
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.finished = token in end_ids or bool(row.stop and finder.hit(row.tokens, row.stop))
        if not row.finished and len(row.tokens) < row.limit:
            kept.append(r)
    return kept
