"""Random rows of RLDS rollouts, shared by the tests of its maths."""

import numpy as np
import torch

from racelab.experiments.methods.rlds.rows import Rows
from racelab.experiments.methods.rlds.turns import turn_counts

FROZENLAKE_PHI = np.array([0.35, 0.25, 0.15, 0.15, 0.10])
"""RLDS Table 3."""


def tensor(values):
    """A torch tensor of the dtype that numpy would choose (float64, int64)."""
    return torch.from_numpy(np.array(values))


def random_tokens(rng, n, max_turns, equal=False):
    """turn_of_token_NT: replies of 1-3 tokens, bridges of 0-2 between them, padding behind. `equal`: max_turns each."""
    rows = []
    for _ in range(n):
        turns = max_turns if equal else int(rng.integers(1, max_turns + 1))
        rows.append(
            [t for u in range(turns) for t in [u] * int(rng.integers(1, 4)) + [-1] * int(rng.integers(0, 3))]
        )
    out = np.full((n, max(map(len, rows))), -1)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def random_rows(rng, groups=3, size=4, k=3, max_turns=5, rewards=None, equal=False, **fixed):
    """(Rows, turn_of_token_NT) with random grades, pivots (one in k + 1 is none), retries, masks; all graded."""
    n = groups * size
    turns_NT = random_tokens(rng, n, max_turns, equal)
    counts_NU = turn_counts(turns_NT, max_turns)
    last_N1 = turns_NT.max(1)[:, None]
    pivots_NK = np.floor(rng.random((n, k)) * (last_N1 + 1)).astype(int)
    phi_K = rng.dirichlet(np.ones(k))
    values = {
        "rewards_N": rng.random(n) if rewards is None else np.asarray(rewards, dtype=float),
        "group_N": np.arange(n) // size + 5,
        "counts_NU": counts_NU,
        "phi_K": phi_K / phi_K.sum(),
        "grades_NK": rng.integers(1, 6, (n, k)),
        "pivots_NK": np.where(rng.random((n, k)) < 1 / (k + 1), -1, pivots_NK),
        "is_retry_N": np.arange(n) % size == size - 1,
    }
    values["train_from_N"] = np.where(values["is_retry_N"], turns_NT.max(1), 0)
    return Rows(**{**values, **fixed}), turns_NT
