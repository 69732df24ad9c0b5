"""The parts of an RLDS run, wired once by `build_rlds.py` and passed on as one value."""

from __future__ import annotations

from dataclasses import dataclass

from racelab.experiments.data.instances import InstanceStream
from racelab.experiments.ports import Actor, Backend, Grader, Reflector, Task
from racelab.experiments.rng import Streams


@dataclass(frozen=True, slots=True)
class RldsParts:
    """Who plays, grades, reflects and learns.

    Attributes:
        actor: plays episodes with the trained model as it is now.
        grader: None where nothing is graded.
        reflector: None where nothing is retried.
        task: data, environment, taxonomy.
        backend: the trained weights and the optimiser.
        stream: training instances.
        rng: the generators of the training loop.
        seed: of the run.
    """

    actor: Actor
    grader: Grader | None
    reflector: Reflector | None
    task: Task
    backend: Backend
    stream: InstanceStream
    rng: Streams
    seed: int = 0

    def forget(self) -> None:
        """Nothing is cached from one step to the next that could change a bit."""
