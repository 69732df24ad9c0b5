"""The fast path: a Llama-type model with float32 master weights and hand-written forward and backward passes.

Weights are held under fused names: `emb`, `norm`, `head` (untied models), and per layer i `i.qkv`,
`i.qkv_b`, `i.o`, `i.gu` (gate over up), `i.down`, `i.n1`, `i.n2`, `i.qn`, `i.kn`. Layers below
`train_from_layer` are frozen and have no master: their compute copies are shared with the frozen reference.
The embedding and the head are trained only if `train_from_layer` is 0; the last norm always is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from racelab.experiments.backends.local import attention, kernels
from racelab.experiments.backends.local.head import Coefficient, head_backward, token_logprobs
from racelab.experiments.backends.local.kernels import Linear
from racelab.experiments.backends.local.packing import Packed
from racelab.experiments.backends.local.spec import Spec
from racelab.experiments.errors import ModelError

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [n, heads, d], k [n, kv, d], v [n, kv, d]) -> [n, heads * d]."""


@dataclass(slots=True)
class Layer:
    """Compute copies of one block's weights."""

    qkv: Linear
    o: Linear
    gu: Linear
    down: Linear
    n1: Tensor
    n2: Tensor
    qn: Tensor | None
    kn: Tensor | None


@dataclass(slots=True)
class _Tape:
    """What one layer keeps for its gradient."""

    x: Tensor
    raw: Tensor | None  # q and k before their norm
    attention: list[attention.Saved]
    a: Tensor
    y: Tensor
    gate_up: Tensor


class FastModel:
    """A Llama-type decoder; see the module's docstring."""

    def __init__(
        self,
        spec: Spec,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: str,
        train_from: int | None,
    ) -> None:
        """Build from fused weights.

        Args:
            spec: sizes.
            weights: fused name -> tensor of any type.
            dtype: compute type.
            device: `cpu` or `cuda`.
            train_from: first trained layer, or None for a frozen model.
        """
        self.spec, self.dtype, self.device, self.train_from = spec, dtype, device, train_from
        self.masters: dict[str, Tensor] = {}
        for name, value in weights.items():
            if train_from is not None and _trained(name, train_from):
                # a copy even if the type fits: masters change in place
                self.masters[name] = value.to(device, torch.float32, copy=True)
        self._rotary = kernels.rotary_table(spec.theta, spec.head_dim, 256, dtype, device)
        self.emb = self._compute("emb", weights)
        self.norm = self._compute("norm", weights)
        self.head = self._head(weights)
        self.layers = [self._layer(i, weights) for i in range(spec.layers)]

    def _compute(self, name: str, weights: Mapping[str, Tensor]) -> Tensor:
        """A tensor in the compute type; in float32 that is the master itself, without a copy."""
        return self.masters.get(name, weights[name]).to(self.device, self.dtype)

    def _head(self, weights: Mapping[str, Tensor]) -> Linear:
        if self.spec.tied:
            return Linear(self.emb, None, self.dtype)
        self.head_weight = self._compute("head", weights)
        return Linear(self.head_weight, None, self.dtype)

    def _layer(self, i: int, weights: Mapping[str, Tensor]) -> Layer:
        """(Re)pack the compute copies of layer i."""

        def get(part: str) -> Tensor:
            return self._compute(f"{i}.{part}", weights)

        bias = get("qkv_b") if self.spec.qkv_bias else None
        return Layer(
            qkv=Linear(get("qkv"), bias, self.dtype),
            o=Linear(get("o"), None, self.dtype),
            gu=Linear(get("gu"), None, self.dtype),
            down=Linear(get("down"), None, self.dtype),
            n1=get("n1"),
            n2=get("n2"),
            qn=get("qn") if self.spec.qk_norm else None,
            kn=get("kn") if self.spec.qk_norm else None,
        )

    def refresh(self) -> None:
        """Repack what has changed after an update: the trained layers, and the embedding if it is trained."""
        if self.train_from is None:
            return
        if "emb" in self.masters:
            self.emb = self._compute("emb", self.masters)
            self.head = self._head(self.masters)
        self.norm = self._compute("norm", self.masters)
        for i in range(self.train_from, self.spec.layers):
            self.layers[i] = self._layer(i, self.masters)

    def frozen_copy(self) -> FastModel:
        """The present weights as a frozen model. Packed weights are shared; masters in float32 are cloned."""
        copy = object.__new__(FastModel)
        copy.spec, copy.dtype, copy.device, copy.train_from = self.spec, self.dtype, self.device, None
        copy.masters, copy._rotary = {}, self._rotary
        copy.emb, copy.norm, copy.head, copy.layers = self.emb, self.norm, self.head, list(self.layers)
        if not self.spec.tied:
            copy.head_weight = self.head_weight
        if self.dtype == torch.float32 and self.masters:  # compute copies alias the masters
            clones = {k: v.clone() for k, v in self.masters.items()}
            if "emb" in clones:
                copy.emb = clones["emb"]
                copy.head = copy._head(clones)
            copy.norm = clones["norm"]
            for i in range(self.train_from or 0, self.spec.layers):
                copy.layers[i] = copy._layer(i, clones)
        return copy

    # ---- forward -------------------------------------------------------------------------------------

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and signed sin [n, 1, head_dim] at `positions`."""
        need = int(positions.max()) + 1 if positions.numel() else 1
        if need > self._rotary[0].shape[0]:
            length = min(max(need, 2 * self._rotary[0].shape[0]), max(need, self.spec.window))
            self._rotary = kernels.rotary_table(
                self.spec.theta, self.spec.head_dim, length, self.dtype, self.device
            )
        cos, sin = self._rotary
        return cos[positions][:, None], sin[positions][:, None]

    def block(
        self, i: int, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, tape: list[_Tape] | None = None
    ) -> Tensor:
        """One layer on flat rows x [n, width]; with `tape`, what the gradient needs is appended to it."""
        s, w = self.spec, self.layers[i]
        qkv = w.qkv(kernels.rms_norm(x, w.n1, s.eps)).view(x.shape[0], s.heads + 2 * s.kv_heads, s.head_dim)
        qk, v = qkv[:, : s.heads + s.kv_heads], qkv[:, s.heads + s.kv_heads :]
        raw: Tensor | None = None
        if w.qn is not None and w.kn is not None:
            raw = qk
            q, k = torch.split(qk, [s.heads, s.kv_heads], 1)
            qk = torch.cat([kernels.rms_norm(q, w.qn, s.eps), kernels.rms_norm(k, w.kn, s.eps)], 1)
        qk = kernels.rotate(qk, cos, sin)
        a = attend(i, qk[:, : s.heads], qk[:, s.heads :], v)
        y = x + w.o(a)
        gate_up = w.gu(kernels.rms_norm(y, w.n2, s.eps))
        out = w.down(kernels.gated_silu(gate_up)).add_(y)
        if tape is not None:
            tape.append(_Tape(x, raw, [], a, y, gate_up))
        return out

    def states(self, batch: Packed) -> Tensor:
        """Final normalised states of the rows that predict sample tokens [tokens, width]; no gradient."""
        x = self._run(self.emb[batch.ids], batch, 0, self.spec.layers)
        return kernels.rms_norm(x[batch.rows], self.norm, self.spec.eps)

    def _run(self, x: Tensor, batch: Packed, first: int, last: int) -> Tensor:
        """Layers first..last-1 without a tape."""
        cos, sin = self.rotary(batch.positions)

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention.attend(q, k, v, batch.buckets, keep=False)[0]

        for i in range(first, last):
            x = self.block(i, x, cos, sin, attend)
        return x

    def logprobs(self, batch: Packed, temperature: float) -> Tensor:
        """Log p of every sample token [tokens], float32."""
        with torch.inference_mode():
            return token_logprobs(self.states(batch), self.head, batch.targets, temperature)

    # ---- gradient ------------------------------------------------------------------------------------

    def accumulate(
        self,
        batch: Packed,
        temperature: float,
        coefficient: Callable[[Tensor | None], Coefficient],
        reference: FastModel | None,
    ) -> Tensor:
        """Add the gradient of a loss of the log-probs to the masters' `.grad`.

        Args:
            batch: packed groups.
            temperature: divides the logits.
            coefficient: receives the reference's log-probs [tokens] (None without `reference`) and returns
                the function that gives the loss's slope (see `Coefficient`).
            reference: a frozen model that equals this one below `train_from`; only its upper layers are run.

        Returns:
            log-probs [tokens], float32.
        """
        if self.train_from is None:
            raise ModelError("a frozen model cannot be trained; open it with role='policy'")
        first, s = self.train_from, self.spec
        with torch.no_grad():
            x = self._run(self.emb[batch.ids], batch, 0, first)
            ref_lp = None
            if reference is not None:
                start = x if first else reference.emb[batch.ids]
                r = reference._run(start, batch, first, s.layers)[batch.rows]
                ref_lp = token_logprobs(
                    kernels.rms_norm(r, reference.norm, s.eps), reference.head, batch.targets, temperature
                )
            x, tape = self._forward_tape(x, batch)
            last = x[batch.rows]
            h = kernels.rms_norm(last, self.norm, s.eps)
            weight = self.emb if s.tied else self.head_weight
            name = "emb" if s.tied else "head"
            add = partial(self._accumulate, name) if name in self.masters else None
            c = coefficient(ref_lp)
            lp, dh = head_backward(h, self.head, weight, batch.targets, temperature, c, add)
            dlast, dw = kernels.rms_norm_grad(dh, last, self.norm, s.eps)
            self._accumulate("norm", dw)
            dx = torch.zeros_like(x)
            dx[batch.rows] = dlast
            self._backward(dx, batch, tape)
        return lp

    def _forward_tape(self, x: Tensor, batch: Packed) -> tuple[Tensor, list[_Tape]]:
        """The trained layers, keeping what their gradients need."""
        cos, sin = self.rotary(batch.positions)
        tape: list[_Tape] = []
        kept: list[list[attention.Saved]] = []

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, saved = attention.attend(q, k, v, batch.buckets, keep=True)
            kept.append(saved)
            return out

        for i in range(self.train_from or 0, self.spec.layers):
            x = self.block(i, x, cos, sin, attend, tape)
            tape[-1].attention = kept.pop()
        return x, tape

    def _backward(self, dx: Tensor, batch: Packed, tape: list[_Tape]) -> None:
        """From the gradient of the last layer's output down to the first trained layer and the embedding."""
        first = self.train_from or 0
        cos, sin = self.rotary(batch.positions)
        for i in range(self.spec.layers - 1, first - 1, -1):
            dx = self._block_grad(
                i, dx, cos, -sin, batch, tape.pop(), lowest=i == first and "emb" not in self.masters
            )
        if "emb" in self.masters:
            emb = self.masters["emb"]
            if emb.grad is None:  # an untied head has left none
                emb.grad = torch.zeros_like(emb)
            emb.grad.index_add_(0, batch.ids, dx.float())

    def _block_grad(
        self, i: int, dz: Tensor, cos: Tensor, minus_sin: Tensor, batch: Packed, t: _Tape, *, lowest: bool
    ) -> Tensor:
        """Gradient of `block`; weight gradients go to the masters.

        With `lowest` nobody needs the input's gradient.
        """
        s, w = self.spec, self.layers[i]
        gate, up = t.gate_up.chunk(2, -1)
        silu = F.silu(gate)
        dh = self._linear_grad(i, "down", dz, silu * up)
        dgu = kernels.gated_silu_grad(dh, t.gate_up, silu)
        dn2 = self._linear_grad(i, "gu", dgu, kernels.rms_norm(t.y, w.n2, s.eps))
        dy, dw = kernels.rms_norm_grad(dn2, t.y, w.n2, s.eps)
        self._add(i, "n2", dw)
        dy.add_(dz)
        da = self._linear_grad(i, "o", dy, t.a)
        dq, dk, dv = attention.attend_grad(da, t.attention, batch.buckets, s.heads)
        dqk = kernels.rotate(torch.cat([dq, dk], 1), cos, minus_sin)
        if t.raw is not None and w.qn is not None and w.kn is not None:
            q, k = torch.split(t.raw, [s.heads, s.kv_heads], 1)
            gq, gk = torch.split(dqk, [s.heads, s.kv_heads], 1)
            (dq, dqn), (dk, dkn) = (
                kernels.rms_norm_grad(gq, q, w.qn, s.eps),
                kernels.rms_norm_grad(gk, k, w.kn, s.eps),
            )
            self._add(i, "qn", dqn)
            self._add(i, "kn", dkn)
            dqk = torch.cat([dq, dk], 1)
        dqkv = torch.cat([dqk, dv], 1).flatten(1)
        if s.qkv_bias:
            self._add(i, "qkv_b", dqkv.sum(0, dtype=torch.float32))
        dn1 = self._linear_grad(i, "qkv", dqkv, kernels.rms_norm(t.x, w.n1, s.eps))
        dx, dw = kernels.rms_norm_grad(dn1, t.x, w.n1, s.eps)
        self._add(i, "n1", dw)
        return dx if lowest else dx.add_(dy)

    def _linear_grad(self, i: int, part: str, g: Tensor, x: Tensor) -> Tensor:
        """Add gᵀ x to the weight's gradient and return g W."""
        name = f"{i}.{part}"
        self._accumulate(name, g.t() @ x)
        return g @ self.masters[name].to(self.dtype)

    def _accumulate(self, name: str, value: Tensor) -> None:
        """Add to a master's float32 gradient."""
        master = self.masters[name]
        if master.grad is None:
            master.grad = value.float()
        else:
            master.grad.add_(value)

    def _add(self, i: int, part: str, value: Tensor) -> None:
        self._accumulate(f"{i}.{part}", value)


def _trained(name: str, train_from: int) -> bool:
    """True if a fused name belongs to what is trained from this layer up."""
    if name in ("emb", "head"):
        return train_from == 0
    return name == "norm" or int(name.split(".")[0]) >= train_from


# ---- loading and saving --------------------------------------------------------------------------------

_PARTS = {
    "o": "self_attn.o_proj",
    "down": "mlp.down_proj",
    "n1": "input_layernorm",
    "n2": "post_attention_layernorm",
}
_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gu": ("mlp.gate_proj", "mlp.up_proj"),
}


def read_weights(folder: Path, spec: Spec) -> dict[str, Tensor]:
    """Fused weights of a folder of safetensors, in the type they are stored in.

    Raises:
        ModelError: a file cannot be read, a tensor is missing or has another shape than config.json says, or a
            layer holds a tensor that the model of config.json does not have.
    """
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        where = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                handle = stack.enter_context(safe_open(str(file), framework="pt"))
            except (SafetensorError, OSError) as e:
                raise ModelError(
                    f"model folder {folder}: {file.name} is no readable safetensors file ({e}); save it again"
                ) from e
            where.update(dict.fromkeys(handle.keys(), handle))
        names = dict(weight_names(spec))
        _no_strangers(folder, where, {n for parts in names.values() for n in parts}, spec)

        def get(name: str) -> Tensor:
            if name not in where:
                raise ModelError(
                    f"model folder {folder}: tensor {name} is missing; the weights do not fit config.json"
                )
            tensor: Tensor = where[name].get_tensor(name)
            found, wanted = tuple(tensor.shape), spec.shape(name)
            if found != wanted:
                raise ModelError(
                    f"model folder {folder}: tensor {name} has shape {list(found)}, config.json says "
                    f"{list(wanted)}; give the config.json that was saved with the weights"
                )
            return tensor

        return {fused: _join([get(n) for n in parts]) for fused, parts in names.items()}


def _no_strangers(folder: Path, found: Iterable[str], known: set[str], spec: Spec) -> None:
    """Raise ModelError for a layer's tensor that would be left out; old files keep rotary tables, not needed."""
    for name in found:
        if name.startswith("model.layers.") and name not in known and ".rotary_emb." not in name:
            raise ModelError(
                f"model folder {folder}: tensor {name} is not part of the {spec.layers} layers that config.json "
                "describes; give the config.json that was saved with the weights"
            )


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def weight_names(spec: Spec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(fused name, the names in a Hugging Face file that it joins along its rows)."""
    yield "emb", ("model.embed_tokens.weight",)
    yield "norm", ("model.norm.weight",)
    if not spec.tied:
        yield "head", ("lm_head.weight",)
    for i in range(spec.layers):
        at = f"model.layers.{i}."
        for part, name in _PARTS.items():
            yield f"{i}.{part}", (f"{at}{name}.weight",)
        for part, names in _FUSED.items():
            yield f"{i}.{part}", tuple(f"{at}{n}.weight" for n in names)
        if spec.qkv_bias:
            yield f"{i}.qkv_b", tuple(f"{at}{n}.bias" for n in _FUSED["qkv"])
        if spec.qk_norm:
            yield f"{i}.qn", (f"{at}self_attn.q_norm.weight",)
            yield f"{i}.kn", (f"{at}self_attn.k_norm.weight",)


def split_fused(spec: Spec, fused: str, value: Tensor) -> list[Tensor]:
    """Undo the joining of `weight_names` for one tensor."""
    part = fused.split(".")[-1]
    if part in ("qkv", "qkv_b"):
        sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
        return list(torch.split(value, sizes))
    return list(torch.split(value, spec.ffn)) if part == "gu" else [value]
