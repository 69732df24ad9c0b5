"""Scripted parts for the baselines that ask a stronger model: a chat model, a judge, data, a learner."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from racelab.configs.compose import compose
from racelab.experiments.models.chat import Calls, ChatRequest, Reply
from racelab.experiments.parts import Parts
from racelab.experiments.rng import Streams
from racelab.experiments.types import (
    JudgeItem,
    JudgeScores,
    Prompt,
    Sample,
    StepRecord,
    TokenBatch,
    UpdateStats,
)

G = 4


def sample(text: str) -> Sample:
    return Sample((1, 2, 3), (-1.0,) * 3, text, True)


class ScriptedChat:
    """Replies by a function of the request; None is a reply that never came. `remember` caches replies."""

    def __init__(self, reply: Callable[[ChatRequest], str | None], remember: bool = False) -> None:
        self.reply, self.remember = reply, remember
        self.batches: list[list[ChatRequest]] = []
        self.known: dict[ChatRequest, str] = {}
        self._calls = Calls()

    @property
    def calls(self) -> Calls:
        return self._calls

    @property
    def requests(self) -> list[ChatRequest]:
        return [r for batch in self.batches for r in batch]

    def complete(self, requests: Sequence[ChatRequest]) -> list[Reply]:
        self.batches.append(list(requests))
        return [self._one(r) for r in requests]

    def _one(self, request: ChatRequest) -> Reply:
        if request in self.known:
            self._calls += Calls(cached=1)
            return Reply(self.known[request], cached=True)
        text = self.reply(request)
        self._calls += Calls(made=1, failed=int(text is None))
        if text is None:
            return Reply(None, finished=False, error="HTTP 500")
        if self.remember:
            self.known[request] = text
        return Reply(text)

    def describe(self) -> dict[str, object]:
        return {"kind": "scripted"}


class World:
    """Data, policy, judge, encoder and learner. `score` is a function of (criteria texts, answer's number)."""

    def __init__(self, score: Callable[[tuple[str, ...], int], float], prompts: int = 1000) -> None:
        self._score, self._prompts = score, prompts
        self.taken = 0
        self.judged: list[JudgeItem] = []
        self.batches: list[TokenBatch] = []

    def take(self, n: int) -> list[Prompt]:
        numbers = [(self.taken + i) % self._prompts for i in range(n)]
        self.taken += n
        return [Prompt(f"p{i}", f"Explain matter {i}") for i in numbers]

    def responses(self, prompts: Sequence[Prompt], n: int, rng: Any) -> list[tuple[Sample, ...]]:
        return [
            tuple(sample(f"<think>hm</think>answer {i} of {p.prompt_id}") for i in range(n)) for p in prompts
        ]

    def response_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        return (7, int(prompt.prompt_id[1:]))

    def score(self, items: Sequence[JudgeItem]) -> JudgeScores:
        self.judged += items
        calls, scores = 0, []
        for item in items:
            if item.rubric is None:
                scores.append(np.full(len(item.responses), np.nan))
                continue
            calls += len(item.responses)
            texts = tuple(c.text for c in item.rubric.criteria)
            scores.append(np.array([self._score(texts, i) for i in range(len(item.responses))]))
        lost = sum(int(np.isnan(s).sum()) for s, i in zip(scores, items, strict=True) if i.rubric is not None)
        return JudgeScores(tuple(scores), calls, infra_failures=lost)

    def embed(self, texts: Sequence[str]) -> Any:
        return np.eye(8)[[sum(t.encode()) % 8 for t in texts]]

    def forget(self) -> None:
        pass

    def update(self, batch: TokenBatch) -> UpdateStats:
        self.batches.append(batch)
        return UpdateStats(bool(batch.groups), n_samples=batch.n_samples, n_tokens=batch.n_tokens)


def parts(world: World, chat: Any, untrained: Any = None, seed: int = 0) -> Parts:
    w: Any = world
    return Parts(w, untrained or w, w, w, w, w, Streams(0), seed=seed, proposer=chat)


def method_config(name: str, *overrides: str) -> Any:
    words = [
        f"method={name}",
        f"method.group_size={G}",
        "method.prompts_per_step=2",
        "method.active_sampling_rounds=1",
        *overrides,
    ]
    return compose(words).config.method


def rubric_json(*criteria: tuple[str, float]) -> str:
    return json.dumps({"criteria": [{"criterion": c, "weight": w} for c, w in criteria]})


def calls(record: StepRecord, kind: str) -> tuple[float, float, float]:
    """(measured, expected, printed)."""
    m = record.metrics
    return (
        m[f"cost/calls/{kind}"],
        m[f"cost/calls/{kind}_expected"],
        m[f"cost/calls/{kind}_printed"],
    )


def lasting(record: StepRecord) -> tuple[dict[str, float], Any]:
    """What two runs of the same step have in common: all but the seconds."""
    metrics = {k: v for k, v in record.metrics.items() if not k.startswith("perf/")}
    return metrics, json.loads(json.dumps(record.tables))
