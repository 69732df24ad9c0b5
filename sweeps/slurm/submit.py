"""Submitting a launch, once: whatever moment its submitter dies at, every task ends up with one job that may work.

The order is what makes that true:

1. the code is copied, the launch's folder made (`prepare`)
2. the run folders are there, each naming the task that may work on it (`Assignment`)
3. `launch.json`: everything that is to be submitted; before it the assignments count for nothing
4. per batch: the intent with a number, then sbatch with a job name that holds launch, batch and number, then the job id

Who finds an intent without a job id (`recover`) looks for a job of that name. If there is one it is adopted. If not,
the batch is submitted under the next number and the runs are assigned to that: should the first sbatch come through
after all, its job finds that its number does not count any more, and does nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from racelab.configs.schema_launcher import SlurmLauncherConfig
from racelab.experiments.environment import redact_command
from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.fsio import now_iso
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.cells import slug
from racelab.sweeps.slurm import environment, executor, preflight, snapshot
from racelab.sweeps.slurm.folder import LAUNCHES, LaunchFolder, intent, new_uid, stamped
from racelab.sweeps.slurm.model import (
    MAX_ARRAY,
    After,
    Assignment,
    Batch,
    Launch,
    Submission,
    Task,
    job_name,
    share,
    split,
)
from racelab.sweeps.slurm.scheduler import Scheduler

Say = Callable[[str], None]
_CONDITIONS = {"ok": "afterok", "any": "afterany"}
_POLL_S = 0.5


def run_batch(
    stage: str,
    runs: Sequence[tuple[str, str]],
    launcher: SlurmLauncherConfig,
    after: Sequence[After] = (),
) -> Batch:
    """A batch of runs that ask for the same.

    Args:
        stage: its name.
        runs: (name of the run folder, title) each.
        launcher: resolved.
        after: what it waits for.
    """
    tasks = tuple(Task("run", run=run, title=title) for run, title in runs)
    return Batch(stage, stage, tasks, launcher, tuple(after))


def by_allocation(
    stage: str, runs: Sequence[tuple[str, str, SlurmLauncherConfig]], after: Sequence[After] = ()
) -> tuple[Batch, ...]:
    """Batches of one stage: one for each different allocation that its runs (folder, title, launcher) ask for.

    Those that ask for one `max_parallel` share it.
    """
    alike: dict[str, list[tuple[str, str, SlurmLauncherConfig]]] = {}
    for run in runs:
        alike.setdefault(run[2].model_dump_json(), []).append(run)
    found = []
    for number, group in enumerate(alike.values()):
        batch = run_batch(stage, [(run, title) for run, title, _ in group], group[0][2], after)
        found.append(batch if number == 0 else replace(batch, name=f"{stage}.{number + 1}"))
    return share_limits(found)


def share_limits(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Slurm limits each array by itself, so the batches of one stage with one limit share it out."""
    found = []
    for number, batch in enumerate(batches):
        limit = batch.launcher.max_parallel
        alike = [
            i for i, b in enumerate(batches)
            if (b.stage, b.launcher.max_parallel) == (batch.stage, limit)
        ]  # fmt: skip
        if limit is not None:
            update = {"max_parallel": share(limit, alike.index(number), len(alike))}
            batch = replace(batch, launcher=batch.launcher.model_copy(update=update))
        found.append(batch)
    return tuple(found)


def new_launch(
    name: str,
    command: str,
    root: Path,
    batches: Sequence[Batch],
    *,
    sweep: str = "",
    max_array: int = MAX_ARRAY,
) -> Launch:
    """A launch with an id of its own; batches of more than `max_array` tasks are split, and get names of their own."""
    parts = _own_names([part for batch in batches for part in split(batch, max_array)])
    return Launch(
        uid=new_uid(),
        name=slug(name),
        command=redact_command(command),
        root=str(root.absolute()),
        cwd=str(Path.cwd()),
        batches=parts,
        sweep=sweep,
        created=now_iso(),
        depth=environment.depth(os.environ),
    )


def _own_names(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Batches that come from several launches may have one name; `After` means stages, whose names stay."""
    taken: set[str] = set()
    found = []
    for batch in batches:
        name, number = batch.name, 1
        while name in taken:
            number += 1
            name = f"{batch.name}-r{number}"
        taken.add(name)
        found.append(replace(batch, name=name))
    return tuple(found)


def assignments(launch: Launch, number: int = 1) -> dict[str, Assignment]:
    """Run folder's name -> the task of this launch that may work on it."""
    return {
        task.run: Assignment(launch.uid, batch.name, index, number)
        for batch, index, task in launch.tasks()
        if task.kind == "run"
    }


def check(launch: Launch, scheduler: Scheduler) -> list[str]:
    """Everything that Slurm would refuse, before anything is made. Returns warnings.

    Raises:
        ConfigError: inside an array job, or a request that cannot be met, with Slurm's own reason.
        UnreachableError: no scheduler answers here.
    """
    environment.refuse_nested(os.environ)
    named = _with_code(launch)
    with TemporaryDirectory(prefix="racelab-preflight-") as place:
        scripts = {}
        for batch in launch.batches:
            scripts[batch.name] = Path(place) / f"{batch.name}.sh"
            text = executor.script_text(named, batch, 1, Path(place))
            scripts[batch.name].write_text(text, encoding="utf-8")
        return preflight.check(launch, scheduler, scripts)


def checked(launch: Launch, scheduler: Scheduler, say: Say) -> None:
    """`check`, with its warnings said."""
    for line in check(launch, scheduler):
        say(f"warning: {line}")


def prepare(launch: Launch) -> Launch:
    """Copies the code and makes the launch's folder, so that what is left to write after the assignments is little.

    Returns:
        The launch with the place of its code, for `submit_launch`.

    Raises:
        RunFolderError: nothing can be written under the root.
    """
    launch = replace(launch, code=str(snapshot.take(Path(launch.root))))
    LaunchFolder.make(launch)
    return launch


def _with_code(launch: Launch) -> Launch:
    """With the place of the code's copy, whether that is there already or not."""
    return replace(launch, code=launch.code or str(snapshot.place(Path(launch.root))))


def submit_launch(launch: Launch, scheduler: Scheduler, say: Say) -> LaunchFolder:
    """Hands every batch of a launch that is prepared to Slurm; the run folders are there and assigned to it.

    Raises:
        ConfigError: Slurm refused a batch; the message says what has been submitted before it.
        RunFolderError: nothing can be written under the root.
        UnreachableError: Slurm gave no answer; `recover` finds out what it did.
    """
    folder = LaunchFolder(Path(launch.root) / LAUNCHES / launch.uid)
    try:
        folder.publish(launch)
        _submit_or_wait(folder, scheduler, say)
    except KeyboardInterrupt:
        if folder.is_there() and not folder.is_settled():
            say(
                f"interrupted: racelab jobs submits what is missing of launch {folder.uid}, "
                f"racelab cancel {folder.uid} drops it"
            )
        raise
    return folder


def _submit_or_wait(folder: LaunchFolder, scheduler: Scheduler, say: Say) -> None:
    """Submits every batch, or waits for the process that does."""
    if not _try_to_submit(folder, scheduler):
        say(f"another process has seen launch {folder.uid} and submits it; waiting for it")
        while not _try_to_submit(folder, scheduler):
            time.sleep(_POLL_S)
        for submission in folder.newest().values():
            if submission.error:
                raise ConfigError(f"{submission.error}; when that is mended: racelab resume {folder.uid}")


def _try_to_submit(folder: LaunchFolder, scheduler: Scheduler) -> bool:
    """Submits what is missing; False if another process is at it."""
    with folder.submitting() as mine:
        if mine:
            _submit_missing(folder, scheduler)
    return mine


def recover(folder: LaunchFolder, scheduler: Scheduler) -> list[str]:
    """Finishes what a submitter that died has left; does nothing where all is submitted or someone is at it.

    Nothing either inside of an array, each of whose tasks would do it, nor below too many launches.

    Returns:
        What was done, a line each.

    Raises:
        ConfigError: Slurm refuses a batch; the launch is settled all the same.
        UnreachableError: Slurm gives no answer; nothing is settled.
    """
    if folder.is_settled():
        return []
    try:
        environment.refuse_nested(os.environ)
    except ConfigError as error:
        return [f"launch {folder.uid}: its submitter has died, and it is not submitted from here: {error}"]
    with folder.submitting() as mine:
        return _submit_missing(folder, scheduler) if mine else []


def _submit_missing(folder: LaunchFolder, scheduler: Scheduler) -> list[str]:
    """Submits, in order, every batch without a job. Returns a line for each, as one who recovers them says it.

    Raises:
        ConfigError: a batch was refused; the batches after it are not submitted, and that is recorded.
        UnreachableError: no answer.
    """
    launch = folder.launch()
    lines = []
    for batch in launch.batches:
        last = folder.newest().get(batch.name)
        if last is not None and last.settled:
            continue
        if last is not None:
            adopted = _adopt(folder, launch, batch, last, scheduler)
            if adopted:
                lines.append(f"job {adopted} found and adopted ({batch.name})")
                continue
        if all(folder.is_cancelled(batch.name, index) for index in range(len(batch.tasks))):
            folder.record(replace(last or intent(batch, 1), error="cancelled before it was submitted"))
            continue
        try:
            job_id = _submit(folder, launch, batch, 1 if last is None else last.number + 1)
        except ConfigError:
            _give_up_rest(folder, launch, batch)
            raise
        lines.append(f"submitted now as job {job_id} ({batch.name})")
    return [f"launch {launch.uid}: its submitter had died; {line}" for line in lines]


def _give_up_rest(folder: LaunchFolder, launch: Launch, refused: Batch) -> None:
    """A launch is submitted whole or mended whole: what comes after a refusal waits for `racelab resume` too."""
    known = folder.newest()
    for batch in launch.batches:
        if batch.name not in known:
            folder.record(replace(intent(batch, 1), error=f"not submitted, since {refused.name} was refused"))


def _adopt(folder: LaunchFolder, launch: Launch, batch: Batch, last: Submission, scheduler: Scheduler) -> str:
    """The job that sbatch made of an intent, recorded; "" if there is none."""
    name = job_name(launch, batch, last.number)
    job_id = scheduler.find([name], stamped(launch.uid)).get(name, "")
    if not job_id:  # a scheduler without accounting may have forgotten it; the job itself has not
        ends = [end for (of, _), end in folder.ends().items() if of == batch.name]
        job_id = ends[0].job_id.partition("_")[0] if ends else ""
    if job_id:
        folder.record(replace(last, job_id=job_id, submitted=now_iso(), adopted=True))
    return job_id


def _submit(folder: LaunchFolder, launch: Launch, batch: Batch, number: int) -> str:
    """One sbatch: intent, assignment, job, job id.

    Raises:
        ConfigError: Slurm's refusal, recorded too.
        UnreachableError: no answer; `recover` finds out what became of it.
    """
    submission = intent(batch, number)
    folder.record(submission)
    _assign(launch, batch, number)
    try:
        job_id = executor.submit(launch, batch, number, folder, dependency(folder, launch, batch))
    except UnreachableError as error:  # it may have got the job all the same: the intent stays open
        raise UnreachableError(
            f"{error}; whether the job is there is not known: racelab jobs {launch.uid} adopts or submits it"
        ) from error
    except ConfigError as error:
        folder.record(replace(submission, error=next(iter(str(error).splitlines()), "refused")))
        done = [s.job_id for s in folder.submissions() if s.job_id]
        before = f" (submitted before it: job {', '.join(done)})" if done else ""
        raise ConfigError(f"{error}{before}; when that is mended: racelab resume {launch.uid}") from error
    folder.record(replace(submission, job_id=job_id, submitted=now_iso()))
    return job_id


def _assign(launch: Launch, batch: Batch, number: int) -> None:
    """Gives the batch's runs to it, but those that have finished or that somebody has taken away meanwhile."""
    for index, task in enumerate(batch.tasks):
        if task.kind != "run":
            continue
        run = RunFolder.open(Path(launch.root) / task.run)
        info = run.info()
        mine = Assignment(launch.uid, batch.name, index, number).to_json()
        held = info.get("launch")
        ours = isinstance(held, dict) and held.get("uid") == launch.uid
        if ours and held != mine and info["status"] != "finished":
            run.update(launch=mine)


def dependency(folder: LaunchFolder, launch: Launch, batch: Batch) -> str:
    """What sbatch's --dependency takes: `afterok:12:13,afterany:14`; "" for a batch that waits for nothing.

    Raises:
        ConfigError: a batch that it waits for was refused.
    """
    jobs = folder.newest()
    words = []
    for after in batch.after:
        ids = [after.job_id] if after.job_id else []
        for part in launch.of_stage(after.stage) if not after.job_id else ():
            submission = jobs.get(part.name)
            if submission is None or not submission.job_id:
                raise ConfigError(f"stage {batch.stage} waits for {part.name}, which was not submitted")
            ids.append(submission.job_id)
        words.append(":".join([_CONDITIONS[after.condition], *ids]))
    return ",".join(words)


def dry_scripts(launch: Launch) -> list[str]:
    """The script of each batch as sbatch would get it, but for the ids of the jobs it waits for."""
    path = Path(launch.root) / LAUNCHES / launch.uid
    named = _with_code(launch)
    return [executor.script_text(named, batch, 1, path, ",".join(_waits(batch))) for batch in named.batches]


def _waits(batch: Batch) -> list[str]:
    """The conditions of a batch, with the stages' names in the place of job ids that are not known yet."""
    return [f"{_CONDITIONS[a.condition]}:{a.job_id or f'<{a.stage}>'}" for a in batch.after]


def graph_lines(launch: Launch) -> list[str]:
    """A line per batch: how many jobs, what of, after what."""
    lines = []
    for batch in launch.batches:
        asked = batch.launcher
        assert asked.nodes is not None
        assert asked.gpus_per_node is not None
        gpus = f" x {_counted(asked.gpus_per_node, 'GPU')}" if asked.gpus_per_node else ""
        size = f"{_counted(len(batch.tasks), 'job')} of {_counted(asked.nodes, 'node')}{gpus}"
        waits = f", {' and '.join(_waits(batch))}" if batch.after else ""
        lines.append(f"{batch.name}: {size}, {asked.time_min} min at most{waits}")
    return lines


def totals(launch: Launch) -> str:
    """How large a launch is: `9 jobs in 1 submission, 1 GPU in all, at most 36 node hours and 4 GPU hours (...)`."""
    gpus = sum(len(batch.tasks) * batch.launcher.gpus for batch in launch.batches)
    nodes = _counted(sum(batch.node_hours() for batch in launch.batches), "node hour")
    hours = _counted(sum(batch.gpu_hours() for batch in launch.batches), "GPU hour")
    return (
        f"{_counted(launch.n_tasks, 'job')} in {_counted(len(launch.batches), 'submission')}, {_counted(gpus, 'GPU')} "
        f"in all, at most {nodes} and {hours} (each job up to its limit, once)"
    )


def _counted(number: float, one: str) -> str:
    """`1 node hour`, `0.5 node hours`, `1,000 jobs`."""
    return f"{number:,.10g} {one if number == 1 else f'{one}s'}"
