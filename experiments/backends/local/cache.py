"""Key-value cache and decoding steps of the fast path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """Decodes rows that share prefixes: each prefix is computed, stored and read once for all its rows.

    Two caches, with keys transposed (the product with few queries is then twice as fast in bf16):

        prefix   keys [layers, J, kv, d, P], values [layers, J, kv, P, d], shorter prefixes masked
        own      keys [layers, rows, kv, d, slots], values [layers, rows, kv, slots, d]; grows by blocks

    All rows have generated equally many tokens: they write to the same slot and the own part needs no mask.
    For the prefix part the rows of a request sit side by side in `J x seats` places; places may be empty.
    Finished rows leave at once if the own cache is small; in a large one they are carried along until a fifth
    of the rows are done, because every compaction copies it.
    """

    def __init__(self, model: FastModel) -> None:
        """Decode with `model`'s present weights."""
        self._m = model

    def start(self, prefixes: Sequence[Sequence[int]], owner: Tensor, room: int) -> Tensor:
        """See `Stepper.start`."""
        m, s = self._m, self._m.spec
        lengths = [len(p) for p in prefixes]
        count, depth, rows = len(prefixes), max(lengths), len(owner)
        like: dict[str, Any] = {"dtype": m.dtype, "device": m.device}
        self._prefix_k = torch.zeros(s.layers, count, s.kv_heads, s.head_dim, depth, **like)
        self._prefix_v = torch.zeros(s.layers, count, s.kv_heads, depth, s.head_dim, **like)
        self._used, self._limit = 0, room
        slots = min(_GROW, room)
        self._k = torch.zeros(s.layers, rows, s.kv_heads, s.head_dim, slots, **like)
        self._v = torch.zeros(s.layers, rows, s.kv_heads, slots, s.head_dim, **like)
        size = torch.tensor(lengths, device=m.device)
        hidden = torch.arange(depth, device=m.device)[None] >= size[:, None]
        self._mask = torch.zeros(count, depth, **like).masked_fill_(hidden, float("-inf"))[:, None, None]
        owner = owner.to(m.device)
        self._owner, self._position = owner, size[owner]
        self._live = torch.arange(rows, device=m.device)
        self._take_seats()
        return self._prefill(prefixes, size.cumsum(0))[owner]

    def _prefill(self, prefixes: Sequence[Sequence[int]], ends: Tensor) -> Tensor:
        """Run all prefixes in one packed pass, filling the prefix cache; logits [J, vocab]."""
        m, s = self._m, self._m.spec
        # every prefix as one sample behind its own first token: all its rows run, none is shared
        batch = pack(
            [([p[0]], [[*p[1:], 0]]) for p in prefixes], heads=s.heads, dtype=m.dtype, device=m.device
        )
        cos, sin = m.rotary(batch.positions)
        spans = [(end - len(p), end) for end, p in zip(ends.tolist(), prefixes, strict=True)]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for j, (a, b) in enumerate(spans):
                self._prefix_k[i, j, :, :, : b - a] = k[a:b].permute(1, 2, 0)
                self._prefix_v[i, j, :, : b - a] = v[a:b].transpose(0, 1)
            return attention.attend(q, k, v, batch.buckets, keep=False)[0]

        x = m.emb[batch.ids]
        for i in range(s.layers):
            x = m.block(i, x, cos, sin, attend)
        return m.head(kernels.rms_norm(x[ends - 1], m.norm, s.eps))

    def _take_seats(self) -> None:
        """Give every row a place beside the rows of its request."""
        counts = torch.bincount(self._owner, minlength=self._mask.shape[0])
        self._seats = int(counts.max())
        first = counts.cumsum(0) - counts
        rank = torch.arange(len(self._owner), device=self._owner.device) - first[self._owner]
        place = self._owner * self._seats + rank
        full = len(place) == self._seats * len(counts)
        self._place = None if full else place  # rows are sorted by request, so full places are in row order
        self._sitter = torch.zeros(self._seats * len(counts), dtype=torch.long, device=place.device)
        self._sitter[place] = torch.arange(len(place), device=place.device)

    def _gather(self, x: Tensor) -> Tensor:
        """Rows [rows, kv, group, e] -> [J, kv, seats·group, e]."""
        x = x if self._place is None else x[self._sitter]
        _, kv, group, e = x.shape
        x = x.view(-1, self._seats, kv, group, e).transpose(1, 2)
        return x.reshape(-1, kv, self._seats * group, e)

    def _spread(self, x: Tensor, group: int) -> Tensor:
        """Undo `_gather`."""
        count, kv, _, e = x.shape
        x = x.view(count, kv, self._seats, group, e).transpose(1, 2).reshape(-1, kv, group, e)
        return x if self._place is None else x[self._place]

    def step(self, tokens: Tensor) -> Tensor:
        """See `Stepper.step`."""
        m, s = self._m, self._m.spec
        if self._used == self._v.shape[3]:
            self._grow()
        if len(tokens) < len(self._position):  # finished rows are still in the cache: feed them anything
            tokens = torch.zeros_like(self._position).index_copy_(0, self._live, tokens)
        n, slot, depth = len(tokens), self._used, self._mask.shape[-1]
        self._used += 1
        cos, sin = m.rotary(self._position)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._k[i], self._v[i]
            keys[..., slot], values[:, :, slot] = k, v
            q = (q * s.head_dim**-0.5).view(n, s.kv_heads, s.group, s.head_dim)
            shared = torch.matmul(self._gather(q), self._prefix_k[i]).add_(self._mask)
            own = torch.matmul(q, keys[..., : self._used])
            p = torch.softmax(torch.cat([self._spread(shared, s.group), own], -1), -1)
            out = torch.matmul(self._gather(p[..., :depth]), self._prefix_v[i])
            own = torch.matmul(p[..., depth:], values[:, :, : self._used])
            return own.add_(self._spread(out, s.group)).view(n, s.heads * s.head_dim)

        x = m.emb[tokens]
        for i in range(s.layers):
            x = m.block(i, x, cos, sin, attend)
        self._position = self._position + 1
        if len(self._live) < n:
            x = x[self._live]
        return m.head(kernels.rms_norm(x, m.norm, s.eps))

    def keep(self, rows: Tensor) -> None:
        """See `Stepper.keep`."""
        self._live = self._live[rows]
        if self._k.numel() > _SMALL and len(self._live) > _COMPACT * len(self._position):
            return
        used = slice(0, self._used)
        self._k, self._v = self._k[:, self._live, :, :, used], self._v[:, self._live, :, used]
        self._position, owner = self._position[self._live], self._owner[self._live]
        left, self._owner = torch.unique(owner, return_inverse=True)
        if len(left) < self._mask.shape[0]:  # all rows of some request are done: its prefix goes too
            self._prefix_k, self._prefix_v = self._prefix_k[:, left], self._prefix_v[:, left]
            self._mask = self._mask[left]
        self._live = torch.arange(len(self._live), device=rows.device)
        self._take_seats()

    def _grow(self) -> None:
        """More slots: a half more, at least a block, never beyond what the longest row may need."""
        extra = min(max(_GROW, self._used // 2), self._limit - self._used)
        self._k, self._v = F.pad(self._k, (0, extra)), F.pad(self._v, (0, 0, 0, extra))
