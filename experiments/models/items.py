"""Rubric items judged one by one: does an answer satisfy this item, yes or no (RaR-explicit, RRD).

One call of the frozen judge per item and answer, each with a rubric of that one item; the item holds if the score is at
least the threshold.

Deviation: the baselines' code asks a binary judge that sees the item and the answer, here the shared frozen judge
(RACE §6.1) sees the prompt as well. A judge that gave no score is NaN and not 0, and is counted; see `weighted_share`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from racelab.experiments.ports import Judge
from racelab.experiments.types import (
    Criterion,
    FloatArray,
    JudgeItem,
    JudgeScores,
    Prompt,
    Rubric,
    Sample,
)

_DIGITS = 12  # of a share; a sum of the same items in another order differs in the last bits


@dataclass(frozen=True, slots=True)
class ItemQuestion:
    """Which of the I items does each of the G answers satisfy?"""

    prompt: Prompt
    items: tuple[str, ...]
    responses: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class ItemAnswers:
    """The judge's answers.

    Attributes:
        holds: [G, I] per question: 1 where the item holds, 0 where it does not, NaN where there is no score.
        scored: calls and failures of the judge; its scores are one array [G] per item, question after question.
    """

    holds: tuple[FloatArray, ...]
    scored: JudgeScores


def judge_items(judge: Judge, questions: Sequence[ItemQuestion], threshold: float) -> ItemAnswers:
    """All items of all questions in one call of the judge's port.

    Args:
        judge: frozen.
        questions: may be empty, and may have no items.
        threshold: in [0, 1]; a score of exactly this much holds.
    """
    flat = [
        JudgeItem(q.prompt, Rubric((Criterion(text, 1.0),), text), q.responses)
        for q in questions
        for text in q.items
    ]
    scored = judge.score(flat) if flat else JudgeScores(())
    columns = iter(scored.scores)
    holds = []
    for q in questions:
        scores_GI = np.full((len(q.responses), len(q.items)), math.nan)
        for k in range(len(q.items)):
            scores_GI[:, k] = next(columns)
        holds.append(np.where(np.isnan(scores_GI), math.nan, scores_GI >= threshold))
    return ItemAnswers(tuple(holds), scored)


def weighted_share(holds_GI: FloatArray, weights_I: Sequence[float] | FloatArray) -> FloatArray:
    """For every answer clip(sum_k w_k b_k / sum_k |w_k|, 0, 1).

    An item without a score counts as one that does not hold, as in the baselines' code; an answer without a single
    score gets NaN, since a judge that is away must not look like a bad answer.

    Args:
        holds_GI: 0, 1 or NaN [G, I].
        weights_I: [I], not all 0.

    Returns:
        Rewards [G], rounded to 12 decimals; all NaN if there is no item.

    Raises:
        ValueError: weights that do not fit the items, or are all 0.
    """
    weights = [float(w) for w in weights_I]
    if holds_GI.shape[1] != len(weights):
        raise ValueError(f"{holds_GI.shape[1]} items have {len(weights)} weights")
    total = math.fsum(abs(w) for w in weights)
    if weights and not total > 0.0:
        raise ValueError("all weights are 0")
    shares = [
        math.nan
        if np.isnan(row).all()
        else math.fsum(w for w, b in zip(weights, row, strict=True) if b == 1.0) / total
        for row in holds_GI
    ]
    return np.asarray(np.clip(np.round(shares, _DIGITS), 0.0, 1.0), dtype=np.float64)
