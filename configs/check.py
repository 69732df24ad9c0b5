"""Which targets and thresholds of a configuration can never be reached, before anything heavy is loaded.

Pure functions of the config: each looks at one way in which a run could go on for hours without ever doing
what its config asks, and says why and which value works. The schema refuses what is contradictory; here
stands what is well-formed and yet cannot happen. `warning`: the run does something, but not that. `error`: it
cannot train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from racelab.configs.check_baselines import baseline_findings
from racelab.configs.check_rlds import rlds_findings
from racelab.configs.findings import (
    Finding,
    error,
    late_steps,
    most_policy_steps,
    planned_phases,
    planned_steps,
    warn,
)
from racelab.configs.schema import Config, RaceConfig
from racelab.configs.schema_eval import EvalRunConfig
from racelab.configs.schema_rlds import AnyConfig, RldsRunConfig

COLLAPSE_FLOOR = 0.245
"""Share of groups with sigma = 0 under a judge with few distinct scores (RACE Table 13: 24.5 %)."""

_COARSE_JUDGES = frozenset({"json", "api"})
"""Judges whose scores take few values, so that all G of a group are often equal."""

_MAX_STD = 0.5
"""The largest population std of numbers in [0, 1]: half of them 0, half 1."""


def reachability(config: AnyConfig) -> list[Finding]:
    """All findings for a configuration, errors first; [] if every target can be reached."""
    return sorted(_findings(config), key=lambda finding: finding.severity != "error")


def _findings(config: AnyConfig) -> list[Finding]:
    if isinstance(config, RldsRunConfig):
        return list(rlds_findings(config))
    if isinstance(config, EvalRunConfig):
        return []
    method = config.method
    if isinstance(method, RaceConfig):
        return [finding for rule in _RULES for finding in rule(config, method)]
    return list(baseline_findings(config))


def _round_up(value: float, digits: int) -> float:
    scale = float(10**digits)
    return math.ceil(value * scale - 1e-9) / scale


def _routes(m: RaceConfig) -> bool:
    """Whether Eqs 8-9 decide anything."""
    return m.routing.mode == "full"


def _adapts_routing(m: RaceConfig) -> bool:
    trqc = m.trqc
    return _routes(m) and (trqc.eta_sigma > 0 or trqc.eta_tau > 0)


def _everything_degenerate(config: Config, m: RaceConfig) -> Iterator[Finding]:
    """Thresholds at which every group is quarantined whatever its rewards."""
    routing = m.routing
    if not _routes(m) or not routing.mask_uninformative:
        return
    if routing.sigma_rt >= _MAX_STD:
        reason = (
            f"rewards in [0, 1] have a std of at most {_MAX_STD}, so every group is quarantined and "
            "none trains"
        )
        yield error("method.routing.sigma_rt", f"{routing.sigma_rt:g}", reason, 0.03)
    if routing.tau_tie <= 0:
        reason = "every tie rate is at least 0, so every group is quarantined and none trains"
        yield error("method.routing.tau_tie", f"{routing.tau_tie:g}", reason, 0.7)


def _quarantine_target(config: Config, m: RaceConfig) -> Iterator[Finding]:
    """q* at or below the share of groups that is always quarantined: TRQC winds up."""
    target = m.trqc.q_target
    if _adapts_routing(m) and config.judge.kind in _COARSE_JUDGES and target <= COLLAPSE_FLOOR:
        yield warn(
            "method.trqc.q_target",
            f"{target:g}",
            f"groups whose rewards are all equal are always quarantined: {100 * COLLAPSE_FLOOR:.1f} % of them "
            "in RACE Table "
            "13; with such a judge the rate cannot fall to the target and TRQC winds sigma_rt down to "
            "0 (it depends "
            f"on how often this {config.judge.kind} judge gives equal scores: race/signal/sigma_zero_frac)",
            0.35,
        )


def _trigram_floor(config: Config, m: RaceConfig) -> Iterator[Finding]:
    """d_tri* below 1/G: G equal responses do not fall under it."""
    if _routes(m) and m.routing.d_tri < 1 / m.group_size:
        yield warn(
            "method.routing.d_tri",
            f"{m.routing.d_tri:g}",
            f"G = {m.group_size} equal responses have d_tri = 1/{m.group_size} = {1 / m.group_size:g} "
            "(less only if "
            "one repeats itself), so no group is found diversity-collapsed",
            f"{max(0.05, _round_up(1.05 / m.group_size, 5)):g}",
        )


def _tie_rates(config: Config, m: RaceConfig) -> Iterator[Finding]:
    """tau_tie* where no possible tie rate lies, k / (G (G - 1) / 2)."""
    pairs = m.group_size * (m.group_size - 1) // 2
    tau, key = m.routing.tau_tie, "method.routing.tau_tie"
    if not _routes(m) or tau <= 0:
        return
    largest = (pairs - 1) / pairs
    if tau > largest:
        yield warn(
            key,
            f"{tau:g}",
            f"with G = {m.group_size} the largest tie rate below 1 is {pairs - 1}/{pairs} = "
            f"{largest:.3f}: only a group "
            "in which every pair ties is caught",
            f"{math.floor(largest * 1000) / 1000:g}" if pairs > 1 else 6,
            None if pairs > 1 else "method.group_size",
        )
        return
    if m.trqc.eta_tau <= 0:
        return
    steps = most_policy_steps(config)
    # TRQC moves tau by eta e_q a step, e_q between -1 (nothing quarantined) and (1 - q*)/q* (everything).
    most_error = (1 - m.trqc.q_target) / m.trqc.q_target
    up = m.trqc.eta_tau * most_error * steps
    down = m.trqc.eta_tau * steps
    at_least = math.ceil(tau * pairs - 1e-9)
    to_next, to_previous = at_least / pairs - tau, tau - (at_least - 1) / pairs
    if up <= to_next and down < to_previous:
        yield warn(
            key,
            f"{tau:g}",
            f"it lies in a dead band: with G = {m.group_size} tie rates are k/{pairs}, so it acts as "
            f"{at_least}/{pairs}, "
            f"and in {steps} steps TRQC moves it by {down:.3g} down or {up:.3g} up "
            "at most, less "
            "than to the next rate: adapting it changes nothing",
            f"{_round_up(1.2 * min(to_previous, to_next / most_error) / steps, 4):g}",
            "method.trqc.eta_tau",
        )


def _gains(config: Config, m: RaceConfig) -> Iterator[Finding]:
    """Gains so large that one step throws a threshold across its whole range."""
    t, p = m.trqc, m.phase
    largest = (1 - t.q_target) / t.q_target
    if _routes(m):
        for name, eta, span in (("eta_sigma", t.eta_sigma, _MAX_STD), ("eta_tau", t.eta_tau, 1.0)):
            if eta * largest >= span:
                reason = (
                    f"at a quarantine rate of 1 one step moves the threshold by {eta * largest:.3g}, "
                    "its whole range"
                )
                yield warn(f"method.trqc.{name}", f"{eta:g}", reason, 0.003)
    if p.mode != "event":
        return
    for name, eta, (low, high) in (
        ("eta_policy", p.eta_policy, p.tau_sat_range),
        ("eta_rubric", p.eta_rubric, p.tau_imp_range),
    ):
        if eta > 0 and high == low:
            reason = f"the range [{low:g}, {high:g}] leaves the threshold no room to adapt"
            yield warn(f"method.phase.{name}", f"{eta:g}", reason, 0)
        elif eta > 0 and eta >= high - low:
            reason = (
                f"phases twice as long as the target move the threshold by {eta:g}, the whole range "
                f"{high - low:g}"
            )
            yield warn(f"method.phase.{name}", f"{eta:g}", reason, f"{(high - low) / 10:g}")


def _pool(config: Config, m: RaceConfig) -> Iterator[Finding]:
    """A rubric phase that can never start for want of pool entries."""
    updates = most_policy_steps(config)
    if m.entries_per_rubric_step > m.pool.capacity:
        yield warn(
            "method.entries_per_rubric_step",
            m.entries_per_rubric_step,
            f"the pool holds {m.pool.capacity} entries at most, so no rubric step ever has as many",
            m.pool.capacity,
        )
    if m.routing.mode == "off" and m.pool.fill == "rubric_failed":
        yield warn(
            "method.routing.mode",
            "off",
            "no group is found rubric-failed, so the pool stays empty and no rubric phase ever starts",
            "uniform",
            "method.pool.fill",
        )
        return
    phase = m.phase.fixed[0] if m.phase.mode == "fixed" else m.phase.policy_target
    in_run, in_phase = m.prompts_per_step * updates, m.prompts_per_step * phase
    key, least = "method.pool.min_pool", m.pool.min_pool
    if least > in_run:
        yield warn(
            key,
            least,
            f"a run of {updates} updates with {m.prompts_per_step} prompts can gather {in_run} entries "
            "at most, so no "
            "rubric phase ever starts",
            max(1, in_run // 4),
        )
    elif least > in_phase:
        yield warn(
            key,
            least,
            f"a policy phase of {phase} steps with {m.prompts_per_step} prompts adds {in_phase} "
            "entries at most even "
            "if every group fails, so the first switches are deferred",
            max(1, in_phase // 4),
        )


def _saturation(config: Config, m: RaceConfig) -> Iterator[Finding]:
    """tau_sat against what the average of Eq 13 can climb to from 0 within L* steps."""
    p = m.phase
    if p.mode != "event":
        return
    key = "method.phase.tau_sat"
    if p.tau_sat <= 0:
        reason = "the average is never below 0, so every policy phase ends after one step"
        yield warn(key, f"{p.tau_sat:g}", reason, 0.4)
        return
    top = 1 - (1 - p.alpha) ** p.policy_target
    if top < p.tau_sat:
        yield warn(
            key,
            f"{p.tau_sat:g}",
            f"starting from 0 with alpha = {p.alpha:g}, the average reaches {top:.3g} in L* = "
            f"{p.policy_target} steps "
            "even if every group is saturated, so phases are longer than their target",
            f"{math.floor(top * 500) / 1000:g}",
        )


def _phase_lengths(config: Config, m: RaceConfig) -> Iterator[Finding]:
    """Length targets that no phase can have, and controllers whose window never fills."""
    p, updates = m.phase, most_policy_steps(config)
    if p.mode != "event":
        return
    if p.rubric_target < 2 * p.window and p.eta_rubric > 0:
        yield warn(
            "method.phase.rubric_target",
            p.rubric_target,
            f"a rubric phase lasts at least 2 W = {2 * p.window} steps (Eq 14), so the mean stays "
            "above the target and "
            "tau_imp winds up to the end of its range",
            2 * p.window,
        )
    if p.max_rubric_steps is not None and p.max_rubric_steps < p.rubric_target:
        yield warn(
            "method.phase.max_rubric_steps",
            p.max_rubric_steps,
            f"it cuts phases before their target length M* = {p.rubric_target}",
            4 * p.rubric_target,
        )
    if p.policy_target > updates:
        yield warn(
            "method.phase.policy_target",
            p.policy_target,
            f"the whole run has {updates} policy updates, so no phase reaches its target length",
            max(1, updates // 3),
        )
    elif p.eta_policy > 0 and p.policy_window * p.policy_target > updates:
        yield warn(
            "method.phase.policy_window",
            p.policy_window,
            f"tau_sat adapts once {p.policy_window} policy phases have ended; at L* = "
            f"{p.policy_target} steps each that "
            f"is beyond the run's {updates} updates",
            max(1, updates // p.policy_target),
        )
    elif p.eta_rubric > 0 and p.rubric_window * p.policy_target > updates:
        yield warn(
            "method.phase.rubric_window",
            p.rubric_window,
            f"tau_imp adapts once {p.rubric_window} rubric phases have ended; with L* = {p.policy_target} policy steps "
            f"before each that is beyond the run's {updates} updates",
            max(1, updates // p.policy_target),
        )
    least = 2 * p.window + 2  # a policy step, the shortest rubric phase, a policy step
    if config.run.max_steps is not None and config.run.max_steps < least:
        yield warn(
            "run.max_steps",
            config.run.max_steps,
            f"a rubric phase lasts at least 2 W = {2 * p.window} steps (Eq 14), so the run cannot return from one",
            least,
        )


def _planned(config: Config, m: RaceConfig) -> Iterator[Finding]:
    """Fixed and random phases against the length of the run."""
    p, steps = m.phase, most_policy_steps(config)
    if p.mode == "fixed":
        yield from planned_phases(config, "method.phase.fixed", *p.fixed)
        yield from late_steps(config, planned_steps(config, *p.fixed))
    elif p.mode == "random" and p.policy_target >= steps:
        reason = (
            f"random policy phases last {p.policy_target} steps on average, the run {steps}: no rubric is likely to be "
            "updated"
        )
        if steps > 1:
            works, works_key = str(max(1, steps // 3)), "method.phase.policy_target"
        elif config.run.policy_updates > 1:
            works, works_key = "null", "run.max_steps"
        else:
            works, works_key = str(2 * p.policy_target), "run.policy_updates"
        yield warn("method.phase.policy_target", p.policy_target, reason, works, works_key)


def _late(config: Config, m: RaceConfig) -> Iterator[Finding]:
    """Where phases end by themselves or by chance, only the limit on all steps is known beforehand."""
    if m.phase.mode != "fixed" and config.run.max_steps is not None:
        yield from late_steps(config, config.run.max_steps)


def _plateau(config: Config, m: RaceConfig) -> Iterator[Finding]:
    """tau_imp below every possible Delta_W: no rubric phase ends by Eq 14."""
    p, reward = m.phase, m.rubric_reward
    # Rewards lie in [-c, c + w], m_new - m_old in [-2, 1].
    lowest = -3.0 if p.plateau_signal == "gain" else -(2 * reward.clip + reward.format_weight)
    if p.mode != "event" or p.tau_imp >= lowest:
        return
    key, value = "method.phase.tau_imp", f"{p.tau_imp:g}"
    reason = f"Delta_W is never below {lowest:g}, so no rubric phase ends by its plateau trigger"
    works = max(lowest, min(0.005, p.tau_imp_range[1]))
    if p.tau_imp_range[1] < lowest:
        yield warn(key, value, f"{reason}, nor at any value of tau_imp_range", "fixed", "method.phase.mode")
    elif p.max_rubric_steps is None and config.run.max_steps is None:
        yield error(key, value, f"{reason}, and without a limit the first one never ends", f"{works:g}")
    else:
        yield warn(key, value, reason, f"{works:g}")


def _warm_up(config: Config, m: RaceConfig) -> Iterator[Finding]:
    """The controllers are frozen while thresholds are being calibrated."""
    steps, budget = m.trqc.calibrate_steps, most_policy_steps(config)
    if steps >= budget:
        reason = f"the whole run has {budget} policy updates, so no threshold ever adapts"
        yield warn("method.trqc.calibrate_steps", steps, reason, max(0, budget // 10))


_RULES: tuple[Callable[[Config, RaceConfig], Iterator[Finding]], ...] = (
    _everything_degenerate,
    _quarantine_target,
    _trigram_floor,
    _tie_rates,
    _gains,
    _pool,
    _saturation,
    _phase_lengths,
    _planned,
    _late,
    _plateau,
    _warm_up,
)
