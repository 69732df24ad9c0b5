"""Rubric statistics (RACE Tables 1, 10, 11), hand-counted."""

from __future__ import annotations

import pytest

from racelab.experiments.models.rubric import RubricSettings
from racelab.experiments.models.rubric_stats import (
    criterion_flags,
    is_constraint,
    is_grounded,
    is_specific,
    probe_metrics,
    rubric_stats,
)

RECTANGLE = "The perimeter of a rectangle is 48. What is the largest possible area of the rectangle?"


@pytest.mark.parametrize(
    ("criterion", "evolm", "ours"),
    [
        ("States the maximum area of 144 square units", True, True),
        ("The result equals the area", True, True),
        ("Writes x = y", True, True),
        ("Gives the formula", True, False),
        ("Decodes the message", True, False),  # "code" is a plain substring in the script
        ("Names three reasons", False, True),
        ('Ends with "Yours truly"', False, True),
        ("Is clear and helpful", False, False),
    ],
)
def test_specific(criterion, evolm, ours):
    assert (is_specific(criterion), is_specific(criterion, "ours")) == (evolm, ours)


@pytest.mark.parametrize(
    ("criterion", "evolm", "ours"),
    [
        ("Avoids jargon", True, True),
        ("Must not mention price", True, True),
        ("Contains the keyword", True, False),
        ("Contains the keywords", False, False),  # the script matches the exact word
        ("Unavoidable detail", False, False),
        ("Has at most ten words", False, True),
        ("Is clear", False, False),
    ],
)
def test_constraint(criterion, evolm, ours):
    assert (is_constraint(criterion), is_constraint(criterion, "ours")) == (evolm, ours)


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        ("Uses the perimeter correctly", True),
        ("Starts from 48", True),
        ("Speaks of rectangles", True),
        ("Is the clearest of all", False),
    ],
)
def test_grounded(criterion, expected):
    assert is_grounded(criterion, RECTANGLE) is expected


@pytest.mark.parametrize(("chars", "label"), [(40, True), (41, False)])
def test_label_only_is_at_most_forty_characters(chars, label):
    flags = criterion_flags("x" * chars, RECTANGLE)
    assert (flags.chars, flags.label_only) == (chars, label)


def test_probe_metrics_count_prompts_for_validity_and_criteria_for_the_rest():
    """Two of three are valid; criteria of 12, 34, 43 characters; one specific, constraint, grounded each."""
    texts = [
        '{"criteria": [{"criterion": "Avoids fluff", "weight": 1},'
        ' {"criterion": "Is written so that a child sees it", "weight": 1}]}',
        '{"criteria": [{"criterion": "States the maximum area of 144 square units", "weight": 1}]}',
        "no rubric",
    ]
    stats = [rubric_stats(t, RECTANGLE, RubricSettings(format="json")) for t in texts]
    assert [s.valid for s in stats] == [True, True, False]
    assert probe_metrics(stats) == pytest.approx(
        {
            "json_valid_frac": 2 / 3,
            "n_criteria_mean": 3 / 2,
            "criterion_chars_mean": (12 + 34 + 43) / 3,
            "label_only_frac": 2 / 3,
            "specific_frac": 1 / 3,
            "constraint_frac": 1 / 3,
            "grounded_frac": 1 / 3,
        }
    )


def test_raw_text_is_not_valid_and_nothing_valid_leaves_only_the_share():
    rules = RubricSettings(format="json", on_parse_failure="raw_text")
    stats = rubric_stats("Be short.", RECTANGLE, rules)
    assert (stats.valid, stats.criteria) == (False, ())
    assert probe_metrics([stats]) == {"json_valid_frac": 0.0}


def test_no_probe_at_all_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        probe_metrics([])
