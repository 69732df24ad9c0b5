"""What a launch asks for, beside what the cluster has: requests that it could never run, and those of which to warn.

Slurm's own judgement is not asked here (`preflight.py` does).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from racelab.configs.schema_launcher import SlurmLauncherConfig
from racelab.configs.suggest import did_you_mean, near
from racelab.sweeps.slurm import environment
from racelab.sweeps.slurm.model import Batch, Launch
from racelab.sweeps.slurm.scheduler import Limits, Node, Partition, Scheduler

EARLY_S: Final = 60
"""Slurm may send the signal before the limit that much earlier than asked."""
_SHORT_S: Final = 480
"""An attempt that has less time than this before the signal is worth a word."""
_FEW: Final = 8
Topic = Literal["partition", "array", "nodes", "time", "account", "qos", "size", "other"]


@dataclass(frozen=True, slots=True)
class Request:
    """One of the different allocations that a launch asks for.

    Attributes:
        where: before each message; "" if there is only one.
        launcher: asked for.
        batches: that ask for it.
        script: of the largest of them.
        partitions: names asked for; () for the default.
        account: "" for the default.
        qos: "" for the default.
    """

    where: str
    launcher: SlurmLauncherConfig
    batches: tuple[Batch, ...]
    script: Path
    partitions: tuple[str, ...]
    account: str
    qos: str


@dataclass(frozen=True, slots=True)
class Problem:
    """What cannot work.

    Attributes:
        topic: that Slurm's own reason would be about.
        text: what, and the key to change.
    """

    topic: Topic
    text: str


class Cluster:
    """What the scheduler says of the cluster, each question asked once and only if it matters."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Asks for the limits."""
        self._scheduler = scheduler
        self.limits: Limits = scheduler.limits()

    @cached_property
    def nodes(self) -> list[Node]:
        """All of them."""
        return self._scheduler.nodes()

    def partitions(self, request: Request) -> list[Partition]:
        """Those that its jobs may go to; [] if that is not known: a plugin may choose where none is asked for."""
        if request.partitions:
            return [self.limits.partitions[n] for n in request.partitions if n in self.limits.partitions]
        default = self.limits.default
        return [] if default is None or self.limits.submit_plugin else [default]

    def nodes_of(self, request: Request) -> list[Node]:
        """The nodes that its jobs may get."""
        names = {partition.name for partition in self.partitions(request)}
        return [node for node in self.nodes if not names or names & set(node.partitions)]


def requests(launch: Launch, scripts: Mapping[str, Path]) -> list[Request]:
    """The different allocations; batches that differ in the number of tasks only count once."""
    alike: dict[str, list[Batch]] = {}
    for batch in launch.batches:
        key = batch.launcher.model_copy(update={"max_parallel": None}).model_dump_json()
        alike.setdefault(key, []).append(batch)
    site = environment.site_options(os.environ)
    found = []
    for batches in alike.values():
        stages = dict.fromkeys(batch.stage for batch in batches)
        largest = max(batches, key=lambda batch: len(batch.tasks))
        launcher = largest.launcher
        names = launcher.partition or site.get("partition", "")
        found.append(
            Request(
                where=f"{', '.join(stages)}: " if len(alike) > 1 else "",
                launcher=launcher,
                batches=tuple(batches),
                script=scripts[largest.name],
                partitions=tuple(name for name in names.split(",") if name),
                account=launcher.account or site.get("account", ""),
                qos=launcher.qos or site.get("qos", ""),
            )
        )
    return found


def problems(request: Request, cluster: Cluster) -> Iterator[Problem]:
    """What could never run, or would wait for ever."""
    yield from _unknown(request, cluster.limits)
    limit = cluster.limits.max_array
    for batch in request.batches:
        if batch.is_array and len(batch.tasks) > limit:
            yield Problem(
                "array",
                f"batch {batch.name} has {len(batch.tasks)} tasks, but an array of this cluster at most {limit} "
                "(MaxArraySize): split the launch",
            )
    found = cluster.partitions(request)
    if found and len(found) >= len(request.partitions):
        yield from _too_many_nodes(request, found)
        if not request.qos:  # which may lift the limit
            yield from _too_long(request, found)
        yield from _not_allowed(request, found)


def _unknown(request: Request, limits: Limits) -> Iterator[Problem]:
    """Names of partitions that are none."""
    known = limits.partitions
    key = "launcher.partition" if request.launcher.partition else "SBATCH_PARTITION"
    for name in request.partitions:
        if name not in known:
            guess = did_you_mean(near(name, known)) or f"; there are {few(known)}"
            yield Problem("partition", f"{key}={name} is no partition of this cluster{guess}")


def _too_many_nodes(request: Request, partitions: list[Partition]) -> Iterator[Problem]:
    """More nodes than any partition asked for has, or gives to one job."""
    nodes = request.launcher.nodes or 1
    asked = f"{counted(nodes, 'node')} (backend.nodes or launcher.nodes)"
    there = max(partition.total_nodes for partition in partitions)
    given = max(min(p.max_nodes or p.total_nodes, p.total_nodes) for p in partitions)
    if nodes > there:
        yield Problem("nodes", f"{asked}, but {_names(partitions)} has {there}")
    elif nodes > given and not request.qos:
        yield Problem(
            "nodes",
            f"{asked}, but a job of {_names(partitions)} gets {given} at most: it would wait for ever "
            "(PartitionNodeLimit)",
        )


def _too_long(request: Request, partitions: list[Partition]) -> Iterator[Problem]:
    """A limit above that of every partition asked for."""
    limits = [partition.max_time_min for partition in partitions]
    longest = max((limit for limit in limits if limit is not None), default=0)
    if None not in limits and request.launcher.time_min > longest:
        yield Problem(
            "time",
            f"launcher.time_min={request.launcher.time_min}, but a job of {_names(partitions)} gets {longest} min at "
            f"most: it would wait for ever (PartitionTimeLimit); set launcher.time_min={longest}, or another "
            "launcher.partition",
        )


def _not_allowed(request: Request, partitions: list[Partition]) -> Iterator[Problem]:
    """An account or a QOS that is named, and that no partition asked for takes."""
    account, qos = request.account, request.qos
    if account and not any(
        account not in p.denied_accounts and (p.accounts is None or account in p.accounts) for p in partitions
    ):
        takes = sorted({name for p in partitions for name in p.accounts or ()})
        only = f", which takes {few(takes)}" if takes else ""
        yield Problem("account", f"launcher.account={account} may not use {_names(partitions)}{only}")
    if qos and not any(p.qos is None or qos in p.qos for p in partitions):
        takes = sorted({name for p in partitions for name in p.qos or ()})
        yield Problem(
            "qos", f"launcher.qos={qos} may not be used in {_names(partitions)}, which takes {few(takes)}"
        )


def sizes(request: Request, cluster: Cluster) -> Iterator[Problem]:
    """What not even the largest node that the jobs may get has."""
    nodes = cluster.nodes_of(request)
    if not nodes:
        return
    asked = request.launcher
    there = f"but no node of {_names(cluster.partitions(request))} has more than"
    cpus, gpus = max(node.cpus for node in nodes), max(node.gpus for node in nodes)
    memory_gb = max(node.memory_mb for node in nodes) / 1024
    if asked.cpus_per_task > cpus:
        yield Problem("size", f"launcher.cpus_per_task={asked.cpus_per_task}, {there} {counted(cpus, 'CPU')}")
    if (asked.gpus_per_node or 0) > gpus:
        yield Problem(
            "size",
            f"{counted(asked.gpus_per_node or 0, 'GPU')} per node (backend.gpus_per_node or launcher.gpus_per_node), "
            f"{there} {gpus}",
        )
    if (asked.mem_gb or 0) > memory_gb:
        yield Problem("size", f"launcher.mem_gb={asked.mem_gb:g}, {there} {memory_gb:.1f} GB")


def warnings(request: Request, cluster: Cluster) -> Iterator[str]:
    """What works, but perhaps not as meant."""
    found = cluster.partitions(request)
    if found and all(partition.state != "UP" for partition in found):
        states = ", ".join(f"{partition.name} is {partition.state}" for partition in found)
        yield f"partition {states}: jobs wait until it is up"
    if request.qos and found:
        for problem in _too_long(request, found):
            yield f"{problem.text}; unless launcher.qos={request.qos} allows more"
    yield from _short(request)
    yield from _container(request)
    yield from _cancelled(request, cluster.limits, found)


def _short(request: Request) -> Iterator[str]:
    """Attempts of runs that are asked to stop soon after their start."""
    asked = request.launcher
    left = 60 * asked.time_min - asked.signal_delay_s - EARLY_S
    if left >= _SHORT_S or not any(task.kind == "run" for batch in request.batches for task in batch.tasks):
        return
    then = (
        f"after {counted(asked.max_idle_requeues, 'requeue')} without a new checkpoint the run is given up"
        if asked.requeue
        else "`racelab resume` goes on"
    )
    yield (
        f"launcher.time_min={asked.time_min} with launcher.signal_delay_s={asked.signal_delay_s}: an attempt may be "
        f"asked to stop {f'after {left} s' if left > 0 else 'at once'}, for Slurm's signal comes up to {EARLY_S} s "
        f"early; {then}"
    )


def _container(request: Request) -> Iterator[str]:
    """Images: the process that asks for the requeue runs in them."""
    kind = request.launcher.container.kind
    if kind != "none" and request.launcher.requeue:
        yield (
            f"launcher.container.kind={kind}: a job asks for its requeue from inside the image, which needs squeue "
            "and scontrol for that (and what they need to reach Slurm); without them a job that is preempted or "
            "reaches its time limit goes on by `racelab resume` only"
        )


def _cancelled(request: Request, limits: Limits, partitions: list[Partition]) -> Iterator[str]:
    """Clusters that cancel what they preempt, and leave it no time to ask for being requeued first."""
    if not request.launcher.requeue or limits.preempt_type == "preempt/none":
        return
    highest = max((partition.tier for partition in limits.partitions.values()), default=0)
    for partition in partitions:
        if limits.preempt_type == "preempt/qos":
            cancels, where = "CANCEL" in limits.preempt_mode, "this cluster"
        else:
            where = f"partition {partition.name}"
            cancels = (
                "CANCEL" in partition.preempt_mode and not partition.grace_s and partition.tier < highest
            )
        if cancels:
            yield (
                f"{where} cancels the jobs that it preempts (PreemptMode=CANCEL): such a run stops at its newest "
                "checkpoint, and `racelab resume` goes on"
            )


def few(names: Iterable[str]) -> str:
    """Names, at most eight of them."""
    listed = list(names)
    more = f" and {len(listed) - _FEW} more" if len(listed) > _FEW else ""
    return ", ".join(listed[:_FEW]) + more


def counted(number: int, what: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _names(partitions: list[Partition]) -> str:
    names = [partition.name for partition in partitions]
    return f"partition {' or '.join(names)}" if names else "the cluster"
