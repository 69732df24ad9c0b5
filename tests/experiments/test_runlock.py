"""Who may work on a run: waiting for the process of a replaced attempt, and holders on other hosts."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from racelab.experiments import fence, runlock
from racelab.experiments.errors import FencedError, RunFolderError
from racelab.experiments.runfolder import STALE_S, RunFolder

from .fenced import WAIT_S, WRITE_FOR_EVER, heard, make, process, taken


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make(tmp_path)


TAKE_LOCK = """
say("asks")
with run.lock():
    say("has it")
    sys.stdin.readline()
"""
HOLD_LOCK = """
lock = run.lock()
say("has it")
time.sleep(60)
"""


def test_a_new_attempt_waits_until_the_old_process_is_dead(run: RunFolder) -> None:
    with process(HOLD_LOCK, run, taken(run, "A")) as old:
        assert heard(old) == "has it"
        with process(TAKE_LOCK, run, taken(run, "B")) as new:
            assert heard(new) == "asks"
            assert heard(new, 0.8) == ""  # without a fence it would have given up by now
            assert new.poll() is None
            old.kill()
            assert heard(new) == "has it"
            assert run.holder() == {**(run.holder() or {}), "pid": new.pid, "fence": "B"}


def test_a_new_attempt_gets_the_lock_of_one_that_noticed(run: RunFolder) -> None:
    """No kill at all: the old process ends because of its fence, and the waiting one goes on."""
    with process(WRITE_FOR_EVER, run, taken(run, "A")) as old:
        assert heard(old) == "writing"
        with process(TAKE_LOCK, run, taken(run, "B")) as new:
            assert (heard(new), heard(new)) == ("asks", "has it")
            assert run.status() == "running"
        assert old.wait(WAIT_S) == 1


def test_who_is_replaced_while_waiting_stops_waiting(run: RunFolder) -> None:
    with process(HOLD_LOCK, run, taken(run, "A")) as old:
        assert heard(old) == "has it"
        with process(TAKE_LOCK, run, taken(run, "B")) as new:
            assert heard(new) == "asks"
            taken(run, "C", job_id="13")
            _, error = new.communicate(timeout=WAIT_S)
            assert "FencedError" in error
            assert "job 13" in error


def test_who_is_replaced_just_before_the_lock_is_free_does_not_take_it(run: RunFolder) -> None:
    lock = run.lock()
    with process(TAKE_LOCK, run, taken(run, "B")) as new:
        assert heard(new) == "asks"
        new.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, new.pid, os.WSTOPPED | os.WNOWAIT)
        taken(run, "C")
        lock.release()
        new.send_signal(signal.SIGCONT)
        output, error = new.communicate(timeout=WAIT_S)
    assert output == ""
    assert "FencedError" in error
    assert run.holder() is None


def test_a_replaced_process_does_not_so_much_as_make_the_lock(run: RunFolder) -> None:
    taken(run, "B")
    with fence.hold(run.path, "A"), pytest.raises(FencedError):
        run.lock()
    assert not (run.path / "lock").exists()


def test_a_replaced_process_that_will_not_go_is_passed_over_after_the_wait(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspended, it keeps its lock for ever; awake again it finds that the lock is another's."""
    monkeypatch.setenv("RACELAB_FENCE_WAIT", "1")
    with process(HOLD_LOCK + "lock.release()\nsay('let go')", run, taken(run, "A")) as old:
        assert heard(old) == "has it"
        old.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        with fence.hold(run.path, taken(run, "B")), run.lock():
            assert 1 <= time.monotonic() - start < 10
            mine = run.holder()
            assert mine is not None
            assert (mine["pid"], mine["fence"]) == (os.getpid(), "B")
            old.send_signal(signal.SIGCONT)
            old.terminate()
            old.wait(WAIT_S)
            assert run.holder() == mine
            assert run.is_held()
            with process(TAKE_LOCK, run) as third:  # the lock that counts is the new one
                assert heard(third) == "asks"
                assert third.wait(WAIT_S) != 0
        assert run.holder() is None


def test_the_wait_has_an_end_and_names_a_process_that_nobody_has_replaced(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACELAB_FENCE_WAIT", "1")
    with process(HOLD_LOCK, run) as old:
        assert heard(old) == "has it"
        with (
            fence.hold(run.path, taken(run, "B")),
            pytest.raises(RunFolderError, match=rf"in use by pid {old.pid} .* after 1 s of waiting"),
        ):
            run.lock()


def elsewhere(run: RunFolder, age_s: float, held: str | None) -> None:
    """As if a process on another host had the lock, whose flock does not reach this one."""
    body = {"pid": 7, "host": "elsewhere", "since": "2026-03-04T05:06:07+00:00", "fence": held}
    (run.path / "lock").write_text(json.dumps(body))
    (run.path / "heartbeat").touch()
    seen = time.time() - age_s
    os.utime(run.path / "heartbeat", (seen, seen))


def test_without_a_fence_a_living_holder_on_another_host_is_respected(run: RunFolder) -> None:
    for held in (None, "A"):
        elsewhere(run, 30, held)
        with pytest.raises(RunFolderError, match=r"in use by pid 7 on host elsewhere; .* again in (90|89) s"):
            run.lock()
    assert (run.holder() or {})["host"] == "elsewhere"
    elsewhere(run, STALE_S + 1, None)
    with run.lock():
        assert (run.holder() or {})["host"] == socket.gethostname()


@pytest.mark.parametrize("letting_go", [False, True])
def test_a_replaced_holder_on_another_host_is_waited_for_until_it_is_silent_or_gone(
    run: RunFolder, letting_go: bool
) -> None:
    """Silent for two beats of 10 s; the file's age says 19 at first."""
    elsewhere(run, 3 if letting_go else 19, "A")
    start = time.monotonic()
    if letting_go:
        threading.Timer(0.5, lambda: os.truncate(run.path / "lock", 0)).start()
    with fence.hold(run.path, taken(run, "B")), run.lock():
        assert (0.4 if letting_go else 0.9) < time.monotonic() - start < 10
        assert (run.holder() or {})["fence"] == "B"


@pytest.mark.parametrize(("held", "passed"), [("A", True), (None, False), ("B", False)])
def test_a_holder_on_another_host_that_stays_alive_is_passed_over_only_if_it_was_replaced(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, held: str | None, passed: bool
) -> None:
    """One that holds no fence, or the same one, could go on writing: nothing would stop it."""
    monkeypatch.setenv("RACELAB_FENCE_WAIT", "0.4")
    elsewhere(run, 0, held)
    start = time.monotonic()
    with fence.hold(run.path, taken(run, "B")):
        if passed:
            run.lock().release()
        else:
            with pytest.raises(RunFolderError, match="in use by pid 7 on host elsewhere"):
                run.lock()
    assert 0.4 <= time.monotonic() - start < 10


def test_who_is_replaced_while_waiting_for_another_host_stops_waiting(run: RunFolder) -> None:
    elsewhere(run, 0, "A")
    with fence.hold(run.path, taken(run, "B")):
        threading.Timer(0.3, lambda: os.replace(run.path / "next", run.path / "fence")).start()
        (run.path / "next").write_text((run.path / "fence").read_text().replace('"B"', '"C"'))
        start = time.monotonic()
        with pytest.raises(FencedError):
            run.lock()
        assert time.monotonic() - start < 10
    assert (run.holder() or {})["fence"] == "A"


def test_a_replaced_holder_neither_beats_nor_wipes_out_the_name_of_the_next(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runlock, "HEARTBEAT_S", 0.02)
    with fence.hold(run.path, taken(run, "A")):
        lock = run.lock()
        taken(run, "B")
        lock._thread.join(WAIT_S)
        assert not lock._thread.is_alive()
        elsewhere(run, 50, "B")
        lock.release()
    assert (run.holder() or {})["fence"] == "B"
    assert (run.heartbeat_age() or 0) > 49


def test_a_person_who_takes_over_a_silent_run_stops_its_process_for_good(run: RunFolder) -> None:
    taken(run, "A")
    elsewhere(run, STALE_S + 1, "A")
    run.lock().release()
    with fence.hold(run.path, "A"), pytest.raises(FencedError, match=f"pid {os.getpid()} on host"):
        run.update(steps=3)
    taken(run, "B")  # of a job that is just starting, and has not got the lock yet
    elsewhere(run, STALE_S + 1, "A")
    run.lock().release()
    with fence.hold(run.path, "B"):
        run.update(steps=4)
