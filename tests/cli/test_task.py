"""`racelab task`: which cells it has, what it refuses, and a real comparison from the command line to its picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
DRY = ("--dry-run", "--json")
FAST = (
    "model.grid.warmup_steps=3", "run.updates=3", "task.train_examples=200", "task.validation_examples=20",
    "task.prompts_per_step=2", "validation.every=2", "tracking=none",
)  # fmt: skip
MAIN, ARMS = ["rlvr", "base-reflection", "rlds"], ["rlds-random-grades", "rlds-no-kernel", "rlds-no-aux"]


def labels(found: Any) -> list[str]:
    assert found.code == 0, found.err
    return [row["label"] for row in found.json()]


def test_all_and_arms_are_sets_of_conditions_in_order(call: Call) -> None:
    task = ("task", "--name", "frozenlake")
    assert labels(call(*task, "--condition", "all,arms", *DRY)) == [
        f"frozenlake-{name}" for name in (*MAIN, *ARMS)
    ]
    again = call(*task, "--condition", "rlds,rlvr", "--condition", "rlds", *DRY)
    assert labels(again) == ["frozenlake-rlds", "frozenlake-rlvr"]


def test_tasks_are_named_in_the_labels_and_seeds_are_innermost(call: Call) -> None:
    words = ("--name", "hotpotqa,frozenlake", "--condition", "rlvr", "--seeds", "0,1")
    found = call("task", *words, *DRY, "run.updates=2")
    assert labels(found) == ["hotpotqa-rlvr"] * 2 + ["frozenlake-rlvr"] * 2
    assert [row["seed"] for row in found.json()] == [0, 1, 0, 1]
    assert found.json()[0]["overrides"] == ["run.updates=2", "task=hotpotqa", "condition=rlvr", "run.seed=0"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--condition", "rlds"], ["--name is missing", "frozenlake, hotpotqa, scienceworld, deepresearch", "all"]),
        (["--name", "frozenlake"], ["--condition is missing", "all or arms"]),
        (["--name", "frozenlak", "--condition", "all"], ["no task 'frozenlak'", "did you mean frozenlake?"]),
        (["--name", "all", "--condition", "rldss"], ["no condition 'rldss'", "did you mean rlds?"]),
        (["--name", "frozenlake", "--condition", "rlvr", "task=hotpotqa"], ["write --name hotpotqa"]),
        (["--name", "frozenlake", "--condition", "rlvr", "condition=rlds"], ["write --condition rlds"]),
        (["--name", "frozenlake", "--condition", "rlds", "method.advantage=grpo"],
         ["the condition rlds sets method.advantage itself", "racelab train condition=rlds method.advantage=grpo"]),
        (["--name", "frozenlake", "--condition", "rlvr", "method.reflect.max_retries=2"], ["sets method.reflect"]),
        (["--name", "frozenlake", "--condition", "rlds", "method.sdae.kernel=none"],
         ["the condition rlds is rlds-no-kernel", "--condition rlds-no-kernel"]),
        (["--name", "frozenlake", "--condition", "rlds", "method.auxiliary.reflect_coef=0",
          "method.auxiliary.retry_coef=0.0"], ["the condition rlds is rlds-no-aux"]),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_a_line(call: Call, words: list[str], parts: list[str]) -> None:
    found = call("task", *words, "--dry-run")
    assert found.code == 2
    assert len(found.err.splitlines()) == 1
    for part in parts:
        assert part in found.err


@pytest.mark.parametrize(
    "words",
    [
        ["method.advantage=sdae"],
        ["method.auxiliary.reflect_coef=0"],
        ["method.grader=policy", "method.reflector=policy", "model=smollm2-135m"],
        ["method.reflect.max_retries=2"],
    ],
)
def test_words_that_leave_a_condition_what_it_is_are_taken(call: Call, words: list[str]) -> None:
    found = call("task", "--name", "frozenlake", "--condition", "rlds", *words, *DRY)
    assert labels(found) == ["frozenlake-rlds"]


SCIENCE = ("task", "--name", "scienceworld", "--condition", "rlvr", "--dry-run")
WRONG_NAMES = [
    ("task.simplification=easi", "'easi', which ScienceWorld does not know; near: easy"),
    ("task.train_tasks=[boill]", "'boill', which is no ScienceWorld task; near: boil"),
]


@pytest.mark.parametrize(("word", "says"), WRONG_NAMES)
def test_a_dry_run_finds_wrong_names_of_scienceworld_without_java(
    call: Call, monkeypatch: pytest.MonkeyPatch, word: str, says: str
) -> None:
    pytest.importorskip("scienceworld")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("JAVA_HOME", "")
    found = call(*SCIENCE, word)
    assert found.code == 2
    assert says in found.err
    assert "cell scienceworld-rlvr (seed 0)" in found.err
    assert call(*SCIENCE).code == 0


def test_a_dry_run_does_not_need_the_package_of_scienceworld(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    from racelab.experiments.tasks.scienceworld import installation

    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: None)
    assert call(*SCIENCE).code == 0


def racelab(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "racelab.cli.main", *words],
        capture_output=True, text=True, timeout=240, check=False, cwd=home,
        env={**os.environ, "RACELAB_HOME": str(home), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The three conditions on FrozenLake, once for all tests here."""
    home = tmp_path_factory.mktemp("home")
    return home, racelab(home, "task", "--name", "frozenlake", "--condition", "all", "--jobs", "2", *FAST)


Swept = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_a_comparison_prints_results_answers_and_curves_and_draws_them(swept: Swept) -> None:
    home, done = swept
    assert done.returncode == 0, done.stderr
    for part in (
        "reward = success", "mean last", "better", "graded",
        "frozenlake: validation reward on 20 examples",
        "NOTE: base-reflection, rlds: grader and reflector = scripted",
        "no evidence for self-reflection",
        "less rlvr", "less base-reflection",
        "SDAE changes the reward by", "against the same retries with GRPO",
        "The reflect-retry rollout with its auxiliary loss (G = 6 + retries against 10) changes the reward by",
        "base-reflection, rlds: the scripted grader and reflector sample nothing",
        "does not see holes solves 0.",
        "With one seed the interval is over examples only",
        "At equal updates", "At equal sampled tokens", "At equal CPU seconds",
    ):  # fmt: skip
        assert part in done.stdout, part
    assert "frozenlake-rlds-s0: finished" in done.stderr
    assert "mean last: mean of the last evaluations, at most five" in " ".join(done.stderr.split())
    assert "intervals: racelab show frozenlake-rlvr-s0-" in done.stderr
    (picture,) = home.glob("runs/sweep-task-*/comparison.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"Picture: {picture}" in done.stdout


@pytest.mark.slow
def test_the_same_command_finds_all_cells_finished_and_show_gives_the_same_numbers(swept: Swept) -> None:
    home, _ = swept
    again = racelab(home, "task", "--name", "frozenlake", "--condition", "all", "--json", *FAST)
    found = json.loads(again.stdout)
    assert [cell["skipped"] for cell in found["cells"]] == [True] * 3
    assert [cell["label"] for cell in found["cells"]] == [f"frozenlake-{name}" for name in MAIN]
    cell = found["cells"][2]
    assert cell["policy_updates"] == 3
    assert cell["retries"] > 0
    assert cell["graded_frac"] == 1.0
    assert cell["reward"] == cell["success"]
    assert "quarantine_rate" not in {k for k, v in cell.items() if v is not None}
    compared = found["comparison"]["frozenlake"]
    assert set(compared["conditions"]) == set(MAIN)
    assert compared["conditions"]["rlds"]["last_five"]["value"] == cell["last_five"]
    assert set(compared["differences"]) == {"base-reflection - rlvr", "rlds - rlvr", "rlds - base-reflection"}
    shown = racelab(home, "show", found["run_id"], "--json")
    assert json.loads(shown.stdout)["comparison"] == found["comparison"]


@pytest.mark.slow
def test_runs_and_the_summary_of_a_cell_speak_of_rlds(
    swept: Swept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from racelab.cli.main import _main

    home, _ = swept
    monkeypatch.setenv("RACELAB_HOME", str(home))
    assert _main(["runs", "--json"]) == 0
    listed = [run for run in json.loads(capsys.readouterr().out) if run["kind"] == "train"]
    assert {(run["task"], run["condition"]) for run in listed} == {("frozenlake", name) for name in MAIN}
    assert _main(["runs"]) == 0
    assert "frozenlake/base-reflection" in capsys.readouterr().out
    (cell,) = (run for run in listed if run["condition"] == "rlds")
    assert _main(["show", cell["run_id"]]) == 0
    shown = capsys.readouterr().out
    for part in (
        "method    frozenlake/rlds", "has finished", "NOTE: grader and reflector = scripted",
        "No parse failure is counted as a grade.", "Retries:", "Stage diagnostics are left out",
        "path_planning", "Tokens sampled by the trained model: policy", "as many as follow from the steps",
    ):  # fmt: skip
        assert part in shown, part
    assert "quarantine" not in shown
    sweep = json.loads((next(home.glob("runs/sweep-task-*")) / "run.json").read_text())
    assert (sweep["paper"], sweep["task"], sweep["condition"]) == ("rlds", "frozenlake", "")


@pytest.mark.slow
def test_a_cell_that_vanished_leaves_the_comparison_of_the_others(
    swept: Swept, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a damaged record is a warning, not the end of the sweep."""
    from racelab.cli.sweep_rlds import comparison
    from racelab.experiments.runfolder import RunFolder

    home, _ = swept
    (folder,) = home.glob("runs/sweep-task-*")
    sweep = RunFolder.open(folder)
    (rlds,) = home.glob("runs/frozenlake-rlds-s0-*")
    hidden = rlds.with_name(".hidden")
    rlds.rename(hidden)
    try:
        found = comparison(sweep, draw=False)
        assert found is not None
        assert set(found["frozenlake"]["conditions"]) == set(MAIN[:2])
    finally:
        hidden.rename(rlds)
    config = rlds / "config" / "composed.yaml"
    text = config.read_text()
    config.write_text("{")
    try:
        assert comparison(sweep, draw=False) is None
        assert "warning: the conditions are not compared" in capsys.readouterr().err
    finally:
        config.write_text(text)


def test_a_damaged_record_is_a_warning_and_a_missing_one_is_left_out(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from racelab.cli import sweep_rlds
    from racelab.experiments.runfolder import RunFolder

    made = [
        RunFolder.create(home, name, composed_yaml="{", overrides=[], info={"kind": "train", "paper": "rlds"})
        for name in ("sweep", "cell")
    ]
    listed = [{"run_id": "gone", "label": "frozenlake-rlvr"}]
    monkeypatch.setattr(RunFolder, "status", lambda run: "finished")
    monkeypatch.setattr(sweep_rlds, "members", lambda sweep: listed)
    assert sweep_rlds.comparison(made[0], draw=False) is None
    assert capsys.readouterr().err == ""
    listed.append({"run_id": made[1].run_id, "label": "frozenlake-rlds"})
    assert sweep_rlds.comparison(made[0], draw=False) is None
    assert "warning: the conditions are not compared" in capsys.readouterr().err


def test_serve_retriever_refuses_an_unknown_engine(call: Call) -> None:
    found = call("serve", "retriever", "--corpus", "package", "--engine", "bm26", "--port", "0")
    assert found.code == 2
    assert "bm26" in found.err
    assert "retriever" in call("serve").out


def test_running_cells_show_updates_and_no_phases(home: Path) -> None:
    import io
    import time

    from rich.console import Console

    from racelab.cli.sweep_view import LiveTable, PlainLines
    from racelab.experiments.tracking.spool import SpoolWriter
    from racelab.sweeps.cells import Spec, make_cells, open_cell
    from racelab.sweeps.launch import CellState

    spec = Spec("rlds", None, ("task=frozenlake", "condition=rlds", "run.updates=10", "tracking=none"))
    cell = make_cells([spec])[0]
    folder = open_cell(home / "runs", cell, cell.cell_id, "sweep-x")
    state = CellState(cell, folder, "running", started=time.monotonic())
    stream = io.StringIO()
    view = PlainLines(stream)
    view.tick([state])
    values = {"train/clock/policy_step": 4.0, "train/clock/phase_kind": 0.0, "train/reward/mean": 0.25,
              "task/frozenlake/solved_frac": 0.25, "rlds/reflect/success_frac": 0.5}  # fmt: skip
    SpoolWriter(folder.spool_dir / "1.jsonl").append([{"kind": "metrics", "step": 4, "values": values}])
    view._next = 0.0
    view.tick([state])
    first, second = stream.getvalue().splitlines()
    assert first.startswith("rlds-s0: before the first update  elapsed=")
    assert second.startswith(
        "rlds-s0: update 4/10  reward=0.250  solved=0.250  retry_success=0.500  elapsed="
    )
    console = Console(file=(out := io.StringIO()), width=120)
    console.print(LiveTable(console).render([state, CellState(cell, folder, "waiting")]))
    shown = out.getvalue()
    assert "retry success" in shown
    assert "4/10" in shown
    assert "phase" not in shown
