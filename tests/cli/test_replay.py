"""`racelab replay` through the command line, on a run of a tiny model with every other part real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from racelab.cli.replay import full_key, parse, replayable
from racelab.experiments.errors import ConfigError
from racelab.experiments.runfolder import RunFolder

from ..experiments.tiny_run import STEPS, overrides, write_tiny_model

Call = Callable[..., Any]
EVENTS = {
    "method.phase.mode": "event",
    "method.phase.mu_sat": 0.0,
    "method.phase.sigma_sw": 1.0,
    "method.phase.alpha": 0.5,
    "method.phase.tau_sat": 0.7,
    "method.phase.window": 1,
    "method.phase.policy_window": 1,
    "method.phase.rubric_window": 1,
    "method.phase.max_rubric_steps": 3,
    "validation.samples": 1,
    "validation.temperatures": "[1.0]",
    "validation.judge_report": "false",
}
"""Every group counts as saturated, so both triggers fire within twelve steps."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("replay")
    model = write_tiny_model(folder / "model")
    words = overrides(model, folder / "runs", **EVENTS)
    done = subprocess.run(
        [sys.executable, "-m", "racelab.cli.main", "train", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return RunFolder.open(json.loads(done.stdout)["path"])


def test_a_run_with_its_own_config_has_no_difference(trained: RunFolder, call: Call) -> None:
    found = call("replay", str(trained.path), "--json", "--no-plot").json()
    assert (found["differences"], found["n_differences"]) == ([], 0)
    assert found["integrity"] == {"mean": 0, "std": 0, "tie_rate": 0}
    assert len(found["steps"]) == STEPS
    assert found["phases"]["logged"] == found["phases"]["replayed"]
    assert {"saturation", "plateau"} <= {p["end_reason"] for p in found["phases"]["logged"]}
    assert all(pair["logged"] == pair["replayed"] for pair in found["thresholds"].values())
    assert found["plot"] is None


def test_for_people_it_says_so_and_draws(trained: RunFolder, call: Call) -> None:
    result = call("replay", str(trained.path))
    file = trained.path / "replay" / "replay.png"
    assert result.code == 0
    assert result.out.startswith(f"Run {trained.run_id}, replayed with its own settings\n")
    assert "No difference" in result.out
    assert result.out.endswith(f"Plot: {file}\n")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_another_setting_gives_differences_and_says_where_they_begin(
    trained: RunFolder, call: Call, tmp_path: Path
) -> None:
    file = tmp_path / "here.png"
    words = ["--set", "controller.tau_sat=0.95", "q_target=0.6"]
    found = call("replay", str(trained.path), *words, "--plot", str(file), "--json").json()
    assert found["set"] == {"method.phase.tau_sat": 0.95, "method.trqc.q_target": 0.6}
    assert found["n_differences"] == len(found["differences"]) > 0
    assert found["differences"][0] == {
        "step": 1,
        "what": "tau_sat",
        "logged": 0.7,
        "replayed": 0.95,
        "group": None,
    }
    first, second = found["steps"][:2]
    assert first["sigma_rt"]["logged"] == first["sigma_rt"]["replayed"]
    assert second["sigma_rt"]["logged"] < second["sigma_rt"]["replayed"]
    assert (found["plot"], file.is_file()) == (str(file), True)
    text = call("replay", str(trained.path), *words, "--no-plot").out
    assert "differences; first at step 1: tau_sat, logged 0.7, replayed 0.95." in text
    assert f"Counterfactual from step {found['counterfactual_from']} on: the phases differ" in text


def test_a_changed_log_is_told_from_changed_settings(trained: RunFolder, call: Call, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / trained.run_id
    shutil.copytree(trained.path, copy)
    (copy / "manifest.json").unlink()
    (spool,) = (copy / "spool").glob("*.jsonl")
    lines = spool.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"groups"' in line)
    record = json.loads(lines[at])
    record["rows"][1]["tau_tie"] += 0.01
    record["rows"][0]["rewards"][0] = 0.123
    lines[at] = json.dumps(record) + "\n"
    spool.write_text("".join(lines))
    result = call("replay", str(copy), "--no-plot")
    assert "1 difference; first at step 1: tau_tie" in result.out
    assert "the log was changed or written by another version" in result.out
    assert "WARNING: 1 groups log another mean than their rewards give." in result.out


def test_a_key_that_no_decision_depends_on_is_noted(trained: RunFolder, call: Call) -> None:
    result = call("replay", str(trained.path), "--no-plot", "--json", "mask_uninformative=false")
    assert result.json()["n_differences"] == 0
    assert result.err == (
        "method.routing.mask_uninformative decides what is trained on, not how groups are routed: "
        "the replay is the same\n"
    )


BAD = {
    "q_targt=0.3": "did you mean method.trqc.q_target",
    "phase.mode=fixd": "did you mean fixed?",
    "mode=fixed": "method.routing.mode and method.phase.mode",
    "run.seed=1": "cannot be replayed",
    "lr=0.1": "cannot be replayed",
    "method.rubric_reward.clip=2": "cannot be replayed",
    "controller.seed=1": "no such key",
    "zzzz=1": "take a key of method.routing, method.pool, method.trqc, method.phase",
    "q_target": "write KEY=VALUE",
    "q_target=": "write KEY=VALUE",
    "q_target=2": "method.trqc.q_target=2: must be less than 1",
    "eta_sigma=.inf": "must be a finite number",
    "eta_sigma=true": "must be a number, not true or false",
    "fixed=[1": "the value cannot be read",
    "max_rubric_steps=1": "is below 2 x window",
}


@pytest.mark.parametrize("word", BAD)
def test_a_bad_setting_is_one_line(word: str, trained: RunFolder, call: Call) -> None:
    result = call("replay", str(trained.path), "--no-plot", "--set", word)
    assert (result.code, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1
    assert BAD[word] in result.err


def test_plot_and_no_plot_exclude_one_another(trained: RunFolder, call: Call) -> None:
    result = call("replay", str(trained.path), "--no-plot", "--plot", "x.png")
    assert (result.code, "exclude one another" in result.err) == (2, True)


def test_runs_that_have_nothing_to_replay(call: Call, make_run: Call) -> None:
    other = make_run("other")
    other.update(method="rlds")
    result = call("replay", "other", "--no-plot")
    assert (result.code, result.out) == (2, "")
    assert "is of method rlds; only RACE has controllers to replay" in result.err
    make_run("empty", rewards=())
    result = call("replay", "empty")
    assert result.code == 2
    assert "there is no rollout group in its log" in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("method.trqc.q_target", "method.trqc.q_target"),
        ("trqc.q_target", "method.trqc.q_target"),
        ("controller.q_target", "method.trqc.q_target"),
        ("controller.tau_sat", "method.phase.tau_sat"),
        ("controller.mode", "method.phase.mode"),
        ("controller.tau_tie", "method.routing.tau_tie"),
        ("q_target", "method.trqc.q_target"),
        ("min_pool", "method.pool.min_pool"),
    ],
)
def test_a_key_may_be_written_in_full_or_short(word: str, key: str) -> None:
    assert full_key(word) == key


def test_the_controller_does_not_reach_the_pool() -> None:
    with pytest.raises(ConfigError, match="no such key"):
        full_key("controller.capacity")


def test_every_key_can_be_named_in_full_and_none_lies_outside_the_four_blocks() -> None:
    assert all(full_key(key) == key for key in replayable())
    assert {key.split(".")[1] for key in replayable()} == {"routing", "trqc", "phase", "pool"}


def test_values_are_read_as_yaml_but_off_stays_a_word() -> None:
    words = ["routing.mode=off", "phase.fixed=[3,2]", "max_rubric_steps=null", "mask_uninformative=false"]
    assert list(parse(words).values()) == ["off", [3, 2], None, False]
