"""Every random draw of a run comes from here: one seed, one independent stream per purpose, all of it resumable.

Streams are derived by purpose and not by order, so that a new use of randomness does not shift the others.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def derived_seed(seed: int, purpose: str, index: int = 0) -> int:
    """A 63-bit seed for `purpose`; the same inputs give the same seed on every machine."""
    digest = hashlib.sha256(f"racelab:{seed}:{purpose}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def torch_generator(seed: int, purpose: str, index: int = 0) -> torch.Generator:
    """A CPU generator for sampling tokens."""
    import torch

    return torch.Generator().manual_seed(derived_seed(seed, purpose, index))


def numpy_generator(seed: int, purpose: str, index: int = 0) -> np.random.Generator:
    """A PCG64 generator."""
    return np.random.Generator(np.random.PCG64(derived_seed(seed, purpose, index)))


class Streams:
    """The generators that a training loop draws from: `sampling` (tokens) and `pool` (entries, random phases)."""

    def __init__(self, seed: int) -> None:
        """Derives the streams from the run's seed."""
        self.sampling = torch_generator(seed, "sampling")
        self.pool = numpy_generator(seed, "pool")

    def state(self) -> dict[str, Any]:
        """JSON; restoring it makes the next draw the same."""
        raw = bytes(self.sampling.get_state().numpy().tobytes())
        return {"sampling": base64.b64encode(raw).decode(), "pool": self.pool.bit_generator.state}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Undoes `state`."""
        import torch

        raw = bytearray(base64.b64decode(state["sampling"]))
        self.sampling.set_state(torch.frombuffer(raw, dtype=torch.uint8))
        self.pool.bit_generator.state = state["pool"]
