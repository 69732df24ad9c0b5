"""A step's rollouts as the arrays that the maths reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from racelab.experiments.episodes import IntArray
from racelab.experiments.methods.rlds.rollout import Rollout, Row
from racelab.experiments.methods.rlds.rows import Rows
from racelab.experiments.methods.rlds.turns import MaskPrefix, train_from
from racelab.experiments.types import FloatArray


@dataclass(frozen=True, slots=True)
class Arrays:
    """One row per rollout, in the rollout's order.

    Attributes:
        rows: for SDAE; grades None where nothing was graded.
        parent_N: row of the original that a retry came from; -1 for an original.
    """

    rows: Rows
    parent_N: IntArray


def arrays(rollout: Rollout, phi_K: FloatArray, mask_prefix: MaskPrefix) -> Arrays:
    """Rewards, grades, pivots, token counts per turn and masks of a step."""
    rows = rollout.rows
    place = {(row.group, row.idx): n for n, row in enumerate(rows)}
    parent_N = np.array(
        [-1 if row.parent is None else place[row.group, row.parent] for row in rows], dtype=np.int64
    )
    retry_from_N = np.array([row.episode.retry_from for row in rows], dtype=np.int64)
    grades_NK, graded_N, pivots_NK = _gradings(rows, len(phi_K))
    return Arrays(
        Rows(
            rewards_N=np.array([row.episode.reward for row in rows], dtype=np.float64),
            group_N=np.array([row.group for row in rows], dtype=np.int64),
            counts_NU=_counts(rows),
            phi_K=phi_K,
            grades_NK=grades_NK,
            graded_N=graded_N,
            pivots_NK=pivots_NK,
            train_from_N=train_from(retry_from_N, parent_N, mask_prefix),
            is_retry_N=parent_N >= 0,
        ),
        parent_N,
    )


def _counts(rows: Sequence[Row]) -> FloatArray:
    """Sampled tokens of each turn [N, U]."""
    counts_NU = np.zeros((len(rows), max((len(row.episode.turns) for row in rows), default=0)))
    for n, row in enumerate(rows):
        counts_NU[n, : len(row.episode.turns)] = [len(turn.tokens) for turn in row.episode.turns]
    return counts_NU


def _gradings(
    rows: Sequence[Row], k: int
) -> tuple[IntArray | None, npt.NDArray[np.bool_] | None, IntArray | None]:
    """Grades (1 where there are none), which rows have some, and pivots (-1 for none)."""
    if all(row.grading is None for row in rows):
        return None, None, None
    grades_NK = np.ones((len(rows), k), dtype=np.int64)
    pivots_NK = np.full((len(rows), k), -1, dtype=np.int64)
    graded_N = np.zeros(len(rows), dtype=bool)
    for n, row in enumerate(rows):
        if row.grading is not None and row.grading.grades is not None:
            graded_N[n] = True
            grades_NK[n] = row.grading.grades
            pivots_NK[n] = [-1 if pivot is None else pivot for pivot in row.grading.pivots]
    return grades_NK, graded_N, pivots_NK
