"""For every test: no hub, no telemetry, one compute thread, and a home of its own for runs.

The variables are set while pytest collects, before any library reads them, so child processes inherit them.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "NO_COLOR": "1",
}
os.environ.update(_ENVIRONMENT)
# A runner started in the background ignores SIGINT, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# With the frameworks loaded a collection walks a million objects; by default they take a fifth of what composing takes.
gc.set_threshold(20_000, 50, 100)
# What the caller's shell says must not decide what a test sees.
for _name in (
    "RACELAB_CONFIG_PATH",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_ID",
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
    "FORCE_COLOR",
    "RACELAB_FENCE",
    "RACELAB_FENCE_RUN",
    "RACELAB_FENCE_WAIT",
    "RACELAB_SHIP",
    "RACELAB_LAUNCH_DEPTH",
    "RACELAB_PARENT_PID",
):
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True, scope="session")
def racelab_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A fresh `RACELAB_HOME` for the whole session (one per worker process)."""
    home = tmp_path_factory.mktemp("racelab-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RACELAB_HOME", str(home))
        yield home


@pytest.fixture(autouse=True, scope="session")
def composed_once() -> Iterator[None]:
    """The same words are composed by Hydra once per process, and an option file of ours is parsed once.

    A composition is a pure function of words and files, and a tenth of a second; the suite makes thousands. Where a
    test brings folders or interpolations of its own, Hydra is asked every time.
    """
    from racelab.configs import compose

    with pytest.MonkeyPatch.context() as patch:
        real = compose._hydra_compose
        kept: dict[tuple[object, ...], Any] = {}
        hydra: list[bool] = []

        def once(words: Any, known: Any, dirs: Any, first: Any, family: Any) -> Any:
            if not hydra:
                hydra.append(True)  # only now, so that what composes nothing does not load it
                patch.setattr(*_parsed_once(compose.CONFIG_DIR))
            key = (*words, "", *first, family.name, family.folder)
            if dirs or any("${" in word.text for word in words):
                return real(words, known, dirs, first, family)
            if key not in kept:
                kept[key] = real(words, known, dirs, first, family)
            return copy.deepcopy(kept[key])

        patch.setattr(compose, "_hydra_compose", once)
        yield


def _parsed_once(folder: Path) -> tuple[type, str, Callable[..., Any]]:
    """Hydra's reader of files, with a memory for those in a folder."""
    from hydra._internal.core_plugins.file_config_source import FileConfigSource

    real = FileConfigSource.load_config
    kept: dict[tuple[str, str], Any] = {}

    def load(source: Any, config_path: str) -> Any:
        if not Path(source.path).is_relative_to(folder):
            return real(source, config_path)
        key = source.path, config_path
        if key not in kept:
            kept[key] = real(source, config_path)
        return copy.deepcopy(kept[key])

    return FileConfigSource, "load_config", load
