"""The cluster's scheduler, through its own commands: squeue, sacct, scontrol, scancel, sbatch --test-only.

Three calls at most answer for any number of jobs: one squeue for all jobs of this user; one sacct for those it does not
name; one more squeue, for jobs of somebody else, if sacct says that they live or nothing is accounted. Nothing here
knows a launch.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.sweeps.slurm import environment, limits, parsing
from racelab.sweeps.slurm.limits import Limits, Node, Partition
from racelab.sweeps.slurm.parsing import ALIVE, SEPARATOR, Job

__all__ = ["ALIVE", "Job", "Limits", "Node", "Partition", "Scheduler", "Table"]

TIMEOUT_S: Final = 30.0
_FIXED: Final = {"LC_ALL": "C", "TZ": "UTC0", "SLURM_BITSTR_LEN": "0"}
"""English words; times in UTC; array indices in full, not cut after 64 characters."""
_RECORDS: Final = (
    "sacct", "-X", "-D", "-P", "-n", f"--delimiter={SEPARATOR}", "-o", parsing.RECORD_FORMAT,
)  # fmt: skip
_QUEUE: Final = ("squeue", "-a", "-h", "-r", "-t", "all")
"""Hidden partitions too, no headline, a line per task of an array, jobs that ended a while ago too."""
_LONGEST: Final = 100_000
"""Characters of ids in one argument; Linux takes 131,072."""
_LINES: Final = 3
"""Of what a tool said, at most."""
_AT_ONCE: Final = 500
"""Ids for one scancel, which sends a message for each."""
_SKEW: Final = timedelta(minutes=10)
"""How far the clocks of the submitting host and of the controller may differ."""
_PASSING: Final = ("socket timed out", "zero bytes were transmitted", "resource temporarily unavailable")
"""Words of a controller with too much to do; worth a second try."""
_NO_ANSWER: Final = (
    *_PASSING, "unable to contact slurm controller", "unexpected message received", "connection refused",
    "authentication", "munge", "cannot stat file", "unable to process configuration", "configuration source",
    "standby mode",
)  # fmt: skip
"""Words that tell of the way to the controller, not of what was asked."""
_NO_ACCOUNTS: Final = "accounting storage is disabled"
_FINAL: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"})
"""Records in these states are not asked for again."""


@dataclass(frozen=True, slots=True)
class Table:
    """What the scheduler knows of some jobs.

    Attributes:
        jobs: of those asked for, by id; unknown ones are missing.
        names: of every job of this user that squeue has, and of those asked for -> id of the job or array (`12` for
            `12_4`); of jobs that share a name the one that may still run, then the newest.
        accounting: the accounting answers, or was not needed and is there as far as is known.
    """

    jobs: dict[str, Job]
    names: dict[str, str]
    accounting: bool


class Scheduler:
    """The scheduler of this machine's cluster; it remembers what cannot change, so one object serves one command."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        """Starts nothing.

        Args:
            timeout_s: after which a tool that says nothing is given up.
        """
        self._timeout_s = timeout_s
        self._accounting: bool | None = None
        self._limits: Limits | None = None
        self._ended: dict[str, Job] = {}  # that the accounting has for good
        self._gone: set[str] = set()  # where nothing is accounted: forgotten for good

    def table(self, ids: Collection[str], since: str | None = None) -> Table:
        """What became of these jobs, and the names of all: at most three calls.

        Args:
            ids: `12`, or `12_4` for a task of an array (`12` alone does not stand for its tasks).
            since: ISO time before which none of them was submitted: ids are used again after a cluster lost its state.

        Raises:
            UnreachableError: squeue does not answer. An accounting that does not is `accounting` False.
        """
        ids = _checked(ids)
        known = self._queued("--me")
        self._ended = {task: job for task, job in self._ended.items() if task not in known}
        known |= self._ended
        left = [task for task in ids if task not in known]
        records = self._recorded(left, since) if left else {}
        if records is None:
            unsure = [task for task in left if task not in self._gone]
        else:
            self._ended.update({task: job for task, job in records.items() if job.state in _FINAL})
            known = records | known
            known |= _vanished(left, known)
            unsure = [task for task in left if task in known and known[task].alive]
        others = self._others(unsure)
        if records is None:
            self._gone.update(task for task in unsure if task not in others)
        known |= others
        return Table(
            jobs={task: known[task] for task in ids if task in known},
            names=_by_name(known.values()),
            accounting=self._may_account() and records is not None,
        )

    def state(self, job_id: str) -> str:
        """Slurm's word for one job or task, "" if squeue does not know it. One call.

        Args:
            job_id: `12_4` for a task of an array: its SLURM_JOB_ID may be the id of the whole array.

        Raises:
            UnreachableError: squeue does not answer.
        """
        return self.state_and_restarts(job_id)[0]

    def state_and_restarts(self, job_id: str) -> tuple[str, int]:
        """As `state`, and how often the job was requeued: SLURM_RESTART_COUNT of the start that the state is of.

        Raises:
            UnreachableError: squeue does not answer.
        """
        text = self._squeue("-j", *_checked([job_id]), "-O", parsing.START_FORMAT)
        return parsing.queue_starts(text).get(job_id, ("", 0))

    def find(self, names: Iterable[str], since: str) -> dict[str, str]:
        """Names of jobs of this user -> id of the job or array, where there is one: two calls at most.

        Args:
            names: as submitted.
            since: ISO time before which none of them was submitted.

        Raises:
            UnreachableError: squeue does not answer, or the accounting that is there does not: what it does not name
                is not known to be missing.
        """
        wanted = set(names)
        found = _by_name(self._queued("--me").values())
        if not wanted <= found.keys() and self._may_account():
            done = self._sacct(_since(since), "-u", str(os.getuid()))
            if done.returncode and self._may_account():
                raise _unreachable(done)
            found = _by_name(parsing.recorded_jobs(done.stdout).values()) | found
        return {name: found[name] for name in wanted & found.keys()}

    def cancel(self, ids: Iterable[str]) -> None:
        """Ends or removes jobs and tasks; unknown ones and those that have ended are no error.

        Raises:
            ConfigError: they belong to somebody else.
            UnreachableError: Slurm does not answer.
        """
        ids = _checked(ids)
        for start in range(0, len(ids), _AT_ONCE):
            done = self._run(["scancel", *ids[start : start + _AT_ONCE]], again=True)
            harmless = re.compile(r"invalid job id|already complet|^$", re.IGNORECASE)
            words = [line for line in done.stderr.splitlines() if not harmless.search(line)]
            if done.returncode and words:
                if _no_answer(done):
                    raise _unreachable(done)
                raise ConfigError(f"{_words(done)}; cancel jobs as the user who submitted them")

    def requeue(self, job_id: str) -> bool:
        """Ends a running job and puts it back into the queue; False if Slurm refuses. For use inside the job.

        Args:
            job_id: `12_4` for a task of an array, as for `state`: `12` would requeue all of them.

        Raises:
            UnreachableError: no answer; it may have been requeued all the same.
        """
        done = self._run(["scontrol", "requeue", *_checked([job_id])])
        if done.returncode and _no_answer(done):
            raise _unreachable(done)
        return done.returncode == 0

    def limits(self) -> Limits:
        """What the cluster allows: two calls, once.

        Raises:
            UnreachableError: scontrol does not answer, or prints what no Slurm does.
        """
        if self._limits is None:
            config = self._answer(["scontrol", "show", "config"])
            partitions = self._answer(["scontrol", "-a", "-o", "show", "partition"])
            with _expected():
                self._limits = limits.parse_limits(config, partitions)
            self._accounting = self._limits.accounting
        return self._limits

    def nodes(self) -> list[Node]:
        """The cluster's nodes; one call.

        Raises:
            UnreachableError: as `limits`.
        """
        text = self._answer(["scontrol", "-a", "-o", "show", "node"])
        with _expected():
            return limits.parse_nodes(text)

    def test(self, script: Path) -> None:
        """Asks Slurm whether it could ever run a script; nothing is submitted.

        Raises:
            ConfigError: it could not, in Slurm's words only.
            UnreachableError: Slurm does not answer.
        """
        done = self._run(["sbatch", "--test-only", str(script)], again=True)
        if done.returncode and _no_answer(done):
            raise _unreachable(done)
        if done.returncode:
            raise ConfigError(_words(done))

    def _queued(self, *whose: str) -> dict[str, Job]:
        return parsing.queue_jobs(self._squeue("-O", parsing.QUEUE_FORMAT, *whose))

    def _squeue(self, *words: str) -> str:
        """What squeue prints; nothing for an unknown id, which is an error to it if it is the only one."""
        done = self._run([*_QUEUE, *words], again=True)
        if done.returncode and "invalid job id" not in done.stderr.lower():
            raise _unreachable(done)
        return done.stdout

    def _may_account(self) -> bool:
        """False once it is known that nothing is accounted here."""
        return self._accounting is not False

    def _others(self, ids: Sequence[str]) -> dict[str, Job]:
        """Jobs that may be somebody else's, whom `--me` leaves out; no call without ids."""
        if not ids:
            return {}
        arrays = _arrays(ids)
        return self._queued(*(["-j", arrays] if len(arrays) < _LONGEST else []))

    def _recorded(self, ids: Sequence[str], since: str | None) -> dict[str, Job] | None:
        """The accounting's records; None where there is none, or none that answers now."""
        if not self._may_account():
            return None
        arrays = _arrays(ids)
        whose = ("-j", arrays) if len(arrays) < _LONGEST else ("-u", str(os.getuid()))
        try:
            done = self._sacct(_since(since), *whose)
        except UnreachableError:
            return None
        return None if done.returncode else parsing.recorded_jobs(done.stdout)

    def _sacct(self, *which: str) -> subprocess.CompletedProcess[str]:
        """Runs sacct and notes whether anything is accounted at all."""
        done = self._run([*_RECORDS, *which], again=True)
        if done.returncode == 0:
            self._accounting = True
        elif _NO_ACCOUNTS in done.stderr.lower():
            self._accounting = False
        return done

    def _answer(self, command: Sequence[str]) -> str:
        """What a tool that only reads prints.

        Raises:
            UnreachableError: it fails.
        """
        done = self._run(command, again=True)
        if done.returncode:
            raise _unreachable(done)
        return done.stdout

    def _run(self, command: Sequence[str], again: bool = False) -> subprocess.CompletedProcess[str]:
        """Runs a tool in a clean environment; `again`: once more if the controller had too much to do."""
        tool = command[0]
        try:
            done = subprocess.run(
                command,
                env=environment.clean(os.environ) | _FIXED,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=self._timeout_s,
                check=False,
            )
        except FileNotFoundError as error:
            raise UnreachableError(
                f"{tool} is not installed here; run this where Slurm's commands are (a login node), or load their "
                "module"
            ) from error
        except OSError as error:
            raise UnreachableError(f"cannot run {tool}: {error.strerror or error}") from error
        except subprocess.TimeoutExpired as error:
            said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else ""
            last = said.strip().rpartition("\n")[2]
            raise UnreachableError(
                f"{tool} gave no answer within {self._timeout_s:g} s{f' ({last})' if last else ''}; is the cluster up? "
                "try again"
            ) from error
        if again and done.returncode and any(word in done.stderr.lower() for word in _PASSING):
            return self._run(command)
        return done


@contextmanager
def _expected() -> Iterator[None]:
    """For reading what scontrol printed."""
    try:
        yield
    except (KeyError, ValueError) as error:
        raise UnreachableError(
            f"`scontrol show` prints something else than expected ({error!r}); is `scontrol` Slurm's?"
        ) from error


def _checked(ids: Iterable[str]) -> list[str]:
    """Each once; ValueError for one that is none, which sacct would call an error of the whole call."""
    once = list(dict.fromkeys(ids))
    for task in once:
        if not parsing.TASK_ID.fullmatch(task):
            raise ValueError(f"{task!r} is no job id")
    return once


def _arrays(ids: Iterable[str]) -> str:
    """The jobs and arrays of some tasks; sacct and squeue give all tasks of an array."""
    return ",".join(sorted({task.partition("_")[0] for task in ids}))


def _vanished(asked: Iterable[str], known: dict[str, Job]) -> dict[str, Job]:
    """Tasks that neither squeue nor sacct names while they name their array: cancelled one by one while they waited.

    Slurm keeps no trace of such a task. When all of an array have gone so, `12` alone is left of it.
    """
    names = {job.array_id: job.name for job in known.values()}
    return {
        task: Job(task, names[array], "CANCELLED", source="sacct", restarts=0)
        for task in asked
        if task not in known and "_" in task and (array := task.partition("_")[0]) in names
    }


def _by_name(jobs: Iterable[Job]) -> dict[str, str]:
    """Name -> id of the job or array; among several the one that may still run, then the newest."""
    best: dict[str, tuple[bool, float, str]] = {}
    for job in jobs:
        rank = (job.alive, job.submitted or 0.0, job.array_id)
        if job.name not in best or rank > best[job.name]:
            best[job.name] = rank
    return {name: job_id for name, (_, _, job_id) in best.items()}


def _since(since: str | None) -> str:
    """`--starttime=` for sacct, which refuses zones and the future. Without a time: all that is recorded."""
    if since is None:
        return "--starttime=1970-01-02T00:00:00"
    moment = datetime.fromisoformat(since)
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return f"--starttime={min(moment, datetime.now(UTC)) - _SKEW:%Y-%m-%dT%H:%M:%S}"


def _words(done: subprocess.CompletedProcess[str]) -> str:
    """What a tool said went wrong, without its own name and the prefix of a library call; `; ` between the lines."""
    said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode} without a word"
    tidy = re.compile(r"^(s[a-z]+: )?(error: |fatal: )?(s\w+ error: |allocation failure: )?")
    lines = list(dict.fromkeys(tidy.sub("", line.strip()) for line in said.splitlines() if line.strip()))
    more = f"; and {len(lines) - _LINES} more" if len(lines) > _LINES else ""
    return "; ".join(lines[:_LINES]) + more


def _no_answer(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode < 0 or any(word in done.stderr.lower() for word in _NO_ANSWER)


def _unreachable(done: subprocess.CompletedProcess[str]) -> UnreachableError:
    return UnreachableError(f"{done.args[0]}: {_words(done)}; is the cluster up? try again")
