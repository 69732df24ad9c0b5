"""One attempt at a run: the lock, the tracker, and a final state whatever happens. The work itself is a subclass's.

Order matters: the folder is locked before anything is written into it, and a run that a launcher was to work on is
taken from it if a person goes on with it here.
"""

from __future__ import annotations

import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from racelab.configs.schema_rlds import AnyConfig, TrainConfig
from racelab.experiments.checkpoint import Checkpoint, CheckpointStore
from racelab.experiments.errors import FencedError, RacelabError
from racelab.experiments.methods.registry import Method
from racelab.experiments.run import LoopParts, Progress, restore
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import StopRequest
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import StepRecord


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: finished, interrupted, or failed where all was done that could be.
        exit_code: 0, 128 + the signal that stopped it, or what the failure says.
        step: last global step.
        seconds: of this attempt.
        peak_gib: largest resident memory of this attempt's process.
    """

    status: str
    exit_code: int
    step: int
    seconds: float
    peak_gib: float


@dataclass(frozen=True, slots=True)
class Talk:
    """Where a run's talk goes.

    Attributes:
        show: every step.
        note: everything else, a line each.
        finish: called with the folder once all tables have their rows, before the run is closed.
    """

    show: Callable[[StepRecord], None]
    note: Callable[[str], None]
    finish: Callable[[RunFolder], None]


class Attempt(ABC):
    """Runs one attempt on one folder. The caller made the folder (or found it) and keeps the inputs."""

    failed_code = 1
    """Exit code of an attempt whose status is failed."""

    def __init__(
        self, config: AnyConfig, folder: RunFolder, inputs: Any, talk: Talk, stop: StopRequest
    ) -> None:
        """Keeps the parts; nothing is opened yet."""
        self.settings: AnyConfig = config
        self.folder, self.inputs, self.talk, self.stop = folder, inputs, talk, stop

    def run(self) -> Outcome:
        """Takes the lock, works, and leaves the folder in a final state whatever happens.

        Raises:
            FencedError: another attempt has the run; the folder is left to it as it is.
            RacelabError: the run failed; the folder says so.
        """
        started = time.monotonic()
        with self.folder.lock() as lock, lock.by_hand():
            attempt = self._begin()
            tracker = None
            try:
                tracker = self._tracker(attempt)
                status, reason, step = self._do(tracker)
                self.folder.update(steps=step)
                tracker.close(status, reason)
            except FencedError:
                raise  # how this attempt ended is not the run's end
            except BaseException as error:
                interrupted = isinstance(error, KeyboardInterrupt)
                self._close_quietly(tracker, "interrupted" if interrupted else "failed", error)
                raise
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        code = (
            self.stop.exit_code if status == "interrupted" else self.failed_code if status == "failed" else 0
        )
        return Outcome(status, code, step, time.monotonic() - started, peak)

    @abstractmethod
    def _begin(self) -> int:
        """Registers the attempt, with what earlier ones wrote that counts no more; returns its number."""

    @abstractmethod
    def _do(self, tracker: SpoolTracker) -> tuple[str, str, int]:
        """The run itself. Returns (finished, failed or interrupted; reason; last step)."""

    def _stopped(self, step: int) -> tuple[str, str, int]:
        return "interrupted", f"stopped by signal {self.stop.signum} after {self._so_far(step)}", step

    def _so_far(self, step: int) -> str:
        """How far it came, in words."""
        return f"step {step}"

    def _tracker(self, attempt: int) -> SpoolTracker:
        t = self.settings.tracking
        return SpoolTracker(
            self.folder,
            attempt,
            ship=t.mlflow,
            uri=t.uri or None,
            experiment=t.experiment,
            wait_s=t.wait_s,
        )

    def _close_quietly(self, tracker: SpoolTracker | None, status: str, error: BaseException) -> None:
        """The first error is the one to report, even if a full disk does not let the end be written."""
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        try:
            if tracker is not None:
                tracker.close(status, reason)
            if self.folder.info()["status"] == "running":
                self.folder.update(status=status, reason=reason)
        except (RacelabError, OSError) as second:
            self.talk.note(f"the end of the run could not be recorded: {second}")


class TrainAttempt(Attempt):
    """An attempt that goes on at a checkpoint."""

    def __init__(
        self, config: TrainConfig, folder: RunFolder, inputs: Any, talk: Talk, stop: StopRequest
    ) -> None:
        """Keeps the parts; nothing is opened yet."""
        super().__init__(config, folder, inputs, talk, stop)
        self.store = CheckpointStore(
            folder.path / "checkpoints", config.checkpoint.keep_last, config.eval.at_steps
        )
        self._checkpoint: Checkpoint | None = None

    @abstractmethod
    def _work(self, tracker: SpoolTracker, checkpoint: Checkpoint | None) -> tuple[str, str, int]:
        """See `_do`; `checkpoint`: where to go on, None for a run that starts."""

    def _begin(self) -> int:
        self._checkpoint = checkpoint = self.store.load_latest() if self.store.steps() else None
        cut = checkpoint.state["tracker"] if checkpoint is not None else None
        return self.folder.begin_attempt(from_step=self._from_step(checkpoint), cut=cut)

    def _do(self, tracker: SpoolTracker) -> tuple[str, str, int]:
        checkpoint, self._checkpoint = self._checkpoint, None  # it holds the weights: nobody else needs them
        return self._work(tracker, checkpoint)

    def _from_step(self, checkpoint: Checkpoint | None) -> int:
        """Last step that counts of earlier attempts: none of them if they left no checkpoint."""
        if checkpoint is not None:
            return checkpoint.step
        return -1 if self.folder.attempts() else 0

    def _progress(self, method: Method, parts: LoopParts, checkpoint: Checkpoint | None) -> Progress:
        if checkpoint is None:
            return Progress(method.start())
        for line in checkpoint.skipped:
            self.talk.note(line)
        self.talk.note(f"going on after step {checkpoint.step}")
        return restore(checkpoint, method, parts)
