"""For every test: no hub, no telemetry, one compute thread, and a home of its own for runs.

The variables are set while pytest collects, before any library reads them, so child processes inherit them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

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
