"""What the baselines share: the policy update, and the record of an update of either role.

A baseline is a `Scorer` (who scores the responses, and at what price) and, for those that train a rubric role, the
update of that role. Prompts, sampling, advantages, the learner and the tables are the same for all of them and for
RACE, so that runs differ in what the papers differ in.

Choices where the baselines' publications or code differ from RACE's conventions:
  * a score that is missing is NaN and its row gets no advantage (their code: the group's mean);
  * groups with equal rewards are dropped only where `active_sampling_rounds` is above 1; then as many further prompts
    are drawn as groups are missing, until N differ, at most that many rounds in all (their code has no bound).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from racelab.configs import schema
from racelab.experiments.methods import records
from racelab.experiments.methods.grpo import grpo_batch
from racelab.experiments.methods.ledger import Calls, add, ledger
from racelab.experiments.methods.race.routing import (
    GroupSignals,
    Route,
    Thresholds,
    signals,
    strip_thinking,
)
from racelab.experiments.methods.race.settings import ROUTERS
from racelab.experiments.parts import Parts
from racelab.experiments.types import (
    FloatArray,
    JudgeScores,
    Prompt,
    RolloutGroup,
    Rubric,
    Sample,
    StepRecord,
    UpdateStats,
)

EPS_TIE = 0.025
"""As RACE's default: the tie rate of the baselines is only logged."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What a scorer made of one batch of N groups.

    Attributes:
        rewards: [G] per prompt, NaN where there is no score.
        rubrics: per prompt, for the record; None where there is none.
        rubric_samples: per prompt, the rubric as written; its tokens only if the trained model wrote it.
        judged: failures of the judge; `scores` is not read.
        measured: calls made, by kind (see `ledger.Calls`), without policy_gen and learner_samples.
        expected: the same kinds as they follow from what happened.
        printed: RACE Table 14 times the number of prompts.
        written: further samples of the trained model (RLCER's rubrics), for tokens per second.
        tables: further rows; `step` is added.
        metrics: further metrics; the mean over the rounds of a step, by their prompts, is kept.
        totals: further metrics; the sum over the rounds of a step is kept.
        gen_s: seconds of scoring in which the trained model wrote (its rubrics); the rest is the judge's.
        detail: whatever the method itself wants to find again.
        unusable: share of rubrics that could not be used; None: the share of None in `rubrics`. 0 for a scorer that
            has no use for rubrics.
    """

    rewards: tuple[FloatArray, ...]
    rubrics: tuple[Rubric | None, ...]
    rubric_samples: tuple[Sample, ...]
    judged: JudgeScores
    measured: Calls
    expected: Calls
    printed: Calls
    written: tuple[Sample, ...] = ()
    tables: Mapping[str, list[dict[str, object]]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    totals: Mapping[str, float] = field(default_factory=dict)
    gen_s: float = 0.0
    detail: Any = None
    unusable: float | None = None


class Scorer(Protocol):
    """Scores the responses of a batch."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]]) -> Scored:
        """Rewards [G] for each prompt's responses."""


def text_sample(text: str) -> Sample:
    """Text that the trained model did not write, such as an API's rubric."""
    return Sample((), (), text, True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run stands after the step at hand.

    Attributes:
        step: global step, from 1.
        policy_step: policy updates, this one included.
        rubric_step: updates of a rubric role, this one included.
        phase_index: number of the phase that the step belongs to, from 0.
        budget: policy updates of the whole run.
    """

    step: int
    policy_step: int
    rubric_step: int
    phase_index: int
    budget: int

    def clock(self, rubric: bool) -> dict[str, float]:
        """The `train/clock` metrics."""
        return {
            "train/clock/policy_step": float(self.policy_step),
            "train/clock/rubric_step": float(self.rubric_step),
            "train/clock/phase_index": float(self.phase_index),
            "train/clock/phase_kind": float(rubric),
        }

    def status(self, phase: str, reward: float, tokens_per_s: float, step_s: float) -> dict[str, object]:
        """What the terminal shows."""
        return {
            "phase": phase,
            "policy_step": self.policy_step,
            "policy_budget": self.budget,
            "reward": reward,
            "routes": {},
            "tokens_per_s": tokens_per_s,
            "step_s": step_s,
            "event": "",
        }


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """The groups of one policy update.

    Attributes:
        groups: all that were sampled, in order.
        seen: their statistics.
        routes: informative groups train; the others are dropped or have no two valid scores.
        scored: one per round of sampling.
    """

    groups: tuple[RolloutGroup, ...]
    seen: tuple[GroupSignals, ...]
    routes: tuple[Route, ...]
    scored: tuple[Scored, ...]

    def used(self, n: int) -> list[RolloutGroup]:
        """The first n groups that train."""
        return [g for g, r in zip(self.groups, self.routes, strict=True) if r is Route.INFORMATIVE][:n]


def sample_policy(
    config: schema.BaselineCommon, parts: Parts, scorer: Scorer, clock: records.Clock
) -> PolicyBatch:
    """Prompts, responses and rewards of one update, in as many rounds as active sampling asks for."""
    route = ROUTERS["off" if config.active_sampling_rounds == 1 else "sigma_zero"]
    batch = PolicyBatch((), (), (), ())
    seconds = {"gen_s": 0.0, "judge_s": 0.0}
    missing = config.prompts_per_step
    for _ in range(config.active_sampling_rounds):
        prompts = parts.stream.take(missing)
        responses = parts.generator.responses(prompts, config.group_size, parts.rng.sampling)
        seconds["gen_s"] += clock.split()
        scored = scorer.score(prompts, responses)
        seconds["gen_s"] += scored.gen_s
        seconds["judge_s"] += clock.split() - scored.gen_s
        groups = [
            RolloutGroup(p, r, s, tuple(ys), np.asarray(rewards, dtype=np.float64), _embed(parts, ys))
            for p, r, s, ys, rewards in zip(
                prompts, scored.rubrics, scored.rubric_samples, responses, scored.rewards, strict=True
            )
        ]
        seen = [signals(g.rewards, [y.text for y in g.responses], g.embeddings, EPS_TIE) for g in groups]
        routes = [route(s, Thresholds()) for s in seen]  # neither router reads a threshold
        batch = PolicyBatch(
            (*batch.groups, *groups), (*batch.seen, *seen), (*batch.routes, *routes), (*batch.scored, scored)
        )
        missing = config.prompts_per_step - len(batch.used(config.prompts_per_step))
        if not missing:
            break
    clock.laps |= seconds
    clock.lap("route_s")
    return batch


def policy_step(
    config: schema.BaselineCommon, parts: Parts, scorer: Scorer, place: Place
) -> tuple[PolicyBatch, StepRecord]:
    """One policy update: sample, score, GRPO (Eqs 3-4), and what it leaves behind."""
    clock = records.Clock()
    batch = sample_policy(config, parts, scorer, clock)
    used = batch.used(config.prompts_per_step)
    stats = parts.backend.update(
        grpo_batch(
            [(parts.generator.response_prefix(g.prompt), g.responses, g.rewards) for g in used],
            n_all_groups=len(batch.groups),
            normalisation=config.loss_normalisation,
            temperature=config.response.temperature,
            eps=config.advantage_eps,
        )
    )
    clock.lap("train_s")
    return batch, _policy_record(config, place, batch, len(used), stats, clock.total())


def _policy_record(
    config: schema.BaselineCommon,
    place: Place,
    batch: PolicyBatch,
    n_used: int,
    stats: UpdateStats,
    seconds: dict[str, float],
) -> StepRecord:
    groups, scored = batch.groups, batch.scored
    written = [y for g in groups for y in (*g.responses, g.rubric_sample)]
    written += [y for s in scored for y in s.written]
    generated = {"policy_gen": sum(len(g.responses) for g in groups), "learner_samples": stats.n_samples}
    n, g = config.prompts_per_step, config.group_size
    perf = records.perf_metrics(seconds, written)
    rewards = records.reward_metrics("train/reward", np.concatenate([g.rewards for g in groups]))
    metrics = {
        **place.clock(rubric=False),
        **rewards,
        **records.optim_metrics(stats),
        **records.route_metrics(batch.routes),
        **records.signal_metrics(groups, batch.seen),
        **records.health_metrics(_failures(scored), _unusable(scored)),
        **perf,
        **ledger(
            add(generated, *(s.measured for s in scored)),
            add(
                {"policy_gen": g * sum(_sizes(scored)), "learner_samples": g * n_used},
                *(s.expected for s in scored),
            ),
            add({"policy_gen": g * n, "learner_samples": g * n}, scored[0].printed),
        ),
        **_mean_metrics(scored),
        **_sum_totals(scored),
    }
    rows = zip(groups, batch.seen, batch.routes, strict=True)
    tables: dict[str, list[dict[str, object]]] = {
        "groups": [records.group_row(place.step, place.policy_step, place.phase_index, *row) for row in rows],
        "samples": records.policy_samples(place.step, groups),
    }
    for one in scored:
        for name, more in one.tables.items():
            tables.setdefault(name, []).extend({"step": place.step, **row} for row in more)
    status = place.status(
        "policy",
        rewards.get("train/reward/mean", math.nan),
        perf["perf/rollout/tokens_per_s"],
        seconds["step_s"],
    )
    counts = {r.value: sum(x is r for x in batch.routes) for r in Route}
    return StepRecord(place.step, records.known(metrics), tables, {**status, "routes": counts})


@dataclass(frozen=True, slots=True)
class RoleUpdate:
    """An update of a role that writes rubrics (or, in Rubric-ARM, verdicts).

    Attributes:
        rewards_NG: what GRPO saw, NaN where there is none.
        stats: of the learner.
        samples: what the role wrote.
        unusable_frac: share of it that could not be used.
        judged: failures of the judge.
        measured: calls made, learner samples included.
        expected: the same kinds as they follow from what happened.
        printed: RACE Tables 14 and 15, where they speak of the method.
        tables: rows; `step` is added.
        metrics: further metrics.
        role: who was updated; the rewards of `judge` are a series of their own.
    """

    rewards_NG: FloatArray
    stats: UpdateStats
    samples: Sequence[Sample]
    unusable_frac: float
    judged: JudgeScores
    measured: Calls
    expected: Calls
    printed: Calls
    tables: Mapping[str, list[dict[str, object]]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    role: str = "rubric"


_REWARD_SECTIONS = {"judge": "race/judge_reward"}
"""Role -> where its rewards are logged, if it writes no rubrics."""


def role_record(place: Place, update: RoleUpdate, seconds: dict[str, float]) -> StepRecord:
    """The record of such an update."""
    perf = records.perf_metrics(seconds, update.samples)
    section = _REWARD_SECTIONS.get(update.role, "race/rubric_reward")
    rewards = records.reward_metrics(section, np.ravel(update.rewards_NG))
    metrics = {
        **place.clock(rubric=True),
        **rewards,
        f"{section}/unusable_frac": update.unusable_frac,
        **records.optim_metrics(update.stats),
        **records.health_metrics(update.judged, update.unusable_frac),
        **perf,
        **ledger(update.measured, update.expected, update.printed),
        **update.metrics,
    }
    tables = {name: [{"step": place.step, **row} for row in rows] for name, rows in update.tables.items()}
    status = place.status(
        update.role,
        rewards.get(f"{section}/mean", math.nan),
        perf["perf/rollout/tokens_per_s"],
        seconds["step_s"],
    )
    return StepRecord(place.step, records.known(metrics), tables, status)


@dataclass(frozen=True, slots=True)
class PolicyOnlyState:
    """The state of a baseline that trains nothing but the policy."""

    policy_steps: int = 0

    @property
    def step(self) -> int:
        """Global steps done."""
        return self.policy_steps

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {"policy_steps": self.policy_steps}


class PolicyOnly:
    """A baseline whose scorer is fixed: prompted rubrics, RaR, RRD, a scalar reward model."""

    def __init__(
        self,
        config: schema.BaselineCommon,
        parts: Parts,
        scorer: Scorer,
        *,
        policy_updates: int,
        max_steps: int | None,
    ) -> None:
        """Keeps the parts; `policy_updates` is the budget, `max_steps` a hard limit."""
        self.config, self.parts, self.scorer = config, parts, scorer
        self.policy_updates = policy_updates
        self.budget = policy_updates if max_steps is None else min(policy_updates, max_steps)

    def start(self) -> PolicyOnlyState:
        """Nothing done yet."""
        return PolicyOnlyState()

    def load(self, state: Mapping[str, Any]) -> PolicyOnlyState:
        """The state of a checkpoint."""
        return PolicyOnlyState(int(state["policy_steps"]))

    def done(self, state: PolicyOnlyState) -> bool:
        """True once the budget is used up."""
        return state.policy_steps >= self.budget

    def step(self, state: PolicyOnlyState) -> tuple[PolicyOnlyState, StepRecord]:
        """One policy update."""
        after = replace(state, policy_steps=state.policy_steps + 1)
        place = Place(after.step, after.policy_steps, 0, 0, self.policy_updates)
        return after, policy_step(self.config, self.parts, self.scorer, place)[1]

    def finish(self, state: PolicyOnlyState, reason: str) -> list[dict[str, object]]:
        """The one phase that there is."""
        return [phase_row(0, "policy", 1, state.step, reason)] if state.step else []


def phase_row(index: int, kind: str, start: int, end: int, reason: str) -> dict[str, object]:
    """A row of `phases` for a method without thresholds; steps are global and inclusive."""
    length = end - start + 1
    return {
        "step": end,
        "index": index,
        "kind": kind,
        "start": start,
        "end": end,
        "length": length,
        "end_reason": reason,
    }


def _embed(parts: Parts, responses: Sequence[Sample]) -> FloatArray:
    return parts.encoder.embed([strip_thinking(y.text) for y in responses])


def _sizes(scored: Sequence[Scored]) -> list[int]:
    """Prompts of each round of a step; those after the first replace what is missing."""
    return [len(s.rewards) for s in scored]


def _unusable(scored: Sequence[Scored]) -> float:
    """Share of unusable rubrics over the rounds of a step, by their prompts."""
    shares = [
        sum(r is None for r in s.rubrics) / len(s.rubrics) if s.unusable is None else s.unusable
        for s in scored
    ]
    return float(np.average(shares, weights=_sizes(scored)))


def _mean_metrics(scored: Sequence[Scored]) -> dict[str, float]:
    found: dict[str, list[Scored]] = {}
    for s in scored:
        for name in s.metrics:
            found.setdefault(name, []).append(s)
    return {
        name: float(np.average([s.metrics[name] for s in rounds], weights=_sizes(rounds)))
        for name, rounds in found.items()
    }


def _sum_totals(scored: Sequence[Scored]) -> dict[str, float]:
    names = dict.fromkeys(name for s in scored for name in s.totals)
    return {name: float(sum(s.totals.get(name, 0.0) for s in scored)) for name in names}


def _failures(scored: Sequence[Scored]) -> JudgeScores:
    return JudgeScores(
        (),
        calls=sum(s.judged.calls for s in scored),
        parse_failures=sum(s.judged.parse_failures for s in scored),
        infra_failures=sum(s.judged.infra_failures for s in scored),
    )
