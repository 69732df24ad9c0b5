"""What RLCER's two steps hand to one another and leave behind. No decisions here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from racelab.configs import schema
from racelab.experiments.methods import records
from racelab.experiments.methods.baselines.common import Place, RoleUpdate
from racelab.experiments.methods.baselines.rlcer_reward import Booleans, outcome
from racelab.experiments.methods.baselines.stored import sample_from_state, sample_state
from racelab.experiments.models.answer_rubrics import AnswerRubric
from racelab.experiments.types import JudgeScores, Prompt, Sample, StepRecord, UpdateStats

_UNIT_SCALE = ("all_ge_0_8_frac", "all_le_0_2_frac", "collapsed_high_frac", "collapsed_low_frac")
"""`race/signal` metrics that suppose scores in [0, 1]."""


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """One prompt's G answers and their G rubrics.

    Attributes:
        written: the i-th rubric was written for the i-th answer.
        correct: by the prompt's rule; None without one.
        cots: share of its own valid items that an answer has; NaN without a rubric.
        valid: [K_i], which items of the i-th rubric are valid.
        rewards: of the answers.
        earned: of the rubrics; NaN for one that was never written.
    """

    prompt: Prompt
    written: tuple[AnswerRubric, ...]
    correct: tuple[bool | None, ...]
    cots: tuple[float, ...]
    valid: tuple[Booleans, ...]
    rewards: tuple[float, ...]
    earned: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RubricGroup:
    """The rubrics of one prompt, kept for the rubric step; part of a checkpoint.

    Attributes:
        prompt: its text.
        prefixes: what the i-th rubric continues (prompt and i-th answer).
        samples: the rubrics, without log-probabilities.
        rewards: [G]; NaN for one that was never written.
        usable: whether the rubric has items.
    """

    prompt: str
    prefixes: tuple[tuple[int, ...], ...]
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    usable: tuple[bool, ...]

    @classmethod
    def of(cls, group: JudgedGroup) -> RubricGroup:
        """What the rubric step needs of a group."""
        return cls(
            group.prompt.text,
            tuple(w.prefix for w in group.written),
            tuple(replace(w.sample, logprobs=()) for w in group.written),
            group.earned,
            tuple(w.rubric is not None for w in group.written),
        )

    def state(self) -> dict[str, Any]:
        """JSON values; a missing reward is null."""
        return {
            "prompt": self.prompt,
            "prefixes": [list(p) for p in self.prefixes],
            "samples": [sample_state(s) for s in self.samples],
            "rewards": [None if math.isnan(r) else r for r in self.rewards],
            "usable": list(self.usable),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RubricGroup:
        """Undoes `state`."""
        return cls(
            state["prompt"],
            tuple(tuple(p) for p in state["prefixes"]),
            tuple(sample_from_state(s) for s in state["samples"]),
            tuple(math.nan if r is None else float(r) for r in state["rewards"]),
            tuple(state["usable"]),
        )


def policy_metrics(judged: Sequence[JudgedGroup]) -> dict[str, float]:
    """Means over the answers of a batch; what has no basis is left out."""
    outcomes = [outcome(z) for group in judged for z in group.correct]
    cots = [c for group in judged for c in group.cots if not math.isnan(c)]
    items = [bool(v) for group in judged for valid_K in group.valid for v in valid_K]
    found: dict[str, Sequence[float]] = {
        "rlcer/outcome_mean": outcomes,
        "rlcer/cot_mean": cots,
        "rlcer/valid_items_frac": items,
        "rlcer/no_rule_frac": [group.prompt.check is None for group in judged],
    }
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def mended(record: StepRecord, judged: Sequence[JudgedGroup]) -> StepRecord:
    """The shared record of a policy step, with each answer's own rubric and without what supposes [0, 1]."""
    texts = [w.sample.text for group in judged for w in group.written]
    rows = [{**row, "rubric_text": text} for row, text in zip(record.tables["samples"], texts, strict=True)]
    dropped = {f"race/signal/{name}" for name in _UNIT_SCALE}
    return replace(
        record,
        metrics={k: v for k, v in record.metrics.items() if k not in dropped},
        tables={**record.tables, "samples": rows},
    )


def role_update(
    groups: Sequence[RubricGroup], stats: UpdateStats, config: schema.RlcerConfig, place: Place
) -> RoleUpdate:
    """The rubric update for the shared record: all that it costs was paid in the policy step."""
    usable = [u for group in groups for u in group.usable]
    nothing = {"policy_gen": 0, "rubric_gen": 0, "judge_eval": 0}
    rows = [
        records.sample_row(place.step, j, i, "rubric", group.prompt, sample, sample.text, reward)
        for j, group in enumerate(groups)
        for i, (sample, reward) in enumerate(zip(group.samples, group.rewards, strict=True))
    ]
    return RoleUpdate(
        rewards_NG=np.array([group.rewards for group in groups], dtype=np.float64),
        stats=stats,
        samples=(),
        unusable_frac=1.0 - sum(usable) / len(usable) if usable else math.nan,
        judged=JudgeScores(()),
        measured={**nothing, "learner_samples": stats.n_samples},
        expected={
            **nothing,
            "learner_samples": sum(bool(s.tokens) for group in groups for s in group.samples),
        },
        printed={**nothing, "learner_samples": config.prompts_per_step * config.group_size},
        tables={"samples": rows},
    )
