"""Subtask-Decomposed Advantage Estimation: Eqs 1-3 of the RLDS paper (§3.3), and the scalar advantages beside it.

    r_ik = R_i (g_ik - 1) / sum_j (g_ij - 1),   A_ik = r_ik - mean of r_.k over the group                     (1)
    A_i  = sum_k phi_k A_ik,                    Â_i  = A_i / (sigma_batch + eps)                              (2)
    Â_it = sum_k phi_k A_ik m_k(t; pivot_ik) / (sigma_batch + eps)                                            (3)

Shapes: N rows (originals and retries of all groups of one task), K subtasks, U turns, T tokens. numpy arrays and torch
tensors alike; see `turns.py`. Several tasks of different K share one sigma_batch (§3.3): each is one `Rows`.

Choices where the paper is silent:
- sigma_batch and the std of scalar GRPO are population deviations, as everywhere in this package.
- A row whose reward is negative has uniform shares: a proportional split would blame the good competencies most.
- A row without grades in a group that has some has uniform shares. A group without any falls back to scalar GRPO
  (§3.3), broadcast, and takes no part in sigma_batch.
- A_i can cancel to 0 in every row of a batch while A_ik does not (solved rollouts whose grades differ on subtasks of
  equal weight). Eq 3 would then divide by eps alone and blow rounding up to a full step. Where sigma_batch is within
  `FLAT` of 0 all decomposed rows have stage 2's broadcast, which is about 0, and the batch is counted.
- `skip_flat`: rows of groups with equal rewards get 0 and take no part in sigma_batch. Off: the paper keeps them.
- `opmd_baseline`: as RLDS §2.1 describes R3L's (arXiv 2601.03715), "retry-conditional". Our reading: the baseline of a
  group is the mean of its originals alone, in Eq 1 and in the scalar advantage. Divisors are unchanged. R3L's public
  code takes the mean of the whole group and no std.
- `positive_amplification`: as §2.1 says, of "successful retries"; here those with Â_i > 0, multiplied as a whole after
  sigma_batch was taken. R3L's public code multiplies every advantage >= 0, originals too.

Sum_k r_ik = R_i holds up to two units in the last place of R_i: each share is rounded twice and no share is bent to
absorb the rest, so that equal grades keep equal shares. With K = 1, or R_i = 0, it is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from racelab.experiments.methods import grpo as scalar
from racelab.experiments.methods.rlds.rows import Rows, complete
from racelab.experiments.methods.rlds.turns import (
    Array,
    clamp_pivots,
    expand,
    kept_turns,
    kernel,
    like,
    namespace,
)

FLAT = 1e-9
"""Rewards of a group that lie within it are equal."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`method.advantage`, `method.sdae` and R3L's two options; meanings as in `configs/schema_rlds.py`."""

    advantage: Literal["sdae", "grpo"] = "sdae"
    kernel: Literal["gaussian", "none"] = "gaussian"
    kernel_sigma: float = 1.0
    eps: float = 1e-6
    advantage_eps: float = 1e-6
    skip_flat: bool = False
    opmd_baseline: bool = False
    positive_amplification: float = 1.0


@dataclass(frozen=True, slots=True)
class Fallbacks:
    """How often SDAE had to do something else. Under scalar GRPO: how often it would have had to.

    Attributes:
        groups: all of the task.
        groups_without_grades: fell back to scalar GRPO.
        groups_flat: equal rewards.
        rows_ungraded: uniform shares in a group with other grades.
        rows_negative: graded, but uniform shares, as the reward is negative.
        pivots_clamped: beyond the row's last turn.
        sigma_zero: 1 if sigma_batch was 0, so that no kernel was applied.
    """

    groups: int
    groups_without_grades: int
    groups_flat: int
    rows_ungraded: int
    rows_negative: int
    pivots_clamped: int
    sigma_zero: int = 0


@dataclass(frozen=True, slots=True)
class Advantages:
    """What the rows of one task get.

    Attributes:
        adv_NK: A_ik of Eq 1; 0 where the row is not decomposed.
        adv_N: Â_i, amplification included: the token mean of the advantages before the retry mask.
        adv_NU: Â_it at the tokens of each turn; 0 on masked turns and on turns without tokens.
        grpo_N: the group-normalised scalar advantage, whatever is trained with.
        decomposed_N: the rows that Eqs 1-3 apply to.
        sigma: sigma_batch, over the decomposed rows of all tasks; 0 if there are none.
        fallbacks: counts.
    """

    adv_NK: Array
    adv_N: Array
    adv_NU: Array
    grpo_N: Array
    decomposed_N: Array
    sigma: float
    fallbacks: Fallbacks


@dataclass(frozen=True, slots=True)
class TokenAdvantages(Advantages):
    """`Advantages` looked up for each token.

    Attributes:
        adv_NT: Â_it; 0 at masked tokens and at those that were not sampled.
    """

    adv_NT: Array


def group_mean(values_NK: Array, group_N: Array, among_N: Array | None = None) -> Array:
    """Mean of each row's group over its rows `among_N` (default: all) [N, K].

    Raises:
        ValueError: a group has no row among them.
    """
    xp = namespace(values_NK)
    groups, index_N = xp.unique(group_N, return_inverse=True)
    member_MN = groups[:, None] == group_N[None, :]
    member_MN = like(member_MN if among_N is None else member_MN & among_N[None, :], values_NK)
    size_M = member_MN.sum(1)
    if bool((size_M == 0).any()):
        raise ValueError("a group without originals has no OPMD baseline")
    return ((member_MN @ values_NK) / size_M[:, None])[index_N]


def shares(rewards_N: Array, grades_NK: Array, graded_N: Array) -> Array:
    """r_ik [N, K]: R_i in proportion to g_ik - 1; evenly where all grades are 1, there are none, or R_i < 0."""
    xp = namespace(rewards_N)
    points_NK = like(grades_NK, rewards_N) - 1.0
    total_N = points_NK.sum(1)
    even_N = ~graded_N | (rewards_N < 0) | (total_N == 0)
    divisor_N = xp.where(even_N, like(grades_NK.shape[1], rewards_N), total_N)
    points_NK = xp.where(even_N[:, None], like(1.0, rewards_N), points_NK)
    return rewards_N[:, None] * points_NK / divisor_N[:, None]


def stage1(shares_NK: Array, group_N: Array, baseline_N: Array | None = None) -> Array:
    """Eq 1: A_ik [N, K]. `baseline_N`: the rows whose mean is taken (default: the whole group)."""
    return shares_NK - group_mean(shares_NK, group_N, baseline_N)


def stage2(adv_NK: Array, phi_K: Array) -> Array:
    """Eq 2 without the divisor: A_i [N]."""
    return adv_NK @ phi_K


def sigma_batch(raw: Sequence[Array]) -> float:
    """Population std of A_i over the decomposed rows of all tasks; 0.0 if there are none. The order plays no role."""
    values = [float(a) for raw_N in raw for a in raw_N]
    return scalar.sigma(np.array(values)) if values else 0.0


def stage3(adv_NK: Array, phi_K: Array, m_NKU: Array, sigma: float, eps: float) -> Array:
    """Eq 3 at the tokens of each turn [N, U]."""
    return ((adv_NK * phi_K)[:, :, None] * m_NKU).sum(1) / (sigma + eps)


def grpo(rewards_N: Array, group_N: Array, eps: float, baseline_N: Array | None = None) -> Array:
    """Scalar GRPO: (R_i - mean) / (std + eps) within each group [N]; 0 in groups of equal rewards.

    Args:
        rewards_N: R_i.
        group_N: groups.
        eps: of the divisor.
        baseline_N: the rows whose mean is taken (default: the whole group). The std is that of the whole group.
    """
    rewards, groups = np.array(rewards_N.tolist()), np.array(group_N.tolist())
    among = np.ones(len(rewards), dtype=bool) if baseline_N is None else np.array(baseline_N.tolist())
    out_N = np.zeros(len(rewards))
    for group in np.unique(groups):
        rows = groups == group
        shift = scalar.mean(rewards[rows]) - scalar.mean(rewards[rows & among])
        spread = scalar.sigma(rewards[rows])
        if spread > 0.0:
            out_N[rows] = scalar.advantages(rewards[rows], eps) + shift / (spread + eps)
    return like(out_N, rewards_N)


def flat_rows(rewards_N: Array, group_N: Array) -> Array:
    """Rows of groups with equal rewards [N]."""
    xp = namespace(rewards_N)
    groups, index_N = xp.unique(group_N, return_inverse=True)
    other_MN = groups[:, None] != group_N[None, :]
    highest_M = xp.amax(xp.where(other_MN, like(-np.inf, rewards_N), rewards_N), 1)
    lowest_M = xp.amin(xp.where(other_MN, like(np.inf, rewards_N), rewards_N), 1)
    return (highest_M - lowest_M <= FLAT)[index_N]


def _baseline(rows: Rows, settings: Settings) -> Array:
    """Rows whose mean is the baseline of their group [N]: all of them, or R3L's originals."""
    return ~rows.is_retry_N if settings.opmd_baseline else rows.is_retry_N | ~rows.is_retry_N


def _decompose(rows: Rows, settings: Settings) -> tuple[Array, Array, Fallbacks]:
    """Stage 1 of complete rows: (A_ik, decomposed rows, counts)."""
    xp, rewards_N, graded_N = namespace(rows.rewards_N), rows.rewards_N, rows.graded_N
    some_N = group_mean(like(graded_N, rewards_N)[:, None], rows.group_N)[:, 0] > 0
    flat_N = flat_rows(rewards_N, rows.group_N)
    on_N = some_N & ~flat_N if settings.skip_flat else some_N
    r_NK = shares(rewards_N, rows.grades_NK, graded_N)
    adv_NK = stage1(r_NK, rows.group_N, _baseline(rows, settings))
    counted = Fallbacks(
        groups=len(xp.unique(rows.group_N)),
        groups_without_grades=len(xp.unique(rows.group_N[~some_N])),
        groups_flat=len(xp.unique(rows.group_N[flat_N])),
        rows_ungraded=int((some_N & ~graded_N).sum()),
        rows_negative=int((graded_N & (rewards_N < 0)).sum()),
        pivots_clamped=clamp_pivots(rows.pivots_NK, rows.counts_NU)[1],
    )
    return xp.where(on_N[:, None], adv_NK, like(0.0, rewards_N)), on_N, counted


def _apply(
    rows: Rows, adv_NK: Array, on_N: Array, counted: Fallbacks, sigma: float, settings: Settings
) -> Advantages:
    """Stages 2 and 3 of complete rows, the scalar path, R3L's amplification and its mask."""
    xp, eps = namespace(adv_NK), settings.eps
    grpo_N = grpo(rows.rewards_N, rows.group_N, settings.advantage_eps, _baseline(rows, settings))
    adv_N, adv_NU = grpo_N, grpo_N[:, None]
    if settings.advantage == "sdae":
        adv_N = xp.where(on_N, stage2(adv_NK, rows.phi_K) / (sigma + eps), grpo_N)
        adv_NU = adv_N[:, None]
        if settings.kernel == "gaussian" and sigma > FLAT:
            pivots_NK, _ = clamp_pivots(rows.pivots_NK, rows.counts_NU)
            m_NKU = kernel(pivots_NK, rows.counts_NU, settings.kernel_sigma)
            adv_NU = xp.where(on_N[:, None], stage3(adv_NK, rows.phi_K, m_NKU, sigma, eps), adv_NU)
    amplified_N = rows.is_retry_N & (adv_N > 0)
    factor_N = xp.where(amplified_N, like(settings.positive_amplification, adv_N), like(1.0, adv_N))
    kept_NU = kept_turns(rows.counts_NU, rows.train_from_N)
    return Advantages(
        adv_NK=adv_NK,
        adv_N=adv_N * factor_N,
        adv_NU=adv_NU * factor_N[:, None] * kept_NU,
        grpo_N=grpo_N,
        decomposed_N=on_N,
        sigma=sigma,
        fallbacks=replace(counted, sigma_zero=int(sigma <= FLAT and bool(on_N.any()))),
    )


def turn_advantages(parts: Sequence[Rows], settings: Settings) -> tuple[Advantages, ...]:
    """Eqs 1-3 and all fallbacks for a batch, per turn. What `token_advantages` does, less the tokens.

    Args:
        parts: the rows of each task; all of them share sigma_batch.
        settings: of the method.

    Raises:
        ValueError: see `complete`.
    """
    parts = [complete(rows) for rows in parts]
    stage = [_decompose(rows, settings) for rows in parts]
    sigma = sigma_batch(
        [stage2(a_NK, p.phi_K)[on_N] for p, (a_NK, on_N, _) in zip(parts, stage, strict=True)]
    )
    return tuple(_apply(rows, *done, sigma, settings) for rows, done in zip(parts, stage, strict=True))


def token_advantages(
    parts: Sequence[Rows], turn_of_token: Sequence[Array], settings: Settings
) -> tuple[TokenAdvantages, ...]:
    """Everything between rewards, grades and pivots on one side and the surrogate on the other.

    Args:
        parts: the rows of each task; `counts_NU` made from `turn_of_token` by `turns.turn_counts`.
        turn_of_token: turn_of_token_NT of each task; T may differ.
        settings: of the method.

    Raises:
        ValueError: see `complete`; or a token of a turn that `counts_NU` does not know.
    """
    out = []
    for advantages, turns_NT in zip(turn_advantages(parts, settings), turn_of_token, strict=True):
        n, width = advantages.adv_NU.shape
        if turns_NT.shape[0] != n or (turns_NT.shape[1] and n and int(turns_NT.max()) >= width):
            raise ValueError(f"turn_of_token must have {n} rows and turns below {width}, as counts_NU has")
        held = {f.name: getattr(advantages, f.name) for f in fields(Advantages)}
        out.append(TokenAdvantages(**held, adv_NT=expand(advantages.adv_NU, turns_NT)))
    return tuple(out)
