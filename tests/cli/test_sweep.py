"""Sweeps through the real command line: real trainings of a tiny model as children, real MLflow."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from racelab.cli.sweep_view import LiveTable, PlainLines
from racelab.configs.keys import CONFIG_DIR
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.cells import Spec, make_cells, open_cell
from racelab.sweeps.launch import CellState

from ..experiments.tiny_run import overrides, write_tiny_model

STEPS = {"run.max_steps": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "racelab.cli.main", *words]


def racelab(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=300)


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def runs(root: Path, kind: str = "train") -> list[RunFolder]:
    named = sorted(
        path for path in root.glob("*/run.json") if path.parent.name[0] != "."
    )  # not those being made
    found = [RunFolder.open(path.parent) for path in named]
    return [run for run in found if run.info()["kind"] == kind]


def wait(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def writes_steps(run: RunFolder) -> bool:
    return any(b'"train/reward/mean"' in path.read_bytes() for path in run.spool_dir.glob("*.jsonl"))


def grid(folder: Path, text: str) -> str:
    file = folder / "grid.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.slow
def test_one_cell_fails_and_the_others_finish(model: Path, tmp_path: Path) -> None:
    """Layer 99 does not exist: found when the model is built, so in the child."""
    file = grid(tmp_path, "name: layers\naxes: {model.train_from_layer: [1, 99, 0]}\n")
    words = [
        w for w in overrides(model, tmp_path / "runs", **STEPS) if not w.startswith("model.train_from_layer")
    ]
    done = racelab("sweep", file, *words, "--jobs", "2", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert [cell["status"] for cell in found["cells"]] == ["finished", "failed", "finished"]
    bad = found["cells"][1]
    assert "99" in bad["reason"]
    assert bad["reason"] in Path(bad["log"]).read_text()
    assert found["means"]["train_from_layer=1/policy_updates"] == 3.0
    assert (found["status"], RunFolder.open(found["path"]).status()) == ("failed", "failed")
    people = racelab("sweep", file, *words)
    assert people.returncode == 1
    assert [len(run.attempts()) for run in runs(tmp_path / "runs") if run.status() == "finished"] == [1, 1]
    assert "why" in people.stdout
    assert bad["log"] in people.stdout
    assert "go on with the same command: racelab sweep" in people.stderr
    shown = racelab("show", found["path"])
    cells = [line.split() for line in shown.stdout.splitlines() if line.startswith("train_from_layer")]
    assert [row[2] for row in cells] == ["finished", "failed", "finished"]


@pytest.mark.slow
def test_a_killed_sweep_goes_on_where_it_was_and_gives_what_an_undisturbed_one_gives(
    model: Path, tmp_path: Path
) -> None:
    def words(root: Path) -> list[str]:
        tiny = overrides(model, root, **{"run.max_steps": 10})
        return ["ablate", "--variant", "full", "--variant", "filter-only", "--seeds", "0", *tiny]

    root = tmp_path / "killed"
    process = start(*words(root))
    wait(lambda: any(writes_steps(run) for run in runs(root) if run.run_id.startswith("filter")), process)
    process.kill()
    process.communicate()
    full, filter_only = sorted(runs(root), key=lambda run: run.run_id, reverse=True)
    end = time.monotonic() + 60
    while filter_only.status() == "running" and time.monotonic() < end:
        time.sleep(0.05)
    assert (full.status(), filter_only.status()) == ("finished", "interrupted")
    again = racelab(*words(root), "--resume")
    assert again.returncode == 0, again.stderr
    assert [len(run.attempts()) for run in (full, filter_only)] == [1, 2]
    assert racelab(*words(tmp_path / "whole")).returncode == 0
    for run in runs(root):
        other = RunFolder.open(tmp_path / "whole" / run.run_id)
        assert summary(run) == summary(other)


def summary(run: RunFolder) -> Any:
    found = json.loads((run.path / "summary.json").read_text())
    return {key: found[key] for key in ("phases", "validation", "steps", "routes")}


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_children_at_a_safe_point(
    model: Path, tmp_path: Path, signum: int, code: int
) -> None:
    words = overrides(model, tmp_path, **{"run.max_steps": 4000})
    process = start("train", *words, "--seeds", "0,1,2", "--jobs", "2")
    wait(lambda: sum(writes_steps(run) for run in runs(tmp_path)) == 2, process)
    process.send_signal(signum)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert sorted(run.status() for run in runs(tmp_path)) == ["interrupted", "interrupted", "queued"]
    assert [run.status() for run in runs(tmp_path, "sweep")] == ["interrupted"]
    assert "go on with the same command: racelab train --seeds 0,1,2 --jobs 2" in err


@pytest.mark.slow
def test_two_sweeps_started_at_once_share_the_work_and_mlflow_has_one_parent(
    model: Path, tmp_path: Path
) -> None:
    import mlflow

    words = ["train", *overrides(model, tmp_path, **STEPS, tracking="mlflow"), "--seeds", "0,1", "--json"]
    both = [start(*words) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    for out, _ in said:
        assert [cell["status"] for cell in json.loads(out)["cells"]] == ["finished", "finished"]
    assert [len(run.attempts()) for run in runs(tmp_path)] == [1, 1]
    (sweep,) = runs(tmp_path, "sweep")
    assert sweep.status() == "finished"
    for run in (sweep, *runs(tmp_path)):
        assert racelab("sync", str(run.path)).returncode == 0
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("racelab")
    assert experiment is not None
    logged = {run.data.tags["racelab.run_id"]: run for run in client.search_runs([experiment.experiment_id])}
    assert set(logged) == {run.run_id for run in (sweep, *runs(tmp_path))}
    parent = logged.pop(sweep.run_id)
    assert (parent.info.status, parent.data.tags["racelab.kind"]) == ("FINISHED", "sweep")
    assert {run.data.tags["mlflow.parentRunId"] for run in logged.values()} == {parent.info.run_id}
    label = "race-full-embedded"
    assert parent.data.metrics["cells/finished"] == 2.0
    assert parent.data.metrics[f"{label}/policy_updates"] == 3.0
    assert f"{label}/reward_std" in parent.data.metrics


@pytest.mark.slow
def test_a_thousand_cells_are_listed_in_seconds(tmp_path: Path) -> None:
    sizes = ", ".join(str(n) for n in range(2, 12))
    rates = ", ".join(f"{n}.0e-5" for n in range(1, 11))
    axes = f"axes:\n  method.group_size: [{sizes}]\n  learner.lr: [{rates}]\n"
    file = grid(
        tmp_path, f"name: many\nbase: [run.root={tmp_path / 'runs'}]\n{axes}seeds: {list(range(10))}\n"
    )
    started = time.monotonic()
    done = racelab("sweep", file, "--dry-run", "--json")
    assert len(json.loads(done.stdout)) == 1000
    assert time.monotonic() - started < 30  # 4 s on an idle core
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def states(tmp_path: Path) -> list[CellState]:
    """Twelve cells whose folders nobody has made yet."""
    cells = make_cells([Spec("a", seed, ()) for seed in range(12)])
    return [CellState(cell, RunFolder(tmp_path / cell.cell_id, cell.cell_id)) for cell in cells]


def test_off_a_terminal_a_line_for_each_start_and_end(
    states: list[CellState], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = PlainLines(sys.stdout)
    view.start("tiny", states)
    states[0].started = time.monotonic()
    states[0].set("running")
    view.changed(states[0])
    view.tick(states)
    states[0].set("failed", "no luck")
    view.changed(states[0])
    states[1].set("elsewhere")
    view.changed(states[1])
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "tiny: 12 cells: 12 waiting",
        f"a-s0: started, in {states[0].folder.path}",
        "a-s0: failed after 0s: no luck",
        "a-s1: another process has it; waiting for it",
    ]
    monkeypatch.setattr("racelab.cli.sweep_view._LINE_EVERY_S", -1.0)
    view.start("tiny", states)
    states[2].set("running")
    view.tick(states)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("a-s2: step -  policy -/24  untrained view  reward=-")


def test_on_a_terminal_one_table_that_shows_what_runs_first(states: list[CellState]) -> None:
    from rich.console import Console

    console = Console(width=120, height=14, force_terminal=False, record=True, file=io.StringIO())
    states[11].set("running")
    states[3].set("failed", "no luck")
    console.print(LiveTable(console).render(states))
    text = console.export_text()
    assert "12 cells: 1 failed, 1 running, 10 waiting" in " ".join(text.split())
    rows = [line.split()[1:4] for line in text.splitlines() if line.startswith("│ a")]
    assert len(rows) == 6
    assert ["a", "│", "11"] in rows
    assert "6 cells are not shown" in text


ROW = {
    "label": "full", "seed": 0, "status": "finished", "wall_s": 65.0, "policy_updates": 8.0, "rubric_updates": 3.0,
    "reward": 0.375, "reward_gain": 0.125, "n_phases": 4.0, "policy_phase_len": 3.5, "quarantine_rate": None,
}  # fmt: skip


def test_the_table_of_cells_leaves_out_what_none_has(capsys: pytest.CaptureFixture[str]) -> None:
    from racelab.cli.sweep import print_cells

    print_cells([ROW, {"label": "static", "seed": 1, "status": "new"}])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["cell", "seed", "status", "took", "updates", "reward", "phases", "phase", "length"],
        ["full", "0", "finished", "1m05s", "8+3", "0.375", "+0.125", "4", "3.5/-"],
        ["static", "1", "new", "-", "-", "-", "-", "-"],
    ]


def test_a_narrow_terminal_gets_the_first_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boxed widths: full 4+3, seed 4+3, finished 8+3, 1m05s 5+3, updates 7+3, 0.375 +0.125 12+3, and 1: 59."""
    from racelab.cli import sweep

    monkeypatch.setattr(sweep, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "59")
    sweep.print_cells([ROW])
    said = capsys.readouterr()
    assert said.out.split()[:6] == ["cell", "seed", "status", "took", "updates", "reward"]
    assert "columns that do not fit: phases, phase length" in said.err


def test_show_and_runs_know_a_sweep_without_training(tmp_path: Path, call: Callable[..., Any]) -> None:
    from racelab.sweeps.run import make_plan, open_sweep

    cells = make_cells([Spec("a", seed, ("tracking=none",)) for seed in (0, 1)])
    plan = make_plan("tiny", "racelab sweep tiny.yaml", tmp_path / "runs", cells, False)
    sweep = open_sweep(plan)
    open_cell(plan.root, cells[0], plan.run_ids[0], sweep.run_id)
    shown = call("show", sweep.run_id, "--json").json()
    assert [(row["label"], row["seed"], row["status"]) for row in shown["cells"]] == [
        ("a", 0, "queued"),
        ("a", 1, "new"),
    ]
    assert "racelab sweep tiny.yaml" in call("show", sweep.run_id).out
    assert {row["kind"] for row in call("runs", "--json").json()} == {"sweep", "train"}
    refused = call("train", "--resume", sweep.run_id)
    assert refused.code == 2
    assert "is a sweep; go on with: racelab sweep tiny.yaml" in refused.err
    for words in (
        ("replay", sweep.run_id),
        ("config", "diff", sweep.run_id, "paper"),
        ("show", sweep.run_id, "--step", "1"),
    ):
        refused = call(*words)
        assert (refused.code, refused.out) == (2, "")
        assert refused.err == f"error: {sweep.run_id} is a sweep; name one of its cells: {plan.run_ids[0]}\n"


def test_a_password_in_the_tracking_address_is_refused_since_no_cell_would_get_it(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    words = ("train", "--seeds", "0,1", "--dry-run", f"run.root={tmp_path / 'runs'}")
    refused = call(*words, "tracking.uri=http://ann:s3cret@host:5000")
    assert refused.code == 2
    assert "leave it out (tracking.uri=http://host:5000)" in refused.err
    assert "export the whole address as MLFLOW_TRACKING_URI" in refused.err
    assert "s3cret" not in refused.err
    assert call(*words, "tracking.uri=http://host:5000").code == 0


def test_a_grid_that_ships_is_named_without_its_path(tmp_path: Path, call: Callable[..., Any]) -> None:
    words = (f"run.root={tmp_path}", "--dry-run", "--json")
    by_name = call("sweep", "quarantine-target", *words).json()
    by_path = call("sweep", str(CONFIG_DIR / "sweep" / "quarantine-target.yaml"), *words).json()
    assert by_name == by_path
    assert len(by_name) == 12
    missing = call("sweep", "quarantine-targets", "--dry-run")
    assert missing.code == 2
    assert "did you mean quarantine-target?" in missing.err


def test_a_dry_run_refuses_to_resume_nothing_and_warns_of_an_api_without_address(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    root = f"run.root={tmp_path}"
    nothing = call("ablate", "--variant", "full,filter-only", "--resume", "--dry-run", root)
    assert nothing.code == 2
    assert "no cell of the sweep ablate has been started" in nothing.err
    warned = call("baseline", "--method", "rar", "--dry-run", root)
    assert warned.code == 0
    assert "warning: cell rar: api.base_url is empty and OPENAI_BASE_URL is not set" in warned.err


def test_cells_that_were_interrupted_say_where_they_go_on(states: list[CellState]) -> None:
    """Of twelve one was stopped after update 212, one before any checkpoint."""
    states[0].attempts = states[1].attempts = 1
    for state in states[:2]:
        (state.folder.path / "checkpoints").mkdir(parents=True)
        (state.folder.path / "run.json").write_text('{"status": "interrupted"}')
    for name in ("step-00000200", "step-00000212", ".tmp-step-00000300"):
        (states[0].folder.path / "checkpoints" / name).mkdir()
    view = PlainLines(stream := io.StringIO())
    view.start("tiny", states)
    for state in states[:2]:
        state.set("running")
        view.changed(state)
    assert stream.getvalue().splitlines() == [
        "tiny: 12 cells: 2 interrupted, 10 waiting",
        f"a-s0: goes on at step 213, in {states[0].folder.path}",
        f"a-s1: started, in {states[1].folder.path}",
    ]
    view.start("tiny", states[2:3])
    assert stream.getvalue().splitlines()[-1] == "tiny: 1 cell: 1 waiting"


def test_the_mean_of_the_last_evaluations_is_none_of_a_single_one(capsys: pytest.CaptureFixture[str]) -> None:
    from racelab.cli.sweep import print_cells

    rlds = {**ROW, "rubric_updates": None, "run_id": "a-s0", "success": 0.25, "last_five": 0.375}
    rows = [{**rlds, "last_evaluations": 1.0}, {**rlds, "last_evaluations": 3.0, "seed": 1}]
    print_cells(rows, Path("runs").absolute())
    said = capsys.readouterr()
    head, *lines = (line.split("  ") for line in said.out.splitlines())
    assert "mean last" in " ".join(head)
    column = [part for part in head if part].index("mean last")
    assert [[p.strip() for p in line if p][column] for line in lines] == ["-", "0.375"]
    assert max(map(len, said.err.splitlines())) <= 110
    assert "mean last: mean of the last evaluations, at most five" in " ".join(said.err.split())
    assert said.err.splitlines()[-1].startswith("intervals: racelab show ")
    print_cells([{**row, "reward": 0.25, "success_gain": 0.125} for row in rows])
    assert "reward = success" in capsys.readouterr().out
    print_cells(rows[:1])
    said = capsys.readouterr()
    assert "mean last" not in said.out + said.err


def test_cells_with_the_same_results_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    from racelab.cli.sweep import print_cells

    same = {"seed": 0, "status": "finished", "reward": 0.5, "success": 0.25, "rubric_updates": 3}
    print_cells([{"label": "a", **same}, {"label": "b", **same}, {"label": "c", **same, "reward": 0.6}])
    assert "a and b have the same numbers throughout" in capsys.readouterr().err
