"""Rubric-ARM (Xu et al., 2026): rubric generator and pairwise judge in turns on preference pairs, then the policy.

Stage 1 has `cycles` x (`generator_steps` updates of the generator, then `judge_steps` of the judge), each on
`pairs_per_step` pairs. Generator: G rubrics from the prompt alone; the judge, greedy, sees the preferred answer as A;
reward 1[it names A] + format_weight 1[the rubric has an item]. Judge: one rubric of the present generator a pair, the
preferred answer as A or B by lot, G verdicts; reward 1 for naming it. Stage 2 trains the policy: one rubric a prompt by
the frozen generator, G scores by the frozen judge that all methods share (RACE Table 14 and §6.1).

Policy, generator and judge are three sets of weights over one backend (`ports.RoleBackend`); all start at the policy's
weights. Between steps the policy's are in.

Calls: a generator update samples P G rubrics (rubric_gen) and asks for one verdict of each usable one (judge_eval); a
judge update samples P rubrics (rubric_gen) and G verdicts behind each usable one, which are its learner samples and are
counted as judge_eval too, for they judge. RACE prints nothing about either; of the policy update it prints
1 rubric and G scores a prompt.

The rewards of a judge update are logged as `race/judge_reward/*`, the generator's as `race/rubric_reward/*`.

Deviations from the published code and choices where RACE is silent:
  * their published code trains no judge; here both roles are trained, as RACE describes the method;
  * their policy reward compares with the pair's preferred answer in both orders (2 G verdicts a prompt); RACE has G
    scores, and the trained judge serves the generator only;
  * rubrics are written and read as RACE's, at the first try (theirs: tagged numbered items, three tries);
  * a rubric that cannot be used gets 0 and costs no verdict; a comparison beyond the window is NaN;
  * always naming A earns nothing in the mean, because the judge learns with sides drawn by lot;
  * equal rewards are dropped in policy updates only (`active_sampling_rounds`), as in RACE's rubric updates;
  * `cycles` and the steps of a cycle are ours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from racelab.configs import schema
from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.methods import records
from racelab.experiments.methods.baselines.common import (
    Place,
    Scored,
    phase_row,
    policy_step,
    role_record,
)
from racelab.experiments.methods.baselines.rubric_arm_reward import PairOrder
from racelab.experiments.methods.baselines.rubric_arm_roles import RoleTrainer
from racelab.experiments.models.generator import Generator
from racelab.experiments.parts import Parts
from racelab.experiments.ports import RoleBackend
from racelab.experiments.types import JudgeItem, Pair, Prompt, Sample, StepRecord


@dataclass(frozen=True, slots=True)
class RubricArmState:
    """Updates done, and the place in the pairs."""

    rubric_steps: int = 0
    policy_steps: int = 0
    order: PairOrder = field(default_factory=PairOrder)

    @property
    def step(self) -> int:
        """Global steps done."""
        return self.rubric_steps + self.policy_steps

    def state(self) -> dict[str, Any]:
        """JSON values."""
        order = {"seed": self.order.seed, "used": self.order.used}
        return {"rubric_steps": self.rubric_steps, "policy_steps": self.policy_steps, "order": order}


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of updates of one role; `start` is its first global step, `length` None has no end."""

    index: int
    kind: str
    start: int
    length: int | None


class FrozenGenerator:
    """Scores of the shared frozen judge under one rubric a prompt, by the generator as it is; a `common.Scorer`."""

    def __init__(self, parts: Parts, roles: RoleBackend) -> None:
        """Keeps the parts."""
        self._parts, self._roles = parts, roles

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]]) -> Scored:
        """1 rubric and G scores a prompt (Table 14); no score, and no call, where the rubric cannot be used."""
        started = time.perf_counter()
        self._roles.switch("generator")
        written = [c for (c,) in self._parts.generator.rubrics(prompts, 1, self._parts.rng.sampling)]
        self._roles.switch("policy")
        gen_s = time.perf_counter() - started
        judged = self._parts.judge.score(
            [JudgeItem(p, c.rubric, tuple(ys)) for p, c, ys in zip(prompts, written, responses, strict=True)]
        )
        usable = sum(len(ys) for c, ys in zip(written, responses, strict=True) if c.rubric is not None)
        return Scored(
            rewards=judged.scores,
            rubrics=tuple(c.rubric for c in written),
            rubric_samples=tuple(c.sample for c in written),
            judged=judged,
            measured={"rubric_gen": len(written), "judge_eval": judged.calls},
            expected={"rubric_gen": len(prompts), "judge_eval": usable},
            printed={"rubric_gen": len(prompts), "judge_eval": sum(map(len, responses))},
            gen_s=gen_s,
        )


class RubricArm:
    """Implements `registry.Method`."""

    def __init__(
        self, config: schema.RubricArmConfig, parts: Parts, *, policy_updates: int, max_steps: int | None
    ) -> None:
        """Keeps the parts; `policy_updates` is the budget, `max_steps` a hard limit on all steps.

        Raises:
            ConfigError: fewer pairs than a step takes, or a backend with one set of weights.
        """
        if not isinstance(parts.backend, RoleBackend):
            raise ConfigError(
                f"method=rubric-arm trains {', '.join(config.roles)} apart; this backend cannot: set backend=local"
            )
        if len(parts.pairs) < config.pairs_per_step:
            raise ConfigError(
                f"method.pairs_per_step={config.pairs_per_step}, but there are {len(parts.pairs)} pairs; lower it or "
                "give more in method.pairs"
            )
        self.config, self.parts, self.roles = config, parts, parts.backend
        self.policy_updates = policy_updates
        self.max_steps = math.inf if max_steps is None else max_steps
        trainer = RoleTrainer(config, parts, self.roles)
        self.updates = {"generator": trainer.generator, "judge": trainer.judge}
        self.scorer = FrozenGenerator(parts, self.roles)

    def start(self) -> RubricArmState:
        """Nothing done yet."""
        return RubricArmState()

    def load(self, state: Mapping[str, Any]) -> RubricArmState:
        """The state of a checkpoint."""
        order = PairOrder(state["order"]["seed"], int(state["order"]["used"]))
        return RubricArmState(int(state["rubric_steps"]), int(state["policy_steps"]), order)

    def done(self, state: RubricArmState) -> bool:
        """True once the budget of policy updates (or the step limit) is used up."""
        return state.policy_steps >= self.policy_updates or state.step >= self.max_steps

    def phase(self, rubric_steps: int) -> Phase:
        """The phase of the next update, after so many of generator and judge."""
        first, second = self.config.generator_steps, self.config.judge_steps
        cycle, within = divmod(rubric_steps, first + second)
        start = cycle * (first + second) + 1
        if cycle >= self.config.cycles:
            return Phase(2 * self.config.cycles, "policy", start, None)
        if within < first:
            return Phase(2 * cycle, "generator", start, first)
        return Phase(2 * cycle + 1, "judge", start + first, second)

    def step(self, state: RubricArmState) -> tuple[RubricArmState, StepRecord]:
        """The next update of whichever role is due."""
        phase = self.phase(state.rubric_steps)
        if phase.kind == "policy":
            after = replace(state, policy_steps=state.policy_steps + 1)
            return after, policy_step(self.config, self.parts, self.scorer, self._place(after, phase))[1]
        indices, order = state.order.take(
            self.config.pairs_per_step, len(self.parts.pairs), self.parts.rng.pool
        )
        after = replace(state, rubric_steps=state.rubric_steps + 1, order=order)
        clock = records.Clock()
        update = self.updates[phase.kind]([self.parts.pairs[i] for i in indices], after.step, clock)
        self.roles.switch("policy")
        record = role_record(self._place(after, phase), update, clock.total())
        return after, _closing(record, phase)

    def finish(self, state: RubricArmState, reason: str) -> list[dict[str, object]]:
        """The row of the phase that the run stops in."""
        phase = self.phase(state.rubric_steps)
        if state.step < phase.start:
            return []
        return [phase_row(phase.index, phase.kind, phase.start, state.step, reason)]

    def _place(self, after: RubricArmState, phase: Phase) -> Place:
        return Place(after.step, after.policy_steps, after.rubric_steps, phase.index, self.policy_updates)


def fitting_pairs(pairs: Sequence[Pair], generator: Generator) -> tuple[tuple[Pair, ...], int]:
    """The pairs whose prompt leaves room for a rubric in the model's window, and how many were dropped.

    Raises:
        DataError: none is left.
        ConfigError: `method.rubric.max_tokens` leaves no room for any prompt.
    """
    kept = tuple(p for p in pairs if _fits(p.prompt, generator))
    if not kept:
        raise DataError(
            f"none of the {len(pairs)} prompts of method.pairs leaves room for a rubric in the model's window of "
            f"{generator.model.window} tokens; shorten them or lower method.rubric.max_tokens"
        )
    return kept, len(pairs) - len(kept)


def _fits(prompt: Prompt, generator: Generator) -> bool:
    try:
        generator.rubric_prefix(prompt)
    except DataError:
        return False
    return True


def _closing(record: StepRecord, phase: Phase) -> StepRecord:
    """The record, with the row of the phase if this was its last step."""
    if phase.length is None or record.step < phase.start + phase.length - 1:
        return record
    row = phase_row(phase.index, phase.kind, phase.start, record.step, "fixed")
    event = f"{phase.kind} phase of {phase.length} steps ended by fixed"
    return replace(
        record, tables={**record.tables, "phases": [row]}, status={**record.status, "event": event}
    )
