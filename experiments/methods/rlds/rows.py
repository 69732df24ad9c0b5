"""What SDAE is told about the rollouts of a task: one row each, without tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from racelab.experiments.methods.rlds.turns import Array, like, namespace


@dataclass(frozen=True, slots=True)
class Rows:
    """Rollouts of one task, token-free.

    Attributes:
        rewards_N: R_i, finite floats. Their dtype is that of all results.
        group_N: integers; rows of equal value form a group.
        counts_NU: sampled tokens per turn (`turns.turn_counts`, or the lengths of the turns).
        phi_K: weights; they sum to 1.
        grades_NK: g_ik in 1..5; anything where the row is ungraded. None: nobody graded.
        graded_N: rows that have grades; None: all, if there are grades.
        pivots_NK: turns, -1 for none; not yet clamped. None: no pivots.
        train_from_N: turns before it are masked (`turns.train_from`); None: nothing is.
        is_retry_N: None: no row is.
    """

    rewards_N: Array
    group_N: Array
    counts_NU: Array
    phi_K: Array
    grades_NK: Array = None
    graded_N: Array = None
    pivots_NK: Array = None
    train_from_N: Array = None
    is_retry_N: Array = None


def complete(rows: Rows) -> Rows:
    """The same rows, checked: nothing left None, counts in the dtype of the rewards, no pivots without grades.

    Raises:
        ValueError: rewards that are not finite floats, grades outside 1..5, weights that do not sum to 1, or shapes
            that do not fit.
    """
    n, k = len(rows.rewards_N), len(rows.phi_K)
    xp, device = namespace(rows.rewards_N), rows.rewards_N.device

    def full(given: Array, value: int, shape: tuple[int, ...], dtype: Any) -> Array:
        return xp.full(shape, value, dtype=dtype, device=device) if given is None else given

    graded_N = None if rows.grades_NK is None else rows.graded_N
    out = Rows(
        rewards_N=rows.rewards_N,
        group_N=rows.group_N,
        counts_NU=like(rows.counts_NU, rows.rewards_N),
        phi_K=like(rows.phi_K, rows.rewards_N),
        grades_NK=full(rows.grades_NK, 1, (n, k), xp.int64),
        graded_N=full(graded_N, rows.grades_NK is not None, (n,), xp.bool),
        pivots_NK=full(rows.pivots_NK, -1, (n, k), xp.int64),
        train_from_N=full(rows.train_from_N, 0, (n,), xp.int64),
        is_retry_N=full(rows.is_retry_N, False, (n,), xp.bool),
    )
    if "float" not in str(out.rewards_N.dtype) or not bool((abs(out.rewards_N) < np.inf).all()):
        raise ValueError("rewards must be finite floats")
    if abs(float(out.phi_K.sum()) - 1.0) > 1e-6 or bool((out.phi_K < 0).any()):
        raise ValueError("the subtask weights phi must not be negative and must sum to 1")
    of_row = (out.group_N, out.counts_NU, out.graded_N, out.train_from_N, out.is_retry_N)
    if any(len(a) != n for a in of_row):
        raise ValueError(f"every array of rows must have {n} of them, as there are rewards")
    if any(tuple(a.shape) != (n, k) for a in (out.grades_NK, out.pivots_NK)):
        raise ValueError(f"grades and pivots must have shape [{n}, {k}]")
    if bool((((out.grades_NK < 1) | (out.grades_NK > 5)) & out.graded_N[:, None]).any()):
        raise ValueError("the grades of a graded row must lie in 1..5")
    pivots_NK = xp.where(out.graded_N[:, None], out.pivots_NK, like(-1, out.pivots_NK))
    return replace(out, pivots_NK=pivots_NK)
