"""Turn-by-turn decoding of the grid transformer for many episodes at once.

Episodes that have seen the same are one leaf and are computed once; which episode sits on which leaf is the caller's
business. Trees whose episodes have all ended leave the batch.

This module imports torch: import it lazily.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from racelab.experiments.backends.local.grid_net import Cache, Chunk, GridSpec, Weights, run
from racelab.experiments.episodes import IntArray
from racelab.experiments.models.grid_tokens import HEAD, POS

_SHRINK = 0.75  # the cache is cut when no more than this share of its trees is alive


class GridDecoder:
    """B trees that grow by one or two tokens a turn.

    At first each tree has one leaf, the end of its header; leaf j belongs to tree j.
    """

    def __init__(self, spec: GridSpec, weights: Weights, cells_BC: IntArray, capacity: int) -> None:
        """Computes the headers.

        Args:
            spec: sizes.
            weights: of the model, as they are now.
            cells_BC: boards, WALL where the canvas is larger.
            capacity: most columns that one tree may take after its header: the sum over turns of (tokens of a leaf)
                x (most leaves of a tree).
        """
        b, header = len(cells_BC), spec.tokens.header
        self._spec = spec
        self._weights = {name: w.detach() for name, w in weights.items()}
        self._cache = Cache(spec, b, header + capacity)
        self._tree: IntArray = np.arange(b)  # of each leaf
        self._alive = b  # trees in the cache
        self._depth = 0
        self._seen: npt.NDArray[np.bool_] = np.ones((b, header), dtype=bool)  # columns that each leaf sees
        ids = np.concatenate([np.full((b, 1), HEAD), cells_BC], axis=1)
        bias = torch.zeros(1, 1, header, header)
        bias.masked_fill_(torch.ones(header, header, dtype=torch.bool).triu(1), -torch.inf)
        self._run(
            ids,
            cell=np.broadcast_to(np.arange(-1, header - 1), ids.shape),
            slot=np.arange(b * header),
            places=header,
            bias=bias,
            wanted=np.zeros(0, dtype=np.int64),
        )

    def extend(self, leaf: IntArray, tokens: IntArray) -> Tensor:
        """Grows the trees.

        Args:
            leaf: the present leaf that each new one continues [m], not falling. Leaves that are not named end here.
            tokens: ids with hints [m, 1 or 2]. New leaf j is (leaf[j], tokens[j]).

        Returns:
            logits [m, vocab] of what follows each new leaf.
        """
        m, width = tokens.shape
        tree = self._shrunk(self._tree[leaf])
        counts = np.bincount(tree, minlength=self._alive)
        rank = np.arange(m) - (np.cumsum(counts) - counts)[tree]
        places = int(counts.max()) * width
        slot = tree * places + rank * width
        used = self._cache.used
        seen = np.zeros((m, used + places), dtype=bool)
        seen[:, :used] = self._seen[leaf]
        allowed = np.zeros((len(counts) * places, used + places), dtype=bool)
        allowed[:, 0] = True  # empty slots look at the first token
        row = np.arange(m)
        for j in range(width):
            seen[row, used + rank * width + j] = True
            allowed[slot + j] = seen
        base = tokens % self._spec.tokens.vocab
        bias = torch.zeros(len(counts), 1, places, used + places)
        bias.masked_fill_(~torch.from_numpy(allowed).view_as(bias), -torch.inf)
        self._tree, self._seen = tree, seen
        return self._run(
            tokens,
            cell=np.where(base >= POS, base - POS, -1),
            slot=(slot[:, None] + np.arange(width)).ravel(),
            places=places,
            bias=bias,
            wanted=np.arange(m) * width + width - 1,
        )

    def _shrunk(self, tree: IntArray) -> IntArray:
        """The trees of the new leaves, renumbered if dead ones were dropped from the cache."""
        alive, number = np.unique(tree, return_inverse=True)
        if len(alive) <= _SHRINK * self._alive:
            self._cache.keep(torch.from_numpy(alive))
            self._alive = len(alive)
            return number.astype(np.int64)
        return tree

    def _run(
        self,
        ids: IntArray,
        *,
        cell: IntArray,
        slot: IntArray,
        places: int,
        bias: Tensor,
        wanted: IntArray,
    ) -> Tensor:
        """One chunk through the network."""
        width = ids.shape[1]
        position = np.broadcast_to(self._depth + np.arange(width), ids.shape)
        chunk = Chunk(
            ids=_flat(ids),
            position=_flat(position),
            cell=_flat(cell),
            slot=_flat(slot),
            trees=self._alive,
            places=places,
            bias=bias,
            wanted=_flat(wanted),
        )
        self._depth += width
        with torch.inference_mode():
            return run(self._spec, self._weights, chunk, self._cache)


def _flat(values: IntArray) -> Tensor:
    return torch.from_numpy(np.array(values).ravel())  # a copy: views may not be writable
