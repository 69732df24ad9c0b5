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
from racelab.experiments.types import Criterion

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


@pytest.mark.parametrize(
    ("criterion", "kinds"),
    [
        ("Avoids jargon", {"negation"}),
        ("Has no errors", {"negation"}),
        ("Notes the answer", set()),  # "no" is a word of its own only
        ("Excludes prices", {"negation"}),
        ("Names a tool such as a saw", {"examples"}),
        ("Names fruit, e.g. 3 apples", {"examples"}),
        ("Is accurate", {"correctness"}),
        ("Is incorrect", set()),  # the start of a word only
        ("Covers all steps", {"completeness"}),
        ("Gives a thorough and error-free proof", {"completeness", "correctness"}),
        ("Is clear", set()),
    ],
)
def test_further_kinds(criterion, kinds):
    flags = criterion_flags(Criterion(criterion, 1.0), RECTANGLE)
    assert {k for k in ("negation", "examples", "correctness", "completeness") if getattr(flags, k)} == kinds


@pytest.mark.parametrize(("chars", "label"), [(40, True), (41, False)])
def test_label_only_is_at_most_forty_characters(chars, label):
    flags = criterion_flags(Criterion("x" * chars, 1.0), RECTANGLE)
    assert (flags.chars, flags.label_only) == (chars, label)


def test_probe_metrics_count_prompts_for_validity_and_criteria_for_the_rest():
    """Two of three are valid; criteria of 12, 34, 43 characters; one specific, constraint, grounded each.

    Weights (1, 3) and (5): largest 3 and 5, mean 4; shares 3/4 and 1, mean 7/8; deviations 1 and 0, mean 1/2.
    """
    texts = [
        '{"criteria": [{"criterion": "Avoids fluff", "weight": 1},'
        ' {"criterion": "Is written so that a child sees it", "weight": 3}]}',
        '{"criteria": [{"criterion": "States the maximum area of 144 square units", "weight": 5}]}',
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
            "negation_frac": 1 / 3,
            "examples_frac": 0.0,
            "correctness_frac": 0.0,
            "completeness_frac": 0.0,
            "max_weight_mean": 4.0,
            "top1_share_mean": 7 / 8,
            "weight_std_mean": 1 / 2,
        }
    )


def test_scoring_levels_add_to_no_length():
    """A criterion as Table 9 has them: 28 characters of text; the three levels do not count."""
    text = (
        '{"criteria": [{"criterion": "Gives the value 144 for area", "weight": 0.5, "scoring_levels":'
        ' {"0": "No value at all is given", "0.5": "Another value", "1": "The value 144"}}]}'
    )
    (row,) = rubric_stats(text, RECTANGLE, RubricSettings(format="json")).criteria
    assert (row.criterion, row.chars, row.label_only) == ("Gives the value 144 for area", 28, True)


def test_what_the_methods_parser_drops_is_counted_as_written():
    """Table 11 counts what was emitted: four criteria of 8, 8, 2 and 9 characters, though the parser keeps one."""
    rules = RubricSettings(format="lines", max_criteria=1, copied=("Is polite",))
    stats = rubric_stats("- Is short | 1\n- is short | 1\n- 48 | 2\n- Is polite | 4", RECTANGLE, rules)
    assert [c.criterion for c in stats.criteria] == ["Is short", "is short", "48", "Is polite"]
    metrics = probe_metrics([stats])
    assert (metrics["json_valid_frac"], metrics["n_criteria_mean"]) == (1.0, 4.0)
    assert (metrics["criterion_chars_mean"], metrics["top1_share_mean"]) == (27 / 4, 0.5)


def test_validity_is_that_of_the_methods_parser():
    """Two different criteria are wanted; one written twice is not two."""
    rules = RubricSettings(format="lines", min_criteria=2)
    assert not rubric_stats("- Is short | 1\n- Is short | 1", RECTANGLE, rules).valid


def test_raw_text_is_not_valid_and_nothing_valid_leaves_only_the_share():
    rules = RubricSettings(format="json", on_parse_failure="raw_text")
    stats = rubric_stats("Be short.", RECTANGLE, rules)
    assert (stats.valid, stats.criteria) == (False, ())
    assert probe_metrics([stats]) == {"json_valid_frac": 0.0}


def test_no_probe_at_all_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        probe_metrics([])
