"""One run, from start or checkpoint to its end. Knows the order of things, not the method.

The spool is written before the checkpoint that refers to it, so a checkpoint never knows of a step that the spool
lost. A run that is killed anywhere goes on at its last checkpoint and repeats the steps since; the repeated steps
are the same to the last bit, because weights, optimiser, random streams and data position are all restored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from racelab.experiments.checkpoint import Checkpoint, CheckpointStore
from racelab.experiments.methods.registry import Method
from racelab.experiments.ports import Backend, Tracker
from racelab.experiments.rng import Streams
from racelab.experiments.signals import StopRequest
from racelab.experiments.types import StepRecord


class Order(Protocol):
    """The order of the training data, as the loop sees it."""

    def state(self) -> dict[str, Any]:
        """JSON: enough to go on at the very next example."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Undoes `state`."""


class LoopParts(Protocol):
    """What the loop itself asks of a run's parts."""

    @property
    def backend(self) -> Backend:
        """The trained weights and the optimiser."""

    @property
    def stream(self) -> Order:
        """The order of the training examples."""

    @property
    def rng(self) -> Streams:
        """The generators of the training loop."""

    def forget(self) -> None:
        """Empties caches, so that a step computes the same bits in a run that was resumed there."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """How often things are done beside the steps.

    Attributes:
        validate_every: policy steps between two validations; 0: none.
        checkpoint_every: steps between two checkpoints.
        pinned: steps whose checkpoints are kept for ever.
        tables_every: table -> keep its rows in every n-th step only.
    """

    validate_every: int
    checkpoint_every: int
    pinned: tuple[int, ...] = ()
    tables_every: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Progress:
    """Where a run stands: the method's state, and the rewards since the last checkpoint (its score).

    Attributes:
        seconds: of all steps so far, for the expected time of arrival only.
        owed: label of a rubric probe that is due after this step and has not been taken, or "".
        owed_validation: a validation is due after this step and has not been taken.
    """

    state: Any
    rewards: list[float] = field(default_factory=list)
    seconds: float = 0.0
    owed: str = ""
    owed_validation: bool = False


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the outside wants to be told.

    Attributes:
        show: called with every record.
        note: called with lines that are no step.
        validate: called with the step after every `validation.every` policy steps; False if it was asked to stop
            meanwhile: then it has written nothing, and is called again when the run goes on.
        due: called with every record and whether it is the last; the label of the probe that is due, or "".
        probe: called with label and step of a probe that is due; it has written all of it when it returns.
    """

    show: Callable[[StepRecord], None]
    note: Callable[[str], None]
    validate: Callable[[int], bool]
    due: Callable[[StepRecord, bool], str]
    probe: Callable[[str, int], None]


def restore(checkpoint: Checkpoint, method: Method, parts: LoopParts) -> Progress:
    """Puts weights, optimiser, streams and data position back."""
    state = checkpoint.state
    parts.backend.load_state(checkpoint.tensors, state["backend"])
    parts.rng.load_state(state["rng"])
    parts.stream.load_state(state["stream"])
    return Progress(
        method.load(state["method"]),
        list(state["rewards"]),
        float(state["seconds"]),
        state.get("owed", ""),
        state.get("owed_validation", False),  # checkpoints of before have no such key
    )


def save(store: CheckpointStore, progress: Progress, parts: LoopParts, tracker: Tracker) -> None:
    """Writes a checkpoint; its score is the mean judged reward since the one before."""
    rewards = progress.rewards
    score = sum(rewards) / len(rewards) if rewards else None
    progress.rewards = []
    state = {
        "tracker": tracker.state(),
        "method": progress.state.state(),
        "backend": parts.backend.state_meta(),
        "rng": parts.rng.state(),
        "stream": parts.stream.state(),
        "rewards": [],
        "seconds": progress.seconds,
        "owed": progress.owed,
        "owed_validation": progress.owed_validation,
    }
    store.save(progress.state.step, parts.backend.state_tensors(), state, score)


def loop(
    settings: LoopSettings,
    method: Method,
    parts: LoopParts,
    progress: Progress,
    *,
    tracker: Tracker,
    store: CheckpointStore,
    stop: StopRequest,
    hooks: Hooks,
) -> Progress:
    """Steps until the budget is used up or someone asks to stop; always leaves a checkpoint of where it stopped."""
    saved = progress.state.step
    _take_owed(progress, hooks, stop)
    while not method.done(progress.state) and not stop.signum:
        parts.forget()
        progress.state, record = method.step(progress.state)
        tracker.record(_kept(record, settings.tables_every))
        progress.seconds += float(record.metrics.get("perf/time/step_s", 0.0))
        reward = record.metrics.get("train/reward/mean", math.nan)
        if math.isfinite(reward):
            progress.rewards.append(reward)
        hooks.show(_with_eta(record, progress))
        progress.owed_validation = _validation_due(record, settings.validate_every)
        progress.owed = hooks.due(record, method.done(progress.state))
        _take_owed(progress, hooks, stop)
        if record.step % settings.checkpoint_every == 0 or record.step in settings.pinned:
            save(store, progress, parts, tracker)
            saved = record.step
    if saved != progress.state.step:
        save(store, progress, parts, tracker)
    return progress


def _validation_due(record: StepRecord, every: int) -> bool:
    """Whether this step is an `every`-th policy step."""
    return bool(
        every and record.status["phase"] == "policy" and int(str(record.status["policy_step"])) % every == 0
    )


def _take_owed(progress: Progress, hooks: Hooks, stop: StopRequest) -> None:
    """Takes the validation and the probe that are owed, unless someone asks to stop: the checkpoint remembers them.

    They are written before the checkpoint of their step, so a run that goes on there has them, and one that goes on at
    an earlier one repeats the step, the validation and the probe.
    """
    if progress.owed_validation and not stop.signum:
        progress.owed_validation = not hooks.validate(progress.state.step)
    if progress.owed and not stop.signum:
        hooks.probe(progress.owed, progress.state.step)
        progress.owed = ""


def _kept(record: StepRecord, tables_every: Mapping[str, int]) -> StepRecord:
    """The record with its large tables (generated texts) only in every n-th step."""
    tables = {n: rows for n, rows in record.tables.items() if record.step % tables_every.get(n, 1) == 0}
    return replace(record, tables=tables)


def _with_eta(record: StepRecord, progress: Progress) -> StepRecord:
    """Adds the expected remaining seconds: rubric steps come on top in the proportion seen so far."""
    done, budget = int(str(record.status["policy_step"])), int(str(record.status["policy_budget"]))
    eta = progress.seconds / max(done, 1) * max(budget - done, 0)
    return replace(record, status={**record.status, "eta_s": eta})
