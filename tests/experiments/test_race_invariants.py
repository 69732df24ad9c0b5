"""Properties that hold for every input: order, bounds, NaN, zero gains, resumption."""

import ast
import json
import math
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.methods import grpo
from racelab.experiments.methods.race import controllers as ctl
from racelab.experiments.methods.race import phase as ph
from racelab.experiments.methods.race import pool as pools
from racelab.experiments.methods.race import routing
from racelab.experiments.methods.race import rubric_reward as rr
from racelab.experiments.methods.race.routing import Route, Thresholds
from racelab.experiments.types import PoolEntry, Prompt, Sample

FEW = settings(max_examples=60, deadline=None, derandomize=True)
scores = st.integers(0, 100).map(lambda i: i / 100)
maybe = st.one_of(scores, st.just(math.nan))
groups = st.lists(maybe, min_size=1, max_size=9).map(np.array)
full_groups = st.lists(scores, min_size=2, max_size=9).map(np.array)
unit = st.floats(0, 1)
nested_lengths = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4)


VALUES = [
    Thresholds(),
    routing.GroupSignals(0.5, 0.1, 0.1, 0.1, 0.1, 8),
    pools.Pool(),
    ctl.TrqcConfig(),
    ctl.TrqcUpdate(Thresholds(), 0.0, 0.0, False),
    ctl.PhaseLengthConfig(),
    ctl.LengthUpdate(0.1, 0.0, False),
    ctl.Calibration(),
    ph.EventSchedule(),
    ph.FixedSchedule(1, 1),
    ph.RandomSchedule(1, 1),
    ph.PhaseConfig(),
    ph.PhaseState(),
    ph.PhaseRecord(0, ph.PhaseKind.POLICY, 1, 1, 1, "budget", Thresholds(), Thresholds()),
    ph.StepEvent(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_states_are_values(value):
    first = next(iter(value.__dataclass_fields__))
    with pytest.raises(FrozenInstanceError):
        setattr(value, first, None)
    assert not hasattr(value, "__dict__")


EQUATIONS = {
    "test_routing.py": (5, 6, 7, 8, 9, 18),
    "test_pool.py": (10, 11),
    "test_phase.py": (12, 13, 14),
    "test_rubric_reward.py": (15, 16),
    "test_controllers.py": (19, 20, 21, 22),
}


def named_equations(file):
    """The equations that the tests of a file name at the start of a docstring that shows fractions."""
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    tests = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    found = set()
    for text in filter(None, map(ast.get_docstring, tests)):
        match = re.match(r"Eqs? (\d+)(?:(-|, )(\d+))?", text)
        if match and re.search(r"\d/\d|\)/", text):
            first, last = int(match[1]), int(match[3] or match[1])
            found |= set(range(first, last + 1)) if match[2] == "-" else {first, last}
    return found


@pytest.mark.parametrize("file", EQUATIONS)
def test_every_equation_has_a_test_that_names_it_and_shows_its_working(file):
    assert set(EQUATIONS[file]) <= named_equations(file)


@FEW
@given(groups, st.randoms(use_true_random=False))
def test_order_of_the_samples_does_not_matter(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = rewards[order]
    same = [grpo.mean, grpo.sigma, routing.tie_rate]
    for statistic in same:
        np.testing.assert_equal(statistic(shuffled), statistic(rewards))
    np.testing.assert_array_equal(grpo.advantages(shuffled), grpo.advantages(rewards)[order])


@FEW
@given(groups)
def test_advantages_are_finite_centred_and_of_unit_spread(rewards):
    adv = grpo.advantages(rewards)
    assert np.isfinite(adv).all()
    assert not adv[np.isnan(rewards)].any()
    assert abs(adv.sum()) < 1e-9
    if grpo.valid(rewards).size >= 2 and grpo.sigma(rewards) > 0:
        assert np.mean(adv[np.isfinite(rewards)] ** 2) == pytest.approx(1, rel=1e-4)
    else:
        assert not adv.any()


@FEW
@given(full_groups, st.floats(0.1, 3), st.floats(-1, 1))
def test_advantages_do_not_see_the_scale(rewards, scale, shift):
    if grpo.sigma(rewards) > 0:
        got = grpo.advantages(scale * rewards + shift)
        np.testing.assert_allclose(got, grpo.advantages(rewards), atol=1e-4)


@FEW
@given(groups)
def test_nan_rows_are_as_if_they_were_not_there(rewards):
    rest = rewards[np.isfinite(rewards)]
    for statistic in (grpo.mean, grpo.sigma, routing.tie_rate):
        np.testing.assert_equal(statistic(rewards), statistic(rest))
    if rest.size >= 2:
        best, worst = pools.best_and_worst(rewards)
        assert best != worst
        assert rewards[best] == rest.max()
        assert rewards[worst] == (rest.min() if rest.max() > rest.min() else rest.max())
        assert pools.margin(rewards) == rest.max() - rest.min() >= 0


@FEW
@given(full_groups)
def test_statistics_stay_in_their_bounds(rewards):
    assert rewards.min() <= grpo.mean(rewards) <= rewards.max()
    assert 0 <= grpo.sigma(rewards) <= (rewards.max() - rewards.min()) / 2 + 1e-12
    assert (grpo.sigma(rewards) == 0) == (rewards.max() == rewards.min())
    assert 0 <= routing.tie_rate(rewards) <= 1


@FEW
@given(nested_lengths, st.integers(0, 3))
def test_weights_sum_to_one_or_to_the_share_of_groups(lengths, masked):
    def total(kind):
        weights = grpo.token_weights(lengths, kind, len(lengths) + masked)
        return sum(w.sum() for group in weights for w in group)

    assert total("informative_groups") == pytest.approx(1)
    assert total("token_mean") == pytest.approx(1)
    assert total("over_all_groups") == pytest.approx(len(lengths) / (len(lengths) + masked))


@FEW
@given(st.lists(st.lists(st.sampled_from("ab.c"), max_size=12).map(" ".join), min_size=1, max_size=5))
def test_trigram_ratio_is_a_share_and_matches_its_definition(texts):
    pooled = [t for text in texts for t in routing.trigrams(text)]
    got = routing.distinct_trigram_ratio(texts)
    assert 0 < got <= 1
    if pooled:
        assert got == len(set(pooled)) / len(pooled)


@FEW
@given(st.integers(2, 8), st.integers(1, 5), st.integers(0, 10**6))
def test_embedding_distance_matches_its_definition(n, width, seed):
    emb = np.random.default_rng(seed).normal(size=(n, width))
    emb /= np.linalg.norm(emb, axis=1, keepdims=True)
    pairs = [1 - emb[i] @ emb[j] for i in range(n) for j in range(i + 1, n)]
    assert routing.embedding_distance(emb) == pytest.approx(np.mean(pairs), abs=1e-12)


@FEW
@given(
    st.lists(st.lists(st.sampled_from("ab.c"), max_size=9).map(" ".join), min_size=2, max_size=5),
    st.integers(0, 10**6),
)
def test_order_of_the_responses_does_not_change_their_diversity(texts, seed):
    rng = np.random.default_rng(seed)
    emb = rng.normal(size=(len(texts), 3))
    emb /= np.linalg.norm(emb, axis=1, keepdims=True)
    order = rng.permutation(len(texts))
    shuffled = [texts[i] for i in order]
    assert routing.distinct_trigram_ratio(shuffled) == routing.distinct_trigram_ratio(texts)
    distance = routing.embedding_distance(emb)
    assert routing.embedding_distance(emb[order]) == pytest.approx(distance, abs=1e-12)
    assert 0 <= distance <= 2


signal_values = st.builds(
    routing.GroupSignals,
    mean=unit,
    std=unit,
    tie_rate=unit,
    d_tri=unit,
    d_emb=unit,
    n_valid=st.integers(0, 8),
)


@FEW
@given(signal_values)
def test_looser_thresholds_never_make_a_group_informative(signals):
    strict, loose = Thresholds(sigma_rt=0.2, tau_tie=0.8), Thresholds(sigma_rt=0.3, tau_tie=0.7)
    if routing.route(signals, strict) is not Route.INFORMATIVE:
        assert routing.route(signals, loose) is not Route.INFORMATIVE
    assert (routing.route(signals, strict) is Route.INVALID) == (signals.n_valid < 2)


@FEW
@given(st.lists(signal_values, max_size=8), st.integers(0, 10**6))
def test_rates_of_a_batch_are_shares_of_its_valid_groups_in_any_order(batch, seed):
    """Eqs 12 and 18: counted one by one; a group with a missing statistic is in neither."""
    thresholds = Thresholds(sigma_rt=0.4, tau_tie=0.6, sigma_sw=0.5, mu_sat=0.5)
    lost = routing.GroupSignals(math.nan, math.nan, math.nan, 1.0, 1.0, 0)
    shuffled = [([*batch, lost])[i] for i in np.random.default_rng(seed).permutation(len(batch) + 1)]
    usable = [g for g in batch if g.n_valid >= 2]

    def rates(found):
        return (
            routing.quarantine_rate([routing.route(g, thresholds) for g in found]),
            ph.saturation_fraction(found, thresholds),
        )

    np.testing.assert_equal(rates(shuffled), rates(usable))
    if usable:
        quarantined = sum(g.std <= 0.4 or g.tie_rate >= 0.6 for g in usable)
        saturated = sum(g.std <= 0.5 and g.mean >= 0.5 for g in usable)
        assert rates(batch) == (quarantined / len(usable), saturated / len(usable))
    else:
        assert all(map(math.isnan, rates(batch)))


@FEW
@given(
    st.lists(st.one_of(st.floats(-1, 1), st.just(math.nan)), min_size=1, max_size=8),
    unit,
    st.floats(0.01, 1),
    st.floats(0.1, 2),
)
def test_rewards_of_candidates_are_their_own_bounded_and_nan_where_the_margin_is(margins, m_old, eps, clip):
    got = rr.base_rewards(np.array(margins), m_old, eps_norm=eps, clip=clip)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(margins))
    assert (np.abs(got[np.isfinite(got)]) <= clip).all()
    backwards = rr.base_rewards(np.array(margins[::-1]), m_old, eps_norm=eps, clip=clip)
    np.testing.assert_array_equal(backwards[::-1], got)


@FEW
@given(st.lists(st.integers(1, 80), min_size=3, max_size=3), st.integers(0, 2), st.integers(1, 40))
def test_longer_phases_never_make_the_next_one_longer(lengths, which, more):
    """Eqs 21-22: the order of the lengths does not matter; both thresholds stay in their range."""
    config = ctl.PhaseLengthConfig()
    longer = [n + more * (i == which) for i, n in enumerate(lengths)]
    for adapt, start, (low, high), sign in (
        (ctl.adapt_tau_sat, 0.4, config.policy_range, -1),
        (ctl.adapt_tau_imp, 0.005, config.rubric_range, 1),
    ):
        here = adapt(start, lengths, config).threshold
        assert adapt(start, lengths[::-1], config).threshold == here
        assert sign * (adapt(start, longer, config).threshold - here) >= 0
        assert low <= here <= high


@FEW
@given(st.floats(-1, 1), unit, st.sampled_from(["sum", "max"]))
def test_rubric_reward_is_bounded_odd_and_keeps_the_sign(m_new, m_old, denominator):
    got = rr.margin_reward(m_new, m_old, denominator=denominator)
    assert -1 <= got <= 1
    assert got == -rr.margin_reward(-m_new, m_old, denominator=denominator)
    assert got * m_new >= 0


@FEW
@given(unit)
def test_a_rubric_that_changes_nothing_is_rewarded_for_the_old_margin(m_old):
    assert rr.margin_reward(m_old, m_old) == pytest.approx(m_old / (m_old + 0.05))


@FEW
@given(st.lists(unit, max_size=30), unit, unit)
def test_zero_gains_are_static_thresholds(rates, sigma_rt, tau_tie):
    thresholds = start = Thresholds(sigma_rt=sigma_rt, tau_tie=tau_tie)
    config, q_ema = ctl.TrqcConfig(eta_sigma=0.0, eta_tau=0.0), 0.0
    for q in rates:
        got = ctl.trqc(thresholds, q_ema, q, config)
        thresholds, q_ema = got.thresholds, got.q_ema
        assert not got.saturated
    assert thresholds == start
    lengths = ctl.PhaseLengthConfig(eta_policy=0.0, eta_rubric=0.0)
    assert ctl.adapt_tau_sat(0.4, [1, 50, 3], lengths).threshold == 0.4
    assert ctl.adapt_tau_imp(0.005, [1, 50, 3], lengths).threshold == 0.005


@FEW
@given(st.lists(st.one_of(unit, st.just(math.nan)), max_size=60), unit)
def test_trqc_stays_in_its_bounds_and_pushes_against_the_error(rates, eta):
    config, q_ema, thresholds = ctl.TrqcConfig(eta_sigma=eta, eta_tau=eta), 0.0, Thresholds()
    for q in rates:
        got = ctl.trqc(thresholds, q_ema, q, config)
        assert 0 <= got.thresholds.sigma_rt <= 1
        assert 0 <= got.thresholds.tau_tie <= 1
        assert 0 <= got.q_ema <= 1
        if got.error > 0:  # too much is quarantined: both thresholds may only get more selective
            assert got.thresholds.sigma_rt <= thresholds.sigma_rt
            assert got.thresholds.tau_tie >= thresholds.tau_tie
        thresholds, q_ema = got.thresholds, got.q_ema


def step(state, thresholds, value, pool, config):
    if state.kind is ph.PhaseKind.POLICY:
        return ph.after_policy_step(state, value, pool, thresholds, config)
    return ph.after_rubric_step(state, {"s_rubric": value, "gain": value}, thresholds, config)


inputs = st.lists(st.tuples(st.one_of(unit, st.just(math.nan)), st.integers(0, 6)), max_size=120)


@FEW
@given(inputs)
def test_phases_alternate_tile_the_run_and_respect_their_bounds(values):
    config = ph.PhaseConfig(alpha=0.5, window=2, min_pool=3, max_rubric_steps=9)
    state, thresholds, records = ph.initial_state(config), Thresholds(), []
    for value, pool in values:
        state, thresholds, event = step(state, thresholds, value, pool, config)
        assert 0 <= state.f_ema <= 1
        assert 0.05 <= thresholds.tau_sat <= 0.95
        assert 0 <= thresholds.tau_imp <= 0.05
        if event.ended:
            records.append(event.ended)
    last = ph.close_phase(state, thresholds, "budget")
    records += [last] if last else []
    assert state.step == len(values) == sum(r.length for r in records)
    for i, record in enumerate(records):
        assert record.index == i
        assert record.kind == ("policy", "rubric")[i % 2]
        assert record.start == (records[i - 1].end + 1 if i else 1)
        assert record.end - record.start + 1 == record.length
        if record.end_reason == "plateau":
            assert record.length >= 4
        assert record.end_reason != "cap" or record.length == 9


@FEW
@given(inputs)
def test_a_resumed_machine_goes_on_exactly_as_the_uninterrupted_one(values):
    config = ph.PhaseConfig(alpha=0.3, window=1, min_pool=2, max_rubric_steps=5)
    one = two = (ph.initial_state(config), Thresholds())
    for value, pool in values:
        one = step(*one, value, pool, config)[:2]
        state = ph.PhaseState.from_state(json.loads(json.dumps(two[0].state())))
        thresholds = Thresholds.from_state(json.loads(json.dumps(two[1].state())))
        two = step(state, thresholds, value, pool, config)[:2]
    assert one == two


@FEW
@given(st.lists(st.integers(0, 5), max_size=8), st.integers(1, 7))
def test_the_pool_holds_the_newest_and_loses_nothing_else(sizes, capacity):
    pool, everything, evicted = pools.Pool(capacity), [], 0
    sample = Sample(tokens=(1,), logprobs=(-1.0,), text="x", finished=True)
    for size in sizes:
        numbers = range(len(everything), len(everything) + size)
        new = [PoolEntry(f"{i}:p", Prompt("p", "ask"), sample, sample, 0.5, i) for i in numbers]
        everything += new
        pool = pool.push(new)
        evicted += pool.evicted
    assert list(pool.entries) == everything[-capacity:]
    assert len(pool) + evicted == len(everything)
