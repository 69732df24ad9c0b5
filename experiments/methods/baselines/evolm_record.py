"""What EvoLM's steps leave behind: metrics and table rows. No decisions here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from racelab.configs import schema
from racelab.experiments.methods import records
from racelab.experiments.methods.baselines.common import Place, RoleUpdate, phase_row
from racelab.experiments.methods.baselines.evolm_buffer import Draw
from racelab.experiments.methods.race.phase import PhaseRecord
from racelab.experiments.methods.race.rubric_reward import rubric_reward_stats
from racelab.experiments.models.generator import Candidate
from racelab.experiments.types import FloatArray, JudgeScores, Sample, StepRecord, UpdateStats


def printed_rubric(n: int, g: int) -> dict[str, int]:
    """As RACE Table 14 counts a rubric update, both answers cached; the n fresh answers are the gap to it."""
    return {"policy_gen": 0, "rubric_gen": n * g, "judge_eval": 2 * n * g, "learner_samples": n * g}


def with_phase(record: StepRecord, ended: PhaseRecord | None, metrics: Mapping[str, float]) -> StepRecord:
    """The record with further metrics, and with the phase that ended with its step, if one did."""
    if ended is None:
        return replace(record, metrics={**record.metrics, **metrics})
    kind = ended.kind.value
    row = phase_row(ended.index, kind, ended.start, ended.end, ended.end_reason)
    lengths = {f"race/phase/{kind}_len": float(ended.length), "race/phase/n_phases": float(ended.index + 1)}
    event = f"{kind} phase of {ended.length} steps ended by {ended.end_reason}"
    return replace(
        record,
        metrics={**record.metrics, **metrics, **lengths},
        tables={**record.tables, "phases": [row]},
        status={**record.status, "event": event},
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rubric step's data. Shapes: N pairs of answers, G candidate rubrics each.

    Attributes:
        drawn: the old answers.
        fresh: a new answer to each of their prompts.
        margins_NG: m; NaN where a score is missing.
        usable_NG: True where there is a rubric to judge: it parsed, or its raw text stands in.
        valid_NG: True where it has the form asked for.
    """

    drawn: Draw
    fresh: Sequence[Sample]
    candidates: Sequence[Sequence[Candidate]]
    margins_NG: FloatArray
    base_NG: FloatArray
    final_NG: FloatArray
    usable_NG: npt.NDArray[np.bool_]
    valid_NG: npt.NDArray[np.bool_]

    def metrics(self, place: Place, buffer: int) -> dict[str, float]:
        """Margins and rewards (those of RACE's that need no cached margin), form, and age of the old answers."""
        unknown = np.full(len(self.margins_NG), math.nan)
        stats = rubric_reward_stats(self.margins_NG, unknown, self.base_NG, self.final_NG)
        kept = ("margin_mean", "sigma_zero_frac", "reversed_frac")
        return {
            **{f"race/rubric_reward/{name}": stats[name] for name in kept},
            "evolm/valid_frac": float(self.valid_NG.mean()),
            "evolm/buffer/size": float(buffer),
            "evolm/buffer/age_mean_steps": float(
                np.mean([place.policy_step - old.policy_step for old in self.drawn.answers])
            ),
            "evolm/buffer/fallback": float(self.drawn.fallback),
        }

    def tables(self, place: Place) -> dict[str, list[dict[str, object]]]:
        """Rows of `rubric_groups` and `samples`."""
        rows = [
            records.sample_row(place.step, j, i, "rubric", old.prompt.text, c.sample, c.sample.text, float(r))
            for j, (old, group, rewards) in enumerate(
                zip(self.drawn.answers, self.candidates, self.final_NG, strict=True)
            )
            for i, (c, r) in enumerate(zip(group, rewards, strict=True))
        ]
        return {"rubric_groups": [self._row(i, place) for i in range(len(self.fresh))], "samples": rows}

    def _row(self, i: int, place: Place) -> dict[str, object]:
        def listed(row: FloatArray) -> list[float | None]:
            return [None if math.isnan(v) else float(v) for v in row]

        old = self.drawn.answers[i]
        return {
            "entry_id": old.entry_id,
            "m_old": None,
            "margins": listed(self.margins_NG[i]),
            "base_rewards": listed(self.base_NG[i]),
            "final_rewards": listed(self.final_NG[i]),
            "usable": int(self.usable_NG[i].sum()),
            "age": place.policy_step - old.policy_step,
        }


def role_update(
    outcome: Outcome,
    scored: JudgeScores,
    stats: UpdateStats,
    config: schema.EvolmConfig,
    place: Place,
    buffer: int,
) -> RoleUpdate:
    """The update of the rubric writer for the shared record; `buffer` is the number of old answers held."""
    (n, g), written = outcome.usable_NG.shape, [c.sample for group in outcome.candidates for c in group]
    return RoleUpdate(
        rewards_NG=outcome.final_NG,
        stats=stats,
        samples=[*written, *outcome.fresh],  # all that the trained model wrote, for tokens per second
        unusable_frac=float(1.0 - outcome.usable_NG.mean()),
        judged=scored,
        measured={
            "policy_gen": len(outcome.fresh),
            "rubric_gen": len(written),
            "judge_eval": scored.calls,
            "learner_samples": stats.n_samples,
        },
        expected={
            "policy_gen": n,
            "rubric_gen": n * g,
            "judge_eval": 2 * int(outcome.usable_NG.sum()),
            "learner_samples": n * g,
        },
        printed=printed_rubric(config.entries_per_rubric_step, g),
        tables=outcome.tables(place),
        metrics=outcome.metrics(place, buffer),
    )
