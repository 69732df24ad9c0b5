"""`racelab sync`: brings MLflow up to date, and closes runs whose process has died."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from racelab.cli.console import print_json, print_table, say
from racelab.cli.train import run_root
from racelab.experiments.errors import UnreachableError
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.manifest import list_runs, resolve

if TYPE_CHECKING:
    from racelab.experiments.tracking.shipper import SyncReport


def sync(run: str | None, root: Path | None, json_output: bool) -> int:
    """Syncs one run, or all that want MLflow.

    Raises:
        UnreachableError: after all runs were looked at, if a store did not answer.
    """
    from racelab.experiments.tracking.shipper import sync as deliver

    folder = run_root(str(root) if root else "")
    reports: list[SyncReport] = []
    unreachable: UnreachableError | None = None
    # A stale run is closed in its folder even when its store is away, so the rest is still worth a look.
    for one in _chosen(folder, run):
        try:
            reports.append(deliver(one))
        except UnreachableError as error:
            unreachable = error
    if json_output:
        print_json([asdict(report) for report in reports])
    elif reports:
        rows = [[r.run_id, str(r.delivered), str(r.backlog), _remark(r)] for r in reports]
        print_table(["run", "delivered", "waiting", "remark"], rows, right=["delivered", "waiting"])
    elif unreachable is None:
        say(f"no runs to sync in {folder}")
    if unreachable is not None:
        raise unreachable
    return 0


def _chosen(folder: Path, run: str | None) -> list[RunFolder]:
    """The run named, else all but those that were started without MLflow, oldest first."""
    if run is not None:
        return [resolve(folder, run)]
    found = [RunFolder(Path(info.path), info.run_id) for info in reversed(list_runs(folder))]
    return [one for one in found if one.status() == "stale" or _wants_mlflow(one)]


def _wants_mlflow(run: RunFolder) -> bool:
    """Whether the run was started with MLflow; `tracking=none` runs are delivered only when named."""
    import yaml

    file = run.path / "config" / "composed.yaml"
    stored = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    tracking = stored.get("tracking") if isinstance(stored, dict) else None
    return bool(tracking.get("mlflow", True)) if isinstance(tracking, dict) else True


def _remark(report: SyncReport) -> str:
    if report.live:
        return "in use: left to its own process"
    if report.closed_stale:
        return "its process had died; closed as interrupted"
    return "up to date" if not report.delivered else ""
