"""What a run's folder says, at a price that allows a thousand: `run.json` and both ends of the newest record."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from racelab.experiments.errors import DataError, RunFolderError
from racelab.experiments.fsio import read_json
from racelab.experiments.runfolder import RunFolder, Status
from racelab.experiments.tracking.spool import read_lines, spool_files
from racelab.sweeps.progress import Progress, SpoolTail
from racelab.sweeps.slurm.model import Assignment

_CLOCK: Final = b'"train/clock/policy_step":'
_REWARD: Final = b'"train/reward/mean":'
_LOG: Final = re.compile(r"\d+(_\d+)?-r\d+\.log")
_BLOCKS: Final = (1 << 14, 1 << 17, 1 << 20)
"""Bytes that are looked through at an end of the record: validation rows may stand before the first step."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """A run as its folder has it.

    Attributes:
        assigned: which task may work on it; None: none.
        status: as `RunFolder.status`.
        reason: why it did not finish, "".
        budget: updates of the policy, None if unknown.
        attempt: number of the newest, None before the first.
        progress: of that attempt.
        ended: when it was last heard of, seconds since the epoch; None for a run that never began.
    """

    assigned: Assignment | None
    status: Status
    reason: str = ""
    budget: int | None = None
    attempt: int | None = None
    progress: Progress = field(default_factory=Progress)
    ended: float | None = None


def glance(path: Path) -> RunFacts | None:
    """The facts of the run in `path`; None if there is no run that can be read."""
    try:
        record = read_json(path / "run.json")
        assigned = Assignment.from_json(record.get("launch"))
        status: Status = record["status"]
    except (RunFolderError, AttributeError, KeyError, TypeError, ValueError):
        return None
    run = RunFolder(path, path.name)
    if status == "running" and not run.is_held():
        status = "stale"
    budget = record.get("policy_updates")
    facts = RunFacts(assigned, status, str(record.get("reason") or ""), budget)
    new = status == "queued" and not record.get("steps")  # one that is to go on has a record
    return facts if new else _with_record(run, facts)


def _with_record(run: RunFolder, facts: RunFacts) -> RunFacts:
    files = spool_files(run)
    attempt = max(files, default=None)
    spoken = [path for path in (run.path / "run.json", files.get(attempt or 0)) if path is not None]
    with contextlib.suppress(OSError):
        facts = replace(facts, ended=max(path.stat().st_mtime for path in spoken))
    if attempt is None:
        return facts
    return replace(facts, attempt=attempt, progress=Ends(run, facts.budget or 0).read())


class Ends(SpoolTail):
    """The progress of the newest attempt from its first and its last steps; what lies between is not read."""

    def read(self) -> Progress:
        """The state now; nothing known where the record cannot be read."""
        files = list(spool_files(self._run).values())
        with contextlib.suppress(DataError, RunFolderError, OSError):
            if files:
                self._read(files[-1])
        return self._now

    def _read(self, path: Path) -> None:
        with open(path, "rb") as handle:
            places = [
                _first(handle.fileno()),
                _last(handle.fileno(), _REWARD),
                _last(handle.fileno(), _CLOCK),
            ]
        for number, place in enumerate(places):
            record = (
                next((record for record, _ in read_lines(path, place)), None) if place is not None else None
            )
            if record is not None and record["kind"] == "metrics":
                self._take(int(record["step"]), int(record["ts"]), record["values"])
            if number == 0:
                self._now = Progress()  # the first step is there for the pace only


def _first(fd: int) -> int | None:
    """Where the line of the first step begins."""
    for length in _BLOCKS:
        block = os.pread(fd, length, 0)
        found = block.find(_CLOCK)
        if found >= 0:
            return block.rfind(b"\n", 0, found) + 1
        if len(block) < length:
            break
    return None


def _last(fd: int, mark: bytes) -> int | None:
    """Where the last whole line with `mark` begins."""
    size = os.fstat(fd).st_size
    for length in _BLOCKS:
        start = max(0, size - length)
        block = os.pread(fd, size - start, start)
        found = block.rfind(mark, 0, block.rfind(b"\n") + 1)
        before = block.rfind(b"\n", 0, max(0, found))
        if found >= 0 and (before >= 0 or start == 0):
            return start + before + 1
        if start == 0:
            break
    return None


def run_logs(path: Path) -> list[Path]:
    """What the attempts of a run printed as jobs, `attempts/<job>-r<restart>.log`, oldest first."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(path / "attempts"):
            if _LOG.fullmatch(entry.name):
                found.append((entry.stat().st_mtime, Path(entry.path)))
    return [log for _, log in sorted(found, key=lambda pair: (pair[0], pair[1].name))]
