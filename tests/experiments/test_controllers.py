"""Eqs 19-22 and the warm-up. Every expected number was worked by hand."""

import json
import math
from dataclasses import replace

import pytest

from racelab.experiments.methods.race import controllers as ctl
from racelab.experiments.methods.race.controllers import Calibration, PhaseLengthConfig, TrqcConfig
from racelab.experiments.methods.race.routing import GroupSignals, Thresholds

NAN = math.nan
START = Thresholds(sigma_rt=0.5, tau_tie=0.5)
COARSE = TrqcConfig(q_star=0.25, alpha_q=0.5, eps_q=0.25, eta_sigma=0.25, eta_tau=0.125)


def test_ema_golden():
    """1/4 * 1 + 3/4 * 1/2 = 5/8."""
    assert ctl.ema(0.5, 1.0, 0.25) == 0.625


@pytest.mark.parametrize(
    ("value", "expected"),
    [(-0.5, (0.0, True)), (0.0, (0.0, False)), (0.5, (0.5, False)), (1.0, (1.0, False)), (2.0, (1.0, True))],
)
def test_project(value, expected):
    assert ctl.project(value, (0.0, 1.0)) == expected


def test_trqc_golden_too_much_quarantined():
    """Eqs 19-20. q_hat = (1/2)(1) + (1/2)(1/2) = 3/4; e = (3/4 - 1/4)/(1/4 + 1/4) = 1.

    sigma_rt = 1/2 - 1/4 = 1/4; tau_tie = 1/2 + 1/8 = 5/8.
    """
    got = ctl.trqc(START, 0.5, 1.0, COARSE)
    assert (got.q_ema, got.error) == (0.75, 1.0)
    assert got.thresholds == replace(START, sigma_rt=0.25, tau_tie=0.625)
    assert not got.saturated


def test_trqc_golden_too_little_quarantined():
    """Eqs 19, 20. q_hat 0; e = (0 - 1/4)/(1/2) = -1/2; sigma_rt = 1/2 + 1/8 = 5/8; tau_tie = 1/2 - 1/16 = 7/16."""
    got = ctl.trqc(START, 0.0, 0.0, COARSE)
    assert (got.q_ema, got.error) == (0.0, -0.5)
    assert (got.thresholds.sigma_rt, got.thresholds.tau_tie) == (0.625, 0.4375)


def test_trqc_first_printed_step():
    """q = 0.245 from q_hat = 0: q_hat = 0.0245; e = -0.1755/0.2 = -0.8775; sigma = 0.03 + 0.0026325."""
    got = ctl.trqc(Thresholds(), 0.0, 0.245, TrqcConfig())
    assert got.q_ema == pytest.approx(0.0245)
    assert got.error == pytest.approx(-0.8775, rel=1e-6)
    assert got.thresholds.sigma_rt == pytest.approx(0.0326325, rel=1e-7)
    assert got.thresholds.tau_tie == pytest.approx(0.6973675, rel=1e-7)


def test_trqc_default_eps_q():
    """q* = 0 leaves eps_q alone below: e = 0.1 / 1e-8 = 1e7."""
    got = ctl.trqc(START, 0.0, 1.0, TrqcConfig(q_star=0.0))
    assert got.error == pytest.approx(1e7)


@pytest.mark.parametrize(
    ("start", "q", "expected"),
    [
        (Thresholds(sigma_rt=0.0, tau_tie=0.5), 1.0, (0.0, 0.6875)),
        (Thresholds(sigma_rt=0.5, tau_tie=1.0), 1.0, (0.125, 1.0)),
        (Thresholds(sigma_rt=1.0, tau_tie=0.5), 0.0, (1.0, 0.4375)),
        (Thresholds(sigma_rt=0.5, tau_tie=0.0), 0.0, (0.625, 0.0)),
    ],
)
def test_trqc_is_held_at_its_bounds_and_says_so(start, q, expected):
    """q_hat 1: e = (3/4)/(1/2) = 3/2, changes -3/8 and +3/16. q_hat 0: e = -1/2, changes +1/8 and -1/16."""
    got = ctl.trqc(start, q, q, COARSE)
    assert (got.thresholds.sigma_rt, got.thresholds.tau_tie) == expected
    assert got.saturated


def test_trqc_without_a_processed_group_changes_nothing():
    got = ctl.trqc(START, 0.5, NAN, COARSE)
    assert got.thresholds == START
    assert (got.q_ema, got.error, got.saturated) == (0.5, 0.5, False)


def test_trqc_frozen_follows_q_only():
    got = ctl.trqc(replace(START, sigma_rt=0.0), 0.5, 1.0, COARSE, frozen=True)
    assert got.thresholds == replace(START, sigma_rt=0.0)
    assert (got.q_ema, got.error, got.saturated) == (0.75, 1.0, False)


def test_trqc_winds_up_when_the_target_cannot_be_reached():
    """Table 13: 24.5 % of the groups have sigma = 0 and are always quarantined, above q* = 0.20.

    q = 0.245 for ever: e tends to 0.045/0.2 = 0.225, so sigma_rt falls by 0.003 * 0.225 = 0.000675 a step.
    """
    thresholds, q_ema, first_zero = Thresholds(), 0.0, None
    for step in range(1, 201):
        got = ctl.trqc(thresholds, q_ema, 0.245, TrqcConfig())
        thresholds, q_ema = got.thresholds, got.q_ema
        if first_zero is None and thresholds.sigma_rt == 0.0:
            first_zero = step
    assert first_zero == 94
    assert got.saturated


LENGTHS = PhaseLengthConfig(
    policy_target=8, rubric_target=4, policy_window=2, rubric_window=3, eta_policy=0.25, eta_rubric=0.5,
    policy_range=(0.125, 0.875), rubric_range=(-0.25, 0.25),
)  # fmt: skip


def test_duration_error_golden():
    """Eq 21. Mean of the last two of (99, 10, 14) = 12; (12 - 8)/8 = 1/2."""
    assert ctl.duration_error([99, 10, 14], 8, 2) == 0.5
    assert ctl.duration_error([2, 4], 8, 2) == -0.625
    assert math.isnan(ctl.duration_error([99], 8, 2))


def test_adapt_tau_sat_golden():
    """Eq 22. Too long: 1/2 - 1/4 * 1/2 = 3/8. Too short, (3 - 8)/8 = -5/8: 1/2 + 5/32 = 21/32."""
    assert ctl.adapt_tau_sat(0.5, [10, 14], LENGTHS) == ctl.LengthUpdate(0.375, 0.5, False)
    assert ctl.adapt_tau_sat(0.5, [2, 4], LENGTHS) == ctl.LengthUpdate(0.65625, -0.625, False)


def test_adapt_tau_imp_golden():
    """Eq 22. Too long, (5 - 4)/4 = 1/4: 0 + 1/2 * 1/4 = 1/8. Too short, (3 - 4)/4: -1/8."""
    assert ctl.adapt_tau_imp(0.0, [4, 5, 6], LENGTHS) == ctl.LengthUpdate(0.125, 0.25, False)
    assert ctl.adapt_tau_imp(0.0, [2, 3, 4], LENGTHS) == ctl.LengthUpdate(-0.125, -0.25, False)


def test_phase_lengths_wait_for_a_full_window():
    for got in (ctl.adapt_tau_sat(0.5, [99], LENGTHS), ctl.adapt_tau_imp(0.5, [99, 99], LENGTHS)):
        assert got.threshold == 0.5  # also where it lies outside its range
        assert math.isnan(got.error)
        assert not got.saturated


@pytest.mark.parametrize(("lengths", "bound"), [([80, 80], 0.125), ([0, 0], 0.875)])
def test_tau_sat_stays_in_its_range(lengths, bound):
    """80: e = 9, change -9/4. 0: e = -1, 7/8 + 1/4."""
    got = ctl.adapt_tau_sat(bound, lengths, LENGTHS)
    assert (got.threshold, got.saturated) == (bound, True)


@pytest.mark.parametrize(("lengths", "bound"), [([40] * 3, 0.25), ([0] * 3, -0.25)])
def test_tau_imp_stays_in_its_range(lengths, bound):
    got = ctl.adapt_tau_imp(bound, lengths, LENGTHS)
    assert (got.threshold, got.saturated) == (bound, True)


def test_printed_defaults():
    """L = 28, 28, 28: e = 3/25, 0.40 - 0.04 * 0.12 = 0.3952. M = 10: e = -1/6, 0.005 - 0.0005/6."""
    config = PhaseLengthConfig()
    assert ctl.adapt_tau_sat(0.40, [28] * 3, config).threshold == pytest.approx(0.3952, rel=1e-14)
    assert ctl.adapt_tau_imp(0.005, [10] * 3, config).threshold == pytest.approx(0.005 - 0.0005 / 6)
    assert math.isnan(ctl.adapt_tau_sat(0.4, [28] * 2, config).error)
    assert math.isnan(ctl.adapt_tau_imp(0.4, [28] * 2, config).error)
    assert ctl.adapt_tau_sat(0.05, [10**6] * 3, config).threshold == 0.05
    assert ctl.adapt_tau_sat(0.95, [1] * 3, config).threshold == 0.95
    assert ctl.adapt_tau_imp(0.05, [10**6] * 3, config).threshold == 0.05
    assert ctl.adapt_tau_imp(0.0, [1] * 3, config).threshold == 0.0


def group(std, tie, d_tri, d_emb, mean, n_valid=8):
    return GroupSignals(mean=mean, std=std, tie_rate=tie, d_tri=d_tri, d_emb=d_emb, n_valid=n_valid)


GROUPS = [
    group(0.0, 1.0, 0.0, 0.5, 0.8),
    group(0.1, 0.8, 0.2, 0.4, 0.79),
    group(0.2, 0.6, 0.4, 0.3, 0.9),
    group(0.3, 0.4, 0.6, 0.2, 0.1),
    group(0.4, 0.2, 0.8, 0.1, 1.0),
]
UNUSABLE = group(9.0, 9.0, 9.0, 9.0, 9.0, n_valid=1)


def test_calibrated_golden():
    """Five groups, so quantile p sits at rank 4p.

    q* = 1/4: std rank 1 = 0.1; tie rate at 3/4, rank 3 of (0.2 .. 1) = 0.8; 10 %: rank 0.4: d_tri 0.08,
    d_emb 0.1 + 0.04; std at means of 0.8 or more: (0, 0.2, 0.4), median 0.2.
    """
    got = ctl.calibrated([*GROUPS, UNUSABLE], Thresholds(), q_star=0.25)
    want = {"sigma_rt": 0.1, "tau_tie": 0.8, "d_tri": 0.08, "d_emb": 0.14, "sigma_sw": 0.2}
    assert got.state() == pytest.approx({**Thresholds().state(), **want})


def test_calibrated_keeps_what_nothing_speaks_about():
    assert ctl.calibrated([UNUSABLE], Thresholds(), 0.2) == Thresholds()
    low = [replace(g, mean=0.5) for g in GROUPS]
    got = ctl.calibrated(low, Thresholds(), 0.25)
    assert got.sigma_sw == 0.06
    assert got.sigma_rt == pytest.approx(0.1)


def test_calibration_collects_then_sets_the_thresholds_once():
    calibration, thresholds = Calibration(steps=2), Thresholds()
    assert calibration.active
    calibration, thresholds = calibration.observe(GROUPS[:2], thresholds, 0.25)
    assert (calibration.done, calibration.seen, calibration.active) == (1, tuple(GROUPS[:2]), True)
    assert thresholds == Thresholds()
    back = Calibration.from_state(json.loads(json.dumps(calibration.state())))
    assert back == calibration
    calibration, thresholds = back.observe(GROUPS[2:], thresholds, 0.25)
    assert thresholds == ctl.calibrated(GROUPS, Thresholds(), 0.25)
    assert (calibration.done, calibration.seen, calibration.active) == (2, (), False)
    assert calibration.observe(GROUPS, Thresholds(), 0.25) == (calibration, Thresholds())


def test_no_calibration_by_default():
    assert not Calibration().active
    assert Calibration().state() == {"steps": 0, "done": 0, "seen": []}
    assert Calibration().observe(GROUPS, Thresholds(), 0.25) == (Calibration(), Thresholds())
