"""One step of RACE (Algorithm 1), policy or rubric, from top to bottom; the maths stands in the files beside this.

Deviations from the paper and choices where it is silent (each a config key of `configs/method/race.yaml`):
  * a score that is missing is NaN, never 0; a group needs two valid scores, else it is `invalid` and left out of
    q and f_sat;
  * masked groups get neither the policy nor the KL gradient; a step without informative groups takes no optimiser
    step;
  * a rubric step takes the pool entries there are, without duplicates, up to `entries_per_rubric_step`;
  * an unusable candidate rubric gets `rubric_reward.invalid_reward` (paper: NaN; sane, embedded: -c);
  * a rubric step masks nothing: an entry whose candidates all score the same still gets the KL gradient;
  * responses and the prompt's rubric are decoded in one batch (the paper does not say in which order).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from racelab.configs import schema
from racelab.experiments.methods.grpo import grpo_batch
from racelab.experiments.methods.race import phase as phases
from racelab.experiments.methods.race import records, settings
from racelab.experiments.methods.race.controllers import Calibration, trqc
from racelab.experiments.methods.race.phase import PhaseKind
from racelab.experiments.methods.race.pool import Pool, at_least, make_entry
from racelab.experiments.methods.race.routing import Route, quarantine_rate, signals, strip_thinking
from racelab.experiments.methods.race.rubric_reward import base_rewards, final_rewards, new_margins
from racelab.experiments.methods.race.state import RaceState
from racelab.experiments.methods.records import Clock
from racelab.experiments.models.generator import Candidate
from racelab.experiments.models.rubric import is_grounded
from racelab.experiments.parts import Parts
from racelab.experiments.types import (
    JudgeItem,
    JudgeScores,
    PoolEntry,
    Prompt,
    RolloutGroup,
    StepRecord,
    TokenBatch,
)


class Race:
    """RACE over given parts. Holds no state of its own: `step` maps a state to the next one and a record."""

    def __init__(
        self, config: schema.RaceConfig, parts: Parts, *, policy_updates: int, max_steps: int | None
    ) -> None:
        """Reads the settings once; `policy_updates` is the budget, `max_steps` a hard limit on all steps."""
        self.config = config
        self.parts = parts
        self.policy_updates = policy_updates
        self.max_steps = math.inf if max_steps is None else max_steps
        self.trqc = settings.trqc_config(config.trqc)
        self.phases = settings.phase_config(config)
        self.route = settings.ROUTERS[config.routing.mode]

    def start(self) -> RaceState:
        """Line 1 of Algorithm 1."""
        return RaceState(
            phase=phases.initial_state(self.phases, self.parts.rng.pool),
            thresholds=settings.thresholds(self.config),
            q_ema=0.0,
            pool=Pool(self.config.pool.capacity),
            calibration=Calibration(self.config.trqc.calibrate_steps),
        )

    def load(self, state: Mapping[str, Any]) -> RaceState:
        """The state of a checkpoint."""
        return RaceState.from_state(state)

    def done(self, state: RaceState) -> bool:
        """True once the budget of policy updates (or the step limit) is used up."""
        return state.phase.policy_steps >= self.policy_updates or state.step >= self.max_steps

    def step(self, state: RaceState) -> tuple[RaceState, StepRecord]:
        """The next step of whichever phase the run is in."""
        take = self.policy_step if state.phase.kind is PhaseKind.POLICY else self.rubric_step
        return take(state)

    def finish(self, state: RaceState, reason: str) -> list[dict[str, object]]:
        """The row of the phase that the run stops in (`budget` or `interrupted`)."""
        record = phases.close_phase(state.phase, state.thresholds, reason)  # type: ignore[arg-type]
        return [records.phase_row(record)] if record else []

    def policy_step(self, state: RaceState) -> tuple[RaceState, StepRecord]:
        """Lines 4-24 of Algorithm 1."""
        cfg, parts, clock = self.config, self.parts, Clock()
        prompts = parts.stream.take(cfg.prompts_per_step)
        rollouts = parts.generator.rollouts(prompts, cfg.group_size, parts.rng.sampling)  # Eq 1
        clock.lap("gen_s")
        scored = parts.judge.score(  # Eq 2
            [JudgeItem(p, r.rubric, r.responses) for p, r in zip(prompts, rollouts, strict=True)]
        )
        clock.lap("judge_s")
        groups = [
            RolloutGroup(p, r.rubric, r.rubric_sample, r.responses, s, self._embed(r.responses))
            for p, r, s in zip(prompts, rollouts, scored.scores, strict=True)
        ]
        seen = [
            signals(g.rewards, [y.text for y in g.responses], g.embeddings, cfg.routing.eps_tie)
            for g in groups
        ]
        routes = [self.route(s, state.thresholds) for s in seen]  # Eqs 5-9
        pool = state.pool.push(self._pool_entries(groups, routes, state))  # Eqs 10-11
        clock.lap("route_s")
        batch = self._policy_batch(groups, routes)
        stats = parts.backend.update(batch)  # Eqs 3-4
        clock.lap("train_s")

        calibrating = state.calibration.active
        controlled = trqc(  # Eqs 18-20
            state.thresholds, state.q_ema, quarantine_rate(routes), self.trqc, frozen=calibrating
        )
        f_sat = phases.saturation_fraction(seen, state.thresholds)  # Eq 12
        calibration, adapted = state.calibration.observe(seen, controlled.thresholds, self.trqc.q_star)
        moved = phases.after_policy_step(  # Eqs 13, 21-22
            state.phase, f_sat, len(pool), adapted, self.phases, parts.rng.pool, frozen=calibrating
        )
        after = RaceState(moved.state, moved.thresholds, controlled.q_ema, pool, calibration)
        seconds = clock.total()
        record = records.policy_record(
            state, after, groups, seen, routes, scored, stats, f_sat, controlled, moved.event, seconds, cfg
        )
        return after, replace(record, status={**record.status, "policy_budget": self.policy_updates})

    def rubric_step(self, state: RaceState) -> tuple[RaceState, StepRecord]:
        """Lines 26-36 of Algorithm 1."""
        cfg, parts, clock = self.config, self.parts, Clock()
        entries = state.pool.sample(cfg.entries_per_rubric_step, parts.rng.pool)
        candidates = parts.generator.rubrics(  # Eq 1
            [e.prompt for e in entries], cfg.group_size, parts.rng.sampling
        )
        clock.lap("gen_s")
        usable_NG = np.array(
            [[self._usable(c, e.prompt) for c in group] for e, group in zip(entries, candidates, strict=True)]
        )
        scored = parts.judge.score(
            [
                JudgeItem(e.prompt, c.rubric if usable else None, (e.preferred, e.rejected))
                for e, group, usable_G in zip(entries, candidates, usable_NG, strict=True)
                for c, usable in zip(group, usable_G, strict=True)
            ]
        )
        clock.lap("judge_s")
        margins_NG = self._margins(scored, len(entries))  # Eq 15
        reward = cfg.rubric_reward
        base_NG = np.array(  # Eq 16
            [
                base_rewards(
                    m, e.margin, eps_norm=reward.eps_norm, clip=reward.clip, denominator=reward.denominator
                )
                for m, e in zip(margins_NG, entries, strict=True)
            ]
        )
        invalid = math.nan if reward.invalid_reward is None else reward.invalid_reward
        final_NG = final_rewards(
            base_NG, usable_NG, invalid_reward=invalid, format_weight=reward.format_weight
        )
        batch = grpo_batch(
            [
                (parts.generator.rubric_prefix(e.prompt), [c.sample for c in group], rewards)
                for e, group, rewards in zip(entries, candidates, final_NG, strict=True)
            ],
            n_all_groups=len(entries),
            normalisation=cfg.loss_normalisation,
            temperature=cfg.rubric.temperature,
            eps=cfg.advantage_eps,
        )
        stats = parts.backend.update(batch)  # Eqs 3-4, 17
        clock.lap("train_s")
        outcome = records.RubricOutcome(entries, candidates, margins_NG, base_NG, final_NG, usable_NG)
        means = outcome.stats(reward.clip)
        moved = phases.after_rubric_step(  # Eqs 14, 21-22
            state.phase,
            {"s_rubric": means["mean"], "gain": means["gain_mean"]},
            state.thresholds,
            self.phases,
            parts.rng.pool,
            frozen=state.calibration.active,
        )
        after = replace(state, phase=moved.state, thresholds=moved.thresholds)
        record = records.rubric_record(
            state, after, outcome, means, scored, stats, moved.event, clock.total(), cfg
        )
        return after, replace(record, status={**record.status, "policy_budget": self.policy_updates})

    def _embed(self, responses: Sequence[Any]) -> Any:
        return self.parts.encoder.embed([strip_thinking(y.text) for y in responses])

    def _usable(self, candidate: Candidate, prompt: Prompt) -> bool:
        """Whether a candidate can earn a reward at all: it parsed, and speaks of its prompt (`min_grounded`)."""
        if candidate.rubric is None or not candidate.valid:
            return False
        grounded = sum(is_grounded(c.text, prompt.text) for c in candidate.rubric.criteria)
        return grounded >= self.config.rubric_reward.min_grounded

    def _pool_entries(
        self, groups: Sequence[RolloutGroup], routes: Sequence[Route], state: RaceState
    ) -> list[PoolEntry]:
        """Rubric failures, or (ablation) every group that has two valid scores."""
        wanted = settings.POOLED[self.config.pool.fill]
        entries = [
            make_entry(g, policy_step=state.phase.policy_steps + 1, pushed_step=state.step + 1)
            for g, r in zip(groups, routes, strict=True)
            if r in wanted
        ]
        return at_least(entries, self.config.pool.min_margin)

    def _policy_batch(self, groups: Sequence[RolloutGroup], routes: Sequence[Route]) -> TokenBatch:
        """Informative groups only, or (ablation) every group with two valid scores."""
        cfg = self.config
        masked = {Route.INVALID} if not cfg.routing.mask_uninformative else set(Route) - {Route.INFORMATIVE}
        used = [
            (self.parts.generator.response_prefix(g.prompt), g.responses, g.rewards)
            for g, r in zip(groups, routes, strict=True)
            if r not in masked
        ]
        return grpo_batch(
            used,
            n_all_groups=len(groups),
            normalisation=cfg.loss_normalisation,
            temperature=cfg.response.temperature,
            eps=cfg.advantage_eps,
        )

    def _margins(self, scored: JudgeScores, n_entries: int) -> Any:
        """Eq 15 as [N, G]: the judge's two scores per candidate, y⁺ first."""
        pairs = np.array(scored.scores, dtype=np.float64).reshape(n_entries, self.config.group_size, 2)
        return new_margins(pairs[..., 0], pairs[..., 1])
