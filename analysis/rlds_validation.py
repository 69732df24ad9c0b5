"""The validation slice of an RLDS run: before, after, every evaluation, best, last, mean of the last five.

The paper reports the best validation over checkpoints; a maximum over noisy evaluations is biased upwards, so the last
one and the mean of the last five stand beside it. The untrained model is no checkpoint: it is never the best one where
there is another evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from racelab.analysis.rlds_words import FEW
from racelab.analysis.stats import bootstrap_mean, paired_bootstrap
from racelab.experiments.rng import numpy_generator

Row = Mapping[str, Any]

UNTRAINED, TRAINED = "untrained", "trained"
LAST: Final = 5
"""Evaluations whose mean is the result of a run."""


def evaluations(samples: Sequence[Row]) -> list[dict[str, Any]]:
    """One dict per evaluation, by step: step, model, and example -> reward and -> solved."""
    found: dict[int, dict[str, Any]] = {}
    for row in samples:
        at = found.setdefault(
            int(row["step"]),
            {"step": int(row["step"]), "model": str(row["model"]), "reward": {}, "solved": {}},
        )
        at["reward"][str(row["example_id"])] = float(row["reward"])
        at["solved"][str(row["example_id"])] = float(row["solved"])
    return [found[step] for step in sorted(found)]


def last_evaluations(evals: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last five after training has begun; the untrained one only if there is no other."""
    later = [e for e in evals if e["step"] > 0]
    return list((later or list(evals))[-LAST:])


def validation(samples: Sequence[Row], n: int, seed: int) -> dict[str, Any]:
    """The fixed slice: before and after with a paired interval, every evaluation, best, last, mean of the last five.

    Args:
        samples: rows of `val_examples`.
        n: bootstrap replicates.
        seed: of the run; the draws depend on nothing else.
    """
    evals = evaluations(samples)
    if not evals:
        return {"n_evaluations": 0}
    by_model = {e["model"]: e for e in evals}
    curve = [
        {
            "step": e["step"],
            "model": e["model"],
            "n": len(e["reward"]),
            "reward": _average(e["reward"]),
            "solved": _average(e["solved"]),
        }
        for e in evals
    ]
    trained = [c for c in curve if c["step"] > 0]
    lasts = last_evaluations(evals)
    return {
        "n_evaluations": len(evals),
        **{
            key: _paired(
                by_model.get(UNTRAINED, {}).get(key, {}), by_model.get(TRAINED, {}).get(key, {}), n, seed
            )
            for key in ("reward", "solved")
        },
        "best": max(trained or curve, key=lambda c: float(c["reward"])),
        "n_checkpoints": len(trained or curve),
        "last": curve[-1],
        "last_five": {
            "n_evaluations": len(lasts),
            "steps": [e["step"] for e in lasts],
            **{key: _mean_of(lasts, key, n, seed) for key in ("reward", "solved")},
        },
        "curve": curve,
    }


def _average(cells: Mapping[str, float]) -> float:
    return sum(cells.values()) / len(cells)


def _mean_of(evals: Sequence[Mapping[str, Any]], key: str, n: int, seed: int) -> dict[str, float | None]:
    """Mean over examples of each example's mean over the evaluations; its interval, unless they are too few for one."""
    ids = sorted(set.intersection(*(set(e[key]) for e in evals)))
    table = np.array([[e[key][i] for e in evals] for i in ids])
    found = bootstrap_mean(table, numpy_generator(seed, "rlds-summary-last"), replicates=n)
    low, high = (found.low, found.high) if len(ids) >= FEW else (None, None)
    return {"mean": found.value, "low": low, "high": high}


def _paired(before: Mapping[str, float], after: Mapping[str, float], n: int, seed: int) -> dict[str, Any]:
    """Mean before, mean after, difference, over the examples that both have; its interval, unless they are too few."""
    ids = sorted(before.keys() & after.keys())
    if not ids:
        return {"n": 0, "before": None, "after": None, "difference": None, "low": None, "high": None}
    a, b = ([cells[i] for i in ids] for cells in (before, after))
    found = paired_bootstrap(b, a, numpy_generator(seed, "rlds-summary"), replicates=n)
    low, high = (found.difference.low, found.difference.high) if len(ids) >= FEW else (None, None)
    return {
        "n": len(ids),
        "before": found.mean_b,
        "after": found.mean_a,
        "difference": found.difference.value,
        "low": low,
        "high": high,
    }
