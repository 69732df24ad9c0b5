"""Fencing: an attempt that was replaced by another can write nothing more.

A scheduler may start a run anew while the process it gave up for lost still lives: a node that was cut off, a process
that was suspended. So whoever starts an attempt first takes the run's fence: `<run>/fence` then holds a new random
token. The attempt's processes carry their token in the environment, and `check` it immediately before every change to
the run folder and every delivery to MLflow. An old token stops its process with `FencedError`.

`fsio` asks `check` before it replaces, renames or removes anything, so no file that is written through it can forget;
the spool, which appends, and the shipper, which writes elsewhere, ask by themselves. The file is opened anew each time:
network filesystems promise no more than that an open sees what was closed before. That costs some microseconds.

**What a replaced attempt wrote just before is harmless.** Its spool is a file of its own (`begin_attempt` claims each
number with an exclusive mkdir, which needs no lock), and the entry of the next attempt in `attempts.json` says where
that file stops to count (`from_step`, `cut`): later lines are superseded, as after a kill. A checkpoint is renamed into
place as a whole; one that the next attempt did not load is replaced or removed when that attempt saves its own, and
stands on lines that count again if it is loaded after all (`spool.cut_offsets`). Half-written files have names that
nobody else has or reads.

**Between a check and the write after it** there are some microseconds in which the fence may be taken. The next
attempt then still waits for the old one's lock. Where locks carry between hosts that closes the gap: the old process
is gone before the new one reads anything. Where they do not, it waits until the old heartbeat has been silent for two
beats (a replaced process stops it), so the old process must have been suspended for 20 s exactly between the two system
calls. What it then still does is one write: a line that does not count, a checkpoint as above, or an older `run.json`,
whose status the next attempt writes again when it ends.

A process without the two variables (not started by a launcher) holds no fence and is checked against nothing; a run
that a launcher has had gets a fence of its own when a person goes on with it (`RunLock.by_hand`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from racelab.experiments.errors import ConfigError, FencedError, RunFolderError

FENCE: Final = "fence"
"""Name of the file in the run folder."""
TOKEN_VARIABLE: Final = "RACELAB_FENCE"
"""Environment variable: the token of this process."""
RUN_VARIABLE: Final = "RACELAB_FENCE_RUN"
"""Environment variable: the absolute run folder that the token is for."""
WAIT_VARIABLE: Final = "RACELAB_FENCE_WAIT"
"""Environment variable: seconds that a new attempt waits for the process of a replaced one."""
WAIT_S: Final = 180.0
"""Default of `WAIT_VARIABLE`."""
_MAX_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Fence:
    """Who may write in a run folder.

    Attributes:
        token: random; what the process must hold.
        job_id: `12` or `12_4`; "" if no job took it.
        restart: SLURM_RESTART_COUNT of the job; None if unknown.
        node: the scheduler's name of the node; "" if unknown.
        host: of the process that took it.
        pid: of that process, which is not the one that trains.
        since: ISO time, UTC.
        launch: the assignment under which a job took it (`sweeps.slurm.model.Assignment` as JSON); None if unknown.
        by_hand: taken by a process that no launcher started.
    """

    token: str
    job_id: str
    restart: int | None
    node: str
    host: str
    pid: int
    since: str
    launch: Mapping[str, Any] | None = None
    by_hand: bool = False

    def holder(self) -> str:
        """For people: `job 12_4 on node3`, or `pid 77 on host login1`."""
        if not self.job_id:
            return f"pid {self.pid} on host {self.host}"
        again = f" (restart {self.restart})" if self.restart else ""
        return f"job {self.job_id}{again} on {self.node or self.host}"


def new_token() -> str:
    """32 random hex digits."""
    return secrets.token_hex(16)


def take(run_path: Path, token: str, facts: Mapping[str, Any]) -> Fence:
    """Gives the run to `token`; whoever held another may write no more once this has returned.

    Args:
        run_path: the run's folder.
        token: from `new_token`, used once.
        facts: any of the attributes of `Fence`; `host`, `pid` and `since` are filled in. With `launch` the fence is
            refused to a job that the run is no longer assigned to, and to an earlier start of the same job, so that
            a process that was stopped right before cannot take the run back.

    Raises:
        FencedError: refused, as above; nothing has changed.
        RunFolderError: the folder cannot be written.
    """
    with _taking(run_path):
        launch = facts.get("launch")
        if launch is not None:
            _refuse_older(run_path, launch, facts.get("restart"))
        return _write(run_path, token, facts)


def retire(run_path: Path, token: str) -> None:
    """Makes `token` worthless if it is still the run's: its process has lost the lock, and may not be dead.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    with _taking(run_path):
        present = read(run_path)
        if present is not None and present.token == token:
            _write(run_path, new_token(), {"by_hand": True})


@contextlib.contextmanager
def _taking(run_path: Path) -> Iterator[None]:
    """Of several processes that take the fence at once, each sees what the one before wrote."""
    # fsio checks before it writes, so it imports this file, and this one asks for it late
    from racelab.experiments.fsio import file_lock

    with file_lock(run_path / f".{FENCE}.lock"):
        yield


def _write(run_path: Path, token: str, facts: Mapping[str, Any]) -> Fence:
    from racelab.experiments.fsio import now_iso, write_json_atomic

    defaults = {"job_id": "", "restart": None, "node": "", "launch": None, "by_hand": False}
    present = {"host": socket.gethostname(), "pid": os.getpid(), "since": now_iso()}
    record = {**defaults, **present, **facts, "token": token}
    fence = _fence(record)
    write_json_atomic(run_path / FENCE, record)
    return fence


def _refuse_older(run_path: Path, launch: Mapping[str, Any], restart: int | None) -> None:
    """Raises FencedError for a job that the run was taken from, and for an earlier start of the job that has it."""
    from racelab.experiments.fsio import read_json

    assigned = read_json(run_path / "run.json").get("launch")
    if assigned != launch:
        whose = f"launch {assigned['uid']}" if assigned else "nobody's job"
        raise FencedError(f"run {run_path.name} is {whose} to work on now, not launch {launch['uid']}")
    present = read(run_path)
    if present is not None and present.launch == launch and (present.restart or 0) > (restart or 0):
        raise FencedError(f"run {run_path.name} was taken over by {present.holder()} at {present.since}")


def read(run_path: Path) -> Fence | None:
    """The fence of a run; None for a run that no launcher has had.

    Raises:
        RunFolderError: the file is there but cannot be read.
    """
    record = _record(str(run_path))
    return None if record is None else _fence(record)


def check(path: str | os.PathLike[str]) -> None:
    """Nothing, unless this process was replaced and `path` is in the run folder that it worked on.

    Raises:
        FencedError: the run has another fence (or has lost it); the message names who replaced this process.
        RunFolderError: the fence cannot be read.
        ConfigError: one of the two variables is set without the other.
    """
    token, run = _variables()
    if not token or not _is_inside(os.fspath(path), run):
        return
    record = _record(run)
    if record is not None and record.get("token") == token:
        return
    name = os.path.basename(run)
    if record is None:
        raise FencedError(
            f"the fence of run {name} is gone; this process stops, to write nothing into another's"
        )
    present = _fence(record)
    raise FencedError(
        f"run {name} was taken over by {present.holder()} at {present.since}; this process was replaced and stops"
    )


def held(run_path: Path) -> str:
    """The token that this process holds for that run, current or not; "" if it holds none."""
    token, run = _variables()
    return token if token and _is_inside(str(run_path), run) and _is_inside(run, str(run_path)) else ""


@contextlib.contextmanager
def hold(run_path: Path, token: str) -> Iterator[None]:
    """This process, and those it starts, hold `token` for the run inside the block."""
    variables = variables_of(run_path, token)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def variables_of(run_path: Path, token: str) -> dict[str, str]:
    """What makes a child process the holder of `token`."""
    return {TOKEN_VARIABLE: token, RUN_VARIABLE: str(run_path.absolute())}


def wait_s() -> float:
    """How long a new attempt waits for the process of a replaced one.

    Raises:
        ConfigError: the variable is no number of seconds.
    """
    text = os.environ.get(WAIT_VARIABLE, "")
    if not text:
        return WAIT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(
            f"{WAIT_VARIABLE}={text!r} is no number of seconds; unset it, or set it to {WAIT_S:.0f}"
        )
    return seconds


def _variables() -> tuple[str, str]:
    """(token, run folder); both "" for a process that holds no fence."""
    token, run = os.environ.get(TOKEN_VARIABLE, ""), os.environ.get(RUN_VARIABLE, "")
    if bool(token) != bool(run) or (run and not os.path.isabs(run)):
        raise ConfigError(
            f"{TOKEN_VARIABLE} and {RUN_VARIABLE} (an absolute folder) go together; unset both to run by hand"
        )
    return token, run.rstrip("/")


def _is_inside(path: str, folder: str) -> bool:
    """Whether `path` is in `folder` or is it, also by way of links."""
    if path == folder or path.startswith(f"{folder}/"):
        return True
    real, whole = os.path.realpath(path), os.path.realpath(folder)
    return real == whole or real.startswith(f"{whole}/")


def _record(run: str) -> dict[str, Any] | None:
    file = f"{run}/{FENCE}"
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(fd, _MAX_BYTES)
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunFolderError(f"cannot read {file}: {(error.strerror or str(error)).lower()}") from error
    try:
        record = json.loads(data)
    except ValueError as error:
        raise RunFolderError(f"{file} is not JSON ({error}); remove it, and resume the run") from error
    if not isinstance(record, dict):
        raise RunFolderError(f"{file} holds no fence; remove it, and resume the run")
    return record


def _fence(record: Mapping[str, Any]) -> Fence:
    try:
        restart = record["restart"]
        return Fence(
            token=str(record["token"]),
            job_id=str(record["job_id"]),
            restart=None if restart is None else int(restart),
            node=str(record["node"]),
            host=str(record["host"]),
            pid=int(record["pid"]),
            since=str(record["since"]),
            launch=record["launch"],
            by_hand=bool(record["by_hand"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"a run's file {FENCE} is damaged ({error!r}); remove it, and resume the run"
        ) from error
