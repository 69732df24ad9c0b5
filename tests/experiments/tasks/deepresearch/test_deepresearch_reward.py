"""D.4's reward with numbers worked by hand, citations, and the taxonomy against the printed table."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.tasks.deepresearch import reward
from racelab.experiments.tasks.deepresearch.citations import (
    Claim,
    answer_block,
    cited_ids,
    claims,
    paper_id,
    web_id,
)
from racelab.experiments.tasks.deepresearch.taxonomy import SUBTASKS


def test_the_rubric_score_is_a_weighted_mean_of_fifths() -> None:
    """(3·5 + 1·2 + 4·0) / 5 / 8 = 17/40."""
    assert reward.rubric_score([5, 2, 0], [3, 1, 4]) == pytest.approx(17 / 40)


def test_a_pitfall_takes_away_what_it_is_worth() -> None:
    """(4·5 − 2·5) / 5 / 4 = 1/2; half into it: (20 − 2·2) / 20 = 4/5; never below 0."""
    assert reward.rubric_score([5, 5], [4, -2]) == 0.5
    assert reward.rubric_score([5, 2], [4, -2]) == pytest.approx(0.8)
    assert reward.rubric_score([0, 5], [4, -2]) == 0.0
    assert reward.rubric_score([5, 0], [4, -2]) == 1.0


@pytest.mark.parametrize(
    ("grades", "weights"), [([5], [1, 1]), ([6], [1]), ([-1], [1]), ([5], [-1]), ([], [])]
)
def test_a_rubric_that_cannot_be_scored_is_an_error(grades: list[int], weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"weight|grades"):
        reward.rubric_score(grades, weights)


def test_buckets_turn_pitfalls_round() -> None:
    assert reward.buckets([5, 3, 0, 5, 0, 1], [1, 1, 1, -1, -1, -1]) == reward.Buckets(2, 2, 2)


def test_citation_format_counts_different_ids() -> None:
    assert reward.citation_format(["a", "a", "b", "x"], {"a", "b", "c"}) == pytest.approx(2 / 3)
    assert reward.citation_format([], {"a"}) == 0.0


def test_f1_of_a_claim() -> None:
    """Recall 1/2, precision 2/3: 2·(1/2)(2/3) / (7/6) = 4/7."""
    assert reward.claim_f1(0.5, [True, True, False]) == pytest.approx(4 / 7)
    assert reward.claim_f1(1.0, [True]) == 1.0
    assert reward.claim_f1(0.0, [False]) == 0.0
    assert reward.claim_f1(1.0, []) == 0.0


def test_citation_reward_with_and_without_f1() -> None:
    assert reward.citation_reward(0.5, 0.25) == pytest.approx(0.6 * 0.25 + 0.4 * 0.5)
    assert reward.citation_reward(0.5, None) == 0.5


@pytest.mark.parametrize(
    ("answer", "cite", "tool", "expected"),
    [(1, 1, 1, 1.0), (1, 0, 0, 0.5), (0, 1, 0, 0.3), (0, 0, 1, 0.2), (0, 0, 0, 0.0)],
)
def test_format(answer: int, cite: int, tool: int, expected: float) -> None:
    found = reward.format_reward(has_answer=bool(answer), has_cite=bool(cite), has_tool_call=bool(tool))
    assert found == pytest.approx(expected)


def test_search() -> None:
    assert [reward.search_reward(n) for n in (0, 1, 3, 9)] == [0.0, pytest.approx(1 / 3), 1.0, 1.0]


def test_length_penalty_is_a_straight_line_between_soft_and_hard() -> None:
    """6,000 → 0, 10,500 (half way) → 0.1, 15,000 → 0.2."""
    found = [
        reward.length_penalty(n, soft=6000, hard=15000, largest=0.2) for n in (0, 6000, 10500, 15000, 90000)
    ]
    assert found == [0.0, 0.0, pytest.approx(0.1), 0.2, 0.2]


def test_total() -> None:
    """0.7·0.5 + 0.1·0.25 + 0.1·1 + 0.1·(1/3) = 61/120."""
    weights = (0.7, 0.1, 0.1, 0.1)
    assert reward.total_reward((0.5, 0.25, 1.0, 1 / 3), weights) == pytest.approx(61 / 120)
    assert reward.total_reward((0.0, 0.0, 0.2, 0.0), weights, 0.5) == 0.0
    assert reward.total_reward((1.0, 1.0, 1.0, 1.0), weights) == 1.0


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.1, 10)), min_size=1, max_size=8))
def test_a_better_grade_never_lowers_the_score_and_scale_does_not_matter(
    rows: list[tuple[int, float]],
) -> None:
    grades, weights = [g for g, _ in rows], [w for _, w in rows]
    score = reward.rubric_score(grades, weights)
    assert 0.0 <= score <= 1.0
    assert reward.rubric_score(grades, [3 * w for w in weights]) == pytest.approx(score)
    assert reward.rubric_score([min(g + 1, 5) for g in grades], weights) >= score


def test_cites_and_claims() -> None:
    text = (
        '<cite id="p_a, b">one\n two</cite> x <cite id=\'c\'>three</cite> <cite id="d">open '
        '<cite id="e">inner</cite> <cite id="a"></cite>'
    )
    assert claims(text) == [Claim("one two", ("p_a", "b")), Claim("three", ("c",)), Claim("inner", ("e",))]
    assert cited_ids(text) == ["p_a", "b", "c", "d", "e", "a"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x <answer> yes </answer> y", "yes"),
        ("<answer>open", None),
        ("no start</answer>", None),
        ("<answer>a <answer>b</answer>", "b"),
        ("<ANSWER></ANSWER>", ""),
    ],
)
def test_answer_block(text: str, expected: str | None) -> None:
    assert answer_block(text) == expected


def test_ids_are_stable_and_short() -> None:
    assert web_id("https://Example.org/a#x") == web_id("https://example.org/a")
    assert web_id("https://example.org/a") != web_id("https://example.org/A")
    assert paper_id("https://example.org/a.pdf") == "p_8b9d7a32ad91"  # sha1sum
    assert cited_ids(f'<cite id="{paper_id("https://example.org/a.pdf")}">x</cite>') == [
        paper_id("https://example.org/a.pdf")
    ]


def test_the_taxonomy_sums_to_one() -> None:
    assert sum(s.weight for s in SUBTASKS) == pytest.approx(1.0)
    assert [s.weight for s in SUBTASKS] == [0.15, 0.20, 0.30, 0.15, 0.20]
    assert [s.name for s in SUBTASKS] == [
        "search_planning",
        "source_selection",
        "search_iteration",
        "claim_grounding",
        "synthesis",
    ]


@pytest.mark.parametrize(
    "piece",
    ['<cite id="a">', '<cite id="a">x</cite>', "<cite id=", '<cite id="', "</cite ", "<answer>", "</answer "],
)
def test_the_time_for_an_answer_grows_with_its_length(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    began = time.process_time()
    claims(text)
    cited_ids(text)
    answer_block(text)
    assert time.process_time() - began < 1.0
