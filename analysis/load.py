"""A run's tables as data frames. Pandas and pyarrow are imported when a table is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from racelab.experiments.errors import DataError, RunFolderError
from racelab.experiments.fsio import read_json
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import read_spool
from racelab.experiments.tracking.tables import (
    TABLES,
    arrow_schema,
    cell,
    column_kinds,
    table_rows,
    tables_current,
    value_kind,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

BASE_COLUMNS = {"step": "int", "attempt": "int"}


def load_table(
    run: RunFolder, name: str, *, step: int | None = None, columns: Sequence[str] | None = None
) -> pd.DataFrame:
    """One table of a run, superseded steps left out.

    Read from parquet when that holds the whole spool, else (a running run) from the spool itself; the two
    give the same frame. Lists come as Python lists with NaN for null, json columns as the values they were.

    Args:
        run: opened.
        name: `metrics`, `groups`, ... (see `tracking/tables.py`).
        step: only the rows of this one. A table of texts may be far larger than one of its steps.
        columns: only these, of those there are. None: all.

    Returns:
        A frame with the table's known columns; no rows if the run wrote none.

    Raises:
        DataError: neither known nor in this run; the message lists what there is.
    """
    table = _from_parquet(run, name, step, columns) if tables_current(run) else _from_spool(run, name, step)
    if table is None:
        if name not in TABLES:
            there = sorted({table for record in read_spool(run) for table, _ in table_rows(record)})
            raise DataError(f"run {run.run_id} has no table {name!r}; it has {', '.join(there) or 'none'}")
        table = arrow_schema(TABLES[name]).empty_table()
    if columns is not None:
        table = table.select([column for column in table.column_names if column in columns])
    return _frame(table)


def load_metrics(run: RunFolder) -> pd.DataFrame:
    """Metrics against step: the index is `step`, one column per metric name, NaN where none was logged.

    Of several values of one metric at one step the last written counts.
    """
    long = load_table(run, "metrics")
    last = long.drop_duplicates(["step", "name"], keep="last")
    wide = last.pivot(index="step", columns="name", values="value").sort_index()
    wide.columns.name = None
    return wide


def load_manifest(run: RunFolder) -> dict[str, Any] | None:
    """`manifest.json` (rows, SHA-256 and last step of each table, complete), None before the run's end."""
    try:
        manifest: dict[str, Any] = read_json(run.path / "manifest.json")
    except RunFolderError:
        return None
    return manifest


def _from_parquet(
    run: RunFolder, name: str, step: int | None, columns: Sequence[str] | None
) -> pa.Table | None:
    import pyarrow.parquet as pq

    manifest = load_manifest(run)
    if manifest is None or name not in manifest["tables"]:
        return None
    path = run.path / "tables" / f"{name}.parquet"
    try:
        there = pq.read_schema(path).names
        wanted = None if columns is None else [column for column in there if column in columns]
        return pq.read_table(path, columns=wanted, filters=None if step is None else [("step", "=", step)])
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path} ({error}); remove it, and `racelab sync {run.run_id}` builds it anew"
        ) from error


def _from_spool(run: RunFolder, name: str, step: int | None) -> pa.Table | None:
    import pyarrow as pa

    rows = [
        row
        for record in read_spool(run)
        if step is None or record["step"] == step
        for table, row in table_rows(record)
        if table == name
    ]
    if not rows:
        return None
    seen: dict[str, set[str]] = {}
    for row in rows:
        for column, value in row.items():
            seen.setdefault(column, set()).add(value_kind(value))
    kinds = column_kinds(seen, TABLES.get(name, BASE_COLUMNS))
    schema = arrow_schema(kinds)
    arrays = {
        column: pa.array([cell(row.get(column), kind) for row in rows], type=schema.field(column).type)
        for column, kind in kinds.items()
    }
    return pa.table(arrays, schema=schema)


def _frame(table: pa.Table) -> pd.DataFrame:
    import pandas as pd

    columns: dict[str, Any] = {}
    for field in table.schema:
        kind = (field.metadata or {}).get(b"kind", b"").decode()
        values = table.column(field.name)
        if kind == "json":
            columns[field.name] = pd.Series([_decode(v) for v in values.to_pylist()], dtype=object)
        elif kind in ("ints", "floats", "strs"):
            columns[field.name] = pd.Series([_list(v, kind) for v in values.to_pylist()], dtype=object)
        else:
            columns[field.name] = values.to_pandas()
    return pd.DataFrame(columns)


def _decode(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _list(values: list[Any] | None, kind: str) -> list[Any] | None:
    if values is None or kind != "floats":
        return values
    return [float("nan") if value is None else value for value in values]
