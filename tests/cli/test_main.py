"""Help, versions, errors, exit codes, and what may be imported."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from racelab.cli import main as cli
from racelab.experiments import errors

HEAVY = ("torch", "mlflow", "ray", "vllm", "verl", "matplotlib", "transformers", "pandas", "pyarrow", "hydra")
NAMES = tuple(
    f"racelab.cli.{name}" for name in ("main", "words", "commands_eval", "commands_rlds", "commands_slurm")
)
"""Modules that hold names and options of commands, and nothing that they do."""
Call = Callable[..., Any]
COMMANDS = (
    "train",
    "ablate",
    "baseline",
    "sweep",
    "task",
    "serve",
    "runs",
    "show",
    "replay",
    "sync",
    "ui",
    "doctor",
    "config",
    "jobs",
    "logs",
    "cancel",
    "resume",
    "launch",
    "eval",
    "compare",
)


def loaded(words: str) -> list[str]:
    """Which heavy or racelab.cli modules a command line imports."""
    code = (
        "import sys, json\n"
        "from racelab.cli.main import _main\n"
        f"_main({words.split()!r})\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        f"own = [m for m in sys.modules if m.startswith('racelab.cli.') and m not in {NAMES!r}]\n"
        "print('\\n' + json.dumps(heavy + own))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(
    "words", ["--help", "", "train --help", "config --help", "config show -h", "--version", "trian"]
)
def test_help_and_usage_errors_import_no_command_and_nothing_heavy(words: str) -> None:
    assert loaded(words) == []


def test_a_command_imports_only_what_it_needs() -> None:
    found = loaded("config check")
    assert "hydra" in found
    assert not {"torch", "mlflow", "transformers", "pandas", "pyarrow"} & set(found)


def test_help_takes_a_small_share_of_what_importing_hydra_and_mlflow_takes() -> None:
    def seconds(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    help_s = min(seconds("from racelab.cli.main import _main; _main(['--help'])") for _ in range(3))
    bare_s = min(seconds("pass") for _ in range(3))
    heavy_s = seconds("import mlflow.tracking, hydra")
    assert help_s - bare_s < 0.25 * (heavy_s - bare_s)


def test_help_names_every_command_and_each_has_a_body_that_can_be_imported(command: Call) -> None:
    shown = command("--help").out
    for name in COMMANDS:
        assert re.search(rf"^  {name}  +\S", shown, re.MULTILINE), name
    assert {word.partition(" ")[0] for word in cli._BODIES} == set(COMMANDS)
    for body in cli._BODIES.values():
        module, _, function = body.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_bare_call_shows_help_and_version_is_the_packages(call: Call) -> None:
    from importlib.metadata import version

    assert "Usage: racelab" in call().out
    assert call("--version").out == f"racelab {version('racelab')}\n"
    assert call("config").code == 0


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["trian"], ["trian", "train", "racelab --help"]),
        (["config", "shw"], ["shw", "show", "racelab config --help"]),
        (["train", "--resum", "x"], ["--resum", "did you mean --resume?", "racelab train --help"]),
        (["doctor", "--jsn"], ["did you mean --json?"]),
        (["show"], ["missing argument", "RUN"]),
        (["runs", "--limit", "-1"], ["--limit"]),
        (["show", "x", "--step", "0"], ["--step"]),
        (["config", "show", "prset=paper"], ["did you mean preset=paper?"]),
        (["train", "foo"], ["foo", "needs a value"]),
    ],
)
def test_mistakes_are_one_line_on_stderr_and_exit_with_2(
    call: Call, words: list[str], parts: list[str]
) -> None:
    result = call(*words)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert len(result.err.splitlines()) == 1
    for part in parts:
        assert part in result.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RacelabError("a"), 1),
        (errors.CheckpointError("a"), 1),
        (errors.ConfigError("a"), 2),
        (errors.DataError("a"), 2),
        (errors.ModelError("a"), 2),
        (errors.RunFolderError("a"), 2),
        (errors.DiskError("a"), 1),
        (errors.MissingDependencyError("a"), 2),
        (errors.UnreachableError("a"), 4),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_family_of_errors_has_its_code(
    call: Call, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(command: str, /, **arguments: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    result = call("runs")
    assert result.code == code
    assert result.out == ""
    assert len(result.err.splitlines()) == (0 if code == 130 else 1)
    assert "Traceback" not in result.err


def test_a_missing_package_names_the_extra_that_brings_it(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: str, /, **arguments: object) -> int:
        raise ModuleNotFoundError("No module named 'reasoning_gym.x'", name="reasoning_gym.x")

    monkeypatch.setattr(cli, "_run", fail)
    assert "pip install 'racelab[reasoning-gym]'" in call("runs").err


def test_several_problems_are_several_lines(call: Call) -> None:
    lines = call("config", "show", "run.seed=-1", "learner.lr=0").err.splitlines()
    assert [line.partition("=")[0] for line in lines] == ["error: run.seed", "error: learner.lr"]


def test_the_unexpected_is_one_line_and_its_traceback_is_in_a_file(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: str, /, **arguments: object) -> int:
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr(cli, "_run", fail)
    result = call("runs")
    assert result.code == 1
    assert len(result.err.splitlines()) == 1
    file = Path(result.err.rstrip("\n").rpartition(" ")[2])
    try:
        assert "ZeroDivisionError: by hand" in file.read_text(encoding="utf-8")
    finally:
        file.unlink()


@pytest.mark.parametrize(
    "words", [["--debug", "config", "show", "foo"], ["config", "show", "foo", "--debug"]]
)
def test_debug_shows_the_traceback_wherever_it_stands(call: Call, words: list[str]) -> None:
    result = call(*words)
    assert result.code == 2
    assert "Traceback" in result.err
    assert result.err.rstrip().splitlines()[-1].startswith("error: foo")


def test_debug_by_variable(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACELAB_DEBUG", "1")
    assert "Traceback" in call("config", "show", "foo").err
    monkeypatch.setenv("RACELAB_DEBUG", "0")
    assert "Traceback" not in call("config", "show", "foo").err


def test_train_gets_all_that_was_typed(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def keep(command: str, /, **arguments: object) -> int:
        seen.update(arguments, command=command)
        return 5

    monkeypatch.setattr(cli, "_run", keep)
    words = ["train", "run.seed=1", "--seeds", "0,1", "--dry-run", "preset=sane", "--config-dir", "a"]
    assert call(*words, "--config-dir", "b", "--json", "--jobs", "2", "--fresh").code == 5
    assert seen == {
        "command": "train",
        "overrides": ["run.seed=1", "preset=sane"],
        "resume": None,
        "seeds": "0,1",
        "jobs": 2,
        "fresh": True,
        "dry_run": True,
        "config_dirs": [Path("a"), Path("b")],
        "json_output": True,
    }


def test_a_closed_pipe_is_no_error() -> None:
    words = f"{sys.executable} -m racelab.cli.main config show --source | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == ""


def with_body(body: str, dead: int) -> subprocess.CompletedProcess[str]:
    """`racelab doctor` with another body, and with stdout (1) or stderr (2) a pipe that nobody reads."""
    code = (
        "import os, sys, types\n"
        f"sys.modules['fake'] = fake = types.ModuleType('fake')\n"
        f"exec({body!r}, fake.__dict__)\n"
        f"r, w = os.pipe(); os.dup2(w, {dead}); os.close(r); os.close(w)\n"
        "import racelab.cli.main as cli\n"
        "cli._BODIES['doctor'] = 'fake:body'\n"
        "cli.main(['doctor'])\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_signal_stops_in_order_though_nobody_reads_stderr() -> None:
    """Ctrl-C in `racelab train 2>&1 | tee log` ends tee first; what the handler says must not fail the step."""
    body = """
import os, signal
from racelab.cli.console import say
from racelab.experiments.signals import StopRequest
def body(**_):
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        say("saved")
        say("go on with")
        print("reached")
        return stop.exit_code
"""
    done = with_body(body, dead=2)
    assert (done.returncode, done.stdout) == (130, "reached\n")


@pytest.mark.parametrize("times", [1, 100_000])
def test_what_failed_fails_though_nobody_reads_its_results(times: int) -> None:
    body = f"""
from racelab.cli.console import results
def body(**_):
    with results():
        print("words " * {times})
    return 1
"""
    done = with_body(body, dead=1)
    assert (done.returncode, done.stderr) == (1, "")


def test_another_broken_pipe_than_stdout_is_an_error() -> None:
    done = with_body("def body(**_): raise BrokenPipeError(32, 'Broken pipe')", dead=0)
    assert done.returncode == 1
    assert "a connection broke" in done.stderr


def test_an_error_keeps_its_code_though_nobody_reads_it() -> None:
    body = "from racelab.experiments.errors import ConfigError\ndef body(**_): raise ConfigError('no')"
    assert with_body(body, dead=2).returncode == 2


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_error(home: Path, closed: str) -> None:
    """A file that is opened later must not get the closed stream's number either."""
    words = f"{sys.executable} -m racelab.cli.main runs --json {closed}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    code = (
        "import os, racelab.cli.main as cli\n"
        "cli._main = lambda words: int(os.open('f', os.O_CREAT | os.O_WRONLY) < 3)\n"
        "cli.main([])"
    )
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "$0" {closed}', code], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_have_their_codes(signum: int, code: int) -> None:
    script = (
        "import os, racelab.cli.main as cli\n"
        f"cli._run = lambda c, /, **w: os.kill(os.getpid(), {int(signum)}) or __import__('time').sleep(30)\n"
        "cli.main(['runs'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ,
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_completion_knows_the_commands(command: Call) -> None:
    words = {"_RACELAB_COMPLETE": "complete_bash", "COMP_WORDS": "racelab tr", "COMP_CWORD": "1"}
    assert command(**words).out.split() == ["train"]
