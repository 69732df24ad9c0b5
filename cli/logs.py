"""`racelab logs`: what a run's job printed, and what Slurm and the job's script printed around it."""

from __future__ import annotations

import codecs
import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from racelab.cli.console import print_json, say
from racelab.cli.jobs_view import change, mends
from racelab.cli.train import one_run, reference, run_root
from racelab.experiments.errors import ConfigError, RunFolderError, UnreachableError
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.slurm.folder import LAUNCHES, LaunchFolder
from racelab.sweeps.slurm.glance import run_logs
from racelab.sweeps.slurm.model import Assignment, Launch

if TYPE_CHECKING:
    from racelab.sweeps.slurm.status import TaskStatus
    from racelab.sweeps.slurm.targets import Target

POLL_S: Final = 0.3
"""Seconds between two looks at the files."""
ASK_S: Final = 10.0
"""Seconds between two questions to the scheduler."""
_RESTART: Final = re.compile(r"(?P<job>\d+(_\d+)?)-r(?P<restart>\d+)\.log")
_AROUND: Final = re.compile(r".*\.(?P<job>\d+(_\d+)?)\.(?P<rank>\d+)\.out")


def logs(
    what: str, follow: bool, rank: int, attempt: int | None, root: Path | None, json_output: bool
) -> int:
    """Prints the newest job's output, or that of an attempt; with `follow` on and on, until the task has ended.

    JSON: {file, bytes, job_id, restart, rank, attempt} of each file that would be printed; null where a file has none.

    Raises:
        ConfigError: options that do not go together, or a word that means several tasks.
        RunFolderError: no such run, attempt or node, or a run whose output went elsewhere.
        UnreachableError: it has not started, and no scheduler says why.
    """
    if follow and attempt is not None:
        raise ConfigError("-f follows the newest attempt; leave it or --attempt out")
    if follow and json_output:
        raise ConfigError("--json says where the logs are, and does not follow them; leave it or -f out")
    source = _source(run_root(str(root) if root else ""), what)
    if follow:
        return _follow(source, rank)
    files = source.newest(rank) if attempt is None else source.of_attempt(attempt, rank)
    if json_output:
        print_json([source.facts(file) for file in files])
        return 0
    if not files or (attempt is None and not source.has_started()):
        _say_standing(source)
    for file in files:
        _header(file)
        with open(file, encoding="utf-8", errors="replace", newline="") as handle:
            shutil.copyfileobj(handle, sys.stdout)
    return 0


def _header(file: Path) -> None:
    sys.stdout.flush()
    say(f"--- {file}")


@dataclass(frozen=True, slots=True)
class Source:
    """A task whose output is asked for.

    Attributes:
        run: its run; None for a command.
        folder: of the launch that it belongs to; None for a run that was started here.
        batch: name, "" without a launch.
        index: in the batch.
        is_array: whether its jobs are named `<array>_<index>`.
    """

    run: RunFolder | None
    folder: LaunchFolder | None = None
    batch: str = ""
    index: int = 0
    is_array: bool = False

    @property
    def name(self) -> str:
        """For people."""
        if self.run is not None:
            return reference(self.run)
        assert self.folder is not None
        return f"{self.folder.uid}:{self.batch}"

    @property
    def root(self) -> Path:
        """Folder of the runs."""
        if self.run is not None:
            return self.run.path.parent.absolute()
        assert self.folder is not None
        return self.folder.path.parent.parent

    def printed(self, rank: int) -> dict[str, Path]:
        """Job -> what it printed on one of its nodes around the run itself, oldest first."""
        if self.folder is None:
            return {}
        job = rf"\d+_{self.index}" if self.is_array else r"\d+"
        pattern = re.compile(rf"{re.escape(self.batch)}\.(?P<job>{job})\.{rank}\.out")
        found = [
            (entry.stat().st_mtime, match["job"], Path(entry.path))
            for entry in os.scandir(self.folder.path / "log")
            if (match := pattern.fullmatch(entry.name)) is not None
        ]
        return {job: path for _, job, path in sorted(found)}

    def has_started(self) -> bool:
        """Whether a job of its launch has; a run without a launch is taken to have."""
        return self.folder is None or bool(self.printed(0))

    def newest(self, rank: int, wait: bool = False) -> list[Path]:
        """The files of the newest job, those with nothing in them left out; before its first job, of the run's last.

        Raises:
            RunFolderError: the job has no such node (with `wait`: will have none), or a run that was started here
                keeps no log.
        """
        printed = self.printed(rank)
        if rank > 0 and not printed and (rank >= self._nodes() if wait else self.has_started()):
            raise RunFolderError(f"{self.name} has printed nothing on a node {rank}; --rank counts from 0")
        job = next(reversed(printed), "")
        around = [printed[job]] if job else []
        return [file for file in [*around, *self._own(job, rank)] if file.stat().st_size]

    def _nodes(self) -> int:
        """How many its job has."""
        return 1 if self.folder is None else self.folder.launch().batch(self.batch).launcher.nodes or 1

    def facts(self, file: Path) -> dict[str, Any]:
        """What a program wants to know of a file."""
        own, around = _RESTART.fullmatch(file.name), _AROUND.fullmatch(file.name)
        match = own or around
        job = match["job"] if match else None
        restart = int(own["restart"]) if own else None
        attempt = next(
            (
                entry["attempt"]
                for entry in (self.run.attempts() if self.run is not None and own else [])
                if (entry.get("slurm_job_id"), entry.get("slurm_restart")) == (job, restart)
            ),
            None,
        )
        rank = int(around["rank"]) if around else 0
        size = file.stat().st_size
        return {
            "file": str(file), "bytes": size, "job_id": job, "restart": restart, "rank": rank, "attempt": attempt,
        }  # fmt: skip

    def _own(self, job: str, rank: int) -> list[Path]:
        """What the run itself printed: in that job, or in whichever was the last; on the first node it always is."""
        if self.run is None or rank > 0:
            return []
        found = run_logs(self.run.path)
        if job:
            return [log for log in found if log.name.startswith(f"{job}-r")][-1:]
        cell = self.run.path / "attempts" / "cell.log"
        if not found and cell.is_file():
            return [cell]
        if not found and self.folder is None and self.run.status() != "queued":
            raise RunFolderError(
                f"{self.run.run_id} was started in a terminal and printed there; `racelab show {self.name}` shows it"
            )
        return found[-1:]

    def of_attempt(self, number: int, rank: int) -> list[Path]:
        """The files of the job of one attempt of the run.

        Raises:
            ConfigError: a command has no attempts.
            RunFolderError: no such attempt, or it was no job's.
        """
        if self.run is None:
            raise ConfigError(f"{self.name} is a command; --attempt is for runs")
        entries = {int(entry["attempt"]): entry for entry in self.run.attempts()}
        if number not in entries:
            known = f"it has {', '.join(map(str, entries))}" if entries else "it has none yet"
            raise RunFolderError(f"{self.run.run_id} has no attempt {number}; {known}")
        entry = entries[number]
        job, restart = entry.get("slurm_job_id"), entry.get("slurm_restart")
        if job is None or restart is None:
            raise RunFolderError(
                f"attempt {number} of {self.run.run_id} was no job: it printed in the terminal it was started in"
            )
        own = self.run.path / "attempts" / f"{job}-r{restart}.log"
        around = self.run.path.parent / LAUNCHES / str(entry.get("launch")) / "log"
        files = [*sorted(around.glob(f"*.{job}.{rank}.out")), *([own] if rank == 0 else [])]
        there = [file for file in files if file.is_file() and file.stat().st_size]
        if not there:
            raise RunFolderError(
                f"attempt {number} of {self.run.run_id} (job {job}) has no log for node {rank}"
            )
        return there

    def last_words(self) -> str:
        """How the newest job, or a run of no launch, says that it has ended; "" while it has not."""
        if self.folder is None:
            assert self.run is not None
            status = self.run.status()
            return "" if status in ("running", "queued") else f"{self.name}: {status}"
        end = self.folder.end(self.batch, self.index)
        job = next(reversed(self.printed(0)), "")
        if end is None or end.status in ("requeued", "stopped") or end.job_id != job:
            return ""  # "stopped" stands there while it still saves, too: the scheduler knows what came of it
        own = self._own(job, 0)
        match = _RESTART.fullmatch(own[-1].name) if own else None
        if match is not None and int(match["restart"]) > end.restart:
            return ""  # somebody had the job requeued all the same
        return f"{self.name}: {end.status}{f': {end.reason}' if end.reason else ''}"

    def status(self) -> TaskStatus | None:
        """How the task stands; None for a run of no launch.

        Raises:
            UnreachableError: no scheduler answers.
        """
        if self.folder is None:
            return None
        from racelab.sweeps.slurm.scheduler import Scheduler
        from racelab.sweeps.slurm.status import survey

        found = survey([self.folder], Scheduler())
        return next(s for s in found if (s.batch, s.index) == (self.batch, self.index))


def _source(root: Path, what: str) -> Source:
    """The task that `what` means."""
    from racelab.sweeps.slurm.targets import find

    target = find(root, what)
    if target.run is None:
        return _of_launch(target)
    run = one_run(target.run)
    assigned = Assignment.from_json(run.info().get("launch"))
    if assigned is None:
        return Source(run)
    folder = LaunchFolder(run.path.parent / LAUNCHES / assigned.uid)
    if not folder.is_readable():
        return Source(run)  # the launch's folder was removed, or is closed to us
    is_array = folder.launch().batch(assigned.batch).is_array
    return Source(run, folder, assigned.batch, assigned.index, is_array)


def _of_launch(target: Target) -> Source:
    folder = target.launches[0]
    launch = folder.launch()
    tasks = [
        (batch, index, task)
        for batch, index, task in launch.tasks()
        if not target.stage or batch.stage == target.stage
    ]
    if len(tasks) > 1:
        elsewhere = Path(launch.root) != run_root("")
        where = f" --root {shlex.quote(launch.root)}" if elsewhere else ""
        raise ConfigError(
            f"{_several(launch, target.stage)}; name one: racelab logs{where} {_examples(launch, target.stage)}"
        )
    batch, index, task = tasks[0]
    run = RunFolder.open(Path(launch.root) / task.run) if task.run else None
    return Source(run, folder, batch.name, index, batch.is_array)


def _several(launch: Launch, stage: str) -> str:
    of = f"stage {stage} of launch {launch.uid}" if stage else f"launch {launch.uid}"
    return f"{of} has {sum(not stage or b.stage == stage for b, _, _ in launch.tasks())} tasks"


def _examples(launch: Launch, stage: str) -> str:
    names = [
        task.run or f"{launch.uid}:{batch.stage}"
        for batch, _, task in launch.tasks()
        if not stage or batch.stage == stage
    ]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _say_standing(source: Source) -> None:
    """How a task stands that has printed nothing yet."""
    status = source.status()
    if status is None:
        assert source.run is not None
        say(f"{source.name}: {source.run.status()}; it has printed nothing yet")
        return
    say(change(status))
    for line in mends([status], source.root):
        say(line)


@dataclass(slots=True)
class _Reader:
    """Prints what is appended to a file."""

    file: Path
    offset: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def read(self) -> str:
        """What is new."""
        with open(self.file, "rb") as handle:
            handle.seek(self.offset)
            data = handle.read()
        self.offset += len(data)
        return self._decoder.decode(data)


def _follow(source: Source, rank: int) -> int:
    """Prints what the newest job prints, and the one after it, until the task has ended."""
    readers: dict[Path, _Reader] = {}
    shown: Path | None = None
    said = ""
    asked = -ASK_S
    while True:
        ended = source.last_words()  # before reading: what was printed until then is read below
        over = bool(ended)
        if not over and time.monotonic() - asked >= ASK_S:
            over, said = _ask(source, said, quiet=bool(readers))
            asked = time.monotonic()
        for file in source.newest(rank, wait=True):
            text = readers.setdefault(file, _Reader(file)).read()
            if text and file != shown:
                _header(file)
                shown = file
            sys.stdout.write(text)
        sys.stdout.flush()
        if over:
            if ended:
                say(ended)
            return 0
        time.sleep(POLL_S)


def _ask(source: Source, said: str, quiet: bool) -> tuple[bool, str]:
    """Asks the scheduler whether the task is over, and says how it stands while nothing is printed."""
    try:
        status = source.status()
    except UnreachableError as error:
        line, over = f"warning: {error}", False
    else:
        if status is None:
            return False, said
        line, over = change(status), not status.live
        if quiet and not over:
            return False, said
    if line != said:
        say(line)
    return over, line
