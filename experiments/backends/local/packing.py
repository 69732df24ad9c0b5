"""Laying groups of sequences out without padding, each prefix once.

The flat order is: the first P-1 tokens of every prefix, then, for every sample, the inputs that predict its
tokens (the prefix's last token and all of the sample but its last token). Everything but attention works on
the flat rows. Attention works on `Bucket`s: rectangles of sequences of similar length whose keys are a shared
prefix and their own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Group = tuple[Sequence[int], Sequence[Sequence[int]]]

_TILE_ELEMENTS = 1 << 22  # largest score tensor of one attention tile
_TILE_QUERIES = 128  # queries per tile, so that long causal tiles skip the keys they cannot see


@dataclass(frozen=True, slots=True)
class Bucket:
    """b sequences of at most T tokens, whose keys are P prefix tokens and their own T.

    Attributes:
        own: flat rows of the sequences [b·T]; rows past a sequence's end repeat its last row.
        valid: positions in `own` that are real, or None if all are.
        prefix: flat rows of the J distinct prefixes [J·P] (padded likewise).
        member: which of the J each sequence continues [b].
        mask: [b, T, P + T], 0 where a query may look and -inf elsewhere, in the compute type.
        tiles: (first sequence, last, first query, last) pieces worked on one at a time.
    """

    size: int
    length: int
    prefix_length: int
    own: Tensor
    valid: Tensor | None
    prefix: Tensor
    member: Tensor
    mask: Tensor
    tiles: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """A set of groups laid out flat.

    Attributes:
        ids: token ids [n].
        positions: [n].
        rows: flat rows that predict a sample token, in sample order [tokens].
        targets: the token each of them predicts [tokens].
        lengths: tokens of each sample, group by group.
        buckets: attention pieces; together they own every flat row exactly once.
    """

    ids: Tensor
    positions: Tensor
    rows: Tensor
    targets: Tensor
    lengths: tuple[int, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    length: int
    prefix_start: int
    prefix_length: int


def pack(groups: Sequence[Group], *, heads: int, dtype: torch.dtype, device: str) -> Packed:
    """Lay `groups` of (prefix, samples) out. Prefixes and samples must not be empty."""
    ids: list[int] = []
    positions: list[int] = []
    prefixes: list[_Span] = []
    for prefix, _ in groups:
        prefixes.append(_Span(len(ids), len(prefix) - 1, 0, 0))
        ids += prefix[:-1]
        positions += range(len(prefix) - 1)
    samples: list[_Span] = []
    targets: list[int] = []
    first = len(ids)
    for (prefix, tails), shared in zip(groups, prefixes, strict=True):
        for tail in tails:
            samples.append(_Span(len(ids), len(tail), shared.start, shared.length))
            ids += [prefix[-1], *tail[:-1]]
            positions += range(len(prefix) - 1, len(prefix) - 1 + len(tail))
            targets += tail
    spans = [*_similar([s for s in prefixes if s.length]), *_similar(samples)]
    return Packed(
        ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        rows=torch.arange(first, len(ids), device=device),
        targets=torch.tensor(targets, device=device),
        lengths=tuple(s.length for s in samples),
        buckets=tuple(_bucket(s, heads, dtype, device) for s in spans),
    )


def _similar(spans: Sequence[_Span]) -> list[list[_Span]]:
    """Split into runs of similar shape: at most a quarter (or 16 tokens) longer than the shortest."""
    runs: list[list[_Span]] = []
    for span in sorted(spans, key=lambda s: (s.length, s.prefix_length, s.start)):
        if runs:
            least = runs[-1][0]
            close = span.length <= max(least.length * 1.25, least.length + 16)
            near = abs(span.prefix_length - least.prefix_length) <= max(32, least.prefix_length // 3)
            if close and near:
                runs[-1].append(span)
                continue
        runs.append([span])
    return runs


def _bucket(spans: Sequence[_Span], heads: int, dtype: torch.dtype, device: str) -> Bucket:
    """Index tensors and mask of one rectangle."""
    spans = sorted(spans, key=lambda s: s.start)
    starts = torch.tensor([s.start for s in spans])
    lengths = torch.tensor([s.length for s in spans])
    size, width = len(spans), int(lengths.max())
    step = torch.arange(width)
    own = starts[:, None] + torch.minimum(step[None], lengths[:, None] - 1)
    real = step[None] < lengths[:, None]
    distinct = sorted({(s.prefix_start, s.prefix_length) for s in spans if s.prefix_length})
    depth = max((n for _, n in distinct), default=0)
    place = {start: j for j, (start, _) in enumerate(distinct)}
    member = torch.tensor([place.get(s.prefix_start, 0) if s.prefix_length else 0 for s in spans])
    column = torch.arange(depth)
    table = torch.tensor([[a + min(c, n - 1) for c in range(depth)] for a, n in distinct], dtype=torch.long)
    seen = column[None] < torch.tensor([s.prefix_length for s in spans])[:, None]
    allowed = torch.cat(
        [seen[:, None].expand(size, width, depth), (step[:, None] >= step[None]).expand(size, width, width)],
        -1,
    )
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))
    return Bucket(
        size=size,
        length=width,
        prefix_length=depth,
        own=own.flatten().to(device),
        valid=None if bool(real.all()) else real.flatten().nonzero()[:, 0].to(device),
        prefix=table.flatten().to(device),
        member=member.to(device),
        mask=mask.to(device),
        tiles=_tiles(size, width, depth, heads),
    )


def _tiles(size: int, width: int, depth: int, heads: int) -> tuple[tuple[int, int, int, int], ...]:
    """Cut a bucket so that no score tensor exceeds the limit."""
    block = (
        width
        if heads * width * (width + depth) <= _TILE_ELEMENTS and width <= 2 * _TILE_QUERIES
        else _TILE_QUERIES
    )
    rows = max(1, _TILE_ELEMENTS // (heads * min(block, width) * (width + depth)))
    return tuple(
        (r, min(r + rows, size), t, min(t + block, width))
        for r in range(0, size, rows)
        for t in range(0, width, block)
    )
