"""Statistics of comparisons. Every draw comes from the generator that is passed in.

The resampling unit is the example: an example's samples (or seeds) are averaged first, since they are not
independent of each other. Shapes: n examples, S samples of one example, B bootstrap replicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from racelab.experiments.errors import DataError

FloatArray = npt.NDArray[np.float64]
_BLOCK = 4_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its percentile bootstrap interval, and the number of examples behind it."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class PairedResult:
    """The comparison of a with b on the same examples.

    Attributes:
        mean_a: mean over examples.
        mean_b: mean over examples.
        difference: of the means, a - b, with its interval.
        ratio: of the means, a / b, with its interval; None where b's mean is 0 in the data or a replicate.
        wins: examples where a > b.
        ties: examples where a = b.
        losses: examples where a < b.
        sign_p: two-sided exact sign test over the examples that are no ties.
    """

    mean_a: float
    mean_b: float
    difference: Interval
    ratio: Interval | None
    wins: int
    ties: int
    losses: int
    sign_p: float


def example_means(values: npt.ArrayLike) -> FloatArray:
    """[n] or [n, S] -> [n]: the mean of each example's samples, NaN samples left out.

    Raises:
        DataError: an example without any value; it must be dropped, or scored, by the caller.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise DataError(f"scores have {array.ndim} dimensions; [examples] or [examples, samples] is needed")
    there = np.isfinite(array)
    empty = np.flatnonzero(~there.any(axis=1))
    if empty.size:
        raise DataError(
            f"{empty.size} of {len(array)} examples have no score (first: row {empty[0]}); drop them"
        )
    means: FloatArray = np.where(there, array, 0.0).sum(axis=1) / there.sum(axis=1)
    return means


def bootstrap_mean(
    values: npt.ArrayLike, rng: np.random.Generator, replicates: int = 1000, level: float = 0.95
) -> Interval:
    """Mean over examples with its percentile interval.

    Args:
        values: [n] or [n, S].
        rng: source of the resampling.
        replicates: B.
        level: coverage aimed at, in (0, 1).

    Raises:
        DataError: no examples, an example without a value, or a level outside (0, 1).
    """
    means = example_means(values)
    _check(len(means), level, replicates)
    draws = _resampled(means[:, None], rng, replicates)[:, 0]
    return _interval(float(means.mean()), draws, level, len(means))


def paired_bootstrap(
    a: npt.ArrayLike,
    b: npt.ArrayLike,
    rng: np.random.Generator,
    replicates: int = 1000,
    level: float = 0.95,
) -> PairedResult:
    """Compares a with b on the same examples; both are resampled by the same example indices.

    Args:
        a: [n] or [n, S]; row i of a and of b is the same example.
        b: [n] or [n, S'].
        rng: source of the resampling.
        replicates: B.
        level: coverage aimed at, in (0, 1).

    Raises:
        DataError: other numbers of examples in a and b, none, or an example without a value.
    """
    means_a, means_b = example_means(a), example_means(b)
    if len(means_a) != len(means_b):
        raise DataError(
            f"{len(means_a)} examples against {len(means_b)}; a paired comparison needs the same ones"
        )
    _check(len(means_a), level, replicates)
    draws = _resampled(np.stack([means_a, means_b], axis=1), rng, replicates)
    mean_a, mean_b = float(means_a.mean()), float(means_b.mean())
    n = len(means_a)
    ratio = None
    if mean_b != 0 and bool(np.all(draws[:, 1] != 0)):
        ratio = _interval(mean_a / mean_b, draws[:, 0] / draws[:, 1], level, n)
    wins, losses = int((means_a > means_b).sum()), int((means_a < means_b).sum())
    return PairedResult(
        mean_a=mean_a,
        mean_b=mean_b,
        difference=_interval(mean_a - mean_b, draws[:, 0] - draws[:, 1], level, n),
        ratio=ratio,
        wins=wins,
        ties=n - wins - losses,
        losses=losses,
        sign_p=sign_test(wins, losses),
    )


def align(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> tuple[list[str], FloatArray]:
    """Pairs two sides by example id: the ids, sorted, and [n, 2] means of each example's samples.

    Raises:
        DataError: an id that only one side has; pairing must not drop examples in silence.
    """
    only = sorted(a.keys() ^ b.keys())
    if only:
        side = "first" if only[0] in a else "second"
        raise DataError(
            f"{len(only)} examples are on one side only (e.g. {only[0]!r}, {side}); evaluate the same set"
        )
    ids = sorted(a)
    return ids, np.array([[example_means([a[i]])[0], example_means([b[i]])[0]] for i in ids]).reshape(-1, 2)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact sign test, P under fair coin flips of a split at least this uneven; ties left out.

    Example: 5 wins and 1 loss: 2 · (C(6,0) + C(6,1)) / 2^6 = 14/64 = 0.21875.
    """
    n, least = wins + losses, min(wins, losses)
    tail = sum(math.comb(n, k) for k in range(least + 1))
    return float(min(1.0, 2 * tail / 2**n))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment for several tests, in the order given.

    Example: [0.01, 0.04, 0.03] gives [0.03, 0.06, 0.06]: sorted, times 3, 2, 1, made non-decreasing.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def over_seeds(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean over seeds with Student's t interval; NaN bounds for a single seed.

    Seeds are few, so resampling them would understate the spread.
    """
    array = np.asarray(values, dtype=np.float64)
    _check(len(array), level, 1)
    mean = float(array.mean())
    if len(array) == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = _t_quantile(0.5 + level / 2, len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Interval(mean, mean - half, mean + half, len(array))


def _check(n: int, level: float, replicates: int) -> None:
    if n == 0:
        raise DataError("no examples to compare; check the filters")
    if not 0 < level < 1 or replicates < 1:
        raise DataError(
            f"level {level} and {replicates} replicates; need 0 < level < 1 and at least 1 replicate"
        )


def _resampled(values: FloatArray, rng: np.random.Generator, replicates: int) -> FloatArray:
    """[n, C] -> [B, C]: column means of B resamples of the rows, drawn in blocks to bound memory."""
    n = len(values)
    block = max(1, _BLOCK // n)
    parts = [
        values[rng.integers(0, n, size=(min(block, replicates - start), n))].mean(axis=1)
        for start in range(0, replicates, block)
    ]
    result: FloatArray = np.concatenate(parts)
    return result


def _interval(value: float, draws: FloatArray, level: float, n: int) -> Interval:
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), n)


def _t_quantile(p: float, df: int) -> float:
    """Quantile of Student's t for p > 1/2, by bisection on its distribution function."""
    low, high = 0.0, 1.0
    while _t_cdf(high, df) < p:
        high *= 2
    return _bisect(lambda t: _t_cdf(t, df) - p, low, high)


def _t_cdf(t: float, df: int) -> float:
    """P(T <= t) for t >= 0 and whole df: the finite trigonometric sums (Abramowitz & Stegun 26.7.3-4)."""
    theta = math.atan(t / math.sqrt(df))
    cos, sin = math.cos(theta), math.sin(theta)
    total, term = 0.0, cos if df % 2 else 1.0
    for k in range(1 if df % 2 else 0, df - 1, 2):
        total += term
        term *= cos * cos * (k + 1) / (k + 2)
    inside = 2 / math.pi * (theta + sin * total) if df % 2 else sin * total
    return 0.5 + inside / 2


def _bisect(f: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(200):
        middle = (low + high) / 2
        if f(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2
