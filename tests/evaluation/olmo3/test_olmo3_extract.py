"""Finding a letter or a number in a text, step by step, with the faults that are part of the protocol."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.evaluation.olmo3 import bbh
from racelab.experiments.evaluation.olmo3.common import TaskSettings, scored_text
from racelab.experiments.evaluation.olmo3.extract import Extracted, extract_letter, same, squeeze
from racelab.experiments.evaluation.olmo3.gsm8k import Gsm8k

WORDS = st.lists(
    st.sampled_from(
        [
            "therefore",
            "the answer is",
            "so",
            "is correct",
            "a:",
            "Answer:",
            "(A)",
            "b",
            "C.",
            r"\boxed{",
            "}",
            "7",
            "-1,234.5",
            "$",
            r"\(",
            r"\)",
            "**",
            r"\[",
            r"\]",
            "\n",
            "  ",
            "x;",
            ")",
            "#### ",
            "</think>",
            "foo",
        ]
    ),
    max_size=30,
).map(" ".join)
TEXTS = st.one_of(WORDS, st.text(max_size=200))


def letter(text: str, *, exact: bool = True, article: bool = True) -> tuple[str, float]:
    found = extract_letter(text, "A-D", exact=exact, article=article)
    return found.answer, found.form


@pytest.mark.parametrize(
    ("text", "answer", "form"),
    [
        # the sentence that was asked for: its last match, whatever follows
        ("Therefore, the answer is (A). No: Therefore, the answer is (B). (C) is correct", "B", 1.0),
        # template 1 may miss comma and parentheses, and is in any case
        ("therefore the answer is: c", "c", 1.0),
        ("So the answer is B.", "B", 0.5),
        ("The correct answer is: D", "D", 0.5),
        ("The answer is B. But (C) and D", "B", 0.5),
        ("A: C", "C", 0.5),
        ("Answer: D or (A)", "D", 0.5),
        ("B) is correct, not (C)", "B", 0.5),
        ("maybe (A), no, (C)", "C", 0.5),
        ("I think B or rather D", "D", 0.5),
        # an earlier template wins over a later sentence
        ("The answer is A ... Answer: B", "A", 0.5),
        # of one template the last match counts
        ("the answer is A, no, the answer is B", "B", 0.5),
        # oddities that stay: a word after a phrase, a capital inside a word
        ("The answer is because of it", "b", 0.5),
        ("schema: data", "d", 0.5),
        ("Dogs", "D", 0.2),
        ("none of them", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_a_letter_by_step(text, answer, form):
    assert letter(text) == (answer, form)


def test_without_the_asked_sentence_it_is_template_one():
    assert letter("Therefore, the answer is (B)", exact=False) == ("B", 1.0)


@pytest.mark.parametrize(
    ("text", "on", "off"),
    [
        ("Such is a dog", "a", ""),
        ("A dog barks", "A", ""),
        ("I say B. A dog barks", "A", "B"),
        ("I choose A because it fits", "A", "A"),
        ("A, then", "A", "A"),
        ("Dogs", "D", ""),
        ("the answer is a", "a", "a"),
    ],
)
def test_quirk_of_the_article(text, on, off):
    assert letter(text)[0] == on
    assert letter(text, article=False)[0] == off


@pytest.mark.parametrize(
    ("text", "answer", "form"),
    [
        (r"Therefore, the final answer is \boxed{6}.", "6", 1.0),
        (r"Therefore, the final answer is \boxed{1,234}.", "1234", 1.0),
        (r"Therefore, the final answer is \boxed{5 apples}.", "5 apples", 1.0),
        (r"**Therefore, the final answer is \boxed{6}.**", "6", 1.0),
        (r"therefore the final answer is $\boxed{6}$", "6", 1.0),
        (r"The answer is \boxed{6}, or 7", "6", 0.5),
        ("The answer is 6.", "6", 0.5),
        ("The answer is 6 apples and 7 pears", "6", 0.5),
        ("The answer is about 6.\nNot 7", "about 6.", 0.5),
        ("Answer: 12.5", "12.5", 0.5),
        (r"So \boxed{3} and \boxed{4}", "4", 0.2),
        ("so it is 3 + 4 = 7", "7", 0.1),
        (r"\[ 3 \]", "3", 0.1),
        # an empty box after a phrase: all up to its brace
        (r"the answer is \boxed{} or so", r"\boxed{}", 0.5),
        # the phrase with nothing after it, then the number that stands somewhere
        ("2 + 2 = 4 is what the answer is", "4", 0.1),
        ("no number", "", 0.1),
        ("", "", 0.1),
    ],
)
def test_a_number_by_step(text, answer, form):
    assert Gsm8k(TaskSettings()).extract(text) == Extracted(answer, form)


def test_quirk_of_the_sign():
    off = Gsm8k(TaskSettings())
    on = Gsm8k(TaskSettings(quirks=frozenset({"gsm8k-unsigned"})))
    for text, signed, unsigned in [("it is -5", "-5", "5"), ("it is -.5", "-.5", "-.5"), ("10-5", "5", "5")]:
        assert off.extract(text).answer == signed
        assert on.extract(text).answer == unsigned


def test_thinking_is_cut_at_the_first_tag():
    text = "I think (A)</think>so (B)</think>(C)"
    assert scored_text(text, TaskSettings(), strips=True) == "so (B)</think>(C)"
    assert scored_text(text, TaskSettings(), strips=False) == text
    assert scored_text(text, TaskSettings(thinking="strip"), strips=False) == "so (B)</think>(C)"
    assert scored_text(text, TaskSettings(thinking="keep"), strips=True) == text
    assert scored_text(text, TaskSettings(think_end="[end]"), strips=True) == text
    assert scored_text("no tag", TaskSettings(), strips=True) == "no tag"


def test_equality():
    assert same("(b)", "B", punctuation=False)
    assert not same("(b)", "B", punctuation=True)
    assert same("-5", "5", punctuation=False)
    assert same("TRUE", "true", punctuation=True)


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_no_text_breaks_the_search(text):
    for exact in (True, False):
        for article in (True, False):
            found = extract_letter(text, "A-F", exact=exact, article=article)
            assert found.answer == "" or found.answer.upper() in tuple("ABCDEF")
            assert found.form in (0.0, 0.2, 0.5, 1.0)
            assert found.answer == "" or found.answer in text
    assert Gsm8k(TaskSettings()).extract(text).form in (0.1, 0.2, 0.5, 1.0)
    for task in ("word_sorting", "dyck_languages", "snarks", "navigate"):
        assert isinstance(bbh.extract(text, task, bare=True), str)


@given(
    st.lists(
        st.sampled_from(
            ["foo", " ", "  ", " is correct", ")", "\n", "3", ";", "is", " is\ncorrect", "B", " is  correct"]
        )
    ).map("".join)
)
@settings(max_examples=100, deadline=None)
def test_words_before_is_correct_are_those_of_the_pattern(text):
    found = re.findall(r"(?i)\b([a-z ]+)\)?\s+is\s+correct", text)
    assert bbh._words_before_is_correct(text) == (found[-1] if found else None)


@pytest.mark.parametrize(
    "unit",
    [
        "word ",
        "x is correct ",
        "the answer is ",
        r"\boxed{",
        r"\(",
        "$",
        "(",
        "1",
        " ",
        "\n",
        "a: ",
        "answer is\n",
        r"Therefore, the final answer is \boxed{",
    ],
)
def test_time_grows_with_the_length_alone(unit):
    """200 000 characters of a loop; quadratic patterns would need minutes."""
    text = "the answer is " + unit * (200_000 // len(unit)) + "!"
    start = time.perf_counter()
    extract_letter(text, "A-F", exact=True, article=False)
    Gsm8k(TaskSettings()).extract(text)
    for task in ("word_sorting", "dyck_languages", "snarks"):
        bbh.extract(text, task, bare=True)
    assert time.perf_counter() - start < 5


def test_white_space_is_cut_but_lines_are_kept():
    assert squeeze("a" + " " * 500 + "b") == "a" + " " * 64 + "b"
    assert squeeze("a" + " " * 500 + "\nb").endswith("\nb")
    assert squeeze("a  \n b") == "a  \n b"
