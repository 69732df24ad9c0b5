"""The local learner: GRPO updates (RACE Eq 4) of a model in this process.

The loss of one update is

    L = sum_t w_t [ -min(r_t A_t, clip(r_t, 1 - eps, 1 + eps_high) A_t) + beta kl3_t - alpha H_t ]
        - sum over the tokens of auxiliary parts of w_t log pi(y_t),
    r_t = pi(y_t) / pi_old(y_t),  kl3_t = exp(d_t) - d_t - 1,  d_t = log pi_ref(y_t) - log pi(y_t),

with A_t and w_t taken from the `TokenBatch`, and H_t the exact entropy of the distribution that token t is scored
under (at the batch's temperature, like every log-prob here). Auxiliary parts (`TrainSample.part`, RLDS Eq 4) have no
ratio, and so are the same loss at every inner step. A token of weight 0 is context only.

pi_old is the policy before the update: on the first inner step the ratio is exactly 1 (from the detached training
log-prob, never from the rollout's, whose kernels round differently); for later inner steps the log-probs are those
that the training pass gave, or a pass without gradient for minibatches that the first step has not seen.

With several minibatches, the weights of each are scaled so that they sum to the weights of the whole batch, the
policy's and each auxiliary part's by themselves: every inner step is then as large as a full one.

This module imports torch: import it lazily. Masters and optimiser state are float32. Everything is written
for `cpu` and `cuda`; it has been tested on CPU only. On CPU the same seed gives bit-equal weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from racelab.experiments.backends.local.head import Coefficient, LossTerms
from racelab.experiments.backends.local.model import split_groups
from racelab.experiments.backends.local.optim import OptimSettings
from racelab.experiments.backends.local.trainable import Trainable
from racelab.experiments.errors import CheckpointError, ConfigError, DataError
from racelab.experiments.models.assets import model_sha256
from racelab.experiments.types import TokenBatch, TrainGroup, UpdateStats

Model = TypeVar("Model", bound=Trainable)

_POLICY = "policy"  # the part that is not an auxiliary loss


@dataclass(slots=True)
class _Totals:
    """Weighted sums over an update: the policy's; of each other part the weights and negative log-likelihoods."""

    weight: float = 0.0
    policy: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    steps: int = 0
    grad_norm: float = 0.0


class LocalBackend(Generic[Model]):
    """Implements `ports.Backend`, for any model that is `Trainable` and speaks the `LanguageModel` port.

    Attributes:
        policy: the trained model; generate from it at any time.
        reference: the model as it was before training (shares every weight that is not trained).
        updates: updates that took at least one optimiser step.
        skipped: optimiser steps left out because the gradient was not finite.
    """

    def __init__(self, policy: Model, settings: OptimSettings, reference: Model | None = None) -> None:
        """Wrap a model opened with role `policy`.

        Args:
            policy: trained in place.
            settings: see `OptimSettings`.
            reference: a frozen copy of `policy` as it is now by default. Another one must be of the same
                engine and equal the policy below its first trained layer; it is not checkpointed.
        """
        if policy.core.train_from is None:
            raise ConfigError("the local backend needs a model opened with role='policy'")
        self.policy: Model = policy
        self.settings = settings
        self.reference: Model = reference if reference is not None else policy.frozen_copy()
        self.updates = 0
        self.skipped = 0
        self._base_sha = model_sha256(policy.path)
        self._masters = policy.core.masters
        self._optimizer = torch.optim.AdamW(
            list(self._masters.values()),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    # ---- one update ----------------------------------------------------------------------------------

    def update(self, batch: TokenBatch) -> UpdateStats:
        """One GRPO update (Eq 4). See the port.

        Raises:
            DataError: a sample whose arrays differ in length, an empty prefix, a sequence beyond the window.
        """
        start = time.perf_counter()
        groups = _filled(batch)
        if not groups:
            return UpdateStats(lr=self.settings.lr_at(self.updates), seconds=time.perf_counter() - start)
        self.policy.check_groups([(g.prefix, [s.tokens for s in g.samples]) for g in groups])
        lr = self.settings.lr_at(self.updates)
        totals = _Totals()
        shares = [groups[k :: self.settings.minibatches] for k in range(self.settings.minibatches)]
        parts = [_scaled(share, groups) for share in shares if share]
        old: dict[int, list[Tensor | None]] = {}
        if len(parts) > 1:
            old = {k: self._old(part, batch.temperature) for k, part in enumerate(parts) if k}
        last_step = self.settings.epochs * len(parts) - 1
        for step in range(last_step + 1):
            k = step % len(parts)
            logps = self._inner(parts[k], batch.temperature, old.get(k), totals)
            if k not in old and last_step > 0:
                old[k] = logps
            self._step(lr, totals)
        if totals.steps:
            self.updates += 1
        return _stats(totals, batch, lr, time.perf_counter() - start)

    def _micro(self, groups: Sequence[TrainGroup]) -> list[list[TrainGroup]]:
        """Split into micro-batches, large groups over their samples."""
        limit = self.settings.max_tokens_per_microbatch
        pieces = split_groups([(g.prefix, [s.tokens for s in g.samples]) for g in groups], limit)
        samples = iter([s for g in groups for s in g.samples])
        return [
            [TrainGroup(tuple(p), tuple(next(samples) for _ in tails)) for p, tails in piece]
            for piece in pieces
        ]

    def _old(self, groups: Sequence[TrainGroup], temperature: float) -> list[Tensor | None]:
        """Log-probs of each micro-batch under the present policy; None where no ratio is taken."""
        return [
            self.policy.score(_pairs(piece), temperature) if _has_policy(piece) else None
            for piece in self._micro(groups)
        ]

    def _inner(
        self,
        groups: Sequence[TrainGroup],
        temperature: float,
        old: Sequence[Tensor | None] | None,
        totals: _Totals,
    ) -> list[Tensor | None]:
        """Accumulate the gradient of one minibatch; log-probs per micro-batch."""
        self._optimizer.zero_grad(set_to_none=True)
        logps: list[Tensor | None] = []
        for m, piece in enumerate(self._micro(groups)):
            terms = self._terms(piece, None if old is None else old[m])
            tallied = terms.weights if terms.policy is None else terms.weights * terms.policy

            def coefficient(
                ref: Tensor | None, terms: LossTerms = terms, tallied: Tensor = tallied
            ) -> Coefficient:
                full = replace(terms, reference=ref)

                def slope(lp: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
                    gradient, policy, kl, clipped = full.evaluate(lp, part)
                    _tally(totals, tallied[part], policy, kl, clipped, lp)
                    return gradient, None if full.entropy is None else full.entropy[part]

                return slope

            reference = self.reference if self.settings.beta > 0 and _has_policy(piece) else None
            logp = self.policy.accumulate(_pairs(piece), temperature, coefficient, reference)
            _tally_parts(totals, piece, terms.weights, logp)
            logps.append(logp)
        return logps

    def _terms(self, piece: Sequence[TrainGroup], old: Tensor | None) -> LossTerms:
        """The per-token inputs of the loss."""
        samples = [s for g in piece for s in g.samples]
        device = self.policy.core.device

        def flat(name: str) -> Tensor:
            return torch.cat([torch.as_tensor(getattr(s, name), dtype=torch.float32) for s in samples]).to(
                device
            )

        s, weights = self.settings, flat("weights")
        own = torch.cat([torch.full((len(p.tokens),), p.part == _POLICY) for p in samples]).to(device)
        policy = own & (weights != 0)
        return LossTerms(
            flat("advantages"),
            weights,
            old,
            None,
            s.clip,
            s.beta,
            clip_high=s.clip_high,
            policy=None if bool(policy.all()) else policy,
            entropy=s.entropy_coef * weights * policy if s.entropy_coef and bool(policy.any()) else None,
        )

    def _step(self, lr: float, totals: _Totals) -> None:
        """Clip and apply the gradient, unless it is not finite."""
        grads = [p.grad for p in self._masters.values() if p.grad is not None]
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))))
        totals.grad_norm = norm if math.isfinite(norm) else math.nan
        if not math.isfinite(norm):
            self.skipped += 1
            self._optimizer.zero_grad(set_to_none=True)
            return
        if norm > self.settings.max_grad_norm:
            torch._foreach_mul_(grads, self.settings.max_grad_norm / (norm + 1e-6))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.policy.core.refresh()  # a further inner step must run under the new weights
        totals.steps += 1

    # ---- state ---------------------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Masters as `weight/<name>`, moments as `exp_avg/<name>` and `exp_avg_sq/<name>`; not copied."""
        tensors = {f"weight/{name}": p.detach() for name, p in self._masters.items()}
        for name, p in self._masters.items():
            state = self._optimizer.state.get(p, {})
            tensors.update({f"{key}/{name}": state[key] for key in ("exp_avg", "exp_avg_sq") if key in state})
        return tensors

    def state_meta(self) -> dict[str, Any]:
        """See the port."""
        steps = {int(s["step"]) for s in self._optimizer.state.values()}
        return {
            "base_sha256": self._base_sha,
            "engine": self.policy.engine,
            "train_from_layer": self.policy.core.train_from,
            "updates": self.updates,
            "optimizer_steps": max(steps, default=0),
            "skipped": self.skipped,
        }

    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """See the port. The reference is left as it is.

        Raises:
            CheckpointError: another base model or engine, or tensors that do not fit.
        """
        mine = self.state_meta()
        for key in ("base_sha256", "engine", "train_from_layer"):
            if meta.get(key) != mine[key]:
                raise CheckpointError(
                    f"checkpoint was written with {key}={meta.get(key)}, this run has {mine[key]}; "
                    "resume with the model settings of the run that wrote it"
                )
        missing = [n for n in self._masters if f"weight/{n}" not in tensors]
        wrong = [
            n
            for n, p in self._masters.items()
            if n not in missing and tensors[f"weight/{n}"].shape != p.shape
        ]
        if missing or wrong:
            bad = missing + wrong
            raise CheckpointError(f"checkpoint: {len(bad)} weights are missing or misshapen, first {bad[0]}")
        steps = int(meta["optimizer_steps"])
        self._optimizer.state.clear()
        with torch.no_grad():
            for name, p in self._masters.items():
                p.copy_(tensors[f"weight/{name}"])
                if f"exp_avg/{name}" in tensors:
                    self._optimizer.state[p] = {
                        "step": torch.tensor(float(steps), dtype=torch.float32, device=p.device),
                        "exp_avg": tensors[f"exp_avg/{name}"].to(p.device, torch.float32, copy=True),
                        "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].to(p.device, torch.float32, copy=True),
                    }
        self.updates, self.skipped = int(meta["updates"]), int(meta["skipped"])
        self.policy.core.refresh()


def _filled(batch: TokenBatch) -> list[TrainGroup]:
    """The groups without samples that have no token; raise DataError for arrays that do not fit."""
    groups = []
    for j, g in enumerate(batch.groups):
        for s in g.samples:
            if not len(s.tokens) == len(s.advantages) == len(s.weights):
                raise DataError(
                    f"training group {j}: {len(s.tokens)} tokens, {len(s.advantages)} advantages and "
                    f"{len(s.weights)} weights; they must agree"
                )
        samples = tuple(s for s in g.samples if s.tokens)
        if samples:
            groups.append(TrainGroup(g.prefix, samples))
    return groups


def _scaled(share: Sequence[TrainGroup], groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """A minibatch with the weights of each part scaled to the sum that the part has in the whole batch."""
    if len(share) == len(groups):
        return list(share)
    whole, here = _weights(groups), _weights(share)
    factor = {part: whole[part] / total if total else 1.0 for part, total in here.items()}
    return [
        TrainGroup(g.prefix, tuple(replace(s, weights=s.weights * factor[s.part]) for s in g.samples))
        for g in share
    ]


def _weights(groups: Sequence[TrainGroup]) -> dict[str, float]:
    """Sum of the weights of each part."""
    sums: dict[str, float] = {}
    for g in groups:
        for s in g.samples:
            sums[s.part] = sums.get(s.part, 0.0) + float(s.weights.sum())
    return sums


def _has_policy(piece: Sequence[TrainGroup]) -> bool:
    """True if some token is trained by the clipped surrogate (and so needs ratio and reference)."""
    return any(s.part == _POLICY and bool(s.weights.any()) for g in piece for s in g.samples)


def _pairs(groups: Sequence[TrainGroup]) -> list[tuple[Sequence[int], Sequence[Sequence[int]]]]:
    """(prefix, samples' tokens) of each group."""
    return [(g.prefix, [s.tokens for s in g.samples]) for g in groups]


def _tally(totals: _Totals, w: Tensor, policy: Tensor, kl: Tensor, clipped: Tensor, logp: Tensor) -> None:
    """Add a piece's weighted sums."""
    sums = torch.stack([w.sum(), (w * policy).sum(), (w * kl).sum(), (w * clipped).sum(), -(w * logp).sum()])
    weight, policy_sum, kl_sum, clip_sum, entropy = sums.tolist()
    totals.weight += weight
    totals.policy += policy_sum
    totals.kl += kl_sum
    totals.clipped += clip_sum
    totals.entropy += entropy


def _tally_parts(totals: _Totals, piece: Sequence[TrainGroup], weights: Tensor, logp: Tensor) -> None:
    """Add the negative log-likelihoods of the auxiliary parts; `logp` is of all tokens of the piece."""
    samples = [s for g in piece for s in g.samples]
    if all(s.part == _POLICY for s in samples):
        return
    sizes = [len(s.tokens) for s in samples]
    values = [float(v.sum()) for v in torch.split(-weights * logp, sizes)]
    for s, total, value in zip(
        samples, [float(w.sum()) for w in torch.split(weights, sizes)], values, strict=True
    ):
        if s.part != _POLICY:
            before = totals.parts.get(s.part, (0.0, 0.0))
            totals.parts[s.part] = (before[0] + total, before[1] + value)


def _stats(t: _Totals, batch: TokenBatch, lr: float, seconds: float) -> UpdateStats:
    """What an update did; losses are averaged over the inner steps, the rest over the policy's weights."""
    w = t.weight or 1.0
    whole = _weights(batch.groups)
    total = whole.get(_POLICY, 0.0)
    return UpdateStats(
        stepped=t.steps > 0,
        loss_pg=t.policy * total / w,
        kl=t.kl / w,
        clip_frac=t.clipped / w,
        entropy=t.entropy / w,
        grad_norm=t.grad_norm,
        lr=lr,
        n_samples=batch.n_samples,
        n_tokens=batch.n_tokens,
        seconds=seconds,
        losses={part: value * whole[part] / (weight or 1.0) for part, (weight, value) in t.parts.items()},
    )
