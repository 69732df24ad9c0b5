"""RLCER's rewards (Sheng et al., 2026): which items of a rubric are valid, what an answer and what a rubric earn.

    item k is valid  <=>  std(v_k) > 0  and  corr(v_k, z) > threshold
    cot     = clip( (Σ_valid b_k s_k - Σ s⁻) / (Σ s⁺ - Σ s⁻), 0, 1 )
    answer  = outcome_weight * (±1) + cot_weight * cot
    rubric  = K_valid / K + 1[K > 0]

v_k: whether item k holds for each of the G answers; z: whether each of them is correct; b_k: whether item k of the
answer's own rubric holds for the answer itself; s_k: its points, Σ s⁺ and Σ s⁻ the positive and the negative points of
the valid items.

Where all answers are right, or all wrong, or correctness is unknown, the items that tell the answers apart are valid,
and if none does, all are. So a rubric that tells nothing apart earns its full 2 on such a prompt, as in Sheng et al.'s
code.

Shapes: G answers to a prompt, K items of one rubric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from racelab.experiments.methods.grpo import SCORE_DIGITS
from racelab.experiments.types import FloatArray

Booleans = npt.NDArray[np.bool_]


def correlation(v_G: Booleans, z_G: Booleans) -> float:
    """Pearson correlation of two yes/no vectors, from whole numbers; NaN if one of them is constant.

    corr = (G Σvz - Σv Σz) / sqrt( Σv (G - Σv) Σz (G - Σz) ), since v² = v.
    """
    n, v, z = len(v_G), int(np.count_nonzero(v_G)), int(np.count_nonzero(z_G))
    spread = v * (n - v) * z * (n - z)
    if not spread:
        return math.nan
    both = int(np.count_nonzero(v_G & z_G))
    return round((n * both - v * z) / math.sqrt(spread), SCORE_DIGITS)


def valid_items(holds_GK: Booleans, correct_G: Booleans | None, threshold: float) -> Booleans:
    """Which items of one rubric are valid [K].

    Args:
        holds_GK: whether the item holds for the answer [G, K].
        correct_G: z [G]; None if the prompt has no rule.
        threshold: the correlation must be above it.
    """
    count_K = np.count_nonzero(holds_GK, axis=0)
    varies_K = (count_K > 0) & (count_K < len(holds_GK))
    if correct_G is None or correct_G.all() or not correct_G.any():
        return varies_K if varies_K.any() else np.ones_like(varies_K)
    related_K = [correlation(v_G, correct_G) > threshold for v_G in holds_GK.T]  # False for NaN
    return np.array(related_K, dtype=np.bool_)


def cot_share(holds_K: Booleans, points_K: Sequence[float] | FloatArray, valid_K: Booleans) -> float:
    """The share of the valid items' points that the answer has, in [0, 1]; 0 if no item is valid.

    Args:
        holds_K: which items of its own rubric the answer satisfies [K].
        points_K: their points, none of them 0 [K].
        valid_K: which items count [K].
    """
    points = [float(s) for s, counts in zip(points_K, valid_K, strict=True) if counts]
    if not points:
        return 0.0
    got = math.fsum(s for s, b in zip(points, np.asarray(holds_K)[valid_K], strict=True) if b)
    lowest = math.fsum(s for s in points if s < 0.0)
    whole = math.fsum(abs(s) for s in points)
    return min(max((got - lowest) / whole, 0.0), 1.0)


def outcome(correct: bool | None) -> float:
    """+1 or -1; 0 where no rule decides."""
    return 0.0 if correct is None else (1.0 if correct else -1.0)


def answer_reward(correct: bool | None, cot: float, *, outcome_weight: float, cot_weight: float) -> float:
    """What the policy gets for an answer, in [-outcome_weight, outcome_weight + cot_weight].

    Args:
        correct: by the prompt's rule; None if it has none.
        cot: see `cot_share`; NaN for an answer without a rubric, which gets the outcome alone.
        outcome_weight: of ±1.
        cot_weight: of the share.
    """
    return outcome_weight * outcome(correct) + (0.0 if math.isnan(cot) else cot_weight * cot)


def rubric_reward(valid_K: Booleans) -> float:
    """What the rubric writer gets for a rubric, in [0, 2]; 0 for one without a usable item (K = 0)."""
    return np.count_nonzero(valid_K) / len(valid_K) + 1.0 if len(valid_K) else 0.0
