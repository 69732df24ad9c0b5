"""A language model as a pairwise judge: which of two answers satisfies a rubric better (Rubric-ARM's trained judge)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from racelab.experiments.models.generator import SamplingSettings
from racelab.experiments.models.prompts.rubric_arm import VERDICT_TEMPLATES
from racelab.experiments.models.rubric import RubricFormat, format_criteria, format_numbered
from racelab.experiments.models.text import defang, strip_thinking
from racelab.experiments.ports import LanguageModel
from racelab.experiments.types import GenerationRequest, Prompt, Rubric, Sample

if TYPE_CHECKING:
    import torch

_CRITERIA: dict[RubricFormat, Callable[[Rubric], str]] = {"lines": format_criteria, "json": format_numbered}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to a prompt, shown as A and B, and the rubric to compare them by."""

    prompt: Prompt
    rubric: Rubric
    first: str
    second: str


class PairwiseJudge:
    """Verdicts of a language model, under whatever weights it has at the moment."""

    def __init__(
        self, model: LanguageModel, *, rubric_format: RubricFormat, sampling: SamplingSettings
    ) -> None:
        """Keeps the parts; the format of rubrics chooses the template."""
        self._model, self._sampling = model, sampling
        self.template = VERDICT_TEMPLATES[rubric_format]
        self._criteria = _CRITERIA[rubric_format]

    def prefix(self, comparison: Comparison) -> tuple[int, ...] | None:
        """Token ids in front of a verdict; None if no verdict fits behind them into the model's window."""
        clean = _one_line if self.template.layout == "text" else defang
        found = self.template.encode(
            self._model,
            prompt=clean(comparison.prompt.text),
            criteria=defang(self._criteria(comparison.rubric)),
            first=clean(strip_thinking(comparison.first)),
            second=clean(strip_thinking(comparison.second)),
        )
        return found if len(found) + self._sampling.max_tokens <= self._model.window else None

    def sample(self, prefixes: Sequence[tuple[int, ...]], n: int, rng: torch.Generator) -> list[list[Sample]]:
        """`n` verdicts behind each prefix, all decoded in one batch."""
        return self._generate(prefixes, n, self._sampling.temperature, self._sampling.top_p, rng)

    def greedy(self, prefixes: Sequence[tuple[int, ...]], rng: torch.Generator) -> list[Sample]:
        """The likeliest verdict behind each prefix; nothing is drawn from `rng`."""
        return [group[0] for group in self._generate(prefixes, 1, 0.0, 1.0, rng)]

    def _generate(
        self,
        prefixes: Sequence[tuple[int, ...]],
        n: int,
        temperature: float,
        top_p: float,
        rng: torch.Generator,
    ) -> list[list[Sample]]:
        if not prefixes:
            return []
        limit, stop = self._sampling.max_tokens, self.template.stop
        return self._model.generate(
            [GenerationRequest(p, n, limit, temperature, top_p, stop) for p in prefixes], rng
        )


def _one_line(text: str) -> str:
    """A text that cannot be taken for another line of a few-shot prompt."""
    return " ".join(defang(text).split())
