"""What the facts about a task amount to: every word of the scheduler, of the job and of the run's folder together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from racelab.sweeps.progress import Progress
from racelab.sweeps.slurm.folder import End
from racelab.sweeps.slurm.glance import RunFacts
from racelab.sweeps.slurm.judge import Facts, judge
from racelab.sweeps.slurm.model import NOT_OURS, Assignment, Submission
from racelab.sweeps.slurm.scheduler import ALIVE, Job

UID = "20260102T030405-0a1b2c"
NOW = 1_800_000_000.0
MINE = Assignment(UID, "cells", 0, 1)
SUBMITTED = Submission("cells", 1, "12", "2026-01-02T03:04:05+00:00", "2026-01-02T03:04:06+00:00")
LIVE_STATES = {"pending", "blocked", "requeued", "running"}


def end(status: str, reason: str = "", restart: int = 0, code: int = 0, step: int | None = None) -> End:
    return End(status, code, reason, "12", restart, "node1", "2026-01-02T04:00:00+00:00", step)


def job(state: str, **changes: Any) -> Job:
    return replace(Job("12", "demo", state, nodes="node1", exit_code=1, restarts=0), **changes)


def facts(**changes: Any) -> Facts:
    base = Facts(UID, "run-0", SUBMITTED, job_id="12", run=RunFacts(MINE, "interrupted", "stopped"), now=NOW)
    return replace(base, **changes)


def grid(text: str) -> dict[str, dict[str, str]]:
    """Row -> column -> cell of a table."""
    (_, *columns), *rows = [line.split() for line in text.strip().splitlines()]
    return {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows}


# The run's folder says interrupted: the job has had it once.
RUN_BY_END = grid("""
job            none         finished   failed     stopped      requeued     fenced       superseded
COMPLETED      interrupted  finished   failed     interrupted  interrupted  interrupted  interrupted
FAILED         failed       failed     failed     interrupted  interrupted  interrupted  interrupted
CANCELLED      cancelled    cancelled  cancelled  cancelled    cancelled    cancelled    cancelled
REVOKED        cancelled    cancelled  cancelled  cancelled    cancelled    cancelled    cancelled
TIMEOUT        timeout      timeout    timeout    timeout      timeout      timeout      timeout
DEADLINE       timeout      timeout    timeout    timeout      timeout      timeout      timeout
PREEMPTED      preempted    preempted  preempted  preempted    preempted    preempted    preempted
NODE_FAIL      node_fail    node_fail  node_fail  node_fail    node_fail    node_fail    node_fail
BOOT_FAIL      node_fail    node_fail  node_fail  node_fail    node_fail    node_fail    node_fail
OUT_OF_MEMORY  out_of_memory out_of_memory out_of_memory out_of_memory out_of_memory out_of_memory out_of_memory
unknown        interrupted  finished   failed     interrupted  interrupted  interrupted  interrupted
PENDING        pending      pending    pending    pending      requeued     pending      pending
CONFIGURING    pending      pending    pending    pending      pending      pending      pending
RUNNING        running      running    running    running      running      running      running
SUSPENDED      running      running    running    running      running      running      running
STOPPED        running      running    running    running      running      running      running
COMPLETING     running      running    running    running      requeued     running      running
SIGNALING      running      running    running    running      running      running      running
STAGE_OUT      running      running    running    running      running      running      running
RESIZING       running      running    running    running      running      running      running
EXPEDITING     running      running    running    running      running      running      running
REQUEUED       requeued     requeued   requeued   requeued     requeued     requeued     requeued
REQUEUE_FED    requeued     requeued   requeued   requeued     requeued     requeued     requeued
REQUEUE_HOLD   blocked      blocked    blocked    blocked      blocked      blocked      blocked
SPECIAL_EXIT   blocked      blocked    blocked    blocked      blocked      blocked      blocked
RESV_DEL_HOLD  blocked      blocked    blocked    blocked      blocked      blocked      blocked
""")
# The job has left no word.
RUN_BY_FOLDER = grid("""
job            none           queued         running        stale          failed         interrupted    finished
COMPLETED      lost           lost           running        lost           failed         interrupted    finished
FAILED         failed         failed         failed         failed         failed         failed         finished
CANCELLED      cancelled      cancelled      cancelled      cancelled      cancelled      cancelled      finished
TIMEOUT        timeout        timeout        timeout        timeout        timeout        timeout        finished
PREEMPTED      preempted      preempted      preempted      preempted      preempted      preempted      finished
NODE_FAIL      node_fail      node_fail      node_fail      node_fail      node_fail      node_fail      finished
BOOT_FAIL      node_fail      node_fail      node_fail      node_fail      node_fail      node_fail      finished
OUT_OF_MEMORY  out_of_memory  out_of_memory  out_of_memory  out_of_memory  out_of_memory  out_of_memory  finished
unknown        lost           lost           running        lost           failed         interrupted    finished
PENDING        pending        pending        pending        pending        pending        pending        finished
RUNNING        running        running        running        running        running        running        finished
COMPLETING     running        running        running        running        running        running        finished
REQUEUED       requeued       requeued       requeued       requeued       requeued       requeued       finished
REQUEUE_HOLD   blocked        blocked        blocked        blocked        blocked        blocked        finished
""")
COMMAND_BY_END = grid("""
job            none           finished       failed         stopped        requeued
COMPLETED      finished       finished       failed         interrupted    interrupted
FAILED         failed         failed         failed         interrupted    interrupted
CANCELLED      cancelled      cancelled      cancelled      cancelled      cancelled
TIMEOUT        timeout        timeout        timeout        timeout        timeout
NODE_FAIL      node_fail      node_fail      node_fail      node_fail      node_fail
OUT_OF_MEMORY  out_of_memory  out_of_memory  out_of_memory  out_of_memory  out_of_memory
unknown        lost           finished       failed         interrupted    lost
PENDING        pending        pending        pending        pending        requeued
RUNNING        running        running        running        running        running
COMPLETING     running        running        running        running        requeued
""")


def scheduled(word: str, source: str = "squeue") -> Job | None:
    """A job of which Slurm's requeue is not to be expected any more."""
    if word == "unknown":
        return None
    return job(word, source=source, end=None if word in ALIVE else NOW - 1000)


def judged(columns: dict[str, str], given: Callable[[str], Facts]) -> dict[str, str]:
    """Column -> state; every one is live exactly where its state is one of a live job."""
    found = {column: judge(given(column)) for column in columns}
    for column, verdict in found.items():
        assert verdict.live == (verdict.state in LIVE_STATES), column
    return {column: verdict.state for column, verdict in found.items()}


def test_the_tables_leave_out_no_state_of_a_live_job() -> None:
    assert RUN_BY_END.keys() >= ALIVE


@pytest.mark.parametrize(
    ("word", "source"),
    [
        (word, source)
        for word in RUN_BY_END
        for source in ("squeue", "sacct")
        if source == "squeue" or word not in ALIVE | {"unknown"}
    ],
)
def test_a_run_by_the_scheduler_and_by_its_own_word(word: str, source: str) -> None:
    """For sacct and live jobs see `test_a_job_that_only_the_accounting_calls_alive`."""
    expected = RUN_BY_END[word]
    known = facts(job=scheduled(word, source))
    assert (
        judged(expected, lambda said: replace(known, end=None if said == "none" else end(said))) == expected
    )


@pytest.mark.parametrize("word", RUN_BY_FOLDER)
def test_a_run_by_the_scheduler_and_by_its_folder(word: str) -> None:
    expected = RUN_BY_FOLDER[word]
    known = facts(job=scheduled(word))
    folder: Any = RunFacts
    given = {status: None if status == "none" else folder(MINE, status) for status in expected}
    assert judged(expected, lambda status: replace(known, run=given[status])) == expected


@pytest.mark.parametrize("word", COMMAND_BY_END)
def test_a_command(word: str) -> None:
    expected = COMMAND_BY_END[word]
    known = facts(job=scheduled(word), run=None, is_run=False)
    assert (
        judged(expected, lambda said: replace(known, end=None if said == "none" else end(said))) == expected
    )


@pytest.mark.parametrize("word", ["PENDING", "RUNNING", "FAILED", "unknown"])
def test_a_task_whose_run_another_has_is_superseded(word: str) -> None:
    folder: Any = RunFacts
    for status in ("queued", "running", "stale", "failed", "interrupted", "finished"):
        found = judge(facts(job=scheduled(word), run=folder(None, status), ours=False))
        mend = f"racelab cancel {UID} removes the job" if word in ALIVE else ""
        assert (found.state, found.live, found.mend) == ("superseded", False, mend), status


@pytest.mark.parametrize("word", ["RUNNING", "PENDING", "REQUEUED"])
def test_a_job_that_only_the_accounting_calls_alive(word: str) -> None:
    """The controller knows every job that is not over."""
    known = facts(job=job(word, source="sacct"), run=RunFacts(MINE, "stale"))
    lost = judge(known)
    assert (lost.state, lost.live) == ("lost", False)
    assert lost.reason == (
        f"accounting says {word}, but the controller does not know job 12: it ended without a word"
    )
    assert judge(replace(known, end=end("failed", "no memory"))).state == "failed"


@pytest.mark.parametrize(("word", "state"), [("PREEMPTED", "preempted"), ("NODE_FAIL", "node_fail")])
def test_preempted_and_node_fail_are_not_final_while_slurm_may_requeue(word: str, state: str) -> None:
    """It does so within seconds; two minutes are waited for it. `squeue` goes on listing the job for longer."""
    fresh = judge(facts(job=job(word, end=NOW - 30)))
    assert (fresh.state, fresh.live, fresh.reason) == (state, True, "Slurm may requeue it")
    assert judge(facts(job=job(word, end=None))).live
    for over in (
        facts(job=job(word, end=NOW - 121)),
        facts(job=job(word, end=NOW - 30), requeue=False),
        facts(job=job(word, end=NOW - 30, source="sacct")),
    ):
        found = judge(over)
        assert (found.state, found.live) == (state, False)
        assert found.mend == "racelab resume run-0"


def test_no_job_yet() -> None:
    """Before sbatch, in it, after it has refused, and asked to stop meanwhile."""
    nothing = facts(submission=None, job_id="", run=RunFacts(MINE, "queued"))
    asked = replace(nothing, submission=Submission("cells", 1, intended="2026-01-02T03:04:05+00:00"))
    refused = replace(nothing, submission=replace(SUBMITTED, job_id="", error="invalid partition: nope"))

    found = judge(nothing)
    assert (found.state, found.live, found.reason) == ("unsubmitted", True, "not submitted yet")
    assert found.mend == f"racelab resume {UID}"
    found = judge(asked)
    assert (found.state, found.live) == ("unsubmitted", True)
    assert found.reason == "its submitter died before Slurm had it"
    for waiting in (nothing, asked):
        found = judge(replace(waiting, submitting=True))
        assert (found.state, found.live) == ("submitting", True)
        found = judge(replace(waiting, cancelled=True))
        assert (found.state, found.live, found.reason) == ("cancelled", False, "cancelled before it started")
    found = judge(replace(refused, submitting=True))
    assert (found.state, found.live, found.reason) == ("refused", False, "invalid partition: nope")
    assert found.mend == f"racelab resume {UID} launcher.KEY=VALUE"


def test_a_word_of_an_earlier_start_says_nothing_about_the_last() -> None:
    """Restart 0 failed and was requeued by hand; restart 1 lost its node."""
    old = end("failed", "the loss is not finite", restart=0)
    gone = judge(facts(job=job("COMPLETED", restarts=1), end=old, run=RunFacts(MINE, "stale")))
    assert gone.state == "lost"
    assert judge(facts(job=job("COMPLETED", restarts=1), end=replace(old, restart=1))).state == "failed"
    assert judge(facts(job=job("COMPLETED", restarts=None), end=old)).state == "failed"


def test_a_requeued_job_says_why_it_was_and_why_it_waits() -> None:
    again = facts(
        job=job("PENDING", reason="BeginTime", nodes="", restarts=1), end=end("requeued", "preempted")
    )
    found = judge(again)
    assert (found.state, found.live) == ("requeued", True)
    assert found.reason == "preempted; may not start yet (BeginTime)"
    assert judge(replace(again, end=None)).state == "requeued"
    held = judge(replace(again, job=job("PENDING", reason="JobHoldMaxRequeue", restarts=6)))
    assert (held.state, held.mend) == ("blocked", "scontrol release 12")


def test_what_can_never_start_names_the_mend() -> None:
    def found(reason: str, **changes: Any) -> tuple[str, str, str]:
        verdict = judge(facts(job=job("PENDING", reason=reason, nodes=""), **changes))
        assert verdict.live
        return verdict.state, verdict.reason, verdict.mend

    again = "racelab cancel run-0; racelab resume run-0 launcher."
    assert found("PartitionTimeLimit") == (
        "blocked", "a limit above the partition's (PartitionTimeLimit)", f"{again}time_min=N",
    )  # fmt: skip
    assert found("PartitionNodeLimit")[2] == f"{again}partition=NAME"
    assert found("QOSMaxWallDurationPerJobLimit")[2] == f"{again}time_min=N"
    assert found("AssocMaxNodePerJobLimit")[2] == f"{again}nodes=N"
    assert found("QOSMaxGRESPerJob")[2] == f"{again}gpus_per_node=N"
    assert found("QOSMinCpuNotSatisfied")[2] == f"{again}qos=NAME"
    assert found("DependencyNeverSatisfied")[2] == f"racelab cancel run-0; racelab resume {UID}"
    assert found("JobHeldUser")[2] == "scontrol release 12"
    for sentence in (
        "Job's account not known, so it can't use this partition (acc allows physics,bio)",
        "Job's_account_not_permitted_to_use_this_partition_(acc_allows_physics_not_me)",
    ):
        assert found(sentence) == (
            "blocked", f"the partition refuses the account ({sentence})", f"{again}account=NAME",
        )  # fmt: skip
    assert found("Job's QOS not permitted to use this partition (acc denies low)")[2] == f"{again}qos=NAME"
    nodes = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
    assert found(nodes) == ("pending", f"its nodes are down, drained or reserved ({nodes})", "")
    for passing in (
        "Resources",
        "Priority",
        "QOSGrpCpuLimit",
        "ReqNodeNotAvail, UnavailableNodes:node4",
        "New",
    ):
        assert found(passing)[::2] == ("pending", ""), passing
    assert found("ReqNodeNotAvail, UnavailableNodes:node4")[1] == (
        "its nodes are down, drained or reserved (ReqNodeNotAvail, UnavailableNodes:node4)"
    )
    assert found("")[1] == ""
    assert found("Dependency", waits_for=("train", "eval"))[1] == "waits for train, eval (Dependency)"


def test_a_stage_that_never_started_because_of_another() -> None:
    """kill-on-invalid-dep: cancelled by Slurm; squeue gives the reason, sacct of some versions does not."""
    never = facts(name=f"{UID}:eval", run=None, is_run=False, waits_for=("train",))
    by_queue = judge(replace(never, job=job("CANCELLED", reason="DependencyNeverSatisfied", nodes="")))
    by_record = judge(replace(never, job=job("CANCELLED", nodes="", source="sacct"), unmet=("train",)))
    for found in (by_queue, by_record):
        assert (found.state, found.live) == ("cancelled", False)
        assert found.reason == "never started: train did not end well"
        assert found.mend == f"racelab resume {UID}"
    by_hand = judge(replace(never, job=job("CANCELLED", reason="Dependency", nodes="")))
    assert by_hand.reason == "by scancel or the site"


def test_who_cancelled() -> None:
    gone = facts(job=job("CANCELLED"), end=end("stopped", step=7))
    assert judge(gone).reason == "by scancel or the site, after step 7"
    assert judge(replace(gone, cancelled=True)).reason == "by racelab cancel, after step 7"
    waiting = facts(job=job("CANCELLED", nodes=""), cancelled=True, run=RunFacts(MINE, "queued"))
    assert judge(waiting).reason == "cancelled before it started"
    # the accounting has lost the record of a task: the scheduler takes it for one that was cancelled before its start
    unknown = facts(job=job("CANCELLED", nodes="", source="sacct"), end=end("finished"))
    assert judge(unknown).state == "finished"
    assert judge(replace(unknown, end=end("requeued"))).state == "cancelled"
    # Slurm calls it FAILED when the run saves and leaves with 143 before scancel's own end of it.
    assert judge(replace(gone, job=job("FAILED", exit_code=143), cancelled=True)).state == "cancelled"
    # nothing knows the job any more
    assert (
        judge(facts(cancelled=True, end=end("stopped", step=7))).reason == "by racelab cancel, after step 7"
    )
    assert judge(facts(cancelled=True, run=RunFacts(MINE, "stale"))).state == "cancelled"


def test_why_it_failed() -> None:
    """The job's word first, then the run's folder, then Slurm's exit code."""
    dead = facts(job=job("FAILED", exit_code=9), run=RunFacts(MINE, "failed", "the disk is full"))
    said = judge(replace(dead, end=end("failed", "the loss is not finite", code=1)))
    assert said.reason == "the loss is not finite"
    assert said.mend == "racelab logs run-0 shows why; racelab resume run-0"
    assert judge(dead).reason == "the disk is full"
    assert judge(replace(dead, end=end("failed", code=3), run=None)).reason == "exit code 3"
    assert judge(replace(dead, run=None)).reason == "its job failed, exit code 9, without a word of its own"
    # rank 0 of a command went well, another rank did not
    whole = facts(job=job("FAILED", exit_code=2), end=end("finished"), run=None, is_run=False)
    assert judge(whole).reason == "its job failed, exit code 2, without a word of its own"


def test_a_run_that_somebody_took_by_hand() -> None:
    """The job leaves without a word, with an exit code of its own; the run is still assigned to it."""
    taken = facts(job=job("FAILED", exit_code=NOT_OURS), run=RunFacts(MINE, "running"))
    found = judge(taken)
    assert (found.state, found.live) == ("running", True)
    assert found.reason == "a process works on it, but Slurm knows no job"
    left = judge(replace(taken, run=RunFacts(MINE, "stale")))
    assert (left.state, left.reason) == ("interrupted", "another process took the run")


def test_lost_without_accounting_and_after_a_requeue() -> None:
    gone = facts(run=RunFacts(MINE, "stale"), accounting=False)
    assert judge(gone).reason == (
        "Slurm does not know job 12 any more and keeps no accounts: it ended without a word"
    )
    assert judge(gone).mend == "racelab resume run-0"
    removed = judge(replace(gone, run=None))
    assert (removed.state, removed.mend) == ("lost", "")
    assert removed.reason.endswith("keeps no accounts, and its run folder is gone or damaged")
    again = replace(gone, end=end("requeued", "preempted"), accounting=True)
    assert judge(again).reason == "Slurm does not know job 12 any more: it ended after it was to go on"


def test_a_limit_that_comes_before_the_end_is_said_so() -> None:
    """Limit 4 h, 1 h used: 3 h are left; 3 h 30 min are needed."""

    def reason(eta_s: float | None, **changes: Any) -> str:
        run = RunFacts(MINE, "running", progress=Progress(eta_s=eta_s))
        limited = job("RUNNING", time_limit_s=14400, elapsed_s=3600)
        return judge(facts(job=limited, run=run, **changes)).reason

    assert reason(12600) == "reaches its limit in 3h00m, and goes on after it"
    assert reason(12600, requeue=False) == "reaches its limit in 3h00m, before its end"
    assert reason(10800) == ""
    assert reason(None) == ""


def test_a_job_that_runs_before_its_run_does() -> None:
    started = facts(job=job("RUNNING"))
    assert judge(replace(started, run=RunFacts(MINE, "queued"))).reason == "starting"
    assert judge(replace(started, run=RunFacts(MINE, "interrupted"))).reason == "starting"
    assert judge(replace(started, run=RunFacts(MINE, "running"))).reason == ""
    assert judge(replace(started, run=None, is_run=False)).reason == ""
