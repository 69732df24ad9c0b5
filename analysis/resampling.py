"""How units, seeds and signs are drawn, and what is read off the draws. Used by `paired.py`, which says why.

Shapes: n units, S seeds, B bootstrap replicates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from racelab.analysis.stats import FloatArray, Interval
from racelab.experiments.errors import DataError

FLIPS: Final = 9_999
"""Sign flips that are drawn where there are too many to go through."""
_EXACT: Final = 14
_BLOCK: Final = 4_000_000
_TINY: Final = 1e-7
ALIKE: Final = 1e-12
"""Sums that differ by less are equal: they were added up in another order."""


def resampled(
    strata: Sequence[FloatArray], weights: FloatArray | None, rng: np.random.Generator, replicates: int
) -> FloatArray:
    """[B]: sums of the units, drawn anew inside each stratum, in blocks that bound the memory.

    Args:
        strata: [R, m] each; R = 1 without weights.
        weights: [B, R], of each replicate's rows; None: the one row.
        rng: source of the draws.
        replicates: B.
    """
    total = np.zeros(replicates)
    for values in strata:
        m = values.shape[1]
        block = max(1, _BLOCK // m)
        for start in range(0, replicates, block):
            rows = slice(start, min(start + block, replicates))
            index = rng.integers(0, m, size=(rows.stop - start, m), dtype=np.int32)
            if weights is None:
                total[rows] += values[0][index].sum(axis=1)
            else:
                mixed = weights[rows] @ values
                total[rows] += np.take_along_axis(mixed, index.astype(np.intp), axis=1).sum(axis=1)
    return total.round(12)  # sums of the same numbers in another order are the same sum


def seed_weights(
    n_a: int, n_b: int, matched: bool, rng: np.random.Generator, replicates: int
) -> FloatArray | None:
    """[B, n_a + n_b]: how much each evaluation counts in each replicate, B's negative; None for one a side."""
    if n_a == n_b == 1:
        return None
    w_a = _frequencies(n_a, rng, replicates)
    w_b = w_a if matched else _frequencies(n_b, rng, replicates)
    found: FloatArray = np.concatenate([w_a, -w_b], axis=1)
    return found


def _frequencies(n: int, rng: np.random.Generator, replicates: int) -> FloatArray:
    """[B, n]: the share of each of n seeds in n draws with replacement."""
    found: FloatArray = rng.multinomial(n, np.full(n, 1.0 / n), size=replicates) / n
    return found


def sign_flip_p(differences: npt.ArrayLike, rng: np.random.Generator) -> float:
    """Two-sided p of a paired permutation test on the sum of differences.

    Example: differences 1, 1, 1, 1, -1 have the sum 3; of the 32 flips those with five or four equal signs reach it:
    2 · (1 + 5) = 12, so p = 12/32 = 0.375.

    Args:
        differences: [n], one per unit; those that are 0 change nothing.
        rng: draws the flips if more than 14 differences are not 0.
    """
    d: FloatArray = np.asarray(differences, dtype=np.float64)
    d = (d / (float(np.abs(d).max(initial=0.0)) or 1.0)).round(12)  # equal sizes are equal numbers
    d = d[d != 0.0]
    if d.size == 0:
        return 1.0
    observed = abs(math.fsum(d)) - _TINY
    if d.size <= _EXACT:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=d.size)))
        return float((np.abs(signs @ d) >= observed).mean())
    return float((1 + (np.abs(_flipped(np.abs(d), rng)) >= observed).sum()) / (1 + FLIPS))


def _flipped(sizes: FloatArray, rng: np.random.Generator) -> FloatArray:
    """[FLIPS]: sums of `sizes` with random signs. Of k equal sizes the sum is size · (2 Binomial(k, 1/2) - k)."""
    each, counts = np.unique(sizes, return_counts=True)
    total = np.zeros(FLIPS)
    for size, k in zip(each, counts, strict=True):
        total += size * (2.0 * rng.binomial(k, 0.5, size=FLIPS) - k)
    return total


def centred_p(value: float, draws: FloatArray) -> float:
    """Share of replicates at least as far from the observed difference as that is from 0."""
    return float((1 + (np.abs(draws - value) >= abs(value) - ALIKE).sum()) / (1 + len(draws)))


def interval(value: float, draws: FloatArray, level: float, n: int) -> Interval:
    """The percentile interval of the draws around an estimate."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), n)


def check(level: float, replicates: int) -> None:
    """Raises DataError for a level or number of replicates that cannot be."""
    if not 0 < level < 1 or replicates < 1:
        raise DataError(
            f"level {level} and {replicates} replicates; need 0 < level < 1 and at least 1 replicate"
        )
