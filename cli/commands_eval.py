"""Names, options and help of the commands that measure: `eval` and `compare`. Only Typer is imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import typer

from racelab.cli.words import ConfigDir, DryRun, Fresh, Jobs, Json, Seeds

BODIES: Final = {"eval": "racelab.cli.evaluate:evaluate"}
"""Command -> `module:function`, as in `main.py`."""


def register(app: typer.Typer, run: Callable[..., int]) -> None:
    """Adds the commands to `app`; `run` imports a command's body and calls it with what was parsed."""

    @app.command("eval")
    def evaluate(
        words: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="RUN|MODEL [KEY=VALUE]",
                help="A run (id, prefix, name, path, latest; a sweep: its cells), a model folder, a hub name, "
                "http://host/v1, or `embedded`; several are evaluated one after the other. Then overrides, as "
                "eval.data.gsm8k=FILE.",
                show_default=False,
            ),
        ] = None,
        suite: Annotated[str, typer.Option(metavar="NAME", help="race, ifeval or rubric.")] = "race",
        benchmarks: Annotated[
            str | None, typer.Option(metavar="A,B", help="Only these of the suite, as gsm8k,mmlu.")
        ] = None,
        limit: Annotated[
            int | None, typer.Option(min=1, metavar="N", help="The first N examples of each benchmark.")
        ] = None,
        protocol: Annotated[
            str | None, typer.Option(metavar="NAME", help="olmo3-adapt (the default) or lm-eval.")
        ] = None,
        judge: Annotated[
            str | None, typer.Option(metavar="MODEL|URL", help="rubric suite: who scores under the rubric.")
        ] = None,
        seeds: Seeds = None,
        resume: Annotated[
            str | None, typer.Option(metavar="RUN", help="Go on with an evaluation that was stopped.")
        ] = None,
        jobs: Jobs = 1,
        fresh: Fresh = False,
        dry_run: DryRun = False,
        config_dir: ConfigDir = None,
        json_output: Json = False,
    ) -> int:
        """Evaluate a run or a model: RACE's eight benchmarks, IFEval, or its rubrics."""
        return run(
            "eval",
            words=words or [],
            suite=suite,
            protocol=protocol,
            benchmarks=benchmarks,
            limit=limit,
            judge=judge,
            seeds=seeds,
            resume=resume,
            jobs=jobs,
            fresh=fresh,
            dry_run=dry_run,
            config_dirs=config_dir or [],
            json_output=json_output,
        )
