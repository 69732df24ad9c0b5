"""`racelab launch`: graphs through the command line, on this machine and as scripts for a cluster."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from racelab.experiments.runfolder import RunFolder

from ..experiments.tiny_run import overrides, write_tiny_model
from .conftest import Result

Call = Callable[..., Result]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def graph(folder: Path, *stages: str, base: str = "") -> str:
    file = folder / "graph.yaml"
    head = ["name: g", *([f"base: [{base}]"] if base else []), "stages:"]
    file.write_text("\n".join([*head, *(f"  {stage}" for stage in stages), ""]))
    return str(file)


FAILS = "bad: {command: show nowhere}"


# --- on this machine ----------------------------------------------------------------------------------------


def test_stages_run_one_after_the_other_and_honour_what_they_wait_for(command: Call, home: Path) -> None:
    """bad fails; never needs its success, nor needs that of never; report waits for the end of all, clean for none."""
    file = graph(
        home,
        "report: {command: runs --json, after_any: [bad, never, nor]}",
        FAILS,
        "never: {command: runs, after: [bad]}",
        "nor: {command: runs, after: [never]}",
        "clean: {command: config check}",
    )
    done = command("launch", file)
    assert done.code == 1
    said = [line for line in done.err.splitlines() if line.startswith("stage ")]
    assert [line.partition(" after ")[0] for line in said] == [
        "stage bad: racelab show nowhere",
        "stage bad: failed",
        "stage never: not run: it needs the success of bad, which failed",
        "stage nor: not run: it needs the success of never, which was not run",
        "stage report: racelab runs --json",
        "stage report: finished",
        "stage clean: racelab config check",
        "stage clean: finished",
    ]
    assert said[1].endswith(": exit code 2")
    assert "error: no runs in" in done.err
    assert "[]" in done.out


def test_under_json_stdout_is_one_document(command: Call, home: Path) -> None:
    done = command("launch", graph(home, "a: {command: runs --json}", FAILS), "--json")
    assert done.code == 1
    rows = done.json()
    assert all(row.pop("took_s") > 0 for row in rows)
    assert rows == [
        {"stage": "a", "status": "finished", "exit_code": 0, "reason": ""},
        {"stage": "bad", "status": "failed", "exit_code": 2, "reason": "exit code 2"},
    ]


def test_all_is_well_without_a_failure(command: Call, home: Path) -> None:
    assert command("launch", graph(home, "a: {command: runs}")).code == 0


def test_a_dry_run_names_the_commands_in_order_and_makes_nothing(call: Call, home: Path) -> None:
    file = graph(
        home,
        "look: {command: 'show {train}', after: [train]}",
        "train: {command: train run.seed=3}",
        "last: {command: runs, after_any: [look, train]}",
        base="preset=embedded",
    )
    done = call("launch", file, "run.policy_updates=2", "--dry-run")
    assert done.code == 0, done.err
    lines = [line.split(maxsplit=1) for line in done.out.splitlines()]
    assert [line[0] for line in lines] == ["stage", "train", "look", "last"]
    assert lines[1][1].split(maxsplit=1) == [
        "-",
        "racelab train preset=embedded run.seed=3 run.policy_updates=2",
    ]
    after, _, run_id = lines[2][1].partition("racelab show ")
    assert after.strip() == "success of train"
    assert lines[3][1].startswith("end of look, end of train")
    assert "nothing was started" in done.err
    rows = call("launch", file, "run.policy_updates=2", "--dry-run", "--json").json()
    assert [row["stage"] for row in rows] == ["train", "look", "last"]
    assert rows[0]["runs"] == [run_id]
    assert rows[1]["after"] == [{"stage": "train", "condition": "ok"}]
    assert not (home / "runs").exists()


def test_what_a_run_lacks_is_said_before_anything_starts(call: Call, home: Path) -> None:
    file = graph(home, "first: {command: runs}", "train: {command: train data=file data.path=nowhere.jsonl}")
    done = call("launch", file)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {file}:4: stages: train: command: cell ")
    assert "nowhere.jsonl" in done.err
    assert "stage first" not in done.err


def test_a_warning_of_several_stages_is_said_once(call: Call, home: Path) -> None:
    words = "run.policy_updates=2 method.trqc.q_target=0.9"
    file = graph(home, f"a: {{command: train {words}}}", f"b: {{command: train {words} run.seed=1}}")
    done = call("launch", file, "--dry-run")
    assert done.code == 0
    warnings = [line for line in done.err.splitlines() if line.startswith("warning:")]
    assert warnings
    assert len(warnings) == len(set(warnings))
    assert all(line.endswith("(stages a, b)") for line in warnings)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train-eval-reprot", "no graph train-eval-reprot; did you mean train-eval-report? (a file, or one that ships: "
            "train-eval-report)"),
        ("nowhere.yaml", "nowhere.yaml: cannot be read"),
    ],
)  # fmt: skip
def test_a_graph_that_is_not_there(call: Call, name: str, said: str) -> None:
    done = call("launch", name)
    assert done.code == 2
    assert done.err.startswith(f"error: {said}")


# --- as scripts for a cluster -------------------------------------------------------------------------------


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No tool of Slurm is on the path."""
    (tmp_path / "bin").mkdir()
    for tool in ("git", "env"):
        found = shutil.which(tool)
        if found:
            (tmp_path / "bin" / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


GRAPH = (
    "train: {command: train run.seed=3}",
    "both: {command: 'train --seeds 0,1', after: [train], launcher: [launcher.time_min=30]}",
    "look: {command: 'show {both}', after_any: [both], launcher: [launcher.nodes=2, launcher.gpus_per_node=8]}",
)


@pytest.mark.usefixtures("no_slurm")
def test_a_dry_run_prints_the_scripts_the_order_and_the_size_where_there_is_no_slurm(
    call: Call, home: Path
) -> None:
    """4 h for the run, 2 x 0.5 h for the sweep, 4 h x 2 nodes (8 GPUs each) for the command: 13 node, 64 GPU hours."""
    file = graph(home, *GRAPH, base="preset=embedded, launcher=slurm")
    done = call("launch", file, "--dry-run")
    assert done.code == 0, done.err
    heads = [line for line in done.out.splitlines() if line.startswith("# -----")]
    assert heads == ["# ----- train.sh", "# ----- both.sh", "# ----- look.sh"]
    scripts = done.out.split("# ----- ")[1:]
    assert "--dependency" not in scripts[0]
    assert "#SBATCH --dependency='afterok:<train>'" in scripts[1]
    assert "#SBATCH --kill-on-invalid-dep=yes" in scripts[1]
    assert "#SBATCH --array=0-1%2" in scripts[1]
    assert "#SBATCH --dependency='afterany:<both>'" in scripts[2]
    assert "#SBATCH --gpus-per-node=8" in scripts[2]
    lines = done.err.splitlines()
    assert [line.partition(":")[0] for line in lines[-4:-1]] == ["train", "both", "look"]
    assert "afterok:<train>" in lines[-3]
    assert lines[-1].startswith(
        "4 jobs in 3 submissions, 16 GPUs in all, at most 13 node hours and 64 GPU hours"
    )
    found = call("launch", file, "--dry-run", "--json").json()
    assert (found["jobs"], found["gpus"], found["node_hours"], found["gpu_hours"]) == (4, 16, 13.0, 64.0)
    assert [batch["after"] for batch in found["batches"]] == [
        [], [{"stage": "train", "condition": "ok"}], [{"stage": "both", "condition": "any"}],
    ]  # fmt: skip
    assert not (home / "runs").exists()


@pytest.mark.usefixtures("no_slurm")
def test_without_slurm_nothing_is_made_and_the_exit_code_says_out_of_reach(call: Call, home: Path) -> None:
    done = call("launch", graph(home, "look: {command: runs}", base="launcher=slurm"))
    assert done.code == 4, done.err
    assert done.err.startswith("error: ")
    assert not (home / "runs").exists()


@pytest.mark.usefixtures("no_slurm")
def test_the_shipped_graph_is_known_by_its_name(call: Call, home: Path) -> None:
    found = call("launch", "train-eval-report", "--dry-run", "--json").json()
    assert [batch["name"] for batch in found["batches"]] == ["train", "eval", "report"]
    (run_id,) = found["batches"][0]["tasks"]
    assert [batch["tasks"] for batch in found["batches"][1:]] == [
        [f"eval {run_id} --suite race --limit 50 --seeds 0 eval.max_tokens=512"], [f"show {run_id}"],
    ]  # fmt: skip


# --- with a model that trains -------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_sweeps_and_what_looks_at_them_share_ids(command: Call, model: Path, home: Path) -> None:
    """A second launch trains nothing again, and goes on with what looks at the runs."""
    words = [*overrides(model, home / "runs", **{"run.max_steps": 5})]
    base = ", ".join(f"'{word}'" for word in words)
    file = graph(
        home,
        "train: {command: train run.seed=3}",
        "both: {command: 'train --seeds 0,1', after: [train]}",
        "look: {command: 'replay {train} --no-plot --json', after: [train]}",
        "report: {command: 'show {both}', after_any: [look, both]}",
        base=base,
    )
    done = command("launch", file)
    assert done.code == 0, done.err
    found = {run.run_id: run for run in map(RunFolder.open, sorted((home / "runs").glob("race-*")))}
    assert sorted(run.info()["seed"] for run in found.values()) == [0, 1, 3]
    assert {run.status() for run in found.values()} == {"finished"}
    (one,) = (run for run in found.values() if run.info()["seed"] == 3)
    assert one.info()["sweep"] == ""
    (sweep,) = (home / "runs").glob("sweep-*")
    assert f"racelab replay {one.run_id} --no-plot --json" in done.err
    assert f"racelab show {sweep.name}" in done.err
    again = command("launch", file, "--json")
    assert [row["status"] for row in again.json()] == ["finished"] * 4
    assert [len(run.attempts()) for run in found.values()] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_stage_at_a_safe_point_and_the_graph_with_it(
    model: Path, home: Path, signum: signal.Signals
) -> None:
    base = ", ".join(f"'{word}'" for word in overrides(model, home / "runs", **{"run.max_steps": 4000}))
    file = graph(home, "train: {command: train}", "report: {command: runs, after_any: [train]}", base=base)
    process = subprocess.Popen(
        [sys.executable, "-m", "racelab.cli.main", "launch", file, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not any(b'"train/reward/mean"' in path.read_bytes() for path in home.glob("runs/*/spool/*.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never trained"
        time.sleep(0.05)
    process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, err
    rows: list[Any] = json.loads(out)
    reason = f"stopped by {signum.name}"
    assert [(row["status"], row["reason"]) for row in rows] == [("interrupted", reason), ("not run", reason)]
    (run,) = map(RunFolder.open, (home / "runs").glob("race-*"))
    assert run.status() == "interrupted"
    assert any((run.path / "checkpoints").glob("step-*"))
