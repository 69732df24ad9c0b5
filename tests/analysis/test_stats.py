"""Intervals and tests against numbers worked by hand, and against their promised coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.analysis.stats import (
    align,
    bootstrap_mean,
    example_means,
    holm,
    over_seeds,
    paired_bootstrap,
    sign_test,
)
from racelab.experiments.errors import DataError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_paired_comparison_by_hand() -> None:
    """a - b per example, samples averaged first: (3/4 - 1/4, 1 - 0, 1/2 - 1/2, 0 - 1) = (1/2, 1, 0, -1).

    Means: a = (3/4 + 1 + 1/2 + 0)/4 = 9/16, b = (1/4 + 0 + 1/2 + 1)/4 = 7/16, difference 1/8, ratio 9/7.
    Two wins, a tie, a loss: sign test 2 · (C(3,0) + C(3,1)) / 8 = 1.
    """
    a = [[0.5, 1.0], [1.0, 1.0], [0.5, math.nan], [0.0, 0.0]]
    got = paired_bootstrap(a, [0.25, 0.0, 0.5, 1.0], rng())
    assert (got.mean_a, got.mean_b, got.difference.value, got.difference.n) == (0.5625, 0.4375, 0.125, 4)
    assert got.ratio is None  # a replicate that draws only the second example has mean 0
    assert (got.wins, got.ties, got.losses, got.sign_p) == (2, 1, 1, 1.0)
    assert got.difference.low < 0.125 < got.difference.high


def test_interval_of_two_examples_is_exact() -> None:
    """The mean of two resampled from {0, 1} is 0, 1/2, 1 with chance 1/4, 1/2, 1/4.

    So the quantiles at 0.1 and 0.9 are 0 and 1, those at 0.3 and 0.7 are both 1/2.
    """
    wide = bootstrap_mean([0.0, 1.0], rng(), replicates=4000, level=0.8)
    assert (wide.value, wide.low, wide.high) == (0.5, 0.0, 1.0)
    narrow = bootstrap_mean([0.0, 1.0], rng(), replicates=4000, level=0.4)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_ratio_interval() -> None:
    got = paired_bootstrap([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], rng())
    assert got.ratio is not None
    assert (got.ratio.value, got.ratio.low, got.ratio.high) == (2.0, 2.0, 2.0)


def test_pairs_are_resampled_together() -> None:
    """A constant difference has no spread, however much the examples vary."""
    a = np.linspace(0, 100, 50)
    got = paired_bootstrap(a + 1, a, rng())
    assert got.difference.low == pytest.approx(1.0)
    assert got.difference.high == pytest.approx(1.0)


def test_the_same_generator_gives_the_same_interval() -> None:
    a, b = rng(1).random((30, 2))[:, 0], rng(2).random(30)
    assert paired_bootstrap(a, b, rng(7)) == paired_bootstrap(a, b, rng(7))
    assert paired_bootstrap(a, b, rng(7)).difference != paired_bootstrap(a, b, rng(8)).difference


def test_coverage_of_the_95_percent_interval() -> None:
    """400 data sets of 40 pairs with true difference 0.3: 0.95 aimed at, the percentile interval a bit under.

    The binomial deviation is 0.011, so [0.90, 0.98] is crossed by a right implementation about never.
    """
    source = rng(11)
    inside = 0
    for _ in range(400):
        b = source.normal(0.0, 1.0, 40)
        a = b + source.normal(0.3, 0.5, 40)
        difference = paired_bootstrap(a, b, source, replicates=400).difference
        inside += difference.low <= 0.3 <= difference.high
    assert 0.90 <= inside / 400 <= 0.98


def test_blocks_do_not_change_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    from racelab.analysis import stats

    values = rng(3).random(20)
    whole = bootstrap_mean(values, rng(5), replicates=1000)
    monkeypatch.setattr(stats, "_BLOCK", 20 * 7)
    assert bootstrap_mean(values, rng(5), replicates=1000) == whole


@given(st.integers(0, 9), st.integers(0, 9))
def test_sign_test_counts_coin_flips(wins: int, losses: int) -> None:
    n = wins + losses
    uneven = [flips for flips in itertools.product((0, 1), repeat=min(n, 10)) if n <= 10]
    if n <= 10:
        as_uneven = sum(abs(2 * sum(f) - n) >= abs(wins - losses) for f in uneven)
        assert sign_test(wins, losses) == pytest.approx(as_uneven / 2**n)
    assert sign_test(wins, losses) == sign_test(losses, wins)


def test_sign_test_by_hand() -> None:
    assert sign_test(5, 1) == 14 / 64
    assert sign_test(0, 6) == 2 / 64
    assert sign_test(3, 3) == 1.0


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(("df", "quantile"), [(1, 12.706205), (2, 4.302653), (4, 2.776445), (9, 2.262157)])
def test_seeds_use_students_t(df: int, quantile: float) -> None:
    """Tabled 97.5 % quantiles; the data 0 .. df have deviation sqrt((df+1)(df+2)/12)."""
    n = df + 1
    got = over_seeds([float(k) for k in range(n)])
    half = quantile * math.sqrt(n * (n + 1) / 12) / math.sqrt(n)
    assert got.value == df / 2
    assert got.high - got.value == pytest.approx(half, rel=1e-6)
    assert got.value - got.low == pytest.approx(half, rel=1e-6)
    assert math.isnan(over_seeds([1.0]).low)


def test_pairing_by_id_refuses_to_drop_examples() -> None:
    ids, pairs = align({"y": [1.0, 0.0], "x": [0.25]}, {"x": [1.0], "y": [0.0]})
    assert ids == ["x", "y"]
    assert pairs.tolist() == [[0.25, 1.0], [0.5, 0.0]]
    with pytest.raises(DataError, match=r"1 examples are on one side only .*'z', second"):
        align({"x": [1.0]}, {"x": [1.0], "z": [1.0]})


def test_refusals() -> None:
    with pytest.raises(DataError, match=r"1 of 2 examples have no score .*row 1"):
        example_means([[1.0, 2.0], [math.nan, math.nan]])
    with pytest.raises(DataError, match=r"2 examples against 3"):
        paired_bootstrap([1.0, 2.0], [1.0, 2.0, 3.0], rng())
    with pytest.raises(DataError, match=r"no examples"):
        bootstrap_mean([], rng())
    with pytest.raises(DataError, match=r"level 95"):
        bootstrap_mean([1.0], rng(), level=95)
    with pytest.raises(DataError, match=r"3 dimensions"):
        example_means(np.zeros((1, 1, 1)))
