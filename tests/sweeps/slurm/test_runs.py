"""From runs to a launch: what of a sweep is still to be submitted, and what tasks that go on have to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from racelab.configs.schema_launcher import SlurmLauncherConfig
from racelab.experiments.errors import ConfigError, RunFolderError
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.cells import Cell, Spec, make_cells, open_cell
from racelab.sweeps.run import Plan, make_plan
from racelab.sweeps.slurm.folder import LaunchFolder, new_uid
from racelab.sweeps.slurm.model import After, Assignment, Submission, Task
from racelab.sweeps.slurm.runs import make_cells as make_folders
from racelab.sweeps.slurm.runs import plan_launch, relaunch, requeue_folder, todo
from racelab.sweeps.slurm.scheduler import Scheduler
from racelab.sweeps.slurm.status import survey
from racelab.sweeps.slurm.submit import assignments, prepare

from .fake_slurm import FakeSlurm
from .hooks import submitted
from .launches import make_batch
from .world import Launched, launched

WORDS = ("task=frozenlake", "tracking=none", "launcher=slurm")
LOOK = Task("command", words=("runs",), title="look")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    return FakeSlurm.install(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs of mine"


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return make_cells([Spec("a", seed, WORDS) for seed in range(3)])


def plan(root: Path, cells: Sequence[Cell]) -> Plan:
    return make_plan("grid", "racelab sweep grid.yaml", root, cells, fresh=False)


# --- what is left of a sweep --------------------------------------------------------------------------------


def test_what_has_finished_or_has_a_job_is_not_submitted_again(
    slurm: FakeSlurm, root: Path, cells: list[Cell]
) -> None:
    """Of three one has finished, one has a job that waits."""
    first = plan(root, cells)
    left = todo(first, Scheduler())
    assert ([run_id for _, run_id in left.cells], left.finished) == (list(first.run_ids), 0)
    made = plan_launch(first, left)
    assert (made.sweep, made.name, [b.name for b in made.batches]) == (first.run_id, "grid", ["cells"])
    sweep = make_folders(first, left.cells, assignments(made))
    assert sweep.info()["launcher"] == "slurm"
    folder = LaunchFolder.create(made)
    folder.record(Submission("cells", 1, "12"))
    slurm.add("12", name=f"grid.{made.uid}.cells.1", tasks=3)
    RunFolder.open(root / first.run_ids[0]).update(status="finished")
    slurm.set("12_0", state="COMPLETED", nodes="node1")
    slurm.set("12_2", state="FAILED", nodes="node1", exit="1:0", start="2026-11-30T08:00:00")

    left = todo(plan(root, cells), Scheduler())
    assert left.finished == 1
    assert {run_id: status.job_id for run_id, status in left.live.items()} == {first.run_ids[1]: "12_1"}
    assert [run_id for _, run_id in left.cells] == [first.run_ids[2]]
    without = todo(plan(root, cells), None)  # a dry run knows of no jobs
    assert [run_id for _, run_id in without.cells] == list(first.run_ids[1:])


def test_a_cell_that_a_process_here_works_on_is_not_taken_from_it(
    slurm: FakeSlurm, root: Path, cells: list[Cell]
) -> None:
    """A run that an earlier job may still hold is another matter: the fence stops that process."""
    first = plan(root, cells)
    run = open_cell(root, cells[0], first.run_ids[0], first.run_id)
    with run.lock():
        run.begin_attempt()
        with pytest.raises(ConfigError, match=rf"run {run.run_id} is in use by pid \d+ on host .*`kill \d+`"):
            todo(first, Scheduler())
        assert len(todo(first, None).cells) == 3
        run.update(launch=Assignment(new_uid(), "cells", 0, 1).to_json())
        assert len(todo(first, Scheduler()).cells) == 3
    run.update(launch=None)
    assert len(todo(first, Scheduler()).cells) == 3


def test_what_a_dead_submitter_left_is_submitted_before_anybody_waits_for_it(
    slurm: FakeSlurm, root: Path, cells: list[Cell]
) -> None:
    first = plan(root, cells)
    made = prepare(plan_launch(first, todo(first, None)))
    make_folders(first, todo(first, None).cells, assignments(made))
    folder = LaunchFolder(root / ".launches" / made.uid)
    folder.publish(made)
    said: list[str] = []
    left = todo(first, Scheduler(), said.append)
    job = folder.newest()["cells"].job_id
    assert said == [f"launch {made.uid}: its submitter had died; submitted now as job {job} (cells)"]
    assert [status.job_id for status in left.live.values()] == [f"{job}_{i}" for i in range(3)]
    assert left.cells == ()


def test_a_cell_of_another_sweep_is_written_down_as_such(root: Path, cells: list[Cell]) -> None:
    """In MLflow it stays that sweep's child."""
    first = plan(root, cells)
    open_cell(root, cells[1], first.run_ids[1], "sweep-of-another")
    launch = plan_launch(first, todo(first, None))
    sweep = make_folders(first, todo(first, None).cells, assignments(launch))
    assert sweep.info()["reused_cells"] == [first.run_ids[1]]
    run = RunFolder.open(root / first.run_ids[1])
    assert run.info()["launch"] == Assignment(launch.uid, "cells", 1, 1).to_json()
    assert run.status() == "queued"


# --- going on -----------------------------------------------------------------------------------------------


def graph(root: Path, condition: str = "ok") -> Launched:
    """A launch of two runs that a command waits for."""
    waits = (After("train", "ok" if condition == "ok" else "any"),)
    return launched(
        root, make_batch(runs=2, stage="train"), make_batch(tasks=(LOOK,), stage="look", after=waits)
    )


def submit(slurm: FakeSlurm, made: Launched, *jobs: str) -> None:
    """As if every batch had been submitted, as these jobs."""
    for number, (batch, job) in enumerate(zip(made.launch.batches, jobs, strict=True)):
        made.submit(job, batch=number)
        slurm.add(job, name=made.name(number), tasks=len(batch.tasks) if batch.is_array else 0)


def again(
    made: Launched, *stages: str, launcher: dict[str, object] | None = None, max_index: int = 9
) -> LaunchFolder:
    """Submits the tasks of some stages again that are neither live nor finished."""
    scheduler = Scheduler()
    everything = survey([made.folder], scheduler)
    chosen = [
        (made.folder, status)
        for status in everything
        if status.stage in stages and status.index <= max_index
        and not status.live and status.state not in ("finished", "superseded")
    ]  # fmt: skip

    def change(old: SlurmLauncherConfig) -> SlurmLauncherConfig:
        return old.model_copy(update=launcher or {})

    return relaunch(made.root, chosen, everything, change, scheduler, lambda line: None, "racelab resume x")


def test_failed_runs_and_what_waits_for_them_go_on_together(slurm: FakeSlurm, root: Path) -> None:
    """Run 0 has finished. The new launch has one run and the command, in order, with the command as typed."""
    made = graph(root)
    submit(slurm, made, "12", "13")
    made.run(0).update(status="finished")
    made.run(1).update(status="failed", reason="bad luck")
    slurm.set("12_0", state="COMPLETED", nodes="node1")
    slurm.set("12_1", state="FAILED", nodes="node1", exit="1:0", start="2026-11-30T08:00:00")
    slurm.set("13", state="CANCELLED", reason="DependencyNeverSatisfied")
    folder = again(made, "train", "look", launcher={"time_min": 5})
    launch = folder.launch()
    assert [(b.name, [t.title for t in b.tasks], b.launcher.time_min) for b in launch.batches] == [
        ("train", ["race-s1"], 5),
        ("look", ["look"], 5),
    ]
    assert launch.batches[1].after == (After("train", "ok"),)
    assert (launch.command, launch.name, launch.root) == ("racelab resume x", "demo", str(root))
    info = made.run(1).info()
    assert (info["status"], info["reason"]) == ("queued", "")
    assert Assignment.from_json(info["launch"]) == Assignment(launch.uid, "train", 0, 1)
    assert made.run(0).status() == "finished"
    job = folder.newest()["train"].job_id
    assert f"#SBATCH --dependency=afterok:{job}\n" in folder.script("look", 1).read_text()


def test_what_waits_for_something_that_failed_and_does_not_go_on_is_refused(
    slurm: FakeSlurm, root: Path
) -> None:
    made = graph(root)
    submit(slurm, made, "12", "13")
    slurm.set("12", state="FAILED", nodes="node1", exit="1:0", start="2026-11-30T08:00:00")
    slurm.set("13", state="CANCELLED", reason="DependencyNeverSatisfied")
    with pytest.raises(ConfigError) as refused:
        again(made, "look")
    assert str(refused.value) == (
        "stage look waits for race-s0, which is failed; resume the whole launch: racelab resume "
        f"{made.launch.uid}"
    )
    assert submitted(slurm) == 0


def test_for_whatever_became_of_a_stage_that_has_ended_nothing_waits(slurm: FakeSlurm, root: Path) -> None:
    made = graph(root, "any")
    submit(slurm, made, "12", "13")
    slurm.set("12", state="FAILED", nodes="node1", exit="1:0", start="2026-11-30T08:00:00")
    slurm.set("13", state="CANCELLED", nodes="node1")
    assert again(made, "look").launch().batches[0].after == ()


def test_what_still_runs_is_waited_for_by_its_job(slurm: FakeSlurm, root: Path) -> None:
    """Run 0 has finished, run 1 still runs."""
    made = graph(root)
    submit(slurm, made, "12", "13")
    made.run(0).update(status="finished")
    slurm.set("12_1", state="RUNNING", nodes="node1", start="2026-11-30T08:00:00")
    slurm.set("13", state="CANCELLED", nodes="node1")
    folder = again(made, "look")
    assert folder.launch().batches[0].after == (After("train", "ok", "12_1"),)
    assert "#SBATCH --dependency=afterok:12_1\n" in folder.script("look", 1).read_text()


def test_a_run_that_a_later_launch_has_is_looked_at_there(slurm: FakeSlurm, root: Path) -> None:
    """train went on by itself: look waits for that job, then for nothing, or is refused if it failed."""
    made = graph(root)
    submit(slurm, made, "12", "13")
    made.run(0).update(status="finished")
    slurm.set("12_1", state="FAILED", nodes="node1", exit="1:0", start="2026-11-30T08:00:00")
    slurm.set("13", state="CANCELLED", reason="DependencyNeverSatisfied")
    job = again(made, "train").newest()["train"].job_id
    assert slurm.job(job)["state"] == "PENDING"
    look = again(made, "look")
    assert look.launch().batches[0].after == (After("train", "ok", job),)
    made = Launched(look, look.launch())
    slurm.set(look.newest()["look"].job_id, state="CANCELLED", reason="DependencyNeverSatisfied")

    slurm.set(job, state="FAILED", nodes="node1", exit="1:0", start="2026-11-30T08:00:00")
    run = RunFolder.open(root / "run-1")
    run.update(status="failed")
    with pytest.raises(
        ConfigError, match=r"race-s1, which is failed; resume that first: racelab resume run-1$"
    ):
        again(made, "look")

    slurm.set(job, state="COMPLETED", nodes="node1")
    run.update(status="finished")
    assert again(made, "look").launch().batches[0].after == ()


def test_a_job_of_another_launch_stays_what_is_waited_for(slurm: FakeSlurm, root: Path) -> None:
    made = launched(root, make_batch(tasks=(LOOK,), stage="look", after=(After("train", "ok", "7"),)))
    submit(slurm, made, "12")
    slurm.set("12", state="CANCELLED")
    assert again(made, "look").launch().batches[0].after == (After("train", "ok", "7"),)


def test_a_job_of_another_launch_that_failed_keeps_what_needs_it_from_going_on(
    slurm: FakeSlurm, root: Path
) -> None:
    """Slurm has forgotten that job, and would start what waits for it."""
    first = launched(root, make_batch(runs=2, stage="train"))
    submit(slurm, first, "7")
    waits = (After("train", "ok", "7_1"),)
    made = launched(root, make_batch(tasks=(LOOK,), stage="look", after=waits), uid=new_uid())
    submit(slurm, made, "12")
    slurm.set("12", state="CANCELLED", reason="DependencyNeverSatisfied")
    slurm.set("7_1", state="FAILED", nodes="node1", exit="1:0", start="2026-11-30T08:00:00", queue=False)
    first.run(1).update(status="failed")
    with pytest.raises(
        ConfigError, match=r"race-s1, which is failed; resume that first: racelab resume run-1$"
    ):
        again(made, "look")
    assert submitted(slurm) == 0
    first.run(1).update(status="finished")
    assert again(made, "look").launch().batches[0].after == ()


def test_a_stage_that_is_only_partly_submitted_again_waits_for_the_rest_of_it_too(
    slurm: FakeSlurm, root: Path
) -> None:
    """Run 0 failed and goes on, run 1 has failed and does not."""
    made = graph(root)
    submit(slurm, made, "12", "13")
    slurm.set("12", state="FAILED", nodes="node1", exit="1:0", start="2026-11-30T08:00:00")
    slurm.set("13", state="CANCELLED", reason="DependencyNeverSatisfied")
    with pytest.raises(ConfigError, match="stage look waits for race-s1, which is failed"):
        again(made, "train", "look", max_index=0)
    slurm.set("12_1", state="RUNNING")
    folder = again(made, "train", "look", max_index=0)
    assert folder.launch().batches[1].after == (After("train", "ok"), After("train", "ok", "12_1"))


def test_a_job_that_a_launch_has_yet_to_submit_is_not_passed_over(slurm: FakeSlurm, root: Path) -> None:
    """train went on by itself, and that submitter died."""
    made = graph(root, "any")
    submit(slurm, made, "12", "13")
    slurm.set("12", "13", state="CANCELLED", nodes="node1")
    later = launched(root / "x", make_batch(runs=2, stage="train"), uid=new_uid())
    moved = root / ".launches" / later.launch.uid
    later.folder.path.rename(moved)
    record = (moved / "launch.json").read_text()
    (moved / "launch.json").write_text(record.replace(str(root / "x"), str(root)))
    for index in (0, 1):
        made.run(index).update(launch=Assignment(later.launch.uid, "train", index, 1).to_json())
    with pytest.raises(
        ConfigError, match=f"has yet to submit; do that first: racelab jobs {later.launch.uid}"
    ):
        again(made, "look")


def test_a_command_that_went_on_is_the_later_launchs(slurm: FakeSlurm, root: Path) -> None:
    """Not before that launch is there; a stage that waits for it looks for it there."""
    waits = (After("look", "ok"),)
    made = launched(
        root,
        make_batch(tasks=(LOOK,), stage="look"),
        make_batch(tasks=(Task("command", words=("runs",), title="last"),), stage="last", after=waits),
    )
    submit(slurm, made, "12", "13")
    slurm.set("12", "13", state="CANCELLED", nodes="node1")
    made.folder.hand_on("look", 0, new_uid())
    assert survey([made.folder], Scheduler())[0].state == "cancelled"
    second = again(made, "look")
    assert (made.folder.path / "resumed" / "look.0").read_text() == second.uid
    assert [s.state for s in survey([made.folder], Scheduler())] == ["superseded", "cancelled"]
    job = second.newest()["look"].job_id
    slurm.set(job, state="FAILED", nodes="node1", exit="1:0", start="2026-11-30T08:00:00")
    with pytest.raises(ConfigError, match=f"look, which is failed; .*: racelab resume {second.uid}:look$"):
        again(made, "last")
    slurm.set(job, state="COMPLETED", exit="0:0")
    assert again(made, "last").launch().batches[0].after == ()


def test_a_run_stays_its_launchs_until_the_next_is_there(slurm: FakeSlurm, root: Path) -> None:
    """The submitter of a second one died before it was written."""
    made = launched(root)
    submit(slurm, made, "12")
    slurm.set("12", state="CANCELLED", nodes="node1")
    made.run().update(launch=Assignment(new_uid(), "cells", 0, 1).to_json(), status="queued")
    assert [s.state for s in survey([made.folder], Scheduler())] == ["cancelled"]
    assert again(made, "cells").launch().n_tasks == 1
    assert [s.state for s in survey([made.folder], Scheduler())] == ["superseded"]


def test_no_run_is_assigned_to_a_launch_whose_folder_cannot_be_made(slurm: FakeSlurm, root: Path) -> None:
    made = launched(root)
    submit(slurm, made, "12")
    slurm.set("12", state="CANCELLED", nodes="node1")
    before = made.run().info()
    (root / ".launches" / "code").write_text("in the way")
    with pytest.raises(RunFolderError):
        again(made, "cells")
    assert made.run().info() == before


def test_how_many_run_at_once_is_what_the_stage_was_allowed_before_it_was_split(
    slurm: FakeSlurm, root: Path
) -> None:
    """3 and 1 are 4, over two arrays and two allocations; resumed with 2, 2. Cells that went on apart are one array."""
    other = [Task("run", run=f"run-{i}", title=f"race-s{i}") for i in (2, 3)]
    made = launched(
        root,
        make_batch(runs=2, max_parallel=3),
        replace(make_batch(tasks=other, max_parallel=1), name="cells-2"),
    )
    submit(slurm, made, "12", "13")
    slurm.set("12", "13", state="CANCELLED", nodes="node1")
    asked: tuple[tuple[dict[str, object], int], ...] = (({"max_parallel": 3}, 3), ({}, 4))
    for words, limit in asked:
        first = again(made, "cells", launcher=words, max_index=0)
        (batch,) = first.launch().batches
        assert (batch.name, len(batch.tasks), batch.launcher.max_parallel) == ("cells", 2, limit)
        for index in (0, 2):  # back again
            uid, name = made.launch.uid, "cells" if index == 0 else "cells-2"
            made.run(index).update(launch=Assignment(uid, name, 0, 1).to_json())
    made.folder.path.joinpath("launch.json").write_text(
        (made.folder.path / "launch.json").read_text().replace('"time_min": 240', '"time_min": 30', 1)
    )
    apart = again(made, "cells").launch().batches
    assert [(b.name, len(b.tasks), b.launcher.max_parallel) for b in apart] == [
        ("cells", 2, 2),
        ("cells.2", 2, 2),
    ]


def test_tasks_of_several_launches_share_one(slurm: FakeSlurm, root: Path) -> None:
    """The second tasks of two arrays of one stage: one array, and no sweep that is not both's."""
    others = [Task("run", run=f"run-{i}", title=f"race-s{i}") for i in (2, 3)]
    one, two = launched(root, runs=2), launched(root, make_batch(tasks=others), uid=new_uid())
    for made, job in ((one, "12"), (two, "13")):
        submit(slurm, made, job)
        slurm.set(job, state="CANCELLED", nodes="node1")
    scheduler = Scheduler()
    folders = {made.launch.uid: made.folder for made in (one, two)}
    everything = survey(list(folders.values()), scheduler)
    chosen = [(folders[status.launch], status) for status in everything if status.index == 1]
    launch = relaunch(root, chosen, everything, lambda old: old, scheduler, lambda line: None, "").launch()
    assert [(b.name, [t.run for t in b.tasks]) for b in launch.batches] == [
        ("cells", ["run-1", "run-3"]),
    ]
    assert launch.sweep == ""


def test_an_allocation_that_does_not_fit_the_run_is_refused(
    slurm: FakeSlurm, root: Path, cells: list[Cell]
) -> None:
    """The local backend trains on one device."""
    first = plan(root, cells[:1])
    left = todo(first, None)
    launch = plan_launch(first, left)
    make_folders(first, left.cells, assignments(launch))
    folder = LaunchFolder.create(launch)
    folder.record(Submission("cells", 1, "12"))
    slurm.add("12", name=f"grid.{launch.uid}.cells.1", state="CANCELLED")
    made = Launched(folder, launch)
    with pytest.raises(
        ConfigError, match=rf"^{first.run_ids[0]}: launcher.gpus_per_node=8, but the local backend"
    ):
        again(made, "cells", launcher={"gpus_per_node": 8})
    assert submitted(slurm) == 0
    requeue_folder(RunFolder.open(root / first.run_ids[0]), assignments(launch)[first.run_ids[0]])
    assert again(made, "cells", launcher={"gpus_per_node": 1}).launch().batches[0].launcher.gpus == 1
