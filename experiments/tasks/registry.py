"""The tasks that a run can name. A new task: its folder here, a YAML, a schema class, one line below, tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from racelab.configs.schema_rlds import TaskConfig
from racelab.experiments.ports import Task


def _frozenlake(config: Any) -> Task:
    from racelab.experiments.tasks.frozenlake.task import FrozenLake

    return FrozenLake(config)


def _hotpotqa(config: Any) -> Task:
    from racelab.experiments.tasks.hotpotqa.task import HotpotQa

    return HotpotQa(config)


def _scienceworld(config: Any) -> Task:
    from racelab.experiments.tasks.scienceworld.task import ScienceWorld

    return ScienceWorld(config)


def _deepresearch(config: Any) -> Task:
    from racelab.experiments.tasks.deepresearch.task import DeepResearch

    return DeepResearch(config)


TASKS: dict[str, Callable[[Any], Task]] = {
    "frozenlake": _frozenlake,
    "hotpotqa": _hotpotqa,
    "scienceworld": _scienceworld,
    "deepresearch": _deepresearch,
}
"""`task.name` -> its maker; what a task needs is imported when it is made."""


def make_task(config: TaskConfig) -> Task:
    """The task that the config names.

    Raises:
        RacelabError: one line naming what is missing (data, a package, a server) and the mend.
    """
    return TASKS[config.name](config)
