"""`launcher=slurm` through the command line: what is submitted, once, and what only looks as if."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from racelab.cli.launching import print_submitted
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.run import members
from racelab.sweeps.slurm.model import Submission

from ..sweeps.slurm.fake_slurm import FakeSlurm
from ..sweeps.slurm.hooks import submitted
from .conftest import Result
from .launched_runs import SWEEP, TRAIN, launches, runs

Call = Callable[..., Result]


@pytest.fixture
def slurm(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm.install(home / "slurm", monkeypatch)


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No tool of Slurm is on the path."""
    (tmp_path / "bin").mkdir()
    git = shutil.which("git")
    assert git is not None
    (tmp_path / "bin" / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def grid(home: Path, text: str) -> str:
    (home / "grid.yaml").write_text(text)
    return str(home / "grid.yaml")


def two_sizes(home: Path) -> str:
    return grid(
        home,
        "name: sizes\nbase: [task=frozenlake, launcher=slurm, tracking=none]\ninclude:\n"
        "  - {label: a, overrides: [run.seed=0]}\n  - {label: b, overrides: [run.seed=1, launcher.time_min=30]}\n"
        "  - {label: c, overrides: [run.seed=2]}\n",
    )


# --- sweeps -------------------------------------------------------------------------------------------------


def test_a_sweep_is_one_array_and_what_has_a_job_or_an_end_is_not_submitted_again(
    slurm: FakeSlurm, call: Call, home: Path
) -> None:
    done = call(*SWEEP, "--json")
    assert done.code == 0, done.err
    found = done.json()
    (folder,) = launches(home)
    (sweep,) = runs(home, "sweep")
    job = folder.newest()["cells"].job_id
    first, second, third = (str(member["run_id"]) for member in members(sweep))
    assert found == {
        "launch": folder.uid,
        "sweep": sweep.run_id,
        "path": str(folder.path),
        "jobs": [
            {
                "run_id": run_id,
                "title": f"frozenlake-rlvr-s{i}",
                "batch": "cells",
                "job_id": f"{job}_{i}",
            }
            for i, run_id in enumerate((first, second, third))
        ],
    }
    assert done.err.splitlines()[-2:] == [
        f"3 jobs submitted as launch {folder.uid}",
        f"watch: racelab jobs {sweep.run_id} --watch   output: racelab logs RUN -f   stop: racelab cancel "
        f"{sweep.run_id}",
    ]
    for index, run in enumerate(runs(home)):
        info = run.info()
        assert (info["status"], info["sweep"]) == ("queued", sweep.run_id)
        assert info["launch"] == {"uid": folder.uid, "batch": "cells", "index": index, "number": 1}
    launch = folder.launch()
    assert (launch.sweep, launch.cwd, launch.depth) == (sweep.run_id, str(home), 0)
    assert launch.command == (
        "racelab task --name frozenlake --condition rlvr --seeds 0,1,2 launcher=slurm tracking=none"
    )
    assert sweep.status() == "queued"

    again = call(*SWEEP)
    assert again.code == 0
    assert f"3 cells of {sweep.run_id} have a job already" in again.err
    assert f"nothing to submit; `racelab show {sweep.run_id}` shows the sweep" in again.err
    none: dict[str, object] = {"launch": None, "sweep": sweep.run_id, "path": None, "jobs": []}
    assert call(*SWEEP, "--json").json() == none
    assert submitted(slurm) == 1

    older = {"version": "0.1", "sha": "0" * 40, "diff": None}
    RunFolder.open(home / "runs" / first).update(status="finished", code=older)
    slurm.set(f"{job}_0", state="COMPLETED", nodes="node1")
    slurm.set(f"{job}_1", state="RUNNING", nodes="node1", start="2026-11-30T08:00:00")
    slurm.set(f"{job}_2", state="FAILED", exit="1:0", nodes="node1", start="2026-11-30T08:00:00")
    third_only = call(*SWEEP, "--json")
    assert [row["run_id"] for row in third_only.json()["jobs"]] == [third]
    assert f"1 cell of {sweep.run_id} has a job already" in third_only.err
    assert f"1 cell of {sweep.run_id} has finished" in third_only.err
    assert "1 finished cell was made by other code than " in third_only.err
    assert submitted(slurm) == 2
    assert len(launches(home)) == 2

    for run in runs(home):
        run.update(status="finished")
    assert call(*SWEEP).code == 0
    assert submitted(slurm) == 2
    dry = call(*SWEEP, "--dry-run", "--json")
    assert (dry.code, dry.json()) == (
        0,
        {"jobs": 0, "gpus": 0, "node_hours": 0, "gpu_hours": 0, "batches": []},
    )
    assert f"all 3 cells of {sweep.run_id} have finished" in dry.err

    fresh = call(*SWEEP, "--fresh", "--json").json()
    assert fresh["sweep"] == f"{sweep.run_id}-2"
    assert [row["run_id"] for row in fresh["jobs"]] == [f"{run_id}-2" for run_id in (first, second, third)]


def test_seeds_of_one_run_are_a_sweep(slurm: FakeSlurm, call: Call, home: Path) -> None:
    done = call(
        "train",
        "--seeds",
        "3,4",
        "task=frozenlake",
        "launcher=slurm",
        "tracking=none",
        "launcher.max_parallel=1",
    )
    assert done.code == 0, done.err
    (folder,) = launches(home)
    script = folder.script("cells", 1).read_text()
    assert "#SBATCH --array=0-1%1\n" in script
    assert [run.info()["seed"] for run in runs(home)] == [3, 4]
    lines = done.out.splitlines()
    assert lines[0].split() == ["run", "job"]
    assert [line.split() for line in lines[1:]] == [
        [run.run_id, f"{folder.newest()['cells'].job_id}_{index}"] for index, run in enumerate(runs(home))
    ]


def test_cells_of_different_allocations_are_submitted_apart(slurm: FakeSlurm, call: Call, home: Path) -> None:
    done = call("sweep", two_sizes(home))
    assert done.code == 0, done.err
    (folder,) = launches(home)
    batches = folder.launch().batches
    assert [(b.name, [t.title for t in b.tasks], b.launcher.time_min) for b in batches] == [
        ("cells", ["a-s0", "c-s2"], 240),
        ("cells.2", ["b-s1"], 30),
    ]
    assert submitted(slurm) == 2
    assert folder.is_settled()


def test_arrays_are_split_at_the_clusters_limit_and_share_the_parallelism(
    slurm: FakeSlurm, call: Call, home: Path
) -> None:
    """MaxArraySize 2 allows indices 0 and 1: three cells make two arrays, of 2 and 1; three at once are 2 and 1."""
    slurm.setting(config={"MaxArraySize": "2"})
    assert call(*SWEEP, "launcher.max_parallel=3").code == 0
    (folder,) = launches(home)
    batches = folder.launch().batches
    assert [(b.name, len(b.tasks), b.launcher.max_parallel) for b in batches] == [
        ("cells", 2, 2),
        ("cells-2", 1, 1),
    ]
    one, two = (folder.newest()[batch.name].job_id for batch in batches)
    assert sorted(slurm.jobs()) == sorted([f"{one}_0", f"{one}_1", two])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--jobs", "2"),
            "--jobs is for runs on this machine; with launcher=slurm set launcher.max_parallel",
        ),
        (("--resume",), "no cell of the sweep task has been started"),
        (("--resume", "--fresh"), "--resume goes on and --fresh starts anew"),
        (("launcher.partition=nope",), "invalid partition specified: nope"),
        (("launcher.time_min=1",), "signal_delay_s=120 is not below the limit"),
    ],
)
def test_what_cannot_be_submitted_is_refused_and_nothing_is_made(
    slurm: FakeSlurm, call: Call, home: Path, words: tuple[str, ...], said: str
) -> None:
    done = call(*SWEEP, *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert not (home / "runs").exists()
    assert submitted(slurm) == 0


def test_cells_here_beside_cells_on_the_cluster_are_refused(slurm: FakeSlurm, call: Call, home: Path) -> None:
    file = grid(
        home,
        "name: mixed\nbase: [task=frozenlake, tracking=none]\ninclude:\n"
        "  - {label: a, overrides: [launcher=slurm, run.seed=0]}\n  - {label: b, overrides: [run.seed=1]}\n",
    )
    for words in ((), ("--dry-run",)):
        done = call("sweep", file, *words)
        assert (done.code, done.err) == (
            2,
            "error: cell b has launcher=inline beside cells with launcher=slurm; give all of them the same\n",
        )
    assert not (home / "runs").exists()


# --- one run ------------------------------------------------------------------------------------------------


def test_one_run_is_one_job(slurm: FakeSlurm, call: Call, home: Path) -> None:
    done = call(*TRAIN, "run.name=mine", "--json")
    assert done.code == 0, done.err
    (run,) = runs(home)
    (folder,) = launches(home)
    job = folder.newest()["train"].job_id
    assert done.json()["jobs"] == [{"run_id": run.run_id, "title": "mine", "batch": "train", "job_id": job}]
    assert done.json()["sweep"] is None
    assert run.info()["launch"] == {"uid": folder.uid, "batch": "train", "index": 0, "number": 1}
    assert slurm.job(job)["name"] == f"mine.{folder.uid}.train.1"
    assert done.err.splitlines()[-1] == (
        f"watch: racelab jobs {run.run_id} --watch   output: racelab logs {run.run_id} -f   stop: racelab cancel "
        f"{run.run_id}"
    )


def test_a_run_elsewhere_is_named_as_it_can_be_typed(slurm: FakeSlurm, call: Call, home: Path) -> None:
    done = call(*TRAIN, f"run.root={home}/my runs")
    assert done.code == 0, done.err
    typed = re.search(r"racelab jobs '(.*)' --watch", done.err)
    assert typed is not None
    (status,) = call("jobs", typed[1], "--json").json()
    assert status["state"] == "pending"


def test_a_run_that_slurm_refuses_leaves_nothing(slurm: FakeSlurm, call: Call, home: Path) -> None:
    for words, said in (
        ((), "Slurm does not answer"),
        (("launcher.gpus_per_node=1", "launcher.nodelist=node1", "launcher.mem_gb=900"), "mem_gb"),
    ):
        slurm.setting(unreachable=not words)
        done = call(*TRAIN, *words)
        assert done.code == (2 if words else 4), done.err
        assert said in done.err or not words
        assert not (home / "runs").exists()


# --- dry runs -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_slurm")
def test_a_dry_run_needs_no_slurm_and_writes_nothing(call: Call, home: Path) -> None:
    """3 x 90 min = 4.5 node hours; one run of 4 h with a GPU."""
    sweep = call(*SWEEP, "--dry-run", "launcher.time_min=90")
    assert sweep.code == 0, sweep.err
    assert sweep.out.startswith("# ----- cells.sh\n#!/bin/bash\n")
    assert "#SBATCH --array=0-2%3\n" in sweep.out
    assert sweep.err.splitlines()[-2:] == [
        "cells: 3 jobs of 1 node, 90 min at most",
        "3 jobs in 1 submission, 0 GPUs in all, at most 4.5 node hours and 0 GPU hours (each job up to its limit, "
        "once); nothing was submitted",
    ]
    assert sweep.out.splitlines()[-2:] == [f"# {line}" for line in sweep.err.splitlines()[-2:]]
    found = call(*SWEEP, "--dry-run", "launcher.time_min=90", "--json").json()
    (batch,) = found.pop("batches")
    assert found == {"jobs": 3, "gpus": 0, "node_hours": 4.5, "gpu_hours": 0.0}
    assert (batch["name"], batch["nodes"], batch["gpus_per_node"], batch["after"]) == ("cells", 1, 0, [])
    assert [re.sub("-[0-9a-f]{10}$", "", run) for run in batch["tasks"]] == [
        f"frozenlake-rlvr-s{seed}" for seed in range(3)
    ]

    train = call(*TRAIN, "--dry-run", "launcher.gpus_per_node=1", "--json")
    assert train.code == 0, train.err
    assert train.json() | {"batches": []} == {
        "jobs": 1, "gpus": 1, "node_hours": 4.0, "gpu_hours": 4.0, "batches": [],
    }  # fmt: skip
    assert "backend=local nodes=1 gpus=1 launcher=slurm" in train.err
    assert not (home / "runs").exists()


def test_the_script_of_a_dry_run_is_the_one_that_is_submitted(
    slurm: FakeSlurm, call: Call, home: Path
) -> None:
    """But for the launch's id, which is made from the time."""
    (dry,) = call(*SWEEP, "--dry-run", "--json").json()["batches"]
    assert slurm.calls() == []
    assert call(*SWEEP).code == 0
    (folder,) = launches(home)
    uid = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
    assert uid.sub("UID", dry["script"]) == uid.sub("UID", folder.script("cells", 1).read_text())


# --- what is left -------------------------------------------------------------------------------------------


def test_the_same_command_submits_what_its_dead_submitter_left(
    slurm: FakeSlurm, call: Call, home: Path
) -> None:
    """Nothing was submitted; then there is a job, and no second launch."""
    assert call(*SWEEP).code == 0
    (folder,) = launches(home)
    slurm.set(*slurm.jobs(), queue=False, record=False)
    (folder.path / "submissions.json").write_text("[]")
    done = call(*SWEEP, "--json")
    assert done.code == 0, done.err
    job = folder.newest()["cells"].job_id
    assert f"its submitter had died; submitted now as job {job} (cells)" in done.err
    assert (done.json()["jobs"], len(launches(home)), submitted(slurm)) == ([], 1, 2)


def test_of_a_graph_with_a_sweep_the_whole_launch_is_watched(
    slurm: FakeSlurm, call: Call, home: Path
) -> None:
    (home / "g.yaml").write_text(
        "name: g\nbase: [task=frozenlake, launcher=slurm, tracking=none]\nstages:\n"
        "  both: {command: 'train --seeds 0,1'}\n  look: {command: 'show {both}', after: [both]}\n"
    )
    done = call("launch", "g.yaml", "--json")
    assert done.code == 0, done.err
    (sweep,) = runs(home, "sweep")
    (folder,) = launches(home)
    assert done.json()["sweep"] == sweep.run_id
    assert f"watch: racelab jobs {folder.uid} --watch" in done.err
    (home / "g.yaml").write_text((home / "g.yaml").read_text().partition("  look:")[0])
    nothing: dict[str, object] = {"launch": None, "sweep": sweep.run_id, "path": None, "jobs": []}
    assert call("launch", "g.yaml", "--json").json() == nothing


def test_what_was_cancelled_before_it_was_submitted_has_no_job(
    slurm: FakeSlurm, call: Call, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*SWEEP).code == 0
    (folder,) = launches(home)
    (folder.path / "submissions.json").write_text("[]")
    folder.record(Submission("cells", 1, error="cancelled before it was submitted"))
    print_submitted(folder, "", json_output=True)
    captured = capsys.readouterr()
    assert [row["job_id"] for row in json.loads(captured.out)["jobs"]] == [None] * 3
    assert f"0 jobs submitted as launch {folder.uid}" in captured.err
