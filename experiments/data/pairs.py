"""Preference pairs: of two answers to a prompt, the better one (Rubric-ARM, scalar-rm).

    pairs = load_pairs("package", difficulty="tiny")

The package pairs an answer that passes the prompt's rule with one that breaks it. Its validation and probe prompts are
never among them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from racelab.experiments.data.files import read_jsonl
from racelab.experiments.data.package import Difficulty, packaged_prompts
from racelab.experiments.data.rows import Columns, clean_text, listed, normalise, to_prompt
from racelab.experiments.errors import DataError
from racelab.experiments.types import Pair

PACKAGE = "package"
_COLUMNS = Columns("prompt")


def load_pairs(
    source: str, *, difficulty: Difficulty | Literal["all"] = "all", categories: Collection[str] = ()
) -> list[Pair]:
    """All pairs of a source, in its order.

    Args:
        source: `package`, or a .jsonl file with the fields `prompt` (a text, or a chat whose first user turn is
            taken), `chosen` and `rejected` (texts); `~` is the home folder.
        difficulty: of packaged prompts; a file has none.
        categories: of packaged prompts; empty keeps all.

    Raises:
        DataError: no such file, a line that is malformed (the message opens with `file:line`), or no pair at all.
    """
    if source == PACKAGE:
        found = _packaged(difficulty, categories)
        if not found:
            raise DataError(
                f"method.pairs=package: no {difficulty} training prompt of {listed(categories)} has two answers; "
                "set data.difficulty=all, other data.categories, or give a .jsonl file"
            )
        return found
    path = Path(source).expanduser()
    if path.suffix.lower() != ".jsonl":
        raise DataError(
            f"method.pairs={source}: give `package` or a .jsonl file with prompt, chosen, rejected"
        )
    if not path.is_file():
        raise DataError(f"method.pairs={source}: no such file")
    found = [_pair(record, path.name, where) for where, record in read_jsonl(path)]
    if not found:
        raise DataError(f"{path}: no pairs; the file is empty")
    return found


def _packaged(difficulty: str, categories: Collection[str]) -> list[Pair]:
    return [
        Pair(row.prompt, row.good, row.bad)
        for row in packaged_prompts()
        if row.split == "train"
        and row.good is not None
        and row.bad is not None
        and difficulty in ("all", row.difficulty)
        and (not categories or row.prompt.category in categories)
    ]


def _pair(record: Mapping[str, object], source: str, where: str) -> Pair:
    """The pair in one line of a file."""
    prompt = to_prompt(record, _COLUMNS, source, where)
    chosen, rejected = (_answer(record, field, where) for field in ("chosen", "rejected"))
    if normalise(chosen) == normalise(rejected):
        raise DataError(f"{where}: chosen and rejected are the same text; remove the record")
    return Pair(prompt, chosen, rejected)


def _answer(record: Mapping[str, object], field: str, where: str) -> str:
    if field not in record:
        raise DataError(f"{where}: field {field!r} is missing; the record has {listed(record)}")
    value = record[field]
    if not isinstance(value, str):
        raise DataError(f"{where}: field {field!r}: expected a text, got {type(value).__name__}")
    return clean_text(value, where, field)
