"""What a RACE step leaves behind: metrics, table rows and the few values of the terminal panel. No decisions here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from racelab.configs import schema
from racelab.experiments.methods import records as shared
from racelab.experiments.methods.race import costs
from racelab.experiments.methods.race.controllers import TrqcUpdate
from racelab.experiments.methods.race.phase import PhaseKind, PhaseRecord, StepEvent, is_saturated
from racelab.experiments.methods.race.routing import GroupSignals, Route
from racelab.experiments.methods.race.rubric_reward import rubric_reward_stats
from racelab.experiments.methods.race.state import RaceState
from racelab.experiments.models.generator import Candidate
from racelab.experiments.types import (
    FloatArray,
    JudgeScores,
    PoolEntry,
    RolloutGroup,
    StepRecord,
    UpdateStats,
)


@dataclass(frozen=True, slots=True)
class RubricOutcome:
    """A rubric step's data. Shapes: N entries, G candidates each."""

    entries: Sequence[PoolEntry]
    candidates: Sequence[Sequence[Candidate]]
    margins_NG: FloatArray
    base_NG: FloatArray
    final_NG: FloatArray
    usable_NG: npt.NDArray[np.bool_]

    def stats(self, clip: float) -> dict[str, float]:
        """The `race/rubric_reward` values."""
        m_old = np.array([e.margin for e in self.entries])
        return rubric_reward_stats(self.margins_NG, m_old, self.base_NG, self.final_NG, clip=clip)


def policy_record(
    before: RaceState,
    after: RaceState,
    groups: Sequence[RolloutGroup],
    seen: Sequence[GroupSignals],
    routes: Sequence[Route],
    scored: JudgeScores,
    stats: UpdateStats,
    f_sat: float,
    controlled: TrqcUpdate,
    event: StepEvent,
    seconds: dict[str, float],
    config: schema.RaceConfig,
) -> StepRecord:
    """The record of a policy step."""
    rewards = np.concatenate([g.rewards for g in groups])
    samples = [y for g in groups for y in g.responses] + [g.rubric_sample for g in groups]
    metrics = {
        **_clock(before, after),
        **shared.reward_metrics("train/reward", rewards),
        **shared.optim_metrics(stats),
        **shared.route_metrics(routes),
        **shared.signal_metrics(groups, seen),
        "race/trqc/q_ema": after.q_ema,
        "race/trqc/error": controlled.error,
        "race/trqc/sigma_rt": before.thresholds.sigma_rt,
        "race/trqc/tau_tie": before.thresholds.tau_tie,
        "race/trqc/saturated": float(controlled.saturated),
        "race/switch/f_sat": f_sat,
        "race/switch/f_sat_ema": after.phase.f_ema,
        "race/switch/tau_sat": before.thresholds.tau_sat,
        "race/switch/deferred_switch": float(event.deferred_switch),
        "race/pool/size": float(len(after.pool)),
        "race/pool/pushed": float(after.pool.pushed),
        "race/pool/evicted": float(after.pool.evicted),
        "race/pool/age_mean_steps": after.pool.mean_age(after.step),
        "race/pool/tie_break_only_frac": after.pool.tie_break_only_frac(),
        **_phase(event),
        **shared.health_metrics(scored, sum(g.rubric is None for g in groups) / len(groups)),
        **shared.perf_metrics(seconds, samples),
        **costs.policy_costs(groups, routes, scored, stats, config),
    }
    tables = {
        "groups": [_group_row(before, after, g, s, r) for g, s, r in zip(groups, seen, routes, strict=True)],
        "samples": shared.policy_samples(after.step, groups),
        "phases": [phase_row(event.ended)] if event.ended else [],
    }
    counts = {r.value: sum(x is r for x in routes) for r in Route}
    status = {
        **_status(before, after, metrics, event, seconds),
        "routes": counts,
        "q_target": config.trqc.q_target,
    }
    return StepRecord(after.step, shared.known(metrics), tables, status)


def rubric_record(
    before: RaceState,
    after: RaceState,
    outcome: RubricOutcome,
    means: dict[str, float],
    scored: JudgeScores,
    stats: UpdateStats,
    event: StepEvent,
    seconds: dict[str, float],
    config: schema.RaceConfig,
) -> StepRecord:
    """The record of a rubric step."""
    samples = [c.sample for group in outcome.candidates for c in group]
    metrics = {
        **_clock(before, after),
        **{f"race/rubric_reward/{k}": v for k, v in means.items()},
        **shared.optim_metrics(stats),
        "race/switch/delta_w": event.delta_w,
        "race/switch/tau_imp": before.thresholds.tau_imp,
        "race/pool/size": float(len(after.pool)),
        "race/pool/age_mean_steps": after.pool.mean_age(after.step),
        "race/pool/tie_break_only_frac": after.pool.tie_break_only_frac(),
        **_phase(event),
        "race/rubric_reward/unusable_frac": float(1.0 - outcome.usable_NG.mean()),
        **shared.health_metrics(
            scored, float(np.mean([not c.valid for group in outcome.candidates for c in group]))
        ),
        **shared.perf_metrics(seconds, samples),
        **costs.rubric_costs(outcome.usable_NG, scored, stats, config),
    }
    tables = {
        "rubric_groups": [_rubric_row(after.step, outcome, i) for i in range(len(outcome.entries))],
        "samples": _rubric_samples(after.step, outcome),
        "phases": [phase_row(event.ended)] if event.ended else [],
    }
    status = {**_status(before, after, metrics, event, seconds), "q_target": config.trqc.q_target}
    return StepRecord(after.step, shared.known(metrics), tables, status)


def phase_row(record: PhaseRecord) -> dict[str, object]:
    """A row of `phases`; `step` is its last step. Before and after the switch, TRQC of that step applied in both."""
    return {
        "step": record.end,
        "index": record.index,
        "kind": record.kind.value,
        "start": record.start,
        "end": record.end,
        "length": record.length,
        "end_reason": record.end_reason,
        **{f"{k}_before": v for k, v in record.before.state().items()},
        **{f"{k}_after": v for k, v in record.after.state().items()},
    }


def _clock(before: RaceState, after: RaceState) -> dict[str, float]:
    return {
        "train/clock/policy_step": float(after.phase.policy_steps),
        "train/clock/rubric_step": float(after.phase.rubric_steps),
        "train/clock/phase_index": float(before.phase.index),
        "train/clock/phase_kind": float(before.phase.kind is PhaseKind.RUBRIC),
    }


def _phase(event: StepEvent) -> dict[str, float]:
    if event.ended is None:
        return {}
    policy = event.ended.kind is PhaseKind.POLICY
    return {
        f"race/phase/{'policy_len' if policy else 'rubric_len'}": float(event.ended.length),
        "race/phase/n_phases": float(event.ended.index + 1),
        f"race/switch/{'err_policy_len' if policy else 'err_rubric_len'}": event.length_error,
        "race/switch/saturated": float(event.saturated),
    }


def _group_row(
    before: RaceState, after: RaceState, group: RolloutGroup, seen: GroupSignals, route: Route
) -> dict[str, object]:
    """A row of `groups`, with the thresholds it was routed by."""
    t = before.thresholds
    saturated = seen.usable and is_saturated(seen, t)
    return {
        **shared.group_row(after.step, after.phase.policy_steps, before.phase.index, group, seen, route),
        "saturated": saturated,
        "sigma_rt": t.sigma_rt,
        "tau_tie": t.tau_tie,
        "d_tri_star": t.d_tri,
        "d_emb_star": t.d_emb,
        "sigma_sw": t.sigma_sw,
        "mu_sat": t.mu_sat,
        "tau_sat": t.tau_sat,
    }


def _rubric_samples(step: int, outcome: RubricOutcome) -> list[dict[str, object]]:
    return [
        shared.sample_row(step, j, i, "rubric", e.prompt.text, c.sample, c.sample.text, float(r))
        for j, (e, group, rewards) in enumerate(
            zip(outcome.entries, outcome.candidates, outcome.final_NG, strict=True)
        )
        for i, (c, r) in enumerate(zip(group, rewards, strict=True))
    ]


def _rubric_row(step: int, outcome: RubricOutcome, i: int) -> dict[str, object]:
    def listed(row: FloatArray) -> list[float | None]:
        return [None if math.isnan(v) else float(v) for v in row]

    return {
        "step": step,
        "entry_id": outcome.entries[i].entry_id,
        "m_old": outcome.entries[i].margin,
        "margins": listed(outcome.margins_NG[i]),
        "base_rewards": listed(outcome.base_NG[i]),
        "final_rewards": listed(outcome.final_NG[i]),
        "usable": int(outcome.usable_NG[i].sum()),
    }


def _status(
    before: RaceState,
    after: RaceState,
    metrics: dict[str, float],
    event: StepEvent,
    seconds: dict[str, float],
) -> dict[str, object]:
    rubric = before.phase.kind is PhaseKind.RUBRIC
    happened = ""
    if event.ended is not None:
        happened = (
            f"{event.ended.kind.value} phase of {event.ended.length} steps ended by {event.ended.end_reason}"
        )
    elif event.deferred_switch:
        happened = f"switch deferred: {len(after.pool)} entries in the pool"
    return {
        "phase": before.phase.kind.value,
        "policy_step": after.phase.policy_steps,
        "reward": metrics.get("race/rubric_reward/mean" if rubric else "train/reward/mean", math.nan),
        "routes": {},
        "sigma_rt": before.thresholds.sigma_rt,
        "tau_tie": before.thresholds.tau_tie,
        "tau_sat": before.thresholds.tau_sat,
        "tau_imp": before.thresholds.tau_imp,
        "f_ema": after.phase.f_ema,
        "q_ema": after.q_ema,
        "pool": len(after.pool),
        "tokens_per_s": metrics["perf/rollout/tokens_per_s"],
        "step_s": seconds["step_s"],
        "event": happened,
    }
