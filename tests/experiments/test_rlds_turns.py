"""Counts, kernel, masks and loss weights per turn; numpy and torch give the same. Expected numbers worked by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.methods.rlds import turns

from .rlds_rows import random_tokens, tensor

FEW = settings(max_examples=30, deadline=None, derandomize=True)
KINDS = pytest.mark.parametrize("array", [np.array, tensor], ids=["numpy", "torch"])
TOKENS = [[0, 0, -1, 1, -1], [-1, 0, 2, 2, 2], [-1, -1, -1, -1, -1]]


@KINDS
def test_counts_and_lookup(array):
    tokens_NT = array(TOKENS)
    assert turns.turn_counts(tokens_NT).tolist() == [[2, 1, 0], [1, 0, 3], [0, 0, 0]]
    assert turns.turn_counts(tokens_NT, 4).tolist() == [[2, 1, 0, 0], [1, 0, 3, 0], [0, 0, 0, 0]]
    values_NU = array([[1.0, 2.0, 9.0], [3.0, 9.0, 4.0], [9.0, 9.0, 9.0]])
    expected = [[1, 1, 0, 2, 0], [0, 3, 4, 4, 4], [0, 0, 0, 0, 0]]
    assert turns.expand(values_NU, tokens_NT).tolist() == expected


@KINDS
def test_a_turn_that_nobody_knows_is_refused(array):
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        turns.turn_counts(array(TOKENS), 2)
    with pytest.raises(ValueError, match=r"\[-1, 2\]"):
        turns.turn_counts(array([[-2, 2]]))


@KINDS
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_batches(array, shape):
    tokens_NT = array(np.zeros(shape, dtype=np.int64))
    counts_NU = turns.turn_counts(tokens_NT)
    assert tuple(counts_NU.shape) == (shape[0], 0)
    assert tuple(turns.expand(counts_NU, tokens_NT).shape) == shape
    assert turns.last_turn(counts_NU).tolist() == [-1] * shape[0]
    pivots_NK = array(np.full((shape[0], 2), 3))
    assert turns.clamp_pivots(pivots_NK, counts_NU)[0].tolist() == [[-1, -1]] * shape[0]
    assert tuple(turns.kernel(pivots_NK, counts_NU, 1.0).shape) == (shape[0], 2, 0)


@KINDS
def test_rows_of_more_than_one_block(array, monkeypatch):
    tokens = random_tokens(np.random.default_rng(0), 7, 4)
    whole_NU = turns.turn_counts(array(tokens)).tolist()
    values_NU = np.random.default_rng(1).random((7, 4))
    whole_NT = turns.expand(array(values_NU), array(tokens)).tolist()
    monkeypatch.setattr(turns, "_BLOCK", 2 * tokens.shape[1])
    assert turns.turn_counts(array(tokens)).tolist() == whole_NU
    assert turns.expand(array(values_NU), array(tokens)).tolist() == whole_NT
    assert turns._BLOCK // tokens.shape[1] == 2
    assert [(rows.start, index.shape[0]) for rows, index in turns._blocks(array(tokens), 4)] == [
        (0, 2),
        (2, 2),
        (4, 2),
        (6, 1),
    ]
    monkeypatch.setattr(turns, "_BLOCK", 1)  # a row longer than a block is a block of its own
    assert turns.turn_counts(array(tokens)).tolist() == whole_NU


@KINDS
def test_last_turn_and_clamping(array):
    """Row 0 ends in turn 1, row 1 in turn 2, row 2 has no tokens. 4 and 3 lie beyond; a row without tokens has none."""
    counts_NU = turns.turn_counts(array(TOKENS))
    assert turns.last_turn(counts_NU).tolist() == [1, 2, -1]
    pivots_NK, moved = turns.clamp_pivots(array([[4, 1], [2, 3], [0, -1]]), counts_NU)
    assert pivots_NK.tolist() == [[1, 1], [2, 2], [-1, -1]]
    assert moved == 2
    assert turns.clamp_pivots(array([[0, 5]]), array([[1.0, 0.0]]))[1] == 1
    assert turns.clamp_pivots(array([[-1, -7], [0, -1], [-1, -1]]), counts_NU)[0].tolist() == [
        [-1, -1],
        [0, -1],
        [-1, -1],
    ]


@KINDS
def test_kernel_golden(array):
    """Tokens (1, 2, 1), pivot 1, sigma 1: g = (e^-1/2, 1, e^-1/2), sum of c g = 2 + 2 e^-1/2 = 3.213061, n = 4.

    m = 4 g / 3.213061 = (0.755081, 1.244919, 0.755081); check: 0.755081 + 2 * 1.244919 + 0.755081 = 4.
    """
    m_NKU = turns.kernel(array([[1, -1]]), array([[1.0, 2.0, 1.0]]), 1.0)
    assert m_NKU[0, 0].tolist() == pytest.approx([0.7550813, 1.2449187, 0.7550813], abs=1e-7)
    assert m_NKU[0, 1].tolist() == [1, 1, 1]


@KINDS
def test_sigma_is_in_turns(array):
    """sigma = 2 at distance 2 is e^-1/2, as sigma = 1 at distance 1. Turn 1 has no token and gets 0."""
    m_NKU = turns.kernel(array([[0]]), array([[1.0, 0.0, 1.0]]), 2.0)
    high = 2 / (1 + math.exp(-0.5))
    assert m_NKU[0, 0].tolist() == pytest.approx([high, 0.0, high * math.exp(-0.5)], abs=1e-12)


@KINDS
def test_a_row_without_tokens_has_no_kernel(array):
    assert turns.kernel(array([[0, -1]]), array([[0.0, 0.0]]), 1.0).tolist() == [[[0, 0], [0, 0]]]


def test_an_unclamped_pivot_would_underflow():
    """Pivot 30 of a row of 10 turns: the nearest is 21 turns away, e^(-441/2) = 1.6e-96 is 0 in float32."""
    plain_U = np.exp(-0.5 * (np.arange(10, dtype=np.float32) - np.float32(30)) ** 2)
    assert plain_U.dtype == np.float32
    assert not plain_U.any()
    counts_NU = np.ones((1, 10), dtype=np.float32)
    pivots_NK, moved = turns.clamp_pivots(np.array([[30]]), counts_NU)
    m_U = turns.kernel(pivots_NK, counts_NU, 1.0)[0, 0]
    assert moved == 1
    assert m_U.argmax() == 9
    assert m_U.sum() == pytest.approx(10, rel=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_far_or_narrow_kernel_stays_a_kernel(dtype):
    """All tokens 60 turns from the pivot, or sigma 0.01: still of mean one."""
    counts_NU = np.zeros((1, 100), dtype=dtype)
    counts_NU[0, [0, 99]] = 1, 3
    m_U = turns.kernel(np.array([[60]]), counts_NU, 1.0)[0, 0]
    assert (m_U * counts_NU[0]).sum() == pytest.approx(4)
    assert m_U[99] == pytest.approx(4 / 3)
    assert turns.kernel(np.array([[99]]), counts_NU, 0.01)[0, 0, 99] == pytest.approx(4 / 3)


@FEW
@given(st.integers(0, 10**6), st.floats(0.05, 20))
def test_the_kernel_has_mean_one_and_its_top_at_the_pivot(seed, sigma):
    rng = np.random.default_rng(seed)
    tokens_NT = random_tokens(rng, 4, 6)
    counts_NU = turns.turn_counts(tokens_NT, 6)
    pivots_NK, _ = turns.clamp_pivots(rng.integers(-1, 9, (4, 3)), counts_NU)
    m_NKU = turns.kernel(pivots_NK, counts_NU, sigma)
    np.testing.assert_allclose(
        (m_NKU * counts_NU[:, None]).sum(2), np.tile(counts_NU.sum(1)[:, None], 3), rtol=1e-12
    )
    for n, k in np.argwhere(pivots_NK >= 0):
        assert m_NKU[n, k, pivots_NK[n, k]] == m_NKU[n, k].max()


@KINDS
def test_retry_mask(array):
    """Row 0 from turn 1 on, row 1 from turn 0: what was not sampled is never trained on."""
    mask_NT = turns.retry_mask(array(TOKENS), array([1, 0, 0]))
    assert mask_NT.tolist() == [
        [False, False, False, True, False],
        [False, True, True, True, True],
        [False] * 5,
    ]
    counts_NU = turns.turn_counts(array(TOKENS))
    kept_NU = turns.kept_turns(counts_NU, array([1, 0, 0]))
    assert kept_NU.tolist() == [[0, 1, 0], [1, 0, 1], [0, 0, 0]]
    assert turns.expand(kept_NU, array(TOKENS)).tolist() == turns.like(mask_NT, kept_NU).tolist()
    assert turns.kept_turns(counts_NU, None).tolist() == [[1, 1, 0], [1, 0, 1], [0, 0, 0]]


@KINDS
def test_whose_prefix_is_masked(array):
    """Rows 0-2 originals, 3 and 4 retries of 1 (from turn 2 and 1), 5 a retry of 0 from its first turn."""
    start, parent = array([0, 0, 0, 2, 1, 0]), array([-1, -1, -1, 1, 1, 0])
    assert turns.train_from(start, parent, "retries").tolist() == [0, 0, 0, 2, 1, 0]
    assert turns.train_from(start, parent, "both").tolist() == [0, 1, 0, 2, 1, 0]
    assert turns.train_from(array([3, 4]), array([-1, 0]), "retries").tolist() == [0, 4]
    assert turns.train_from(array([3, 4]), array([-1, 0]), "both").tolist() == [4, 4]
    assert turns.train_from(array([3, 0, 2]), array([-1, -1, 1]), "both").tolist() == [0, 2, 2]
    assert turns.train_from(array([0, 0, 2]), array([-1, -1, 0]), "both").tolist() == [2, 0, 2]
    with pytest.raises(ValueError, match="shorter"):
        turns.train_from(array([3, 4]), array([-1]), "both")


@KINDS
def test_token_mean_weights(array):
    """Row 0: 2 tokens of turn 0 masked, 1 left; row 1: 4 tokens; row 2 none. 5 unmasked tokens weigh 1/5 each."""
    counts_NU = turns.turn_counts(array(TOKENS))
    (w_NU,) = turns.loss_weights([counts_NU], [array([1, 0, 0])], "token_mean")
    assert w_NU.tolist() == [[0, 0.2, 0], [0.2, 0, 0.2], [0, 0, 0]]


@KINDS
def test_sequence_mean_weights(array):
    """Two rows have a token left: 1/2 for the one token of row 0, 1/8 for each of the four of row 1."""
    counts_NU = turns.turn_counts(array(TOKENS))
    (w_NU,) = turns.loss_weights([counts_NU], [array([1, 0, 0])], "sequence_mean")
    assert w_NU.tolist() == [[0, 0.5, 0], [0.125, 0, 0.125], [0, 0, 0]]


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean"])
def test_loss_weights_span_all_tasks_of_the_batch(kind):
    """One task with 1 token, one with 3: token mean 1/4 each; sequence mean 1/2 and 1/6."""
    a, b = turns.loss_weights([np.array([[1.0]]), np.array([[0.0, 3.0]])], [None, None], kind)
    first, second = (0.25, 0.25) if kind == "token_mean" else (0.5, 1 / 6)
    assert a.tolist() == [[first]]
    assert b.tolist() == [[0.0, pytest.approx(second)]]


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean"])
def test_nothing_to_train_on(kind):
    (w_NU,) = turns.loss_weights([np.array([[2.0, 1.0]])], [np.array([5])], kind)
    assert w_NU.tolist() == [[0, 0]]
    (w_NU,) = turns.loss_weights([np.array([[2.0, 1.0]])], [np.array([1])], kind)
    assert w_NU.tolist() == [[0, 1]]
    with pytest.raises(ValueError, match="shorter"):
        turns.loss_weights([np.array([[2.0, 1.0]])], [], kind)


@FEW
@given(st.integers(0, 10**6), st.sampled_from(["token_mean", "sequence_mean"]))
def test_loss_weights_sum_to_one(seed, kind):
    rng = np.random.default_rng(seed)
    tokens_NT = random_tokens(rng, 5, 4)
    counts_NU, first_N = turns.turn_counts(tokens_NT), rng.integers(0, 3, 5)
    (w_NU,) = turns.loss_weights([counts_NU], [first_N], kind)
    w_NT = turns.expand(w_NU, tokens_NT)
    mask_NT = turns.retry_mask(tokens_NT, first_N)
    assert w_NT.sum() == pytest.approx(1.0 if mask_NT.any() else 0.0)
    assert ((w_NT > 0) == mask_NT).all()
