"""Whose variables reach sbatch and the jobs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from racelab.experiments.errors import ConfigError
from racelab.sweeps.slurm.environment import (
    DEPTH_VARIABLE,
    clean,
    cleaned,
    depth,
    refuse_nested,
    site_options,
)

OF_A_JOB = (
    "SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_CPU", "SLURM_ARRAY_TASK_ID", "SLURMD_NODENAME",
    "SRUN_CPUS_PER_TASK", "SALLOC_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_PARTITION", "SUBMITIT_EXECUTOR",
    "PMI_RANK", "PMI2_SIZE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_RANK",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_WORLD_SIZE", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "RACELAB_FENCE", "RACELAB_FENCE_RUN", "RACELAB_PARENT_PID",
    "RACELAB_NODES_DIR", "RACELAB_DEBUG",
    "SQUEUE_FORMAT", "SACCT_FORMAT", "SCANCEL_INTERACTIVE", "SLURM_TIME_FORMAT",
)  # fmt: skip
ANYBODYS = (
    "SLURM_CONF", "PATH", "PYTHONPATH", "HOME", "RANKING", "MY_RANK", "XMASTER_ADDR", "RACELAB_HOME", DEPTH_VARIABLE,
    "SLURMISH", "MLFLOW_TRACKING_URI",
)  # fmt: skip
OF_ITS_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "RAY_ADDRESS", "RACELAB_SHIP")


@pytest.mark.parametrize("name", OF_A_JOB)
def test_what_a_job_leaves_behind_goes(name: str) -> None:
    assert clean({name: "1", "HOME": "here"}) == {"HOME": "here"}


@pytest.mark.parametrize("name", ANYBODYS)
def test_everything_else_stays(name: str) -> None:
    assert clean({name: "1", "SLURM_JOB_ID": "7"}) == {name: "1"}


@pytest.mark.parametrize("name", OF_ITS_DEVICES)
def test_devices_are_a_persons_own_outside_of_a_job_only(name: str) -> None:
    assert clean({name: "0"}) == {name: "0"}
    assert clean({name: "0", "SLURM_JOB_ID": "7"}) == {}


def test_the_number_of_threads_is_a_persons_own_unless_a_job_of_ours_set_it() -> None:
    there = {"OMP_NUM_THREADS": "8"}
    assert clean(there) == there
    assert clean({**there, "SLURM_JOB_ID": "7"}) == there
    assert clean({**there, "SLURM_JOB_ID": "7", DEPTH_VARIABLE: "1"}) == {DEPTH_VARIABLE: "1"}


def test_a_child_sees_the_clean_environment_and_afterwards_all_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-9")
    monkeypatch.setenv("SLURM_CONF", "slurm.conf")
    before = dict(os.environ)
    look = "import os; print(*sorted(name for name in os.environ if name.startswith(('SLURM_', 'SBATCH_'))))"
    with cleaned():
        seen = subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True).stdout
    assert seen.split() == ["SLURM_CONF"]
    assert dict(os.environ) == before


def test_what_was_taken_is_back_after_an_error_and_what_was_set_meanwhile_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.delenv("NEW_ONE", raising=False)

    def fails() -> None:
        with cleaned():
            assert "SLURM_NTASKS" not in os.environ
            monkeypatch.setenv("NEW_ONE", "1")
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fails()
    assert os.environ["SLURM_NTASKS"] == "4"
    assert os.environ["NEW_ONE"] == "1"


def test_the_users_own_account_is_taken_as_the_launchers_and_a_limit_is_not() -> None:
    present = {
        "SBATCH_ACCOUNT": "physics", "SBATCH_PARTITION": "long", "SBATCH_QOS": "", "SBATCH_TIMELIMIT": "1",
        "SBATCH_WCKEY": "w",
    }  # fmt: skip
    assert site_options(present) == {"account": "physics", "partition": "long", "wckey": "w"}
    assert site_options({}) == {}


def test_depth_is_what_the_job_script_says() -> None:
    assert depth({}) == 0
    assert depth({DEPTH_VARIABLE: "1"}) == 1


@pytest.mark.parametrize("value", ["", "-1", "one", "1.5"])
def test_a_depth_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"{DEPTH_VARIABLE}='{value}' is no number; unset it"):
        depth({DEPTH_VARIABLE: value})


@pytest.mark.parametrize(
    "present",
    [{}, {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", DEPTH_VARIABLE: "1"}, {DEPTH_VARIABLE: "0"}],
)
def test_a_person_and_a_plain_job_may_submit(present: dict[str, str]) -> None:
    refuse_nested(present)


@pytest.mark.parametrize("name", ["SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"])
def test_an_array_job_may_not(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"task of an array job \({name}=0\).*submit from a login node"):
        refuse_nested({"SLURM_JOB_ID": "7", name: "0"})


@pytest.mark.parametrize("above", ["2", "3", "10"])
def test_a_job_of_a_job_may_not(above: str) -> None:
    with pytest.raises(ConfigError, match=rf"{above} launches are above this one .*launcher=inline"):
        refuse_nested({DEPTH_VARIABLE: above})
