"""Comparisons by example: hand-worked values, what must not change them, and the coverage of the intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from racelab.analysis.paired import Comparison, compare, score_interval
from racelab.analysis.resampling import interval, resampled, sign_flip_p
from racelab.analysis.units import shares
from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.preference.judgebench import judgebench_total
from racelab.experiments.evaluation.preference.rewardbench2 import rewardbench2_total
from racelab.experiments.evaluation.totals import Row, total

PROTOCOL = "olmo3-adapt"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def rows(label: str, scores: Sequence[float], domains: Sequence[str] | None = None) -> list[Row]:
    """One row per score, `e0`, `e1`, ...; NaN is a lost one."""
    return [
        Row(label, f"e{i}", domains[i] if domains else "", s, "lost" if math.isnan(s) else "scored")
        for i, s in enumerate(scores)
    ]


def against(a: Sequence[Row], b: Sequence[Row], suite: str = "race", **more: Any) -> Comparison:
    return compare({"0": a}, {"0": b}, suite, PROTOCOL, rng(), **more)


def test_five_examples_go_through_all_sign_flips() -> None:
    """Four wins and a loss: |sum| >= 3 in 2 (1 + 5) = 12 of 32 flips, p = 3/8; five wins: 2 of 32, p = 1/16.

    Of 5, 3, 2 (all wins) only the two flips with all signs equal reach 10: p = 2/8. Of 5, -3, -2 the sum is 0: p = 1.
    Of 3, 1, -2 (sum 2): |±3 ±1 ±2| is 6, 2, 4, 0 twice each; at least 2 in 6 of 8: p = 3/4.
    """
    assert sign_flip_p([1, 1, -1, 1, 1, 0, 0], rng()) == 3 / 8
    assert sign_flip_p([0.2] * 5, rng()) == 1 / 16
    assert sign_flip_p([5, 3, 2], rng()) == 1 / 4
    assert sign_flip_p([5, -3, -2], rng()) == 1.0
    assert sign_flip_p([3, 1, -2], rng()) == 3 / 4
    assert sign_flip_p([0, 0], rng()) == 1.0


def test_drawn_flips_are_near_the_exact_sign_test() -> None:
    """14 wins and 6 losses: 2 sum_{k<=6} C(20, k) / 2^20 = 2 · 60460 / 1048576 = 0.11532; 9,999 draws: ± 0.01.

    With sizes 1 and 2 mixed (ten wins of each) only the two extreme flips reach the sum: p = 1 / 10000 but for luck.
    """
    assert sign_flip_p([1.0] * 14 + [-1.0] * 6, rng()) == pytest.approx(120920 / 1048576, abs=0.01)
    assert sign_flip_p([1 / 7] * 14 + [-1 / 7] * 6, rng()) == pytest.approx(120920 / 1048576, abs=0.01)
    assert sign_flip_p([1.0] * 10 + [2.0] * 10, rng()) <= 3 / 10_000


def test_a_mean_over_domains_by_hand() -> None:
    """One example of law, three of maths; A has 1 | 1 0 0, B has 0 | 1 1 0.

    A = (1 + 1/3) / 2 = 2/3, B = (0 + 2/3) / 2 = 1/3. Shares differ by 1/2 | 0 -1/6 0: |±1/2 ±1/6| >= 1/3 always, p = 1.
    Drawn anew inside the domains the difference is 1/2 - k/6 with P(k) = 8, 12, 6, 1 of 27: its 2.5 % and 97.5 %
    quantiles are 0 (k = 3 has 1/27 = 3.7 %) and 1/2 (k = 0).
    """
    domains = ["law", "maths", "maths", "maths"]
    found = against(rows("mmlu", [1, 1, 0, 0], domains), rows("mmlu", [0, 1, 1, 0], domains)).benchmarks[
        "mmlu"
    ]
    assert (found.value_a, found.value_b) == pytest.approx((2 / 3, 1 / 3))
    d = found.difference
    assert (d.value, d.low, d.high) == pytest.approx((1 / 3, 0, 1 / 2), abs=1e-12)
    assert (found.p, found.n, found.wins, found.ties, found.losses) == (1.0, 4, 1, 2, 1)
    draws = resampled([np.array([[0.5]]), np.array([[0.0, -1 / 6, 0.0]])], None, rng(), 27_000)
    counts = [int((np.abs(draws - (1 / 2 - k / 6)) < 1e-9).sum()) for k in range(4)]
    assert counts == pytest.approx([8000, 12000, 6000, 1000], abs=300)


def test_micro_counts_every_example_alike() -> None:
    """BBH is micro: 2 of 4 against 1 of 4, whatever the subtasks."""
    domains = ["x", "y", "y", "y"]
    found = against(rows("bbh", [1, 1, 0, 0], domains), rows("bbh", [0, 1, 0, 0], domains)).benchmarks["bbh"]
    assert (found.value_a, found.value_b, found.difference.value) == (0.5, 0.25, 0.25)
    assert found.p == 1.0  # one example differs: both flips reach it


def test_holm_is_over_benchmarks_and_not_over_readings() -> None:
    """Five wins of five (p = 1/16) and four of five (p = 3/8): Holm gives 2/16 and 3/8."""
    a = rows("gsm8k", [1] * 5) + rows("gpqa", [1, 1, 1, 1, 0])
    b = rows("gsm8k", [0] * 5) + rows("gpqa", [0, 0, 0, 0, 1])
    found = against(a, b).benchmarks
    assert [(one.p, one.p_holm) for one in found.values()] == [(1 / 16, 1 / 8), (3 / 8, 3 / 8)]
    a = rows("ifeval", [1] * 5) + rows("ifeval-answer", [1] * 5)
    b = rows("ifeval", [0] * 5) + rows("ifeval-answer", [0] * 5)
    read = against(a, b, "ifeval").benchmarks
    assert [(one.p, one.p_holm) for one in read.values()] == [(1 / 16, 1 / 16), (1 / 16, None)]


def test_the_average_needs_the_whole_suite_and_is_in_no_family() -> None:
    names = ("gsm8k", "mbpp_plus", "bbh", "mmlu", "popqa", "gpqa", "zebralogic", "agieval")
    a = [row for name in names for row in rows(name, [1, 1, 0, 0], ["d"] * 4)]
    b = [row for name in names for row in rows(name, [1, 0, 0, float(name == "bbh")], ["d"] * 4)]
    found = against(a, b)
    assert found.average is not None
    assert found.average.value == pytest.approx((7 * 0.25 + 0) / 8)
    assert (found.average_a, found.average_b) == pytest.approx((0.5, (7 * 0.25 + 0.5) / 8))
    assert found.average.low <= found.average.value <= found.average.high
    some = [row for row in a if row.label != "bbh"]
    assert against(some, some).average is None


def _random_rows(seed: int, label: str = "mmlu") -> list[Row]:
    draw = rng(seed)
    return rows(label, [float(x) for x in draw.integers(0, 2, 40)], [f"d{i % 3}" for i in range(40)])


def test_a_against_itself_is_nothing() -> None:
    a = _random_rows(1)
    for runs in ({"0": a}, {"0": a, "1": _random_rows(2)}):
        one = compare(runs, runs, "race", PROTOCOL, rng()).benchmarks["mmlu"]
        assert (one.difference.value, one.difference.low, one.difference.high) == (0, 0, 0)
        assert (one.p, one.p_holm, one.ties) == (1, 1, 40)


def test_swapping_sides_negates() -> None:
    a, b = _random_rows(1), _random_rows(2)
    one, other = (against(x, y).benchmarks["mmlu"] for x, y in ((a, b), (b, a)))
    d, e = one.difference, other.difference
    assert (d.value, d.low, d.high) == pytest.approx((-e.value, -e.high, -e.low), abs=1e-12)
    assert (one.p, one.wins, one.losses) == (other.p, other.losses, other.wins)


def test_the_order_of_rows_changes_nothing() -> None:
    a, b = _random_rows(1), _random_rows(2)
    assert against(a, b) == against(a[::-1], [*b[7:], *b[:7]])
    forth, back = (score_interval(x, "mmlu", PROTOCOL, rng()) for x in (a, a[::-1]))
    assert forth == back


def test_seeds_of_the_same_numbers_are_drawn_in_pairs() -> None:
    """Seed 0 is right everywhere, seed 1 nowhere, on both sides. In pairs the difference is 0 in every draw.

    Apart each side's mean is 1, 1/2, 0 with 1/4, 1/2, 1/4, so the difference is 1 or -1 with 1/16 each: the 95 %
    interval is [-1, 1].
    """
    good, bad = rows("gsm8k", [1] * 4), rows("gsm8k", [0] * 4)
    pairs = compare({"0": good, "1": bad}, {"0": good, "1": bad}, "race", PROTOCOL, rng())
    apart = compare({"0": good, "1": bad}, {"2": good, "3": bad}, "race", PROTOCOL, rng())
    assert pairs.matched
    assert not apart.matched
    d, e = (x.benchmarks["gsm8k"].difference for x in (pairs, apart))
    assert (d.value, d.low, d.high) == (0, 0, 0)
    assert (e.value, e.low, e.high) == pytest.approx((0, -1, 1))
    against_one = compare({"0": good, "1": bad}, {"0": bad}, "race", PROTOCOL, rng()).benchmarks["gsm8k"]
    assert against_one.difference.value == 0.5
    assert against_one.wins == 4


def test_examples_of_one_side_only_are_an_error() -> None:
    a, b = rows("gsm8k", [1, 0, 1]), rows("gsm8k", [1, 0])
    with pytest.raises(DataError, match=r"gsm8k: 1 examples .*'e2' is in A.*same --limit and data"):
        against(a, b)
    with pytest.raises(DataError, match=r"'e2' is in B"):
        against(b, a)
    with pytest.raises(DataError, match="gpqa: not in both"):
        against(a + rows("gpqa", [1]), a)
    with pytest.raises(DataError, match="'d' in A"):
        against(rows("bbh", [1], ["d"]), rows("bbh", [1], ["e"]))


def test_lost_examples_are_left_out_on_both_sides_and_counted() -> None:
    """e1 is lost in A and e2 in B: e0 and e3 stay, A = 1/2, B = 1."""
    nan = math.nan
    one = against(rows("gsm8k", [1, nan, 1, 0]), rows("gsm8k", [1, 1, nan, 1])).benchmarks["gsm8k"]
    assert (one.n, one.lost, one.value_a, one.value_b) == (2, 2, 0.5, 1.0)
    with pytest.raises(DataError, match="no example has an answer on both sides"):
        against(rows("gsm8k", [nan]), rows("gsm8k", [1]))
    assert score_interval(rows("gsm8k", [nan]), "gsm8k", PROTOCOL, rng()) is None


def _ties(kind: str, pair: str, draw: np.random.Generator) -> Row:
    right = [float(x) for x in draw.integers(0, 5, 1 if kind == "ref" else 3)]
    wrong = [float(x) for x in draw.integers(0, 4, 3)]
    details = {"kind": kind, "pair": pair, "right": right, "wrong": wrong}
    return Row(
        "rewardbench2", f"Ties/{kind}:{pair}", "Ties", float(min(right) > max(wrong)), "scored", details
    )


@pytest.mark.parametrize("seed", range(20))
def test_shares_add_up_to_the_score_of_the_authors(seed: int) -> None:
    """Whole pairs, prompts without their partner, subsets of different sizes; and JudgeBench's categories."""
    draw = rng(seed)
    found = [_ties("ref", str(i), draw) for i in range(0, 6)] + [
        _ties("tied", str(i), draw) for i in range(2, 9)
    ]
    found += [Row("rewardbench2", f"Math/{i}", "Math", draw.integers(0, 3) / 2, "scored") for i in range(5)]
    found += [Row("rewardbench2", f"Focus/{i}", "Focus", draw.integers(0, 2) / 1, "scored") for i in range(2)]
    made = shares("rewardbench2", PROTOCOL, [found])
    assert made is not None
    assert made.values[0] == pytest.approx(rewardbench2_total(found)["avg"])
    alone = [row for row in found if row.example_id not in [f"Ties/tied:{i}" for i in range(2, 6)]]
    made = shares("rewardbench2", PROTOCOL, [alone])  # no whole pair: Ties is in neither
    assert made is not None
    assert made.values[0] == pytest.approx(rewardbench2_total(alone)["avg"])
    details = {"games": [[1, 2], [1, 2]], "decisions": [1, 1]}
    pairs = [
        Row(
            "judgebench",
            f"p{i}",
            ("Math", "Coding", "Math")[i % 3],
            float(draw.integers(0, 2)),
            "scored",
            details,
        )
        for i in range(11)
    ]
    made = shares("judgebench", PROTOCOL, [pairs])
    assert made is not None
    assert made.values[0] == pytest.approx(judgebench_total(pairs)["avg"])


@pytest.mark.parametrize("label", ["gsm8k", "mmlu", "rewardbench2"])
def test_the_interval_is_around_the_total(label: str) -> None:
    found = _random_rows(3, label)
    if label == "rewardbench2":
        draw = rng(4)
        found = [_ties(kind, str(i), draw) for kind in ("ref", "tied") for i in range(30)]
    one = score_interval(found, label, PROTOCOL, rng())
    assert one is not None
    assert one.value == pytest.approx(total(label, found, PROTOCOL).value)
    assert one.low < one.value < one.high
    assert one.n == len(found)
    assert score_interval(found, label, PROTOCOL, rng()) == one


def test_what_cannot_be_asked_for_is_an_error() -> None:
    a = rows("gsm8k", [1, 0])
    with pytest.raises(DataError, match=r"level 1\.0"):
        against(a, a, level=1.0)
    with pytest.raises(DataError, match="no examples to compare"):
        against([], [])


def _coverage(n: int, sets: int, replicates: int) -> tuple[float, float]:
    """Share of data sets whose 95 % interval holds the true difference, and of p < 0.05 where there is none.

    An example is won with 0.15, lost with 0.10: the true difference is 0.05. Without a difference both are 0.125.
    """
    draw = rng(n)
    held, low_p = 0, 0
    for _ in range(sets):
        d = draw.choice([1.0, -1.0, 0.0], size=n, p=[0.15, 0.10, 0.75]) / n
        found = interval(float(d.sum()), resampled([d[None]], None, draw, replicates), 0.95, n)
        held += found.low <= 0.05 <= found.high
        same = draw.choice([1.0, -1.0, 0.0], size=n, p=[0.125, 0.125, 0.75])
        low_p += sign_flip_p(same, draw) < 0.05
    return held / sets, low_p / sets


@pytest.mark.slow
def test_coverage_of_the_paired_bootstrap() -> None:
    """2,000 data sets: at 300 examples 93 to 97 %; at 20 it is what docs/statistics.md says (too few to rely on)."""
    many, false_many = _coverage(300, 2000, 1000)
    few, false_few = _coverage(20, 2000, 1000)
    print(
        f"coverage at n=300 {many:.3f}, n=20 {few:.3f}; false alarms at 5 %: {false_many:.3f}, {false_few:.3f}"
    )
    assert 0.93 <= many <= 0.97
    assert false_many <= 0.06
    assert false_few <= 0.06
    assert few < 0.97


def test_p_values_are_fractions_of_the_flips() -> None:
    """With n not-zero differences exact p values are multiples of 2^(1-n)."""
    p = sign_flip_p([1, 2, 3, -1, 2], rng())
    assert Fraction(p).denominator <= 16
