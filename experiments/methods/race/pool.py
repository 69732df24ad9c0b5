"""The rubric training pool P: Eqs 10-11 of the RACE paper and a first-in-first-out store of failures.

    i+ = first argmax r,   i- = first argmin r over the others      (10)
    m_old = r_{i+} - r_{i-} >= 0                                    (11)

A `Pool` is a value: `push` gives a new one and leaves the old one alone, so a checkpoint is just its `state`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from racelab.experiments.methods.grpo import MIN_VALID, SCORE_DIGITS
from racelab.experiments.types import FloatArray, PoolEntry, Prompt, RolloutGroup, Sample


def best_and_worst(rewards_G: FloatArray) -> tuple[int, int]:
    """Eq 10: (i+, i-), always different. Invalid scores are never chosen; ties go to the first index.

    Raises:
        ValueError: with fewer than two valid scores.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    rows = np.flatnonzero(np.isfinite(rewards_G))
    if rows.size < MIN_VALID:
        raise ValueError(f"a pair needs {MIN_VALID} valid scores, the group has {rows.size}")
    best = int(rows[np.argmax(rewards_G[rows])])
    others = rows[rows != best]
    return best, int(others[np.argmin(rewards_G[others])])


def margin(rewards_G: FloatArray) -> float:
    """Eq 11: m_old >= 0.

    Raises:
        ValueError: with fewer than two valid scores.
    """
    best, worst = best_and_worst(rewards_G)
    return float(rewards_G[best] - rewards_G[worst])


def tie_break_only(m_old: float, eps: float = 0.0) -> bool:
    """True if the order of the pair says nothing: the margin is at most `eps`, only the index decided."""
    return round(m_old, SCORE_DIGITS) <= eps


def make_entry(group: RolloutGroup, *, policy_step: int, pushed_step: int) -> PoolEntry:
    """The pair of Eq 10 with its margin (Eq 11); the log-probs of its samples are of no more use and left out.

    Args:
        group: a rubric-failed group.
        policy_step: number of the policy step, part of the entry's id.
        pushed_step: global step, for the age of the entry.

    Raises:
        ValueError: with fewer than two valid scores.
    """
    best, worst = best_and_worst(group.rewards)
    return PoolEntry(
        entry_id=f"{policy_step}:{group.prompt.prompt_id}",
        prompt=group.prompt,
        preferred=replace(group.responses[best], logprobs=()),
        rejected=replace(group.responses[worst], logprobs=()),
        margin=margin(group.rewards),
        pushed_step=pushed_step,
        rubric_text=group.rubric.text if group.rubric else group.rubric_sample.text,
    )


def at_least(entries: Sequence[PoolEntry], min_margin: float) -> list[PoolEntry]:
    """The entries whose m_old is `min_margin` or more. 0 keeps all (Algorithm 1 pushes every failure)."""
    return [e for e in entries if round(e.margin, SCORE_DIGITS) >= min_margin]


@dataclass(frozen=True, slots=True)
class Pool:
    """First in, first out; entries stay after use.

    Attributes:
        capacity: most entries held (Table 7: 2048).
        entries: oldest first.
        pushed: entries given to the last `push`.
        evicted: entries that the last `push` threw out, of the old ones or of its own.
    """

    capacity: int = 2048
    entries: tuple[PoolEntry, ...] = ()
    pushed: int = 0
    evicted: int = 0

    def __post_init__(self) -> None:
        """Checks the sizes."""
        if self.capacity < 1:
            raise ValueError(f"pool capacity must be at least 1, got {self.capacity}")
        if len(self.entries) > self.capacity:
            raise ValueError(f"{len(self.entries)} entries do not fit a pool of {self.capacity}")

    def __len__(self) -> int:
        """Entries held."""
        return len(self.entries)

    def push(self, entries: Sequence[PoolEntry]) -> Pool:
        """A pool with `entries` at its end; the oldest beyond the capacity are gone."""
        everything = (*self.entries, *entries)
        kept = everything[-self.capacity :]
        return Pool(self.capacity, kept, pushed=len(entries), evicted=len(everything) - len(kept))

    def sample(self, n: int, rng: np.random.Generator) -> list[PoolEntry]:
        """min(n, size) different entries, uniformly, in the order drawn."""
        chosen = rng.choice(len(self.entries), size=min(n, len(self.entries)), replace=False)
        return [self.entries[i] for i in chosen]

    def mean_age(self, step: int) -> float:
        """Mean of step - pushed_step; NaN for an empty pool."""
        if not self.entries:
            return float("nan")
        return sum(step - e.pushed_step for e in self.entries) / len(self.entries)

    def tie_break_only_frac(self) -> float:
        """Share of entries whose order is only an index; NaN for an empty pool."""
        if not self.entries:
            return float("nan")
        return sum(tie_break_only(e.margin) for e in self.entries) / len(self.entries)

    def state(self) -> dict[str, Any]:
        """JSON values; floats survive exactly."""
        return {
            "capacity": self.capacity,
            "pushed": self.pushed,
            "evicted": self.evicted,
            "entries": [_entry_state(e) for e in self.entries],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Pool:
        """Undoes `state`."""
        return cls(
            capacity=int(state["capacity"]),
            entries=tuple(_entry_from_state(e) for e in state["entries"]),
            pushed=int(state["pushed"]),
            evicted=int(state["evicted"]),
        )


def _sample_state(sample: Sample) -> dict[str, Any]:
    return {
        "tokens": list(sample.tokens),
        "logprobs": list(sample.logprobs),
        "text": sample.text,
        "finished": sample.finished,
    }


def _sample_from_state(state: Mapping[str, Any]) -> Sample:
    return Sample(
        tokens=tuple(state["tokens"]),
        logprobs=tuple(state["logprobs"]),
        text=state["text"],
        finished=state["finished"],
    )


def _entry_state(entry: PoolEntry) -> dict[str, Any]:
    prompt = entry.prompt
    return {
        "entry_id": entry.entry_id,
        "prompt": {
            "prompt_id": prompt.prompt_id,
            "text": prompt.text,
            "source": prompt.source,
            "category": prompt.category,
            "check": None if prompt.check is None else dict(prompt.check),
        },
        "preferred": _sample_state(entry.preferred),
        "rejected": _sample_state(entry.rejected),
        "margin": entry.margin,
        "pushed_step": entry.pushed_step,
        "rubric_text": entry.rubric_text,
    }


def _entry_from_state(state: Mapping[str, Any]) -> PoolEntry:
    return PoolEntry(
        entry_id=state["entry_id"],
        prompt=Prompt(**state["prompt"]),
        preferred=_sample_from_state(state["preferred"]),
        rejected=_sample_from_state(state["rejected"]),
        margin=state["margin"],
        pushed_step=state["pushed_step"],
        rubric_text=state["rubric_text"],
    )
