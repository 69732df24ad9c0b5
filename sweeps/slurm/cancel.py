"""Cancelling tasks: remembered first, so that a job that is being stopped does not requeue itself."""

from __future__ import annotations

from collections.abc import Sequence

from racelab.sweeps.slurm.model import Launch
from racelab.sweeps.slurm.scheduler import Scheduler
from racelab.sweeps.slurm.settle import close
from racelab.sweeps.slurm.status import TaskStatus
from racelab.sweeps.slurm.targets import Target

CANCELLED = "cancelled by racelab cancel"
_WAITING = frozenset({"pending", "blocked", "unsubmitted", "requeued"})
"""States in which no process is there that could write down how the run ended."""


def downstream(launch: Launch, stages: Sequence[str]) -> list[str]:
    """The stages that wait, directly or not, for one of `stages`."""
    found = list(stages)
    for batch in launch.batches:  # in an order in which a stage comes after those it waits for
        if batch.stage not in found and any(after.stage in found for after in batch.after):
            found.append(batch.stage)
    return found[len(stages) :]


def with_downstream(
    target: Target, meant: Sequence[TaskStatus], everything: Sequence[TaskStatus]
) -> list[TaskStatus]:
    """`meant`, and every task of their launches that waits for one of their stages."""
    found = list(meant)
    for folder in target.launches:
        stages = {s.stage for s in meant if s.launch == folder.uid}
        further = set(downstream(folder.launch(), sorted(stages)))
        found += [s for s in everything if s.launch == folder.uid and s.stage in further]
    return found


def cancel(target: Target, tasks: Sequence[TaskStatus], scheduler: Scheduler) -> list[TaskStatus]:
    """Cancels the tasks that may still run or start, and jobs whose run another has by now; returns them.

    A run that is being worked on saves a checkpoint first, within the time that the cluster gives it.

    Raises:
        UnreachableError: the scheduler does not answer; the tasks stay marked, and cancelling again is safe.
    """
    live = [status for status in tasks if status.live or status.leftover]
    for status in live:
        target.folder(status).cancel(status.batch, status.index)
    scheduler.cancel(_job_ids(target, live))
    for status in live:
        if status.run_id and status.state in _WAITING:
            close(status, "interrupted", CANCELLED)
    return live


def _job_ids(target: Target, live: Sequence[TaskStatus]) -> list[str]:
    """What scancel is given: an array as a whole where all its tasks are meant."""
    by_batch: dict[tuple[str, str], list[str]] = {}
    for status in live:
        if status.job_id:
            by_batch.setdefault((status.launch, status.batch), []).append(status.job_id)
    found = []
    for (uid, name), ids in by_batch.items():
        folder = next(folder for folder in target.launches if folder.uid == uid)
        whole = len(folder.launch().batch(name).tasks) == len(ids)
        found += [ids[0].partition("_")[0]] if whole else ids
    return found
