"""A run's folder: created before anything starts, locked while an attempt works in it.

Inside `<root>/<run id>/`:

- `run.json`: what the run is and how it stands (written first). Its `uid` is random: the id of a cell of a sweep
  comes again in another root, or after its folder was removed, but that is another run
- `attempts.json`: one entry per attempt, where it started from and on which host
- `attempts/<n>/`: logs of attempt n
- `config/`: composed.yaml, overrides.json
- `env/`: environment.json (versions, platform, git), git.diff
- `spool/<n>.jsonl`: the record of attempt n (the truth; see `tracking/spool.py`)
- `tables/`: parquet tables with JSON twins; `manifest.json` beside the folder
- `checkpoints/`: see `checkpoint.py`
- `lock`, `heartbeat`: held and touched while an attempt lives; `fence`: which attempt may write (see `fence.py`)
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from racelab.experiments import fence
from racelab.experiments.environment import Surroundings, redact, redact_command, surroundings
from racelab.experiments.errors import RunFolderError
from racelab.experiments.fsio import (
    file_lock,
    is_locked,
    now_iso,
    read_json,
    unwritten,
    write_json_atomic,
    write_text_atomic,
)
from racelab.experiments.runlock import HEARTBEAT_S, STALE_S, RunLock

__all__ = [
    "HEARTBEAT_S",
    "SCHEMA",
    "STALE_S",
    "RunExistsError",
    "RunFolder",
    "RunLock",
    "check_name",
    "read_json",
    "write_json_atomic",
    "write_text_atomic",
]

SCHEMA: Final = 1
"""Version of the folder's layout; `open` refuses any other."""

Status = Literal["queued", "running", "finished", "failed", "interrupted", "stale"]
_STORED: Final = frozenset({"queued", "running", "finished", "failed", "interrupted"})
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+@,-]{0,119}")


class RunExistsError(RunFolderError):
    """A run of that id is there already; open it instead."""


def check_name(name: str) -> str:
    """`name` itself.

    Raises:
        RunFolderError: it could leave the run root (separators, `..`) or is not a plain file name.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise RunFolderError(
            f"run name {name!r} cannot be used; take 1-120 letters, digits and . _ = + @ , - without '..', "
            "starting with a letter or digit"
        )
    return name


def _bad_key(record: Mapping[str, Any]) -> str:
    """What a `run.json` lacks of the fields that every reader relies on; "" if nothing."""
    for key in ("run_id", "name", "status", "started"):
        if not isinstance(record.get(key), str):
            return f"{key} is {record.get(key)!r}, not a text"
    if record["status"] not in _STORED:
        return f"status is {record['status']!r}, none of {', '.join(sorted(_STORED))}"
    for key in ("steps", "seed"):
        if type(record.get(key)) not in (int, type(None)):
            return f"{key} is {record[key]!r}, not a whole number"
    if not isinstance(record.get("tracking", {}), dict):
        return "tracking is not an object"
    try:
        datetime.fromisoformat(record["started"])
    except ValueError:
        return f"started is {record['started']!r}, not a time"
    return ""


def _random_suffix() -> str:
    return secrets.token_hex(3)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A handle on a run's folder; it holds no state, every read goes to the disk.

    Attributes:
        path: absolute.
        run_id: name of the folder, `<UTC time>-<suffix>`, so that run ids sort by time of creation; or the id that
            the creator gave.
    """

    path: Path
    run_id: str

    @classmethod
    def create(
        cls,
        root: str | os.PathLike[str],
        name: str,
        *,
        composed_yaml: str,
        overrides: Sequence[str],
        info: Mapping[str, Any],
        run_id: str | None = None,
        suffix: Callable[[], str] = _random_suffix,
        clock: Callable[[], datetime] | None = None,
        around: Surroundings | None = None,
    ) -> RunFolder:
        """Makes the folder of a new run, status `queued`.

        A folder with a given `run_id` is filled under a hidden name and then renamed, so that of several processes
        that make it at the same instant one does, and the others find it whole.

        Args:
            root: the folder of all runs; made if missing.
            name: what people call the run; need not be unique.
            composed_yaml: the whole config, as text.
            overrides: the words typed on the command line.
            info: facts for `run.json` (kind, method, variant, task, condition, seed, steps, ...).
            run_id: the id, for a run that must always have the same one; None: made from time and suffix.
            suffix: gives the part of the run id that tells runs of one second apart.
            clock: the time of creation (UTC); now by default.
            around: what the run is started in; looked up by default.

        Raises:
            RunExistsError: `run_id` is taken.
            RunFolderError: the name could leave `root`, or nothing can be written there.
        """
        check_name(name)
        started = (clock or (lambda: datetime.now(UTC)))()
        base = Path(root).absolute()
        run = cls._new_folder(base, started, suffix) if run_id is None else cls._hidden_folder(base, run_id)
        record = {
            "name": name, "kind": "", "method": "", "variant": "", "task": "", "condition": "", "seed": None,
            "steps": 0, "mlflow_run_id": None, "reason": "",
            **info,
            **({"command": redact_command(str(info["command"]))} if info.get("command") else {}),
            "schema": SCHEMA, "run_id": run.run_id, "uid": secrets.token_hex(16), "status": "queued",
            "started": started.isoformat(timespec="milliseconds"),
        }  # fmt: skip
        try:
            write_json_atomic(run.path / "run.json", record)
            write_json_atomic(run.path / "attempts.json", [])
            for folder in ("attempts", "config", "env", "spool", "tables", "checkpoints"):
                (run.path / folder).mkdir()
            write_text_atomic(run.path / "config" / "composed.yaml", redact(composed_yaml))
            write_json_atomic(run.path / "config" / "overrides.json", [redact(word) for word in overrides])
            around = around or surroundings(Path.cwd())
            write_json_atomic(run.path / "env" / "environment.json", dict(around.environment))
            if around.diff:
                write_text_atomic(run.path / "env" / "git.diff", around.diff)
            return run if run_id is None else run._named(base)
        except OSError as error:
            shutil.rmtree(run.path, ignore_errors=True)
            raise unwritten(f"cannot create a run in {base}", error) from error
        except (RunFolderError, ValueError, TypeError):
            shutil.rmtree(run.path, ignore_errors=True)
            raise

    @classmethod
    def _new_folder(cls, root: Path, started: datetime, suffix: Callable[[], str]) -> RunFolder:
        for _ in range(20):
            run_id = check_name(f"{started:%Y%m%dT%H%M%S}-{suffix()}")
            path = root / run_id
            try:
                root.mkdir(parents=True, exist_ok=True)
                path.mkdir()
            except FileExistsError:
                if not root.is_dir():
                    raise RunFolderError(f"{root} is not a folder; choose another run.root") from None
                continue
            except OSError as error:
                raise unwritten(f"cannot create a run in {root}", error) from error
            return cls(path, run_id)
        raise RunFolderError(f"no free run id in {root} for {started.isoformat()}; try again in a second")

    @classmethod
    def _hidden_folder(cls, root: Path, run_id: str) -> RunFolder:
        """Where the folder of a run with a given id is filled, until `_named`."""
        path = root / f".{check_name(run_id)}.{secrets.token_hex(4)}"
        if (root / run_id).exists():
            raise RunExistsError(f"run {run_id} is in {root} already; open it, or choose another id")
        try:
            root.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except OSError as error:
            raise unwritten(f"cannot create a run in {root}", error) from error
        return cls(path, run_id)

    def _named(self, root: Path) -> RunFolder:
        """The filled folder under its own name. Raises RunExistsError if another process was first."""
        target = root / self.run_id
        try:
            os.rename(self.path, target)  # refuses a folder that holds anything
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            raise RunExistsError(
                f"run {self.run_id} is in {root} already; open it, or choose another id"
            ) from error
        return RunFolder(target, self.run_id)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The run in `path`.

        Raises:
            RunFolderError: there is no run, its layout has another schema number, or its `run.json` is damaged.
        """
        folder = Path(path).absolute()
        if not (folder / "run.json").is_file():
            raise RunFolderError(f"no run in {folder} (run.json is missing); `racelab runs` lists the runs")
        record = read_json(folder / "run.json")
        schema = record.get("schema") if isinstance(record, dict) else None
        if schema != SCHEMA:
            raise RunFolderError(
                f"{folder / 'run.json'} has schema {schema}, this racelab reads schema {SCHEMA}; "
                "use the racelab version named in its env/environment.json"
            )
        bad = _bad_key(record)
        if bad:
            raise RunFolderError(
                f"{folder / 'run.json'} is damaged: {bad}; restore it from a copy or remove the run"
            )
        return cls(folder, record["run_id"])

    @property
    def spool_dir(self) -> Path:
        """Where the attempts' records are."""
        return self.path / "spool"

    def info(self) -> dict[str, Any]:
        """The content of `run.json`."""
        record: dict[str, Any] = read_json(self.path / "run.json")
        return record

    def attempts(self) -> list[dict[str, Any]]:
        """`attempts.json`, oldest first.

        Each is {attempt, from_step, started, pid, host, slurm_job_id, cut}; since runs have fences also slurm_restart,
        node and launch (the launch's uid), which are None for an attempt that no launcher started.

        Raises:
            RunFolderError: the file is missing or damaged.
        """
        file = self.path / "attempts.json"
        entries: list[dict[str, Any]] = read_json(file)
        whole = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
        if not whole or not all(type(e.get(k)) is int for e in entries for k in ("attempt", "from_step")):
            raise RunFolderError(f"{file} is damaged: an attempt lacks its number or its first step")
        return entries

    def update(self, **fields: Any) -> None:
        """Changes fields of `run.json`; safe beside another process that changes others.

        Raises:
            RunFolderError: unknown status, or the file cannot be written.
        """
        if "status" in fields and fields["status"] not in _STORED:
            raise RunFolderError(f"status {fields['status']!r} of {self.path} is none of {sorted(_STORED)}")
        with file_lock(self.path / ".run.json.lock"):
            write_json_atomic(self.path / "run.json", self.info() | fields)

    def lock(self) -> RunLock:
        """Takes the run for this process until the lock is released or the process ends (see `RunLock`).

        Raises:
            InUseError: another process has it; the message names its pid and host.
            RunFolderError: the folder cannot be written.
            FencedError: this process was replaced.
        """
        return RunLock(self)

    def begin_attempt(self, from_step: int = 0, cut: Mapping[str, int] | None = None) -> int:
        """Registers a new attempt, to be called with the lock held; returns its number, from 1.

        The number is claimed by making a folder, so no two attempts ever share a spool file, not even where hosts do
        not see each other's locks. A number whose process died right then is left out.

        Args:
            from_step: last step that the restored checkpoint holds; what earlier attempts wrote for later
                steps is superseded from now on.
            cut: `{attempt, offset}` of the tracker's state in that checkpoint: what that attempt wrote behind the
                offset is superseded too, even for the same step (a view after the last step, say).
        """
        entries = self.attempts()
        number = self._claim(1 + max((int(entry["attempt"]) for entry in entries), default=0))
        entry = {
            "attempt": number, "from_step": from_step, "started": now_iso(), "pid": os.getpid(),
            "host": socket.gethostname(), **self._job(),
            "cut": {"attempt": cut["attempt"], "offset": cut["offset"]} if cut else None,
        }  # fmt: skip
        write_json_atomic(self.path / "attempts.json", [*entries, entry])
        self.update(status="running", reason="")
        return number

    def _claim(self, number: int) -> int:
        """The first number from `number` on whose folder nobody has made; makes it."""
        while True:
            fence.check(self.path)
            try:
                (self.path / "attempts" / str(number)).mkdir(parents=True)
            except FileExistsError:
                number += 1
            except OSError as error:
                raise unwritten(f"cannot begin attempt {number} of {self.path}", error) from error
            else:
                return number

    def _job(self) -> dict[str, Any]:
        """What an attempt's entry says of its job.

        Who types a command in an `salloc` shell is in a job too, but that job was not started for this run.
        """
        mine = fence.read(self.path) if fence.held(self.path) else None
        if mine is None or mine.by_hand:
            here = os.environ.get("SLURM_JOB_ID")
            return {"slurm_job_id": here, "slurm_restart": None, "node": None, "launch": None}
        launch = self.info().get("launch")
        return _slurm_facts(mine) | {"launch": launch["uid"] if launch else None}

    def status(self) -> Status:
        """The stored status, or `stale` for a run that says it is running though nobody works on it."""
        stored: Status = self.info()["status"]
        if stored != "running" or self.is_held():
            return stored
        return "stale"

    def is_held(self) -> bool:
        """Whether a live process works on the run: the lock is taken and the heartbeat is fresh.

        A holder on another host is judged by its heartbeat alone, since not every network filesystem tells
        hosts of each other's locks.
        """
        holder = self.holder()
        age = self.heartbeat_age()
        fresh = age is not None and age < STALE_S
        if holder is None or not fresh:
            return False
        return holder.get("host") != socket.gethostname() or is_locked(self.path / "lock")

    def holder(self) -> dict[str, Any] | None:
        """{pid, host, since, fence} of the process that last took the lock; None if nobody did or it let go."""
        try:
            holder = json.loads((self.path / "lock").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return holder if isinstance(holder, dict) else None

    def heartbeat_age(self) -> float | None:
        """Seconds since the last sign of life, None if there never was one."""
        try:
            return max(0.0, time.time() - (self.path / "heartbeat").stat().st_mtime)
        except OSError:
            return None


def _slurm_facts(mine: fence.Fence) -> dict[str, Any]:
    """Job, restart and node of this process: as its fence has them, else as Slurm says here."""
    present = os.environ
    array, index = present.get("SLURM_ARRAY_JOB_ID"), present.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{index}" if array and index else present.get("SLURM_JOB_ID")
    again = present.get("SLURM_RESTART_COUNT", "0")  # Slurm sets it only if there was a restart
    restart = int(again) if job and again.isdecimal() else None
    return {
        "slurm_job_id": mine.job_id or job,
        "slurm_restart": restart if mine.restart is None else mine.restart,
        "node": mine.node or present.get("SLURMD_NODENAME"),
    }
