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
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import read_lines, spool_files
from racelab.sweeps.manifest import RunInfo, list_runs

_TAIL_BYTES = 1 << 19
REWARD = "train/reward/mean"
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        step: last global step in its record, 0 if there is none.
        reward: last mean reward of a policy step, None if the end of the record holds none.
    """

    step: int = 0
    reward: float | None = None


def runs(root: Path | None, limit: int | None, json_output: bool) -> int:
    """Prints the runs; all of them under --json unless a limit is given."""
    folder = run_root(str(root) if root else "")
    found = list_runs(folder)
    default = len(found) if json_output else _SHOWN
    shown = found[: (limit or len(found)) if limit is not None else default]
    rows = [(info, last_progress(RunFolder(Path(info.path), info.run_id))) for info in shown]
    if json_output:
        print_json([_as_json(info, progress) for info, progress in rows])
        return 0
    if not found:
        say(f"no runs in {folder}; start one with: racelab train")
        return 0
    columns = ["run", "name", "method", "status", "step", "reward", "started", "folder"]
    print_table(columns, [_row(info, progress) for info, progress in rows], right=["step", "reward"])
    if len(found) > len(shown):
        say(f"{len(found) - len(shown)} older runs are not shown; --limit 0 shows all")
    return 0


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
    """`race/full`."""
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
    path = os.path.relpath(info.path)
    return [
        info.run_id,
        info.name,
        method_name(info),
        info.status,
        str(progress.step),
        number(progress.reward),
        local_time(info.started),
        info.path if path.startswith("..") else path,
    ]
