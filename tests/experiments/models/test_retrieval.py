"""Corpora, BM25 by hand, dense search against a plain product, ties."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.errors import DataError, MissingDependencyError
from racelab.experiments.models.retrieval import (
    BM25,
    FAISS_CHUNK,
    Dense,
    Passage,
    _best,
    open_engine,
    prefixes,
    read_corpus,
)
from racelab.experiments.types import FloatArray

LINES = [
    {"id": "a", "contents": '"Tern Bridge"\nThe bridge crosses the river.'},
    {"id": 7, "contents": '"Dunmere"\nA river with mills.'},
    {"id": "c", "contents": "no title here"},
]


def corpus(path: Path, lines: Sequence[object] = LINES) -> Path:
    file = path / "corpus.jsonl"
    file.write_text(
        "\n".join(json.dumps(x) if isinstance(x, dict) else str(x) for x in lines), encoding="utf-8"
    )
    return file


def test_a_corpus_is_read_in_its_order(tmp_path: Path) -> None:
    found = read_corpus(corpus(tmp_path, [LINES[0], "", *LINES[1:]]))
    assert [(p.passage_id, p.title, p.text) for p in found] == [
        ("a", "Tern Bridge", "The bridge crosses the river."),
        ("7", "Dunmere", "A river with mills."),
        ("c", "", "no title here"),
    ]
    assert Passage("1", "Bare title\ntext").title == "Bare title"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "malformed JSON"),
        ("[1]", "expected an object"),
        ('{"contents": "x"}', "'id' is missing"),
        ('{"id": true, "contents": "x"}', "'id' is missing"),
        ('{"id": "z"}', "'contents' is missing"),
        ('{"id": "z", "contents": " "}', "'contents' is missing"),
        ('{"id": "a", "contents": "x"}', "id 'a' stands there twice"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(DataError, match=rf"corpus\.jsonl:3: .*{says}"):
        read_corpus(corpus(tmp_path, [*LINES[:2], line]))


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        read_corpus(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="no passages; the file is empty"):
        read_corpus(corpus(tmp_path, [""]))
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "1", "contents": "\xe9"}')
    with pytest.raises(DataError, match=r"latin\.jsonl:1: not UTF-8"):
        read_corpus(tmp_path / "latin.jsonl")


def test_bm25_by_hand() -> None:
    texts = ["red red fox", "red hen", "blue hen hen hen"]
    engine = BM25([Passage(str(i), text) for i, text in enumerate(texts)])
    [hits] = engine.search(["red"], 3)
    # Lucene: idf = ln(1 + (3 - 2 + .5) / (2 + .5)); tf / (tf + k1 (1 - b + b len / mean)), mean length 3
    idf = math.log(1 + 1.5 / 2.5)
    wanted = [("0", idf * 2 / (2 + 1.5)), ("1", idf / (1 + 1.5 * (0.25 + 0.75 * 2 / 3)))]
    assert [h.passage.passage_id for h in hits] == [i for i, _ in wanted]
    assert [h.score for h in hits] == pytest.approx([s for _, s in wanted], rel=1e-5)


def test_bm25_gives_only_what_shares_a_word_and_clamps_k() -> None:
    engine = BM25([Passage("0", "red fox"), Passage("1", "blue hen"), Passage("2", "red hen")])
    found = engine.search(["red", "green", "", "the", "hen fox"], 50)
    assert [[h.passage.passage_id for h in hits] for hits in found] == [
        ["0", "2"],
        [],
        [],
        [],
        ["0", "1", "2"],
    ]


def test_equal_scores_are_ordered_by_position() -> None:
    engine = BM25([Passage(str(i), f"red filler{i}") for i in range(40)])
    for k in (1, 7, 40):
        assert [h.passage.passage_id for h in engine.search(["red"], k)[0]] == [str(i) for i in range(k)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 40))
def test_best_is_a_stable_sort(values: list[int], k: int) -> None:
    wanted = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert _best(np.array(values, dtype=np.float32), k).tolist() == wanted


class Letters:
    """An encoder whose vectors can be worked out: counts of a, b and c, of unit length."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def embed(self, texts: Sequence[str]) -> FloatArray:
        self.seen += texts
        rows = np.array([[t.count(c) for c in "abc"] for t in texts], dtype=np.float64) + 1e-9
        unit: FloatArray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return unit

    def forget(self) -> None: ...


def test_dense_is_the_plain_inner_product() -> None:
    texts = ["aab", "abc", "ccc", "bbc", "cab", "a"]
    engine = Dense([Passage(str(i), t) for i, t in enumerate(texts)], Letters())
    [hits] = engine.search(["aac"], 4)
    products = Letters().embed(texts) @ Letters().embed(["aac"])[0]
    wanted = sorted(range(6), key=lambda i: (-round(products[i], 6), i))[:4]
    assert [h.passage.passage_id for h in hits] == [str(i) for i in wanted]
    assert [h.score for h in hits] == pytest.approx([products[i] for i in wanted], abs=1e-6)


def test_dense_ties_are_ordered_by_position_and_k_is_clamped() -> None:
    engine = Dense([Passage(str(i), "abc") for i in range(30)], Letters())
    for k in (1, 5, 29, 30, 99):
        found = [h.passage.passage_id for h in engine.search(["abc"], k)[0]]
        assert found == [str(i) for i in range(min(k, 30))]


def test_dense_does_not_depend_on_the_queries_beside() -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc"), 9)) for _ in range(60)]
    engine = Dense([Passage(str(i), t) for i, t in enumerate(texts)], Letters())
    queries = texts[: 2 * FAISS_CHUNK + 3]
    assert engine.search(queries, 5) == [engine.search([q], 5)[0] for q in queries]
    assert engine.search([], 5) == []


def test_e5_gets_its_prefixes() -> None:
    for name in ("intfloat/e5-base-v2", "models/E5_small", "multilingual-e5-large", "e5"):
        assert prefixes(name) == ("query: ", "passage: ")
    for name in ("minilm", "me/base5-v2", "code5", "e50"):
        assert prefixes(name) == ("", "")
    encoder = Letters()
    Dense([Passage("0", "a\nb")], encoder, encoder_name="intfloat/e5-base-v2").search(["q"], 1)
    assert encoder.seen == ["passage: a\nb", "query: q"]


def test_an_index_file_is_written_once_and_checked(tmp_path: Path) -> None:
    passages = [Passage(str(i), t) for i, t in enumerate(["aab", "bcc", "c"])]
    file = tmp_path / "flat.index"
    built = Dense(passages, Letters(), index=file)
    second = Letters()
    read = Dense(passages, second, index=file)
    assert "aab" not in second.seen
    assert read.search(["abc"], 3) == built.search(["abc"], 3)
    with pytest.raises(
        DataError, match=r"flat\.index: holds 3 vectors of width 3, the corpus and encoder give 2 of 3"
    ):
        Dense(passages[:2], Letters(), index=file)
    file.write_bytes(b"no index")
    with pytest.raises(DataError, match=r"flat\.index: cannot be read as a FAISS index"):
        Dense(passages, Letters(), index=file)
    with pytest.raises(DataError, match="the index cannot be written"):
        Dense(passages, Letters(), index=tmp_path / "none" / "flat.index")


@pytest.mark.parametrize(("engine", "package"), [("bm25", "bm25s"), ("dense", "faiss")])
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, engine: str, package: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(
        MissingDependencyError, match=rf"engine {engine} needs: pip install 'racelab\[tasks\]'"
    ):
        BM25([Passage("0", "a")]) if engine == "bm25" else Dense([Passage("0", "a")], Letters())


@pytest.mark.slow
def test_minilm_finds_what_shares_no_word(tmp_path: Path) -> None:
    lines = [
        {"id": "0", "contents": '"Cat"\nThe cat sleeps on the sofa.'},
        {"id": "1", "contents": '"Bond"\nShares fell on the stock exchange.'},
        {"id": "2", "contents": '"Rain"\nA storm with heavy showers is expected.'},
    ]
    engine = open_engine("dense", corpus(tmp_path, lines), "minilm")
    for query, wanted in (
        ("kitten resting", "Cat"),
        ("equity market losses", "Bond"),
        ("bad weather", "Rain"),
    ):
        assert engine.search([query], 1)[0][0].passage.title == wanted
    assert engine.describe() == {
        "engine": "dense",
        "corpus": "corpus.jsonl",
        "passages": 3,
        "encoder": "minilm",
    }
