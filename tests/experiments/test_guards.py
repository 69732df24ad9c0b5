"""The likelihood judge's guards, by hand."""

from __future__ import annotations

import pytest

from racelab.experiments.models.guards import (
    Guards,
    GuardSettings,
    copied_share,
    guard_factor,
    measure_guards,
    without_prompt_words,
)
from racelab.experiments.types import Criterion, Rubric

PROMPT = "What is the capital of France?"
RUBRIC = Rubric((Criterion("Names the right city", 5.0), Criterion("Is one clear sentence", 2.0)), "")
HONEST = Guards(repetition=0.0, copied=0.0, known=2, own=2, new_words=1, n_words=6)


def factor(response):
    return guard_factor(measure_guards(PROMPT, RUBRIC, response), GuardSettings())


def test_counts_of_an_honest_answer():
    """6 words; "the capital of france" (4 of them) is copied; capital and franc are known, pari is own."""
    found = measure_guards(PROMPT, RUBRIC, "The capital of France is Paris.")
    assert found == Guards(repetition=0.0, copied=4 / 6, known=2, own=1, new_words=1, n_words=6)


def test_an_honest_answer_keeps_part_and_a_free_one_all():
    """Copied 2/3 with 1/4 free costs (2/3 - 1/4) / (3/4) = 5/9."""
    assert factor("The capital of France is Paris.") == pytest.approx(4 / 9)
    assert factor("Paris, on the river Seine, governs France.") == 1.0


@pytest.mark.parametrize(
    "attack",
    [
        "",
        "...",
        PROMPT,
        "what is the CAPITAL of france",
        "Names the right city. Is one clear sentence.",
    ],
)
def test_attacks_get_nothing(attack):
    assert factor(attack) == 0.0


@pytest.mark.parametrize(
    "attack",
    [
        "You are asking: What is the capital of France? That is a good question.",
        "France capital the of is what",
    ],
)
def test_restating_the_prompt_keeps_a_quarter_at_most(attack):
    assert 0.0 < factor(attack) <= 0.25


def test_a_symbol_is_news_and_everyday_punctuation_is_not():
    assert measure_guards("Which sign?", RUBRIC, "The sign is #.").new_words == 1
    assert measure_guards("Which sign?", RUBRIC, "The sign - is!").new_words == 0


def test_repetition_keeps_little():
    """12 equal words: 11 bigrams, 1 different: repetition 10/11."""
    assert factor("paris " * 12) == pytest.approx(1 / 11)


@pytest.mark.parametrize(
    ("guards", "expected"),
    [
        (HONEST, 1.0),
        (Guards(0.25, 0.0, 2, 2, 1, 6), 0.75),
        (Guards(0.0, 0.625, 2, 2, 1, 6), 0.5),
        (Guards(0.0, 1.0, 2, 2, 1, 6), 0.0),
        (Guards(0.0, 0.0, 8, 0, 1, 6), 0.4),  # 3 above 5 free, falling over 5
        (Guards(0.0, 0.0, 8, 1, 1, 6), 1.0),  # one own word frees three
        (Guards(0.0, 0.0, 12, 0, 1, 6), 0.0),
        (Guards(0.0, 0.0, 2, 2, 0, 6), 0.25),  # nothing new
        (Guards(0.0, 0.0, 2, 2, 1, 3), 0.75),
    ],
)
def test_factor(guards, expected):
    assert guard_factor(guards, GuardSettings()) == pytest.approx(expected)


def test_a_short_answer_may_consist_of_the_rubrics_words():
    rubric = Rubric((Criterion("Says that Paris lies on the Seine", 1.0),), "")
    found = measure_guards("Where does the capital lie?", rubric, "Paris sits by the Seine.")
    assert guard_factor(found, GuardSettings()) == 1.0


def test_copied_share_sees_small_changes_and_short_sources():
    assert copied_share("He mentioned a city!", ["he mentions a city"]) == 1.0
    assert copied_share("is it clear and short", ["is clear"]) == 0.0
    assert copied_share("so it is clear", ["is clear"]) == 0.5
    assert copied_share("anything", [""]) == 0.0


def test_without_prompt_words():
    assert without_prompt_words("The capital, of France: is Paris!", PROMPT) == "Paris!"
