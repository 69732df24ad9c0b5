"""What goes into a run of model-written code and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from racelab.experiments.errors import RacelabError

Means = Literal["namespaces", "seccomp"]
Outcome = Literal["passed", "failed", "timeout", "memory", "killed"]


class SandboxError(RacelabError):
    """A program could not be confined, and was not run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use.

    Attributes:
        timeout_s: wall time, in seconds.
        cpu_s: seconds of CPU of one process.
        memory_mb: MiB of address space of one process, and MiB resident of all together.
        file_mb: MiB of one file; all files together hold eight times that (under `seccomp` looked at every 100 ms).
        processes: processes and threads at a time, the program's own included.
        output_bytes: of standard output and of standard error, each; what comes after is dropped.
    """

    timeout_s: float = 20.0
    cpu_s: int = 20
    memory_mb: int = 4096
    file_mb: int = 16
    processes: int = 32
    output_bytes: int = 65536


@dataclass(frozen=True, slots=True)
class CodeResult:
    """What became of one program.

    Attributes:
        passed: its last statement was reached, and its exit code is 0.
        outcome: `timeout`: wall time or CPU; `memory`: a MemoryError that it did not catch, or more resident than it
            may; `killed`: by a signal, or for too many processes or too much in its folder, which a
            last line of `stderr` then says; `failed`: any other end that is not `passed`.
        stdout: the first `output_bytes`, as UTF-8, malformed bytes replaced.
        stderr: the same.
        exit_code: None if it did not end by itself.
        seconds: wall time, start-up included.
    """

    passed: bool
    outcome: Outcome
    stdout: str
    stderr: str
    exit_code: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class SandboxKind:
    """How code is confined on this machine.

    Attributes:
        means: namespaces, or seccomp with Landlock.
        user: the run has a user id of its own, because racelab runs as root.
    """

    means: Means
    user: bool

    def __str__(self) -> str:
        """For a person."""
        how = "namespaces" if self.means == "namespaces" else "seccomp filter and Landlock"
        return f"{how}, a user id per program" if self.user else how
