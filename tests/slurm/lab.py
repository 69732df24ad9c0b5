"""A real Slurm for the tests: bringing one up, asking it, and doing to its nodes what befalls nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

SCRIPTS = Path(__file__).resolve().parent / "cluster"
TOOL_S = 30.0
"""How long one call of a Slurm tool may take."""
OVER = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"}
)
"""States that Slurm may end a job in; of a job that is requeued it says REQUEUED or PENDING."""
T = TypeVar("T")


class NotThereError(AssertionError):
    """What was waited for did not come; a test fails with it."""


def wait_for(
    predicate: Callable[[], T], timeout: float, what: str, explain: Callable[[], str] = lambda: ""
) -> T:
    """The first true value of `predicate`, asked five times a second.

    Raises:
        NotThereError: after `timeout` seconds, with `what` and what `explain` says then.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise NotThereError(f"not within {timeout:g} s: {what} (last: {value!r})\n{explain()}")
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Options:
    """How a cluster differs from the usual one; see `cluster/common.sh`."""

    accounting: Literal["dbd", "none"] = "dbd"
    preempt: Literal["REQUEUE", "CANCEL"] = "REQUEUE"
    signal: Literal["on", "off"] = "on"
    net: Literal["host", "netns"] = "host"
    nodes: int = 4

    def variables(self) -> dict[str, str]:
        """For up.sh."""
        return {
            "RACELAB_SLURM_ACCOUNTING": self.accounting,
            "RACELAB_SLURM_PREEMPT": self.preempt,
            "RACELAB_SLURM_SIGNAL": self.signal,
            "RACELAB_SLURM_NET": self.net,
            "RACELAB_SLURM_NODES": str(self.nodes),
        }


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that is up, and the outside world's words for it.

    Attributes:
        folder: of its own, short, fresh: `SLURM_CONF` is `<folder>/etc/slurm.conf`.
        options: it was brought up with.
    """

    folder: Path
    options: Options = field(default_factory=Options)

    @classmethod
    def bring_up(cls, options: Options) -> Cluster:
        """A fresh cluster on free ports.

        Raises:
            NotThereError: it does not come up; nothing of it is left then.
        """
        cluster = cls(Path(tempfile.mkdtemp(prefix="rls-", dir="/tmp")), options)
        try:
            cluster.up()
        except BaseException:
            cluster.down()
            raise
        return cluster

    def up(self) -> None:
        """Starts what does not run; nothing else happens if all of it does."""
        self._script("up.sh", timeout=120)

    def down(self, *, keep: bool = False) -> None:
        """Ends what `up` started; the folder goes too unless `keep`."""
        if (self.folder / "env.sh").exists():
            self._script("down.sh", *([] if keep else ["--purge"]), timeout=90)
        elif not keep:
            shutil.rmtree(self.folder)

    def _script(self, name: str, *words: str, timeout: float) -> str:
        """Runs one of `cluster/`; what it says goes through a file: a pipe would stay open in its daemons."""
        said = self.folder / f"{name}.said"
        variables = {"RACELAB_SLURM_DIR": str(self.folder), **self.options.variables()}
        with tempfile.TemporaryFile("w+") as out:
            done = subprocess.run(
                [str(SCRIPTS / name), *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**outside(), **variables},
                timeout=timeout,
                check=False,
            )
            out.seek(0)
            text = out.read()
        if done.returncode != 0:
            raise NotThereError(f"{name} {' '.join(words)} ended with {done.returncode}:\n{text}")
        if said.parent.is_dir():
            said.write_text(text)
        return text

    def environment(self, **more: str) -> dict[str, str]:
        """Of a person at the cluster's login node."""
        return {**outside(), "SLURM_CONF": str(self.folder / "etc" / "slurm.conf"), **more}

    def tool(self, *words: str, cwd: Path | None = None, timeout: float = TOOL_S) -> str:
        """What a Slurm tool prints.

        Raises:
            NotThereError: it exits with another code than 0.
        """
        done = subprocess.run(
            words,
            cwd=cwd or self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise NotThereError(f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def sbatch(self, *words: str, cwd: Path | None = None) -> str:
        """Submits; the job id. What the job prints is thrown away unless the words say otherwise."""
        return self.tool("sbatch", "--parsable", "--output=/dev/null", *words, cwd=cwd).partition(";")[0]

    def wrap(self, command: str, *options: str) -> str:
        """Submits a shell line; the job id."""
        return self.sbatch(*options, f"--wrap={command}")

    def squeue(self, *jobs: str) -> dict[str, str]:
        """Job or array task -> state, ended ones too, as long as slurmctld remembers them."""
        chosen = ["-j", ",".join(jobs)] if jobs else []
        lines = self.tool("squeue", "-h", "-r", "-t", "all", "-o", "%i %T", *chosen).splitlines()
        return dict(line.split() for line in lines)

    def state(self, job: str) -> str:
        """Of one job; "" if slurmctld does not know it (any more)."""
        return self.squeue().get(job, "")

    def sacct(self, *jobs: str) -> list[dict[str, str]]:
        """A row for every time that a job was started, by sacct's names of the columns; none without accounting."""
        columns = (
            "JobID",
            "JobName",
            "State",
            "ExitCode",
            "NodeList",
            "AllocTRES",
            "Start",
            "End",
            "Restarts",
        )
        chosen = ["-j", ",".join(jobs)] if jobs else ["-S", "now-1days"]
        text = self.tool("sacct", "-n", "-X", "-D", "-P", "-o", ",".join(columns[:-1]), *chosen)
        return [dict(zip(columns, line.split("|"), strict=False)) for line in text.splitlines()]

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.tool("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def alloc_tres(self, job: str) -> dict[str, str]:
        """What Slurm gave to a job: `{"cpu": "4", "gres/gpu": "16", "node": "2", ...}`."""
        if self.options.accounting == "dbd":
            rows = self.wait(
                lambda: [row for row in self.sacct(job) if row["AllocTRES"]], 20, f"sacct's row of job {job}"
            )
            text = rows[-1]["AllocTRES"]
        else:
            text = self.job(job)["TRES"]
        return dict(part.split("=", 1) for part in text.split(","))

    def wait(self, predicate: Callable[[], T], timeout: float, what: str) -> T:
        """`wait_for`, with the cluster's own words in the error."""
        return wait_for(predicate, timeout, what, self.picture)

    def wait_state(self, job: str, states: str | Collection[str], timeout: float) -> str:
        """Until a job is in one of `states`; which."""
        wanted = {states} if isinstance(states, str) else set(states)

        def reached() -> str:
            state = self.state(job)
            return state if state in wanted else ""

        return self.wait(reached, timeout, f"job {job} in {' or '.join(sorted(wanted))}")

    def picture(self) -> str:
        """Jobs, nodes and the last lines of slurmctld's log, for an error message."""
        try:
            queue = self.tool("squeue", "-t", "all", "-o", "%i %j %T %r %N")
            nodes = self.tool("sinfo", "-N", "-h", "-p", "cpu", "-o", "%N %T %E")
        except (NotThereError, subprocess.SubprocessError, OSError) as error:
            queue, nodes = f"slurmctld does not answer: {error}", ""
        log = self.folder / "log" / "slurmctld.log"
        tail = log.read_text(errors="replace").splitlines()[-25:] if log.exists() else []
        return "\n".join([queue, nodes, *tail])

    def node(self, name: str) -> Node:
        """`node1` ... `node4`."""
        return Node(self, name)

    @property
    def nodes(self) -> list[Node]:
        """All of them."""
        return [self.node(f"node{i}") for i in range(1, self.options.nodes + 1)]

    def drain(self, name: str) -> None:
        """No further job starts on the node."""
        self.tool("scontrol", "update", f"nodename={name}", "state=drain", "reason=a test")

    def resume(self, name: str) -> None:
        """Takes a drained node back."""
        self.tool("scontrol", "update", f"nodename={name}", "state=resume")

    def restore(self) -> None:
        """No job, and every node idle: what the next test expects."""
        if self.tool("squeue", "-h", "-o", "%i"):
            self.tool("scancel", "--user=root")
        for node in self.nodes:
            node.start()
        drained = self.tool("sinfo", "-h", "-N", "-p", "cpu", "-t", "drain", "-o", "%N").split()
        for name in drained:
            self.resume(name)
        self.wait(lambda: not self.tool("squeue", "-h", "-o", "%i"), 60, "an empty queue")
        self.wait(lambda: all(node.state() == "idle" for node in self.nodes), 60, "idle nodes")


@dataclass(frozen=True, slots=True)
class Node:
    """A virtual node: a process tree with a hostname and pids of its own, which others see as other numbers."""

    cluster: Cluster
    name: str

    def start(self) -> None:
        """The node, or its slurmd alone if the node lives without; nothing if both live."""
        self._do("start")

    def stop(self) -> None:
        """Ends slurmd; running steps live on."""
        self._do("stop")

    def kill(self) -> None:
        """Power loss."""
        self._do("kill")

    def _do(self, action: str) -> str:
        return self.cluster._script("node.sh", action, self.name, timeout=30)

    def state(self) -> str:
        """Slurm's word: idle, allocated, mixed, down, drained ...; `*`: it does not answer."""
        return self.cluster.tool("sinfo", "-h", "-n", self.name, "-p", "cpu", "-o", "%T")

    def pids(self, text: str = "") -> list[int]:
        """Processes inside the node whose command line holds `text`, by the pids that this machine sees."""
        first = self.cluster.folder / "run" / f"{self.name}.pid"
        if not first.exists():
            return []  # the node is dead, and so is all that ran in it
        inside = os.readlink(f"/proc/{first.read_text().strip()}/ns/pid")
        return [pid for pid, line in processes().items() if text in line and _pid_namespace(pid) == inside]


def processes() -> dict[int, str]:
    """Every process of the machine with its command line, words joined by spaces."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                line = Path(entry.path, "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            found[int(entry.name)] = line.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""  # it has just ended; or this machine's init, which not even root may look into


def alive(pid: int) -> bool:
    """Whether the process still runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def outside(present: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without what a surrounding Slurm job or another test cluster put there."""
    prefixes = ("SLURM", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "RACELAB_SLURM_")
    return {key: value for key, value in present.items() if not key.startswith(prefixes)}
