"""The prompts that ship with racelab (`prompts.jsonl`, beside this file)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from racelab.experiments.data.files import read_jsonl
from racelab.experiments.data.rows import Columns, to_prompt
from racelab.experiments.errors import ConfigError
from racelab.experiments.types import Prompt

PACKAGE_FILE = Path(__file__).with_name("prompts.jsonl")
_COLUMNS = Columns("text", prompt_id="id", category="category", check="check")

Split = Literal["train", "validation", "probe"]
Difficulty = Literal["tiny", "full"]


@dataclass(frozen=True, slots=True)
class PackagedPrompt:
    """A packaged prompt with what only the package knows.

    Attributes:
        split: `train`, `validation` (held out) or `probe` (the fixed 100 for rubric statistics).
        difficulty: `tiny` (a model of 135 M parameters sometimes gets it right within one short sentence) or
            `full`.
        good: an answer that passes the check; None without a check.
        bad: a wrong answer that fails it; None without a check.
    """

    prompt: Prompt
    split: Split
    difficulty: Difficulty
    good: str | None
    bad: str | None


@cache
def packaged_prompts() -> tuple[PackagedPrompt, ...]:
    """All packaged prompts, in the file's order."""
    rows: list[PackagedPrompt] = []
    for where, record in read_jsonl(PACKAGE_FILE):
        prompt = to_prompt(record, _COLUMNS, "package", where)
        extra = {key: record[key] for key in ("split", "difficulty", "good", "bad")}
        rows.append(PackagedPrompt(prompt, **extra))  # type: ignore[arg-type]
    return tuple(rows)


def read_package(
    split: Split | Literal["all"] = "train",
    difficulty: Difficulty | Literal["all"] = "all",
    categories: Collection[str] = (),
) -> list[Prompt]:
    """Packaged prompts of one split and difficulty.

    Args:
        split: one split, or `all`.
        difficulty: one difficulty, or `all`.
        categories: empty keeps all.

    Raises:
        ConfigError: an unknown split, difficulty or category, or nothing is left.
    """
    rows = packaged_prompts()
    known = sorted({row.prompt.category for row in rows})
    for category in categories:
        if category not in known:
            raise ConfigError(f"data.categories: no category {category!r}; use {', '.join(known)}")
    if split not in ("train", "validation", "probe", "all"):
        raise ConfigError(f"split {split!r} of the package: use train, validation, probe or all")
    if difficulty not in ("tiny", "full", "all"):
        raise ConfigError(f"data.difficulty={difficulty}: use tiny, full or all")
    found = [
        row.prompt
        for row in rows
        if split in ("all", row.split)
        and difficulty in ("all", row.difficulty)
        and (not categories or row.prompt.category in categories)
    ]
    if not found:
        raise ConfigError(
            f"data.categories={list(categories)}: no {difficulty} prompt of split {split} is in them; add one"
        )
    return found
