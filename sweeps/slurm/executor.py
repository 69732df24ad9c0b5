"""A batch's sbatch script, and handing it to sbatch. The only module that knows submitit; import it inside functions.

submitit assembles the `#SBATCH` lines, calls sbatch and reads the job id. It pickles nothing here: the script starts
`racelab.sweeps.slurm.entry`, which finds all it needs in the launch's folder.

What a script does, in this order: enters the folder the launch was typed in, runs `launcher.setup` and stops at the
first of its lines that fails, puts the launch's copy of the code before everything else on PYTHONPATH, and starts one
task per node.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from submitit.core.utils import FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from racelab.configs.schema_launcher import SlurmLauncherConfig
from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.fsio import write_text_atomic
from racelab.sweeps.slurm import environment, snapshot
from racelab.sweeps.slurm.folder import LaunchFolder
from racelab.sweeps.slurm.model import Batch, Launch, job_name

ENTRY: Final = "racelab.sweeps.slurm.entry"
TIMEOUT_S: Final = 60
_NO_ANSWER: Final = (
    "unable to contact slurm controller",
    "socket timed out",
    "connection refused",
    "connection timed out",
    "communication connection failure",
    "communications connection failure",
    "zero bytes were transmitted",
    "transport endpoint",
    "backup controller",
    "in standby mode",
    "temporarily unable to accept",
    "resource temporarily unavailable",
    "protocol authentication error",
    "munge encode failed",
    "configuration source",
    "unable to process configuration",
)
"""What sbatch says, in small letters, when the request was not judged at all; any other words are a refusal."""

# The trap runs for the failed commands of the script itself, not for those inside a file that a line sources.
_STOP_AT_FAILURE: Final = (
    "racelab_setup() {",
    '    [ "$3" -gt 1 ] && return',
    '    echo "racelab: line $2 of the job script, from launcher.setup, failed with exit code $1:" >&2',
    '    sed -n "$2p" "$0" >&2',
    '    exit "$1"',
    "}",
    "trap 'racelab_setup $? $LINENO ${#BASH_SOURCE[@]}' ERR",
)
_TASK: Final = """
    trap '' TERM USR2
    exec >>"$1.$SLURM_PROCID.out" 2>&1
    cd -- "$2" || exit 1
    shift 2
    exec "$@"
"""
_CONTAINED_TASK: Final = """
    trap '' TERM USR2
    exec >>"$1.$SLURM_PROCID.out" 2>&1
    cd -- "$2" || exit 1
    export PYTHONPATH="$3${PYTHONPATH:+:$PYTHONPATH}"
    shift 3
    exec "$@"
"""
"""What a shell does on every node: the log of its rank, the folder, and the code once more, since what an image sets
beats what the job exported.

Signals are ignored until the entry listens for them: one that came before would end a job that can be requeued.

The log is not left to srun's --output: srun expands a pattern twice, here and on the node, by rules that differ, so
that no spelling of a folder with a per cent sign in its name is right in all versions.
"""


class _Executor(SlurmExecutor):
    """submitit's script and sbatch call around a command of ours."""

    def __init__(self, folder: Path, command: str) -> None:
        super().__init__(folder)
        self._command = command

    @classmethod
    def affinity(cls) -> int:
        """As on a cluster everywhere: a script can be written without Slurm."""
        return 2

    @property
    def _submitit_command_str(self) -> str:
        return self._command

    def text(self) -> str:
        """The whole script."""
        return self._make_submission_file_text(self._submitit_command_str, uid="")

    def ask(self, parameters: dict[str, Any], tasks: int) -> None:
        """Sets what is asked of Slurm, by submitit's names; several tasks make an array."""
        self.update_parameters(**self._convert_parameters(parameters))
        if tasks > 1:
            self.parameters["map_count"] = tasks

    def call(self, script: Path) -> str:
        """Runs sbatch and returns the job id; raises what `subprocess` does, FailedSubmissionError without an id."""
        done = subprocess.run(
            self._make_submission_command(script),
            check=True,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
        )
        line = re.search(r"^Submitted batch job \d+.*$", done.stdout, re.MULTILINE)
        return self._get_job_id_from_submission_command(line[0] if line else done.stdout)


def script_text(launch: Launch, batch: Batch, number: int, folder: Path, dependency: str = "") -> str:
    """The script for sbatch; equal arguments give equal text, as long as the user's SBATCH_ACCOUNT and the like are.

    Args:
        launch: without `code`, the place where the present code would be copied to is named.
        batch: one of its batches; nodes and GPUs are numbers.
        number: of the submission.
        folder: of the launch.
        dependency: as `afterok:12,afterany:13_4`; "" for none.

    Raises:
        ConfigError: a folder's name cannot be written in a job script.
    """
    code = launch.code or str(snapshot.place(Path(launch.root)))
    _refuse_names(launch, batch, folder, code)
    executor = _Executor(folder, _command(launch, batch, number, folder, code))
    executor.ask(_parameters(launch, batch, number, folder, dependency, code), len(batch.tasks))
    return executor.text()


def submit(launch: Launch, batch: Batch, number: int, folder: LaunchFolder, dependency: str = "") -> str:
    """Writes the script into the launch's folder and gives it to sbatch.

    Returns:
        Id of the job or array job.

    Raises:
        ConfigError: Slurm refuses it, in Slurm's words.
        RunFolderError: the script cannot be written.
        UnreachableError: no sbatch here, or no clear answer. There may be a job all the same: look for its name.
    """
    if not launch.code:
        raise ValueError("a launch is submitted with a copy of the code")
    script = folder.script(batch.name, number)
    write_text_atomic(script, script_text(launch, batch, number, folder.path, dependency))
    try:
        with environment.cleaned():
            return _Executor(folder.path, "").call(script)
    except FileNotFoundError as error:
        raise UnreachableError(
            "sbatch is not installed here; run this where sbatch is, or with launcher=inline"
        ) from error
    except OSError as error:
        raise UnreachableError(f"cannot run sbatch: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(
            f"sbatch gave no answer within {TIMEOUT_S} s for {script}; the job may be queued all the same: "
            "`racelab jobs` finds it by its name"
        ) from error
    except FailedSubmissionError as error:
        raise UnreachableError(
            f"sbatch took {script}, but its answer holds no job id; `racelab jobs` finds the job by its name"
        ) from error
    except subprocess.CalledProcessError as error:
        raise _failure(error, script) from error


def _failure(error: subprocess.CalledProcessError, script: Path) -> ConfigError | UnreachableError:
    words = _words(str(error.stderr)) or _words(str(error.stdout)) or "no word why"
    if error.returncode < 0:
        return UnreachableError(
            f"sbatch was killed by signal {-error.returncode} ({words}); the job may be queued all the same: "
            "`racelab jobs` finds it by its name"
        )
    if any(known in words.lower() for known in _NO_ANSWER):
        return UnreachableError(f"Slurm does not answer here: {words}; try again, or use launcher=inline")
    return ConfigError(
        f"sbatch refuses {script}: {words}; change the launcher's keys to what the cluster has"
    )


def _words(stderr: str) -> str:
    """The errors among what sbatch said, without its name before each; all of it if none is marked as an error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"sbatch: (error|fatal):", line)]
    return "; ".join(re.sub(r"^sbatch: (error: |fatal: )?", "", line) for line in errors or lines)


def _parameters(
    launch: Launch, batch: Batch, number: int, folder: Path, dependency: str, code: str
) -> dict[str, Any]:
    """What submitit takes; None leaves a line out."""
    asked = batch.launcher
    site = environment.site_options(os.environ)
    return {
        "name": job_name(launch, batch, number),
        "comment": _comment(launch, batch),
        "nodes": asked.nodes,
        "tasks_per_node": 1,
        "cpus_per_task": asked.cpus_per_task,
        "gpus_per_node": asked.gpus_per_node or None,
        **({} if asked.mem_gb is None else {"mem_gb": asked.mem_gb}),
        "timeout_min": asked.time_min,
        "partition": asked.partition or site.get("partition"),
        "account": asked.account or site.get("account"),
        "qos": asked.qos or site.get("qos"),
        "constraint": asked.constraint or site.get("constraint"),
        "nodelist": asked.nodelist,
        "exclude": asked.exclude,
        "exclusive": asked.exclusive or None,
        "wckey": site.get("wckey"),
        "dependency": dependency or None,
        "signal_delay_s": asked.signal_delay_s,
        "array_parallelism": asked.max_parallel or len(batch.tasks),
        "stderr_to_stdout": True,
        "setup": _before(launch, asked, code),
        "use_srun": False,  # submitit's srun line names log files of its own; ours is in the command
        "additional_parameters": {
            "output": _output(folder, batch),
            "chdir": launch.cwd,
            "signal": f"USR2@{asked.signal_delay_s}",  # submitit would take another from a variable
            "requeue" if asked.requeue else "no-requeue": True,
            **({"kill-on-invalid-dep": "yes"} if dependency else {}),
            **_reservation(asked.reservation or site.get("reservation")),
            **dict(_option(line) for line in asked.extra),
        },
    }


def _reservation(name: str | None) -> dict[str, str]:
    return {} if name is None else {"reservation": name}


def _option(line: str) -> tuple[str, str | bool]:
    """`--mail-type=END` -> (mail-type, END); an option without a value is True."""
    name, equals, value = line.removeprefix("--").partition("=")
    return name, value if equals else True


def _comment(launch: Launch, batch: Batch) -> str:
    """By which people know a job."""
    first = batch.tasks[0]
    if batch.is_array:
        what = "runs" if first.kind == "run" else "commands"
        return f"racelab {launch.name}, {len(batch.tasks)} {what}"
    return f"racelab run {first.run}" if first.kind == "run" else f"racelab {launch.name}, {batch.stage}"


def _output(folder: Path, batch: Batch) -> str:
    """Pattern for sbatch of the log that the batch shell shares with rank 0: `<batch>.<job>.0.out`."""
    job = "%A_%a" if batch.is_array else "%j"
    return f"{str(folder / 'log').replace('%', '%%')}/{batch.name}.{job}.0.out"


def _log(folder: Path, batch: Batch) -> str:
    """The same without `.0.out`, as a word of the script."""
    job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if batch.is_array else "$SLURM_JOB_ID"
    return shlex.quote(f"{folder / 'log' / batch.name}.") + job


def _before(launch: Launch, asked: SlurmLauncherConfig, code: str) -> list[str]:
    """The script's lines before the command."""
    cwd = shlex.quote(launch.cwd)
    # slurmd goes to /tmp with a word in the log if the folder is not there; a run must not start in the wrong place.
    lines = [
        f"cd -- {cwd} || {{",
        f"    echo racelab: ${{SLURMD_NODENAME:-$HOSTNAME}} has no folder {cwd}, where this was launched. >&2",
        "    echo racelab: launch from a folder that every node of the cluster sees. >&2",
        "    exit 1",
        "}",
    ]
    if asked.setup:
        lines += [*_STOP_AT_FAILURE, *asked.setup, "trap - ERR"]
    return [
        *lines,
        f"export PYTHONPATH={shlex.quote(code)}${{PYTHONPATH:+:$PYTHONPATH}}",
        "export PYTHONUNBUFFERED=1",
        f"export {environment.DEPTH_VARIABLE}={launch.depth + 1}",
    ]


def _command(launch: Launch, batch: Batch, number: int, folder: Path, code: str) -> str:
    """The srun line with the entry, one task per node."""
    asked = batch.launcher
    python = os.path.expanduser(asked.python) or sys.executable
    srun = [
        "srun",
        "--ntasks-per-node=1",
        f"--cpus-per-task={asked.cpus_per_task}",  # since 22.05 srun does not take it from sbatch
        "--kill-on-bad-exit=1",
    ]
    container = asked.container
    inside: list[str] = []
    if container.kind == "pyxis":
        srun += [
            f"--container-image={container.image}",
            f"--container-mounts={','.join(_mounts(launch, asked, code))}",
            f"--container-workdir={launch.cwd}",
        ]
    elif container.kind == "apptainer":
        gpus = ["--nv"] if asked.gpus_per_node else []
        binds = [f"--bind={mount}" for mount in _mounts(launch, asked, code)]
        inside = ["apptainer", "exec", *gpus, *binds, f"--pwd={launch.cwd}", container.image]
    contained = container.kind != "none"
    words = [
        shlex.join([*srun, *asked.srun]),
        *([shlex.join(inside)] if inside else []),
        f"sh -c {shlex.quote(_CONTAINED_TASK if contained else _TASK)} racelab",
        _log(folder, batch),
        shlex.join([launch.cwd, *([code] if contained else [])]),
        shlex.join([python, "-u", "-P", "-m", ENTRY, str(folder), batch.name, str(number)]),
    ]
    return " \\\n    ".join(words)


def _mounts(launch: Launch, asked: SlurmLauncherConfig, code: str) -> Sequence[str]:
    """FROM:TO of what a container must see, then the user's; what lies within one of them needs none."""
    needed: list[Path] = []
    for path in (Path(launch.root), Path(launch.cwd), Path(code)):
        if not any(path.is_relative_to(held) for held in needed):
            needed.append(path)
    return [*(f"{path}:{path}" for path in needed), *asked.container.mounts]


def _refuse_names(launch: Launch, batch: Batch, folder: Path, code: str) -> None:
    """A backslash in a log's path is an order to sbatch, a colon in PYTHONPATH ends an entry.

    Raises:
        ConfigError: a folder whose name cannot be passed on.
    """
    bad = dict.fromkeys([launch.root, launch.cwd, str(folder)], "\\\n\r")
    bad[code] = "\\\n\r:"
    if batch.launcher.container.kind != "none":
        bad = {path: signs + ":," for path, signs in bad.items()}
    for path, signs in bad.items():
        for sign in signs:
            if sign in path:
                raise ConfigError(
                    f"a job cannot use the folder {path!r}: {sign!r} in its name means something else to Slurm, "
                    "Python's path or the container; use a folder without it"
                )
