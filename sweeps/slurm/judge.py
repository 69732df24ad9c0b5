"""What the facts about a task amount to. No files, no scheduler: facts in, verdict out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from racelab.sweeps.slurm.folder import End
from racelab.sweeps.slurm.glance import RunFacts
from racelab.sweeps.slurm.model import NOT_OURS, Submission
from racelab.sweeps.slurm.reasons import waiting
from racelab.sweeps.slurm.scheduler import ALIVE, Job

State = Literal[
    "unsubmitted", "submitting", "refused", "pending", "blocked", "running", "requeued", "finished", "failed",
    "cancelled", "timeout", "preempted", "node_fail", "out_of_memory", "interrupted", "lost", "superseded",
]  # fmt: skip
_REQUEUE_S: Final = 120.0
"""How long after PREEMPTED or NODE_FAIL Slurm may still requeue a job; it does so within seconds."""
_HELD: Final = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_PASSING: Final = frozenset({"PREEMPTED", "NODE_FAIL"})


@dataclass(frozen=True, slots=True)
class Facts:
    """All that is known of a task.

    Attributes:
        launch: id.
        name: what the commands take for the task.
        ours: whether its run is assigned to it; a command's always is.
        requeue: whether Slurm may requeue its job.
        submission: newest of its batch; None before the first.
        submitting: a live process submits the launch just now.
        job_id: of the task, also where only its name was found; "" without one.
        job: as the scheduler has it; None if it does not know it.
        end: what the job itself said last; None if it is of another submission, or nothing.
        run: as its folder has it; None for a command, and for a folder that is gone.
        is_run: a run, not a command.
        cancelled: somebody asked to cancel it.
        waits_for: stages that it waits for.
        unmet: those of them that had to end well, and did not.
        accounting: whether the scheduler remembers jobs for good.
        now: seconds since the epoch.
    """

    launch: str
    name: str
    submission: Submission | None
    job_id: str = ""
    job: Job | None = None
    end: End | None = None
    run: RunFacts | None = None
    is_run: bool = True
    ours: bool = True
    requeue: bool = True
    submitting: bool = False
    cancelled: bool = False
    waits_for: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()
    accounting: bool = True
    now: float = 0.0

    @property
    def words(self) -> End | None:
        """What the job said at its end, if that was the end of its last start."""
        if self.end is None or self.job is None or self.job.restarts is None:
            return self.end
        return self.end if self.end.restart >= self.job.restarts else None

    @property
    def run_status(self) -> str:
        """Of the run's folder, "" without one."""
        return self.run.status if self.run is not None else ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a task stands.

    Attributes:
        state: one word.
        live: it may still run or start.
        reason: one line, "" where there is nothing to say.
        mend: the command that helps, "".
    """

    state: State
    live: bool = False
    reason: str = ""
    mend: str = ""


def judge(facts: Facts) -> Verdict:
    """How a task stands. The first line that fits decides.

    | known | state | live |
    |---|---|---|
    | its run is assigned to another task; with a mend if the controller still has its job | superseded | no |
    | the run's folder says finished | finished | no |
    | no job, and cancelled meanwhile | cancelled | no |
    | no job, sbatch refused it | refused | no |
    | no job, a process is submitting | submitting | yes |
    | no job | unsubmitted | yes |
    | controller: PENDING, for a reason that no time cures; REQUEUE_HOLD and the like | blocked | yes |
    | controller: PENDING after a start, REQUEUED, COMPLETING after its word "requeued" | requeued | yes |
    | controller: PENDING, CONFIGURING | pending | yes |
    | controller: PREEMPTED or NODE_FAIL for two minutes, job may be requeued | preempted, node_fail | yes |
    | controller: any other state of a job that lives | running | yes |
    | ended FAILED or COMPLETED, another process has the run | running, failed, interrupted as the folder says | |
    | ended FAILED or COMPLETED, its word is "stopped" or "requeued" | interrupted; cancelled if asked for | no |
    | COMPLETED, its word is "failed" | failed | no |
    | COMPLETED, its word is "finished"; a command without a word | finished | no |
    | COMPLETED, a run without a word | failed or interrupted as the folder says, else lost | no |
    | FAILED otherwise | failed | no |
    | CANCELLED, REVOKED | cancelled | no |
    | TIMEOUT, DEADLINE | timeout | no |
    | PREEMPTED; NODE_FAIL, BOOT_FAIL; OUT_OF_MEMORY | preempted; node_fail; out_of_memory | no |
    | job unknown, its word is "finished", "failed" | finished, failed | no |
    | job unknown, its word is "stopped" | interrupted; cancelled if asked for | no |
    | job unknown, its word is that another process has the run | running, failed, interrupted as the folder says | |
    | job unknown, a process works on the run | running | yes |
    | job unknown, cancelled | cancelled | no |
    | job unknown, the folder says failed, interrupted | failed, interrupted | no |
    | nothing of all that | lost | no |

    A job that accounting alone calls RUNNING or PENDING is unknown: the controller has lost it. One that it calls
    CANCELLED before its start, though it has said how it ended, is unknown too: its record is gone.
    """
    for rule in _RULES:
        verdict = rule(facts)
        if verdict is not None:
            return verdict
    return _lost(facts)


def _reassigned(f: Facts) -> Verdict | None:
    if f.ours:
        return None
    if _lives(f):
        reason = "its run was taken by hand or by a later launch, and its job is still there"
        return Verdict("superseded", reason=reason, mend=f"racelab cancel {f.launch} removes the job")
    return Verdict("superseded", reason="the run is assigned to a later job")


def _finished(f: Facts) -> Verdict | None:
    return Verdict("finished") if f.run_status == "finished" else None


def _unsubmitted(f: Facts) -> Verdict | None:
    if f.job_id:
        return None
    if f.cancelled:
        return _cancelled_before(f)
    if f.submission is not None and f.submission.error:
        mend = f"racelab resume {f.launch} launcher.KEY=VALUE"
        return Verdict("refused", reason=f.submission.error, mend=mend)
    if f.submitting:
        return Verdict("submitting", live=True)
    reason = "not submitted yet" if f.submission is None else "its submitter died before Slurm had it"
    return Verdict("unsubmitted", live=True, reason=reason, mend=f"racelab resume {f.launch}")


def _cancelled_before(f: Facts) -> Verdict:
    return Verdict("cancelled", reason="cancelled before it started", mend=f"racelab resume {f.name}")


def _lives(f: Facts) -> bool:
    """Whether the controller has the job, and the job has not ended for good."""
    if f.job is None or f.job.source == "sacct":
        return False
    if f.job.state in _PASSING and f.requeue:
        return f.job.end is None or f.now - f.job.end < _REQUEUE_S
    return f.job.state in ALIVE


def _alive(f: Facts) -> Verdict | None:
    if f.job is None or not _lives(f):
        return None
    word = f.job.state
    if word in _PASSING:
        state: State = "preempted" if word == "PREEMPTED" else "node_fail"
        return Verdict(state, live=True, reason="Slurm may requeue it")
    if word in _HELD:
        return Verdict("blocked", True, f"requeued, and held ({word})", f"scontrol release {f.job_id}")
    if word == "PENDING":
        return _waits(f, f.job)
    if word == "CONFIGURING":
        return Verdict("pending", live=True, reason="its nodes are being made ready (CONFIGURING)")
    if word in ("REQUEUED", "REQUEUE_FED"):
        return Verdict("requeued", live=True, reason=f.end.reason if f.end else "")
    if word == "COMPLETING":
        return _ending(f)
    return Verdict("running", live=True, reason=_pace(f, f.job) if word == "RUNNING" else word.lower())


def _waits(f: Facts, job: Job) -> Verdict:
    why = waiting(job.reason, job_id=f.job_id, name=f.name, launch=f.launch)
    if why.mend:
        return Verdict("blocked", True, why.text, why.mend)
    text = why.text
    if job.reason.startswith("Dependency") and f.waits_for:
        text = f"waits for {', '.join(f.waits_for)} (Dependency)"
    if job.restarts or (f.end is not None and f.end.status == "requeued"):
        return Verdict("requeued", True, "; ".join(filter(None, (f.end.reason if f.end else "", text))))
    return Verdict("pending", True, text)


def _ending(f: Facts) -> Verdict:
    if f.words is not None and f.words.status == "requeued":
        return Verdict("requeued", live=True, reason=f.words.reason)
    return Verdict("running", live=True, reason="its job is ending (COMPLETING)")


def _pace(f: Facts, job: Job) -> str:
    """What is to be said of a running job."""
    if f.run is None:
        return ""
    if f.run.status != "running":
        return "starting"
    eta = f.run.progress.eta_s
    if eta is None or job.time_limit_s is None or job.elapsed_s is None:
        return ""
    left = job.time_limit_s - job.elapsed_s
    if eta <= left:
        return ""
    then = "and goes on after it" if f.requeue else "before its end"
    return f"reaches its limit in {_span(left)}, {then}"


def _span(seconds: float) -> str:
    minutes = max(0, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60}h{minutes % 60:02d}m"


def _ended(f: Facts) -> Verdict | None:
    """The scheduler's final word, with the job's own."""
    if f.job is None or f.job.state in ALIVE:
        return None
    word = f.job.state
    if word in ("COMPLETED", "FAILED"):
        return _by_words(f) or (_without_words(f) if word == "COMPLETED" else _failed(f))
    if word in ("CANCELLED", "REVOKED"):
        return (_last_words(f) if not f.job.nodes else None) or _cancelled(f)
    if word not in _FINAL:
        return None
    state, reason, mend = _FINAL[word]
    return Verdict(state, reason=f"{reason}{_after_step(f)}", mend=mend.format(name=f.name))


_FINAL: Final[dict[str, tuple[State, str, str]]] = {
    "TIMEOUT": (
        "timeout",
        "time limit",
        "racelab resume {name}, with launcher.time_min=N for a longer limit",
    ),
    "DEADLINE": ("timeout", "deadline", "racelab resume {name}"),
    "PREEMPTED": ("preempted", "preempted, not requeued", "racelab resume {name}"),
    "NODE_FAIL": ("node_fail", "its node failed, not requeued", "racelab resume {name}"),
    "BOOT_FAIL": ("node_fail", "its node did not boot", "racelab resume {name}"),
    "OUT_OF_MEMORY": ("out_of_memory", "out of memory", "racelab resume {name} launcher.mem_gb=N"),
}
"""Slurm's word -> state, reason, mend."""


def _after_step(f: Facts) -> str:
    step = f.words.step if f.words is not None else None
    return f", after step {step}" if step is not None else ""


def _by_words(f: Facts) -> Verdict | None:
    """What the job itself said at its end decides; None where it said nothing, or that all went well."""
    words = f.words
    if words is None:
        return _taken(f) if f.job is not None and f.job.exit_code == NOT_OURS else None
    if words.status == "finished":
        return None
    if words.status in ("fenced", "superseded"):
        return _taken(f)
    if words.status == "failed":
        return _failed(f)
    if f.cancelled:
        return _cancelled(f)
    asked = words.reason or "asked to stop"
    reason = asked if words.status == "stopped" else f"{asked}; meant to go on, but Slurm did not requeue it"
    return Verdict("interrupted", reason=f"{reason}{_after_step(f)}", mend=f"racelab resume {f.name}")


def _taken(f: Facts) -> Verdict:
    """Another process, which is no later job, has the run or had it."""
    mend = f"racelab resume {f.name}"
    return _by_folder(f) or Verdict("interrupted", reason="another process took the run", mend=mend)


def _without_words(f: Facts) -> Verdict:
    """Slurm says COMPLETED."""
    if f.words is not None or not f.is_run:
        return Verdict("finished")
    return _by_folder(f) or _lost(f)


def _failed(f: Facts) -> Verdict:
    reason = f.words.reason if f.words is not None else ""
    if not reason and f.run is not None and f.run.status == "failed":
        reason = f.run.reason
    if not reason and f.words is not None and f.words.exit_code:
        reason = f"exit code {f.words.exit_code}"
    if not reason and f.job is not None:
        code = "" if f.job.exit_code is None else f", exit code {f.job.exit_code}"
        reason = f"its job {f.job.state.lower()}{code}, without a word of its own"
    mend = f"racelab logs {f.name} shows why; racelab resume {f.name}"
    return Verdict("failed", reason=reason, mend=mend)


def _cancelled(f: Facts) -> Verdict:
    job = f.job
    if job is not None and not job.nodes:  # never started
        if f.cancelled:
            return _cancelled_before(f)
        if f.unmet or job.reason == "DependencyNeverSatisfied":
            what = ", ".join(f.unmet or f.waits_for) or "what it waited for"
            reason = f"never started: {what} did not end well"
            return Verdict("cancelled", reason=reason, mend=f"racelab resume {f.launch}")
    by = "by racelab cancel" if f.cancelled else "by scancel or the site"
    return Verdict("cancelled", reason=f"{by}{_after_step(f)}", mend=f"racelab resume {f.name}")


def _last_words(f: Facts) -> Verdict | None:
    """The scheduler does not know the job: what the job itself said at its end."""
    if f.words is None or f.words.status == "requeued":
        return None
    return Verdict("finished") if f.words.status == "finished" else _by_words(f)


def _by_folder(f: Facts) -> Verdict | None:
    """Neither the scheduler nor the job says anything: the run's folder."""
    if f.run is not None and f.run.status == "running":
        return Verdict("running", live=True, reason="a process works on it, but Slurm knows no job")
    if f.cancelled:
        return _cancelled(f)
    if f.run is not None and f.run.status == "failed":
        return _failed(f)
    if f.run is not None and f.run.status == "interrupted":
        return Verdict("interrupted", reason=f.run.reason, mend=f"racelab resume {f.name}")
    return None


def _lost(f: Facts) -> Verdict:
    if f.job is not None and f.job.state in ALIVE:
        known = f"accounting says {f.job.state}, but the controller does not know job {f.job_id}"
    elif f.job is not None:
        known = f"job {f.job_id} ended ({f.job.state})"
    else:
        known = f"Slurm does not know job {f.job_id} any more"
    record = "" if f.accounting or f.job is not None else " and keeps no accounts"
    left = "without a word" if f.end is None else "after it was to go on"
    if f.is_run and f.run is None:  # nothing is there that could go on
        return Verdict("lost", reason=f"{known}{record}, and its run folder is gone or damaged")
    return Verdict("lost", reason=f"{known}{record}: it ended {left}", mend=f"racelab resume {f.name}")


_RULES: Final[tuple[Callable[[Facts], Verdict | None], ...]] = (
    _reassigned, _finished, _unsubmitted, _alive, _ended, _last_words, _by_folder,
)  # fmt: skip
