"""What the tasks of olmo3-adapt share: settings, the text that is scored, rows, and reading of fields."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from racelab.experiments.data.rows import clean_text, listed
from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.types import Answer, Ask, Examined, Example, Mark

OWN_TOKENS = 131_072
"""Longest answer of every task but MBPP+."""


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """What a run may change of a task.

    Attributes:
        max_tokens: bound of one answer, below the task's own; None: the task's own.
        thinking: what is scored: as the task has it, after the thinking block, or with it.
        think_end: the tag that closes a thinking block.
        quirks: oddities of the published protocol that hold (`configs.schema_eval.Quirk`).
        think: `Ask.thinking`.
    """

    max_tokens: int | None = None
    thinking: Literal["protocol", "strip", "keep"] = "protocol"
    think_end: str = "</think>"
    quirks: frozenset[str] = frozenset()
    think: bool | None = None


def scored_text(text: str, settings: TaskSettings, strips: bool) -> str:
    """What is scored of an answer: what follows the first close tag, or all of it.

    Args:
        text: the answer as it came.
        settings: `thinking` overrides the task.
        strips: whether the task itself leaves the thinking out.

    Returns:
        The whole text where there is no close tag.
    """
    if settings.thinking == "keep" or (settings.thinking == "protocol" and not strips):
        return text
    _, tag, rest = text.partition(settings.think_end)
    return rest if tag else text


def question(
    user: str, settings: TaskSettings, *, n: int = 1, own: int = OWN_TOKENS, overrides: bool = False
) -> Ask:
    """A task's question as olmo3-adapt samples it: T 0.6, nucleus 0.95, no system turn, no stop strings.

    Args:
        user: the user's turn.
        settings: of the run.
        n: answers wanted.
        own: the task's own bound in tokens.
        overrides: the task belongs to those that set their bound after the launcher's has been applied; under the quirk
            `token-override` their own bound then stands.
    """
    deaf = overrides and "token-override" in settings.quirks
    cap = own if deaf or settings.max_tokens is None else min(own, settings.max_tokens)
    return Ask(user, n=n, max_tokens=cap, temperature=0.6, top_p=0.95, thinking=settings.think)


def row(
    idx: int, answer: Answer, extracted: str | None, score: float, error: str | None = None
) -> dict[str, Any]:
    """One row of `eval_answers`.

    Args:
        idx: of the answer among those of its example, from 0.
        answer: with a text.
        extracted: what was taken from it; None: nothing.
        score: the primary metric of this answer.
        error: one line; default: the answer's own.
    """
    return {
        "idx": idx,
        "role": "answer",
        "text": answer.text or "",
        "finished": answer.finished,
        "n_tokens": answer.n_tokens,
        "extracted": extracted,
        "score": score,
        "error": answer.error if error is None else error,
    }


def present(record: Mapping[str, Any], key: str, where: str) -> Any:
    """The value of a field.

    Raises:
        DataError: there is none.
    """
    if key not in record:
        raise DataError(f"{where}: field {key!r} is missing; the record has {listed(record)}")
    return record[key]


def text_field(record: Mapping[str, Any], key: str, where: str, *, blank: bool = False) -> str:
    """A text that can be tokenised and stored.

    Args:
        record: the columns.
        key: of the field.
        where: `file:line`, opens the message.
        blank: whether it may be missing, null or without a visible character ("" is returned).

    Raises:
        DataError: missing, of another type, blank, or it holds NUL or a lone surrogate.
    """
    value = record.get(key) if blank else present(record, key, where)
    if blank and (value is None or _nan(value) or (isinstance(value, str) and not value.strip())):
        return ""
    if not isinstance(value, str):
        raise wrong_type(where, key, value, "a text")
    return clean_text(value, where, key)


def number_field(record: Mapping[str, Any], key: str, where: str) -> int:
    """A whole number, or (in CSV) a text of one.

    Raises:
        DataError: missing, or no whole number.
    """
    value = present(record, key, where)
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(where, key, value, "a whole number")
    return value


def texts_field(
    record: Mapping[str, Any], key: str, where: str, *, least: int = 1, blank: bool = False
) -> tuple[str, ...]:
    """A list of texts, or (in CSV) the JSON text of one.

    Args:
        record: the columns.
        key: of the field.
        where: `file:line`, opens the message.
        least: texts needed.
        blank: whether one may be without a visible character.

    Raises:
        DataError: missing, of another type, fewer than `least`, or a text that cannot be used.
    """
    value = list_field(record, key, where)
    for i, item in enumerate(value):
        if not isinstance(item, str):
            raise wrong_type(where, f"{key}[{i}]", item, "a text")
        if item.strip() or not blank:
            clean_text(item, where, f"{key}[{i}]")
    if len(value) < least:
        raise DataError(f"{where}: field {key!r} holds {len(value)} texts, at least {least} are needed")
    return tuple(value)


def list_field(record: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
    """A list, or (in CSV) the JSON text of one.

    Raises:
        DataError: missing, or no list.
    """
    value = parsed(present(record, key, where), key, where, "a list")
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise wrong_type(where, key, value, "a list")
    return value


def parsed(value: Any, key: str, where: str, wanted: str) -> Any:
    """`value`, or what its JSON text holds.

    Raises:
        DataError: a text that is no JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise wrong_type(where, key, value, f"{wanted} or its JSON text") from None


def wrong_type(where: str, key: str, value: object, wanted: str) -> DataError:
    """`file:line: field ... has type ...; ...`."""
    kind = "null" if value is None else "NaN" if _nan(value) else type(value).__name__
    return DataError(f"{where}: field {key!r} has type {kind}; {wanted} is needed")


def place(where: str) -> str:
    """The number at the end of `file:line` or `name:split:row n`: stable whatever else is in the file."""
    return where.rsplit(":", 1)[-1].removeprefix("row ")


def unique(found: Iterable[tuple[str, Example]]) -> list[Example]:
    """The examples of (`file:line`, example), none of whose ids occurs twice.

    Raises:
        DataError: one does; the message names both places.
    """
    first: dict[str, str] = {}
    examples: list[Example] = []
    for where, example in found:
        name = example.example_id
        if name in first:
            raise DataError(f"{where}: id {name!r} occurs already in {first[name]}; make the ids unique")
        first[name] = where
        examples.append(example)
    return examples


def examined(
    label: str,
    example: Example,
    answer: Answer,
    extracted: str,
    score: float,
    details: Mapping[str, Any],
    *,
    parsed: bool,
) -> Examined:
    """What an example with one answer gives.

    Args:
        label: of the mark.
        example: see there.
        answer: the one.
        extracted: what was taken from it; "": nothing.
        score: the primary metric.
        details: further metrics.
        parsed: whether the answer held anything to score.
    """
    mark = Mark(label, score, details, "scored" if parsed else "unparsed")
    return Examined(example, (mark,), (row(0, answer, extracted or None, score),))


def _nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
