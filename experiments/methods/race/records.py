"""What a RACE step leaves behind: metrics, table rows and the few values of the terminal panel. No decisions here."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from racelab.configs import schema
from racelab.experiments.methods.race import costs
from racelab.experiments.methods.race.controllers import TrqcUpdate
from racelab.experiments.methods.race.phase import PhaseKind, PhaseRecord, StepEvent, is_saturated
from racelab.experiments.methods.race.routing import GroupSignals, Route, quarantine_rate
from racelab.experiments.methods.race.rubric_reward import rubric_reward_stats
from racelab.experiments.methods.race.state import RaceState
from racelab.experiments.models.generator import Candidate
from racelab.experiments.types import (
    FloatArray,
    JudgeScores,
    PoolEntry,
    RolloutGroup,
    Sample,
    StepRecord,
    UpdateStats,
)

HIGH, LOW = 0.8, 0.2
"""App. D.5 counts groups with every response at or above 0.8, and at or below 0.2."""


class Clock:
    """Seconds of the parts of a step; never part of a state, so that runs stay comparable bit by bit."""

    def __init__(self) -> None:
        """Starts."""
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Seconds since the last lap go to `name`."""
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._last = now

    def total(self) -> dict[str, float]:
        """All laps, and `step_s`."""
        return {**self._laps, "step_s": time.perf_counter() - self._start}


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
        **_reward("train/reward", rewards),
        **_optim(stats),
        **_routes(routes),
        **_signals(groups, seen),
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
        **_health(scored, sum(g.rubric is None for g in groups) / len(groups)),
        **_perf(seconds, samples),
        **costs.policy_costs(groups, routes, scored, stats, config),
    }
    tables = {
        "groups": [_group_row(before, after, g, s, r) for g, s, r in zip(groups, seen, routes, strict=True)],
        "samples": _policy_samples(after.step, groups),
        "phases": [phase_row(event.ended)] if event.ended else [],
    }
    counts = {r.value: sum(x is r for x in routes) for r in Route}
    status = {
        **_status(before, after, metrics, event, seconds),
        "routes": counts,
        "q_target": config.trqc.q_target,
    }
    return StepRecord(after.step, _known(metrics), tables, status)


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
        **_optim(stats),
        "race/switch/delta_w": event.delta_w,
        "race/switch/tau_imp": before.thresholds.tau_imp,
        "race/pool/size": float(len(after.pool)),
        "race/pool/age_mean_steps": after.pool.mean_age(after.step),
        "race/pool/tie_break_only_frac": after.pool.tie_break_only_frac(),
        **_phase(event),
        "race/rubric_reward/unusable_frac": float(1.0 - outcome.usable_NG.mean()),
        **_health(scored, float(np.mean([not c.valid for group in outcome.candidates for c in group]))),
        **_perf(seconds, samples),
        **costs.rubric_costs(outcome.usable_NG, scored, stats, config),
    }
    tables = {
        "rubric_groups": [_rubric_row(after.step, outcome, i) for i in range(len(outcome.entries))],
        "samples": _rubric_samples(after.step, outcome),
        "phases": [phase_row(event.ended)] if event.ended else [],
    }
    status = {**_status(before, after, metrics, event, seconds), "q_target": config.trqc.q_target}
    return StepRecord(after.step, _known(metrics), tables, status)


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


def _known(metrics: dict[str, float]) -> dict[str, float]:
    """Drops values that have no basis in this step (NaN), such as Delta_W before two windows are full."""
    return {k: float(v) for k, v in metrics.items() if not math.isnan(v)}


def _clock(before: RaceState, after: RaceState) -> dict[str, float]:
    return {
        "train/clock/policy_step": float(after.phase.policy_steps),
        "train/clock/rubric_step": float(after.phase.rubric_steps),
        "train/clock/phase_index": float(before.phase.index),
        "train/clock/phase_kind": float(before.phase.kind is PhaseKind.RUBRIC),
    }


def _reward(section: str, rewards: FloatArray) -> dict[str, float]:
    valid = rewards[np.isfinite(rewards)]
    if not valid.size:
        return {}
    return {
        f"{section}/mean": float(valid.mean()),
        f"{section}/std": float(valid.std()),
        f"{section}/min": float(valid.min()),
        f"{section}/max": float(valid.max()),
    }


def _optim(stats: UpdateStats) -> dict[str, float]:
    """A step without an update has no loss to report."""
    if not stats.stepped:
        found = {"train/optim/stepped": 0.0}
        if stats.n_samples:  # there was a gradient, and it was not finite
            found["health/nonfinite/train/optim/grad_norm"] = 1.0
        return found
    return {
        "train/optim/stepped": 1.0,
        "train/optim/loss_pg": stats.loss_pg,
        "train/optim/kl": stats.kl,
        "train/optim/clip_frac": stats.clip_frac,
        "train/optim/entropy": stats.entropy,
        "train/optim/grad_norm": stats.grad_norm,
        "train/optim/lr": stats.lr,
    }


def _routes(routes: Sequence[Route]) -> dict[str, float]:
    return {
        **{f"race/route/{r.value}_frac": sum(x is r for x in routes) / len(routes) for r in Route},
        "race/route/quarantine_rate": quarantine_rate(routes),
        "race/route/n_groups": float(len(routes)),
    }


def _signals(groups: Sequence[RolloutGroup], seen: Sequence[GroupSignals]) -> dict[str, float]:
    usable = [(g, s) for g, s in zip(groups, seen, strict=True) if s.usable]
    if not usable:
        return {}
    collapsed = [g.rewards for g, s in usable if s.std == 0.0]

    def share(rows: Sequence[FloatArray], test: str) -> float:
        if not rows:
            return math.nan
        hits = [np.nanmin(r) >= HIGH if test == "high" else np.nanmax(r) <= LOW for r in rows]
        return float(np.mean(hits))

    rewards = [g.rewards for g, _ in usable]
    return {
        "race/signal/sigma_mean": float(np.mean([s.std for _, s in usable])),
        "race/signal/sigma_zero_frac": len(collapsed) / len(usable),
        "race/signal/tie_rate_mean": float(np.mean([s.tie_rate for _, s in usable])),
        "race/signal/d_tri_mean": float(np.mean([s.d_tri for _, s in usable])),
        "race/signal/d_emb_mean": float(np.mean([s.d_emb for _, s in usable])),
        "race/signal/all_ge_0_8_frac": share(rewards, "high"),
        "race/signal/all_le_0_2_frac": share(rewards, "low"),
        "race/signal/collapsed_high_frac": share(collapsed, "high"),
        "race/signal/collapsed_low_frac": share(collapsed, "low"),
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


def _health(scored: JudgeScores, unusable_rubrics: float) -> dict[str, float]:
    return {
        "health/judge_parse_fail": float(scored.parse_failures),
        "health/judge_infra_fail": float(scored.infra_failures),
        "health/rubric_parse_fail": unusable_rubrics,
    }


def _perf(seconds: dict[str, float], samples: Sequence[Sample]) -> dict[str, float]:
    tokens = sum(len(y.tokens) for y in samples)
    return {
        **{f"perf/time/{k}": v for k, v in seconds.items()},
        "perf/rollout/tokens_per_s": tokens / max(seconds["gen_s"], 1e-9),
        "perf/rollout/tokens_mean": tokens / max(len(samples), 1),
    }


def _group_row(
    before: RaceState, after: RaceState, group: RolloutGroup, seen: GroupSignals, route: Route
) -> dict[str, object]:
    """A row of `groups`, with the thresholds it was routed by."""
    t = before.thresholds
    saturated = seen.usable and is_saturated(seen, t)
    return {
        "step": after.step,
        "policy_step": after.phase.policy_steps,
        "phase_index": before.phase.index,
        "prompt_id": group.prompt.prompt_id,
        "rubric_sha": group.rubric.sha if group.rubric else None,
        "rewards": [None if math.isnan(r) else float(r) for r in group.rewards],
        "mean": seen.mean,
        "std": seen.std,
        "tie_rate": seen.tie_rate,
        "d_tri": seen.d_tri,
        "d_emb": seen.d_emb,
        "route": route.value,
        "saturated": saturated,
        "sigma_rt": t.sigma_rt,
        "tau_tie": t.tau_tie,
        "d_tri_star": t.d_tri,
        "d_emb_star": t.d_emb,
        "sigma_sw": t.sigma_sw,
        "mu_sat": t.mu_sat,
        "tau_sat": t.tau_sat,
    }


def _sample_row(
    step: int, group: int, idx: int, role: str, prompt: str, sample: Sample, rubric: str, score: float
) -> dict[str, object]:
    return {
        "step": step,
        "group": group,
        "idx": idx,
        "role": role,
        "prompt": prompt,
        "text": sample.text,
        "rubric_text": rubric,
        "score": None if math.isnan(score) else score,
        "finished": sample.finished,
        "n_tokens": len(sample.tokens),
    }


def _policy_samples(step: int, groups: Sequence[RolloutGroup]) -> list[dict[str, object]]:
    return [
        _sample_row(
            step,
            j,
            i,
            "policy",
            g.prompt.text,
            y,
            g.rubric.text if g.rubric else g.rubric_sample.text,
            float(r),
        )
        for j, g in enumerate(groups)
        for i, (y, r) in enumerate(zip(g.responses, g.rewards, strict=True))
    ]


def _rubric_samples(step: int, outcome: RubricOutcome) -> list[dict[str, object]]:
    return [
        _sample_row(step, j, i, "rubric", e.prompt.text, c.sample, c.sample.text, float(r))
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
