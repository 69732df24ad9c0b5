"""RLCER (Sheng et al., 2026), its evolving form: answers and the rubrics written for them are updated from one batch.

Every answer gets a rubric of its own, written by the trained model from the prompt and that answer. A verifier checks
every answer of a group against every rubric of the group (G² checks). Items that go with correctness are valid; an
answer earns its outcome and its share of its own valid items, a rubric its share of valid items. A policy step is
followed by a rubric step on the rubrics of that policy step; the equations stand in `rlcer_reward.py`.

Deviations from Sheng et al.'s code, and choices:
  * correctness is the prompt's own rule (`data/checks.py`) on the answer without its thinking; a prompt without a rule
    counts as one whose answers are all alike, with outcome 0;
  * with `rubric.format=lines` items have no category and no negative points;
  * an answer too long for a rubric behind it in the window gets none, and its rubric no reward (NaN);
  * where `active_sampling_rounds` drops groups, their rubrics are not trained either;
  * the rubric step comes behind the policy step on shared weights, so its rubrics are of weights one update older; as
    everywhere here, the gradient takes them as on-policy;
  * the run ends after the rubric step that belongs to the last policy step;
  * rewards of the policy lie in [-outcome_weight, outcome_weight + cot_weight] and are logged as they are. The shares
    of groups above 0.8 and below 0.2, which suppose scores in [0, 1], are left out of the metrics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from racelab.configs import schema
from racelab.experiments.data.checks import passes
from racelab.experiments.methods.baselines import rlcer_record
from racelab.experiments.methods.baselines.common import (
    Place,
    PolicyBatch,
    Scored,
    phase_row,
    policy_step,
    role_record,
)
from racelab.experiments.methods.baselines.rlcer_record import JudgedGroup, RubricGroup
from racelab.experiments.methods.baselines.rlcer_reward import (
    Booleans,
    answer_reward,
    cot_share,
    rubric_reward,
    valid_items,
)
from racelab.experiments.methods.grpo import prefixed_batch
from racelab.experiments.methods.race.routing import Route
from racelab.experiments.methods.records import Clock
from racelab.experiments.models.answer_rubrics import AnswerRubric, AnswerRubricWriter
from racelab.experiments.models.generator import SamplingSettings
from racelab.experiments.models.rubric import RubricSettings
from racelab.experiments.models.text import strip_thinking
from racelab.experiments.parts import Parts
from racelab.experiments.ports import Verifier
from racelab.experiments.types import Check, JudgeScores, Prompt, Sample, StepRecord, Verdicts

_CALLS: dict[str, Callable[[Sequence[Check]], int]] = {
    "list": len,
    "items": lambda checks: sum(len(c.items) for c in checks),
}
"""`method.verifier` -> the judge calls that checks should cost."""


@dataclass(frozen=True, slots=True)
class RlcerState:
    """With weights, optimiser and random streams it is the whole checkpoint.

    Attributes:
        policy_steps: policy updates done.
        rubric_steps: rubric updates done.
        pending: the rubrics of the last policy step, until their own step.
    """

    policy_steps: int = 0
    rubric_steps: int = 0
    pending: tuple[RubricGroup, ...] = ()

    @property
    def step(self) -> int:
        """Global steps done."""
        return self.policy_steps + self.rubric_steps

    @property
    def rubric_next(self) -> bool:
        """True between a policy step and its rubric step."""
        return self.policy_steps > self.rubric_steps

    def state(self) -> dict[str, Any]:
        """JSON values; floats survive exactly."""
        return {
            "policy_steps": self.policy_steps,
            "rubric_steps": self.rubric_steps,
            "pending": [group.state() for group in self.pending],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RlcerState:
        """Undoes `state`."""
        pending = tuple(RubricGroup.from_state(group) for group in state["pending"])
        return cls(int(state["policy_steps"]), int(state["rubric_steps"]), pending)


class RlcerScorer:
    """Rubrics, verdicts and rewards of a batch: per prompt G rubrics, G² checks and G rule checks (Table 14)."""

    def __init__(self, config: schema.RlcerConfig, parts: Parts, verifier: Verifier) -> None:
        """Keeps the parts; the trained model writes the rubrics as `method.rubric` says."""
        self.config, self.parts, self.verifier = config, parts, verifier
        r = config.rubric
        self.writer = AnswerRubricWriter(
            parts.generator.model,
            sampling=SamplingSettings(r.max_tokens, r.temperature, r.top_p),
            parsing=RubricSettings(format=r.format, min_criteria=r.min_criteria, max_criteria=r.max_criteria),
            drop_copied_examples=r.drop_copied_examples,
        )

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]]) -> Scored:
        """Rewards [G] for each prompt's responses."""
        started = time.perf_counter()
        written = self.writer.write(prompts, responses, self.parts.rng.sampling)
        gen_s = time.perf_counter() - started
        checks = [
            Check(prompt, tuple(c.text for c in w.rubric.criteria), y)
            for prompt, ys, row in zip(prompts, responses, written, strict=True)
            for w in row
            if w.rubric is not None
            for y in ys
        ]
        verdicts = self.verifier.verify(checks)
        holds = iter(verdicts.holds)
        judged = tuple(
            self._judged(prompt, ys, row, [self._table(w, ys, holds) for w in row])
            for prompt, ys, row in zip(prompts, responses, written, strict=True)
        )
        return self._scored(judged, checks, verdicts, gen_s)

    def _table(self, written: AnswerRubric, answers: Sequence[Sample], holds: Any) -> Booleans:
        """Which items of one rubric hold for which answers [G, K]; K = 0 without a rubric."""
        if written.rubric is None:
            return np.zeros((len(answers), 0), dtype=np.bool_)
        return np.array([next(holds) for _ in answers], dtype=np.bool_)

    def _judged(
        self,
        prompt: Prompt,
        answers: Sequence[Sample],
        written: Sequence[AnswerRubric],
        tables: Sequence[Booleans],
    ) -> JudgedGroup:
        """The rewards of both roles; `tables[i]` are the verdicts [G, K_i] on the items of the i-th rubric."""
        cfg = self.config
        correct = None
        if prompt.check is not None:
            correct = np.array(
                [passes(prompt.check, strip_thinking(y.text), prompt.prompt_id) for y in answers]
            )
        valid = [valid_items(holds_GK, correct, cfg.correlation_threshold) for holds_GK in tables]
        cots = [
            math.nan
            if w.rubric is None
            else cot_share(holds_GK[i], [c.weight for c in w.rubric.criteria], valid_K)
            for i, (w, holds_GK, valid_K) in enumerate(zip(written, tables, valid, strict=True))
        ]
        outcomes = [None] * len(answers) if correct is None else [bool(z) for z in correct]
        rewards = [
            answer_reward(z, cot, outcome_weight=cfg.outcome_weight, cot_weight=cfg.cot_weight)
            for z, cot in zip(outcomes, cots, strict=True)
        ]
        earned = [
            rubric_reward(valid_K) if w.sample.tokens else math.nan
            for w, valid_K in zip(written, valid, strict=True)
        ]
        return JudgedGroup(
            prompt, tuple(written), tuple(outcomes), tuple(cots), tuple(valid), tuple(rewards), tuple(earned)
        )

    def _scored(
        self, judged: tuple[JudgedGroup, ...], checks: Sequence[Check], verdicts: Verdicts, gen_s: float
    ) -> Scored:
        n, g = len(judged), self.config.group_size
        written = [w for group in judged for w in group.written]
        return Scored(
            rewards=tuple(np.array(group.rewards) for group in judged),
            rubrics=(None,) * n,  # a group has G of them, not one
            rubric_samples=tuple(group.written[0].sample for group in judged),
            judged=JudgeScores((), verdicts.calls, verdicts.parse_failures, verdicts.infra_failures),
            measured={
                "rubric_gen": sum(bool(w.sample.tokens) for w in written),
                "judge_eval": verdicts.calls,
            },
            expected={
                "rubric_gen": sum(self.writer.fits(w.prefix) for w in written),
                "judge_eval": _CALLS[self.config.verifier](checks),
            },
            printed={"rubric_gen": n * g, "judge_eval": n * g * g},
            written=tuple(w.sample for group in judged for w in group.written[1:]),
            metrics=rlcer_record.policy_metrics(judged),
            unusable=sum(w.rubric is None for w in written) / len(written),
            gen_s=gen_s,
            detail=judged,
        )


class Rlcer:
    """RLCER over given parts; holds no state of its own."""

    def __init__(
        self, config: schema.RlcerConfig, parts: Parts, *, policy_updates: int, max_steps: int | None
    ) -> None:
        """Reads the settings once; `policy_updates` is the budget, `max_steps` a hard limit on all steps.

        Raises:
            ValueError: the parts have no verifier.
        """
        if parts.verifier is None:
            raise ValueError("RLCER needs parts.verifier")
        self.config, self.parts, self.policy_updates = config, parts, policy_updates
        self.max_steps = math.inf if max_steps is None else max_steps
        self.scorer = RlcerScorer(config, parts, parts.verifier)

    def start(self) -> RlcerState:
        """Nothing done yet."""
        return RlcerState()

    def load(self, state: Mapping[str, Any]) -> RlcerState:
        """The state of a checkpoint."""
        return RlcerState.from_state(state)

    def done(self, state: RlcerState) -> bool:
        """True once the policy updates and their rubric steps are done, or at the step limit."""
        return state.rubric_steps >= self.policy_updates or state.step >= self.max_steps

    def step(self, state: RlcerState) -> tuple[RlcerState, StepRecord]:
        """A policy step, or the rubric step that belongs to the last one."""
        return (self.rubric_step if state.rubric_next else self.policy_step)(state)

    def finish(self, state: RlcerState, reason: str) -> list[dict[str, object]]:
        """One phase in which both roles learn."""
        return [phase_row(0, "joint", 1, state.step, reason)] if state.step else []

    def policy_step(self, state: RlcerState) -> tuple[RlcerState, StepRecord]:
        """One policy update; its rubrics wait for their own step."""
        after = replace(state, policy_steps=state.policy_steps + 1)
        batch, record = policy_step(self.config, self.parts, self.scorer, self._place(after))
        judged = [group for scored in batch.scored for group in scored.detail]
        return replace(after, pending=self._pending(batch, judged)), rlcer_record.mended(record, judged)

    def rubric_step(self, state: RlcerState) -> tuple[RlcerState, StepRecord]:
        """One rubric update on what the last policy step has left; no model is asked."""
        cfg, clock = self.config, Clock()
        clock.lap("gen_s")
        batch = prefixed_batch(
            [(group.prefixes, group.samples, np.array(group.rewards)) for group in state.pending],
            n_all_groups=len(state.pending),
            normalisation=cfg.loss_normalisation,
            temperature=cfg.rubric.temperature,
            eps=cfg.advantage_eps,
        )
        stats = self.parts.backend.update(batch)
        clock.lap("train_s")
        after = replace(state, rubric_steps=state.rubric_steps + 1, pending=())
        place = self._place(after)
        update = rlcer_record.role_update(state.pending, stats, cfg, place)
        return after, role_record(place, update, clock.total())

    def _pending(self, batch: PolicyBatch, judged: Sequence[JudgedGroup]) -> tuple[RubricGroup, ...]:
        """The rubrics of the groups that the policy learnt from."""
        used = [g for g, r in zip(judged, batch.routes, strict=True) if r is Route.INFORMATIVE]
        return tuple(RubricGroup.of(g) for g in used[: self.config.prompts_per_step])

    def _place(self, after: RlcerState) -> Place:
        return Place(after.step, after.policy_steps, after.rubric_steps, 0, self.policy_updates)
