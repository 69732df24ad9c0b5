"""Prompts and other records from local .jsonl, .parquet and .csv files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from racelab.experiments.data.rows import Columns, listed, to_prompt
from racelab.experiments.errors import DataError
from racelab.experiments.types import Prompt

Record = tuple[str, Mapping[str, object]]
"""`file:line` (or `file:row n` in parquet) and the columns."""


def read_file(path: str | Path, columns: Columns | None = None, source: str = "") -> list[Prompt]:
    """All prompts of a file, in its order, not yet de-duplicated.

    A UTF-8 byte-order mark and CRLF line ends are accepted; blank lines of a .jsonl are skipped.

    Args:
        path: ends in .jsonl, .parquet or .csv; `~` is the home folder.
        columns: where the parts of a prompt stand; default: a `prompt` column and nothing else.
        source: `Prompt.source`; default: the file's name.

    Raises:
        DataError: no such file, unreadable, unknown ending, empty, not UTF-8, malformed, or a field is missing
            or of the wrong type; the message opens with `file:line`.
    """
    path = Path(path).expanduser()
    columns = columns or Columns()
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown kind of file; use {', '.join(_READERS)}")
    if not _is_file(path):
        raise DataError(f"{path}: no such file; set data.path to a file that exists")
    prompts = [
        to_prompt(record, columns, source or path.name, where) for where, record in reader(path, columns)
    ]
    if not prompts:
        raise DataError(f"{path}: no prompts; the file is empty")
    return prompts


def read_records(path: Path) -> Iterator[Record]:
    """The rows of a .jsonl, .parquet or .csv file, with all their columns, one by one.

    Raises:
        DataError: unreadable, unknown ending, not UTF-8 or malformed; the message opens with `file:line`.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: unknown kind of file; use {', '.join(_READERS)}")
    yield from reader(path, None)


def read_jsonl(path: Path) -> Iterator[Record]:
    """One JSON object per line."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line, parse_constant=_not_json)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(f"{where}: malformed JSON: {reason}") from None
        if not isinstance(record, dict):
            raise DataError(f"{where}: expected an object per line, got {type(record).__name__}")
        yield where, record


def read_csv(path: Path) -> Iterator[Record]:
    """Comma-separated with a header line; quoted fields may hold line breaks."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    header: list[str] | None = None
    try:
        for row in reader:
            where = f"{path}:{reader.line_num}"
            if header is None:
                header = row
                if len(set(header)) < len(header):
                    raise DataError(f"{where}: a column name occurs twice in the header")
            elif not row:
                continue
            elif len(row) != len(header):
                raise DataError(f"{where}: {len(row)} fields, the header has {len(header)}; quote commas")
            else:
                yield where, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: malformed CSV: {error}") from None


def read_parquet(path: Path, columns: Columns | None) -> Iterator[Record]:
    """One record per row, rows counted from 1.

    Only the wanted columns are read (chats can be long); None reads all of them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            present = names if columns is None else _wanted(names, columns, path)
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=present):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", record
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: not a readable parquet file: {reason}") from None


def _wanted(names: list[str], columns: Columns, path: Path) -> list[str]:
    for column in columns.named():
        if column not in names:
            raise DataError(f"{path}: column {column!r} is missing; the file has {listed(names)}")
    if not {columns.prompt, *columns.fallbacks} & set(names):
        raise DataError(
            f"{path}: column {columns.prompt!r} is missing; the file has {listed(names)}; set data.prompt_field"
        )
    return [name for name in names if name in columns.wanted()]


def _text(path: Path) -> str:
    """The file as text, byte-order mark dropped, CRLF and CR folded to LF."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _is_file(path: Path) -> bool:
    """False if there is none; a folder on the way that may not be entered is an error of its own."""
    try:
        return path.is_file()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({error.strerror or error}); mend its rights or its disk")


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_READERS: dict[str, Callable[[Path, Columns | None], Iterator[Record]]] = {
    ".jsonl": lambda path, _: read_jsonl(path),
    ".parquet": read_parquet,
    ".csv": lambda path, _: read_csv(path),
}
