"""Groups of grid sequences laid out as trees, so that whatever begins alike is computed once.

All samples that were played on the same board share the header, and those that took the same first turns share them
too. The log-probs of a shared node are read once per sample, so gradients are exactly those of separate sequences.

This module imports torch: import it lazily.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from racelab.experiments.backends.local.grid_net import Chunk, GridSpec
from racelab.experiments.backends.local.packing import Group
from racelab.experiments.models.grid_tokens import POS

_MOST_NODES = 120  # a tree that has grown to this is left, and the board gets another: attention is quadratic
_CLOSE = 1.6  # trees of one chunk are at most so many times as large as its smallest


@dataclass(slots=True)
class _Tree:
    """One board's nodes after the header. Node -1 is the last of the header."""

    header: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    children: dict[int, int] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    flat: list[int] = field(default_factory=list)

    def child(self, at: int, token: int, most: int) -> int:
        """The node of `token` after node `at`; made if need be. Ids are below `most`."""
        key = at * most + token
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = len(self.ids)
            self.ids.append(token)
            self.parents.append(at)
            self.depths.append(self.depths[at] + 1 if at >= 0 else 0)
        return found


@dataclass(frozen=True, slots=True)
class Planted:
    """A chunk of trees, and the sample tokens that it predicts.

    Attributes:
        chunk: its wanted nodes are those that predict a token.
        rows: place of the predicting node among the wanted ones [tokens].
        targets: the token without hint [tokens].
        flat: which of all sample tokens, in the order of the groups [tokens].
    """

    chunk: Chunk
    rows: Tensor
    targets: Tensor
    flat: Tensor


def plant(spec: GridSpec, groups: Sequence[Group]) -> list[Planted]:
    """Lay out groups of (prefix, samples); a prefix holds a whole header and at least one more token."""
    trees = sorted(_grow(spec, groups), key=lambda t: len(t.ids))
    chunks: list[list[_Tree]] = []
    for tree in trees:
        size = spec.tokens.header + len(tree.ids)
        if chunks and size <= _CLOSE * (spec.tokens.header + len(chunks[-1][0].ids)):
            chunks[-1].append(tree)
        else:
            chunks.append([tree])
    return [_planted(spec, some) for some in chunks]


def _grow(spec: GridSpec, groups: Sequence[Group]) -> list[_Tree]:
    """The trees, board by board."""
    header, most = spec.tokens.header, spec.tokens.ids
    latest: dict[tuple[int, ...], _Tree] = {}
    trees: list[_Tree] = []
    flat = 0
    for prefix, tails in groups:
        board = tuple(prefix[:header])
        for tail in tails:
            if not len(tail):
                continue
            tree = latest.get(board)
            if tree is None or len(tree.ids) >= _MOST_NODES:
                tree = latest[board] = _Tree(board)
                trees.append(tree)
            at = -1
            for token in prefix[header:]:
                at = tree.child(at, token, most)
            for token in tail[:-1]:
                tree.rows.append(at)
                at = tree.child(at, token, most)
            tree.rows.append(at)
            tree.targets.extend(tail)
            tree.flat.extend(range(flat, flat + len(tail)))
            flat += len(tail)
    return trees


def _planted(spec: GridSpec, trees: Sequence[_Tree]) -> Planted:
    """Index tensors of trees of similar size."""
    header, vocab, b = spec.tokens.header, spec.tokens.vocab, len(trees)
    sizes = np.array([len(t.ids) for t in trees])
    places = header + int(sizes.max())
    # Nodes are numbered: all headers, then the rest tree by tree.
    tree_of = np.repeat(np.arange(b), sizes)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    place = header + np.arange(len(tree_of)) - first[tree_of]
    ids = np.array([i for t in trees for i in t.ids])
    depth = np.array([d for t in trees for d in t.depths])
    base = ids % vocab
    head_slots = (np.arange(b)[:, None] * places + np.arange(header)).ravel()
    slot = tree_of * places + place
    parent = header + np.array([p for t in trees for p in t.parents]) + tree_of * places
    seen = _ancestors(b, places, header, slot, place, parent, depth)
    rows = np.array([r for t in trees for r in t.rows]) + np.repeat(first, [len(t.rows) for t in trees])
    wanted, rows = np.unique(rows, return_inverse=True)
    chunk = Chunk(
        ids=_tensor(np.concatenate([np.array([t.header for t in trees]).ravel(), ids])),
        position=_tensor(np.concatenate([np.tile(np.arange(header), b), header + depth])),
        cell=_tensor(
            np.concatenate([np.tile(np.arange(-1, header - 1), b), np.where(base >= POS, base - POS, -1)])
        ),
        slot=_tensor(np.concatenate([head_slots, slot])),
        trees=b,
        places=places,
        bias=torch.zeros(b, 1, places, places).masked_fill_(~torch.from_numpy(seen)[:, None], -torch.inf),
        wanted=_tensor(b * header + wanted),
    )
    targets = np.array([i for t in trees for i in t.targets]) % vocab
    return Planted(chunk, _tensor(rows), _tensor(targets), _tensor([f for t in trees for f in t.flat]))


def _ancestors(
    b: int,
    places: int,
    header: int,
    slot: np.ndarray,
    place: np.ndarray,
    parent: np.ndarray,
    depth: np.ndarray,
) -> np.ndarray:
    """What each slot sees [b, places, places]: its ancestors and itself; empty slots see the first token."""
    seen = np.zeros((b, places, places), dtype=bool)
    seen[:, :, 0] = True
    seen[:, :header, :header] = np.tri(header, dtype=bool)
    flat = seen.reshape(b * places, places)
    for level in range(int(depth.max()) + 1):
        here = np.flatnonzero(depth == level)
        flat[slot[here]] = flat[parent[here]]
        flat[slot[here], place[here]] = True
    return seen


def _tensor(values: object) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64)
