"""Choosing the next token: temperature, nucleus, inverse-CDF draws from given uniforms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 128  # vocabulary entries per block of the two-level search


def choose(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row.

    Args:
        logits: [rows, vocab], any type; overwritten if float32.
        temperature: [rows] float32; 0 takes the most likely token.
        top_p: [rows] float32; the smallest set of tokens with at least this mass is kept.
        uniform: [rows] float64 in [0, 1), one draw per row.

    Returns:
        tokens [rows] and their log-probs [rows] float32: under the tempered and truncated distribution the
        token was drawn from, and under the plain softmax (temperature 1) for greedy rows.
    """
    x = logits.float()
    greedy = temperature == 0
    best = x.argmax(-1) if bool(greedy.any()) else None
    if bool((temperature != 1).any()):
        x = x / torch.where(greedy, 1.0, temperature)[:, None]
    e = x.sub_(x.amax(-1, keepdim=True)).exp_()
    cut = (top_p < 1) & ~greedy
    if bool(cut.any()):
        rows = cut.nonzero()[:, 0]
        e[rows] = _nucleus(e[rows], top_p[rows])
    tokens, total = _inverse_cdf(e, uniform)
    if best is not None:
        tokens = torch.where(greedy, best, tokens)
    chosen = e.gather(1, tokens[:, None])[:, 0].double()
    return tokens, (chosen / total).log().float()


def _nucleus(e: Tensor, top_p: Tensor) -> Tensor:
    """Zero all but the smallest set of largest entries whose share reaches top_p (at least one)."""
    ordered, index = e.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered[before >= top_p[:, None] * ordered.sum(-1, keepdim=True)] = 0.0
    return torch.zeros_like(e).scatter_(1, index, ordered)


def _inverse_cdf(e: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw in proportion to e [rows, vocab] >= 0: first the block, then the token inside it.

    Returns:
        tokens [rows] and the row sums [rows] float64. A token of weight 0 is never drawn.
    """
    rows, vocab = e.shape
    if vocab % _BLOCK:
        e = F.pad(e, (0, _BLOCK - vocab % _BLOCK))
    blocks = e.view(rows, -1, _BLOCK)
    edges = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = edges[:, -1:]
    aim = torch.minimum(uniform[:, None] * total, total * (1 - 1e-12))
    block = torch.searchsorted(edges, aim, right=True)
    below = torch.where(block > 0, edges.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inner = blocks.gather(1, block[:, :, None].expand(rows, 1, _BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    aim = torch.minimum((aim - below).clamp_(min=0.0), inner[:, -1:] * (1 - 1e-12))
    token = torch.searchsorted(inner, aim, right=True)
    return (block * _BLOCK + token)[:, 0], total[:, 0]
