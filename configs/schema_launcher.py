"""Where a run starts: here, or as a job of a Slurm cluster. What one run asks of the cluster is decided here only."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Protocol

from pydantic import Field, field_validator, model_validator

from racelab.configs.section import Count, Section


class InlineLauncherConfig(Section):
    """On this machine, in this terminal."""

    name: Literal["inline"]


class ContainerConfig(Section):
    """Runs the job's Python inside an image."""

    kind: Literal["none", "apptainer", "pyxis"] = Field(
        description="apptainer: `apptainer exec`; pyxis: srun's --container-image."
    )
    image: str = Field(description="Image file or address; empty only for kind none.")
    mounts: tuple[str, ...] = Field(description="FROM:TO each; the runs' folder must be among what is seen.")

    @model_validator(mode="after")
    def _whole(self) -> ContainerConfig:
        if (self.kind == "none") != (not self.image):
            raise ValueError(
                "container.kind and container.image go together: "
                + ("set container.kind=apptainer or pyxis" if self.image else "set container.image")
            )
        if self.kind == "none" and self.mounts:
            raise ValueError("container.mounts means nothing without container.kind=apptainer or pyxis")
        return self


class SlurmLauncherConfig(Section):
    """As a job of a Slurm cluster, through submitit. `null`: the cluster's own default."""

    name: Literal["slurm"]
    partition: str | None = Field(min_length=1)
    account: str | None = Field(min_length=1)
    qos: str | None = Field(min_length=1)
    reservation: str | None = Field(min_length=1)
    nodes: Count | None = Field(description="null: backend.nodes.")
    gpus_per_node: int | None = Field(ge=0, description="null: backend.gpus_per_node.")
    cpus_per_task: Count = Field(description="Cores of a node's one task.")
    mem_gb: Annotated[float, Field(gt=0.0)] | None = Field(description="Memory of a node.")
    time_min: Count = Field(
        description="Limit of one attempt; a run that reaches it is requeued and goes on."
    )
    constraint: str | None = Field(min_length=1)
    nodelist: str | None = Field(min_length=1)
    exclude: str | None = Field(min_length=1)
    exclusive: bool
    max_parallel: Count | None = Field(description="Cells of a sweep at once; null: as many as fit.")
    signal_delay_s: int = Field(
        ge=10, description="How long before the limit a run is asked to save and stop."
    )
    requeue: bool = Field(
        description="After preemption or the time limit, go on in the same job; false: `racelab resume` does."
    )
    max_idle_requeues: Count = Field(
        description="Requeues at the time limit without a new checkpoint before the run is given up."
    )
    ship: Literal["auto", "always", "never"] = Field(
        description="Jobs write to MLflow themselves; auto: if the store is a server, else `racelab sync` does."
    )
    fence_wait_s: Count = Field(
        description="How long a new attempt waits for the process of a replaced one to let go of the run."
    )
    python: str = Field(description="Python of the jobs; empty: this one.")
    container: ContainerConfig
    setup: tuple[str, ...] = Field(description="Shell lines before the command, as `module load cuda`.")
    srun: tuple[str, ...] = Field(description="Further words for srun, as --cpu-bind=none.")
    extra: tuple[str, ...] = Field(description="Further #SBATCH options, as --mail-type=END.")

    @field_validator("extra")
    @classmethod
    def _options(cls, extra: tuple[str, ...]) -> tuple[str, ...]:
        """Options only, and none that racelab sets itself."""
        for line in extra:
            match = re.fullmatch(r"--(?P<name>[a-z][a-z0-9-]*)(=.*)?", line)
            if match is None:
                raise ValueError(f"{line!r} is no #SBATCH option; write it as --mail-type=END")
            if match["name"] in OWN_OPTIONS:
                raise ValueError(f"{line!r}: racelab sets --{match['name']} itself{_instead(match['name'])}")
        return extra

    @field_validator("setup")
    @classmethod
    def _lines(cls, setup: tuple[str, ...]) -> tuple[str, ...]:
        for line in setup:
            if line.lstrip().startswith("#SBATCH"):
                raise ValueError(f"{line!r} comes too late for sbatch; put the option into launcher.extra")
        return setup

    @model_validator(mode="after")
    def _signal(self) -> SlurmLauncherConfig:
        if self.signal_delay_s >= 60 * self.time_min:
            raise ValueError(
                f"signal_delay_s={self.signal_delay_s} is not below the limit of time_min={self.time_min} min: every "
                "attempt would be stopped at its start"
            )
        return self

    @property
    def gpus(self) -> int:
        """GPUs of a job; both numbers must be known (`resolved`)."""
        assert self.nodes is not None
        assert self.gpus_per_node is not None
        return self.nodes * self.gpus_per_node

    def resolved(self, backend: HasSize) -> SlurmLauncherConfig:
        """With the backend's nodes and GPUs where the launcher leaves them open."""
        nodes = backend.nodes if self.nodes is None else self.nodes
        gpus = backend.gpus_per_node if self.gpus_per_node is None else self.gpus_per_node
        return self.model_copy(update={"nodes": nodes, "gpus_per_node": gpus})


class HasSize(Protocol):
    """What a launcher asks of a backend."""

    @property
    def name(self) -> str:
        """Local or verl."""

    @property
    def nodes(self) -> int:
        """Nodes it runs on."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs it takes of each."""


OWN_OPTIONS: dict[str, str] = {
    "job-name": "", "comment": "", "output": "", "error": "", "array": "max_parallel", "dependency": "",
    "open-mode": "", "requeue": "requeue", "no-requeue": "requeue", "signal": "signal_delay_s", "ntasks": "",
    "ntasks-per-node": "", "nodes": "nodes", "gpus-per-node": "gpus_per_node", "cpus-per-task": "cpus_per_task",
    "time": "time_min", "partition": "partition", "account": "account", "qos": "qos", "mem": "mem_gb",
    "constraint": "constraint", "nodelist": "nodelist", "exclude": "exclude", "exclusive": "exclusive",
    "reservation": "reservation", "export": "", "kill-on-invalid-dep": "", "parsable": "", "test-only": "",
    "wrap": "", "wait": "", "chdir": "", "wckey": "",
}  # fmt: skip
"""#SBATCH options that racelab writes -> the launcher's key for it; "" where there is none."""


def _instead(option: str) -> str:
    key = OWN_OPTIONS[option]
    return f"; set launcher.{key}" if key else ""


def asked_of_slurm(
    launcher: InlineLauncherConfig | SlurmLauncherConfig, backend: HasSize
) -> SlurmLauncherConfig | None:
    """What a run asks of Slurm, its numbers filled in; None for a run that starts here."""
    return launcher.resolved(backend) if isinstance(launcher, SlurmLauncherConfig) else None


LauncherConfig = Annotated[InlineLauncherConfig | SlurmLauncherConfig, Field(discriminator="name")]


def refuse_what_launcher_cannot(
    launcher: InlineLauncherConfig | SlurmLauncherConfig, backend: HasSize
) -> None:
    """An allocation that the backend would leave idle, or that is too small for it, is an error."""
    if not isinstance(launcher, SlurmLauncherConfig):
        return
    if launcher.nodes is not None and launcher.nodes != backend.nodes:
        raise ValueError(
            f"launcher.nodes={launcher.nodes}, but the run uses {backend.nodes} (backend.nodes); leave launcher.nodes "
            "out, or set both"
        )
    gpus = launcher.gpus_per_node
    if backend.name == "local":
        if gpus is not None and gpus > 1:
            raise ValueError(
                f"launcher.gpus_per_node={gpus}, but the local backend trains on one device; set 0 or 1"
            )
        return
    if gpus is not None and gpus != backend.gpus_per_node:
        raise ValueError(
            f"launcher.gpus_per_node={gpus}, but the run uses {backend.gpus_per_node} of each node "
            "(backend.gpus_per_node); leave launcher.gpus_per_node out, or set both"
        )
