"""Preference pairs: which ones there are, and what a bad file is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from racelab.experiments.data.checks import passes
from racelab.experiments.data.package import read_package
from racelab.experiments.data.pairs import load_pairs
from racelab.experiments.errors import DataError


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


def test_packaged_pairs_are_training_prompts_whose_rule_tells_the_answers_apart():
    pairs = load_pairs("package", difficulty="tiny")
    assert len(pairs) >= 120
    train = {p.prompt_id for p in read_package("train", "tiny")}
    assert {p.prompt.prompt_id for p in pairs} <= train
    for pair in pairs:
        assert pair.prompt.check is not None
        assert passes(pair.prompt.check, pair.chosen)
        assert not passes(pair.prompt.check, pair.rejected)


def test_no_held_out_or_probe_prompt_is_among_them():
    texts = {p.prompt.text for p in load_pairs("package")}
    others = {p.text for split in ("validation", "probe") for p in read_package(split)}  # type: ignore[arg-type]
    assert texts.isdisjoint(others)


def test_difficulty_and_categories_choose():
    every, tiny = load_pairs("package"), load_pairs("package", difficulty="tiny")
    math = load_pairs("package", categories=["math"])
    assert len(tiny) < len(every)
    assert {p.prompt.category for p in math} == {"math"}
    assert 0 < len(math) < len(every)


def test_a_file_of_pairs(tmp_path):
    path = write(
        tmp_path / "pairs.jsonl",
        {"prompt": "Say hi.", "chosen": "Hi.", "rejected": "No."},
        "",
        {"prompt": [{"role": "user", "content": "Say ho."}], "chosen": "Ho.", "rejected": "Hi."},
    )
    first, second = load_pairs(str(path))
    assert (first.prompt.text, first.chosen, first.rejected) == ("Say hi.", "Hi.", "No.")
    assert (second.prompt.text, second.prompt.source) == ("Say ho.", "pairs.jsonl")
    assert first.prompt.prompt_id != second.prompt.prompt_id


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "x", "chosen": "a"}, "'rejected' is missing"),
        ({"prompt": "x", "chosen": "a", "rejected": 3}, "'rejected': expected a text, got int"),
        ({"prompt": "x", "chosen": "  ", "rejected": "b"}, "'chosen' is blank"),
        ({"prompt": "x", "chosen": "a b", "rejected": "a  b "}, "the same text"),
        ({"chosen": "a", "rejected": "b"}, "'prompt' is missing"),
        ("{no json", "malformed JSON"),
        ("[1]", "expected an object per line"),
    ],
)
def test_errors_name_file_and_line(tmp_path, line, words):
    path = write(tmp_path / "p.jsonl", {"prompt": "x", "chosen": "a", "rejected": "b"}, line)
    with pytest.raises(DataError) as error:
        load_pairs(str(path))
    assert f"{path}:2: " in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [("nowhere.jsonl", "no such file"), ("pairs.csv", "a .jsonl file"), ("other", "`package`")],
)
def test_sources_that_are_none(source, words):
    with pytest.raises(DataError, match=words):
        load_pairs(source)


def test_nothing_found_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no pairs"):
        load_pairs(str(write(tmp_path / "e.jsonl", "")))
    with pytest.raises(DataError, match=r"data\.categories"):
        load_pairs("package", categories=["nothing"])
