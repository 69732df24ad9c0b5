"""An RLDS run that is killed in a retry, or stopped in a validation, goes on to the very end of one that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import read_spool

WORDS = [
    "task=frozenlake", "model.grid.warmup_steps=3", "run.updates=4", "run.threads=1", "task.train_examples=200",
    "task.validation_examples=20", "task.prompts_per_step=4", "tracking=none", "validation.every=2",
    "checkpoint.every=1", "run.transcripts_every=1", "method.sdae.null_every=2", "method.sdae.null_draws=3",
]  # fmt: skip

KILLED_IN_RETRY = """
import os, signal, sys
from racelab.experiments.tasks.frozenlake.grid_actor import GridActor

play, seen = GridActor.play, 0

def dies(self, starts, sampling, rng):
    global seen
    if starts and starts[0].parent is not None:
        seen += 1
        if seen == 3:
            play(self, starts[:1], sampling, rng)  # one retry is through
            os.kill(os.getpid(), signal.SIGKILL)
    return play(self, starts, sampling, rng)

GridActor.play = dies
from racelab.cli.main import main
sys.argv = ["racelab", *sys.argv[1:]]
main()
"""

STOPPED = """
import os, signal, sys
from racelab.experiments import session_rlds
from racelab.experiments.methods.rlds.step import Rlds
from racelab.experiments.tasks.frozenlake.grid_actor import GridActor

session_rlds._WAVE = 8  # a validation in several waves: between two a stop request is looked for
where = sys.argv.pop(1)
play, step, look, looking = GridActor.play, Rlds.step, session_rlds.RldsSession._look, False

def plays(self, starts, sampling, rng):
    if looking and where == "validation":
        os.kill(os.getpid(), signal.SIGTERM)
    return play(self, starts, sampling, rng)

def steps(self, state):
    if state.step == 1 and where == "step":
        os.kill(os.getpid(), signal.SIGTERM)
    return step(self, state)

def looks(self, parts, held, tracker, label, at):
    global looking
    looking = label == "step 2"
    return look(self, parts, held, tracker, label, at)

GridActor.play, Rlds.step, session_rlds.RldsSession._look = plays, steps, looks
from racelab.cli.main import main
main()
"""


def racelab(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "racelab.cli.main", *words], capture_output=True, text=True, timeout=300
    )


def only_run(root: Path) -> RunFolder:
    (folder,) = [p for p in root.iterdir() if (p / "run.json").exists()]
    return RunFolder.open(folder)


def remembered(run: RunFolder) -> list[tuple[Any, ...]]:
    """Everything in the spool that still counts, clock readings left out."""
    found: list[tuple[Any, ...]] = []
    for record in read_spool(run):
        if record["kind"] == "metrics":
            clocks = ("/time/", "/cpu/", "tokens_per_s")
            values = {k: v for k, v in record["values"].items() if not any(clock in k for clock in clocks)}
            found.append((record["step"], json.dumps(values, sort_keys=True)))
        elif record["kind"] == "rows":
            found.append((record["step"], record["table"], json.dumps(record["rows"], sort_keys=True)))
    return found


def validated(run: RunFolder) -> list[int]:
    """Steps after which the slice was played."""
    return [record["step"] for record in read_spool(run) if record.get("table") == "val_examples"]


def end_state(run: RunFolder) -> tuple[bytes, dict[str, Any]]:
    newest = max((run.path / "checkpoints").glob("step-*"))
    state = json.loads((newest / "state.json").read_text())
    return (newest / "tensors.safetensors").read_bytes(), {
        k: state[k] for k in ("method", "backend", "rng", "stream")
    }


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["rlds", pytest.param("base-reflection", marks=pytest.mark.slow)])
def test_killed_in_a_retry_it_ends_with_the_same_weights(tmp_path: Path, condition: str) -> None:
    words = [*WORDS, f"condition={condition}"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = racelab("train", *words, f"run.root={whole}")
    assert done.returncode == 0, done.stderr
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_RETRY, "train", *words, f"run.root={cut}"],
        capture_output=True, text=True, timeout=300, env=os.environ,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run = only_run(cut)
    assert run.status() == "stale"
    resumed = racelab("train", "--resume", str(run.path))
    assert resumed.returncode == 0, resumed.stderr
    assert len(run.attempts()) == 2
    assert end_state(run) == end_state(only_run(whole))
    assert remembered(run) == remembered(only_run(whole))


@pytest.mark.slow
def test_stopped_before_its_validation_it_takes_it_when_it_goes_on(tmp_path: Path) -> None:
    def wrapped(where: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", STOPPED, where, "train", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)

    words = [*WORDS, "run.updates=3"]
    done = wrapped("never", *words, f"run.root={tmp_path / 'whole'}")
    assert done.returncode == 0, done.stderr
    whole = only_run(tmp_path / "whole")
    stopped = wrapped("step", *words, f"run.root={tmp_path / 'cut'}")
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    run = only_run(tmp_path / "cut")
    assert validated(run) == [0]
    stopped = wrapped("validation", "--resume", str(run.path))  # first of all the one that is owed
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert validated(run) == [0]
    resumed = wrapped("never", "--resume", str(run.path))
    assert resumed.returncode == 0, resumed.stderr
    assert validated(run) == [0, 2, 3]
    assert end_state(run) == end_state(whole)
    assert remembered(run) == remembered(whole)


@pytest.mark.slow
def test_other_data_is_not_gone_on_with(tmp_path: Path) -> None:
    boards = tmp_path / "boards.jsonl"
    rows = [{"rows": ["SF", "FG"], "split": "validation"}, {"rows": ["SG", "FF"], "split": "validation"}]
    boards.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        *WORDS,
        f"task.boards={boards}",
        "task.validation_examples=2",
        "task.sizes=[2,4]",
        f"run.root={tmp_path / 'runs'}",
    ]
    done = racelab("train", *words, "run.updates=1")
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "runs")
    info = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps({**info, "status": "interrupted"}))
    boards.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    refused = racelab("train", "--resume", str(run.path))
    assert refused.returncode != 0
    assert "other examples" in refused.stderr
