"""What a job's process does with its task: whether it may, the child that does it, and how it ended.

How it ended is an `End` in the launch's folder. It is written before anything that may kill this process, and never by
one whose run another attempt has.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from racelab.experiments import fence
from racelab.experiments.checkpoint import CheckpointStore
from racelab.experiments.errors import FencedError, RacelabError, RunFolderError
from racelab.experiments.fsio import explain
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.slurm import nodes
from racelab.sweeps.slurm.asked import Asked
from racelab.sweeps.slurm.folder import End
from racelab.sweeps.slurm.handback import (
    LATER,
    MAX_BARREN,
    await_stop,
    barren_reason,
    barren_starts,
    hand_back,
    idle_reason,
    idle_requeues,
)
from racelab.sweeps.slurm.model import NOT_OURS, Assignment
from racelab.sweeps.slurm.place import Place
from racelab.sweeps.slurm.supervise import (
    STOPPED,
    Child,
    Words,
    busy_after_s,
    child_environment,
    header,
    own_output,
    said_last,
    shipping,
    signal_name,
    term_patience,
    watch,
)

STOPPED_CODE: Final = 143
"""Exit code of a job that stopped because it was asked to, as shells say it."""
_EARLY_S: Final = 60
"""How much too early Slurm may give a signal."""
_RECORD_S: Final = 120
"""What writing a sweep's record may take."""
_SETUP_S: Final = 300
"""What may pass between a job's start and this process's: modules, a container's image."""


def begin(arguments: Sequence[str], environ: Mapping[str, str], asked: Asked, words: Words) -> int:
    """Works on the task of this process; returns the exit code.

    Args:
        arguments: launch folder, batch, number of the submission.
        environ: of this process.
        asked: the signals.
        words: gives the child's command line.

    Raises:
        RacelabError: the task could not be worked on; its `End` says so where one can be written.
    """
    place = Place.find(arguments, environ)
    me = place.me
    if me.rank > 0 and not place.task.every_node:
        return _stand_by(place, environ, asked)
    attempt = TaskAttempt(place, environ, asked, words)
    try:
        code = attempt.work()
        attempt.record_sweep()
        return code
    except Exception as error:
        attempt.broke(error)
        raise
    finally:
        if me.nodes > 1 and me.rank == 0:
            nodes.close(place.nodes_dir, me)


def _stand_by(place: Place, environ: Mapping[str, str], asked: Asked) -> int:
    """A further node of a task that its first one does.

    That this one failed is written down: srun then stops the first rank, to which that looks like a preemption.
    """
    me = place.me
    try:
        nodes.report(place.nodes_dir, me, environ)
        patience = place.batch.launcher.signal_delay_s + nodes.GATHER_S
        return nodes.stand_by(place.nodes_dir, me, asked, patience)
    except Exception as error:
        with contextlib.suppress(RacelabError, OSError):
            if not place.replaced():
                code, reason = _summary(error)
                place.write_end("failed", code, f"rank {me.rank} on {me.node}: {reason}", None)
        raise


@dataclass(slots=True)
class TaskAttempt:
    """One attempt at a task by one process.

    Attributes:
        place: task and process.
        environ: of the process.
        asked: the signals.
        words: gives the child's command line.
        run: the task's, once it is known to be ours to work on; None for a command.
        token: of its fence.
        log: where the child prints, None: where this process does.
        child: once it has started.
        before: step of the newest checkpoint at the start.
        last: how the attempt before ended, in the same job.
        void: a later start of the job runs, so that this one has nothing to say.
        started: clock (monotonic, s).
    """

    place: Place
    environ: Mapping[str, str]
    asked: Asked
    words: Words
    run: RunFolder | None = None
    token: str = ""
    log: Path | None = None
    child: Child | None = None
    before: int | None = None
    last: End | None = None
    void: bool = False
    started: float = field(default_factory=time.monotonic)

    def work(self) -> int:
        """From the question whether it may, to the `End`; returns the exit code."""
        refused = self.place.replaced()
        if refused:
            return _say(NOT_OURS, f"{refused}; nothing to do")
        self.last = self.place.end()
        if self.place.task.kind == "run":
            run = RunFolder.open(self.place.run)
            if _is_finished(run):
                self.place.write_end("finished", 0, "", _newest_step(run))
                return 0
            if Assignment.from_json(run.info().get("launch")) != self.place.assignment:
                reason = f"run {run.run_id} is another task's to work on"
                self.place.write_superseded(reason)
                return _say(NOT_OURS, f"{reason}; nothing to do")
            self.run = run
        if self.place.is_cancelled():
            return self._cancelled()
        try:
            self._take()
        except FencedError as error:
            return _say(0 if self._is_replaced_by_later() else NOT_OURS, f"{error}; nothing to do")
        barren = self._barren()
        if barren >= MAX_BARREN:
            return self._failed(1, barren_reason(barren, self._newest()))
        self._meet()
        if self.asked.at is not None:  # stopped before it began
            return self._stopped()
        self._start()
        return self._see_it_through()

    def record_sweep(self) -> None:
        """Writes the record of the run's sweep if this was the last of its cells; a process of its own, with time-out.

        Not while the job is being taken away: there the next attempt does it, or `racelab jobs` or `sync`.
        """
        name = self.run.info().get("sweep") if self.run is not None and self.asked.at is None else None
        if not name:
            return
        assert self.run is not None
        path = self.run.path.parent / str(name)
        environment = {**self.environ, **shipping(self.run, self.place.batch.launcher.ship)}
        words = [sys.executable, "-P", "-m", "racelab.sweeps.collect", str(path)]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, timeout=_RECORD_S, check=False)

    def broke(self, error: Exception) -> None:
        """Something is wrong here, not in the child: leaves no child, and writes down what can be written."""
        if self.child is not None:
            self.child.end()
        if self.log is not None and not isinstance(error, RacelabError):
            with contextlib.suppress(OSError), open(self.log, "a", encoding="utf-8") as log:
                traceback.print_exception(error, file=log)
        code, reason = _summary(error)
        with contextlib.suppress(RacelabError, OSError):
            if not self.place.replaced() and not self._is_fenced():
                self._failed(code, reason)

    def _take(self) -> None:
        """The run's fence, so that no other attempt can write any more."""
        if self.run is None:
            return
        token, me = fence.new_token(), self.place.me
        launch = self.place.assignment.to_json()
        facts = {"job_id": me.job, "restart": me.restart, "node": me.node, "launch": launch}
        fence.take(self.run.path, token, facts)
        self.token = token
        self.before = _newest_step(self.run)

    def _meet(self) -> None:
        """The other ranks."""
        me = self.place.me
        if me.nodes > 1:
            nodes.report(self.place.nodes_dir, me, self.environ)
            if not self.place.task.every_node:
                nodes.gather(self.place.nodes_dir, me, self.asked, nodes.GATHER_S)

    def _start(self) -> None:
        """The child."""
        place, launcher = self.place, self.place.batch.launcher
        words = self.words(place.task, place.run)
        environment = child_environment(self.environ)
        if place.me.nodes > 1:
            environment[nodes.NODES_VARIABLE] = str(place.nodes_dir)
        if self.run is None:
            print(header(place.me, words), flush=True)
        else:
            environment |= fence.variables_of(self.run.path, self.token)
            environment[fence.WAIT_VARIABLE] = str(launcher.fence_wait_s)
            environment |= shipping(self.run, launcher.ship)
            self.log = self.run.path / "attempts" / f"{place.me.job}-r{place.me.restart}.log"
            _append(self.log, header(place.me, words))
        self.child = Child(words, environment, self.log)

    def _see_it_through(self) -> int:
        """Watches the child to its end; hands the job back meanwhile if it would not come to it before the limit."""
        assert self.child is not None
        launcher, handed = self.place.batch.launcher, False
        busy_s = busy_after_s(launcher.signal_delay_s) if launcher.requeue and self._decides else None
        partition = self.environ.get("SLURM_JOB_PARTITION", "")
        patience = functools.partial(term_patience, partition)
        seen = watch(self.child, self.asked, self._is_fenced, busy_s, self._note_asked, patience)
        if seen == "busy":
            handed = self._while_busy()
            seen = watch(self.child, self.asked, self._is_fenced, None)
        code = self.child.end()
        if seen == "fenced":
            return self._fenced()
        if code == 0 or (self.run is not None and _is_finished(self.run)):
            return self._finished()
        if handed:
            self.place.write_end("requeued", STOPPED_CODE, self._why(), self._step(), self._idle())
            return STOPPED_CODE
        if self.asked.at is not None or code in STOPPED:
            return self._stopped()
        said = f"killed by {signal_name(-code)}" if code < 0 else said_last(self.log or own_output())
        return self._failed(128 - code if code < 0 else code, said or f"exit code {code}")

    @property
    def _decides(self) -> bool:
        """Whether this process speaks for the job; of a command on every node only the first does."""
        return self.place.me.rank == 0

    def _finished(self) -> int:
        if self._decides and self.place.failed_elsewhere() is None:
            self.place.write_end("finished", 0, "", self._step())
        return 0

    def _failed(self, code: int, reason: str) -> int:
        me = self.place.me
        if me.rank > 0:
            reason = f"rank {me.rank} on {me.node}: {reason}"
        if self.place.failed_elsewhere() is None:
            self.place.write_end("failed", code, reason, self._step(), self._idle())
        if self.run is not None and self.token and self.run.status() == "queued":
            with fence.hold(self.run.path, self.token):  # the child never came as far as to say so itself
                self.run.update(status="failed", reason=reason)
        return code

    def _fenced(self) -> int:
        """Another attempt has the run. If it is a later one of this very task, the `End` is that one's to write.

        Then the code is 0, too: any other and srun would kill what it takes for the same step of the job.
        """
        assert self.run is not None
        present = fence.read(self.run.path)
        taken = "its fence is gone" if present is None else f"taken over by {present.holder()}"
        ours = present is not None and present.launch == self.place.assignment.to_json()
        if not ours:
            self.place.write_end("fenced", NOT_OURS, taken, self._step())
        return _say(0 if ours else NOT_OURS, f"fenced: run {self.run.run_id} {taken}")

    def _is_replaced_by_later(self) -> bool:
        """Whether a later start of this very job has the run."""
        present = fence.read(self.place.run)
        if present is None or present.launch != self.place.assignment.to_json():
            return False
        return (present.job_id, True) == (self.place.me.job, (present.restart or 0) > self.place.me.restart)

    def _note_asked(self) -> None:
        """A first word as soon as a signal comes; a child that takes too long to save is killed with this process."""
        if not self._decides or self._is_fenced() or self.place.failed_elsewhere() is not None:
            return
        why = "cancelled" if self.place.is_cancelled() else self._why()
        try:
            self.place.write_end("stopped", STOPPED_CODE, why, self._step(), self._idle())
        except RunFolderError as error:  # a full disk must not keep the child from saving
            print(f"racelab: {error}", flush=True)

    def _cancelled(self) -> int:
        self.place.write_end("stopped", STOPPED_CODE, "cancelled", self._step())
        return STOPPED_CODE

    def _stopped(self) -> int:
        """It was asked to stop, and has. Returns the exit code."""
        if not self._decides:
            return 0  # for any other code srun would kill the first rank, which has the rest to do
        if self._is_fenced():
            return self._fenced()
        failed = self.place.failed_elsewhere()
        if failed is not None:
            return failed.exit_code
        if self.place.is_cancelled():
            return self._cancelled()
        tired = self._too_idle()
        if tired:
            return self._failed(1, tired)
        refused = self._hand_back()
        if self.void:
            return _say(0, refused)
        if refused:
            self.place.write_end("stopped", STOPPED_CODE, refused, self._step(), self._idle())
        return STOPPED_CODE

    def _while_busy(self) -> bool:
        """Whether the job is requeued although its child still works; what that saves until it is killed counts."""
        if self._is_fenced() or self.place.is_cancelled() or self.place.failed_elsewhere() is not None:
            return False
        refused = self._too_idle() or self._hand_back()
        if refused and not self.void:  # it may still end in time; if not, this is the last word
            self.place.write_end("stopped", STOPPED_CODE, refused, self._step(), self._idle())
        return not refused

    def _hand_back(self) -> str:
        """Has the job requeued if it may be; "" if it was, else why not."""
        why, terms, step, idle = self._why(), self.asked.terms, self._step(), self._idle()
        if not self.place.batch.launcher.requeue:
            return f"{why}; launcher.requeue=false leaves it to `racelab resume`"

        def note(status: str, reason: str) -> None:
            try:
                self.place.write_end(status, STOPPED_CODE, f"{why}; {reason}" if reason else why, step, idle)
            except RunFolderError as error:  # a full disk must not keep the job from going on later
                print(f"racelab: {error}", flush=True)

        refused = hand_back(self.place.me.job, self.place.me.restart, note)
        self.void = refused == LATER
        if refused:
            return f"{why}; {refused}"
        await_stop(self.asked, terms)
        return ""

    def _too_idle(self) -> str:
        """Why the job is given up at a stop that would come again; "" as long as it is not."""
        launcher, idle = self.place.batch.launcher, self._idle()
        if not launcher.requeue or not self._comes_again() or idle <= launcher.max_idle_requeues:
            return ""
        return idle_reason(idle, self._at_limit(), launcher.time_min, self._newest())

    def _barren(self) -> int:
        """Starts of the job without a new checkpoint, before this one."""
        me = self.place.me
        attempts = [] if self.run is None else self.run.attempts()
        return barren_starts(attempts, me.job, me.restart, self.before)

    def _newest(self) -> str:
        """The newest checkpoint, for people; "" for a command."""
        if self.run is None:
            return ""
        step = self._step()
        return "none so far" if step is None else f"the newest is of step {step}"

    def _comes_again(self) -> bool:
        """Whether what stops it now is no accident of the cluster: the time limit, or no signal of Slurm's."""
        return self._at_limit() or self.asked.at is None

    def _at_limit(self) -> bool:
        """Whether the signal that came was the one before the time limit, as far as the clock can tell."""
        launcher = self.place.batch.launcher
        earliest = 60 * launcher.time_min - launcher.signal_delay_s - _EARLY_S - _SETUP_S
        return self.asked.user is not None and self.asked.user - self.started >= earliest

    def _why(self) -> str:
        if self._at_limit():
            return "the time limit came"
        if self.asked.user is not None:
            return "asked to stop by SIGUSR2"
        return "asked to stop by SIGTERM" if self.asked.at is not None else "stopped by a signal, not Slurm's"

    def _idle(self) -> int:
        return idle_requeues(self.last, self.before, self._step(), self._comes_again())

    def _step(self) -> int | None:
        return None if self.run is None else _newest_step(self.run)

    def _is_fenced(self) -> bool:
        """Whether another attempt has the run; a fence that cannot be read now is looked at again later."""
        if self.run is None or not self.token:
            return False
        try:
            present = fence.read(self.run.path)
        except RunFolderError:
            return False
        return present is None or present.token != self.token


def _summary(error: Exception) -> tuple[int, str]:
    """Exit code and a line for an `End`."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (error.exit_code if isinstance(error, RacelabError) else 1), reason


def _is_finished(run: RunFolder) -> bool:
    """Whether its folder says so; a file system that has hiccups does not."""
    with contextlib.suppress(RunFolderError):
        return bool(run.info()["status"] == "finished")
    return False


def _newest_step(run: RunFolder) -> int | None:
    """Step of the newest checkpoint; None if there is none, or none that can be seen now."""
    with contextlib.suppress(OSError):
        return max(CheckpointStore(run.path / "checkpoints").steps(), default=None)
    return None


def _append(log: Path, line: str) -> None:
    try:
        with open(log, "a", encoding="utf-8") as handle:
            handle.write(f"{line}\n")
    except OSError as error:
        raise RunFolderError(f"cannot write {log}: {explain(error)}") from error


def _say(code: int, line: str) -> int:
    print(f"racelab: {line}", flush=True)
    return code
