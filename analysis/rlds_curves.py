"""Conditions of RLDS against each other: finished runs of one task, over seeds and validation examples.

The result of a run is, for each validation example, the mean reward of the last five evaluations; the best evaluation
stands beside it. Intervals are of a bootstrap that draws seeds (outer level) and examples, the same draw for every
condition, so that a difference is paired in both. Seeds are few, and resampling few of them understates their
spread: with three seeds read an interval as a lower bound on the uncertainty.

Curves are compared at equal updates (at evaluations that were made), at equal tokens that the trained model sampled
(its rollouts, gradings and reflections; a scripted or random role samples none), and at equal CPU seconds of the run's
process (updates only: neither validation nor warm-up, and no server or simulator). Between evaluations the last two
are linear.

Shapes: S seeds, E evaluations of a run, V validation examples, B bootstrap replicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from racelab.analysis.rlds_validation import evaluations, last_evaluations
from racelab.analysis.rlds_verdicts import ARMS, verdicts, without_retries
from racelab.analysis.rlds_walker import blind_walker
from racelab.analysis.rlds_words import FEW, NO_TOOL, has_tools, notes, unpaid
from racelab.configs.schema_rlds import RldsRunConfig
from racelab.experiments.errors import DataError
from racelab.experiments.rng import numpy_generator
from racelab.experiments.runfolder import RunFolder

FloatArray = npt.NDArray[np.float64]

AXES: Final = {"updates": "updates", "tokens": "sampled tokens", "cpu_s": "CPU seconds"}
"""What curves are drawn against -> its name for people."""
REFERENCES: Final[tuple[str, ...]] = ("rlvr", "base-reflection")
_GRID: Final = 6
"""Amounts, at most, at which curves are compared."""
_RETRIES: Final = ("rlds/reflect/n_retries",)
_PAIRS: Final = ("rlds/reflect/n_reflect_pairs", "rlds/reflect/n_retry_pairs")
_TOOLS: Final = ("cost/calls/tool_calls",)
_TOKENS: Final = ("cost/tokens/policy", "cost/tokens/grade", "cost/tokens/reflect")


@dataclass(frozen=True, slots=True)
class Curve:
    """The evaluations of one run.

    Attributes:
        task: of the run.
        condition: of the run.
        label: of its cell.
        seed: of the run.
        replicates: B of its config.
        at: axis -> how much of it each evaluation came after [E].
        reward: mean over the slice [E].
        result: example -> mean reward of the last evaluations.
        n_last: evaluations behind `result`.
        retries: that were made.
        pairs: that the auxiliary loss learnt from.
        config: of the run.
        tool_calls: in its updates; None for a task without tools.
    """

    task: str
    condition: str
    label: str
    seed: int
    replicates: int
    at: Mapping[str, FloatArray]
    reward: FloatArray
    result: Mapping[str, float]
    n_last: int
    retries: int
    pairs: int
    config: RldsRunConfig
    tool_calls: int | None = None

    @property
    def best(self) -> float:
        """The highest evaluation of a checkpoint; the untrained model is none, unless there is no other."""
        checkpoints_E = self.reward[self.at["updates"] > 0]
        return float((checkpoints_E if len(checkpoints_E) else self.reward).max())


def read_curve(run: RunFolder, label: str) -> Curve | None:
    """The curve of a finished RLDS run; None for any other, or one that was never validated."""
    from racelab.analysis.load import load_metrics, load_table
    from racelab.configs.compose import read_composed

    if run.info().get("paper") != "rlds" or run.status() != "finished":
        return None
    config = read_composed(run.path / "config" / "composed.yaml", to_look=True).config
    assert isinstance(config, RldsRunConfig)
    rows: list[dict[str, Any]] = load_table(run, "val_examples").to_dict("records")  # type: ignore[assignment]
    evals = evaluations(rows)
    if not evals:
        return None
    metrics = load_metrics(run)
    steps = np.array([e["step"] for e in evals])

    def so_far(names: Sequence[str]) -> FloatArray:
        """Sum of metrics over the steps up to each evaluation [E]."""
        each = sum((metrics[n].fillna(0.0) for n in names if n in metrics.columns), start=0.0 * metrics.index)
        spent, index = np.asarray(each, dtype=np.float64), np.asarray(metrics.index)
        return np.array([float(spent[index <= step].sum()) for step in steps])

    lasts = last_evaluations(evals)
    ids = sorted(set.intersection(*(set(e["reward"]) for e in lasts)))
    return Curve(
        task=config.task.name,
        condition=config.method.condition,
        label=label,
        seed=config.run.seed,
        replicates=config.validation.bootstrap,
        at={
            "updates": steps.astype(np.float64),
            "tokens": so_far(_TOKENS),
            "cpu_s": so_far(["perf/cpu/step_s"]),
        },
        reward=np.array([np.mean(list(e["reward"].values())) for e in evals]),
        result={i: float(np.mean([e["reward"][i] for e in lasts])) for i in ids},
        n_last=len(lasts),
        retries=int(so_far(_RETRIES)[-1]),
        pairs=int(so_far(_PAIRS)[-1]),
        config=config,
        tool_calls=int(so_far(_TOOLS)[-1]) if has_tools(config) else None,
    )


def interpolate(x_E: FloatArray, y_E: FloatArray, at: float) -> float | None:
    """The curve at `at`, linear between its points; None before its first and beyond its last.

    Example: x = [0, 10, 30], y = [0.1, 0.5, 0.7] gives 0.3 at 5, 0.6 at 20, None at 31.
    """
    if not len(x_E) or at < x_E[0] or at > x_E[-1]:
        return None
    return float(np.interp(at, x_E, y_E))


def named(curves: Sequence[Curve]) -> dict[str, dict[int, Curve]]:
    """Name -> seed -> curve, of one task.

    The name is the condition where every condition has one label, else the label: a sweep may cross conditions with
    other keys.
    """
    labels: dict[str, set[str]] = {}
    for curve in curves:
        labels.setdefault(curve.condition, set()).add(curve.label)
    plain = all(len(found) == 1 for found in labels.values())
    found: dict[str, dict[int, Curve]] = {}
    for curve in curves:
        found.setdefault(curve.condition if plain else curve.label, {})[curve.seed] = curve
    return found


def table_SV(curves: Mapping[int, Curve], seeds: Sequence[int], ids: Sequence[str]) -> FloatArray:
    """The results of some seeds at some examples [S, V]."""
    return np.array([[curves[seed].result[i] for i in ids] for seed in seeds]).reshape(len(seeds), len(ids))


def bootstrap(values_SV: FloatArray, rng: np.random.Generator, replicates: int) -> dict[str, float]:
    """Mean over seeds and examples with its 95 % percentile interval: both are drawn with replacement, crossed.

    Every seed has the same examples, so one draw of examples serves all seeds of a replicate. With one seed only the
    examples are drawn. For a paired difference give the differences.

    Args:
        values_SV: [S, V].
        rng: source of the draws.
        replicates: B.

    Raises:
        DataError: no seeds or no examples.
    """
    n_seeds, n = values_SV.shape
    if not n_seeds or not n:
        raise DataError("no seeds or no validation examples in common; nothing to compare")
    seeds_BS = rng.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), size=replicates) / n_seeds
    examples_BV = rng.multinomial(n, np.full(n, 1 / n), size=replicates) / n
    draws_B = np.einsum("bs,sv,bv->b", seeds_BS, values_SV, examples_BV, optimize=True)
    low, high = np.quantile(draws_B, [0.025, 0.975])
    return {"value": float(values_SV.mean()), "low": float(low), "high": float(high)}


def compare(curves: Sequence[Curve]) -> dict[str, Any]:
    """Everything that is said of a sweep, as JSON values: task -> see `compare_task`."""
    tasks = list(dict.fromkeys(curve.task for curve in curves))
    return {task: compare_task([c for c in curves if c.task == task]) for task in tasks}


def compare_task(curves: Sequence[Curve]) -> dict[str, Any]:
    """The conditions of one task: results, paired differences, curves at equal cost, and what they say."""
    by_name = named(curves)
    pairs = [(a, b) for a in by_name for b in REFERENCES if a not in (b, REFERENCES[0]) and b in by_name]
    pairs += [(a, b) for a, b in ARMS if a in by_name and b in by_name]
    found = {f"{a} - {b}": _difference(by_name[a], by_name[b]) for a, b in pairs}
    differences = {name: values for name, values in found.items() if values is not None}
    return {
        "notes": [*_notes(by_name), *without_retries(by_name)],
        "token_notes": unpaid({name: next(iter(of.values())).config.method for name, of in by_name.items()}),
        "conditions": {name: _condition(of) for name, of in by_name.items()},
        "differences": differences,
        "verdicts": verdicts(differences, by_name),
        "curves": {axis: _at_equal(by_name, axis) for axis in AXES},
        "blind_walker": blind_walker(curves[0].config),
    }


def _notes(by_name: Mapping[str, Mapping[int, Curve]]) -> list[str]:
    """What a reader must know of some of the conditions before the numbers."""
    who: dict[str, list[str]] = {}
    for name, of in by_name.items():
        for note in notes(next(iter(of.values())).config):
            who.setdefault(note, []).append(name)
        if all(curve.tool_calls == 0 for curve in of.values()):
            who.setdefault(NO_TOOL, []).append(name)
    return [f"{', '.join(names)}: {note}" for note, names in who.items()]


def _condition(curves: Mapping[int, Curve]) -> dict[str, Any]:
    """One condition over its seeds: the result with its interval, and the mean over seeds of best and last."""
    first, seeds = next(iter(curves.values())), sorted(curves)
    ids = sorted(set.intersection(*(set(curves[s].result) for s in seeds)))
    found = _interval(table_SV(curves, seeds, ids), first.replicates)
    return {
        "seeds": seeds,
        "examples": len(ids),
        "evaluations": min(c.n_last for c in curves.values()),
        "last_five": found,
        "by_seed": {str(s): float(np.mean(list(curves[s].result.values()))) for s in seeds},
        "best": float(np.mean([c.best for c in curves.values()])),
        "last": float(np.mean([c.reward[-1] for c in curves.values()])),
    }


def _interval(values_SV: FloatArray, replicates: int) -> dict[str, float | None]:
    """`bootstrap`, without low and high where the examples are too few; the same data give the same interval."""
    found: dict[str, float | None] = {**bootstrap(values_SV, numpy_generator(0, "rlds-compare"), replicates)}
    return found if values_SV.shape[1] >= FEW else found | {"low": None, "high": None}


def _difference(a: Mapping[int, Curve], b: Mapping[int, Curve]) -> dict[str, Any] | None:
    """Result of a less that of b, paired over common seeds and examples; None without a common one.

    `resolved`: there is an interval, and 0 is not in it.
    """
    seeds = sorted(a.keys() & b.keys())
    runs = [of[seed] for of in (a, b) for seed in seeds]
    ids = sorted(set.intersection(*(set(run.result) for run in runs))) if runs else []
    if not ids:
        return None
    values_SV = table_SV(a, seeds, ids) - table_SV(b, seeds, ids)
    found = _interval(values_SV, runs[0].replicates)
    low, high = found["low"], found["high"]
    return {
        **found,
        "resolved": low is not None and high is not None and not low <= 0.0 <= high,
        "seeds": seeds,
        "examples": len(ids),
    }


def _at_equal(by_name: Mapping[str, Mapping[int, Curve]], axis: str) -> dict[str, Any]:
    """Mean reward over seeds at equal amounts of `axis`: None where one of the seeds has none.

    Updates are those after which all seeds of some condition were evaluated. Of tokens and seconds the last amount is
    the largest that all seeds of some condition come to; a seed that had ended before has no reward there.
    """
    grid = _evaluated(by_name) if axis == "updates" else _spread(by_name, axis)
    rows: dict[str, list[float | None]] = {}
    for name, of in by_name.items():
        rows[name] = []
        for at in grid:
            found = [_reward_at(c, axis, at) for c in of.values()]
            known = [value for value in found if value is not None]
            rows[name].append(sum(known) / len(known) if len(known) == len(found) else None)
    return {"at": grid, "reward": rows}


def _evaluated(by_name: Mapping[str, Mapping[int, Curve]]) -> list[float]:
    """Steps of common evaluations, every n-th up to the last, where they are too many for a table."""
    common = [
        set.intersection(*(set(c.at["updates"].tolist()) for c in of.values())) for of in by_name.values()
    ]
    steps = sorted(set.union(*common) - {0.0}) or [0.0]
    stride = -(-len(steps) // _GRID)
    return steps[::-1][::stride][::-1]


def _spread(by_name: Mapping[str, Mapping[int, Curve]], axis: str) -> list[float]:
    """Equal parts of the largest amount that all seeds of some condition come to."""
    ends = [min(float(c.at[axis][-1]) for c in of.values()) for of in by_name.values()]
    grid: list[float] = np.linspace(0.0, max(ends), _GRID + 1)[1:].tolist()
    return grid


def _reward_at(curve: Curve, axis: str, at: float) -> float | None:
    """Measured after so many updates; of tokens and seconds between two evaluations."""
    if axis != "updates":
        return interpolate(curve.at[axis], curve.reward, at)
    (found,) = np.nonzero(curve.at[axis] == at)
    return float(curve.reward[found[0]]) if len(found) else None
