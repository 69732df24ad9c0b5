"""The parts that a method works with, wired once by `build.py` and passed on as one value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from racelab.experiments.models.generator import Generator, SamplingSettings
from racelab.experiments.ports import (
    Backend,
    Encoder,
    Judge,
    LanguageModel,
    PromptStream,
    RewardModel,
    Verifier,
)
from racelab.experiments.rng import Streams
from racelab.experiments.types import Pair

if TYPE_CHECKING:
    from racelab.experiments.models.chat import ChatModel


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
        judge_model: the language model behind the judge; None where it stands behind a server.
        seed: of the run, for draws that depend on a prompt and not on when it comes.
        proposer: the model that writes rubrics for the prompted and offline baselines (`method.proposer`).
        verifier: checks answers item by item (RLCER).
        reward_model: scores answers without a rubric (scalar-rm).
        pairs: preference pairs (Rubric-ARM, scalar-rm).
        proposal: how the proposer's replies are sampled.

    The last five are None, empty or not looked at for methods that have no use for them: `build.py` fills them in.
    """

    generator: Generator
    untrained: Generator
    judge: Judge
    encoder: Encoder
    backend: Backend
    stream: PromptStream
    rng: Streams
    judge_model: LanguageModel | None = None
    seed: int = 0
    proposer: ChatModel | None = None
    verifier: Verifier | None = None
    reward_model: RewardModel | None = None
    pairs: tuple[Pair, ...] = ()
    proposal: SamplingSettings = field(default_factory=lambda: SamplingSettings(2048, 0.0))

    def forget(self) -> None:
        """Empties caches before a step, so that a step computes the same bits in a run that was resumed there."""
        self.encoder.forget()
