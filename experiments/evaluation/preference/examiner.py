"""One benchmark of preferences, from its examples to their marks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from racelab.experiments.evaluation.preference.rating import RatedBenchmark, Rater, Rating
from racelab.experiments.evaluation.types import Examined, Example, Mark


class RatingExaminer:
    """Has the responses rated, and marks the ratings; implements `Examiner`."""

    def __init__(self, benchmark: RatedBenchmark, examples: Sequence[Example], rater: Rater) -> None:
        """Keeps the parts.

        Args:
            benchmark: what is rated, and how it is marked.
            examples: all, in their order.
            rater: who rates.
        """
        self._benchmark, self._rater = benchmark, rater
        self._examples = tuple(examples)

    @property
    def name(self) -> str:
        """Of the benchmark."""
        return self._benchmark.name

    @property
    def examples(self) -> Sequence[Example]:
        """All, in their order."""
        return self._examples

    def examine(self, wanted: frozenset[str]) -> Iterator[Examined]:
        """See the protocol; `answers` are the rubric's tries, then the judge's replies, game by game."""
        items = [self._benchmark.item(example) for example in self._examples]
        indices = [i for i, example in enumerate(self._examples) if example.example_id in wanted]
        for i, rating in self._rater.rate(items, indices, self._benchmark.plan, self.name):
            yield self._examined(self._examples[i], rating)

    def _examined(self, example: Example, rating: Rating) -> Examined:
        mark = (
            Mark(self.name, math.nan, status="lost")
            if rating.lost
            else self._benchmark.mark(example, rating.scores)
        )
        return Examined(example, (replace(mark, judge=self._rater.judge),), rating.rows)
