"""What Slurm's tools print, as values. QUEUE and RECORDS are what 22.05.8 printed.

There `^` stands for the control character, and the year is another.
"""
# ruff: noqa: E501 (lines as Slurm printed them)

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from racelab.sweeps.slurm import parsing
from racelab.sweeps.slurm.scheduler import ALIVE, Job, Scheduler

from .fake_slurm import FakeSlurm

QUEUE = """\
142^CANCELLED^DependencyNeverSatisfied^^0^2024-11-30T08:18:52^2024-11-30T08:18:52^2024-11-30T08:18:51^0:00^10:00^0^rec.depkill
139^FAILED^NonZeroExitCode^node1^768^2024-11-30T08:18:51^2024-11-30T08:18:51^2024-11-30T08:18:51^0:00^10:00^0^rec.fail
140^FAILED^JobLaunchFailure^node1^9^2024-11-30T08:18:51^2024-11-30T08:18:52^2024-11-30T08:18:51^0:01^10:00^0^rec.sig
141^PENDING^DependencyNeverSatisfied^^0^N/A^N/A^2024-11-30T08:18:51^0:00^10:00^0^rec.dep
145^PENDING^BeginTime^^0^2024-11-30T08:18:58^2024-11-30T08:20:58^2024-11-30T08:18:52^0:00^2:00^1^rec.requeue
143_8^PENDING^JobHeldUser^^0^N/A^N/A^2024-11-30T08:18:51^0:00^10:00^0^rec.held
146^RUNNING^None^node[1-2]^0^2024-11-30T08:18:51^2024-11-30T08:28:51^2024-11-30T08:18:51^0:03^10:00^0^rec.new
line
147^TIMEOUT^TimeLimit^node1^15^2024-11-30T08:18:51^2024-11-30T08:20:09^2024-11-30T08:18:51^1:18^1:00^0^rec.timeout
138_2^PENDING^JobArrayTaskLimit^^0^N/A^N/A^2024-11-30T08:18:51^0:00^1-02:04:00^0^rec a.b|c 1
138_0^RUNNING^None^node1^0^2024-11-30T08:18:51^2024-12-01T10:22:51^2024-11-30T08:18:51^0:03^1-02:04:00^0^rec a.b|c 1
144^PENDING^PartitionTimeLimit^^0^N/A^N/A^2024-11-30T08:18:51^0:00^1:30:00^0^rec.plimit
"""
RECORDS = """\
139^FAILED^None^node1^3:0^2024-11-30T08:18:51^2024-11-30T08:18:51^2024-11-30T08:18:51^0^10^rec.fail
140^FAILED^None^node1^0:9^2024-11-30T08:18:51^2024-11-30T08:18:52^2024-11-30T08:18:51^1^10^rec.sig
141^CANCELLED by 0^DependencyNeverSatisfied^None assigned^0:0^None^2024-11-30T08:19:10^2024-11-30T08:18:51^0^10^rec.dep
142^CANCELLED^Dependency^None assigned^0:0^2024-11-30T08:18:52^2024-11-30T08:18:52^2024-11-30T08:18:51^0^10^rec.depkill
144^CANCELLED by 0^PartitionTimeLimit^None assigned^0:0^None^2024-11-30T08:19:10^2024-11-30T08:18:51^0^90^rec.plimit
145^REQUEUED^None^node1^0:0^2024-11-30T08:18:51^2024-11-30T08:18:51^2024-11-30T08:18:51^0^2^rec.requeue
146^COMPLETED^None^node[1-2]^0:0^2024-11-30T08:18:51^2024-11-30T08:19:01^2024-11-30T08:18:51^10^10^rec.new
line
147^RUNNING^None^node1^0:0^2024-11-30T08:18:51^Unknown^2024-11-30T08:18:51^21^1^rec.timeout
138_2^COMPLETED^JobArrayTaskLimit^node1^0:0^2024-11-30T08:18:56^2024-11-30T08:19:00^2024-11-30T08:18:51^4^1564^rec a.b|c 1
143_[0,2,6,8]^CANCELLED by 0^JobHeldUser^None assigned^0:0^None^2024-11-30T08:19:10^2024-11-30T08:18:51^0^10^rec.held
145^COMPLETED^BeginTime^node1^0:0^2024-11-30T08:18:58^2024-11-30T08:19:10^2024-11-30T08:18:52^12^2^rec.requeue
"""
NEW_RECORD = "146^PENDING^None^node1^0:0^2024-11-30T08:18:51^Unknown^2024-11-30T08:18:51^3^^allocation\n"
"""What sacct said a second after sbatch."""
AT_0818_51 = 1732954731.0
"""2024-11-30T08:18:51Z: 20,057 days, 8 h, 18 min, 51 s after 1970."""
SINCE = "2024-11-30T07:30:00+00:00"


def real(text: str) -> str:
    return text.replace("^", "\x1f")


def test_a_line_of_squeue_for_each_kind_of_job() -> None:
    jobs = parsing.queue_jobs(real(QUEUE))
    assert jobs["138_0"] == Job(
        "138_0", "rec a.b|c 1", "RUNNING", nodes="node1", start=AT_0818_51, elapsed_s=3,
        time_limit_s=93_840, restarts=0, submitted=AT_0818_51,
    )  # fmt: skip  # a day, two hours, four minutes
    assert jobs["144"].time_limit_s == 5400
    waiting = jobs["145"]  # requeued once, may start at 08:18:58
    assert (waiting.state, waiting.reason, waiting.restarts, waiting.start) == (
        "PENDING",
        "BeginTime",
        1,
        None,
    )
    assert waiting.expected == AT_0818_51 + 7
    assert (jobs["141"].reason, jobs["141"].expected) == ("DependencyNeverSatisfied", None)
    assert (jobs["146"].nodes, jobs["146"].name) == ("node[1-2]", "rec.new")
    assert len(jobs) == 11  # the second line of a name is none


def test_ended_jobs_of_squeue_have_an_end_and_a_code_as_a_shell_gives_it() -> None:
    jobs = parsing.queue_jobs(real(QUEUE))
    assert (jobs["139"].exit_code, jobs["139"].end) == (3, AT_0818_51)
    assert jobs["140"].exit_code == 137  # signal 9
    assert (jobs["147"].exit_code, jobs["147"].elapsed_s) == (143, 78)
    assert (jobs["138_0"].exit_code, jobs["138_0"].end) == (None, None)
    # It was cancelled before it could start; squeue calls that moment its start too.
    assert (jobs["142"].start, jobs["142"].end) == (None, AT_0818_51 + 1)


def test_newer_squeues_print_the_code_as_sacct_does() -> None:
    line = QUEUE.splitlines()[1]
    assert parsing.queue_jobs(real(line.replace("^768^", "^3:0^")))["139"].exit_code == 3
    assert parsing.queue_jobs(real(line.replace("^768^", "^0:9^")))["139"].exit_code == 137


def test_a_line_of_sacct_for_each_kind_of_job() -> None:
    jobs = parsing.recorded_jobs(real(RECORDS))
    assert jobs["139"] == Job(
        "139", "rec.fail", "FAILED", nodes="node1", exit_code=3, start=AT_0818_51, end=AT_0818_51, elapsed_s=0,
        time_limit_s=600, restarts=0, source="sacct", submitted=AT_0818_51,
    )  # fmt: skip
    assert jobs["140"].exit_code == 137
    assert (jobs["147"].state, jobs["147"].end, jobs["147"].exit_code) == ("RUNNING", None, None)
    # Why it last waited is no reason why it ended.
    assert (jobs["138_2"].state, jobs["138_2"].reason) == ("COMPLETED", "")
    assert (jobs["144"].state, jobs["144"].reason, jobs["144"].nodes) == (
        "CANCELLED",
        "PartitionTimeLimit",
        "",
    )


def test_a_dependency_that_slurm_gave_up_is_said_so() -> None:
    """142 had kill-on-invalid-dep: nobody cancelled it, and sacct's reason is a bare Dependency."""
    assert parsing.recorded_jobs(real(RECORDS))["142"].reason == "DependencyNeverSatisfied"


def test_of_a_requeued_job_the_newest_attempt_counts() -> None:
    job = parsing.recorded_jobs(real(RECORDS))["145"]
    assert (job.state, job.start, job.restarts) == ("COMPLETED", AT_0818_51 + 7, 1)
    backwards = "\n".join(reversed(RECORDS.splitlines()))
    assert parsing.recorded_jobs(real(backwards))["145"].state == "COMPLETED"


def test_tasks_that_never_started_share_a_line_and_stand_back_behind_their_own() -> None:
    jobs = parsing.recorded_jobs(real(RECORDS))
    assert [task for task in jobs if task.startswith("143")] == ["143_0", "143_2", "143_6", "143_8"]
    assert jobs["143_6"].state == "CANCELLED"
    shared = "7_[0-2%2]^PENDING^None^None assigned^0:0^Unknown^Unknown^2024-11-30T08:18:51^0^10^x\n"
    own = "7_1^COMPLETED^None^node1^0:0^2024-11-30T08:18:56^2024-11-30T08:19:00^2024-11-30T08:18:51^4^10^x\n"
    for text in (shared + own, own + shared):
        found = parsing.recorded_jobs(real(text))
        assert {task: job.state for task, job in found.items()} == {
            "7_0": "PENDING", "7_1": "COMPLETED", "7_2": "PENDING",
        }  # fmt: skip
        assert found["7_1"].restarts == 0


def test_a_job_whose_name_the_accounting_has_not_been_told_has_none() -> None:
    assert parsing.recorded_jobs(real(NEW_RECORD))["146"].name == ""


@pytest.mark.parametrize(
    ("job_id", "tasks"),
    [
        ("12", ("12",)),
        ("12_4", ("12_4",)),
        ("12_[5-7]", ("12_5", "12_6", "12_7")),
        ("12_[0-8:4,17%2]", ("12_0", "12_4", "12_8", "12_17")),
        ("12+0", ()),
        ("12.batch", ()),
        ("line", ()),
    ],
)
def test_ids_of_arrays_are_written_out(job_id: str, tasks: tuple[str, ...]) -> None:
    assert parsing.expand(job_id) == tasks


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:04", 4),
        ("1:30:00", 5400),
        ("1-02:03:04", 93_784),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("NOT_SET", None),
        ("Partition_Limit", None),
        ("", None),
    ],
)
def test_durations(text: str, seconds: int | None) -> None:
    assert parsing.duration(text) == seconds


@pytest.mark.parametrize(
    ("state", "word"), [("CANCELLED by 1000", "CANCELLED"), ("COMPLETED+", "COMPLETED"), ("", "")]
)
def test_states_are_cut_to_their_word(state: str, word: str) -> None:
    assert parsing.base(state) == word


@pytest.mark.parametrize("text", ["N/A", "Unknown", "None", "NONE", ""])
def test_times_that_slurm_does_not_know(text: str) -> None:
    assert parsing.moment(text) is None


def test_what_may_still_run() -> None:
    assert {"PENDING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"} <= ALIVE
    assert not ALIVE & {
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "TIMEOUT",
        "PREEMPTED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
    }


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm.install(tmp_path / "slurm", monkeypatch)


def test_the_stand_ins_print_what_slurm_printed(slurm: FakeSlurm) -> None:
    """What other tests learn from them is worth as much as this."""
    at = "2024-11-30T08:18:51"
    fields = {"submit": at, "limit_min": 10}
    slurm.add("139", **fields, name="rec.fail", state="FAILED", reason="NonZeroExitCode", nodes="node1", exit="3:0",
              start=at, end=at)  # fmt: skip
    slurm.add("140", **fields, name="rec.sig", state="FAILED", reason="JobLaunchFailure", nodes="node1", exit="0:9",
              start=at, end="2024-11-30T08:18:52", elapsed_s=1)  # fmt: skip
    slurm.add("141", **fields, name="rec.dep", reason="DependencyNeverSatisfied")
    slurm.add("143_8", **fields, name="rec.held", reason="JobHeldUser")
    slurm.add("138_2", submit=at, limit_min=1564, name="rec a.b|c 1", reason="JobArrayTaskLimit")
    slurm.add("144", submit=at, limit_min=90, name="rec.plimit", reason="PartitionTimeLimit")
    scheduler = Scheduler()
    scheduler.table([])
    words = slurm.calls("squeue")[0]
    printed = subprocess.run(["squeue", *words], capture_output=True, text=True, check=True).stdout
    lines = {line.partition("^")[0]: line for line in QUEUE.splitlines()}
    assert printed.replace("\x1f", "^").splitlines() == [
        lines[task] for task in ("139", "140", "141", "143_8", "138_2", "144")
    ]

    slurm.set("139", "140", queue=False, reason="None")
    for index in (0, 2, 6):
        slurm.add(f"143_{index}", **fields, name="rec.held")
    cancelled = {"state": "CANCELLED", "by": "0", "reason": "JobHeldUser", "end": "2024-11-30T08:19:10"}
    slurm.set("143", queue=False, **cancelled)
    scheduler.table(["139", "140", "143_0"], SINCE)
    words = slurm.calls("sacct")[0]
    printed = subprocess.run(["sacct", *words], capture_output=True, text=True, check=True).stdout
    lines = {line.partition("^")[0]: line for line in RECORDS.splitlines()}
    shared = lines["143_[0,2,6,8]"].replace(
        "[0,2,6,8]", "[8,0,2,6]"
    )  # in the order in which they were added here
    assert printed.replace("\x1f", "^").splitlines() == [lines["139"], lines["140"], shared]
