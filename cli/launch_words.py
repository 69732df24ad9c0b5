"""Command lines as stages of a graph: what they are, and the runs they would make, found without running them."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from racelab.cli.launching import wants_slurm
from racelab.cli.sweep import planning
from racelab.cli.train import run_root
from racelab.configs.suggest import did_you_mean, near
from racelab.experiments.errors import ConfigError
from racelab.sweeps.composing import last_words

if TYPE_CHECKING:
    from racelab.sweeps.slurm.stages import Runs

MAKERS: Final = ("train", "ablate", "baseline", "task", "sweep")
"""The commands that make runs."""
_NO_STAGES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("ui", "serve"), "it goes on until somebody stops it"),
    **dict.fromkeys(("jobs", "logs"), "it looks after jobs from outside"),
    **dict.fromkeys(("launch", "resume", "cancel"), "a job submits no jobs and stops none"),
}
"""Commands that cannot be a stage, and why."""
_NO_OPTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "resume": ("--resume", "a launch goes on with what has been started by itself"),
    "dry_run": ("--dry-run", "the stage would make nothing; racelab launch has the option, for all stages"),
    "json_output": ("--json", "racelab launch has the option, for all stages"),
}
"""Parameter of the commands that make runs -> its option, and why a stage has none."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A command line that could be run.

    Attributes:
        path: of the command: `config show`.
        command: Typer's.
        context: Typer's, with what the words say.
    """

    path: str
    command: Any
    context: Any


def makes_runs(words: Sequence[str]) -> bool:
    """Whether a command line makes runs.

    Raises:
        ConfigError: no command of racelab, options that it does not take, or a command that cannot be a stage.
    """
    parsed = parse(words)
    maker = parsed.path in MAKERS
    for name, (option, why) in _NO_OPTIONS.items() if maker else ():
        if parsed.context.params.get(name):
            raise ConfigError(f"{option} cannot stand in a stage: {why}; leave it out")
    return maker


def parse(words: Sequence[str]) -> Parsed:
    """Reads a command line as the shell's would be read.

    Raises:
        ConfigError: it does not parse, or the command cannot be a stage.
    """
    command = _racelab()
    path: list[str] = []
    rest = list(words)
    while (commands := getattr(command, "commands", None)) is not None:
        name = rest.pop(0) if rest else ""
        if name not in commands:
            raise ConfigError(_no_command(name, path, commands))
        if name in _NO_STAGES and not path:
            raise ConfigError(f"{name} cannot be a stage: {_NO_STAGES[name]}; leave it out")
        path.append(name)
        command = commands[name]
    line = " ".join(path)
    if not {"-h", "--help"}.isdisjoint(rest):
        raise ConfigError(f"{shlex.join(words)} asks for help only; write a command that does something")
    try:
        context = command.make_context(f"racelab {line}", rest)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # Typer's errors of use have it, as in main.py
        if not callable(usage):
            raise
        message = str(usage())
        raise ConfigError(
            f"{message[:1].lower()}{message[1:].rstrip('.')} (see racelab {line} --help)"
        ) from error
    return Parsed(line, command, context)


@functools.cache
def _racelab() -> Any:
    """The whole command line, as Typer's parser."""
    from typer.main import get_command

    from racelab.cli.main import app

    return get_command(app)


def _no_command(name: str, path: Sequence[str], commands: Mapping[str, object]) -> str:
    known = [one for one in commands if path or one not in _NO_STAGES]
    if name == "racelab":
        return "write the words that come after racelab"
    if not name or name.startswith("-"):
        what = f"no command{f' of {path[0]}' if path else ''} stands first"
    else:
        what = f"no such command {' '.join([*path, name])}{did_you_mean(near(name, known))}"
    return f"{what} (known: {', '.join(known)})"


@dataclass(frozen=True, slots=True)
class Planner:
    """Finds the runs of a command line.

    Attributes:
        config_dirs: the user's config folders, in addition to those that a command line names itself.
    """

    config_dirs: tuple[Path, ...]

    def __call__(self, words: Sequence[str], below: Sequence[str], above: Sequence[str]) -> Runs:
        """The runs; nothing is made.

        Args:
            words: of the command line.
            below: overrides that its own stand above.
            above: overrides above its own.

        Raises:
            RacelabError: a cell does not compose.
        """
        from racelab.sweeps.slurm.stages import Runs

        parsed = parse(words)
        given = parsed.context.params
        given["overrides"] = last_words([*below, *(given["overrides"] or ()), *above])
        given["config_dir"] = [*(given["config_dir"] or ()), *self.config_dirs]
        with planning() as plans:
            parsed.command.invoke(parsed.context)
        (plan,) = plans
        single = parsed.path == "train" and given["seeds"] is None
        if given["jobs"] > 1 and (single or wants_slurm(plan)):
            mend = "with launcher=slurm set launcher.max_parallel" if wants_slurm(plan) else "leave it out"
            raise ConfigError(f"--jobs is for several runs on this machine; {mend}")
        run_id = plan.run_ids[0] if single else plan.run_id
        reference = run_id if plan.root == run_root("") else str(plan.root / run_id)
        fresh = ["--fresh"] if given["fresh"] else []  # a plan's own command is what goes on with it
        return Runs(plan, single, reference, (*shlex.split(plan.command)[1:], *fresh))
