"""A launch on disk: `<root>/.launches/<uid>/`, written before sbatch is called, so that nothing depends on its caller.

- `launch.json`: the `Launch`, never changed
- `submissions.json`: every `Submission`, oldest first
- `scripts/<batch>.<number>.sh`: what sbatch was given
- `log/`: what the jobs printed before and around the run itself, `<batch>.<job>.<rank>.out`
- `ends/<batch>.<index>.json`: how the newest attempt of a task ended, by the job itself (an `End`)
- `cancelled/<batch>.<index>`: there if someone asked to cancel the task
- `resumed/<batch>.<index>`: id of the launch that has the task, a command, now
- `nodes/<batch>.<index>/<rank>.json`: who waits on the further nodes of a task
- `submit.lock`: held while a process submits
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from racelab.configs.schema_launcher import SlurmLauncherConfig
from racelab.experiments.errors import RunFolderError
from racelab.experiments.fsio import (
    explain,
    file_lock,
    now_iso,
    read_json,
    try_flock,
    write_json_atomic,
    write_text_atomic,
)
from racelab.sweeps.slurm.model import After, Batch, Launch, Submission, Task

LAUNCHES: Final = ".launches"
SCHEMA: Final = 1
_UID: Final = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt of a task ended, in the job's own words.

    Attributes:
        status: finished; failed; stopped (asked to, checkpoint written, not requeued); requeued (goes on in the same
            job); fenced or superseded (another attempt has the run).
        exit_code: of the command.
        reason: one line, "" if it went well.
        job_id: `12` or `12_4`.
        restart: SLURM_RESTART_COUNT.
        node: Slurm's name of the node of rank 0.
        at: ISO time, UTC.
        step: last step of the run, None for commands.
        idle_requeues: requeues in a row without a new checkpoint.
    """

    status: str
    exit_code: int
    reason: str
    job_id: str
    restart: int
    node: str
    at: str
    step: int | None = None
    idle_requeues: int = 0


def new_uid() -> str:
    """A launch id; they sort by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class LaunchFolder:
    """A handle on a launch's folder; it holds no state."""

    path: Path

    @classmethod
    def create(cls, launch: Launch) -> LaunchFolder:
        """Makes a launch's folder under its root, with its `launch.json`.

        Raises:
            RunFolderError: nothing can be written there.
        """
        folder = cls.make(launch)
        folder.publish(launch)
        return folder

    @classmethod
    def make(cls, launch: Launch) -> LaunchFolder:
        """All but `launch.json`: nobody takes it for a launch until `publish`.

        Raises:
            RunFolderError: nothing can be written there.
        """
        path = Path(launch.root) / LAUNCHES / launch.uid
        try:
            for name in ("scripts", "log", "ends", "cancelled", "resumed", "nodes"):
                (path / name).mkdir(parents=True)
        except OSError as error:
            raise RunFolderError(f"cannot create {path}: {explain(error)}") from error
        write_json_atomic(path / "submissions.json", [])
        return cls(path)

    def publish(self, launch: Launch) -> None:
        """Writes `launch.json`: from now on the launch is there, and whoever finds it may submit what is missing."""
        write_json_atomic(self.path / "launch.json", {"schema": SCHEMA, **_plain(launch)})

    @property
    def uid(self) -> str:
        """Of the launch."""
        return self.path.name

    def launch(self) -> Launch:
        """What was submitted.

        Raises:
            RunFolderError: `launch.json` is missing, damaged or of another schema.
        """
        file = self.path / "launch.json"
        record = read_json(file)
        try:
            if record["schema"] != SCHEMA:
                raise RunFolderError(
                    f"{file} has schema {record['schema']}, this racelab reads {SCHEMA}; use the racelab that wrote it"
                )
            return _launch(record)
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{file} is damaged ({error}); remove the folder") from error

    def submissions(self) -> list[Submission]:
        """All of them, oldest first.

        Raises:
            RunFolderError: `submissions.json` is missing or damaged.
        """
        file = self.path / "submissions.json"
        try:
            return [Submission(**entry) for entry in read_json(file)]
        except TypeError as error:
            raise RunFolderError(f"{file} is damaged ({error}); remove the folder") from error

    def is_readable(self) -> bool:
        """Whether it is there for this user: another's may be closed; one that is being made has no record yet."""
        return os.access(self.path / "launch.json", os.R_OK)

    def owner(self) -> str:
        """Who made it: a name, or a number that has none here."""
        uid = self.path.stat().st_uid
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return str(uid)

    def newest(self) -> dict[str, Submission]:
        """Batch -> its newest submission; a batch that nobody has tried to submit is not in it."""
        return {entry.batch: entry for entry in self.submissions()}

    def is_settled(self) -> bool:
        """Whether every batch has a job, or an answer why it has none."""
        known = self.newest()
        found = (known.get(batch.name) for batch in self.launch().batches)
        return all(submission is not None and submission.settled for submission in found)

    def record(self, submission: Submission) -> None:
        """Adds a submission, or replaces the one of its batch and number."""
        with file_lock(self.path / ".submissions.lock"):
            known = self.submissions()
            same = [(s.batch, s.number) == (submission.batch, submission.number) for s in known]
            if any(same):
                known[same.index(True)] = submission
            else:
                known.append(submission)
            write_json_atomic(self.path / "submissions.json", [asdict(entry) for entry in known])

    def script(self, batch: str, number: int) -> Path:
        """Where the script of a submission is."""
        return self.path / "scripts" / f"{batch}.{number}.sh"

    def end(self, batch: str, index: int) -> End | None:
        """How the newest attempt of a task ended; None if none has said so."""
        try:
            return End(**read_json(self._end_file(batch, index)))
        except (RunFolderError, TypeError):
            return None

    def ends(self) -> dict[tuple[str, int], End]:
        """All of them, by batch and index: one listing of the folder."""
        found = {}
        for entry in os.scandir(self.path / "ends"):
            batch, _, index = entry.name.removesuffix(".json").rpartition(".")
            if entry.name.endswith(".json") and not entry.name.startswith(".") and index.isdecimal():
                end = self.end(batch, int(index))
                if end is not None:
                    found[batch, int(index)] = end
        return found

    def write_end(self, batch: str, index: int, end: End) -> None:
        """Says how an attempt ended."""
        write_json_atomic(self._end_file(batch, index), asdict(end))

    def _end_file(self, batch: str, index: int) -> Path:
        return self.path / "ends" / f"{batch}.{index}.json"

    def cancel(self, batch: str, index: int) -> None:
        """Remembers that someone asked to cancel a task, so that it is not requeued."""
        try:
            (self.path / "cancelled" / f"{batch}.{index}").touch()
        except OSError as error:
            raise RunFolderError(f"cannot write in {self.path}: {explain(error)}") from error

    def is_cancelled(self, batch: str, index: int) -> bool:
        """Whether someone did."""
        return (self.path / "cancelled" / f"{batch}.{index}").exists()

    def hand_on(self, batch: str, index: int, uid: str) -> None:
        """Remembers which launch has a command's task now; runs say that themselves."""
        (self.path / "resumed").mkdir(exist_ok=True)
        write_text_atomic(self.path / "resumed" / f"{batch}.{index}", uid)

    def handed_on(self, batch: str, index: int) -> LaunchFolder | None:
        """The launch that has the task now; None: this one. One that was never finished making counts for nothing."""
        try:
            uid = (self.path / "resumed" / f"{batch}.{index}").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        other = LaunchFolder(self.path.parent / uid)
        return other if other.is_there() else None

    def is_there(self) -> bool:
        """Whether its `launch.json` has been written; so it has where another user's folder is closed."""
        try:
            return (self.path / "launch.json").is_file()
        except PermissionError:
            return True

    def nodes_dir(self, batch: str, index: int) -> Path:
        """Where the further nodes of a task report."""
        return self.path / "nodes" / f"{batch}.{index}"

    @contextlib.contextmanager
    def submitting(self) -> Iterator[bool]:
        """Whether this process has the right to submit; another that has it is at work. Released by its death.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        try:
            fd = os.open(self.path / "submit.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunFolderError(f"cannot write in {self.path}: {explain(error)}") from error
        try:
            yield try_flock(fd, 0.05)
        finally:
            os.close(fd)


def all_launches(root: Path) -> list[LaunchFolder]:
    """The launches under a root that can be read, oldest first."""
    folder = root / LAUNCHES
    if not folder.is_dir():
        return []
    names = sorted(entry.name for entry in os.scandir(folder) if _UID.fullmatch(entry.name))
    return [launch for launch in (LaunchFolder(folder / name) for name in names) if launch.is_readable()]


def stamped(launch_uid: str) -> str:
    """The time in a launch id, as sacct's --starttime takes it (UTC)."""
    return datetime.strptime(launch_uid[:15], "%Y%m%dT%H%M%S").replace(tzinfo=UTC).isoformat()


def intent(batch: Batch, number: int) -> Submission:
    """What is written before sbatch is called."""
    return Submission(batch.name, number, intended=now_iso())


def _plain(launch: Launch) -> dict[str, Any]:
    record = asdict(launch)
    for plain, batch in zip(record["batches"], launch.batches, strict=True):
        plain["launcher"] = batch.launcher.model_dump(mode="json")
    return record


def _launch(record: Mapping[str, Any]) -> Launch:
    batches = tuple(
        Batch(
            name=b["name"],
            stage=b["stage"],
            tasks=tuple(Task(**{**task, "words": tuple(task["words"])}) for task in b["tasks"]),
            launcher=SlurmLauncherConfig.model_validate(b["launcher"]),
            after=tuple(After(**entry) for entry in b["after"]),
        )
        for b in record["batches"]
    )
    fields = {key: value for key, value in record.items() if key not in ("schema", "batches")}
    return Launch(**fields, batches=batches)
