"""How RRD's items of one prompt grow (Shen et al., 2026), and how many prompts grow side by side.

    1  propose   from the prompt and its G answers
    2  prune     in order: an item that overlaps or conflicts with an earlier one is dropped
    3  split     an item that `decomposition_trigger` answers satisfy gives two finer ones; each is checked against all
                 items, and added or rejected (no finer items at all: one rejection)
    4  stop      between rounds: `termination_threshold` rejections, `max_rounds`, or nothing added
    5  score     G x I yes or no, each item and answer judged once in the whole course
    6  weigh     uniform, llm or wu

A course is a generator that yields what it asks and is sent what it got, so that it reads as the steps above while the
questions of all prompts are put together.

Choices where the public code is unclear or odd:
  * an item that was split stays, and its parts are checked against it too, as in the code;
  * the code prunes again after every round. Each item was checked against all earlier ones when it came, so the same
    questions would be asked again: left out. A part that repeats an item's words is rejected without a question;
  * the check for misalignment needs reference answers, which training does not have: left out, as in the code;
  * a YES/NO that never came or cannot be read counts as NO: the item stays;
  * an empty answer is judged like any other (the code raises).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from racelab.configs import schema
from racelab.experiments.methods.baselines import rrd_weights
from racelab.experiments.models.chat import ChatRequest, Reply
from racelab.experiments.models.items import ItemQuestion, judge_items
from racelab.experiments.models.prompts.rrd import CONFLICT, OVERLAP, PROPOSE, SPLIT, WEIGHTS
from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.proposals import (
    Proposer,
    item_key,
    read,
    read_items,
    read_numbers,
    read_yes,
)
from racelab.experiments.models.text import strip_thinking
from racelab.experiments.ports import Judge
from racelab.experiments.types import FloatArray, JudgeScores, Prompt, Sample

T = TypeVar("T")
PARTS = 2
"""Finer items in place of one."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What one prompt wants next: replies of the proposer, and columns [G] of the judge."""

    requests: tuple[ChatRequest, ...] = ()
    items: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Got:
    """The answer: one reply per request; `holds_GI` for the items asked about."""

    replies: tuple[Reply, ...]
    holds_GI: FloatArray


Asking = Generator[Ask, Got, T]
"""Yields what it asks, is sent what it got, returns T."""


@dataclass(slots=True)
class Growth:
    """The items of one prompt as they grow.

    Attributes:
        items: those that are in, in order; empty if the proposal failed.
        columns: item -> which answers satisfy it [G] (0, 1, NaN).
        weights: [I].
        rejected: candidates that were not added, in all rounds.
        rows: of `rrd_rounds`; round 0 is the proposal and its pruning.
        asked: requests to the proposer, by what they were for.
    """

    config: schema.RrdConfig
    proposer: Proposer
    prompt: Prompt
    responses: tuple[Sample, ...]
    items: list[str] = field(default_factory=list)
    columns: dict[str, FloatArray] = field(default_factory=dict)
    weights: FloatArray = field(default_factory=lambda: np.zeros(0))
    rejected: int = 0
    rows: list[dict[str, object]] = field(default_factory=list)
    asked: dict[str, int] = field(
        default_factory=lambda: {"proposal": 0, "split": 0, "check": 0, "weight": 0}
    )

    def run(self) -> Asking[None]:
        """Steps 1 to 6, the reward aside."""
        fields = {"prompt": self.prompt.text, "answers": _numbered_answers(self.responses)}
        limits = self.config.rubric
        (proposed,) = yield from self._tried(
            "proposal", PROPOSE, [fields], lambda t: read_items(t, limits.min_criteria, limits.max_criteria)
        )
        if proposed is None:
            self._row(0, added=0, rejected=0)
            return
        for item in proposed:
            if not self.items or not (yield from self._collides(item, self.items)):
                self.items.append(item)
        self._row(0, added=len(self.items), rejected=len(proposed) - len(self.items))
        for round_ in range(1, self.config.max_rounds + 1):
            added, rejected = yield from self._round()
            self.items += added
            self.rejected += rejected
            self._row(round_, added=len(added), rejected=rejected)
            if not added or self.rejected >= self.config.termination_threshold:
                break
        yield from self._judge()
        self.weights = yield from WEIGHERS[self.config.weights](self)

    def holds_GI(self) -> FloatArray:
        """Which answers satisfy which items [G, I]."""
        if not self.items:
            return np.zeros((len(self.responses), 0))
        return np.stack([self.columns[item] for item in self.items], axis=1)

    def _round(self) -> Asking[tuple[list[str], int]]:
        """Step 3 for the items that there are: (added, number of rejections)."""
        yield from self._judge()
        coarse = [i for i in self.items if np.nansum(self.columns[i]) >= self.config.decomposition_trigger]
        finer = yield from self._tried(
            "split",
            SPLIT,
            [self._split_fields(i) for i in coarse],
            lambda t: read_items(t, 1, PARTS),
        )
        added: list[str] = []
        rejected = 0
        for parts in finer:
            if parts is None:
                rejected += 1
                continue
            for part in parts:
                known = [*self.items, *added]
                repeats = item_key(part) in {item_key(item) for item in known}
                if repeats or (yield from self._collides(part, known)):
                    rejected += 1
                else:
                    added.append(part)
        return added, rejected

    def _split_fields(self, item: str) -> dict[str, str]:
        column_G = self.columns[item]
        satisfied = [y for y, b in zip(self.responses, column_G, strict=True) if b == 1.0]
        return {
            "prompt": self.prompt.text,
            "answers": _numbered_answers(satisfied),
            "item": item,
            "others": _listed([i for i in self.items if i != item]) or "(none)",
        }

    def _judge(self) -> Asking[None]:
        """Columns of the items that were not judged before."""
        missing = tuple(i for i in self.items if i not in self.columns)
        if missing:
            got = yield Ask(items=missing)
            self.columns.update(zip(missing, got.holds_GI.T, strict=True))

    def _collides(self, item: str, others: Sequence[str]) -> Asking[bool]:
        """Whether the item overlaps or conflicts with the others."""
        fields = {"items": _listed(others), "item": item}
        replies = yield from self._ask(
            "check",
            [self.proposer.request(t, 0, **fields) for t in (OVERLAP, CONFLICT)],
        )
        return any(read(reply, read_yes) for reply in replies)

    def _tried(
        self,
        kind: str,
        template: RoleTemplate,
        rows: Sequence[Mapping[str, str]],
        reader: Callable[[str], T | None],
    ) -> Asking[list[T | None]]:
        """What the reader finds in the replies to each row, None after `tries` unusable ones."""
        found: list[T | None] = [None] * len(rows)
        for draw in range(self.config.tries):
            open_ = [i for i, value in enumerate(found) if value is None]
            requests = [self.proposer.request(template, draw, **rows[i]) for i in open_]
            replies = yield from self._ask(kind, requests)
            for i, reply in zip(open_, replies, strict=True):
                found[i] = read(reply, reader)
        return found

    def _ask(self, kind: str, requests: Sequence[ChatRequest]) -> Asking[tuple[Reply, ...]]:
        if not requests:
            return ()
        got = yield Ask(requests=tuple(requests))
        self.asked[kind] += len(requests)
        return got.replies

    def _row(self, round_: int, *, added: int, rejected: int) -> None:
        self.rows.append(
            {
                "prompt_id": self.prompt.prompt_id,
                "round": round_,
                "items": len(self.items),
                "added": added,
                "rejected": rejected,
            }
        )

    def ask_weights(self) -> Asking[FloatArray]:
        """The proposer's own weights: negative ones count as 0; all alike if it gives none."""
        n = len(self.items)
        fields = {"prompt": self.prompt.text, "items": _listed(self.items), "n": str(n)}
        (reply,) = yield from self._ask("weight", [self.proposer.request(WEIGHTS, 0, **fields)])
        numbers = read(reply, lambda text: read_numbers(text, n))
        return rrd_weights.uniform(n) if numbers is None else rrd_weights.normalised(np.array(numbers))


def _uniform(growth: Growth) -> Asking[FloatArray]:
    return rrd_weights.uniform(len(growth.items))
    yield  # asks nothing


def _whitened(growth: Growth) -> Asking[FloatArray]:
    return rrd_weights.whitened(growth.holds_GI())
    yield


WEIGHERS: dict[str, Callable[[Growth], Asking[FloatArray]]] = {
    "uniform": _uniform,
    "llm": Growth.ask_weights,
    "wu": _whitened,
}
"""Step 6, by `method.weights`."""


def grow(growths: Sequence[Growth], proposer: Proposer, judge: Judge, threshold: float) -> JudgeScores:
    """Runs all of them side by side: each round asks what every prompt wants next, in one batch a model.

    Returns:
        The judge's counts; its scores are in the growths.
    """
    running = {i: growth.run() for i, growth in enumerate(growths)}
    asks = {i: next(course) for i, course in running.items()}
    calls = unread = lost = 0
    while asks:
        replies = iter(proposer.ask([r for ask in asks.values() for r in ask.requests]))
        questions = [
            ItemQuestion(growths[i].prompt, ask.items, growths[i].responses) for i, ask in asks.items()
        ]
        answers = judge_items(judge, questions, threshold)
        calls += answers.scored.calls
        unread += answers.scored.parse_failures
        lost += answers.scored.infra_failures
        wanted: dict[int, Ask] = {}
        for (i, ask), holds_GI in zip(asks.items(), answers.holds, strict=True):
            got = Got(tuple(next(replies) for _ in ask.requests), holds_GI)
            try:
                wanted[i] = running[i].send(got)
            except StopIteration:  # this prompt is done
                continue
        asks = wanted
    return JudgeScores((), calls, unread, lost)


def _numbered_answers(responses: Sequence[Sample]) -> str:
    return "\n\n".join(f"Answer {i}:\n{strip_thinking(y.text).strip()}" for i, y in enumerate(responses, 1))


def _listed(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
