"""The model under test, ready to be asked. Imports torch, transformers or vLLM when it is called."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from racelab.configs.schema_eval import EvalRunConfig
from racelab.experiments.checkpoint import CheckpointStore
from racelab.experiments.errors import ConfigError, ModelError
from racelab.experiments.evaluation.subject.api import ApiSubject
from racelab.experiments.evaluation.subject.find import in_subject, url_settings
from racelab.experiments.evaluation.subject.found import Found
from racelab.experiments.evaluation.subject.local import LocalSubject
from racelab.experiments.evaluation.types import Subject
from racelab.experiments.models.api import ApiModel

if TYPE_CHECKING:
    from racelab.experiments.backends.local.model import LocalModel


def open_subject(config: EvalRunConfig, found: Found, note: Callable[[str], None]) -> Subject:
    """Loads the model, or opens the client of its server; the caller closes it.

    Args:
        config: of the evaluation.
        found: from `find_subject`.
        note: says what takes a while.

    Raises:
        RacelabError: a model that cannot be run as the config says, or a checkpoint that is damaged.
    """
    for line in found.lines:
        note(line)
    if found.engine == "server":
        return _server(config, found)
    if found.engine == "vllm":
        return _vllm(config, found, note)
    return _local(config, found)


def _server(config: EvalRunConfig, found: Found) -> ApiSubject:
    settings = replace(url_settings(config), model=found.model)
    return ApiSubject(
        ApiModel(settings),
        seed=config.run.seed,
        thinking=config.subject.thinking,
        think_end=config.eval.think_end,
        window=found.window,
        facts=found.facts,
    )


def _local(config: EvalRunConfig, found: Found) -> LocalSubject:
    model = open_model(config, found)
    how = {
        "engine": model.engine,
        "compute_dtype": config.subject.compute_dtype,
        "device": str(model.core.device),
    }
    return LocalSubject(
        model,
        seed=config.run.seed,
        batch=config.eval.batch,
        thinking=config.subject.thinking,
        facts={**found.facts, **how},
    )


def _vllm(config: EvalRunConfig, found: Found, note: Callable[[str], None]) -> Subject:
    from racelab.experiments.evaluation.subject.vllm_engine import VllmSubject, open_vllm

    assert found.folder is not None
    scratch = None
    try:
        folder = found.folder
        if found.trained is not None:
            scratch = Path(tempfile.mkdtemp(prefix="racelab-vllm-"))
            note("writing the checkpoint as a model folder for vLLM")
            folder = _exported(config, found, scratch / "model")
        note("starting vLLM")
        llm, sampling = open_vllm(folder, config.subject, config.run.seed)
        return VllmSubject(
            llm,
            sampling,
            seed=config.run.seed,
            batch=config.eval.batch,
            thinking=config.subject.thinking,
            facts={**found.facts, "compute_dtype": config.subject.compute_dtype},
            scratch=scratch,
        )
    except BaseException:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        raise


def open_model(config: EvalRunConfig, found: Found) -> LocalModel:
    """The model of this process, frozen; of a run, with the weights of its checkpoint.

    Raises:
        ModelError, ConfigError: it cannot be run so.
        CheckpointError: damaged, or it does not fit.
    """
    from racelab.experiments.backends.local.model import open_language_model
    from racelab.experiments.needs import torch_device

    assert found.folder is not None
    s = config.subject
    device = torch_device(s.device)
    if found.trained is not None:
        return _policy(config, found, device).frozen_copy()
    assert s.engine != "vllm"
    try:
        return open_language_model(
            found.folder,
            role="frozen",
            engine=s.engine,
            compute_dtype=s.compute_dtype,
            device=device,
            window=s.max_length,
        )
    except (ModelError, ConfigError) as error:
        raise type(error)(in_subject(str(error))) from error


def _policy(config: EvalRunConfig, found: Found, device: str) -> LocalModel:
    """The run's model as it was trained, with the weights of the checkpoint as its masters."""
    from racelab.experiments.backends.local.model import open_language_model
    from racelab.experiments.backends.local.restore import load_trained

    trained, s = found.trained, config.subject
    assert trained is not None
    assert found.folder is not None
    try:
        model = open_language_model(
            found.folder,
            role="policy",
            engine=trained.engine,
            compute_dtype=s.compute_dtype,
            device=device,
            train_from_layer=trained.train_from_layer,
            window=s.max_length,
        )
    except (ModelError, ConfigError) as error:
        raise type(error)(in_subject(str(error))) from error
    stored = CheckpointStore(trained.run.path / "checkpoints").load(trained.step).tensors
    prefix = f"{trained.role}/" if trained.role else ""
    mine = {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}
    if mine or not prefix:  # weights that the run has not trained yet are the base model's
        load_trained(model, mine)
    return model


def _exported(config: EvalRunConfig, found: Found, folder: Path) -> Path:
    """The checkpoint as a model folder; built on the CPU, since the GPU is vLLM's."""
    from racelab.experiments.backends.local.export import export_model

    exact = config.model_copy(
        update={"subject": config.subject.model_copy(update={"compute_dtype": "float32"})}
    )
    return export_model(_policy(exact, found, "cpu"), folder)
