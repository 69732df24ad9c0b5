"""The job script word by word, and what sbatch's answers mean. sbatch is a small program on PATH: the outside world."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.sweeps.slurm import executor
from racelab.sweeps.slurm.executor import script_text, submit
from racelab.sweeps.slurm.folder import LaunchFolder
from racelab.sweeps.slurm.model import Batch, Launch, Task

from .launches import UID, first_on_path, make_batch, make_launch, program

PYTHON = "launcher.python=/usr/bin/python3"
ROOT = Path("/data/my runs")
FOLDER = ROOT / ".launches" / UID

PLAIN = """\
#!/bin/bash

# Parameters
#SBATCH --chdir='/data/my runs'
#SBATCH --comment='racelab run run-0'
#SBATCH --cpus-per-task=2
#SBATCH --job-name=demo.20260102T030405-0a1b2c.cells.1
#SBATCH --mem=6GB
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/data/my runs/.launches/20260102T030405-0a1b2c/log/cells.%j.0.out'
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=240

# setup
cd -- '/data/my runs' || {
    echo racelab: ${SLURMD_NODENAME:-$HOSTNAME} has no folder '/data/my runs', where this was launched. >&2
    echo racelab: launch from a folder that every node of the cluster sees. >&2
    exit 1
}
export PYTHONPATH='/data/my runs/code'${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
export RACELAB_LAUNCH_DEPTH=1

# command
export SUBMITIT_EXECUTOR=slurm
srun --ntasks-per-node=1 --cpus-per-task=2 --kill-on-bad-exit=1 \\
    sh -c '
    trap '"'"''"'"' TERM USR2
    exec >>"$1.$SLURM_PROCID.out" 2>&1
    cd -- "$2" || exit 1
    shift 2
    exec "$@"
' racelab \\
    '/data/my runs/.launches/20260102T030405-0a1b2c/log/cells.'$SLURM_JOB_ID \\
    '/data/my runs' \\
    /usr/bin/python3 -u -P -m racelab.sweeps.slurm.entry '/data/my runs/.launches/20260102T030405-0a1b2c' cells 1
"""
EVERYTHING = """\
#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --array=0-2%2
#SBATCH --chdir=/home
#SBATCH --comment='racelab demo, 3 runs'
#SBATCH --constraint='a100&nvlink'
#SBATCH --cpus-per-task=16
#SBATCH --dependency=afterok:12:13
#SBATCH --exclude=bad1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --hold
#SBATCH --job-name=demo.20260102T030405-0a1b2c.cells.4
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --mail-type=END
#SBATCH --mem=512MB
#SBATCH --no-requeue
#SBATCH --nodelist='n[1-4]'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/data/50%%/.launches/20260102T030405-0a1b2c/log/cells.%A_%a.0.out
#SBATCH --partition=gpu
#SBATCH --qos=high
#SBATCH --reservation=mine
#SBATCH --signal=USR2@60
#SBATCH --time=30

# setup
cd -- /home || {
    echo racelab: ${SLURMD_NODENAME:-$HOSTNAME} has no folder /home, where this was launched. >&2
    echo racelab: launch from a folder that every node of the cluster sees. >&2
    exit 1
}
racelab_setup() {
    [ "$3" -gt 1 ] && return
    echo "racelab: line $2 of the job script, from launcher.setup, failed with exit code $1:" >&2
    sed -n "$2p" "$0" >&2
    exit "$1"
}
trap 'racelab_setup $? $LINENO ${#BASH_SOURCE[@]}' ERR
module load cuda
export A="1 2"
trap - ERR
export PYTHONPATH=/data/50%/code${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
export RACELAB_LAUNCH_DEPTH=2

# command
export SUBMITIT_EXECUTOR=slurm
srun --ntasks-per-node=1 --cpus-per-task=16 --kill-on-bad-exit=1 --cpu-bind=none '--label=a b' \\
    sh -c '
    trap '"'"''"'"' TERM USR2
    exec >>"$1.$SLURM_PROCID.out" 2>&1
    cd -- "$2" || exit 1
    shift 2
    exec "$@"
' racelab \\
    /data/50%/.launches/20260102T030405-0a1b2c/log/cells.${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID \\
    /home \\
    /usr/bin/python3 -u -P -m racelab.sweeps.slurm.entry /data/50%/.launches/20260102T030405-0a1b2c cells 4
"""
APPTAINER = """\
srun --ntasks-per-node=1 --cpus-per-task=2 --kill-on-bad-exit=1 \\
    apptainer exec --nv '--bind=/data/my runs:/data/my runs' --bind=/scratch:/scratch '--pwd=/data/my runs' lab.sif \\
    sh -c '
    trap '"'"''"'"' TERM USR2
    exec >>"$1.$SLURM_PROCID.out" 2>&1
    cd -- "$2" || exit 1
    export PYTHONPATH="$3${PYTHONPATH:+:$PYTHONPATH}"
    shift 3
    exec "$@"
' racelab \\
    '/data/my runs/.launches/20260102T030405-0a1b2c/log/cells.'$SLURM_JOB_ID \\
    '/data/my runs' '/data/my runs/code' \\
    /usr/bin/python3 -u -P -m racelab.sweeps.slurm.entry '/data/my runs/.launches/20260102T030405-0a1b2c' cells 1
"""
PYXIS = """\
srun --ntasks-per-node=1 --cpus-per-task=2 --kill-on-bad-exit=1 '--container-image=nvcr.io#lab/torch:1' \\
'--container-mounts=/data/my runs:/data/my runs,/elsewhere:/elsewhere' --container-workdir=/elsewhere \\
    sh -c '
    trap '"'"''"'"' TERM USR2
    exec >>"$1.$SLURM_PROCID.out" 2>&1
    cd -- "$2" || exit 1
    export PYTHONPATH="$3${PYTHONPATH:+:$PYTHONPATH}"
    shift 3
    exec "$@"
' racelab \\
    '/data/my runs/.launches/20260102T030405-0a1b2c/log/cells.'$SLURM_JOB_ID \\
    /elsewhere '/data/my runs/code' \\
    /usr/bin/python3 -u -P -m racelab.sweeps.slurm.entry '/data/my runs/.launches/20260102T030405-0a1b2c' cells 1
""".replace(" \\\n'--container-mounts", " '--container-mounts")


@pytest.fixture(autouse=True)
def no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """No account of the machine's own, no job around the tests."""
    for name in list(os.environ):
        if name.startswith(("SBATCH_", "SLURM_", "SUBMITIT_")):
            monkeypatch.delenv(name)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return first_on_path(tmp_path / "tools", monkeypatch)


def is_valid(script: str) -> bool:
    """Whether bash can read it."""
    return subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def command(script: str) -> str:
    """The part of a script from its srun on."""
    return script[script.index("\nsrun ") + 1 :]


def option(script: str, name: str) -> str | None:
    """The value that sbatch reads for an option; None without one."""
    prefix = f"#SBATCH --{name}="
    values = [line.removeprefix(prefix) for line in script.splitlines() if line.startswith(prefix)]
    assert len(values) < 2, values
    return shlex.split(values[0])[0] if values else None


def plain(*words: str, root: Path = ROOT, **asked: object) -> str:
    """The script of a launch with one run."""
    launch = make_launch(root, make_batch(PYTHON, *words, **asked))
    return script_text(launch, launch.batches[0], 1, root / ".launches" / UID)


class TestText:
    def test_one_run(self) -> None:
        assert plain() == PLAIN
        assert is_valid(PLAIN)

    def test_an_array_with_every_option(self) -> None:
        batch = make_batch(
            PYTHON, "launcher.account=physics", "launcher.constraint='a100&nvlink'", "launcher.cpus_per_task=16",
            "launcher.exclude=bad1", "launcher.exclusive=true", "launcher.extra=['--mail-type=END','--hold']",
            "launcher.max_parallel=2", "launcher.mem_gb=0.5", "launcher.nodelist='n[1-4]'", "launcher.partition=gpu",
            "launcher.qos=high", "launcher.requeue=false", "launcher.reservation=mine", "launcher.signal_delay_s=60",
            "launcher.setup=['module load cuda','export A=\"1 2\"']", "launcher.time_min=30",
            "launcher.srun=['--cpu-bind=none','--label=a b']", runs=3, nodes=2, gpus_per_node=8,
        )  # fmt: skip
        root = Path("/data/50%")
        launch = make_launch(root, batch, cwd=Path("/home"), depth=1)
        assert script_text(launch, batch, 4, root / ".launches" / UID, "afterok:12:13") == EVERYTHING
        assert is_valid(EVERYTHING)

    def test_apptainer(self) -> None:
        script = plain(
            "launcher.container.kind=apptainer", "launcher.container.image=lab.sif",
            "launcher.container.mounts=['/scratch:/scratch']", gpus_per_node=1,
        )  # fmt: skip
        assert command(script) == APPTAINER
        assert is_valid(script)
        without = plain("launcher.container.kind=apptainer", "launcher.container.image=lab.sif")
        assert "--nv" not in without

    def test_pyxis_mounts_the_folder_of_the_launch_if_it_is_elsewhere(self) -> None:
        batch = make_batch(
            PYTHON, "launcher.container.kind=pyxis", "launcher.container.image='nvcr.io#lab/torch:1'"
        )
        launch = make_launch(ROOT, batch, cwd=Path("/elsewhere"))
        script = script_text(launch, batch, 1, FOLDER)
        assert command(script) == PYXIS
        assert is_valid(script)

    def test_neither_the_order_of_calls_nor_the_machine_changes_a_script(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plain("launcher.mem_gb=null", "launcher.partition=gpu")
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", "7")
        monkeypatch.setenv("PATH", "/nonexistent")  # no srun, no sbatch
        assert plain() == PLAIN

    def test_submitits_own_variable_for_the_signal_changes_nothing(self) -> None:
        code = (
            "from pathlib import Path; from launches import make_launch; from racelab.sweeps.slurm import executor\n"
            "launch = make_launch(Path('/data'))\n"
            "print(executor.script_text(launch, launch.batches[0], 1, Path('/data')))"
        )
        done = subprocess.run(  # submitit reads the variable when it is imported
            [sys.executable, "-c", code],
            env={**os.environ, "SUBMITIT_PREEMPT_SIGNAL": "USR1"},
            cwd=Path(__file__).parent, check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert option(done.stdout, "signal") == "USR2@120"

    def test_a_command_is_named_by_its_stage(self) -> None:
        tasks = [Task("command", words=("report",), title="report"), Task("command", words=("eval",))]
        one, two = make_batch(stage="report", tasks=tasks[:1]), make_batch(stage="report", tasks=tasks)
        launch = make_launch(ROOT, one, two)
        assert option(script_text(launch, one, 1, FOLDER), "comment") == "racelab demo, report"
        assert option(script_text(launch, two, 1, FOLDER), "comment") == "racelab demo, 2 commands"

    def test_without_memory_or_a_limit_of_parallel_jobs_slurm_decides(self) -> None:
        batch = make_batch(PYTHON, "launcher.mem_gb=null", runs=5)
        script = script_text(make_launch(ROOT, batch), batch, 1, FOLDER)
        assert option(script, "mem") is None
        assert option(script, "array") == "0-4%5"

    def test_the_users_account_stands_in_for_one_that_the_launcher_leaves_open(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("ACCOUNT", "PARTITION", "QOS", "RESERVATION", "CONSTRAINT", "WCKEY"):
            monkeypatch.setenv(f"SBATCH_{name}", f"site-{name.lower()}")
        monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
        script = plain("launcher.partition=gpu", "launcher.reservation=mine")
        found = {
            name: option(script, name) for name in ("account", "partition", "qos", "reservation", "time")
        }
        assert found == {
            "account": "site-account", "partition": "gpu", "qos": "site-qos", "reservation": "mine", "time": "240",
        }  # fmt: skip
        assert (option(script, "constraint"), option(script, "wckey")) == ("site-constraint", "site-wckey")

    def test_before_the_code_is_copied_its_place_is_named(self, tmp_path: Path) -> None:
        launch = replace(make_launch(tmp_path), code="")
        script = script_text(launch, launch.batches[0], 1, tmp_path / ".launches" / UID)
        line = next(line for line in script.splitlines() if line.startswith("export PYTHONPATH="))
        assert line.startswith(f"export PYTHONPATH={tmp_path}/.launches/code/")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("name", ["a\\b", "a\nb", "a:b"])
    def test_a_folder_that_slurm_or_python_would_misread_is_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ConfigError, match=r"a job cannot use the folder .*use a folder without it"):
            plain(root=tmp_path / name)

    @pytest.mark.parametrize("name", ["a:b", "a,b"])
    def test_so_is_one_that_a_container_would(self, name: str) -> None:
        words = ("launcher.container.kind=apptainer", "launcher.container.image=lab.sif")
        batch = make_batch(*words)
        launch = make_launch(ROOT, batch, cwd=Path("/home") / name)
        with pytest.raises(ConfigError, match=f"a job cannot use the folder '/home/{name}'"):
            script_text(launch, batch, 1, FOLDER)
        free = make_batch()
        assert script_text(make_launch(ROOT, free, cwd=Path("/home") / name), free, 1, FOLDER) != ""


SBATCH = """\
env > "$SEEN/environment"
printf '%s\\n' "$@" > "$SEEN/words"
cat > "$SEEN/stdin"
"""


class Desk:
    """A launch with a folder, and an sbatch that answers as told."""

    def __init__(self, tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = tmp_path / "seen"
        self.seen.mkdir()
        monkeypatch.setenv("SEEN", str(self.seen))
        self.tools = tools
        self.launch: Launch = make_launch(tmp_path / "my runs", make_batch(PYTHON, runs=2))
        self.folder = LaunchFolder.create(self.launch)

    @property
    def batch(self) -> Batch:
        return self.launch.batches[0]

    def submit(self, answer: str, dependency: str = "") -> str:
        program(self.tools, "sbatch", SBATCH + answer)
        return submit(self.launch, self.batch, 2, self.folder, dependency)


@pytest.fixture
def desk(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tools, tmp_path, monkeypatch)


class TestSubmit:
    def test_sbatch_gets_the_script_that_stays_in_the_launchs_folder(self, desk: Desk) -> None:
        assert desk.submit("echo Submitted batch job 4711", "afterany:3") == "4711"
        script = desk.folder.path / "scripts" / "cells.2.sh"
        assert (desk.seen / "words").read_text() == f"{script}\n"
        assert script.read_text() == script_text(desk.launch, desk.batch, 2, desk.folder.path, "afterany:3")
        left = [path.name for path in desk.folder.path.rglob("*") if path.is_file()]
        assert sorted(left) == ["cells.2.sh", "launch.json", "submissions.json"]

    @pytest.mark.parametrize(
        "answer",
        [
            "Submitted batch job 12 on cluster x",
            "Submitted batch job 12",
            "Welcome, job 1 of the day is waiting for you\\nSubmitted batch job 12\\nBye, job 3",
        ],
    )
    def test_the_job_id_is_found_in_the_answer(self, desk: Desk, answer: str) -> None:
        assert desk.submit(f"printf '{answer}\\n'; echo 'sbatch: job 99 is large' >&2") == "12"

    def test_nothing_of_a_surrounding_job_reaches_sbatch(
        self, desk: Desk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in (
            "SLURM_CPUS_PER_TASK",
            "SLURM_CONF",
            "SBATCH_TIMELIMIT",
            "SBATCH_ACCOUNT",
            "RANK",
            "MINE",
        ):
            monkeypatch.setenv(name, "1")
        desk.submit("echo Submitted batch job 12")
        seen = {line.partition("=")[0] for line in (desk.seen / "environment").read_text().splitlines()}
        assert seen & {"SLURM_CPUS_PER_TASK", "SBATCH_TIMELIMIT", "SBATCH_ACCOUNT", "RANK"} == set()
        assert seen >= {"SLURM_CONF", "MINE", "PATH"}
        assert os.environ["SLURM_CPUS_PER_TASK"] == "1"
        assert option((desk.folder.path / "scripts" / "cells.2.sh").read_text(), "account") == "1"

    def test_a_refusal_is_told_in_slurms_words(self, desk: Desk) -> None:
        answer = (
            "echo 'sbatch: lua: hello' >&2; echo 'sbatch: error: invalid partition specified: nope' >&2; "
            "echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2; exit 1"
        )
        with pytest.raises(ConfigError) as caught:
            desk.submit(answer)
        assert str(caught.value) == (
            f"sbatch refuses {desk.folder.path}/scripts/cells.2.sh: invalid partition specified: nope; Batch job "
            "submission failed: Invalid partition name specified; change the launcher's keys to what the cluster has"
        )

    @pytest.mark.parametrize(("answer", "words"), [("echo no thanks", "no thanks"), ("true", "no word why")])
    def test_a_refusal_without_an_error_line_is_told_too(self, desk: Desk, answer: str, words: str) -> None:
        with pytest.raises(ConfigError, match=f": {words}; change"):
            desk.submit(f"{answer}; exit 1")

    @pytest.mark.parametrize(
        "words",
        [
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
            "sbatch: error: Batch job submission failed: Protocol authentication error",
            "sbatch: fatal: Could not establish a configuration source",
            "sbatch: fatal: Unable to process configuration file",
            "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
        ],
    )
    def test_a_controller_that_does_not_answer_is_no_refusal(self, desk: Desk, words: str) -> None:
        with pytest.raises(
            UnreachableError, match=r"Slurm does not answer here: .*; try again, or use launcher=inline"
        ):
            desk.submit(f"echo {shlex.quote(words)} >&2; exit 1")

    def test_an_answer_without_a_job_id_may_still_be_a_job(self, desk: Desk) -> None:
        with pytest.raises(
            UnreachableError, match="holds no job id; `racelab jobs` finds the job by its name"
        ):
            desk.submit("echo Thank you")

    def test_so_may_an_sbatch_that_was_killed(self, desk: Desk) -> None:
        with pytest.raises(UnreachableError, match=r"killed by signal 9 .*may be queued all the same"):
            desk.submit("kill -KILL $$")

    def test_so_may_one_that_hangs(self, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(executor, "TIMEOUT_S", 0.5)
        with pytest.raises(UnreachableError, match=r"no answer within 0.5 s .*may be queued all the same"):
            desk.submit("exec sleep 30")

    def test_without_sbatch_the_mend_is_named(self, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(desk.tools))
        with pytest.raises(
            UnreachableError, match="sbatch is not installed here; run this where sbatch is, or with"
        ):
            submit(desk.launch, desk.batch, 1, desk.folder)

    def test_an_sbatch_that_cannot_be_run_is_named(self, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
        (desk.tools / "sbatch").write_text("no program")
        monkeypatch.setenv("PATH", str(desk.tools))
        with pytest.raises(UnreachableError, match="cannot run sbatch: Permission denied"):
            submit(desk.launch, desk.batch, 1, desk.folder)

    def test_a_launch_without_its_code_is_not_submitted(self, desk: Desk) -> None:
        with pytest.raises(ValueError, match="copy of the code"):
            submit(replace(desk.launch, code=""), desk.batch, 1, desk.folder)
