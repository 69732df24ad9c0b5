"""Parquet tables from the spool."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from racelab.experiments import fence
from racelab.experiments.errors import FencedError
from racelab.experiments.runfolder import RunFolder, read_json
from racelab.experiments.tracking import tables as tables_module
from racelab.experiments.tracking.spool import SpoolWriter
from racelab.experiments.tracking.tables import TABLES, column_kinds, value_kind, write_tables


def make(root: Path) -> tuple[RunFolder, SpoolWriter]:
    run = RunFolder.create(root, "toy", composed_yaml="", overrides=[], info={})
    run.begin_attempt()
    return run, SpoolWriter(run.spool_dir / "1.jsonl", clock=lambda: 5)


def rows(step: int, table: str, *content: dict[str, object]) -> dict[str, object]:
    return {"kind": "rows", "step": step, "table": table, "rows": list(content)}


def test_known_table_has_its_types_and_its_twin(tmp_path: Path) -> None:
    run, writer = make(tmp_path)
    writer.append([rows(1, "groups", {"step": 1, "prompt_id": "p1", "rewards": [0.25, math.nan], "mean": 1})])
    writer.append([{"kind": "end", "step": 2, "status": "finished", "reason": ""}])
    manifest = write_tables(run)
    table = pq.read_table(run.path / "tables" / "groups.parquet")
    assert table.schema.names == list(TABLES["groups"])
    assert str(table.schema.field("mean").type) == "double"
    assert str(table.schema.field("rewards").type).startswith("list<")
    assert table.to_pylist()[0] | {"rewards": 0} == {
        **dict.fromkeys(TABLES["groups"]), "step": 1, "attempt": 1, "prompt_id": "p1", "mean": 1.0,
        "rewards": 0,
    }  # fmt: skip
    assert table.to_pylist()[0]["rewards"] == [0.25, None]
    entry = manifest["tables"]["groups"]
    data = (run.path / "tables" / "groups.parquet").read_bytes()
    assert (entry["rows"], entry["sha256"]) == (1, hashlib.sha256(data).hexdigest())
    assert (manifest["complete"], manifest["last_step"]) == (True, 2)
    assert read_json(run.path / "manifest.json") == manifest
    twin = json.loads((run.path / "tables" / "groups.json").read_text())
    assert twin["head"][0]["prompt_id"] == "p1"
    assert [p.name for p in (run.path / "tables").iterdir() if p.name.startswith(".")] == []


def test_unknown_columns_and_unfitting_values_are_kept(tmp_path: Path) -> None:
    run, writer = make(tmp_path)
    writer.append([
        rows(1, "val_examples", {"step": 1, "task": "t", "reward": 1, "extra": 2, "turns": "many"}),
        rows(2, "val_examples", {"step": 2, "task": "t", "reward": 0.5, "extra": 2.5, "turns": 3}),
        rows(2, "own_table", {"step": 2, "pairs": [{"a": 1}], "name": "x"}),
    ])  # fmt: skip
    manifest = write_tables(run)
    got = pq.read_table(run.path / "tables" / "val_examples.parquet").to_pylist()
    assert [(r["reward"], r["extra"], r["turns"]) for r in got] == [(1.0, 2.0, '"many"'), (0.5, 2.5, "3")]
    assert manifest["tables"]["val_examples"]["retyped"] == ["turns"]
    own = pq.read_table(run.path / "tables" / "own_table.parquet").to_pylist()
    assert own == [{"step": 2, "attempt": 1, "pairs": '[{"a": 1}]', "name": "x"}]
    assert manifest["complete"] is False


def test_superseded_rows_do_not_reach_the_tables(tmp_path: Path) -> None:
    run, writer = make(tmp_path)
    writer.append([rows(s, "val_examples", {"step": s, "reward": 0.0}) for s in (1, 2, 3)])
    run.begin_attempt(from_step=2)
    second = SpoolWriter(run.spool_dir / "2.jsonl")
    second.append([rows(3, "val_examples", {"step": 3, "reward": 1.0})])
    second.append([{"kind": "metrics", "step": 3, "values": {"a/b": 0.5}}])
    write_tables(run)
    got = pq.read_table(run.path / "tables" / "val_examples.parquet").to_pylist()
    assert [(r["step"], r["attempt"], r["reward"]) for r in got] == [(1, 1, 0.0), (2, 1, 0.0), (3, 2, 1.0)]
    metric = pq.read_table(run.path / "tables" / "metrics.parquet").to_pylist()
    assert [(r["name"], r["step"], r["value"]) for r in metric] == [("a/b", 3, 0.5)]


def test_blocks_are_joined_and_the_twin_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_module, "_BLOCK_ROWS", 7)
    run, writer = make(tmp_path)
    for step in range(1, 101):
        writer.append([rows(step, "samples", {"step": step, "text": "x" * 2000, "score": step / 100})])
    assert write_tables(run)["tables"]["samples"]["rows"] == 100
    got = pq.read_table(run.path / "tables" / "samples.parquet", columns=["step", "text"]).to_pylist()
    assert [r["step"] for r in got] == list(range(1, 101))
    assert {len(r["text"]) for r in got} == {2000}
    assert (run.path / "tables" / "samples.json").stat().st_size < 60_000


def test_tables_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    run, writer = make(tmp_path)
    writer.append([rows(1, "val_examples", {"step": 1, "reward": 0.5})])
    assert write_tables(run) == write_tables(run)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "null"), (True, "bool"), (3, "int"), (2**63, "json"), (0.5, "float"), ("a", "str"),
        ([], "list"),
        ([None], "list"), ([1, None], "ints"), ([1, 0.5], "floats"), (["a"], "strs"), ([True], "json"),
        ([[1]], "json"), ({"a": 1}, "json"),
    ],
)  # fmt: skip
def test_value_kinds(value: object, kind: str) -> None:
    assert value_kind(value) == kind


def test_column_kinds_prefer_the_known_type() -> None:
    known = {"step": "int", "x": "floats", "y": "str"}
    assert column_kinds({"x": {"ints"}, "y": {"int"}, "z": {"null"}, "w": {"bool", "int"}}, known) == {
        "step": "int", "x": "floats", "y": "int", "z": "json", "w": "json",
    }  # fmt: skip


def test_a_replaced_attempt_leaves_the_tables_as_they_are(tmp_path: Path) -> None:
    run, writer = make(tmp_path)
    writer.append([rows(1, "val_examples", {"step": 1, "reward": 0.5})])
    fence.take(run.path, "A", {})
    with fence.hold(run.path, "A"):
        before = write_tables(run)
        writer.append([rows(2, "val_examples", {"step": 2, "reward": 0.5})])
        fence.take(run.path, "B", {})
        with open(writer.path, "ab") as spool:
            spool.write(b"damaged\n")
        with pytest.raises(FencedError):  # before hours of a spool are read
            write_tables(run)
        builder = tables_module._Builder("val_examples", run.path / "tables", {"step": "int"})
        builder.add({"step": 7})
        with pytest.raises(FencedError):  # replaced while the rows were written
            builder.finish()
        builder.discard()
    assert read_json(run.path / "manifest.json") == before
    data = (run.path / "tables" / "val_examples.parquet").read_bytes()
    assert hashlib.sha256(data).hexdigest() == before["tables"]["val_examples"]["sha256"]
    assert [p.name for p in (run.path / "tables").iterdir() if p.name.startswith(".")] == []
