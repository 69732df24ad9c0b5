"""Weights and forward pass of the grid transformer, on chunks of token trees.

A decoder-only transformer (pre-norm, no biases, exact GELU) whose input is the sum of five embeddings: token, hint,
position in the sequence, and the row and column of the cell that a token speaks of. Map cells and agent positions
share the last two; without them training stops at the level of a walker that cannot see holes.

Sequences that begin alike are computed once. A chunk holds the nodes of B trees: a node is a token with everything
before it, and it attends to its ancestors and itself. Linear layers run on the n nodes without padding; attention
runs on [B, M] slots. Letters of the shapes: B trees, M slots of a tree, n nodes, w nodes whose output is wanted,
D width, H heads.

This module imports torch: import it lazily.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from racelab.experiments.models.grid_tokens import HINTS, GridTokens

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class GridSpec:
    """Sizes of the model.

    Attributes:
        side: of the canvas.
        width: D.
        layers: blocks.
        heads: H, divides the width.
        max_turns: longest episode; sets the number of position embeddings.
    """

    side: int
    width: int
    layers: int
    heads: int
    max_turns: int

    @property
    def tokens(self) -> GridTokens:
        """The vocabulary."""
        return GridTokens(self.side)

    @property
    def window(self) -> int:
        """Longest sequence: header, then a position and an action per turn, and what the last action led to."""
        return self.tokens.header + 2 * self.max_turns + 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight, in the order in which they are drawn."""
        d, t = self.width, self.tokens
        shapes: dict[str, tuple[int, ...]] = {
            "token": (t.vocab, d),
            "hint": (HINTS, d),
            "position": (self.window, d),
            "row": (self.side + 1, d),
            "column": (self.side + 1, d),
        }
        for i in range(self.layers):
            shapes |= {
                f"layers.{i}.norm_attention": (d,),
                f"layers.{i}.qkv": (3 * d, d),
                f"layers.{i}.out": (d, d),
                f"layers.{i}.norm_mlp": (d,),
                f"layers.{i}.up": (4 * d, d),
                f"layers.{i}.down": (d, 4 * d),
            }
        return shapes | {"norm": (d,), "head": (t.vocab, d)}


def draw_weights(spec: GridSpec, rng: torch.Generator) -> dict[str, Tensor]:
    """Fresh weights: embeddings normal with std 0.02, matrices uniform within 1/sqrt(inputs), norms 1."""
    made = {}
    for name, shape in spec.shapes().items():
        if len(shape) == 1:
            made[name] = torch.ones(shape)
        elif name in ("token", "hint", "position", "row", "column"):
            made[name] = torch.randn(shape, generator=rng) * 0.02
        else:
            bound = 1 / math.sqrt(shape[1])
            made[name] = torch.empty(shape).uniform_(-bound, bound, generator=rng)
    return made


@dataclass(frozen=True, slots=True)
class Chunk:
    """Nodes that are computed together.

    Attributes:
        ids: with hints [n].
        position: in the sequence [n].
        cell: cell of the canvas that the token speaks of, -1: none [n].
        slot: tree * M + place of the node [n], each once.
        trees: B.
        places: M.
        bias: 0 where a slot may look and -inf elsewhere [B, 1, M, earlier slots + M].
        wanted: nodes whose output is needed [w].
    """

    ids: Tensor
    position: Tensor
    cell: Tensor
    slot: Tensor
    trees: int
    places: int
    bias: Tensor
    wanted: Tensor


class Cache:
    """Keys and values of earlier chunks, per layer [B, H, capacity, D/H].

    Attributes:
        used: columns that are filled.
    """

    def __init__(self, spec: GridSpec, trees: int, capacity: int) -> None:
        """Empty."""
        shape = (2, trees, spec.heads, capacity, spec.width // spec.heads)
        self._layers = [torch.empty(shape) for _ in range(spec.layers)]
        self.used = 0

    def put(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a chunk's [B, H, M, D/H] behind the earlier ones; all of them, views."""
        end = self.used + key.shape[2]
        both = self._layers[layer]
        both[0, :, :, self.used : end] = key
        both[1, :, :, self.used : end] = value
        return both[0, :, :, :end], both[1, :, :, :end]

    def keep(self, trees: Tensor) -> None:
        """Drops all trees but these."""
        self._layers = [both.index_select(1, trees) for both in self._layers]


def run(spec: GridSpec, w: Weights, chunk: Chunk, cache: Cache | None = None) -> Tensor:
    """Logits [wanted, vocab] of a chunk; its keys and values go into the cache, if there is one."""
    x = _embed(spec, w, chunk)
    slot = chunk.slot
    for i in range(spec.layers):
        name = f"layers.{i}."
        h = _norm(x, w[name + "norm_attention"])
        if i < spec.layers - 1:
            q, k, v = F.linear(h, w[name + "qkv"]).chunk(3, -1)
        else:  # of the last layer only the wanted nodes are read
            wq, wkv = w[name + "qkv"][: spec.width], w[name + "qkv"][spec.width :]
            k, v = F.linear(h, wkv).chunk(2, -1)
            x, h, slot = x[chunk.wanted], h[chunk.wanted], slot[chunk.wanted]
            q = F.linear(h, wq)
        if not len(slot):  # a header alone: keys and values are all that is needed
            if cache is not None:
                cache.put(i, _spread(spec, chunk, k, chunk.slot), _spread(spec, chunk, v, chunk.slot))
            break
        x = x + F.linear(_attend(spec, chunk, q, k, v, slot, cache, i), w[name + "out"])
        x = x + F.linear(F.gelu(F.linear(_norm(x, w[name + "norm_mlp"]), w[name + "up"])), w[name + "down"])
    if cache is not None:
        cache.used += chunk.places
    return F.linear(_norm(x, w["norm"]), w["head"])


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight)


def _embed(spec: GridSpec, w: Weights, chunk: Chunk) -> Tensor:
    """Sum of the five embeddings [n, D]."""
    vocab, side = spec.tokens.vocab, spec.side
    none = chunk.cell < 0
    row = torch.where(none, side, torch.div(chunk.cell, side, rounding_mode="floor"))
    column = torch.where(none, side, chunk.cell % side)
    return (
        F.embedding(chunk.ids % vocab, w["token"])
        + F.embedding(torch.div(chunk.ids, vocab, rounding_mode="floor"), w["hint"])
        + F.embedding(chunk.position, w["position"])
        + F.embedding(row, w["row"])
        + F.embedding(column, w["column"])
    )


def _spread(spec: GridSpec, chunk: Chunk, x: Tensor, slot: Tensor) -> Tensor:
    """Nodes [n, D] to their slots [B, H, M, D/H]; empty slots are 0."""
    padded = x.new_zeros(chunk.trees * chunk.places, x.shape[-1]).index_copy(0, slot, x)
    return padded.view(chunk.trees, chunk.places, spec.heads, -1).transpose(1, 2)


def _attend(
    spec: GridSpec,
    chunk: Chunk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot: Tensor,
    cache: Cache | None,
    layer: int,
) -> Tensor:
    """Attention of the nodes at `slot` to what their bias lets them see [len(slot), D]."""
    query = _spread(spec, chunk, q * (spec.width // spec.heads) ** -0.5, slot)
    key, value = _spread(spec, chunk, k, chunk.slot), _spread(spec, chunk, v, chunk.slot)
    if cache is not None:
        key, value = cache.put(layer, key, value)
    share = (query @ key.transpose(-1, -2) + chunk.bias).softmax(-1)
    seen = (share @ value).transpose(1, 2).reshape(chunk.trees * chunk.places, -1)
    return seen.index_select(0, slot)
