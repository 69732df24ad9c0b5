"""The parts that a method works with, wired once by `build.py` and passed on as one value."""

from __future__ import annotations

from dataclasses import dataclass

from racelab.experiments.models.generator import Generator
from racelab.experiments.ports import Backend, Encoder, Judge, PromptStream
from racelab.experiments.rng import Streams


@dataclass(frozen=True, slots=True)
class Parts:
    """Models, data and randomness of one run.

    Attributes:
        generator: both roles of the trained model (RACE §5: shared weights).
        untrained: both roles of the frozen starting point.
        judge: frozen.
        encoder: frozen.
        backend: the trained weights and the optimiser.
        stream: training prompts.
        rng: the generators of the training loop.
    """

    generator: Generator
    untrained: Generator
    judge: Judge
    encoder: Encoder
    backend: Backend
    stream: PromptStream
    rng: Streams

    def forget(self) -> None:
        """Empties caches before a step, so that a step computes the same bits in a run that was resumed there."""
        self.encoder.forget()
