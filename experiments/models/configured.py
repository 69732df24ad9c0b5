"""Judges and generators as sections of a config describe them: what a training run and an evaluation share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from racelab.configs import schema
from racelab.experiments.models.api_health import check_server
from racelab.experiments.models.api_settings import ApiSettings, server_settings
from racelab.experiments.models.assets import resolve_model
from racelab.experiments.models.generator import (
    Generator,
    GeneratorSettings,
    SamplingSettings,
    default_templates,
)
from racelab.experiments.models.guards import GuardSettings
from racelab.experiments.models.judge import JudgeSettings
from racelab.experiments.models.judge_api import ApiJudgeSettings
from racelab.experiments.models.judge_likelihood import Calibration, LikelihoodJudge, LikelihoodSettings
from racelab.experiments.models.judge_prompted import DigitSettings, JsonSettings
from racelab.experiments.models.rubric import RubricSettings
from racelab.experiments.ports import Judge, LanguageModel
from racelab.experiments.rng import derived_seed, torch_generator
from racelab.experiments.types import JudgeItem, Prompt


def json_settings(judge: schema.JsonJudgeConfig, seed: int) -> JsonSettings:
    """How a JSON judge replies; its draws are seeded by the run."""
    return JsonSettings(
        high=judge.high,
        max_tokens=judge.max_tokens,
        temperature=judge.temperature,
        top_p=judge.top_p,
        thinking=judge.thinking,
        seed=derived_seed(seed, "judge") % 2**31,
    )


def judge_settings(judge: schema.JudgeConfig, seed: int) -> JudgeSettings:
    """The settings of the judge that the section `judge` names."""
    return _SETTINGS[judge.kind](judge, seed)


def find_judge(judge: schema.JudgeConfig) -> tuple[Path | None, ApiSettings | None]:
    """The judge's folder (None: the untrained policy), or its server, which has answered and whose model has a name.

    Raises:
        RacelabError: no such model; no such server, or it refuses.
    """
    if isinstance(judge, schema.ApiJudgeConfig):
        server = server_settings(judge, "judge", empty_ok=True)
        return None, replace(server, model=check_server(server))
    if judge.source == "policy":
        return None, None
    return resolve_model(judge.source, sha256=judge.sha256, revision=judge.revision), None


def make_generator(method: schema.MethodConfig, model: LanguageModel) -> Generator:
    """Policy and rubric generator over one model, as the section `method` has them."""
    response, rubric = method.response, method.rubric
    return Generator(
        model,
        templates=default_templates(rubric.format),
        settings=GeneratorSettings(
            response=SamplingSettings(response.max_tokens, response.temperature, response.top_p),
            rubric=SamplingSettings(rubric.max_tokens, rubric.temperature, rubric.top_p),
            parsing=rubric_settings(rubric),
        ),
    )


def rubric_settings(rubric: schema.RubricConfig) -> RubricSettings:
    """What counts as a usable rubric."""
    return RubricSettings(
        format=rubric.format,
        min_criteria=rubric.min_criteria,
        max_criteria=rubric.max_criteria,
        on_parse_failure=rubric.on_parse_failure,
        copied=default_templates(rubric.format).rubric.examples if rubric.drop_copied_examples else (),
    )


def with_scales(
    judge: Judge,
    config: schema.JudgeConfig,
    known: Mapping[str, Any] | None,
    *,
    ruler: Callable[[], Generator],
    prompts: Sequence[Prompt],
    seed: int,
) -> Judge:
    """The judge, with the scales that it needs; other judges than `likelihood` need none.

    Args:
        judge: as built.
        config: the section `judge`.
        known: scales that were measured before (a resumed run's); None measures them.
        ruler: the untrained model, which writes the base samples.
        prompts: of which the first ones are asked.
        seed: of the base samples.

    Raises:
        DataError: the base samples hardly differ.
    """
    if not isinstance(judge, LikelihoodJudge) or not isinstance(config, schema.LikelihoodJudgeConfig):
        return judge
    if known is not None:
        return judge.with_calibration(Calibration.from_json(known))
    chosen = prompts[: config.calibration_prompts]
    rng = torch_generator(seed, "calibration")
    rollouts = ruler().rollouts(list(chosen), config.calibration_samples, rng)
    items = [JudgeItem(p, r.rubric, r.responses) for p, r in zip(chosen, rollouts, strict=True)]
    return judge.with_calibration(judge.calibrate(items))


def _likelihood(judge: schema.LikelihoodJudgeConfig, seed: int) -> JudgeSettings:
    return LikelihoodSettings(
        slope=judge.slope,
        floor=judge.floor,
        likelihood_weight=judge.likelihood_weight,
        relevance_weight=judge.relevance_weight,
        cap=judge.cap,
        topic_share=judge.topic_share,
        unfinished_factor=judge.unfinished_factor,
        guards=GuardSettings(
            copy_free=judge.copy_free,
            min_words=judge.min_words,
            known_free=judge.known_free,
            nothing_new=judge.nothing_new,
        ),
    )


def _digit(judge: schema.DigitJudgeConfig, seed: int) -> JudgeSettings:
    return DigitSettings(low=judge.low, high=judge.high)


def _api(judge: schema.ApiJudgeConfig, seed: int) -> JudgeSettings:
    return ApiJudgeSettings(
        high=judge.high,
        max_tokens=judge.max_tokens,
        temperature=judge.temperature,
        top_p=judge.top_p,
        seed=derived_seed(seed, "judge") % 2**31,
    )


_SETTINGS: dict[str, Callable[[Any, int], JudgeSettings]] = {
    "likelihood": _likelihood,
    "digit": _digit,
    "json": json_settings,
    "api": _api,
}
"""`judge.kind` -> its settings."""
