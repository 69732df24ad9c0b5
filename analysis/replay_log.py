"""What a RACE run logged, as its controllers read it: groups with their signals, steps in order, phases.

Shapes: M groups of the whole run in the order of the log, G samples of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from racelab.experiments.errors import DataError
from racelab.experiments.methods.grpo import SCORE_DIGITS
from racelab.experiments.methods.race.phase import PhaseKind
from racelab.experiments.methods.race.routing import GroupSignals, tie_rate
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.types import FloatArray

if TYPE_CHECKING:
    import pandas as pd

TOLERANCE = 1e-12
"""Two logged numbers that differ by no more are the same."""

KIND = "train/clock/phase_kind"
RUBRIC_REWARD, RUBRIC_GAIN = "race/rubric_reward/mean", "race/rubric_reward/gain_mean"
_NEEDED = ("step", "rewards", "mean", "std", "tie_rate", "d_tri", "d_emb")


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step of the log.

    Attributes:
        step: global step, from 1.
        kind: of the phase that it belonged to.
        rows: its groups; empty in a rubric step.
        metrics: what it logged; a value that had no basis (NaN) is not there.
    """

    step: int
    kind: PhaseKind
    rows: range
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Log:
    """A run's log.

    Attributes:
        steps: ascending and without a gap.
        signals: of each group, [M].
        rewards_MG: [M, G]; NaN where there was no score (or a group is smaller than the largest).
        columns: the columns of `groups` as arrays [M].
        phases: the rows of `phases` by index.
        names: the metrics that the run logged at all.
    """

    steps: Sequence[LoggedStep]
    signals: Sequence[GroupSignals]
    rewards_MG: FloatArray
    columns: Mapping[str, npt.NDArray[Any]]
    phases: Sequence[Mapping[str, Any]]
    names: frozenset[str]

    def with_eps_tie(self, eps_tie: float) -> Sequence[GroupSignals]:
        """The signals with Eq 5 taken anew from the rewards."""
        return [
            GroupSignals(s.mean, s.std, tie_rate(rewards_G, eps_tie), s.d_tri, s.d_emb, s.n_valid)
            for s, rewards_G in zip(self.signals, self.rewards_MG, strict=True)
        ]


def load_log(run: RunFolder) -> Log:
    """Reads the log of a run.

    Raises:
        DataError: it logged no rollout groups, or a step is missing.
    """
    from racelab.analysis.load import load_metrics, load_table

    tables = load_table(run, "groups"), load_metrics(run), load_table(run, "phases")
    try:
        return build_log(*tables)
    except DataError as error:
        raise DataError(f"run {run.run_id}: {error}") from error


def build_log(groups: pd.DataFrame, metrics: pd.DataFrame, phases: pd.DataFrame) -> Log:
    """The log from the tables `groups` and `phases` and the metrics against step.

    The last step may be torn (a killed run): without its groups it is left out.

    Raises:
        DataError: no groups, a column is missing, or steps are.
    """
    missing = [name for name in _NEEDED if name not in groups.columns]
    if groups.empty or missing or KIND not in metrics.columns:
        what = f"column {missing[0]} of table groups" if missing else "rollout group"
        raise DataError(f"there is no {what} in its log; only runs of method race have what a replay needs")
    groups = groups.sort_values("step", kind="stable")
    columns = {str(name): groups[name].to_numpy() for name in groups.columns}
    rewards_MG = _rewards(groups["rewards"].tolist())
    n_valid = np.isfinite(rewards_MG).sum(axis=1).tolist()
    values = [columns[name].astype(np.float64).tolist() for name in _NEEDED[2:]]
    signals = [GroupSignals(*row) for row in zip(*values, n_valid, strict=True)]
    steps = _steps(metrics[metrics[KIND].notna()], columns["step"].astype(np.int64))
    rows: list[Mapping[str, Any]] = [
        {str(k): v for k, v in row.items()} for row in phases.sort_values("index").to_dict("records")
    ]
    return Log(steps, signals, rewards_MG, columns, rows, frozenset(map(str, metrics.columns)))


def _rewards(column: Sequence[Sequence[float] | None]) -> FloatArray:
    """[M, G], short rows filled with NaN, which every statistic leaves out."""
    lists = [[] if row is None else row for row in column]
    widest = max(map(len, lists))
    if any(len(row) != widest for row in lists):
        lists = [[*row, *[math.nan] * (widest - len(row))] for row in lists]
    return np.array(lists, dtype=np.float64).reshape(len(lists), widest)


def _steps(metrics: pd.DataFrame, step_M: npt.NDArray[np.int64]) -> list[LoggedStep]:
    numbers = metrics.index.to_numpy(dtype=np.int64)
    first_S = np.searchsorted(step_M, numbers, side="left").tolist()
    after_S = np.searchsorted(step_M, numbers, side="right").tolist()
    names = [str(name) for name in metrics.columns]
    table = metrics.to_numpy(dtype=np.float64)
    known = np.isfinite(table)
    steps = []
    for i, step in enumerate(numbers.tolist()):
        found = {names[j]: float(table[i, j]) for j in np.flatnonzero(known[i])}
        kind = PhaseKind.RUBRIC if found[KIND] else PhaseKind.POLICY
        rows = range(first_S[i], after_S[i])
        if kind is PhaseKind.POLICY and not rows and i + 1 == len(numbers):
            break
        steps.append(LoggedStep(step, kind, rows, found))
    for expected, at in enumerate(steps, 1):
        if at.step != expected:
            raise DataError(f"step {expected} is missing in its metrics; a replay needs every step")
        if at.kind is PhaseKind.POLICY and not at.rows:
            raise DataError(f"policy step {expected} is missing in table groups; a replay needs every step")
    if len(step_M) != sum(len(at.rows) for at in steps):
        raise DataError("table groups has steps that the metrics do not have; a replay needs both")
    return steps


def integrity(log: Log, eps_tie: float) -> dict[str, int]:
    """How many groups have another mean, std or tie rate (Eq 5) in the log than their logged rewards give.

    Worked out over all groups at once, apart from the functions that training uses.

    Args:
        log: of the run.
        eps_tie: the one that the run used.
    """
    rewards_MG = log.rewards_MG
    there_MG = np.isfinite(rewards_MG)
    n_M = there_MG.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_M = np.where(there_MG, rewards_MG, 0.0).sum(axis=1) / n_M
        off_MG = np.where(there_MG, rewards_MG - mean_M[:, None], 0.0)
        std_M = np.sqrt((off_MG**2).sum(axis=1) / n_M)
        tie_M = _ties(rewards_MG, eps_tie) / (n_M * (n_M - 1) / 2)  # 0 / 0, NaN, without a pair
    return {
        name: _unequal(found_M, log.columns[name].astype(np.float64))
        for name, found_M in (("mean", mean_M), ("std", std_M), ("tie_rate", tie_M))
    }


def _ties(rewards_MG: FloatArray, eps_tie: float) -> npt.NDArray[np.int64]:
    """Pairs of valid scores closer than `eps_tie`, [M]; one offset at a time, so memory stays at M x G."""
    ties_M = np.zeros(len(rewards_MG), dtype=np.int64)
    for offset in range(1, rewards_MG.shape[1]):
        gaps = np.round(np.abs(rewards_MG[:, offset:] - rewards_MG[:, :-offset]), SCORE_DIGITS)
        ties_M += (gaps < eps_tie).sum(axis=1)  # False for NaN
    return ties_M


def _unequal(a_M: FloatArray, b_M: FloatArray) -> int:
    nan_M = np.isnan(a_M) | np.isnan(b_M)
    apart_M = np.isnan(a_M) != np.isnan(b_M)
    return int(np.count_nonzero(np.where(nan_M, apart_M, np.abs(a_M - b_M) > TOLERANCE)))
