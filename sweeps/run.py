"""A sweep as a whole: which folders its cells have, what is left to do, and its own run beside theirs.

The sweep is a run folder too (kind `sweep`, id `sweep-<name>-<hash over the cells>`), with a spool and a shipper of its
own, so that MLflow shows one parent and a child per cell. Its `config/composed.yaml` says which folder belongs to which
cell; starting the same sweep again finds all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from racelab.experiments.errors import ConfigError, RunFolderError, UnreachableError
from racelab.experiments.runfolder import RunExistsError, RunFolder
from racelab.experiments.signals import StopRequest
from racelab.experiments.tracking.address import stored_config
from racelab.sweeps.cells import Cell, ids_hash, newest_name, numbered, open_cells, slug
from racelab.sweeps.fingerprint import code_name, code_state
from racelab.sweeps.launch import CellState, InlineLauncher, Watch
from racelab.sweeps.record import Recorder, Row, cell_row, state_row

NEW: Final = "new"
"""Status of a cell without a folder."""
_UNREACHABLE: Final = UnreachableError.exit_code
_MANY: Final = 50
"""From here on it takes seconds to make the folders."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep that could start now.

    Attributes:
        name: of the sweep.
        command: as typed, for people.
        root: folder of the runs.
        run_id: of the sweep's own folder.
        cells: all of them.
        run_ids: the folder of each cell, in the same order.
    """

    name: str
    command: str
    root: Path
    run_id: str
    cells: tuple[Cell, ...]
    run_ids: tuple[str, ...]

    def statuses(self) -> list[str]:
        """How each cell stands: new, queued, running, finished, failed, interrupted or stale."""
        found: list[str] = []
        for run_id in self.run_ids:
            path = self.root / run_id
            found.append(RunFolder.open(path).status() if path.exists() else NEW)
        return found


def make_plan(name: str, command: str, root: Path, cells: Sequence[Cell], fresh: bool) -> Plan:
    """Finds the folders: those of the newest start of this sweep, or new ones under `fresh`.

    A cell that another sweep has run is not run again: a sweep that starts for the first time takes the newest
    folder of each cell, and a finished one of the same content under another label.

    Raises:
        RunFolderError: a folder that is there is damaged.
    """
    base = f"sweep-{slug(name)}-{ids_hash(cells)}"
    newest, number = newest_name(root, base)
    if number and not fresh:
        known = {str(entry["cell"]): str(entry["run_id"]) for entry in members(RunFolder.open(root / newest))}
        run_ids = tuple(known[cell.cell_id] for cell in cells)
        return Plan(name, command, root, newest, tuple(cells), run_ids)
    others = {} if fresh else _finished(root, {_tail(cell.cell_id) for cell in cells})
    run_ids = tuple(_folder_name(root, cell, fresh, others) for cell in cells)
    return Plan(name, command, root, numbered(base, number + 1), tuple(cells), run_ids)


def _folder_name(root: Path, cell: Cell, fresh: bool, others: Mapping[str, str]) -> str:
    newest, number = newest_name(root, cell.cell_id)
    if number == 0:
        return others.get(_tail(cell.cell_id), cell.cell_id)
    return numbered(cell.cell_id, number + 1) if fresh else newest


def _tail(cell_id: str) -> str:
    """Seed and hash, all that decides a cell's result: `s0-0123456789`."""
    return "-".join(cell_id.split("-")[-2:])


def _finished(root: Path, tails: Set[str]) -> dict[str, str]:
    """Tail of an id -> folder of a finished cell: one that another sweep has run under another label."""
    names = sorted(path.name for path in root.glob("*-s*-*"))
    return {tail: name for name in names if (tail := _tail(name)) in tails and _is_finished(root / name)}


def _is_finished(path: Path) -> bool:
    with contextlib.suppress(RunFolderError):
        return RunFolder.open(path).status() == "finished"
    return False


def members(sweep: RunFolder) -> list[dict[str, Any]]:
    """The cells of a sweep's folder: {cell, run_id, label, seed} each.

    Raises:
        RunFolderError: its `config/composed.yaml` is missing or damaged.
    """
    cells = stored_config(sweep).get("cells")
    if not isinstance(cells, list) or not all(isinstance(c, dict) and "run_id" in c for c in cells):
        raise RunFolderError(
            f"{sweep.path / 'config' / 'composed.yaml'} does not name the sweep's cells; restore it from a copy or "
            "start the sweep anew with --fresh"
        )
    return cells


def rows_of(sweep: RunFolder) -> list[Row]:
    """The row of every cell of a sweep, as the cells' folders stand now."""
    found = []
    for entry in members(sweep):
        path = sweep.path.parent / str(entry["run_id"])
        if (path / "run.json").is_file():
            found.append(cell_row(RunFolder.open(path), str(entry["label"])))
        else:
            found.append({**entry, "status": NEW, "reason": ""})
    return found


@dataclass(frozen=True, slots=True)
class Result:
    """How a sweep ended.

    Attributes:
        status: finished, failed (some cell did) or interrupted.
        exit_code: 0, 128 + the signal that stopped it, 4 where every cell that failed ended with that, else 1.
        states: every cell.
        rows: the row of every cell, in the same order.
        folder: the sweep's own.
    """

    status: str
    exit_code: int
    states: tuple[CellState, ...]
    rows: tuple[Row, ...]
    folder: RunFolder


class View(Watch, Protocol):
    """Who is told what happens, from the start to the end."""

    def start(self, name: str, states: Sequence[CellState]) -> None:
        """The sweep and its cells, before the first starts."""

    def note(self, text: str) -> None:
        """A line of talk."""

    def stop(self) -> None:
        """The end; a second call does nothing."""


def refuse_new(plan: Plan) -> None:
    """What `--resume` asks for.

    Raises:
        ConfigError: no cell has been started.
    """
    if not any(_was_started(plan.root / run_id) for run_id in plan.run_ids):
        raise ConfigError(
            f"no cell of the sweep {plan.name} has been started in {plan.root}; leave --resume out to start it"
        )


def run_sweep(plan: Plan, jobs: int, resume: bool, view: View, stop: StopRequest) -> Result:
    """Runs what is not finished, one child process per cell, and records it in the sweep's own folder.

    Args:
        plan: which cells, which folders; every check of configs and inputs has been made.
        jobs: children at once.
        resume: only go on with a sweep of which some cell has been started.
        view: is told.
        stop: asked, nothing new starts and the children stop at their next safe point.

    Raises:
        ConfigError: nothing to resume.
        KeyboardInterrupt: a second SIGINT; the children are dead and the sweep's folder says interrupted.
    """
    if resume:
        refuse_new(plan)
    folder = open_sweep(plan)
    if len(plan.cells) > _MANY:
        view.note(f"making the folders of {len(plan.cells):,} cells")
    none: Mapping[str, object] = {}
    asked = [(cell, run_id, none) for cell, run_id in zip(plan.cells, plan.run_ids, strict=True)]
    folders = open_cells(plan.root, asked, folder.run_id)
    states = [_state(cell, of) for cell, of in zip(plan.cells, folders, strict=True)]
    note_reused(folder, [state.folder for state in states])
    for line in other_code([state.folder for state in states if state.skipped]):
        view.note(line)
    recorder = Recorder(folder, plan.cells[0].config.tracking, states, view)
    all_there = all(state.skipped for state in states)
    view.start(f"{plan.name}  {folder.run_id}", states)
    try:
        if not (all_there and folder.status() == "finished"):
            _run(states, jobs, stop, recorder)
    finally:
        view.stop()
    status, code = _end(states, stop)
    return Result(status, code, tuple(states), tuple(state_row(state) for state in states), folder)


def _run(states: Sequence[CellState], jobs: int, stop: StopRequest, recorder: Recorder) -> None:
    """Launches, with the sweep's own record open around it."""
    recorder.open()
    try:
        InlineLauncher(jobs, stop, recorder).run(states)
    except BaseException as error:
        words = str(error).splitlines() or [type(error).__name__]
        recorder.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", words[0])
        raise
    recorder.open()  # if whoever had it has gone without a last word
    status, _ = _end(states, stop)
    open_ends = [state.folder.run_id for state in states if state.status != "finished"]
    recorder.close(status, f"not finished: {', '.join(open_ends)}"[:500] if open_ends else "")


def _end(states: Sequence[CellState], stop: StopRequest) -> tuple[str, int]:
    """Status and exit code of the sweep."""
    if all(state.status == "finished" for state in states):
        return "finished", 0
    if stop.signum:
        return "interrupted", stop.exit_code
    out_of_reach = all(state.code == _UNREACHABLE for state in states if state.status != "finished")
    return "failed", _UNREACHABLE if out_of_reach else 1


def note_reused(sweep: RunFolder, cells: Sequence[RunFolder]) -> None:
    """Writes down which cells another sweep made, or this one before its folder was removed: in MLflow its children."""
    info = sweep.info()
    facts = {cell.run_id: cell.info() for cell in cells}
    reused = [
        run_id
        for run_id, f in facts.items()
        if f.get("sweep") != sweep.run_id or f["started"] < info["started"]
    ]
    if reused != info.get("reused_cells", []):
        sweep.update(reused_cells=reused)


def _was_started(path: Path) -> bool:
    return path.exists() and bool(RunFolder.open(path).attempts())


def _state(cell: Cell, folder: RunFolder) -> CellState:
    finished = folder.status() == "finished"
    return CellState(
        cell, folder, "finished" if finished else "waiting", skipped=finished, attempts=len(folder.attempts())
    )


def open_sweep(plan: Plan) -> RunFolder:
    """The sweep's folder; made, with status `queued`, if it is not there."""
    import yaml

    path = plan.root / plan.run_id
    if path.exists():
        return RunFolder.open(path)
    first = plan.cells[0].config
    content = {
        "sweep": {
            "name": plan.name,
            "labels": list(dict.fromkeys(cell.label for cell in plan.cells)),
            "seeds": sorted({cell.seed for cell in plan.cells}),
        },
        "tracking": first.tracking.model_dump(mode="json"),
        "cells": [
            {"cell": c.cell_id, "run_id": r, "label": c.label, "seed": c.seed}
            for c, r in zip(plan.cells, plan.run_ids, strict=True)
        ],
    }
    facts = [cell.config.facts() for cell in plan.cells]
    info = {
        "kind": "sweep",
        **{name: _common(facts, name) for name in ("paper", "method", "task", "condition")},
        "preset": facts[0]["preset"],
        "command": plan.command,
        "cwd": str(Path.cwd()),
        "n_cells": len(plan.cells),
    }
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
    try:
        return RunFolder.create(
            plan.root, slug(plan.name), composed_yaml=text, overrides=[], info=info, run_id=plan.run_id
        )
    except RunExistsError:  # the same sweep, started in the same instant
        return RunFolder.open(path)


def _common(facts: Sequence[Mapping[str, object]], name: str) -> str:
    """What all cells have; empty where they differ."""
    found = {str(of.get(name) or "") for of in facts}
    return found.pop() if len(found) == 1 else ""


def other_code(finished: Sequence[RunFolder]) -> list[str]:
    """One line if finished cells were made by another racelab than the present one."""
    now = code_state()
    made: dict[str, list[str]] = {}
    for cell in finished:
        code = cell.info().get("code")
        if isinstance(code, dict) and code != now:
            made.setdefault(code_name(code), []).append(cell.run_id)
    if not made:
        return []
    which = "; ".join(
        f"{', '.join(ids[:3])}{' ...' if len(ids) > 3 else ''} by {name}" for name, ids in made.items()
    )
    count = sum(map(len, made.values()))
    cells = f"{count} finished {'cell was' if count == 1 else 'cells were'}"
    return [f"{cells} made by other code than {code_name(now)} ({which}); --fresh runs them anew"]
