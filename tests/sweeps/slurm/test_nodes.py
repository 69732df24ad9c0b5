"""A task on several nodes: a process for each, which find one another through files."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from racelab.experiments import fence
from racelab.experiments.fsio import write_json_atomic
from racelab.sweeps.slurm.model import Task

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


def test_the_first_rank_waits_for_the_others_and_they_for_its_end(lab: Lab) -> None:
    lab.launch(make_batch(nodes=2), what="long")
    nodes = lab.folder.nodes_dir("cells", 0)
    nodes.mkdir()
    write_json_atomic(nodes / "ended.json", {"job": "12", "restart": 0})  # of the start before
    write_json_atomic(
        nodes / "1.json",
        {"rank": 1, "host": "h", "node": "node9", "address": "", "pid": 1, "job": "12", "restart": 0},
    )
    two = {"SLURM_NNODES": "2", "SLURM_RESTART_COUNT": "1"}
    first = lab.start(**two)
    wait(lambda: (nodes / "0.json").exists())
    assert not lab.at_work()()
    second = lab.start(**two, SLURM_PROCID="1", SLURMD_NODENAME="node4", SLURM_LAUNCH_NODE_IPADDR="127.0.0.1")
    wait(lab.at_work())
    there = json.loads((nodes / "1.json").read_text())
    assert there == {
        "rank": 1, "host": os.uname().nodename, "node": "node4", "address": "127.0.0.1", "pid": second.pid,
        "job": "12", "restart": 1,
    }  # fmt: skip
    assert json.loads((lab.run().path / "seen.json").read_text())["RACELAB_NODES_DIR"] == str(nodes)
    second.send_signal(signal.SIGTERM)  # Slurm sends it to every node; this one may still be needed
    time.sleep(0.5)
    assert second.poll() is None
    first.send_signal(signal.SIGTERM)
    assert (ended(first)[0], ended(second)[0]) == (143, 0)
    assert lab.end().status == "requeued"


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(lab: Lab) -> None:
    lab.launch(make_batch(nodes=3))
    three = {"SLURM_NNODES": "3"}
    second = lab.start(**three, SLURM_PROCID="1", SLURMD_NODENAME="node4")
    code, said = ended(lab.start(**three))
    assert code == 4
    assert "error: rank 2 of 3 has not reported" in said
    assert (lab.end().status, lab.end().reason) == ("failed", said.strip().removeprefix("error: "))
    assert lab.run().status() == "failed"
    assert ended(second)[0] == 0


def test_a_rank_that_breaks_says_so_and_the_first_asks_for_no_requeue(lab: Lab) -> None:
    """srun stops the first rank then, as a preemption does."""
    lab.launch(make_batch(nodes=2), what="long")
    (lab.folder.nodes_dir("cells", 0) / "1.json").mkdir(parents=True)  # where its report would be
    first = lab.start(SLURM_NNODES="2")
    wait((lab.folder.nodes_dir("cells", 0) / "0.json").exists)
    code, said = ended(lab.start(SLURM_NNODES="2", SLURM_PROCID="1", SLURMD_NODENAME="node4"))
    first.send_signal(signal.SIGTERM)
    assert code == 2
    assert (wire(lab.end()), lab.end().reason) == (
        ("failed", 2, "12", 0, "node4"),
        f"rank 1 on node4: {said.strip().removeprefix('error: ')}",
    )
    assert ended(first)[0] == 2
    assert (lab.end().status, lab.requeued) == ("failed", [])


def test_a_replaced_start_that_still_waits_for_its_ranks_asks_for_nothing(lab: Lab) -> None:
    lab.launch(make_batch(nodes=2), what="long")
    old = lab.start(SLURM_NNODES="2")
    wait((lab.folder.nodes_dir("cells", 0) / "0.json").exists)
    present = fence.read(lab.run().path)
    assert present is not None
    fence.take(lab.run().path, fence.new_token(), {"job_id": "12", "restart": 1, "launch": present.launch})
    old.send_signal(signal.SIGTERM)
    assert (ended(old)[0], lab.requeued, lab.folder.end("cells", 0)) == (0, [], None)


def test_a_command_on_every_node_fails_with_any_of_them_and_is_not_requeued(lab: Lab) -> None:
    """srun stops the other ranks then, which looks like a preemption to them."""
    words = (
        "import os, sys, time; os.environ['SLURM_PROCID'] == '1' and sys.exit('error: no'); time.sleep(60)"
    )
    lab.launch(make_batch(nodes=2, tasks=(Task("command", words=(words,), every_node=True),)))
    first = lab.start(SLURM_NNODES="2")
    second = lab.start(SLURM_NNODES="2", SLURM_PROCID="1", SLURMD_NODENAME="node4")
    assert ended(second)[0] == 1
    wait(lambda: (lab.folder.nodes_dir("cells", 0) / "0.json").exists())
    first.send_signal(signal.SIGTERM)
    assert ended(first)[0] == 1
    assert (lab.end().status, lab.end().node, lab.requeued) == ("failed", "node4", [])
    assert lab.end().reason.startswith("rank 1 on node4: ")


def test_a_command_on_every_node_that_is_preempted_is_requeued_by_its_first_rank(lab: Lab) -> None:
    """The others must not fail: srun would kill the first rank before it has asked."""
    words = (
        "import os, signal, time; signal.signal(15, lambda *_: os._exit(143)); print('up'); time.sleep(60)"
    )
    lab.launch(make_batch(nodes=2, tasks=(Task("command", words=(words,), every_node=True),)))
    logs = [lab.place / f"{rank}.out" for rank in range(2)]
    ranks = [
        lab.start(SLURM_NNODES="2", SLURM_PROCID=str(rank), SLURMD_NODENAME=f"node{3 + rank}", out=log)
        for rank, log in enumerate(logs)
    ]
    (lab.place / "pid").write_text(str(ranks[0].pid))
    wait(lambda: all("up\n" in log.read_text() for log in logs))
    for process in ranks:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(30) for process in ranks] == [143, 0]
    assert (wire(lab.end()), lab.requeued) == (("requeued", 143, "12", 0, "node3"), ["requeue 12"])
