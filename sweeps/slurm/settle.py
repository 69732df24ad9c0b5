"""What a job could not write down itself: a run whose job never started, or died without a word, gets its end here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from racelab.experiments.errors import RacelabError
from racelab.experiments.runfolder import STALE_S, RunFolder
from racelab.sweeps.collect import collect
from racelab.sweeps.slurm.folder import LaunchFolder
from racelab.sweeps.slurm.model import Assignment
from racelab.sweeps.slurm.status import TaskStatus, is_ours

_FAILED: Final = frozenset({"failed", "out_of_memory", "lost", "refused"})
_STOPPED: Final = frozenset({"cancelled", "timeout", "preempted", "node_fail", "interrupted"})


def settle(launches: Sequence[LaunchFolder], statuses: Sequence[TaskStatus]) -> list[str]:
    """Closes runs that no job has any more, and writes the records of sweeps whose cells have all ended.

    Of our own launches only: a cluster may hide the jobs of others, which then look lost.

    Args:
        launches: those that were surveyed.
        statuses: of their tasks.

    Returns:
        What could not be written, a line each; looking at jobs must not fail because of it.
    """
    problems = []
    ours = {folder.uid: folder for folder in launches if is_ours(folder)}
    for status in statuses:
        if status.launch in ours and _is_to_close(status):
            word = "failed" if status.state in _FAILED else "interrupted"
            try:
                close(status, word, status.reason or status.state)
            except RacelabError as error:
                problems.append(str(error))
    live = {status.launch for status in statuses if status.live}
    for uid, folder in ours.items():
        if uid in live:
            continue
        try:
            _collect(folder)
        except RacelabError as error:
            problems.append(str(error))
    return problems


def _is_to_close(status: TaskStatus) -> bool:
    """Whether the task's run needs an end; one that was removed does not."""
    if not status.run_id or status.live or status.state not in _FAILED | _STOPPED:
        return False
    path = Path(status.path)
    if not (path / "run.json").is_file():
        return False
    age = RunFolder(path, path.name).heartbeat_age()
    return (
        status.state != "lost" or age is None or age >= STALE_S
    )  # a process that was there just now may be yet


def close(status: TaskStatus, word: str, reason: str) -> bool:
    """Writes the end of a run that has none: its job never started on it, or died at work. Returns whether it did.

    Nothing happens to a run that a process works on, or that meanwhile is another task's.
    """
    run = RunFolder.open(Path(status.path))
    assigned = Assignment.from_json(run.info().get("launch"))
    mine = (status.launch, status.batch, status.index)
    if assigned is None or (assigned.uid, assigned.batch, assigned.index) != mine:
        return False
    if run.status() != "queued":
        from racelab.experiments.tracking.shipper import close_stale

        return close_stale(run, word, reason)
    run.update(status=word, reason=reason)
    return True


def _collect(folder: LaunchFolder) -> None:
    """The records of the sweeps that the launch's runs belong to; a graph may hold several."""
    launch = folder.launch()
    root = Path(launch.root)
    names = {launch.sweep} if launch.sweep else set()
    for _, _, task in launch.tasks():
        if not launch.sweep and task.run and (root / task.run / "run.json").is_file():
            names.add(str(RunFolder.open(root / task.run).info().get("sweep") or ""))
    for name in sorted(names - {""}):
        if (root / name / "run.json").is_file():
            sweep = RunFolder.open(root / name)
            if sweep.info()["status"] != "finished":
                collect(sweep)
