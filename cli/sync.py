"""`racelab sync`: brings MLflow up to date, and closes runs whose process has died."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from racelab.cli.console import print_json, print_table, say
from racelab.cli.train import run_root
from racelab.experiments.errors import RacelabError
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
    # keep the others waiting.
    for one in _candidates(folder, run):
        try:
            if run is not None or one.status() == "stale" or _wants_mlflow(one):
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
