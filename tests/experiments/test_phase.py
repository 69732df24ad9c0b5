"""Eqs 12-14 and every branch of Algorithm 1's state machine, scripted."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from racelab.experiments.methods.race import phase as ph
from racelab.experiments.methods.race.controllers import PhaseLengthConfig
from racelab.experiments.methods.race.phase import (
    FixedSchedule,
    PhaseConfig,
    PhaseKind,
    PhaseState,
    RandomSchedule,
)
from racelab.experiments.methods.race.routing import GroupSignals, Thresholds

NAN = math.nan
START = Thresholds(tau_sat=0.5, tau_imp=0.125)
LENGTHS = PhaseLengthConfig(
    policy_target=4, rubric_target=8, policy_window=2, rubric_window=1, eta_policy=0.25, eta_rubric=0.125,
    rubric_range=(0.0, 0.5),
)  # fmt: skip
CONFIG = PhaseConfig(alpha=0.5, window=2, min_pool=3, lengths=LENGTHS)


def group(std, mean, n_valid=8):
    return GroupSignals(mean=mean, std=std, tie_rate=0.0, d_tri=1.0, d_emb=1.0, n_valid=n_valid)


def test_saturation_fraction_golden():
    """Eq 12. Bounds included: (0.06, 0.8) and (0, 1) saturated; (0.061, 0.8), (0.06, 0.79) not: 2/4.

    The group with one valid score is not among the N.
    """
    groups = [group(0.06, 0.8), group(0.0, 1.0), group(0.061, 0.8), group(0.06, 0.79), group(0.0, 1.0, 1)]
    assert ph.saturation_fraction(groups, Thresholds()) == 0.5
    assert ph.saturation_fraction(groups, Thresholds(mu_sat=0.7, sigma_sw=0.1)) == 1.0
    assert math.isnan(ph.saturation_fraction(groups[4:], Thresholds()))
    assert ph.saturation_fraction([group(0.5, 0.9, n_valid=2)], Thresholds()) == 0.0


def test_plateau_delta_golden():
    """Eq 14. W = 2: (1/2 + 1)/2 - (1/4 + 1/4)/2 = 3/4 - 1/4 = 1/2; the 9 is too old to count."""
    assert ph.plateau_delta([9.0, 0.25, 0.25, 0.5, 1.0], 2) == 0.5
    assert ph.plateau_delta([0.25, 0.25, 0.5, 1.0], 2) == 0.5
    assert math.isnan(ph.plateau_delta([0.25, 0.5, 1.0], 2))
    assert ph.plateau_delta([0.25, 1.0], 1) == 0.75


def policy(state, f_sat, pool=9, thresholds=START, config=CONFIG, **kwargs):
    return ph.after_policy_step(state, f_sat, pool, thresholds, config, **kwargs)


def rubric(state, s, thresholds=START, config=CONFIG, gain=NAN, **kwargs):
    return ph.after_rubric_step(state, {"s_rubric": s, "gain": gain}, thresholds, config, **kwargs)


def test_policy_step_follows_the_ema_and_counts():
    """Eq 13. f_hat = (1/2)(3/4) = 3/8; then (1/2)(1/2) + (1/2)(3/8) = 7/16, both below 1/2."""
    one = policy(ph.initial_state(CONFIG), 0.75)
    two = policy(one.state, 0.5)
    assert (one.state.f_ema, two.state.f_ema) == (0.375, 0.4375)
    assert (two.state.policy_t, two.state.policy_steps, two.state.step, two.state.length) == (2, 2, 2, 2)
    assert two.state.kind is PhaseKind.POLICY
    assert two.thresholds == START
    assert two.event.ended is None
    assert not two.event.deferred_switch
    assert not two.event.saturated


def test_a_step_without_a_usable_group_counts_but_leaves_the_ema():
    got = policy(PhaseState(f_ema=0.25, policy_t=3, policy_steps=3), NAN)
    assert (got.state.f_ema, got.state.policy_t) == (0.25, 4)


def test_saturation_enters_the_rubric_phase_at_equality():
    """f_hat = (1/2)(1) + 0 = 1/2 >= 1/2. One length in a window of two: tau_sat does not move yet."""
    got = policy(PhaseState(policy_t=4, policy_steps=4), 1.0)
    assert got.state == PhaseState(
        kind=PhaseKind.RUBRIC, index=1, policy_t=5, f_ema=0.5, policy_lengths=(5,), policy_steps=5
    )
    ended = got.event.ended
    assert (ended.index, ended.kind, ended.start, ended.end, ended.length) == (0, PhaseKind.POLICY, 1, 5, 5)
    assert ended.end_reason == "saturation"
    assert ended.before == ended.after == got.thresholds == START
    assert math.isnan(got.event.length_error)
    assert math.isnan(got.event.delta_w)


def test_saturation_with_a_full_window_adapts_tau_sat():
    """Lengths 7 and 5: mean 6, e_P = (6 - 4)/4 = 1/2; tau_sat = 1/2 - 1/4 * 1/2 = 3/8. The 99 is gone."""
    before = PhaseState(policy_t=4, policy_steps=20, rubric_steps=10, index=2, policy_lengths=(99, 7))
    got = policy(before, 1.0)
    assert got.thresholds == replace(START, tau_sat=0.375)
    assert got.state.policy_lengths == (7, 5)
    assert (got.event.length_error, got.event.saturated) == (0.5, False)
    assert (got.event.ended.before, got.event.ended.after) == (START, got.thresholds)
    assert (got.event.ended.start, got.event.ended.end, got.event.ended.index) == (27, 31, 2)


def test_tau_sat_held_at_its_bound_is_reported():
    got = policy(PhaseState(policy_t=99, policy_lengths=(99,)), 1.0, thresholds=replace(START, tau_sat=0.05))
    assert got.event.saturated
    assert got.thresholds.tau_sat == 0.05


def test_a_frozen_controller_records_lengths_but_adapts_nothing():
    got = policy(PhaseState(policy_t=4, policy_lengths=(7,)), 1.0, frozen=True)
    assert got.thresholds == START
    assert got.state.policy_lengths == (7, 5)
    assert math.isnan(got.event.length_error)
    in_rubric = PhaseState(kind=PhaseKind.RUBRIC, rubric_t=3, rewards=(0.5, 0.5, 0.5))
    got = rubric(in_rubric, 0.5, frozen=True)
    assert got.event.ended.end_reason == "plateau"
    assert got.thresholds == START
    assert got.state.rubric_lengths == (4,)


def test_a_small_pool_defers_the_switch_until_it_is_filled():
    first = policy(PhaseState(policy_t=4, policy_steps=4), 1.0, pool=2)
    assert first.event.deferred_switch
    assert first.event.ended is None
    assert (first.state.kind, first.state.deferred, first.state.policy_t) == (PhaseKind.POLICY, 1, 5)
    assert first.state.index == 0
    assert first.thresholds == START
    second = policy(first.state, 1.0, pool=2)
    assert second.state.deferred == 2
    third = policy(second.state, 1.0, pool=3)
    assert third.state.kind is PhaseKind.RUBRIC
    assert third.event.ended.length == 7
    assert not third.event.deferred_switch


def test_rubric_phase_ends_on_a_plateau_once_both_windows_are_in():
    """Eq 14. W = 2. Rewards 0, 1/4, 1/2, 3/4: Delta = 5/8 - 1/8 = 1/2 > 1/8, goes on.

    Then 3/4: Delta = 3/4 - 3/8 = 3/8; then 3/4: 3/4 - 5/8 = 1/8 <= 1/8: plateau after 6 steps.
    e_R = (6 - 8)/8 = -1/4: tau_imp = 1/8 - 1/8 * 1/4 = 3/32.
    """
    state = PhaseState(kind=PhaseKind.RUBRIC, index=1, policy_t=5, policy_steps=5, f_ema=0.5)
    deltas = []
    for value in (0.0, 0.25, 0.5, 0.75, 0.75):
        got = rubric(state, value)
        state = got.state
        deltas.append(got.event.delta_w)
        assert state.kind is PhaseKind.RUBRIC
        assert got.event.ended is None
    assert np.isnan(deltas[:3]).all()
    assert deltas[3:] == [0.5, 0.375]
    assert (state.rubric_t, state.length, state.f_ema) == (5, 5, 0.5)
    got = rubric(state, 0.75)
    assert got.thresholds == replace(START, tau_imp=0.09375)
    assert (got.event.delta_w, got.event.length_error, got.event.saturated) == (0.125, -0.25, False)
    ended = got.event.ended
    assert (ended.index, ended.kind, ended.start, ended.end, ended.length) == (1, PhaseKind.RUBRIC, 6, 11, 6)
    assert (ended.end_reason, ended.before, ended.after) == ("plateau", START, got.thresholds)
    assert got.state.kind is PhaseKind.POLICY
    assert (got.state.policy_t, got.state.f_ema, got.state.index) == (0, 0.0, 2)
    assert got.state.rubric_lengths == (6,)
    assert (got.state.policy_steps, got.state.rubric_steps) == (5, 6)


def test_tau_imp_held_at_its_bound_is_reported():
    state = PhaseState(kind=PhaseKind.RUBRIC, rubric_t=3, rewards=(0.5, 0.5, 0.5))
    got = rubric(state, 0.5, thresholds=replace(START, tau_imp=0.0))
    assert got.event.saturated
    assert got.thresholds.tau_imp == 0.0


def test_entering_the_rubric_phase_forgets_the_last_ones_rewards():
    got = policy(PhaseState(policy_t=4, rubric_t=9, rewards=(0.1, 0.2)), 1.0)
    assert (got.state.rewards, got.state.rubric_t) == ((), 0)


def test_a_rubric_step_without_a_valid_reward_counts_but_enters_no_window():
    state = PhaseState(kind=PhaseKind.RUBRIC)
    for value in (0.5, NAN, 0.5, NAN, 0.5):
        state = rubric(state, value).state
        assert state.kind is PhaseKind.RUBRIC
    assert (state.rubric_t, state.rewards) == (5, (0.5, 0.5, 0.5))
    got = rubric(state, 0.5)
    assert got.event.ended.end_reason == "plateau"
    assert got.event.ended.length == 6


def test_the_cap_ends_a_phase_that_never_plateaus_and_teaches_the_controller_nothing():
    config = replace(CONFIG, max_rubric_steps=3)
    state = PhaseState(kind=PhaseKind.RUBRIC, rubric_lengths=(7,))
    for _ in range(2):
        got = rubric(state, NAN, config=config)
        state = got.state
        assert got.event.ended is None
    got = rubric(state, NAN, config=config)
    assert got.event.ended.end_reason == "cap"
    assert got.thresholds == START
    assert got.state.rubric_lengths == (7,)
    assert got.state.kind is PhaseKind.POLICY
    assert math.isnan(got.event.length_error)
    assert not got.event.saturated


def test_a_plateau_on_the_capped_step_is_a_plateau():
    config = replace(CONFIG, max_rubric_steps=4)
    state = PhaseState(kind=PhaseKind.RUBRIC, rubric_t=3, rewards=(0.5, 0.5, 0.5))
    assert rubric(state, 0.5, config=config).event.ended.end_reason == "plateau"


def test_without_a_cap_a_rubric_phase_without_rewards_goes_on():
    state = PhaseState(kind=PhaseKind.RUBRIC)
    for _ in range(60):
        state = rubric(state, NAN).state
    assert (state.kind, state.rubric_t) == (PhaseKind.RUBRIC, 60)


def test_the_plateau_can_watch_the_gain_instead():
    config = replace(CONFIG, plateau_signal="gain")
    state = PhaseState(kind=PhaseKind.RUBRIC)
    for s, gain in ((0.5, 0.0), (0.5, 0.0), (0.5, 1.0), (0.5, 1.0)):
        got = rubric(state, s, config=config, gain=gain)
        state = got.state
    assert state.rewards == (0.0, 0.0, 1.0, 1.0)
    assert got.event.delta_w == 1.0
    assert state.kind is PhaseKind.RUBRIC


def test_steps_of_the_wrong_kind_are_refused():
    with pytest.raises(ValueError, match="policy step cannot happen"):
        policy(PhaseState(kind=PhaseKind.RUBRIC), 0.5)
    with pytest.raises(ValueError, match="rubric step cannot happen"):
        rubric(PhaseState(), 0.5)


def test_fixed_phases_ignore_the_triggers_and_the_cap():
    """3 policy steps, 2 rubric steps, although everything is saturated and nothing improves."""
    config = replace(CONFIG, schedule=FixedSchedule(3, 2), window=1, max_rubric_steps=1)
    state, kinds, reasons = ph.initial_state(config), [], []
    thresholds = START
    for _ in range(10):
        kinds.append(str(state.kind)[0])
        step = policy if state.kind is PhaseKind.POLICY else rubric
        state, thresholds, event = step(state, 1.0, config=config, thresholds=thresholds)
        reasons += [event.ended.end_reason] if event.ended else []
    assert "".join(kinds) == "ppprrppprr"
    assert reasons == ["fixed"] * 4
    assert thresholds == START
    assert state.policy_lengths == state.rubric_lengths == ()
    assert state.index == 4


def test_fixed_phases_wait_for_the_pool_too():
    config = replace(CONFIG, schedule=FixedSchedule(1, 2))
    first = policy(ph.initial_state(config), 0.0, pool=2, config=config)
    assert first.event.deferred_switch
    second = policy(first.state, 0.0, pool=3, config=config)
    assert second.event.ended.length == 2


def test_random_lengths_have_the_targets_as_means_and_cover_their_range():
    schedule, rng = RandomSchedule(5, 3), np.random.default_rng(0)
    policy_lengths = [schedule.plan(PhaseKind.POLICY, rng) for _ in range(4000)]
    rubric_lengths = [schedule.plan(PhaseKind.RUBRIC, rng) for _ in range(4000)]
    assert set(policy_lengths) == set(range(1, 10))
    assert set(rubric_lengths) == set(range(1, 6))
    assert np.mean(policy_lengths) == pytest.approx(5, abs=0.2)  # 5 standard errors
    with pytest.raises(ValueError, match="need a numpy Generator"):
        schedule.plan(PhaseKind.POLICY, None)


def test_random_phases_last_as_long_as_they_were_drawn():
    config = replace(CONFIG, schedule=RandomSchedule(4, 3))
    rng = np.random.default_rng(3)
    state = ph.initial_state(config, rng)
    planned, lengths, reasons = [state.planned], [], set()
    while len(lengths) < 12:
        step = policy if state.kind is PhaseKind.POLICY else rubric
        state, _, event = step(state, 1.0, config=config, rng=rng)
        if event.ended:
            lengths.append(event.ended.length)
            reasons.add(event.ended.end_reason)
            planned.append(state.planned)
    assert lengths == planned[:-1]
    assert reasons == {"random"}
    rng = np.random.default_rng(3)
    draws = [int(rng.integers(1, 8 if i % 2 == 0 else 6)) for i in range(12)]
    assert lengths == draws


def test_the_run_may_stop_inside_a_phase():
    state = PhaseState(kind=PhaseKind.RUBRIC, index=3, rubric_t=2, policy_steps=7, rubric_steps=5)
    got = ph.close_phase(state, START, "budget")
    assert (got.index, got.start, got.end, got.length, got.end_reason) == (3, 11, 12, 2, "budget")
    assert got.before == got.after == START
    assert ph.close_phase(PhaseState(), START, "interrupted") is None


def test_defaults():
    config = PhaseConfig()
    assert (config.alpha, config.window, config.min_pool, config.max_rubric_steps) == (0.1, 5, 8, None)
    assert config.plateau_signal == "s_rubric"
    assert config.lengths == PhaseLengthConfig()
    assert ph.initial_state(config) == PhaseState()
    fresh = PhaseState()
    assert (fresh.kind, fresh.index, fresh.step, fresh.length) == (PhaseKind.POLICY, 0, 0, 0)
    assert (fresh.policy_t, fresh.rubric_t, fresh.f_ema, fresh.deferred) == (0, 0, 0.0, 0)


def test_state_survives_json_exactly():
    state = PhaseState(
        PhaseKind.RUBRIC,
        3,
        4,
        5,
        0.1 + 0.2,
        (1 / 3, 0.7),
        (4, 5),
        (6,),
        9,
        policy_steps=11,
        rubric_steps=7,
        deferred=2,
    )
    back = PhaseState.from_state(json.loads(json.dumps(state.state())))
    assert back == state
    assert isinstance(back.kind, PhaseKind)
    assert PhaseState.from_state(json.loads(json.dumps(PhaseState().state()))) == PhaseState()


def test_a_mean_of_exactly_the_threshold_is_saturated():
    """(70 + 70 + 86 + 94) / 400 = 320/400 = 0.8."""
    scores = np.array([0.70, 0.70, 0.86, 0.94])
    group = GroupSignals(float(scores.sum() / 4), 0.1, 0.0, 1.0, 1.0, 4)
    assert ph.is_saturated(group, Thresholds(sigma_sw=0.2, mu_sat=0.8))
