"""What is submitted: a launch holds batches, a batch holds tasks. Plain data, no scheduler, no files.

- **Task**: one run (a run folder that exists already), or one command of racelab.
- **Batch**: tasks that ask for the same allocation: one sbatch, an array if there are several.
- **Launch**: the batches of one command line, with their order (`after`).

A batch may be submitted more than once (its submitter died, its jobs were lost): each time is a `Submission` with a
number of its own, and only jobs of the newest may work on the runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from racelab.configs.schema_launcher import SlurmLauncherConfig

MAX_ARRAY: Final = 1001
"""Slurm's default MaxArraySize: indices are below it, so an array has at most that many tasks."""
NOT_OURS: Final = 75
"""Exit code of a job that found its run in other hands. Not 0: what waits for the job by `afterok` needs the run
finished."""
Kind = Literal["run", "command"]
Condition = Literal["ok", "any"]


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of work.

    Attributes:
        kind: run: `racelab train --resume` of a run folder; command: any command line of racelab.
        run: name of the run's folder below the root (kind run).
        words: of the command line after `racelab` (kind command).
        title: for people: `evolm-s0`, or the stage's name.
        every_node: a command that every node executes, not the first alone.
    """

    kind: Kind
    run: str = ""
    words: tuple[str, ...] = ()
    title: str = ""
    every_node: bool = False


@dataclass(frozen=True, slots=True)
class After:
    """A condition on another stage of the launch.

    Attributes:
        stage: name.
        condition: ok: all its tasks ended well (`afterok`, and this never runs if one does not); any: they ended
            (`afterany`).
        job_id: of a job of an earlier launch that is still to end; "" where the stage is of this launch.
    """

    stage: str
    condition: Condition
    job_id: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """One sbatch.

    Attributes:
        name: unique in the launch: the stage's name, or `<stage>-2` ... for the further parts of a split one.
        stage: of the graph; what `After` refers to.
        tasks: at least one; several make an array, task i has index i.
        launcher: resolved: nodes and gpus_per_node are numbers.
        after: conditions on other stages.
    """

    name: str
    stage: str
    tasks: tuple[Task, ...]
    launcher: SlurmLauncherConfig
    after: tuple[After, ...] = ()

    @property
    def is_array(self) -> bool:
        """Whether jobs are named `<array>_<index>`."""
        return len(self.tasks) > 1

    def gpu_hours(self) -> float:
        """At most: every task up to its limit, once."""
        return len(self.tasks) * self.launcher.gpus * self.launcher.time_min / 60

    def node_hours(self) -> float:
        """At most: every task up to its limit, once."""
        assert self.launcher.nodes is not None
        return len(self.tasks) * self.launcher.nodes * self.launcher.time_min / 60


@dataclass(frozen=True, slots=True)
class Launch:
    """What one command line submits.

    Attributes:
        uid: `<UTC time>-<random>`, name of its folder below `<root>/.launches`.
        name: of the run, sweep or graph.
        command: as typed.
        root: absolute folder of the runs.
        cwd: absolute folder the command was typed in; jobs start there.
        batches: in an order in which every stage comes after those it waits for.
        code: absolute folder that holds the `racelab` package the jobs import; "" before it is made.
        sweep: id of the sweep's own run folder, "" without one.
        created: ISO time, UTC.
        depth: launches above this one (0: typed by a person).
    """

    uid: str
    name: str
    command: str
    root: str
    cwd: str
    batches: tuple[Batch, ...]
    code: str = ""
    sweep: str = ""
    created: str = ""
    depth: int = 0

    def batch(self, name: str) -> Batch:
        """The batch of that name. Raises KeyError."""
        for batch in self.batches:
            if batch.name == name:
                return batch
        raise KeyError(name)

    def tasks(self) -> Iterator[tuple[Batch, int, Task]]:
        """Every (batch, index, task)."""
        for batch in self.batches:
            for index, task in enumerate(batch.tasks):
                yield batch, index, task

    def of_stage(self, stage: str) -> tuple[Batch, ...]:
        """The batches that a stage was split into."""
        return tuple(batch for batch in self.batches if batch.stage == stage)

    @property
    def n_tasks(self) -> int:
        """Jobs, with every task of an array counted."""
        return sum(len(batch.tasks) for batch in self.batches)


@dataclass(frozen=True, slots=True)
class Submission:
    """One time that a batch was handed to sbatch.

    Attributes:
        batch: name.
        number: from 1; only the newest of a batch counts.
        job_id: of the job or array; "" between the intent and sbatch's answer.
        intended: ISO time, written before sbatch is called.
        submitted: ISO time of the answer; "" before.
        adopted: found by its name after its submitter had died.
        error: why sbatch refused; "".
    """

    batch: str
    number: int
    job_id: str = ""
    intended: str = ""
    submitted: str = ""
    adopted: bool = False
    error: str = ""

    @property
    def settled(self) -> bool:
        """Whether sbatch has answered, with a job or with an error."""
        return bool(self.job_id or self.error)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which task of which launch may work on a run: the key `launch` of its run.json.

    Attributes:
        uid: of the launch.
        batch: name.
        index: in the array.
        number: of the submission.
    """

    uid: str
    batch: str
    index: int
    number: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"uid": self.uid, "batch": self.batch, "index": self.index, "number": self.number}

    @classmethod
    def from_json(cls, value: object) -> Assignment | None:
        """None for a run that no job may work on."""
        if not isinstance(value, dict):
            return None
        return cls(str(value["uid"]), str(value["batch"]), int(value["index"]), int(value["number"]))


def job_name(launch: Launch, batch: Batch, number: int) -> str:
    """By which a job is found again: `<name>.<launch uid>.<batch>.<number>`; only the name part may be cut."""
    return f"{launch.name[:40]}.{launch.uid}.{batch.name}.{number}"


def task_job_id(job_id: str, batch: Batch, index: int) -> str:
    """`12` or `12_4`, as the scheduler's tables have it."""
    return f"{job_id}_{index}" if batch.is_array else job_id


def share(limit: int, number: int, parts: int) -> int:
    """What part `number` of several gets of a limit: at least 1. Example: 4 among 3 are 2, 1, 1."""
    return max(1, limit // parts + (number < limit % parts))


def split(batch: Batch, max_array: int) -> tuple[Batch, ...]:
    """The batch in parts of at most `max_array` tasks; their names are `<name>`, `<name>-2`, ...

    Each part gets the whole `max_parallel`: Slurm's limit is per array, so it is shared out among the parts.

    Example: 5 tasks, max_array 2, max_parallel 4 give parts of 2, 2, 1 tasks with limits 2, 1, 1.
    """
    parts = [batch.tasks[i : i + max_array] for i in range(0, len(batch.tasks), max_array)]
    if len(parts) == 1:
        return (batch,)
    limit = batch.launcher.max_parallel
    found = []
    for number, tasks in enumerate(parts):
        launcher = batch.launcher
        if limit is not None:
            launcher = launcher.model_copy(update={"max_parallel": share(limit, number, len(parts))})
        name = batch.name if number == 0 else f"{batch.name}-{number + 1}"
        found.append(replace(batch, name=name, tasks=tasks, launcher=launcher))
    return tuple(found)
