"""The tables of a run: known names and columns, and the parquet files made from the spool.

The spool is read twice (once for the types of columns nobody announced, once to write) and held in memory one
block at a time, so a table may be far larger than memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from racelab.experiments import fence
from racelab.experiments.errors import RunFolderError
from racelab.experiments.fsio import read_json, rename, unique, unwritten, write_json_atomic
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import Record, last_end, read_spool, spool_files

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA: Final = 1
_HEAD_ROWS: Final = 50
_HEAD_CHARS: Final = 500
_BLOCK_ROWS: Final = 2_000
_BLOCK_BYTES: Final = 16_000_000

# Column types: int, float, str, bool; ints, floats, strs = lists; json = any JSON value, stored as its text.
Columns = Mapping[str, str]

_THRESHOLDS = {"sigma_rt": "float", "tau_tie": "float", "d_tri_star": "float", "d_emb_star": "float"}
_ALL = ("sigma_rt", "tau_tie", "d_tri", "d_emb", "tau_sat", "tau_imp", "sigma_sw", "mu_sat")
_AT = {"step": "int", "attempt": "int"}

TABLES: Final[Mapping[str, Columns]] = {
    "metrics": {**_AT, "ts": "int", "name": "str", "value": "float"},
    "groups": {
        **_AT, "policy_step": "int", "phase_index": "int", "prompt_id": "str", "rubric_sha": "str",
        "rewards": "floats", "mean": "float", "std": "float", "tie_rate": "float", "d_tri": "float",
        "d_emb": "float", "route": "str", "saturated": "bool", **_THRESHOLDS,
    },
    "probe_groups": {
        **_AT, "checkpoint": "str", "prompt_id": "str", "category": "str", "rewards": "floats", "std": "float",
        "all_ge_0_8": "bool",
    },
    "samples": {
        **_AT, "group": "int", "idx": "int", "role": "str", "prompt": "str", "text": "str",
        "rubric_text": "str", "score": "float",
    },
    "phases": {
        **_AT, "index": "int", "kind": "str", "start": "int", "end": "int", "length": "int",
        "end_reason": "str", **{f"{name}_{when}": "float" for when in ("before", "after") for name in _ALL},
    },
    "rubric_groups": {
        **_AT, "entry_id": "str", "m_old": "float", "margins": "floats", "base_rewards": "floats",
        "final_rewards": "floats",
    },
    "rubric_probe": {
        **_AT, "checkpoint": "str", "prompt_id": "str", "category": "str", "json_valid": "bool",
        "redundant": "bool", "criterion": "str", "weight": "float", "chars": "int",
        **dict.fromkeys(
            ("label_only", "specific", "constraint", "grounded", "negation", "examples", "correctness",
             "completeness"), "bool",
        ), "text": "str",
    },
    "static_rubrics": {
        **_AT, "prompt_id": "str", "text": "str", "n_criteria": "int", "source": "str", "tries": "int",
    },
    "rrd_rounds": {
        **_AT, "prompt_id": "str", "round": "int", "items": "int", "added": "int", "rejected": "int",
    },
    "verdicts": {
        **_AT, "group": "int", "idx": "int", "role": "str", "prompt_id": "str", "preferred": "str",
        "winner": "str", "reward": "float",
    },
    "eval_examples": {
        **_AT, "checkpoint": "int", "policy_step": "int", "suite": "str", "benchmark": "str",
        "domain": "str", "judge": "str", "example_id": "str", "score": "float", "status": "str",
        "details": "json", "protocol": "str", "seed": "int",
    },
    "eval_answers": {
        **_AT, "benchmark": "str", "example_id": "str", "idx": "int", "role": "str", "text": "str",
        "finished": "bool", "n_tokens": "int", "extracted": "str", "score": "float", "error": "str",
    },
    "val_examples": {**_AT, "task": "str", "example_id": "str", "reward": "float", "turns": "int"},
    "rollouts": {
        **_AT, "group": "int", "idx": "int", "is_retry": "bool", "parent": "int", "retry_from_step": "int",
        "R": "float", "grades": "floats", "pivots": "ints", "A_k": "floats", "A_sdae": "float",
        "A_grpo": "float", "token_adv_std": "float", "prompt_id": "str", "parse_status": "str",
        "n_turns": "int", "n_tokens": "int",
    },
    "transcripts": {
        **_AT, "group": "int", "idx": "int", "instance": "json", "system": "str", "first_observation": "str",
        "turns": "json", "token_turn": "ints", "token_adv": "floats", "grading": "str", "reflection": "str",
        "addition": "str",
    },
    "reflections": {
        **_AT, "group": "int", "idx": "int", "status": "str", "retry_from_step": "int", "n_tokens": "int",
        "text": "str",
    },
    "retry_pairs": {
        **_AT, "group": "int", "parent": "int", "retry": "int", "delta_R": "float", "delta_grades": "floats",
        "retry_from_step": "int", "weight": "float", "used": "bool",
    },
}  # fmt: skip
"""Table -> column -> type. Other tables and columns are kept too, with types found from their values."""


def table_rows(record: Record) -> Iterator[tuple[str, dict[str, Any]]]:
    """The (table, row) pairs of one spool record; a metrics record gives rows of `metrics`."""
    at = {"step": record["step"], "attempt": record["attempt"]}
    if record["kind"] == "metrics":
        for name, value in record["values"].items():
            yield "metrics", {**at, "ts": record["ts"], "name": name, "value": value}
    elif record["kind"] == "rows":
        for row in record["rows"]:
            yield record["table"], {**at, **row}


def column_kinds(values: Mapping[str, set[str]], known: Columns) -> dict[str, str]:
    """Column -> type: the known one if every value fits it, else the one that fits all, else json.

    Args:
        values: column -> kinds of values seen (see `value_kind`), in order of appearance.
        known: the announced columns; all are in the result, in their order and first.
    """
    result: dict[str, str] = {}
    for column in [*known, *(name for name in values if name not in known)]:
        seen = values.get(column, set()) - {"null"}
        candidates = [known[column]] if column in known else []
        candidates += ["bool", "int", "float", "str", "ints", "floats", "strs"]
        result[column] = next((kind for kind in candidates if seen <= _FITS[kind]), "json")
        if not seen and column not in known:
            result[column] = "json"
    return result


_FITS: Final[Mapping[str, set[str]]] = {
    "bool": {"bool"},
    "int": {"int"},
    "float": {"int", "float"},
    "str": {"str"},
    "ints": {"ints", "list"},
    "floats": {"ints", "floats", "list"},
    "strs": {"strs", "list"},
    "json": {"bool", "int", "float", "str", "ints", "floats", "strs", "list", "json"},
}


def value_kind(value: object) -> str:
    """What a JSON value is: null, bool, int, float, str, ints, floats, strs, list (of nothing) or json."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if -(2**63) <= value < 2**63 else "json"
    if isinstance(value, float):
        return "float"
    if isinstance(value, str):
        return "str"
    if not isinstance(value, list):
        return "json"
    inside = {value_kind(item) for item in value} - {"null"}
    for name, kinds in (("list", set()), ("ints", {"int"}), ("floats", {"int", "float"}), ("strs", {"str"})):
        if inside <= kinds:
            return name
    return "json"


def write_tables(run: RunFolder) -> dict[str, Any]:
    """Builds `tables/*.parquet`, their JSON twins (the first rows, for people) and `manifest.json`.

    Each file is replaced as a whole, the manifest last. Returns the manifest: {schema, tables: {name: {rows,
    sha256, last_step, columns, retyped}}, last_step, complete, spool: {file: bytes read}}.

    Raises:
        DataError: a damaged spool line.
        RunFolderError: the disk is full; tables written before are intact.
        FencedError: this process was replaced; tables written before are intact.
    """
    fence.check(run.path)
    sizes = {path.name: path.stat().st_size for path in spool_files(run).values()}
    end = last_end(run)
    seen: dict[str, dict[str, set[str]]] = {"metrics": {}}
    step = 0
    for record in read_spool(run):
        step = max(step, int(record["step"]))
        for table, row in table_rows(record):
            columns = seen.setdefault(table, {})
            for name, value in row.items():
                columns.setdefault(name, set()).add(value_kind(value))
    kinds = {name: column_kinds(columns, TABLES.get(name, _AT)) for name, columns in seen.items()}
    entries = _write_all(run, kinds)
    manifest = {
        "schema": SCHEMA,
        "tables": entries,
        "last_step": step,
        "complete": end is not None and end["status"] == "finished",
        "spool": sizes,
    }
    write_json_atomic(run.path / "manifest.json", manifest)
    return manifest


def tables_current(run: RunFolder) -> bool:
    """Whether the tables are all there and were made from the whole spool."""
    try:
        manifest = read_json(run.path / "manifest.json")
    except RunFolderError:  # not built yet, or damaged: to be built anew
        return False
    if not isinstance(manifest, dict):
        return False
    sizes = {path.name: path.stat().st_size for path in spool_files(run).values()}
    tables = manifest.get("tables") or {}
    there = all((run.path / "tables" / f"{name}.parquet").is_file() for name in tables)
    return there and manifest.get("spool") == sizes


def _write_all(run: RunFolder, kinds: Mapping[str, Columns]) -> dict[str, Any]:
    folder = run.path / "tables"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritten(f"cannot write the tables of {run.path}", error) from error
    builders = {name: _Builder(name, folder, columns) for name, columns in kinds.items()}
    try:
        for record in read_spool(run):
            for table, row in table_rows(record):
                # a live spool may have grown since the first pass: its new tables wait for the next call
                if table in builders:
                    builders[table].add(row)
        return {name: builder.finish() for name, builder in sorted(builders.items())}
    except OSError as error:
        raise unwritten(f"cannot write the tables of {run.path}", error) from error
    finally:
        for builder in builders.values():
            builder.discard()


def arrow_schema(columns: Columns) -> pa.Schema:
    """The parquet schema; a json column is text, marked in the field's metadata."""
    import pyarrow as pa

    types = {
        "int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_(), "json": pa.string(),
        "ints": pa.list_(pa.int64()), "floats": pa.list_(pa.float64()), "strs": pa.list_(pa.string()),
    }  # fmt: skip
    return pa.schema([pa.field(name, types[kind], metadata={"kind": kind}) for name, kind in columns.items()])


def cell(value: Any, kind: str) -> Any:
    """A spool value as parquet stores it."""
    if value is None:
        return None
    if kind == "json":
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    # a live spool may hold a value that the first pass did not see; what no longer fits becomes null
    return value if value_kind(value) in _FITS[kind] else None


@dataclass(slots=True)
class _Builder:
    """Writes one table block by block into a temporary file."""

    name: str
    folder: Path
    columns: Columns
    rows: int = 0
    last_step: int = 0
    head: list[dict[str, Any]] = field(default_factory=list)
    block: list[dict[str, Any]] = field(default_factory=list)
    block_bytes: int = 0
    writer: Any = None
    suffix: str = field(default_factory=unique)

    @property
    def temporary(self) -> Path:
        return self.folder / f".{self.name}.{self.suffix}.tmp"

    def add(self, row: dict[str, Any]) -> None:
        self.rows += 1
        self.last_step = max(self.last_step, int(row["step"]))
        if len(self.head) < _HEAD_ROWS:
            self.head.append(_short(row))
        self.block.append(row)
        self.block_bytes += sum(len(v) for v in row.values() if isinstance(v, str | list))
        if len(self.block) >= _BLOCK_ROWS or self.block_bytes >= _BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = arrow_schema(self.columns)
        if self.writer is None:
            self.writer = pq.ParquetWriter(self.temporary, schema, compression="zstd")
        arrays = {
            name: pa.array([cell(row.get(name), kind) for row in self.block], type=schema.field(name).type)
            for name, kind in self.columns.items()
        }
        self.writer.write_table(pa.table(arrays, schema=schema))
        self.block = []
        self.block_bytes = 0

    def finish(self) -> dict[str, Any]:
        """Puts the files in place; returns the manifest entry."""
        self._flush()
        self.writer.close()
        self.writer = None
        digest = hashlib.sha256()
        with open(self.temporary, "rb") as handle:
            while data := handle.read(1 << 20):
                digest.update(data)
            os.fsync(handle.fileno())
        rename(self.temporary, self.folder / f"{self.name}.parquet")
        twin = {"table": self.name, "rows": self.rows, "shown": len(self.head), "head": self.head}
        write_json_atomic(self.folder / f"{self.name}.json", twin)
        known = TABLES.get(self.name, {})
        return {
            "rows": self.rows,
            "sha256": digest.hexdigest(),
            "last_step": self.last_step,
            "columns": dict(self.columns),
            "retyped": sorted(c for c, kind in self.columns.items() if known.get(c, kind) != kind),
        }

    def discard(self) -> None:
        """Removes what an interrupted build left."""
        if self.writer is not None:
            with contextlib.suppress(OSError):
                self.writer.close()
        with contextlib.suppress(OSError):
            self.temporary.unlink()


def _short(value: Any) -> Any:
    """A value for the JSON twin: long texts and lists are cut."""
    if isinstance(value, str) and len(value) > _HEAD_CHARS:
        return f"{value[:_HEAD_CHARS]}… ({len(value)} characters)"
    if isinstance(value, list) and len(value) > _HEAD_ROWS:
        return [*(_short(item) for item in value[:_HEAD_ROWS]), f"… ({len(value)} values)"]
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return value
