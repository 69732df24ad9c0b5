"""A rollout of an RLDS run as values: what `transcript.py` reads, and the terminal and the page show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from racelab.experiments.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """What `--rollout` names: a step, a group of it, or one rollout."""

    step: int
    group: int | None = None
    idx: int | None = None

    @classmethod
    def parse(cls, text: str) -> Place:
        """`STEP`, `STEP:GROUP` or `STEP:GROUP:IDX`.

        Raises:
            ConfigError: something else.
        """
        words = text.strip().split(":")
        if len(words) > 3 or not all(word.isascii() and word.isdecimal() for word in words):
            raise ConfigError(
                f"--rollout {text!r} names no rollout; write STEP:GROUP:IDX, as 10:0:3, or STEP:GROUP or STEP to list"
            )
        return cls(*map(int, words))


@dataclass(frozen=True, slots=True)
class Rollout:
    """A row of the table `rollouts`. None: the condition has no such value, or the row was not graded.

    Attributes:
        parent: idx of the original that a retry came from.
        retry_from: first turn of a retry that was sampled.
        grades: g_ik in 1..5 [K].
        pivots: turns, as the grader said, not clamped [K].
        adv_K: A_ik of Eq 1.
        adv_sdae: Â_i of Eq 2; None under scalar GRPO.
        adv_grpo: the group-normalised scalar advantage, whatever the run was trained with.
        token_adv_std: std of Â_it over the trained tokens.
        parse_status: of the grader's reply; see `Grading`.
    """

    step: int
    group: int
    idx: int
    is_retry: bool
    parent: int | None
    retry_from: int | None
    reward: float
    solved: bool | None
    end_reason: str
    instance_id: str
    grades: tuple[int | None, ...] | None
    pivots: tuple[int | None, ...] | None
    adv_K: tuple[float, ...] | None
    adv_sdae: float | None
    adv_grpo: float | None
    token_adv_std: float | None
    parse_status: str | None
    n_turns: int
    n_tokens: int

    @property
    def place(self) -> str:
        """`STEP:GROUP:IDX`."""
        return f"{self.step}:{self.group}:{self.idx}"


@dataclass(frozen=True, slots=True)
class RetryLink:
    """A row of the table `retry_pairs`: a retry, its original, and what the auxiliary loss took of the two.

    Attributes:
        retry: idx of the retry.
        parent: idx of the original.
        retry_from: first turn that was sampled.
        delta_R: reward of the retry less the original's.
        delta_grades: the same of the grades [K]; None unless both are graded.
        weight: in the retry distillation; 0 if it is not `used`.
        used: the retry distillation took it.
        reflect_weight: in the loss on the reflection; 0 if it is not `reflect_used`.
        reflect_used: that loss took it.
    """

    retry: int
    parent: int
    retry_from: int
    delta_R: float
    delta_grades: tuple[float, ...] | None
    weight: float
    used: bool
    reflect_weight: float
    reflect_used: bool


@dataclass(frozen=True, slots=True)
class SubtaskRow:
    """What one subtask of the taxonomy got.

    Attributes:
        name: of the subtask.
        phi: φ_k at this step.
        grade: g_ik, or None.
        pivot: turn that the grader named, or None.
        pivot_turn: the turn of this rollout that it stands for.
        advantage: A_ik, or None.
    """

    name: str
    phi: float
    grade: int | None
    pivot: int | None
    pivot_turn: int | None
    advantage: float | None


@dataclass(frozen=True, slots=True)
class TurnView:
    """A reply and what came of it.

    Attributes:
        index: from 0.
        text: the reply.
        tokens: ids as they were sampled.
        sampled: False: replayed from the original.
        finished: it ended by itself.
        masked: not trained on.
        advantage: Â_it, the same for every token of the turn (Eq 3 weighs turns); None for a turn without tokens.
        pivots: subtasks whose pivot this turn is.
        observation: what the environment answered.
        drawn: the agent did not see `observation` as words.
        info: facts of the turn.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    sampled: bool
    finished: bool
    masked: bool
    advantage: float | None
    pivots: tuple[str, ...]
    observation: str
    drawn: bool
    info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the advantages of a rollout came from its A_ik (Eqs 2 and 3).

    Attributes:
        decomposed: they did: some rollout of the group has grades. False: Â_i is the scalar advantage (§3.3).
        sigma_batch: of the step; None in runs that did not write it down.
        kernel_sigma: width of the pivot kernel in turns; None: every turn has Â_i.
        amplification: factor of the advantages of retries above 0.
    """

    decomposed: bool
    sigma_batch: float | None
    kernel_sigma: float | None
    amplification: float


@dataclass(frozen=True, slots=True)
class Transcript:
    """Everything that is known of one rollout.

    Attributes:
        rollout: its row.
        scaling: what led from A_ik to its advantages.
        subtasks: the taxonomy, with grades where there are any [K].
        retries: of an original: its retries; of a retry: itself.
        instance: what was played (task, instance_id, data); None in runs that did not write it down.
        system: the system prompt, the addition of a retry included where it stands there.
        demonstration: worked examples between it and the first observation, as (said to the agent, its reply); None:
            there were some, but the run did not write them down.
        drawn: `first_observation` was not seen as words.
        grader: `method.grader`; "" if the condition grades nothing.
        grading: the grader's reply; "" for a scripted one.
        reflection: the report that led to a retry; "" for an original and a scripted reflector.
        addition: what the reflection added to the context of a retry.
        token_turn: turn of every id after the prompt, -1 for those that were not sampled [T].
        token_adv: advantage of the same [T].
    """

    run_id: str
    run_name: str
    task: str
    condition: str
    rollout: Rollout
    scaling: Scaling
    subtasks: tuple[SubtaskRow, ...]
    retries: tuple[RetryLink, ...]
    instance: Mapping[str, Any] | None
    system: str
    demonstration: tuple[tuple[str, str], ...] | None
    first_observation: str
    drawn: bool
    turns: tuple[TurnView, ...]
    grader: str
    grading: str
    reflection: str
    addition: str
    token_turn: tuple[int, ...]
    token_adv: tuple[float, ...]

    @property
    def largest(self) -> float:
        """Largest |Â_it| over the turns; 0.0 if every one is 0."""
        return max((abs(t.advantage) for t in self.turns if t.advantage is not None), default=0.0)

    def strength(self, turn: TurnView) -> float:
        """|Â_it| relative to the largest of the rollout, in [0, 1]: how deep the colour of a turn is."""
        return abs(turn.advantage) / self.largest if turn.advantage and self.largest else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
