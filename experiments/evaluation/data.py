"""The data of a benchmark: from the hub, or from a local file or folder."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from racelab.experiments.data.files import read_records
from racelab.experiments.data.hub import HubWords, load_table
from racelab.experiments.errors import DataError, MissingDependencyError
from racelab.experiments.evaluation.types import HubSource, Record

KINDS = (".jsonl", ".json", ".parquet", ".csv")
"""Endings of the files that are read."""


def records(source_path: str, sources: Sequence[HubSource], key: str) -> list[Record]:
    """All records of a benchmark, in the order of its data.

    A record whose data name no `task` gets one: the domain of its hub source, or, in a folder, its file's name.

    Args:
        source_path: a file, or a folder whose files are read sorted by name; `~` is the home folder; "": the hub.
        sources: where the data stand on the hub.
        key: the configuration's key for `source_path`, such as `eval.data.gsm8k`; messages name it.

    Raises:
        DataError: missing, unreadable, malformed or empty; on the hub also refused.
        MissingDependencyError: `datasets` is not installed.
        UnreachableError: the hub does not answer and there is no cached copy.
    """
    if source_path:
        return read_local(source_path, key)
    check_path(source_path, key)
    found = [record for source in sources for record in _hub(source, key)]
    if not found:
        where = ", ".join(source.name for source in sources)
        raise DataError(f"{where}: no records; set {key} to data that hold some")
    return found


def read_local(source_path: str, key: str) -> list[Record]:
    """All records of a file or folder; see `records`.

    Raises:
        DataError: missing, unreadable, malformed or empty.
    """
    check_path(source_path, key)
    place = Path(source_path).expanduser()
    found = list(_folder(place) if place.is_dir() else _file(place))
    if not found:
        raise DataError(f"{place}: no records; set {key} to data that hold some")
    return found


def check_path(source_path: str, key: str) -> None:
    """Refuses what `records` could not read at all; reads nothing, so it can be asked before a model is loaded.

    Raises:
        DataError: no such file or folder, of an unknown kind, or a folder without a file of a known kind.
        MissingDependencyError: the data are on the hub and `datasets` is not installed.
    """
    if not source_path:
        if importlib.util.find_spec("datasets") is None:
            raise MissingDependencyError(
                f"{key} is empty and the hub's data need a package: pip install 'racelab[hub]'"
            )
        return
    place = Path(source_path).expanduser()
    try:
        if place.is_dir():
            if not _files(place):
                raise DataError(
                    f"{place}: no file to read; set {key} to a folder that holds {', '.join(KINDS)}"
                )
        elif not place.is_file():
            raise DataError(
                f"{place}: no such file or folder; set {key} to one that exists, or leave it empty for the hub"
            )
        elif place.suffix.lower() not in KINDS:
            raise DataError(f"{place}: unknown kind of file; set {key} to one of {', '.join(KINDS)}")
    except OSError as error:
        raise DataError(
            f"{place}: cannot be read ({error.strerror or error}); mend its rights or its disk, or {key}"
        ) from None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in KINDS and path.is_file())


def _folder(folder: Path) -> Iterator[Record]:
    for path in _files(folder):
        for where, record in _file(path):
            yield where, {"task": path.stem, **record}


def _file(path: Path) -> Iterator[Record]:
    return _json(path) if path.suffix.lower() == ".json" else read_records(path)


def _json(path: Path) -> Iterator[Record]:
    """A list of objects, or an object whose `examples` are that (as BIG-Bench Hard is published)."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); mend its rights") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: malformed JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: no JSON text in UTF-8: {error}; save it as such") from None
    if isinstance(value, dict):
        value = value.get("examples")
    if not isinstance(value, list):
        raise DataError(
            f"{path}: neither a list of records nor an object with `examples`; write one per line"
        )
    for number, record in enumerate(value, 1):
        if not isinstance(record, dict):
            raise DataError(f"{path}:row {number}: expected an object, got {type(record).__name__}")
        yield f"{path}:row {number}", record


def _hub(source: HubSource, key: str) -> Iterator[Record]:
    where = source.name if source.config is None else f"{source.name}/{source.config}"
    mend = f"check your access to it (HF_TOKEN), or set {key} to a local copy"
    words = HubWords(
        who=f"{key} is empty and the hub's data need a package",
        where=where,
        refused=mend,
        silent=f"set {key} to a local copy",
        mend=mend,
    )
    table = load_table(source.name, source.split, words, config=source.config)
    domain = {"task": source.domain} if source.domain else {}
    for number, row in enumerate(table, 1):
        yield f"{where}:{source.split}:row {number}", {**domain, **row}
