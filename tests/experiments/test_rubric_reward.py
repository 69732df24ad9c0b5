"""Eqs 15-16 and Table 12's diagnostics. Every expected number was worked by hand."""

import math

import numpy as np
import pytest

from racelab.experiments.methods.race import rubric_reward as rr

NAN = math.nan


def test_new_margins_golden():
    """Eq 15: 3/4 - 1/4 = 1/2; 1/4 - 1 = -3/4; NaN on either side stays NaN."""
    got = rr.new_margins(np.array([0.75, 0.25, NAN, 0.5]), np.array([0.25, 1.0, 0.5, NAN]))
    assert got[:2].tolist() == [0.5, -0.75]
    assert np.isnan(got[2:]).all()


def test_base_reward_golden():
    """Eqs 15-16, eps_norm = 1/20, c = 1, m_old = 1/5, so the denominator is 1/4.

    Candidate 0: m = 1/2 - 3/8 = 1/8, reward (1/8)/(1/4) = 1/2. Candidate 1: m = 1/4 - 5/16 = -1/16, reward -1/4.
    Candidate 2: m = 1 - 1/2 = 1/2, 2 clipped to 1. Candidate 3: m = 0 - 3/4, -3 clipped to -1.
    """
    margins = rr.new_margins(np.array([0.5, 0.25, 1.0, 0.0]), np.array([0.375, 0.3125, 0.5, 0.75]))
    assert rr.base_rewards(margins, 0.2) == pytest.approx([0.5, -0.25, 1.0, -1.0], rel=1e-14)


@pytest.mark.parametrize(
    ("m_new", "m_old", "expected"),
    [
        (0.1, 0.15, 0.5),  # 0.1 / (0.15 + 0.05) = 1/2
        (-0.1, 0.15, -0.5),
        (0.0, 0.15, 0.0),
        (0.025, 0.0, 0.5),  # (1/40) / (1/20) = 1/2
        (0.9, 0.0, 1.0),  # 18, clipped
        (-0.9, 0.2, -1.0),  # -3.6, clipped
        (0.2, 0.2, 0.8),  # a rubric that changes nothing: 0.2 / 0.25 = 4/5
    ],
)
def test_margin_reward_golden(m_new, m_old, expected):
    assert rr.margin_reward(m_new, m_old) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("m_new", "m_old", "expected"),
    [(0.1, 0.2, 0.5), (0.1, 0.25, 0.4), (0.025, 0.0, 0.5), (0.025, 0.04, 0.5), (0.9, 0.2, 1.0)],
)
def test_margin_reward_with_the_max_denominator(m_new, m_old, expected):
    """max(0.2, 0.05) = 0.2: 0.1/0.2 = 1/2; below 0.05 the floor takes over: (1/40)/(1/20) = 1/2."""
    assert rr.margin_reward(m_new, m_old, denominator="max") == pytest.approx(expected, rel=1e-14)


def test_margin_reward_settings():
    """0.3 / (0.1 + 0.1) = 3/2, clipped at 2: 3/2; at 1.25: 5/4."""
    assert rr.margin_reward(0.3, 0.1, eps_norm=0.1, clip=2.0) == pytest.approx(1.5)
    assert rr.margin_reward(0.3, 0.1, eps_norm=0.1, clip=1.25) == 1.25
    assert rr.margin_reward(-0.3, 0.1, eps_norm=0.1, clip=1.25) == -1.25


def test_margin_reward_of_nan_is_nan():
    assert math.isnan(rr.margin_reward(NAN, 0.1))


@pytest.mark.parametrize(
    ("m_old", "kwargs", "message"),
    [
        (-0.1, {}, "m_old must be >= 0"),
        (NAN, {}, "m_old must be >= 0"),
        (0.1, {"eps_norm": 0.0}, "must be positive"),
        (0.1, {"clip": 0.0}, "must be positive"),
        (0.1, {"denominator": "min"}, "'min' is unknown"),
    ],
)
def test_margin_reward_refuses_nonsense(m_old, kwargs, message):
    with pytest.raises(ValueError, match=message):
        rr.margin_reward(0.1, m_old, **kwargs)


def test_base_rewards_are_eq_16_row_by_row():
    """(0.1, NaN, -0.9) over 0.15 + 0.05: 1/2, NaN, -1; max with eps 0.3, clip 0.25: 1/4, NaN, -1/4."""
    margins = np.array([0.1, NAN, -0.9])
    np.testing.assert_allclose(rr.base_rewards(margins, 0.15), [0.5, NAN, -1.0])
    got = rr.base_rewards(margins, 0.15, eps_norm=0.3, clip=0.25, denominator="max")
    np.testing.assert_allclose(got, [0.25, NAN, -0.25])
    got = rr.base_rewards(margins, 0.15, eps_norm=0.25, clip=3.0)
    np.testing.assert_allclose(got, [0.25, NAN, -2.25])


def test_final_rewards_by_default_leave_unusable_candidates_out():
    base, usable = np.array([0.5, NAN, NAN]), np.array([True, False, True])
    np.testing.assert_array_equal(rr.final_rewards(base, usable), [0.5, NAN, NAN])


def test_final_rewards_with_a_punishment_and_a_format_term():
    """Usable: 1/2 + 1/4 and -1 + 1/4; unusable: -1 whatever else; usable but not judged: NaN."""
    base, usable = np.array([0.5, -1.0, NAN, NAN]), np.array([True, True, False, True])
    got = rr.final_rewards(base, usable, invalid_reward=-1.0, format_weight=0.25)
    np.testing.assert_array_equal(got, [0.75, -0.75, -1.0, NAN])


def stats(**kwargs):
    margins = np.array([[0.2, -0.1, NAN, 0.0], [0.5, 0.5, 0.5, NAN], [NAN, NAN, NAN, 0.1]])
    m_old = np.array([0.0, 0.2, 0.025])
    base = np.array([[1.0, -1.0, NAN, 0.0], [1.0, 1.0, 1.0, NAN], [NAN, NAN, NAN, 0.5]])
    final = np.array([[1.0, -1.0, -1.0, 0.0], [1.0, 1.0, 1.0, NAN], [NAN, NAN, NAN, 0.5]])
    return rr.rubric_reward_stats(margins, m_old, base, final, **kwargs)


def test_stats_golden():
    """Seven margins: 0.2, -0.1, 0, 0.5 x 3, 0.1.

    mean of the 8 finals: (1 - 1 - 1 + 0 + 3 + 0.5)/8 = 2.5/8. margin_mean: 1.7/7.
    gain: (0.2 - 0.1 + 0) + 3 * 0.3 + 0.075 = 1.075, /7. reversed: 1/7. at the clip: 5/7.
    groups with two finals: rows 1 and 2, sigma = 0 in row 2: 1/2. near ties: m_old = 0 only (0.025 is not
    < 0.025): 1/3.
    """
    assert stats() == pytest.approx(
        {
            "mean": 0.3125,
            "gain_mean": 1.075 / 7,
            "margin_mean": 1.7 / 7,
            "sigma_zero_frac": 0.5,
            "near_tie_frac": 1 / 3,
            "at_clip_frac": 5 / 7,
            "reversed_frac": 1 / 7,
        },
        rel=1e-14,
    )


def test_stats_settings():
    """Clip 1/2 lets the 0.5 count too: 6/7. Near tie below 0.03: two of three."""
    got = stats(clip=0.5, near_tie=0.03)
    assert got["at_clip_frac"] == pytest.approx(6 / 7)
    assert got["near_tie_frac"] == pytest.approx(2 / 3)


def test_stats_count_collapsed_groups_of_two_or_more():
    """Finals (1/2, 1/2) collapsed; (0, 1), (0, 1) not; (1/2, NaN) is no group: 1/3."""
    final = np.array([[0.5, 0.5], [0.0, 1.0], [0.0, 1.0], [0.5, NAN]])
    got = rr.rubric_reward_stats(final, np.zeros(4), final, final)
    assert got["sigma_zero_frac"] == pytest.approx(1 / 3)


def test_stats_of_a_step_without_valid_scores():
    nothing = np.full((1, 2), NAN)
    got = rr.rubric_reward_stats(nothing, np.array([0.5]), nothing, nothing)
    assert got.pop("near_tie_frac") == 0.0
    assert all(math.isnan(v) for v in got.values())


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_stats_check_shapes(which):
    arrays = [np.zeros((2, 3)), np.zeros(2), np.zeros((2, 3)), np.zeros((2, 3))]
    arrays[which] = np.zeros(3) if which == 1 else np.zeros((2, 4))
    with pytest.raises(ValueError, match="shapes differ"):
        rr.rubric_reward_stats(*arrays)
