"""Conditions of RLDS against each other: finished runs of one task, over seeds and validation examples.

The result of a run is, for each validation example, the mean reward of the last five evaluations; the best evaluation
stands beside it. Intervals are of a bootstrap that draws seeds (outer level) and examples, the same draw for every
condition, so that a difference is paired in both. Seeds are few, and resampling few of them understates their
spread: with three seeds read an interval as a lower bound on the uncertainty.

Curves are compared at equal updates, at equal tokens that the trained model sampled (its rollouts, gradings and
reflections), and at equal CPU seconds of the run's process (updates only: neither validation nor warm-up, and no
server or simulator).

Shapes: S seeds, E evaluations of a run, V validation examples, B bootstrap replicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from racelab.analysis.rlds_summary import evaluations, last_evaluations, notes
from racelab.configs.schema_rlds import FrozenLakeTask, RldsRunConfig
from racelab.experiments.errors import DataError, RacelabError
from racelab.experiments.rng import numpy_generator
from racelab.experiments.runfolder import RunFolder

FloatArray = npt.NDArray[np.float64]

AXES: Final = {"updates": "updates", "tokens": "sampled tokens", "cpu_s": "CPU seconds"}
"""What curves are drawn against -> its name for people."""
SDAE, RETRIES, RANDOM = (
    ("rlds", "base-reflection"),
    ("base-reflection", "rlvr"),
    ("rlds", "rlds-random-grades"),
)
"""Differences that answer a question: what SDAE adds, what the retries add, what the grades' content adds."""
REFERENCES: Final[tuple[str, ...]] = ("rlvr", "base-reflection")
_GRID: Final = 6
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
        config: of the run.
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
    config: RldsRunConfig

    @property
    def best(self) -> float:
        """The highest evaluation."""
        return float(self.reward.max())


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
        config=config,
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
    pairs += [RANDOM] * all(name in by_name for name in RANDOM)
    found = {f"{a} - {b}": _difference(by_name[a], by_name[b]) for a, b in pairs}
    differences = {name: values for name, values in found.items() if values is not None}
    return {
        "notes": _notes(by_name),
        "conditions": {name: _condition(of) for name, of in by_name.items()},
        "differences": differences,
        "verdicts": verdicts(differences),
        "curves": {axis: _at_equal(by_name, axis) for axis in AXES},
        "blind_walker": blind_walker(curves[0].config),
    }


def _notes(by_name: Mapping[str, Mapping[int, Curve]]) -> list[str]:
    """What a reader must know of some of the conditions before the numbers."""
    who: dict[str, list[str]] = {}
    for name, of in by_name.items():
        for note in notes(next(iter(of.values())).config):
            who.setdefault(note, []).append(name)
    return [f"{', '.join(names)}: {note}" for note, names in who.items()]


def _condition(curves: Mapping[int, Curve]) -> dict[str, Any]:
    """One condition over its seeds: the result with its interval, and the mean over seeds of best and last."""
    first, seeds = next(iter(curves.values())), sorted(curves)
    ids = sorted(set.intersection(*(set(curves[s].result) for s in seeds)))
    found = bootstrap(table_SV(curves, seeds, ids), _rng(), first.replicates)
    return {
        "seeds": seeds,
        "examples": len(ids),
        "evaluations": min(c.n_last for c in curves.values()),
        "last_five": found,
        "by_seed": {str(s): float(np.mean(list(curves[s].result.values()))) for s in seeds},
        "best": float(np.mean([c.best for c in curves.values()])),
        "last": float(np.mean([c.reward[-1] for c in curves.values()])),
    }


def _rng() -> np.random.Generator:
    """The same draws for every comparison: the same data give the same interval."""
    return numpy_generator(0, "rlds-compare")


def _difference(a: Mapping[int, Curve], b: Mapping[int, Curve]) -> dict[str, Any] | None:
    """Result of a less that of b, paired over common seeds and examples; None without a common one."""
    seeds = sorted(a.keys() & b.keys())
    runs = [of[seed] for of in (a, b) for seed in seeds]
    ids = sorted(set.intersection(*(set(run.result) for run in runs))) if runs else []
    if not ids:
        return None
    values_SV = table_SV(a, seeds, ids) - table_SV(b, seeds, ids)
    found = bootstrap(values_SV, _rng(), runs[0].replicates)
    return {
        **found,
        "resolved": not found["low"] <= 0.0 <= found["high"],
        "seeds": seeds,
        "examples": len(ids),
    }


def verdicts(differences: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What SDAE adds and what the retries add, in a sentence each; nothing about what was not run."""
    said = []
    sdae, retries, random = (differences.get(" - ".join(pair)) for pair in (SDAE, RETRIES, RANDOM))
    if sdae is not None or random is not None:
        parts = [] if sdae is None else [f"over the same retries with GRPO {_said(sdae)}"]
        parts += [] if random is None else [f"over itself with random grades and pivots {_said(random)}"]
        said.append(f"SDAE adds {', and '.join(parts)}.")
    if retries is not None:
        said.append(f"The retries add over scalar GRPO without them {_said(retries)}.")
    return said


def _said(found: Mapping[str, Any]) -> str:
    words = f"{found['value']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"
    return words if found["resolved"] else f"{words} (not resolved)"


def _at_equal(by_name: Mapping[str, Mapping[int, Curve]], axis: str) -> dict[str, Any]:
    """Mean reward over seeds at equal amounts of `axis`: None where one of the seeds had already ended.

    The last amount is the largest that all seeds of some condition come to.
    """
    ends = [min(float(c.at[axis][-1]) for c in of.values()) for of in by_name.values()]
    grid = np.linspace(0.0, max(ends), _GRID + 1)[1:]
    rows: dict[str, list[float | None]] = {}
    for name, of in by_name.items():
        rows[name] = []
        for at in grid:
            found = [interpolate(c.at[axis], c.reward, float(at)) for c in of.values()]
            known = [value for value in found if value is not None]
            rows[name].append(sum(known) / len(known) if len(known) == len(found) else None)
    return {"at": grid.tolist(), "reward": rows}


def blind_walker(config: RldsRunConfig) -> float | None:
    """Expected success on the validation boards of a walker that heads for the goal and does not see holes.

    It takes each move that brings it nearer (Manhattan distance) with equal probability. On 4x4 boards that is the
    line above which a policy must have learnt where holes are. None for other tasks, or if the boards cannot be had.
    """
    if not isinstance(config.task, FrozenLakeTask):
        return None
    from racelab.experiments.tasks.frozenlake.boards import from_instances
    from racelab.experiments.tasks.frozenlake.task import FrozenLake

    try:
        slice_ = FrozenLake(config.task).validation()[: config.validation.examples]
        boards = from_instances(slice_)
    except RacelabError:
        return None
    chances = [
        walk_blindly(cells.reshape(boards.side, boards.side), int(start), config.task.max_turns)
        for cells, start in zip(boards.cells_MC, boards.start_M, strict=True)
    ]
    return float(np.mean(chances)) if chances else None


def walk_blindly(cells: npt.NDArray[np.int8], start: int, turns: int) -> float:
    """Exact chance that the walker of `blind_walker` reaches the goal of one board [side, side] in `turns` moves.

    Example: with the goal one step right and one down of the start and a hole on one of the two ways it is 1/2.
    """
    from racelab.experiments.tasks.frozenlake.boards import GOAL, HOLE

    side = len(cells)
    (goal_row,), (goal_column,) = np.nonzero(cells == GOAL)
    row, column = divmod(start, side)
    if abs(goal_row - row) + abs(goal_column - column) > turns:
        return 0.0

    def chance(row: int, column: int) -> float:
        if cells[row, column] == HOLE:
            return 0.0
        down, right = int(np.sign(goal_row - row)), int(np.sign(goal_column - column))
        ways = [(row + down, column)] * (down != 0) + [(row, column + right)] * (right != 0)
        if not ways:
            return 1.0
        if (row, column) not in known:
            known[row, column] = sum(chance(*way) for way in ways) / len(ways)
        return known[row, column]

    known: dict[tuple[int, int], float] = {}
    return chance(row, column)
