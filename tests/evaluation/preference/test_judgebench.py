"""JudgeBench: reading and scoring, worked by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.preference.judgebench import (
    JudgeBench,
    decision,
    judgebench_notes,
    judgebench_total,
    vote,
)
from racelab.experiments.evaluation.preference.rating import RatedBenchmark

NAN = math.nan


def record(source="mmlu-pro-law", label="A>B", **more):
    return {
        "pair_id": "p1", "original_id": "9", "source": source, "question": "Which?", "response_A": "first",
        "response_B": "second", "response_model": "gpt-4o", "label": label, **more,
    }  # fmt: skip


def mark(games, label="A>B"):
    bench = JudgeBench()
    (example,) = bench.read([("f.jsonl:1", record(label=label))])
    return bench.mark(example, games)


def test_it_is_a_benchmark_of_ratings():
    bench = JudgeBench()
    assert isinstance(bench, RatedBenchmark)
    (example,) = bench.read([("f.jsonl:1", record())])
    assert (example.example_id, example.domain) == ("p1", "Knowledge")
    assert bench.item(example).responses == ("first", "second")
    assert (bench.plan.games, bench.plan.retry) == (2, True)
    assert bench.sources[0].split == "gpt"
    assert JudgeBench("claude").sources[0].split == "claude"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(0.7, 0.2, 1), (0.2, 0.7, -1), (0.4, 0.4, 0), (NAN, 0.0, -1), (0.0, NAN, 1), (NAN, NAN, None)],
)
def test_decision(a, b, expected):
    assert decision(a, b) == expected


@pytest.mark.parametrize(
    ("games", "score", "status"),
    [
        (((0.9, 0.1), (0.8, 0.2)), 1.0, "scored"),  # gold twice
        (((0.1, 0.9), (0.2, 0.8)), 0.0, "scored"),  # reversed
        (((0.5, 0.5), (0.5, 0.5)), 0.0, "scored"),  # a tie is wrong
        (((0.9, 0.1), (0.5, 0.5)), 1.0, "scored"),  # 1 + 0
        (((0.9, 0.1), (0.1, 0.9)), 0.0, "scored"),  # 1 - 1
        (((0.9, 0.1), (NAN, NAN)), 1.0, "scored"),  # 1 + none
        (((0.9, NAN), (NAN, 0.1)), 0.0, "scored"),  # a score that cannot be read loses: 1 - 1
        (((NAN, NAN), (NAN, NAN)), 0.0, "unparsed"),
    ],
)
def test_the_vote_of_two_games(games, score, status):
    found = mark(games)
    assert (found.score, found.status, found.label) == (score, status, "judgebench")
    swapped = mark([game[::-1] for game in games], label="B>A")
    assert (swapped.score, swapped.status) == (score, status)


def test_details_hold_what_a_total_needs():
    assert mark(((0.9, NAN), (0.5, 0.5)), "B>A").details == {
        "label": "B>A",
        "games": [[0.9, None], [0.5, 0.5]],
        "decisions": [1, 0],
    }
    assert vote([1, None, 0], -1) == -1


def row(domain, score, games=((0.9, 0.1), (0.9, 0.1)), decisions=(1, 1)):
    return SimpleNamespace(domain=domain, score=score, details={"games": games, "decisions": decisions})


def test_overall_is_over_pairs_and_the_average_over_categories():
    """Knowledge 2/3, Coding 1/1: overall 3/4, average 5/6. A lost pair is in neither."""
    rows = [row("Knowledge", 1.0), row("Knowledge", 1.0), row("Knowledge", 0.0), row("Coding", 1.0)]
    total = judgebench_total([*rows, row("Math", NAN, (), ())])
    assert total == {
        "overall": 0.75,
        "avg": pytest.approx(5 / 6),
        "Knowledge": pytest.approx(2 / 3),
        "Coding": 1.0,
        "failed_scores": 0.0,
        "pairs_with_failure": 0.0,
        "null_decisions": 0.0,
    }
    assert judgebench_notes(total) == ()
    assert math.isnan(judgebench_total([])["avg"])


def test_health_is_reported():
    """Of two pairs one has 3 of 8 scores unreadable: one game without a decision of four."""
    sick = row("Math", 0.0, [[None, None], [0.2, None]], [None, 1])
    total = judgebench_total([row("Math", 1.0), sick])
    assert (total["failed_scores"], total["pairs_with_failure"], total["null_decisions"]) == (
        0.375,
        0.5,
        0.25,
    )
    lines = judgebench_notes(total)
    assert len(lines) == 3
    assert lines[0] == (
        "judgebench: 37.5 % of the scores could not be read; above 2 % the score is not to be trusted"
    )


@pytest.mark.parametrize(
    ("source", "category"),
    [
        ("mmlu-pro-computer science", "Knowledge"),
        ("livebench-reasoning", "Reasoning"),
        ("livebench-math", "Math"),
        ("livecodebench", "Coding"),
    ],
)
def test_categories(source, category):
    (example,) = JudgeBench().read([("f.jsonl:1", record(source))])
    assert example.domain == category


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (record(source="arena"), "f.jsonl:1: source 'arena' is unknown"),
        (record(label="A=B"), "label 'A=B'; A>B or B>A is needed"),
        (record(question=3), "'question' has type int"),
        ({"source": "livecodebench"}, "'label' is missing"),
    ],
)
def test_bad_records_are_named(bad, says):
    with pytest.raises(DataError, match=says):
        JudgeBench().read([("f.jsonl:1", bad)])


def test_a_pair_occurs_once():
    with pytest.raises(DataError, match=r"f\.jsonl:2: id 'p1' occurs already in f\.jsonl:1"):
        JudgeBench().read([("f.jsonl:1", record()), ("f.jsonl:2", record())])
