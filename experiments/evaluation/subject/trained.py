"""A run as the model under test: which checkpoint, whose weights, over which base model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

from racelab.configs.compose import read_composed
from racelab.configs.schema_eval import EvalRunConfig
from racelab.configs.schema_rlds import RldsRunConfig, TrainConfig
from racelab.experiments.checkpoint import MANIFEST, STATE, TENSORS, CheckpointStore
from racelab.experiments.errors import CheckpointError, ConfigError, ModelError, RunFolderError
from racelab.experiments.evaluation.subject.found import Found, Trained
from racelab.experiments.fsio import read_json
from racelab.experiments.models.assets import model_sha256, resolve_model
from racelab.experiments.runfolder import RunFolder

_CELLS_SHOWN = 5
_FACTS = ("name", "method", "variant", "task", "condition", "seed")


def find_trained(config: EvalRunConfig, run: RunFolder, pinned: int | None = None) -> Found:
    """The checkpoint that `subject` means.

    Args:
        config: of the evaluation.
        run: the run under test.
        pinned: the step that an earlier attempt took, which holds where the config names none.

    Raises:
        RunFolderError: no run that trains, or one without (such) a checkpoint.
        ConfigError: one that plays on grid tokens, or `subject.engine` is not the one that it trained with.
        ModelError: its base model is gone or has changed.
    """
    info = run.info()
    _refuse_kind(run, info)
    trained_by = read_composed(run.path / "config" / "composed.yaml", to_look=True).config
    assert not isinstance(trained_by, EvalRunConfig)  # its kind would be another
    if isinstance(trained_by, RldsRunConfig) and trained_by.model.engine == "grid":
        raise ConfigError(
            f"run {run.run_id} trained the grid model, which plays FrozenLake only and cannot be asked in text; "
            "evaluate a run with model=smollm2-135m or another text model"
        )
    step = _step(run, pinned if config.subject.checkpoint is None else config.subject.checkpoint)
    folder = CheckpointStore(run.path / "checkpoints").path(step)
    state, manifest = (_object(folder / name) for name in (STATE, MANIFEST))
    meta, role, line = _weights_of(state.get("backend"), config.eval.suite, folder)
    trained = _trained(config, run, step, role, meta)
    base = _base(trained_by, info)
    base_sha = model_sha256(base)
    if base_sha != meta.get("base_sha256"):
        raise ModelError(
            f"run {run.run_id} was trained on a base model with SHA-256 {meta.get('base_sha256')}, but {base} has "
            f"{base_sha}; put the model of the run back"
        )
    facts = {
        "kind": "run",
        "source": str(run.path),
        "sha256": base_sha,
        "run_id": run.run_id,
        **{name: info.get(name) for name in _FACTS},
        "checkpoint": step,
        "policy_step": policy_step(state.get("method")),
        "checkpoint_sha256": manifest.get("files", {}).get(TENSORS, {}).get("sha256"),
        **({"role": role} if role else {}),
    }
    lines = (f"checkpoint of step {step} of {info.get('name')} ({run.run_id})", *([line] if line else []))
    return Found("run", "local", base, trained, facts=facts, lines=lines)


def policy_step(method: object) -> int | None:
    """Policy updates in a method's stored state: RACE counts them in its phase, RLDS makes no others."""
    if not isinstance(method, Mapping):
        return None
    phase = method.get("phase")
    places = (method, phase if isinstance(phase, Mapping) else {})
    found = [place["policy_steps"] for place in places if "policy_steps" in place]
    value = found[0] if found else method.get("step")
    return value if type(value) is int else None


def _refuse_kind(run: RunFolder, info: Mapping[str, Any]) -> None:
    kind = info.get("kind")
    if kind == "eval":
        raise RunFolderError(f"{run.run_id} is an evaluation itself; name the run that it evaluated")
    if kind != "sweep":
        return
    cells = [str(cell.get("run_id")) for cell in _cells(run)]
    more = f" and {len(cells) - _CELLS_SHOWN} more" if len(cells) > _CELLS_SHOWN else ""
    raise RunFolderError(
        f"{run.run_id} is a sweep; name one of its cells: {', '.join(cells[:_CELLS_SHOWN]) or 'it has none'}{more}"
    )


def _cells(run: RunFolder) -> list[dict[str, Any]]:
    """The cells that a sweep's stored config lists; none where it cannot be read."""
    import yaml

    try:
        stored = yaml.safe_load((run.path / "config" / "composed.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    cells = stored.get("cells") if isinstance(stored, dict) else None
    return [cell for cell in cells if isinstance(cell, dict)] if isinstance(cells, list) else []


def _step(run: RunFolder, wanted: int | None) -> int:
    steps = CheckpointStore(run.path / "checkpoints").steps()
    if not steps:
        raise RunFolderError(
            f"run {run.run_id} has no checkpoint ({run.status()}); resume it until it has one, or evaluate its base "
            "model"
        )
    if wanted is not None and wanted not in steps:
        shown = ", ".join(map(str, steps))
        raise RunFolderError(
            f"run {run.run_id} has no checkpoint of step {wanted}; set subject.checkpoint to one of {shown}"
        )
    return steps[-1] if wanted is None else wanted


def _object(file: Path) -> dict[str, Any]:
    try:
        value = read_json(file)
    except RunFolderError as error:
        raise CheckpointError(f"checkpoint {file.parent} is damaged: {error}; take another") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"checkpoint {file.parent} is damaged: {file.name} is no object; take another")
    return value


def _weights_of(backend: object, suite: str, folder: Path) -> tuple[Mapping[str, Any], str, str]:
    """The stored facts of the weights that are asked, whose they are, and what to say of it.

    Rubric-ARM trains policy, generator and judge apart: who writes rubrics there is the generator.
    """
    if not isinstance(backend, Mapping):
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {STATE} says nothing of the weights; take another"
        )
    roles = backend.get("roles")
    if not isinstance(roles, Mapping):
        return backend, "", ""
    role = "generator" if suite == "rubric" else "policy"
    if role in roles:
        return roles[role], role, f"of its separately trained weights those of the {role}"
    if not roles:
        raise CheckpointError(f"checkpoint {folder} holds no trained weights; take a later one")
    other: Mapping[str, Any] = next(iter(roles.values()))
    return other, role, f"its {role} was not trained yet: the base model's weights"


def _trained(config: EvalRunConfig, run: RunFolder, step: int, role: str, meta: Mapping[str, Any]) -> Trained:
    engine, asked = meta.get("engine"), config.subject.engine
    if engine not in ("fast", "plain"):
        raise CheckpointError(f"run {run.run_id} trained with engine={engine}, which answers no text")
    if asked in ("fast", "plain") and asked != engine:
        raise ConfigError(
            f"subject.engine={asked}: run {run.run_id} trained with engine={engine}, and its checkpoint fits no other; "
            "set subject.engine=auto"
        )
    return Trained(run, step, role, cast(Literal["fast", "plain"], engine), int(meta["train_from_layer"]))


def _base(config: TrainConfig, info: Mapping[str, Any]) -> Path:
    """The run's base model; a relative folder is looked for where the run was started, too."""
    m = config.model
    there = Path(str(info.get("cwd") or ".")) / m.source
    source = str(there) if not Path(m.source).expanduser().is_dir() and there.is_dir() else m.source
    return resolve_model(source, sha256=m.sha256, revision=m.revision)
