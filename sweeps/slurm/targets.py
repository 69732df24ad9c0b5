"""What people mean by RUN, SWEEP or LAUNCH: the tasks of launches, as they stand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from racelab.configs.suggest import did_you_mean, near
from racelab.experiments.errors import RunFolderError
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.manifest import resolve
from racelab.sweeps.run import members
from racelab.sweeps.slurm.folder import LAUNCHES, LaunchFolder, all_launches
from racelab.sweeps.slurm.model import Assignment
from racelab.sweeps.slurm.scheduler import Scheduler
from racelab.sweeps.slurm.status import TaskStatus, survey


@dataclass(frozen=True, slots=True)
class Target:
    """What a word means.

    Attributes:
        run: the run or sweep; None for a launch.
        launches: that its tasks belong to, oldest first; none for a run that was never launched.
        stage: of the launch, "" for all.
        runs: names of the run folders that are meant; empty: all tasks of the launches.
    """

    run: RunFolder | None
    launches: tuple[LaunchFolder, ...]
    stage: str = ""
    runs: frozenset[str] = frozenset()

    def tasks(self, scheduler: Scheduler) -> tuple[list[TaskStatus], list[TaskStatus]]:
        """(the tasks meant that still count, every task of their launches)."""
        everything = survey(self.launches, scheduler) if self.launches else []
        meant = [s for s in everything if s.state != "superseded" and self._means(s)]
        return meant, everything

    def leftovers(self, everything: Sequence[TaskStatus]) -> list[TaskStatus]:
        """The tasks meant whose run is another's by now, and whose job is there all the same."""
        return [status for status in everything if status.leftover and self._means(status)]

    def _means(self, status: TaskStatus) -> bool:
        if self.runs:
            return status.run_id in self.runs
        return self.stage in ("", status.stage)

    def folder(self, status: TaskStatus) -> LaunchFolder:
        """The launch of a task."""
        return next(folder for folder in self.launches if folder.uid == status.launch)


def find(root: Path, text: str) -> Target:
    """The tasks that `text` means: a launch (`UID`, the beginning of one, `UID:STAGE`), or a run or sweep as elsewhere.

    Raises:
        RunFolderError: nothing of that name, or several launches begin so.
    """
    uid, _, stage = text.partition(":")
    known = all_launches(root)
    exact = [folder for folder in known if folder.uid == uid]
    found = exact or [folder for folder in known if len(uid) >= _LEAST and folder.uid.startswith(uid)]
    if len(found) > 1:
        raise RunFolderError(
            f"{uid!r} begins {len(found)} launches: {', '.join(folder.uid for folder in found[:5])}; give the whole id"
        )
    if found:
        _check_stage(found[0], stage)
        return Target(None, (found[0],), stage)
    return _of_run(root, resolve(root, text))


def with_earlier(target: Target) -> Target:
    """With every launch that its runs have ever been in, for a job of one of them may still be there."""
    if target.run is None:
        return target
    found = launches_with(target.run.path.parent, target.runs)
    return replace(target, launches=tuple(sorted({*target.launches, *found}, key=lambda folder: folder.uid)))


def launches_with(root: Path, runs: Collection[str]) -> list[LaunchFolder]:
    """The launches, oldest first, that these runs are or were in; damaged ones are left out."""
    found = []
    for folder in all_launches(root):
        try:
            tasks = [task.run for _, _, task in folder.launch().tasks()]
            folder.submissions()
        except RunFolderError:
            continue  # none that can be looked at; `racelab jobs` warns of it
        if any(run in runs for run in tasks):
            found.append(folder)
    return found


_LEAST = 9
"""Characters of a launch's id that may stand for it: run ids begin with a date too."""


def _check_stage(folder: LaunchFolder, stage: str) -> None:
    stages = list(dict.fromkeys(batch.stage for batch in folder.launch().batches))
    if stage and stage not in stages:
        hint = did_you_mean(near(stage, stages))
        raise RunFolderError(
            f"launch {folder.uid} has no stage {stage!r}{hint} (stages: {', '.join(stages)})"
        )


def _of_run(root: Path, run: RunFolder) -> Target:
    if run.info().get("kind") == "sweep":
        names = frozenset(str(entry["run_id"]) for entry in members(run))
    else:
        names = frozenset({run.run_id})
    return Target(run, tuple(_launches_of(run.path.parent, sorted(names))), runs=names)


def _launches_of(root: Path, runs: Sequence[str]) -> list[LaunchFolder]:
    """The launches that these runs are assigned to."""
    uids = set()
    for name in runs:
        path = root / name
        if (path / "run.json").is_file():
            assigned = Assignment.from_json(RunFolder.open(path).info().get("launch"))
            if assigned is not None:
                uids.add(assigned.uid)
    folders = [LaunchFolder(root / LAUNCHES / uid) for uid in sorted(uids)]
    return [folder for folder in folders if folder.is_readable()]
