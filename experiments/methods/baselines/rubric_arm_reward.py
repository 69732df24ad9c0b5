"""Rubric-ARM's two rewards, and the order in which preference pairs are used. Maths only.

P pairs of a step, G samples of a pair. The preferred answer of a pair is shown as A or as B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from racelab.experiments.types import FloatArray


def generator_rewards(
    winners_G: Sequence[str | None], valid_G: Sequence[bool], beyond_G: Sequence[bool], format_weight: float
) -> FloatArray:
    """1[the judge names A, the preferred answer] + format_weight 1[the rubric has an item], [G].

    Args:
        winners_G: `A`, `B`, or None where there is no verdict or it could not be read (no win).
        valid_G: whether the text parsed as a rubric.
        beyond_G: True where the judge could not be asked, because its prompt exceeds the window.
        format_weight: see the formula.

    Returns:
        Rewards; NaN where the judge could not be asked.
    """
    return np.array(
        [
            math.nan if beyond else float(winner == "A") + format_weight * float(valid)
            for winner, valid, beyond in zip(winners_G, valid_G, beyond_G, strict=True)
        ],
        dtype=np.float64,
    )


def judge_rewards(winners_G: Sequence[str | None], preferred: str) -> FloatArray:
    """1 where a verdict names the preferred side, else 0, [G]; a verdict that cannot be read gets 0."""
    return np.array([float(winner == preferred) for winner in winners_G], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class PairOrder:
    """Where the run stands in its pairs.

    An epoch is a random order of all pairs, cut into steps; what is left at its end and does not fill a step is left
    out, other pairs in every epoch.

    Attributes:
        seed: of the epoch's order; None before the first.
        used: pairs of the epoch that were used.
    """

    seed: int | None = None
    used: int = 0

    def take(self, n: int, total: int, rng: np.random.Generator) -> tuple[list[int], PairOrder]:
        """Indices of the next n of `total` pairs, and where the run stands then; n <= total.

        Args:
            n: pairs of a step.
            total: pairs there are.
            rng: drawn from once an epoch.
        """
        if n > total:
            raise ValueError(f"{n} pairs a step of {total}")
        now = self
        if now.seed is None or now.used + n > total:
            now = PairOrder(int(rng.integers(2**62)), 0)
        order = np.random.default_rng(now.seed).permutation(total)
        taken = [int(i) for i in order[now.used : now.used + n]]
        return taken, PairOrder(now.seed, now.used + n)
