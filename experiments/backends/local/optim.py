"""Settings of the local learner: AdamW, its schedule, and the constants of the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from racelab.experiments.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class OptimSettings:
    """AdamW, its schedule, and the loss.

    Attributes:
        lr: peak learning rate.
        betas: AdamW's decay rates.
        eps: AdamW's epsilon.
        weight_decay: decoupled.
        max_grad_norm: the gradient is scaled down to this norm; infinity leaves it.
        schedule: after the warm-up: `constant`, or down to `min_lr_ratio` along a line or half a cosine.
        warmup_steps: updates over which the rate rises linearly from lr / warmup_steps.
        total_steps: updates at which `linear` and `cosine` arrive; required by them.
        min_lr_ratio: share of lr that is left at the end.
        beta: weight of kl3 against the frozen reference; 0 runs no reference.
        clip: eps of the ratio.
        clip_high: eps above 1 (clip-higher); None: the same as below.
        entropy_coef: alpha, weight of the policy's entropy, which is maximised; 0 never computes it.
        epochs: passes over the batch per update.
        minibatches: optimiser steps per pass; groups are dealt round-robin.
        max_tokens_per_microbatch: tokens (prefixes once, plus samples) that run together.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.0
    beta: float = 0.0
    clip: float = 0.2
    epochs: int = 1
    minibatches: int = 1
    max_tokens_per_microbatch: int = 4096
    clip_high: float | None = None
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot work."""
        for name in (
            "lr",
            "eps",
            "max_grad_norm",
            "clip",
            "epochs",
            "minibatches",
            "max_tokens_per_microbatch",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"learner.{name}: must be positive, got {getattr(self, name)}")
        if self.clip_high is not None and not self.clip_high > 0:
            raise ConfigError(f"learner.clip_ratio_high: must be positive or null, got {self.clip_high}")
        for name in ("weight_decay", "beta", "warmup_steps", "min_lr_ratio", "entropy_coef"):
            if getattr(self, name) < 0:
                raise ConfigError(f"learner.{name}: must not be negative, got {getattr(self, name)}")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ConfigError(f"learner.schedule: {self.schedule} is none of constant, linear, cosine")
        if self.schedule != "constant" and (
            self.total_steps is None or self.total_steps <= self.warmup_steps
        ):
            raise ConfigError(
                f"learner.total_steps: schedule {self.schedule} needs more than the {self.warmup_steps} "
                f"warm-up steps, got {self.total_steps}"
            )

    def lr_at(self, update: int) -> float:
        """Learning rate of an update, counted from 0."""
        if update < self.warmup_steps:
            return self.lr * (update + 1) / self.warmup_steps
        if self.schedule == "constant" or self.total_steps is None:
            return self.lr
        done = min(1.0, (update - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * left)
