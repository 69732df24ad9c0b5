"""The values of the rubric suite, and what its parts ask of each other.

A benchmark says which responses are to be rated, a rater rates them (with a rubric and a judge, or as a reward model),
and the benchmark marks the ratings. A response is always rated alone: no order can matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from racelab.experiments.evaluation.types import Example, HubSource, Mark, Record


@dataclass(frozen=True, slots=True)
class Item:
    """Responses to one prompt, to be rated.

    Attributes:
        item_id: the example's.
        prompt: what the user said.
        responses: thinking blocks included, as the data have them.
    """

    item_id: str
    prompt: str
    responses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How often.

    Attributes:
        games: ratings of each response; the later ones are other draws of the judge under the same rubric.
        retry: whether a rubric that cannot be read is asked for again; the tries are at the config's
            `retry_temperatures`, from the first one on.
    """

    games: int = 1
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Rating:
    """What a rater gave for one item.

    Attributes:
        scores: [games][responses]; higher is better, NaN where nothing could be read.
        lost: why there is none, for want of a model that answers; "" otherwise. Then the scores say nothing.
        rows: of `eval_answers`: the rubric and the judge's replies.
    """

    scores: tuple[tuple[float, ...], ...]
    lost: str = ""
    rows: tuple[Mapping[str, Any], ...] = ()


@runtime_checkable
class Rater(Protocol):
    """Rates responses."""

    @property
    def judge(self) -> str:
        """Who rates, in a word or two."""

    def describe(self) -> Mapping[str, Any]:
        """All that is needed to rate the same again (JSON values)."""

    def rate(
        self, items: Sequence[Item], wanted: Sequence[int], plan: Plan, purpose: str
    ) -> Iterator[tuple[int, Rating]]:
        """The ratings of `items[i]` for each i in `wanted`, as they come, in any order.

        They depend on `items`, the seed and `purpose` alone, not on `wanted` (see `Subject.answers`).

        Raises:
            UnreachableError: nothing can be rated (no server, wrong key).
        """


@runtime_checkable
class RatedBenchmark(Protocol):
    """One benchmark of preferences: how its examples are read, and marked from ratings. Pure."""

    @property
    def name(self) -> str:
        """As in `eval.benchmarks`."""

    @property
    def sources(self) -> tuple[HubSource, ...]:
        """Its data on the hub."""

    @property
    def plan(self) -> Plan:
        """How its responses are rated."""

    def read(self, records: Iterable[Record]) -> list[Example]:
        """The examples in the order of the data.

        Raises:
            DataError: a field is missing or of the wrong type; the message opens with `file:line`.
        """

    def item(self, example: Example) -> Item:
        """What is to be rated."""

    def mark(self, example: Example, scores: Sequence[Sequence[float]]) -> Mark:
        """The mark of scores [games][responses], NaN where nothing could be read; `Mark.judge` is left empty."""


class RatedRow(Protocol):
    """A row of `eval_examples`, as far as a total needs it."""

    @property
    def domain(self) -> str:
        """Subset or category."""

    @property
    def score(self) -> float:
        """Of the example; NaN: it is lost, and in no total."""

    @property
    def details(self) -> Mapping[str, Any]:
        """`Mark.details`."""


def readable(scores: Iterable[float]) -> list[float | None]:
    """Scores as JSON holds them: None for NaN."""
    return [None if score != score else float(score) for score in scores]
