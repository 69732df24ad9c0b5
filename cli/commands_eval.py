"""Names, options and help of the commands that measure: `eval` and `compare`. Only Typer is imported here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from racelab.cli.words import ConfigDir, DryRun, Fresh, Jobs, Json, Seeds

BODIES: Final = {"eval": "racelab.cli.evaluate:evaluate", "compare": "racelab.cli.compare:compare"}
"""Command -> `module:function`, as in `main.py`."""


def register(app: typer.Typer, run: Callable[..., int]) -> None:
    """Adds the commands to `app`; `run` imports a command's body and calls it with what was parsed."""

    @app.command("eval")
    def evaluate(
        words: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="RUN|MODEL [KEY=VALUE]",
                help="A run (id, prefix, name, path; latest: the newest that trained; a sweep: its cells), a model "
                "folder, a hub name, http://host/v1, or `embedded`; several are evaluated one after the other. Then "
                "overrides, as eval.data.gsm8k=FILE.",
                show_default=False,
            ),
        ] = None,
        suite: Annotated[str, typer.Option(metavar="NAME", help="race, ifeval or rubric.")] = "race",
        benchmarks: Annotated[
            str | None, typer.Option(metavar="A,B", help="Only these of the suite, as gsm8k,mmlu.")
        ] = None,
        limit: Annotated[
            int | None,
            typer.Option(min=1, metavar="N", help="N examples of each benchmark, from its tasks in turns."),
        ] = None,
        protocol: Annotated[
            str | None, typer.Option(metavar="NAME", help="olmo3-adapt (the default) or lm-eval.")
        ] = None,
        judge: Annotated[
            str | None,
            typer.Option(
                metavar="MODEL|URL",
                help="rubric suite: who scores under the rubric. A URL is asked at T 0.6 with room to think, unless "
                "judge=api says greedily; a model is greedy, unless judge=qwen3-1.7b says otherwise.",
            ),
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

    _register_compare(app, run)


def _register_compare(app: typer.Typer, run: Callable[..., int]) -> None:
    @app.command("compare")
    def compare(
        a: Annotated[
            str,
            typer.Argument(
                metavar="A",
                help="An evaluation, a training run (its newest evaluation counts), a sweep of either (its cells are "
                "seeds), or several with commas.",
            ),
        ],
        b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with; the same kinds.")],
        suite: Annotated[
            str | None,
            typer.Option(
                metavar="NAME", help="Of a run with evaluations of several suites: the one to compare."
            ),
        ] = None,
        benchmarks: Annotated[
            str | None, typer.Option(metavar="A,B", help="Only these, as gsm8k,mmlu.")
        ] = None,
        level: Annotated[float, typer.Option(metavar="P", help="Coverage of the intervals.")] = 0.95,
        replicates: Annotated[int, typer.Option(min=1, metavar="N", help="Draws of the bootstrap.")] = 2000,
        seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of those draws.")] = 0,
        root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the runs.")] = None,
        json_output: Json = False,
    ) -> int:
        """Compare two evaluations, or two sets of seeds, example by example: differences, intervals, p values."""
        return run(
            "compare",
            a=a,
            b=b,
            suite=suite,
            benchmarks=benchmarks,
            level=level,
            replicates=replicates,
            seed=seed,
            root=root,
            json_output=json_output,
        )
