"""The order of a task's training examples: the seeded, resumable stream of prompts, over instances."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from racelab.experiments.data.stream import SeededStream, data_digest
from racelab.experiments.episodes import Instance
from racelab.experiments.types import Prompt


def as_prompt(instance: Instance) -> Prompt:
    """The instance as the stream sees it: an id, and a text that changes with its content."""
    return Prompt(instance.instance_id, json.dumps(instance.data, sort_keys=True), source=instance.task)


def instances_digest(instances: Sequence[Instance]) -> str:
    """First 16 hex digits of a SHA-256 of all ids and contents, in order."""
    return data_digest([as_prompt(instance) for instance in instances])


class InstanceStream:
    """`SeededStream` over instances; implements `ports.PromptStream` with instances in the place of prompts."""

    def __init__(self, instances: Sequence[Instance], seed: int) -> None:
        """Starts at epoch 0.

        Args:
            instances: not empty, ids unique.
            seed: >= 0.

        Raises:
            DataError: none, or an id twice.
        """
        self._by_id = {instance.instance_id: instance for instance in instances}
        self._stream = SeededStream([as_prompt(instance) for instance in instances], seed)

    def take(self, n: int) -> list[Instance]:
        """The next n different instances."""
        return [self._by_id[prompt.prompt_id] for prompt in self._stream.take(n)]

    def state(self) -> dict[str, Any]:
        """JSON: enough to go on at the very next instance."""
        return self._stream.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Undoes `state`."""
        self._stream.load_state(state)
