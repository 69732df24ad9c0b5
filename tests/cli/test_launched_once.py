"""No run gets two jobs that may work: submitters that die at the worst moment, and people who go on by hand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..sweeps.slurm.fake_slurm import FakeSlurm
from ..sweeps.slurm.hooks import hook, submitted
from .conftest import Result
from .launched_runs import SWEEP, TINY, TRAIN, launches, runs

Call = Callable[..., Result]


@pytest.fixture
def slurm(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm.install(home / "slurm", monkeypatch)


# --- a submitter that dies ----------------------------------------------------------------------------------


def die(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, when: str, *words: str) -> None:
    """Runs a command line that is killed right before or right after its sbatch; from then on sbatch works."""
    kill = "kill -9 $PPID; while kill -0 $PPID 2>/dev/null; do sleep 0.01; done"
    hook(slurm, "sbatch", monkeypatch, **{when: kill + ("; exit 1" if when == "before" else "")})
    done = subprocess.run(
        [sys.executable, "-m", "racelab.cli.main", *words],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    hook(slurm, "sbatch", monkeypatch)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mend", ["jobs", "resume"])
def test_whenever_the_submitter_dies_every_run_gets_one_job_that_counts(
    slurm: FakeSlurm, call: Call, home: Path, monkeypatch: pytest.MonkeyPatch, when: str, mend: str
) -> None:
    die(slurm, monkeypatch, when, *TRAIN)
    (folder,) = launches(home)
    (run,) = runs(home)
    assert not folder.is_settled()
    assert run.status() == "queued"
    assert len(slurm.jobs()) == (when == "after")
    mended = call(mend, folder.uid)
    assert mended.code == 0, mended.err
    said = "found and adopted (train)" if when == "after" else "submitted now as job"
    assert f"launch {folder.uid}: its submitter had died; " in mended.err
    assert said in mended.err
    newest = folder.newest()["train"]
    assert (newest.number, newest.adopted) == ((1, True) if when == "after" else (2, False))
    assert list(slurm.jobs()) == [newest.job_id]
    assert run.info()["launch"] == {"uid": folder.uid, "batch": "train", "index": 0, "number": newest.number}
    (status,) = call("jobs", "--json").json()
    assert (status["state"], status["job_id"]) == ("pending", newest.job_id)
    assert len(slurm.jobs()) == 1
    assert len(launches(home)) == 1


def test_a_run_whose_submitter_died_before_the_launch_was_written_is_submitted_again(
    slurm: FakeSlurm, call: Call, home: Path
) -> None:
    """Its folder names a launch that is not there; it goes on as the job that its own config asks for."""
    assert call(*TRAIN, "launcher.time_min=30").code == 0
    (folder,) = launches(home)
    (run,) = runs(home)
    shutil.rmtree(folder.path)
    slurm.set(*slurm.jobs(), queue=False, record=False)
    done = call("resume", run.run_id, "launcher.cpus_per_task=4", "--json")
    assert done.code == 0, done.err
    (folder,) = launches(home)
    (batch,) = folder.launch().batches
    assert (batch.launcher.time_min, batch.launcher.cpus_per_task) == (30, 4)
    assert run.info()["launch"]["uid"] == folder.uid


# --- here and there -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_run_here_while_its_job_waits_is_lost_to_the_job(
    slurm: FakeSlurm, call: Call, command: Call, home: Path
) -> None:
    """The same command with launcher=inline: it trains the cell, and the job then finds that it is not its own."""
    words = ("task", "--name", "frozenlake", "--condition", "rlvr", "--seeds", "0", *TINY, "tracking=none")
    assert call(*words, "launcher=slurm").code == 0
    (folder,) = launches(home)
    (run,) = runs(home)
    job = folder.newest()["cells"].job_id
    done = command(*words, "launcher=inline", "--json")
    assert done.code == 0, done.err
    assert [(cell["run_id"], cell["status"]) for cell in done.json()["cells"]] == [(run.run_id, "finished")]
    assert (run.status(), run.info()["launch"]) == ("finished", None)
    (status,) = call("jobs", "--all", "--json").json()
    assert (status["state"], status["live"]) == ("superseded", False)

    run.update(status="interrupted")  # as if somebody had stopped it
    before = (run.path / "run.json").read_bytes()
    entry = [sys.executable, "-m", "racelab.sweeps.slurm.entry", str(folder.path), "cells", "1"]
    of_job = {"SLURM_JOB_ID": job, "SLURM_PROCID": "0", "SLURM_NNODES": "1", "SLURMD_NODENAME": "node1"}
    started = subprocess.run(
        entry, env={**os.environ, **of_job}, capture_output=True, text=True, timeout=60, check=False
    )
    assert started.returncode == 75, started.stderr
    assert f"run {run.run_id} is another task's to work on; nothing to do" in started.stdout
    assert (run.path / "run.json").read_bytes() == before
    end: Any = json.loads((folder.path / "ends" / "cells.0.json").read_text())
    assert end["status"] == "superseded"


def test_a_cell_that_is_run_here_just_now_is_not_submitted(slurm: FakeSlurm, call: Call, home: Path) -> None:
    assert call(*SWEEP).code == 0
    first = runs(home)[0]
    slurm.set(*slurm.jobs(), state="CANCELLED", nodes="node1")
    with first.lock() as lock, lock.by_hand():
        first.begin_attempt()
        done = call(*SWEEP)
        assert done.code == 2
        assert f"run {first.run_id} is in use by pid" in done.err
        assert first.status() == "running"
    assert submitted(slurm) == 1
