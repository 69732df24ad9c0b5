"""What SDAE had to work with in a step: the three stage diagnostics (§5.1), the per-subtask readouts (§5.3), a null.

All of it is computed as SDAE would see the rows, whatever the condition trains with, without amplification; several
tasks are pooled. A metric that has no value (a constant side of a correlation, no pivot, no retry) is left out.

    stage1/sign_disagreement_rows    decomposed rows with an A_ik > 1e-9 and an A_ij < -1e-9 (§3.3)
    stage1/sign_disagreement_groups  decomposed groups with such a row (§5.1)
    stage1/subtask_std               population std of A_ik over the rows of a group; mean over k, then over groups
    stage1/flat_group_frac           groups with equal rewards
    stage2/grpo_correlation          Pearson of Â_i (before pivots) and the group-normalised scalar, decomposed rows
    stage2/grpo_correlation_raw      the same with R_i - mean
    stage2/informative               0 if phi is uniform: then A_i = (R_i - mean) / K, whatever the grades say, and both
                                     correlations are what the rewards make them (raw: exactly 1)
    stage3/token_adv_std             population std of Â_it over the trained tokens, mean over decomposed rows that have
                                     a pivot. Masked tokens do not count: their zeros are the mask's doing.
    stage3/pivot_spread              population std over k of the (clamped) pivots, mean over rows that have two or more

The raw numbers mislead: random grades also disagree in sign (at a rate of about 0.9), and oracle grades can disagree
less than random ones. So `null` permutes grades and pivots within each group, and reports observed - mean of the
permuted and a two-sided p. Choices:
- Grades and pivots of a row travel together, among the graded rows of a group; ungraded rows stay where they are.
- A pivot travels as its position in the row, floor(n_new (pivot + u) / n_old), u uniform and drawn once per pivot: a
  turn drawn uniformly from a row is then uniform in the row that it comes to, so that random pivots are exchangeable
  where rows differ in length. In rows of equal length it is the same turn.
- p = (1 + #{permuted at least as far from the pooled mean as the observed}) / (B + 1), the pooled mean taken over all
  B + 1 values: exact under exchangeability. B draws cannot give less than 1 / (B + 1).
- pivot_spread has no null: permuting whole vectors leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from racelab.experiments.methods.rlds.rows import Rows, complete
from racelab.experiments.methods.rlds.sdae import (
    Settings,
    flat_rows,
    group_mean,
    turn_advantages,
)
from racelab.experiments.methods.rlds.turns import clamp_pivots, kept_turns, last_turn
from racelab.experiments.types import FloatArray

TINY = 1e-9
"""An advantage within it has no sign; a side of a correlation whose std is within it is constant."""
TIE = 1e-12
"""Deviations from the pooled mean of a null that differ by less are equal: the sums of a permuted batch round
differently."""

BoolArray = npt.NDArray[np.bool_]


def pearson(x_N: FloatArray, y_N: FloatArray) -> float | None:
    """Pearson's correlation; None where either side is constant (population std <= 1e-9) or empty."""
    if not len(x_N) or np.std(x_N) <= TINY or np.std(y_N) <= TINY:
        return None
    x_N, y_N = x_N - np.mean(x_N), y_N - np.mean(y_N)
    return float(np.clip(x_N @ y_N / np.sqrt((x_N @ x_N) * (y_N @ y_N)), -1.0, 1.0))


def correlation_informative(phi_K: FloatArray) -> bool:
    """False if phi is uniform: the correlation with the scalar advantage then says nothing about the grades."""
    return bool(np.ptp(phi_K) > TINY)


def mixed_signs(adv_NK: FloatArray) -> BoolArray:
    """Rows with an advantage above 1e-9 and another below -1e-9 [N]."""
    return np.asarray((adv_NK > TINY).any(1) & (adv_NK < -TINY).any(1))


def token_std(adv_NU: FloatArray, weight_NU: FloatArray) -> FloatArray:
    """Population std of each row's token advantages [N]; `weight_NU` counts the tokens of a turn; 0 without tokens."""
    total_N1 = np.maximum(weight_NU.sum(1, keepdims=True), 1.0)
    mean_N1 = (adv_NU * weight_NU).sum(1, keepdims=True) / total_N1
    return np.asarray(np.sqrt((weight_NU * (adv_NU - mean_N1) ** 2).sum(1) / total_N1[:, 0]))


def _mean(values: FloatArray | BoolArray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _group_firsts(rows: Rows, on_N: BoolArray) -> npt.NDArray[np.int64]:
    """One row of each group that has a row in `on_N`."""
    return np.flatnonzero(on_N)[np.unique(rows.group_N[on_N], return_index=True)[1]]


def _stages(parts: Sequence[Rows], settings: Settings) -> dict[str, float | None]:
    """The stage metrics that a permutation can change. `parts` are complete."""
    done = turn_advantages(parts, settings)
    rows_, groups, spread, fraction, tokens = [], [], [], [], []
    for rows, adv in zip(parts, done, strict=True):
        on_N, mixed_N = adv.decomposed_N, mixed_signs(adv.adv_NK)
        first = _group_firsts(rows, on_N)
        rows_.append(mixed_N[on_N])
        groups.append(group_mean(mixed_N[:, None].astype(float), rows.group_N)[first, 0] > 0)
        spread.append(_within_std(adv.adv_NK, rows)[first])
        kept_NU = rows.counts_NU * kept_turns(rows.counts_NU, rows.train_from_N)
        pivot_N = (rows.pivots_NK >= 0).any(1) & on_N & (kept_NU.sum(1) > 0)
        tokens.append(token_std(adv.adv_NU, kept_NU)[pivot_N])
        centred_N = rows.rewards_N - group_mean(rows.rewards_N[:, None], rows.group_N)[:, 0]
        fraction.append(np.stack([adv.adv_N, adv.grpo_N, centred_N])[:, on_N])
    ours_N, grpo_N, raw_N = np.concatenate(fraction, axis=1)
    return {
        "stage1/sign_disagreement_rows": _mean(np.concatenate(rows_)),
        "stage1/sign_disagreement_groups": _mean(np.concatenate(groups)),
        "stage1/subtask_std": _mean(np.concatenate(spread)),
        "stage2/grpo_correlation": pearson(ours_N, grpo_N),
        "stage2/grpo_correlation_raw": pearson(ours_N, raw_N),
        "stage3/token_adv_std": _mean(np.concatenate(tokens)),
    }


def _within_std(adv_NK: FloatArray, rows: Rows) -> FloatArray:
    """Population std of A_ik over the rows of the group, mean over k, for each row [N]."""
    centred_NK = adv_NK - group_mean(adv_NK, rows.group_N)
    return np.asarray(np.sqrt(group_mean(centred_NK**2, rows.group_N)).mean(1))


def _as_sdae(settings: Settings) -> Settings:
    return replace(settings, advantage="sdae", positive_amplification=1.0)


def stage_metrics(parts: Sequence[Rows], settings: Settings) -> dict[str, float]:
    """All stage metrics of a step, by name; those without a value are left out.

    Args:
        parts: the rows of each task (numpy).
        settings: of the method.
    """
    parts = [complete(rows) for rows in parts]
    out = _stages(parts, _as_sdae(settings))
    flat = [flat_rows(p.rewards_N, p.group_N)[np.unique(p.group_N, return_index=True)[1]] for p in parts]
    out["stage1/flat_group_frac"] = _mean(np.concatenate(flat))
    out["stage2/informative"] = float(any(correlation_informative(p.phi_K) for p in parts))
    out["stage3/pivot_spread"] = _mean(np.concatenate([_pivot_std(p) for p in parts]))
    return {name: value for name, value in out.items() if value is not None}


def _pivot_std(rows: Rows) -> FloatArray:
    """Population std of the pivots of each graded row that has two or more."""
    pivots_NK, _ = clamp_pivots(rows.pivots_NK, rows.counts_NU)
    given = [row[row >= 0] for row in pivots_NK[rows.graded_N]]
    return np.array([np.std(row) for row in given if len(row) >= 2])


def subtask_metrics(
    rows: Rows, names: Sequence[str], parent_N: npt.NDArray[np.int64] | None = None
) -> dict[str, float]:
    """Figures 6-9: `grade/<subtask>`, `pivot/<subtask>` and, where there are retries, `retry/<subtask>`.

    Args:
        rows: of one task (numpy).
        names: of its K subtasks.
        parent_N: row of the original that a retry came from, -1 for originals; None: no retries.

    Returns:
        Mean grade over the graded rows; mean clamped pivot over the graded rows that have one; mean change of the grade
        from the failed original to its retry, over pairs that are graded on both sides.
    """
    rows = complete(rows)
    pivots_NK, _ = clamp_pivots(rows.pivots_NK, rows.counts_NU)
    deltas_RK = retry_deltas(rows, parent_N)
    out: dict[str, float | None] = {}
    for k, name in enumerate(names):
        turns_N = pivots_NK[rows.graded_N, k]
        out[f"grade/{name}"] = _mean(rows.grades_NK[rows.graded_N, k])
        out[f"pivot/{name}"] = _mean(turns_N[turns_N >= 0])
        out[f"retry/{name}"] = _mean(deltas_RK[:, k])
    return {name: value for name, value in out.items() if value is not None}


def retry_deltas(rows: Rows, parent_N: npt.NDArray[np.int64] | None) -> FloatArray:
    """Grades of each retry less those of its original [pairs graded on both sides, K]."""
    rows = complete(rows)
    parents = np.full(len(rows.rewards_N), -1) if parent_N is None else parent_N
    retries = np.flatnonzero((parents >= 0) & rows.graded_N & rows.graded_N[parents])
    return np.asarray(rows.grades_NK[retries] - rows.grades_NK[parents[retries]], dtype=np.float64)


def _positions(rows: Rows, rng: np.random.Generator) -> FloatArray:
    """(pivot + u) / number of turns, in [0, 1) [N, K]; meaningless where there is no pivot."""
    return np.asarray((rows.pivots_NK + rng.random(rows.pivots_NK.shape)) / _n_turns(rows))


def _n_turns(rows: Rows) -> FloatArray:
    """Turns of each row [N, 1], at least 1."""
    return np.asarray(np.maximum(last_turn(rows.counts_NU)[:, None] + 1.0, 1.0))


def permuted(rows: Rows, positions_NK: FloatArray, rng: np.random.Generator) -> Rows:
    """Grades and pivots shuffled among the graded rows of each group. `rows` are complete, their pivots clamped."""
    graded = np.flatnonzero(rows.graded_N)
    group = rows.group_N[graded]
    source_N = np.arange(len(rows.rewards_N))
    source_N[graded[np.argsort(group, kind="stable")]] = graded[np.lexsort((rng.random(len(graded)), group))]
    turns_N1 = _n_turns(rows)
    old_NK, same_N1 = rows.pivots_NK[source_N], turns_N1 == turns_N1[source_N]
    moved_NK = np.where(same_N1, old_NK, np.floor(positions_NK[source_N] * turns_N1))
    pivots_NK = np.where(old_NK < 0, -1, moved_NK).astype(rows.pivots_NK.dtype)
    return replace(rows, grades_NK=rows.grades_NK[source_N], pivots_NK=pivots_NK)


def null(parts: Sequence[Rows], settings: Settings, draws: int, rng: np.random.Generator) -> dict[str, float]:
    """The permutation null: `<metric>_excess` and `<metric>_p` of each stage metric.

    Args:
        parts: the rows of each task (numpy).
        settings: of the method.
        draws: B.
        rng: the only source of randomness.

    Returns:
        Empty if `draws` is 0. Metrics without a value, observed or in any draw, are left out.
    """
    settings, whole = _as_sdae(settings), [complete(rows) for rows in parts]
    whole = [replace(p, pivots_NK=clamp_pivots(p.pivots_NK, p.counts_NU)[0]) for p in whole]
    positions = [_positions(p, rng) for p in whole]
    observed = _stages(whole, settings)
    sampled = [
        _stages([permuted(p, at, rng) for p, at in zip(whole, positions, strict=True)], settings)
        for _ in range(draws)
    ]
    return _compare(observed, sampled)


def _compare(
    observed: Mapping[str, float | None], sampled: Sequence[Mapping[str, float | None]]
) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, value in observed.items():
        drawn = [s[name] for s in sampled]
        known = [d for d in drawn if d is not None]
        if value is None or not known or len(known) < len(drawn):
            continue
        short, drawn_B = name.split("/")[1], np.array(known)
        centre = (value + drawn_B.sum()) / (len(drawn_B) + 1)
        as_far = np.abs(drawn_B - centre) >= abs(value - centre) - TIE
        out[f"{short}_excess"] = value - float(drawn_B.mean())
        out[f"{short}_p"] = (1 + int(as_far.sum())) / (len(drawn_B) + 1)
    return out
