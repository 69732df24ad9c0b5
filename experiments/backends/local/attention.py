"""Grouped-query attention over the buckets of a packed batch, and its gradient.

q [n, heads, d], k and v [n, kv_heads, d] are flat. The query heads that share a key-value head become extra
query rows, so keys are never repeated. Scores are formed tile by tile; their softmax is kept for the gradient
only where it is small, and formed again otherwise, so memory grows with tokens and not with tokens squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from racelab.experiments.backends.local.packing import Bucket

_KEEP_ELEMENTS = 1 << 21  # softmax tensors up to this size are kept for the gradient


@dataclass(slots=True)
class Saved:
    """What the gradient of one bucket needs."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor | None


def _rows(x: Tensor, b: Bucket, kv: int) -> Tensor:
    """Flat [n, heads, d] -> [b, kv, group·T, d]: the heads of a group stacked as query rows."""
    heads, d = x.shape[1], x.shape[2]
    x = x.index_select(0, b.own).view(b.size, b.length, kv, heads // kv, d)
    return x.permute(0, 2, 3, 1, 4).reshape(b.size, kv, heads // kv * b.length, d)


def _keys(x: Tensor, b: Bucket) -> Tensor:
    """Flat [n, kv, d] -> [b, kv, P + T, d]: prefix, then own tokens."""
    kv, d = x.shape[1], x.shape[2]
    out = torch.empty(b.size, kv, b.prefix_length + b.length, d, dtype=x.dtype, device=x.device)
    if b.prefix_length:
        shared = x.index_select(0, b.prefix).view(-1, b.prefix_length, kv, d)
        out[:, :, : b.prefix_length] = shared.transpose(1, 2).index_select(0, b.member)
    out[:, :, b.prefix_length :] = x.index_select(0, b.own).view(b.size, b.length, kv, d).transpose(1, 2)
    return out


def _softmax(q: Tensor, k: Tensor, b: Bucket, tile: tuple[int, int, int, int]) -> Tensor:
    """Attention weights of one tile [rows, kv, group·t, keys]; q is already scaled."""
    r0, r1, t0, t1 = tile
    end = b.prefix_length + t1
    kv, group = q.shape[1], q.shape[2] // (t1 - t0)
    score = torch.matmul(q, k[r0:r1, :, :end].transpose(-1, -2))
    score.view(r1 - r0, kv, group, t1 - t0, end).add_(b.mask[r0:r1, None, None, t0:t1, :end])
    return torch.softmax(score, -1)


def _cut(x: Tensor, b: Bucket, tile: tuple[int, int, int, int]) -> Tensor:
    """The queries of one tile out of [b, kv, group·T, d]."""
    r0, r1, t0, t1 = tile
    if t1 - t0 == b.length:
        return x[r0:r1]
    kv, d = x.shape[1], x.shape[3]
    return x[r0:r1].view(r1 - r0, kv, -1, b.length, d)[:, :, :, t0:t1].reshape(r1 - r0, kv, -1, d)


def _put(out: Tensor, part: Tensor, b: Bucket, tile: tuple[int, int, int, int]) -> None:
    """Inverse of `_cut`."""
    r0, r1, t0, t1 = tile
    kv, d = out.shape[1], out.shape[3]
    view = out[r0:r1].view(r1 - r0, kv, -1, b.length, d)
    view[:, :, :, t0:t1] = part.view(r1 - r0, kv, -1, t1 - t0, d)


def _scatter(out: Tensor, x: Tensor, b: Bucket) -> None:
    """Write [b, T, ...] to its flat rows, leaving padding out."""
    flat = x.reshape(b.size * b.length, *out.shape[1:])
    if b.valid is None:
        out[b.own] = flat
    else:
        out[b.own[b.valid]] = flat[b.valid]


def attend(
    q: Tensor, k: Tensor, v: Tensor, buckets: Sequence[Bucket], *, keep: bool
) -> tuple[Tensor, list[Saved]]:
    """softmax(q kᵀ / sqrt(d)) v for every bucket.

    Returns:
        [n, heads·d], and (with `keep`) what `attend_grad` needs.
    """
    n, heads, d = q.shape
    kv = k.shape[1]
    out = torch.empty(n, heads, d, dtype=q.dtype, device=q.device)
    saved: list[Saved] = []
    for b in buckets:
        qb, kb, vb = _rows(q, b, kv).mul_(d**-0.5), _keys(k, b), _keys(v, b)
        p: Tensor | None = None
        if len(b.tiles) == 1:
            p = _softmax(qb, kb, b, b.tiles[0])
            ob = torch.matmul(p, vb)
        else:
            ob = torch.empty_like(qb)
            for tile in b.tiles:
                part = _softmax(_cut(qb, b, tile), kb, b, tile)
                values = vb[tile[0] : tile[1], :, : b.prefix_length + tile[3]]
                _put(ob, torch.matmul(part, values), b, tile)
        _scatter(out, ob.view(b.size, kv, heads // kv, b.length, d).permute(0, 3, 1, 2, 4), b)
        if keep:
            saved.append(Saved(qb, kb, vb, p if p is not None and p.numel() <= _KEEP_ELEMENTS else None))
    return out.view(n, heads * d), saved


def attend_grad(
    g: Tensor, saved: Sequence[Saved], buckets: Sequence[Bucket], heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend` with respect to q, k, v, flat as they came in; g [n, heads·d]."""
    kv, d = saved[0].k.shape[1], saved[0].k.shape[3]
    n = g.shape[0]
    g = g.view(n, heads, d)
    dq = torch.empty(n, heads, d, dtype=g.dtype, device=g.device)
    dk, dv = (torch.zeros(n, kv, d, dtype=g.dtype, device=g.device) for _ in range(2))
    for b, s in zip(buckets, saved, strict=True):
        gb = _rows(g, b, kv)
        if b.valid is not None:  # padding rows repeat a real row: they must carry no gradient
            dead = torch.ones(b.size * b.length, dtype=torch.bool, device=g.device)
            dead[b.valid] = False
            gb.view(b.size, kv, -1, b.length, d).masked_fill_(dead.view(b.size, 1, 1, b.length, 1), 0.0)
        dqb, dkb, dvb = _bucket_grad(gb, s, b)
        dqb.mul_(d**-0.5)
        _scatter(dq, dqb.view(b.size, kv, heads // kv, b.length, d).permute(0, 3, 1, 2, 4), b)
        for out, part in ((dk, dkb), (dv, dvb)):
            _add_keys(out, part, b)
    return dq, dk, dv


def _bucket_grad(gb: Tensor, s: Saved, b: Bucket) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one bucket in its own layout."""
    if len(b.tiles) == 1:
        p = s.p if s.p is not None else _softmax(s.q, s.k, b, b.tiles[0])
        dv = torch.matmul(p.transpose(-1, -2), gb)
        ds = torch._softmax_backward_data(torch.matmul(gb, s.v.transpose(-1, -2)), p, -1, p.dtype)
        return torch.matmul(ds, s.k), torch.matmul(ds.transpose(-1, -2), s.q), dv
    dq = torch.empty_like(s.q)
    dk, dv = torch.zeros(s.k.shape, device=gb.device), torch.zeros(s.v.shape, device=gb.device)
    for tile in b.tiles:
        r0, r1, _, t1 = tile
        end = b.prefix_length + t1
        q, g, k, v = _cut(s.q, b, tile), _cut(gb, b, tile), s.k[r0:r1, :, :end], s.v[r0:r1, :, :end]
        p = _softmax(q, s.k, b, tile)
        dv[r0:r1, :, :end] += torch.matmul(p.transpose(-1, -2), g)
        ds = torch._softmax_backward_data(torch.matmul(g, v.transpose(-1, -2)), p, -1, p.dtype)
        _put(dq, torch.matmul(ds, k), b, tile)
        dk[r0:r1, :, :end] += torch.matmul(ds.transpose(-1, -2), q)
    return dq, dk.to(gb.dtype), dv.to(gb.dtype)


def _add_keys(out: Tensor, part: Tensor, b: Bucket) -> None:
    """Add [b, kv, P + T, d] to flat rows: own rows once, each prefix the sum over its continuations."""
    kv, d = out.shape[1], out.shape[2]
    own = part[:, :, b.prefix_length :].transpose(1, 2)
    if b.valid is None:
        out[b.own] += own.reshape(-1, kv, d)
    else:
        out[b.own[b.valid]] += own.reshape(-1, kv, d)[b.valid]
    if not b.prefix_length:
        return
    count = b.prefix.shape[0] // b.prefix_length
    pick = torch.zeros(count, b.size, dtype=torch.float32, device=out.device)
    pick[b.member, torch.arange(b.size, device=out.device)] = 1.0
    shared = part[:, :, : b.prefix_length].transpose(1, 2).reshape(b.size, -1).float()
    summed = (pick @ shared).to(out.dtype).view(-1, kv, d)
    # Padding columns repeat a real row but are masked, so their gradient is zero; accumulate to be safe.
    out.index_put_((b.prefix,), summed, accumulate=True)
