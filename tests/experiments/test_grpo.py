"""Eqs 3-4: advantages, token weights, the surrogate. Every expected number was worked by hand."""

import math

import numpy as np
import pytest

from racelab.experiments.methods import grpo
from racelab.experiments.types import Sample

NAN = math.nan


def sample(n, text="x"):
    return Sample(tokens=tuple(range(10, 10 + n)), logprobs=(-1.0,) * n, text=text, finished=True)


def test_mean_and_sigma_of_a_group():
    """r = (0.2, 0.4, 0.6, 0.8): mean 2/4 = 0.5; variance (9 + 1 + 1 + 9)/100/4 = 1/20; std = sqrt(0.05)."""
    r = np.array([0.2, 0.4, 0.6, 0.8])
    assert grpo.mean(r) == 0.5
    assert grpo.sigma(r) == pytest.approx(0.22360679774997896, rel=1e-15)


def test_sigma_is_the_population_deviation():
    """r = (0, 1): mean 1/2, population variance (1/4 + 1/4)/2 = 1/4, std 1/2 (ddof 1 would give 0.7071)."""
    assert grpo.sigma(np.array([0.0, 1.0])) == 0.5


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 8, 11])
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.8])
def test_equal_scores_have_sigma_exactly_zero_and_their_own_mean(n, value):
    r = np.array([value] * n + [NAN])
    assert grpo.sigma(r) == 0.0
    assert grpo.mean(r) == value
    assert grpo.advantages(r).tolist() == [0.0] * (n + 1)


def test_numpy_alone_would_get_six_equal_scores_wrong():
    assert np.std([0.7] * 6) > 0.0


def test_no_valid_score():
    r = np.array([NAN, np.inf])
    assert math.isnan(grpo.sigma(r))
    assert math.isnan(grpo.mean(r))
    assert grpo.advantages(r).tolist() == [0.0, 0.0]
    assert grpo.valid(r).tolist() == []


def test_valid_keeps_order_and_needs_one_axis():
    assert grpo.valid(np.array([0.5, NAN, 0.25])).tolist() == [0.5, 0.25]
    with pytest.raises(ValueError, match=r"shape \[G\]"):
        grpo.valid(np.zeros((2, 2)))


def test_advantages_golden():
    """r = (0, 0, 1, 1): mean 1/2, std 1/2; with eps = 1/2: A = (-1/2)/(1/2 + 1/2) = -1/2 and +1/2."""
    r = np.array([0.0, 0.0, 1.0, 1.0])
    assert grpo.advantages(r, eps=0.5).tolist() == [-0.5, -0.5, 0.5, 0.5]


def test_advantages_default_eps():
    """r = (0, 1): A_2 = (1/2)/(1/2 + 1e-8) = 1/(1 + 2e-8) = 1 - 2e-8 to first order."""
    assert grpo.advantages(np.array([0.0, 1.0]))[1] == pytest.approx(1 - 2e-8, abs=1e-12)


def test_a_nan_row_gets_zero_and_the_others_their_own_statistics():
    """Valid (0.25, 0.75): mean 1/2, std 1/4; with eps 1/4: A = -(1/4)/(1/2) = -1/2 and +1/2."""
    r = np.array([0.25, NAN, 0.75])
    assert grpo.advantages(r, eps=0.25).tolist() == [-0.5, 0.0, 0.5]


def test_no_spread_gives_zeros_without_any_eps():
    assert grpo.advantages(np.array([0.3, 0.3, 0.3]), eps=0.0).tolist() == [0.0, 0.0, 0.0]


def test_one_valid_score_gives_zeros():
    assert grpo.advantages(np.array([NAN, 0.9, NAN])).tolist() == [0.0, 0.0, 0.0]


LENGTHS = [[1, 2], [4, 0]]


def weights(kind, n_all=2, lengths=LENGTHS):
    return [[w.tolist() for w in group] for group in grpo.token_weights(lengths, kind, n_all)]


def test_weights_over_informative_groups():
    """2 groups of 2: 1/(2*2*1) = 1/4, 1/(2*2*2) = 1/8, 1/(2*2*4) = 1/16; the empty sample has none."""
    expected = [[[0.25], [0.125] * 2], [[0.0625] * 4, []]]
    assert weights("informative_groups") == expected
    assert weights("informative_groups", n_all=64) == expected


def test_weights_over_all_groups():
    """4 groups processed, 2 used: 1/(4*2*1) = 1/8, 1/16, 1/32."""
    assert weights("over_all_groups", n_all=4) == [[[0.125], [0.0625] * 2], [[0.03125] * 4, []]]


def test_weights_over_all_groups_needs_a_possible_count():
    assert weights("over_all_groups", n_all=2) == weights("informative_groups")
    with pytest.raises(ValueError, match="less than the 2 groups"):
        weights("over_all_groups", n_all=1)


def test_weights_token_mean():
    """1 + 2 + 4 + 0 = 7 tokens, 1/7 each."""
    assert weights("token_mean") == [[[1 / 7], [1 / 7] * 2], [[1 / 7] * 4, []]]


@pytest.mark.parametrize("kind", ["informative_groups", "over_all_groups", "token_mean"])
def test_weights_of_nothing(kind):
    assert weights(kind, n_all=0, lengths=[]) == []
    assert weights(kind, n_all=1, lengths=[[0]]) == [[[]]]


def test_unknown_normalisation():
    with pytest.raises(ValueError, match="'mean' is unknown"):
        grpo.token_weights([[1]], "mean", 1)


def test_grpo_batch_golden():
    """Group of lengths (1, 2), r = (0, 1), eps 1/2: A = -+1/2; weights 1/(1*2*1), 1/(1*2*2)."""
    batch = grpo.grpo_batch(
        [([5, 6], [sample(1), sample(2)], np.array([0.0, 1.0]))], n_all_groups=3, temperature=0.7, eps=0.5
    )
    assert batch.temperature == 0.7
    (group,) = batch.groups
    assert group.prefix == (5, 6)
    assert [s.tokens for s in group.samples] == [(10,), (10, 11)]
    assert [s.advantages.tolist() for s in group.samples] == [[-0.5], [0.5, 0.5]]
    assert [s.weights.tolist() for s in group.samples] == [[0.5], [0.25, 0.25]]


def test_grpo_batch_passes_the_normalisation_on():
    groups = [([1], [sample(1), sample(2)], np.array([0.0, 1.0]))]
    batch = grpo.grpo_batch(groups, n_all_groups=4, normalisation="over_all_groups")
    assert batch.groups[0].samples[0].weights.tolist() == [0.125]
    assert batch.temperature == 1.0
    assert batch.groups[0].samples[1].advantages == pytest.approx([1 - 2e-8] * 2, abs=1e-12)


def test_grpo_batch_leaves_out_samples_and_groups_without_tokens():
    groups = [
        ([1], [sample(0), sample(2)], np.array([0.0, 1.0])),
        ([2], [sample(0), sample(0)], np.array([0.0, 1.0])),
    ]
    batch = grpo.grpo_batch(groups, n_all_groups=2)
    assert [g.prefix for g in batch.groups] == [(1,)]
    assert batch.n_samples == 1
    assert batch.groups[0].samples[0].weights.tolist() == [0.125, 0.125]


def test_grpo_batch_of_no_group_is_empty():
    assert grpo.grpo_batch([], n_all_groups=4).groups == ()


def test_grpo_batch_needs_a_reward_per_sample():
    with pytest.raises(ValueError, match="2 samples but 3 rewards"):
        grpo.grpo_batch([([1], [sample(1), sample(1)], np.zeros(3))], n_all_groups=1)


def test_kl3_golden():
    """d = 0: 0. d = ln 2: 2 - ln 2 - 1 = 1 - ln 2. d = -ln 2: 1/2 + ln 2 - 1 = ln 2 - 1/2."""
    got = grpo.kl3([0.0, math.log(2), -math.log(2)])
    assert got.tolist() == pytest.approx([0.0, 0.3068528194400547, 0.1931471805599453], rel=1e-14)


def log(*values):
    return np.log(np.array(values))


def one_token_batch(reward_pair):
    return grpo.grpo_batch([([1], [sample(1), sample(1)], np.array(reward_pair))], n_all_groups=1, eps=0.5)


def test_surrogate_on_policy_is_zero_and_off_policy_is_clipped():
    """A = (-1/2, 1/2), weights 1/2.

    Ratio 1: -(1/2)(-1/2 + 1/2) = 0.
    Ratios (1/2, 2), eps_c = 1/4: min(-1/4, 3/4 * -1/2) = -3/8; min(1, 5/4 * 1/2) = 5/8;
    L = -(1/2)(1/4) = -1/8.
    Ratios (2, 1/2): min(-1, -5/8) = -1; min(1/4, 3/8) = 1/4; L = -(1/2)(-3/4) = 3/8.
    """
    batch = one_token_batch([0.0, 1.0])
    old = [[log(0.25), log(0.25)]]

    def loss(a, b):
        new = [[log(a), log(b)]]
        return grpo.surrogate(batch, new, old, new, clip_eps=0.25)

    assert loss(0.25, 0.25) == pytest.approx(0.0, abs=1e-15)
    assert loss(0.125, 0.5) == pytest.approx(-0.125, rel=1e-13)
    assert loss(0.5, 0.125) == pytest.approx(0.375, rel=1e-13)


def test_surrogate_kl_term():
    """sigma = 0, so A = 0; new 1/4, ref 1/2: d = ln 2, kl3 = 1 - ln 2; L = beta * kl3 * (1/2 + 1/2)."""
    batch = one_token_batch([0.5, 0.5])
    new, ref = [[log(0.25), log(0.25)]], [[log(0.5), log(0.5)]]
    assert grpo.surrogate(batch, new, new, ref, beta=0.1) == pytest.approx(0.03068528194400547, rel=1e-13)


def test_surrogate_defaults_are_the_papers():
    """eps_c = 0.2: ratios (1, 2): -(1/2)(-1/2 + 1.2/2) = -1/20; beta = 1e-3: kl3(ln 2) * 1e-3 on both."""
    batch = one_token_batch([0.0, 1.0])
    old = [[log(0.25), log(0.25)]]
    new = [[log(0.25), log(0.5)]]
    assert grpo.surrogate(batch, new, old, new) == pytest.approx(-0.05, rel=1e-12)
    ref = [[log(0.5), log(1.0)]]
    expected = -0.05 + 1e-3 * 0.3068528194400547
    assert grpo.surrogate(batch, new, old, ref) == pytest.approx(expected, rel=1e-12)


def test_surrogate_needs_an_array_per_sample():
    batch = one_token_batch([0.0, 1.0])
    one = log(0.5)
    for wrong in ([[one]], [[one, one], [one, one]], []):
        with pytest.raises(ValueError, match="zip"):
            grpo.surrogate(batch, [[one, one]], wrong, [[one, one]])


def test_masked_groups_add_no_kl():
    """A group that is not passed in has no token in the batch, so the KL of Eq 4 cannot see it."""
    informative = ([1], [sample(1), sample(3)], np.array([0.0, 1.0]))
    assert grpo.grpo_batch([informative], n_all_groups=2).n_tokens == 4
