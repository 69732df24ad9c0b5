"""Giving a job back to Slurm, so that it goes on later: the conversation, and when to give up instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from racelab.experiments.errors import UnreachableError
from racelab.sweeps.slurm.asked import Asked
from racelab.sweeps.slurm.folder import End
from racelab.sweeps.slurm.scheduler import Scheduler

HOLD_S: Final = 300.0
"""How long to go on asking a scheduler that does not answer; a preempted job that ends is not requeued."""
KILLED_S: Final = 120.0
"""How long a requeued job waits to be stopped."""
LATER: Final = "a later start has the job"
"""Why a job is not given back: a process that was given up for lost has no say in it."""
MAX_BARREN: Final = 20
"""Starts of a job in a row without a new checkpoint before it is given up, whatever stopped them. Each holds nodes and
gives nothing; far more than a streak of preemptions or of broken nodes makes likely, and an end to what repeats itself
for ever (a rank that the kernel kills each time)."""
_ASK_S: Final = 1.0
_POLL_S: Final = 0.1
_RUNNING: Final = "RUNNING"
_WAITS: Final = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD"})
"""States of a job that Slurm has requeued itself."""

Note = Callable[[str, str], None]
"""Writes the `End`: status and reason."""


def hand_back(job: str, restart: int, note: Note) -> str:
    """Has the job requeued.

    Only a job that says RUNNING may ask: one that was cancelled would come to life again. And only its newest start: a
    process that comes back from a node that was lost would end the attempt that took its place. The `End` is written
    first, for the requeue kills who asked for it.

    Args:
        job: `12` or `12_4`.
        restart: SLURM_RESTART_COUNT of this process.
        note: writes the `End`; has been called with what is true when this returns "".

    Returns:
        "" if the job is requeued, else why it is not; `LATER`, with nothing noted, if it is a later start that runs.
    """
    scheduler = Scheduler()
    deadline = time.monotonic() + HOLD_S
    refused = False
    asked = False
    while True:
        try:
            state, restarts = scheduler.state_and_restarts(job)
            if state == _RUNNING and restarts > restart:
                return "" if asked else LATER  # asked: what runs is what was asked for
            if state and state != _RUNNING:
                if asked or state in _WAITS:
                    note("requeued", "")
                    return ""
                return f"ended from outside (Slurm says {state})"
            if state:
                note("requeued", "")
                asked = True
                if scheduler.requeue(job):
                    return ""
                if refused:
                    return "Slurm refused to requeue the job"
                refused = True  # or the requeue has just killed who reports it: the state tells
            problem = "it does not know the job"
        except UnreachableError as error:
            problem = str(error)
        if not asked:
            note("stopped", f"Slurm could not be asked to requeue the job: {problem}")
        if time.monotonic() > deadline:
            return f"Slurm could not be asked to requeue the job: {problem}"
        time.sleep(_ASK_S)


def await_stop(asked: Asked, terms: int) -> None:
    """Until a SIGTERM comes beyond the first `terms`, as it does within a moment of a requeue."""
    deadline = time.monotonic() + KILLED_S
    while asked.terms <= terms and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def idle_requeues(last: End | None, before: int | None, after: int | None, counts: bool) -> int:
    """How many stops in a row came without a new checkpoint, with the present one.

    Args:
        last: how the attempt before ended, in the same job.
        before: step of the newest checkpoint when the present attempt started; None: there was none.
        after: the same now.
        counts: whether the present stop is one that would come again: the time limit, or no signal of Slurm's at all.

    Example: limits at steps 10, 10, 10 give 0, 1, 2; a preemption in between, at step 10, keeps the count.
    """
    if after is not None and (before is None or after > before):
        return 0
    return (0 if last is None else last.idle_requeues) + counts


def idle_reason(idle: int, at_limit: bool, time_min: int, newest: str) -> str:
    """Why a job is given up that has stopped `idle` times.

    Args:
        idle: from `idle_requeues`.
        at_limit: whether it is the time limit that stopped it last.
        time_min: the limit.
        newest: of a run, what is known of its newest checkpoint; "" for a command.
    """
    if not at_limit:
        where = f"without a new checkpoint ({newest})" if newest else "and starts anew each time"
        return (
            f"stopped {idle} times in a row {where}, now by a signal that Slurm did not send; the end of its log may "
            "say who did (an out-of-memory daemon, the work itself)"
        )
    limit = f"launcher.time_min (now {time_min})"
    if not newest:
        return f"the command reached its time limit {idle} times, each time from its start; raise {limit}"
    return (
        f"the time limit came {idle} times in a row without a new checkpoint ({newest}); raise {limit} or lower "
        "checkpoint.every"
    )


def barren_starts(attempts: Iterable[Mapping[str, Any]], job: str, restart: int, newest: int | None) -> int:
    """How many starts of the job, up to the present one, have left the run at its newest checkpoint.

    Starts that came to no attempt count too.

    Args:
        attempts: the run's, as `RunFolder.attempts` gives them.
        job: `12` or `12_4`.
        restart: SLURM_RESTART_COUNT of this process.
        newest: step of the newest checkpoint, None if there is none.

    Example: start 0 goes from step 0 to 8, starts 1 and 2 go on at 8; start 3 sees 8, so 2 starts gave nothing.
    """
    fruitful = [
        int(entry["slurm_restart"])
        for entry in attempts
        if entry.get("slurm_job_id") == job
        and entry.get("slurm_restart") is not None
        and entry["slurm_restart"] < restart
        and entry["from_step"] != (newest or 0)
    ]
    return restart - 1 - max(fruitful, default=-1)


def barren_reason(starts: int, newest: str) -> str:
    """Why a job is given up after so many starts; `newest` as for `idle_reason`."""
    if not newest:
        return f"the command was started {starts} times and stopped each time before its end; it needs a longer stay"
    return (
        f"{starts} starts in a row ended without a new checkpoint ({newest}); lower checkpoint.every, and see "
        "what stopped them in the logs"
    )
