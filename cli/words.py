"""The options that several commands share, as Typer takes them. Only Typer is imported here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, as preset=paper run.seed=1.", show_default=False),
]
ConfigDir = Annotated[
    list[Path] | None,
    typer.Option("--config-dir", metavar="DIR", help="Extra folder of YAML configs; repeatable."),
]
Seeds = Annotated[str | None, typer.Option(metavar="0,1,2", help="One run per seed.")]
Jobs = Annotated[int, typer.Option(min=1, metavar="N", help="Runs at once, each in a process of its own.")]
GoOn = Annotated[bool, typer.Option("--resume", help="Only go on with what was started before.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run everything anew, in further folders.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Compose and check; start nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable JSON on stdout.")]
