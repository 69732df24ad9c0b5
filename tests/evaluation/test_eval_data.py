"""Data of benchmarks: every shape of file, folders, the hub (stood in for by local folders), and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from racelab.experiments.errors import DataError, MissingDependencyError, UnreachableError
from racelab.experiments.evaluation import data
from racelab.experiments.evaluation.data import check_path, read_local, records
from racelab.experiments.evaluation.types import HubSource

KEY = "eval.data.bbh"
ROWS = [{"input": "one é", "target": "(A)"}, {"input": "two\nlines", "target": "(B)"}]


def write(path, value: str | bytes):
    path.write_bytes(value.encode() if isinstance(value, str) else value)
    return path


def jsonl(rows, end="\n"):
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows)


def test_every_kind_of_file_gives_the_same_records(tmp_path):
    write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + jsonl(ROWS, "\r\n").encode())
    write(tmp_path / "b.json", json.dumps({"canary": "x", "examples": ROWS}))
    write(tmp_path / "c.json", json.dumps(ROWS))
    write(tmp_path / "d.csv", 'input,target\r\none é,(A)\r\n"two\nlines",(B)\r\n')
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "e.parquet")
    for name in ("a.jsonl", "b.json", "c.json", "d.csv", "e.parquet"):
        assert [dict(record) for _, record in records(str(tmp_path / name), (), KEY)] == ROWS, name
    wheres = [where for where, _ in records(str(tmp_path / "a.jsonl"), (), KEY)]
    assert wheres == [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/a.jsonl:2"]


def test_nested_columns_of_parquet_stay(tmp_path):
    rows = [{"choices": ["a", "b"], "answer": 1}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [dict(record) for _, record in records(str(tmp_path / "a.parquet"), (), KEY)] == rows


def test_a_folder_is_read_by_name_and_its_files_name_the_task(tmp_path, monkeypatch):
    write(tmp_path / "snarks.jsonl", jsonl(ROWS[:1]))
    write(tmp_path / "navigate.json", json.dumps(ROWS[1:]))
    write(tmp_path / "own.jsonl", jsonl([{**ROWS[0], "task": "hyperbaton"}]))
    write(tmp_path / "README.md", "not data")
    (tmp_path / "sub.jsonl").mkdir()
    found = [record["task"] for _, record in records(str(tmp_path), (), KEY)]
    assert found == ["navigate", "hyperbaton", "snarks"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(read_local("~/snarks.jsonl", KEY)) == 1


def test_the_hub_by_local_folders(tmp_path, monkeypatch):
    """`load_dataset` takes a folder as it takes a name; two configurations are two folders here."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / name / "test-00000.parquet")
    sources = (
        HubSource(str(tmp_path / "one"), "test", domain="snarks"),
        HubSource(str(tmp_path / "two"), "test", config="default"),
    )
    found = records("", sources, KEY)
    assert [where for where, _ in found] == [
        f"{tmp_path}/one:test:row 1",
        f"{tmp_path}/one:test:row 2",
        f"{tmp_path}/two/default:test:row 1",
        f"{tmp_path}/two/default:test:row 2",
    ]
    assert [record.get("task") for _, record in found] == ["snarks", "snarks", None, None]
    assert found[3][1]["input"] == "two\nlines"


def test_a_split_that_the_hub_does_not_have(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "one").mkdir()
    write(tmp_path / "one" / "test.jsonl", jsonl(ROWS))
    with pytest.raises(
        DataError, match=r"one: cannot be loaded: .*; check your access to it .* set eval.data.bbh"
    ):
        records("", (HubSource(str(tmp_path / "one"), "validation"),), KEY)


def test_the_hub_does_not_answer(monkeypatch):
    import datasets

    def silent(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", silent)
    with pytest.raises(
        UnreachableError, match=r"^a/b/all: the hub does not answer \(offline\); set eval.data.bbh"
    ):
        records("", (HubSource("a/b", "test", config="all"),), KEY)


def test_without_datasets(monkeypatch):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingDependencyError, match=r"^eval.data.bbh is empty .* pip install 'racelab\[hub\]'$"
    ):
        check_path("", KEY)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", None, "no such file or folder; set eval.data.bbh to one that exists, or leave it empty"),
        ("a.txt", "x", "unknown kind of file; set eval.data.bbh to one of .jsonl, .json, .parquet, .csv"),
        ("a.jsonl", "", "no records; set eval.data.bbh to data that hold some"),
        ("a.json", "[]", "no records; set eval.data.bbh to data that hold some"),
        ("a.csv", "input,target\n", "no records; set eval.data.bbh to data that hold some"),
        ("a.json", "{}", "neither a list of records nor an object with `examples`"),
        ("a.json", "[1]", "expected an object, got int"),
        ("a.json", '[\n{"a": }]', "malformed JSON: Expecting value"),
        ("a.json", b"[\xff]", "no JSON text in UTF-8"),
        ("a.json", "[" * 200_000, "no JSON text in UTF-8"),
        ("a.jsonl", '{"input": "x"}\n{"input": NaN}\n', "malformed JSON: NaN is no JSON value"),
        ("a.jsonl", '{"input": "x"}\n[1]\n', "expected an object per line, got list"),
        ("a.jsonl", b'{"input": "\xff"}\n', "not UTF-8 text"),
        ("a.csv", "a,a\n1,2\n", "a column name occurs twice in the header"),
        ("a.csv", "a,b\n1\n", "1 fields, the header has 2"),
        ("a.parquet", "no parquet", "not a readable parquet file"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        write(path, content)
    with pytest.raises(DataError) as caught:
        records(str(path), (), KEY)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert message in text
    assert "\n" not in text


def test_the_line_is_named(tmp_path):
    with pytest.raises(DataError, match=r"a.jsonl:2: malformed JSON"):
        records(str(write(tmp_path / "a.jsonl", '{"input": "x"}\n{"input": NaN}\n')), (), KEY)
    with pytest.raises(DataError, match=r"b.json:2: malformed JSON"):
        records(str(write(tmp_path / "b.json", '[\n{"a": }]')), (), KEY)
    with pytest.raises(DataError, match=r"c.json:row 1: expected an object"):
        records(str(write(tmp_path / "c.json", "[1]")), (), KEY)


def test_a_folder_without_data(tmp_path):
    with pytest.raises(DataError, match=r"no file to read; set eval.data.bbh to a folder that holds .jsonl"):
        check_path(str(tmp_path), KEY)


def test_the_check_reads_nothing(tmp_path):
    check_path(str(write(tmp_path / "a.jsonl", "broken")), KEY)
    check_path(str(tmp_path), KEY)
    check_path("", KEY)


def test_a_folder_that_may_not_be_entered(tmp_path, monkeypatch):
    def shut(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", shut)
    with pytest.raises(DataError, match=r"cannot be read \(Permission denied\); mend its rights"):
        check_path(str(tmp_path), KEY)
