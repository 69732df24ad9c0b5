"""Which variations are trained on and which validate (RLDS App. D.3, Table 2).

`split: variations`: of each of the 30 tasks, a share of the benchmark's train variations trains, and the same share
of its dev variations validates. A share of a half, rounded down per task, gives Table 2's 1,796 and 887 exactly.
`split: tasks`: the tasks named in `train_tasks` train (their train variations), all others validate (their dev
variations). R3L's 17/13 list is not printed, so the list in `configs/rlds/task/scienceworld.yaml` is ours: every
topic of the benchmark has tasks on both sides.

Ours, since the paper says only "sampled at 50%": the variations are drawn without replacement by `task.data_seed`, one
stream per task and side (the numbering is systematic: the first half would leave out whole materials), and each split
is in a seeded order, so that its first n examples are a mixed sample. A variation is one world, the same for each
rollout and epoch (`jvm.py`). The paper's "every example draws a fresh JVM seed" is no option of this simulator: it
seeds itself with the variation, and only the order of its sets varies between loads unless it is held fixed.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from racelab.configs.schema_rlds import ScienceWorldTask
from racelab.experiments.episodes import Instance
from racelab.experiments.errors import ConfigError, MissingDependencyError, RunFolderError
from racelab.experiments.fsio import read_json, write_json_atomic
from racelab.experiments.rng import numpy_generator
from racelab.experiments.tasks.scienceworld.installation import INSTALL_PACKAGE
from racelab.experiments.tasks.scienceworld.jvm import Simulator

Side = Literal["train", "validation"]
Variations = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""Per task its train and its dev variations."""

SIMPLIFICATIONS = (
    "easy",
    "teleportAction",
    "openDoors",
    "openContainers",
    "selfWateringFlowerPots",
    "noElectricalAction",
)
"""What the simulator knows; it passes over others without a word."""


def task_names(tasks_file: Path) -> tuple[str, ...]:
    """The package's 30 names, in its order.

    Raises:
        MissingDependencyError: the file cannot be read.
    """
    try:
        return tuple(str(task["task_name"]) for task in json.loads(tasks_file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MissingDependencyError(
            f"{tasks_file} cannot be read; install the package again: {INSTALL_PACKAGE}"
        ) from error


def check_names(config: ScienceWorldTask, names: Sequence[str]) -> None:
    """Finds names that the package does not have, and splits that would be empty on one side.

    Raises:
        ConfigError: with the nearest names.
    """
    for name in config.train_tasks:
        if name not in names:
            raise ConfigError(
                f"task.train_tasks names {name!r}, which is no ScienceWorld task{_near(name, names)}"
            )
    if len(set(config.train_tasks)) < len(config.train_tasks):
        raise ConfigError("task.train_tasks names a task twice; drop one of them")
    if config.split == "tasks" and not 0 < len(config.train_tasks) < len(names):
        raise ConfigError(
            f"task.split=tasks trains on {len(config.train_tasks)} of {len(names)} tasks; name some of them in "
            "task.train_tasks and leave some to validate on"
        )
    given = [part for part in config.simplification.split(",") if part]
    for part in given:
        if part not in SIMPLIFICATIONS:
            raise ConfigError(
                f"task.simplification has {part!r}, which ScienceWorld does not know{_near(part, SIMPLIFICATIONS)}"
            )


def _near(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; near: {', '.join(found)}" if found else f"; it knows {', '.join(known)}"


def read_variations(names: Sequence[str], cache: Path, start: Callable[[], Simulator]) -> Variations:
    """The benchmark's variations: from the cache, else asked from a simulator (about two seconds) and kept there.

    Args:
        names: of the tasks.
        cache: a file; its name tells the version of the package.
        start: makes a simulator, which is ended again.

    Raises:
        SimulatorFaultError: there is no cache, and the simulator failed.
    """
    with contextlib.suppress(RunFolderError, TypeError, ValueError, AttributeError):
        kept = {
            str(task): (tuple(int(i) for i in train), tuple(int(i) for i in dev))
            for task, (train, dev) in read_json(cache).items()
        }
        if set(kept) == set(names):
            return kept
    simulator = start()
    try:
        found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for name in names:
            simulator.load(name, 0, "")
            found[name] = simulator.variations()
    finally:
        simulator.close()
    with contextlib.suppress(
        RunFolderError, OSError
    ):  # a home that cannot be written costs two seconds a run
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(cache, {task: [list(train), list(dev)] for task, (train, dev) in found.items()})
    return found


def instances(config: ScienceWorldTask, variations: Variations, side: Side) -> tuple[Instance, ...]:
    """One side of the split, in its seeded order, the first `train_examples` or `validation_examples` of it.

    Raises:
        ConfigError: the config asks for more than there are.
    """
    found = [
        _instance(task, number)
        for task in sorted(_tasks(config, variations, side))
        for number in _drawn(config, task, variations[task][side == "validation"], side)
    ]
    key = f"{side}_examples"
    wanted = int(getattr(config, key))
    if wanted > len(found):
        raise ConfigError(
            f"task.{key}={wanted}, but task.split={config.split} has {len(found)}; set task.{key}={len(found)}"
        )
    order = numpy_generator(config.data_seed, f"scienceworld-order-{side}").permutation(len(found))
    return tuple(found[i] for i in order[:wanted])


def _tasks(config: ScienceWorldTask, variations: Variations, side: Side) -> set[str]:
    if config.split == "variations":
        return set(variations)
    trained = set(config.train_tasks)
    return trained if side == "train" else set(variations) - trained


def _drawn(config: ScienceWorldTask, task: str, numbers: Sequence[int], side: Side) -> list[int]:
    """floor(n · share) of them, ascending."""
    count = int(len(numbers) * config.variation_share + 1e-9)
    rng = numpy_generator(config.data_seed, f"scienceworld-{side}-{task}")
    return sorted(int(numbers[i]) for i in rng.choice(len(numbers), size=count, replace=False))


def _instance(task: str, variation: int) -> Instance:
    return Instance("scienceworld", f"{task}/{variation}", {"task": task, "variation": variation})
