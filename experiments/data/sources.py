"""Prompt sources: load, de-duplicate, hold out, draw.

    data, report = prepare(read_file("my.jsonl"), "my.jsonl", heldout=48, limit=200, seed=0)
    data.train, data.heldout

The readers are `read_package`, `read_gym`, `read_file` and `read_hub`; they are re-exported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from racelab.experiments.data.files import read_file
from racelab.experiments.data.gym import read_gym
from racelab.experiments.data.hub import HUB_COLUMNS, read_hub
from racelab.experiments.data.package import packaged_prompts, read_package
from racelab.experiments.data.rows import Columns, normalise
from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.types import Prompt

__all__ = [
    "HUB_COLUMNS",
    "Columns",
    "LoadReport",
    "PromptData",
    "deduplicate",
    "draw",
    "hold_out",
    "normalise",
    "packaged_prompts",
    "prepare",
    "read_file",
    "read_gym",
    "read_hub",
    "read_package",
    "without",
]

# Spawn keys: holding out and drawing never share random numbers, whatever the seed.
_HOLD_OUT, _DRAW = 1, 2


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What happened to the rows of a source.

    Attributes:
        before: rows read.
        after: rows left once equal texts are dropped (`before` without de-duplication).
        heldout: set aside for validation.
        overlap: training rows dropped because their text stands in a separate held-out set.
        train: what is left to train on, after `limit`.
    """

    source: str
    before: int
    after: int
    heldout: int
    overlap: int
    train: int

    def line(self) -> str:
        """One line for the log."""
        return (
            f"{self.source}: {self.before} prompts, {self.after} after de-duplication, {self.train} of them to train "
            f"on; {self.heldout} held out ({self.overlap} dropped because their text is)"
        )


@dataclass(frozen=True, slots=True)
class PromptData:
    """Training and held-out prompts; no text is in both."""

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]


def deduplicate(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first prompt of every normalised text (NFC, white space folded, case kept), order kept."""
    seen: dict[str, Prompt] = {}
    for prompt in prompts:
        seen.setdefault(normalise(prompt.text), prompt)
    return list(seen.values())


def without(prompts: Sequence[Prompt], others: Sequence[Prompt]) -> list[Prompt]:
    """The prompts whose normalised text does not stand in `others`, order kept."""
    taken = {normalise(p.text) for p in others}
    return [p for p in prompts if normalise(p.text) not in taken]


def draw(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """At most `limit` prompts, drawn without replacement, in their original order; all if `limit` is None.

    Raises:
        ConfigError: `limit` < 1.
    """
    if limit is None:
        return list(prompts)
    if limit < 1:
        raise ConfigError(f"data.limit={limit}: must be at least 1; null takes all")
    order = _generator(seed, _DRAW).permutation(len(prompts))[:limit]
    return [prompts[i] for i in sorted(order)]


def hold_out(prompts: Sequence[Prompt], n: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """(the rest, n held-out prompts), both in their original order; no normalised text is in both.

    Prompts of equal text move together: the copies of a held-out prompt leave the rest too.

    Raises:
        ConfigError: nothing would be left to train on.
    """
    unique = deduplicate(prompts)
    if not 0 <= n < len(unique):
        most = max(0, len(unique) - 1)
        raise ConfigError(f"data.heldout={n}: of {len(unique)} different prompts hold out at most {most}")
    order = _generator(seed, _HOLD_OUT).permutation(len(unique))[:n]
    held = [unique[i] for i in sorted(order)]
    return without(prompts, held), held


def prepare(
    prompts: Sequence[Prompt],
    source: str,
    *,
    heldout: int | Sequence[Prompt],
    limit: int | None = None,
    seed: int = 0,
    unique: bool = True,
) -> tuple[PromptData, LoadReport]:
    """From the rows of a source to training and held-out prompts.

    Args:
        prompts: all rows, as read.
        source: names the source in the report and in messages.
        heldout: how many to set aside, or a held-out set of its own (a packaged `validation` split, another
            file), whose texts are then dropped from the training prompts.
        limit: training prompts to draw; None keeps all.
        seed: >= 0, of both draws.
        unique: drop rows of equal normalised text.

    Raises:
        ConfigError: `heldout` or `limit` cannot be met.
        DataError: two prompts have the same id, or none is left.
    """
    if not prompts:
        raise DataError(f"{source}: no prompts")
    rows = deduplicate(prompts) if unique else list(prompts)
    if isinstance(heldout, int):
        rest, held = hold_out(rows, heldout, seed)
        overlap = 0
    else:
        held = deduplicate(heldout)
        rest = without(rows, held)
        overlap = len(rows) - len(rest)
    if not rest:
        raise DataError(f"{source}: every prompt is in the held-out set; give another data.path or source")
    _check_ids([*rest, *held], source)
    train = draw(rest, limit, seed)
    report = LoadReport(source, len(prompts), len(rows), len(held), overlap, len(train))
    return PromptData(tuple(train), tuple(held)), report


def _check_ids(prompts: Sequence[Prompt], source: str) -> None:
    seen: dict[str, str] = {}
    for prompt in prompts:
        other = seen.setdefault(prompt.prompt_id, prompt.text)
        if other is not prompt.text:
            raise DataError(
                f"{source}: id {prompt.prompt_id!r:.40} is given twice ({other!r:.30}, {prompt.text!r:.30});"
                " make ids unique, or set data.id_field=null data.deduplicate=true"
            )


def _generator(seed: int, key: int) -> np.random.Generator:
    if seed < 0:
        raise ConfigError(f"data seed {seed}: must be >= 0")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(key,)))
