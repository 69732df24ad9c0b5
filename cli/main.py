"""`racelab`: the commands' names, options and help. What a command does is imported when it is called.

Only Typer is imported here, so that help and completion stay quick; a test holds the list of modules that
`racelab --help` must not load.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO

import typer

from racelab.cli import commands_eval, commands_rlds, commands_slurm
from racelab.cli.words import ConfigDir, DryRun, Fresh, GoOn, Jobs, Json, Overrides, Seeds
from racelab.configs.suggest import did_you_mean, near
from racelab.experiments.errors import RacelabError

_DEBUG = "RACELAB_DEBUG"
_EXTRAS = {
    "torch": "local",
    "transformers": "local",
    "safetensors": "local",
    "tokenizers": "local",
    "gguf": "local",
    "reasoning_gym": "reasoning-gym",
    "openai": "api",
}
"""Optional package -> the extra that brings it."""

_BODIES = {
    "train": "racelab.cli.train:train",
    "ablate": "racelab.cli.ablate:ablate",
    "baseline": "racelab.cli.baseline:baseline",
    "sweep": "racelab.cli.sweep:sweep",
    "config show": "racelab.cli.config:show",
    "config diff": "racelab.cli.config:diff",
    "config check": "racelab.cli.config:check",
    "runs": "racelab.cli.runs:runs",
    "show": "racelab.cli.show:show",
    "replay": "racelab.cli.replay:replay",
    "sync": "racelab.cli.sync:sync",
    "ui": "racelab.cli.ui:ui",
    "doctor": "racelab.cli.doctor:doctor",
    **commands_eval.BODIES,
    **commands_rlds.BODIES,
    **commands_slurm.BODIES,
}
"""Command -> `module:function`; the function takes what the command parsed and returns the exit code."""


def _colour() -> bool:
    """Boxes and colours only on a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()  # None: closed by `>&-`


app = typer.Typer(
    name="racelab",
    help="Run, track and look at RACE (evolving rubrics) and RLDS (subtask-decomposed advantages).",
    rich_markup_mode="rich" if _colour() else None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show, compare and check configurations.")
app.add_typer(config_app, name="config")


def _run(command: str, /, **arguments: Any) -> int:
    """Imports the command's module and runs it."""
    module, _, function = _BODIES[command].partition(":")
    body = getattr(importlib.import_module(module), function)
    try:
        code = body(**arguments)
    except BrokenPipeError as error:
        if not _reader_gone():  # another pipe or a socket; Typer would say nothing of it
            raise RuntimeError(f"a connection broke: {error}") from error
        # The reader (head, less) has gone; nothing more can be said to it. Typer would make it a failure.
        _discard(sys.stdout)
        return 0
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
    assert isinstance(code, int)
    return code


def _reader_gone() -> bool:
    """Whether stdout is a pipe that nobody reads."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0))
    except (OSError, ValueError):  # no file at all
        return False


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"racelab {version('racelab')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (also RACELAB_DEBUG=1).")] = False,
) -> int:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
    return 0


@app.command()
def train(
    overrides: Overrides = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with a run: id, prefix, name, path or latest.")
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    fresh: Fresh = False,
    dry_run: DryRun = False,
    config_dir: ConfigDir = None,
    json_output: Json = False,
) -> int:
    """Train: RACE with the embedded model, unless the overrides say otherwise."""
    return _run(
        "train",
        overrides=overrides or [],
        resume=resume,
        seeds=seeds,
        jobs=jobs,
        fresh=fresh,
        dry_run=dry_run,
        config_dirs=config_dir or [],
        json_output=json_output,
    )


@app.command()
def ablate(
    overrides: Overrides = None,
    variant: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A variant of RACE, or all; repeatable.")
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    resume: GoOn = False,
    fresh: Fresh = False,
    dry_run: DryRun = False,
    config_dir: ConfigDir = None,
    json_output: Json = False,
) -> int:
    """Run the ablations of RACE, a cell per variant and seed; what has finished is not run again."""
    return _run(
        "ablate",
        variants=variant or [],
        overrides=overrides or [],
        seeds=seeds,
        jobs=jobs,
        resume=resume,
        fresh=fresh,
        dry_run=dry_run,
        config_dirs=config_dir or [],
        json_output=json_output,
    )


@app.command()
def baseline(
    overrides: Overrides = None,
    method: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A baseline, or all; repeatable.")
    ] = None,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    resume: GoOn = False,
    fresh: Fresh = False,
    dry_run: DryRun = False,
    config_dir: ConfigDir = None,
    json_output: Json = False,
) -> int:
    """Run the baselines of RACE, a cell per method and seed; what has finished is not run again."""
    return _run(
        "baseline",
        methods=method or [],
        overrides=overrides or [],
        seeds=seeds,
        jobs=jobs,
        resume=resume,
        fresh=fresh,
        dry_run=dry_run,
        config_dirs=config_dir or [],
        json_output=json_output,
    )


commands_rlds.register(app, _run)
commands_eval.register(app, _run)


@app.command()
def sweep(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A grid (YAML with name, base, axes, seeds), or the name of one that ships."
        ),
    ],
    overrides: Overrides = None,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    resume: GoOn = False,
    fresh: Fresh = False,
    dry_run: DryRun = False,
    config_dir: ConfigDir = None,
    json_output: Json = False,
) -> int:
    """Run every cell of a grid; what has finished is not run again."""
    return _run(
        "sweep",
        file=file,
        overrides=overrides or [],
        seeds=seeds,
        jobs=jobs,
        resume=resume,
        fresh=fresh,
        dry_run=dry_run,
        config_dirs=config_dir or [],
        json_output=json_output,
    )


@config_app.callback(invoke_without_command=True)
def _config_top(ctx: typer.Context) -> int:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
    return 0


@config_app.command("show")
def config_show(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE|RUN",
            help="Overrides, as preset=paper run.seed=1; or the name of a preset or a run.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[bool, typer.Option("--source", help="Name the file and line of every value.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="KEY", help="One key: value, where it is set, and why.")
    ] = None,
    config_dir: ConfigDir = None,
    json_output: Json = False,
) -> int:
    """Print the composed configuration."""
    return _run(
        "config show",
        words=words or [],
        source=source,
        explain=explain,
        config_dirs=config_dir or [],
        json_output=json_output,
    )


@config_app.command("diff")
def config_diff(
    left: Annotated[str, typer.Argument(metavar="A", help="A preset, a run, or overrides in quotes.")],
    right: Annotated[str, typer.Argument(metavar="B", help="The same.")],
    config_dir: ConfigDir = None,
    json_output: Json = False,
) -> int:
    """Print the keys in which two configurations differ, with the reason for each value."""
    return _run("config diff", left=left, right=right, config_dirs=config_dir or [], json_output=json_output)


@config_app.command("check")
def config_check(
    overrides: Overrides = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 for warnings, too.")] = False,
    config_dir: ConfigDir = None,
    json_output: Json = False,
) -> int:
    """Say which targets and thresholds this configuration can never reach."""
    return _run(
        "config check",
        overrides=overrides or [],
        strict=strict,
        config_dirs=config_dir or [],
        json_output=json_output,
    )


@app.command()
def runs(
    root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the runs.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="At most this many, 0: all. Default: 20, under --json all.")
    ] = None,
    json_output: Json = False,
) -> int:
    """List the runs, newest first."""
    return _run("runs", root=root, limit=limit, json_output=json_output)


@app.command()
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, unique prefix, name, path, or latest.")],
    step: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The rubrics and responses of step N.")
    ] = None,
    rollout: Annotated[
        str | None,
        typer.Option(metavar="STEP[:GROUP[:IDX]]", help="RLDS: one rollout turn by turn, or a list of them."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write --rollout as a page instead.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Cut no text of --rollout on a terminal.")] = False,
    root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the runs.")] = None,
    json_output: Json = False,
) -> int:
    """Show a run, the texts and scores of one of its steps, or a rollout."""
    return _run(
        "show", run=run, step=step, rollout=rollout, html=html, full=full, root=root, json_output=json_output
    )


@app.command()
def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, unique prefix, name, path, or latest.")],
    more: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="As --set.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Another setting; repeatable.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PNG to write. Default: replay/replay.png of the run.")
    ] = None,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw nothing.")] = False,
    root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the runs.")] = None,
    json_output: Json = False,
) -> int:
    """Replay the controllers of a RACE run on its log, with its own settings or with others."""
    return _run(
        "replay",
        run=run,
        changes=[*(changes or []), *(more or [])],
        plot=plot,
        no_plot=no_plot,
        root=root,
        json_output=json_output,
    )


@app.command()
def sync(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Run id, prefix, name, path, latest; none: all.")
    ] = None,
    root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the runs.")] = None,
    json_output: Json = False,
) -> int:
    """Deliver to MLflow what a run's record holds and MLflow lacks."""
    return _run("sync", run=run, root=root, json_output=json_output)


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0: a free one.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
    root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the runs.")] = None,
    json_output: Json = False,
) -> int:
    """Start the MLflow UI on the runs; Ctrl-C stops it."""
    return _run("ui", port=port, open_browser=open_browser, root=root, json_output=json_output)


@app.command()
def doctor(
    root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the runs.")] = None,
    json_output: Json = False,
) -> int:
    """Check what `train` needs, and say how to mend what is missing."""
    return _run("doctor", root=root, json_output=json_output)


commands_slurm.register(app, _run)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `racelab` script; leaves with the exit code of the command.

    0 ok, 1 failed at run time, 2 usage or config, 4 backend or server out of reach, 130 SIGINT, 143 SIGTERM.
    """
    _open_closed_streams()
    signal.signal(signal.SIGTERM, _on_sigterm)
    sys.exit(_main(list(sys.argv[1:] if argv is None else argv)))


def _open_closed_streams() -> None:
    """Puts the null device where the shell closed stdout or stderr (`>&-`).

    Else the next file that is opened would get that number, and what a child process prints would go into it.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8"))


def _on_sigterm(signum: int, frame: FrameType | None) -> None:
    sys.exit(143)


def _main(words: list[str]) -> int:
    """Runs one command line and turns every error into one line and a code."""
    debug = "--debug" in words or os.environ.get(_DEBUG, "") not in ("", "0")
    # `--debug` may stand anywhere: who needs it adds it to the end of the line that has just failed.
    words = [word for word in words if word != "--debug"]
    try:
        code = app(words, prog_name="racelab", standalone_mode=False)
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _report(error, debug)
    return code if isinstance(code, int) else 0


def run_words(words: Sequence[str]) -> int:
    """Another command line within this one; its errors are this one's. Returns the exit code."""
    code = app(list(words), prog_name="racelab", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _report(error: Exception, debug: bool) -> int:
    """The error on stderr, one line per problem; returns the exit code."""
    if isinstance(error, RacelabError):
        for line in str(error).splitlines():
            _say(f"error: {line}")
        return error.exit_code
    usage = getattr(error, "format_message", None)
    if callable(usage):
        _say(f"error: {_usage(error, str(usage()))}")
        return 2
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in _EXTRAS:
        _say(f"error: {missing} is not installed; run: pip install 'racelab[{_EXTRAS[missing]}]'")
        return 2
    first = next(iter(str(error).splitlines()), "")
    place = "" if debug else f"; traceback in {_keep_traceback(error)}"
    _say(f"error: unexpected {type(error).__name__}: {first}{place}")
    return 1


def _usage(error: Exception, message: str) -> str:
    """A usage error with the near option and the command's help line."""
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "racelab")
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and isinstance(option, str):
        known = [name for parameter in context.command.params for name in parameter.opts] if context else []
        message = f"no such option {option}{did_you_mean(near(option, known))}"
    return f"{message[:1].lower()}{message[1:].rstrip('.')} (see {path} --help)"


def _keep_traceback(error: Exception) -> str:
    """Writes the traceback to a file of its own; returns its path."""
    handle, path = tempfile.mkstemp(prefix="racelab-", suffix=".traceback.txt")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.writelines(traceback.format_exception(error))
    return path


def _say(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    from racelab.cli.console import discard

    discard(stream)


if __name__ == "__main__":
    main()
