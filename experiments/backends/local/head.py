"""Log-probabilities and their gradient through the vocabulary, without ever holding [tokens, vocab].

Source of the loss: RACE Eq 4 (clipped policy gradient with a kl3 penalty), as a weighted sum over tokens. Beside it:
the exact entropy of the distribution that a token is scored under, and plain negative log-likelihood for the tokens of
an auxiliary loss (RLDS Eq 4).
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

Coefficient = Callable[[Tensor, slice], tuple[Tensor, Tensor | None]]
"""(log-probs [m], which tokens) -> (c [m], h [m] or None): d loss / d log-prob, and the loss's term - h_t H_t, where
H_t is the entropy of the distribution that token t is scored under."""


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
        clip_high: another upper bound, 1 + clip_high; None: the same as the lower.
        policy: [tokens] of booleans: these have ratio, advantage, KL and entropy, the others only -w_t log p_t; None:
            all are policy tokens.
        entropy: w_t times the entropy coefficient, 0 outside `policy`; None: no entropy term.
    """

    advantages: Tensor
    weights: Tensor
    old: Tensor | None
    reference: Tensor | None
    clip: float
    beta: float
    clip_high: float | None = None
    policy: Tensor | None = None
    entropy: Tensor | None = None

    def evaluate(self, logp: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss parts and the exact derivative at `logp` [m] for the tokens in `part`.

        With r = exp(logp - old): loss_t = w (-min(r A, clip(r) A) + beta kl3),
        kl3 = exp(ref - logp) - (ref - logp) - 1, and

            d loss_t / d logp = w (-r A [not clipped] + beta (1 - exp(ref - logp))).

        Outside `policy`: loss_t = -w logp, derivative -w.

        Returns:
            derivative, policy part, kl3, clipped (1.0 or 0.0), each [m]; only the derivative is weighted. Outside
            `policy` the last three are -logp, 0 and 0.
        """
        adv, w = self.advantages[part], self.weights[part]
        ratio = torch.ones_like(logp) if self.old is None else torch.exp(logp - self.old[part])
        top = 1 + (self.clip if self.clip_high is None else self.clip_high)
        high = (adv > 0) & (ratio > top)
        low = (adv < 0) & (ratio < 1 - self.clip)
        clipped = (high | low).to(logp.dtype)
        policy = -torch.minimum(ratio * adv, ratio.clamp(1 - self.clip, top) * adv)
        slope = -ratio * adv * (1 - clipped)
        kl = torch.zeros_like(logp)
        if self.reference is not None:
            delta = self.reference[part] - logp
            kl = torch.expm1(delta) - delta
            slope = slope - self.beta * torch.expm1(delta)
        if self.policy is None:
            return w * slope, policy, kl, clipped
        # chosen, not multiplied by 0: where nothing is trained the reference may be far away and exp overflow
        on, zero = self.policy[part], torch.zeros_like(logp)
        return (
            torch.where(on, w * slope, -w),
            torch.where(on, policy, -logp),
            torch.where(on, kl, zero),
            torch.where(on, clipped, zero),
        )


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

    With c_t = d loss / d log p_t, the gradient of the logits is c_t (onehot - softmax) / temperature; a term - h_t H_t
    adds h_t p (log p + H_t) / temperature, p being the softmax.

    Args:
        h: normalised final states [n, width], compute type.
        head: the head in the compute type.
        weight: the same weight [vocab, width], plain, compute type.
        targets: [n].
        temperature: divides the logits.
        coefficient: gives c and h for a block of tokens from its log-probs.
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
                slope, h_entropy = coefficient(lp, rows)
                c = (slope / temperature)[:, None]
                bonus = None if h_entropy is None else _entropy_grad(e, total, h_entropy / temperature)
                e.mul_(-c / total[:, None]).scatter_add_(1, targets[rows, None], c)
                grad[a + i : a + i + _BLOCK] = e if bonus is None else e.add_(bonus)
        dh[start : start + _PIECE] = grad @ weight
        if add_weight_grad is not None:
            add_weight_grad(grad.t() @ piece)
    return logp, dh


def _entropy_grad(e: Tensor, total: Tensor, h: Tensor) -> Tensor:
    """Gradient of -h H by the scaled logits, h p (log p + H), for p = e / total [m, vocab]; e is not changed.

    With s = e log e (0 where e is) and S its sum: log p + H = log e - S / total.
    """
    s: Tensor = torch.special.xlogy(e, e)
    s.addcmul_(e, (s.sum(-1) / total)[:, None], value=-1.0)
    s.mul_((h / total)[:, None])
    return s
