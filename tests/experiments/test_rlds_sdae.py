"""Eqs 1-3 of the RLDS paper, the scalar advantages and every fallback. Expected numbers worked by hand."""

import math
from dataclasses import FrozenInstanceError, asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.methods import grpo as scalar
from racelab.experiments.methods.rlds import sdae
from racelab.experiments.methods.rlds.rows import Rows, complete
from racelab.experiments.methods.rlds.sdae import Fallbacks, Settings, token_advantages, turn_advantages
from racelab.experiments.methods.rlds.turns import expand, retry_mask, turn_counts

from .rlds_rows import FROZENLAKE_PHI, random_rows, tensor

FEW = settings(max_examples=40, deadline=None, derandomize=True)
KINDS = pytest.mark.parametrize("array", [np.array, tensor], ids=["numpy", "torch"])
SEEDS = st.integers(0, 10**6)
PLAIN = Settings(kernel="none")


def one_turn(rewards, group=None, phi=(1.0,), array=np.array, **rest):
    """Rows of one token each; one group by default."""
    n = len(rewards)
    given_ = {name: array(value) for name, value in rest.items()}
    return Rows(
        array([float(r) for r in rewards]),
        array(group or [0] * n),
        array(np.ones((n, 1))),
        array(phi),
        **given_,
    )


# ---------------------------------------------------------------- stage 1


@KINDS
def test_shares_golden(array):
    """Grades (5, 3, 1): 4 + 2 + 0 = 6, shares 4/6, 2/6, 0 of R. All 1, no grades, R < 0: a third each."""
    r_NK = sdae.shares(
        array([0.6, 0.9, 0.3, -0.3, 0.0]),
        array([[5, 3, 1], [1, 1, 1], [0, 9, 9], [5, 3, 1], [5, 3, 1]]),
        array([True, True, False, True, True]),
    )
    expected = [[0.4, 0.2, 0.0], [0.3] * 3, [0.1] * 3, [-0.1] * 3, [0.0] * 3]
    np.testing.assert_allclose(np.asarray(r_NK), expected, atol=1e-15)


@FEW
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
    st.floats(-1, 1, allow_subnormal=False),
    st.booleans(),
)
def test_shares_sum_to_the_reward(grades, reward, graded):
    """Up to two units in the last place; exactly for K = 1 and for R = 0."""
    r_K = sdae.shares(np.array([reward]), np.array([grades]), np.array([graded]))[0]
    assert abs(math.fsum(r_K) - reward) <= 2 * math.ulp(reward)
    if len(grades) == 1 or reward == 0:
        assert math.fsum(r_K) == reward
    assert (np.sign(r_K) * np.sign(reward) >= 0).all()


def test_a_failed_row_has_zero_shares_whatever_its_grades():
    """R = 0: every failing row of a group has the same A_ik; only pivots can differ, and no sign can disagree."""
    rows = one_turn([0, 0, 1], phi=FROZENLAKE_PHI, grades_NK=[[5, 1, 3, 2, 4], [1, 5, 1, 1, 1], [5] * 5])
    (out,) = turn_advantages([rows], PLAIN)
    assert out.adv_NK[0].tolist() == out.adv_NK[1].tolist() == pytest.approx([-0.2 / 3] * 5)


@KINDS
def test_stage1_golden(array):
    """Group a: r = (2/3, 1/3), (0, 0): mean (1/3, 1/6). Group b alone: its own mean, A = 0."""
    adv_NK = sdae.stage1(array([[2 / 3, 1 / 3], [0.0, 0.0], [0.4, 0.1]]), array([7, 7, 3]))
    np.testing.assert_allclose(np.asarray(adv_NK), [[1 / 3, 1 / 6], [-1 / 3, -1 / 6], [0, 0]], atol=1e-15)


@KINDS
def test_opmd_baseline_is_the_mean_of_the_originals(array):
    """Originals 0.2 and 0.4, retry 0.9: baseline 0.3, A = (-0.1, 0.1, 0.6)."""
    adv_NK = sdae.stage1(array([[0.2], [0.4], [0.9]]), array([0, 0, 0]), array([True, True, False]))
    np.testing.assert_allclose(np.asarray(adv_NK)[:, 0], [-0.1, 0.1, 0.6], atol=1e-15)
    with pytest.raises(ValueError, match="without originals"):
        sdae.stage1(array([[0.2]]), array([0]), array([False]))


# ---------------------------------------------------------------- stages 2 and 3


def worked_rows(array=np.array):
    """R = (1, 0), row 0 graded (5, 3), phi (3/4, 1/4), two turns of one token, pivots (0, none) and (none, 1)."""
    return Rows(
        rewards_N=array([1.0, 0.0]),
        group_N=array([0, 0]),
        counts_NU=array([[1.0, 1.0], [1.0, 1.0]]),
        phi_K=array([0.75, 0.25]),
        grades_NK=array([[5, 3], [2, 2]]),
        pivots_NK=array([[0, -1], [-1, 1]]),
    )


@KINDS
def test_all_three_stages_golden(array):
    """A = (1/3, 1/6) and its negative; A_i = 3/4 1/3 + 1/4 1/6 = 7/24; sigma = 7/24. eps = 1/24 makes the divisor 1/3.

    Â_i = +-7/8. Row 0, pivot 0 of subtask 0: m = 2 (1, e^-1/2) / (1 + e^-1/2) = (1.2449187, 0.7550813);
    Â = 3 (1/4 m + 1/24) = (1.0586890, 0.6913110), mean 7/8. Row 1, pivot 1 of subtask 1 (phi A = -1/24):
    Â = -3 (1/4 + 1/24 m) = -(3/4 + 1/8 (0.7550813, 1.2449187)) = (-0.8443852, -0.9056148), mean -7/8.
    """
    (out,) = turn_advantages([worked_rows(array)], Settings(eps=1 / 24))
    assert out.sigma == pytest.approx(7 / 24)
    assert out.adv_N.tolist() == pytest.approx([7 / 8, -7 / 8])
    np.testing.assert_allclose(np.asarray(out.adv_NK), [[1 / 3, 1 / 6], [-1 / 3, -1 / 6]], atol=1e-15)
    expected = [[1.0586890, 0.6913110], [-0.8443852, -0.9056148]]
    np.testing.assert_allclose(np.asarray(out.adv_NU), expected, atol=1e-7)
    (plain,) = turn_advantages([worked_rows(array)], Settings(eps=1 / 24, kernel="none"))
    np.testing.assert_allclose(np.asarray(plain.adv_NU), [[7 / 8] * 2, [-7 / 8] * 2], atol=1e-15)


def test_sigma_of_the_kernel_is_a_setting():
    """sigma 0.5: e^(-1/2 (1/0.5)^2) = e^-2; Â_00 = 3 (1/4 2/(1 + e^-2) + 1/24)."""
    (out,) = turn_advantages([worked_rows()], Settings(eps=1 / 24, kernel_sigma=0.5))
    assert out.adv_NU[0, 0] == pytest.approx(3 * (0.5 / (1 + math.exp(-2)) + 1 / 24))


def test_sigma_batch_is_of_the_population_and_of_all_tasks():
    """A_i of (3, -3) and (1, -1): sqrt((9 + 9 + 1 + 1) / 4) = sqrt(5). No decomposed row at all: 0."""
    assert sdae.sigma_batch([np.array([3.0, -3.0]), np.array([1.0, -1.0])]) == math.sqrt(5)
    assert sdae.sigma_batch([np.array([3.0, -3.0]), np.array([])]) == 3.0
    assert sdae.sigma_batch([np.zeros(0)]) == sdae.sigma_batch([]) == 0.0


def test_tasks_of_different_k_share_sigma_batch():
    """K = 1: R (3, 0): A +-1.5. K = 2, even shares, phi (1/2, 1/2): A_ik = +-1/4, A_i +-1/4.

    sigma = sqrt((2 * 9/4 + 2 / 16) / 4) = sqrt(37 / 32) = 1.0752907.
    """
    a = one_turn([3, 0], grades_NK=[[2], [2]])
    b = one_turn([1, 0], phi=[0.5, 0.5], grades_NK=[[2, 2], [1, 1]])
    first, second = turn_advantages([a, b], Settings(eps=0.0))
    assert first.sigma == second.sigma == pytest.approx(math.sqrt(37 / 32))
    assert first.adv_N.tolist() == pytest.approx([1.5 / first.sigma, -1.5 / first.sigma])
    assert second.adv_N.tolist() == pytest.approx([0.25 / first.sigma, -0.25 / first.sigma])


@KINDS
def test_one_subtask_without_pivots_is_unnormalised_grpo(array):
    """R = (1, 0, 0.5), mean 0.5: A = (0.5, -0.5, 0), sigma sqrt(1/6), whatever the grades."""
    rows = one_turn([1, 0, 0.5], array=array, grades_NK=[[5], [1], [3]])
    (out,) = turn_advantages([rows], Settings())
    assert out.adv_NK[:, 0].tolist() == [0.5, -0.5, 0.0]
    np.testing.assert_allclose(
        np.asarray(out.adv_N), np.array([0.5, -0.5, 0]) / (math.sqrt(1 / 6) + 1e-6), atol=1e-15
    )


@FEW
@given(SEEDS)
def test_one_subtask_is_unnormalised_grpo_on_any_batch(seed):
    rng = np.random.default_rng(seed)
    rows, turns_NT = random_rows(rng, k=1, pivots_NK=None, train_from_N=None, graded_N=None)
    (out,) = token_advantages([rows], [turns_NT], Settings())
    centred_N = rows.rewards_N - np.repeat(rows.rewards_N.reshape(3, 4).mean(1), 4)
    np.testing.assert_allclose(
        out.adv_NT, np.where(turns_NT >= 0, (centred_N / (out.sigma + 1e-6))[:, None], 0)
    )


@FEW
@given(SEEDS, st.floats(0.2, 5), st.booleans())
def test_the_token_mean_is_the_row_advantage(seed, sigma, ungraded):
    """On rows without a prefix mask; zero at tokens that were not sampled."""
    rng = np.random.default_rng(seed)
    graded_N = rng.random(12) < 0.5 if ungraded else None
    rows, turns_NT = random_rows(rng, train_from_N=None, graded_N=graded_N)
    (out,) = token_advantages([rows], [turns_NT], Settings(kernel_sigma=sigma, positive_amplification=1.5))
    sampled_NT = turns_NT >= 0
    np.testing.assert_allclose((out.adv_NT * sampled_NT).sum(1) / sampled_NT.sum(1), out.adv_N, atol=1e-11)
    assert not out.adv_NT[~sampled_NT].any()


@FEW
@given(SEEDS)
def test_retries_are_zero_on_the_shared_prefix_and_are_not_rescaled(seed):
    rows, turns_NT = random_rows(np.random.default_rng(seed))
    (masked,) = token_advantages([rows], [turns_NT], Settings())
    (whole,) = token_advantages([replace(rows, train_from_N=None)], [turns_NT], Settings())
    mask_NT = retry_mask(turns_NT, rows.train_from_N)
    assert masked.adv_NT[~mask_NT].tolist() == [0.0] * int((~mask_NT).sum())
    assert masked.adv_NT[mask_NT].tolist() == whole.adv_NT[mask_NT].tolist()
    assert masked.adv_N.tolist() == whole.adv_N.tolist()
    assert (turns_NT[rows.is_retry_N] < rows.train_from_N[rows.is_retry_N, None]).any()


def reference(rows, turns_NT, sigma=1.0, eps=1e-6):
    """Eqs 1-3 token by token, all rows graded, no option."""
    n, k = rows.grades_NK.shape
    r = np.zeros((n, k))
    for i in range(n):
        points = rows.grades_NK[i] - 1
        p = points / points.sum() if points.sum() and rows.rewards_N[i] >= 0 else np.full(k, 1 / k)
        r[i] = p * rows.rewards_N[i]
    adv = np.array([r[i] - r[rows.group_N == rows.group_N[i]].mean(0) for i in range(n)])
    scale = (adv @ rows.phi_K).std() + eps
    out = np.zeros(turns_NT.shape)
    for i in range(n):
        t = np.flatnonzero(turns_NT[i] >= 0)
        u = turns_NT[i, t]
        for j in range(k):
            pivot = min(rows.pivots_NK[i, j], u.max())
            g = np.exp(-0.5 * ((u - pivot) / sigma) ** 2) if pivot >= 0 else np.ones(len(t))
            out[i, t] += rows.phi_K[j] * adv[i, j] * g * len(t) / g.sum() / scale
        out[i, t[u < rows.train_from_N[i]]] = 0
    return out


@FEW
@given(SEEDS, st.booleans())
def test_tokens_as_the_equations_say(seed, negative):
    rng = np.random.default_rng(seed)
    rows, turns_NT = random_rows(rng, rewards=rng.random(12) - 0.5 * negative)
    rows = replace(rows, pivots_NK=rows.pivots_NK + rng.integers(0, 2, rows.pivots_NK.shape))
    (out,) = token_advantages([rows], [turns_NT], Settings())
    np.testing.assert_allclose(out.adv_NT, reference(rows, turns_NT), atol=1e-11)


# ---------------------------------------------------------------- invariances, numpy and torch


@FEW
@given(SEEDS)
def test_the_order_of_rows_and_the_names_of_groups_do_not_matter(seed):
    rng = np.random.default_rng(seed)
    rows, _ = random_rows(rng, graded_N=rng.random(12) < 0.7)
    order = rng.permutation(12)
    names = {5: 40, 6: -3, 7: 7}
    moved = Rows(**{f: v if f == "phi_K" else v[order] for f, v in fields_of(complete(rows)).items()})
    moved = replace(moved, group_N=np.array([names[g] for g in moved.group_N]))
    (a,), (b,) = turn_advantages([rows], Settings()), turn_advantages([moved], Settings())
    np.testing.assert_allclose(b.adv_NU, a.adv_NU[order], atol=1e-9)
    np.testing.assert_allclose(b.adv_NK, a.adv_NK[order], atol=1e-14)
    assert a.fallbacks == b.fallbacks


@FEW
@given(SEEDS, st.floats(0.01, 100))
def test_scaling_the_rewards_scales_stage_1_and_nothing_after(seed, c):
    rows, _ = random_rows(np.random.default_rng(seed))
    (a,), (b,) = (
        turn_advantages([replace(rows, rewards_N=rows.rewards_N * f)], Settings(eps=0.0)) for f in (1.0, c)
    )
    np.testing.assert_allclose(b.adv_NK, c * a.adv_NK, atol=1e-13 * c)
    np.testing.assert_allclose(b.adv_NU, a.adv_NU, atol=1e-9)


def test_the_order_of_subtasks_does_not_matter():
    rows, _ = random_rows(np.random.default_rng(3))
    order = np.array([2, 0, 1])
    moved = replace(
        rows,
        phi_K=rows.phi_K[order],
        grades_NK=rows.grades_NK[:, order],
        pivots_NK=rows.pivots_NK[:, order],
    )
    (a,), (b,) = turn_advantages([rows], Settings()), turn_advantages([moved], Settings())
    np.testing.assert_allclose(a.adv_NU, b.adv_NU, atol=1e-12)


def fields_of(value):
    held = {name: getattr(value, name) for name in value.__dataclass_fields__}
    return {name: v for name, v in held.items() if v is not None}


@pytest.mark.parametrize("advantage", ["sdae", "grpo"])
@pytest.mark.parametrize("seed", range(4))
def test_torch_gives_what_numpy_gives(seed, advantage):
    rng = np.random.default_rng(seed)
    options = Settings(
        advantage=advantage, skip_flat=seed == 1, opmd_baseline=seed == 2, positive_amplification=1 + seed
    )
    given_N = rng.random(12) < 0.6
    given_N[:4] = False
    rewards = np.round(rng.random(12) - 0.2, 1)
    rewards[4:8] = 0.3
    rows, turns_NT = random_rows(rng, rewards=rewards, graded_N=given_N)
    rows = replace(rows, pivots_NK=rows.pivots_NK + 3)
    (a,) = token_advantages([rows], [turns_NT], options)
    same = Rows(**{name: tensor(value) for name, value in fields_of(rows).items()})
    (b,) = token_advantages([same], [tensor(turns_NT)], options)
    for name in ("adv_NK", "adv_N", "adv_NU", "adv_NT", "grpo_N"):
        np.testing.assert_allclose(getattr(b, name).numpy(), getattr(a, name), atol=1e-12, err_msg=name)
    assert b.decomposed_N.tolist() == a.decomposed_N.tolist()
    assert b.fallbacks == a.fallbacks
    assert b.sigma == pytest.approx(a.sigma, abs=1e-12)


@KINDS
def test_results_have_the_dtype_of_the_rewards(array):
    rows, turns_NT = random_rows(np.random.default_rng(0))
    rows = replace(rows, rewards_N=rows.rewards_N.astype(np.float32))
    same = Rows(**{name: array(value) for name, value in fields_of(rows).items()})
    (out,) = token_advantages([same], [array(turns_NT)], Settings())
    for name in ("adv_NK", "adv_N", "adv_NT", "grpo_N"):
        assert "float32" in str(getattr(out, name).dtype)
    np.testing.assert_allclose(np.asarray(out.adv_NT), reference(rows, turns_NT), atol=1e-4)


# ---------------------------------------------------------------- scalar GRPO, fallbacks, options


@KINDS
def test_grpo_golden(array):
    """Group 0: (0, 0, 1, 1): mean 1/2, population std 1/2, eps 1/2: -+1/2. Group 1: equal rewards: 0."""
    out_N = sdae.grpo(array([0.0, 0.3, 0.0, 1.0, 0.3, 1.0]), array([0, 1, 0, 0, 1, 0]), 0.5)
    assert out_N.tolist() == [-0.5, 0.0, -0.5, 0.5, 0.0, 0.5]
    assert sdae.grpo(array([0.3, 0.3]), array([0, 0]), 0.0).tolist() == [0, 0]


def test_grpo_is_that_of_the_package():
    rewards_N = np.random.default_rng(0).random(9)
    ours = sdae.grpo(rewards_N, np.zeros(9, dtype=int), 1e-6)
    assert ours.tolist() == scalar.advantages(rewards_N, 1e-6).tolist()


@KINDS
def test_grpo_with_the_opmd_baseline(array):
    """(0, 1 | retry 1): originals' mean 1/2; std of all sqrt(2/9), eps chosen so that the divisor is 1."""
    out_N = sdae.grpo(
        array([0.0, 1.0, 1.0]), array([0, 0, 0]), 1 - math.sqrt(2 / 9), array([True, True, False])
    )
    np.testing.assert_allclose(np.asarray(out_N), [-0.5, 0.5, 0.5], atol=1e-15)


@KINDS
def test_scalar_condition_broadcasts(array):
    """advantage=grpo: every sampled token of a row has the same value; grades play no role, masks do."""
    rows, turns_NT = random_rows(np.random.default_rng(5))
    same = Rows(**{name: array(value) for name, value in fields_of(rows).items()})
    (out,) = token_advantages([same], [array(turns_NT)], Settings(advantage="grpo"))
    expected = sdae.grpo(rows.rewards_N, rows.group_N, 1e-6)
    mask_NT = retry_mask(turns_NT, rows.train_from_N)
    assert out.adv_NT.tolist() == (expected[:, None] * mask_NT).tolist()
    assert out.adv_N.tolist() == out.grpo_N.tolist() == expected.tolist()


@KINDS
def test_rows_without_grades_at_all(array):
    """rlvr: grades, pivots and retries are absent; K comes from phi."""
    rows = one_turn([0, 1], phi=[0.5, 0.5], array=array)
    for advantage in ("grpo", "sdae"):
        (out,) = turn_advantages([rows], Settings(advantage=advantage, advantage_eps=0.5))
        assert out.adv_N.tolist() == [-0.5, 0.5]
        assert out.adv_NU.tolist() == [[-0.5], [0.5]]
        assert out.adv_NK.tolist() == [[0, 0], [0, 0]]
        assert out.decomposed_N.tolist() == [False, False]
        assert out.sigma == 0.0
        assert out.fallbacks == Fallbacks(1, 1, 0, 0, 0, 0)


def test_a_group_without_grades_falls_back_to_grpo_and_stays_out_of_sigma_batch():
    """Group 0 graded: K = 1, R (1, 0): A +-1/2, sigma 1/2. Group 1 ungraded: R (8, 0): GRPO +-4/(4 + 1/2)."""
    rows = one_turn(
        [1, 0, 8, 0], [0, 0, 1, 1], grades_NK=[[3], [3], [0], [0]], graded_N=[True, True, False, False]
    )
    (out,) = turn_advantages([rows], Settings(eps=0.0, advantage_eps=0.5))
    assert out.sigma == 0.5
    assert out.adv_N.tolist() == [1, -1, 4 / 4.5, -4 / 4.5]
    assert out.adv_NK[:, 0].tolist() == [0.5, -0.5, 0, 0]
    assert out.decomposed_N.tolist() == [True, True, False, False]
    assert out.fallbacks == Fallbacks(2, 1, 0, 0, 0, 0)


def test_an_ungraded_row_has_even_shares_and_no_pivots():
    """R = (1, 1), row 1 ungraded: r = (1, 0), (1/2, 1/2); A = (1/4, -1/4), (-1/4, 1/4). Its pivot is not looked at."""
    rows = replace(
        worked_rows(),
        rewards_N=np.array([1.0, 1.0]),
        grades_NK=np.array([[5, 1], [5, 1]]),
        graded_N=np.array([True, False]),
        pivots_NK=np.array([[-1, -1], [0, 9]]),
    )
    (out,) = turn_advantages([rows], Settings())
    assert out.adv_NK.tolist() == [[0.25, -0.25], [-0.25, 0.25]]
    assert out.adv_NU[1, 0] == out.adv_NU[1, 1]
    assert out.fallbacks == Fallbacks(1, 0, 1, 1, 0, 0)


def test_a_negative_reward_is_shared_evenly_and_counted():
    """-0.1 over grades (5, 1): -0.05 each; an ungraded negative row counts as ungraded only."""
    rows = one_turn(
        [-0.1, -0.1, 0], phi=[0.5, 0.5], grades_NK=[[5, 1], [5, 1], [5, 1]], graded_N=[True, False, True]
    )
    (out,) = turn_advantages([rows], PLAIN)
    np.testing.assert_allclose(out.adv_NK, [[-0.05 / 3] * 2] * 2 + [[0.1 / 3] * 2], atol=1e-15)
    assert out.fallbacks.rows_ungraded == out.fallbacks.rows_negative == 1


def test_pivots_are_clamped_and_counted():
    """Pivots 9 and 1 of two turns are the last turn; only one of them was moved."""
    rows = replace(worked_rows(), pivots_NK=np.array([[9, -1], [-1, 1]]))
    (out,) = turn_advantages([rows], Settings(eps=1 / 24))
    assert out.fallbacks.pivots_clamped == 1
    np.testing.assert_allclose(out.adv_NU[0], [0.6913110, 1.0586890], atol=1e-7)


def test_two_solved_rows_the_wall_bumper_is_preferred():
    """R = 1 twice, grades all 5 and one boundary grade of 1 (phi 0.10): r = 1/5 each, and (1/4, 1/4, 1/4, 1/4, 0).

    A_0 = (-1/40 four times, +1/10): 0.9 (-0.025) + 0.1 (0.1) = -0.0125. GRPO gives both rows 0.
    """
    rows = one_turn([1, 1], phi=FROZENLAKE_PHI, grades_NK=[[5] * 5, [5, 5, 5, 5, 1]])
    (out,) = turn_advantages([rows], PLAIN)
    assert sdae.stage2(out.adv_NK, FROZENLAKE_PHI).tolist() == pytest.approx([-0.0125, 0.0125])
    assert out.adv_N.tolist() == pytest.approx([-1, 1], abs=1e-4)
    assert out.grpo_N.tolist() == [0.0, 0.0]
    assert out.fallbacks.groups_flat == 1


def test_skip_flat_drops_groups_with_equal_rewards_from_the_batch():
    """The flat group gets 0 and leaves sigma_batch to the other one (K = 1 subtask of R (1, 0): 1/2)."""
    rows = one_turn([1, 1, 1, 0], [0, 0, 1, 1], phi=[0.9, 0.1], grades_NK=[[5, 5], [5, 1], [5, 1], [1, 1]])
    (kept,) = turn_advantages([rows], PLAIN)
    (out,) = turn_advantages([rows], replace(PLAIN, skip_flat=True, eps=0.0))
    assert kept.adv_N[:2].all()
    assert out.adv_N.tolist() == pytest.approx([0, 0, 1, -1])
    assert out.adv_NK[:2].tolist() == [[0, 0], [0, 0]]
    assert out.sigma == pytest.approx(0.45)
    assert out.decomposed_N.tolist() == [False, False, True, True]
    assert out.fallbacks == kept.fallbacks == Fallbacks(2, 0, 1, 0, 0, 0)


@KINDS
def test_flat_means_equal_but_for_rounding(array):
    rewards_N = array([0.3, 0.1 + 0.2, 0.3, 0.3 + 1e-8, 5.0])
    assert sdae.flat_rows(rewards_N, array([4, 4, 9, 9, 1])).tolist() == [True, True, False, False, True]


def test_positive_amplification_is_for_successful_retries_only():
    """K = 1, R = (1, 0 | retries 1, 0): A = +-1/2, sigma 1/2; only the good retry is doubled, in every token."""
    rows = replace(
        one_turn([1, 0, 1, 0], grades_NK=[[3]] * 4, is_retry_N=[False, False, True, True]),
        counts_NU=np.ones((4, 2)),
    )
    for advantage in ("sdae", "grpo"):
        (out,) = turn_advantages(
            [rows], Settings(advantage=advantage, eps=0.0, advantage_eps=0.0, positive_amplification=2.0)
        )
        assert out.adv_N.tolist() == [1, -1, 2, -1]
        assert out.adv_NU.tolist() == [[1, 1], [-1, -1], [2, 2], [-1, -1]]
        assert out.grpo_N.tolist() == [1, -1, 1, -1]
        assert out.sigma == 0.5
    (out,) = turn_advantages([rows], Settings(eps=0.5, positive_amplification=2.0))
    assert out.adv_N.tolist() == [0.5, -0.5, 1, -0.5]


def test_opmd_baseline_in_a_batch():
    """K = 1, R = (0, 1 | retry 1): baseline 1/2: A = (-1/2, 1/2, 1/2); mean 1/6, sigma sqrt(2/9)."""
    rows = one_turn([0, 1, 1], grades_NK=[[3]] * 3, is_retry_N=[False, False, True])
    (out,) = turn_advantages([rows], Settings(opmd_baseline=True, eps=0.0, advantage_eps=0.0))
    assert out.adv_NK[:, 0].tolist() == [-0.5, 0.5, 0.5]
    assert out.sigma == pytest.approx(math.sqrt(2 / 9))
    assert out.grpo_N.tolist() == pytest.approx((np.array([-0.5, 0.5, 0.5]) / math.sqrt(2 / 9)).tolist())
    (out,) = turn_advantages([replace(rows, is_retry_N=None)], Settings(opmd_baseline=True))
    assert out.adv_NK[:, 0].tolist() == pytest.approx([-2 / 3, 1 / 3, 1 / 3])


# ---------------------------------------------------------------- what is refused, what results are


@KINDS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards_N": [1.0, math.inf]}, "finite"),
        ({"rewards_N": [1.0, -math.inf]}, "finite"),
        ({"rewards_N": [1.0, math.nan]}, "finite"),
        ({"rewards_N": [1, 0]}, "floats"),
        ({"phi_K": [0.75, 0.2]}, "sum to 1"),
        ({"phi_K": [0.75, 0.3]}, "sum to 1"),
        ({"phi_K": [1.25, -0.25]}, "negative"),
        ({"grades_NK": [[0, 3], [2, 2]]}, r"1\.\.5"),
        ({"grades_NK": [[5, 6], [2, 2]]}, r"1\.\.5"),
        ({"grades_NK": [[5], [2]]}, r"\[2, 2\]"),
        ({"pivots_NK": [[0, 0]]}, r"\[2, 2\]"),
        ({"group_N": [0, 0, 0]}, "have 2 of them"),
        ({"train_from_N": [0]}, "have 2 of them"),
        ({"is_retry_N": [True]}, "have 2 of them"),
    ],
)
def test_what_would_give_wrong_numbers_is_refused(array, change, message):
    with pytest.raises(ValueError, match=message):
        complete(replace(worked_rows(array), **{name: array(value) for name, value in change.items()}))


@KINDS
def test_grades_of_ungraded_rows_are_not_looked_at(array):
    rows = replace(worked_rows(array), grades_NK=array([[1, 5], [0, 99]]), graded_N=array([True, False]))
    assert complete(rows).pivots_NK.tolist() == [[0, -1], [-1, -1]]
    assert complete(replace(rows, phi_K=array([1.0, 0.0]))).phi_K.tolist() == [1, 0]
    assert complete(replace(rows, grades_NK=None)).graded_N.tolist() == [False, False]
    assert complete(replace(rows, phi_K=array([0.75, 0.2500009]))).phi_K.tolist() == [0.75, 0.2500009]


def test_tokens_must_be_those_of_the_counts():
    with pytest.raises(ValueError, match="turns below 2"):
        token_advantages([worked_rows()], [np.array([[0, 1], [0, 2]])], Settings())
    with pytest.raises(ValueError, match="2 rows"):
        token_advantages([worked_rows()], [np.array([[0, 1]])], Settings())
    with pytest.raises(ValueError, match="longer"):
        token_advantages([worked_rows()], [np.array([[0, 1], [0, 1]])] * 2, Settings())
    (out,) = token_advantages([worked_rows()], [np.array([[0, 1], [1, -1]])], Settings())
    assert out.adv_NT.tolist() == expand(out.adv_NU, np.array([[0, 1], [1, -1]])).tolist()


def test_a_batch_without_tokens_or_rows():
    rows = replace(worked_rows(), counts_NU=np.zeros((2, 0)))
    (out,) = token_advantages([rows], [np.zeros((2, 0), dtype=int)], Settings())
    assert out.adv_NT.shape == (2, 0)
    assert turn_advantages([], Settings()) == ()


def test_results_are_values():
    (out,) = token_advantages([worked_rows()], [np.array([[0, 1], [0, 1]])], Settings())
    for value in (Settings(), worked_rows(), out, out.fallbacks):
        with pytest.raises(FrozenInstanceError):
            setattr(value, next(iter(value.__dataclass_fields__)), None)
        assert not hasattr(value, "__dict__")


def test_the_defaults_are_those_of_the_config():
    from racelab.configs.schema_rlds import RldsMethodConfig, SdaeConfig

    known = set(SdaeConfig.model_fields) | set(RldsMethodConfig.model_fields)
    assert set(asdict(Settings())) == {
        *("advantage", "kernel", "kernel_sigma", "eps", "advantage_eps"),
        *("skip_flat", "opmd_baseline", "positive_amplification"),
    }
    assert set(asdict(Settings())) <= known
    assert turn_counts(np.array([[0, -1]])).tolist() == [[1]]


def test_a_batch_whose_row_advantages_cancel_is_not_blown_up_by_the_kernel() -> None:
    """FrozenLake's weights, four solved rollouts, grades that differ on the two subtasks of weight 0.15 only.

    r_ik = 1/20 (g - 1) for grades that sum to 25 - 5: rows (5,5,5,3,5), (5,5,5,3,5), (5,5,3,5,5), (5,5,3,5,5): shares
    of the two are 2/18 and 4/18, so A_i3 = -A_i2 = +-1/18 and A_i = 0.15 (A_i2 + A_i3) = 0 in every row.
    """
    rows = Rows(
        rewards_N=np.ones(4),
        group_N=np.zeros(4, dtype=np.int64),
        counts_NU=np.ones((4, 6)),
        phi_K=np.array([0.35, 0.25, 0.15, 0.15, 0.10]),
        grades_NK=np.array([[5, 5, 5, 3, 5], [5, 5, 5, 3, 5], [5, 5, 3, 5, 5], [5, 5, 3, 5, 5]]),
        pivots_NK=np.array([[0, 1, 2, 3, 4]] * 4),
    )
    (adv,) = turn_advantages([rows], Settings())
    np.testing.assert_allclose(adv.adv_NK[0], [0, 0, 1 / 18, -1 / 18, 0], atol=1e-12)
    assert adv.sigma <= 1e-9
    assert abs(adv.adv_NU).max() < 1e-6
    assert adv.fallbacks.sigma_zero == 1
    (plain,) = turn_advantages([replace(rows, rewards_N=np.array([1.0, 1.0, 1.0, 0.0]))], Settings())
    assert plain.fallbacks.sigma_zero == 0
    assert abs(plain.adv_NU - plain.adv_N[:, None]).max() > 0.1
