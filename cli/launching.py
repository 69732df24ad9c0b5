"""`launcher=slurm` of every command that makes runs: what would be submitted, or submitting it and how to go on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from racelab.analysis.rlds_words import counted
from racelab.cli.console import print_json, print_table, results, say
from racelab.configs.compose import Composed
from racelab.configs.schema_launcher import SlurmLauncherConfig
from racelab.experiments.errors import ConfigError

if TYPE_CHECKING:
    from racelab.sweeps.run import Plan
    from racelab.sweeps.slurm.folder import LaunchFolder
    from racelab.sweeps.slurm.model import Launch

_SHOWN = 20
NO_DRY: Final = {"jobs": 0, "gpus": 0, "node_hours": 0, "gpu_hours": 0, "batches": []}
"""JSON of a dry run that would submit nothing."""


def refuse_credentials(uris: Iterable[str]) -> None:
    """Raises ConfigError for a tracking address with a password: another process reads its config from its folder."""
    from racelab.experiments.tracking.mlflow_store import without_credentials

    for uri in uris:
        if without_credentials(uri) != uri:
            raise ConfigError(
                "tracking.uri holds a user or a password, which the runs would not get: no file keeps it; leave it "
                f"out (tracking.uri={without_credentials(uri)}) and export the whole address as MLFLOW_TRACKING_URI"
            )


def wants_slurm(plan: Plan) -> bool:
    """Whether the cells of a plan are to run as jobs.

    Raises:
        ConfigError: some are and some are not.
    """
    asked = [isinstance(cell.config.launcher, SlurmLauncherConfig) for cell in plan.cells]
    if any(asked) and not all(asked):
        label = plan.cells[asked.index(False)].label
        raise ConfigError(
            f"cell {label} has launcher=inline beside cells with launcher=slurm; give all of them the same"
        )
    return all(asked)


def dry_run_plan(plan: Plan, json_output: bool) -> None:
    """The scripts of what is left of a sweep, as sbatch would get them; nothing is made, no scheduler is needed."""
    from racelab.sweeps.slurm.runs import plan_launch, todo

    left = todo(plan, None)
    if not left.cells:
        say(
            f"all {counted(left.finished, 'cell')} of {plan.run_id} have finished: nothing would be submitted"
        )
        if json_output:
            print_json(NO_DRY)
        return
    print_dry(plan_launch(plan, left), json_output)
    if left.finished:
        say(f"{counted(left.finished, 'cell')} finished before and would not run again")


def print_dry(launch: Launch, json_output: bool) -> None:
    """The scripts and, as comments after them, the size of a launch; that is talk too, but not twice on a terminal."""
    from racelab.sweeps.slurm.submit import dry_scripts, graph_lines, totals

    scripts = dry_scripts(launch)
    if json_output:
        print_json(
            {
                "jobs": launch.n_tasks,
                "gpus": sum(len(b.tasks) * b.launcher.gpus for b in launch.batches),
                "node_hours": sum(b.node_hours() for b in launch.batches),
                "gpu_hours": sum(b.gpu_hours() for b in launch.batches),
                "batches": [
                    {
                        "name": b.name,
                        "tasks": [task.run or shlex.join(task.words) for task in b.tasks],
                        "nodes": b.launcher.nodes,
                        "gpus_per_node": b.launcher.gpus_per_node,
                        "after": [{"stage": a.stage, "condition": a.condition} for a in b.after],
                        "script": script,
                    }
                    for b, script in zip(launch.batches, scripts, strict=True)
                ],
            }
        )
        return
    for batch, script in zip(launch.batches, scripts, strict=True):
        print(f"# ----- {batch.name}.sh")
        print(script.rstrip())
        print()
    lines = [*graph_lines(launch), f"{totals(launch)}; nothing was submitted"]
    for line in lines:
        print(f"# {line}")
    if not sys.stdout.isatty():
        for line in lines:
            say(line)


def submit_plan(plan: Plan, resume: bool, json_output: bool) -> int:
    """Submits what is left of a sweep. Returns the exit code."""
    from racelab.sweeps.slurm import runs
    from racelab.sweeps.slurm.scheduler import Scheduler

    scheduler = Scheduler()
    left = runs.todo(plan, scheduler, say)
    if left.live:
        say(f"{counted(len(left.live), 'cell')} of {plan.run_id} {_have(len(left.live))} a job already")
    if left.finished:
        say(f"{counted(left.finished, 'cell')} of {plan.run_id} {_have(left.finished)} finished")
    if not left.cells:
        say(f"nothing to submit; `racelab show {plan.run_id}` shows the sweep")
        if json_output:
            print_no_launch(plan.run_id)
        return 0
    folder = runs.submit_plan(plan, left, scheduler, resume, say)
    print_submitted(folder, plan.run_id, json_output)
    return 0


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def submit_train(composed: Composed, launcher: SlurmLauncherConfig, json_output: bool) -> int:
    """Makes one run's folder and submits it. Returns the exit code."""
    from racelab.cli.train import check_reach, run_root
    from racelab.experiments.session import new_run, prepare
    from racelab.sweeps.slurm import submit
    from racelab.sweeps.slurm.runs import requeue_folder
    from racelab.sweeps.slurm.scheduler import Scheduler

    refuse_credentials([composed.config.tracking.uri])
    check_reach(composed)
    root = run_root(composed.config.run.root)
    prepare(composed.config, root)
    command = shlex.join(["racelab", "train", *composed.overrides])
    scheduler = Scheduler()

    launch = train_launch(composed, launcher, "RUN")
    submit.checked(launch, scheduler, say)
    launch = submit.prepare(launch)
    folder = new_run(
        composed.config,
        root=root,
        composed_yaml=composed.yaml,
        overrides=list(composed.overrides),
        command=command,
    )
    launch = replace(launch, batches=train_launch(composed, launcher, folder.run_id).batches)
    requeue_folder(folder, submit.assignments(launch)[folder.run_id])
    print_submitted(submit.submit_launch(launch, scheduler, say), "", json_output)
    return 0


def train_launch(composed: Composed, launcher: SlurmLauncherConfig, run_id: str) -> Launch:
    """The launch of one run."""
    from racelab.cli.train import run_root
    from racelab.sweeps.slurm.submit import new_launch, run_batch

    config = composed.config
    name = config.run.name or f"{config.title}-s{config.run.seed}"
    batch = run_batch("train", [(run_id, name)], launcher)
    command = shlex.join(["racelab", "train", *composed.overrides])
    return new_launch(name, command, run_root(config.run.root), [batch])


def print_no_launch(sweep: str) -> None:
    """JSON of a command that had nothing to submit, with the keys of one that had."""
    none: dict[str, Any] = {"launch": None, "sweep": sweep or None, "path": None, "jobs": []}
    print_json(none)


def print_submitted(folder: LaunchFolder, sweep: str, json_output: bool) -> None:
    """What was submitted, as which jobs, and the commands that look after it."""
    from racelab.sweeps.slurm.model import task_job_id

    launch = folder.launch()
    jobs = {batch: submission.job_id for batch, submission in folder.newest().items() if submission.job_id}
    rows: list[Mapping[str, Any]] = [
        {
            "run_id": task.run or None,
            "title": task.title,
            "batch": batch.name,
            "job_id": task_job_id(jobs[batch.name], batch, index) if batch.name in jobs else None,
        }
        for batch, index, task in launch.tasks()
    ]
    with results():
        if json_output:
            print_json({"launch": launch.uid, "sweep": sweep or None, "path": str(folder.path), "jobs": rows})
        else:
            shown = [[str(row["run_id"] or row["title"]), str(row["job_id"] or "-")] for row in rows[:_SHOWN]]
            print_table(["run", "job"], shown)
    if len(rows) > _SHOWN and not json_output:
        say(f"and {len(rows) - _SHOWN:,} more")
    submitted = sum(row["job_id"] is not None for row in rows)
    say(f"{counted(submitted, 'job')} submitted as launch {launch.uid}")
    alone = len({batch.stage for batch in launch.batches}) == 1  # other stages are not the sweep's
    what = _typed(launch, str(rows[0]["run_id"] or "") if len(rows) == 1 else sweep if alone else "")
    run = what if len(rows) == 1 else "RUN"
    say(f"watch: racelab jobs {what} --watch   output: racelab logs {run} -f   stop: racelab cancel {what}")


def _typed(launch: Launch, run_id: str) -> str:
    """What to type for a run or sweep of a launch, or for the launch if there is none."""
    from racelab.cli.train import reference, run_root
    from racelab.experiments.runfolder import RunFolder

    root = Path(launch.root)
    if run_id:
        return reference(RunFolder(root / run_id, run_id))
    return launch.uid if root == run_root("") else f"{launch.uid} --root {shlex.quote(launch.root)}"
