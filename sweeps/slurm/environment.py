"""What of the caller's environment reaches sbatch and the jobs, and how deep launches may nest.

sbatch reads options from variables, which beat the `#SBATCH` lines of a script, and it hands its whole environment to
the job, where srun reads options from variables again. Inside a job both are full of that job's own numbers:
SLURM_CPUS_PER_TASK, SLURM_MEM_PER_CPU, SLURM_ARRAY_TASK_ID, RANK. So none of them goes through.

The user's own SBATCH_ACCOUNT and the like, from a shell's start file or a site's module, are legitimate: on some
sites nothing runs without. They are taken as values of the launcher's keys that are empty (`site_options`), and
written into the script, where one can see them. As variables they would also beat an account that the launcher names.
Slurm itself sets none of these variables in a job, so they are the user's own inside of one too. Every other SBATCH_*
variable would change what a launch asks for behind its back (SBATCH_TIMELIMIT, SBATCH_ARRAY_INX, SBATCH_EXPORT) and
is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from racelab.experiments.errors import ConfigError

STRIPPED_PREFIXES: Final = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_",
    "SQUEUE_", "SACCT_", "SINFO_", "SCONTROL_", "SCANCEL_",  # formats and filters of what racelab calls itself
    "SUBMITIT_",
    "PMI", "OMPI_", "PRTE_", "MPI_LOCAL", "MV2_COMM_WORLD_", "PALS_",
    "TORCHELASTIC_",
    "RACELAB_FENCE",
)  # fmt: skip
"""Families of variables of a surrounding job, of its steps and ranks, and defaults of Slurm's commands."""
KEPT: Final = ("SLURM_CONF", "SLURM_JWT")
"""Where the cluster's configuration is, and who the user is: without them Slurm's commands find no controller, or are
refused by it, on some sites."""
MAX_DEPTH: Final = 2
"""Launches in a row: a person's, and one by a job of it."""
DEPTH_VARIABLE: Final = "RACELAB_LAUNCH_DEPTH"

_RANKS: Final = frozenset(
    f"{whose}{what}" for whose in ("", "LOCAL_", "GROUP_", "ROLE_", "NODE_") for what in ("RANK", "WORLD_SIZE")
) | {"ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}  # fmt: skip
_OF_A_PARENT: Final = frozenset({"RACELAB_PARENT_PID", "RACELAB_NODES_DIR", "RACELAB_DEBUG"})
_OF_OUR_JOB: Final = frozenset({"OMP_NUM_THREADS"})
"""What our own jobs set for what they start, from the cores of that job; elsewhere it is the user's own."""
_OF_A_JOB: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
        "GPU_DEVICE_ORDINAL", "RAY_ADDRESS", "RACELAB_SHIP",
    }
)  # fmt: skip
"""Right in a job, wrong in the jobs it submits; outside of a job they are the user's own."""
_SITE_OPTIONS: Final = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_WCKEY": "wckey",
}


def clean(present: Mapping[str, str]) -> dict[str, str]:
    """`present` without what belongs to a surrounding job or changes what Slurm's commands do.

    Devices and addresses that a job was given go only if `present` is that of a job.
    """
    in_job = "SLURM_JOB_ID" in present
    gone = _RANKS | _OF_A_PARENT | (_OF_A_JOB if in_job else frozenset())
    gone |= _OF_OUR_JOB if DEPTH_VARIABLE in present else frozenset()
    return {
        name: value
        for name, value in present.items()
        if name in KEPT or not (name in gone or name.startswith(STRIPPED_PREFIXES))
    }


@contextmanager
def cleaned() -> Iterator[None]:
    """`os.environ` is clean inside; afterwards what was taken away is back. Not for two threads at once."""
    before = dict(os.environ)
    kept = clean(before)
    taken = {name: value for name, value in before.items() if name not in kept}
    for name in taken:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(taken)


def site_options(present: Mapping[str, str]) -> dict[str, str]:
    """Option of sbatch -> the value that the user's own SBATCH_* variable gives it, where a launcher gives none."""
    return {option: present[name] for name, option in _SITE_OPTIONS.items() if present.get(name)}


def depth(present: Mapping[str, str]) -> int:
    """How many launches are above a process with this environment; 0 in a person's shell.

    Raises:
        ConfigError: the variable is no number.
    """
    value = present.get(DEPTH_VARIABLE, "0")
    if not value.isdecimal():
        raise ConfigError(f"{DEPTH_VARIABLE}={value!r} is no number; unset it, racelab sets it in its jobs")
    return int(value)


def refuse_nested(present: Mapping[str, str]) -> None:
    """No launch from inside an array job, whose tasks would each submit the same, and none of jobs that go on so.

    Raises:
        ConfigError: with what to do.
    """
    array = [name for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID") if name in present]
    if array:
        raise ConfigError(
            f"this is a task of an array job ({array[0]}={present[array[0]]}), and each of its tasks would submit "
            "the same jobs again; submit from a login node or from a plain job"
        )
    above = depth(present)
    if above >= MAX_DEPTH:
        raise ConfigError(
            f"{above} launches are above this one ({DEPTH_VARIABLE}), at most {MAX_DEPTH - 1} may be: jobs would go "
            "on submitting jobs; use launcher=inline here, or submit from a login node"
        )
