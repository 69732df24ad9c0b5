"""The packaged prompts: sizes, hygiene, checks that tell a right answer from a wrong one and from an echo."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from racelab.experiments.data.checks import passes
from racelab.experiments.data.package import PACKAGE_FILE, packaged_prompts, read_package
from racelab.experiments.data.rows import normalise
from racelab.experiments.errors import ConfigError

ROWS = packaged_prompts()
CHECKED = [row for row in ROWS if row.prompt.check is not None]


def echoes(text: str) -> list[str]:
    """The prompt, its parts and small variations: what a model that only copies would say."""
    stem = text.rstrip(".?!")
    found = [text, text.lower(), text.upper(), stem, stem + "?", stem + "!", f"{text} {text}", f'"{text}"']
    if ": " in text:
        tail = text.split(": ", 1)[1]
        found += [tail, tail.rstrip(".?!") + "?", tail.rstrip(".?!") + "!", f"{tail} {tail}"]
    return found + re.split(r"(?<=[.?!])\s+", text)


@pytest.mark.parametrize("row", CHECKED, ids=lambda row: row.prompt.prompt_id)
def test_check_tells_good_from_bad_and_from_an_echo(row):
    check, text = row.prompt.check, row.prompt.text
    assert passes(check, row.good), row.good
    assert not passes(check, row.bad), row.bad
    assert not passes(check, "")
    assert [e for e in echoes(text) if passes(check, e)] == []


@pytest.mark.parametrize(
    "reply",
    [
        "I am happy to help you with that.",
        "As an AI language model, I cannot do that.",
        "Sure! Here is a sentence:",
        "I don't know.",
        "ok",
        "the the the the the the",
        "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
    ],
)
def test_a_stock_reply_passes_nothing(reply):
    assert [row.prompt.prompt_id for row in CHECKED if passes(row.prompt.check, reply)] == []


def test_no_single_answer_passes_many_prompts():
    """Each good answer fits its own prompt and hardly any other: at most 5 % of all."""
    for row in CHECKED:
        hits = sum(passes(other.prompt.check, row.good) for other in CHECKED)
        assert 1 <= hits <= 0.05 * len(CHECKED), row.good


def test_sizes():
    assert len(ROWS) >= 300
    tiny = [row for row in ROWS if row.difficulty == "tiny"]
    assert len(tiny) >= 200
    assert all(row.prompt.check is not None for row in tiny)
    assert Counter(row.split for row in ROWS)["probe"] == 100
    assert len(read_package("validation", "tiny")) == 48
    categories = {row.prompt.category for row in ROWS}
    assert {"explanation", "dialogue", "rewriting", "constrained", "math", "code", "science"} <= categories
    for split in ("train", "validation", "probe"):
        assert {"math", "rewriting", "lists"} <= {p.category for p in read_package(split, "tiny")}


def test_ids_and_texts_are_unique_and_plain():
    assert len({row.prompt.prompt_id for row in ROWS}) == len(ROWS)
    assert len({normalise(row.prompt.text).casefold() for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.prompt.text == normalise(row.prompt.text)
        assert row.split in ("train", "validation", "probe")
        assert row.difficulty in ("tiny", "full")
        assert (row.good is None) == (row.bad is None) == (row.prompt.check is None)
    assert b"\r" not in PACKAGE_FILE.read_bytes()


def test_tiny_prompts_and_answers_are_short():
    for row in ROWS:
        if row.difficulty == "tiny":
            assert len(row.prompt.text.split()) <= 24, row.prompt.text
            assert len(row.good.split()) <= 16, row.good


def test_the_probe_holds_the_prompt_that_the_paper_prints():
    """Tables 9 and 10 of RACE follow one rectangle prompt; §6.2 has emotional-support prompts."""
    probe = read_package("probe")
    assert any("perimeter of a rectangle is 48" in p.text for p in probe)
    assert sum(p.category == "support" for p in probe) >= 5


def test_filters():
    train = read_package("train", "tiny", ["math"])
    assert train
    assert {p.category for p in train} == {"math"}
    assert {p.source for p in train} == {"package"}
    assert len(read_package("all", "all")) == len(ROWS)
    assert len(read_package()) == len(read_package("train", "tiny")) + len(read_package("train", "full"))


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("train", "tiny", ["maths"]), "maths"),
        (("test",), "test"),
        (("train", "huge"), "huge"),
        (("train", "tiny", ["support"]), "support"),
    ],
)
def test_an_unknown_filter_is_refused(arguments, word):
    with pytest.raises(ConfigError, match=word):
        read_package(*arguments)
