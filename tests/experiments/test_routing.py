"""Eqs 5-9 and 18: ties, trigrams, embedding distance, routes. Every expected number was worked by hand."""

import json
import math

import numpy as np
import pytest

from racelab.experiments.methods.race import routing
from racelab.experiments.methods.race.routing import GroupSignals, Route, Thresholds

NAN = math.nan


def test_tie_rate_golden():
    """Eq 5. r = (0.50, 0.51, 0.52, 0.90), eps 0.025: near pairs 12, 13, 23 of 4*3/2 = 6 pairs: 3/6."""
    assert routing.tie_rate(np.array([0.50, 0.51, 0.52, 0.90])) == 0.5


def test_tie_rate_counts_valid_pairs_only():
    """Valid (0.5, 0.5, 0.9): 1 tie of 3 pairs."""
    assert routing.tie_rate(np.array([0.5, NAN, 0.9, 0.5])) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.275), (0.5, 0.525), (1.0, 0.975)])
def test_tie_rate_is_strict_whatever_the_rounding(a, b):
    """A gap of exactly eps_tie is no tie, though 0.3 - 0.275 is 0.02499999999999997 in binary."""
    assert routing.tie_rate(np.array([a, b])) == 0.0
    assert routing.tie_rate(np.array([a, b]), eps_tie=0.026) == 1.0


def test_tie_rate_needs_two_scores():
    assert math.isnan(routing.tie_rate(np.array([0.5, NAN])))
    assert routing.tie_rate(np.array([0.5, 0.5])) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("<think>a b</think>answer", "answer"),
        ("x <think>a</think> y <think>b</think> z", "x  y  z"),
        ("answer <think>never closed", "answer "),
        ("opened by the template</think>answer", "answer"),
        ("template</think>one <think>b</think>two", "one two"),
        ("<think>a</think>one</think>two", "one</think>two"),
    ],
)
def test_thinking_is_stripped(text, expected):
    assert routing.strip_thinking(text) == expected


def test_words_are_lower_case_runs_or_single_marks():
    assert routing.words("It's 3.5, OK?! <think>no</think>Été_1") == [
        "it", "'", "s", "3", ".", "5", ",", "ok", "?", "!", "été_1",
    ]  # fmt: skip


def test_trigrams_of_one_response():
    assert routing.trigrams("a b c d") == [("a", "b", "c"), ("b", "c", "d")]
    assert routing.trigrams("a b") == []


def test_distinct_trigram_ratio_golden():
    """Eq 6. abc, bcd | abc, bcx: 3 different of 4, 3/4. Trigrams never span two responses."""
    assert routing.distinct_trigram_ratio(["a b c d", "A B C x"]) == 0.75


def test_distinct_trigram_ratio_of_equal_responses_is_one_over_g():
    """8 times the same 10 words: 8 different of 64 trigrams = 1/8, above the printed floor of 0.05."""
    text = " ".join("abcdefghij")
    assert routing.distinct_trigram_ratio([text] * 8) == 0.125
    assert routing.reachable_d_tri(8) == 0.13125
    assert routing.reachable_d_tri(64) == 0.05
    assert routing.reachable_d_tri(8, floor=0.5) == 0.5


def test_short_responses_add_no_trigrams_to_the_longer():
    """'hi' has none and takes none away: 1 of 1."""
    assert routing.distinct_trigram_ratio(["hi", "a b c", ""]) == 1.0


def test_without_any_trigram_unique_responses_count():
    """Yes, yes, No, (empty): 3 different of 4."""
    assert routing.distinct_trigram_ratio(["Yes", "yes ", "No", ""]) == 0.75
    with pytest.raises(ValueError, match="at least one response"):
        routing.distinct_trigram_ratio([])


def test_embedding_distance_golden():
    """Eq 7. e = (1,0), (0,1), (3/5,4/5): distances 1, 2/5, 1/5; mean (1 + 2/5 + 1/5)/3 = 8/15."""
    emb = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    assert routing.embedding_distance(emb) == pytest.approx(8 / 15, rel=1e-14)


def test_embedding_distance_bounds():
    """Equal rows: 0. Opposite rows: 1 - (-1) = 2."""
    assert routing.embedding_distance(np.array([[0.6, 0.8]] * 7)) == pytest.approx(0.0, abs=1e-15)
    assert routing.embedding_distance(np.array([[0.6, 0.8]] * 7)) >= 0.0
    assert routing.embedding_distance(np.array([[0.6, 0.8], [-0.6, -0.8]])) == 2.0
    assert math.isnan(routing.embedding_distance(np.array([[1.0, 0.0]])))
    with pytest.raises(ValueError, match=r"shape \[G, D\]"):
        routing.embedding_distance(np.zeros(3))


def test_embedding_distance_is_clipped_for_rows_a_little_too_long():
    long_rows = np.array([[1.001, 0.0], [1.001, 0.0]])
    assert routing.embedding_distance(long_rows) == 0.0
    assert routing.embedding_distance(long_rows * [[1], [-1]]) == 2.0


def group(std=0.2, tie=0.1, d_tri=0.9, d_emb=0.4, n_valid=8, mean=0.5):
    return GroupSignals(mean=mean, std=std, tie_rate=tie, d_tri=d_tri, d_emb=d_emb, n_valid=n_valid)


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        (group(), Route.INFORMATIVE),
        (group(std=0.031, tie=0.69), Route.INFORMATIVE),
        (group(std=0.031, tie=0.69, d_tri=0.0, d_emb=0.0), Route.INFORMATIVE),
        (group(std=0.03), Route.RUBRIC_FAILED),
        (group(tie=0.70), Route.RUBRIC_FAILED),
        (group(std=0.03, d_tri=0.05), Route.RUBRIC_FAILED),
        (group(std=0.03, d_emb=0.05), Route.RUBRIC_FAILED),
        (group(std=0.03, d_tri=0.05, d_emb=0.05), Route.DIVERSITY_COLLAPSED),
        (group(tie=0.70, d_tri=0.05, d_emb=0.05), Route.DIVERSITY_COLLAPSED),
        (group(std=0.0, d_tri=0.051, d_emb=0.05), Route.RUBRIC_FAILED),
        (group(std=0.0, d_tri=0.05, d_emb=0.051), Route.RUBRIC_FAILED),
        (group(n_valid=2), Route.INFORMATIVE),
        (group(n_valid=1, std=0.0), Route.INVALID),
        (group(n_valid=0, std=NAN, tie=NAN, mean=NAN), Route.INVALID),
    ],
)
def test_routes_with_the_printed_thresholds(signals, expected):
    assert routing.route(signals, Thresholds()) is expected


def test_degenerate_golden():
    """Eq 8. r = (1/2, 1/2, 1/2, 1): mean 5/8, var (3 (1/8)^2 + (3/8)^2)/4 = 3/64, std 0.2165; ties 3/6 = 1/2."""
    found = routing.signals(np.array([0.5, 0.5, 0.5, 1.0]), ["a", "b", "c", "d"], np.eye(4))
    assert found.std == pytest.approx(math.sqrt(3) / 8, rel=1e-15)
    assert not routing.is_degenerate(found, Thresholds(sigma_rt=0.216, tau_tie=0.51))
    assert routing.is_degenerate(found, Thresholds(sigma_rt=0.217, tau_tie=0.51))
    assert routing.is_degenerate(found, Thresholds(sigma_rt=0.216, tau_tie=0.5))


def test_diversity_collapsed_golden():
    """Eq 9. Equal scores, so degenerate. 'a b c' x 3 and 'a b d': 2/4 trigrams = 1/2.

    e = (1,0) x 3 and (3/5,4/5): of 6 pairs 3 have the distance 0 and 3 have 1 - 3/5 = 2/5: mean 1/5.
    """
    emb = np.array([[1.0, 0.0]] * 3 + [[0.6, 0.8]])
    found = routing.signals(np.full(4, 0.5), ["a b c", "a b c", "a b d", "a b c"], emb)
    assert found.d_tri == 0.5
    assert found.d_emb == pytest.approx(0.2, rel=1e-14)
    assert routing.route(found, Thresholds(d_tri=0.5, d_emb=0.21)) is Route.DIVERSITY_COLLAPSED
    assert routing.route(found, Thresholds(d_tri=0.49, d_emb=0.21)) is Route.RUBRIC_FAILED
    assert routing.route(found, Thresholds(d_tri=0.5, d_emb=0.19)) is Route.RUBRIC_FAILED


@pytest.mark.parametrize("n", [6, 7])
def test_equal_scores_are_degenerate_even_at_sigma_rt_zero(n):
    """n times 0.7 and one NaN, sigma_rt wound down to 0: sigma must be 0 <= 0, so never informative."""
    rewards = np.array([0.7] * n + [NAN])
    texts = [f"answer number {i} of them" for i in range(n + 1)]
    emb = np.eye(n + 1)
    wound_down = Thresholds(sigma_rt=0.0, tau_tie=1.1)
    got = routing.signals(rewards, texts, emb)
    assert got.std == 0.0
    assert got.n_valid == n
    assert routing.route(got, wound_down) is Route.RUBRIC_FAILED


def test_signals_puts_every_statistic_in_its_place():
    """r = (0, 1, 1): mean 2/3, var 2/9, ties 1/3; 'a b c' x 2 + 'a b d': 2/3; distances 1, 1, 0: 2/3."""
    got = routing.signals(
        np.array([0.0, 1.0, 1.0]), ["a b d", "a b c", "a b c"], np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    )
    assert got.mean == pytest.approx(2 / 3)
    assert got.std == pytest.approx(math.sqrt(2) / 3)
    assert got.tie_rate == pytest.approx(1 / 3)
    assert got.d_tri == pytest.approx(2 / 3)
    assert got.d_emb == pytest.approx(2 / 3)
    assert got.n_valid == 3
    assert got.usable


def test_signals_takes_eps_tie():
    rewards, texts, emb = np.array([0.0, 0.04]), ["a", "b"], np.eye(2)
    assert routing.signals(rewards, texts, emb).tie_rate == 0.0
    assert routing.signals(rewards, texts, emb, eps_tie=0.05).tie_rate == 1.0


@pytest.mark.parametrize(("r", "t", "e"), [(3, 2, 2), (2, 3, 2), (2, 2, 3)])
def test_signals_must_describe_the_same_responses(r, t, e):
    with pytest.raises(ValueError, match=f"{r} rewards, {t} texts and {e} embeddings"):
        routing.signals(np.zeros(r), ["x"] * t, np.eye(e))


def test_quarantine_rate_golden():
    """Eq 18. 2 failed + 1 collapsed of 3 + 2 informative = 5 processed: 3/5; the invalid one is not processed."""
    i, c, f, x = Route.INFORMATIVE, Route.DIVERSITY_COLLAPSED, Route.RUBRIC_FAILED, Route.INVALID
    assert routing.quarantine_rate([i, f, x, c, i, f]) == 0.6
    assert routing.quarantine_rate([i]) == 0.0
    assert math.isnan(routing.quarantine_rate([x, x]))


def test_default_thresholds_are_table_7s():
    assert Thresholds().state() == {
        "sigma_rt": 0.03,
        "tau_tie": 0.70,
        "d_tri": 0.05,
        "d_emb": 0.05,
        "tau_sat": 0.40,
        "tau_imp": 0.005,
        "sigma_sw": 0.06,
        "mu_sat": 0.8,
    }


def test_thresholds_and_signals_survive_json():
    thresholds = Thresholds(sigma_rt=0.1 + 0.2, tau_imp=1 / 3)
    assert Thresholds.from_state(json.loads(json.dumps(thresholds.state()))) == thresholds
    signals = group(std=1 / 7, n_valid=3)
    back = GroupSignals.from_state(json.loads(json.dumps(signals.state())))
    assert back == signals
    assert isinstance(back.n_valid, int)


@pytest.mark.parametrize("low", [0.11, 0.35, 0.57, 0.7, 0.83])
def test_a_spread_of_exactly_the_threshold_is_degenerate_wherever_it_lies(low):
    """Four scores of a and four of a + 6/100: std = 3/100 whatever a is; binary floats may land just above."""
    scores = np.array([low] * 4 + [round(low + 0.06, 2)] * 4)
    found = routing.signals(scores, [f"text {i}" for i in range(8)], np.eye(8), 0.025)
    assert routing.is_degenerate(found, Thresholds(sigma_rt=0.03, tau_tie=0.99))
