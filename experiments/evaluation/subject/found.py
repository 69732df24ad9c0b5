"""What was found of the model under test, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from racelab.experiments.runfolder import RunFolder

SourceKind = Literal["packaged", "folder", "hub", "run", "url"]


@dataclass(frozen=True, slots=True)
class Trained:
    """A checkpoint of a run.

    Attributes:
        run: its folder.
        step: global step of the checkpoint.
        role: whose weights are taken, where the run trained several sets apart (Rubric-ARM); "" where it has one set.
        engine: that the run trained with.
        train_from_layer: layers below it are the base model's.
    """

    run: RunFolder
    step: int
    role: str
    engine: Literal["fast", "plain"]
    train_from_layer: int


@dataclass(frozen=True, slots=True)
class Found:
    """What `subject.source` is.

    Attributes:
        kind: of the source.
        engine: who generates: `local` (this package), `vllm` (in this process too), `server`.
        folder: of the model, of a run its base model; None behind a URL.
        trained: of a run.
        model: the name on the server; "" for the others.
        window: longest sequence of a server's model, where it says so.
        facts: for the record of the evaluation: kind, source, sha256, and what else tells it apart (JSON values).
        lines: what to say.
    """

    kind: SourceKind
    engine: Literal["local", "vllm", "server"]
    folder: Path | None
    trained: Trained | None = None
    model: str = ""
    window: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
