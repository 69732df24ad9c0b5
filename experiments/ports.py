"""What the methods ask of the outside: models, judge, encoder, data, backend, tracker. Protocols only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from racelab.experiments.episodes import (
    AgentSampling,
    Case,
    Episode,
    Grading,
    Instance,
    Observation,
    Reflection,
    Result,
    Start,
    Subtask,
    Turn,
)
from racelab.experiments.types import (
    Check,
    FloatArray,
    GenerationRequest,
    JudgeItem,
    JudgeScores,
    Prompt,
    Sample,
    StepRecord,
    TokenBatch,
    UpdateStats,
    Verdicts,
)

if TYPE_CHECKING:
    import torch


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model, live or frozen."""

    eos_id: int
    window: int

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised, none is added."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text, special tokens removed."""

    def chat(self, user: str, system: str | None = None) -> list[int]:
        """Token ids of the model's chat template up to and including the assistant's header."""

    def generate(self, requests: Sequence[GenerationRequest], rng: torch.Generator) -> list[list[Sample]]:
        """All requests decoded in one batch; result[j] holds requests[j].n samples."""

    def logprobs(
        self,
        groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
        temperature: float = 1.0,
    ) -> list[list[FloatArray]]:
        """Log p(tail_t | prefix, tail_<t) [T] for every tail of every (prefix, tails) group."""


@runtime_checkable
class Encoder(Protocol):
    """A frozen sentence encoder."""

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """[n, D], rows of unit length. Equal texts give equal rows."""

    def forget(self) -> None:
        """Empties the cache. What a batch holds can change the last bits of a row, so a step starts without one."""


@runtime_checkable
class Judge(Protocol):
    """The frozen judge J(x, y; R) of Eq 2."""

    def score(self, items: Sequence[JudgeItem]) -> JudgeScores:
        """One call per response, the whole rubric at once; no call where the rubric is None."""

    def describe(self) -> dict[str, object]:
        """Kind, model hash, calibration: all that is needed to score the same again (JSON values)."""


@runtime_checkable
class Verifier(Protocol):
    """Says which items of a rubric an answer satisfies (RLCER)."""

    def verify(self, checks: Sequence[Check]) -> Verdicts:
        """One boolean per item for every check."""


@runtime_checkable
class RewardModel(Protocol):
    """Scores answers without a rubric."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]]) -> list[FloatArray]:
        """[G] in [0, 1] for each prompt's responses, NaN where the model's window is too small."""

    def describe(self) -> dict[str, object]:
        """Model hash and settings (JSON values)."""


@runtime_checkable
class Backend(Protocol):
    """Holds the trained weights and the optimiser."""

    @property
    def policy(self) -> LanguageModel:
        """The trained model, as it is now."""

    @property
    def reference(self) -> LanguageModel:
        """The model as it was before training, frozen."""

    def update(self, batch: TokenBatch) -> UpdateStats:
        """One GRPO update (Eq 4). An empty batch changes nothing."""

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Trained parameters and optimiser state, by name. Frozen weights are not in it."""

    def state_meta(self) -> dict[str, Any]:
        """JSON part of the state: base model hash, optimiser step, schedule position."""

    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        """Restores both. Raises CheckpointError if the base model's hash differs."""


@runtime_checkable
class RoleBackend(Backend, Protocol):
    """A backend that holds several sets of trained weights, one at a time (Rubric-ARM)."""

    role: str

    def switch(self, role: str) -> None:
        """Makes `policy` and `update` those of another role, with its own optimiser state."""


@runtime_checkable
class PromptStream(Protocol):
    """An endless, seeded, resumable order of training prompts."""

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts; an epoch is a seeded permutation, no prompt twice inside one."""

    def state(self) -> dict[str, Any]:
        """JSON: enough to go on at the very next prompt."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Undoes `state`."""


@runtime_checkable
class DialogueModel(LanguageModel, Protocol):
    """A language model that can hold a conversation token by token."""

    def opening(self, system: str, user: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of system prompt, first user turn and the header of the reply; tools as OpenAI function schemas."""

    def bridge(self, user: str, *, ended: bool) -> list[int]:
        """Ids between a reply and the next: end of turn (unless `ended`: it was sampled), user turn, next header."""


@runtime_checkable
class Environment(Protocol):
    """One episode of a task. Not shared between threads; opened, played once, closed."""

    def reset(self) -> Observation:
        """The first observation."""

    def step(self, reply: str) -> Observation:
        """The answer to one reply.

        Never raises for what an agent says or an outside service does: faults are counted in the result and end the
        episode where they must.
        """

    def replay(self, turns: Sequence[Turn]) -> Observation | None:
        """Brings a fresh environment to the state after `turns`, without calling any outside service again.

        Returns:
            The last observation, or None if the state could not be restored exactly (the retry is then dropped).
        """

    def stop(self, reason: str) -> Observation:
        """Ends the episode from outside (`response_budget`, `turns`); gives the terminal observation."""

    def result(self) -> Result:
        """Reward and end; called once `done`."""

    def close(self) -> None:
        """Gives back what the episode held."""


@runtime_checkable
class Task(Protocol):
    """One of the four benchmarks: data, texts, environment, taxonomy."""

    @property
    def name(self) -> str:
        """As in the config."""

    @property
    def subtasks(self) -> tuple[Subtask, ...]:
        """The taxonomy (App. C)."""

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """OpenAI function schemas; () for free-form actions."""

    @property
    def concurrency(self) -> int | None:
        """Environments that may be open at once; None: any number."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end a reply beside the end token, such as `</action>`."""

    @property
    def demonstration(self) -> tuple[tuple[str, str], ...]:
        """(user, reply) turns of worked examples that stand before the first observation; () for none."""

    def train(self) -> Sequence[Instance]:
        """Training examples, ids unique."""

    def validation(self) -> Sequence[Instance]:
        """The fixed validation slice."""

    def system_prompt(self, addition: str = "") -> str:
        """The system prompt, with what a reflection adds ("consult any additions below", Fig. 10)."""

    def open(self, instance: Instance) -> Environment:
        """A fresh environment."""

    def metrics(self) -> Mapping[str, float]:
        """Counters and times since the last call (`task/<name>/<metric>`), then set back to zero."""

    def describe(self) -> dict[str, object]:
        """What is needed to score the same again: versions, servers, hashes (JSON values)."""

    def close(self) -> None:
        """Stops servers and processes that the task started. May be called twice."""


@runtime_checkable
class Actor(Protocol):
    """Plays episodes with a policy."""

    def play(
        self, starts: Sequence[Start], sampling: AgentSampling, rng: torch.Generator
    ) -> list[Episode | None]:
        """One episode per start, in order; None where a retry's prefix could not be replayed exactly."""


@runtime_checkable
class Grader(Protocol):
    """Grades episodes along a task's taxonomy."""

    def grade(self, episodes: Sequence[Episode], rng: torch.Generator) -> list[Grading]:
        """One grading per episode, in order."""


@runtime_checkable
class Reflector(Protocol):
    """Says what to do otherwise, and from which turn on."""

    def reflect(self, cases: Sequence[Case], rng: torch.Generator) -> list[Reflection]:
        """One reflection per case, in order."""


@runtime_checkable
class Tracker(Protocol):
    """Remembers what happened. Never blocks a step, never raises into it for want of a server."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Values of one step; a value that is not finite is counted under `health/nonfinite/<name>` instead."""

    def rows(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Rows of a table; each row has a `step`."""

    def record(self, record: StepRecord) -> None:
        """Metrics and rows of one step in one write."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Run-level facts."""

    def state(self) -> dict[str, Any]:
        """Durable position (flushed first), stored in the checkpoint."""

    def close(self, status: str, reason: str = "") -> None:
        """`finished`, `failed` or `interrupted`."""
