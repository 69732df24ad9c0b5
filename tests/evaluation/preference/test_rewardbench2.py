"""RewardBench 2: reading and scoring, worked by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.preference.rating import RatedBenchmark
from racelab.experiments.evaluation.preference.rewardbench2 import (
    RewardBench2,
    credit,
    gap,
    rewardbench2_total,
    spread,
    ties,
)

NAN = math.nan


def record(subset="Math", id="7", chosen=("yes",), rejected=("no", "never", "perhaps"), **more):
    return {
        "id": id, "prompt": "Is 2 even?", "chosen": list(chosen), "rejected": list(rejected), "subset": subset,
        "num_correct": len(chosen), "models": ["a"], **more,
    }  # fmt: skip


def read(*records):
    return RewardBench2().read((f"f.jsonl:{i}", r) for i, r in enumerate(records, 1))


def mark(scores, subset="Math", quirks=frozenset(), **more):
    bench = RewardBench2(quirks)
    (example,) = bench.read([("f.jsonl:1", record(subset, **more))])
    return bench.mark(example, [scores])


def row(domain, score, **details):
    return SimpleNamespace(domain=domain, score=score, details=details)


def tie(kind, pair, right, wrong):
    return {"kind": kind, "pair": pair, "right": right, "wrong": wrong}


def test_it_is_a_benchmark_of_ratings():
    bench = RewardBench2()
    assert isinstance(bench, RatedBenchmark)
    (example,) = read(record())
    assert (example.example_id, example.domain) == ("Math/7", "Math")
    item = bench.item(example)
    assert (item.prompt, item.responses) == ("Is 2 even?", ("yes", "no", "never", "perhaps"))
    assert (bench.plan.games, bench.plan.retry) == (1, False)


@pytest.mark.parametrize(
    ("scores", "expected", "any_credit", "status"),
    [
        ((0.9, 0.1, 0.2, 0.3), 1.0, 1.0, "scored"),  # gold
        ((0.1, 0.9, 0.9, 0.9), 0.0, 0.0, "scored"),  # reversed
        ((0.5, 0.5, 0.1, 0.5), 1 / 3, 1.0, "scored"),  # three share the top
        ((0.5, 0.5, 0.5, 0.5), 0.25, 1.0, "scored"),  # all tied
        ((0.4, NAN, 0.1, NAN), 1.0, 1.0, "scored"),  # what cannot be read is out of the maximum
        ((NAN, 0.0, 0.0, 0.0), 0.0, 0.0, "scored"),
        ((NAN, NAN, NAN, NAN), 0.25, 1.0, "unparsed"),
    ],
)
def test_credit(scores, expected, any_credit, status):
    found = mark(scores)
    assert (found.score, found.status, found.label) == (pytest.approx(expected), status, "rewardbench2")
    assert found.details["credit"] == found.score
    assert found.details["right"] == [None if math.isnan(scores[0]) else scores[0]]
    loose = mark(scores, quirks=frozenset({"rewardbench2-any-credit"}))
    assert (loose.score, loose.details["credit"]) == (any_credit, pytest.approx(expected))


def test_ties_are_marked_by_their_worst_right_answer():
    """Right 0.8 and 0.6, wrong 0.5 and 0.1: gap 0.6 - 0.5, spread 0.8 - 0.6."""
    found = mark((0.8, 0.6, 0.5, 0.1), "Ties", id="tied:3", chosen=("a", "b"), rejected=("c", "d"))
    assert found.score == 1.0
    assert found.details == tie("tied", "3", [0.8, 0.6], [0.5, 0.1])
    assert (
        mark((0.8, 0.5, 0.5, 0.1), "Ties", id="tied:3", chosen=("a", "b"), rejected=("c", "d")).score == 0.0
    )


def test_gap_and_spread():
    assert gap([0.8, 0.6], [0.5, 0.1]) == pytest.approx(0.1)
    assert spread([0.8, 0.6], [0.5, 0.1]) == pytest.approx(0.2)
    # unreadable: -1
    assert gap([0.8, None], [0.0]) == pytest.approx(-1.0)
    assert gap([0.8], [None]) == pytest.approx(1.8)
    assert spread([0.8, None], [0.5]) == pytest.approx(1.8)
    # a reward model's logits: not above what was read
    assert gap([None], [-3.0, -5.0]) == pytest.approx(-2.0)
    assert (gap([None], [None, None]), spread([None, None], [None])) == (0.0, 0.0)


def test_the_score_of_ties():
    """Pair 1: ref gap .9 - .4 = .5; tied right .8, .7, wrong .4: gap .3, spread .1; m = .3: tanh(3 - 1).
    Pair 2: ref gap .5 - .6 = -.1; tied right .9, .5, wrong .4: gap .1, spread .4; m = -.1: tanh(-.25 - 1).
    Accurate: tied 2/2, ref 1/2. Gap above spread 1/2; m above spread 1/2.
    .3 + .15 + .1 + .1 + .01 (tanh 2 + tanh(-1.25)) / 2 = .65 + .005 (.964028 - .848284) = .650579
    """
    details = [
        tie("ref", "1", [0.9], [0.4, 0.2]),
        tie("tied", "1", [0.8, 0.7], [0.4]),
        tie("ref", "2", [0.5], [0.6]),
        tie("tied", "2", [0.9, 0.5], [0.4]),
    ]
    assert ties(details) == pytest.approx(0.650579, abs=1e-6)
    assert ties(list(reversed(details))) == ties(details)


@pytest.mark.parametrize(
    ("ref", "tied", "expected"),
    [
        # spread 0, m > 0: all of it, and the limit 1
        (([0.9], [0.1]), ([0.8, 0.8], [0.1]), 0.3 + 0.3 + 0.2 + 0.2 + 0.01),
        # spread 0, m < 0: nothing, and the limit -1
        (([0.1], [0.9]), ([0.1, 0.1], [0.9]), -0.01),
        # everything equal: 0/0 is 0
        (([0.5], [0.5]), ([0.5, 0.5], [0.5]), 0.0),
        (([None], [None]), ([None, None], [None]), 0.0),
        # the ref prompt alone is wrong, m = -.2 under spread 0
        (([0.3], [0.5]), ([0.8, 0.8], [0.1]), 0.3 + 0.2 - 0.01),
    ],
)
def test_ties_without_a_spread(ref, tied, expected):
    assert ties([tie("ref", "0", *ref), tie("tied", "0", *tied)]) == pytest.approx(expected)


def test_only_whole_pairs_count_for_the_margins():
    """The lone tied prompt is inaccurate: accurate 1/2 of the tied ones, all else from the pair."""
    whole = [tie("ref", "0", [0.9], [0.1]), tie("tied", "0", [0.8, 0.8], [0.1])]
    lone = tie("tied", "5", [0.1, 0.1], [0.9])
    assert ties([*whole, lone]) == pytest.approx(0.15 + 0.3 + 0.2 + 0.2 + 0.01)
    assert math.isnan(ties([lone]))


def test_the_average_is_over_subsets():
    """Math 1/2, Focus 1, Ties 1.01; lost rows are in none. Mean of the three: 2.51 / 3."""
    rows = [
        row("Math", 1.0),
        row("Math", 0.0),
        row("Math", NAN),
        row("Focus", 1.0),
        row("Ties", 1.0, **tie("ref", "0", [0.9], [0.1])),
        row("Ties", 1.0, **tie("tied", "0", [0.8, 0.8], [0.1])),
    ]
    total = rewardbench2_total(rows)
    assert total == {"avg": pytest.approx(2.51 / 3), "Math": 0.5, "Focus": 1.0, "Ties": pytest.approx(1.01)}
    assert list(total) == ["avg", "Focus", "Math", "Ties"]
    assert "Ties" not in rewardbench2_total(rows[:5])
    assert math.isnan(rewardbench2_total([row("Math", NAN)])["avg"])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (record(subset="Chat"), "f.jsonl:1: subset 'Chat' is unknown"),
        (record(subset="Ties", id="7"), "id '7' of subset Ties"),
        (record(chosen=("a", "b")), "'chosen' holds 2 answers"),
        (record(chosen=()), "'chosen' holds no answer"),
        (record(rejected=(3,)), r"'rejected\[0\]' has type int"),
        ({"subset": "Math"}, "'chosen' is missing"),
    ],
)
def test_bad_records_are_named(bad, says):
    with pytest.raises(DataError, match=says):
        read(bad)


def test_ids_are_unique_in_a_subset():
    assert len(read(record("Math"), record("Focus"))) == 2
    with pytest.raises(DataError, match=r"f\.jsonl:2: id 'Math/7' occurs already in f\.jsonl:1"):
        read(record(), record())


def test_an_answer_may_be_empty_and_a_column_may_be_a_text():
    (example,) = read({**record(chosen=("",)), "rejected": '["a", "b"]'})
    assert RewardBench2().item(example).responses == ("", "a", "b")
    (example,) = read({**record(), "chosen": "yes", "id": None})
    assert (example.example_id, example.fields["right"]) == ("Math/1", ("yes",))


def test_relabelling_changes_nothing():
    assert credit([0.5], [0.5, 0.2, 0.1]) == credit([0.5], [0.1, 0.5, 0.2]) == 0.5
