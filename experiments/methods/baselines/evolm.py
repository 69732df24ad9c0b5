"""EvoLM (Li et al., 2026): policy and rubric writer share weights and take turns of fixed lengths.

A rubric step compares, for one prompt, a fresh answer of the policy with an older one: a good rubric prefers the fresh
one (temporal contrast, `evolm_buffer.py`); the reward stands in `evolm_reward.py`.

Deviations from Li et al.'s code, and choices:
  * one template and one temperature (`rubric.temperature`) write rubrics in both phases; their code samples at 0.6 for
    the policy and at 1.0 in the rubric phase, with a prompt of its own that does not follow the configured one;
  * a rubric step takes at most `entries_per_rubric_step` different entries of the buffer; where no entry has the age
    asked for, the rules of `ReplayBuffer.draw` widen it, for the whole step and not for each entry;
  * a rubric step masks nothing, as RACE's: an entry whose candidates all score the same still gets the KL gradient
    (their code drops it);
  * a rubric has the valid form if it has two criteria or more, all of them with a weight above 0, and the weights sum
    to 1 within 0.15. With `rubric.format=lines` the sum is not looked at: that template asks for weights of 1 to 10;
  * with `rubric.on_parse_failure=raw_text` a text that does not parse is judged as it stands, without the valid form.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from racelab.configs import schema
from racelab.experiments.methods.baselines import evolm_record
from racelab.experiments.methods.baselines.common import (
    Place,
    Scored,
    phase_row,
    policy_step,
    role_record,
)
from racelab.experiments.methods.baselines.evolm_buffer import Draw, OldAnswer, ReplayBuffer
from racelab.experiments.methods.baselines.evolm_reward import base_rewards, final_rewards
from racelab.experiments.methods.grpo import grpo_batch
from racelab.experiments.methods.race import phase as phases
from racelab.experiments.methods.race.phase import FixedSchedule, PhaseConfig, PhaseKind, PhaseState
from racelab.experiments.methods.race.routing import Thresholds
from racelab.experiments.methods.race.rubric_reward import new_margins
from racelab.experiments.methods.records import Clock
from racelab.experiments.models.generator import Candidate
from racelab.experiments.models.rubric import json_values
from racelab.experiments.models.text import strip_thinking
from racelab.experiments.parts import Parts
from racelab.experiments.types import JudgeItem, JudgeScores, Prompt, Sample, StepRecord

MIN_CRITERIA = 2
WEIGHT_SLACK = 0.15
"""A rubric of the valid form (Li et al.)."""

_NO_THRESHOLDS = Thresholds()  # phases of fixed length read none


@dataclass(frozen=True, slots=True)
class EvolmState:
    """With weights, optimiser and random streams it is the whole checkpoint.

    Attributes:
        phase: where the alternation stands.
        buffer: older answers.
    """

    phase: PhaseState
    buffer: ReplayBuffer

    @property
    def step(self) -> int:
        """Global steps done."""
        return self.phase.step

    def state(self) -> dict[str, Any]:
        """JSON values; floats survive exactly."""
        return {"phase": self.phase.state(), "buffer": self.buffer.state()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> EvolmState:
        """Undoes `state`."""
        return cls(PhaseState.from_state(state["phase"]), ReplayBuffer.from_state(state["buffer"]))


class LiveRubrics:
    """Scores a group under one rubric of the trained model: 1 rubric and G judge calls per prompt (Table 14)."""

    def __init__(self, config: schema.BaselineCommon, parts: Parts) -> None:
        """Keeps the parts."""
        self.config, self.parts = config, parts

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]]) -> Scored:
        """Rewards [G] for each prompt's responses; NaN for a prompt whose rubric cannot be used."""
        started = time.perf_counter()
        written = [c for (c,) in self.parts.generator.rubrics(prompts, 1, self.parts.rng.sampling)]
        gen_s = time.perf_counter() - started
        scored = self.parts.judge.score(
            [JudgeItem(p, c.rubric, tuple(ys)) for p, c, ys in zip(prompts, written, responses, strict=True)]
        )
        n, g = len(prompts), self.config.group_size
        return Scored(
            rewards=scored.scores,
            rubrics=tuple(c.rubric for c in written),
            rubric_samples=tuple(c.sample for c in written),
            judged=scored,
            measured={"rubric_gen": len(written), "judge_eval": scored.calls},
            expected={"rubric_gen": n, "judge_eval": g * sum(c.rubric is not None for c in written)},
            printed={"rubric_gen": n, "judge_eval": g * n},
            gen_s=gen_s,
        )


class Evolm:
    """EvoLM over given parts; holds no state of its own."""

    def __init__(
        self, config: schema.EvolmConfig, parts: Parts, *, policy_updates: int, max_steps: int | None
    ) -> None:
        """Reads the settings once; `policy_updates` is the budget, `max_steps` a hard limit on all steps."""
        self.config, self.parts, self.policy_updates = config, parts, policy_updates
        self.max_steps = math.inf if max_steps is None else max_steps
        self.phases = PhaseConfig(min_pool=1, schedule=FixedSchedule(*config.fixed))
        self.scorer = LiveRubrics(config, parts)

    def start(self) -> EvolmState:
        """A policy phase, and no old answers."""
        return EvolmState(phases.initial_state(self.phases), ReplayBuffer(self.config.buffer.capacity))

    def load(self, state: Mapping[str, Any]) -> EvolmState:
        """The state of a checkpoint."""
        return EvolmState.from_state(state)

    def done(self, state: EvolmState) -> bool:
        """True once the policy updates are used up, with the rubric phase that a full last phase calls for.

        RACE App. D: 500 policy updates in phases of 50 end at step 1000. The step limit ends a run anywhere.
        """
        phase = state.phase
        spent = phase.policy_steps >= self.policy_updates and phase.kind is PhaseKind.POLICY
        return spent or state.step >= self.max_steps

    def step(self, state: EvolmState) -> tuple[EvolmState, StepRecord]:
        """The next step of whichever phase the run is in."""
        take = self.policy_step if state.phase.kind is PhaseKind.POLICY else self.rubric_step
        return take(state)

    def finish(self, state: EvolmState, reason: str) -> list[dict[str, object]]:
        """The row of the phase that the run stops in (`budget` or `interrupted`)."""
        end = phases.close_phase(state.phase, _NO_THRESHOLDS, reason)  # type: ignore[arg-type]
        return [phase_row(end.index, end.kind.value, end.start, end.end, end.end_reason)] if end else []

    def policy_step(self, state: EvolmState) -> tuple[EvolmState, StepRecord]:
        """One policy update; the first response of every group goes into the buffer."""
        batch, record = policy_step(self.config, self.parts, self.scorer, self._place(state))
        number = state.phase.policy_steps + 1
        buffer = state.buffer.push(
            [OldAnswer(number, g.prompt, replace(g.responses[0], logprobs=())) for g in batch.groups]
        )
        moved = phases.after_policy_step(state.phase, math.nan, len(buffer), _NO_THRESHOLDS, self.phases)
        metrics = {"evolm/buffer/size": float(len(buffer))}
        return EvolmState(moved.state, buffer), evolm_record.with_phase(record, moved.event.ended, metrics)

    def rubric_step(self, state: EvolmState) -> tuple[EvolmState, StepRecord]:
        """One update of the rubric writer on pairs of a fresh and an old answer."""
        cfg, parts, clock = self.config, self.parts, Clock()
        drawn = self._draw(state)
        prompts = [old.prompt for old in drawn.answers]
        fresh = [y for (y,) in parts.generator.responses(prompts, 1, parts.rng.sampling)]
        candidates = parts.generator.rubrics(prompts, cfg.group_size, parts.rng.sampling)
        clock.lap("gen_s")
        scored = parts.judge.score(
            [
                JudgeItem(old.prompt, c.rubric, (new, old.answer))
                for old, new, group in zip(drawn.answers, fresh, candidates, strict=True)
                for c in group
            ]
        )
        clock.lap("judge_s")
        outcome = self._outcome(drawn, fresh, candidates, scored)
        batch = grpo_batch(
            [
                (parts.generator.rubric_prefix(p), [c.sample for c in group], rewards)
                for p, group, rewards in zip(prompts, candidates, outcome.final_NG, strict=True)
            ],
            n_all_groups=len(prompts),
            normalisation=cfg.loss_normalisation,
            temperature=cfg.rubric.temperature,
            eps=cfg.advantage_eps,
        )
        stats = parts.backend.update(batch)
        clock.lap("train_s")
        place = self._place(state)
        update = evolm_record.role_update(outcome, scored, stats, cfg, place, len(state.buffer))
        record = role_record(place, update, clock.total())
        moved = phases.after_rubric_step(state.phase, {"s_rubric": math.nan}, _NO_THRESHOLDS, self.phases)
        return EvolmState(moved.state, state.buffer), evolm_record.with_phase(record, moved.event.ended, {})

    def _draw(self, state: EvolmState) -> Draw:
        buffer = self.config.buffer
        return state.buffer.draw(
            self.config.entries_per_rubric_step,
            state.phase.policy_steps,
            min_age=buffer.min_age,
            max_age=buffer.max_age,
            rng=self.parts.rng.pool,
        )

    def _outcome(
        self,
        drawn: Draw,
        fresh: Sequence[Sample],
        candidates: Sequence[Sequence[Candidate]],
        scored: JudgeScores,
    ) -> evolm_record.Outcome:
        """Margins and rewards [N, G]; the judge's two scores per candidate come fresh answer first."""
        reward = self.config.rubric_reward
        usable_NG = np.array([[c.rubric is not None for c in group] for group in candidates])
        valid_NG = np.array([[self._valid(c) for c in group] for group in candidates])
        pairs = np.array(scored.scores, dtype=np.float64).reshape(*usable_NG.shape, 2)
        margins_NG = new_margins(pairs[..., 0], pairs[..., 1])
        base_NG = base_rewards(margins_NG, reward.base)
        final_NG = final_rewards(
            base_NG,
            valid_NG,
            usable_NG,
            format_weight=reward.format_weight,
            invalid_reward=math.nan if reward.invalid_reward is None else reward.invalid_reward,
        )
        return evolm_record.Outcome(
            drawn, fresh, candidates, margins_NG, base_NG, final_NG, usable_NG, valid_NG
        )

    def _place(self, state: EvolmState) -> Place:
        """Where the run stands after the step that comes."""
        at, rubric = state.phase, state.phase.kind is PhaseKind.RUBRIC
        return Place(
            at.step + 1,
            at.policy_steps + (not rubric),
            at.rubric_steps + rubric,
            at.index,
            self.policy_updates,
        )

    def _valid(self, candidate: Candidate) -> bool:
        return candidate.valid and _FORMS[self.config.rubric.format](candidate)


def _json_form(candidate: Candidate) -> bool:
    """A JSON object whose `criteria` are two or more, each with a text and a weight above 0; weights sum to about 1.

    Looked up in the text itself: a rubric that parsed has lost the criteria that could not be used.
    """
    first = next((v for v in json_values(strip_thinking(candidate.sample.text)) if isinstance(v, dict)), {})
    rows = first.get("criteria")
    if not isinstance(rows, list) or len(rows) < MIN_CRITERIA:
        return False
    weights = [_weight(row) for row in rows]
    return min(weights) > 0.0 and round(abs(math.fsum(weights) - 1.0), 9) <= WEIGHT_SLACK


def _weight(row: object) -> float:
    """The weight of a criterion; 0 if it is none."""
    if not isinstance(row, dict) or not isinstance(row.get("criterion"), str) or not row["criterion"].strip():
        return 0.0
    weight = row.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        return 0.0
    return float(weight)


def _lines_form(candidate: Candidate) -> bool:
    return candidate.rubric is not None and len(candidate.rubric.criteria) >= MIN_CRITERIA


_FORMS: dict[str, Callable[[Candidate], bool]] = {"json": _json_form, "lines": _lines_form}
"""`rubric.format` -> whether a usable rubric has the form that was asked for."""
