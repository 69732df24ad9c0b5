"""`racelab sync`: brings MLflow up to date, and closes runs whose process has died."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from racelab.cli.console import print_json, print_table, say
from racelab.cli.train import run_root
from racelab.experiments.errors import RacelabError, RunFolderError, UnreachableError
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.manifest import resolve, survey

if TYPE_CHECKING:
    from racelab.experiments.tracking.shipper import SyncReport


def sync(run: str | None, root: Path | None, json_output: bool) -> int:
    """Syncs one run, or all that want MLflow.

    Raises:
        RacelabError: after all runs were looked at, the worst of what stopped one; the message has them all.
    """
    from racelab.experiments.tracking.shipper import sync as deliver

    folder = run_root(str(root) if root else "")
    reports: list[SyncReport] = []
    failures: list[RacelabError] = []
    # A stale run is closed in its folder even when its store is away, and one run that is damaged must not
    # keep the others waiting. The record of a sweep of jobs is about how its cells ended, so they come first.
    for one in sorted(_candidates(folder, run), key=_is_sweep_of_jobs):
        try:
            if run is not None or one.status() == "stale" or _wants_mlflow(one):
                _record(one)
                reports.append(deliver(one))
        except RacelabError as error:
            failures.append(error)
    if json_output:
        print_json([asdict(report) for report in reports])
    elif reports:
        rows = [[r.run_id, str(r.delivered), str(r.backlog), _remark(r)] for r in reports]
        print_table(["run", "delivered", "waiting", "remark"], rows, right=["delivered", "waiting"])
    elif not failures:
        say(f"no runs to sync in {folder}")
    if failures:
        worst = max(failures, key=lambda failure: failure.exit_code)
        lines = dict.fromkeys(str(failure) for failure in failures)  # one server that is away is one line
        raise type(worst)("\n".join(lines)) from worst
    return 0


def _record(run: RunFolder) -> None:
    """A sweep of jobs whose cells have all ended gets its record, if nobody has written it."""
    from racelab.sweeps.collect import collect

    if _is_sweep_of_jobs(run):
        collect(run)


def _is_sweep_of_jobs(run: RunFolder) -> bool:
    with contextlib.suppress(RunFolderError):  # whoever reads it next says what is wrong
        info = run.info()
        return info.get("kind") == "sweep" and info.get("launcher") == "slurm"
    return False


def deliver_launched(root: Path) -> None:
    """Brings to MLflow what jobs of a cluster have left for it; what fails is said, and left for `racelab sync`."""
    from racelab.experiments.tracking.shipper import backlog
    from racelab.experiments.tracking.shipper import sync as deliver

    waiting = []
    for info in survey(root)[0]:
        run = RunFolder(Path(info.path), info.run_id)
        facts = run.info()
        by_jobs = facts.get("launch") is not None or facts.get("launcher") == "slurm"
        try:
            if by_jobs and info.status != "running" and _wants_mlflow(run):
                _record(run)
                waiting += [run] if backlog(run) else []
        except RacelabError as error:
            say(f"warning: {error}")
    if waiting:
        say(f"delivering {len(waiting)} run{'' if len(waiting) == 1 else 's'} that jobs have left")
    for run in reversed(waiting):
        try:
            deliver(run)
        except RacelabError as error:
            say(f"warning: {error}; racelab sync tries again")
            if isinstance(error, UnreachableError):  # so it is for the others
                return


def _candidates(folder: Path, run: str | None) -> list[RunFolder]:
    """The run named, else all, oldest first."""
    if run is not None:
        return [resolve(folder, run)]
    found, damaged = survey(folder)
    for problem in damaged.values():
        say(f"warning: {problem}")
    return [RunFolder(Path(info.path), info.run_id) for info in reversed(found)]


def _wants_mlflow(run: RunFolder) -> bool:
    """Whether the run was started with MLflow; `tracking=none` runs are delivered only when named."""
    from racelab.experiments.tracking.address import stored_config

    tracking = stored_config(run).get("tracking")
    return bool(tracking.get("mlflow", True)) if isinstance(tracking, dict) else True


def _remark(report: SyncReport) -> str:
    if report.live:
        return "in use: left to its own process"
    if report.closed_stale:
        return "its process had died; closed as interrupted"
    return "up to date" if not report.delivered else ""
