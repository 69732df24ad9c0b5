"""What a sweep says of its cells: one row each, means over seeds, and the record of the sweep's own run.

The numbers come from the `summary.json` that a run leaves at its end; what a method does not have is left out.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

from racelab.configs.schema import TrackingConfig
from racelab.experiments.errors import DataError, InUseError, RunFolderError
from racelab.experiments.evaluation.totals import in_order
from racelab.experiments.fsio import explain, read_json
from racelab.experiments.runfolder import RunFolder, RunLock
from racelab.experiments.tracking.spool import read_lines, spool_files, whole_lines
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import StepRecord
from racelab.sweeps.launch import CellState, Watch

Row = dict[str, Any]

RACE_METRICS: Final[Mapping[str, tuple[str, ...]]] = {
    "reward": ("validation", "judged_reward", "after"),
    "reward_gain": ("validation", "judged_reward", "difference"),
    "success": ("validation", "rule_success", "after"),
    "success_gain": ("validation", "rule_success", "difference"),
    "quarantine_rate": ("quarantine_rate",),
    "collapse_rate": ("collapse_rate",),
    "policy_updates": ("steps", "policy"),
    "rubric_updates": ("steps", "rubric"),
}
"""Metric -> where it stands in `summary.json`. reward and success: held-out prompts, after training."""
RLDS_METRICS: Final[Mapping[str, tuple[str, ...]]] = {
    "reward": ("validation", "reward", "after"),
    "reward_gain": ("validation", "reward", "difference"),
    "success": ("validation", "solved", "after"),
    "success_gain": ("validation", "solved", "difference"),
    "best_reward": ("validation", "best", "reward"),
    "last_five": ("validation", "last_five", "reward", "mean"),
    "last_evaluations": ("validation", "last_five", "n_evaluations"),
    "retries": ("retries", "made"),
    "retry_success": ("retries", "success_frac"),
    "graded_frac": ("parse", "graded_frac"),
    "collapse_rate": ("collapse_rate",),
    "mixed_rate": ("mixed_rate",),
    "policy_updates": ("steps", "policy"),
    "policy_tokens": ("costs", "tokens", "policy"),
    "cpu_s": ("cpu_s",),
}
"""The same for an RLDS run; reward and success: validation after training; last_five: mean of the last evaluations, at
most five; last_evaluations: how many they were."""
PHASE_METRICS: Final = ("n_phases", "policy_phase_len", "rubric_phase_len")
NAMES: Final = (*dict.fromkeys([*RACE_METRICS, *PHASE_METRICS, *RLDS_METRICS]), "wall_s")
"""Every number of a cell."""
_TAIL_BLOCK: Final = 1 << 14
_CUT: Final = frozenset({"budget", "interrupted"})
"""End reasons of phases that did not end by themselves."""


def cell_row(folder: RunFolder, label: str, status: str | None = None) -> Row:
    """A cell as it stands: cell, run_id, label, seed, status, reason, wall_s and its numbers (None: not known).

    That of an evaluation has `scores` too: label -> score, and `avg` where there is one; `n`: label -> examples with a
    score; `lost`: label -> examples without an answer, of those that have such; `notes`. One that failed for lost
    examples has its scores all the same.
    """
    info = folder.info()
    status = status or folder.status()
    row: Row = {
        "cell": f"{label}-s{info['seed']}",
        "run_id": folder.run_id,
        "label": label,
        "seed": info["seed"],
        "status": status,
        "reason": "" if status == "finished" else str(info.get("reason") or ""),
        **dict.fromkeys(NAMES),
    }
    evaluates = info.get("kind") == "eval"
    ended = status == "finished" or (evaluates and status == "failed")
    summary = _summary(folder) if ended else {}
    row |= numbers(summary)
    if evaluates:
        lost = {label: n for label, n in counts(summary, "lost").items() if n}
        notes = [str(line) for line in summary.get("notes") or []]
        row |= {"scores": scores(summary), "n": counts(summary, "n"), "lost": lost, "notes": notes}
    row["wall_s"] = wall_seconds(folder)
    return row


def _summary(folder: RunFolder) -> Mapping[str, Any]:
    """The run's summary; {} for a run that was killed before it could write one."""
    with contextlib.suppress(RunFolderError):
        found = read_json(folder.path / "summary.json")
        return found if isinstance(found, dict) else {}
    return {}


def numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a summary that are there.

    The mean length of a kind of phase is over those that ended by themselves: the budget cuts the last one.
    """
    paths = RLDS_METRICS if summary.get("family") == "rlds" else RACE_METRICS
    found = {name: value for name, path in paths.items() if (value := _at(summary, path)) is not None}
    phases = summary.get("phases")
    if isinstance(phases, list) and phases:
        found["n_phases"] = float(len(phases))
        for kind in ("policy", "rubric"):
            lengths = [p["length"] for p in phases if p["kind"] == kind and p.get("end_reason") not in _CUT]
            if lengths:
                found[f"{kind}_phase_len"] = sum(lengths) / len(lengths)
    return found


def scores(summary: Mapping[str, Any]) -> dict[str, float]:
    """Label -> score of an evaluation's summary, those that are known, in the order of the suite; `avg` last."""
    found = _by_label(summary, "value") | {"avg": _at(summary, ("avg",))}
    return {label: value for label, value in found.items() if value is not None}


def counts(summary: Mapping[str, Any], name: str) -> dict[str, int]:
    """Label -> a count of an evaluation's summary, such as `n` and `lost`; in the order of the suite."""
    return {label: int(n) for label, n in _by_label(summary, name).items() if n is not None}


def _by_label(summary: Mapping[str, Any], name: str) -> dict[str, float | None]:
    stored = summary.get("scores")
    labels = stored if isinstance(stored, Mapping) else {}
    return {label: _at(labels, (label, name)) for label in in_order(map(str, labels))}


def _at(summary: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = summary
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def wall_seconds(folder: RunFolder) -> float | None:
    """Seconds that a run was worked on: from the start of each attempt to the last line that it wrote."""
    try:
        files = spool_files(folder)
        total = 0.0
        for entry in folder.attempts():
            path = files.get(int(entry["attempt"]))
            last = last_stamp(path) if path else None
            if last is not None:
                began = datetime.fromisoformat(entry["started"]).timestamp()
                total += max(0.0, last / 1000 - began)
    except (DataError, RunFolderError):
        return None
    return total or None


def last_stamp(path: Path) -> int | None:
    """The `ts` of a spool file's last whole line, read from its end; None without one."""
    block = _TAIL_BLOCK
    try:
        with path.open("rb") as handle:
            end = whole_lines(handle.fileno())
            while True:
                start = max(0, end - block)
                cut = os.pread(handle.fileno(), max(0, end - 1 - start), start).rfind(b"\n")
                if cut >= 0 or start == 0:
                    break
                block *= 4
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {explain(error)}") from error
    return next((int(record["ts"]) for record, _ in read_lines(path, start + cut + 1)), None)


def means(rows: Iterable[Row]) -> dict[str, float]:
    """`<label>/<metric>`: the mean over the finished cells of a label; `_std` (n - 1) where there are several.

    The metrics of an evaluation are its benchmarks and `avg`.

    Example: two finished cells of label `full` with reward 0.5 and 0.75 give full/reward = 0.625 and
    full/reward_std = sqrt((1/8)^2 + (1/8)^2) = 0.17678.
    """
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == "finished":
            by_label.setdefault(str(row["label"]), []).append(row)
    result: dict[str, float] = {}
    for label, found in by_label.items():
        benchmarks = dict.fromkeys(name for row in found for name in row.get("scores") or {})
        for name in (*NAMES, *benchmarks):
            values = [value for row in found if (value := _number(row, name)) is not None]
            if values:
                result[f"{label}/{name}"] = statistics.fmean(values)
            if len(values) > 1:
                result[f"{label}/{name}_std"] = statistics.stdev(values)
    return result


def _number(row: Row, name: str) -> float | None:
    """A number of a row, or a score of it."""
    value = row[name] if name in NAMES else (row.get("scores") or {}).get(name)
    return None if value is None else float(value)


ENDED: Final = frozenset({"finished", "failed", "interrupted"})
"""Statuses of a cell that nobody works on any more."""


class Standing(Protocol):
    """How a cell stands, as far as the record asks."""

    @property
    def folder(self) -> RunFolder:
        """Its run."""

    @property
    def label(self) -> str:
        """What the cells of several seeds have in common."""

    @property
    def status(self) -> str:
        """One of `ENDED`, or another while it is not over."""

    @property
    def reason(self) -> str:
        """Why it did not finish; "" if unknown."""


def state_row(state: Standing) -> Row:
    """The row of a cell as this sweep saw it end."""
    status = state.status if state.status in ENDED else state.folder.status()
    row = cell_row(state.folder, state.label, status)
    return {**row, "reason": state.reason or row["reason"]}


class Recorder:
    """The sweep's own run, from its lock to its end record; hands every word on to the watch it is given.

    Of several processes that run the same sweep one holds the lock and records, for all of them, how the cells end.
    """

    def __init__(
        self,
        folder: RunFolder,
        tracking: TrackingConfig,
        states: Sequence[Standing],
        watch: Watch | None = None,
    ) -> None:
        """Keeps the parts; nothing is opened yet."""
        self.folder, self.tracking, self.states, self.watch = folder, tracking, states, watch
        self._lock: RunLock | None = None
        self._tracker: SpoolTracker | None = None
        self._rows: dict[str, Row] = {}

    def open(self) -> bool:
        """Begins an attempt, unless it has begun or another process holds the sweep; whether it is this one's.

        It supersedes the attempts before: every cell has one row in the newest.
        """
        if self._tracker is not None:
            return True
        self._lock = self._take()
        if self._lock is None:
            return False
        t = self.tracking
        attempt = self.folder.begin_attempt(from_step=-1 if self.folder.attempts() else 0)
        self._tracker = SpoolTracker(
            self.folder, attempt, ship=t.mlflow, uri=t.uri or None, experiment=t.experiment, wait_s=t.wait_s
        )
        self._add([state for state in self.states if state.status in ENDED])
        return True

    def _take(self) -> RunLock | None:
        """The sweep's lock, None if another process has it.

        One that lets go while this one gives up waiting may have left cells open, so it is asked for once more. One
        that has only just taken it, or is suspended, does not look like a holder either, and keeps it.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        for _ in range(2):
            try:
                return self.folder.lock()
            except InUseError:
                if self.folder.is_held():
                    break
        return None

    def changed(self, state: CellState) -> None:
        """Records a cell that has ended."""
        if self.watch is not None:
            self.watch.changed(state)
        if self._tracker is not None and state.status in ENDED:
            self._add([state])

    def tick(self, states: Sequence[CellState]) -> None:
        """Hands on."""
        if self.watch is not None:
            self.watch.tick(states)

    def close(self, status: str, reason: str) -> None:
        """Records the cells that did not end, and ends the attempt."""
        if self._tracker is None or self._lock is None:
            return
        with self._lock:
            self._add([state for state in self.states if state.folder.run_id not in self._rows])
            self.folder.update(steps=sum(state.status in ENDED for state in self.states))
            self._tracker.close(status, reason)

    def _add(self, states: Sequence[Standing]) -> None:
        """The rows of some cells, and the means with them; the step is the number of cells that have ended."""
        assert self._tracker is not None
        if not states:
            return
        rows = [state_row(state) for state in states]
        self._rows |= {row["run_id"]: row for row in rows}
        statuses = [state.status for state in self.states]
        counts = {f"cells/{name}": float(statuses.count(name)) for name in ("finished", "failed")}
        labels = {row["label"] for row in rows}
        step = sum(status in ENDED for status in statuses)
        metrics = counts | means(row for row in self._rows.values() if row["label"] in labels)
        self._tracker.record(StepRecord(step, metrics, {"cells": [{"step": step, **row} for row in rows]}))
