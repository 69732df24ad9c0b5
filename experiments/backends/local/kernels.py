"""Numerical pieces of the fast path: linear layers, RMS norm, rotation, gated SiLU, and their gradients.

This file and the rest of the package import torch at the top: they are themselves imported lazily. Every
gradient here is the hand-derived one (autograd's bf16 backward of these small operations is several times
slower on CPU); the tests hold them against autograd. Only plain torch operations are used, so the same code
runs on a GPU, but it has been tested on CPU only.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def prepacking_works() -> bool:
    """True if oneDNN's prepacked bf16 linear layer runs on this CPU."""
    if not torch._C._has_mkldnn:
        return False
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        w = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16, dtype=torch.bfloat16), 16)
        x = torch.ones(2, 16, dtype=torch.bfloat16)
        out = torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return bool((out == 16).all())


class Linear:
    """y = x Wᵀ + b with a weight held in the compute type, prepacked for oneDNN where that works.

    Attributes:
        bias: [out] or None, in the compute type.
    """

    __slots__ = ("_dtype", "_packed", "_source", "bias")

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, prepack: bool = True
    ) -> None:
        """Takes [out, in] weights of any type; keeps no copy of its own if the type already is `dtype`."""
        self._dtype = dtype
        self._source: Tensor | None = None
        self._packed: Tensor | None = None
        cast = weight.detach().to(dtype)
        if prepack and dtype == torch.bfloat16 and weight.device.type == "cpu" and prepacking_works():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(cast.contiguous(), 64)
        else:
            self._source = cast
        self.bias = None if bias is None else bias.detach().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Map [n, in] to [n, out]."""
        if self._packed is not None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return out
        assert self._source is not None
        return F.linear(x, self._source, self.bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square: x / rms(x) · weight over the last axis."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_grad(g: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradient of `rms_norm`: with x̂ = x·r, r = 1/rms(x): dx = r (g w - x̂ mean(g w x̂)), dw = Σ g x̂.

    Returns:
        dx like x, and dw [last axis] in float32, summed over all other axes.
    """
    n = x.shape[-1]
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    r = torch.rsqrt(norm.square_().div_(n).add_(eps)).to(x.dtype)
    x_hat = x * r
    dw = (g * x_hat).reshape(-1, n).sum(0, dtype=torch.float32)
    gw = g * weight
    mean = (gw * x_hat).sum(-1, keepdim=True, dtype=torch.float32).div_(n).to(x.dtype)
    return gw.sub_(x_hat.mul_(mean)).mul_(r), dw


def rotary_table(
    theta: float, head_dim: int, length: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """Cos and signed sin [length, head_dim] of position * theta^(-2j / head_dim), laid out for `rotate`."""
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    angle = torch.arange(length, dtype=torch.float32)[:, None] * inverse[None]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).to(device, dtype), torch.cat([-sin, sin], -1).to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the two-halves order: (a, b) -> (a cos - b sin, b cos + a sin).

    x [n, heads, head_dim]; cos and signed sin [n, 1, head_dim]. The gradient is the same call with -sin.
    """
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat([x[..., half:], x[..., :half]], -1), sin)


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up; gate_up [n, 2·ffn]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gated_silu_grad(g: Tensor, gate_up: Tensor, silu: Tensor) -> Tensor:
    """Gradient of `gated_silu` in one [n, 2·ffn] tensor; `silu` is silu(gate), computed before."""
    gate, up = gate_up.chunk(2, -1)
    out = torch.empty_like(gate_up)
    d_gate, d_up = out.chunk(2, -1)
    torch.mul(silu, g, out=d_up)
    torch.mul(g, up, out=d_gate)
    torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
    return out
