"""The Dirichlet extension of RLDS §6. Expected numbers worked by hand."""

import json
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.methods.rlds.phi import DynamicPhi, update

from .rlds_rows import FROZENLAKE_PHI

STATIC = (0.5, 0.3, 0.2)
deltas = st.lists(st.lists(st.integers(-4, 4), min_size=3, max_size=3), max_size=6).map(
    lambda rows: np.array(rows, dtype=float).reshape(-1, 3)
)


def test_update_golden():
    """S = 10, eta = 1/2. Retries: (2, 0, 0) is one observation of subtask 0; (-1, 1, 3) shares 0.3 and 0.6: 1/3, 2/3;
    (0, -2, 0) is none. z = (1, 1/3, 2/3), e = z / 2; alpha = (5.5, 3 1/6, 2 1/3), sum 11: (1/2, 19/66, 14/66).
    """
    phi = update(DynamicPhi(STATIC, 10.0, 0.5), np.array([[2.0, 0, 0], [-1, 1, 3], [0, -2, 0]]))
    assert phi.evidence_K == pytest.approx((1 / 2, 1 / 6, 1 / 3))
    assert phi.weights_K.tolist() == pytest.approx([0.5, 19 / 66, 14 / 66])
    again = update(phi, np.array([[0.0, 0, 4]]))
    assert again.evidence_K == pytest.approx((1 / 4, 1 / 12, 1 / 6 + 1 / 2))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(deltas, max_size=4))
def test_eta_zero_is_the_static_case_bit_for_bit(steps):
    phi = DynamicPhi(STATIC, 100.0, 0.0)
    for deltas_RK in steps:
        phi = update(phi, deltas_RK)
    assert phi == DynamicPhi(STATIC, 100.0, 0.0)
    assert phi.weights_K.tolist() == list(STATIC)


def test_without_an_observation_the_weights_are_the_static_ones_bit_for_bit():
    phi = update(DynamicPhi(tuple(FROZENLAKE_PHI.tolist()), 100.0, 0.3), np.zeros((0, 5)))
    phi = update(phi, np.array([[0.0, -1, 0, 0, -4]]))
    assert phi.evidence_K == (0.0,) * 5
    assert phi.weights_K.tolist() == FROZENLAKE_PHI.tolist()


def test_equal_gains_leave_the_weights_where_they_are():
    phi = update(DynamicPhi(STATIC, 1.0, 1.0), np.array([[2.0, 2, 2], [1, 1, 1]]))
    assert phi.weights_K.tolist() == pytest.approx(STATIC)


def test_what_benefits_is_upweighted_and_decays_when_it_is_saturated():
    phi, up = DynamicPhi(STATIC, 20.0, 0.1), []
    for _ in range(30):
        phi = update(phi, np.array([[0.0, 0, 2]] * 10))
        up.append(phi.weights_K[2])
    assert (np.diff([0.2, *up]) > 0).all()
    down = []
    for _ in range(200):
        phi = update(phi, np.zeros((0, 3)))
        down.append(phi.weights_K[2])
    assert (np.diff([up[-1], *down]) < 0).all()
    np.testing.assert_allclose(phi.weights_K, STATIC, atol=1e-8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(deltas, max_size=5), st.floats(0, 1), st.floats(0.5, 200))
def test_weights_are_weights_with_a_floor(steps, eta, prior):
    """They sum to 1 and never fall below S phi / (S + retries of a step)."""
    phi = DynamicPhi(STATIC, prior, eta)
    for deltas_RK in steps:
        phi = update(phi, deltas_RK)
    most = max((len(d) for d in steps), default=0)
    assert phi.weights_K.sum() == pytest.approx(1.0)
    assert (phi.weights_K >= prior * np.array(STATIC) / (prior + most) - 1e-12).all()
    assert DynamicPhi.from_state(json.loads(json.dumps(phi.state()))) == phi


def test_a_delta_for_each_subtask():
    with pytest.raises(ValueError, match=r"\[R, 3\]"):
        update(DynamicPhi(STATIC, 1.0, 0.1), np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"\[R, 3\]"):
        update(DynamicPhi(STATIC, 1.0, 0.0), np.zeros(3))


def test_the_state_is_a_value():
    phi = DynamicPhi(STATIC, 1.0, 0.1)
    with pytest.raises(FrozenInstanceError):
        phi.eta = 0.2
    assert not hasattr(phi, "__dict__")
    assert replace(phi, evidence_K=(1.0, 0.0, 0.0)).weights_K.tolist() == pytest.approx([0.75, 0.15, 0.1])
