"""How every task of a launch stands: the scheduler's tables, the job's own last words and the run's folder, merged.

None of the three is enough. The scheduler forgets jobs, lags, and calls a job failed that was only asked to stop; a
job that lost its node says nothing; a run's folder knows no queue. `survey` gathers the facts, in the order in which
they come about (so that none is older than one that was read before it), and `judge` decides; its docstring holds the
truth table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from racelab.experiments.fsio import is_locked
from racelab.sweeps.progress import Progress
from racelab.sweeps.slurm.folder import LAUNCHES, End, LaunchFolder, stamped
from racelab.sweeps.slurm.glance import glance, run_logs
from racelab.sweeps.slurm.judge import Facts, State, Verdict, judge
from racelab.sweeps.slurm.model import Batch, Launch, Submission, Task, job_name, task_job_id
from racelab.sweeps.slurm.scheduler import Scheduler, Table

__all__ = ["State", "TaskStatus", "is_ours", "owners", "survey"]

REWARD = "train/reward/mean"


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """How a task stands.

    Attributes:
        launch: id.
        batch: name.
        index: in the batch.
        number: of the newest submission, 0 before the first.
        kind: run or command.
        title: for people.
        run_id: name of the run's folder, "" for a command.
        path: of the run's folder, "" for a command.
        state: see `judge`.
        live: it may still run or start.
        reason: one line, "" where there is nothing to say.
        mend: the command that helps, "".
        job_id: `12` or `12_4`; "" without one.
        slurm_state: Slurm's own word, "" if it does not know the job.
        node: where it runs or ran; Slurm's notation for several.
        attempt: number of the run's newest, None before the first and for commands.
        restarts: how often Slurm requeued the job, None if unknown.
        step: updates of the policy done; None before the first and for commands.
        budget: of them, None for commands.
        eta_s: seconds to the end of a running task, to Slurm's expected start of a pending one; None if unknown.
        metric: name of the last metric, "".
        value: of it.
        submitted: ISO time, "" before.
        log: newest log of the run, or what the command printed; "" if there is none.
        ended: ISO time at which it was last heard of, "" while it is live.
        stage: of the graph.
    """

    launch: str
    batch: str
    index: int
    number: int
    kind: str
    title: str
    run_id: str
    path: str
    state: State
    live: bool
    reason: str
    mend: str
    job_id: str
    slurm_state: str
    node: str
    attempt: int | None
    restarts: int | None
    step: int | None
    budget: int | None
    eta_s: float | None
    metric: str
    value: float | None
    submitted: str
    log: str
    ended: str = ""
    stage: str = ""

    @property
    def name(self) -> str:
        """What the commands take for it: the run's id, or `LAUNCH:STAGE`."""
        return self.run_id or f"{self.launch}:{self.stage}"

    @property
    def leftover(self) -> bool:
        """Whether its job is still in the queue though the run is another's: a job that nothing else tells of."""
        return self.state == "superseded" and bool(self.mend)


def survey(
    folders: Sequence[LaunchFolder], scheduler: Scheduler, since: datetime | None = None
) -> list[TaskStatus]:
    """Every task of the launches, as launched. At most one table of the scheduler, none if there is no launch.

    Args:
        folders: the launches.
        scheduler: asked once, for all of them.
        since: leave out launches whose tasks had all ended before, without looking at each task.

    Raises:
        RunFolderError: a launch's record is damaged.
        UnreachableError: the scheduler does not answer.
    """
    launched = [_Launched(folder, folder.launch(), folder.newest()) for folder in folders]
    if not launched:
        return []
    quiet = {one.launch.uid for one in launched if since is not None and one.is_quiet(since)}
    began = stamped(min(one.launch.uid for one in launched))
    ids = [job for one in launched if one.launch.uid not in quiet for job in one.job_ids()]
    table = scheduler.table(ids, began)
    # Seldom: jobs whose id was not recorded, and those of quiet launches that are to go on or ended a moment ago.
    more = [job for one in launched for job in one.job_ids(table.names, only_named=one.launch.uid in quiet)]
    if not set(more) <= set(ids):
        table = scheduler.table([*ids, *more], began)
    known = {job.partition("_")[0] for job in more}
    kept = [one for one in launched if one.launch.uid not in quiet or known & set(one.arrays().values())]
    return [status for one in kept for status in _tasks(one, table)]


def owners(root: Path, runs: Collection[str], scheduler: Scheduler) -> dict[str, TaskStatus]:
    """Name of a run's folder -> the task that it is assigned to, where that is live.

    Raises:
        UnreachableError: the scheduler does not answer; it is not asked if no run is assigned to a task.
    """
    facts = {name: glance(root / name) for name in runs}
    uids = sorted({f.assigned.uid for f in facts.values() if f is not None and f.assigned is not None})
    folders = [LaunchFolder(root / LAUNCHES / uid) for uid in uids]
    there = [folder for folder in folders if folder.is_readable()]
    return {s.run_id: s for s in survey(there, scheduler) if s.live and s.run_id in facts}


def is_ours(folder: LaunchFolder) -> bool:
    """Whether this user made the launch; nobody else may finish submitting it, or close its runs."""
    return folder.path.stat().st_uid == os.getuid()


@dataclass(frozen=True, slots=True)
class _Launched:
    """A launch as its folder has it."""

    folder: LaunchFolder
    launch: Launch
    newest: Mapping[str, Submission]

    def is_quiet(self, since: datetime) -> bool:
        """Whether nothing has happened since, and every task has said how it ended."""
        path = self.folder.path
        touched = max(os.stat(path / name).st_mtime for name in ("ends", "cancelled", "submissions.json"))
        if touched >= since.timestamp() or datetime.fromisoformat(stamped(self.launch.uid)) >= since:
            return False
        said = sum(entry.name.endswith(".json") for entry in os.scandir(path / "ends"))
        return said >= self.launch.n_tasks

    def arrays(self, names: Mapping[str, str] | None = None) -> dict[str, str]:
        """Batch -> id of its job or array, from the record, or else from the names of the jobs there are."""
        found = {}
        for batch in self.launch.batches:
            submission = self.newest.get(batch.name)
            if submission is not None:
                name = job_name(self.launch, batch, submission.number)
                found[batch.name] = submission.job_id or (names or {}).get(name, "")
        return {name: job_id for name, job_id in found.items() if job_id}

    def job_ids(self, names: Mapping[str, str] | None = None, only_named: bool = False) -> list[str]:
        """Of every task that has one; `only_named`: of those that are among the names, too."""
        arrays = self.arrays(names)
        return [
            task_job_id(arrays[batch.name], batch, index)
            for batch in self.launch.batches
            if batch.name in arrays and (not only_named or arrays[batch.name] in (names or {}).values())
            for index in range(len(batch.tasks))
        ]


def _tasks(one: _Launched, table: Table) -> Iterator[TaskStatus]:
    """The tasks of a launch; the scheduler's table is older than the jobs' words, and those than the runs' folders."""
    ends = one.folder.ends()
    cancelled = {entry.name for entry in os.scandir(one.folder.path / "cancelled")}
    submitting = is_locked(one.folder.path / "submit.lock")
    replaced = {s.job_id for s in one.folder.submissions()} - {s.job_id for s in one.newest.values()}
    badly: set[str] = set()
    arrays = one.arrays(table.names)
    for batch in one.launch.batches:
        submission = one.newest.get(batch.name)
        of_batch = {index: end for (name, index), end in ends.items() if name == batch.name}
        job_id = arrays.get(batch.name) or _said(submission, of_batch.values(), replaced)
        unmet = tuple(a.stage for a in batch.after if a.condition == "ok" and a.stage in badly)
        for index, task in enumerate(batch.tasks):
            facts = Facts(
                launch=one.launch.uid,
                name=task.run or f"{one.launch.uid}:{batch.stage}",
                submission=submission,
                job_id=task_job_id(job_id, batch, index) if job_id else "",
                end=of_batch.get(index),
                is_run=task.kind == "run",
                requeue=batch.launcher.requeue,
                submitting=submitting,
                cancelled=f"{batch.name}.{index}" in cancelled,
                waits_for=tuple(after.stage for after in batch.after),
                unmet=unmet,
                accounting=table.accounting,
                now=time.time(),
            )
            facts = _with_run(_with_job(facts, one.launch, batch, table), one.launch, batch, index, task)
            verdict = judge(facts)
            if not verdict.live and verdict.state not in ("finished", "superseded"):
                badly.add(batch.stage)
            yield _status(one, batch, index, facts, verdict)


def _said(submission: Submission | None, ends: Collection[End], replaced: Collection[str]) -> str:
    """The job or array by its own word, where its submitter died before it recorded the id and Slurm forgot it; ""."""
    if submission is None or submission.error:
        return ""
    arrays = (end.job_id.partition("_")[0] for end in ends)
    return next((array for array in arrays if array not in replaced), "")


def _with_job(facts: Facts, launch: Launch, batch: Batch, table: Table) -> Facts:
    """The scheduler's job, unless its name says that the id now belongs to another; the word, if it is of this job."""
    job = table.jobs.get(facts.job_id)
    if job is not None and facts.submission is not None:
        own = job_name(launch, batch, facts.submission.number).removeprefix(launch.name[:40])
        job = job if not job.name or job.name.endswith(own) else None
    end = facts.end if facts.end is not None and facts.end.job_id == facts.job_id else None
    return replace(facts, job=job, end=end)


def _with_run(facts: Facts, launch: Launch, batch: Batch, index: int, task: Task) -> Facts:
    """The run's folder, and whether the run is this task's; whichever submission: the newest one counts.

    A run that is assigned to a launch that was never finished making, or was removed, is still the task's.
    """
    launches = Path(launch.root) / LAUNCHES
    if not task.run:
        return replace(facts, ours=LaunchFolder(launches / launch.uid).handed_on(batch.name, index) is None)
    run = glance(Path(launch.root) / task.run)
    of = run.assigned if run is not None else None
    mine = of is not None and (of.uid, of.batch, of.index) == (launch.uid, batch.name, index)
    ours = run is None or mine or (of is not None and not LaunchFolder(launches / of.uid).is_there())
    return replace(facts, run=run, ours=ours)


def _status(one: _Launched, batch: Batch, index: int, f: Facts, verdict: Verdict) -> TaskStatus:
    """What people and programs read of it."""
    task, job, run, submission = batch.tasks[index], f.job, f.run, f.submission
    progress = run.progress if run is not None else Progress()
    path = Path(one.launch.root) / task.run
    log = _log(one.folder, batch, f, path)
    return TaskStatus(
        launch=one.launch.uid,
        batch=batch.name,
        index=index,
        number=submission.number if submission is not None else 0,
        kind=task.kind,
        title=task.title,
        run_id=task.run,
        path=str(path) if task.run else "",
        state=verdict.state,
        live=verdict.live,
        reason=_with_last_line(f, verdict, log),
        mend=verdict.mend,
        job_id=f.job_id,
        slurm_state=job.state if job is not None else "",
        node=(job.nodes if job is not None else "") or (f.end.node if f.end is not None else ""),
        attempt=run.attempt if run is not None else None,
        restarts=_restarts(f),
        step=progress.policy_step,
        budget=run.budget if run is not None else None,
        eta_s=_eta(f, verdict),
        metric=REWARD if progress.reward is not None else "",
        value=progress.reward,
        submitted=(submission.submitted or submission.intended) if submission is not None else "",
        log=log,
        ended="" if verdict.live else _ended(f),
        stage=batch.stage,
    )


def _with_last_line(f: Facts, verdict: Verdict, log: str) -> str:
    """The reason; of a job that left no word of its own (a setup line failed, say) with the last line it printed."""
    if verdict.state not in ("failed", "lost") or f.end is not None or not log:
        return verdict.reason
    from racelab.sweeps.launch import last_line  # it knows configs, which a look at jobs does not need

    said = last_line(Path(log))
    return f"{verdict.reason}: {said}" if said and said not in verdict.reason else verdict.reason


def _restarts(f: Facts) -> int | None:
    if f.job is not None and f.job.restarts is not None:
        return f.job.restarts
    return f.end.restart if f.end is not None else None


def _eta(f: Facts, verdict: Verdict) -> float | None:
    if verdict.state == "running" and f.run is not None and f.run.status == "running":
        return f.run.progress.eta_s
    if verdict.state in ("pending", "requeued") and f.job is not None and f.job.expected is not None:
        return max(0.0, f.job.expected - f.now)
    return None


def _ended(f: Facts) -> str:
    """When it was last heard of: the job's word, the scheduler's, the run's record, its submission."""
    if f.end is not None:
        return f.end.at
    job = f.job.end if f.job is not None else None
    moment = job if job is not None else f.run.ended if f.run is not None else None
    if moment is not None:
        return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
    return (f.submission.submitted or f.submission.intended) if f.submission is not None else ""


def _log(folder: LaunchFolder, batch: Batch, f: Facts, path: Path) -> str:
    if not f.is_run:
        printed = folder.path / "log" / f"{batch.name}.{f.job_id}.0.out"
        return str(printed) if f.job_id and printed.exists() else ""
    tried = f.end is not None or (f.run is not None and f.run.attempt is not None)
    logs = run_logs(path) if tried or (f.job is not None and f.job.nodes) else []
    return str(logs[-1]) if logs else ""
