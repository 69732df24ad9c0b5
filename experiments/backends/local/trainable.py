"""What the learner asks of a model: log-probabilities, gradients, masters. Every engine of this backend has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from racelab.experiments.backends.local.head import Coefficient
from racelab.experiments.backends.local.packing import Group

if TYPE_CHECKING:
    from torch import Tensor


class Core(Protocol):
    """The weights.

    Attributes:
        masters: name -> float32 parameter that the optimiser steps; each has its gradient in `.grad`.
        train_from: first trained layer; None for a frozen model.
        device: where it computes.
    """

    masters: dict[str, Tensor]
    train_from: int | None
    device: str

    def refresh(self) -> None:
        """Makes the compute copies follow the masters."""


class Trainable(Protocol):
    """A model that can be trained in this process."""

    core: Any
    path: Path
    window: int

    @property
    def engine(self) -> str:
        """Name, stored with checkpoints."""

    def check_groups(self, groups: Sequence[Group]) -> None:
        """Raises DataError for what cannot be scored."""

    def score(self, groups: Sequence[Group], temperature: float) -> Tensor:
        """Log p of every token of every sample, flat [tokens] float32, without gradient."""

    def accumulate(
        self,
        groups: Sequence[Group],
        temperature: float,
        coefficient: Callable[[Tensor | None], Coefficient],
        reference: Self | None,
    ) -> Tensor:
        """Adds the gradient to the masters; flat log-probs.

        `coefficient(reference log-probs)` gives the loss's slope at a piece of tokens: (c [m], h [m] or None), for a
        loss with d loss / d log p_t = c_t and a term - h_t H_t, where H_t is the entropy of the distribution that
        token t was scored under (softmax(logits / temperature)).
        """

    def frozen_copy(self) -> Self:
        """The present weights as a frozen model."""
