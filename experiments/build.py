"""Wires the parts of a run from its config. Imports torch and transformers: called only when a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from racelab.configs.schema import Config
from racelab.experiments.data.load import fit_prompts, load_prompts
from racelab.experiments.data.sources import PromptData
from racelab.experiments.data.stream import SeededStream
from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.learning import learner_settings
from racelab.experiments.models.api import ApiModel
from racelab.experiments.models.api_settings import ApiSettings
from racelab.experiments.models.assets import model_sha256, resolve_model
from racelab.experiments.models.configured import find_judge, judge_settings, make_generator, with_scales
from racelab.experiments.models.encoder import SentenceEncoder
from racelab.experiments.models.generator import Generator
from racelab.experiments.models.judge import build_judge
from racelab.experiments.needs import Needs, find_needs, torch_device
from racelab.experiments.parts import Parts
from racelab.experiments.ports import Judge, LanguageModel
from racelab.experiments.rng import Streams
from racelab.experiments.tracking.mlflow_store import tracking_uri
from racelab.experiments.types import Prompt
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
        server: the judge's, which has answered; None for a judge of this process.
    """

    prompts: PromptData
    lines: tuple[str, ...]
    model: Path
    judge: Path | None
    encoder: Path
    needs: Needs = field(default_factory=Needs)
    server: ApiSettings | None = None


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
    m, e = config.model, config.encoder
    judge, server = find_judge(config.judge)
    return Inputs(
        prompts=data,
        lines=(report.line(), *needs.lines),
        model=resolve_model(m.source, sha256=m.sha256, revision=m.revision),
        judge=judge,
        encoder=resolve_model(e.source, sha256=e.sha256, revision=e.revision),
        needs=needs,
        server=server,
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
    generator, untrained = (
        make_generator(config.method, model) for model in (backend.policy, backend.reference)
    )
    encoder = SentenceEncoder(
        inputs.encoder,
        pooling=config.encoder.pooling,
        max_length=config.encoder.max_length,
        device=device,
    )
    judge_model: LanguageModel | None = backend.reference if inputs.server is None else None
    if inputs.judge is not None:
        judge_model = open_language_model(
            inputs.judge, role="frozen", engine=m.engine, compute_dtype=m.compute_dtype, device=device
        )
    judge = build_judge(
        config.judge.kind,
        model=judge_model,
        encoder=encoder,
        chat=None if inputs.server is None else ApiModel(inputs.server),
        settings=judge_settings(config.judge, config.run.seed),
        model_id=model_sha256(inputs.judge or inputs.model),
    )
    prompts, reports = fit_prompts(
        config.data, inputs.prompts, lambda text: len(policy.encode(text)), room(config, generator)
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
    return as_ruler(parts.untrained, config)


def as_ruler(untrained: Generator, config: Config) -> Generator:
    """The same for a generator alone."""
    v = config.validation
    return at_temperature(untrained, v.temperatures[0], v.rubric_temperature)


def calibrated(parts: Parts, config: Config, prompts: PromptData, known: Mapping[str, Any] | None) -> Judge:
    """The judge, with the scales that it needs: from `known` (a resumed run) or from base samples."""
    return with_scales(
        parts.judge,
        config.judge,
        known,
        ruler=lambda: ruler(parts, config),
        prompts=prompts.train,
        seed=config.run.seed,
    )


def room(config: Config, generator: Generator) -> int:
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
