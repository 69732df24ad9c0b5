"""Whether the cluster could ever run what a launch asks for, before anything is made or submitted.

Slurm judges each different allocation itself (`sbatch --test-only`). It gives its reason without a key and stops at the
first one; it takes requests that it would never start (a limit above the partition's), and refuses some that have to
wait only (for nodes that are down). `capacity.py` knows of those; here both are put together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from racelab.experiments.errors import ConfigError
from racelab.sweeps.slurm import capacity, mounts
from racelab.sweeps.slurm.capacity import Cluster, Problem, Request
from racelab.sweeps.slurm.model import Launch
from racelab.sweeps.slurm.scheduler import Scheduler

_SIZE_KEYS: Final = "nodes gpus_per_node cpus_per_task mem_gb exclusive constraint nodelist exclude"
_REASONS: Final = (
    ("accounting/qos policy", "policy", "qos account time_min nodes cpus_per_task mem_gb"),
    ("invalid partition|partition name|default partition", "partition", "partition"),
    ("partition not available|group not permitted", "state", "partition"),
    ("node count", "nodes", "nodes"),
    (
        "node configuration|more processors|memory required|generic resource|gres|trackable",
        "size",
        _SIZE_KEYS,
    ),
    ("time limit|time specified|time-min", "time", "time_min"),
    ("array", "array", ""),
    ("account", "account", "account"),
    ("qos", "qos", "qos"),
    ("feature", "constraint", "constraint"),
    ("node name|not in this partition", "nodelist", "nodelist exclude"),
    ("reservation", "reservation", "reservation"),
    ("option", "extra", "extra"),
)
"""Slurm's words (slurm_errno.c), what they are about, the launcher's keys that decide it."""
_WAITS: Final = re.compile(r"nodes are busy|down, drained or reserved|DOWN state|maintenance reservation")
"""Reasons that pass; sbatch takes such jobs."""


def check(launch: Launch, scheduler: Scheduler, scripts: Mapping[str, Path]) -> list[str]:
    """Asks Slurm, and looks at what Slurm does not say.

    Args:
        launch: its batches are split already.
        scheduler: asked two questions, one more for each different allocation, and one where single nodes matter.
        scripts: batch -> its script.

    Returns:
        Warnings: what works, but perhaps not as meant.

    Raises:
        ConfigError: all that cannot work, a line each: what, the key to change, Slurm's own reason.
        UnreachableError: no scheduler answers here.
    """
    cluster = Cluster(scheduler)
    refused: list[str] = []
    doubts: list[str] = []
    for request in capacity.requests(launch, scripts):
        problems = list(capacity.problems(request, cluster))
        reason = _reason(request, scheduler)
        wait = ""
        if reason:
            problems, wait = _explained(problems, reason, request, cluster)
        refused += [f"{request.where}{problem.text}" for problem in problems]
        doubts += [f"{request.where}{text}" for text in (wait, *capacity.warnings(request, cluster)) if text]
    if refused:
        raise ConfigError("\n".join(refused))
    return [*doubts, *_folders(launch, cluster)]


def _reason(request: Request, scheduler: Scheduler) -> str:
    """Why Slurm would not take the script, in its words; "" if it would."""
    try:
        scheduler.test(request.script)
    except ConfigError as error:
        return str(error)
    return ""


def _explained(
    problems: list[Problem], reason: str, request: Request, cluster: Cluster
) -> tuple[list[Problem], str]:
    """The problems with Slurm's reason at the one that it is about, or a warning if the jobs only have to wait."""
    topic, keys = next(
        ((topic, keys) for words, topic, keys in _REASONS if re.search(words, reason, re.IGNORECASE)),
        ("", ""),
    )
    quoted = f'Slurm: "{reason}"'
    if topic == "size":
        problems = [*problems, *capacity.sizes(request, cluster)]
    for number, problem in enumerate(problems):
        if problem.topic == topic or (problem.topic == "nodes" and topic == "size"):
            said = Problem(problem.topic, f"{problem.text} ({quoted})")
            return [*problems[:number], said, *problems[number + 1 :]], ""
    gone = [node.name for node in cluster.nodes_of(request) if not node.usable] if topic == "size" else []
    if gone or _WAITS.search(reason):
        names = f"; down, drained or reserved now: {capacity.few(gone)}" if gone else ""
        return problems, f"the jobs will have to wait, if Slurm takes them at all ({quoted}){names}"
    return [*problems, Problem("other", f"{quoted}; change {_asked(request, keys)}")], ""


def _asked(request: Request, keys: str) -> str:
    """The keys and what they ask for; without those that ask for nothing, if any asks for something."""
    names = keys.split()
    values = {name: getattr(request.launcher, name) for name in names}
    asking = [f"launcher.{name}={value}" for name, value in values.items() if value not in (None, 0, ())]
    return ", ".join(asking or [f"launcher.{name}" for name in names]) or "the launcher's keys"


def _folders(launch: Launch, cluster: Cluster) -> Iterator[str]:
    """Folders that the jobs need and that other machines may not see."""
    kinds = {path: mounts.local(Path(path)) for path in (launch.root, launch.cwd)}
    if not any(kinds.values()) or not any(
        mounts.is_elsewhere(node.name, node.address, node.host) for node in cluster.nodes
    ):
        return
    for path, kind in kinds.items():
        if kind:
            what, mend = ("the working folder", "start from a shared one")
            if path == launch.root:
                what, mend = "the runs' folder", "set run.root to a shared one"
            yield f"{what} {path} is on a {kind}, which jobs on other nodes may not see; {mend}"
