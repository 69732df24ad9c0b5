"""EvoLM's reward of a candidate rubric (Li et al., 2026): does it prefer the newer answer to the older one?

    m     = s⁺ - s⁻                                    s⁺: the fresh answer's score, s⁻: the old one's
    base  = 1[m > 0]  |  m  |  0.7 1[m > 0] + 0.3 clip(m, 0, 1)
    final = (1 - f) base + f valid

A tie prefers nothing: base 0. A score that is missing makes the margin and the reward NaN. The settings that Li et
al. train with are `preference` and f = 0; their released model is named after `margin` with a format term, whose f is
not published.

Shapes: G candidates of one pair of answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from racelab.experiments.types import FloatArray

Base = Literal["preference", "margin", "separation"]

PREFERENCE_SHARE, SIZE_SHARE = 0.7, 0.3
"""`separation`: weights of the order and of the size of the margin."""


def _preference(margins: FloatArray) -> FloatArray:
    return (margins > 0.0).astype(np.float64)


def _separation(margins: FloatArray) -> FloatArray:
    size = np.clip(margins, 0.0, 1.0)
    return np.asarray(PREFERENCE_SHARE * _preference(margins) + SIZE_SHARE * size, dtype=np.float64)


_BASES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "preference": _preference,
    "margin": lambda margins: margins,
    "separation": _separation,
}


def base_rewards(margins_G: FloatArray, base: Base) -> FloatArray:
    """The base reward of each candidate [G]; NaN where the margin is.

    Raises:
        ValueError: unknown `base`.
    """
    if base not in _BASES:
        raise ValueError(f"base reward {base!r} is unknown; use one of {sorted(_BASES)}")
    margins_G = np.asarray(margins_G, dtype=np.float64)
    return np.where(np.isnan(margins_G), math.nan, _BASES[base](margins_G))


def final_rewards(
    base_G: FloatArray,
    valid_G: npt.NDArray[np.bool_],
    usable_G: npt.NDArray[np.bool_],
    *,
    format_weight: float,
    invalid_reward: float = math.nan,
) -> FloatArray:
    """What GRPO sees: (1 - f) base + f valid where there is a rubric to judge, `invalid_reward` where there is none.

    A usable rubric whose judge call failed keeps NaN: the rubric is not to blame.

    Args:
        base_G: base rewards [G].
        valid_G: True where the rubric has the form asked for [G]; stricter than usable.
        usable_G: True where it parsed, or its raw text stands in [G].
        format_weight: f in [0, 1].
        invalid_reward: NaN leaves unusable candidates out of the group.
    """
    mixed_G = (1.0 - format_weight) * np.asarray(base_G, dtype=np.float64) + format_weight * valid_G
    return np.where(usable_G, mixed_G, invalid_reward)
