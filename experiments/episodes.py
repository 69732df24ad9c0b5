"""Multi-turn values of RLDS: what an agent did in an environment, and what was said of it.

Further letters of the shape legend in `types.py`:

    N  rollouts (rows) of a batch                    e.g. 144
    K  subtasks of a task's taxonomy                 e.g. 5
    T  tokens after the prompt, all turns            e.g. 900
    U  turns of an episode                           e.g. 10

Turns are counted from 0: turn u is the agent's u-th reply. `pivots_NK` and `retry_from` are turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Subtask:
    """One line of a taxonomy (RLDS App. C).

    Attributes:
        name: exactly the string that the grader returns and that metrics are logged under.
        description: shown to the grader.
        weight: φ_k; the weights of a task sum to 1.
    """

    name: str
    description: str
    weight: float


@dataclass(frozen=True, slots=True)
class Instance:
    """One example of a task.

    Attributes:
        task: name of the task.
        instance_id: unique in the task and stable across runs.
        data: JSON values, enough to open the environment again (board; question and answer; task and variation).
    """

    task: str
    instance_id: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment says.

    Attributes:
        text: shown to the agent; after the last turn it is what the grader reads, the agent never sees it.
        done: the episode has ended.
        info: facts of the turn that led here, JSON values (action, invalid, tool calls, seconds).
    """

    text: str
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """How an episode ended.

    Attributes:
        reward: R_i.
        solved: not a candidate for a retry (each task says what that means).
        end_reason: goal, hole, turns, response_budget, answer, repeated_action, environment_error, ...
        metrics: numbers of the episode (raw score, invalid turns, tool calls, faults by kind, ...), means of which are
            logged as `task/<name>/<metric>`.
    """

    reward: float
    solved: bool
    end_reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of the agent and what came of it.

    Attributes:
        text: the reply, special tokens removed.
        tokens: exactly the ids that were sampled (end token included); never tokenised again.
        logprobs: of each of `tokens`, under the distribution that it was drawn from.
        finished: it ended by itself; False if it was cut.
        observation: what the environment answered.
        bridge: ids between this reply and the next one (end of turn if it was not sampled, observation, header of the
            next reply); () after the last turn. Never trained on.
        info: of the observation.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    observation: str
    bridge: tuple[int, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Episode:
    """One rollout y_i.

    Attributes:
        instance: what was played.
        prompt: ids before the first reply (system prompt, first observation, header).
        system: text of the system prompt, the addition of a retry included.
        first_observation: text.
        turns: at least one.
        result: reward and end.
        retry_from: turns before it were replayed from `parent`, not sampled; 0 for an original.
        addition: what the reflection added to the context of a retry; "" for an original.
        is_retry: True for y⁽²⁾.
        bare_prompt: `prompt` without the addition (retry distillation, App. B); equal to `prompt` for an original.
        bare_bridge: the bridge before turn `retry_from` without the addition, where the addition stands there
            (`reflect.placement: user_turn`, or the grid's hint); None: the same as in `turns`.
    """

    instance: Instance
    prompt: tuple[int, ...]
    system: str
    first_observation: str
    turns: tuple[Turn, ...]
    result: Result
    retry_from: int = 0
    addition: str = ""
    is_retry: bool = False
    bare_prompt: tuple[int, ...] = ()
    bare_bridge: tuple[int, ...] | None = None

    @property
    def reward(self) -> float:
        """R_i."""
        return self.result.reward

    def tokens(self) -> tuple[int, ...]:
        """All ids after the prompt [T]: replies and bridges in order; the last turn has no bridge."""
        return tuple(token for turn in self.turns for part in (turn.tokens, turn.bridge) for token in part)

    def turn_of_token(self) -> IntArray:
        """Turn of each of `tokens()` [T]; -1 for ids that were not sampled (bridges)."""
        parts = [
            np.full(len(ids), u if own else -1, dtype=np.int64)
            for u, turn in enumerate(self.turns)
            for ids, own in ((turn.tokens, True), (turn.bridge, False))
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    @property
    def n_response_tokens(self) -> int:
        """Sampled ids, the replayed ones of a retry included."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def n_own_tokens(self) -> int:
        """Ids that were sampled in this very episode; the replayed ones of a retry are its parent's."""
        return sum(len(turn.tokens) for turn in self.turns[self.retry_from :])


@dataclass(frozen=True, slots=True)
class Start:
    """One episode to be played.

    Attributes:
        instance: of the task.
        parent: the episode that is retried; None for an original.
        retry_from: first turn that is sampled; those before are the parent's.
        addition: what the reflection adds to the context.
    """

    instance: Instance
    parent: Episode | None = None
    retry_from: int = 0
    addition: str = ""


@dataclass(frozen=True, slots=True)
class AgentSampling:
    """How the agent samples.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus.
    """

    temperature: float
    top_p: float = 1.0


GradeStatus = Literal["ok", "bad_json", "incomplete", "bad_grade", "cut", "too_long"]


@dataclass(frozen=True, slots=True)
class Grading:
    """What the grader said of one episode (RLDS §3.2, App. E). A reply that cannot be read is not a grade.

    Attributes:
        grades: g_ik in 1..5 for each of the K subtasks, or None: the row is ungraded.
        pivots: per subtask a turn >= 0, or None; all None where `grades` is None. Not yet clamped to the episode.
        status: ok; bad_json; incomplete (a subtask is missing or twice); bad_grade (not an integer in 1..5); cut (the
            reply hit its limit and cannot be read); too_long (the prompt does not fit the model's window).
        bad_pivots: pivots that were neither null nor a whole number >= 0 (they count as None).
        text: the reply; "" for a scripted grader.
        n_tokens: of the reply.
    """

    grades: tuple[int, ...] | None
    pivots: tuple[int | None, ...]
    status: GradeStatus = "ok"
    bad_pivots: int = 0
    text: str = ""
    n_tokens: int = 0


ReflectStatus = Literal["ok", "bad_json", "no_suggestion", "bad_step", "out_of_range", "cut", "too_long"]


@dataclass(frozen=True, slots=True)
class Reflection:
    """What the reflector said of one failed episode.

    Attributes:
        addition: goes into the context of the retry.
        retry_from: turn, or None: no retry.
        status: ok; bad_json; no_suggestion; bad_step (not a whole number >= 0); out_of_range (>= the number of turns);
            cut; too_long.
        text: the reply.
        prompt: ids that the reply was conditioned on; () for a scripted reflector (then there is no NLL pair).
        tokens: ids of the reply as sampled.
    """

    addition: str
    retry_from: int | None
    status: ReflectStatus = "ok"
    text: str = ""
    prompt: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A failed episode to reflect on.

    Attributes:
        episode: the failure.
        grading: of it; None under single-pass grading.
        best: the best sibling of the group, for `{contrastive_section}`; None leaves the section empty.
        memory: earlier suggestions on this task, oldest first, for `{memory_section}`.
    """

    episode: Episode
    grading: Grading | None
    best: Episode | None = None
    memory: tuple[str, ...] = ()
