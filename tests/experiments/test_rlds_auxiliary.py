"""Pairs of L_aux and their weights. Expected numbers worked by hand."""

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.methods.rlds.auxiliary import select_pairs, token_weights


def test_pairs_golden():
    """Deltas (0.2, -0.1, 0.5, 0, 0.3), two kept: 0.5 and 0.3 of 0.8. Tokens 4 and 2, coefficient 0.1."""
    delta_R = np.array([0.2, -0.1, 0.5, 0.0, 0.3])
    pairs = select_pairs(delta_R, 2)
    assert pairs.index_M.tolist() == [2, 4]
    assert pairs.weight_M.tolist() == pytest.approx([0.625, 0.375])
    n_tokens_R = np.array([9, 9, 4, 9, 2])
    assert token_weights(pairs, n_tokens_R, 0.1).tolist() == pytest.approx([0.1 * 0.625 / 4, 0.1 * 0.375 / 2])


def test_ties_are_taken_in_order_even_those_of_binary_floats():
    """0.3 - 0.1 is 0.19999999999999998: it is 0.2, and comes before the 0.2 that follows it."""
    delta_R = np.array([0.3 - 0.1, 0.2, 1.0, 0.2])
    assert select_pairs(delta_R, 3).index_M.tolist() == [2, 0, 1]


def test_rounding_is_no_success():
    """0.1 + 0.2 - 0.3 is 5.6e-17."""
    assert select_pairs(np.array([0.1 + 0.2 - 0.3]), 64).index_M.tolist() == []


def test_a_pair_without_tokens_takes_no_place():
    pairs = select_pairs(np.array([0.9, 0.5, 0.5, 0.0]), 1, np.array([0, 1, 5, 9]))
    assert pairs.index_M.tolist() == [1]
    assert pairs.weight_M.tolist() == [1.0]
    assert select_pairs(np.array([0.9, 0.0]), 2, np.array([1, 1])).index_M.tolist() == [0]
    with pytest.raises(FrozenInstanceError):
        pairs.index_M = pairs.index_M
    assert not hasattr(pairs, "__dict__")


@pytest.mark.parametrize("delta_R", [[], [-1.0, 0.0]])
def test_nothing_to_imitate(delta_R):
    pairs = select_pairs(np.array(delta_R), 64)
    assert pairs.index_M.tolist() == pairs.weight_M.tolist() == []
    assert token_weights(pairs, np.zeros(len(delta_R), dtype=int), 0.1).tolist() == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_delta_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="finite"):
        select_pairs(np.array([0.5, value]), 64)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(-100, 100), st.integers(0, 5)), max_size=20),
    st.integers(1, 8),
    st.floats(0.01, 1),
)
def test_all_token_weights_sum_to_the_coefficient(rows, most, coef):
    delta_R = np.array([d / 100 for d, _ in rows])
    n_tokens_R = np.array([n for _, n in rows], dtype=int)
    pairs = select_pairs(delta_R, most, n_tokens_R)
    usable = sorted((d for d, n in rows if d > 0 and n > 0), reverse=True)[:most]
    assert (100 * delta_R[pairs.index_M]).round().tolist() == usable
    total = float((token_weights(pairs, n_tokens_R, coef) * n_tokens_R[pairs.index_M]).sum())
    assert total == pytest.approx(coef if usable else 0.0)
    assert (np.diff(pairs.weight_M) <= 0).all()
