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
    "serve judge": "racelab.cli.serve_judge:judge",
}
"""Command -> `module:function`, as in `main.py`."""


def register(app: typer.Typer, run: Callable[..., int]) -> None:
    """Adds the commands to `app`; `run` imports a command's body and calls it with what was parsed."""
    _register_task(app, run)
    serve = typer.Typer(help="Serve over HTTP what tasks and judges ask for.")
    app.add_typer(serve, name="serve")
    _register_serve(serve, run)
    _register_judge(serve, run)


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


def _register_judge(app: typer.Typer, run: Callable[..., int]) -> None:
    @app.command("judge")
    def judge(
        model: Annotated[str, typer.Argument(metavar="MODEL", help="`embedded`, a folder or a hub name.")],
        words: Annotated[
            list[str] | None, typer.Argument(metavar="[-- WORD...]", help="Further options for vLLM.")
        ] = None,
        engine: Annotated[
            str,
            typer.Option(
                metavar="NAME", help="vllm, transformers (our own local models), or auto: vLLM if it is here."
            ),
        ] = "auto",
        host: Annotated[
            str, typer.Option(metavar="ADDRESS", help="Address to listen at; with another one, --key-env.")
        ] = "127.0.0.1",
        port: Annotated[
            int, typer.Option(min=0, max=65535, metavar="N", help="Port to listen at; 0: a free one.")
        ] = 8000,
        device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:1.")] = "auto",
        max_length: Annotated[
            int | None,
            typer.Option(
                min=2, metavar="N", help="Tokens, messages and reply together; else the model's window."
            ),
        ] = None,
        vllm: Annotated[
            str | None,
            typer.Option(metavar="FILE", help="vLLM's executable (also RACELAB_VLLM), in any environment."),
        ] = None,
        key_env: Annotated[
            str, typer.Option(metavar="NAME", help="Variable that holds the key that clients must send.")
        ] = "",
        batch: Annotated[
            int | None,
            typer.Option(min=1, max=1024, metavar="N", help="Replies decoded at a time; transformers: 16."),
        ] = None,
        name: Annotated[
            str | None,
            typer.Option(metavar="NAME", help="What clients call the model; else the end of MODEL."),
        ] = None,
    ) -> int:
        """Serve a model in OpenAI's chat API (POST /v1/chat/completions) until Ctrl-C."""
        return run(
            "serve judge",
            model=model,
            engine=engine,
            host=host,
            port=port,
            device=device,
            max_length=max_length,
            vllm=vllm,
            key_env=key_env,
            batch=batch,
            name=name,
            words=words or [],
        )
