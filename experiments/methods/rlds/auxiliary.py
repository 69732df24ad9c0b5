"""Which retries teach by imitation, and how much: the pairs and weights of L_aux (RLDS §3.2, App. B).

Two kinds of pair come from a retry whose reward beat its original's: (what the reflector saw, its reflection) and
(original prompt, retry response). Of each kind the top 64 of a step by reward delta are kept, pair j weighs
delta_j / sum of the kept deltas, and its NLL is a mean over its tokens:

    L_aux = sum over kinds of coef * sum_j (delta_j / sum delta) * (1 / n_j) * sum_t -log pi(y_t)

Choices where the paper is silent: equal deltas are taken in the order of the retries; deltas are rounded to
`SCORE_DIGITS`, so that 0.3 - 0.1 and 0.2 are equal and rounding alone is no success; a pair without a token (a scripted
reflector's reflection) is no pair and takes no one's place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from racelab.experiments.methods.grpo import SCORE_DIGITS
from racelab.experiments.types import FloatArray

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The kept pairs of one kind, by falling delta.

    Attributes:
        index_M: which retries.
        weight_M: delta over the sum of the kept deltas; sums to 1, or is empty.
    """

    index_M: IntArray
    weight_M: FloatArray


def select_pairs(
    delta_R: FloatArray, max_pairs: int, n_tokens_R: npt.NDArray[np.integer] | None = None
) -> Pairs:
    """The pairs of one kind.

    Args:
        delta_R: reward of each retry less that of its original.
        max_pairs: most that are kept.
        n_tokens_R: tokens of each retry's pair of this kind; 0 where there is none. None: all have some.

    Raises:
        ValueError: a delta that is not finite.
    """
    delta_R = np.asarray(np.round(delta_R, SCORE_DIGITS), dtype=np.float64)
    if not np.isfinite(delta_R).all():
        raise ValueError("reward deltas must be finite")
    usable_R = delta_R > 0 if n_tokens_R is None else (delta_R > 0) & (np.asarray(n_tokens_R) > 0)
    order = np.argsort(-delta_R, kind="stable")
    index_M = order[usable_R[order]][:max_pairs]
    kept_M = delta_R[index_M]
    return Pairs(index_M, kept_M / kept_M.sum() if len(kept_M) else kept_M)


def token_weights(pairs: Pairs, n_tokens_R: npt.NDArray[np.integer], coef: float) -> FloatArray:
    """Weight of each token of a kept pair's NLL [M]: coef * weight / tokens. They sum to `coef` over all tokens.

    Args:
        pairs: of `select_pairs` with the same `n_tokens_R`.
        n_tokens_R: tokens of each retry's pair of this kind.
        coef: 0.05 for reflections, 0.10 for retries (App. B).
    """
    return np.asarray(coef * pairs.weight_M / np.asarray(n_tokens_R)[pairs.index_M])
