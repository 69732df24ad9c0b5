"""The fixed held-out view: the same prompts, rubrics and seeds for the untrained and the trained model.

Each held-out prompt keeps the rubric that the UNTRAINED model wrote for it, so that judged rewards before and after
are measured with one ruler. Success by rule (`Prompt.check`) needs no model at all. Lower temperatures are the
sharpening control: what an untrained model gains by sampling more narrowly is not learning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from racelab.experiments.data.checks import passes
from racelab.experiments.models.generator import Generator
from racelab.experiments.ports import Judge
from racelab.experiments.rng import torch_generator
from racelab.experiments.types import JudgeItem, Prompt, Rubric, Sample


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out prompts, each with its fixed rubric (None where the untrained model gave no usable one)."""

    prompts: tuple[Prompt, ...]
    rubrics: tuple[Rubric | None, ...]


def held_out(prompts: Sequence[Prompt], untrained: Generator, seed: int, tries: int = 4) -> HeldOut:
    """Writes the fixed rubrics: the first usable one of `tries` samples per prompt."""
    candidates = untrained.rubrics(list(prompts), tries, torch_generator(seed, "validation-rubrics"))
    first = tuple(next((r for _, r in group if r is not None), None) for group in candidates)
    return HeldOut(tuple(prompts), first)


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
) -> list[dict[str, object]]:
    """Rows of `val_examples`: one per sample, with the judged reward and the rule's verdict.

    The sampling seed depends on the temperature only: both models start from the same random numbers.
    """
    rng = torch_generator(seed, f"validation@{temperature}")
    responses = model.responses(list(held.prompts), samples, rng, temperature=temperature)
    scores = judge.score(
        [JudgeItem(p, r, ys) for p, r, ys in zip(held.prompts, held.rubrics, responses, strict=True)]
    )
    rows: list[dict[str, object]] = []
    for prompt, ys, rewards in zip(held.prompts, responses, scores.scores, strict=True):
        for i, (y, reward) in enumerate(zip(ys, rewards, strict=True)):
            rows.append(_row(prompt, y, float(reward), i, step, label, temperature))
    return rows


def _row(
    prompt: Prompt, sample: Sample, reward: float, idx: int, step: int, label: str, temperature: float
) -> dict[str, object]:
    passed = None if prompt.check is None else float(passes(prompt.check, sample.text))
    return {
        "step": step,
        "task": prompt.source,
        "example_id": prompt.prompt_id,
        "idx": idx,
        "model": label,
        "temperature": temperature,
        "category": prompt.category,
        "reward": reward if reward == reward else None,
        "passed": passed,
        "finished": sample.finished,
        "n_tokens": len(sample.tokens),
        "turns": 1,
        "text": sample.text,
    }
