"""From one record of a table or file to a `Prompt`: columns, chat turns, text hygiene."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from racelab.experiments.data.checks import shown, validate
from racelab.experiments.errors import DataError
from racelab.experiments.types import Prompt


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the parts of a prompt stand in a record.

    Attributes:
        prompt: holds a text, or a chat (a list of `{"role", "content"}`), whose first user turn is taken.
        fallbacks: columns tried in this order if a record has no `prompt` column.
        prompt_id: text or whole number, unique; None derives an id from the text, stable under reordering.
        category: text; None leaves it empty.
        check: an object (or its JSON text, as in CSV), or empty for no check; None ignores checks.
    """

    prompt: str = "prompt"
    fallbacks: tuple[str, ...] = ()
    prompt_id: str | None = None
    category: str | None = None
    check: str | None = None

    def wanted(self) -> set[str]:
        """Every column that is ever looked at."""
        return {self.prompt, *self.fallbacks, *self.named()}

    def named(self) -> tuple[str, ...]:
        """The columns that every record must have, the prompt column apart."""
        return tuple(c for c in (self.prompt_id, self.category, self.check) if c is not None)


def normalise(text: str) -> str:
    """The key of de-duplication: NFC, white space folded to single blanks, ends stripped; case kept."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def text_id(source: str, text: str) -> str:
    """`<source>-<12 hex digits>` of the normalised text."""
    return f"{source}-{hashlib.sha256(normalise(text).encode()).hexdigest()[:12]}"


def clean_text(value: str, where: str, field: str) -> str:
    """`value` unchanged, if it can be tokenised and stored.

    Raises:
        DataError: blank, or it holds a NUL character or a lone surrogate.
    """
    if not value.strip():
        raise DataError(f"{where}: field {field!r} is blank; give a text or remove the record")
    if "\x00" in value:
        raise DataError(f"{where}: field {field!r} holds a NUL character; remove it")
    if any("\ud800" <= ch <= "\udfff" for ch in value):
        raise DataError(f"{where}: field {field!r} holds a lone surrogate, no Unicode text; remove it")
    return value


def first_user_turn(chat: Sequence[object], where: str, field: str) -> str:
    """The content of the first turn whose role is `user`.

    Raises:
        DataError: a turn is no `{"role", "content"}` object, or there is no user turn.
    """
    for i, turn in enumerate(chat):
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
            raise DataError(f"{where}: {field}[{i}] is no object with a text `role`")
        if turn["role"] == "user":
            content = turn.get("content")
            if not isinstance(content, str):
                raise DataError(f"{where}: {field}[{i}].content: expected a text, got {_kind(content)}")
            return clean_text(content, where, f"{field}[{i}].content")
    raise DataError(f"{where}: field {field!r} has no user turn")


def to_prompt(record: Mapping[str, object], columns: Columns, source: str, where: str) -> Prompt:
    """The prompt in one record.

    Args:
        record: column name -> value.
        columns: where the parts stand.
        source: goes into `Prompt.source` and into derived ids.
        where: `file:line`, opens every error message.

    Raises:
        DataError: a named column is missing, or holds the wrong type or unusable text.
    """
    for column in columns.named():
        if column not in record:
            raise DataError(f"{where}: field {column!r} is missing; the record has {listed(record)}")
    text = _prompt_text(record, columns, where)
    prompt_id = _plain(record, columns.prompt_id, where) if columns.prompt_id else text_id(source, text)
    category = _plain(record, columns.category, where) if columns.category else ""
    check = _check(record[columns.check], where, columns.check) if columns.check else None
    if check is not None:
        try:
            validate(check, prompt_id)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    return Prompt(prompt_id, text, source, category, check)


def _prompt_text(record: Mapping[str, object], columns: Columns, where: str) -> str:
    for column in (columns.prompt, *columns.fallbacks):
        value = record.get(column)
        if value is None and column in record and column != columns.prompt:
            continue
        if isinstance(value, str):
            return clean_text(value, where, column)
        if isinstance(value, Sequence):
            return first_user_turn(value, where, column)
        if column in record and value is not None:
            raise DataError(f"{where}: field {column!r}: expected a text or a chat, got {_kind(value)}")
    tried = " or ".join(repr(c) for c in (columns.prompt, *columns.fallbacks))
    raise DataError(f"{where}: field {tried} is missing or null; the record has {listed(record)}")


def _plain(record: Mapping[str, object], column: str, where: str) -> str:
    value = record[column]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"{where}: field {column!r}: expected a text, got {_kind(value)}")
    return clean_text(value, where, column)


def _check(value: object, where: str, column: str) -> Mapping[str, object] | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: field {column!r} is no JSON: {error.msg}") from None
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: field {column!r}: expected an object, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def listed(names: Iterable[object]) -> str:
    """At most a dozen names, for an error message of one line."""
    every = [shown(name) for name in names]
    return ", ".join(every[:12]) + (f" and {len(every) - 12} more" if len(every) > 12 else "") or "no fields"
