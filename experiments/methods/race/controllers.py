"""Online threshold adaptation: Eqs 19-22 of the RACE paper, and the warm-up that can initialise thresholds.

    q_hat <- alpha_q q + (1 - alpha_q) q_hat,  q_hat(0) = 0;  e_q = (q_hat - q*) / (q* + eps_q)       (19)
    sigma_rt <- clip(sigma_rt - eta_sigma e_q, 0, 1);  tau_tie <- clip(tau_tie + eta_tau e_q, 0, 1)   (20)
    e_P = (mean L - L*) / L*,  e_R = (mean M - M*) / M*                                               (21)
    tau_sat <- proj_I_P(tau_sat - eta_P e_P);  tau_imp <- proj_I_R(tau_imp + eta_R e_R)               (22)

Pure functions on frozen values. With zero gains every threshold stays what it was, to the last bit, as long
as it lies inside its range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from racelab.experiments.methods.race.routing import GroupSignals, Thresholds


def ema(previous: float, value: float, alpha: float) -> float:
    """Exponential moving average, alpha * value + (1 - alpha) * previous (Eqs 13 and 19)."""
    return alpha * value + (1.0 - alpha) * previous


def project(value: float, interval: tuple[float, float]) -> tuple[float, bool]:
    """The nearest point of the interval, and whether the value had been outside (pushed beyond a bound)."""
    low, high = interval
    inside = min(max(value, low), high)
    return inside, inside != value


@dataclass(frozen=True, slots=True)
class TrqcConfig:
    """Target-Rate Quarantine Controller.

    Attributes:
        q_star: target quarantine rate, >= 0.
        alpha_q: smoothing, in (0, 1].
        eps_q: keeps the relative error finite at q* = 0.
        eta_sigma: gain of sigma_rt; 0 keeps it fixed.
        eta_tau: gain of tau_tie; 0 keeps it fixed.
    """

    q_star: float = 0.20
    alpha_q: float = 0.1
    eps_q: float = 1e-8
    eta_sigma: float = 0.003
    eta_tau: float = 0.003


@dataclass(frozen=True, slots=True)
class TrqcUpdate:
    """What one TRQC step gave.

    Attributes:
        thresholds: those of the next step.
        q_ema: q_hat.
        error: e_q; positive means that too much is quarantined.
        saturated: a threshold was pushed beyond 0 or 1 and held there.
    """

    thresholds: Thresholds
    q_ema: float
    error: float
    saturated: bool


def trqc(
    thresholds: Thresholds, q_ema: float, q: float, config: TrqcConfig, *, frozen: bool = False
) -> TrqcUpdate:
    """Eqs 19-20 after one policy step.

    Args:
        thresholds: those the step was routed with.
        q_ema: q_hat before the step (0 at the start of the run).
        q: the step's quarantine rate (Eq 18). NaN, no group was processed, changes nothing.
        config: target, smoothing and gains.
        frozen: True while thresholds are being calibrated: q_hat is followed, nothing adapted.
    """
    nothing_seen = math.isnan(q)
    if not nothing_seen:
        q_ema = ema(q_ema, q, config.alpha_q)
    error = (q_ema - config.q_star) / (config.q_star + config.eps_q)
    if frozen or nothing_seen:
        return TrqcUpdate(thresholds, q_ema, error, saturated=False)
    sigma_rt, sigma_hit = project(thresholds.sigma_rt - config.eta_sigma * error, (0.0, 1.0))
    tau_tie, tau_hit = project(thresholds.tau_tie + config.eta_tau * error, (0.0, 1.0))
    adapted = replace(thresholds, sigma_rt=sigma_rt, tau_tie=tau_tie)
    return TrqcUpdate(adapted, q_ema, error, saturated=sigma_hit or tau_hit)


@dataclass(frozen=True, slots=True)
class PhaseLengthConfig:
    """Adaptive Phase-Switching Controller.

    Attributes:
        policy_target: L*, steps.
        rubric_target: M*, steps.
        policy_window: W_P, phases averaged.
        rubric_window: W_R.
        eta_policy: eta_P; 0 keeps tau_sat fixed.
        eta_rubric: eta_R; 0 keeps tau_imp fixed.
        policy_range: I_P, range of tau_sat.
        rubric_range: I_R, range of tau_imp.
    """

    policy_target: float = 25.0
    rubric_target: float = 12.0
    policy_window: int = 3
    rubric_window: int = 3
    eta_policy: float = 0.04
    eta_rubric: float = 0.0005
    policy_range: tuple[float, float] = (0.05, 0.95)
    rubric_range: tuple[float, float] = (0.0, 0.05)


@dataclass(frozen=True, slots=True)
class LengthUpdate:
    """What the phase-length controller gave.

    Attributes:
        threshold: the adapted one.
        error: e_P or e_R; NaN while the window is not full (the threshold is then unchanged).
        saturated: the threshold was pushed beyond its range and held there.
    """

    threshold: float
    error: float
    saturated: bool


def duration_error(lengths: Sequence[int], target: float, window: int) -> float:
    """Eq 21 over the last `window` lengths; NaN while there are fewer."""
    if len(lengths) < window:
        return math.nan
    recent = lengths[-window:]
    return (sum(recent) / window - target) / target


def _adapt(threshold: float, error: float, change: float, interval: tuple[float, float]) -> LengthUpdate:
    """Eq 22: threshold + change, projected; unchanged where the error is not known yet."""
    if math.isnan(error):
        return LengthUpdate(threshold, error, saturated=False)
    adapted, hit = project(threshold + change, interval)
    return LengthUpdate(adapted, error, hit)


def adapt_tau_sat(tau_sat: float, lengths: Sequence[int], config: PhaseLengthConfig) -> LengthUpdate:
    """Eqs 21-22 for tau_sat: policy phases that last too long lower it, so that the next one ends sooner.

    Args:
        tau_sat: the current threshold.
        lengths: of the policy phases that ended by saturation, the one just ended last.
        config: target, window, gain and range.
    """
    error = duration_error(lengths, config.policy_target, config.policy_window)
    return _adapt(tau_sat, error, -config.eta_policy * error, config.policy_range)


def adapt_tau_imp(tau_imp: float, lengths: Sequence[int], config: PhaseLengthConfig) -> LengthUpdate:
    """Eqs 21-22 for tau_imp: rubric phases that last too long raise it, so that the next one ends sooner.

    Args:
        tau_imp: the current threshold.
        lengths: of the rubric phases that ended by a plateau, the one just ended last.
        config: target, window, gain and range.
    """
    error = duration_error(lengths, config.rubric_target, config.rubric_window)
    return _adapt(tau_imp, error, config.eta_rubric * error, config.rubric_range)


def calibrated(groups: Sequence[GroupSignals], thresholds: Thresholds, q_star: float) -> Thresholds:
    """Thresholds read off the groups of the warm-up (our reading of Section 5.1's "first 50 steps").

    sigma_rt = q*-quantile of std; tau_tie = (1 - q*)-quantile of the tie rate; d_tri and d_emb = their 10 %
    quantiles; sigma_sw = median std among the groups whose mean reaches mu_sat (unchanged if none does).
    Quantiles interpolate linearly. Groups with fewer than two valid scores are left out; with none left, the
    thresholds are returned as they are.
    """
    seen = [g for g in groups if g.usable]
    if not seen:
        return thresholds
    high = [g.std for g in seen if g.mean >= thresholds.mu_sat]
    return replace(
        thresholds,
        sigma_rt=float(np.quantile([g.std for g in seen], q_star)),
        tau_tie=float(np.quantile([g.tie_rate for g in seen], 1.0 - q_star)),
        d_tri=float(np.quantile([g.d_tri for g in seen], 0.1)),
        d_emb=float(np.quantile([g.d_emb for g in seen], 0.1)),
        sigma_sw=float(np.median(high)) if high else thresholds.sigma_sw,
    )


@dataclass(frozen=True, slots=True)
class Calibration:
    """The warm-up: collects signals for `steps` policy steps, then sets the thresholds once.

    Attributes:
        steps: `calibrate_steps`; 0 means that the given thresholds are used from the first step.
        done: policy steps seen so far.
        seen: signals collected; emptied once used.
    """

    steps: int = 0
    done: int = 0
    seen: tuple[GroupSignals, ...] = ()

    @property
    def active(self) -> bool:
        """True while collecting; the controllers are frozen meanwhile."""
        return self.done < self.steps

    def observe(
        self, groups: Sequence[GroupSignals], thresholds: Thresholds, q_star: float
    ) -> tuple[Calibration, Thresholds]:
        """Takes in one policy step; on the last one gives the calibrated thresholds, else the ones given."""
        if not self.active:
            return self, thresholds
        seen = (*self.seen, *groups)
        if self.done + 1 < self.steps:
            return Calibration(self.steps, self.done + 1, seen), thresholds
        return Calibration(self.steps, self.steps), calibrated(seen, thresholds, q_star)

    def state(self) -> dict[str, Any]:
        """JSON values (a NaN statistic is written as Python's json does)."""
        return {"steps": self.steps, "done": self.done, "seen": [g.state() for g in self.seen]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Calibration:
        """Undoes `state`."""
        seen = tuple(GroupSignals.from_state(g) for g in state["seen"])
        return cls(steps=int(state["steps"]), done=int(state["done"]), seen=seen)
