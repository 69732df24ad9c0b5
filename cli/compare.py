"""`racelab compare A B`: two evaluations, or two sets of seeds, example by example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from racelab.analysis.eval_summary import FEW
from racelab.analysis.paired import Compared, Comparison
from racelab.analysis.paired import compare as compared_sides
from racelab.cli.compare_sides import Evaluation, Side, check_alike, find_side
from racelab.cli.console import number, print_json, print_table, say
from racelab.cli.eval_view import percent
from racelab.cli.evaluate import benchmark_name
from racelab.cli.train import run_root
from racelab.experiments.errors import ConfigError
from racelab.experiments.evaluation.totals import benchmark_of
from racelab.experiments.rng import numpy_generator

if TYPE_CHECKING:
    from pathlib import Path

    from racelab.analysis.stats import Interval

_MIN_SEEDS = 5


def compare(
    a: str,
    b: str,
    suite: str | None,
    benchmarks: str | None,
    level: float,
    replicates: int,
    seed: int,
    root: Path | None,
    json_output: bool,
) -> int:
    """Compares what the two words mean. Returns the exit code.

    Raises:
        ConfigError: evaluations that cannot be compared; the message says what differs.
        DataError: examples that only one side has.
    """
    folder = run_root(str(root) if root else "")
    sides = [find_side(word, suite, folder) for word in (a, b)]
    notes = [*(line for side in sides for line in side.notes), *check_alike(sides)]
    (rows_a, rows_b), left_out = _rows(sides, benchmarks)
    notes += left_out
    config = next(iter(sides[0].runs.values())).config
    rng = numpy_generator(seed, "compare")
    found = compared_sides(
        rows_a, rows_b, config.eval.suite, config.eval.protocol, rng, replicates=replicates, level=level
    )
    notes += _limits(found)
    sentences = _sentences(found, level)
    if json_output:
        asked = {"level": level, "replicates": replicates, "draws_seed": seed}
        print_json({**_as_json(found, sides, config.eval.suite, config.eval.protocol), **asked,
                    "sentences": sentences, "notes": notes})  # fmt: skip
        return 0
    _print(found, sides, level)
    for line in sentences:
        print(line)
    for line in notes:
        say(f"note: {line}")
    return 0


def _rows(sides: Sequence[Side], benchmarks: str | None) -> tuple[list[dict[str, Any]], list[str]]:
    """Seed -> rows of both sides, of the benchmarks that are asked for or that all have; and what that leaves out."""
    every = [one for side in sides for one in side.runs.values()]
    there = [dict.fromkeys(row.label for row in one.rows) for one in every]
    common = [label for label in there[0] if all(label in labels for labels in there)]
    notes: list[str] = []
    if benchmarks is not None:
        asked = [benchmark_name(word) for word in benchmarks.split(",") if word.strip()]
        for name in asked:
            lacking = next((one for one in every if all(row.of != name for row in one.rows)), None)
            if lacking is not None:
                raise ConfigError(f"--benchmarks {name}: {lacking.folder.run_id} has no examples of it")
        common = [label for label in common if benchmark_of(label) in asked]
    else:
        for one, labels in zip(every, there, strict=True):
            odd = [label for label in labels if label not in common]
            if odd:
                notes.append(f"not compared, since not all have it: {', '.join(odd)} of {one.folder.run_id}")
    if not common:
        raise ConfigError("the evaluations have no benchmark in common; evaluate both on the same ones")
    return [{seed: _kept(one, common) for seed, one in side.runs.items()} for side in sides], notes


def _kept(one: Evaluation, labels: Sequence[str]) -> list[Any]:
    return [row for label in labels for row in one.rows if row.label == label]


# --- words --------------------------------------------------------------------------------------------------------


def _level(level: float) -> str:
    return f"{100 * level:g} %"


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _bounds(found: Interval) -> str:
    return f"[{_points(found.low)}, {_points(found.high)}]"


def _p(value: float | None) -> str:
    return "-" if value is None else "<0.001" if value < 0.001 else number(value)


def _print(found: Comparison, sides: Sequence[Side], level: float) -> None:
    for letter, side in zip("AB", sides, strict=True):
        of = ", ".join(f"{one.folder.run_id} (seed {one.seed})" for one in side.runs.values())
        say(f"{letter}: {side.typed}: {of}")
    gap = "difference"
    columns = [
        "benchmark",
        "A",
        "B",
        gap,
        f"{_level(level)} interval",
        "p",
        "p (Holm)",
        "examples",
        "wins/ties/losses",
    ]
    rows = [
        [
            label,
            percent(one.value_a),
            percent(one.value_b),
            _points(one.difference.value),
            _bounds(one.difference),
            _p(one.p),
            _p(one.p_holm),
            f"{one.n:,}",
            f"{one.wins:,}/{one.ties:,}/{one.losses:,}",
        ]
        for label, one in found.benchmarks.items()
    ]
    if found.average is not None:
        middle = [_points(found.average.value), _bounds(found.average)]
        rows.append(
            ["average", percent(found.average_a), percent(found.average_b), *middle, "-", "-", "-", "-"]
        )
    print_table(columns, rows, right=columns[1:])


def _sentences(found: Comparison, level: float) -> list[str]:
    """What may be said, and no more: a claim needs the interval and the p value after Holm."""
    claims, doubtful, none = list[str](), list[str](), list[str]()
    for label, one in found.benchmarks.items():
        d = one.difference
        p = one.p if one.p_holm is None else one.p_holm
        better = "A" if d.value > 0 else "B"
        size = f"{abs(100 * d.value):.1f} points, {_level(level)} interval of A - B {_bounds(d)}"
        if d.low <= 0.0 <= d.high:
            none.append(label)
        elif p > 1.0 - level:
            after = "" if one.p_holm is None or len(found.benchmarks) == 1 else " after Holm"
            doubtful.append(
                f"{label}: {better} is ahead by {size}, which excludes 0, but p{after} is {_p(p)}: no claim."
            )
        else:
            claims.append(f"{label}: {better} is better by {size}, which excludes 0; p {_p(p)}.")
    lines = claims + doubtful
    if none:
        lines.append(f"No difference is shown on {', '.join(none)}: 0 lies inside the interval.")
    if found.average is not None:
        d = found.average
        better = "A" if d.value > 0 else "B"
        apart = not d.low <= 0.0 <= d.high
        said = f"{better} is better by {abs(100 * d.value):.1f} points" if apart else "no difference is shown"
        lines.append(f"On the suite's average {said}; {_level(level)} interval of A - B {_bounds(d)}.")
    return lines


def _limits(found: Comparison) -> list[str]:
    """What the numbers may not be taken for."""
    notes = [
        f"{one.label}: {one.lost} examples without an answer on one of the sides are left out on both"
        for one in found.benchmarks.values()
        if one.lost
    ]
    few = [f"{one.label} {one.n}" for one in found.benchmarks.values() if one.n < FEW]
    if few:
        notes.append(f"too few examples to conclude anything (fewer than {FEW}): {', '.join(few)}")
    n_a, n_b = len(found.seeds_a), len(found.seeds_b)
    if n_a == n_b == 1:
        return [*notes, "one seed a side: the interval says nothing of other seeds"]
    how = "drawn in pairs" if found.matched else "drawn on each side by itself"
    notes.append(f"seeds: {n_a} of A, {n_b} of B, {how}; examples are drawn inside")
    if min(n_a, n_b) < _MIN_SEEDS:
        notes.append(f"fewer than {_MIN_SEEDS} seeds a side: the spread between seeds is underestimated")
    return notes


def _as_json(found: Comparison, sides: Sequence[Side], suite: str, protocol: str) -> dict[str, Any]:
    return {
        **{
            key: {"typed": side.typed, "runs": [one.to_json() for one in side.runs.values()]}
            for key, side in zip("ab", sides, strict=True)
        },
        "suite": suite,
        "protocol": protocol,
        "seeds": {"a": found.seeds_a, "b": found.seeds_b, "matched": found.matched},
        "benchmarks": {label: _one_json(one) for label, one in found.benchmarks.items()},
        "average": None
        if found.average is None
        else {"a": found.average_a, "b": found.average_b, "difference": asdict(found.average)},
    }


def _one_json(one: Compared) -> dict[str, Any]:
    values = asdict(replace(one))
    return {key: value for key, value in values.items() if key != "label"}
