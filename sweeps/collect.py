"""A sweep whose cells run as jobs has no process of its own: its record is written by whoever sees the last one end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from racelab.configs.schema import TrackingConfig
from racelab.experiments.errors import RacelabError, RunFolderError
from racelab.experiments.fsio import explain, try_flock
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.address import stored_config
from racelab.experiments.tracking.mlflow_store import tracking_uri
from racelab.experiments.tracking.tracker import SHIP_VARIABLE
from racelab.sweeps.record import ENDED, Recorder
from racelab.sweeps.run import members

_RECORDED: Final = "recorded_cells"
"""Key of the sweep's run.json: cell -> status and number of attempts when the record was written."""


@dataclass(frozen=True, slots=True)
class _Stood:
    """A cell as its folder says."""

    folder: RunFolder
    label: str
    status: str
    reason: str


def collect(sweep: RunFolder) -> bool:
    """Writes the sweep's record anew if every cell has ended and one of them has changed since the last time.

    Safe to call from several processes at once, and again and again. Returns whether it wrote.

    Raises:
        RunFolderError: a folder is damaged or cannot be written.
    """
    with _alone(sweep) as mine:
        states = _ended(sweep) if mine else None
        if not states:
            return False
        now = {state.folder.run_id: f"{state.status} {len(state.folder.attempts())}" for state in states}
        if sweep.info().get(_RECORDED) == now:
            return False
        tracking = TrackingConfig.model_validate(stored_config(sweep)["tracking"])
        recorder = Recorder(sweep, tracking, states)
        with _no_shipper(sweep, tracking):
            if not recorder.open():
                return False  # a process runs the sweep on this machine, and records it
        failed = [state.folder.run_id for state in states if state.status != "finished"]
        status = "failed" if any(state.status == "failed" for state in states) else "interrupted"
        reason = f"not finished: {', '.join(failed)}"[:500] if failed else ""
        recorder.close(status if failed else "finished", reason)
        sweep.update(**{_RECORDED: now})
    return True


@contextlib.contextmanager
def _alone(sweep: RunFolder) -> Iterator[bool]:
    """Whether no other process collects the sweep just now; one that does sees what this one would see."""
    try:
        fd = os.open(sweep.path / ".collect.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunFolderError(f"cannot lock {sweep.path}: {explain(error)}") from error
    try:
        yield try_flock(fd, 0.05)
    finally:
        os.close(fd)


def _ended(sweep: RunFolder) -> list[_Stood] | None:
    """Every cell of the sweep, None as long as one has not ended."""
    states = []
    for entry in members(sweep):
        path = sweep.path.parent / str(entry["run_id"])
        if not (path / "run.json").is_file():
            return None
        run = RunFolder.open(path)
        info = run.info()
        if info["status"] not in ENDED:
            return None
        states.append(_Stood(run, str(entry["label"]), info["status"], str(info.get("reason") or "")))
    return states


@contextlib.contextmanager
def _no_shipper(sweep: RunFolder, tracking: TrackingConfig) -> Iterator[None]:
    """Inside, no shipper starts if the store is a file: as with the cells, `racelab sync` delivers to it."""
    before = os.environ.get(SHIP_VARIABLE)
    if tracking_uri(sweep.path.parent, tracking.uri or None).startswith("sqlite:"):
        os.environ[SHIP_VARIABLE] = "0"
    try:
        yield
    finally:
        os.environ.pop(SHIP_VARIABLE, None)
        if before is not None:
            os.environ[SHIP_VARIABLE] = before


def main(words: list[str]) -> int:
    """`python -m racelab.sweeps.collect SWEEP`: for a job that may be the last of its sweep."""
    try:
        collect(RunFolder.open(words[0]))
    except RacelabError as error:
        print(f"the record of the sweep could not be written: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
