"""Graphs as jobs of a real Slurm that wait for one another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from racelab.experiments.runfolder import RunFolder

from ..experiments.tiny_run import overrides, write_tiny_model
from .lab import Cluster

LAUNCHER = ("launcher=slurm", "launcher.cpus_per_task=1", "launcher.mem_gb=2", "launcher.time_min=15")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def graph(folder: Path, model: Path, *stages: str) -> str:
    words = [*overrides(model, folder / "runs", **{"run.max_steps": 5}), *LAUNCHER]
    head = ["name: g", "base:", *(f"  - {word!r}" for word in words), "stages:"]
    file = folder / "graph.yaml"
    file.write_text("\n".join([*head, *(f"  {stage}" for stage in stages), ""]))
    return str(file)


def racelab(cluster: Cluster, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "racelab.cli.main", *words],
        cwd=folder, env=cluster.environment(RACELAB_HOME=str(folder)), capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def answer(cluster: Cluster, folder: Path, *words: str) -> Any:
    """The JSON of a command that goes well."""
    done = racelab(cluster, folder, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_graph_runs_through_and_a_failure_stops_only_what_needs_it(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    file = graph(
        folder,
        model,
        "train: {command: train run.seed=3}",
        "both: {command: 'train --seeds 0,1', after: [train]}",
        "eval: {command: 'replay {train} --no-plot --json', after: [train]}",
        "bad: {command: 'show {train} --step 77', after: [train]}",
        "never: {command: runs, after: [bad]}",
        "report: {command: 'show {both}', after_any: [both, eval, bad, never]}",
    )
    jobs = answer(cluster, folder, "launch", file)["jobs"]
    ids = {f"{row['batch']}/{row['title']}": row["job_id"] for row in jobs}
    assert racelab(cluster, folder, "jobs", "--wait").returncode == 1  # not all has finished
    found = {status["job_id"]: status for status in answer(cluster, folder, "jobs")}
    states = {name.partition("/")[0]: found[job_id]["state"] for name, job_id in ids.items()}
    assert states == {
        "train": "finished", "both": "finished", "eval": "finished", "bad": "failed", "never": "cancelled",
        "report": "finished",
    }  # fmt: skip
    accounted = {row["JobID"]: row["State"].partition(" ")[0] for row in cluster.sacct(*found)}
    words = {"finished": "COMPLETED", "failed": "FAILED", "cancelled": "CANCELLED"}
    assert accounted == {job_id: words[status["state"]] for job_id, status in found.items()}
    runs = [RunFolder.open(path) for path in sorted((folder / "runs").glob("race-*"))]
    assert {run.status() for run in runs} == {"finished"}
    (sweep,) = (folder / "runs").glob("sweep-*")
    assert RunFolder.open(sweep).status() == "finished"
    launch = found[ids["report/report"]]["launch"]
    said = racelab(cluster, folder, "logs", f"{launch}:report")
    assert said.returncode == 0, said.stderr
    assert sweep.name in said.stdout
    assert "no texts of step 77" in racelab(cluster, folder, "logs", f"{launch}:bad").stdout


def test_a_second_launch_waits_for_a_run_that_the_first_one_has(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    file = graph(
        tmp_path, model, "train: {command: train}", "look: {command: 'show {train}', after: [train]}"
    )
    first = answer(cluster, tmp_path, "launch", file, "launcher.extra=[--hold]")
    train = first["jobs"][0]["job_id"]
    second = answer(cluster, tmp_path, "launch", file)
    (look,) = second["jobs"]
    assert look["title"] == "look"
    assert cluster.job(look["job_id"])["Dependency"].startswith(f"afterok:{train}")
    for launch in (first, second):
        assert racelab(cluster, tmp_path, "cancel", launch["launch"]).returncode == 0
