"""Controller replay: routing, TRQC, phase switching and the pool's size, decided anew from what a run logged.

The functions are those of training (Eqs 5-9, 12-14, 18-22 of the RACE paper), so with the run's own config every
logged decision and threshold comes out again. With other settings it is a counterfactual, and a bounded one:
responses, rewards and the diversities d_tri and d_emb are those of the log, whatever other updates would have made
of them. As long as the phases agree, step k is fed with step k of the log. From the first step that falls into
another phase on, the next policy or rubric step of the log that has not been used is taken, whichever the replayed
phase asks for; the replay ends when there is none.

`phase.mode=random` and the pool share one random stream; the draws are made as in training, so lengths agree too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from racelab.analysis.replay_log import RUBRIC_GAIN, RUBRIC_REWARD, Log, LoggedStep
from racelab.configs import schema
from racelab.experiments.methods.race import phase as phases
from racelab.experiments.methods.race import settings
from racelab.experiments.methods.race.controllers import Calibration, trqc
from racelab.experiments.methods.race.phase import PhaseKind, StepEvent
from racelab.experiments.methods.race.pool import Pool, at_least, margin
from racelab.experiments.methods.race.records import phase_row
from racelab.experiments.methods.race.routing import GroupSignals, Route, Thresholds, quarantine_rate
from racelab.experiments.methods.race.state import RaceState
from racelab.experiments.rng import numpy_generator
from racelab.experiments.types import PoolEntry, Prompt, Sample

End = Literal["budget", "log", "policy", "rubric"]
"""Why a replay ends: the run's budget, the whole log is used, or no step of one kind is left in it."""

OPEN = "open"
"""End reason of the phase that a replay stops in, where the run itself did not end there."""

_NOTHING = Sample((), (), "", True)
_ENTRY = PoolEntry("", Prompt("", ""), _NOTHING, _NOTHING, 0.0, 0)
"""What the pool holds here: of an entry only the margin decides anything."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a step decided.

    Attributes:
        step: number of the step in the replay.
        fed: the step of the log whose groups or rubric reward it saw.
        logged_kind: phase of the log's step of the same number.
        counterfactual: the phases of log and replay have parted, here or before.
        before: thresholds that the step worked with.
        after: thresholds of the next step.
        routes: of its groups; empty in a rubric step.
        q_ema: q_hat after the step (Eq 19).
        f_ema: f_hat after the step (Eq 13).
        f_sat: Eq 12; NaN in a rubric step.
        held: TRQC was held at 0 or 1.
        pool: entries after the step.
        event: what it meant for the phases.
    """

    step: int
    fed: LoggedStep
    logged_kind: PhaseKind
    counterfactual: bool
    before: Thresholds
    after: Thresholds
    routes: Sequence[Route]
    q_ema: float
    f_ema: float
    f_sat: float
    held: bool
    pool: int
    event: StepEvent

    @property
    def kind(self) -> PhaseKind:
        """Phase of the step in the replay; also that of the logged step it was fed with."""
        return self.fed.kind


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay.

    Attributes:
        decisions: one per step.
        signals: of the log's groups, as they were routed [M].
        phases: rows as in table `phases`; the last one may be `open`.
        thresholds: at the end.
        end: why it ended.
        unused: steps of the log that were not used, by kind.
    """

    decisions: Sequence[Decision]
    signals: Sequence[GroupSignals]
    phases: Sequence[Mapping[str, Any]]
    thresholds: Thresholds
    end: End
    unused: Mapping[str, int]

    @property
    def parted(self) -> int | None:
        """First step that falls into another phase than in the log; None if there is none."""
        return next((d.step for d in self.decisions if d.counterfactual), None)


def replay(log: Log, config: schema.RaceConfig, run: schema.RunConfig, eps_tie: float) -> Replayed:
    """Runs the controllers over a log.

    Args:
        log: of the run.
        config: settings to decide by.
        run: seed and budget of the run.
        eps_tie: of Eq 5 as the run used it; where `config` has another one, tie rates are taken anew.
    """
    other = config.routing.eps_tie != eps_tie
    machine = _Machine(config, run, log, log.with_eps_tie(config.routing.eps_tie) if other else log.signals)
    queues: dict[PhaseKind, deque[LoggedStep]] = {
        kind: deque(at for at in log.steps if at.kind is kind) for kind in PhaseKind
    }
    state, decisions, parted = machine.start(), [], False
    while not machine.done(state) and queues[state.phase.kind]:
        fed = queues[state.phase.kind].popleft()
        logged_kind = log.steps[state.step].kind  # there is one: every step uses up one step of the log
        parted = parted or logged_kind is not fed.kind
        take = machine.policy_step if fed.kind is PhaseKind.POLICY else machine.rubric_step
        state, decision = take(state, fed)
        decisions.append(replace(decision, logged_kind=logged_kind, counterfactual=parted))
    end: End = "log" if not any(queues.values()) else state.phase.kind.value
    end = "budget" if machine.done(state) else end
    return Replayed(
        decisions,
        machine.signals,
        [phase_row(d.event.ended) for d in decisions if d.event.ended] + _closing(state, log, end),
        state.thresholds,
        end,
        {kind.value: len(left) for kind, left in queues.items()},
    )


def _closing(state: RaceState, log: Log, end: End) -> list[dict[str, Any]]:
    """The row of the phase that the replay stops in, if it has a step yet."""
    record = phases.close_phase(state.phase, state.thresholds, "budget" if end == "budget" else "interrupted")
    if record is None:
        return []
    # Whether a run was interrupted is no decision: it is so where the log says it of the same step.
    interrupted = any(p["end_reason"] == "interrupted" and p["end"] == record.end for p in log.phases)
    return [phase_row(record) | ({} if end == "budget" or interrupted else {"end_reason": OPEN})]


class _Machine:
    """The steps of `Race` without models: the same calls in the same order."""

    def __init__(
        self, config: schema.RaceConfig, run: schema.RunConfig, log: Log, signals: Sequence[GroupSignals]
    ) -> None:
        self.config, self.log, self.signals = config, log, signals
        self.policy_updates = run.policy_updates
        self.max_steps = math.inf if run.max_steps is None else run.max_steps
        self.rng = numpy_generator(run.seed, "pool")
        self.trqc = settings.trqc_config(config.trqc)
        self.phases = settings.phase_config(config)
        self.route = settings.ROUTERS[config.routing.mode]

    def start(self) -> RaceState:
        """As `Race.start`."""
        return RaceState(
            phase=phases.initial_state(self.phases, self.rng),
            thresholds=settings.thresholds(self.config),
            q_ema=0.0,
            pool=Pool(self.config.pool.capacity),
            calibration=Calibration(self.config.trqc.calibrate_steps),
        )

    def done(self, state: RaceState) -> bool:
        """As `Race.done`."""
        return state.phase.policy_steps >= self.policy_updates or state.step >= self.max_steps

    def policy_step(self, state: RaceState, fed: LoggedStep) -> tuple[RaceState, Decision]:
        """As `Race.policy_step`, from the scored groups on."""
        seen = self.signals[fed.rows.start : fed.rows.stop]
        routes = [self.route(s, state.thresholds) for s in seen]  # Eqs 5-9
        pool = state.pool.push(self._entries(fed, routes))  # Eqs 10-11
        calibrating = state.calibration.active
        controlled = trqc(  # Eqs 18-20
            state.thresholds, state.q_ema, quarantine_rate(routes), self.trqc, frozen=calibrating
        )
        f_sat = phases.saturation_fraction(seen, state.thresholds)  # Eq 12
        calibration, adapted = state.calibration.observe(seen, controlled.thresholds, self.trqc.q_star)
        moved = phases.after_policy_step(  # Eqs 13, 21-22
            state.phase, f_sat, len(pool), adapted, self.phases, self.rng, frozen=calibrating
        )
        after = RaceState(moved.state, moved.thresholds, controlled.q_ema, pool, calibration)
        decision = self._decision(state, after, fed, moved.event)
        return after, replace(decision, routes=routes, f_sat=f_sat, held=controlled.saturated)

    def rubric_step(self, state: RaceState, fed: LoggedStep) -> tuple[RaceState, Decision]:
        """As `Race.rubric_step`; what the rubrics earned is read from the log."""
        state.pool.sample(self.config.entries_per_rubric_step, self.rng)  # for the random stream alone
        moved = phases.after_rubric_step(  # Eqs 14, 21-22
            state.phase,
            {
                "s_rubric": fed.metrics.get(RUBRIC_REWARD, math.nan),
                "gain": fed.metrics.get(RUBRIC_GAIN, math.nan),
            },
            state.thresholds,
            self.phases,
            self.rng,
            frozen=state.calibration.active,
        )
        after = replace(state, phase=moved.state, thresholds=moved.thresholds)
        return after, self._decision(state, after, fed, moved.event)

    def _entries(self, fed: LoggedStep, routes: Sequence[Route]) -> list[PoolEntry]:
        wanted, least = settings.POOLED[self.config.pool.fill], self.config.pool.min_margin
        rows = [row for row, route in zip(fed.rows, routes, strict=True) if route in wanted]
        if least == 0.0:  # every margin will do
            return [_ENTRY] * len(rows)
        margins = [margin(self.log.rewards_MG[row]) for row in rows]
        return at_least([replace(_ENTRY, margin=m) for m in margins], least)

    def _decision(self, before: RaceState, after: RaceState, fed: LoggedStep, event: StepEvent) -> Decision:
        return Decision(
            step=after.step,
            fed=fed,
            logged_kind=fed.kind,
            counterfactual=False,
            before=before.thresholds,
            after=after.thresholds,
            routes=(),
            q_ema=after.q_ema,
            f_ema=after.phase.f_ema,
            f_sat=math.nan,
            held=False,
            pool=len(after.pool),
            event=event,
        )
