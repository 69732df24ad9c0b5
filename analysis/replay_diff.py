"""A replay beside its log: what differs, and both as JSON values. Only what was logged is compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from racelab.analysis.replay import OPEN, Decision, Replayed
from racelab.analysis.replay_log import TOLERANCE, Log, LoggedStep
from racelab.experiments.methods.race.phase import PhaseKind, is_saturated
from racelab.experiments.methods.race.routing import Route

_COLUMNS = {
    "sigma_rt": "sigma_rt", "tau_tie": "tau_tie", "d_tri": "d_tri_star", "d_emb": "d_emb_star",
    "tau_sat": "tau_sat", "sigma_sw": "sigma_sw", "mu_sat": "mu_sat",
}  # fmt: skip
"""Threshold -> its column in `groups`."""
_METRICS = {
    "sigma_rt": "race/trqc/sigma_rt",
    "tau_tie": "race/trqc/tau_tie",
    "tau_sat": "race/switch/tau_sat",
    "tau_imp": "race/switch/tau_imp",
}
"""Threshold -> its metric."""
_POLICY = {
    "q_ema": "race/trqc/q_ema",
    "trqc_saturated": "race/trqc/saturated",
    "f_sat": "race/switch/f_sat",
    "f_ema": "race/switch/f_sat_ema",
    "deferred_switch": "race/switch/deferred_switch",
    "pool": "race/pool/size",
}
_RUBRIC = {"delta_w": "race/switch/delta_w", "pool": "race/pool/size"}
_PHASE = ("kind", "start", "end", "end_reason")


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that the replay has otherwise.

    Attributes:
        step: of the log, where the value stands.
        what: a threshold, `route`, `saturated`, `q_ema`, `f_sat`, `f_ema`, `trqc_saturated`, `deferred_switch`,
            `delta_w`, `pool`, `phase_kind` (of the step of this number) or `phase <index> <column>`.
        logged: value in the log; None: there is none.
        replayed: value of the replay; None: there is none.
        group: number of the group in its step, for `route` and `saturated`.
    """

    step: int
    what: str
    logged: Any
    replayed: Any
    group: int | None = None


def differences(log: Log, replayed: Replayed) -> list[Difference]:
    """All differences, by step."""
    found: list[Difference] = []
    for decision in replayed.decisions:
        found += _step(log, replayed, decision)
    return sorted([*found, *_phases(log, replayed)], key=lambda d: d.step)  # stable


def same(a: float, b: float) -> bool:
    """Equal to 1e-12; two NaN are equal."""
    return abs(a - b) <= TOLERANCE or (math.isnan(a) and math.isnan(b))


def _step(log: Log, replayed: Replayed, d: Decision) -> Iterator[Difference]:
    if d.logged_kind is not d.kind:
        yield Difference(d.step, "phase_kind", d.logged_kind.value, d.kind.value)
    at, ours = d.fed.step, d.before.state()
    for name in ours:
        other = next((v for v in _thresholds(log, d.fed, name) if not same(v, ours[name])), None)
        if other is not None:
            yield Difference(at, name, other, ours[name])
    yield from _groups(log, replayed, d)
    values = _values(d)
    for name, metric in (_POLICY if d.kind is PhaseKind.POLICY else _RUBRIC).items():
        # A metric of a step that is not there had no basis, if other steps have it.
        logged = d.fed.metrics.get(metric, math.nan)
        if metric in log.names and not same(logged, values[name]):
            yield Difference(at, name, _known(logged), _known(values[name]))


def _thresholds(log: Log, at: LoggedStep, name: str) -> list[float]:
    """What the log of one step says of a threshold, in every place."""
    found = [at.metrics[_METRICS[name]]] if _METRICS.get(name) in at.metrics else []
    column = log.columns.get(_COLUMNS.get(name, ""))
    if column is not None:
        found += [v for v in column[at.rows.start : at.rows.stop].tolist() if not math.isnan(v)]
    return found


def _groups(log: Log, replayed: Replayed, d: Decision) -> Iterator[Difference]:
    routes, saturated = log.columns.get("route"), log.columns.get("saturated")
    for group, (row, route) in enumerate(zip(d.fed.rows, d.routes, strict=True)):
        if routes is not None and routes[row] != route.value:
            yield Difference(d.fed.step, "route", routes[row], route.value, group)
        if saturated is not None and saturated[row] is not None:
            signals = replayed.signals[row]
            ours = signals.usable and is_saturated(signals, d.before)
            if bool(saturated[row]) is not ours:
                yield Difference(d.fed.step, "saturated", bool(saturated[row]), ours, group)


def _values(d: Decision) -> dict[str, float]:
    return {
        "q_ema": d.q_ema,
        "trqc_saturated": float(d.held),
        "f_sat": d.f_sat,
        "f_ema": d.f_ema,
        "deferred_switch": float(d.event.deferred_switch),
        "delta_w": d.event.delta_w,
        "pool": float(d.pool),
    }


def _phases(log: Log, replayed: Replayed) -> Iterator[Difference]:
    """Rows of `phases` against one another; one that is `open` against nothing."""
    logged, ours = ({int(p["index"]): p for p in rows} for rows in (log.phases, replayed.phases))
    for index in sorted(logged.keys() | ours.keys()):
        a, b = logged.get(index), ours.get(index)
        if b is not None and b["end_reason"] == OPEN:
            continue
        if a is None or b is None:
            there = a or b or {}
            # The closing row is written after the last validation: a run may have died before.
            if a is not None or there["end_reason"] != "budget":
                yield Difference(int(there["end"]), f"phase {index}", _phrase(a), _phrase(b))
            continue
        for column in b:
            if column in a and column not in ("step", "index") and not _equal(a[column], b[column]):
                yield Difference(int(a["end"]), f"phase {index} {column}", a[column], b[column])


def _equal(a: Any, b: Any) -> bool:
    """An older log lacks some columns: NaN there is nothing to compare with."""
    if isinstance(b, str):
        return str(a) == b
    return math.isnan(a) or same(float(a), float(b))


def _phrase(row: Mapping[str, Any] | None) -> str | None:
    return None if row is None else f"{row['kind']} {row['start']}-{row['end']} {row['end_reason']}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def step_rows(log: Log, replayed: Replayed) -> list[dict[str, Any]]:
    """One dict a step of the replay; what both know is {"logged": ..., "replayed": ...}.

    `kind` compares the steps of the same number, all else the step with the logged one that it was fed with.
    """
    return [_row(log, d) for d in replayed.decisions]


def _row(log: Log, d: Decision) -> dict[str, Any]:
    logged, ours = logged_values(log, d.fed), d.before.state() | _values(d)
    ended = d.event.ended
    happened = "switch deferred" if d.event.deferred_switch else ""
    if ended is not None:
        happened = f"{ended.kind.value} phase of {ended.length} steps ended by {ended.end_reason}"
    return {
        "step": d.step,
        "logged_step": d.fed.step,
        "counterfactual": d.counterfactual,
        "kind": {"logged": d.logged_kind.value, "replayed": d.kind.value},
        "routes": {"logged": route_counts(log, [d]), "replayed": _counted(d.routes)} if d.routes else None,
        **{name: {"logged": _known(v), "replayed": _known(ours[name])} for name, v in logged.items()},
        "event": happened,
    }


def logged_values(log: Log, at: LoggedStep) -> dict[str, float]:
    """What a step logged of the thresholds that adapt, q_ema, f_ema, delta_w and pool; NaN where it logged none."""
    metrics = _POLICY if at.kind is PhaseKind.POLICY else _RUBRIC
    return {
        **{name: next(iter(_thresholds(log, at, name)), math.nan) for name in _METRICS},
        **{
            name: at.metrics.get(metrics.get(name, ""), math.nan)
            for name in ("q_ema", "f_ema", "delta_w", "pool")
        },
    }


def route_counts(log: Log, decisions: Sequence[Decision]) -> dict[str, int]:
    """Logged routes of the groups that these steps were fed with."""
    column = log.columns.get("route")
    if column is None:
        return {}
    return _counted([str(column[row]) for d in decisions for row in d.fed.rows])


def _counted(routes: Sequence[str]) -> dict[str, int]:
    counts = Counter(map(str, routes))
    return {route.value: counts[route.value] for route in Route}


def final_thresholds(log: Log, replayed: Replayed) -> dict[str, dict[str, float | None]]:
    """Thresholds at the end; logged: those of the last row of `phases`, if it is of the last step."""
    last = log.phases[-1] if log.phases else {}
    closed = bool(log.steps) and last.get("end") == log.steps[-1].step
    return {
        name: {
            "logged": _known(float(last.get(f"{name}_after", math.nan))) if closed else None,
            "replayed": value,
        }
        for name, value in replayed.thresholds.state().items()
    }


def to_json(log: Log, replayed: Replayed) -> dict[str, Any]:
    """Everything as JSON values."""
    found = differences(log, replayed)
    phase_keys = ("index", *_PHASE, "length")
    return {
        "differences": [asdict(d) for d in found],
        "n_differences": len(found),
        "end": replayed.end,
        "unused": dict(replayed.unused),
        "counterfactual_from": replayed.parted,
        "routes": {
            "logged": route_counts(log, replayed.decisions),
            "replayed": _counted([r for d in replayed.decisions for r in d.routes]),
        },
        "thresholds": final_thresholds(log, replayed),
        "phases": {
            "logged": [{k: _plain(p.get(k)) for k in phase_keys} for p in log.phases],
            "replayed": [{k: p[k] for k in phase_keys} for p in replayed.phases],
        },
        "steps": step_rows(log, replayed),
    }


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
