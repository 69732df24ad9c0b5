"""RewardBench 2: of four answers the right one must be rated highest; in Ties, every right one above every wrong one.

    credit = 1 / (number of answers that share the highest score) if a right one is among them, else 0
    spread = best right - worst right, of the `tied` prompt;  gap = worst right - best wrong;  accurate: gap > 0
    Ties   = .3 mean accurate(tied) + .3 mean accurate(ref) + .2 P(gap_tied > spread) + .2 P(m > spread)
             + .01 mean tanh(m / spread - 1),   m = min(gap_ref, gap_tied)
    Avg    = mean of the six subsets

A `ref` prompt has one right answer and a `tied` prompt several; a pair of them shares a number. Where the spread is 0
the last term is its limit: 1 or -1 by the sign of m, and 0 for m = 0 (its authors' 0/0). An answer whose score cannot
be read is excluded from the highest; all four unreadable is chance, 0.25. In Ties it stands at -1, as its authors have
it, and never above an answer that was read (the logits of a reward model may be lower).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from racelab.experiments.data.rows import clean_text
from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.olmo3.common import (
    list_field,
    place,
    present,
    text_field,
    unique,
    wrong_type,
)
from racelab.experiments.evaluation.preference.rating import Item, Plan, RatedRow, readable
from racelab.experiments.evaluation.types import Example, HubSource, Mark, Record

SUBSETS: Final = ("Factuality", "Focus", "Math", "Precise IF", "Safety", "Ties")
TIES: Final = "Ties"
ANY_CREDIT: Final = "rewardbench2-any-credit"
CHANCE: Final = 0.25
_UNREAD: Final = -1.0
_KINDS: Final = ("ref", "tied")


class RewardBench2:
    """Implements `RatedBenchmark`."""

    name = "rewardbench2"
    sources = (HubSource("allenai/reward-bench-2", "test"),)
    plan = Plan()

    def __init__(self, quirks: frozenset[str] = frozenset()) -> None:
        """Keeps the quirks in force; `rewardbench2-any-credit` counts any credit as a whole one."""
        self._any_credit = ANY_CREDIT in quirks

    def read(self, records: Iterable[Record]) -> list[Example]:
        """Columns prompt, chosen, rejected, subset, and id (Ties: `ref:7` or `tied:7`).

        Raises:
            DataError: a field is missing or wrong, or an id occurs twice in a subset.
        """
        return unique((where, _example(record, where)) for where, record in records)

    def item(self, example: Example) -> Item:
        """The right answers first; the order reaches nobody."""
        f = example.fields
        return Item(example.example_id, f["prompt"], (*f["right"], *f["wrong"]))

    def mark(self, example: Example, scores: Sequence[Sequence[float]]) -> Mark:
        """Details of Ties: kind, pair, right, wrong; of the others: right, wrong, credit. Null: unreadable."""
        (row,) = scores
        n = len(example.fields["right"])
        right, wrong = readable(row[:n]), readable(row[n:])
        details: dict[str, Any] = {"right": right, "wrong": wrong}
        if example.domain == TIES:
            kind, _, pair = example.example_id.partition("/")[2].partition(":")
            details |= {"kind": kind, "pair": pair}
            score = float(gap(right, wrong) > 0)
        else:
            details["credit"] = score = credit(right, wrong)
            score = float(score > 0) if self._any_credit else score
        unread = all(s is None for s in (*right, *wrong))
        return Mark(self.name, score, details, "unparsed" if unread else "scored")


def credit(right: Sequence[float | None], wrong: Sequence[float | None]) -> float:
    """The credit of one prompt outside Ties; None is unreadable."""
    every = [s for s in (*right, *wrong) if s is not None]
    if not every:
        return CHANCE
    top = max(every)
    return 1.0 / every.count(top) if top in right else 0.0


def gap(right: Sequence[float | None], wrong: Sequence[float | None]) -> float:
    """Worst right minus best wrong."""
    low = _lowest(right, wrong)
    return min(low if s is None else s for s in right) - max(low if s is None else s for s in wrong)


def spread(right: Sequence[float | None], wrong: Sequence[float | None]) -> float:
    """Best right minus worst right."""
    low = _lowest(right, wrong)
    values = [low if s is None else s for s in right]
    return max(values) - min(values)


def _lowest(right: Sequence[float | None], wrong: Sequence[float | None]) -> float:
    """Where an unreadable answer stands."""
    return min([_UNREAD, *(s for s in (*right, *wrong) if s is not None)])


def ties(details: Iterable[Mapping[str, Any]]) -> float:
    """The score of Ties from the details of its marks; NaN without at least one whole pair."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {kind: {} for kind in _KINDS}
    for d in details:
        found[d["kind"]][d["pair"]] = d
    ref, tied = ({pair: gap(d["right"], d["wrong"]) for pair, d in found[kind].items()} for kind in _KINDS)
    pairs = [pair for pair in tied if pair in ref]
    if not pairs:
        return math.nan
    spreads = [spread(found["tied"][p]["right"], found["tied"][p]["wrong"]) for p in pairs]
    least = [min(ref[p], tied[p]) for p in pairs]
    return (
        0.3 * fmean(g > 0 for g in tied.values())
        + 0.3 * fmean(g > 0 for g in ref.values())
        + 0.2 * fmean(tied[p] > s for p, s in zip(pairs, spreads, strict=True))
        + 0.2 * fmean(m > s for m, s in zip(least, spreads, strict=True))
        + 0.01 * fmean(_beyond(m, s) for m, s in zip(least, spreads, strict=True))
    )


def _beyond(margin: float, width: float) -> float:
    """tanh(margin / width - 1), and its limit where the width is 0."""
    if width == 0:
        return math.copysign(1.0, margin) if margin else 0.0
    return math.tanh(margin / width - 1.0)


def rewardbench2_total(rows: Iterable[RatedRow]) -> dict[str, float]:
    """Subset -> score, and `avg`, their mean. A subset without (enough) scored rows is left out of both."""
    by: dict[str, list[RatedRow]] = {}
    for row in rows:
        if row.score == row.score:
            by.setdefault(row.domain, []).append(row)
    found: dict[str, float] = {
        name: ties(r.details for r in by[name]) if name == TIES else fmean(r.score for r in by[name])
        for name in SUBSETS
        if name in by
    }
    found = {name: value for name, value in found.items() if value == value}
    return {"avg": fmean(found.values()) if found else math.nan, **found}


def _example(record: Mapping[str, Any], where: str) -> Example:
    subset = text_field(record, "subset", where)
    if subset not in SUBSETS:
        raise DataError(f"{where}: subset {subset!r} is unknown; there are {', '.join(SUBSETS)}")
    right, wrong = (_responses(record, key, where) for key in ("chosen", "rejected"))
    own = str(record["id"]) if record.get("id") not in (None, "") else place(where)
    if subset == TIES:
        kind, colon, pair = own.partition(":")
        if kind not in _KINDS or not colon or not pair:
            raise DataError(
                f"{where}: id {own!r} of subset Ties; `ref:<number>` or `tied:<number>` is needed"
            )
    elif len(right) != 1:
        raise DataError(f"{where}: field 'chosen' holds {len(right)} answers; outside Ties one is right")
    fields = {"prompt": text_field(record, "prompt", where), "right": right, "wrong": wrong}
    return Example(f"{subset}/{own}", subset, fields)


def _responses(record: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A text, or a list of at least one; an answer may be empty."""
    value = present(record, key, where)
    listed = not isinstance(value, str) or value.lstrip().startswith("[")
    value = list_field(record, key, where) if listed else (value,)
    if not value:
        raise DataError(f"{where}: field {key!r} holds no answer")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise wrong_type(where, f"{key}[{i}]", text, "a text")
        if text.strip():
            clean_text(text, where, f"{key}[{i}]")
    return tuple(value)
