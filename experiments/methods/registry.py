"""The methods that a run can name. A new method: its file, a YAML, a schema class, one line here, a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from racelab.configs.schema import Config
from racelab.experiments.methods.baselines.evolm import Evolm
from racelab.experiments.methods.baselines.rar import rar
from racelab.experiments.methods.baselines.rlcer import Rlcer
from racelab.experiments.methods.baselines.rrd import rrd
from racelab.experiments.methods.baselines.rubric_arm import RubricArm
from racelab.experiments.methods.baselines.scalar_rm import scalar_rm
from racelab.experiments.methods.baselines.static_rubric import prompted
from racelab.experiments.methods.race.step import Race
from racelab.experiments.parts import Parts
from racelab.experiments.types import StepRecord


class Method(Protocol):
    """What the loop asks of a method. Its state is a frozen value with `step` and a JSON form."""

    def start(self) -> Any:
        """The state before the first step."""

    def load(self, state: Mapping[str, Any]) -> Any:
        """The state from its JSON form."""

    def done(self, state: Any) -> bool:
        """True once the budget is used up."""

    def step(self, state: Any) -> tuple[Any, StepRecord]:
        """The next state, and what happened."""

    def finish(self, state: Any, reason: str) -> list[dict[str, object]]:
        """Rows of `phases` for what the run stops in the middle of."""


class _Make(Protocol):
    def __call__(
        self, config: Any, parts: Parts, *, policy_updates: int, max_steps: int | None
    ) -> Method: ...


METHODS: dict[str, _Make] = {
    "race": Race,
    "evolm": Evolm,
    "rlcer": Rlcer,
    "prompted-api": prompted,
    "prompted-policy": prompted,
    "rar": rar,
    "rrd": rrd,
    "rubric-arm": RubricArm,
    "scalar-rm": scalar_rm,
}
"""`method.name` -> its maker."""


def make_method(config: Config, parts: Parts) -> Method:
    """The method that the config names, over its parts."""
    run = config.run
    make = METHODS[config.method.name]
    return make(config.method, parts, policy_updates=run.policy_updates, max_steps=run.max_steps)
