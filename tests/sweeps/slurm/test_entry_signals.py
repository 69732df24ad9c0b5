"""What runs inside a job, when Slurm stops it: real signals, and a job that asks for its own requeue."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from racelab.sweeps.slurm.folder import End
from racelab.sweeps.slurm.handback import idle_requeues
from racelab.sweeps.slurm.model import Batch, Task
from racelab.sweeps.slurm.supervise import TERM_BUSY_S, busy_after_s, term_patience

from .entry_lab import Lab, ended, wait, wire
from .fake_slurm import FakeSlurm
from .launches import make_batch


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    made = Lab(tmp_path, FakeSlurm.install(tmp_path / "slurm", monkeypatch))
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


def test_a_preempted_run_saves_is_requeued_and_goes_on(lab: Lab) -> None:
    lab.launch(what="long save")
    process = lab.start()
    wait(lab.at_work())
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    assert lab.requeued == ["requeue 12"]
    assert wire(lab.end()) == ("requeued", 143, "12", 0, "node3")
    assert (lab.end().reason, lab.end().step) == ("asked to stop by SIGTERM", 1)
    assert lab.run().status() == "interrupted"
    lab.state("RUNNING")
    (lab.run().path / "what").write_text("")
    assert ended(lab.start(SLURM_RESTART_COUNT="1"))[0] == 0
    assert wire(lab.end()) == ("finished", 0, "12", 1, "node3")
    assert len(lab.run().attempts()) == 2


def test_the_signal_before_the_limit_reaches_the_child_too_and_does_not_kill_it(lab: Lab) -> None:
    lab.launch(make_batch(time_min=1, signal_delay_s=30), what="long save")
    process = lab.start()
    wait(lab.at_work())
    os.kill(int((lab.run().holder() or {})["pid"]), signal.SIGUSR2)
    process.send_signal(signal.SIGUSR2)
    assert ended(process)[0] == 143
    assert (lab.end().status, lab.end().reason, lab.end().step) == ("requeued", "the time limit came", 1)
    assert lab.run().status() == "interrupted"


def test_the_same_signal_long_before_the_limit_is_a_preemption(lab: Lab) -> None:
    """Some sites send it then; that is no limit without progress."""
    lab.launch(what="long")
    process = lab.start()
    wait(lab.at_work())
    process.send_signal(signal.SIGUSR2)
    assert ended(process)[0] == 143
    end = lab.end()
    assert (end.status, end.reason, end.idle_requeues) == ("requeued", "asked to stop by SIGUSR2", 0)


def test_a_job_whose_end_cannot_be_written_goes_on_all_the_same(lab: Lab) -> None:
    lab.launch(what="long")
    process = lab.start()
    wait(lab.at_work())
    (lab.folder.path / "ends").rmdir()
    (lab.folder.path / "ends").touch()
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert (code, lab.requeued) == (143, ["requeue 12"])
    assert "racelab: cannot write" in said


def test_a_stop_that_nobody_asked_for_is_made_good_too(lab: Lab) -> None:
    lab.launch(what="long")
    process = lab.start()
    wait(lab.at_work())
    (lab.run().path / "signal-yourself").touch()
    assert ended(process)[0] == 143
    assert (lab.end().status, lab.end().reason) == ("requeued", "stopped by a signal, not Slurm's")


def test_a_child_that_breaks_while_it_is_stopped_goes_on_later(lab: Lab) -> None:
    """Slurm's SIGTERM reaches what the child has started as well, which a game's process does not survive."""
    lab.launch(what="long break")
    process = lab.start()
    wait(lab.at_work())
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    assert lab.end().status == "requeued"


def stop_with(lab: Lab, before: Callable[[], object], batch: Batch | None = None) -> tuple[int, End]:
    lab.launch(batch, what="long")
    process = lab.start()
    wait(lab.at_work())
    before()
    process.send_signal(signal.SIGTERM)
    return ended(process)[0], lab.end()


def test_a_cancelled_run_is_not_requeued(lab: Lab) -> None:
    code, end = stop_with(lab, lambda: lab.folder.cancel("cells", 0))
    assert (code, end.status, end.reason, lab.requeued) == (143, "stopped", "cancelled", [])


def test_a_job_that_slurm_ends_is_not_requeued(lab: Lab) -> None:
    code, end = stop_with(lab, lambda: lab.state("COMPLETING"))
    reason = "asked to stop by SIGTERM; ended from outside (Slurm says COMPLETING)"
    assert (code, end.status, end.reason, lab.requeued) == (143, "stopped", reason, [])


def test_a_job_that_slurm_has_requeued_itself_says_so(lab: Lab) -> None:
    lab.launch(what="long")
    process = lab.start()
    wait(lab.at_work())
    lab.state("PENDING")
    process.send_signal(signal.SIGTERM)
    wait(lambda: ((end := lab.folder.end("cells", 0)) and end.status) == "requeued")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    assert (lab.end().status, lab.requeued) == ("requeued", [])


def test_requeue_false_leaves_it_to_people(lab: Lab) -> None:
    code, end = stop_with(lab, lambda: None, make_batch(requeue=False))
    assert (code, end.status, lab.requeued) == (143, "stopped", [])
    assert "launcher.requeue=false" in end.reason


def test_a_refused_requeue_is_asked_for_twice_and_said(lab: Lab) -> None:
    code, end = stop_with(lab, (lab.place / "refuse").touch)
    assert (code, end.status, lab.requeued) == (143, "stopped", ["requeue 12", "requeue 12"])
    assert end.reason == "asked to stop by SIGTERM; Slurm refused to requeue the job"


def test_a_scheduler_that_does_not_answer_at_once_is_asked_again(lab: Lab) -> None:
    code, end = stop_with(lab, lambda: lab.slurm.setting(busy=2))
    assert (code, end.status, lab.requeued) == (143, "requeued", ["requeue 12"])


def test_a_job_does_not_end_while_the_scheduler_is_silent(lab: Lab) -> None:
    """HOLD_S is 2 s here."""
    lab.launch(what="long")
    process = lab.start()
    wait(lab.at_work())
    lab.slurm.setting(unreachable=True)
    process.send_signal(signal.SIGTERM)
    wait(lambda: "could not be asked" in (((end := lab.folder.end("cells", 0)) and end.reason) or ""))
    assert process.poll() is None
    assert ended(process)[0] == 143
    assert lab.end().status == "stopped"
    assert "Slurm could not be asked to requeue the job: squeue" in lab.end().reason


def test_a_child_that_is_still_busy_before_the_limit_is_left_to_slurm_and_the_job_requeued(lab: Lab) -> None:
    lab.launch(make_batch(time_min=1, signal_delay_s=30), what="long deaf")
    process = lab.start()
    wait(lab.at_work())
    child = int((lab.run().holder() or {})["pid"])
    process.send_signal(signal.SIGUSR2)
    wait(lambda: lab.requeued == ["requeue 12"])
    assert lab.end().status == "requeued"
    assert process.poll() is None
    os.kill(child, signal.SIGKILL)  # as Slurm does
    assert ended(process)[0] == 143
    assert (lab.end().status, lab.end().step, lab.end().idle_requeues) == ("requeued", None, 1)


def test_a_preempted_child_that_takes_long_to_save_does_not_lose_the_job(lab: Lab) -> None:
    """TERM_BUSY_S is 1 s here; a cluster that cancels kills everything when the grace time is over."""
    lab.launch(what="long deaf")
    process = lab.start()
    wait(lab.at_work())
    child = int((lab.run().holder() or {})["pid"])
    process.send_signal(signal.SIGTERM)
    wait(lambda: lab.requeued == ["requeue 12"])
    assert (lab.end().status, process.poll()) == ("requeued", None)
    (lab.run().path / "checkpoints" / "step-00000004").mkdir()
    os.kill(child, signal.SIGKILL)
    assert ended(process)[0] == 143
    assert (lab.end().status, lab.end().step, lab.requeued) == ("requeued", 4, ["requeue 12"])


def test_how_long_a_child_may_save_is_what_the_partition_does_to_preempted_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requeued by Slurm itself: the whole grace time. Cancelled: half of it, and not less than what nobody knows."""
    partitions = {
        "back": {"PreemptMode": "REQUEUE", "GraceTime": "60"},
        "gone": {"PreemptMode": "CANCEL", "GraceTime": "60"},
        "quick": {"PreemptMode": "CANCEL", "GraceTime": "2"},
    }
    slurm = FakeSlurm.install(tmp_path / "slurm", monkeypatch, partitions=partitions)
    found = [term_patience(name) for name in ("back", "gone", "quick", "nowhere", "")]
    assert found == [math.inf, 30.0, TERM_BUSY_S, TERM_BUSY_S, TERM_BUSY_S]
    for tool in ("scontrol", "squeue"):
        (slurm.folder / tool).unlink()
    monkeypatch.setenv("PATH", str(slurm.folder))
    assert term_patience("back") == TERM_BUSY_S


def test_a_cancelled_job_does_not_come_back_while_its_child_saves(lab: Lab) -> None:
    lab.launch(what="long deaf")
    process = lab.start()
    wait(lab.at_work())
    child = int((lab.run().holder() or {})["pid"])
    lab.state("COMPLETING")
    process.send_signal(signal.SIGTERM)
    wait(lambda: "COMPLETING" in (((end := lab.folder.end("cells", 0)) and end.reason) or ""))
    assert process.poll() is None
    os.kill(child, signal.SIGKILL)
    assert (ended(process)[0], lab.end().status, lab.requeued) == (143, "stopped", [])


def test_the_first_word_is_written_as_soon_as_a_signal_comes(lab: Lab) -> None:
    words = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
        f"while not os.path.exists({str(lab.place / 'go')!r}): time.sleep(0.02)"
    )
    lab.launch(make_batch(requeue=False, tasks=(Task("command", words=(words,)),)))
    process = lab.start(out=lab.place / "out")
    wait(lambda: "up\n" in (lab.place / "out").read_text())
    process.send_signal(signal.SIGTERM)
    wait(lambda: lab.folder.end("cells", 0) is not None)
    assert (lab.end().status, lab.end().reason) == ("stopped", "asked to stop by SIGTERM")
    assert process.poll() is None
    (lab.place / "go").touch()
    assert process.wait(30) == 0
    assert lab.end().status == "finished"


@pytest.mark.parametrize("what", ["long", "long deaf"])
def test_an_old_start_does_not_requeue_the_later_one(lab: Lab, what: str) -> None:
    """Its node came back after Slurm had given it up; the later start has not taken the fence yet."""
    lab.launch(what=what)
    process = lab.start()
    wait(lab.at_work())
    child = int((lab.run().holder() or {})["pid"])
    lab.slurm.set("12", restarts=1)
    process.send_signal(signal.SIGTERM)
    if "deaf" in what:
        asked = len(lab.slurm.calls("squeue"))
        wait(lambda: len(lab.slurm.calls("squeue")) > asked)
        os.kill(child, signal.SIGKILL)
    code, said = ended(process)
    assert (code, lab.requeued, lab.slurm.job("12")["restarts"]) == (0, [], 1)
    assert "a later start has the job" in said
    assert lab.end().status == "stopped"  # its first word; that of the later start will replace it


def test_a_run_that_stops_by_itself_again_and_again_is_given_up(lab: Lab) -> None:
    lab.launch(make_batch(max_idle_requeues=1), what="long")
    found = []
    for restart in range(2):
        lab.state("RUNNING")
        process = lab.start(SLURM_RESTART_COUNT=str(restart))
        (lab.run().path / "signal-yourself").touch()
        found.append((ended(process)[0], lab.end().status, lab.end().idle_requeues))
    assert found == [(143, "requeued", 1), (1, "failed", 2)]
    assert lab.end().reason.startswith(
        "stopped 2 times in a row without a new checkpoint (none so far), now by a signal that Slurm did not send"
    )
    assert lab.requeued == ["requeue 12"]


def test_a_run_that_gets_nowhere_before_its_limit_is_given_up(lab: Lab) -> None:
    """max_idle_requeues=1: the limits end attempts 0 (a first checkpoint), 1 and 2 (none); 2 is the last."""
    lab.launch(make_batch(time_min=1, signal_delay_s=30, max_idle_requeues=1), what="long save")
    found = []
    for restart in range(3):
        lab.state("RUNNING")
        process = lab.start(SLURM_RESTART_COUNT=str(restart))
        wait((lab.run().path / "attempts" / f"12-r{restart}.log").exists)
        wait(lambda: lab.run().is_held())
        process.send_signal(signal.SIGUSR2)
        found.append((ended(process)[0], lab.end().status, lab.end().step, lab.end().idle_requeues))
        (lab.run().path / "what").write_text("long")
    assert found == [(143, "requeued", 1, 0), (143, "requeued", 1, 1), (1, "failed", 1, 2)]
    assert lab.end().reason == (
        "the time limit came 2 times in a row without a new checkpoint (the newest is of step 1); raise "
        "launcher.time_min (now 1) or lower checkpoint.every"
    )
    assert len(lab.requeued) == 2


@pytest.mark.parametrize(
    ("idle", "before", "after", "at_limit", "expected"),
    [
        (None, None, None, True, 1),
        (None, None, 4, True, 0),
        (1, 4, 8, True, 0),
        (1, 4, 4, True, 2),
        (1, 4, 4, False, 1),
        (1, 4, 2, True, 2),
    ],
)
def test_counting_limits_without_progress(
    idle: int | None, before: int | None, after: int | None, at_limit: bool, expected: int
) -> None:
    last = None if idle is None else End("requeued", 143, "", "12", 0, "", "", idle_requeues=idle)
    assert idle_requeues(last, before, after, at_limit) == expected


def test_a_job_is_handed_back_while_enough_time_is_left_to_ask() -> None:
    """120 - 30; half of what is left where it is little: 40 / 2, 10 / 2."""
    assert [busy_after_s(delay) for delay in (600, 120, 40, 10)] == [570.0, 90.0, 20.0, 5.0]


def test_a_child_does_not_outlive_its_job(lab: Lab) -> None:
    lab.launch(what="long")
    process = lab.start()
    wait(lab.at_work())
    process.kill()
    wait(lambda: lab.run().status() == "interrupted")


def test_what_a_command_leaves_behind_goes_with_it(lab: Lab) -> None:
    words = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    lab.launch(make_batch(tasks=(Task("command", words=(words,)),)))
    code, said = ended(lab.start())  # which waits for the end of the output, too
    assert code == 0
    wait(lambda: not Path(f"/proc/{said.split()[-1]}").exists())
