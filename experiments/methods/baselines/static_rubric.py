"""Baselines whose rubric is written once per prompt by a model that is not trained (RACE §6.1).

prompted-api (GPT-4.1), prompted-policy (the policy's own starting point) and, with its own template, RaR (`rar.py`).

The request depends on the prompt alone, never on the answers or the step, and the rubric is kept for the rest of the
run. It is part of the state, so a resumed run scores under the same rubrics without asking again. A prompt for which no
usable rubric came has NaN rewards, and is asked again, with another draw, the next time it comes.

Choices:
  * prompted-api asks with the JSON template of the rubric role and reads JSON, whatever `method.rubric.format` the role
    of a small policy has; `method.rubric`'s limits hold, its sampling does not (see `api`);
  * prompted-policy draws a rubric from a generator of the prompt's own, alone in its batch, so that it does not depend
    on when or with whom the prompt comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from racelab.configs import schema
from racelab.experiments.methods.baselines.common import Place, Scored, phase_row, policy_step, text_sample
from racelab.experiments.methods.baselines.static_sources import (
    ChatSource,
    RoleSource,
    Source,
    Written,
    api_costs,
    open_proposer,
)
from racelab.experiments.methods.ledger import Calls
from racelab.experiments.models.prompts.templates import RUBRIC_JSON
from racelab.experiments.models.rubric import RubricSettings, parse_rubric
from racelab.experiments.parts import Parts
from racelab.experiments.ports import Judge
from racelab.experiments.types import FloatArray, JudgeItem, JudgeScores, Prompt, Rubric, Sample, StepRecord


class Aggregation(Protocol):
    """How answers are scored under a rubric."""

    def rewards(
        self,
        prompts: Sequence[Prompt],
        rubrics: Sequence[Rubric | None],
        responses: Sequence[Sequence[Sample]],
    ) -> tuple[tuple[FloatArray, ...], JudgeScores]:
        """[G] per prompt, NaN where there is no rubric; and the judge's counts."""

    def per_answer(self, rubric: Rubric | None) -> int:
        """Judge calls for one answer."""

    def printed_per_answer(self, rubric: Rubric | None) -> int:
        """The same by RACE Table 14, or by the baseline's publication where that has none."""


class WholeRubric:
    """The whole rubric and one score per answer (implicit aggregation)."""

    def __init__(self, judge: Judge) -> None:
        """`judge` is frozen."""
        self._judge = judge

    def rewards(
        self,
        prompts: Sequence[Prompt],
        rubrics: Sequence[Rubric | None],
        responses: Sequence[Sequence[Sample]],
    ) -> tuple[tuple[FloatArray, ...], JudgeScores]:
        """See `Aggregation`."""
        rows = zip(prompts, rubrics, responses, strict=True)
        scored = self._judge.score([JudgeItem(p, r, tuple(ys)) for p, r, ys in rows])
        return scored.scores, scored

    def per_answer(self, rubric: Rubric | None) -> int:
        """One, none without a rubric."""
        return int(rubric is not None)

    def printed_per_answer(self, rubric: Rubric | None) -> int:
        """Table 14: G answer scores."""
        return 1


@dataclass(frozen=True, slots=True)
class StaticState:
    """The state of a run with static rubrics.

    Attributes:
        policy_steps: updates done.
        rubrics: prompt id -> the text that its rubric is read from.
        drawn: prompt id -> replies so far, of prompts that have no rubric yet.
    """

    policy_steps: int = 0
    rubrics: Mapping[str, str] = field(default_factory=dict)
    drawn: Mapping[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Global steps done."""
        return self.policy_steps

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "policy_steps": self.policy_steps,
            "rubrics": dict(self.rubrics),
            "drawn": dict(self.drawn),
        }


class StaticScorer:
    """Scores one step; holds what the prompts of the step add to the rubrics known before."""

    def __init__(self, source: Source, aggregation: Aggregation, state: StaticState) -> None:
        """`state` is not changed."""
        self._source, self._aggregation = source, aggregation
        self.rubrics, self.drawn = dict(state.rubrics), dict(state.drawn)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]]) -> Scored:
        """Rewards under the prompts' static rubrics; asks for those that are not there yet."""
        asked, before = self._source.spent()
        new = {p.prompt_id: p for p in prompts if p.prompt_id not in self.rubrics}
        written = self._write(list(new.values()))
        asked_now, now = self._source.spent()
        used = now - before
        texts = [self.rubrics.get(p.prompt_id) for p in prompts]
        rubrics = [
            None if t is None else self._source.read(t, p) for t, p in zip(texts, prompts, strict=True)
        ]
        rewards, judged = self._aggregation.rewards(prompts, rubrics, responses)
        sizes = [len(ys) for ys in responses]
        rows = list(zip(rubrics, sizes, strict=True))
        return Scored(
            rewards=rewards,
            rubrics=tuple(rubrics),
            rubric_samples=tuple(text_sample(t or "") for t in texts),
            judged=judged,
            measured=self._calls(asked_now - asked, judged.calls, used.made + used.cached),
            expected=self._calls(
                sum(w.tries for w in written),
                sum(g * self._aggregation.per_answer(r) for r, g in rows),
                sum(w.tries for w in written),
            ),
            printed=self._calls(
                len(prompts) * self._source.per_prompt,
                sum(g * self._aggregation.printed_per_answer(r) for r, g in rows),
                len(prompts) * self._source.per_prompt,
            ),
            tables={"static_rubrics": [self._row(i, w) for i, w in zip(new, written, strict=True)]},
            metrics={"train/static_rubric/asked_frac": len(new) / len(prompts)},
            totals=api_costs(used) if self._source.external else {},
        )

    def _write(self, prompts: Sequence[Prompt]) -> list[Written]:
        written = self._source.write(prompts, [self.drawn.get(p.prompt_id, 0) for p in prompts])
        for prompt, one in zip(prompts, written, strict=True):
            drawn = self.drawn.pop(prompt.prompt_id, 0) + one.tries
            if one.rubric is not None and one.text is not None:
                self.rubrics[prompt.prompt_id] = one.text
            else:
                self.drawn[prompt.prompt_id] = drawn
        return written

    def _calls(self, rubrics: int, judge: int, external: int) -> Calls:
        calls = {"rubric_gen": rubrics, "judge_eval": judge}
        return {**calls, "external_calls": external} if self._source.external else calls

    def _row(self, prompt_id: str, written: Written) -> dict[str, object]:
        """A failed proposal has no criteria, and the last reply for its text."""
        return {
            "prompt_id": prompt_id,
            "text": written.text,
            "n_criteria": len(written.rubric.criteria) if written.rubric else 0,
            "source": self._source.name,
            "tries": written.tries,
        }


class StaticRubrics:
    """A baseline that trains the policy under static rubrics."""

    def __init__(
        self,
        config: schema.StaticRubricCommon,
        parts: Parts,
        source: Source,
        aggregation: Aggregation,
        *,
        policy_updates: int,
        max_steps: int | None,
    ) -> None:
        """Keeps the parts; `policy_updates` is the budget, `max_steps` a hard limit."""
        self.config, self.parts = config, parts
        self.source, self.aggregation = source, aggregation
        self.policy_updates = policy_updates
        self.budget = policy_updates if max_steps is None else min(policy_updates, max_steps)

    def start(self) -> StaticState:
        """No rubric yet."""
        return StaticState()

    def load(self, state: Mapping[str, Any]) -> StaticState:
        """The state of a checkpoint."""
        return StaticState(int(state["policy_steps"]), dict(state["rubrics"]), dict(state["drawn"]))

    def done(self, state: StaticState) -> bool:
        """True once the budget is used up."""
        return state.policy_steps >= self.budget

    def step(self, state: StaticState) -> tuple[StaticState, StepRecord]:
        """One policy update."""
        scorer = StaticScorer(self.source, self.aggregation, state)
        n = state.policy_steps + 1
        _, record = policy_step(self.config, self.parts, scorer, Place(n, n, 0, 0, self.policy_updates))
        return StaticState(n, scorer.rubrics, scorer.drawn), record

    def finish(self, state: StaticState, reason: str) -> list[dict[str, object]]:
        """The one phase that there is."""
        return [phase_row(0, "policy", 1, state.step, reason)] if state.step else []


def prompted(
    config: schema.PromptedConfig, parts: Parts, *, policy_updates: int, max_steps: int | None
) -> StaticRubrics:
    """prompted-api and prompted-policy."""
    source = {"api": _api_source, "untrained": _untrained_source}[config.proposer](config, parts)
    return StaticRubrics(
        config,
        parts,
        source,
        WholeRubric(parts.judge),
        policy_updates=policy_updates,
        max_steps=max_steps,
    )


def _api_source(config: schema.PromptedConfig, parts: Parts) -> Source:
    limits = config.rubric
    settings = RubricSettings(
        "json", limits.min_criteria, limits.max_criteria, on_parse_failure=limits.on_parse_failure
    )

    def reader(text: str, prompt: Prompt) -> Rubric | None:
        return parse_rubric(text, settings, prompt.text).rubric

    return ChatSource(open_proposer(config, parts), RUBRIC_JSON, reader, tries=1, name="api")


def _untrained_source(config: schema.PromptedConfig, parts: Parts) -> Source:
    return RoleSource(parts.untrained, parts.seed)
