"""What is refused before anything is submitted, with Slurm's reason and the key, and what is only warned of."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

import pytest

from racelab.configs.schema_launcher import ContainerConfig
from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.sweeps.slurm import executor, mounts, preflight
from racelab.sweeps.slurm.model import Batch, Launch, Task
from racelab.sweeps.slurm.scheduler import Scheduler

from .fake_slurm import FakeSlurm
from .launches import make_batch, make_launch

COMMAND = (Task("command", words=("eval", "x"), title="eval"),)
HERE = {f"node{n}": {"NodeAddr": "127.0.0.1"} for n in (1, 2, 3, 4)}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Four nodes with 32 CPUs, 195.3 GB and 8 GPUs, all of them this machine; cpu is the default partition."""
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_QOS"):
        monkeypatch.delenv(name, raising=False)
    return FakeSlurm.install(tmp_path / "slurm", monkeypatch, nodes=HERE)


def check(folder: Path, *batches: Batch, launch: Launch | None = None) -> list[str]:
    """The warnings, for the scripts that would be submitted."""
    launch = launch or make_launch(folder, *batches)
    scripts = {}
    for batch in launch.batches:
        scripts[batch.name] = folder / f"{batch.name}.sh"
        scripts[batch.name].write_text(executor.script_text(launch, batch, 1, folder))
    return preflight.check(launch, Scheduler(), scripts)


def refused(folder: Path, *batches: Batch) -> list[str]:
    """The lines of the error."""
    with pytest.raises(ConfigError) as failure:
        check(folder, *batches)
    return str(failure.value).splitlines()


def test_nothing_to_say_of_a_launch_that_fits(slurm: FakeSlurm, tmp_path: Path) -> None:
    assert (
        check(tmp_path, make_batch(runs=3, nodes=2, gpus_per_node=8, cpus_per_task=32, partition="gpu")) == []
    )
    assert slurm.jobs() == {}


def test_slurm_is_asked_once_for_each_different_allocation_with_the_largest_array(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    batches = [
        make_batch(runs=2, stage="cells"),
        make_batch(runs=9, stage="more", max_parallel=4),
        make_batch(tasks=COMMAND, stage="eval", time_min=30),
    ]
    check(tmp_path, *batches)
    tested = [call[1].rpartition("/")[2] for call in slurm.calls("sbatch")]
    assert tested == ["more.sh", "eval.sh"]
    assert {call[0] for call in slurm.calls("sbatch")} == {"--test-only"}


# Refusals


def test_an_unknown_partition_with_near_names(slurm: FakeSlurm, tmp_path: Path) -> None:
    assert refused(tmp_path, make_batch(partition="gpus")) == [
        'launcher.partition=gpus is no partition of this cluster; did you mean gpu? (Slurm: "invalid partition '
        'specified: gpus; Invalid partition name specified")'
    ]
    (line,) = refused(tmp_path, make_batch(partition="zzz"))
    assert line.startswith(
        "launcher.partition=zzz is no partition of this cluster; there are cpu, short, gpu, high ("
    )


def test_a_partition_from_the_users_own_variable_is_named_so(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nope")
    (line,) = refused(tmp_path, make_batch())
    assert line.startswith("SBATCH_PARTITION=nope is no partition")


def test_a_limit_above_the_partitions_which_slurm_takes_and_never_starts(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    """short gives 30 minutes, cpu a day: a job that may go to either may take a day."""
    (line,) = refused(tmp_path, make_batch(partition="short", time_min=31))
    assert line == (
        "launcher.time_min=31, but a job of partition short gets 30 min at most: it would wait for ever "
        "(PartitionTimeLimit); set launcher.time_min=30, or another launcher.partition"
    )
    assert check(tmp_path, make_batch(partition="short,cpu", time_min=1440)) == []
    (line,) = refused(tmp_path, make_batch(partition="short,cpu", time_min=1441))
    assert "a job of partition short or cpu gets 1440 min at most" in line
    slurm.setting(partitions={"cpu": {"MaxTime": "UNLIMITED"}})
    assert check(tmp_path, make_batch(time_min=100_000)) == []


def test_a_qos_may_lift_the_limit_of_time(slurm: FakeSlurm, tmp_path: Path) -> None:
    (warning,) = check(tmp_path, make_batch(partition="short", time_min=60, qos="long"))
    assert "launcher.time_min=60" in warning
    assert warning.endswith("unless launcher.qos=long allows more")


def test_more_nodes_than_there_are_with_slurms_reason(slurm: FakeSlurm, tmp_path: Path) -> None:
    assert refused(tmp_path, make_batch(nodes=5)) == [
        "5 nodes (backend.nodes or launcher.nodes), but partition cpu has 4 "
        '(Slurm: "Requested node configuration is not available")'
    ]


def test_more_nodes_than_the_partition_gives_a_job(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.setting(partitions={"cpu": {"MaxNodes": "2"}})
    (line,) = refused(tmp_path, make_batch(nodes=3))
    assert "a job of partition cpu gets 2 at most: it would wait for ever (PartitionNodeLimit)" in line
    assert check(tmp_path, make_batch(nodes=2)) == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"cpus_per_task": 33},
            "launcher.cpus_per_task=33, but no node of partition cpu has more than 32 CPUs",
        ),
        ({"mem_gb": 196.0}, "launcher.mem_gb=196, but no node of partition cpu has more than 195.3 GB"),
        (
            {"gpus_per_node": 9},
            "9 GPUs per node (backend.gpus_per_node or launcher.gpus_per_node), but no node of partition cpu has more "
            "than 8",
        ),
    ],
)
def test_more_than_any_node_has(
    slurm: FakeSlurm, tmp_path: Path, asked: dict[str, float], words: str
) -> None:
    """200,000 MB are 195.3 GB."""
    assert refused(tmp_path, make_batch(**asked)) == [
        f'{words} (Slurm: "Requested node configuration is not available")'
    ]


def test_an_array_beyond_the_clusters_limit(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Indices are below MaxArraySize=21: 21 tasks are the most."""
    slurm.setting(config={"MaxArraySize": "21"})
    assert check(tmp_path, make_batch(runs=21)) == []
    (line,) = refused(tmp_path, make_batch(runs=22))
    assert line == (
        "batch cells has 22 tasks, but an array of this cluster at most 21 (MaxArraySize): split the launch "
        '(Slurm: "Invalid job array specification")'
    )


def test_an_account_that_may_not_use_the_partition(slurm: FakeSlurm, tmp_path: Path) -> None:
    """Where accounts are not enforced Slurm takes the job, and it never starts."""
    slurm.setting(partitions={"cpu": {"AllowAccounts": "physics,bio"}, "gpu": {"DenyAccounts": "chem"}})
    assert refused(tmp_path, make_batch(account="chem")) == [
        "launcher.account=chem may not use partition cpu, which takes bio, physics"
    ]
    assert refused(tmp_path, make_batch(account="chem", partition="gpu")) == [
        "launcher.account=chem may not use partition gpu"
    ]
    assert check(tmp_path, make_batch(account="bio")) == []
    assert check(tmp_path, make_batch(account="chem", partition="cpu,short")) == []
    assert check(tmp_path, make_batch()) == []  # whose the default account is, is not known


def test_a_qos_that_the_partition_does_not_take(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.setting(partitions={"cpu": {"AllowQos": "normal"}})
    (line,) = refused(tmp_path, make_batch(qos="long"))
    assert line == "launcher.qos=long may not be used in partition cpu, which takes normal"


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("Invalid account or account/partition combination specified", "launcher.account"),
        ("Invalid qos specification", "launcher.qos"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "launcher.time_min=240"),
        ("Invalid feature specification", "launcher.constraint=h100"),
        ("Invalid node name specified", "launcher.nodelist, launcher.exclude"),
        ("Requested reservation is invalid", "launcher.reservation"),
        ("Node count specification invalid", "launcher.nodes=1"),
        ("User's group not permitted to use this partition", "launcher.partition"),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "launcher.time_min=240, launcher.nodes=1, launcher.cpus_per_task=2, launcher.mem_gb=6.0",
        ),
        (
            "Requested node configuration is not available",
            "launcher.nodes=1, launcher.cpus_per_task=2, launcher.mem_gb=6.0, launcher.constraint=h100",
        ),
        ("Something new", "the launcher's keys"),
    ],
)
def test_slurms_own_reason_stands_with_the_keys_that_decide_it(
    slurm: FakeSlurm, tmp_path: Path, reason: str, change: str
) -> None:
    slurm.setting(refuse=reason)
    assert refused(tmp_path, make_batch(constraint="h100")) == [f'Slurm: "{reason}"; change {change}']


def test_all_problems_at_once_each_with_its_stage(slurm: FakeSlurm, tmp_path: Path) -> None:
    lines = refused(
        tmp_path,
        make_batch(stage="train", partition="short", time_min=60, nodes=5),
        make_batch(stage="eval", tasks=COMMAND, partition="nope"),
        make_batch(stage="report", tasks=COMMAND),
    )
    assert [line.partition(", but")[0].partition(" is ")[0] for line in lines] == [
        "train: 5 nodes (backend.nodes or launcher.nodes)",
        "train: launcher.time_min=60",
        "eval: launcher.partition=nope",
    ]
    assert "Requested node configuration" in lines[0]
    assert "Slurm:" not in lines[1]  # Slurm gives one reason, and that was the other


def test_a_drained_partition_is_refused_as_slurm_does(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.setting(partitions={"gpu": {"State": "DRAIN"}})
    assert refused(tmp_path, make_batch(partition="gpu")) == [
        'Slurm: "Required partition not available (inactive or drain)"; change launcher.partition=gpu'
    ]


def test_a_controller_that_is_away_is_no_refusal(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.setting(unreachable=True)
    with pytest.raises(UnreachableError):
        check(tmp_path, make_batch())


# Not judged where it is not known


def test_where_a_plugin_may_choose_the_partition_the_defaults_limits_are_not_held_against_it(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.setting(config={"JobSubmitPlugins": "lua"})
    assert check(tmp_path, make_batch(time_min=5000)) == []
    assert len(refused(tmp_path, make_batch(time_min=5000, partition="cpu"))) == 1


# Warnings


def test_nodes_that_are_down_make_jobs_wait_although_slurm_calls_them_impossible(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    """`sbatch --test-only` says so with a drained node; sbatch takes the job."""
    slurm.setting(nodes={"node3": {"State": "IDLE+DRAIN"}, "node4": {"State": "DOWN*"}})
    assert check(tmp_path, make_batch(nodes=3)) == [
        'the jobs will have to wait, if Slurm takes them at all (Slurm: "Requested node configuration is not '
        'available"); down, drained or reserved now: node3, node4'
    ]
    assert len(refused(tmp_path, make_batch(nodes=3, gpus_per_node=9))) == 1  # no node has these, up or down


def test_a_partition_that_is_down_makes_jobs_wait(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.setting(partitions={"gpu": {"State": "DOWN"}})
    assert check(tmp_path, make_batch(partition="gpu")) == ["partition gpu is DOWN: jobs wait until it is up"]
    assert check(tmp_path, make_batch(partition="gpu,cpu")) == []


@pytest.mark.parametrize(
    ("time_min", "delay", "words"),
    [(10, 120, "after 420 s"), (4, 120, "after 60 s"), (3, 150, "at once")],
)
def test_attempts_that_are_soon_asked_to_stop(
    slurm: FakeSlurm, tmp_path: Path, time_min: int, delay: int, words: str
) -> None:
    """10 min are 600 s, less 120 s for the signal and the 60 s that it may come early."""
    (warning,) = check(tmp_path, make_batch(time_min=time_min, signal_delay_s=delay))
    assert f"launcher.time_min={time_min} with launcher.signal_delay_s={delay}" in warning
    assert words in warning
    assert warning.endswith("after 2 requeues without a new checkpoint the run is given up")


def test_short_limits_are_fine_for_commands_and_from_eleven_minutes(slurm: FakeSlurm, tmp_path: Path) -> None:
    assert check(tmp_path, make_batch(tasks=COMMAND, time_min=3)) == []
    assert check(tmp_path, make_batch(time_min=11)) == []
    (warning,) = check(tmp_path, make_batch(time_min=5, requeue=False))
    assert warning.endswith("`racelab resume` goes on")


def test_a_cluster_that_cancels_what_it_preempts(slurm: FakeSlurm, tmp_path: Path) -> None:
    """With a grace time the job asks to be requeued before it is cancelled; high stands above all others."""
    slurm.setting(
        partitions={
            "cpu": {"PreemptMode": "CANCEL", "GraceTime": "0"},
            "gpu": {"PreemptMode": "CANCEL", "GraceTime": "10"},
            "high": {"PreemptMode": "CANCEL"},
        }
    )
    assert check(tmp_path, make_batch()) == [
        "partition cpu cancels the jobs that it preempts (PreemptMode=CANCEL): such a run stops at its newest "
        "checkpoint, and `racelab resume` goes on"
    ]
    for partition in ("gpu", "short", "high"):
        assert check(tmp_path, make_batch(partition=partition, time_min=30)) == []
    assert check(tmp_path, make_batch(requeue=False)) == []  # asked for
    slurm.setting(config={"PreemptType": "preempt/none"})
    assert check(tmp_path, make_batch()) == []
    slurm.setting(config={"PreemptType": "preempt/qos", "PreemptMode": "CANCEL"})
    (warning,) = check(tmp_path, make_batch())
    assert warning.startswith("this cluster cancels")


@pytest.mark.parametrize("kind", ["apptainer", "pyxis"])
def test_an_image_needs_slurms_commands_for_the_requeue(
    slurm: FakeSlurm, tmp_path: Path, kind: Literal["apptainer", "pyxis"]
) -> None:
    container = ContainerConfig(kind=kind, image="racelab.sif", mounts=())
    (warning,) = check(tmp_path, make_batch(container=container))
    assert warning.startswith(f"launcher.container.kind={kind}: ")
    assert "squeue and scontrol" in warning
    assert "`racelab resume`" in warning
    assert check(tmp_path, make_batch(container=container, requeue=False)) == []


def test_a_cluster_that_does_not_requeue_by_default_is_no_matter(slurm: FakeSlurm, tmp_path: Path) -> None:
    """JobRequeue=0 is a default; the scripts say --requeue."""
    slurm.setting(config={"JobRequeue": "0"})
    assert check(tmp_path, make_batch()) == []


# Folders that other nodes do not see


def in_memory(tmp_path: Path, cwd: Path) -> list[str]:
    """The warnings of a launch whose runs go to /dev/shm."""
    return check(tmp_path, launch=make_launch(Path("/dev/shm/racelab-none"), make_batch(), cwd=cwd))


def test_a_runs_folder_of_this_machine_alone(slurm: FakeSlurm, tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    assert in_memory(tmp_path, shm) == []  # all nodes are this machine
    slurm.setting(nodes={"node4": {"NodeAddr": "10.0.0.4"}})
    assert in_memory(tmp_path, shm) == [
        "the runs' folder /dev/shm/racelab-none is on a memory file system (tmpfs at /dev/shm), which jobs on other "
        "nodes may not see; set run.root to a shared one",
        "the working folder /dev/shm is on a memory file system (tmpfs at /dev/shm), which jobs on other nodes may not "
        "see; start from a shared one",
    ]


def test_nodes_are_not_asked_for_where_no_folder_is_local(slurm: FakeSlurm, tmp_path: Path) -> None:
    network = Path("/proc")  # a kind of file system that is not known to be local
    launch = make_launch(network, make_batch(), cwd=network)
    assert check(tmp_path, launch=launch) == []
    assert len(slurm.calls("scontrol")) == 2


def test_which_nodes_are_this_machine() -> None:
    name = socket.gethostname().partition(".")[0]
    assert not mounts.is_elsewhere("node1", "127.0.0.1", "node1")
    assert not mounts.is_elsewhere("n1", f"{name}.cluster.local", "n1")
    assert not mounts.is_elsewhere("n1", "10.0.0.1", name)
    assert mounts.is_elsewhere(f"{name}x", "10.0.0.1", f"{name}x.cluster.local")


MOUNTS = r"""
/dev/sda1 / ext4 rw 0 0
overlay /ctr overlay rw 0 0
tmpfs /tmp tmpfs rw 0 0
server:/people /people nfs4 rw 0 0
/dev/sdb1 /scratch/local xfs rw 0 0
/dev/sdc1 /data\040sets btrfs rw 0 0
fs /scratch lustre rw 0 0
auto /auto autofs rw 0 0
server:/proj /auto/proj nfs rw 0 0
b /beegfs beegfs rw 0 0
c /ceph fuse.cephfs rw 0 0
/dev/sdd1 /over ext4 rw 0 0
server:/over /over nfs rw 0 0
x /new newfs rw 0 0
""".strip()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/runs", "local disk (ext4 at /)"),
        ("/tmp/runs", "memory file system (tmpfs at /tmp)"),
        ("/tmpfoo/runs", "local disk (ext4 at /)"),
        ("/ctr/runs", "layer of a container (overlay at /ctr)"),
        ("/people/me/runs", ""),
        ("/scratch/local/runs", "local disk (xfs at /scratch/local)"),
        ("/data sets/a", "local disk (btrfs at /data sets)"),
        ("/scratch/me", ""),
        ("/auto/proj/me", ""),
        ("/auto/other", ""),
        ("/beegfs", ""),
        ("/ceph/me", ""),
        ("/over/me", ""),  # mounted over the disk
        ("/new/me", ""),  # not known
        ("/srv/share/runs", ""),  # exported
        ("/srv/shared", "local disk (ext4 at /)"),
        ("/srv/off", "local disk (ext4 at /)"),
    ],
)
def test_which_folders_only_this_machine_sees(path: str, kind: str) -> None:
    exports = "# comment\n/srv/share  10.0.0.0/8(rw)\n#/srv/off *(rw)\n"
    assert mounts.local(Path(path), MOUNTS, exports) == kind


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "home")
    table = f"d / ext4 rw 0 0\ns {tmp_path}/home nfs rw 0 0\n"
    assert mounts.local(tmp_path / "runs" / "new", table, "") == ""
    assert mounts.local(tmp_path / "other", table, "").startswith("local disk")
