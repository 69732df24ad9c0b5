"""The test cluster itself behaves as a real one: what the other tests here build on."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .lab import SCRIPTS, Cluster, NotThereError, Options, alive, outside, processes

FURTHER = Callable[[Options], Cluster]


def pids_of(folder: Path) -> set[int]:
    """Every process that was started with this folder as its cluster's, or names it."""
    found = set()
    for pid, line in processes().items():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has just ended; or this machine's init
        if str(folder) in line or f"RACELAB_SLURM_DIR={folder}".encode() in environment:
            found.add(pid)
    return found


def mounts() -> set[str]:
    return set(Path("/proc/mounts").read_text().splitlines())


def port_of(cluster: Cluster) -> int:
    text = (cluster.folder / "env.sh").read_text()
    return int(text.partition("RACELAB_SLURM_PORT=")[2].split()[0])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_two_nodes_with_eight_gpus_each_are_sixteen(cluster: Cluster, tmp_path: Path) -> None:
    said = tmp_path / "said"
    line = f"srun --ntasks-per-node=1 bash -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES' > {said}"
    job = cluster.wrap(line, "-p", "gpu", "-N2", "--ntasks-per-node=1", "--gpus-per-node=8")
    cluster.wait_state(job, "COMPLETED", 60)

    tres = cluster.alloc_tres(job)
    assert (tres["gres/gpu"], tres["node"]) == ("16", "2")
    lines = [line.split() for line in said.read_text().splitlines()]
    assert len({node for node, _ in lines}) == 2
    assert {gpus for _, gpus in lines} == {"0,1,2,3,4,5,6,7"}


def test_a_job_in_high_takes_a_node_and_its_victim_starts_again(cluster: Cluster) -> None:
    victim = cluster.wrap("sleep 300", "-w", "node1", "--exclusive")
    cluster.wait_state(victim, "RUNNING", 30)
    winner = cluster.wrap("sleep 3", "-p", "high", "-w", "node1", "--exclusive")
    cluster.wait_state(winner, "COMPLETED", 60)

    cluster.wait_state(victim, "RUNNING", 60)
    assert cluster.job(victim)["Restarts"] == "1"
    cluster.wait(lambda: "PREEMPTED" in str(cluster.sacct(victim)), 10, "sacct's row of the preempted start")


def test_a_lost_node_gives_its_job_to_another_and_comes_back(cluster: Cluster) -> None:
    job = cluster.wrap("sleep 300")
    cluster.wait_state(job, "RUNNING", 30)
    node = cluster.node(cluster.job(job)["NodeList"])
    first = cluster.wait(lambda: node.pids("sleep 300"), 10, "the job's process")
    node.kill()
    cluster.wait(lambda: not any(alive(pid) for pid in first), 10, "the process to die with its node")
    assert node.pids() == []

    cluster.wait(lambda: cluster.job(job)["Restarts"] == "1", 90, "a requeue")
    cluster.wait_state(job, "RUNNING", 60)
    assert cluster.job(job)["NodeList"] != node.name
    node.start()
    cluster.wait(lambda: node.state() in {"idle", "mixed"}, 30, f"{node.name} to come back")


def test_a_step_outlives_its_slurmd(cluster: Cluster) -> None:
    node = cluster.node("node2")
    job = cluster.wrap("sleep 301", "-w", "node2")
    cluster.wait_state(job, "RUNNING", 30)
    (step,) = cluster.wait(lambda: [p for p in node.pids("sleep 301") if is_sleep(p)], 10, "the step")
    node.stop()
    assert not any("slurmd" in line.split()[:1] for line in (processes()[pid] for pid in node.pids()))
    assert alive(step)

    node.start()
    assert cluster.tool("srun", "-w", node.name, "hostname", timeout=60) == node.name
    assert cluster.state(job) == "RUNNING"
    assert alive(step)


def is_sleep(pid: int) -> bool:
    return processes().get(pid, "").startswith("sleep")


def test_pids_inside_a_node_are_other_numbers(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.wrap(f"echo $$ > {tmp_path}/pid; sleep 302; :", "-w", "node3")
    cluster.wait_state(job, "RUNNING", 30)
    (outer,) = cluster.wait(lambda: cluster.node("node3").pids("sleep 302"), 10, "the job's process")
    inner = Path(f"/proc/{outer}/status").read_text().partition("NSpid:")[2].splitlines()[0].split()
    assert inner[0] == str(outer)
    assert int(inner[1]) < outer
    assert cluster.node("node4").pids("sleep 302") == []


def test_a_second_up_changes_nothing(cluster: Cluster) -> None:
    job = cluster.wrap("sleep 300")
    cluster.wait_state(job, "RUNNING", 30)
    before = {path.name: path.read_text() for path in (cluster.folder / "run").glob("*.pid")}
    cluster.up()
    assert {path.name: path.read_text() for path in (cluster.folder / "run").glob("*.pid")} == before
    assert len(before) == 12  # four daemons; the first process and the slurmd of each node
    assert cluster.state(job) == "RUNNING"


def test_a_cluster_that_is_up_refuses_other_options(cluster: Cluster) -> None:
    other = Cluster(cluster.folder, Options(preempt="CANCEL"))
    with pytest.raises(NotThereError, match="is up with other options"):
        other.up()
    assert cluster.tool("sinfo", "-h", "-p", "cpu", "-o", "%D %T") == "4 idle"


def test_without_accounting_slurmctld_alone_knows_the_jobs(further: FURTHER) -> None:
    cluster = further(Options(accounting="none", nodes=1))
    good, bad = cluster.wrap("true"), cluster.wrap("exit 7")
    assert cluster.wait_state(good, {"COMPLETED", "FAILED"}, 30) == "COMPLETED"
    assert cluster.wait_state(bad, {"COMPLETED", "FAILED"}, 30) == "FAILED"
    assert cluster.job(bad)["ExitCode"] == "7:0"
    with pytest.raises(NotThereError, match="accounting storage is disabled"):
        cluster.sacct(good)


def test_a_cluster_may_cancel_what_it_preempts(further: FURTHER) -> None:
    cluster = further(Options(preempt="CANCEL", accounting="none", nodes=1))
    victim = cluster.wrap("sleep 300", "--exclusive")
    cluster.wait_state(victim, "RUNNING", 30)
    cluster.wrap("sleep 1", "-p", "high", "--exclusive")
    assert cluster.wait_state(victim, {"PREEMPTED", "PENDING"}, 60) == "PREEMPTED"


@pytest.mark.parametrize(
    "options", [Options(), Options(net="netns", accounting="none", nodes=2)], ids=lambda o: o.net
)
@pytest.mark.usefixtures("slurm")
def test_down_leaves_nothing_behind(options: Options) -> None:
    if options.net == "netns" and shutil.which("ip") is None:
        pytest.skip("netns mode needs the Debian package iproute2")
    before, links = mounts(), set(os.listdir("/sys/class/net"))
    cluster = Cluster.bring_up(options)
    try:
        job = cluster.wrap("srun hostname; sleep 300", f"-N{options.nodes}")
        cluster.wait_state(job, "RUNNING", 30)
        port = port_of(cluster)
        ours = pids_of(cluster.folder)
        assert len(ours) >= 2 + 3 * options.nodes
    finally:
        cluster.down()

    assert pids_of(cluster.folder) == set()
    assert not any(alive(pid) for pid in ours)
    assert not cluster.folder.exists()
    assert mounts() == before
    assert set(os.listdir("/sys/class/net")) == links
    assert not any(listens(port + offset) for offset in range(32))


@pytest.mark.usefixtures("slurm")
def test_down_spares_a_stranger_with_a_recycled_pid() -> None:
    folder = Path(tempfile.mkdtemp(prefix="rls-", dir="/tmp"))
    (folder / "run").mkdir()
    (folder / "env.sh").write_text(f"export RACELAB_SLURM_DIR={folder} RACELAB_SLURM_NET=host\n")
    with subprocess.Popen(["sleep", "60"]) as stranger:
        for name in ("munged", "slurmctld", "slurmdbd", "mariadbd", "node1"):
            (folder / "run" / f"{name}.pid").write_text(f"{stranger.pid}\n")
        environment = {**outside(), "RACELAB_SLURM_DIR": str(folder)}
        subprocess.run([SCRIPTS / "down.sh", "--purge"], env=environment, timeout=60, check=True)
        assert stranger.poll() is None
        stranger.kill()
    assert not folder.exists()
