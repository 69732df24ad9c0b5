"""A tiny model that can think, a run that trained it, and the config of an evaluation, for the tests of the subject."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from racelab.configs.compose import compose
from racelab.configs.schema_eval import EvalRunConfig
from racelab.experiments.runfolder import RunFolder

from ...experiments.tiny_run import overrides, write_tiny_model

__all__ = ["evaluation", "trained_run", "write_tiny_model"]


def evaluation(source: object, suite: str = "race", **more: object) -> EvalRunConfig:
    """The config of an evaluation; the keys in `more` have `__` for the dot."""
    values = json.loads(_composed(suite))
    for key, value in {"subject__source": str(source), **more}.items():
        section, _, name = key.partition("__")
        values[section][name] = value
    return EvalRunConfig.model_validate(values)


@cache
def _composed(suite: str) -> str:
    return compose([f"suite={suite}"]).config.model_dump_json()


def trained_run(root: Path, model: Path, steps: Mapping[int, int], roles: tuple[str, ...] = ()) -> RunFolder:
    """A run with a checkpoint per global step (-> policy updates that its state counts); each learns something else.

    Args:
        root: of the runs.
        model: base model.
        steps: of the checkpoints.
        roles: sets of weights; all of them but the last are trained.
    """
    from racelab.experiments.backends.local.learner import LocalBackend, OptimSettings
    from racelab.experiments.backends.local.model import open_language_model
    from racelab.experiments.backends.roles import RoleBackend
    from racelab.experiments.checkpoint import CheckpointStore

    composed = compose(overrides(model, root))
    info = {"kind": "train", **composed.config.facts(), "cwd": str(root)}
    run = RunFolder.create(root, "tiny", composed_yaml=composed.yaml, overrides=[], info=info)
    policy = open_language_model(model, compute_dtype="float32", train_from_layer=1)
    one = LocalBackend(policy, OptimSettings(lr=0.05))
    backend: Any = RoleBackend(one, roles) if roles else one
    for step, updates in steps.items():
        for k, role in enumerate(roles[:-1] or ("",)):
            if role:
                backend.switch(role)
            backend.update(_batch(step + k))
        state = {"backend": backend.state_meta(), "method": {"phase": {"policy_steps": updates}}}
        CheckpointStore(run.path / "checkpoints", keep_last=9).save(step, backend.state_tensors(), state)
    return run


def _batch(which: int) -> Any:
    from racelab.experiments.types import TokenBatch, TrainGroup, TrainSample

    tokens = (7 + which, 8 + which, 9)
    sample = TrainSample(tokens, np.ones(3), np.full(3, 1 / 3))
    return TokenBatch((TrainGroup((1, 2), (sample,)),))
