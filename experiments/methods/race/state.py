"""Everything that RACE carries from one step to the next, beside weights, optimiser and random streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from racelab.experiments.methods.race.controllers import Calibration
from racelab.experiments.methods.race.phase import PhaseState
from racelab.experiments.methods.race.pool import Pool
from racelab.experiments.methods.race.routing import Thresholds


@dataclass(frozen=True, slots=True)
class RaceState:
    """One frozen value; with weights, optimiser and random streams it is the whole checkpoint.

    Attributes:
        phase: where Algorithm 1 stands.
        thresholds: in force for the next step.
        q_ema: q̂ of Eq 19.
        pool: the rubric training pool.
        calibration: the warm-up of §5.1, if any.
    """

    phase: PhaseState
    thresholds: Thresholds
    q_ema: float
    pool: Pool
    calibration: Calibration

    @property
    def step(self) -> int:
        """Global steps done."""
        return self.phase.step

    def state(self) -> dict[str, Any]:
        """JSON values; floats survive exactly."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v.state() if hasattr(v, "state") else v for k, v in values.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RaceState:
        """Undoes `state`."""
        return cls(
            phase=PhaseState.from_state(state["phase"]),
            thresholds=Thresholds.from_state(state["thresholds"]),
            q_ema=float(state["q_ema"]),
            pool=Pool.from_state(state["pool"]),
            calibration=Calibration.from_state(state["calibration"]),
        )
