"""Key-value cache and decoding steps of the fast path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from racelab.experiments.backends.local import attention, kernels
from racelab.experiments.backends.local.fast import FastModel
from racelab.experiments.backends.local.packing import pack

_GROW = 64  # slots added when the cache is full
_SMALL = 1 << 25  # a cache of at most this many elements is compacted whenever a row ends
_COMPACT = 0.8  # a larger one when at most this share of its rows is still live


class FastStepper:
    """Decodes rows whose prefixes are right-aligned, so that all rows write to the same cache slot.

    keys [layers, rows, kv, d, slots] are held transposed (the product with one query is then twice as fast in
    bf16), values [layers, rows, kv, slots, d]; mask [rows, slots] hides the slots left of a prefix. The cache
    grows by blocks. Finished rows leave it at once if it is small; in a large one they are carried along
    until a fifth of the rows are done, because every compaction copies the cache.
    """

    def __init__(self, model: FastModel) -> None:
        """Decode with `model`'s present weights."""
        self._m = model

    def start(self, prefixes: Sequence[Sequence[int]], owner: Tensor, room: int) -> Tensor:
        """See `Stepper.start`."""
        m, s = self._m, self._m.spec
        lengths = [len(p) for p in prefixes]
        self._used, self._limit = max(lengths), max(lengths) + room
        slots = min(self._used + _GROW, self._limit)
        shape = (s.layers, len(owner), s.kv_heads)
        self._k = torch.zeros(*shape, s.head_dim, slots, dtype=m.dtype, device=m.device)
        self._v = torch.zeros(*shape, slots, s.head_dim, dtype=m.dtype, device=m.device)
        owner = owner.to(m.device)
        size = torch.tensor(lengths, device=m.device)
        self._position = size[owner]
        self._index = torch.arange(len(owner), device=m.device)
        hidden = torch.arange(self._limit, device=m.device)[None] < (self._used - self._position)[:, None]
        self._mask = torch.zeros(hidden.shape, dtype=m.dtype, device=m.device).masked_fill_(
            hidden, float("-inf")
        )
        # every prefix as one sample behind its own first token: all its rows run, none is shared
        batch = pack(
            [([p[0]], [[*p[1:], 0]]) for p in prefixes], heads=s.heads, dtype=m.dtype, device=m.device
        )
        ends = size.cumsum(0)
        rows_of = [(owner == j).nonzero()[:, 0] for j in range(len(prefixes))]
        cos, sin = m.rotary(batch.positions)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for j, (end, n) in enumerate(zip(ends.tolist(), lengths, strict=True)):
                slot = slice(self._used - n, self._used)
                self._k[i, rows_of[j], :, :, slot] = k[end - n : end].permute(1, 2, 0)
                self._v[i, rows_of[j], :, slot] = v[end - n : end].transpose(0, 1)
            return attention.attend(q, k, v, batch.buckets, keep=False)[0]

        x = m.emb[batch.ids]
        for i in range(s.layers):
            x = m.block(i, x, cos, sin, attend)
        logits = m.head(kernels.rms_norm(x[ends - 1], m.norm, s.eps))
        return logits[owner]

    def step(self, tokens: Tensor) -> Tensor:
        """See `Stepper.step`."""
        m, s = self._m, self._m.spec
        if self._used == self._v.shape[3]:
            self._grow()
        if len(tokens) < len(self._position):  # finished rows are still in the cache: feed them anything
            tokens = torch.zeros_like(self._position).index_copy_(0, self._index, tokens)
        n, slot = len(tokens), self._used
        self._used += 1
        mask = self._mask[:, None, None, : self._used]
        cos, sin = m.rotary(self._position)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._k[i], self._v[i]
            keys[..., slot], values[:, :, slot] = k, v
            q = (q * s.head_dim**-0.5).view(n, s.kv_heads, s.group, s.head_dim)
            scores = torch.matmul(q, keys[..., : self._used]).add_(mask)
            out = torch.matmul(torch.softmax(scores, -1), values[:, :, : self._used])
            return out.view(n, s.heads * s.head_dim)

        x = m.emb[tokens]
        for i in range(s.layers):
            x = m.block(i, x, cos, sin, attend)
        self._position = self._position + 1
        if len(self._index) < n:
            x = x[self._index]
        return m.head(kernels.rms_norm(x, m.norm, s.eps))

    def keep(self, rows: Tensor) -> None:
        """See `Stepper.keep`."""
        self._index = self._index[rows]
        if self._k.numel() > _SMALL and len(self._index) > _COMPACT * len(self._position):
            return
        used = slice(0, self._used)
        self._k, self._v = self._k[:, self._index, :, :, used], self._v[:, self._index, :, used]
        self._mask, self._position = self._mask[self._index], self._position[self._index]
        self._index = torch.arange(len(self._index), device=rows.device)

    def _grow(self) -> None:
        """More slots: a half more, at least a block, never beyond what the longest row may need."""
        extra = min(max(_GROW, self._used // 2), self._limit - self._used)
        self._k, self._v = F.pad(self._k, (0, extra)), F.pad(self._v, (0, 0, 0, extra))
