"""Small grid models and boards for tests, and a plain float64 forward pass to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from racelab.experiments.backends.local.grid import GridModel, new_grid_model
from racelab.experiments.backends.local.grid_net import GridSpec
from racelab.experiments.tasks.frozenlake.boards import Boards, make_boards

TURNS = 6


def small_model(side: int = 3, seed: int = 0, turns: int = TURNS) -> GridModel:
    """Two layers, untrained; weights are enlarged so that distributions are far from uniform."""
    spec = GridSpec(side, width=16, layers=2, heads=2, max_turns=turns)
    model = new_grid_model(spec, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, w in model.core.masters.items():
            w.mul_(
                {"token": 40.0, "hint": 40.0, "position": 20.0, "row": 20.0, "column": 20.0}.get(name, 1.5)
            )
    return model


def some_boards(count: int, sizes: Sequence[int] = (3,), seed: int = 0) -> Boards:
    return make_boards(
        count,
        sizes=sizes,
        frozen_probability=(0.65, 0.85),
        min_path=1,
        max_path=6,
        rng=np.random.default_rng(seed),
    )


def plain_logits(spec: GridSpec, w: Mapping[str, Tensor], ids: Sequence[int]) -> Tensor:
    """Logits [tokens, vocab] of one whole sequence, token by token as the docstrings say, nothing shared."""
    n, side, vocab = len(ids), spec.side, 9 + spec.side**2
    rows, columns = [], []
    for place, token in enumerate(ids):
        base = token % vocab
        cell = place - 1 if place <= side**2 else base - 9 if base >= 9 else -1
        rows.append(side if cell < 0 else cell // side)
        columns.append(side if cell < 0 else cell % side)
    base, hint = torch.tensor([i % vocab for i in ids]), torch.tensor([i // vocab for i in ids])
    x = w["token"][base] + w["hint"][hint] + w["position"][:n]
    x = x + w["row"][torch.tensor(rows)] + w["column"][torch.tensor(columns)]
    for i in range(spec.layers):
        p, d = f"layers.{i}.", spec.width
        h = F.layer_norm(x, (d,), w[p + "norm_attention"])
        q, k, v = (
            (h @ w[p + "qkv"][j * d : (j + 1) * d].T).view(n, spec.heads, -1).transpose(0, 1)
            for j in range(3)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a.transpose(0, 1).reshape(n, d) @ w[p + "out"].T
        x = x + F.gelu(F.layer_norm(x, (d,), w[p + "norm_mlp"]) @ w[p + "up"].T) @ w[p + "down"].T
    return F.layer_norm(x, (spec.width,), w["norm"]) @ w["head"].T


def doubles(model: GridModel) -> dict[str, Tensor]:
    """The weights as float64 leaves."""
    return {name: t.detach().double().clone().requires_grad_(True) for name, t in model.core.masters.items()}


def plain_shares(
    spec: GridSpec, w: Mapping[str, Tensor], prefix: Sequence[int], tail: Sequence[int], temperature: float
) -> Tensor:
    """Log of the distribution from which each token of `tail` comes [len(tail), vocab]."""
    logits = plain_logits(spec, w, [*prefix, *tail])
    return (logits[len(prefix) - 1 : -1] / temperature).log_softmax(-1)
