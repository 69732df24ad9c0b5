"""The plain path: any causal language model of transformers, through its own forward pass and autograd.

Slower than the fast path and without prefix sharing in training, but it asks nothing of the architecture
beyond `input_ids`, `attention_mask` and logits. Rows are right-padded; a batch of B sequences of length S
needs [B, S, vocab] logits, so keep `max_tokens_per_microbatch` small for large vocabularies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from racelab.experiments.backends.local.head import Coefficient
from racelab.experiments.backends.local.packing import Group
from racelab.experiments.errors import ModelError


class PlainModel:
    """A transformers model with float32 masters; compute in bf16 by autocast."""

    def __init__(self, module: Any, dtype: torch.dtype, device: str, train_from: int | None) -> None:
        """Wrap `module` (a transformers causal LM in float32, or in `dtype` if frozen)."""
        self.module = module.to(device).eval()
        self.dtype, self.device, self.train_from = dtype, device, train_from
        self.vocab = int(module.get_input_embeddings().weight.shape[0])
        known = inspect.signature(module.forward).parameters
        self._takes_positions = "position_ids" in known
        self.cache_name = "cache" if "cache" in known else "past_key_values"  # older transformers 5
        self.masters: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(train_from is not None and _trained(name, train_from))
            if parameter.requires_grad:
                self.masters[name] = parameter
        if train_from is not None and not self.masters:
            raise ModelError(f"train_from_layer {train_from}: no parameter is left to train; lower it")

    def refresh(self) -> None:
        """Nothing to do: the module computes with the masters."""

    def frozen_copy(self) -> PlainModel:
        """The present weights as a frozen model; parameters that are not trained are shared."""
        import copy

        shared = {id(p): p for p in self.module.parameters() if not p.requires_grad}
        module = copy.deepcopy(self.module, memo=dict(shared))
        return PlainModel(module, self.dtype, self.device, None)

    def cast(self) -> AbstractContextManager[Any]:
        """Autocast for bf16, nothing for float32."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device, dtype=self.dtype)

    def call(self, ids: Tensor, mask: Tensor, cache: object | None = None, last: int | None = None) -> Any:
        """The module's forward; positions count the unmasked tokens."""
        args: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if cache is not None or last is not None:
            args["use_cache"] = True
            args[self.cache_name] = cache
        if self._takes_positions:
            positions = (mask.cumsum(-1) - 1).clamp_(min=0)
            args["position_ids"] = positions[:, -ids.shape[1] :]
        with self.cast():
            return self.module(**args)

    def _scored(
        self, batch: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log p of every sample token of the (prefix, sample) pairs in order [tokens], and the scaled logits."""
        width = max(len(p) + len(t) for p, t in batch) - 1
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        where: list[int] = []
        targets: list[int] = []
        for r, (prefix, tail) in enumerate(batch):
            row = [*prefix, *tail[:-1]]
            ids[r, : len(row)], mask[r, : len(row)] = torch.tensor(row), 1
            where += range(r * width + len(prefix) - 1, r * width + len(row))
            targets += tail
        logits = self.call(ids.to(self.device), mask.to(self.device)).logits
        picked = logits.flatten(0, 1)[torch.tensor(where, device=self.device)].float() / temperature
        chosen = picked.gather(1, torch.tensor(targets, device=self.device)[:, None])[:, 0]
        return torch.sub(chosen, picked.logsumexp(-1)), picked

    def logprobs(self, groups: Sequence[Group], temperature: float) -> Tensor:
        """Log p of every sample token [tokens], float32; no gradient."""
        with torch.no_grad():
            return self._scored(_pairs(groups), temperature)[0].float()

    def accumulate(
        self,
        groups: Sequence[Group],
        temperature: float,
        coefficient: Callable[[Tensor | None], Coefficient],
        reference: PlainModel | None,
    ) -> Tensor:
        """As `FastModel.accumulate`, by autograd: Σ c_t log p_t - h_t H_t has the same gradient as the loss."""
        ref = None if reference is None else reference.logprobs(groups, temperature)
        lp, logits = self._scored(_pairs(groups), temperature)
        c, h = coefficient(ref)(lp.detach().float(), slice(0, len(lp)))
        surrogate = (lp * c).sum()
        if h is not None:
            p = logits.softmax(-1)
            surrogate = surrogate - (h * (logits.logsumexp(-1) - (p * logits).sum(-1))).sum()
        surrogate.backward()  # type: ignore[no-untyped-call]
        return lp.detach().float()


class PlainStepper:
    """Decoding through the module's own cache; prefixes are left-padded."""

    def __init__(self, model: PlainModel) -> None:
        """Decode with `model`."""
        self._m = model
        self._cache: Any = None

    def start(self, prefixes: Sequence[Sequence[int]], owner: Tensor, room: int) -> Tensor:
        """See `Stepper.start`."""
        width = max(len(p) for p in prefixes)
        ids = torch.zeros(len(prefixes), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for r, prefix in enumerate(prefixes):
            ids[r, width - len(prefix) :], mask[r, width - len(prefix) :] = torch.tensor(list(prefix)), 1
        device = self._m.device
        out = self._m.call(ids.to(device), mask.to(device), last=1)
        self._cache = getattr(out, self._m.cache_name, None)
        if not hasattr(self._cache, "batch_select_indices"):
            raise ModelError("this model's cache cannot be split by rows; use engine 'fast' or another model")
        owner = owner.to(device)
        self._mask = mask.to(device)[owner]
        self._cache.batch_select_indices(owner)
        logits: Tensor = out.logits[:, -1][owner]
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """See `Stepper.step`."""
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], 1)
        out = self._m.call(tokens[:, None], self._mask, cache=self._cache)
        logits: Tensor = out.logits[:, -1]
        return logits

    def keep(self, rows: Tensor) -> None:
        """See `Stepper.keep`."""
        self._mask = self._mask[rows]
        self._cache.batch_select_indices(rows)


def load_plain(folder: Path, dtype: torch.dtype, device: str, train_from: int | None) -> PlainModel:
    """Read a folder with transformers, offline: Masters are float32, frozen weights as they compute."""
    from transformers import AutoModelForCausalLM

    stored = dtype if train_from is None else torch.float32
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=stored, local_files_only=True, output_loading_info=True
        )
        module, report = found
    except MemoryError:
        raise
    except Exception as e:  # a damaged file comes as whatever error the reading library has
        raise ModelError(f"model folder {folder}: transformers cannot load it ({one_line(e)})") from e
    # transformers fills what is missing with random numbers and drops layers too many, with a warning only
    missing = sorted(report["missing_keys"])
    extra = sorted(n for n in report["unexpected_keys"] if any(part.isdigit() for part in n.split(".")))
    if missing or extra:
        what = (
            f"tensor {missing[0]} is missing" if missing else f"tensor {extra[0]} has no place in the model"
        )
        raise ModelError(f"model folder {folder}: {what}; the weights do not fit config.json")
    return PlainModel(module, dtype, device, train_from)


def _pairs(groups: Sequence[Group]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """(prefix, sample) of every sample."""
    return [(p, t) for p, tails in groups for t in tails]


def one_line(error: BaseException) -> str:
    """An error's text on one line of at most 200 characters; its type if it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _trained(name: str, train_from: int) -> bool:
    """True if a parameter lies at or above this layer (all of them for 0)."""
    if train_from == 0:
        return True
    numbers = [int(p) for p in name.split(".") if p.isdigit()]
    if numbers:
        return numbers[0] >= train_from
    return "norm" in name.lower() or "ln_f" in name
