"""Event-triggered phase switching: Eqs 12-14 and the state machine of Algorithm 1 of the RACE paper.

    f_sat = (1/N) sum_j 1[ std(r_j) <= sigma_sw and mean(r_j) >= mu_sat ]                        (12)
    f_hat <- alpha f_sat + (1 - alpha) f_hat;  policy -> rubric when f_hat >= tau_sat            (13)
    Delta_W = mean of the last W rubric rewards - mean of the W before;
              rubric -> policy when t_R >= 2W and Delta_W <= tau_imp                             (14)

Where the printed algorithm is silent:
  * t_P goes up by one per policy step (Algorithm 1 resets it but never counts it);
  * entering the policy phase sets f_hat = 0 and t_P = 0, everything else carries on;
  * a pool below `min_pool` defers the switch: the policy phase goes on and the deferral is counted;
  * a rubric step without a valid reward counts in t_R but not in the windows;
  * only phases that ended by their own trigger enter the length windows of Eq 21.

The functions are pure: state in, state out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from racelab.experiments.methods.grpo import SCORE_DIGITS
from racelab.experiments.methods.race.controllers import (
    LengthUpdate,
    PhaseLengthConfig,
    adapt_tau_imp,
    adapt_tau_sat,
    ema,
)
from racelab.experiments.methods.race.routing import GroupSignals, Thresholds


class PhaseKind(StrEnum):
    """Which role is being trained."""

    POLICY = "policy"
    RUBRIC = "rubric"


EndReason = Literal["saturation", "plateau", "cap", "fixed", "random", "budget", "interrupted"]


class Schedule(Protocol):
    """Decides beforehand how long a phase lasts, or leaves it to the triggers."""

    @property
    def reason(self) -> EndReason:
        """End reason of a phase whose length was planned."""

    def plan(self, kind: PhaseKind, rng: np.random.Generator | None) -> int | None:
        """Steps of the phase that begins; None: until its trigger fires."""


@dataclass(frozen=True, slots=True)
class EventSchedule:
    """RACE: phases end by Eq 13 or 14, or at `max_rubric_steps`; no length is planned, `reason` is unread."""

    reason: EndReason = "cap"

    def plan(self, kind: PhaseKind, rng: np.random.Generator | None) -> int | None:
        """No plan."""
        return None


@dataclass(frozen=True, slots=True)
class FixedSchedule:
    """Fixed alternation: `policy` steps, then `rubric` steps (EvoLM and an ablation: 50, 50)."""

    policy: int
    rubric: int
    reason: EndReason = "fixed"

    def plan(self, kind: PhaseKind, rng: np.random.Generator | None) -> int | None:
        """The same every time."""
        return self.policy if kind is PhaseKind.POLICY else self.rubric


@dataclass(frozen=True, slots=True)
class RandomSchedule:
    """Random lengths L ~ U{1..2 L* - 1} and M ~ U{1..2 M* - 1}, whose means are L* and M*."""

    policy_target: int
    rubric_target: int
    reason: EndReason = "random"

    def plan(self, kind: PhaseKind, rng: np.random.Generator | None) -> int | None:
        """One draw from `rng`.

        Raises:
            ValueError: without a generator.
        """
        if rng is None:
            raise ValueError("random phase lengths need a numpy Generator")
        target = self.policy_target if kind is PhaseKind.POLICY else self.rubric_target
        return int(rng.integers(1, 2 * target))


@dataclass(frozen=True, slots=True)
class PhaseConfig:
    """Switching settings.

    Attributes:
        alpha: smoothing of f_sat (Eq 13).
        window: W of Eq 14.
        min_pool: fewest pool entries a rubric phase may start with.
        max_rubric_steps: an event-triggered rubric phase ends there with reason `cap`; None: never. Planned
            phases (fixed, random) have their own bound.
        plateau_signal: what Eq 14 watches: `s_rubric` the mean reward, `gain` the mean of m_new - m_old.
        schedule: event-triggered, fixed or random.
        lengths: the controller of Eqs 21-22.
    """

    alpha: float = 0.1
    window: int = 5
    min_pool: int = 8
    max_rubric_steps: int | None = None
    plateau_signal: Literal["s_rubric", "gain"] = "s_rubric"
    schedule: Schedule = field(default_factory=EventSchedule)
    lengths: PhaseLengthConfig = field(default_factory=PhaseLengthConfig)


@dataclass(frozen=True, slots=True)
class PhaseState:
    """Where the run stands between two steps.

    Attributes:
        kind: the phase that the next step belongs to.
        index: number of the phase, from 0.
        policy_t: t_P, policy steps of this (or the last) policy phase.
        rubric_t: t_R, rubric steps of this (or the last) rubric phase.
        f_ema: f_hat of Eq 13.
        rewards: plateau signal of this rubric phase's steps, valid ones only.
        policy_lengths: the last W_P lengths of policy phases that ended by saturation.
        rubric_lengths: the last W_R lengths of rubric phases that ended by a plateau.
        planned: steps this phase is to last; None: until its trigger fires.
        policy_steps: policy steps of the whole run.
        rubric_steps: rubric steps of the whole run.
        deferred: switches deferred in the whole run for want of pool entries.
    """

    kind: PhaseKind = PhaseKind.POLICY
    index: int = 0
    policy_t: int = 0
    rubric_t: int = 0
    f_ema: float = 0.0
    rewards: tuple[float, ...] = ()
    policy_lengths: tuple[int, ...] = ()
    rubric_lengths: tuple[int, ...] = ()
    planned: int | None = None
    policy_steps: int = 0
    rubric_steps: int = 0
    deferred: int = 0

    @property
    def step(self) -> int:
        """Global steps done."""
        return self.policy_steps + self.rubric_steps

    @property
    def length(self) -> int:
        """Steps of the current phase so far."""
        return self.policy_t if self.kind is PhaseKind.POLICY else self.rubric_t

    def state(self) -> dict[str, Any]:
        """JSON values; floats survive exactly."""
        tuples = {k: list(v) for k, v in asdict(self).items() if isinstance(v, tuple)}
        return {**asdict(self), **tuples, "kind": str(self.kind)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PhaseState:
        """Undoes `state`."""
        tuples = {k: tuple(v) for k, v in state.items() if isinstance(v, list)}
        return cls(**{**state, **tuples, "kind": PhaseKind(state["kind"])})


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """A phase that is over (a row of the `phases` table). `start` and `end` are global steps, inclusive."""

    index: int
    kind: PhaseKind
    start: int
    end: int
    length: int
    end_reason: EndReason
    before: Thresholds
    after: Thresholds


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What a step meant for the phases.

    Attributes:
        ended: the phase that ended with this step, or None.
        deferred_switch: the policy phase should have ended, but the pool is too small.
        delta_w: Delta_W of Eq 14; NaN in policy steps and while the windows are not full.
        length_error: e_P or e_R of Eq 21; NaN unless a phase ended and the window is full.
        saturated: the phase-length controller was held at the bound of its range.
    """

    ended: PhaseRecord | None = None
    deferred_switch: bool = False
    delta_w: float = math.nan
    length_error: float = math.nan
    saturated: bool = False


class Transition(NamedTuple):
    """State and thresholds for the next step, and what happened in this one."""

    state: PhaseState
    thresholds: Thresholds
    event: StepEvent


def is_saturated(group: GroupSignals, thresholds: Thresholds) -> bool:
    """The condition inside Eq 12: little spread at a high mean."""
    return (
        round(group.std, SCORE_DIGITS) <= thresholds.sigma_sw
        and round(group.mean, SCORE_DIGITS) >= thresholds.mu_sat
    )


def saturation_fraction(groups: Sequence[GroupSignals], thresholds: Thresholds) -> float:
    """Eq 12 over the groups with enough valid scores; NaN if there is none."""
    usable = [g for g in groups if g.usable]
    if not usable:
        return math.nan
    return sum(is_saturated(g, thresholds) for g in usable) / len(usable)


def plateau_delta(history: Sequence[float], window: int) -> float:
    """Eq 14: mean of the last `window` values less the mean of the `window` before; NaN with fewer."""
    if len(history) < 2 * window:
        return math.nan
    last = math.fsum(history[-window:])
    before = math.fsum(history[-2 * window : -window])
    return last / window - before / window


def initial_state(config: PhaseConfig, rng: np.random.Generator | None = None) -> PhaseState:
    """Line 1 of Algorithm 1: the policy phase, with the length planned if the schedule plans."""
    return PhaseState(planned=config.schedule.plan(PhaseKind.POLICY, rng))


def _record(state: PhaseState, reason: EndReason, before: Thresholds, after: Thresholds) -> PhaseRecord:
    start = state.step - state.length + 1
    return PhaseRecord(state.index, state.kind, start, state.step, state.length, reason, before, after)


def close_phase(
    state: PhaseState, thresholds: Thresholds, reason: Literal["budget", "interrupted"]
) -> PhaseRecord | None:
    """The record of the phase that the run stops in; None if it has no step yet."""
    return _record(state, reason, thresholds, thresholds) if state.length else None


def after_policy_step(
    state: PhaseState,
    f_sat: float,
    pool_size: int,
    thresholds: Thresholds,
    config: PhaseConfig,
    rng: np.random.Generator | None = None,
    *,
    frozen: bool = False,
) -> Transition:
    """Lines 20-24 of Algorithm 1.

    Args:
        state: before the step; must be in the policy phase.
        f_sat: Eq 12; NaN (no usable group) leaves f_hat as it was.
        pool_size: entries in the pool after this step's pushes.
        thresholds: those of the next step (after TRQC).
        config: switching settings.
        rng: needed by random phase lengths only.
        frozen: True while thresholds are being calibrated: tau_sat is not adapted.

    Raises:
        ValueError: in a rubric phase, or if a random length lacks its generator.
    """
    if state.kind is not PhaseKind.POLICY:
        raise ValueError("a policy step cannot happen in a rubric phase")
    f_ema = state.f_ema if math.isnan(f_sat) else ema(state.f_ema, f_sat, config.alpha)
    state = replace(state, policy_t=state.policy_t + 1, policy_steps=state.policy_steps + 1, f_ema=f_ema)
    reason = _policy_end(state, thresholds, config)
    if reason is None:
        return Transition(state, thresholds, StepEvent())
    if pool_size < config.min_pool:
        deferred = replace(state, deferred=state.deferred + 1)
        return Transition(deferred, thresholds, StepEvent(deferred_switch=True))
    return _enter_rubric(state, thresholds, config, reason, rng, frozen)


def _policy_end(state: PhaseState, thresholds: Thresholds, config: PhaseConfig) -> EndReason | None:
    """Why the policy phase ends with this step (if the pool allows it), or None."""
    if state.planned is not None:
        return config.schedule.reason if state.policy_t >= state.planned else None
    return "saturation" if state.f_ema >= thresholds.tau_sat else None


def _enter_rubric(
    state: PhaseState,
    thresholds: Thresholds,
    config: PhaseConfig,
    reason: EndReason,
    rng: np.random.Generator | None,
    frozen: bool,
) -> Transition:
    lengths, update = state.policy_lengths, _unchanged(thresholds.tau_sat)
    if reason == "saturation":
        lengths = (*lengths, state.policy_t)[-config.lengths.policy_window :]
        update = update if frozen else adapt_tau_sat(thresholds.tau_sat, lengths, config.lengths)
    after = replace(thresholds, tau_sat=update.threshold)
    entered = replace(
        state,
        kind=PhaseKind.RUBRIC,
        index=state.index + 1,
        rubric_t=0,
        rewards=(),
        policy_lengths=lengths,
        planned=config.schedule.plan(PhaseKind.RUBRIC, rng),
    )
    record = _record(state, reason, thresholds, after)
    event = StepEvent(ended=record, length_error=update.error, saturated=update.saturated)
    return Transition(entered, after, event)


def after_rubric_step(
    state: PhaseState,
    signals: Mapping[str, float],
    thresholds: Thresholds,
    config: PhaseConfig,
    rng: np.random.Generator | None = None,
    *,
    frozen: bool = False,
) -> Transition:
    """Lines 26-36 of Algorithm 1.

    Args:
        state: before the step; must be in the rubric phase.
        signals: `s_rubric` (mean reward) and `gain` (mean of m_new - m_old) of the step; the one that
            `config.plateau_signal` names is used. NaN: the step had no valid reward.
        thresholds: the current ones.
        config: switching settings.
        rng: needed by random phase lengths only.
        frozen: True while thresholds are being calibrated: tau_imp is not adapted.

    Raises:
        ValueError: in a policy phase, or if a random length lacks its generator.
    """
    if state.kind is not PhaseKind.RUBRIC:
        raise ValueError("a rubric step cannot happen in a policy phase")
    value = signals[config.plateau_signal]
    rewards = state.rewards if math.isnan(value) else (*state.rewards, value)
    state = replace(state, rubric_t=state.rubric_t + 1, rubric_steps=state.rubric_steps + 1, rewards=rewards)
    delta = plateau_delta(rewards, config.window)  # a number only once 2W valid steps, so t_R >= 2W, are in
    reason = _rubric_end(state, delta, thresholds, config)
    if reason is None:
        return Transition(state, thresholds, StepEvent(delta_w=delta))
    return _enter_policy(state, thresholds, config, reason, delta, rng, frozen)


def _rubric_end(
    state: PhaseState, delta: float, thresholds: Thresholds, config: PhaseConfig
) -> EndReason | None:
    """Why the rubric phase ends with this step, or None."""
    if state.planned is not None:
        return config.schedule.reason if state.rubric_t >= state.planned else None
    if delta <= thresholds.tau_imp:  # False for NaN
        return "plateau"
    cap = config.max_rubric_steps
    return "cap" if cap is not None and state.rubric_t >= cap else None


def _enter_policy(
    state: PhaseState,
    thresholds: Thresholds,
    config: PhaseConfig,
    reason: EndReason,
    delta: float,
    rng: np.random.Generator | None,
    frozen: bool,
) -> Transition:
    lengths, update = state.rubric_lengths, _unchanged(thresholds.tau_imp)
    if reason == "plateau":
        lengths = (*lengths, state.rubric_t)[-config.lengths.rubric_window :]
        update = update if frozen else adapt_tau_imp(thresholds.tau_imp, lengths, config.lengths)
    after = replace(thresholds, tau_imp=update.threshold)
    entered = replace(
        state,
        kind=PhaseKind.POLICY,
        index=state.index + 1,
        policy_t=0,
        f_ema=0.0,
        rubric_lengths=lengths,
        planned=config.schedule.plan(PhaseKind.POLICY, rng),
    )
    record = _record(state, reason, thresholds, after)
    event = StepEvent(ended=record, delta_w=delta, length_error=update.error, saturated=update.saturated)
    return Transition(entered, after, event)


def _unchanged(threshold: float) -> LengthUpdate:
    return LengthUpdate(threshold, math.nan, saturated=False)
