"""Names, options and help of the commands that look after jobs of a Slurm cluster. Only Typer is imported here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from racelab.cli.words import ConfigDir, DryRun, Json, Overrides

BODIES: Final = {
    "jobs": "racelab.cli.jobs:jobs",
    "logs": "racelab.cli.logs:logs",
    "cancel": "racelab.cli.manage:cancel",
    "resume": "racelab.cli.manage:resume",
    "launch": "racelab.cli.launch:launch",
}
"""Command -> `module:function`, as in `main.py`."""
_Root = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the runs.")]


def register(app: typer.Typer, run: Callable[..., int]) -> None:
    """Adds the commands to `app`; `run` imports a command's body and calls it with what was parsed."""
    _register_jobs(app, run)
    _register_logs(app, run)
    _register_manage(app, run)
    _register_launch(app, run)


def _register_jobs(app: typer.Typer, run: Callable[..., int]) -> None:
    @app.command("jobs")
    def jobs(
        what: Annotated[
            str | None,
            typer.Argument(
                metavar="LAUNCH|RUN|SWEEP",
                help="Only these: id, unique prefix, name, path, or LAUNCH:STAGE.",
                show_default=False,
            ),
        ] = None,
        everything: Annotated[
            bool,
            typer.Option(
                "--all", help="Also what ended over a day ago, and tasks that a later job replaced."
            ),
        ] = False,
        watch: Annotated[
            bool, typer.Option("--watch", help="Go on until nothing is running or waiting, or Ctrl-C.")
        ] = False,
        wait: Annotated[
            bool, typer.Option("--wait", help="Wait until all have ended; exit with 1 unless all finished.")
        ] = False,
        root: _Root = None,
        json_output: Json = False,
    ) -> int:
        """Show how the jobs stand that were launched from here: what is live, and what ended in the last 24 hours."""
        return run(
            "jobs",
            what=what,
            everything=everything,
            watch=watch,
            wait=wait,
            root=root,
            json_output=json_output,
        )


def _register_logs(app: typer.Typer, run: Callable[..., int]) -> None:
    @app.command("logs")
    def logs(
        what: Annotated[
            str,
            typer.Argument(
                metavar="RUN", help="Run id, unique prefix, name, path or latest; LAUNCH or LAUNCH:STAGE."
            ),
        ],
        follow: Annotated[
            bool, typer.Option("--follow", "-f", help="Go on until the task has ended, or Ctrl-C.")
        ] = False,
        rank: Annotated[
            int, typer.Option(min=0, metavar="N", help="What the N-th node of a job printed.")
        ] = 0,
        attempt: Annotated[
            int | None,
            typer.Option(min=1, metavar="K", help="What the K-th attempt printed. Default: the newest."),
        ] = None,
        root: _Root = None,
        json_output: Json = False,
    ) -> int:
        """Print what a run's newest job printed; --json: where that is."""
        return run(
            "logs",
            what=what,
            follow=follow,
            rank=rank,
            attempt=attempt,
            root=root,
            json_output=json_output,
        )


def _register_manage(app: typer.Typer, run: Callable[..., int]) -> None:
    @app.command("cancel")
    def cancel(
        what: Annotated[str, typer.Argument(metavar="RUN|SWEEP|LAUNCH", help="As `racelab jobs` takes it.")],
        downstream: Annotated[
            bool, typer.Option("--downstream", help="Also the stages that wait for it.")
        ] = False,
        root: _Root = None,
        json_output: Json = False,
    ) -> int:
        """Cancel jobs; a run saves a checkpoint first."""
        return run("cancel", run=what, downstream=downstream, root=root, json_output=json_output)

    @app.command("resume")
    def resume(
        what: Annotated[str, typer.Argument(metavar="RUN|SWEEP|LAUNCH", help="As `racelab jobs` takes it.")],
        overrides: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="KEY=VALUE", help="Of the launcher only, as launcher.time_min=60.", show_default=False
            ),
        ] = None,
        config_dir: ConfigDir = None,
        root: _Root = None,
        json_output: Json = False,
    ) -> int:
        """Go on with what has not finished and has no job: as jobs what was launched, here what was started here."""
        return run(
            "resume",
            run=what,
            overrides=overrides or [],
            config_dirs=config_dir or [],
            root=root,
            json_output=json_output,
        )


def _register_launch(app: typer.Typer, run: Callable[..., int]) -> None:
    @app.command("launch")
    def launch(
        file: Annotated[
            Path,
            typer.Argument(
                metavar="FILE",
                help="A graph (YAML with name, base, stages), or the name of one that ships.",
            ),
        ],
        overrides: Overrides = None,
        dry_run: DryRun = False,
        config_dir: ConfigDir = None,
        json_output: Json = False,
    ) -> int:
        """Start the stages of a graph: with launcher=slurm as jobs that wait for one another, else one by one here."""
        return run(
            "launch",
            file=file,
            overrides=overrides or [],
            dry_run=dry_run,
            config_dirs=config_dir or [],
            json_output=json_output,
        )
