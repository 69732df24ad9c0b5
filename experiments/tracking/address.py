"""Which store a run belongs to, from its folder and the environment. MLflow is not imported."""

from __future__ import annotations

import os
from typing import Any

from racelab.experiments.errors import ConfigError, RunFolderError
from racelab.experiments.fsio import explain
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.mlflow_store import tracking_uri, with_credentials


def stored_config(run: RunFolder) -> dict[str, Any]:
    """The run's `config/composed.yaml`, {} without one.

    Raises:
        RunFolderError: it cannot be read or is no YAML.
    """
    import yaml

    file = run.path / "config" / "composed.yaml"
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunFolderError(f"cannot read {file}: {explain(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = str(error).splitlines()[0]
        raise RunFolderError(f"{file} is not YAML ({line}); restore it from a copy or remove it") from error
    return config if isinstance(config, dict) else {}


def run_uri(run: RunFolder) -> str:
    """The address of the run's store: as its config names it, else MLFLOW_TRACKING_URI, else as recorded.

    So a run that was not bound to a store can be brought to the one that the variable names now.

    Raises:
        RunFolderError: the recorded address is none.
        ConfigError: the variable's is none.
    """
    stored = run.info().get("tracking", {}).get("uri")
    if not stored:
        return tracking_uri(run.path.parent)
    if os.environ.get("MLFLOW_TRACKING_URI") and not _is_bound(run):
        return tracking_uri(run.path.parent)
    try:
        return tracking_uri(run.path.parent, with_credentials(str(stored)))
    except ConfigError as error:
        raise RunFolderError(f"{run.path / 'run.json'}: {error}") from error


def _is_bound(run: RunFolder) -> bool:
    """Whether the run was started with an address of its own."""
    known = run.info()["tracking"].get("configured")
    if known is not None:
        return bool(known)
    tracking = stored_config(run).get("tracking")  # a run of before the field
    return isinstance(tracking, dict) and bool(tracking.get("uri"))
