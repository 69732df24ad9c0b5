"""How `racelab jobs` shows tasks: rows, counts, mends, a line per change, and a table that is redrawn."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from racelab.analysis.rlds_words import counted
from racelab.cli.console import number, seconds
from racelab.cli.train import run_root
from racelab.sweeps.slurm.status import State, TaskStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS: Final = ("run", "state", "reason", "node", "job", "attempt", "step", "ETA", "reward")
RIGHT: Final = ("attempt", "step", "reward")
_COUNTED: Final[tuple[State, ...]] = (
    "finished", "running", "requeued", "pending", "submitting", "unsubmitted", "blocked", "refused", "failed",
    "timeout", "out_of_memory", "node_fail", "preempted", "interrupted", "lost", "cancelled", "superseded",
)  # fmt: skip
"""In which order states are counted."""
_FIRST: Final[tuple[State, ...]] = (
    "running", "failed", "lost", "out_of_memory", "timeout", "node_fail", "preempted", "refused", "blocked",
    "interrupted", "requeued", "submitting", "unsubmitted", "pending", "finished", "cancelled", "superseded",
)  # fmt: skip
"""Which tasks are shown first where the terminal is too low for all."""
_STYLES: Final[Mapping[str, str]] = {
    "running": "cyan", "finished": "green", "pending": "", "requeued": "yellow", "submitting": "",
    "unsubmitted": "yellow", "cancelled": "dim", "superseded": "dim", "interrupted": "yellow", "preempted": "yellow",
}  # fmt: skip
"""What is not named here went wrong: red."""
_NAMED: Final = 3


def row(status: TaskStatus, now: datetime | None = None) -> list[str]:
    """A task's cells; `now` in the reader's time zone."""
    return [
        label(status),
        status.state,
        status.reason or "-",
        status.node or "-",
        status.job_id or "-",
        "-" if status.attempt is None else str(status.attempt),
        _step(status),
        _eta(status, now or datetime.now().astimezone()),
        number(status.value),
    ]


def label(status: TaskStatus) -> str:
    """What the commands take for the task, with its title where that says more."""
    if not status.title or status.name.startswith(status.title) or status.title == status.stage:
        return status.name
    return f"{status.name} ({status.title})"


def _step(status: TaskStatus) -> str:
    if status.step is None:
        return "-"
    return f"{status.step}/{status.budget}" if status.budget is not None else str(status.step)


def _eta(status: TaskStatus, now: datetime) -> str:
    """`3m05s` to the end of a running task; `starts ~14:05` of one that waits, with the day if it is another."""
    if status.eta_s is None:
        return "-"
    if status.state == "running":
        return seconds(status.eta_s)
    start = now + timedelta(seconds=status.eta_s)
    return f"starts ~{start:%H:%M}" if start.date() == now.date() else f"starts ~{start:%Y-%m-%d %H:%M}"


def counts(statuses: Sequence[TaskStatus]) -> str:
    """`9 jobs: 5 finished, 2 running, 2 pending`; at least one."""
    return f"{counted(len(statuses), 'job')}: {_by_state(statuses)}"


def _by_state(statuses: Sequence[TaskStatus]) -> str:
    states = [status.state for status in statuses]
    return ", ".join(f"{states.count(state):,} {state}" for state in _COUNTED if state in states)


def mends(statuses: Iterable[TaskStatus], root: Path | None = None) -> Iterator[str]:
    """What to do, a line for each mend; tasks that share one are named together.

    Args:
        statuses: any.
        root: folder of the runs; None: where the commands look by themselves.
    """
    root = None if root == run_root("") else root
    groups: dict[str, list[TaskStatus]] = {}
    for status in statuses:
        if status.mend:
            groups.setdefault(_general(status), []).append(status)
    for mend, group in groups.items():
        if len(group) == 1:
            yield f"{group[0].name} {group[0].state}: {_rooted(group[0].mend, root)}"
            continue
        names = ", ".join(status.name for status in group[:_NAMED])
        more = f" and {len(group) - _NAMED:,} more" if len(group) > _NAMED else ""
        yield f"{len(group):,} {group[0].state}: {_rooted(mend, root)} (of {names}{more})"


def _general(status: TaskStatus) -> str:
    """The mend without the names of this very task."""
    mend = status.mend.replace(status.name, "RUN" if status.run_id else "LAUNCH:STAGE")
    return mend.replace(f" {status.job_id}", " JOB") if status.job_id and "scontrol" in mend else mend


def _rooted(mend: str, root: Path | None) -> str:
    if root is None:
        return mend
    return re.sub(r"racelab \w+ [^\s;,]+", lambda match: f"{match[0]} --root {shlex.quote(str(root))}", mend)


def change(status: TaskStatus) -> str:
    """A line for a task that stands otherwise than before: `full-s0-0123456789: running on node2 (job 12_3)`."""
    where = f" on {status.node}" if status.state == "running" and status.node else ""
    job = f" (job {status.job_id})" if status.job_id else ""
    return f"{label(status)}: {status.state}{where}{job}{f': {status.reason}' if status.reason else ''}"


Key = tuple[str, str, int]


def key(status: TaskStatus) -> Key:
    """Which task it is."""
    return status.launch, status.batch, status.index


def stands(status: TaskStatus) -> tuple[str, str, str]:
    """What must differ for a change to be worth a line; why a task waits may change every moment."""
    return status.state, status.job_id, status.node if status.state == "running" else ""


def table(statuses: Sequence[TaskStatus], room: int) -> RenderableType:
    """The table for a terminal: at most `room` tasks, the most interesting ones, in the order they were launched."""
    from rich.box import ROUNDED
    from rich.table import Table
    from rich.text import Text

    made = Table(box=ROUNDED, title=counts(statuses), title_justify="left", header_style="bold")
    for name in COLUMNS:
        made.add_column(
            name,
            justify="right" if name in RIGHT else "left",
            overflow="ellipsis" if name == "reason" else "fold",
            no_wrap=name not in ("run", "reason"),
        )
    ranks = {state: rank for rank, state in enumerate(_FIRST)}
    places = sorted(range(len(statuses)), key=lambda place: ranks[statuses[place].state])
    shown, hidden = sorted(places[: max(1, room)]), places[max(1, room) :]
    for status in (statuses[place] for place in shown):
        style = _STYLES.get(status.state, "red")
        made.add_row(*(Text(cell, style=style) for cell in row(status)))
    if hidden:
        verb = "is" if len(hidden) == 1 else "are"
        states = _by_state([statuses[place] for place in hidden])
        made.caption = f"{counted(len(hidden), 'job')} {verb} not shown: {states}"
    return made
