"""Submitting once: what is on disk at each moment, and what becomes of a launch whose submitter died there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.fsio import read_json
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.slurm.folder import LaunchFolder, intent
from racelab.sweeps.slurm.model import After, Assignment, Batch, Launch, Submission, Task, job_name
from racelab.sweeps.slurm.scheduler import Scheduler
from racelab.sweeps.slurm.submit import (
    assignments,
    by_allocation,
    check,
    dependency,
    dry_scripts,
    graph_lines,
    new_launch,
    prepare,
    recover,
    submit_launch,
    totals,
)

from .fake_slurm import FakeSlurm
from .hooks import hook, submitted, wait_for
from .launches import make_batch, slurm_launcher
from .world import Launched, launched, write_run

LOOK = Task("command", words=("runs",), title="look")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    return FakeSlurm.install(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs of mine"


def prepared(root: Path, *batches: Batch) -> Launch:
    """A launch whose folder and runs are there, queued and assigned, as the commands leave it to `submit_launch`."""
    launch = prepare(new_launch("demo", "racelab ablate launcher=slurm", root, batches or (make_batch(),)))
    for run, assignment in assignments(launch).items():
        write_run(root / run, run, assignment)
    return launch


def quiet(line: str) -> None:
    raise AssertionError(line)


def graph() -> tuple[Batch, Batch]:
    return make_batch(runs=2, stage="train"), make_batch(
        tasks=(LOOK,), stage="look", after=(After("train", "ok"),)
    )


def died(root: Path, *batches: Batch, runs: int = 1) -> Launched:
    """A launch whose submitter died between the intent of its first batch and sbatch."""
    made = launched(root, *batches, runs=runs)
    made.folder.record(intent(made.launch.batches[0], 1))
    return made


def assigned(run: RunFolder) -> Assignment | None:
    return Assignment.from_json(run.info()["launch"])


# --- the order ----------------------------------------------------------------------------------------------


def test_when_sbatch_is_called_everything_is_on_disk(
    slurm: FakeSlurm, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call sees the intent of its batch, the second the job of the first and its own intent."""
    launch = prepared(root, *graph())
    folder = root / ".launches" / launch.uid
    then = tmp_path / "then"
    then.mkdir()
    copy = f"there='{then}'/$(ls '{then}' | wc -l); mkdir $there; cp -r '{folder}' $there/launch; "
    copy += f"cp '{root}/run-1/run.json' $there; ls '{root}/.launches/code' > $there/code"
    hook(slurm, "sbatch", monkeypatch, before=copy)

    made = submit_launch(launch, Scheduler(), quiet)

    first, second = then / "0", then / "1"
    run = read_json(first / "run.json")
    assert run["status"] == "queued"
    assert run["launch"] == {"uid": launch.uid, "batch": "train", "index": 1, "number": 1}
    seen = LaunchFolder(first / "launch")
    assert seen.launch().batches == launch.batches
    assert seen.launch().code == f"{root}/.launches/code/{(first / 'code').read_text().strip()}"
    (open_end,) = seen.submissions()
    assert (open_end.batch, open_end.number, open_end.job_id, open_end.error) == ("train", 1, "", "")
    assert open_end.intended
    assert [path.name for path in (first / "launch" / "scripts").iterdir()] == ["train.1.sh"]

    of_train, of_look = LaunchFolder(second / "launch").submissions()
    assert (of_train.job_id, bool(of_train.submitted)) == ("1", True)
    assert (of_look.batch, of_look.job_id) == ("look", "")
    assert [(s.batch, s.number, s.job_id) for s in made.submissions()] == [
        ("train", 1, "1"),
        ("look", 1, "2"),
    ]
    assert made.is_settled()
    assert slurm.job("1_1")["name"] == job_name(launch, launch.batches[0], 1)
    assert "#SBATCH --dependency=afterok:1\n" in made.script("look", 1).read_text()


def test_what_slurm_would_refuse_is_refused_before_anything_is_made(
    slurm: FakeSlurm, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = new_launch("demo", "", root, [make_batch(partition="nope")])
    with pytest.raises(ConfigError, match="invalid partition specified: nope"):
        check(launch, Scheduler())
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with pytest.raises(ConfigError, match="task of an array job"):
        check(new_launch("demo", "", root, [make_batch()]), Scheduler())
    assert not root.exists()
    assert submitted(slurm) == 0


def test_a_refusal_settles_the_whole_launch_and_names_what_is_submitted(slurm: FakeSlurm, root: Path) -> None:
    """The second of three is refused: one job, and two answers why there is none; nothing is left for a recovery."""
    train, look = graph()
    small = make_batch(
        tasks=(LOOK,), stage="other", gpus_per_node=9
    )  # no node has nine; preflight was left out
    launch = prepared(root, train, small, look)
    with pytest.raises(ConfigError, match="Requested node configuration is not available") as refused:
        submit_launch(launch, Scheduler(), quiet)
    assert str(refused.value).endswith(
        f" (submitted before it: job 1); when that is mended: racelab resume {launch.uid}"
    )
    folder = LaunchFolder(root / ".launches" / launch.uid)
    of_train, of_small, of_look = folder.submissions()
    assert of_train.job_id == "1"
    assert "Requested node configuration is not available" in of_small.error
    assert of_look.error == "not submitted, since other was refused"
    assert folder.is_settled()
    assert recover(folder, Scheduler()) == []
    assert submitted(slurm) == 2


def test_without_an_answer_the_intent_stays_open_and_is_submitted_later(slurm: FakeSlurm, root: Path) -> None:
    launch = prepared(root)
    slurm.setting(unreachable=True)
    with pytest.raises(UnreachableError, match=f"racelab jobs {launch.uid} adopts or submits it"):
        submit_launch(launch, Scheduler(), quiet)
    folder = LaunchFolder(root / ".launches" / launch.uid)
    with pytest.raises(UnreachableError):
        recover(folder, Scheduler())
    (open_end,) = folder.submissions()
    assert (open_end.number, open_end.settled) == (1, False)
    slurm.setting(unreachable=False)
    assert recover(folder, Scheduler()) == [
        f"launch {launch.uid}: its submitter had died; submitted now as job 1 (cells)"
    ]
    assert [(s.number, s.job_id) for s in folder.submissions()] == [(1, ""), (2, "1")]


@pytest.mark.parametrize("refused", [False, True])
def test_another_process_that_sees_the_launch_first_is_waited_for(
    slurm: FakeSlurm, root: Path, refused: bool
) -> None:
    """`racelab jobs --watch` may take the lock between the folder's making and its maker."""
    launch = prepared(root)
    folder = LaunchFolder(root / ".launches" / launch.uid)
    said: list[str] = []
    errors: list[str] = []

    def submit() -> None:
        try:
            submit_launch(launch, Scheduler(), said.append)
        except ConfigError as error:
            errors.append(str(error))

    with folder.submitting() as mine:
        assert mine
        thread = threading.Thread(target=submit, daemon=True)
        thread.start()
        wait_for(lambda: bool(said))
        last = Submission("cells", 1, error="no such account") if refused else Submission("cells", 1, "77")
        folder.record(last)
    thread.join(30)
    assert not thread.is_alive()
    assert "another process" in said[0]
    assert errors == (
        [f"no such account; when that is mended: racelab resume {launch.uid}"] if refused else []
    )
    assert folder.submissions() == [last]
    assert submitted(slurm) == 0


def test_an_interruption_says_what_becomes_of_the_launch(
    slurm: FakeSlurm, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C inside sbatch."""
    hook(slurm, "sbatch", monkeypatch, before="kill -INT $PPID; sleep 1; exit 1")
    launch = prepared(root)
    said: list[str] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            submit_launch(launch, Scheduler(), said.append)
    finally:
        signal.signal(signal.SIGINT, before)
    assert said == [
        f"interrupted: racelab jobs submits what is missing of launch {launch.uid}, racelab cancel {launch.uid} "
        "drops it"
    ]
    hook(slurm, "sbatch", monkeypatch)
    assert len(recover(LaunchFolder(root / ".launches" / launch.uid), Scheduler())) == 1


# --- recovery -----------------------------------------------------------------------------------------------


def test_a_job_of_the_intents_name_is_adopted(slurm: FakeSlurm, root: Path) -> None:
    made = died(root, *graph())
    slurm.add("7", name=made.name(), tasks=2)
    assert recover(made.folder, Scheduler()) == [
        f"launch {made.launch.uid}: its submitter had died; job 7 found and adopted (train)",
        f"launch {made.launch.uid}: its submitter had died; submitted now as job 8 (look)",
    ]
    train, look = made.folder.submissions()
    assert (train.number, train.job_id, train.adopted) == (1, "7", True)
    assert (look.job_id, look.adopted) == ("8", False)
    assert "afterok:7" in made.folder.script("look", 1).read_text()
    assert assigned(made.run(0)) == Assignment(made.launch.uid, "train", 0, 1)


def test_a_job_that_slurm_has_forgotten_is_adopted_by_its_own_last_word(slurm: FakeSlurm, root: Path) -> None:
    """Without accounting: task 1 of array 5 has written how it ended."""
    slurm.setting(accounting=False)
    made = died(root, runs=2)
    made.end("finished", index=1, job="5")
    (line,) = recover(made.folder, Scheduler())
    assert "job 5 found and adopted" in line
    assert made.folder.newest()["cells"].job_id == "5"
    assert submitted(slurm) == 0


def test_without_a_job_the_batch_gets_the_next_number_and_its_runs_with_it(
    slurm: FakeSlurm, root: Path
) -> None:
    """Not the one that has finished, not the one that somebody has taken by hand, not the one of a later launch."""
    made = died(root, runs=4)
    made.run(1).update(status="finished")
    made.run(2).update(launch=None)
    later = Assignment("20270101T000000-ffffff", "cells", 0, 1)
    made.run(3).update(launch=later.to_json())
    recover(made.folder, Scheduler())
    uid = made.launch.uid
    assert [assigned(made.run(i)) for i in range(4)] == [
        Assignment(uid, "cells", 0, 2),
        Assignment(uid, "cells", 1, 1),
        None,
        later,
    ]
    assert slurm.job("1_0")["name"] == made.name(number=2)
    assert recover(made.folder, Scheduler()) == []
    assert submitted(slurm) == 1


def test_what_was_cancelled_meanwhile_is_not_submitted(slurm: FakeSlurm, root: Path) -> None:
    made = died(root, runs=2)
    made.folder.cancel("cells", 0)
    made.folder.cancel("cells", 1)
    assert recover(made.folder, Scheduler()) == []
    (only,) = made.folder.submissions()
    assert (only.number, only.error) == (1, "cancelled before it was submitted")
    assert submitted(slurm) == 0


def test_one_cancelled_task_of_two_does_not_keep_the_other_from_being_submitted(
    slurm: FakeSlurm, root: Path
) -> None:
    made = died(root, runs=2)
    made.folder.cancel("cells", 0)
    recover(made.folder, Scheduler())
    assert submitted(slurm) == 1


def test_a_cancelled_batch_whose_job_is_there_is_adopted_so_that_it_can_be_cancelled(
    slurm: FakeSlurm, root: Path
) -> None:
    made = died(root)
    made.folder.cancel("cells", 0)
    slurm.add("7", name=made.name())
    recover(made.folder, Scheduler())
    assert made.folder.newest()["cells"].job_id == "7"


def test_a_live_submitter_is_left_alone(slurm: FakeSlurm, root: Path) -> None:
    made = died(root)
    with made.folder.submitting() as mine:
        assert mine
        assert recover(made.folder, Scheduler()) == []
    assert slurm.calls() == []


def test_a_task_of_an_array_job_recovers_nothing(
    slurm: FakeSlurm, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its tasks would submit the same, and with the variables of that job."""
    made = died(root)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    (line,) = recover(made.folder, Scheduler())
    assert line.startswith(
        f"launch {made.launch.uid}: its submitter has died, and it is not submitted from here: "
    )
    assert slurm.calls() == []


def test_of_two_recoveries_at_once_one_submits(
    slurm: FakeSlurm, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first is inside sbatch."""
    inside, go = tmp_path / "inside", tmp_path / "go"
    hook(slurm, "sbatch", monkeypatch, before=f"touch '{inside}'; while [ ! -e '{go}' ]; do sleep 0.02; done")
    made = died(root)
    lines: list[str] = []
    thread = threading.Thread(target=lambda: lines.extend(recover(made.folder, Scheduler())), daemon=True)
    thread.start()
    try:
        wait_for(inside.exists)
        assert recover(made.folder, Scheduler()) == []
    finally:
        go.touch()
    thread.join(30)
    assert len(lines) == 1
    assert submitted(slurm) == 1
    assert made.folder.newest()["cells"].job_id == "1"


# --- dependencies -------------------------------------------------------------------------------------------


def test_dependencies_name_every_part_of_a_stage_and_jobs_of_other_launches(root: Path) -> None:
    """eval waits for both parts of train and for job 40 of another launch; report for whatever became of eval."""
    train = (make_batch(stage="train"), make_batch(stage="train", tasks=(Task("run", run="run-9"),)))
    waits = (After("train", "ok"), After("train", "ok", "40"), After("eval", "any"))
    launch = new_launch("g", "", root, [*train, *(make_batch(tasks=(LOOK,), stage=s) for s in ("eval", "x"))])
    assert [batch.name for batch in launch.batches] == ["train", "train-r2", "eval", "x"]
    folder = LaunchFolder.create(launch)
    for name, job in (("train", "12"), ("train-r2", "13"), ("eval", "14")):
        folder.record(Submission(name, 1, job))

    def of(*after: After) -> str:
        return dependency(folder, launch, make_batch(tasks=(LOOK,), stage="x", after=after))

    assert of() == ""
    assert of(waits[0]) == "afterok:12:13"
    assert of(*waits) == "afterok:12:13,afterok:40,afterany:14"


def test_a_stage_whose_predecessor_was_refused_is_not_submitted(slurm: FakeSlurm, root: Path) -> None:
    made = launched(root, *graph())
    made.folder.record(Submission("train", 1, error="no"))
    with pytest.raises(ConfigError, match="stage look waits for train, which was not submitted"):
        recover(made.folder, Scheduler())
    assert made.folder.newest()["look"].error == "stage look waits for train, which was not submitted"
    assert submitted(slurm) == 0


# --- sizes --------------------------------------------------------------------------------------------------


def test_runs_that_ask_for_the_same_share_a_batch_and_large_batches_are_split(root: Path) -> None:
    """Five of one allocation, two of another; arrays of two; max_parallel 4 shared as 2, 1, 1."""
    many = slurm_launcher().model_copy(update={"max_parallel": 4})
    other = slurm_launcher("launcher.time_min=60")
    asked = [(f"run-{i}", f"r{i}", other if i in (1, 4) else many) for i in range(7)]
    batches = by_allocation("cells", asked)
    assert [(b.name, b.stage, [t.run for t in b.tasks]) for b in batches] == [
        ("cells", "cells", ["run-0", "run-2", "run-3", "run-5", "run-6"]),
        ("cells.2", "cells", ["run-1", "run-4"]),
    ]
    launch = new_launch("demo", "", root, batches, max_array=2)
    assert [(b.name, len(b.tasks), b.launcher.max_parallel) for b in launch.batches] == [
        ("cells", 2, 2), ("cells-2", 2, 1), ("cells-3", 1, 1), ("cells.2", 2, None),
    ]  # fmt: skip


def test_allocations_that_ask_for_one_limit_share_it(root: Path) -> None:
    """Four at once, in two arrays: 2 and 2; five: 3 and 2."""
    for limit, shares in ((4, [2, 2]), (5, [3, 2])):
        one, two = (
            slurm_launcher(*w).model_copy(update={"max_parallel": limit})
            for w in ((), ("launcher.time_min=60",))
        )
        asked = [(f"run-{i}", f"r{i}", two if i == 1 else one) for i in range(3)]
        assert [b.launcher.max_parallel for b in by_allocation("cells", asked)] == shares


def test_every_batch_has_a_name_of_its_own(root: Path) -> None:
    """A part of a large one, and one of an earlier launch that was such a part."""
    launch = new_launch(
        "demo",
        "",
        root,
        [make_batch(runs=3), make_batch(stage="cells-2", tasks=(LOOK,)), make_batch(tasks=(LOOK,))],
        max_array=2,
    )
    assert [batch.name for batch in launch.batches] == ["cells", "cells-2", "cells-2-r2", "cells-r2"]


@pytest.mark.parametrize(
    ("batches", "line", "size"),
    [
        # 1 job of 1 node for 60 min
        (
            lambda: [make_batch(time_min=60)],
            "cells: 1 job of 1 node, 60 min at most",
            "1 job in 1 submission, 0 GPUs in all, at most 1 node hour and 0 GPU hours",
        ),
        # 1 GPU for 60 min
        (
            lambda: [make_batch(time_min=60, gpus_per_node=1)],
            "cells: 1 job of 1 node x 1 GPU, 60 min at most",
            "1 job in 1 submission, 1 GPU in all, at most 1 node hour and 1 GPU hour",
        ),
        # 3 jobs x 2 nodes x 90 min = 9 node hours, x 8 GPUs = 72 GPU hours; and a command for 30 min
        (
            lambda: [
                make_batch(runs=3, nodes=2, gpus_per_node=8, time_min=90),
                make_batch(tasks=(LOOK,), stage="look", time_min=30, after=(After("cells", "any"),)),
            ],
            "look: 1 job of 1 node, 30 min at most, afterany:<cells>",
            "4 jobs in 2 submissions, 48 GPUs in all, at most 9.5 node hours and 72 GPU hours",
        ),
        # 1,001 jobs x 8 GPUs x 48 h: nothing is rounded
        (
            lambda: [make_batch(runs=1001, gpus_per_node=8, time_min=2880)],
            "cells: 1,001 jobs of 1 node x 8 GPUs, 2880 min at most",
            "1,001 jobs in 1 submission, 8,008 GPUs in all, at most 48,048 node hours and 384,384 GPU hours",
        ),
    ],
    ids=["one", "one GPU", "graph", "many"],
)
def test_the_size_of_a_launch_is_said_in_whole_words(
    root: Path, batches: Callable[[], list[Batch]], line: str, size: str
) -> None:
    launch = new_launch("demo", "", root, batches())
    assert graph_lines(launch)[-1] == line
    assert totals(launch) == f"{size} (each job up to its limit, once)"


def test_a_dry_run_has_the_very_scripts_but_for_the_ids_of_jobs(slurm: FakeSlurm, root: Path) -> None:
    launch = prepared(root, *graph())
    dry = dry_scripts(launch)
    folder = submit_launch(launch, Scheduler(), quiet)
    train, look = (folder.script(name, 1).read_text() for name in ("train", "look"))
    assert dry == [train, look.replace("afterok:1\n", "'afterok:<train>'\n")]
