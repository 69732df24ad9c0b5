"""Giving a job back to Slurm, so that it goes on later: the conversation, and when to give up instead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from racelab.experiments.errors import UnreachableError
from racelab.sweeps.slurm.asked import Asked
from racelab.sweeps.slurm.folder import End
from racelab.sweeps.slurm.scheduler import Scheduler

HOLD_S: Final = 300.0
"""How long to go on asking a scheduler that does not answer; a preempted job that ends is not requeued."""
KILLED_S: Final = 120.0
"""How long a requeued job waits to be stopped."""
_ASK_S: Final = 1.0
_POLL_S: Final = 0.1
_RUNNING: Final = "RUNNING"
_WAITS: Final = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD"})
"""States of a job that Slurm has requeued itself."""

Note = Callable[[str, str], None]
"""Writes the `End`: status and reason."""


def hand_back(job: str, note: Note) -> str:
    """Has the job requeued.

    Only a job that says RUNNING may ask: one that was cancelled would come to life again. The `End` is written first,
    for the requeue kills who asked for it.

    Args:
        job: `12` or `12_4`.
        note: writes the `End`; has been called with what is true when this returns "".

    Returns:
        "" if the job is requeued, else why it is not.
    """
    scheduler = Scheduler()
    deadline = time.monotonic() + HOLD_S
    refused = False
    asked = False
    while True:
        try:
            state = scheduler.state(job)
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


def idle_requeues(last: End | None, before: int | None, after: int | None, at_limit: bool) -> int:
    """How many times in a row the time limit has come without a new checkpoint, with the present time.

    Args:
        last: how the attempt before ended, in the same job.
        before: step of the newest checkpoint when the present attempt started; None: there was none.
        after: the same now.
        at_limit: whether it is the time limit that stops it now.

    Example: limits at steps 10, 10, 10 give 0, 1, 2; a preemption in between, at step 10, keeps the count.
    """
    if after is not None and (before is None or after > before):
        return 0
    return (0 if last is None else last.idle_requeues) + at_limit
