"""`racelab runs`: every run, newest first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from racelab.cli.console import number, print_json, print_table, say
from racelab.cli.train import run_root
from racelab.experiments.errors import DataError, RunFolderError
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import read_lines, spool_files
from racelab.sweeps.manifest import RunInfo, survey

_TAIL_BYTES = 1 << 19
REWARD = "train/reward/mean"
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        step: last global step in its record, 0 if there is none, None if the record is damaged.
        reward: last mean reward of a policy step, None if the end of the record holds none.
    """

    step: int | None = 0
    reward: float | None = None


def runs(root: Path | None, limit: int | None, json_output: bool) -> int:
    """Prints the runs; all of them under --json unless a limit is given.

    A damaged run is one line on stderr and keeps no other from being listed.
    """
    folder = run_root(str(root) if root else "")
    found, damaged = survey(folder)
    default = len(found) if json_output else _SHOWN
    shown = found[: (limit or len(found)) if limit is not None else default]
    rows = [(info, _progress(info)) for info in shown]
    for problem in damaged.values():
        say(f"warning: {problem}")
    if json_output:
        print_json([_as_json(info, progress) for info, progress in rows])
        return 0
    if not found and not damaged:
        say(f"no runs in {folder}; start one with: racelab train")
        return 0
    columns = ["run", "name", "method", "status", "step", "reward", "started", "folder"]
    unread = [[path.name, "-", "-", "damaged", "-", "-", "-", _near(str(path))] for path in damaged]
    print_table(columns, [_row(info, at) for info, at in rows] + unread, right=["step", "reward"])
    if len(found) > len(shown):
        say(f"{len(found) - len(shown)} older runs are not shown; --limit 0 shows all")
    return 0


def _progress(info: RunInfo) -> Progress:
    """`last_progress`, or a word on stderr and nothing known."""
    try:
        return last_progress(RunFolder(Path(info.path), info.run_id))
    except (DataError, RunFolderError) as error:
        say(f"warning: {error}")
        return Progress(step=None)


def last_progress(run: RunFolder) -> Progress:
    """Step and reward from the end of the newest attempt's record; nothing is read before that."""
    files = list(spool_files(run).values())
    for path in reversed(files):
        step, reward = 0, None
        for record in _tail(path):
            step = max(step, int(record["step"]))
            if record["kind"] == "metrics":
                reward = record["values"].get(REWARD, reward)
        if step:
            return Progress(step, reward)
    return Progress()


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    """The records in the last half megabyte of a spool file."""
    start = max(0, path.stat().st_size - _TAIL_BYTES)
    if start:
        with path.open("rb") as handle:
            handle.seek(start)
            start += len(handle.readline())
    for record, _ in read_lines(path, start):
        yield record


def method_name(info: RunInfo) -> str:
    """`race/full`; of an RLDS run its task and condition, `frozenlake/rlvr`."""
    if info.task or info.condition:
        return "/".join(word for word in (info.task, info.condition) if word)
    return "/".join(word for word in (info.method, info.variant) if word)


def local_time(iso: str) -> str:
    """An ISO time in the reader's time zone, to the minute; the text itself if it is none."""
    try:
        return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return iso


def _as_json(info: RunInfo, progress: Progress) -> dict[str, Any]:
    return {**info.to_json(), "last_step": progress.step, "last_reward": progress.reward}


def _row(info: RunInfo, progress: Progress) -> list[str]:
    return [
        info.run_id,
        info.name,
        method_name(info),
        info.status,
        _step(info, progress),
        number(progress.reward),
        local_time(info.started),
        _near(info.path),
    ]


def _step(info: RunInfo, progress: Progress) -> str:
    """How far a run is; an evaluation makes no steps, it has marks."""
    if info.kind == "eval":
        return f"{info.steps:,} marks" if info.steps else "-"
    return "-" if progress.step is None else str(progress.step)


def _near(path: str) -> str:
    """Relative to the working directory if it is in there."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
