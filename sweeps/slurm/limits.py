"""What a cluster allows and has: `scontrol show config`, `show partition` and `show node`, as values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from racelab.sweeps.slurm.parsing import NOTHING, duration, something


@dataclass(frozen=True, slots=True)
class Partition:
    """What a partition allows.

    Attributes:
        name: of it.
        max_time_min: longest limit of a job; None: any.
        max_nodes: most nodes of a job; None: all.
        total_nodes: nodes it has.
        state: UP; DOWN (jobs wait), DRAIN or INACTIVE (jobs are refused).
        default: jobs that name no partition go there.
        accounts: who may use it; None: all.
        denied_accounts: who may not.
        qos: that may be used in it; None: all.
        preempt_mode: what happens to its jobs when others need their nodes: REQUEUE, CANCEL, OFF, ...
        grace_s: between the signal and the end of a preempted job.
        tier: jobs of a higher one may preempt those of a lower.
    """

    name: str
    max_time_min: int | None
    max_nodes: int | None
    total_nodes: int
    state: str
    default: bool
    accounts: tuple[str, ...] | None = None
    denied_accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] | None = None
    preempt_mode: str = "OFF"
    grace_s: int = 0
    tier: int = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What the cluster allows.

    Attributes:
        max_array: indices of arrays are below it, so an array has at most that many tasks.
        partitions: by name; hidden ones too.
        version: as `22.05.8`.
        accounting: jobs are remembered (sacct works).
        enforce: EnforcePartLimits: NO: a job beyond its partition's limits is taken and waits for ever.
        preempt_type: preempt/partition_prio, preempt/qos; preempt/none: jobs are never preempted.
        preempt_mode: of the cluster.
        submit_plugin: what may change jobs at their submission, as the partition they name; "" for none.
    """

    max_array: int
    partitions: dict[str, Partition]
    version: str
    accounting: bool
    enforce: str
    preempt_type: str = "preempt/none"
    preempt_mode: str = "OFF"
    submit_plugin: str = ""

    @property
    def default(self) -> Partition | None:
        """Where jobs go that name no partition."""
        return next((partition for partition in self.partitions.values() if partition.default), None)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster.

    Attributes:
        name: Slurm's.
        address: under which the controller reaches it.
        host: what it calls itself.
        usable: neither down nor drained nor reserved for maintenance.
        partitions: it is in.
        cpus: it has.
        memory_mb: it has.
        gpus: it has.
    """

    name: str
    address: str
    host: str
    usable: bool
    partitions: tuple[str, ...]
    cpus: int
    memory_mb: int
    gpus: int


def parse_limits(config: str, partitions: str) -> Limits:
    """Of `scontrol show config` and `scontrol -a -o show partition`.

    Raises:
        KeyError: a line is missing that every Slurm prints.
        ValueError: a number is none.
    """
    settings = dict(re.findall(r"^(\w+)\s*= ?(.*?)\s*$", config, re.MULTILINE))
    return Limits(
        max_array=int(settings["MaxArraySize"]),
        partitions={p.name: p for p in map(_partition, _records(partitions))},
        version=settings["SLURM_VERSION"],
        accounting=settings["AccountingStorageType"] not in ("accounting_storage/none", *NOTHING),
        enforce=settings["EnforcePartLimits"],
        preempt_type=something(settings["PreemptType"]) or "preempt/none",
        preempt_mode=settings["PreemptMode"],
        submit_plugin=something(settings["JobSubmitPlugins"]),
    )


def _partition(entry: dict[str, str]) -> Partition:
    limit = duration(entry["MaxTime"])
    return Partition(
        name=entry["PartitionName"],
        max_time_min=None if limit is None else limit // 60,
        max_nodes=int(entry["MaxNodes"]) if entry["MaxNodes"].isdecimal() else None,
        total_nodes=int(entry["TotalNodes"]),
        state=entry["State"],
        default=entry["Default"] == "YES",
        accounts=_names(entry["AllowAccounts"]) if "AllowAccounts" in entry else None,
        denied_accounts=_names(entry["DenyAccounts"]) or () if "DenyAccounts" in entry else (),
        qos=_names(entry["AllowQos"]) if "AllowQos" in entry else None,
        preempt_mode=entry["PreemptMode"],
        grace_s=int(entry["GraceTime"]),
        tier=int(entry["PriorityTier"]),
    )


def parse_nodes(text: str) -> list[Node]:
    """Of `scontrol -a -o show node`.

    Raises:
        KeyError: a field is missing that every Slurm prints.
        ValueError: a number is none.
    """
    return [
        Node(
            name=entry["NodeName"],
            address=entry.get("NodeAddr", entry["NodeName"]),  # not shown of a node that is to be made yet
            host=entry.get("NodeHostName", entry["NodeName"]),
            usable=_usable(entry["State"]),
            partitions=tuple(entry.get("Partitions", "").split(",")),  # not shown of a node that is in none
            cpus=int(entry["CPUTot"]),
            memory_mb=int(entry["RealMemory"]),
            gpus=sum(map(int, re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", entry["Gres"]))),
        )
        for entry in _records(text)
    ]


def _usable(state: str) -> bool:
    """Of `IDLE`, `MIXED+PLANNED`, `IDLE+CLOUD+POWERED_DOWN`; not of `DOWN*`, `IDLE+DRAIN`, `IDLE+MAINTENANCE`."""
    gone = ("DOWN", "ERROR", "UNKNOWN", "DRAIN", "FAIL", "MAINT", "NOT_RESPONDING", "INVAL", "FUTURE")
    return "*" not in state and not any(word.startswith(gone) for word in state.split("+"))


def _records(text: str) -> Iterator[dict[str, str]]:
    """The `Key=value` words of each line; of a key that comes twice, the first."""
    for line in text.splitlines():
        if line.strip():
            yield dict(reversed(re.findall(r"(\S+?)=(\S*)", line)))


def _names(text: str) -> tuple[str, ...] | None:
    return None if text == "ALL" or text in NOTHING else tuple(text.split(","))
