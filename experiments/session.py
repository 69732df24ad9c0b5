"""A whole run of any family: what it needs, its folder, and who runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from racelab.configs.schema import Config
from racelab.configs.schema_eval import EvalRunConfig
from racelab.configs.schema_rlds import AnyConfig
from racelab.experiments.attempt import Attempt, Outcome, Talk
from racelab.experiments.environment import Surroundings
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import StopRequest

__all__ = ["Attempt", "Outcome", "Talk", "new_run", "open_session", "prepare"]


def new_run(
    config: AnyConfig,
    *,
    root: Path,
    composed_yaml: str,
    overrides: list[str],
    command: str,
    name: str = "",
    run_id: str | None = None,
    more: Mapping[str, object] = MappingProxyType({}),
    around: Surroundings | None = None,
) -> RunFolder:
    """The folder of a new run, `run.json` first; a cell of a sweep brings name, id, surroundings and further facts."""
    name = name or config.run.name or f"{config.title}-s{config.run.seed}"
    kind = "eval" if isinstance(config, EvalRunConfig) else "train"
    info = {"kind": kind, **config.facts(), "command": command, "cwd": str(Path.cwd())}
    return RunFolder.create(
        root,
        name,
        composed_yaml=composed_yaml,
        overrides=overrides,
        info=info | dict(more),
        run_id=run_id,
        around=around,
    )


def prepare(config: AnyConfig, root: Path, folder: RunFolder | None = None) -> Any:
    """Everything that can be wrong with the outside, found before a run folder exists.

    Args:
        config: of the run.
        root: folder of the runs.
        folder: of a run that goes on.

    Raises:
        RacelabError: one line naming the file, key, package or server that is missing or wrong.
    """
    if isinstance(config, Config):
        from racelab.experiments.build import find_inputs

        return find_inputs(config, root)
    if isinstance(config, EvalRunConfig):
        from racelab.experiments.evaluation.build import find_evaluation

        known = folder.info().get("evaluates") if folder is not None else None
        return find_evaluation(config, root, known)
    from racelab.experiments.build_rlds import find_task

    return find_task(config, root)


def open_session(config: AnyConfig, folder: RunFolder, inputs: Any, talk: Talk, stop: StopRequest) -> Attempt:
    """The attempt that runs this config on this folder; `inputs` from `prepare`."""
    if isinstance(config, Config):
        from racelab.experiments.session_race import RaceSession

        return RaceSession(config, folder, inputs, talk, stop)
    if isinstance(config, EvalRunConfig):
        from racelab.experiments.session_eval import EvalSession

        return EvalSession(config, folder, inputs, talk, stop)
    from racelab.experiments.session_rlds import RldsSession

    return RldsSession(config, folder, inputs, talk, stop)
