"""The rubric probe: one rubric per fixed prompt, and a group of responses scored under it, at a few checkpoints.

What RACE §4 and App. D show of 100 fixed prompts: Tables 1 and 11 (what the rubrics look like), 9 and 10 (the
rectangle prompt's), 13 (how often a group's rewards are all alike). The prompts ship with racelab, so that rubrics of
all methods and data sets can be compared. A probe draws from generators of its own and changes no weights.

Deviations from the paper:
  * the 100 prompts are ours; the paper's are not published, save the rectangle prompt;
  * Table 13 counts groups of the training batches; `probe_groups` those on the probe prompts (the metrics
    `race/signal` count the training batches), with `probe.group_size` responses each: fewer are equal more often;
  * every method's rubrics are those of the trained model's rubric role, even where the method takes its rubrics from
    elsewhere: then the probe shows what happens to a role that is not trained.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import zip_longest

import numpy as np

from racelab.configs.schema import ProbeConfig
from racelab.experiments.data.package import read_package
from racelab.experiments.errors import DataError
from racelab.experiments.models.generator import Candidate, Generator
from racelab.experiments.models.redundancy import Redundancy
from racelab.experiments.models.rubric_stats import RubricStats, probe_metrics, rubric_stats
from racelab.experiments.ports import Backend, Judge, RoleBackend
from racelab.experiments.rng import torch_generator
from racelab.experiments.types import FloatArray, JudgeItem, Prompt, StepRecord

Row = dict[str, object]

RECTANGLE = "math-035"
"""The prompt of Tables 9 and 10."""
HIGH = 0.8
"""Table 13 counts groups with every reward at or above it."""
_AT_ONCE = 20
"""Prompts decoded in one batch, so that memory does not grow with the number of prompts."""


def probe_prompts(n: int) -> tuple[Prompt, ...]:
    """The rectangle prompt and the first of each category in turn, until there are `n`; in the package's order."""
    prompts = read_package("probe")
    by_category: dict[str, list[Prompt]] = {}
    for p in sorted(prompts, key=lambda p: p.prompt_id != RECTANGLE):
        by_category.setdefault(p.category, []).append(p)
    turns = [p for turn in zip_longest(*by_category.values()) for p in turn if p is not None]
    chosen = {p.prompt_id for p in turns[:n]}
    return tuple(p for p in prompts if p.prompt_id in chosen)


def due(at_steps: Sequence[int | str], step: int, *, middle: bool = False, end: bool = False) -> str:
    """The label of the probe that is due after global step `step`, the last listed of several; "" if none is.

    Args:
        at_steps: `probe.at_steps`.
        step: 0 before the first.
        middle: the step was the policy update that reaches half of the budget.
        end: the step was the last.
    """
    named = {"start": step == 0, "middle": middle, "end": end}
    labels = [
        at if isinstance(at, str) else f"step {at}" for at in at_steps if named.get(str(at), at == step)
    ]
    return labels[-1] if labels else ""


@contextmanager
def rubric_weights(backend: Backend) -> Iterator[None]:
    """Meanwhile the weights are those that write rubrics: where a backend has several sets, the role `generator`'s."""
    if not isinstance(backend, RoleBackend):
        yield
        return
    before = backend.role
    backend.switch("generator")
    try:
        yield
    finally:
        backend.switch(before)


class RubricProbe:
    """Takes probes of one run."""

    def __init__(self, config: ProbeConfig, seed: int, redundancy: Redundancy | None) -> None:
        """Reads the prompts; `redundancy` None leaves `redundant_frac` out."""
        self.config, self.seed, self.redundancy = config, seed, redundancy
        self.prompts = probe_prompts(config.prompts)

    def due(self, record: StepRecord, done: bool) -> str:
        """The label of the probe that is due after a step; `done` says that it was the last."""
        status = record.status
        reached, budget = int(str(status["policy_step"])), int(str(status["policy_budget"]))
        middle = status["phase"] == "policy" and reached == (budget + 1) // 2
        return due(self.config.at_steps, record.step, middle=middle, end=done)

    def take(self, model: Generator, backend: Backend, judge: Judge, *, label: str, step: int) -> StepRecord:
        """One probe: rows of `rubric_probe` and `probe_groups`, metrics `race/probe`.

        Prompts that do not fit the model's window are left out and counted.

        Args:
            model: as it is now, under the policy's weights.
            backend: that holds its weights.
            judge: frozen.
            label: `checkpoint` of the rows.
            step: global step.
        """
        started = time.perf_counter()
        prompts = [p for p in self.prompts if self._fits(model, p)]
        metrics = {
            "n_prompts": float(len(prompts)),
            "left_out": float(len(self.prompts) - len(prompts)),
        }
        tables: dict[str, list[Row]] = {}
        if prompts:
            with rubric_weights(backend):
                written = self._rubrics(model, prompts)
            found, tables["rubric_probe"] = self._look_at(model, prompts, written, label)
            metrics |= found
            if self.config.group_size:
                rewards = self._rewards(model, judge, prompts, written)
                found, tables["probe_groups"] = group_statistics(prompts, rewards, label)
                metrics |= {"group_size": float(self.config.group_size), **found}
        metrics = {f"race/probe/{k}": v for k, v in metrics.items()}
        metrics["perf/time/probe_s"] = time.perf_counter() - started
        return StepRecord(
            step, metrics, {k: [{"step": step, **r} for r in rows] for k, rows in tables.items()}
        )

    def _fits(self, model: Generator, prompt: Prompt) -> bool:
        try:
            model.rubric_prefix(prompt)
            if self.config.group_size:
                model.response_prefix(prompt)
        except DataError:
            return False
        return True

    def _rubrics(self, model: Generator, prompts: Sequence[Prompt]) -> list[Candidate]:
        """One per prompt. Every batch has a generator of its own: it starts alike whatever the one before drew."""
        return [
            group[0]
            for i, part in enumerate(_batches(prompts))
            for group in model.rubrics(part, 1, torch_generator(self.seed, "rubric-probe", i))
        ]

    def _rewards(
        self, model: Generator, judge: Judge, prompts: Sequence[Prompt], written: Sequence[Candidate]
    ) -> list[FloatArray]:
        """[group_size] per prompt: responses of the model under the rubric that it has just written."""
        rewards: list[FloatArray] = []
        rubrics = {p.prompt_id: c.rubric for p, c in zip(prompts, written, strict=True)}
        for i, part in enumerate(_batches(prompts)):
            rng = torch_generator(self.seed, "probe-groups", i)
            responses = model.responses(part, self.config.group_size, rng)
            items = [JudgeItem(p, rubrics[p.prompt_id], y) for p, y in zip(part, responses, strict=True)]
            rewards += judge.score(items).scores
        return rewards

    def _look_at(
        self, model: Generator, prompts: Sequence[Prompt], written: Sequence[Candidate], label: str
    ) -> tuple[dict[str, float], list[Row]]:
        """Statistics and rows of `rubric_probe`: one per criterion, one for a rubric that does not parse."""
        parsing, lexicon = model.settings.parsing, self.config.lexicon
        texts = [c.sample.text for c in written]
        stats = [rubric_stats(t, p.text, parsing, lexicon) for t, p in zip(texts, prompts, strict=True)]
        redundant = self._redundant(prompts, stats)
        rows = [
            row
            for p, text, s, twice in zip(prompts, texts, stats, redundant, strict=True)
            for row in _rubric_rows(p, text, s, twice, label)
        ]
        metrics = probe_metrics(stats)
        known = [r for r in redundant if r is not None]
        if known:
            metrics["redundant_frac"] = sum(known) / len(known)
        if self.redundancy is not None:
            metrics["redundant_unread"] = float(sum(s.valid for s in stats) - len(known))
        return metrics, rows

    def _redundant(self, prompts: Sequence[Prompt], stats: Sequence[RubricStats]) -> list[bool | None]:
        """Whether each rubric says the same twice; None for those that did not parse or have no answer."""
        if self.redundancy is None:
            return [None] * len(stats)
        asked = [
            (p, tuple(c.criterion for c in s.criteria))
            for p, s in zip(prompts, stats, strict=True)
            if s.valid
        ]
        answers = iter(self.redundancy.redundant(asked))
        return [next(answers) if s.valid else None for s in stats]


def group_statistics(
    prompts: Sequence[Prompt], rewards: Sequence[FloatArray], label: str
) -> tuple[dict[str, float], list[Row]]:
    """Table 13's statistics over groups with two scores or more, and the rows of `probe_groups`.

    Args:
        prompts: one per group.
        rewards: [G] each, NaN where there is no score.
        label: `checkpoint` of the rows.
    """
    rows: list[Row] = []
    stds, high = [], []
    for prompt, rewards_G in zip(prompts, rewards, strict=True):
        scores = rewards_G[np.isfinite(rewards_G)]
        row: Row = {"checkpoint": label, "prompt_id": prompt.prompt_id, "category": prompt.category}
        row |= {"rewards": [float(r) if np.isfinite(r) else None for r in rewards_G]}
        if scores.size >= 2:
            # the deviation of equal floats is not always 0
            stds.append(0.0 if scores.min() == scores.max() else float(scores.std()))
            high.append(bool(scores.min() >= HIGH))
            row |= {"std": stds[-1], "all_ge_0_8": high[-1]}
        rows.append(row)
    metrics = {"n_groups": float(len(stds))}
    if stds:
        metrics |= {
            "sigma_zero_frac": stds.count(0.0) / len(stds),
            "sigma_mean": sum(stds) / len(stds),
            "all_ge_0_8_frac": sum(high) / len(high),
        }
    return metrics, rows


def _batches(prompts: Sequence[Prompt]) -> list[Sequence[Prompt]]:
    return [prompts[i : i + _AT_ONCE] for i in range(0, len(prompts), _AT_ONCE)]


def _rubric_rows(
    prompt: Prompt, text: str, stats: RubricStats, redundant: bool | None, label: str
) -> list[Row]:
    base: Row = {"checkpoint": label, "prompt_id": prompt.prompt_id, "category": prompt.category}
    base |= {"json_valid": stats.valid, "redundant": redundant, "text": text}
    return [{**base, **asdict(c)} for c in stats.criteria] or [base]
