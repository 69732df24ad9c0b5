"""What squeue and sacct print of jobs, as values. Text in, values out; the formats are those of Slurm 20.11 to 26.05.

The tools run with TZ=UTC0, SLURM_BITSTR_LEN=0 and without SLURM_TIME_FORMAT (`scheduler.py` sees to it), so times are
`2026-11-30T07:58:08` in UTC and lists of array indices are whole. Fields are divided by a control character and a job's
name comes last: it may hold blanks and bars, and what follows a line break in it is no record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

SEPARATOR: Final = "\x1f"
_QUEUE_FIELDS: Final = (
    "JobArrayID", "State", "Reason", "NodeList", "exit_code", "StartTime", "EndTime", "SubmitTime", "TimeUsed",
    "TimeLimit", "RestartCnt", "Name",
)  # fmt: skip
QUEUE_FORMAT: Final = f":{SEPARATOR},".join(_QUEUE_FIELDS) + ":"
"""For `squeue -O`; without a width, fields are not cut."""
START_FORMAT: Final = f"JobArrayID:{SEPARATOR},State:{SEPARATOR},RestartCnt:"
"""The same, for one question."""
_RECORD_FIELDS: Final = (
    "JobID", "State", "Reason", "NodeList", "ExitCode", "Start", "End", "Submit", "ElapsedRaw", "TimelimitRaw",
    "JobName",
)  # fmt: skip
RECORD_FORMAT: Final = ",".join(_RECORD_FIELDS)
"""For `sacct -o`."""
ALIVE: Final = frozenset(
    {
        "PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING",
        "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "EXPEDITING", "SPECIAL_EXIT", "RESV_DEL_HOLD",
    }
)  # fmt: skip
"""States in which a job may still run, start or start again."""
_NOT_STARTED: Final = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
NOTHING: Final = frozenset({"", "None", "None assigned", "(null)", "n/a", "N/A"})
"""How the tools print what is not there."""
TASK_ID: Final = re.compile(r"\d+(_\d+)?")
"""`12` or `12_4`."""
_ARRAY_ID: Final = re.compile(r"(\d+)_\[([\d,:-]+)(?:%\d+)?\]")


@dataclass(frozen=True, slots=True)
class Job:
    """One job, or one task of an array, as the scheduler has it.

    Attributes:
        job_id: `12`, or `12_4` for a task of an array.
        name: as submitted.
        state: Slurm's base word: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, PREEMPTED, NODE_FAIL, ...
        reason: Slurm's word why it waits or why it ended; "" for none.
        nodes: Slurm's list, as `node[1-2]`; "" if it has none.
        exit_code: of an ended job, as a shell has it: 128 + N after signal N. None before.
        start: of the present or last attempt, seconds since the epoch; None if it has not started.
        end: of an ended job; None before.
        elapsed_s: of that attempt.
        time_limit_s: None if there is none.
        restarts: how often it was requeued; of an ended job that only the accounting knows, how often at least.
        source: squeue or sacct.
        submitted: when, or when it was last requeued.
        expected: of a job that waits, when Slurm expects to start it; None where it has not said so.
    """

    job_id: str
    name: str
    state: str
    reason: str = ""
    nodes: str = ""
    exit_code: int | None = None
    start: float | None = None
    end: float | None = None
    elapsed_s: int | None = None
    time_limit_s: int | None = None
    restarts: int | None = None
    source: str = "squeue"
    submitted: float | None = None
    expected: float | None = None

    @property
    def array_id(self) -> str:
        """What sbatch said: `12` for `12_4`, too."""
        return self.job_id.partition("_")[0]

    @property
    def alive(self) -> bool:
        """Whether it may still run, start or start again."""
        return self.state in ALIVE


def queue_jobs(text: str) -> dict[str, Job]:
    """The jobs that `squeue -h -r -t all -O QUEUE_FORMAT` printed, by id."""
    found = {}
    for row in _rows(text, len(_QUEUE_FIELDS)):
        task, state, reason, nodes, code, start, end, submit, used, limit, restarts, name = row
        if not TASK_ID.fullmatch(task):
            continue  # a part of a heterogeneous job, or what follows a line break in a name
        state, nodes = base(state), something(nodes)
        never = state in _NOT_STARTED or (state not in ALIVE and not nodes)
        found[task] = Job(
            job_id=task,
            name=name,
            state=state,
            reason=something(reason),
            nodes=nodes,
            exit_code=None if state in ALIVE else _queue_code(code),
            start=None if never else moment(start),  # of a job that was cancelled before, squeue says when
            end=None if state in ALIVE else moment(end),
            elapsed_s=duration(used),
            time_limit_s=duration(limit),
            restarts=int(restarts) if restarts.isdecimal() else None,
            source="squeue",
            submitted=moment(submit),
            expected=moment(start) if state in _NOT_STARTED else None,
        )
    return found


def queue_starts(text: str) -> dict[str, tuple[str, int]]:
    """Id -> state and number of restarts, as `squeue -h -r -O START_FORMAT` printed them."""
    return {
        task: (base(state), int(restarts) if restarts.strip().isdecimal() else 0)
        for task, state, restarts in _rows(text, 3)
    }


def recorded_jobs(text: str) -> dict[str, Job]:
    """The jobs that `sacct -X -D -P -n --delimiter -o RECORD_FORMAT` printed, by id; the newest record of each.

    A requeued job has a record for each attempt. Tasks of an array that never started share one, `12_[5-9%2]`, which
    stands back behind a record of the task's own.
    """
    best: dict[str, tuple[float, bool, Job]] = {}
    attempts: dict[tuple[str, str], int] = {}
    for row in _rows(text, len(_RECORD_FIELDS)):
        ids = expand(row[0])
        own = len(ids) == 1
        for task in ids:
            job = _recorded(task, row)
            attempts[task, job.name] = attempts.get((task, job.name), -1) + own
            rank = (job.submitted or 0.0, own)
            if task not in best or rank >= best[task][:2]:
                best[task] = (*rank, replace(job, restarts=max(0, attempts[task, job.name])))
    return {task: job for task, (_, _, job) in best.items()}


def _recorded(task: str, row: list[str]) -> Job:
    _, state, reason, nodes, code, start, end, submit, elapsed, limit, name = row
    if name == "allocation":  # what the accounting calls a job before it has been told its name
        name = ""
    word = base(state)
    node = something(nodes)
    # The reason of a job that has run is what it last waited for.
    why = something(reason) if word == "PENDING" or not node else ""
    if word == "CANCELLED" and why == "Dependency" and " by " not in state:
        why = "DependencyNeverSatisfied"  # Slurm itself cancelled it (kill-on-invalid-dep)
    return Job(
        job_id=task,
        name=name,
        state=word,
        reason=why,
        nodes=node,
        exit_code=None if word in ALIVE else _record_code(code),
        start=None if word in _NOT_STARTED or not node else moment(start),
        end=None if word in ALIVE else moment(end),
        elapsed_s=int(elapsed) if elapsed.isdecimal() else None,
        time_limit_s=60 * int(limit) if limit.isdecimal() else None,
        source="sacct",
        submitted=moment(submit),
    )


def expand(job_id: str) -> tuple[str, ...]:
    """The tasks that an id stands for; () if it is of another kind.

    Example: `12_[0-2,7%2]` gives 12_0, 12_1, 12_2, 12_7; `12_4` and `12` give themselves, `12+0` nothing.
    """
    if TASK_ID.fullmatch(job_id):
        return (job_id,)
    match = _ARRAY_ID.fullmatch(job_id)
    return tuple(f"{match[1]}_{index}" for index in _indices(match[2])) if match else ()


def _indices(text: str) -> Iterator[int]:
    """The numbers of `0-8:4,17`: 0, 4, 8, 17."""
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        if first.isdecimal():
            yield from range(int(first), int(last or first) + 1, int(step or 1))


def base(state: str) -> str:
    """The base word of a state: CANCELLED of `CANCELLED by 0`, COMPLETED of `COMPLETED+`."""
    word, *_ = state.split() or [""]
    return word.rstrip("+")


def moment(text: str) -> float | None:
    """Seconds since the epoch of `2026-11-30T07:58:08`; None of `N/A`, `Unknown`, `None` and the like."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def duration(text: str) -> int | None:
    """Seconds of `1-02:03:04`, `1:30:00`, `5:00`; None of UNLIMITED, NOT_SET, INVALID and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _rows(text: str, fields: int) -> Iterator[list[str]]:
    """Lines as fields; a line with fewer is the rest of a name with a line break."""
    for line in text.split("\n"):
        row = line.split(SEPARATOR, fields - 1)
        if len(row) == fields:
            yield row


def something(text: str) -> str:
    """A reason or a list of nodes; "" where Slurm has none."""
    return "" if text in NOTHING else text


def _queue_code(text: str) -> int | None:
    """What squeue prints: the status that wait() gave (768 for exit code 3), since 23.02 as sacct does (`3:0`)."""
    if ":" in text:
        return _record_code(text)
    if not text.isdecimal():
        return None
    status = int(text)
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8


def _record_code(text: str) -> int | None:
    code, _, signal = text.partition(":")
    if not code.isdecimal():
        return None
    return 128 + int(signal) if signal.isdecimal() and int(signal) else int(code)
