"""Wires the parts of a run from its config. Imports torch and transformers: called only when a run starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from racelab.configs import schema
from racelab.configs.schema import Config
from racelab.experiments.data.load import fit_prompts, load_prompts
from racelab.experiments.data.sources import PromptData
from racelab.experiments.data.stream import SeededStream
from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.learning import learner_settings
from racelab.experiments.models.assets import model_sha256, resolve_model
from racelab.experiments.models.encoder import SentenceEncoder
from racelab.experiments.models.generator import (
    Generator,
    GeneratorSettings,
    SamplingSettings,
    default_templates,
)
from racelab.experiments.models.guards import GuardSettings
from racelab.experiments.models.judge import JudgeSettings, build_judge
from racelab.experiments.models.judge_likelihood import Calibration, LikelihoodJudge, LikelihoodSettings
from racelab.experiments.models.judge_prompted import DigitSettings
from racelab.experiments.models.rubric import RubricSettings
from racelab.experiments.needs import Needs, find_needs, json_settings, torch_device
from racelab.experiments.parts import Parts
from racelab.experiments.ports import Judge, LanguageModel
from racelab.experiments.rng import Streams, torch_generator
from racelab.experiments.tracking.mlflow_store import tracking_uri
from racelab.experiments.types import JudgeItem, Prompt
from racelab.experiments.validation import at_temperature


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that can be wrong with the outside, found before a run folder exists.

    Attributes:
        prompts: training and held-out prompts, not yet cut to the model's window.
        lines: what the loaders have to say.
        model: folder of the trained model.
        judge: folder of the judge, None if it is the untrained policy.
        encoder: folder of the encoder.
        needs: what the method asks for beside them.
    """

    prompts: PromptData
    lines: tuple[str, ...]
    model: Path
    judge: Path | None
    encoder: Path
    needs: Needs = field(default_factory=Needs)


def find_inputs(config: Config, root: Path) -> Inputs:
    """Reads the data and finds the models; `root` is the folder of the runs.

    Raises:
        RacelabError: one line naming the file, key or package that is missing or wrong.
    """
    if config.backend.name != "local":
        raise UnreachableError(
            f"backend={config.backend.name} is not in racelab yet; backend=local runs every method on one device"
        )
    if config.tracking.mlflow:
        tracking_uri(
            root, config.tracking.uri or None
        )  # a bad address is an error now, not when the run is under way
    data, report = load_prompts(config.data, config.run.seed)
    if len(data.train) < config.method.prompts_per_step:
        raise ConfigError(
            f"{len(data.train)} training prompts are fewer than method.prompts_per_step="
            f"{config.method.prompts_per_step}; raise data.limit or lower it"
        )
    needs = find_needs(config, data)
    m, j, e = config.model, config.judge, config.encoder
    return Inputs(
        prompts=data,
        lines=(report.line(), *needs.lines),
        model=resolve_model(m.source, sha256=m.sha256, revision=m.revision),
        judge=None if j.source == "policy" else resolve_model(j.source, sha256=j.sha256, revision=j.revision),
        encoder=resolve_model(e.source, sha256=e.sha256, revision=e.revision),
        needs=needs,
    )


def build_parts(config: Config, inputs: Inputs) -> tuple[Parts, PromptData, tuple[str, ...]]:
    """The parts, the prompts cut to the window, and lines about the cutting. The judge is not yet calibrated."""
    import torch

    from racelab.experiments.backends.local.learner import LocalBackend
    from racelab.experiments.backends.local.model import open_language_model

    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    device = torch_device(config.model.device)
    m = config.model
    policy = open_language_model(
        inputs.model,
        role="policy",
        engine=m.engine,
        compute_dtype=m.compute_dtype,
        device=device,
        train_from_layer=m.train_from_layer,
    )
    backend = LocalBackend(policy, learner_settings(config))
    generator, untrained = (_generator(config, model) for model in (backend.policy, backend.reference))
    encoder = SentenceEncoder(
        inputs.encoder,
        pooling=config.encoder.pooling,
        max_length=config.encoder.max_length,
        device=device,
    )
    judge_model: LanguageModel = backend.reference
    if inputs.judge is not None:
        judge_model = open_language_model(
            inputs.judge, role="frozen", engine=m.engine, compute_dtype=m.compute_dtype, device=device
        )
    judge = build_judge(
        config.judge.kind,
        model=judge_model,
        encoder=encoder,
        settings=JUDGE_SETTINGS[config.judge.kind](config.judge, config.run.seed),
        model_id=model_sha256(inputs.judge or inputs.model),
    )
    prompts, reports = fit_prompts(
        config.data, inputs.prompts, lambda text: len(policy.encode(text)), _room(config, generator)
    )
    lines = tuple(
        f"{r.truncated} prompts cut and {r.dropped} dropped at {r.limit} tokens"
        for r in reports
        if r.truncated or r.dropped
    )
    parts = Parts(
        generator=generator,
        untrained=untrained,
        judge=judge,
        encoder=encoder,
        backend=backend,
        stream=SeededStream(prompts.train, config.run.seed),
        rng=Streams(config.run.seed),
        judge_model=judge_model,
        seed=config.run.seed,
    )
    return parts, prompts, lines


def ruler(parts: Parts, config: Config) -> Generator:
    """The untrained model as all methods are measured by it: no key of a method changes how it samples."""
    v = config.validation
    return at_temperature(parts.untrained, v.temperatures[0], v.rubric_temperature)


def calibrated(parts: Parts, config: Config, prompts: PromptData, known: Mapping[str, Any] | None) -> Judge:
    """The judge, with the scales that it needs: from `known` (a resumed run) or from base samples."""
    judge = parts.judge
    if not isinstance(judge, LikelihoodJudge) or not isinstance(config.judge, schema.LikelihoodJudgeConfig):
        return judge
    if known is not None:
        return judge.with_calibration(Calibration.from_json(known))
    chosen = prompts.train[: config.judge.calibration_prompts]
    rng = torch_generator(config.run.seed, "calibration")
    rollouts = ruler(parts, config).rollouts(list(chosen), config.judge.calibration_samples, rng)
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


JUDGE_SETTINGS: dict[str, Callable[[Any, int], JudgeSettings]] = {
    "likelihood": _likelihood,
    "digit": _digit,
    "json": json_settings,
}


def _generator(config: Config, model: LanguageModel) -> Generator:
    response, rubric = config.method.response, config.method.rubric
    templates = default_templates(rubric.format)
    parsing = RubricSettings(
        format=rubric.format,
        min_criteria=rubric.min_criteria,
        max_criteria=rubric.max_criteria,
        on_parse_failure=rubric.on_parse_failure,
        copied=templates.rubric.examples if rubric.drop_copied_examples else (),
    )
    settings = GeneratorSettings(
        response=SamplingSettings(response.max_tokens, response.temperature, response.top_p),
        rubric=SamplingSettings(rubric.max_tokens, rubric.temperature, rubric.top_p),
        parsing=parsing,
    )
    return Generator(model, templates=templates, settings=settings)


def _room(config: Config, generator: Generator) -> int:
    """Tokens that the window leaves for a prompt, once template and answer have theirs."""
    empty = Prompt(prompt_id="empty", text="")
    response = config.method.response.max_tokens + len(generator.response_prefix(empty))
    rubric = config.method.rubric.max_tokens + len(generator.rubric_prefix(empty))
    room = generator.model.window - max(response, rubric)
    if room < 1:
        raise ConfigError(
            f"template and answer take {max(response, rubric)} of the model's {generator.model.window} tokens; "
            "lower method.response.max_tokens and method.rubric.max_tokens"
        )
    return room
