"""Log-probabilities and their gradient through the vocabulary, without ever holding [tokens, vocab].

Source of the loss: RACE Eq 4 (clipped policy gradient with a kl3 penalty), as a weighted sum over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from racelab.experiments.backends.local.kernels import Linear

_CHUNK = 256  # tokens whose logits exist at the same time (in the compute type)
_PIECE = 512  # tokens whose logits' gradients exist at the same time; a multiple of the chunk
_BLOCK = 16  # tokens whose logits exist in float32, small enough for the cache

Coefficient = Callable[[Tensor, slice], Tensor]
"""(log-probs [m], which tokens) -> d loss / d log-prob [m]."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Per-token inputs of the loss, all [tokens] in float32.

    Attributes:
        advantages: A_t.
        weights: w_t; the loss is Σ w_t (...).
        old: log-probs under the policy that is the ratio's denominator; None means the current one (ratio 1).
        reference: log-probs under the frozen reference; None where beta is 0.
        clip: eps_c; the ratio is clipped to [1 - clip, 1 + clip].
        beta: weight of kl3.
    """

    advantages: Tensor
    weights: Tensor
    old: Tensor | None
    reference: Tensor | None
    clip: float
    beta: float

    def evaluate(self, logp: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss parts and the exact derivative at `logp` [m] for the tokens in `part`.

        With r = exp(logp - old): loss_t = w (-min(r A, clip(r) A) + beta kl3),
        kl3 = exp(ref - logp) - (ref - logp) - 1, and

            d loss_t / d logp = w (-r A [not clipped] + beta (1 - exp(ref - logp))).

        Returns:
            derivative, policy part, kl3, clipped (1.0 or 0.0), each [m]; only the derivative is weighted.
        """
        adv, w = self.advantages[part], self.weights[part]
        ratio = torch.ones_like(logp) if self.old is None else torch.exp(logp - self.old[part])
        high = (adv > 0) & (ratio > 1 + self.clip)
        low = (adv < 0) & (ratio < 1 - self.clip)
        clipped = (high | low).to(logp.dtype)
        policy = -torch.minimum(ratio * adv, ratio.clamp(1 - self.clip, 1 + self.clip) * adv)
        slope = -ratio * adv * (1 - clipped)
        kl = torch.zeros_like(logp)
        if self.reference is not None:
            delta = self.reference[part] - logp
            kl = torch.expm1(delta) - delta
            slope = slope - self.beta * torch.expm1(delta)
        return w * slope, policy, kl, clipped


def token_logprobs(h: Tensor, head: Linear, targets: Tensor, temperature: float) -> Tensor:
    """Log softmax(h Wᵀ / temperature) at `targets`; h [n, width] -> [n] float32."""
    out = torch.empty(h.shape[0], dtype=torch.float32, device=h.device)
    for a in range(0, h.shape[0], _CHUNK):
        logits = head(h[a : a + _CHUNK])
        for i in range(0, logits.shape[0], _BLOCK):
            rows = slice(a + i, a + i + _BLOCK)
            out[rows] = _block(logits[i : i + _BLOCK], targets[rows], temperature)[0]
    return out


def _block(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, exp(logits - max) and its row sums for a few rows, in float32."""
    x = logits.float()
    if temperature != 1.0:
        x = x.div_(temperature) if x is not logits else x / temperature
    elif x is logits:
        x = x.clone()
    x.sub_(x.amax(-1, keepdim=True))
    chosen = x.gather(1, targets[:, None])[:, 0]
    e = x.exp_()
    total = e.sum(-1)
    return chosen - total.log(), e, total


def head_backward(
    h: Tensor,
    head: Linear,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    coefficient: Coefficient,
    add_weight_grad: Callable[[Tensor], None] | None,
) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of a loss of them, chunk by chunk.

    With c_t = d loss / d log p_t, the gradient of the logits is c_t (onehot - softmax) / temperature.

    Args:
        h: normalised final states [n, width], compute type.
        head: the head in the compute type.
        weight: the same weight [vocab, width], plain, compute type.
        targets: [n].
        temperature: divides the logits.
        coefficient: gives c for a chunk from its log-probs.
        add_weight_grad: receives pieces of d loss / d weight [vocab, width]; None if the head is frozen.

    Returns:
        log-probs [n] float32 and d loss / d h [n, width].
    """
    logp = torch.empty(h.shape[0], dtype=torch.float32, device=h.device)
    dh = torch.empty_like(h)
    n = h.shape[0]
    # One buffer for the logits' gradient, filled by several calls of the head: the fewer pieces the weight's
    # gradient has, the less often that large matrix is read and written.
    buffer = torch.empty(min(n, _PIECE), weight.shape[0], dtype=h.dtype, device=h.device)
    for start in range(0, n, _PIECE):
        piece = h[start : start + _PIECE]
        grad = buffer[: piece.shape[0]]
        for a in range(0, piece.shape[0], _CHUNK):
            logits = head(piece[a : a + _CHUNK])
            for i in range(0, logits.shape[0], _BLOCK):
                rows = slice(start + a + i, min(start + a + i + _BLOCK, start + a + _CHUNK, n))
                lp, e, total = _block(logits[i : i + _BLOCK], targets[rows], temperature)
                logp[rows] = lp
                c = (coefficient(lp, rows) / temperature)[:, None]
                e.mul_(-c / total[:, None]).scatter_add_(1, targets[rows, None], c)
                grad[a + i : a + i + _BLOCK] = e
        dh[start : start + _PIECE] = grad @ weight
        if add_weight_grad is not None:
            add_weight_grad(grad.t() @ piece)
    return logp, dh
