"""The fixed held-out view: the same prompts, rubrics and seeds for the untrained and the trained model.

Each held-out prompt keeps the rubric that the UNTRAINED model wrote for it, so that judged rewards before and after
are measured with one ruler. Success by rule (`Prompt.check`) needs no model at all. Lower temperatures are the
sharpening control: what an untrained model gains by sampling more narrowly is not learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from racelab.experiments.data.checks import passes
from racelab.experiments.models.generator import Generator
from racelab.experiments.models.judge_report import judge_report, own_vs_other_rubric_auc, within_group_auc
from racelab.experiments.ports import Judge
from racelab.experiments.rng import torch_generator
from racelab.experiments.types import Criterion, JudgeItem, Prompt, Rubric, Sample

Row = dict[str, object]
UNTRAINED, TRAINED = "untrained", "trained"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out prompts, each with its fixed rubric (None where the untrained model gave no usable one)."""

    prompts: tuple[Prompt, ...]
    rubrics: tuple[Rubric | None, ...]

    def state(self) -> list[dict[str, Any]]:
        """JSON: the rubrics by prompt id."""
        return [
            {"prompt_id": p.prompt_id, "rubric": None if r is None else asdict(r)}
            for p, r in zip(self.prompts, self.rubrics, strict=True)
        ]

    @classmethod
    def from_state(cls, prompts: Sequence[Prompt], state: Sequence[Mapping[str, Any]]) -> HeldOut:
        """Undoes `state`, given the same prompts."""
        rubrics = {row["prompt_id"]: _rubric(row["rubric"]) for row in state}
        return cls(tuple(prompts), tuple(rubrics[p.prompt_id] for p in prompts))


def _rubric(state: Mapping[str, Any] | None) -> Rubric | None:
    if state is None:
        return None
    return Rubric(tuple(Criterion(c["text"], c["weight"]) for c in state["criteria"]), state["text"])


def hold_rubrics(prompts: Sequence[Prompt], untrained: Generator, seed: int, tries: int = 4) -> HeldOut:
    """Writes the fixed rubrics: the first usable one of `tries` samples per prompt."""
    candidates = untrained.rubrics(list(prompts), tries, torch_generator(seed, "validation-rubrics"))
    first = tuple(next((c.rubric for c in group if c.rubric is not None), None) for group in candidates)
    return HeldOut(tuple(prompts), first)


def at_temperature(
    model: Generator, temperature: float, rubric_temperature: float | None = None
) -> Generator:
    """The same roles at other temperatures and the whole distribution: a method's own top_p is no part of the ruler.

    Args:
        model: any.
        temperature: of responses.
        rubric_temperature: of rubrics; None leaves that role as it is.
    """
    now = model.settings
    settings = replace(now, response=replace(now.response, temperature=temperature, top_p=1.0))
    if rubric_temperature is not None:
        settings = replace(settings, rubric=replace(now.rubric, temperature=rubric_temperature, top_p=1.0))
    return Generator(model.model, templates=model.templates, settings=settings)


@dataclass(frozen=True, slots=True)
class View:
    """One model at one temperature on the held-out prompts.

    Attributes:
        responses: per prompt.
        rows: for `val_examples`, one per sample.
        rewards: judged rewards of the rows, NaN where there is none.
    """

    responses: list[tuple[Sample, ...]]
    rows: list[Row]


def evaluate(
    model: Generator,
    held: HeldOut,
    judge: Judge,
    *,
    samples: int,
    temperature: float,
    seed: int,
    step: int,
    label: str,
) -> View:
    """Samples and scores; the sampling seed depends on the temperature only, so both models start alike."""
    rng = torch_generator(seed, f"validation@{temperature}")
    responses = at_temperature(model, temperature).responses(list(held.prompts), samples, rng)
    scored = judge.score(
        [JudgeItem(p, r, ys) for p, r, ys in zip(held.prompts, held.rubrics, responses, strict=True)]
    )
    rows = [
        _row(prompt, y, float(reward), i, step, label, temperature)
        for prompt, ys, rewards in zip(held.prompts, responses, scored.scores, strict=True)
        for i, (y, reward) in enumerate(zip(ys, rewards, strict=True))
    ]
    return View(responses, rows)


def _row(
    prompt: Prompt, sample: Sample, reward: float, idx: int, step: int, label: str, temperature: float
) -> Row:
    return {
        "step": step,
        "task": prompt.source,
        "example_id": prompt.prompt_id,
        "idx": idx,
        "model": label,
        "temperature": temperature,
        "category": prompt.category,
        "reward": reward if reward == reward else None,
        "passed": None if prompt.check is None else float(passes(prompt.check, sample.text)),
        "finished": sample.finished,
        "n_tokens": len(sample.tokens),
        "turns": 1,
        "prompt": prompt.text,
        "text": sample.text,
    }


def validation_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """`val/<task>` of the rows at the first temperature: mean judged reward, success by rule, counts."""
    metrics: dict[str, float] = {}
    for task in sorted({str(r["task"]) for r in rows}):
        mine = [r for r in rows if r["task"] == task]
        rewards = [float(str(r["reward"])) for r in mine if r["reward"] is not None]
        passed = [float(str(r["passed"])) for r in mine if r["passed"] is not None]
        metrics[f"val/{task}/n"] = float(len(mine))
        if rewards:
            metrics[f"val/{task}/reward_mean"] = sum(rewards) / len(rewards)
        if passed:
            metrics[f"val/{task}/passed_frac"] = sum(passed) / len(passed)
    return metrics


def rubrics_now(model: Generator, prompts: Sequence[Prompt], seed: int) -> tuple[Rubric | None, ...]:
    """One rubric per held-out prompt, as the model writes it now."""
    groups = model.rubrics(list(prompts), 1, torch_generator(seed, "validation-rubrics-now"))
    return tuple(group[0].rubric for group in groups)


def _outcomes(held: HeldOut, view: View) -> list[list[bool]]:
    """What the rules say. A prompt without a rule has outcomes that are all alike, so it ranks nothing."""
    return [
        [p.check is not None and passes(p.check, y.text) for y in ys]
        for p, ys in zip(held.prompts, view.responses, strict=True)
    ]


def _items(held: HeldOut, view: View, rubrics: Sequence[Rubric | None]) -> list[JudgeItem]:
    return [JudgeItem(p, r, ys) for p, r, ys in zip(held.prompts, rubrics, view.responses, strict=True)]


def report_on_judge(judge: Judge, held: HeldOut, view: View) -> dict[str, float]:
    """AUCs and attack scores of the judge under the fixed rubrics."""
    return judge_report(judge, _items(held, view, held.rubrics), _outcomes(held, view))


def ranking(judge: Judge, held: HeldOut, view: View, rubrics: Sequence[Rubric | None]) -> dict[str, float]:
    """How well the judge ranks the same responses under other rubrics.

    Returns:
        `auc_rules`: against the rules, inside each prompt's group; `auc_own_rubric`: scores under a prompt's own
        rubric over those under another prompt's (0.5: the rubric is not read).
    """
    items = _items(held, view, rubrics)
    live = [i for i, item in enumerate(items) if item.rubric is not None]
    outcomes = _outcomes(held, view)
    scores = judge.score([items[i] for i in live]).scores
    return {
        "auc_rules": within_group_auc([s.tolist() for s in scores], [outcomes[i] for i in live]),
        "auc_own_rubric": own_vs_other_rubric_auc(judge, items),
    }
