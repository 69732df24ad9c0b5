"""From the checked config to the frozen settings of the maths: the one place that knows both names."""

from __future__ import annotations

from collections.abc import Callable

from racelab.configs import schema
from racelab.experiments.methods.race.controllers import PhaseLengthConfig, TrqcConfig
from racelab.experiments.methods.race.phase import (
    EventSchedule,
    FixedSchedule,
    PhaseConfig,
    RandomSchedule,
    Schedule,
)
from racelab.experiments.methods.race.routing import GroupSignals, Route, Thresholds, route

Router = Callable[[GroupSignals, Thresholds], Route]


def thresholds(config: schema.RaceConfig) -> Thresholds:
    """The initial thresholds (Table 7)."""
    r, p = config.routing, config.phase
    return Thresholds(
        sigma_rt=r.sigma_rt,
        tau_tie=r.tau_tie,
        d_tri=r.d_tri,
        d_emb=r.d_emb,
        tau_sat=p.tau_sat,
        tau_imp=p.tau_imp,
        sigma_sw=p.sigma_sw,
        mu_sat=p.mu_sat,
    )


def trqc_config(config: schema.TrqcConfig) -> TrqcConfig:
    """Settings of Eqs 19-20."""
    return TrqcConfig(
        q_star=config.q_target,
        alpha_q=config.alpha_q,
        eps_q=config.eps_q,
        eta_sigma=config.eta_sigma,
        eta_tau=config.eta_tau,
    )


def _schedule(config: schema.PhaseConfig) -> Schedule:
    schedules: dict[str, Schedule] = {
        "event": EventSchedule(),
        "fixed": FixedSchedule(*config.fixed),
        "random": RandomSchedule(config.policy_target, config.rubric_target),
    }
    return schedules[config.mode]


def phase_config(config: schema.RaceConfig) -> PhaseConfig:
    """Settings of Eqs 13-14 and 21-22."""
    p = config.phase
    return PhaseConfig(
        alpha=p.alpha,
        window=p.window,
        min_pool=config.pool.min_pool,
        max_rubric_steps=p.max_rubric_steps,
        plateau_signal=p.plateau_signal,
        schedule=_schedule(p),
        lengths=PhaseLengthConfig(
            policy_target=p.policy_target,
            rubric_target=p.rubric_target,
            policy_window=p.policy_window,
            rubric_window=p.rubric_window,
            eta_policy=p.eta_policy,
            eta_rubric=p.eta_rubric,
            policy_range=p.tau_sat_range,
            rubric_range=p.tau_imp_range,
        ),
    )


def _zero_spread(group: GroupSignals, _: Thresholds) -> Route:
    """The ablation `filter-only`: an advantage-collapse filter alone (§6.3), blind to diversity."""
    if not group.usable:
        return Route.INVALID
    return Route.RUBRIC_FAILED if group.std == 0.0 else Route.INFORMATIVE


def _no_routing(group: GroupSignals, _: Thresholds) -> Route:
    """Plain GRPO."""
    return Route.INFORMATIVE if group.usable else Route.INVALID


ROUTERS: dict[str, Router] = {"full": route, "sigma_zero": _zero_spread, "off": _no_routing}

POOLED: dict[str, frozenset[Route]] = {
    "rubric_failed": frozenset({Route.RUBRIC_FAILED}),
    "uniform": frozenset(Route) - {Route.INVALID},
}
"""`pool.fill` -> the routes whose groups go into the pool."""
