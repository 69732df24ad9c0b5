"""From runs to a launch: the cells of a sweep, one run, or what an earlier launch left unfinished."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from racelab.configs.compose import read_composed
from racelab.configs.schema_launcher import (
    SlurmLauncherConfig,
    asked_of_slurm,
    refuse_what_launcher_cannot,
)
from racelab.experiments.errors import ConfigError
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.cells import Cell, open_cells
from racelab.sweeps.run import NEW, Plan, note_reused, open_sweep, other_code, refuse_new
from racelab.sweeps.slurm.folder import LAUNCHES, LaunchFolder, all_launches
from racelab.sweeps.slurm.model import MAX_ARRAY, After, Assignment, Batch, Launch, Task
from racelab.sweeps.slurm.scheduler import Scheduler
from racelab.sweeps.slurm.status import TaskStatus, is_ours, owners, survey
from racelab.sweeps.slurm.submit import (
    assignments,
    by_allocation,
    checked,
    new_launch,
    prepare,
    recover,
    share_limits,
    submit_launch,
)

CELLS = "cells"
"""Stage of a sweep's cells."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Todo:
    """What a sweep still asks of the cluster.

    Attributes:
        cells: (cell, name of its run folder) to submit.
        live: run folder's name -> the job that has it already.
        finished: how many have nothing left to do.
    """

    cells: tuple[tuple[Cell, str], ...]
    live: Mapping[str, TaskStatus]
    finished: int


def _unheard(line: str) -> None:
    """Says it to nobody."""


def todo(plan: Plan, scheduler: Scheduler | None, say: Say = _unheard) -> Todo:
    """The cells of a plan that have not finished and that no job has; without a scheduler none is known to be live.

    With one, what a submitter that died has left of them is submitted first, and said.

    Raises:
        ConfigError: a process that is no job works on one of them.
        UnreachableError: the scheduler does not answer.
    """
    statuses = dict(zip(plan.run_ids, plan.statuses(), strict=True))
    started = [run_id for run_id, status in statuses.items() if status not in (NEW, "finished")]
    live: dict[str, TaskStatus] = {}
    if scheduler is not None and started:
        live = owners(plan.root, started, scheduler)
        if _recovered(plan.root, live.values(), scheduler, say):
            live = owners(plan.root, started, scheduler)
        for run in (RunFolder(plan.root / run_id, run_id) for run_id in started if run_id not in live):
            if statuses[run.run_id] == "running" and not run.info().get("launch"):
                refuse_held(run)  # what is left of an earlier job's process is stopped by the run's fence
    cells = [
        (cell, run_id)
        for cell, run_id in zip(plan.cells, plan.run_ids, strict=True)
        if statuses[run_id] != "finished" and run_id not in live
    ]
    return Todo(tuple(cells), live, sum(status == "finished" for status in statuses.values()))


def _recovered(root: Path, live: Iterable[TaskStatus], scheduler: Scheduler, say: Say) -> bool:
    """Submits what is missing of this user's launches; whether there was any."""
    uids = dict.fromkeys(status.launch for status in live if status.state == "unsubmitted")
    folders = [folder for folder in (LaunchFolder(root / LAUNCHES / uid) for uid in uids) if is_ours(folder)]
    for folder in folders:
        try:
            for line in recover(folder, scheduler):
                say(line)
        except ConfigError as error:  # its runs have no job then, and are submitted anew
            say(f"warning: {error}")
    return bool(folders)


def refuse_held(run: RunFolder) -> None:
    """Raises ConfigError for a run that a process works on: a job would only wait for it, or take it away."""
    if run.is_held():
        holder = run.holder() or {}
        pid, host = holder.get("pid"), holder.get("host")
        raise ConfigError(
            f"run {run.run_id} is in use by pid {pid} on host {host}; wait for it, or stop it there with `kill {pid}`"
        )


def plan_batches(
    cells: Sequence[tuple[Cell, str]], stage: str = CELLS, after: Sequence[After] = ()
) -> tuple[Batch, ...]:
    """The batches of a sweep's cells."""
    asked = [(run_id, f"{cell.label}-s{cell.seed}", _launcher(cell)) for cell, run_id in cells]
    return by_allocation(stage, asked, after)


def _launcher(cell: Cell) -> SlurmLauncherConfig:
    launcher = asked_of_slurm(cell.config.launcher, cell.config.backend)
    if launcher is None:
        raise ConfigError(
            f"cell {cell.label} has launcher=inline beside cells with launcher=slurm; give all of them the same"
        )
    return launcher


def plan_launch(plan: Plan, left: Todo, max_array: int = MAX_ARRAY) -> Launch:
    """The launch of what is left of a sweep; `left.cells` is not empty."""
    return new_launch(
        plan.name, plan.command, plan.root, plan_batches(left.cells), sweep=plan.run_id, max_array=max_array
    )


def submit_plan(plan: Plan, left: Todo, scheduler: Scheduler, resume: bool, say: Say) -> LaunchFolder:
    """Checks, makes the sweep's folder and the cells', and submits.

    Raises:
        ConfigError: Slurm would refuse it (nothing has been made), or refuses it.
    """
    if resume:
        refuse_new(plan)
    launch = plan_launch(plan, left, scheduler.limits().max_array)
    checked(launch, scheduler, say)
    launch = prepare(launch)
    make_cells(plan, left.cells, assignments(launch))
    if left.finished:
        runs = [RunFolder.open(plan.root / run_id) for run_id in plan.run_ids]
        for line in other_code([run for run in runs if run.status() == "finished"]):
            say(line)
    return submit_launch(launch, scheduler, say)


def make_cells(
    plan: Plan, cells: Sequence[tuple[Cell, str]], assigned: Mapping[str, Assignment]
) -> RunFolder:
    """The sweep's folder and its cells', each naming the task that may work on it."""
    sweep = open_sweep(plan)
    sweep.update(launcher="slurm")
    known = {run_id for _, run_id in cells if (plan.root / run_id).exists()}
    asked = [(cell, run_id, {"launch": assigned[run_id].to_json()}) for cell, run_id in cells]
    for folder in open_cells(plan.root, asked, sweep.run_id):
        mine = assigned[folder.run_id]
        if folder.run_id in known or folder.info().get("launch") != mine.to_json():
            requeue_folder(folder, mine)
    if known or len(cells) < len(plan.cells):
        note_reused(sweep, [RunFolder.open(plan.root / run_id) for run_id in plan.run_ids])
    return sweep


def requeue_folder(folder: RunFolder, assignment: Assignment) -> None:
    """A run that has not finished is to be worked on by another task."""
    folder.update(launch=assignment.to_json(), status="queued", reason="")


def relaunch(
    root: Path,
    chosen: Sequence[tuple[LaunchFolder, TaskStatus]],
    everything: Sequence[TaskStatus],
    launcher: Callable[[SlurmLauncherConfig], SlurmLauncherConfig],
    scheduler: Scheduler,
    say: Say,
    command: str,
) -> LaunchFolder:
    """A new launch of tasks that have not finished and that no job has.

    Args:
        root: folder of the runs.
        chosen: the tasks, each with its launch; all of one launch or of several.
        everything: every task of those launches, to see what the chosen ones wait for.
        launcher: changes to the allocation, from the command line.
        scheduler: asked.
        say: is told.
        command: as typed.

    Raises:
        ConfigError: a task waits for one that has not finished, is not running and is not among the chosen; an
            allocation that does not fit the runs, or that Slurm would refuse.
    """
    chosen = list({_work(status): (folder, status) for folder, status in chosen}.values())
    launches = {folder.uid: folder.launch() for folder in dict.fromkeys(folder for folder, _ in chosen)}
    again = [status for _, status in chosen]
    waits = _Waits(root, {_place(status) for status in again}, everything, scheduler)
    sweeps = {launch.sweep for launch in launches.values()}
    launch = new_launch(
        next(iter(launches.values())).name,
        command,
        root,
        _merged(launches, again, launcher, waits),
        sweep=sweeps.pop() if len(sweeps) == 1 else "",
        max_array=scheduler.limits().max_array,
    )
    started_in = {one.cwd for one in launches.values() if Path(one.cwd).is_dir()}
    if len(started_in) == 1:  # what relative paths in the commands mean
        launch = replace(launch, cwd=started_in.pop())
    checked(launch, scheduler, say)
    launch = prepare(launch)
    for folder, status in chosen:
        if not status.run_id:
            folder.hand_on(status.batch, status.index, launch.uid)
    for run, assignment in assignments(launch).items():
        requeue_folder(RunFolder.open(root / run), assignment)
    return submit_launch(launch, scheduler, say)


def _place(status: TaskStatus) -> tuple[str, str, int]:
    return status.launch, status.batch, status.index


def _work(status: TaskStatus) -> object:
    """What a task does: of two that would work on one run, one is enough."""
    return status.run_id or _place(status)


def _merged(
    launches: Mapping[str, Launch],
    again: Sequence[TaskStatus],
    launcher: Callable[[SlurmLauncherConfig], SlurmLauncherConfig],
    waits: _Waits,
) -> tuple[Batch, ...]:
    """The batches of tasks that are submitted again; runs of one stage that ask and wait for the same share one.

    How many may run at once is what the stage was allowed before it was split, or what `launcher` makes of that.
    """
    by_batch: dict[tuple[str, str], list[Task]] = {}
    for status in again:
        task = launches[status.launch].batch(status.batch).tasks[status.index]
        by_batch.setdefault((status.launch, status.batch), []).append(task)
    groups: dict[tuple[object, ...], list[Batch]] = {}
    for (uid, name), tasks in by_batch.items():
        launch, old = launches[uid], launches[uid].batch(name)
        before = old.launcher.model_copy(update={"max_parallel": _limit(launch, old)})
        asked = launcher(before)
        if _size(asked) != _size(before) and tasks[0].run:
            refuse_misfit(RunFolder.open(waits.root / tasks[0].run), asked)
        batch = Batch(old.stage, old.stage, tuple(tasks), asked, waits.of(launch, old))
        alike = asked.model_copy(update={"max_parallel": None}).model_dump_json()
        apart = "" if tasks[0].run else (uid, name)
        groups.setdefault((batch.stage, alike, batch.after, apart), []).append(batch)
    stages = list(dict.fromkeys(batches[0].stage for batches in groups.values()))
    found: list[Batch] = []
    for stage in stages:  # all of a stage before those that wait for it
        parts = [_joined(batches) for batches in groups.values() if batches[0].stage == stage]
        found += [part if i == 0 else replace(part, name=f"{stage}.{i + 1}") for i, part in enumerate(parts)]
    return share_limits(found)


def _limit(launch: Launch, batch: Batch) -> int | None:
    """How many tasks of a batch's stage may run at once, over all its arrays."""
    limits = [part.launcher.max_parallel for part in launch.of_stage(batch.stage)]
    return None if batch.launcher.max_parallel is None else sum(limit or 0 for limit in limits)


def _joined(batches: Sequence[Batch]) -> Batch:
    """One batch of all their tasks; of several limits, which come from several launches, the largest."""
    limits = [batch.launcher.max_parallel for batch in batches]
    limit = None if None in limits else max(limit or 0 for limit in limits)
    launcher = batches[0].launcher.model_copy(update={"max_parallel": limit})
    return replace(batches[0], tasks=tuple(task for b in batches for task in b.tasks), launcher=launcher)


def _size(launcher: SlurmLauncherConfig) -> tuple[int | None, int | None]:
    return launcher.nodes, launcher.gpus_per_node


def refuse_misfit(run: RunFolder, launcher: SlurmLauncherConfig) -> None:
    """Raises ConfigError for an allocation that the run's backend would leave idle, or that is too small for it."""
    backend = read_composed(run.path / "config" / "composed.yaml").config.backend
    try:
        refuse_what_launcher_cannot(launcher, backend)
    except ValueError as error:
        raise ConfigError(f"{run.run_id}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Waits:
    """What tasks that are submitted again still have to wait for.

    Attributes:
        root: folder of the runs.
        again: (launch, batch, index) of the tasks that are submitted again.
        everything: every task of the launches.
        scheduler: asked about tasks that belong to other launches.
    """

    root: Path
    again: Set[tuple[str, str, int]]
    everything: Sequence[TaskStatus]
    scheduler: Scheduler

    def of(self, old: Launch, batch: Batch) -> tuple[After, ...]:
        """Stages that are submitted again, and jobs that may still run; nothing for what has ended well.

        Raises:
            ConfigError: what it needs the success of has ended otherwise, and is not submitted again; or what it waits
                for has no job yet.
        """
        found: list[After] = []
        for after in batch.after:
            tasks = self._of_job(after.job_id) if after.job_id else self._of_stage(old, after.stage)
            if after.job_id and not tasks:
                found.append(after)  # its launch was removed
            stages = dict.fromkeys(s.stage for s in tasks if _place(s) in self.again)
            found += [replace(after, stage=stage, job_id="") for stage in stages]
            left = [self._newest(s) for s in tasks if _place(s) not in self.again]
            later = self._later([s.run_id for s in left if s.run_id and s.state == "superseded"])
            live = [s for s in [*left, *later.values()] if s.live]
            _refuse_without_job(batch, live)
            found += [replace(after, job_id=job) for job in dict.fromkeys(s.job_id for s in live)]
            if after.condition == "ok":
                self._refuse_lost(old, batch, [s for s in left if not s.live and s.run_id not in later])
        return tuple(found)

    def _of_stage(self, old: Launch, stage: str) -> list[TaskStatus]:
        parts = {part.name for part in old.of_stage(stage)}
        return [s for s in self.everything if s.launch == old.uid and s.batch in parts]

    def _of_job(self, job_id: str) -> list[TaskStatus]:
        """The tasks of a job of an earlier launch: Slurm takes one that it has forgotten for one that ended well."""
        array = job_id.partition("_")[0]
        folders = [f for f in all_launches(self.root) if any(s.job_id == array for s in f.submissions())]
        tasks = survey(folders[-1:], self.scheduler)  # ids may have been used before
        return [s for s in tasks if job_id in (s.job_id, s.job_id.partition("_")[0])]

    def _newest(self, status: TaskStatus) -> TaskStatus:
        """A command's task where it is now."""
        while status.state == "superseded" and not status.run_id:
            folder = LaunchFolder(self.root / LAUNCHES / status.launch).handed_on(status.batch, status.index)
            there = survey([folder], self.scheduler) if folder is not None else []
            same = [
                s for s in there if (s.stage, s.title, s.kind) == (status.stage, status.title, status.kind)
            ]
            if not same:
                break
            status = same[0]
        return status

    def _later(self, runs: Sequence[str]) -> dict[str, TaskStatus]:
        """Run -> the task of a later launch that has it, where that is live."""
        return owners(self.root, runs, self.scheduler) if runs else {}

    def _refuse_lost(self, old: Launch, batch: Batch, ended: Sequence[TaskStatus]) -> None:
        for status in ended:
            state, mend = str(status.state), old.uid if status.launch == old.uid else status.name
            if state == "superseded" and status.run_id:  # by a later launch that has ended, or by hand
                state, mend = RunFolder.open(self.root / status.run_id).status(), status.run_id
            if state != "finished":
                what = "resume the whole launch" if mend == old.uid else "resume that first"
                raise ConfigError(
                    f"stage {batch.stage} waits for {status.title}, which is {state}; {what}: racelab resume {mend}"
                )


def _refuse_without_job(batch: Batch, live: Sequence[TaskStatus]) -> None:
    for status in live:
        if not status.job_id:
            raise ConfigError(
                f"stage {batch.stage} waits for {status.title}, which launch {status.launch} has yet to submit; "
                f"do that first: racelab jobs {status.launch}"
            )
