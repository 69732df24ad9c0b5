"""JudgeBench: of two answers, one objectively right, the right one must be rated higher.

    decision of a game = the answer with the higher score; a score that cannot be read loses; equal: tie; neither: none
    vote = sum over the two games of +1 (decision = label), -1 (the other answer), 0 (tie, none);  correct: vote > 0
    overall = share of correct pairs;  Avg = mean over Knowledge, Reasoning, Math, Coding

Its authors play a second game with the answers swapped. Here each answer is rated alone, so the order reaches nobody
and the second game is another draw of the judge under the same rubric. A tie is wrong: chance is below one half.

What a judge that writes has said is read by `judge_prompted.first_number`, as its authors do; their judge is sampled at
T 0.6, top_p 0.95 in up to 16,384 tokens (judge=api-thinking).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.olmo3.common import place, text_field, unique
from racelab.experiments.evaluation.preference.rating import Item, Plan, RatedRow, readable
from racelab.experiments.evaluation.types import Example, HubSource, Mark, Record

CATEGORIES: Final = {
    "mmlu-pro": "Knowledge",
    "livebench-reasoning": "Reasoning",
    "livebench-math": "Math",
    "livecodebench": "Coding",
}
"""First words of `source` -> category."""
LABELS: Final = {"A>B": 1, "B>A": -1}
LIMITS: Final = {"failed_scores": 0.02, "pairs_with_failure": 0.10, "null_decisions": 0.05}
"""Shares beyond which the score says more about the judge's replies than about the rubrics."""
_WORDS: Final = {
    "failed_scores": "{} of the scores could not be read",
    "pairs_with_failure": "{} of the pairs hold a score that could not be read",
    "null_decisions": "no decision could be made in {} of the games, neither score could be read",
}


class JudgeBench:
    """Implements `RatedBenchmark`."""

    name = "judgebench"
    plan = Plan(games=2, retry=True)

    def __init__(self, split: str = "gpt") -> None:
        """`gpt`: the 350 pairs of GPT-4o's answers, which are published; `claude`: the 270 of Claude 3.5 Sonnet's."""
        self.sources = (HubSource("ScalerLab/JudgeBench", split),)

    def read(self, records: Iterable[Record]) -> list[Example]:
        """Columns pair_id, source, question, response_A, response_B, label (`A>B` or `B>A`).

        Raises:
            DataError: a field is missing or wrong, or a pair occurs twice.
        """
        return unique((where, _example(record, where)) for where, record in records)

    def item(self, example: Example) -> Item:
        """A first; the order reaches nobody."""
        f = example.fields
        return Item(example.example_id, f["question"], (f["a"], f["b"]))

    def mark(self, example: Example, scores: Sequence[Sequence[float]]) -> Mark:
        """Details: label, games (scores [2][2], null: unreadable), decisions (1: A, -1: B, 0: tie, null: none)."""
        decisions = [decision(a, b) for a, b in scores]
        label = example.fields["label"]
        details = {"label": label, "games": [readable(game) for game in scores], "decisions": decisions}
        unread = all(d is None for d in decisions)
        correct = vote(decisions, LABELS[label]) > 0
        return Mark(self.name, float(correct), details, "unparsed" if unread else "scored")


def decision(a: float, b: float) -> int | None:
    """1: A is better, -1: B is, 0: tie, None: neither score could be read (NaN)."""
    if math.isnan(a) or math.isnan(b):
        return None if math.isnan(a) and math.isnan(b) else -1 if math.isnan(a) else 1
    return (a > b) - (a < b)


def vote(decisions: Iterable[int | None], label: int) -> int:
    """The vote of the games; `label` is 1 where A is right, -1 where B is."""
    return sum(label * d for d in decisions if d is not None)


def judgebench_total(rows: Iterable[RatedRow]) -> dict[str, float]:
    """`overall`, `avg`, each category that has scored rows, and the shares of `LIMITS`."""
    scored = [row for row in rows if row.score == row.score]
    if not scored:
        return {"overall": math.nan, "avg": math.nan}
    by: dict[str, list[float]] = {}
    for row in scored:
        by.setdefault(row.domain, []).append(row.score)
    found = {name: fmean(by[name]) for name in dict.fromkeys(CATEGORIES.values()) if name in by}
    failed = [[s is None for game in row.details["games"] for s in game] for row in scored]
    none = [d is None for row in scored for d in row.details["decisions"]]
    return {
        "overall": fmean(row.score for row in scored),
        "avg": fmean(found.values()),
        **found,
        "failed_scores": fmean(f for pair in failed for f in pair),
        "pairs_with_failure": fmean(any(pair) for pair in failed),
        "null_decisions": fmean(none),
    }


def judgebench_notes(total: Mapping[str, float]) -> tuple[str, ...]:
    """What to say about a total whose judge failed too often: one line per limit that is passed."""
    return tuple(
        f"judgebench: {_WORDS[name].format(f'{100 * total[name]:.1f} %')}; above {100 * limit:.0f} % the score is not "
        "to be trusted"
        for name, limit in LIMITS.items()
        if total.get(name, 0.0) > limit
    )


def _example(record: Mapping[str, Any], where: str) -> Example:
    source = text_field(record, "source", where)
    category = next((name for start, name in CATEGORIES.items() if source.startswith(start)), None)
    if category is None:
        raise DataError(f"{where}: source {source!r} is unknown; it begins with {', '.join(CATEGORIES)}")
    label = text_field(record, "label", where)
    if label not in LABELS:
        raise DataError(f"{where}: label {label!r}; A>B or B>A is needed")
    fields = {
        "question": text_field(record, "question", where),
        "a": text_field(record, "response_A", where, blank=True),
        "b": text_field(record, "response_B", where, blank=True),
        "label": label,
    }
    return Example(text_field(record, "pair_id", where, blank=True) or place(where), category, fields)
