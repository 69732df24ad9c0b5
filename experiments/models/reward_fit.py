"""A one-label reward head on frozen features, fitted to preference pairs by Bradley-Terry logistic regression.

    P(chosen beats rejected) = sigmoid(w · (x⁺ - x⁻)),    minimise  sum_i log(1 + exp(-w · z_i)) + (l2 / 2) |w|²

with x the untrained policy's hidden state at the token where transformers' classifiers read their label, each feature
divided by its standard deviation over the training answers, and z_i the difference of a pair.

A preference says nothing about the level of the scores, and the head of such a classifier has no bias. Left alone, the
part of w along the mean feature would put every logit far out on one side, where the sigmoid is flat and all rewards
are equal. So w is kept orthogonal to the mean feature: the mean logit of the training answers is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from racelab.experiments.errors import DataError, ModelError
from racelab.experiments.fsio import read_json
from racelab.experiments.models.assets import model_sha256
from racelab.experiments.models.reward_model import (
    HEAD_FILE,
    Classifier,
    Dtype,
    new_head,
    open_classifier,
    opened,
    write_head,
)
from racelab.experiments.rng import numpy_generator
from racelab.experiments.types import FloatArray, Pair

_ITERATIONS, _TOLERANCE = 100, 1e-9


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How a head is fitted.

    Attributes:
        holdout: share of the prompts whose pairs are kept apart.
        l2: weight of |w|² / 2 against the sum over pairs.
        seed: of the split.
        max_length: pairs with a longer conversation are left out.
    """

    holdout: float
    l2: float
    seed: int
    max_length: int


@dataclass(frozen=True, slots=True)
class FitReport:
    """How well the head ranks: shares of pairs whose better answer gets the higher logit (ties count half)."""

    train_pairs: int
    heldout_pairs: int
    train_accuracy: float
    heldout_accuracy: float
    left_out: int

    def line(self) -> str:
        """One line for the log."""
        extra = f"; {self.left_out} too long" if self.left_out else ""
        return (
            f"reward head fitted to {self.train_pairs} pairs: it ranks {self.train_accuracy:.2f} of them rightly, and "
            f"{self.heldout_accuracy:.2f} of {self.heldout_pairs} held-out pairs{extra}"
        )

    def state(self) -> dict[str, object]:
        """JSON values."""
        return {
            "train_pairs": self.train_pairs,
            "heldout_pairs": self.heldout_pairs,
            "train_accuracy": self.train_accuracy,
            "heldout_accuracy": self.heldout_accuracy,
            "left_out": self.left_out,
        }


def fitted_classifier(
    folder: Path,
    base: Path,
    pairs: Sequence[Pair],
    settings: FitSettings,
    *,
    source: str,
    revision: str | None = None,
    dtype: Dtype = "bfloat16",
    device: str = "cpu",
) -> tuple[Classifier, FitReport]:
    """The classifier of a head folder, which is fitted and written first if it is not there yet.

    Args:
        folder: of the head; one that is there is used as it is, whatever `pairs` and `settings` say now.
        base: folder of the untrained policy.
        pairs: to fit to.
        settings: see `FitSettings`.
        source: name under which `base` is found again.
        revision: likewise.
        dtype: of the model's forward passes.
        device: `cpu` or `cuda`.

    Raises:
        DataError: too few pairs to fit to or to hold out.
        ModelError: the model has no such head, or the folder is that of another model.
    """
    if not (folder / HEAD_FILE).is_file():
        classifier = opened(base, *new_head(base, dtype), device)
        weights, report = fit_head(classifier, pairs, settings)
        facts = {
            "base": {"source": source, "revision": revision, "sha256": model_sha256(base)},
            "fit": {**report.state(), "holdout": settings.holdout, "l2": settings.l2, "seed": settings.seed},
        }
        write_head(folder, weights, facts)
        del classifier  # the model is opened once more below, by the way that a resumed run takes
    fit = read_json(folder / HEAD_FILE)["fit"]
    found = open_classifier(folder, dtype=dtype, device=device, base=base)
    return found, FitReport(**{name: fit[name] for name in FitReport.__slots__})


def fit_head(
    classifier: Classifier, pairs: Sequence[Pair], settings: FitSettings
) -> tuple[FloatArray, FitReport]:
    """The head's weights [D], and how well it ranks.

    Raises:
        DataError: fewer than two prompts with a pair that is short enough.
    """
    limit = min(settings.max_length, classifier.window)
    rows = [[classifier.tokens(p.prompt.text, y) for y in (p.chosen, p.rejected)] for p in pairs]
    short = [i for i, both in enumerate(rows) if max(map(len, both)) <= limit]
    train, held = split([pairs[i] for i in short], settings.holdout, settings.seed)
    features = extract(classifier, [ids for i in short for ids in rows[i]]).reshape(len(short), 2, -1)
    weights = bradley_terry(features[train], settings.l2)
    margins = (features[:, 0] - features[:, 1]) @ weights
    return weights, FitReport(
        train_pairs=len(train),
        heldout_pairs=len(held),
        train_accuracy=_accuracy(margins[train]),
        heldout_accuracy=_accuracy(margins[held]),
        left_out=len(pairs) - len(short),
    )


def split(pairs: Sequence[Pair], holdout: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices to fit to and to hold out; pairs of the same prompt stay together.

    Args:
        pairs: in any order.
        holdout: share of the prompts; at least one prompt on each side.
        seed: of the draw.

    Raises:
        DataError: fewer than two prompts.
    """
    prompts = sorted({p.prompt.text for p in pairs})
    if len(prompts) < 2:
        raise DataError(
            f"method.pairs has {len(prompts)} prompts within method.max_length; a reward head needs two at least, "
            "one of them held out"
        )
    n = min(max(1, round(holdout * len(prompts))), len(prompts) - 1)
    order = numpy_generator(seed, "reward-holdout").permutation(len(prompts))[:n]
    apart = {prompts[i] for i in order}
    held = [i for i, p in enumerate(pairs) if p.prompt.text in apart]
    return [i for i, p in enumerate(pairs) if p.prompt.text not in apart], held


def extract(classifier: Classifier, rows: Sequence[Sequence[int]]) -> FloatArray:
    """What the head sees of each conversation, [n, D] in float64."""
    import torch

    seen: list[Any] = []
    hook = classifier.module.score.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    out: FloatArray | None = None
    pad = classifier.tokenizer.pad_token_id
    try:
        for batch in classifier.batches(rows):
            ids, mask = classifier.padded([rows[i] for i in batch])
            with torch.inference_mode():
                classifier.module(input_ids=ids, attention_mask=mask)
            hidden = seen.pop()  # [B, T, D]
            # as transformers pools: the last token that is not the padding token, even inside the mask
            places = torch.arange(ids.shape[1], device=ids.device) * (ids != pad)
            picked = hidden[torch.arange(len(batch), device=ids.device), places.argmax(-1)]
            if out is None:
                out = np.zeros((len(rows), picked.shape[-1]))
            out[batch] = picked.float().cpu().double().numpy()
    finally:
        hook.remove()
    if out is None:
        raise ValueError("no conversation to look at")
    return out


def bradley_terry(features: FloatArray, l2: float) -> FloatArray:
    """The weights of the module's docstring, in the units of the features.

    Args:
        features: [n, 2, D], the chosen answer first.
        l2: > 0, which makes the minimum unique.

    Returns:
        w [D] with w · mean(features) = 0.

    Raises:
        ModelError: the features hold values that are not finite.
    """
    if not np.isfinite(features).all():
        raise ModelError("the model's hidden states are not finite; fit with model.compute_dtype=float32")
    flat = features.reshape(-1, features.shape[-1])
    scale = flat.std(axis=0)
    scale = np.where(scale > 1e-8 * max(float(scale.max()), 1e-300), scale, np.inf)  # constant: no use
    centre = flat.mean(axis=0) / scale
    length = float(np.linalg.norm(centre))
    unit = centre / length if length > 0 else centre
    z = (features[:, 0] - features[:, 1]) / scale
    z -= np.outer(z @ unit, unit)
    w = _newton(z, l2)
    w -= (w @ unit) * unit  # rounding
    weights: FloatArray = w / scale
    return weights


def _newton(z: FloatArray, l2: float) -> FloatArray:
    """argmin_w sum log(1 + exp(-z w)) + l2/2 |w|² over the rows of z [n, D], by Newton's method with step halving."""
    n, width = z.shape
    if n < width:  # the minimum lies in the span of the rows: solve there
        basis, coordinates = np.linalg.qr(z.T)
        return np.asarray(basis @ _newton(coordinates.T, l2), dtype=np.float64)

    def loss(w: FloatArray) -> float:
        return float(np.logaddexp(0.0, -(z @ w)).sum() + 0.5 * l2 * (w @ w))

    w = np.zeros(width)
    for _ in range(_ITERATIONS):
        wrong = np.exp(-np.logaddexp(0.0, z @ w))  # probability of the wrong order [n]
        gradient = l2 * w - z.T @ wrong
        if float(np.abs(gradient).max()) <= _TOLERANCE * n:
            break
        hessian = l2 * np.eye(width) + (z * (wrong * (1.0 - wrong))[:, None]).T @ z
        step, rate = np.linalg.solve(hessian, gradient), 1.0
        while loss(w - rate * step) > loss(w) and rate > 1e-9:
            rate *= 0.5
        w = w - rate * step
    return w


def _accuracy(margins: FloatArray) -> float:
    return float(np.mean((margins > 0) + 0.5 * (margins == 0)))
