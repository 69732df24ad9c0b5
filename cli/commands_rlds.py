"""Names, options and help of the commands that RLDS brought: `task` and `serve`. Only Typer is imported here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from racelab.cli.words import ConfigDir, DryRun, Fresh, GoOn, Jobs, Json, Overrides, Seeds

BODIES: Final = {
    "task": "racelab.cli.task:task",
    "serve retriever": "racelab.cli.serve:retriever",
}
"""Command -> `module:function`, as in `main.py`."""


def register(app: typer.Typer, run: Callable[..., int]) -> None:
    """Adds the commands to `app`; `run` imports a command's body and calls it with what was parsed."""
    _register_task(app, run)
    serve = typer.Typer(help="Serve what tasks ask for over HTTP.")
    app.add_typer(serve, name="serve")
    _register_serve(serve, run)


def _register_task(app: typer.Typer, run: Callable[..., int]) -> None:
    @app.command("task")
    def task(
        overrides: Overrides = None,
        name: Annotated[
            list[str] | None,
            typer.Option(
                metavar="NAME",
                help="frozenlake, hotpotqa, scienceworld, deepresearch, or all; repeatable, or with commas.",
            ),
        ] = None,
        condition: Annotated[
            list[str] | None,
            typer.Option(
                metavar="NAME",
                help="rlvr, base-reflection, rlds, or all of these; arms: rlds-random-grades, rlds-no-kernel, "
                "rlds-no-aux; repeatable, or with commas.",
            ),
        ] = None,
        seeds: Seeds = None,
        jobs: Jobs = 1,
        resume: GoOn = False,
        fresh: Fresh = False,
        dry_run: DryRun = False,
        config_dir: ConfigDir = None,
        json_output: Json = False,
    ) -> int:
        """Run RLDS and what it is compared with, a cell per task, condition and seed; what has finished stays."""
        return run(
            "task",
            names=name or [],
            conditions=condition or [],
            overrides=overrides or [],
            seeds=seeds,
            jobs=jobs,
            resume=resume,
            fresh=fresh,
            dry_run=dry_run,
            config_dirs=config_dir or [],
            json_output=json_output,
        )


def _register_serve(app: typer.Typer, run: Callable[..., int]) -> None:
    @app.callback(invoke_without_command=True)
    def _top(ctx: typer.Context) -> int:
        if ctx.invoked_subcommand is None:
            typer.echo(ctx.get_help())
        return 0

    @app.command("retriever")
    def retriever(
        corpus: Annotated[
            str, typer.Option(metavar="FILE", help="Passages (.jsonl, Search-R1's format), or `package`.")
        ],
        engine: Annotated[str, typer.Option(metavar="NAME", help="bm25 or dense.")] = "bm25",
        encoder: Annotated[
            str, typer.Option(metavar="NAME", help="dense: minilm, a folder or a hub name.")
        ] = "minilm",
        host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
        port: Annotated[
            int, typer.Option(min=0, max=65535, metavar="N", help="Port to listen at; 0: a free one.")
        ] = 8000,
        index: Annotated[
            Path | None,
            typer.Option(metavar="FILE", help="dense: FAISS index; read if it is there, else written."),
        ] = None,
        device: Annotated[str, typer.Option(metavar="NAME", help="dense: device of the encoder.")] = "cpu",
    ) -> int:
        """Serve passages in Search-R1's API (POST /retrieve) until Ctrl-C."""
        return run(
            "serve retriever",
            corpus=corpus,
            engine=engine,
            encoder=encoder,
            host=host,
            port=port,
            index=index,
            device=device,
        )
