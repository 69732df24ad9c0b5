"""`racelab sweep FILE`, and what every command with many runs shares: check all, list or run, say what came of it."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from racelab.analysis.rlds_words import counted
from racelab.cli.console import number, on_terminal, print_json, print_table, results, say, seconds
from racelab.cli.launching import dry_run_plan, refuse_credentials, submit_plan, wants_slurm
from racelab.cli.shipped import shipped
from racelab.cli.sweep_rlds import comparison, print_comparison
from racelab.cli.sweep_view import make_view
from racelab.cli.train import parse_seeds, reference, run_root
from racelab.configs.check import reachability
from racelab.configs.schema_rlds import AnyConfig
from racelab.experiments.errors import ConfigError
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.cells import Cell, Spec, make_cells
from racelab.sweeps.grid import read_grid
from racelab.sweeps.inputs import check_inputs
from racelab.sweeps.record import Row, means
from racelab.sweeps.run import Plan, Result, make_plan, refuse_new, run_sweep

_SHOWN_LABELS = 3
_SINK: ContextVar[list[Plan] | None] = ContextVar("plans", default=None)
"""Where plans go in the place of being run; see `planning`."""
_BOTH = "reward = success"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line of a sweep has beside its cells.

    Attributes:
        jobs: cells at once.
        resume: only go on with a sweep that has been started.
        fresh: run everything anew, in further folders.
        dry_run: list the cells, start nothing.
        config_dirs: the user's config folders.
        json_output: JSON on stdout, no talk.
        table: prints the rows of the cells at the end; None: the columns of training.
    """

    jobs: int = 1
    resume: bool = False
    fresh: bool = False
    dry_run: bool = False
    config_dirs: tuple[Path, ...] = ()
    json_output: bool = False
    table: Callable[[Sequence[Row]], None] | None = None

    def words(self, seeds: str | None) -> list[str]:
        """The options to type again to go on with the sweep."""
        found = [] if seeds is None else ["--seeds", seeds]
        found += ["--jobs", str(self.jobs)] if self.jobs > 1 else []
        return found + [word for folder in self.config_dirs for word in ("--config-dir", str(folder))]


@contextlib.contextmanager
def planning() -> Iterator[list[Plan]]:
    """Inside, the commands that make sweeps check their cells and leave their plan in this list; nothing is made."""
    plans: list[Plan] = []
    token = _SINK.set(plans)
    try:
        yield plans
    finally:
        _SINK.reset(token)


def is_planning() -> bool:
    """Whether a command is to leave its plan only."""
    return _SINK.get() is not None


def sweep(
    file: Path,
    overrides: Sequence[str],
    seeds: str | None,
    jobs: int,
    resume: bool,
    fresh: bool,
    dry_run: bool,
    config_dirs: Sequence[Path],
    json_output: bool,
) -> int:
    """Runs the grid in `file`."""
    options = Options(jobs, resume, fresh, dry_run, tuple(config_dirs), json_output)
    given = parse_seeds(seeds)
    grid = read_grid(shipped(file, "sweep", "grid"), overrides, given, config_dirs)
    return run_cells(grid.name, ["sweep", str(file), *options.words(seeds), *overrides], grid.specs, options)


def seeded(label: str, words: Sequence[str], seeds: Sequence[int] | None) -> list[Spec]:
    """One cell per seed; one alone, with the seed of the config, if there are none."""
    if seeds is None:
        return [Spec(label, None, tuple(words))]
    if any(word.partition("=")[0] == "run.seed" for word in words):
        raise ConfigError("run.seed and --seeds both say the seed; leave one of them out")
    return [Spec(label, seed, tuple(words)) for seed in seeds]


def run_cells(
    name: str,
    words: Sequence[str],
    specs: Sequence[Spec],
    options: Options,
    label: Callable[[str, AnyConfig], str] | None = None,
) -> int:
    """Composes and checks every cell, then lists or runs them. Returns the exit code.

    Args:
        name: of the sweep.
        words: of the command line, for people.
        specs: the cells.
        options: see there.
        label: what people read, from a cell's label and its config; None: the label.

    Raises:
        ConfigError: a cell that cannot run, before any has started.
    """
    if options.resume and options.fresh:
        raise ConfigError("--resume goes on and --fresh starts anew; leave one of them out")
    cells = make_cells(specs, options.config_dirs)
    if label is not None:
        cells = [replace(cell, label=label(cell.label, cell.config)) for cell in cells]
    root = _root(cells)
    refuse_credentials({cell.config.tracking.uri for cell in cells})
    plan = make_plan(name, shlex.join(["racelab", *words]), root, cells, options.fresh)
    if (sink := _SINK.get()) is not None:
        sink.append(plan)
        return 0
    slurm = wants_slurm(plan)
    if slurm and options.jobs > 1:
        raise ConfigError("--jobs is for runs on this machine; with launcher=slurm set launcher.max_parallel")
    statuses = plan.statuses()
    _say_findings(cells)
    todo = [cell for cell, status in zip(cells, statuses, strict=True) if status != "finished"]
    for line in check_inputs(todo, root, options.dry_run):
        say(f"warning: {line}")
    if options.dry_run:
        if options.resume:
            refuse_new(plan)
        if slurm:
            dry_run_plan(plan, options.json_output)
        else:
            _print_plan(plan, statuses, options.json_output)
        return 0
    if slurm:
        return submit_plan(plan, options.resume, options.json_output)
    from racelab.experiments.signals import StopRequest

    with StopRequest() as stop:
        view = make_view(options.json_output)
        result = run_sweep(plan, options.jobs, options.resume, view, stop)
    with results():
        _print_result(plan, result, options)
    return result.exit_code


def _root(cells: Sequence[Cell]) -> Path:
    roots = list(dict.fromkeys(cell.config.run.root for cell in cells))
    if len(roots) > 1:
        raise ConfigError(f"run.root is one folder for all cells of a sweep, not {' and '.join(roots[:2])}")
    return run_root(roots[0])


def _say_findings(cells: Sequence[Cell]) -> None:
    """What the controllers cannot reach, each thing once; raises ConfigError for what could not train at all."""
    found: dict[str, list[str]] = {}
    errors: dict[str, list[str]] = {}
    for cell in cells:
        for finding in reachability(cell.config):
            where = errors if finding.severity == "error" else found
            where.setdefault(finding.line(), []).append(cell.label)
    if errors:
        lines = [f"{line.removeprefix('error: ')} ({_labels(labels)})" for line, labels in errors.items()]
        raise ConfigError("\n".join(lines))
    several = len({cell.label for cell in cells}) > 1
    for line, labels in found.items():
        say(f"{line} ({_labels(labels)})" if several else line)


def _labels(labels: Sequence[str]) -> str:
    names = list(dict.fromkeys(labels))
    more = f" and {len(names) - _SHOWN_LABELS} more" if len(names) > _SHOWN_LABELS else ""
    return f"in {', '.join(names[:_SHOWN_LABELS])}{more}"


def _print_plan(plan: Plan, statuses: Sequence[str], json_output: bool) -> None:
    rows = [
        {
            "cell": cell.cell_id,
            "run_id": run_id,
            "label": cell.label,
            "seed": cell.seed,
            "status": status,
            "overrides": list(cell.overrides),
        }
        for cell, run_id, status in zip(plan.cells, plan.run_ids, statuses, strict=True)
    ]
    if json_output:
        print_json(rows)
        return
    common = set(plan.cells[0].overrides).intersection(*(cell.overrides for cell in plan.cells))
    own = [shlex.join(word for word in cell.overrides if word not in common) for cell in plan.cells]
    table = [
        [*(str(row[key]) for key in ("run_id", "label", "seed", "status")), words]
        for row, words in zip(rows, own, strict=True)
    ]
    print_table(["cell", "label", "seed", "status", "own overrides"], table, right=["seed"])
    if common:
        say(f"all cells: {shlex.join(word for word in plan.cells[0].overrides if word in common)}")
    say(f"{counted(len(rows), 'cell')} of {plan.run_id} in {plan.root}; nothing was started")


def _print_result(plan: Plan, result: Result, options: Options) -> None:
    """The cells, what failed, and how to go on."""
    compared = comparison(result.folder, draw=True)
    if options.json_output:
        print_json({**_as_json(result), "comparison": compared})
        return
    if options.table is not None:
        options.table(result.rows)
    else:
        print_cells(result.rows, plan.root)
    if compared is not None:
        print_comparison(compared, result.folder)
    ended = ("failed", "interrupted") if result.status == "failed" else ("failed",)
    failed = [pair for pair in zip(result.states, result.rows, strict=True) if pair[0].status in ended]
    if failed:
        print()
        table = [[state.folder.run_id, str(row["reason"]), str(state.log)] for state, row in failed]
        print_table(["failed", "why", "log"], table)
    unfinished = sum(row["status"] != "finished" for row in result.rows)
    if unfinished:
        of = counted(len(result.rows), "cell")
        say(
            f"{unfinished} of {of} {'is' if unfinished == 1 else 'are'} not finished; go on with the same command: "
            f"{plan.command}"
        )
    say(f"sweep {result.folder.run_id} {result.status}; `racelab show {result.folder.run_id}` shows it again")


def _as_json(result: Result) -> dict[str, Any]:
    cells = [
        {**row, "path": str(state.folder.path), "log": str(state.log), "skipped": state.skipped}
        for state, row in zip(result.states, result.rows, strict=True)
    ]
    return {
        "run_id": result.folder.run_id,
        "path": str(result.folder.path),
        "status": result.status,
        "cells": cells,
        "means": means(result.rows),
    }


Column = tuple[str, Callable[[Row], str]]


def print_cells(rows: Sequence[Row], root: Path | None = None) -> None:
    """The table of a sweep's cells on stdout.

    A column that no cell has is left out, and on a terminal the last ones, if it is too narrow.

    Args:
        rows: of the cells.
        root: folder of the runs; with it the legend names a cell as it can be typed.
    """
    columns = _merged(
        [
            (head, [cell(row) for row in rows])
            for head, cell in _COLUMNS
            if head in _ALWAYS or any(cell(row).strip("-/+ ") for row in rows)
        ]
    )
    room = shutil.get_terminal_size().columns if on_terminal() else None
    shown = _fitting(columns, room)
    heads = [head for head, _ in shown]
    table = [list(row) for row in zip(*(cells for _, cells in shown), strict=True)]
    print_table(heads, table, right=[head for head in heads if head not in ("cell", "status")])
    if any(row.get("last_five") is not None for row in rows):
        _say_legend(_RLDS_LEGEND, [head for head, _ in shown], rows, root)
    elif any(row.get("reward") is not None for row in rows):
        _say_legend(_LEGEND, [head for head, _ in shown], rows, root)
    for labels in _twins(rows):
        say(
            f"{' and '.join(labels)} have the same numbers throughout: what tells them apart decided nothing here"
        )
    if len(shown) < len(columns):
        say(f"columns that do not fit: {', '.join(head for head, _ in columns[len(shown) :])}")


def _merged(columns: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """One column for reward and success where they are equal in every row, as in a task whose reward is 0 or 1."""
    cells = dict(columns)
    if cells.get("reward") is None or cells.get("reward") != cells.get("success"):
        return columns
    return [(_BOTH if h == "reward" else h, of) for h, of in columns if h != "success"]


def _say_legend(
    legend: Mapping[str, str], heads: Sequence[str], rows: Sequence[Row], root: Path | None
) -> None:
    """What the columns that are shown mean, and a command for more."""
    ended = next(
        (str(row["run_id"]) for row in rows if row["status"] == "finished" and "run_id" in row), None
    )
    cell = "CELL" if ended is None or root is None else reference(RunFolder(root / ended, ended))
    meant = {**legend, _BOTH: legend["reward"]}
    said = [f"{head}: {meant[head]}" for head in heads if head in meant]
    width = max(40, min(110, shutil.get_terminal_size((110, 24)).columns))
    for line in textwrap.wrap("; ".join(said), width, break_on_hyphens=False):
        say(line)
    say(f"intervals: racelab show {cell}")


def _twins(rows: Sequence[Row]) -> list[list[str]]:
    """Labels of finished cells of one seed whose results are equal to the last digit."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for row in rows:
        if row["status"] == "finished" and row.get("reward") is not None:
            values = tuple(row.get(name) for name in _TELLING)
            alike.setdefault(values, []).append(str(row["label"]))
    return [labels for labels in alike.values() if len(labels) > 1]


def _fitting(columns: list[tuple[str, list[str]]], room: int | None) -> list[tuple[str, list[str]]]:
    """The first columns whose boxed table is at most `room` wide; all of them for None."""
    widths = [3 + max(map(len, [head, *cells])) for head, cells in columns]
    while room is not None and len(widths) > len(_ALWAYS) and sum(widths) + 1 > room:
        widths.pop()
    return columns[: len(widths)]


def _pair(row: Row, name: str) -> str:
    """A value after training and what it gained: `0.375 +0.125`."""
    gain = row.get(f"{name}_gain")
    value = number(row.get(name))
    return value if gain is None else f"{value} {float(gain):+.3f}"


def _updates(row: Row) -> str:
    """Of the policy and of the rubric role; of the policy alone in an RLDS run."""
    if row.get("rubric_updates") is None:
        return number(row.get("policy_updates"), 0)
    return _two(row, "policy_updates", "rubric_updates", "+", 0)


def _two(row: Row, first: str, second: str, sign: str, digits: int) -> str:
    """A value of the policy's and one of the rubric role's, `8+15`; `-` where there is neither."""
    values = [number(row.get(name), digits) for name in (first, second)]
    return "-" if values == ["-", "-"] else sign.join(values)


_COLUMNS: tuple[Column, ...] = (
    ("cell", lambda row: str(row["label"])),
    ("seed", lambda row: str(row["seed"])),
    ("status", lambda row: str(row["status"])),
    ("took", lambda row: seconds(row.get("wall_s"))),
    ("updates", _updates),
    ("reward", lambda row: _pair(row, "reward")),
    ("success", lambda row: _pair(row, "success")),
    ("mean last", lambda row: number(row.get("last_five") if row.get("last_evaluations") != 1 else None)),
    ("best", lambda row: number(row.get("best_reward"))),
    ("retries", lambda row: number(row.get("retries"), 0)),
    ("better", lambda row: number(row.get("retry_success"))),
    ("graded", lambda row: number(row.get("graded_frac"))),
    ("mixed", lambda row: number(row.get("mixed_rate"))),
    ("phases", lambda row: number(row.get("n_phases"), 0)),
    ("quarantined", lambda row: number(row.get("quarantine_rate"))),
    ("collapsed", lambda row: number(row.get("collapse_rate"))),
    ("phase length", lambda row: _two(row, "policy_phase_len", "rubric_phase_len", "/", 1)),
)
"""Heading -> the text of a cell's row: updates and phase lengths are policy and rubric."""
_LEGEND: Mapping[str, str] = {
    "updates": "policy + rubric",
    "reward": "judged, on held-out prompts after training, and the rise",
    "success": "by rule, likewise",
    "phase length": "policy/rubric",
}
_RLDS_LEGEND: Mapping[str, str] = {
    "took": "from the start of the run to its last record, without that of the process",
    "reward": "validation after training, and the rise",
    "success": "likewise",
    "mean last": "mean of the last evaluations, at most five",
    "best": "the highest evaluation",
    "better": "share of the retries that beat their original",
    "graded": "share of the gradings that could be read",
    "mixed": "groups with solved and unsolved rollouts",
    "collapsed": "groups with equal rewards",
}
"""Heading -> what it means."""
_TELLING = (
    "seed",
    "reward",
    "success",
    "rubric_updates",
    "quarantine_rate",
    "last_five",
    "retry_success",
    "policy_tokens",
)
"""Numbers that are hardly equal in two cells by chance."""
_ALWAYS = ("cell", "seed", "status", "took")
