"""Who a job's process is, and how the processes of one task on several nodes find one another: through small files.

In `nodes/<batch>.<index>/` of the launch's folder every rank writes `<rank>.json`, a `Report`, and the first one
`ended.json` when its attempt is over. Both name the job and its restart, so what an earlier attempt left counts for
nothing. The child of the first rank finds the folder in RACELAB_NODES_DIR.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from racelab.experiments.errors import ConfigError, RunFolderError, UnreachableError
from racelab.experiments.fsio import explain, read_json, write_json_atomic
from racelab.sweeps.slurm.asked import Asked

NODES_VARIABLE: Final = "RACELAB_NODES_DIR"
"""Environment variable of the child of a task on several nodes: the folder of the reports."""
GATHER_S: Final = 120.0
"""How long the first rank waits for the others; nodes differ in how long they take to start a process."""
_POLL_S: Final = 0.2
_ENDED: Final = "ended.json"


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process of which job this is.

    Attributes:
        job: `12` or `12_4`.
        submission: job id of the whole array, or the job's.
        index: in the array; 0 for a job that is none.
        restart: how often Slurm has requeued the job.
        rank: of the process in its step.
        nodes: of the step, one process on each.
        node: Slurm's name of this one.
    """

    job: str
    submission: str
    index: int
    restart: int
    rank: int
    nodes: int
    node: str

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Identity:
        """From the variables that Slurm sets for a step's processes.

        Raises:
            ConfigError: one is missing; this is no process of a job.
        """
        needed = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NNODES", "SLURMD_NODENAME")
        missing = [name for name in needed if not environ.get(name)]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: this command is for the jobs "
                "that racelab submits; use `racelab launch`, or launcher=slurm"
            )
        array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        in_array = bool(array and index)
        try:
            return cls(
                job=f"{array}_{index}" if in_array else environ["SLURM_JOB_ID"],
                submission=str(array) if in_array else environ["SLURM_JOB_ID"],
                index=int(index or 0) if in_array else 0,
                restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
                rank=int(environ["SLURM_PROCID"]),
                nodes=int(environ["SLURM_NNODES"]),
                node=environ["SLURMD_NODENAME"],
            )
        except ValueError as error:
            raise ConfigError(
                f"Slurm's variables are not as expected ({error}); see `env | grep SLURM_` in the job"
            ) from error


@dataclass(frozen=True, slots=True)
class Report:
    """A rank that is there.

    Attributes:
        rank: of the process.
        host: as the node calls itself.
        node: as Slurm calls it.
        address: IP address by which the job's first node reaches it.
        pid: of the process.
        job: `12` or `12_4`.
        restart: of the job.
    """

    rank: int
    host: str
    node: str
    address: str
    pid: int
    job: str
    restart: int


def report(directory: Path, me: Identity, environ: Mapping[str, str]) -> None:
    """Says that this rank is there.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"cannot create {directory}: {explain(error)}") from error
    here = _address(environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
    mine = Report(me.rank, socket.gethostname(), me.node, here, os.getpid(), me.job, me.restart)
    write_json_atomic(directory / f"{me.rank}.json", asdict(mine))


def gather(directory: Path, me: Identity, asked: Asked, wait_s: float) -> list[Report]:
    """The reports of all ranks of this attempt, by rank; fewer if a signal came before they were complete.

    Raises:
        UnreachableError: a rank has not reported within `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    while True:
        found = [there for rank in range(me.nodes) if (there := _read(directory, rank, me)) is not None]
        if len(found) == me.nodes or asked.at is not None:
            return found
        if time.monotonic() > deadline:
            missing = sorted(set(range(me.nodes)) - {there.rank for there in found})
            raise UnreachableError(
                f"rank {', '.join(map(str, missing))} of {me.nodes} has not reported in {directory} within "
                f"{wait_s:.0f} s; see the log of that rank, and whether its node sees the folder"
            )
        time.sleep(_POLL_S)


def close(directory: Path, me: Identity) -> None:
    """Says that the attempt is over, so that the other ranks end too."""
    write_json_atomic(directory / _ENDED, {"job": me.job, "restart": me.restart})


def stand_by(directory: Path, me: Identity, asked: Asked, patience_s: float) -> int:
    """Waits until the first rank has ended the attempt; returns the exit code.

    A signal does not end it at once: while the first rank saves, it may still need what runs on this node.

    Args:
        directory: of the reports.
        me: this rank; it has reported.
        asked: the signals.
        patience_s: how long to go on after the first of them, should the first rank be gone without a word.
    """
    while not _is_over(directory, me):
        if asked.at is not None and time.monotonic() - asked.at > patience_s:
            break
        time.sleep(_POLL_S)
    return 0


def _is_over(directory: Path, me: Identity) -> bool:
    try:
        return bool(read_json(directory / _ENDED) == {"job": me.job, "restart": me.restart})
    except RunFolderError:  # not there yet
        return False


def _read(directory: Path, rank: int, me: Identity) -> Report | None:
    """The report of a rank; None if this attempt's has none yet."""
    try:
        found = Report(**read_json(directory / f"{rank}.json"))
    except (RunFolderError, TypeError):
        return None
    return found if (found.job, found.restart) == (me.job, me.restart) else None


def _address(towards: str) -> str:
    """The address of this host on the way to another; its own name's where that is not known, "" if that has none."""
    try:
        if towards:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((towards, 9))  # a datagram socket: nothing is sent
                return str(probe.getsockname()[0])
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
