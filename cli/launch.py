"""`racelab launch`: the stages of a graph, as jobs that wait for one another, or here, one after the other."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from racelab.analysis.rlds_words import counted
from racelab.cli.console import print_json, print_table, say
from racelab.cli.launch_words import Planner, makes_runs
from racelab.cli.shipped import shipped
from racelab.cli.train import run_root
from racelab.configs.check import reachability
from racelab.experiments.errors import ConfigError, RacelabError
from racelab.sweeps.cells import Cell, open_cell
from racelab.sweeps.inputs import check_inputs
from racelab.sweeps.slurm.graph import Graph, fail_at, read_graph
from racelab.sweeps.slurm.stages import Planned, Runs, graph_batches, plan_stages

if TYPE_CHECKING:
    from racelab.sweeps.slurm.model import Assignment, Launch
    from racelab.sweeps.slurm.runs import Todo
    from racelab.sweeps.slurm.scheduler import Scheduler

_CONDITIONS: Mapping[str, str] = {"ok": "success of", "any": "end of"}


def launch(
    file: Path, overrides: Sequence[str], dry_run: bool, config_dirs: Sequence[Path], json_output: bool
) -> int:
    """Starts the graph in `file`. Returns the exit code.

    Args:
        file: YAML, or the name of a graph that ships.
        overrides: words above all of the file's.
        dry_run: say what would start, and start nothing.
        config_dirs: the user's config folders.
        json_output: JSON on stdout.

    Raises:
        ConfigError: what is wrong in the file, or with a stage; nothing has started.
    """
    graph = read_graph(shipped(file, "graph", "graph"), makes_runs)
    stages = plan_stages(graph, Planner(tuple(config_dirs)), overrides, config_dirs)
    _check(stages, dry_run)
    command = shlex.join(["racelab", "launch", str(file), *_dirs(config_dirs), *overrides])
    if stages[0].on_slurm:
        return (
            _dry_slurm(graph, stages, command, json_output)
            if dry_run
            else _submit(graph, stages, command, json_output)
        )
    if dry_run:
        _dry_here(stages, json_output)
        return 0
    from racelab.cli.launch_here import run_here

    return run_here(stages, json_output)


def _dirs(config_dirs: Sequence[Path]) -> list[str]:
    return [word for folder in config_dirs for word in ("--config-dir", str(folder))]


def _check(stages: Sequence[Planned], dry_run: bool) -> None:
    """Says what the controllers of runs cannot reach, each thing once; refuses runs that lack an input.

    Inputs that another stage has yet to make are looked at as in a dry run.

    Raises:
        RacelabError: of the first stage that cannot run, with its place in the file.
    """
    said: dict[str, list[str]] = {}
    for planned in stages:
        if planned.runs is None:
            continue
        plan, stage = planned.runs.plan, planned.stage
        todo = [c for c, status in zip(plan.cells, plan.statuses(), strict=True) if status != "finished"]
        later = planned.words != stage.words  # an id of another stage stands in them
        try:
            warnings = [*_findings(todo), *check_inputs(todo, plan.root, dry_run or later)]
        except RacelabError as error:
            fail_at(stage.place, error)
        for line in dict.fromkeys(warnings):
            said.setdefault(line, []).append(stage.name)
    for line, names in said.items():
        say(f"{line} ({'stage' if len(names) == 1 else 'stages'} {', '.join(names)})")


def _findings(cells: Sequence[Cell]) -> list[str]:
    """What the controllers cannot reach; raises ConfigError for what could not train at all."""
    findings = {finding.line(): finding.severity for cell in cells for finding in reachability(cell.config)}
    errors = [line.removeprefix("error: ") for line, severity in findings.items() if severity == "error"]
    if errors:
        raise ConfigError("\n".join(errors))
    return list(findings)


def _dry_here(stages: Sequence[Planned], json_output: bool) -> None:
    """The stages of a graph that would run on this machine, in order."""
    rows = [
        {
            "stage": planned.stage.name,
            "command": planned.command,
            "after": [{"stage": after.stage, "condition": after.condition} for after in planned.stage.waits],
            "runs": [] if planned.runs is None else list(planned.runs.plan.run_ids),
        }
        for planned in stages
    ]
    if json_output:
        print_json(rows)
        return
    table = [
        [
            planned.stage.name,
            ", ".join(f"{_CONDITIONS[after.condition]} {after.stage}" for after in planned.stage.waits)
            or "-",
            str(row["command"]),
        ]
        for planned, row in zip(stages, rows, strict=True)
    ]
    print_table(["stage", "after", "command"], table)
    say(
        f"{counted(len(rows), 'stage')}, one after the other on this machine (launcher=inline); nothing was started"
    )


def _dry_slurm(graph: Graph, stages: Sequence[Planned], command: str, json_output: bool) -> int:
    """The scripts, the graph and its size; no scheduler is needed."""
    from racelab.cli.launching import NO_DRY, print_dry
    from racelab.sweeps.slurm.runs import todo

    left = {
        planned.stage.name: todo(planned.runs.plan, None) for planned in stages if planned.runs is not None
    }
    _say_finished(left)
    made = _launch_of(graph, stages, left, command)
    if made is None:
        _say_nothing(graph)
        if json_output:
            print_json(NO_DRY)
        return 0
    print_dry(made, json_output)
    return 0


def _submit(graph: Graph, stages: Sequence[Planned], command: str, json_output: bool) -> int:
    """Checks everything, makes the folders of the runs, and submits the jobs."""
    from racelab.cli.launching import print_no_launch, print_submitted
    from racelab.sweeps.slurm.runs import todo
    from racelab.sweeps.slurm.scheduler import Scheduler
    from racelab.sweeps.slurm.submit import assignments, checked, prepare, submit_launch

    scheduler = Scheduler()
    makers = [(planned.stage.name, planned.runs) for planned in stages if planned.runs is not None]
    left = {name: todo(runs.plan, scheduler, say) for name, runs in makers}
    _say_finished(left)
    made = _launch_of(graph, stages, left, command, scheduler)
    if made is None:
        _say_nothing(graph)
        if json_output:
            print_no_launch(_sweep([runs for _, runs in makers]))
        return 0
    checked(made, scheduler, say)
    made = prepare(made)
    assigned = assignments(made)
    for name, runs in makers:
        _make_folders(runs, left[name], assigned)
    print_submitted(submit_launch(made, scheduler, say), made.sweep, json_output)
    return 0


def _say_finished(left: Mapping[str, Todo]) -> None:
    """Which stages have cells that need no job."""
    for name, todo in left.items():
        for count, what in ((todo.finished, "finished"), (len(todo.live), "a job already")):
            if count:
                have = "has" if count == 1 else "have"
                say(f"stage {name}: {counted(count, 'run')} {have} {what}")


def _launch_of(
    graph: Graph,
    stages: Sequence[Planned],
    left: Mapping[str, Todo],
    command: str,
    scheduler: Scheduler | None = None,
) -> Launch | None:
    """The launch of what is left of a graph; None if that is nothing."""
    from racelab.sweeps.slurm.model import MAX_ARRAY
    from racelab.sweeps.slurm.submit import new_launch

    batches = graph_batches(stages, left)
    if not batches:
        return None
    makers = [planned.runs for planned in stages if planned.runs is not None]
    root = makers[0].plan.root if makers else run_root("")
    return new_launch(
        graph.name,
        command,
        root,
        batches,
        sweep=_sweep(makers),
        max_array=MAX_ARRAY if scheduler is None else scheduler.limits().max_array,
    )


def _sweep(makers: Sequence[Runs]) -> str:
    """Id of the only sweep that a graph makes; "" if there is none, or several."""
    sweeps = [runs.plan.run_id for runs in makers if not runs.single]
    return sweeps[0] if len(sweeps) == 1 else ""


def _say_nothing(graph: Graph) -> None:
    say(
        f"every run of the graph {graph.name} has finished or has a job: nothing to submit; --fresh in the command "
        "of a stage runs it anew"
    )


def _make_folders(runs: Runs, todo: Todo, assigned: Mapping[str, Assignment]) -> None:
    """The folders of a stage's runs, each naming the task that may work on it."""
    from racelab.sweeps.slurm.runs import make_cells, requeue_folder

    if not runs.single:
        make_cells(runs.plan, todo.cells, assigned)
        return
    for cell, run_id in todo.cells:  # one run, of no sweep
        requeue_folder(open_cell(runs.plan.root, cell, run_id, ""), assigned[run_id])
