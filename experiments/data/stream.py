"""An endless, seeded order of prompts that can be stopped and resumed at any sample."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from racelab.experiments.errors import CheckpointError, ConfigError, DataError
from racelab.experiments.types import Prompt


def data_digest(prompts: Sequence[Prompt]) -> str:
    """First 16 hex digits of the SHA-256 of all ids and texts, in order."""
    sha = hashlib.sha256()
    for prompt in prompts:
        sha.update(json.dumps([prompt.prompt_id, prompt.text]).encode())
    return sha.hexdigest()[:16]


class SeededStream:
    """Implements `ports.PromptStream`: epoch e is the permutation drawn from SeedSequence([seed, e]).

    A batch may run into the next epoch. A prompt that already stands in that batch is put off to the next
    call, so that no batch holds a prompt twice and every epoch still holds each prompt once.

    Example: 3 prompts, `take(2)` twice: two, then the third and the first of epoch 1 that differs from it.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        """Starts at epoch 0.

        Args:
            prompts: not empty, ids unique.
            seed: >= 0.

        Raises:
            ConfigError: a negative seed.
            DataError: no prompts, or an id twice.
        """
        if seed < 0:
            raise ConfigError(f"run.seed={seed}: must be >= 0")
        if not prompts:
            raise DataError("the prompt stream has no prompts; check data.source and its filters")
        if len({p.prompt_id for p in prompts}) < len(prompts):
            raise DataError("two prompts of the stream have the same id; set data.deduplicate=true")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._digest = data_digest(prompts)
        self._go_to(0, 0, ())

    def _go_to(self, epoch: int, position: int, deferred: Sequence[int]) -> None:
        self._epoch, self._position, self._deferred = epoch, position, list(deferred)
        rng = np.random.default_rng(np.random.SeedSequence([self._seed, epoch]))
        self._order = [int(i) for i in rng.permutation(len(self._prompts))]

    @property
    def epoch(self) -> int:
        """The epoch that the last prompt came from; 0 before the first call."""
        return self._epoch

    def take(self, n: int) -> list[Prompt]:
        """The next n different prompts.

        Raises:
            ConfigError: n < 1, or more than there are prompts.
        """
        if not 1 <= n <= len(self._prompts):
            raise ConfigError(
                f"{n} prompts per step, but the data has {len(self._prompts)}; "
                "lower the prompts per step or raise data.limit"
            )
        batch: dict[int, None] = {}
        waiting = self._deferred
        self._deferred = []
        while len(batch) < n:
            if waiting:
                index = waiting.pop(0)
            else:
                if self._position == len(self._order):
                    self._go_to(self._epoch + 1, 0, self._deferred)
                index = self._order[self._position]
                self._position += 1
            if index in batch:
                self._deferred.append(index)
            else:
                batch[index] = None
        self._deferred += waiting
        return [self._prompts[i] for i in batch]

    def state(self) -> dict[str, Any]:
        """JSON: epoch, position in it, prompts put off, seed and the digest of the data."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "deferred": list(self._deferred),
            "seed": self._seed,
            "digest": self._digest,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on exactly where `state` was taken.

        Raises:
            CheckpointError: the state is malformed.
            ConfigError: it was taken with another seed.
            DataError: it was taken on other data.
        """
        try:
            epoch, position, seed = (_count(state[key]) for key in ("epoch", "position", "seed"))
            deferred = [_count(i) for i in state["deferred"]]
            digest = str(state["digest"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"malformed prompt stream state ({error}); use an older checkpoint"
            ) from None
        if digest != self._digest:
            raise DataError(
                f"the checkpoint was made on other prompts (digest {digest}, here {self._digest}); "
                "restore the data file or its settings, or start a new run"
            )
        if seed != self._seed:
            raise ConfigError(
                f"the checkpoint has prompt order {seed}, this run {self._seed}; set run.seed={seed}"
            )
        size = len(self._prompts)
        if position > size or len(set(deferred)) < len(deferred) or any(i >= size for i in deferred):
            raise CheckpointError(f"prompt stream state outside {size} prompts; use an older checkpoint")
        self._go_to(epoch, position, deferred)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
