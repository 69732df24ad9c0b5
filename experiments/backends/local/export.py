"""Writing a trained model as an ordinary Hugging Face folder, for evaluation elsewhere.

This module imports torch: import it lazily.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torch import Tensor

from racelab.experiments.backends.local.fast import FastModel, split_fused, weight_names
from racelab.experiments.backends.local.model import LocalModel
from racelab.experiments.errors import ModelError


def export_model(model: LocalModel, folder: str | Path) -> Path:
    """Write config, tokenizer and weights of `model` as it is now.

    Frozen weights are taken from the folder that the model was read from, trained ones (in float32) from its
    masters.

    Args:
        model: opened with role `policy`.
        folder: made if need be; must hold no weights yet.

    Returns:
        the folder.

    Raises:
        ModelError: a frozen model, a folder that holds weights, or a base folder that is gone.
    """
    from safetensors.torch import load_file, save_file

    if model.core.train_from is None:
        raise ModelError(f"model {model.path} was opened frozen: copy that folder instead of exporting")
    target = Path(folder)
    if any(target.glob("*.safetensors")):
        raise ModelError(f"export folder {target} already holds weights; give an empty one")
    sources = sorted(model.path.glob("*.safetensors"))
    if not sources:
        raise ModelError(
            f"model folder {model.path}: its safetensors are gone, the frozen layers cannot be read"
        )
    target.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Tensor] = {}
    for file in sources:
        weights.update(load_file(str(file)))
    weights.update(trained_weights(model))
    for file in model.path.iterdir():
        if file.suffix in (".json", ".txt", ".jinja", ".model") and ".safetensors" not in file.name:
            shutil.copy(file, target / file.name)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(
        {name: w.detach().cpu().float().contiguous() for name, w in weights.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    return target


def trained_weights(model: LocalModel) -> dict[str, Tensor]:
    """The masters under their Hugging Face names (views where they are fused)."""
    core = model.core
    if not isinstance(core, FastModel):
        return dict(core.masters)
    out: dict[str, Tensor] = {}
    for fused, names in weight_names(core.spec):
        if fused in core.masters:
            out.update(zip(names, split_fused(core.spec, fused, core.masters[fused]), strict=True))
    return out
