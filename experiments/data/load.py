"""From `data.*` to training and held-out prompts: the one place that knows both the config and the readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from racelab.configs import schema
from racelab.experiments.data.rows import Columns
from racelab.experiments.data.sources import (
    HUB_COLUMNS,
    LoadReport,
    PromptData,
    draw,
    prepare,
    read_file,
    read_gym,
    read_hub,
    read_package,
)
from racelab.experiments.data.window import WindowReport, fit_window
from racelab.experiments.errors import ConfigError
from racelab.experiments.types import Prompt


@dataclass(frozen=True, slots=True)
class Rows:
    """What a reader found. `heldout` is a validation split of the source's own, None if it has none."""

    prompts: list[Prompt]
    source: str
    heldout: list[Prompt] | None = None


def _package(data: schema.PackageData) -> Rows:
    train, heldout = (
        read_package(split, data.difficulty, data.categories) for split in ("train", "validation")
    )
    return Rows(train, f"package ({data.difficulty})", heldout)


def _gym(data: schema.ReasoningGymData) -> Rows:
    return Rows(read_gym(data.datasets, data.size, data.seed), "reasoning-gym")


def _file(data: schema.FileData) -> Rows:
    columns = Columns(
        prompt=data.prompt_field,
        prompt_id=data.id_field,
        category=data.category_field,
        check=data.check_field,
    )
    return Rows(read_file(data.path, columns), data.path)


def _hub(data: schema.HubData) -> Rows:
    columns = Columns(prompt=data.prompt_field, fallbacks=HUB_COLUMNS.fallbacks)
    return Rows(read_hub(data.name, data.split, columns, data.revision), data.name)


READERS: dict[str, Callable[[Any], Rows]] = {
    "package": _package,
    "reasoning-gym": _gym,
    "file": _file,
    "hub": _hub,
}
"""`data.source` -> its reader."""


def load_prompts(data: schema.DataConfig, seed: int) -> tuple[PromptData, LoadReport]:
    """Reads, de-duplicates, sets the held-out prompts aside and draws the training prompts, all seeded.

    Raises:
        DataError: the source cannot be read (file, line and field are named) or holds too little.
        ConfigError: `data.heldout` or `data.limit` cannot be met.
    """
    rows = READERS[data.source](data)
    heldout: int | list[Prompt] = data.heldout
    if rows.heldout is not None:
        if data.heldout > len(rows.heldout):
            raise ConfigError(
                f"data.heldout={data.heldout}: {rows.source} has {len(rows.heldout)} validation prompts; "
                f"set data.heldout={len(rows.heldout)} or fewer"
            )
        heldout = draw(rows.heldout, data.heldout, seed)
    return prepare(
        rows.prompts, rows.source, heldout=heldout, limit=data.limit, seed=seed, unique=data.deduplicate
    )


def fit_prompts(
    data: schema.DataConfig, prompts: PromptData, count_tokens: Callable[[str], int], room: int
) -> tuple[PromptData, list[WindowReport]]:
    """Applies `data.on_long_prompt` to both sets.

    Args:
        data: the data section.
        prompts: as loaded.
        count_tokens: length of a prompt under the longest of the role templates.
        room: tokens that the model's window leaves for a prompt.

    Raises:
        DataError: a prompt is too long and the policy is `error`, or none is left.
    """
    limit = min(data.max_prompt_tokens, room)

    def fit(rows: Sequence[Prompt]) -> tuple[list[Prompt], WindowReport]:
        return fit_window(rows, count_tokens, limit, data.on_long_prompt)

    train, train_report = fit(prompts.train)
    heldout, heldout_report = fit(prompts.heldout)
    return PromptData(tuple(train), tuple(heldout)), [train_report, heldout_report]
