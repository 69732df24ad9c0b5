"""The two trained roles of one model: the policy answers, the rubric generator writes rubrics (RACE Eq 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.prompts.templates import POLICY, RUBRIC_TEMPLATES
from racelab.experiments.models.rubric import ParsedRubric, RubricSettings, parse_rubric
from racelab.experiments.models.text import defang
from racelab.experiments.ports import LanguageModel
from racelab.experiments.types import GenerationRequest, Prompt, Rubric, Sample

if TYPE_CHECKING:
    import torch


class Rollout(NamedTuple):
    """What a policy step generates for one prompt."""

    rubric_sample: Sample
    rubric: Rubric | None
    responses: tuple[Sample, ...]


class Candidate(NamedTuple):
    """One candidate rubric of a rubric step; `valid` says that it parsed (a raw-text stand-in did not)."""

    sample: Sample
    rubric: Rubric | None
    valid: bool


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How one role samples; `temperature` is also the one its log-probs are trained under."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Templates:
    """One template per role; each has the single slot `prompt`."""

    policy: RoleTemplate
    rubric: RoleTemplate


@dataclass(frozen=True, slots=True)
class GeneratorSettings:
    """Sampling of both roles and what counts as a usable rubric."""

    response: SamplingSettings
    rubric: SamplingSettings
    parsing: RubricSettings = field(default_factory=RubricSettings)


def default_templates(rubric_format: str) -> Templates:
    """The shipped templates for a `rubric.format`.

    Raises:
        ConfigError: the format is unknown.
    """
    if rubric_format not in RUBRIC_TEMPLATES:
        raise ConfigError(f"rubric.format {rubric_format!r} is unknown; take {' or '.join(RUBRIC_TEMPLATES)}")
    return Templates(POLICY, RUBRIC_TEMPLATES[rubric_format])


class Generator:
    """Samples responses and rubrics from one language model, one chat template per role."""

    def __init__(self, model: LanguageModel, *, templates: Templates, settings: GeneratorSettings) -> None:
        """Keeps the parts.

        Raises:
            ConfigError: a template does not have the single slot `prompt`.
        """
        for template in (templates.policy, templates.rubric):
            if template.slots != {"prompt"}:
                raise ConfigError(f"template {template.name}: a generator needs the one slot {{prompt}}")
        self.model = model
        self.templates = templates
        self.settings = settings

    def response_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids in front of a response; the learner trains behind the same ids.

        Raises:
            DataError: the prompt is too long for the window.
            ConfigError: `max_tokens` leaves no room for any prompt.
        """
        return self._prefix("response", self.templates.policy, prompt, self.settings.response)

    def rubric_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids in front of a rubric; raises as `response_prefix`."""
        return self._prefix("rubric", self.templates.rubric, prompt, self.settings.rubric)

    def parse(self, text: str, prompt: Prompt) -> ParsedRubric:
        """The rubric in `text`, or the reason why there is none."""
        return parse_rubric(text, self.settings.parsing, prompt.text)

    def rollouts(self, prompts: Sequence[Prompt], n_responses: int, rng: torch.Generator) -> list[Rollout]:
        """One rubric and `n_responses` responses for each prompt, all decoded in one batch."""
        if not prompts:
            return []
        requests = [self._response_request(p, n_responses) for p in prompts]
        requests += [self._rubric_request(p, 1) for p in prompts]
        samples = self.model.generate(requests, rng)
        responses, rubrics = samples[: len(prompts)], samples[len(prompts) :]
        return [
            Rollout(written[0], self.parse(written[0].text, prompt).rubric, tuple(answers))
            for prompt, answers, written in zip(prompts, responses, rubrics, strict=True)
        ]

    def responses(self, prompts: Sequence[Prompt], n: int, rng: torch.Generator) -> list[tuple[Sample, ...]]:
        """`n` responses for each prompt, without rubrics (calibration, validation)."""
        if not prompts:
            return []
        return [tuple(s) for s in self.model.generate([self._response_request(p, n) for p in prompts], rng)]

    def rubrics(self, prompts: Sequence[Prompt], n: int, rng: torch.Generator) -> list[list[Candidate]]:
        """`n` candidate rubrics for each prompt, all decoded in one batch."""
        if not prompts:
            return []
        samples = self.model.generate([self._rubric_request(p, n) for p in prompts], rng)
        return [
            [self._candidate(sample, prompt) for sample in group]
            for prompt, group in zip(prompts, samples, strict=True)
        ]

    def _candidate(self, sample: Sample, prompt: Prompt) -> Candidate:
        parsed = self.parse(sample.text, prompt)
        return Candidate(sample, parsed.rubric, parsed.valid)

    def _response_request(self, prompt: Prompt, n: int) -> GenerationRequest:
        return self._request(
            self.response_prefix(prompt), n, self.settings.response, self.templates.policy.stop
        )

    def _rubric_request(self, prompt: Prompt, n: int) -> GenerationRequest:
        return self._request(self.rubric_prefix(prompt), n, self.settings.rubric, self.templates.rubric.stop)

    def _request(
        self, prefix: tuple[int, ...], n: int, how: SamplingSettings, stop: tuple[str, ...]
    ) -> GenerationRequest:
        return GenerationRequest(prefix, n, how.max_tokens, how.temperature, how.top_p, stop)

    def _prefix(
        self, role: str, template: RoleTemplate, prompt: Prompt, how: SamplingSettings
    ) -> tuple[int, ...]:
        prefix = template.encode(self.model, prompt=defang(prompt.text))
        if len(prefix) + how.max_tokens > self.model.window:
            bare = len(template.encode(self.model, prompt=""))
            if bare + how.max_tokens >= self.model.window:  # no prompt fits, however short
                raise ConfigError(
                    f"method.{role}.max_tokens={how.max_tokens}: with {bare} tokens of template {template.name} "
                    f"it fills the model's window of {self.model.window}; "
                    f"take less than {max(self.model.window - bare, 1)}"
                )
            raise DataError(
                f"prompt {prompt.prompt_id}: {len(prefix)} tokens under template {template.name} "
                f"+ {how.max_tokens} to generate exceed the model's window of {self.model.window}; "
                "lower data.max_prompt_tokens"
            )
        return prefix
