"""ScienceWorld as a task: splits, prompt, environments, simulators (RLDS App. D.3)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from racelab.configs.schema_rlds import ScienceWorldTask
from racelab.experiments.data.instances import instances_digest
from racelab.experiments.episodes import Instance
from racelab.experiments.errors import UnreachableError
from racelab.experiments.models.assets import cache_dir
from racelab.experiments.tasks.common import ACTION_END
from racelab.experiments.tasks.scienceworld.env import Rules, ScienceWorldEnv
from racelab.experiments.tasks.scienceworld.installation import INSTALL_JAVA, find_installation, java_version
from racelab.experiments.tasks.scienceworld.jvm import Simulator, SimulatorFaultError
from racelab.experiments.tasks.scienceworld.pool import JvmPool
from racelab.experiments.tasks.scienceworld.reward import Shaping
from racelab.experiments.tasks.scienceworld.splits import (
    Side,
    Variations,
    check_names,
    instances,
    read_variations,
    task_names,
)
from racelab.experiments.tasks.scienceworld.taxonomy import DEMONSTRATION, SUBTASKS, SYSTEM_PROMPT


class ScienceWorld:
    """The task of `task=scienceworld`."""

    name = "scienceworld"
    subtasks = SUBTASKS
    tools: tuple[Mapping[str, Any], ...] = ()
    stops = (ACTION_END,)

    def __init__(self, config: ScienceWorldTask) -> None:
        """Looks for the packages and Java, and checks names; starts nothing.

        Raises:
            MissingDependencyError: a package is missing.
            UnreachableError: Java is missing.
            ConfigError: a name in the config is unknown.
        """
        self._config = config
        self._installation = find_installation()
        self._names = task_names(self._installation.tasks_file)
        check_names(config, self._names)
        self.concurrency: int | None = config.jvms
        self._pool = JvmPool(self._start, config.jvms)
        self._rules = Rules(
            config.simplification,
            config.max_turns,
            config.repeat_limit,
            Shaping(
                config.stagnant_factor,
                config.no_experiment_factor,
                config.no_experiment_from,
                config.reasoning_penalty,
                config.diversity_bonus,
            ),
        )

    @property
    def demonstration(self) -> tuple[tuple[str, str], ...]:
        """Two commands, if the config asks for it."""
        return DEMONSTRATION if self._config.demonstration else ()

    def train(self) -> tuple[Instance, ...]:
        """The training examples.

        Raises:
            ConfigError: the config asks for more than the split has.
            UnreachableError: the simulator, asked for its variations, does not start.
        """
        return self._side("train")

    def validation(self) -> tuple[Instance, ...]:
        """The fixed validation slice; raises what `train` does."""
        return self._side("validation")

    def system_prompt(self, addition: str = "") -> str:
        """Ours, since the paper prints none; the addition, if there is one, stands below the rules."""
        return f"{SYSTEM_PROMPT}\n\n# Additions\n{addition.strip()}" if addition.strip() else SYSTEM_PROMPT

    def open(self, instance: Instance) -> ScienceWorldEnv:
        """An environment with a simulator of its own; waits while `concurrency` of them are open.

        Raises:
            UnreachableError: no simulator can be started.
        """
        return ScienceWorldEnv(instance, self._pool, self._rules)

    def metrics(self) -> Mapping[str, float]:
        """Simulators started and restarted, their faults by kind, steps, and steps per second inside of them."""
        counts = self._pool.take_counters()
        seconds = counts.pop("step_s")
        found = {f"jvm_{name}": value for name, value in counts.items() if name != "steps"}
        found["jvm_faults"] = sum(v for name, v in found.items() if name.startswith("jvm_fault_"))
        found["env_steps"] = counts["steps"]
        if seconds:
            found["env_steps_per_s"] = counts["steps"] / seconds
        return found

    def describe(self) -> dict[str, object]:
        """Versions, the simulator's hash, and a hash of each split."""
        found, c = self._installation, self._config
        return {
            "task": self.name,
            "scienceworld": found.version,
            "jar_sha256": hashlib.sha256(found.jar.read_bytes()).hexdigest(),
            "java": java_version(found.java),
            "split": c.split,
            "simplification": c.simplification,
            "data_seed": c.data_seed,
            "hashes": {
                "train": instances_digest(self.train()),
                "validation": instances_digest(self.validation()),
            },
        }

    def close(self) -> None:
        """Ends all simulators. May be called twice."""
        self._pool.close()

    def _start(self) -> Simulator:
        return Simulator(self._installation, self._config.heap_mb, self._config.step_timeout_s)

    def _side(self, side: Side) -> tuple[Instance, ...]:
        if side not in self._sides:
            self._sides[side] = instances(self._config, self._variations, side)
        return self._sides[side]

    @cached_property
    def _sides(self) -> dict[Side, tuple[Instance, ...]]:
        return {}

    @cached_property
    def _variations(self) -> Variations:
        cache = cache_dir() / "scienceworld" / f"variations-{self._installation.version}.json"
        try:
            return read_variations(self._names, cache, self._start)
        except SimulatorFaultError as error:
            raise UnreachableError(
                f"ScienceWorld does not start ({error}); check `java -version` ({INSTALL_JAVA})"
            ) from error
