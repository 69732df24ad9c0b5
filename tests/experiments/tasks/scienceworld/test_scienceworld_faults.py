"""Simulators that die, hang, do not start or outlive their use."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from racelab.experiments.episodes import Instance, Turn
from racelab.experiments.errors import UnreachableError
from racelab.experiments.tasks.scienceworld import jvm
from racelab.experiments.tasks.scienceworld import pool as pools
from racelab.experiments.tasks.scienceworld.env import ScienceWorldEnv
from racelab.experiments.tasks.scienceworld.jvm import Simulator, SimulatorFaultError
from racelab.experiments.tasks.scienceworld.pool import JvmPool

INSTANCE = Instance("scienceworld", "boil/0", {"task": "boil", "variation": 0})
LOOK = "<think>so</think><action>look around</action>"


def gone(pid):
    """Whether a process has ended (a zombie of another parent counts)."""
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def pids(pool):
    return [simulator.pid for simulator in pool._lent]


@pytest.fixture
def one(installation):
    """A pool of one simulator, which waits two seconds for an answer."""
    pool = JvmPool(lambda: Simulator(installation, 128, 2.0), 1)
    yield pool
    pool.close()


@pytest.mark.slow
def test_killed_and_hung_simulators_score_zero_and_are_replaced(one, rules):
    for number, (kind, signum) in enumerate((("dead", signal.SIGKILL), ("hung", signal.SIGSTOP)), 1):
        env = ScienceWorldEnv(INSTANCE, one, rules)
        env.reset()
        turn = Turn(LOOK, (1,), (0.0,), True, env.step(LOOK).text)
        (pid,) = pids(one)
        os.kill(pid, signum)
        began = time.monotonic()
        seen = env.step(LOOK)
        assert time.monotonic() - began < 4.0
        assert seen.done
        assert seen.info["status"] == "fault"
        assert "the simulator failed" in seen.text
        assert "Final score: 0/100" in seen.text
        result = env.result()
        assert (result.reward, result.solved, result.end_reason) == (0.0, False, "environment_error")
        assert result.metrics["jvm_fault"] == 1.0
        env.close()
        assert wait_until(lambda pid=pid: gone(pid))
        after = ScienceWorldEnv(INSTANCE, one, rules)
        assert after.replay([turn]) is not None  # the next episode is served, the retry's prefix is restored
        after.close()
        counts = one.take_counters()
        assert (counts[f"fault_{kind}"], counts["restarts"]) == (1.0, 1.0), number


@pytest.mark.slow
def test_a_simulator_that_dies_between_episodes_costs_none(one, rules):
    env = ScienceWorldEnv(INSTANCE, one, rules)
    env.reset()
    (pid,) = pids(one)
    env.close()
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: gone(pid) or not one._idle[0].alive)
    again = ScienceWorldEnv(INSTANCE, one, rules)  # seen when it is lent
    assert not again.reset().done
    (pid,) = pids(one)
    os.kill(pid, signal.SIGKILL)
    assert "boil" in again.reset().text  # not seen before it is asked
    assert not again.step(LOOK).done
    counts = one.take_counters()
    assert (counts["fault_dead"], counts["started"], counts["restarts"]) == (2.0, 3.0, 2.0)
    again.close()


@pytest.mark.slow
def test_no_world_ends_the_episode_at_its_first_step(one, rules):
    """An episode has at least one turn."""
    env = ScienceWorldEnv(
        Instance("scienceworld", "boil/9999", {"task": "boil", "variation": 9999}), one, rules
    )
    assert not env.reset().done
    assert env.step(LOOK).done
    assert env.result().end_reason == "environment_error"
    assert env.result().reward == 0.0
    env.close()
    assert one.take_counters()["fault_error"] == 3.0


@pytest.mark.slow
def test_the_process_dies_with_its_parent(installation):
    program = (
        "import sys, time\n"
        "from racelab.experiments.tasks.scienceworld.installation import find_installation\n"
        "from racelab.experiments.tasks.scienceworld.jvm import Simulator\n"
        "simulator = Simulator(find_installation(), 128, 20.0)\n"
        "print(simulator.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        assert not gone(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert wait_until(lambda: gone(pid))


@pytest.mark.slow
def test_one_process(start):
    """Its session, its token, its refusals, its end."""
    simulator = start()
    pid = simulator.pid
    try:
        assert os.getsid(pid) == pid
        port = simulator._gateway.gateway_parameters.port
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as stranger,
            contextlib.suppress(OSError),
        ):
            stranger.sendall(b"c\nz:java.lang.System\ncurrentTimeMillis\ne\n")
            assert not stranger.recv(100).startswith(b"!y")
        assert "boil" in simulator.load("boil", 0, "easy")
        assert simulator.step("look around").moves == 0
        assert "open OBJ" in simulator.templates()
        with pytest.raises(SimulatorFaultError, match="Unknown task") as caught:
            simulator.load("boill", 0, "easy")
        assert caught.value.kind == "error"
        with pytest.raises(SimulatorFaultError, match="cannot be used any more"):
            simulator.step("look around")
    finally:
        simulator.close()
    simulator.close()
    assert gone(pid)


def java(tmp_path, text):
    program = tmp_path / "java"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


def test_a_java_that_does_not_start(installation, tmp_path, monkeypatch):
    broken = replace(installation, java=java(tmp_path, "echo 'Could not create the machine' >&2; exit 1"))
    with pytest.raises(SimulatorFaultError, match="Java ended at once: Could not create the machine"):
        Simulator(broken, 128, 2.0)
    silent = replace(installation, java=java(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(jvm, "_START_S", 0.2)
    with pytest.raises(SimulatorFaultError, match="no word from Java"):
        Simulator(silent, 128, 2.0)
    nowhere = replace(installation, java=java(tmp_path, "echo warning; echo 1; echo token; exec sleep 60"))
    monkeypatch.setattr(jvm, "_START_S", 20.0)
    with pytest.raises(SimulatorFaultError, match="did not come up"):
        Simulator(nowhere, 128, 2.0)
    with pytest.raises(SimulatorFaultError, match="cannot run"):
        Simulator(replace(installation, java=str(tmp_path / "none")), 128, 2.0)


class Stub:
    """A simulator for the pool's bookkeeping only."""

    def __init__(self):
        self.fault, self.closed = "", False

    @property
    def alive(self):
        return not self.fault and not self.closed

    def close(self):
        self.closed = True


def test_no_simulator_can_be_started(monkeypatch):
    monkeypatch.setattr(pools, "_BACKOFF_S", 0.0)

    def start():
        raise SimulatorFaultError("start", "Java ended at once")

    pool = JvmPool(start, 1)
    for _ in range(2):  # a failed lease leaves its place free
        with pytest.raises(UnreachableError, match=r"Java ended at once.*task\.jvms or task\.heap_mb"):
            pool.lease()
    assert pool.take_counters()["fault_start"] == 6.0
    pool.close()


def test_leases():
    pool = JvmPool(Stub, 2)
    first, second = pool.lease(), pool.lease()
    assert first is not second
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(pool.lease()), daemon=True)
    waiting.start()
    time.sleep(0.05)
    assert not taken
    pool.give_back(first)
    waiting.join(5)
    assert taken == [first]
    pool.give_back(first)
    pool.give_back(first)  # twice does not matter
    assert pool.lease() is first
    second.fault = "hung"
    third = pool.replace(second)
    assert second.closed
    assert third not in (first, second)
    counts = pool.take_counters()
    assert (counts["started"], counts["restarts"]) == (3.0, 1.0)
    pool.close()
    assert first.closed
    assert third.closed
    with pytest.raises(RuntimeError, match="closed"):
        pool.lease()


def test_many_threads_never_share():
    pool, holders, clashes = JvmPool(Stub, 3), set(), []
    lock = threading.Lock()

    def work():
        for _ in range(50):
            simulator = pool.lease()
            with lock:
                clashes.extend([simulator] if simulator in holders else [])
                holders.add(simulator)
            with lock:
                holders.discard(simulator)
            pool.give_back(simulator)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not clashes
    assert pool.take_counters()["started"] <= 3.0
    pool.close()


def test_closing_wakes_who_waits():
    pool = JvmPool(Stub, 1)
    pool.lease()
    errors = []

    def work():
        try:
            pool.lease()
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=work, daemon=True)
    waiting.start()
    time.sleep(0.05)
    pool.close()
    waiting.join(5)
    assert len(errors) == 1


def test_a_simulator_leaves_nothing_in_the_folder_that_it_was_started_from(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    simulator = start()
    simulator.load("boil", 0, "easy")
    simulator.close()
    assert list(tmp_path.iterdir()) == []
