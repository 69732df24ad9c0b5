"""Evaluations compared example by example. Every draw comes from the generator that is passed in.

`compare` draws one number from it, the seed of a stream for each benchmark: what is drawn for one does not depend on
which others are compared.

    difference = score(A) - score(B) = sum over units of share_A - share_B        (see units.py)

One evaluation a side: units are drawn anew, the same ones for both sides, and the p value is that of a paired
permutation test: were A and B alike, each unit's two scores might as well be swapped, which flips the sign of its
difference; p is the share of flips with a sum at least as large. All 2^n flips are gone through where few units differ,
else 9,999 are drawn, and p is (1 + as large) / (1 + drawn).

Several evaluations a side (training or sampling seeds): seeds are drawn anew first and examples inside, the same
examples for all seeds and both sides of a replicate, the same seeds for all its benchmarks. Where both sides have
the same seeds, pairs of them are drawn, else each side's own. p is then the share of replicates whose difference lies
at least as far from the observed one as that lies from 0. Limits: of S seeds the spread between seeds comes out
(S - 1)/S of what it is, so with two or three the interval is too narrow if seeds differ much; noise that is new in
each answer is counted up to three times, so it is too wide if seeds differ little.

Across benchmarks the p values are Holm's. A percentile interval of few examples is too narrow as well; the measured
coverage stands in docs/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from racelab.analysis.resampling import (
    ALIKE,
    centred_p,
    check,
    interval,
    resampled,
    seed_weights,
    sign_flip_p,
)
from racelab.analysis.stats import FloatArray, Interval, holm
from racelab.analysis.units import Shares, shares
from racelab.configs.schema_eval import RACE_SUITE, RUBRIC_SUITE
from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.totals import Row, metric_name, total
from racelab.experiments.rng import numpy_generator

Runs = Mapping[str, Sequence[Row]]
"""One side: seed -> the rows of its evaluation."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One benchmark.

    Attributes:
        label: of the benchmark.
        metric: name of the score.
        value_a: score of A over the compared examples, mean over its seeds.
        value_b: of B.
        difference: A - B with its interval.
        p: two-sided, see above; 1 where nothing differs.
        p_holm: p after Holm over the benchmarks; None for a further reading of one (`ifeval-answer`).
        wins: examples that A scores higher (means over seeds).
        ties: equally.
        losses: lower.
        n: examples compared.
        lost: examples left out, since one of the evaluations has no answer to them.
    """

    label: str
    metric: str
    value_a: float
    value_b: float
    difference: Interval
    p: float
    p_holm: float | None
    wins: int
    ties: int
    losses: int
    n: int
    lost: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """All benchmarks.

    Attributes:
        benchmarks: label -> see there.
        average: of the suite's scores, A - B; None unless all of the suite was compared. In no Holm family.
        average_a: of A.
        average_b: of B.
        seeds_a: of A, in their order.
        seeds_b: of B.
        matched: whether seeds were drawn in pairs.
    """

    benchmarks: Mapping[str, Compared]
    average: Interval | None
    average_a: float | None
    average_b: float | None
    seeds_a: tuple[str, ...]
    seeds_b: tuple[str, ...]
    matched: bool


def score_interval(
    rows: Sequence[Row],
    label: str,
    protocol: str,
    rng: np.random.Generator,
    replicates: int = 2000,
    level: float = 0.95,
) -> Interval | None:
    """The score of one evaluation with its percentile bootstrap interval over examples; None without any score.

    Args:
        rows: of one label; lost ones are left out.
        label: see `Row`.
        protocol: decides how the score is made.
        rng: source of the resampling; the same one gives the same interval.
        replicates: of the bootstrap.
        level: coverage aimed at, in (0, 1).
    """
    check(level, replicates)
    scored = [row for row in rows if row.label == label and row.status != "lost"]
    found = shares(label, protocol, [scored]) if scored else None
    if found is None:
        return None
    draws = resampled(found.strata, None, rng, replicates)
    return interval(total(label, scored, protocol).value, draws, level, len(scored))


def compare(
    a: Runs,
    b: Runs,
    suite: str,
    protocol: str,
    rng: np.random.Generator,
    replicates: int = 2000,
    level: float = 0.95,
) -> Comparison:
    """A against B on the same examples.

    Args:
        a: evaluations of one side by seed.
        b: of the other.
        suite: decides the average.
        protocol: decides how scores are made.
        rng: source of the resampling.
        replicates: of the bootstrap.
        level: coverage aimed at, in (0, 1).

    Raises:
        DataError: an example or benchmark that only some of the evaluations have, or nothing to compare.
    """
    check(level, replicates)
    a, b = dict(sorted(a.items())), dict(sorted(b.items()))
    matched = len(a) > 1 and a.keys() == b.keys()
    seed = int(rng.integers(2**62))
    weights = seed_weights(len(a), len(b), matched, numpy_generator(seed, "seeds"), replicates)
    found: dict[str, Compared] = {}
    drawn: dict[str, FloatArray] = {}
    for label in _order(a, b):
        one = _paired(label, protocol, a, b)
        own = numpy_generator(seed, f"benchmark:{label}")
        drawn[label] = one.draws(weights, own, replicates)
        found[label] = one.compared(drawn[label], weights, own, level)
    found = _with_holm(found)
    wanted = RUBRIC_SUITE if suite == "rubric" else RACE_SUITE if suite == "race" else ()
    whole = bool(wanted) and all(name in found for name in wanted)
    names = wanted if whole else ()
    average = None
    if whole:
        mean = np.mean([drawn[name] for name in names], axis=0)
        value = math.fsum(found[name].difference.value for name in names) / len(names)
        average = interval(value, mean, level, sum(found[name].n for name in names))
    return Comparison(
        benchmarks=found,
        average=average,
        average_a=math.fsum(found[n].value_a for n in names) / len(names) if whole else None,
        average_b=math.fsum(found[n].value_b for n in names) / len(names) if whole else None,
        seeds_a=tuple(a),
        seeds_b=tuple(b),
        matched=matched,
    )


# --- pairing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pairs:
    """One label of both sides on the same units; rows of the arrays are seeds, A's first in `both`."""

    label: str
    metric: str
    value_a: float
    value_b: float
    a: Shares
    b: Shares
    scores_a: FloatArray
    scores_b: FloatArray
    lost: int

    @property
    def differences(self) -> FloatArray:
        """[n units]: of the shares, means over seeds."""
        found: FloatArray = self.a.all.mean(axis=0) - self.b.all.mean(axis=0)
        return found

    def draws(self, weights: FloatArray | None, rng: np.random.Generator, replicates: int) -> FloatArray:
        """[B]: bootstrap replicates of the difference."""
        if weights is None:
            return resampled([x - y for x, y in self._strata()], None, rng, replicates)
        return resampled([np.concatenate([x, y]) for x, y in self._strata()], weights, rng, replicates)

    def _strata(self) -> list[tuple[FloatArray, FloatArray]]:
        return list(zip(self.a.strata, self.b.strata, strict=True))

    def compared(
        self, draws: FloatArray, weights: FloatArray | None, rng: np.random.Generator, level: float
    ) -> Compared:
        apart = self.scores_a.mean(axis=0) - self.scores_b.mean(axis=0)
        n, wins, losses = apart.size, int((apart > ALIKE).sum()), int((apart < -ALIKE).sum())
        value = self.value_a - self.value_b
        value = 0.0 if abs(value) < ALIKE else value
        return Compared(
            label=self.label,
            metric=self.metric,
            value_a=self.value_a,
            value_b=self.value_b,
            difference=interval(value, draws, level, n),
            p=sign_flip_p(self.differences, rng) if weights is None else centred_p(value, draws),
            p_holm=None,
            wins=wins,
            ties=n - wins - losses,
            losses=losses,
            n=n,
            lost=self.lost,
        )


def _order(a: Runs, b: Runs) -> list[str]:
    """The labels, in the order of the first evaluation's rows. Raises DataError if not all have the same ones."""
    found = [list(dict.fromkeys(row.label for row in rows)) for rows in (*a.values(), *b.values())]
    names = [f"{side} (seed {seed})" for side, runs in (("A", a), ("B", b)) for seed in runs]
    for name, labels in zip(names, found, strict=True):
        odd = sorted(set(labels) ^ set(found[0]))
        if odd:
            raise DataError(
                f"{odd[0]}: not in both {names[0]} and {name}; evaluate the same benchmarks, or choose with "
                "--benchmarks"
            )
    if not found or not found[0]:
        raise DataError("no examples to compare; the evaluations have none yet")
    return found[0]


def _paired(label: str, protocol: str, a: Runs, b: Runs) -> _Pairs:
    """The examples that all evaluations have an answer to. Raises DataError where one lacks an example altogether."""
    sides = [[_by_id(rows, label) for rows in runs.values()] for runs in (a, b)]
    every = [rows for side in sides for rows in side]
    names = [f"{side} (seed {seed})" for side, runs in (("A", a), ("B", b)) for seed in runs]
    for name, rows in zip(names, every, strict=True):
        odd = sorted(rows.keys() ^ every[0].keys())
        if odd:
            there, away = (name, names[0]) if odd[0] in rows else (names[0], name)
            raise DataError(
                f"{label}: {len(odd)} examples are not in both evaluations (e.g. {odd[0]!r} is in {there}, not in "
                f"{away}); evaluate the same set: same --limit and data"
            )
        moved = next((i for i in sorted(rows) if rows[i].domain != every[0][i].domain), None)
        if moved is not None:
            raise DataError(
                f"{label}: example {moved!r} is of {every[0][moved].domain!r} in {names[0]} and of "
                f"{rows[moved].domain!r} in {name}; evaluate the same set: same --limit and data"
            )
    kept = [i for i in sorted(every[0]) if all(rows[i].status != "lost" for rows in every)]
    if not kept:
        raise DataError(
            f"{label}: no example has an answer on both sides; `racelab resume` asks for them again"
        )
    listed = [[[rows[i] for i in kept] for rows in side] for side in sides]
    share_a, share_b = (shares(label, protocol, side) for side in listed)
    if share_a is None or share_b is None:
        raise DataError(f"{label}: its examples make no score (a pair of Ties is incomplete); raise --limit")
    scores_a, scores_b = (np.array([[row.score for row in rows] for rows in side]) for side in listed)
    value_a, value_b = (fmean(total(label, rows, protocol).value for rows in side) for side in listed)
    return _Pairs(
        label=label,
        metric=metric_name(label, protocol),
        value_a=value_a,
        value_b=value_b,
        a=share_a,
        b=share_b,
        scores_a=scores_a,
        scores_b=scores_b,
        lost=len(every[0]) - len(kept),
    )


def _by_id(rows: Sequence[Row], label: str) -> dict[str, Row]:
    return {row.example_id: row for row in rows if row.label == label}


def _with_holm(found: Mapping[str, Compared]) -> dict[str, Compared]:
    """The adjusted p values of the labels that are benchmarks themselves."""
    family = [label for label, one in found.items() if _primary(label)]
    adjusted = dict(zip(family, holm([found[label].p for label in family]), strict=True))
    return {label: replace(one, p_holm=adjusted.get(label)) for label, one in found.items()}


def _primary(label: str) -> bool:
    """IFEval's second reading is not a second benchmark."""
    return label != "ifeval-answer"
