"""Values per turn, and how they reach tokens: token counts, the pivot kernel, the retry mask, loss weights.

Everything that RLDS says of a token (Eq 3's kernel, R3L's mask, the weight in the loss) depends on its row and its turn
alone. So all of it is computed per turn, [N, U], from the number of tokens of each turn, and a token only looks its
value up. Memory is linear in rollouts x tokens; no [N, K, T] array exists.

Further letters of the legend in `episodes.py`: `turn_of_token_NT` holds the turn of each token, and -1 for whatever
was not sampled (observations, padding); `counts_NU` the number of sampled tokens of each turn.

One implementation for numpy arrays and torch tensors: numpy is the reference, and this file never imports torch. It
uses only names that both spell alike, and asks `namespace` which of the two it has been given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

Array = Any
"""A numpy array or a torch tensor; all arrays of a call are of one kind."""

Aggregation = Literal["token_mean", "sequence_mean"]
MaskPrefix = Literal["retries", "both"]

_BLOCK = 1 << 17
"""Tokens looked up at a time: their index fits into a cache, which halves the time of a large batch."""


def namespace(array: Array) -> Any:
    """The module `numpy` or `torch`, after the kind of `array`."""
    return np if isinstance(array, np.ndarray) else sys.modules["torch"]


def like(values: Any, array: Array) -> Array:
    """`values` as an array of the kind, dtype and device of `array`."""
    return namespace(array).asarray(values, dtype=array.dtype, device=array.device)


def _blocks(turn_of_token_NT: Array, width: int) -> Any:
    """(rows, index) of each block; index [rows, T] points into a flat [rows, 1 + width], column 0 for turn -1."""
    xp, (n, t) = namespace(turn_of_token_NT), turn_of_token_NT.shape
    rows = max(1, _BLOCK // max(t, 1))
    start_N = xp.arange(min(rows, n), dtype=xp.int64, device=turn_of_token_NT.device) * (1 + width) + 1
    for first in range(0, n, rows):
        block = turn_of_token_NT[first : first + rows]
        yield slice(first, first + rows), block + start_N[: block.shape[0], None]


def turn_counts(turn_of_token_NT: Array, n_turns: int | None = None) -> Array:
    """Sampled tokens of each turn [N, U], as float64.

    Args:
        turn_of_token_NT: integers >= -1.
        n_turns: U; None: one more than the largest turn.

    Raises:
        ValueError: a turn below -1, or not below `n_turns`.
    """
    xp, (n, t) = namespace(turn_of_token_NT), turn_of_token_NT.shape
    largest = int(turn_of_token_NT.max()) if n * t else -1
    width = largest + 1 if n_turns is None else n_turns
    if largest >= width or (n * t and int(turn_of_token_NT.min()) < -1):
        raise ValueError(f"turn_of_token must lie in [-1, {width - 1}]")
    counts_NU = xp.zeros((n, width), dtype=xp.float64, device=turn_of_token_NT.device)
    for rows, index in _blocks(turn_of_token_NT, width):
        size = index.shape[0] * (1 + width)
        counts_NU[rows] = xp.bincount(index.reshape(-1), minlength=size).reshape(-1, 1 + width)[:, 1:]
    return counts_NU


def expand(values_NU: Array, turn_of_token_NT: Array) -> Array:
    """The value of each token's turn [N, T]; 0 where the turn is -1.

    The turns are not checked again: they must be those that `turn_counts` made the U columns from.
    """
    xp, (n, width) = namespace(values_NU), values_NU.shape
    none_N1 = xp.zeros((n, 1), dtype=values_NU.dtype, device=values_NU.device)
    padded_NU = xp.concatenate([none_N1, values_NU], 1)
    out_NT = xp.empty(turn_of_token_NT.shape, dtype=values_NU.dtype, device=values_NU.device)
    for rows, index in _blocks(turn_of_token_NT, width):
        out_NT[rows] = xp.take(padded_NU[rows].reshape(-1), index)
    return out_NT


def _turns(counts_NU: Array) -> Array:
    """0 .. U - 1, in the dtype of the counts."""
    return like(range(counts_NU.shape[1]), counts_NU)


def last_turn(counts_NU: Array) -> Array:
    """Last turn of each row that has a sampled token [N], as floats; -1 for a row without any."""
    if not counts_NU.shape[1]:
        return counts_NU.sum(1) - 1.0
    return namespace(counts_NU).amax((_turns(counts_NU) + 1.0) * (counts_NU > 0), 1) - 1.0


def clamp_pivots(pivots_NK: Array, counts_NU: Array) -> tuple[Array, int]:
    """Pivots beyond the row's last turn moved onto it; everything below 0 becomes -1, "none".

    Unclamped, a pivot 30 of a row of 10 turns has a kernel of exp(-441 / 2) at best: 0 in float32.

    Args:
        pivots_NK: turns as integers; -1 for none.
        counts_NU: tokens per turn.

    Returns:
        (the pivots [N, K], how many were moved onto the last turn). A row without tokens has none.
    """
    xp = namespace(pivots_NK)
    last_N1 = like(last_turn(counts_NU), pivots_NK)[:, None]
    clamped_NK = xp.where(pivots_NK < 0, like(-1, pivots_NK), xp.minimum(pivots_NK, last_N1))
    return clamped_NK, int(((pivots_NK > last_N1) & (last_N1 >= 0)).sum())


def kernel(pivots_NK: Array, counts_NU: Array, sigma: float) -> Array:
    """m_k(t; pivot) of Eq 3 for each turn [N, K, U]: a Gaussian in turns, of mean one over the row's sampled tokens.

    The exponent is taken relative to the nearest turn that has tokens. That cancels in the scaling, but keeps a row
    whose tokens are far from its pivot, or a narrow kernel, from becoming 0 / 0.

    Args:
        pivots_NK: clamped turns; -1 for none, which gives 1 everywhere (stage 2's broadcast).
        counts_NU: tokens per turn.
        sigma: width in turns (App. B: 1).

    Returns:
        [N, K, U]; 0 for a row without tokens and at turns without tokens.
    """
    xp = namespace(counts_NU)
    held_N1U = (counts_NU > 0)[:, None, :]
    distance_NKU = (_turns(counts_NU) - like(pivots_NK, counts_NU)[:, :, None]) / sigma
    power_NKU = xp.where(held_N1U, -0.5 * distance_NKU**2, like(-np.inf, counts_NU))
    nearest_NK1 = xp.amax(power_NKU, 2)[:, :, None] if counts_NU.shape[1] else power_NKU
    some_NK1 = xp.where(nearest_NK1 > -np.inf, nearest_NK1, like(0.0, counts_NU))
    shape_NKU = xp.exp(power_NKU - some_NK1)
    tokens_N11 = counts_NU.sum(1)[:, None, None]
    total_NK1 = (shape_NKU * counts_NU[:, None, :]).sum(2)[:, :, None]
    scaled_NKU = shape_NKU * (tokens_N11 / xp.where(total_NK1 > 0, total_NK1, like(1.0, counts_NU)))
    return xp.where((pivots_NK < 0)[:, :, None], like(held_N1U, counts_NU), scaled_NKU)


def retry_mask(turn_of_token_NT: Array, retry_from_N: Array) -> Array:
    """R3L's mask [N, T]: True at sampled tokens of turns >= retry_from >= 0 (§3.3). It is applied after the scaling."""
    return turn_of_token_NT >= retry_from_N[:, None]


def train_from(retry_from_N: Array, parent_N: Array, mask_prefix: MaskPrefix) -> Array:
    """First turn of each row that is trained on [N].

    Args:
        retry_from_N: turns before it were replayed; 0 for an original.
        parent_N: row of the original that a retry came from; -1 for an original.
        mask_prefix: `retries` masks the shared prefix in the retry only (§3.3: "on retry rows"); `both` in the failed
            original, too (R3L's code): there up to the earliest of its retries.
    """
    xp = namespace(retry_from_N)
    if mask_prefix == "retries":
        return xp.where(parent_N >= 0, retry_from_N, like(0, retry_from_N))
    first = [int(r) if p >= 0 else 0 for r, p in zip(retry_from_N, parent_N, strict=True)]
    for parent in {int(p) for p in parent_N if p >= 0}:
        first[parent] = min(f for f, p in zip(first, parent_N, strict=True) if int(p) == parent)
    return like(first, retry_from_N)


def kept_turns(counts_NU: Array, train_from_N: Array | None) -> Array:
    """1.0 at turns that have tokens and are trained on, else 0.0 [N, U]."""
    held_NU = counts_NU > 0
    if train_from_N is not None:
        held_NU = held_NU & (_turns(counts_NU) >= like(train_from_N, counts_NU)[:, None])
    return like(held_NU, counts_NU)


def loss_weights(
    counts: Sequence[Array], train_from: Sequence[Array | None], aggregation: Aggregation
) -> tuple[Array, ...]:
    """Weight of a token of each turn in the policy loss, which is a plain weighted sum.

    Masked tokens have weight 0 and are in no denominator. Rows whose advantage is 0 keep their weight: they still take
    part in KL and entropy, or else the conditions would differ in regularisation.

    Args:
        counts: `counts_NU` of each task of the batch.
        train_from: of each task, first turn [N] that is trained on; None: 0.
        aggregation: `token_mean`: one over the unmasked tokens of the whole batch (verl's default; the paper is
            silent); `sequence_mean`: mean over the tokens of a row, then over all rows that have an unmasked token.

    Returns:
        weights_NU of each task. Weight times tokens sums to 1 over the batch, or to 0 if no token is left.
    """
    kept = [kept_turns(c, f) for c, f in zip(counts, train_from, strict=True)]
    per_row = [(c * k).sum(1) for c, k in zip(counts, kept, strict=True)]
    if aggregation == "token_mean":
        total = max(sum(float(n_N.sum()) for n_N in per_row), 1.0)
        return tuple(k / total for k in kept)
    rows = max(sum(int((n_N > 0).sum()) for n_N in per_row), 1)
    return tuple(
        k / (namespace(n_N).where(n_N > 0, n_N, like(1.0, n_N))[:, None] * rows)
        for k, n_N in zip(kept, per_row, strict=True)
    )
