"""A language model that says what it is told to, one token per character, and small episodes to show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from racelab.experiments.episodes import Episode, Instance, Result, Subtask, Turn
from racelab.experiments.types import GenerationRequest, Sample

SUBTASKS = (
    Subtask("path_planning", "Finding a safe route to the goal.", 0.6),
    Subtask("hazard_identification", "Recognizing which tiles are holes.", 0.4),
)


class ScriptedPolicy:
    """`reply` is given the prompt's text. Token 0 ends; a reply longer than `max_tokens` is cut.

    Attributes:
        asked: prompts, in order.
        batches: how many prompts each call of `generate` had.
    """

    eos_id = 0

    def __init__(self, reply: Callable[[str], str] | str, *, window: int = 20_000) -> None:
        self.reply = reply if callable(reply) else lambda _: reply
        self.window = window
        self.asked: list[str] = []
        self.requests: list[GenerationRequest] = []
        self.batches: list[int] = []

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(t) for t in tokens if t)

    def chat(self, user: str, system: str | None = None) -> list[int]:
        return self.encode(f"{user}>")

    def logprobs(self, groups: Any, temperature: float = 1.0) -> Any:
        raise AssertionError("graders and reflectors ask for no log-probabilities")

    def generate(self, requests: Sequence[GenerationRequest], rng: torch.Generator) -> list[list[Sample]]:
        self.batches.append(len(requests))
        self.requests += requests
        for r in requests:
            assert r.n == 1
            assert len(r.prefix) + r.max_tokens <= self.window
        return [[self._sample(r)] for r in requests]

    def _sample(self, request: GenerationRequest) -> Sample:
        prompt = self.decode(request.prefix)
        self.asked.append(prompt)
        tokens = (*self.encode(self.reply(prompt)), self.eos_id)
        kept = tokens[: request.max_tokens]
        return Sample(kept, (-1.0,) * len(kept), self.decode(kept), kept == tokens)


def episode(
    *turns: tuple[str, str],
    first: str = "A board.",
    system: str = "Play.",
    reward: float = 0.0,
    name: str = "i0",
) -> Episode:
    """One of (reply, observation) pairs; two plain moves by default."""
    pairs = turns or (("Right", "You moved."), ("Down", "You fell into a hole."))
    return Episode(
        Instance("frozenlake", name, {}),
        (1, 2),
        system,
        first,
        tuple(Turn(text, (5,), (-1.0,), True, seen) for text, seen in pairs),
        Result(reward, reward > 0, "goal" if reward > 0 else "hole"),
        bare_prompt=(1, 2),
    )
