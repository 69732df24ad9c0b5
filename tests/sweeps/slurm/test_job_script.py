"""What a job script does when a shell runs it; srun and apptainer are small programs on PATH: the outside world."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from racelab.sweeps.slurm.executor import script_text

from .launches import UID, first_on_path, make_batch, make_launch, program

SRUN = """
while [[ "$1" == --* ]]; do shift; done
for rank in $(seq 0 $((${RANKS:-1} - 1))); do SLURM_PROCID=$rank "$@" || code=$?; done
exit ${code:-0}
"""
"""Runs the command once per rank on this machine."""
STAND_IN = (
    'echo "out: $*"; echo "in $PWD, path $PYTHONPATH, depth $RACELAB_LAUNCH_DEPTH" >&2; exit ${CODE:-0}'
)
"""In the place of Python."""


class Job:
    """A folder in which a job script runs as slurmd would run it."""

    def __init__(self, tools: Path, root: Path) -> None:
        program(tools, "srun", SRUN)
        self.python = program(tools, "python-for-jobs", STAND_IN)
        self.root = root
        self.log = root / ".launches" / UID / "log"
        self.log.mkdir(parents=True)

    def run(self, *words: str, runs: int = 1, cwd: Path | None = None, **variables: str) -> tuple[int, str]:
        """Exit code, and what the script itself printed."""
        batch = make_batch(f"launcher.python='{self.python}'", *words, runs=runs)
        launch = make_launch(self.root, batch, cwd=cwd)
        script = self.log.parent / "script.sh"
        script.write_text(script_text(launch, batch, 1, self.log.parent))
        done = subprocess.run(
            ["bash", str(script)],
            env={"SLURM_JOB_ID": "7", "PATH": os.environ["PATH"], **variables},
            cwd="/", capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def logs(self) -> dict[str, str]:
        """Name of each log file -> content."""
        return {path.name: path.read_text() for path in self.log.iterdir()}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return first_on_path(tmp_path / "tools", monkeypatch)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "with space",
        "50%",
        "p%j %t %%",
        "it's",
        'a"b',
        "$HOME",
        "a`date`b",
        "a#b",
        "a;b&c",
        "über",
        "-x",
        "*",
    ],
)
def test_any_folder_will_do(tools: Path, tmp_path: Path, name: str) -> None:
    root = tmp_path / name
    job = Job(tools, root)
    assert job.run(PYTHONPATH="mine:yours") == (0, "")
    assert job.logs() == {
        "cells.7.0.out": f"out: -u -P -m racelab.sweeps.slurm.entry {root}/.launches/{UID} cells 1\n"
        f"in {root}, path {root}/code:mine:yours, depth 1\n"
    }


def test_every_rank_and_every_task_of_an_array_has_its_log(tools: Path, tmp_path: Path) -> None:
    job = Job(tools, tmp_path / "runs")
    array = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7"}
    for task in ("0", "1"):
        assert job.run(runs=2, **array, SLURM_ARRAY_TASK_ID=task, RANKS="2")[0] == 0
    assert job.run(runs=2, **array, SLURM_ARRAY_TASK_ID="0", RANKS="1")[0] == 0  # requeued
    lines = {name: text.count("out: ") for name, text in job.logs().items()}
    assert lines == {
        "cells.7_0.0.out": 2,
        "cells.7_0.1.out": 1,
        "cells.7_1.0.out": 1,
        "cells.7_1.1.out": 1,
    }


def test_the_jobs_exit_code_is_the_commands(tools: Path, tmp_path: Path) -> None:
    assert Job(tools, tmp_path / "runs").run(CODE="3")[0] == 3


def test_a_node_without_the_folder_says_so_and_starts_nothing(tools: Path, tmp_path: Path) -> None:
    job = Job(tools, tmp_path / "runs")
    setup = "launcher.setup=['echo in the wrong place']"
    code, said = job.run(setup, cwd=tmp_path / "gone away", SLURMD_NODENAME="n3")
    assert code == 1
    assert f"racelab: n3 has no folder {tmp_path}/gone away, where this was launched." in said
    assert "wrong place" not in said
    assert job.logs() == {}


def test_what_setup_sets_is_there_and_does_not_beat_the_code(tools: Path, tmp_path: Path) -> None:
    job = Job(tools, tmp_path / "runs")
    setup = "launcher.setup=['export PYTHONPATH=modules CODE=4']"
    assert job.run(setup) == (4, "")
    assert f"path {tmp_path}/runs/code:modules," in job.logs()["cells.7.0.out"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("module load nothing-of-that-name", 127),
        ("(exit 9)", 9),
        ("gone() { true; return 5; }; gone", 5),
        ("source not-there.sh", 1),
        ("source ends-badly.sh", 6),
        ("if true; then false; fi", 1),
    ],
)
def test_a_setup_line_that_fails_is_named_and_nothing_is_started(
    tools: Path, tmp_path: Path, line: str, code: int
) -> None:
    job = Job(tools, tmp_path / "runs")
    (tmp_path / "runs" / "ends-badly.sh").write_text("false\ntrue\nreturn 6\n")
    got, said = job.run(f"launcher.setup=['echo before','{line}','echo after']")
    assert got == code
    assert f"from launcher.setup, failed with exit code {code}:\n{line}\n" in said
    assert said.startswith("before\n")
    assert "after" not in said
    assert job.logs() == {}


@pytest.mark.parametrize(
    "line",
    [
        "false || true",
        "if false; then true; fi",
        "source ends-well.sh",
        "! true || true",
        "until true; do :; done",
    ],
)
def test_what_only_fails_on_the_way_is_no_failure(tools: Path, tmp_path: Path, line: str) -> None:
    job = Job(tools, tmp_path / "runs")
    (tmp_path / "runs" / "ends-well.sh").write_text("false\nhelp() { false; true; }\nhelp\n")
    assert job.run(f"launcher.setup=['{line}']") == (0, "")
    assert list(job.logs()) == ["cells.7.0.out"]


def test_setup_may_span_lines(tools: Path, tmp_path: Path) -> None:
    job = Job(tools, tmp_path / "runs")
    lines = "launcher.setup=['case x in','x) export CODE=2 ;;','esac','for i in 1 2; do','echo $i','done']"
    assert job.run(lines) == (2, "1\n2\n")


def test_an_unfinished_setup_starts_nothing(tools: Path, tmp_path: Path) -> None:
    job = Job(tools, tmp_path / "runs")
    code, said = job.run("launcher.setup=['if true; then']")
    assert code == 2
    assert "syntax error" in said
    assert job.logs() == {}


@pytest.mark.parametrize("kind", ["apptainer", "pyxis"])
def test_the_code_wins_over_what_an_image_sets(tools: Path, tmp_path: Path, kind: str) -> None:
    job = Job(tools, tmp_path / "my runs")
    shell = program(tools, "in-image", 'PYTHONPATH=/image exec "$@"')
    program(
        tools,
        "apptainer",
        f'while [[ "$1" != lab.sif ]]; do shift; done; shift; exec {shlex.quote(str(shell))} "$@"',
    )
    if kind == "pyxis":
        program(tools, "srun", f'while [[ "$1" == --* ]]; do shift; done\nSLURM_PROCID=0 exec {shell} "$@"')
    words = (f"launcher.container.kind={kind}", "launcher.container.image=lab.sif")
    assert job.run(*words) == (0, "")
    assert f"path {tmp_path}/my runs/code:/image, depth 1" in job.logs()["cells.7.0.out"]
