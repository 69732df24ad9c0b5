"""Which task a job's process is to work on, whether its submission counts, and where it says how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from racelab.experiments.errors import ConfigError
from racelab.experiments.fsio import now_iso
from racelab.sweeps.slurm.folder import End, LaunchFolder
from racelab.sweeps.slurm.model import NOT_OURS, Assignment, Batch, Launch, Task
from racelab.sweeps.slurm.nodes import Identity


@dataclass(frozen=True, slots=True)
class Place:
    """A task and the process that is to work on it.

    Attributes:
        folder: of the launch.
        launch: what is in it.
        batch: the task's.
        number: of the submission.
        me: the process.
    """

    folder: LaunchFolder
    launch: Launch
    batch: Batch
    number: int
    me: Identity

    @classmethod
    def find(cls, arguments: Sequence[str], environ: Mapping[str, str]) -> Place:
        """From the command line (launch folder, batch, number of the submission) and Slurm's variables.

        Raises:
            ConfigError: no such batch or task, or this is no process of a job.
            RunFolderError: the launch's folder is missing or damaged.
        """
        if len(arguments) != 3 or not arguments[2].isdecimal():
            raise ConfigError(
                "racelab.sweeps.slurm.entry takes LAUNCH_FOLDER BATCH NUMBER; it is for the scripts of jobs, people "
                "take `racelab launch` or launcher=slurm"
            )
        me = Identity.of(environ)
        folder = LaunchFolder(Path(arguments[0]).absolute())
        launch = folder.launch()
        names = [batch.name for batch in launch.batches]
        if arguments[1] not in names:
            raise ConfigError(f"launch {launch.uid} has no batch {arguments[1]!r}; it has {', '.join(names)}")
        batch = launch.batch(arguments[1])
        if me.index >= len(batch.tasks):
            raise ConfigError(
                f"batch {batch.name} of launch {launch.uid} has no task {me.index}, it has {len(batch.tasks)} tasks"
            )
        return cls(folder, launch, batch, int(arguments[2]), me)

    @property
    def task(self) -> Task:
        """What is to be done."""
        return self.batch.tasks[self.me.index]

    @property
    def run(self) -> Path:
        """Folder of the task's run (kind run)."""
        return Path(self.launch.root) / self.task.run

    @property
    def assignment(self) -> Assignment:
        """What the run must name as its task."""
        return Assignment(self.launch.uid, self.batch.name, self.me.index, self.number)

    @property
    def nodes_dir(self) -> Path:
        """Where the ranks report."""
        return self.folder.nodes_dir(self.batch.name, self.me.index)

    def replaced(self) -> str:
        """Why this submission does not count; "" if it does.

        A second job of the same script counts only while nobody knows the job id of the first.
        """
        name, newest = self.batch.name, self.folder.newest().get(self.batch.name)
        if newest is None or newest.number != self.number:
            known = "none" if newest is None else f"number {newest.number}"
            return f"submission {self.number} of {name} does not count, {known} does"
        if newest.job_id and newest.job_id != self.me.submission:
            return f"submission {self.number} of {name} is job {newest.job_id}, not {self.me.submission}"
        return ""

    def is_cancelled(self) -> bool:
        """Whether someone asked to cancel the task."""
        return self.folder.is_cancelled(self.batch.name, self.me.index)

    def end(self) -> End | None:
        """How the task's newest attempt ended, if that was one of this job."""
        end = self.folder.end(self.batch.name, self.me.index)
        return end if end is not None and end.job_id == self.me.job else None

    def failed_elsewhere(self) -> End | None:
        """The `End` of this very attempt if another rank has failed."""
        if self.me.nodes == 1:
            return None
        end = self.end()
        return end if end is not None and end.status == "failed" and end.restart == self.me.restart else None

    def write_end(self, status: str, code: int, reason: str, step: int | None, idle: int = 0) -> None:
        """Says how this attempt ended, unless a later start of the job has said how that one did."""
        me, last = self.me, self.end()
        if last is not None and last.restart > me.restart:
            return
        end = End(status, code, reason, me.job, me.restart, me.node, now_iso(), step, idle)
        self.folder.write_end(self.batch.name, me.index, end)

    def write_superseded(self, reason: str) -> None:
        """Says that the run is another's, unless that would hide how a real attempt ended."""
        last = self.folder.end(self.batch.name, self.me.index)
        if last is None or (last.job_id == self.me.job and last.status == "requeued"):
            self.write_end("superseded", NOT_OURS, reason, None)
