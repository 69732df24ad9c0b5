"""Rubrics that the trained model writes for one answer each (RLCER): prompt, sampling, parsing.

An item is a criterion with points: above 0 for a merit, below 0 for a fault. `json` knows both; `lines`, for models too
small for JSON, knows merits only. The limits of `rubric` hold for the size of the points.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from racelab.experiments.models.generator import SamplingSettings
from racelab.experiments.models.prompts.rlcer import RUBRIC_TEMPLATES
from racelab.experiments.models.rubric import RubricSettings, json_values, parse_rubric
from racelab.experiments.models.text import defang, strip_thinking
from racelab.experiments.ports import LanguageModel
from racelab.experiments.types import Criterion, GenerationRequest, Prompt, Rubric, Sample

if TYPE_CHECKING:
    import torch

MAX_POINTS = 5.0
_LIST_KEYS = ("items", "criteria", "rubric")


@dataclass(frozen=True, slots=True)
class AnswerRubric:
    """One rubric as written.

    Attributes:
        prefix: what it continues.
        sample: without tokens if it was not written, since its prompt leaves the window no room.
        rubric: None if the text has no usable items; the weights are points, faults below 0.
    """

    prefix: tuple[int, ...]
    sample: Sample
    rubric: Rubric | None


class AnswerRubricWriter:
    """Writes one rubric for every answer, all of them decoded in one batch."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        sampling: SamplingSettings,
        parsing: RubricSettings,
        drop_copied_examples: bool,
    ) -> None:
        """Keeps the parts; the template follows `parsing.format`, and so do the examples that may not be copied."""
        self.model, self.sampling = model, sampling
        self.template = RUBRIC_TEMPLATES[parsing.format]
        self.parsing = replace(parsing, copied=self.template.examples if drop_copied_examples else ())

    def prefix(self, prompt: Prompt, answer: Sample) -> tuple[int, ...]:
        """Token ids in front of the rubric; the thinking of the answer is left out."""
        shown = defang(strip_thinking(answer.text).strip())
        return self.template.encode(self.model, prompt=defang(prompt.text), response=shown)

    def write(
        self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]], rng: torch.Generator
    ) -> list[list[AnswerRubric]]:
        """One rubric for each response of each prompt."""
        prefixes = [[self.prefix(p, y) for y in ys] for p, ys in zip(prompts, responses, strict=True)]
        how = self.sampling
        requests = [
            GenerationRequest(x, 1, how.max_tokens, how.temperature, how.top_p, self.template.stop)
            for row in prefixes
            for x in row
            if self.fits(x)
        ]
        samples = iter(self.model.generate(requests, rng) if requests else [])
        return [
            [self._read(x, next(samples)[0] if self.fits(x) else _UNWRITTEN, prompt) for x in row]
            for prompt, row in zip(prompts, prefixes, strict=True)
        ]

    def fits(self, prefix: tuple[int, ...]) -> bool:
        """Whether the window has room for a rubric behind `prefix`."""
        return len(prefix) + self.sampling.max_tokens <= self.model.window

    def parse(self, text: str, prompt: Prompt) -> Rubric | None:
        """The items in a text; None if there are too few."""
        return {"lines": self._lines, "json": self._json}[self.parsing.format](text, prompt)

    def _read(self, prefix: tuple[int, ...], sample: Sample, prompt: Prompt) -> AnswerRubric:
        return AnswerRubric(prefix, sample, self.parse(sample.text, prompt))

    def _lines(self, text: str, prompt: Prompt) -> Rubric | None:
        parsed = parse_rubric(text, replace(self.parsing, max_weight=MAX_POINTS), prompt.text)
        return parsed.rubric if parsed.valid else None

    def _json(self, text: str, prompt: Prompt) -> Rubric | None:
        """The rules of `parse_rubric` for the size of the points; then the signs are put back."""
        rows = next((found for v in json_values(strip_thinking(text)) if (found := _rows(v))), [])
        sizes = json.dumps([{"criterion": text, "weight": abs(points)} for text, points in rows])
        parsed = parse_rubric(sizes, replace(self.parsing, max_weight=MAX_POINTS), prompt.text)
        if parsed.rubric is None or not parsed.valid:
            return None
        points = dict(reversed(rows))  # of items that repeat, the first is the one that was kept
        return Rubric(tuple(Criterion(c.text, points[c.text]) for c in parsed.rubric.criteria), text)


_UNWRITTEN = Sample((), (), "", False)


def _rows(value: object) -> list[tuple[str, float]]:
    """(criterion, points) of each object in a JSON list, or in the first list of a JSON object, two levels deep."""
    for _ in range(2):
        if isinstance(value, dict):
            value = next((value[k] for k in _LIST_KEYS if isinstance(value.get(k), list | dict)), None)
    if not isinstance(value, list):
        return []
    return [
        (" ".join(row["criterion"].split()), float(row["points"]))
        for row in value
        if isinstance(row, dict) and isinstance(row.get("criterion"), str) and _is_points(row.get("points"))
    ]


def _is_points(value: object) -> bool:
    """A number other than 0 whose size is at most 5; the parser would refuse it as a weight otherwise."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < abs(value) <= MAX_POINTS
