"""The weights of a checkpoint in a model, without an optimiser. Imports torch: import it lazily."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from racelab.experiments.backends.local.model import LocalModel
from racelab.experiments.errors import CheckpointError


def load_trained(model: LocalModel, tensors: Mapping[str, Tensor]) -> None:
    """Puts the weights of `LocalBackend.state_tensors` into a model; the optimiser's part of them is left alone.

    Args:
        model: opened with role `policy`, with the engine and `train_from_layer` of the run that wrote them.
        tensors: `weight/<name>` of every trained one.

    Raises:
        CheckpointError: one is missing, of another shape, or of no layer that this model trains.
    """
    masters = model.core.masters
    given = {name.removeprefix("weight/"): t for name, t in tensors.items() if name.startswith("weight/")}
    bad = sorted(
        name
        for name in {*masters, *given}
        if name not in masters or name not in given or masters[name].shape != given[name].shape
    )
    if bad:
        raise CheckpointError(
            f"checkpoint: {len(bad)} weights do not fit the model, first {bad[0]}; the run's base model or engine "
            "is another than it was trained with"
        )
    with torch.no_grad():
        for name, parameter in masters.items():
            parameter.copy_(given[name])
    model.core.refresh()
