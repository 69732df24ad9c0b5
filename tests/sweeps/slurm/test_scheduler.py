"""The scheduler through its commands: how often they are called, with what, and what is made of their answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.sweeps.slurm.scheduler import Scheduler

from .fake_slurm import FakeSlurm

SINCE = "2024-11-30T07:30:00+00:00"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm.install(tmp_path / "slurm", monkeypatch)


# The table


def test_one_call_for_any_number_of_jobs_that_squeue_knows(slurm: FakeSlurm) -> None:
    slurm.add("12", tasks=300, name="sweep")
    slurm.add("13", name="report")
    table = Scheduler().table([*(f"12_{i}" for i in range(300)), "13"], SINCE)
    assert len(table.jobs) == 301
    assert {job.state for job in table.jobs.values()} == {"PENDING"}
    assert table.names == {"sweep": "12", "report": "13"}
    assert len(slurm.calls()) == 1


def test_sacct_is_asked_once_for_what_squeue_has_forgotten(slurm: FakeSlurm) -> None:
    slurm.add("12", tasks=3, name="sweep")
    slurm.set("12_0", "12_1", state="COMPLETED", nodes="node1", start="2024-11-30T08:00:01", end="2024-11-30T08:00:09",
              queue=False)  # fmt: skip
    slurm.add("14", name="gone", state="FAILED", exit="1:0", nodes="node2", start="2024-11-30T08:00:01",
              end="2024-11-30T08:00:09", queue=False)  # fmt: skip
    table = Scheduler().table(["12_0", "12_1", "12_2", "14", "99"], SINCE)
    assert {task: (job.state, job.source) for task, job in table.jobs.items()} == {
        "12_0": ("COMPLETED", "sacct"),
        "12_1": ("COMPLETED", "sacct"),
        "12_2": ("PENDING", "squeue"),
        "14": ("FAILED", "sacct"),
    }
    assert table.accounting
    assert [call[0] for call in slurm.calls()] == ["squeue", "sacct"]
    asked = slurm.calls("sacct")[0]
    assert asked[asked.index("-j") + 1] == "12,14,99"  # arrays, not their tasks
    assert "--starttime=2024-11-30T07:20:00" in asked  # UTC, ten minutes for clocks that differ


def test_what_has_ended_for_good_is_not_asked_for_again(slurm: FakeSlurm) -> None:
    done = {"nodes": "node1", "start": "2024-11-30T08:00:01", "end": "2024-11-30T08:00:09", "queue": False}
    slurm.add("12", name="a", state="COMPLETED", **done)
    slurm.add("13", name="b", state="NODE_FAIL", **done)
    scheduler = Scheduler()
    scheduler.table(["12", "13"], SINCE)
    again = scheduler.table(["12", "13"], SINCE)
    assert {task: job.state for task, job in again.jobs.items()} == {"12": "COMPLETED", "13": "NODE_FAIL"}
    assert [call[call.index("-j") + 1] for call in slurm.calls("sacct")] == ["12,13", "13"]
    slurm.set("12", queue=True, state="RUNNING", restarts=1, end="")  # somebody requeued it
    assert scheduler.table(["12"], SINCE).jobs["12"].state == "RUNNING"


def test_without_accounting_sacct_is_tried_once_and_forgotten_jobs_are_not_sought_again(
    slurm: FakeSlurm,
) -> None:
    slurm.setting(accounting=False)
    slurm.add("12", name="a", state="RUNNING")
    slurm.add("13", name="b", mine=False)
    scheduler = Scheduler()
    for _ in range(3):
        table = scheduler.table(["12", "13", "99"], SINCE)
        assert {task: job.state for task, job in table.jobs.items()} == {"12": "RUNNING", "13": "PENDING"}
        assert not table.accounting
    assert [call[0] for call in slurm.calls()] == ["squeue", "sacct", "squeue"] + 2 * ["squeue", "squeue"]
    slurm.set("13", queue=False)
    scheduler.table(["12", "13", "99"], SINCE)
    slurm.forget_calls()
    assert set(scheduler.table(["12", "13", "99"], SINCE).jobs) == {"12"}
    assert len(slurm.calls()) == 1


def test_limits_tell_that_nothing_is_accounted(slurm: FakeSlurm) -> None:
    slurm.setting(accounting=False)
    scheduler = Scheduler()
    assert scheduler.limits().accounting is False
    assert not scheduler.table(["12"], SINCE).accounting
    assert slurm.calls("sacct") == []


def test_jobs_of_somebody_else_are_asked_for_when_sacct_says_that_they_live(slurm: FakeSlurm) -> None:
    slurm.add("12", name="theirs", state="RUNNING", nodes="node1", start="2024-11-30T08:00:01", mine=False)
    job = Scheduler().table(["12"], SINCE).jobs["12"]
    assert (job.state, job.source) == ("RUNNING", "squeue")
    assert [call[0] for call in slurm.calls()] == ["squeue", "sacct", "squeue"]


def test_a_job_that_only_the_accounting_calls_running_is_marked_so(slurm: FakeSlurm) -> None:
    slurm.add("12", name="lost", state="RUNNING", nodes="node1", start="2024-11-30T08:00:01", queue=False)
    assert Scheduler().table(["12"], SINCE).jobs["12"].source == "sacct"


def test_an_accounting_that_is_away_does_not_hide_the_queue(slurm: FakeSlurm) -> None:
    slurm.add("12", name="a", state="RUNNING")
    slurm.setting(database=False)
    scheduler = Scheduler()
    table = scheduler.table(["12", "13"], SINCE)
    assert (set(table.jobs), table.accounting) == ({"12"}, False)
    slurm.setting(database=True)
    slurm.add(
        "13", name="b", state="COMPLETED", start="2024-11-30T08:00:01", end="2024-11-30T08:00:09", queue=False
    )
    assert scheduler.table(["12", "13"], SINCE).jobs["13"].state == "COMPLETED"


def test_an_accounting_that_hangs_or_is_not_installed_does_not_hide_the_queue(slurm: FakeSlurm) -> None:
    slurm.add("12", name="a", state="RUNNING")
    slurm.setting(slow={"sacct": 60})
    start = time.monotonic()
    table = Scheduler(timeout_s=3).table(["12", "13"], SINCE)
    assert (set(table.jobs), table.accounting) == ({"12"}, False)
    assert time.monotonic() - start < 30
    (slurm.folder / "sacct").write_text("#!/nowhere/python\n")
    table = Scheduler().table(["12", "13"], SINCE)
    assert (set(table.jobs), table.accounting) == ({"12"}, False)


def test_a_waiting_task_that_was_cancelled_alone_leaves_no_trace_and_is_called_cancelled(
    slurm: FakeSlurm,
) -> None:
    slurm.add("12", tasks=3, name="sweep")
    scheduler = Scheduler()
    scheduler.cancel(["12_1"])
    assert "12_1" not in slurm.jobs()  # as in Slurm: neither squeue nor sacct has it
    table = scheduler.table(["12_0", "12_1", "12_2"], SINCE)
    assert {task: job.state for task, job in table.jobs.items()} == {
        "12_0": "PENDING", "12_1": "CANCELLED", "12_2": "PENDING",
    }  # fmt: skip
    assert (table.jobs["12_1"].name, table.jobs["12_1"].nodes) == ("sweep", "")


def test_an_array_of_which_every_task_was_cancelled_alone(slurm: FakeSlurm) -> None:
    """`12` is left, without an index, in squeue for a while and in sacct."""
    slurm.add("12", tasks=2, name="sweep")
    scheduler = Scheduler()
    scheduler.cancel(["12_0", "12_1"])
    assert list(slurm.jobs()) == ["12"]
    for queue in (True, False):
        slurm.set("12", queue=queue)
        table = scheduler.table(["12_0", "12_1"], SINCE)
        assert [job.state for job in table.jobs.values()] == ["CANCELLED", "CANCELLED"]
        assert table.names == {"sweep": "12"}


def test_without_accounting_an_unknown_task_is_unknown(slurm: FakeSlurm) -> None:
    slurm.setting(accounting=False)
    slurm.add("12", tasks=2, name="sweep")
    slurm.set("12_0", state="COMPLETED", queue=False)
    assert set(Scheduler().table(["12_0", "12_1"], SINCE).jobs) == {"12_1"}


def test_long_lists_of_indices_are_not_cut(slurm: FakeSlurm) -> None:
    """Slurm cuts them after 64 characters unless SLURM_BITSTR_LEN=0."""
    slurm.add("12", tasks=60, name="sweep")
    slurm.set("12", state="CANCELLED", end="2024-11-30T08:19:10", queue=False)
    assert len(Scheduler().table([f"12_{i}" for i in range(60)], SINCE).jobs) == 60


def test_more_ids_than_a_command_line_takes(slurm: FakeSlurm) -> None:
    slurm.add("1000000", name="a", state="COMPLETED", start="2024-11-30T08:00:01", end="2024-11-30T08:00:09",
              queue=False)  # fmt: skip
    ids = [str(number) for number in range(1_000_000, 1_020_000)]  # 160,000 characters
    assert set(Scheduler().table(ids, SINCE).jobs) == {"1000000"}
    assert "-u" in slurm.calls("sacct")[0]


def test_what_is_no_job_id_is_a_fault_of_the_caller(slurm: FakeSlurm) -> None:
    for wrong in ("", "12,13", "12_[0-3]", "x"):
        with pytest.raises(ValueError, match="no job id"):
            Scheduler().table([wrong])
    assert slurm.calls() == []


# Names


def test_the_job_that_may_still_run_has_the_name_then_the_newest(slurm: FakeSlurm) -> None:
    slurm.add("12", name="x", state="RUNNING", submit="2024-11-30T08:00:00")
    slurm.add("13", name="x", state="FAILED", submit="2024-11-30T09:00:00")
    slurm.add("14", name="y", state="FAILED", submit="2024-11-30T08:00:00")
    slurm.add("15", name="y", state="COMPLETED", submit="2024-11-30T09:00:00")
    assert Scheduler().table([]).names == {"x": "12", "y": "15"}


def test_find_looks_into_the_queue_and_then_into_the_accounting(slurm: FakeSlurm) -> None:
    slurm.add("12", tasks=2, name="n a.b|1")
    slurm.add(
        "13",
        name="old",
        state="COMPLETED",
        start="2024-11-30T08:00:01",
        end="2024-11-30T08:00:09",
        queue=False,
    )
    slurm.add("14", name="theirs", mine=False)
    scheduler = Scheduler()
    assert scheduler.find(["n a.b|1"], SINCE) == {"n a.b|1": "12"}
    assert slurm.calls("sacct") == []
    assert scheduler.find(["n a.b|1", "old", "theirs", "never"], SINCE) == {"n a.b|1": "12", "old": "13"}
    assert scheduler.find(["old"], "2024-11-30T09:05:00+01:00") == {"old": "13"}
    assert scheduler.find(["old"], "2024-11-30T09:05:00+00:00") == {}  # it had ended before


def test_find_does_not_take_an_absent_accounting_for_an_absent_job(slurm: FakeSlurm) -> None:
    slurm.setting(database=False)
    with pytest.raises(UnreachableError, match="Problem talking to the database: Connection refused"):
        Scheduler().find(["x"], SINCE)
    slurm.setting(accounting=False)
    assert Scheduler().find(["x"], SINCE) == {}


def test_times_in_the_future_are_not_asked_for(slurm: FakeSlurm) -> None:
    """sacct calls them an error."""
    Scheduler().find(["x"], "2999-01-01T00:00:00+00:00")
    (start,) = (word for word in slurm.calls("sacct")[0] if word.startswith("--starttime="))
    assert start < "--starttime=" + time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())


# One job


def test_state_of_one_job(slurm: FakeSlurm) -> None:
    slurm.add("12", tasks=2, name="a")
    slurm.set("12_1", state="COMPLETING")
    scheduler = Scheduler()
    assert [scheduler.state(task) for task in ("12_0", "12_1", "12_7", "99")] == [
        "PENDING",
        "COMPLETING",
        "",
        "",
    ]
    assert len(slurm.calls()) == 4


def test_which_start_of_a_job_runs(slurm: FakeSlurm) -> None:
    slurm.add("12", tasks=2, name="a", state="RUNNING")
    slurm.set("12_1", restarts=3)
    scheduler = Scheduler()
    found = [scheduler.state_and_restarts(task) for task in ("12_0", "12_1", "12_7", "99")]
    assert found == [("RUNNING", 0), ("RUNNING", 3), ("", 0), ("", 0)]
    assert len(slurm.calls("squeue")) == 4


def test_requeue_is_true_or_refused(slurm: FakeSlurm) -> None:
    slurm.add("12", tasks=1, name="a", state="RUNNING", nodes="node1", start="2024-11-30T08:00:01")
    scheduler = Scheduler()
    assert scheduler.requeue("12_0")
    assert not scheduler.requeue("12_0")  # "Job is pending execution"
    assert not scheduler.requeue("99")
    job = scheduler.table(["12_0"]).jobs["12_0"]
    assert (job.state, job.restarts, job.alive) == ("PENDING", 1, True)


def test_requeue_is_not_tried_twice(slurm: FakeSlurm) -> None:
    """The first try may have been heard: the second would be refused, and the job be taken for one that ends."""
    slurm.add("12", name="a", state="RUNNING")
    slurm.setting(busy=1)
    with pytest.raises(UnreachableError):
        Scheduler().requeue("12")
    assert len(slurm.calls()) == 1


def test_cancel_takes_many_at_once_and_unknown_ones(slurm: FakeSlurm) -> None:
    slurm.add("12", tasks=700, name="a", state="RUNNING")
    slurm.add("13", name="b", state="COMPLETED")
    Scheduler().cancel([*(f"12_{i}" for i in range(700)), "13", "99", "12_5"])
    assert [len(call) for call in slurm.calls("scancel")] == [500, 202]
    jobs = slurm.jobs()
    assert {jobs[f"12_{i}"]["state"] for i in range(700)} == {"CANCELLED"}
    assert jobs["13"]["state"] == "COMPLETED"


def test_jobs_of_somebody_else_cannot_be_cancelled(slurm: FakeSlurm) -> None:
    slurm.add("12", name="theirs", mine=False)
    with pytest.raises(ConfigError, match="job id 12: Access/permission denied"):
        Scheduler().cancel(["12"])


def test_nothing_to_cancel_is_no_call(slurm: FakeSlurm) -> None:
    Scheduler().cancel([])
    assert slurm.calls() == []


# The cluster


def test_limits_of_the_cluster_in_two_calls_once(slurm: FakeSlurm) -> None:
    slurm.setting(
        config={"MaxArraySize": "21", "EnforcePartLimits": "ALL"},
        partitions={
            "hid": {"Hidden": "YES", "MaxNodes": "1", "MaxTime": "00:30:00"},
            "long": {"State": "DOWN", "AllowAccounts": "physics,bio", "TotalNodes": "2"},
            "most": {"DenyAccounts": "guests"},
        },
    )
    scheduler = Scheduler()
    limits = scheduler.limits()
    assert (limits.max_array, limits.version, limits.enforce, limits.accounting) == (
        21,
        "22.05.8",
        "ALL",
        True,
    )
    partitions = limits.partitions
    assert list(partitions) == ["cpu", "short", "gpu", "high", "hid", "long", "most"]
    assert limits.default == partitions["cpu"]
    assert (partitions["cpu"].max_time_min, partitions["cpu"].max_nodes, partitions["cpu"].total_nodes) == (
        1440,
        None,
        4,
    )
    assert (partitions["hid"].max_time_min, partitions["hid"].max_nodes) == (30, 1)
    assert (partitions["long"].max_time_min, partitions["long"].state) == (None, "DOWN")
    assert (partitions["long"].accounts, partitions["cpu"].accounts) == (("physics", "bio"), None)
    assert partitions["most"].denied_accounts == ("guests",)
    assert (partitions["high"].tier, partitions["high"].preempt_mode) == (10, "OFF")
    assert (partitions["cpu"].grace_s, limits.preempt_type) == (10, "preempt/partition_prio")
    scheduler.limits()
    assert slurm.calls() == [
        ["scontrol", "show", "config"],
        ["scontrol", "-a", "-o", "show", "partition"],
    ]


def test_nodes_of_the_cluster(slurm: FakeSlurm) -> None:
    slurm.setting(nodes={"node9": {"Gres": "gpu:a100:4(S:0-1),gpu:h100:2,shard:8", "Partitions": "gpu"}})
    nodes = {node.name: node for node in Scheduler().nodes()}
    assert (nodes["node1"].cpus, nodes["node1"].memory_mb, nodes["node1"].gpus) == (32, 200_000, 8)
    assert (nodes["node9"].gpus, nodes["node9"].partitions) == (6, ("gpu",))


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("IDLE", True),
        ("MIXED+PLANNED", True),
        ("IDLE+CLOUD+POWERED_DOWN", True),
        ("ALLOCATED~", True),
        ("IDLE+DRAIN", False),
        ("MIXED+DRAIN", False),
        ("DOWN", False),
        ("IDLE*", False),
        ("DOWN*+DRAIN", False),
        ("IDLE+NOT_RESPONDING", False),
        ("IDLE+MAINTENANCE", False),
        ("FAIL", False),
    ],
)
def test_which_nodes_can_be_used(slurm: FakeSlurm, state: str, usable: bool) -> None:
    slurm.setting(nodes={"node2": {"State": state}})
    assert {node.name: node.usable for node in Scheduler().nodes()} == {
        "node1": True, "node2": usable, "node3": True, "node4": True,
    }  # fmt: skip


def test_a_script_that_slurm_would_take_and_one_that_it_would_not(slurm: FakeSlurm, tmp_path: Path) -> None:
    good, bad = tmp_path / "a job.sh", tmp_path / "b.sh"
    good.write_text("#!/bin/bash\n#SBATCH --partition=cpu --array=0-9%3\n#SBATCH --time=4:00:00\ntrue\n")
    bad.write_text("#!/bin/bash\n#SBATCH --partition=nope\ntrue\n")
    Scheduler().test(good)
    with pytest.raises(ConfigError) as failure:
        Scheduler().test(bad)
    assert str(failure.value) == "invalid partition specified: nope; Invalid partition name specified"
    assert slurm.jobs() == {}


# What goes wrong on the way


def test_a_busy_controller_is_asked_once_more(slurm: FakeSlurm) -> None:
    slurm.add("12", name="a")
    slurm.setting(busy=1)
    assert set(Scheduler().table(["12"]).jobs) == {"12"}
    assert len(slurm.calls()) == 2
    slurm.setting(busy=2)
    with pytest.raises(UnreachableError, match="squeue: Socket timed out on send/recv operation"):
        Scheduler().table(["12"])


def test_a_controller_that_is_away_is_unreachable_to_every_tool(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.setting(unreachable=True)
    script = tmp_path / "a.sh"
    script.write_text("#!/bin/bash\n")
    scheduler = Scheduler()
    for ask in (
        lambda: scheduler.table(["12"]),
        lambda: scheduler.state("12"),
        lambda: scheduler.find(["x"], SINCE),
        lambda: scheduler.cancel(["12"]),
        scheduler.limits,
        scheduler.nodes,
        lambda: scheduler.test(script),
    ):
        with pytest.raises(
            UnreachableError, match=r"Unable to contact slurm controller .*; is the cluster up"
        ):
            ask()
    with pytest.raises(UnreachableError, match="Unexpected message received"):  # so says scontrol
        scheduler.requeue("12")


def test_a_tool_that_says_nothing_is_given_up(slurm: FakeSlurm) -> None:
    slurm.setting(slow={"squeue": 30})
    start = time.monotonic()
    with pytest.raises(UnreachableError, match=r"squeue gave no answer within 0\.4 s"):
        Scheduler(timeout_s=0.4).table(["12"])
    assert time.monotonic() - start < 10


def test_the_last_words_of_a_tool_that_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when there is no configuration: Slurm's tools look for it for a minute."""
    tool = tmp_path / "squeue"
    tool.write_text("#!/bin/sh\necho 'squeue: error: cannot stat file /x: retrying' >&2\nexec sleep 30\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        UnreachableError, match=r"within 2 s \(squeue: error: cannot stat file /x: retrying\)"
    ):
        Scheduler(timeout_s=2).table(["12"])


def test_without_slurm_the_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UnreachableError, match=r"^squeue is not installed here; run this where .* \(a login node\)"
    ):
        Scheduler().table(["12"])
    with pytest.raises(UnreachableError, match=r"^scontrol is not installed here"):
        Scheduler().limits()


def test_a_tool_of_the_same_name_that_is_not_slurms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text("#!/bin/sh\necho hello\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UnreachableError, match="is `scontrol` Slurm's"):
        Scheduler().limits()


def test_the_tools_get_a_clean_environment(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_TIME_FORMAT": "relative", "SQUEUE_FORMAT": "%i",
        "SLURM_JOB_ID": "7", "SACCT_FORMAT": "JobID", "SBATCH_ARRAY_INX": "0-9", "LC_ALL": "de_DE.UTF-8",
        "TZ": "Asia/Tokyo",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    Scheduler().table(["12"], SINCE)
    for tool in ("squeue", "sacct"):
        (seen,) = slurm.environments(tool)
        about = {
            name: value
            for name, value in seen.items()
            if name.startswith(("SLURM", "SQUEUE", "SACCT", "SBATCH"))
        }
        assert about == {"SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_BITSTR_LEN": "0"}
        assert (seen["LC_ALL"], seen["TZ"]) == ("C", "UTC0")
