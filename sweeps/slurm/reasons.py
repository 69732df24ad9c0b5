"""Why a job waits, in words: Slurm's pending reasons, which of them no time cures, and what does.

The words are those of `squeue -o %r` (https://slurm.schedmd.com/job_reason_codes.html). A reason that is not known here
is shown as it is, and taken for one that passes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a job waits.

    Attributes:
        text: for people, with Slurm's own word; "" if Slurm gives none.
        mend: the command that helps; "" where time does.
    """

    text: str
    mend: str = ""


_PASSES: Final[Mapping[str, str]] = {
    "Resources": "waits for free nodes",
    "Priority": "waits behind other jobs",
    "Dependency": "waits for other jobs",
    "JobArrayTaskLimit": "launcher.max_parallel tasks are running",
    "BeginTime": "may not start yet",
    "ReqNodeNotAvail": "its nodes are down, drained or reserved",
    "NodeDown": "its node is down",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is closed",
    "Licenses": "waits for a licence",
    "Reservation": "waits for its reservation",
    "Cleaning": "is being requeued",
    "FrontEndDown": "the front end is down",
    "Prolog": "the node is being made ready",
}
"""Reasons that pass -> what they mean."""

_RELEASE: Final = "scontrol release {job}"


def _anew(key: str) -> str:
    return f"racelab cancel {{name}}; racelab resume {{name}} launcher.{key}"


_BLOCKS: Final[Mapping[str, tuple[str, str]]] = {
    "PartitionNodeLimit": ("more nodes than the partition gives a job", _anew("partition=NAME")),
    "PartitionTimeLimit": ("a limit above the partition's", _anew("time_min=N")),
    "BadConstraints": ("no node is as asked for", _anew("constraint=NAME")),
    "AccountNotAllowed": ("the partition refuses the account", _anew("account=NAME")),
    "InvalidAccount": ("no such account", _anew("account=NAME")),
    "AccountingPolicy": ("the account may not run this", _anew("account=NAME")),
    "QOSNotAllowed": ("the partition or the account refuses the QOS", _anew("qos=NAME")),
    "InvalidQOS": ("no such QOS", _anew("qos=NAME")),
    "ReservationDeleted": ("its reservation is gone", _anew("reservation=NAME")),
    "DeadLine": ("cannot end before its deadline", _anew("time_min=N")),
    "JobHeldUser": ("held by its owner", _RELEASE),
    "JobHeldAdmin": ("held by an administrator", f"ask one, or: {_RELEASE}"),
    "JobHoldMaxRequeue": ("held, for it was requeued too often", _RELEASE),
    "DependencyNeverSatisfied": (
        "what it waits for did not end well, so it can never run",
        "racelab cancel {name}; racelab resume {launch}",
    ),
}
"""Reasons that no time cures -> what they mean, and the commands that help."""

_SENTENCES: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"Job's account not (known|permitted)\b"), "AccountNotAllowed"),
    (re.compile(r"Job's QOS not (known|permitted)\b"), "QOSNotAllowed"),
    (re.compile(r"Nodes required for job are DOWN\b"), "ReqNodeNotAvail"),
)
"""What Slurm says in a sentence, with blanks or (some versions) underscores in it -> the word for it."""

_PER_JOB: Final = re.compile(r"(QOS|Assoc)(Max|Min)(?P<what>\w+?)(PerJob|PerJobLimit|NotSatisfied)")
"""`QOSMaxNodePerJobLimit`, `AssocMaxWallDurationPerJobLimit`, `QOSMinCpuNotSatisfied`, ..."""
_KEYS: Final[Mapping[str, str]] = {
    "WallDuration": "time_min=N",
    "Node": "nodes=N",
    "Memory": "mem_gb=N",
    "GRES": "gpus_per_node=N",
}


def waiting(reason: str, *, job_id: str, name: str, launch: str) -> Waiting:
    """What a pending job's reason means.

    Args:
        reason: as squeue gives it; may go on after a comma, as in `ReqNodeNotAvail, UnavailableNodes:node4`.
        job_id: of the task.
        name: what racelab's commands take for the task.
        launch: what they take for the whole launch.

    Example: `PartitionTimeLimit` gives a text and the mend `racelab cancel NAME; racelab resume NAME
    launcher.time_min=N`; `Resources` gives `waits for free nodes (Resources)` and no mend.
    """
    said = reason.replace("_", " ")
    word = next((word for begins, word in _SENTENCES if begins.match(said)), reason.partition(",")[0].strip())
    if word in ("", "None"):
        return Waiting("")
    if word in _BLOCKS:
        text, mend = _BLOCKS[word]
    elif match := _PER_JOB.fullmatch(word):
        text = "beyond what a job of this QOS or account may ask for"
        mend = _anew(next((key for what, key in _KEYS.items() if match["what"].startswith(what)), "qos=NAME"))
    else:
        return Waiting(f"{_PASSES[word]} ({reason})" if word in _PASSES else reason)
    return Waiting(f"{text} ({reason})", mend.format(job=job_id, name=name, launch=launch))
