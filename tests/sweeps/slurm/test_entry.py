"""What runs inside a job: which run it may work on, how it ends, and what is wrong outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from racelab.configs.compose import compose
from racelab.experiments import fence
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.session import new_run
from racelab.sweeps.slurm.folder import End, LaunchFolder, intent
from racelab.sweeps.slurm.handback import barren_starts
from racelab.sweeps.slurm.model import Assignment, Task
from racelab.sweeps.slurm.supervise import child_environment, shipping

from ...experiments.tiny_run import STEPS, overrides, write_tiny_model
from .entry_lab import Lab, ended, wait, wire
from .fake_slurm import FakeSlurm
from .launches import make_batch, make_launch


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    made = Lab(tmp_path, FakeSlurm.install(tmp_path / "slurm", monkeypatch))
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


# A run that ends by itself.


def test_a_run_that_finishes(lab: Lab) -> None:
    lab.launch()
    assert ended(lab.start()) == (0, "")
    end = lab.end()
    assert wire(end) == ("finished", 0, "12", 0, "node3")
    assert end.reason == ""
    log = (lab.run().path / "attempts" / "12-r0.log").read_text().splitlines()
    assert log[0].startswith("--- job 12, restart 0, rank 0 on node3, ")
    assert log[1] == "at work"
    seen = json.loads((lab.run().path / "seen.json").read_text())
    present = fence.read(lab.run().path)
    assert present is not None
    assert (present.job_id, present.restart, present.node) == ("12", 0, "node3")
    assert seen["RACELAB_FENCE"] == present.token
    assert seen["RACELAB_FENCE_RUN"] == str(lab.run().path)
    assert seen["RACELAB_FENCE_WAIT"] == "180"
    assert seen["RACELAB_PARENT_PID"] == str(lab.processes[0].pid)
    assert (seen["RACELAB_DEBUG"], seen["RACELAB_SHIP"]) == ("1", "0")


def test_the_task_of_an_array_is_that_of_its_index(lab: Lab) -> None:
    lab.launch(make_batch(runs=3))
    array = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "2"}
    assert ended(lab.start(**array, SLURM_RESTART_COUNT="3"))[0] == 0
    assert wire(lab.end(2)) == ("finished", 0, "12_2", 3, "node3")
    assert [lab.run(f"run-{i}").status() for i in range(3)] == ["queued", "queued", "finished"]
    assert (lab.run("run-2").path / "attempts" / "12_2-r3.log").exists()
    assert lab.run("run-2").attempts()[0]["slurm_job_id"] == "12_2"


@pytest.mark.parametrize(
    ("what", "code", "reason", "status"),
    [
        ("crash", 1, "the loss is not finite", "failed"),
        ("refuse", 1, "no model in there", "failed"),
        ("mute", 3, "exit code 3", "failed"),
        ("die", 137, "killed by SIGKILL (out of memory?)", "stale"),
    ],
)
def test_a_run_that_fails_says_why(lab: Lab, what: str, code: int, reason: str, status: str) -> None:
    lab.launch(what=what)
    assert ended(lab.start())[0] == code
    assert (wire(lab.end()), lab.end().reason) == (("failed", code, "12", 0, "node3"), reason)
    assert lab.run().status() == status
    assert lab.requeued == []


def test_a_command_prints_where_its_job_does_and_its_last_line_is_the_reason(
    lab: Lab, tmp_path: Path
) -> None:
    told = Task("command", words=("print('told'); import os; print('fence', 'RACELAB_FENCE' in os.environ)",))
    broken = Task("command", words=("import sys; sys.exit('error: no such table')",))
    lab.launch(make_batch(tasks=(told, broken)))
    code, said = ended(lab.start(SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="0"))
    assert (code, said.splitlines()[1:]) == (0, ["told", "fence False"])
    assert wire(lab.end(0)) == ("finished", 0, "12_0", 0, "node3")
    assert (
        ended(lab.start(SLURM_ARRAY_JOB_ID="12", SLURM_ARRAY_TASK_ID="1", out=tmp_path / "own.out"))[0] == 1
    )
    assert (lab.end(1).status, lab.end(1).reason) == ("failed", "no such table")


# Whose run it is.


def change_assignment(lab: Lab) -> None:
    lab.run().update(launch={"uid": "another", "batch": "cells", "index": 0, "number": 1})


def take_by_hand(lab: Lab) -> None:
    lab.run().update(launch=None)


def submit_again(lab: Lab) -> None:
    lab.folder.record(intent(lab.folder.launch().batches[0], 2))


def know_another_job(lab: Lab) -> None:
    lab.folder.record(replace(lab.folder.newest()["cells"], job_id="11"))


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (change_assignment, "superseded"),
        (take_by_hand, "superseded"),
        (submit_again, None),
        (know_another_job, None),
    ],
)
def test_a_job_that_does_not_count_does_nothing(
    lab: Lab, act: Callable[[Lab], None], status: str | None
) -> None:
    lab.launch()
    act(lab)
    code, said = ended(lab.start())
    assert code == 75
    assert said.count("\n") == 1
    end = lab.folder.end("cells", 0)
    assert (end and end.status) == status
    assert lab.run().attempts() == []
    assert fence.read(lab.run().path) is None


@pytest.mark.parametrize(("before", "after"), [("failed", "failed"), ("requeued", "superseded")])
def test_a_superseded_job_hides_no_earlier_end(lab: Lab, before: str, after: str) -> None:
    lab.launch()
    change_assignment(lab)
    lab.folder.write_end("cells", 0, End(before, 1, "x", "12", 0, "node1", "2026-01-02T03:04:05+00:00"))
    assert ended(lab.start(SLURM_RESTART_COUNT="1"))[0] == 75
    assert lab.end().status == after


def test_a_run_that_has_finished_is_left_alone(lab: Lab) -> None:
    lab.launch()
    lab.run().update(status="finished")
    assert ended(lab.start())[0] == 0
    assert lab.end().status == "finished"
    assert lab.run().attempts() == []


def test_a_cancelled_task_does_not_start(lab: Lab) -> None:
    lab.launch()
    lab.folder.cancel("cells", 0)
    assert ended(lab.start())[0] == 143
    assert (lab.end().status, lab.end().reason) == ("stopped", "cancelled")
    assert lab.run().attempts() == []


def test_a_fenced_child_is_killed_and_the_later_attempt_has_the_last_word(lab: Lab) -> None:
    lab.launch(what="long deaf")
    old = lab.start()
    wait(lab.at_work())
    holder = int((lab.run().holder() or {})["pid"])
    (lab.run().path / "what").write_text("long")
    new = lab.start(SLURM_RESTART_COUNT="1", SLURMD_NODENAME="node4")
    code, said = ended(old)
    assert code == 0  # srun would take any other for one of the new attempt's
    assert "taken over by job 12 (restart 1) on node4" in said
    with pytest.raises(ProcessLookupError):
        os.kill(holder, 0)
    assert lab.folder.end("cells", 0) is None
    new.send_signal(signal.SIGTERM)
    assert ended(new)[0] == 143
    assert wire(lab.end()) == ("requeued", 143, "12", 1, "node4")


def test_a_child_that_notices_by_itself_that_it_was_fenced_has_not_failed(lab: Lab) -> None:
    lab.launch(what="long heed")
    old = lab.start()
    wait(lab.at_work())
    fence.take(lab.run().path, fence.new_token(), {"job_id": "99", "node": "node1"})
    assert ended(old)[0] == 75
    assert lab.end().status == "fenced"


def test_a_run_taken_by_another_launch_leaves_the_end_of_this_task_to_this_job(lab: Lab) -> None:
    lab.launch(what="long deaf")
    old = lab.start()
    wait(lab.at_work())
    fence.take(lab.run().path, fence.new_token(), {"job_id": "99", "node": "node1"})
    assert ended(old)[0] == 75
    assert wire(lab.end()) == ("fenced", 75, "12", 0, "node3")
    assert lab.end().reason == "taken over by job 99 on node1"


def test_an_earlier_start_of_the_job_cannot_take_the_run_back(lab: Lab) -> None:
    lab.launch(what="long")
    new = lab.start(SLURM_RESTART_COUNT="1")
    wait(lab.at_work())
    assert ended(lab.start())[0] == 0
    (lab.place / "pid").write_text(str(new.pid))
    new.send_signal(signal.SIGTERM)
    assert ended(new)[0] == 143
    assert wire(lab.end()) == ("requeued", 143, "12", 1, "node3")


def waiting_command(lab: Lab) -> Task:
    """It ends once a file is there, whatever signals come."""
    return Task("command", words=(
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
        f"while not os.path.exists({str(lab.place / 'go')!r}): time.sleep(0.02)",
    ))  # fmt: skip


def test_the_end_of_a_later_start_stands(lab: Lab) -> None:
    """Commands have no fence: after the loss of a node both copies may come to their end."""
    lab.launch(make_batch(tasks=(waiting_command(lab),)))
    old = lab.start(out=lab.place / "old.out")
    wait(lambda: "up\n" in (lab.place / "old.out").read_text())
    later = End("failed", 1, "x", "12", 1, "node4", "2026-01-02T03:04:05+00:00")
    lab.folder.write_end("cells", 0, later)
    (lab.place / "go").touch()
    assert old.wait(30) == 0
    assert lab.end() == later


# A job that gets nowhere.


def test_a_run_that_was_started_twenty_times_without_a_checkpoint_is_given_up(lab: Lab) -> None:
    lab.launch()
    assert ended(lab.start(SLURM_RESTART_COUNT="20"))[0] == 1
    assert (wire(lab.end()), lab.end().reason) == (
        ("failed", 1, "12", 20, "node3"),
        "20 starts in a row ended without a new checkpoint (none so far); lower checkpoint.every, and see what "
        "stopped them in the logs",
    )
    assert (lab.run().status(), lab.run().attempts()) == ("failed", [])
    assert ended(lab.start(SLURM_RESTART_COUNT="19"))[0] == 0


def test_a_command_that_was_started_twenty_times_is_given_up(lab: Lab) -> None:
    lab.launch(make_batch(tasks=(Task("command", words=("pass",)),)))
    assert ended(lab.start(SLURM_RESTART_COUNT="20"))[0] == 1
    assert lab.end().reason.startswith(
        "the command was started 20 times and stopped each time before its end"
    )


@pytest.mark.parametrize(
    ("starts", "restart", "newest", "expected"),
    [
        ([], 0, None, 0),
        ([], 3, None, 3),  # 0, 1 and 2
        ([(0, 0), (1, 0)], 3, 8, 1),  # 1 has saved 8, 2 came to nothing
        ([(0, 0), (1, 8), (2, 8)], 3, 8, 2),
        ([(0, 8)], 3, 8, 3),  # 8 is of an earlier job
        ([(0, 0), (5, 0)], 3, 8, 2),  # 5 is of a job that had the same id
    ],
)
def test_counting_starts_without_progress(
    starts: list[tuple[int, int]], restart: int, newest: int | None, expected: int
) -> None:
    other = {"slurm_job_id": "11", "slurm_restart": 2, "from_step": 4}
    by_hand = {"slurm_job_id": None, "slurm_restart": None, "from_step": 4}
    mine = [{"slurm_job_id": "12", "slurm_restart": r, "from_step": step} for r, step in starts]
    assert barren_starts([other, by_hand, *mine], "12", restart, newest) == expected


# What is wrong outside.


def test_typed_by_hand_it_says_what_is_missing(lab: Lab) -> None:
    lab.launch()
    code, said = ended(lab.start(SLURM_PROCID="0", SLURMD_NODENAME=""))
    assert (code, said.splitlines()) == (
        2,
        [
            "error: SLURMD_NODENAME is not set: this command is for the jobs that racelab submits; use "
            "`racelab launch`, or launcher=slurm"
        ],
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "has no batch 'nothing'; it has cells"),
        (("one",), "takes LAUNCH_FOLDER BATCH NUMBER"),
        (("/no/launch", "cells", "1"), "cannot read /no/launch/launch.json"),
    ],
)
def test_a_wrong_call_is_refused(lab: Lab, words: tuple[str, ...], message: str) -> None:
    lab.launch()
    code, said = ended(lab.start(*(words or (str(lab.folder.path), "nothing", "1"))))
    assert code == 2
    assert message in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1


def test_a_run_that_is_gone_fails_its_task(lab: Lab) -> None:
    lab.launch()
    (lab.run().path / "run.json").unlink()
    code, said = ended(lab.start())
    assert code == 2
    assert lab.end().status == "failed"
    assert f"error: {lab.end().reason}\n" == said


def test_a_fault_of_its_own_is_an_end_too(lab: Lab) -> None:
    lab.launch()
    (lab.place / "child.py").rename(lab.place / "gone.py")
    (lab.place / "wrapper.py").write_text("from racelab.sweeps.slurm import entry\nimport sys\nsys.argv.pop(1)\n"
        "def words(task, run): raise KeyError('words')\nsys.exit(entry.main(words=words))\n")  # fmt: skip
    code, said = ended(lab.start())
    assert code == 1
    assert "Traceback" in said
    assert said.splitlines()[-1] == "error: KeyError: 'words'"
    assert lab.end().status == "failed"


# The real thing.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def new_training(lab: Lab, model: Path, name: str) -> RunFolder:
    """A launch of one real run, by the command line that jobs use."""
    (lab.place / "wrapper.py").write_text(
        "import sys; from racelab.sweeps.slurm import entry; sys.argv.pop(1); sys.exit(entry.main())"
    )
    batch = make_batch(tasks=(Task("run", run=name, title="tiny"),))
    launch = make_launch(lab.root, batch, uid=f"20260102T030405-{len(name):06x}")
    composed = compose(overrides(model, lab.root))
    mine = Assignment(launch.uid, "cells", 0, 1)
    run = new_run(
        composed.config, root=lab.root, composed_yaml=composed.yaml, overrides=[], command="", run_id=name,
        more={"launch": mine.to_json()},
    )  # fmt: skip
    lab.folder = LaunchFolder.create(launch)
    lab.folder.record(intent(batch, 1))
    return run


def weights(run: RunFolder) -> bytes:
    return (max((run.path / "checkpoints").glob("step-*")) / "tensors.safetensors").read_bytes()


def test_a_real_run_fails_with_its_own_last_line_and_shows_its_traceback(lab: Lab, model: Path) -> None:
    run = new_training(lab, model, "broken")
    config = run.path / "config" / "composed.yaml"
    config.write_text(config.read_text().replace(str(model), f"{model}-gone"))
    assert ended(lab.start(), 60)[0] == 2
    log = (run.path / "attempts" / "12-r0.log").read_text()
    assert "Traceback" in log
    assert log.splitlines()[-1] == f"error: {lab.end().reason}"
    assert f"{model}-gone" in lab.end().reason
    assert (run.status(), run.info()["reason"]) == ("failed", lab.end().reason)


@pytest.mark.slow
def test_a_real_run_that_is_preempted_ends_with_the_weights_of_one_that_is_not(lab: Lab, model: Path) -> None:
    whole = new_training(lab, model, "whole")
    assert ended(lab.start(), 120)[0] == 0
    run = new_training(lab, model, "preempted")
    process = lab.start()
    wait(lambda: any((run.path / "checkpoints").glob("step-*")), 120)
    process.send_signal(signal.SIGTERM)
    assert ended(process, 60)[0] == 143
    first = lab.end()
    assert first.status == "requeued"
    assert first.step is not None
    assert 0 < first.step < STEPS
    lab.state("RUNNING")
    assert ended(lab.start(SLURM_RESTART_COUNT="1"), 120)[0] == 0
    assert (lab.end().status, lab.end().step) == ("finished", STEPS)
    assert [attempt["from_step"] for attempt in run.attempts()] == [0, first.step]
    assert weights(run) == weights(whole)


# The child's environment.


def test_no_more_threads_than_cores() -> None:
    """8 asked for, 4 usable: 4; the user's own number stays."""
    assert "OMP_NUM_THREADS" not in child_environment({}, 4)
    assert child_environment({"SLURM_CPUS_PER_TASK": "8"}, 4)["OMP_NUM_THREADS"] == "4"
    assert child_environment({"SLURM_CPUS_PER_TASK": "2"}, 4)["OMP_NUM_THREADS"] == "2"
    assert (
        child_environment({"SLURM_CPUS_PER_TASK": "8", "OMP_NUM_THREADS": "1"}, 4)["OMP_NUM_THREADS"] == "1"
    )


@pytest.mark.parametrize(
    ("uri", "ship", "expected"),
    [
        ("null", "auto", "0"),
        ("sqlite:////tmp/x.db", "auto", "0"),
        ("http://server:5000", "auto", None),
        ("http://server:5000", "never", "0"),
        ("null", "always", "1"),
    ],
)
def test_jobs_write_to_a_server_but_not_to_a_file_that_they_share(
    tmp_path: Path, uri: str, ship: Any, expected: str | None
) -> None:
    yaml = f"tracking: {{uri: {uri}}}\n" if uri == "null" else f"tracking: {{uri: '{uri}'}}\n"
    run = RunFolder.create(tmp_path, "run", composed_yaml=yaml, overrides=[], info={}, run_id="run")
    assert shipping(run, ship).get("RACELAB_SHIP") == expected


def test_the_process_is_ready_for_signals_before_it_loads_anything_heavy() -> None:
    code = (
        "import sys; from racelab.sweeps.slurm import entry; early = set(sys.modules);"
        "import racelab.sweeps.slurm.work; heavy = {'torch', 'mlflow', 'hydra', 'submitit', 'omegaconf', 'pandas'};"
        "print(*sorted(heavy & set(sys.modules)), *sorted({'pydantic', 'subprocess'} & early))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
