"""Declarative checks: each kind by hand-made examples, and every malformed dict by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.data.checks import (
    count_items,
    count_sentences,
    count_words,
    find_numbers,
    has_word,
    kinds,
    passes,
    score,
    validate,
)
from racelab.experiments.errors import DataError

CASES = [
    # check, a text that passes, a text that fails
    ({"kind": "any_word", "words": ["whale*", "fish"]}, "Whales sing.", "A fisherman sings."),
    ({"kind": "any_word", "words": ["red", "blue", "green"], "min": 2}, "Red and blue", "red red red"),
    ({"kind": "any_word", "words": ["ice cream"]}, "I like ice\n cream.", "I like icecream"),
    ({"kind": "all_words", "words": ["tea", "morning"]}, "Tea every morning", "Teapot every morning"),
    ({"kind": "not_words", "words": ["cold"]}, "It is coldish", "It is COLD."),
    ({"kind": "regex", "pattern": "^yes$"}, "Yes", "Yes."),
    ({"kind": "regex", "pattern": "HI", "ignore_case": False}, "HI", "hi"),
    ({"kind": "min_words", "n": 3}, "one two three", "one two"),
    ({"kind": "max_words", "n": 3}, "one-way isn't bad", "a b c d"),
    ({"kind": "sentence_count", "n": 2}, "It is 3.5 km. Go!", "Go now."),
    ({"kind": "sentence_count", "max": 1}, "Dr. Who came", "He came. He went."),
    ({"kind": "n_items", "n": 3}, "apple, pear and fig", "apple, apple, pear"),
    ({"kind": "n_items", "min": 2, "max": 3}, "- tea\n- milk, cold", "- tea"),
    ({"kind": "starts_with", "any": ["why", "how"]}, '"Why not?"', "And why?"),
    ({"kind": "ends_with", "any": ["!", "?"]}, "Great!'", "Great."),
    ({"kind": "number", "value": 7}, "3 + 4 = 7", "7 is 3 + 4"),
    ({"kind": "number", "value": 7, "which": "any"}, "7 is 3 + 4", "8 is 3 + 4"),
    ({"kind": "number", "value": 7, "which": "first"}, "7 is 3 + 4", "3 + 4 = 7"),
    ({"kind": "number", "value": 7, "which": "any", "max_numbers": 2}, "3 and 7", "5 or 6 or 7"),
    ({"kind": "number", "value": 0.33, "tolerance": 0.01}, "about 1/3", "about 1/2"),
    ({"kind": "number", "value": 1}, "just one", "just two"),
    ({"kind": "number", "value": 1200}, "1,200 euros", "1,20 euros"),
    ({"kind": "number", "value": -5}, "it is -5", "it is 5"),
    (
        {"kind": "all_of", "checks": [{"kind": "min_words", "n": 2}, {"kind": "number", "value": 4}]},
        "four, or 4",
        "4",
    ),
    (
        {"kind": "any_of", "checks": [{"kind": "number", "value": 4}, {"kind": "number", "value": 6}]},
        "six",
        "five",
    ),
]


@pytest.mark.parametrize(("check", "good", "bad"), CASES)
def test_each_kind_passes_and_fails(check, good, bad):
    assert passes(check, good)
    assert score(check, good) == 1.0
    assert not passes(check, bad)
    assert score(check, bad) < 1.0


@pytest.mark.parametrize(("check", "good", "bad"), CASES)
@pytest.mark.parametrize("blank", ["", "  \n\t"])
def test_an_empty_response_never_passes(check, good, bad, blank):
    assert not passes(check, blank)
    assert score(check, blank) == 0.0


def test_every_kind_has_a_case():
    assert {check["kind"] for check, _, _ in CASES} | {"reasoning_gym"} == set(kinds())


def test_all_of_scores_the_share_of_its_parts():
    """Two of the three parts hold: 2/3."""
    parts = [{"kind": "min_words", "n": 1}, {"kind": "max_words", "n": 5}, {"kind": "number", "value": 9}]
    check = {"kind": "all_of", "checks": parts}
    assert score(check, "no number here") == pytest.approx(0.6666666666666666, abs=1e-12)
    assert not passes(check, "no number here")


@pytest.mark.parametrize(
    ("check", "key"),
    [
        (["any_word"], "check:"),
        ({}, "check.kind"),
        ({"kind": "contains"}, "check.kind"),
        ({"kind": ["number"]}, "check.kind"),
        ({"kind": "any_word"}, "check.words"),
        ({"kind": "any_word", "words": []}, "check.words"),
        ({"kind": "any_word", "words": "cat"}, "check.words"),
        ({"kind": "any_word", "words": ["*"]}, "check.words"),
        ({"kind": "any_word", "words": ["cat", 3]}, "check.words"),
        ({"kind": "any_word", "words": ["cat"], "minimum": 2}, "check.minimum"),
        ({"kind": "max_words", "n": -1}, "check.n"),
        ({"kind": "max_words", "n": True}, "check.n"),
        ({"kind": "n_items"}, "check.n"),
        ({"kind": "n_items", "n": 3, "max": 4}, "check.n"),
        ({"kind": "regex", "pattern": "("}, "check.pattern"),
        ({"kind": "regex", "pattern": "a", "ignore_case": 1}, "check.ignore_case"),
        ({"kind": "number", "value": "7"}, "check.value"),
        ({"kind": "number", "value": float("nan")}, "check.value"),
        ({"kind": "number", "value": 7, "which": "best"}, "check.which"),
        ({"kind": "number", "value": 7, "tolerance": -1}, "check.tolerance"),
        ({"kind": "all_of", "checks": []}, "check.checks"),
        (
            {"kind": "all_of", "checks": [{"kind": "max_words", "n": 1}, {"kind": "x"}]},
            "check.checks[1].kind",
        ),
        ({"kind": "any_of", "checks": [{"kind": "all_of", "checks": [3]}]}, "check.checks[0].checks[0]"),
        ({"kind": "reasoning_gym", "dataset": "chain_sum", "entry": {}}, "check.entry"),
        ({"kind": "reasoning_gym", "dataset": "", "entry": {"answer": "1"}}, "check.dataset"),
    ],
)
def test_a_malformed_check_names_the_prompt_and_the_key(check, key):
    for call in (
        lambda: validate(check, "p-17"),
        lambda: passes(check, "x", "p-17"),
        lambda: score(check, "x", "p-17"),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert str(caught.value).startswith(f"prompt p-17: {key}")
        assert "\n" not in str(caught.value)


def test_numbers_are_read_in_order():
    text = "Two and twenty-one, then 3.5, -4, 1,000, one hundred, 3/4 and one."
    assert find_numbers(text) == [2.0, 21.0, 3.5, -4.0, 1000.0, 100.0, 0.75, 1.0]
    assert find_numbers("the one of 2", with_one=False) == [2.0]
    assert find_numbers("3-4 x2 v1.2 someone") == [3.0, 4.0]


def test_counts():
    assert count_words("It's a well-known fact: 3 of 4!") == 7
    assert count_sentences("Is it? Yes, e.g. now. Fine") == 3
    assert count_sentences("...") == 0
    assert count_items("1. Tea\n2. tea.\n3. Milk") == 2
    assert count_items("Red, GREEN or blue & red") == 3
    assert has_word("The CATS.", "cat*")
    assert not has_word("concat", "cat*")


leaf = st.sampled_from([check for check, _, _ in CASES])


@given(leaf, leaf, st.text(max_size=60))
def test_a_passing_response_scores_one_and_composites_follow_logic(a, b, text):
    for check in (a, b):
        value = score(check, text)
        assert 0.0 <= value <= 1.0
        assert passes(check, text) == (value == 1.0)
    assert passes({"kind": "all_of", "checks": [a, b]}, text) == (passes(a, text) and passes(b, text))
    assert passes({"kind": "any_of", "checks": [a, b]}, text) == (passes(a, text) or passes(b, text))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda c: (
            st.lists(c, max_size=2)
            | st.dictionaries(st.sampled_from(["kind", "words", "n", "checks", "value"]), c, max_size=3)
        ),
        max_leaves=5,
    )
)
def test_any_json_is_either_a_check_or_a_data_error(value):
    error = None
    try:
        passes(value, "some text with 3 words")
    except DataError as caught:
        error = str(caught)
    assert "\n" not in error if error else value["kind"] in kinds()
