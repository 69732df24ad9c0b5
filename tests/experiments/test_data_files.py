"""Local files: every accepted shape, and every malformed one by file, line and field."""

from __future__ import annotations

import csv
import json
import string
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from racelab.experiments.data.files import read_file
from racelab.experiments.data.rows import Columns
from racelab.experiments.errors import DataError

CHECK = {"kind": "number", "value": 4}
FULL = Columns("question", prompt_id="key", category="kind", check="rule")


def write(path, data: str | bytes):
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_jsonl_with_all_columns(tmp_path):
    row = {"question": " What is 2 + 2? ", "key": 7, "kind": "math", "rule": CHECK, "extra": [1]}
    path = write(tmp_path / "a.jsonl", json.dumps(row) + "\n\n")
    (prompt,) = read_file(path, FULL)
    assert (prompt.prompt_id, prompt.text, prompt.source) == ("7", " What is 2 + 2? ", "a.jsonl")
    assert (prompt.category, prompt.check) == ("math", CHECK)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_and_byte_order_marks(tmp_path, end, mark):
    lines = ['{"prompt": "one é"}', '{"prompt": "two"}', ""]
    path = write(tmp_path / "a.jsonl", mark + end.join(lines).encode())
    assert [p.text for p in read_file(path)] == ["one é", "two"]
    path = write(tmp_path / "a.csv", mark + end.join(["prompt,n", "one é,1", '"two, too",2', ""]).encode())
    assert [p.text for p in read_file(path)] == ["one é", "two, too"]


def test_csv_with_a_check_column_and_a_line_break(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["question", "key", "kind", "rule"], ["a\nb", "x", "math", json.dumps(CHECK)]])
        writer.writerow(["c", "y", "math", ""])
    one, two = read_file(path, FULL)
    assert (one.text, one.check, two.check) == ("a\nb", CHECK, None)


def test_parquet_with_text_and_with_chats(tmp_path):
    chat = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "user", "content": "x"},
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": [chat, chat[1:]], "n": [1, 2]}), path)
    assert [p.text for p in read_file(path, Columns("messages"))] == ["hello", "hello"]
    assert [p.text for p in read_file(path, Columns("prompt", fallbacks=("chosen", "messages")))] == [
        "hello"
    ] * 2
    with pytest.raises(
        DataError, match=r"a\.parquet: column 'prompt' is missing; the file has messages, n; set"
    ):
        read_file(path)
    with pytest.raises(DataError, match=r"column 'key' is missing; the file has messages, n"):
        read_file(path, Columns("messages", prompt_id="key"))
    pq.write_table(pa.table({"prompt": ["a", None]}), path)
    with pytest.raises(DataError, match=r"a\.parquet:row 2: field 'prompt' is missing or null"):
        read_file(path)


def test_derived_ids_are_stable_and_ignore_white_space(tmp_path):
    a = read_file(write(tmp_path / "a.jsonl", '{"prompt": "x  y"}\n{"prompt": "z"}\n'), source="s")
    b = read_file(write(tmp_path / "b.jsonl", '{"prompt": "z"}\n{"prompt": " x y"}\n'), source="s")
    assert [p.prompt_id for p in a] == [p.prompt_id for p in reversed(b)]
    assert a[0].prompt_id != a[1].prompt_id
    assert a[0].prompt_id.startswith("s-")


GOOD = '{"question": "q", "key": "k", "kind": "c", "rule": null}\n'


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"question": "q"', "malformed JSON"),
        ("[1]", "list"),
        ('{"question": "q", "key": NaN}', "NaN"),
        ("[" * 100_000, "malformed JSON"),
        ('{"key": "k", "kind": "c", "rule": null}', "'question' is missing"),
        ('{"question": null, "key": "k", "kind": "c", "rule": null}', "'question' is missing or null"),
        (
            '{"question": 3, "key": "k", "kind": "c", "rule": null}',
            "'question': expected a text or a chat, got int",
        ),
        ('{"question": " ", "key": "k", "kind": "c", "rule": null}', "'question' is blank"),
        ('{"question": "a\\u0000b", "key": "k", "kind": "c", "rule": null}', "NUL"),
        ('{"question": "a\\ud800b", "key": "k", "kind": "c", "rule": null}', "surrogate"),
        ('{"question": [], "key": "k", "kind": "c", "rule": null}', "no user turn"),
        ('{"question": ["hi"], "key": "k", "kind": "c", "rule": null}', r"question\[0\]"),
        (
            '{"question": [{"role": "user"}], "key": "k", "kind": "c", "rule": null}',
            r"question\[0\]\.content",
        ),
        ('{"question": "q", "kind": "c", "rule": null}', "'key' is missing"),
        ('{"question": "q", "key": 1.5, "kind": "c", "rule": null}', "'key': expected a text, got float"),
        ('{"question": "q", "key": "k", "kind": true, "rule": null}', "'kind': expected a text, got bool"),
        ('{"question": "q", "key": "k", "kind": "c", "rule": 3}', "'rule': expected an object"),
        ('{"question": "q", "key": "k", "kind": "c", "rule": "{"}', "'rule' is no JSON"),
        ('{"question": "q", "key": "k9", "kind": "c", "rule": {"kind": "x"}}', r"prompt k9: check\.kind"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, field):
    path = write(tmp_path / "bad.jsonl", GOOD + "\r\n" + line + "\n" + GOOD)
    with pytest.raises(DataError, match=field) as caught:
        read_file(path, FULL)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("prompt,n\na,1\nb\n", ":3: 1 fields, the header has 2"),
        ("prompt,prompt\na,1\n", ":1: a column name occurs twice"),
        ('prompt,n\n"a"b,1\n', ":2: malformed CSV"),
        ("prompt,n\na\x00,1\n", "NUL"),
        ("prompt,n\n", "empty"),
        ("text\na\n", ":2: field 'prompt' is missing"),
    ],
)
def test_a_bad_csv_is_named(tmp_path, body, message):
    with pytest.raises(DataError) as caught:
        read_file(write(tmp_path / "bad.csv", body))
    assert message in str(caught.value)


def test_messages_stay_on_one_short_line_whatever_the_names(tmp_path):
    row = {"question": "q", "key": "a\nb" + "k" * 500, "kind": "c", "rule": {"kind": "number", "val\nue": 1}}
    with pytest.raises(DataError) as caught:
        read_file(write(tmp_path / "a.jsonl", json.dumps(row)), FULL)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400 + len(str(tmp_path))
    with pytest.raises(DataError, match=r"the record has c0, .*c11 and 8 more") as caught:
        read_file(write(tmp_path / "b.jsonl", json.dumps({f"c{i}": 1 for i in range(20)})))


def test_files_that_are_no_data(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        read_file(tmp_path / "gone.jsonl")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="no such file"):
        read_file(tmp_path / "folder.csv")
    with pytest.raises(DataError, match=r"unknown kind of file; use \.jsonl"):
        read_file(write(tmp_path / "a.txt", "x"))
    for name in ("a.jsonl", "a.csv"):
        with pytest.raises(DataError, match="empty"):
            read_file(write(tmp_path / name, ""))
    with pytest.raises(DataError, match=r"u\.jsonl:2: not UTF-8"):
        read_file(write(tmp_path / "u.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n'))
    for data in (b"", b"PAR1 and more"):
        with pytest.raises(DataError, match=r"p\.parquet: not a readable parquet file"):
            read_file(write(tmp_path / "p.parquet", data))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="empty"):
        read_file(tmp_path / "none.parquet")


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.jsonl", '{"prompt": "one"}')
    assert [p.text for p in read_file("~/a.jsonl")] == ["one"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
@pytest.mark.parametrize("call", ["read_bytes", "is_file"])
def test_a_file_that_the_system_will_not_give_is_named(tmp_path, monkeypatch, name, call):
    path = write(tmp_path / name, "prompt\none\n")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(DataError, match=r"a\.(jsonl|csv): cannot be read \(Permission denied\)"):
        read_file(path)


texts = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), min_size=1, max_size=20
).filter(lambda s: s.strip() and "\r" not in s)
quiet = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quiet
@given(st.lists(texts, min_size=1, max_size=5))
def test_any_text_survives_all_three_formats(tmp_path, rows):
    write(tmp_path / "r.jsonl", "".join(json.dumps({"prompt": r}, ensure_ascii=False) + "\n" for r in rows))
    with (tmp_path / "r.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["prompt", "n"], *([r, 1] for r in rows)])
    pq.write_table(pa.table({"prompt": rows}), tmp_path / "r.parquet")
    for name in ("r.jsonl", "r.csv", "r.parquet"):
        assert [p.text for p in read_file(tmp_path / name)] == rows


@quiet
@given(
    st.sampled_from(["f.jsonl", "f.csv", "f.parquet"]),
    st.binary(max_size=80) | st.text(string.printable + '{}":,[]é\ud7ff', max_size=80).map(str.encode),
)
def test_any_bytes_give_prompts_or_one_line(tmp_path, name, data):
    path = write(tmp_path / name, b'{"prompt": "a"}\n' + data if name.endswith("jsonl") else data)
    message, prompts = "", []
    try:
        prompts = read_file(path)
    except DataError as error:
        message = str(error)
    assert prompts or message.startswith(str(path))
    assert len(message.splitlines()) <= 1
