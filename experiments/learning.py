"""The learner's settings, from the config of a run that trains. Imports torch when it is called."""

from __future__ import annotations

from typing import Any

from racelab.configs.schema_rlds import TrainConfig


def learner_settings(config: TrainConfig) -> Any:
    """The learner's settings, with the length of the schedule."""
    from racelab.experiments.backends.local.optim import OptimSettings

    learner = config.learner
    return OptimSettings(
        lr=learner.lr,
        schedule=learner.schedule,
        warmup_steps=learner.warmup_steps,
        betas=learner.betas,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        beta=learner.kl_beta,
        clip=learner.clip_ratio,
        clip_high=learner.clip_ratio_high,
        entropy_coef=learner.entropy_coef,
        epochs=learner.epochs,
        minibatches=learner.minibatches,
        max_tokens_per_microbatch=learner.max_tokens_per_microbatch,
    )
