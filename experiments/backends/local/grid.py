"""The small FrozenLake transformer (about 0.35 M parameters) as an engine of the local backend.

It implements `Trainable`, so `LocalBackend` trains it like any other model, and it can be decoded turn by turn
(`decoder`). It cannot write: there is no tokenizer, only the grid tokens of `models/grid_tokens.py`.

Every log-prob that it gives is the model's own, observations included: they cost little, and a caller who weighs them
(the warm-up does) gets the right gradient. float32 on the CPU; gradients by autograd.

This module imports torch: import it lazily.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from racelab.experiments.backends.local.grid_decode import GridDecoder
from racelab.experiments.backends.local.grid_net import GridSpec, draw_weights, run
from racelab.experiments.backends.local.grid_tree import Planted, plant
from racelab.experiments.backends.local.head import Coefficient
from racelab.experiments.backends.local.packing import Group
from racelab.experiments.episodes import IntArray
from racelab.experiments.errors import DataError, ModelError
from racelab.experiments.models.grid_tokens import HEAD, N_CELLS, GridTokens
from racelab.experiments.types import FloatArray

MODEL_TYPE = "racelab-grid"
_WEIGHTS = "model.safetensors"


@dataclass(slots=True)
class GridCore:
    """The weights; see `trainable.Core`. The masters are what is computed with: there are no copies to refresh."""

    masters: dict[str, Tensor]
    train_from: int | None
    device: str = "cpu"

    def refresh(self) -> None:
        """Nothing to do."""


class GridModel:
    """A grid transformer in this process; implements `trainable.Trainable`.

    Attributes:
        core: the weights.
        spec: sizes.
        path: the folder it was read from.
        window: longest sequence.
        eos_id: -1: no token ends a reply; each reply is one token.
    """

    eos_id = -1

    def __init__(self, spec: GridSpec, weights: dict[str, Tensor], path: Path, *, trained: bool) -> None:
        """Use `open_grid_model`."""
        self.core = GridCore(
            {name: t.detach().clone().requires_grad_(trained) for name, t in weights.items()},
            0 if trained else None,
        )
        self.spec, self.path, self.window = spec, path, spec.window

    @property
    def engine(self) -> str:
        """`grid`."""
        return "grid"

    @property
    def tokens(self) -> GridTokens:
        """The vocabulary."""
        return self.spec.tokens

    @property
    def n_parameters(self) -> int:
        """Numbers that are trained."""
        return sum(t.numel() for t in self.core.masters.values())

    def check_groups(self, groups: Sequence[Group]) -> None:
        """Raises DataError for what is no sequence on a board of this canvas."""
        header, ids = self.tokens.header, self.tokens.ids
        for prefix, tails in groups:
            if len(prefix) <= header:
                raise DataError(
                    f"a grid sequence's prefix has {len(prefix)} tokens; it needs {header} for the board and a position"
                )
            if prefix[0] != HEAD or max(prefix[1:header]) >= N_CELLS or min(prefix[1:header]) < 0:
                raise DataError(
                    f"a grid sequence does not open with the board's {header} tokens on a canvas of side "
                    f"{self.spec.side}; make the prompt with the actor of the same task"
                )
            longest = len(prefix) + max(map(len, tails), default=0)
            if longest > self.window:
                raise DataError(
                    f"a sequence of {longest} tokens exceeds the grid model's window of {self.window}; warm a model up "
                    f"with a larger task.max_turns than {self.spec.max_turns}"
                )
            for part in (prefix[header:], *tails):
                if len(part) and (min(part) < 0 or max(part) >= ids):
                    raise DataError(f"a grid token lies outside 0..{ids - 1}")

    def score(self, groups: Sequence[Group], temperature: float) -> Tensor:
        """Log p of every token of every sample, flat [tokens] float32, without gradient.

        A token that carries a hint is scored as the token alone.
        """
        with torch.no_grad():
            return self._forward(plant(self.spec, groups), temperature, entropy=False)[0]

    def logprobs(
        self, groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], temperature: float = 1.0
    ) -> list[list[FloatArray]]:
        """Log p(tail_t | prefix, tail_<t) [T] of every tail, as the port of language models has it.

        Raises:
            DataError: as `check_groups`.
        """
        self.check_groups(groups)
        flat = self.score(groups, temperature).numpy().astype(np.float64)
        ends = np.cumsum([len(t) for _, tails in groups for t in tails])
        known = iter(np.split(flat, ends[:-1]) if len(ends) else [])
        return [[next(known) for _ in tails] for _, tails in groups]

    def accumulate(
        self,
        groups: Sequence[Group],
        temperature: float,
        coefficient: Callable[[Tensor | None], Coefficient],
        reference: Self | None,
    ) -> Tensor:
        """Adds the gradient of a loss to the masters; flat log-probs. See `Trainable.accumulate`.

        `coefficient` is asked once, for all tokens: with c and h held fixed, the surrogate sum_t c_t log p_t - h_t H_t
        has the loss's gradient.
        """
        forest = plant(self.spec, groups)
        known = None
        if reference is not None:
            with torch.no_grad():
                known = reference._forward(forest, temperature, entropy=False)[0]
        logp, entropy = self._forward(forest, temperature, entropy=True)
        flat = logp.detach()
        c, h = coefficient(known)(flat, slice(0, len(flat)))
        surrogate = logp @ c
        if h is not None:
            surrogate = surrogate - entropy @ h
        surrogate.backward()  # type: ignore[no-untyped-call]
        return flat

    def _forward(self, forest: Sequence[Planted], temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probs and, if asked for, entropies of the scored distributions, flat [tokens]."""
        logps, entropies = [], []
        for part in forest:
            logits = run(self.spec, self.core.masters, part.chunk)
            log_share = F.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)
            logps.append(log_share[part.rows, part.targets])
            if entropy:
                entropies.append(-(log_share.exp() * log_share).sum(-1)[part.rows])
        if not logps:
            return torch.zeros(0), torch.zeros(0)
        order = torch.cat([part.flat for part in forest])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return torch.cat(logps)[back], torch.cat(entropies)[back] if entropy else torch.zeros(0)

    def decoder(self, cells_BC: IntArray, capacity: int) -> GridDecoder:
        """Starts episodes on B boards of this canvas; see `GridDecoder`."""
        return GridDecoder(self.spec, self.core.masters, cells_BC, capacity)

    def frozen_copy(self) -> Self:
        """The present weights as a frozen model."""
        return type(self)(self.spec, self.core.masters, self.path, trained=False)

    def save(self, folder: str | Path) -> Path:
        """Writes config.json and model.safetensors into `folder` (made if need be); equal weights give equal bytes.

        Raises:
            ModelError: the folder holds weights already.
        """
        target = Path(folder)
        if any(target.glob("*.safetensors")):
            raise ModelError(f"folder {target} already holds weights; give an empty one")
        target.mkdir(parents=True, exist_ok=True)
        write_grid_model(self.spec, self.core.masters, target)
        return target


def write_grid_model(spec: GridSpec, weights: dict[str, Tensor], folder: Path) -> None:
    """A model folder that `open_grid_model` reads."""
    from safetensors.torch import save_file

    config = {"model_type": MODEL_TYPE, **asdict(spec)}
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    save_file({name: t.detach().contiguous() for name, t in weights.items()}, folder / _WEIGHTS)


def new_grid_model(spec: GridSpec, rng: torch.Generator, path: Path = Path()) -> GridModel:
    """An untrained model that can be trained; `path` is where it will be saved."""
    return GridModel(spec, draw_weights(spec, rng), path, trained=True)


def open_grid_model(folder: str | Path, *, role: Literal["policy", "frozen"] = "policy") -> GridModel:
    """Opens a folder with config.json (model_type `racelab-grid`) and model.safetensors.

    Raises:
        ModelError: a file is missing or damaged, or the weights are not those of the config.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder)
    spec = _spec(path)
    try:
        weights = load_file(str(path / _WEIGHTS))
    except (OSError, SafetensorError) as e:
        raise ModelError(
            f"model folder {path}: {_WEIGHTS} cannot be read ({e}); delete the folder, it is made again"
        ) from e
    expected = spec.shapes()
    wrong = [n for n, s in expected.items() if n not in weights or tuple(weights[n].shape) != s]
    if wrong or len(weights) != len(expected):
        raise ModelError(
            f"model folder {path}: the weights do not fit config.json (first: {(wrong or ['?'])[0]})"
        )
    return GridModel(spec, {n: weights[n].float() for n in expected}, path, trained=role == "policy")


def _spec(path: Path) -> GridSpec:
    """The sizes in config.json."""
    try:
        config: Any = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"model folder {path}: config.json cannot be read ({e})") from e
    if not isinstance(config, dict) or config.get("model_type") != MODEL_TYPE:
        raise ModelError(f"model folder {path}: config.json does not say model_type {MODEL_TYPE}")
    sizes: dict[str, int] = {}
    for field in fields(GridSpec):
        value = config.get(field.name)
        sizes[field.name] = value if type(value) is int else 0
    bad = [name for name, value in sizes.items() if value < 1]
    if bad or sizes["width"] % sizes["heads"]:
        raise ModelError(f"model folder {path}: config.json: {(bad or ['width'])[0]} is no size that can be")
    return GridSpec(**sizes)
