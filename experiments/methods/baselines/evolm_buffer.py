"""EvoLM's replay buffer: older answers of the policy, told apart by their age in policy steps (temporal contrast).

A `ReplayBuffer` is a value: `push` gives a new one and leaves the old one alone, so a checkpoint is just its `state`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from racelab.experiments.methods.baselines.stored import prompt_state, sample_from_state, sample_state
from racelab.experiments.types import Prompt, Sample


@dataclass(frozen=True, slots=True)
class OldAnswer:
    """One answer of an earlier policy.

    Attributes:
        policy_step: number of the policy step that sampled it, from 1.
        prompt: the prompt it answers.
        answer: without log-probabilities.
    """

    policy_step: int
    prompt: Prompt
    answer: Sample

    @property
    def entry_id(self) -> str:
        """`<policy_step>:<prompt_id>`, as in RACE's pool."""
        return f"{self.policy_step}:{self.prompt.prompt_id}"


class Draw(NamedTuple):
    """What a rubric step compares with.

    Attributes:
        answers: different entries, in the order drawn.
        fallback: which rule had entries: 0 the ages asked for, 1 without the upper limit, 2 from half the lower
            limit (at least 1), 3 the oldest half, 4 anything.
    """

    answers: tuple[OldAnswer, ...]
    fallback: int


@dataclass(frozen=True, slots=True)
class ReplayBuffer:
    """First in, first out; entries stay after use.

    Attributes:
        capacity: most entries held.
        answers: oldest first.
    """

    capacity: int
    answers: tuple[OldAnswer, ...] = ()

    def __len__(self) -> int:
        """Entries held."""
        return len(self.answers)

    def push(self, answers: Sequence[OldAnswer]) -> ReplayBuffer:
        """A buffer with `answers` at its end; the oldest beyond the capacity are gone."""
        return ReplayBuffer(self.capacity, (*self.answers, *answers)[-self.capacity :])

    def draw(self, n: int, now: int, *, min_age: int, max_age: int | None, rng: np.random.Generator) -> Draw:
        """min(n, eligible) entries, uniformly without replacement.

        Args:
            n: entries wanted.
            now: policy steps done; an entry of the last one has age 0.
            min_age: youngest age asked for.
            max_age: oldest; None: no limit.
            rng: the generator to draw from.

        Raises:
            ValueError: the buffer is empty.
        """
        if not self.answers:
            raise ValueError("an empty replay buffer has no old answers")
        rules = (
            self._aged(now, min_age, max_age),
            self._aged(now, min_age, None),
            self._aged(now, max(1, min_age // 2), None),
            self.answers[: len(self.answers) // 2],
            self.answers,
        )
        fallback, eligible = next((i, found) for i, found in enumerate(rules) if found)
        chosen = rng.choice(len(eligible), size=min(n, len(eligible)), replace=False)
        return Draw(tuple(eligible[i] for i in chosen), fallback)

    def _aged(self, now: int, low: int, high: int | None) -> tuple[OldAnswer, ...]:
        ages = ((a, now - a.policy_step) for a in self.answers)
        return tuple(a for a, age in ages if low <= age and (high is None or age <= high))

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "capacity": self.capacity,
            "answers": [
                {
                    "policy_step": a.policy_step,
                    "prompt": prompt_state(a.prompt),
                    "answer": sample_state(a.answer),
                }
                for a in self.answers
            ],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ReplayBuffer:
        """Undoes `state`."""
        answers = (
            OldAnswer(a["policy_step"], Prompt(**a["prompt"]), sample_from_state(a["answer"]))
            for a in state["answers"]
        )
        return cls(int(state["capacity"]), tuple(answers))
