"""`racelab cancel` and `racelab resume` through the command line, on runs that the commands made."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from racelab.configs.compose import compose
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.slurm.folder import LaunchFolder, intent

from ..sweeps.slurm.fake_slurm import FakeSlurm
from ..sweeps.slurm.hooks import hook, submitted
from .conftest import Result
from .launched_runs import STARTED, SWEEP, TINY, TRAIN, launches, runs

Call = Callable[..., Result]


@pytest.fixture
def slurm(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm.install(home / "slurm", monkeypatch)


def newest(home: Path) -> LaunchFolder:
    return launches(home)[-1]


def job_of(folder: LaunchFolder, batch: str = "cells") -> str:
    return folder.newest()[batch].job_id


@pytest.fixture
def run(slurm: FakeSlurm, call: Call, home: Path) -> RunFolder:
    """One run whose job waits."""
    assert call(*TRAIN).code == 0
    (found,) = runs(home)
    return found


@pytest.fixture
def cells(slurm: FakeSlurm, call: Call, home: Path) -> list[RunFolder]:
    """Three cells whose array waits."""
    assert call(*SWEEP).code == 0
    return runs(home)


@pytest.fixture
def graph(slurm: FakeSlurm, call: Call, home: Path) -> LaunchFolder:
    """train <- look (ok) <- report (any)."""
    (home / "g.yaml").write_text(
        "name: g\nbase: [task=frozenlake, launcher=slurm, tracking=none]\nstages:\n  train: {command: train}\n"
        "  look: {command: 'show {train}', after: [train]}\n  report: {command: runs, after_any: [look]}\n"
    )
    assert call("launch", "g.yaml").code == 0
    return newest(home)


def held(run: RunFolder) -> Any:
    """A process works on the run, by hand."""
    lock = run.lock()
    run.begin_attempt()
    return lock


# --- cancel -------------------------------------------------------------------------------------------------


def test_cancelling_a_sweep_says_what_went_and_how_to_go_on(
    slurm: FakeSlurm, call: Call, home: Path, cells: list[RunFolder]
) -> None:
    (sweep,) = runs(home, "sweep")
    job = job_of(newest(home))
    done = call("cancel", sweep.run_id)
    assert done.code == 0, done.err
    head, *rows = (line.split() for line in done.out.splitlines())
    assert head == ["run", "job", "was"]
    assert rows == [[cell.run_id, f"{job}_{i}", "pending"] for i, cell in enumerate(cells)]
    assert done.err == f"3 jobs cancelled; go on with: racelab resume {sweep.run_id}\n"
    assert [cell.status() for cell in cells] == ["interrupted"] * 3
    again = call("cancel", sweep.run_id)
    assert (again.code, again.out) == (0, "")
    assert again.err == f"nothing of {sweep.run_id} is running or waiting\n"
    assert (call("cancel", sweep.run_id, "--json").json()) == []
    assert slurm.calls("scancel") == [[job]]


def test_cancelling_one_cell_under_json(
    slurm: FakeSlurm, call: Call, home: Path, cells: list[RunFolder]
) -> None:
    job = job_of(newest(home))
    done = call("cancel", cells[1].run_id, "--json")
    assert done.json() == [{"run_id": cells[1].run_id, "title": "frozenlake-rlvr-s1", "job_id": f"{job}_1"}]
    assert slurm.calls("scancel") == [[f"{job}_1"]]
    assert [cell.status() for cell in cells] == ["queued", "interrupted", "queued"]


def test_of_a_graph_what_waits_goes_only_if_it_is_asked_for(
    slurm: FakeSlurm, call: Call, graph: LaunchFolder
) -> None:
    look, report = job_of(graph, "look"), job_of(graph, "report")
    assert [row["job_id"] for row in call("cancel", f"{graph.uid}:look", "--json").json()] == [look]
    (row,) = call("cancel", f"{graph.uid}:look", "--downstream", "--json").json()
    assert row == {"run_id": None, "title": "report", "job_id": report}
    missing = call("cancel", f"{graph.uid}:lok")
    assert (missing.code, missing.out) == (2, "")
    assert f"launch {graph.uid} has no stage 'lok'; did you mean look?" in missing.err


def test_what_runs_here_is_stopped_here(slurm: FakeSlurm, call: Call, home: Path) -> None:
    """Exit code 2, with the command; and for one that nobody works on too."""
    assert call(*TRAIN).code == 0
    (run,) = runs(home)
    run.update(launch=None)
    slurm.set(*slurm.jobs(), state="CANCELLED")
    with held(run):
        done = call("cancel", run.run_id)
        assert done.code == 2
        assert f"error: no job has {run.run_id}: pid " in done.err
        assert "stop it there with `kill " in done.err
        assert run.status() == "running"
    idle = call("cancel", run.run_id)
    assert idle.code == 2
    assert "nobody works on it; there is nothing to cancel" in idle.err
    assert slurm.calls("scancel") == []


@pytest.mark.parametrize("by", ["run", "launch"])
def test_the_job_of_a_run_that_was_taken_by_hand_can_be_cancelled(
    slurm: FakeSlurm, call: Call, home: Path, run: RunFolder, by: str
) -> None:
    job = job_of(newest(home), "train")
    with run.lock() as lock, lock.by_hand():
        run.begin_attempt()
        done = call("cancel", run.run_id if by == "run" else newest(home).uid, "--json")
        assert done.code == 0, done.err
        assert [row["job_id"] for row in done.json()] == [job]
        assert slurm.calls("scancel") == [[job]]
        assert run.status() == "running"
        assert ("stop it there with `kill " in done.err) == (by == "run")


def test_how_to_go_on_names_the_folder_that_was_named(slurm: FakeSlurm, call: Call, home: Path) -> None:
    assert call(*TRAIN, "run.root=other place").code == 0
    (run,) = (home / "other place").glob("*/run.json")
    name = run.parent.name
    done = call("cancel", name, "--root", "other place")
    assert done.err == f"1 job cancelled; go on with: racelab resume {name} --root 'other place'\n"


# --- resume -------------------------------------------------------------------------------------------------


def test_a_run_goes_on_as_a_new_job_with_a_changed_allocation_and_its_own_config(
    slurm: FakeSlurm, call: Call, home: Path, run: RunFolder
) -> None:
    """By its id, and by its launch's: only the script changes, and only in what was named."""
    first = newest(home)
    config = (run.path / "config" / "composed.yaml").read_bytes()
    slurm.set(job_of(first, "train"), state="TIMEOUT", **STARTED)
    done = call("resume", run.run_id, "launcher.time_min=5", "--json")
    assert done.code == 0, done.err
    second = newest(home)
    assert done.json() == {
        "launch": second.uid, "sweep": None, "path": str(second.path),
        "jobs": [{
            "run_id": run.run_id, "title": run.info()["name"], "batch": "train", "job_id": job_of(second, "train"),
        }],
    }  # fmt: skip
    old, new = first.launch(), second.launch()
    changed = old.batches[0].launcher.model_copy(update={"time_min": 5})
    assert new.batches[0].launcher == changed
    assert new.command == f"racelab resume {run.run_id} launcher.time_min=5"
    assert "#SBATCH --time=5\n" in second.script("train", 1).read_text()
    assert run.info()["launch"] == {"uid": second.uid, "batch": "train", "index": 0, "number": 1}
    assert run.status() == "queued"
    assert (run.path / "config" / "composed.yaml").read_bytes() == config

    live = call("resume", second.uid)
    assert live.code == 0
    assert f"1 job is live already: {job_of(second, 'train')}" in live.err
    assert live.err.endswith(f"nothing to resume of {second.uid}\n")
    nothing = call("resume", second.uid, "--json").json()
    assert nothing == {"launch": None, "sweep": None, "path": None, "jobs": []}
    assert call("resume", first.uid).err == f"nothing to resume of {first.uid}\n"  # the run has left it
    slurm.set(job_of(second, "train"), state="OUT_OF_MEMORY", **STARTED)
    by_launch = call("resume", second.uid[:-2], "launcher=slurm-gpu", "launcher.qos=long")
    assert by_launch.code == 0, by_launch.err
    asked = newest(home).launch().batches[0].launcher
    assert (asked.gpus_per_node, asked.nodes, asked.time_min, asked.qos) == (1, 1, 1440, "long")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run.seed=3",), "run.seed=3: a run goes on with the config that it started with"),
        (("launcher.tim_min=3",), "did you mean launcher.time_min?"),
        (("launcher.time_min=1",), "signal_delay_s=120 is not below the limit"),
        (("launcher.gpus_per_node=8",), "launcher.gpus_per_node=8, but the local backend trains on one device"),
        (("launcher.partition=nope",), "invalid partition specified: nope"),
        (("launcher=inline",), "racelab train --resume RUN"),
    ],
)  # fmt: skip
def test_words_that_cannot_be_are_refused_and_nothing_is_changed(
    slurm: FakeSlurm, call: Call, home: Path, run: RunFolder, words: tuple[str, ...], said: str
) -> None:
    slurm.set(job_of(newest(home), "train"), state="TIMEOUT", **STARTED)
    before = run.info()
    done = call("resume", run.run_id, *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert run.info() == before
    assert (len(launches(home)), submitted(slurm)) == (1, 1)


def test_what_is_checked_together_is_checked_with_what_the_run_has(
    slurm: FakeSlurm, call: Call, home: Path
) -> None:
    """With a signal 30 s before the limit one minute is enough; with one 600 s before it ten are not."""
    for words, limit, code in (
        (("launcher.signal_delay_s=30",), 1, 0),
        (("launcher.signal_delay_s=600",), 10, 2),
    ):
        assert call(*TRAIN, *words).code == 0
        folder = newest(home)
        slurm.set(job_of(folder, "train"), state="TIMEOUT", **STARTED)
        done = call("resume", folder.uid, f"launcher.time_min={limit}")
        assert done.code == code, done.err
    assert "signal_delay_s=600 is not below the limit of time_min=10 min" in done.err


@pytest.mark.slow
def test_nodes_and_gpus_that_a_preset_leaves_open_stay_those_of_the_run(
    slurm: FakeSlurm, call: Call, home: Path
) -> None:
    """A run of two nodes with eight GPUs each: the preset slurm names neither, slurm-gpu wants one GPU."""
    run = inline_run(home, call, slurm)
    verl = compose(["task=frozenlake", "backend=verl", "tracking=none"])  # no command takes it yet
    (run.path / "config" / "composed.yaml").write_text(verl.yaml)
    refused = call("resume", run.run_id, "launcher=slurm-gpu")
    assert refused.code == 2
    assert "launcher.gpus_per_node=1, but the run uses 8 of each node" in refused.err
    done = call("resume", run.run_id, "launcher=slurm", "launcher.nodes=2", "launcher.time_min=60")
    assert done.code == 0, done.err
    slurm.set(job_of(newest(home), "train"), state="TIMEOUT", **STARTED)
    assert call("resume", run.run_id, "launcher=slurm").code == 0
    first, second = (folder.launch().batches[0].launcher for folder in launches(home)[-2:])
    assert (first.nodes, first.gpus_per_node, first.time_min) == (2, 8, 60)
    assert (second.nodes, second.gpus_per_node, second.time_min) == (2, 8, 240)


def test_of_a_sweep_what_neither_lives_nor_has_finished_goes_on(
    slurm: FakeSlurm, call: Call, home: Path, cells: list[RunFolder]
) -> None:
    """One runs, one has failed, one was taken by hand and left."""
    (sweep,) = runs(home, "sweep")
    job = job_of(newest(home))
    slurm.set(f"{job}_0", state="RUNNING", **STARTED)
    slurm.set(f"{job}_1", state="FAILED", exit="1:0", **STARTED)
    with cells[2].lock() as lock, lock.by_hand():
        cells[2].begin_attempt()
        cells[2].update(status="interrupted")
    done = call("resume", sweep.run_id, "--json")
    assert done.code == 0, done.err
    found = done.json()
    assert [row["run_id"] for row in found["jobs"]] == [cells[1].run_id]
    assert found["sweep"] == sweep.run_id
    assert f"1 job is live already: {job}_0" in done.err
    assert (
        f"{cells[2].run_id} is interrupted, and no launch has it; go on with: racelab resume {cells[2].run_id}\n"
        in done.err
    )
    assert newest(home).launch().sweep == sweep.run_id
    for cell in cells:
        cell.update(status="finished")
    ended = call("resume", sweep.run_id)
    assert (ended.code, ended.err.splitlines()) == (
        0, ["2 jobs finished before", f"nothing to resume of {sweep.run_id}"],
    )  # fmt: skip


def test_a_stage_goes_on_only_if_what_it_needs_has_ended_well(
    slurm: FakeSlurm, call: Call, home: Path, graph: LaunchFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """train fails, so look never runs. The whole launch goes on in its order; look alone once train has finished."""
    (run,) = runs(home)
    slurm.set(job_of(graph, "train"), state="FAILED", exit="1:0", **STARTED)
    slurm.set(job_of(graph, "look"), state="CANCELLED", reason="DependencyNeverSatisfied")
    slurm.set(job_of(graph, "report"), state="COMPLETED", **STARTED)
    refused = call("resume", f"{graph.uid}:look")
    assert refused.code == 2
    assert "error: stage look waits for " in refused.err
    assert refused.err.endswith(f", which is failed; resume the whole launch: racelab resume {graph.uid}\n")
    whole = call("resume", graph.uid, "--json")
    assert [row["batch"] for row in whole.json()["jobs"]] == ["train", "look"]
    again = newest(home)
    train = job_of(again, "train")
    assert f"#SBATCH --dependency=afterok:{train}\n" in again.script("look", 1).read_text()

    slurm.set(train, state="COMPLETED", **STARTED)
    run.update(status="finished")
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    slurm.set(job_of(again, "look"), state="CANCELLED", **STARTED)
    alone = call("resume", f"{again.uid}:look")
    assert alone.code == 0, alone.err
    assert "--dependency" not in newest(home).script("look", 1).read_text()
    assert newest(home).launch().cwd == str(home)  # where the graph was typed


def test_refused_submissions_go_on_when_that_is_mended(
    slurm: FakeSlurm, call: Call, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm would take the script, as it says, and does not when it counts."""
    no = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    hook(slurm, "sbatch", monkeypatch, before=f"echo '{no}' >&2; exit 1")
    refused = call(*TRAIN)
    folder = newest(home)
    (run,) = runs(home)
    assert (refused.code, refused.out) == (2, "")
    assert "Invalid account or account/partition combination specified" in refused.err
    assert refused.err.endswith(f"; when that is mended: racelab resume {folder.uid}\n")
    (status,) = call("jobs", "--json").json()
    assert (status["state"], run.status()) == ("refused", "failed")
    hook(slurm, "sbatch", monkeypatch)
    done = call("resume", folder.uid, "launcher.account=mine")
    assert done.code == 0, done.err
    assert "#SBATCH --account=mine\n" in newest(home).script("train", 1).read_text()
    assert run.info()["launch"]["uid"] == newest(home).uid
    assert run.status() == "queued"


def test_a_change_mends_what_slurm_refuses_when_the_dead_submitters_work_is_finished(
    slurm: FakeSlurm, call: Call, home: Path, run: RunFolder
) -> None:
    """Its partition is gone: the old script is refused, said so, and the new one is taken."""
    folder = newest(home)
    launch = (folder.path / "launch.json").read_text()
    (folder.path / "launch.json").write_text(launch.replace('"partition": null', '"partition": "gone"'))
    slurm.set(*slurm.jobs(), queue=False, record=False)
    folder.record(intent(folder.launch().batches[0], 1))
    done = call("resume", folder.uid, "launcher.partition=gpu")
    assert done.code == 0, done.err
    assert "warning: sbatch refuses " in done.err
    assert newest(home).launch().batches[0].launcher.partition == "gpu"
    assert slurm.job(job_of(newest(home), "train"))["partition"] == "gpu"


def test_what_a_container_has_besides_its_new_image_stays(slurm: FakeSlurm, call: Call, home: Path) -> None:
    words = ("kind=apptainer", "image=old one.sif", "mounts=[/data:/data,/home:/h o m e]")
    assert call(*TRAIN, *(f"launcher.container.{word}" for word in words)).code == 0
    slurm.set(*slurm.jobs(), state="TIMEOUT", **STARTED)
    old = newest(home).launch().batches[0].launcher.container
    assert old.mounts == ("/data:/data", "/home:/h o m e")
    done = call("resume", newest(home).uid, "launcher.container.image=new.sif")
    assert done.code == 0, done.err
    new = newest(home).launch().batches[0].launcher.container
    assert new == old.model_copy(update={"image": "new.sif"})
    slurm.set(*slurm.jobs(), state="TIMEOUT", **STARTED)
    bare = call("resume", newest(home).uid, "launcher.container.kind=none")
    assert bare.code == 0, bare.err
    assert newest(home).launch().batches[0].launcher.container.kind == "none"


def test_a_run_that_was_removed_is_left_out(
    slurm: FakeSlurm, call: Call, home: Path, cells: list[RunFolder]
) -> None:
    slurm.set(*slurm.jobs(), state="TIMEOUT", **STARTED)
    shutil.rmtree(cells[1].path)
    done = call("resume", newest(home).uid, "--json")
    assert done.code == 0, done.err
    assert f"the folder of {cells[1].run_id} is gone; it is left out\n" in done.err
    assert [row["run_id"] for row in done.json()["jobs"]] == [cells[0].run_id, cells[2].run_id]


def test_what_another_user_has_not_submitted_yet_is_left_to_that_user(
    slurm: FakeSlurm, call: Call, home: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = newest(home)
    slurm.set(*slurm.jobs(), queue=False, record=False)
    folder.record(intent(folder.launch().batches[0], 1))
    before = submitted(slurm)
    uid = folder.path.stat().st_uid
    monkeypatch.setattr("os.getuid", lambda: uid + 1)
    done = call("resume", folder.uid)
    assert done.code == 0, done.err
    said = f"launch {folder.uid} is {folder.owner()}'s; its owner's `racelab jobs` submits it\n"
    assert said in done.err
    assert done.err.endswith(f"nothing to resume of {folder.uid}\n")
    assert (submitted(slurm), folder.is_settled()) == (before, False)


# --- here and there -----------------------------------------------------------------------------------------


def inline_run(home: Path, call: Call, slurm: FakeSlurm, *words: str) -> RunFolder:
    """A run that was started here and has been interrupted."""
    assert call(*TRAIN, *words).code == 0
    (run,) = runs(home)
    file = run.path / "config" / "composed.yaml"
    config = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**config, "launcher": {"name": "inline"}}))
    run.update(status="interrupted", launch=None)
    slurm.forget_calls()
    return run


def test_a_run_that_was_started_here_goes_on_as_a_job_if_it_is_asked_to(
    slurm: FakeSlurm, call: Call, home: Path
) -> None:
    run = inline_run(home, call, slurm)
    config = (run.path / "config" / "composed.yaml").read_bytes()
    with held(run):
        used = call("resume", run.run_id, "launcher=slurm")
        assert used.code == 2
        assert f"run {run.run_id} is in use by pid" in used.err
    idle = call("resume", run.run_id, "launcher.time_min=30")
    assert idle.code == 2
    assert "launcher.time_min=30 is for jobs; add launcher=slurm, or leave it out" in idle.err
    wide = call("resume", run.run_id, "launcher=slurm", "launcher.nodes=2")
    assert wide.code == 2
    assert f"{run.run_id}: launcher.nodes=2, but the run uses 1" in wide.err
    assert submitted(slurm) == 0
    done = call("resume", run.run_id, "launcher=slurm", "launcher.time_min=30")
    assert done.code == 0, done.err
    launch = newest(home).launch()
    asked = launch.batches[0].launcher
    assert (asked.time_min, asked.nodes, asked.gpus_per_node) == (30, 1, 0)
    assert run.info()["launch"] == {"uid": launch.uid, "batch": "train", "index": 0, "number": 1}
    assert run.status() == "queued"
    assert (run.path / "config" / "composed.yaml").read_bytes() == config
    run.update(status="finished", launch=None)
    ended = call("resume", run.run_id, "launcher=slurm", "--json")
    assert ended.json() == {"launch": None, "sweep": None, "path": None, "jobs": []}


@pytest.mark.slow
def test_what_was_started_here_goes_on_here(slurm: FakeSlurm, call: Call, command: Call, home: Path) -> None:
    """It trains to its end; then there is nothing left to do."""
    run = inline_run(home, call, slurm, "condition=rlvr", *TINY)
    trained = command("resume", run.run_id, "--json")
    assert trained.code == 0, trained.err
    assert (trained.json()["run_id"], trained.json()["status"]) == (run.run_id, "finished")
    assert run.status() == "finished"
    for words in ((), ("launcher=inline",)):
        done = call("resume", run.run_id, *words)
        assert done.code == 0, done.err
        assert f"run {run.run_id} has finished" in done.err
    assert slurm.calls() == []


def test_a_sweep_that_was_started_here_goes_on_with_its_own_command(
    slurm: FakeSlurm, call: Call, home: Path, cells: list[RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    (sweep,) = runs(home, "sweep")
    slurm.set(*slurm.jobs(), state="CANCELLED", **STARTED)
    for cell in cells:
        cell.update(status="finished", launch=None)
    sweep.update(command=str(sweep.info()["command"]).replace("launcher=slurm", "launcher=inline"))
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    there = call("resume", sweep.run_id, "launcher=slurm")
    assert there.code == 2
    assert f"{sweep.info()['command']} launcher=slurm" in there.err
    done = call("resume", sweep.run_id, "--json")
    assert done.code == 0, done.err
    assert f"going on with: {sweep.info()['command']}\n" in done.err
    assert [cell["skipped"] for cell in done.json()["cells"]] == [True] * 3
    assert Path.cwd() == home
