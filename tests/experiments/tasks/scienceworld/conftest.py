"""What the ScienceWorld tests share: the real simulator, in at most two processes.

Without Java or the package they are skipped, except where `CI` is set: there a missing simulator is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import racelab.configs
from racelab.configs.schema_rlds import ScienceWorldTask
from racelab.experiments.episodes import Instance
from racelab.experiments.errors import RacelabError
from racelab.experiments.tasks.scienceworld.env import Rules, ScienceWorldEnv
from racelab.experiments.tasks.scienceworld.installation import Installation, find_installation
from racelab.experiments.tasks.scienceworld.jvm import Simulator
from racelab.experiments.tasks.scienceworld.pool import JvmPool
from racelab.experiments.tasks.scienceworld.reward import Shaping

HEAP_MB, TIMEOUT_S = 256, 20.0


@pytest.fixture(scope="session")
def installation() -> Installation:
    try:
        return find_installation()
    except RacelabError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI must test the simulator: {error}")
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ScienceWorldTask]:
    """The task's YAML with changes."""
    folder = Path(racelab.configs.__file__).parent
    values = yaml.safe_load((folder / "rlds" / "task" / "scienceworld.yaml").read_text(encoding="utf-8"))
    return lambda **changes: ScienceWorldTask(**{**values, **changes})


@pytest.fixture(scope="session")
def start(installation: Installation) -> Callable[[], Simulator]:
    return lambda: Simulator(installation, HEAP_MB, TIMEOUT_S)


@pytest.fixture(scope="session")
def pool(start: Callable[[], Simulator]) -> Iterator[JvmPool]:
    """Two simulators for all tests that break none."""
    pool = JvmPool(start, 2)
    yield pool
    pool.close()


@pytest.fixture
def rules() -> Rules:
    return Rules("easy", 30, 3, Shaping())


@pytest.fixture
def play(pool: JvmPool, rules: Rules) -> Iterator[Callable[..., ScienceWorldEnv]]:
    """Opens environments that are closed at the end of the test."""
    opened: list[ScienceWorldEnv] = []

    def make(task: str = "find-living-thing", variation: int = 0) -> ScienceWorldEnv:
        data = {"task": task, "variation": variation}
        opened.append(ScienceWorldEnv(Instance("scienceworld", f"{task}/{variation}", data), pool, rules))
        return opened[-1]

    yield make
    for env in opened:
        env.close()
