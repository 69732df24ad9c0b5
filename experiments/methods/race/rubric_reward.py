"""The reward of a candidate rubric: Eqs 15-16 of the RACE paper, and the diagnostics of Table 12.

    m_i = J(x, y+; R_i) - J(x, y-; R_i)                       (15)
    S_rubric = clip( m_i / (m_old + eps_norm), -c, c )        (16)

A rubric that changes nothing scores m_old / (m_old + eps_norm), not 0: read `gain_mean`, the mean of
m_i - m_old, beside it.
The denominator of Eq 16 is not printed; `sum` reads "normalises the scale, eps stabilises" as in Eq 3, `max`
takes max(m_old, eps_norm).

Shapes: N pool entries of a step, G candidate rubrics per entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from racelab.experiments.methods.grpo import MIN_VALID, sigma, valid
from racelab.experiments.types import FloatArray

Denominator = Literal["sum", "max"]

_DENOMINATORS: dict[str, Callable[[float, float], float]] = {
    "sum": lambda m_old, eps_norm: m_old + eps_norm,
    "max": max,
}


def new_margins(preferred_G: FloatArray, rejected_G: FloatArray) -> FloatArray:
    """Eq 15: scores of y+ less scores of y- under each candidate [G]; NaN where either is missing."""
    return np.asarray(preferred_G, dtype=np.float64) - np.asarray(rejected_G, dtype=np.float64)


def margin_reward(
    m_new: float,
    m_old: float,
    *,
    eps_norm: float = 0.05,
    clip: float = 1.0,
    denominator: Denominator = "sum",
) -> float:
    """Eq 16, the base reward of one candidate.

    Args:
        m_new: m_i of Eq 15; NaN gives NaN.
        m_old: the cached margin (Eq 11), >= 0.
        eps_norm: > 0 (Section 5.2: 0.05).
        clip: c > 0 (Section 5.2: 1.0).
        denominator: `sum` m_old + eps_norm, `max` max(m_old, eps_norm).

    Raises:
        ValueError: if m_old is negative or NaN, eps_norm or clip is not positive, or the denominator unknown.
    """
    if not m_old >= 0.0:
        raise ValueError(f"m_old must be >= 0 (Eq 11), got {m_old}")
    if not (eps_norm > 0.0 and clip > 0.0):
        raise ValueError(f"eps_norm and clip must be positive, got {eps_norm} and {clip}")
    if denominator not in _DENOMINATORS:
        raise ValueError(f"denominator {denominator!r} is unknown; use one of {sorted(_DENOMINATORS)}")
    if math.isnan(m_new):
        return math.nan
    return min(max(m_new / _DENOMINATORS[denominator](m_old, eps_norm), -clip), clip)


def base_rewards(
    margins_G: FloatArray,
    m_old: float,
    *,
    eps_norm: float = 0.05,
    clip: float = 1.0,
    denominator: Denominator = "sum",
) -> FloatArray:
    """Eq 16 for the candidates of one entry [G]; NaN where the margin is."""
    rewards = [
        margin_reward(float(m), m_old, eps_norm=eps_norm, clip=clip, denominator=denominator)
        for m in margins_G
    ]
    return np.array(rewards, dtype=np.float64)


def final_rewards(
    base_G: FloatArray,
    usable_G: npt.NDArray[np.bool_],
    *,
    invalid_reward: float = math.nan,
    format_weight: float = 0.0,
) -> FloatArray:
    """What GRPO sees: base reward + format_weight for a usable rubric, `invalid_reward` for an unusable one.

    A usable rubric whose judge call failed keeps NaN: the rubric is not to blame.

    Args:
        base_G: Eq 16 [G].
        usable_G: True where the candidate parsed [G].
        invalid_reward: NaN leaves unusable candidates out of the group; -c presses for valid JSON.
        format_weight: w of the option w * valid_json (0: Eq 16 alone).
    """
    return np.where(usable_G, np.asarray(base_G, dtype=np.float64) + format_weight, invalid_reward)


def _mean(values: npt.ArrayLike) -> float:
    """Mean of the finite values, NaN if there is none."""
    scores = valid(np.ravel(np.asarray(values, dtype=np.float64)))
    return math.fsum(scores) / scores.size if scores.size else math.nan


def rubric_reward_stats(
    margins_NG: FloatArray,
    m_old_N: FloatArray,
    base_NG: FloatArray,
    final_NG: FloatArray,
    *,
    clip: float = 1.0,
    near_tie: float = 0.025,
) -> dict[str, float]:
    """The `race/rubric_reward` metrics of one rubric step. A value that has no basis is NaN.

    Args:
        margins_NG: Eq 15.
        m_old_N: cached margins.
        base_NG: Eq 16.
        final_NG: the rewards that GRPO gets.
        clip: c of Eq 16.
        near_tie: Table 12's bound on |m_old|.

    Returns:
        `mean` of the final rewards (r-bar of Eq 14), `gain_mean` of m_new - m_old, `margin_mean` of m_new;
        `sigma_zero_frac` of the groups with two or more final rewards; `near_tie_frac` of the entries;
        `at_clip_frac` and `reversed_frac` (m_new < 0) of the candidates that have a margin.

    Raises:
        ValueError: if the shapes do not agree.
    """
    n = len(m_old_N)
    if not margins_NG.shape == base_NG.shape == final_NG.shape or margins_NG.shape[:1] != (n,):
        raise ValueError(
            f"shapes differ: margins {margins_NG.shape}, m_old {m_old_N.shape}, "
            f"base {base_NG.shape}, final {final_NG.shape}"
        )
    spreads = [sigma(row) for row in final_NG if valid(row).size >= MIN_VALID]
    scored = np.isfinite(margins_NG)
    return {
        "mean": _mean(final_NG),
        "gain_mean": _mean(margins_NG - np.asarray(m_old_N)[:, None]),
        "margin_mean": _mean(margins_NG),
        "sigma_zero_frac": _mean([float(s == 0.0) for s in spreads]),
        "near_tie_frac": _mean(np.abs(m_old_N) < near_tie),
        "at_clip_frac": _mean(np.abs(base_NG[scored]) >= clip),
        "reversed_frac": _mean(margins_NG[scored] < 0.0),
    }
