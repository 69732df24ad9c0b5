"""Prompt lengths against the window; the token counter is words plus two for the chat template."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.data.window import fit_window, truncate_text
from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.types import Prompt

ROWS = [
    Prompt("a", "one two", "f.jsonl"),
    Prompt("b", "one  two three\nfour five", "f.jsonl"),
    Prompt("c", "one two three four", "f.jsonl"),
]


def words(text: str) -> int:
    return 2 + len(text.split())


def letters(text: str) -> int:
    return 2 + len(text)


@pytest.mark.parametrize("policy", ["error", "truncate", "drop"])
def test_prompts_that_fit_are_left_alone(policy):
    rows, report = fit_window(ROWS, words, 7, policy)
    assert rows == ROWS
    assert (report.longest, report.longest_id, report.truncated, report.dropped) == (7, "b", 0, 0)


def test_error_names_file_id_and_length():
    with pytest.raises(DataError, match=r"f\.jsonl: prompt b has 7 tokens, 6 fit; .*truncate or drop"):
        fit_window(ROWS, words, 6, "error")


def test_truncate_cuts_between_words_and_counts():
    rows, report = fit_window(ROWS, words, 5, "truncate")
    assert [p.text for p in rows] == ["one two", "one  two three", "one two three"]
    assert [p.prompt_id for p in rows] == ["a", "b", "c"]
    assert (report.truncated, report.dropped, report.longest, report.limit) == (2, 0, 7, 5)
    assert "2 truncated" in report.line()


def test_drop_leaves_out_and_counts():
    rows, report = fit_window(ROWS, words, 5, "drop")
    assert [p.prompt_id for p in rows] == ["a"]
    assert (report.dropped, report.truncated) == (2, 0)
    with pytest.raises(DataError, match="all 3 prompts have more than 3 tokens"):
        fit_window(ROWS, words, 3, "drop")


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens=2: the chat template alone takes 2"):
        fit_window(ROWS, words, 2, "truncate")
    with pytest.raises(ConfigError, match="on_long_prompt=cut"):
        fit_window(ROWS, words, 9, "cut")
    with pytest.raises(DataError, match="no prompts"):
        fit_window([], words, 9, "drop")
    with pytest.raises(DataError, match="prompt z: nothing is left"):
        fit_window([Prompt("z", "  long")], letters, 4, "truncate")


def test_a_word_longer_than_the_window_is_cut_inside():
    assert truncate_text("abcdef", letters, 5) == "abc"
    assert truncate_text("ab cdef", letters, 6) == "ab"


@given(st.text(max_size=60), st.integers(2, 40), st.sampled_from([words, letters]))
def test_truncation_is_a_beginning_that_fits_and_no_word_more_would(text, limit, counter):
    cut = truncate_text(text, counter, limit)
    assert text.startswith(cut)
    assert counter(cut) <= limit
    if counter(text.rstrip()) > limit and cut:
        rest = text[len(cut) :]
        following = rest[: len(rest) - len(rest.lstrip())] + (rest.split() or [""])[0]
        assert counter(cut + following) > limit
