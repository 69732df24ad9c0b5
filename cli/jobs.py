"""`racelab jobs`: how the jobs stand that were launched from here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from racelab.cli.console import console, on_terminal, print_json, print_table, results, say
from racelab.cli.jobs_view import COLUMNS, RIGHT, Key, change, counts, key, mends, row, stands, table
from racelab.cli.train import run_root
from racelab.experiments.errors import ConfigError, RacelabError, RunFolderError, UnreachableError
from racelab.sweeps.slurm.folder import LaunchFolder, all_launches
from racelab.sweeps.slurm.status import TaskStatus, is_ours, survey

if TYPE_CHECKING:
    from racelab.sweeps.slurm.scheduler import Scheduler
    from racelab.sweeps.slurm.targets import Target

POLL_S: Final = 5.0
"""Seconds between two looks of --watch and --wait."""
_RECENT: Final = timedelta(hours=24)
_ROWS_BESIDE: Final = 8
"""Lines of the terminal that the table's frame, its title and the prompt take."""


def jobs(
    what: str | None, everything: bool, watch: bool, wait: bool, root: Path | None, json_output: bool
) -> int:
    """Prints the tasks, once or until none is live. Returns the exit code.

    Raises:
        ConfigError: options that do not go together.
        RunFolderError: `what` means nothing here.
        UnreachableError: there are launches, and no scheduler answers.
    """
    if watch and (wait or json_output):
        raise ConfigError(
            f"--watch is for people to look at; leave it or {'--wait' if wait else '--json'} out (--wait --json: "
            "wait, then JSON)"
        )
    look = Look(run_root(str(root) if root else ""), what, everything, quiet=json_output)
    if not look.find():
        if json_output:
            print_json([])
        say(f"nothing was launched from {look.root}; a command with launcher=slurm does, or `racelab launch`")
        return 0
    if watch:
        return _watch(look)
    statuses, well = _wait(look) if wait else (look.now(), True)
    with results():
        _print(look, statuses, json_output)
    return 0 if well else 1


def _print(look: Look, statuses: Sequence[TaskStatus], json_output: bool) -> None:
    if json_output:
        print_json([{"name": status.name, **asdict(status)} for status in statuses])
        return
    if statuses:
        print_table(COLUMNS, [row(status) for status in statuses], right=RIGHT)
    _say_end(look, statuses)


def _say_end(look: Look, statuses: Sequence[TaskStatus]) -> None:
    """Counts, and what to do."""
    if not statuses:
        say(
            "nothing is live, and nothing has ended in the last 24 hours; --all shows what was launched before"
        )
        return
    say(counts(statuses))
    for line in mends(statuses, look.home):
        say(line)


def _changes(look: Look) -> Iterator[tuple[list[TaskStatus], list[TaskStatus]]]:
    """(all tasks, those that stand otherwise than at the look before), until none is live.

    A scheduler that does not answer for a while ends nothing, unless it is the first time that it is asked.
    """
    before: dict[Key, tuple[str, str, str]] = {}
    answered = silent = False
    while True:
        try:
            statuses = look.now()
        except UnreachableError as error:
            if not answered:
                raise
            if not silent:
                look.say(f"warning: {error}; asking again every {POLL_S:.0f} s")
            silent = True
        else:
            answered, silent = True, False
            yield statuses, [status for status in statuses if before.get(key(status)) != stands(status)]
            before = {key(status): stands(status) for status in statuses}
            if not any(status.live for status in statuses):
                return
        time.sleep(POLL_S)


def _wait(look: Look) -> tuple[list[TaskStatus], bool]:
    """(the tasks once none is live, whether those waited for finished); a line per change.

    Waited for is what a name means, or else what was live at the first look: what failed before is no news.
    """
    found: list[TaskStatus] = []
    awaited: set[Key] | None = None
    for statuses, changed in _changes(look):
        if awaited is None:
            awaited = {key(status) for status in statuses if status.live or look.what is not None}
        if found:
            for status in changed:
                look.say(change(status))
        elif any(status.live for status in statuses):
            look.say(counts(statuses))
        found = statuses
    ended = [status for status in found if key(status) in (awaited or ()) and status.state != "superseded"]
    return found, all(status.state == "finished" for status in ended)


def _watch(look: Look) -> int:
    """Until none is live or Ctrl-C: on a terminal a table that is redrawn, elsewhere a line per change."""
    found: list[TaskStatus] = []
    with _screen() if on_terminal() else contextlib.nullcontext(_say_changes) as draw:
        for statuses, changed in _changes(look):
            draw(statuses, changed)
            found = statuses
    _say_end(look, found)
    return 0


_Draw = Callable[[Sequence[TaskStatus], Sequence[TaskStatus]], None]


def _say_changes(statuses: Sequence[TaskStatus], changed: Sequence[TaskStatus]) -> None:
    for status in changed:
        print(change(status), flush=True)


@contextlib.contextmanager
def _screen() -> Iterator[_Draw]:
    """A table on the terminal; the last state stays there."""
    from rich.live import Live

    terminal = console()
    with Live(console=terminal, auto_refresh=False) as live:
        yield lambda statuses, changed: live.update(
            table(statuses, terminal.height - _ROWS_BESIDE), refresh=True
        )


@dataclass(slots=True)
class Look:
    """Looks at the tasks that the command line means, as often as it is asked.

    Attributes:
        root: folder of the runs.
        what: launch, run or sweep; None: whatever was launched from here.
        everything: what ended long ago too, and what a later job replaced.
        quiet: no talk.
    """

    root: Path
    what: str | None
    everything: bool
    quiet: bool
    _scheduler: Scheduler | None = None
    _target: Target | None = None
    _folders: list[LaunchFolder] = field(default_factory=list)
    _damaged: set[str] = field(default_factory=set)

    def find(self) -> bool:
        """Finds the launches anew, for there may be more; whether there are any.

        Raises:
            RunFolderError: `what` means nothing here, or a run that was not launched.
        """
        if self.what is None:
            self._folders = [folder for folder in all_launches(self.root) if self._is_readable(folder)]
            return bool(self._folders)
        from racelab.sweeps.slurm.targets import find, with_earlier

        target = find(self.root, self.what)
        target = self._target = with_earlier(target) if self.everything else target
        if target.run is not None and not target.launches:
            raise RunFolderError(
                f"{target.run.run_id} was not launched as a job; `racelab show {self.what}` says how it stands"
            )
        self._folders = list(target.launches)
        return True

    @property
    def home(self) -> Path:
        """Folder of the runs that are shown: a path may lead elsewhere."""
        run = self._target.run if self._target is not None else None
        return run.path.parent.absolute() if run is not None else self.root

    def _is_readable(self, folder: LaunchFolder) -> bool:
        """Whether its record is; one that is not is said, once, and keeps no other from being shown."""
        try:
            folder.launch()
            folder.submissions()
        except RunFolderError as error:
            if folder.uid not in self._damaged:
                say(f"warning: {error}")
            self._damaged.add(folder.uid)
            return False
        return True

    def now(self) -> list[TaskStatus]:
        """The tasks to show, as launched. First, what a submitter that died has left is finished.

        Raises:
            UnreachableError: no scheduler answers.
        """
        self.find()
        self._recover()
        since = None if self.everything or self.what is not None else datetime.now(UTC) - _RECENT
        found = survey(self._folders, self.scheduler, since)
        self._settle(found)
        return [status for status in found if self._means(status, since)]

    @property
    def scheduler(self) -> Scheduler:
        """Made when it is first needed."""
        if self._scheduler is None:
            from racelab.sweeps.slurm.scheduler import Scheduler

            self._scheduler = Scheduler()
        return self._scheduler

    def say(self, line: str) -> None:
        """Talk, unless JSON was asked for."""
        if not self.quiet:
            say(line)

    def _recover(self) -> None:
        """Submits or adopts what is ours; a refusal of one launch must not hide the others."""
        unfinished = [folder for folder in self._folders if is_ours(folder) and not folder.is_settled()]
        if not unfinished:
            return
        from racelab.sweeps.slurm.submit import recover

        for folder in unfinished:
            try:
                for line in recover(folder, self.scheduler):
                    self.say(line)
            except UnreachableError:
                raise
            except RacelabError as error:
                self.say(f"warning: launch {folder.uid}: {error}")

    def _settle(self, found: Sequence[TaskStatus]) -> None:
        """Writes down what jobs could not: the end of runs that no job has any more, the record of their sweep."""
        seen = {status.launch for status in found}
        live = {status.launch for status in found if status.live}
        if seen == live and all(s.live or s.state in ("finished", "superseded") for s in found):
            return  # nothing yet, and what follows loads numpy
        from racelab.sweeps.slurm.settle import settle

        for problem in settle([folder for folder in self._folders if folder.uid in seen], found):
            self.say(f"warning: {problem}")

    def _means(self, status: TaskStatus, since: datetime | None) -> bool:
        """Whether the command line asks for this task."""
        target = self._target
        if target is not None and target.runs and status.run_id not in target.runs:
            return False
        if target is not None and target.stage and status.stage != target.stage:
            return False
        if self.everything:
            return True
        if status.state == "superseded":
            return status.leftover
        if since is None or status.live or (status.state == "lost" and status.mend):
            return True  # lost without a mend: its run was removed
        return not status.ended or datetime.fromisoformat(status.ended) >= since
