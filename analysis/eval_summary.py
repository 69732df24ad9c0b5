"""What came of an evaluation: its scores, each with a bootstrap interval, and what must be known to read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from racelab.analysis.paired import score_interval
from racelab.configs.schema_eval import PROTOCOL_QUIRKS, QUIRK_BENCHMARKS, EvalRunConfig
from racelab.experiments.evaluation.preference.judgebench import judgebench_notes, judgebench_total
from racelab.experiments.evaluation.rows import recorded
from racelab.experiments.evaluation.totals import Row, Total, average, suite_totals
from racelab.experiments.rng import numpy_generator
from racelab.experiments.runfolder import RunFolder

FEW: Final = 100
"""Examples below which a score is shown, and called too few: at 100 the interval of a rate of 0.5 is 20 points wide."""


def summarise_eval(folder: RunFolder, config: EvalRunConfig) -> dict[str, Any]:
    """Scores, average and notes of an evaluation that has finished, or of what there is of it.

    Args:
        folder: of the evaluation.
        config: the one stored with it.
    """
    info, e = folder.info(), config.eval
    rows = list(recorded(folder).values())
    totals = suite_totals(rows, e.suite, e.protocol)
    return {
        "family": "eval",
        "run_id": folder.run_id,
        "name": info["name"],
        "path": str(folder.path),
        "suite": e.suite,
        "protocol": e.protocol,
        "seed": config.run.seed,
        "subject": dict(info.get("evaluates") or {"source": config.subject.source}),
        "scores": {label: _score(one, _of(rows, label), config) for label, one in totals.items()},
        "avg": average(totals, e.suite),
        "notes": _notes(folder.run_id, config, totals, rows),
    }


def _of(rows: Sequence[Row], label: str) -> list[Row]:
    return [row for row in rows if row.label == label]


def _score(one: Total, rows: Sequence[Row], config: EvalRunConfig) -> dict[str, Any]:
    """JSON values; what is not known is null."""
    rng = numpy_generator(config.run.seed, f"interval:{one.label}")
    found = score_interval(rows, one.label, config.eval.protocol, rng)
    return {
        "metric": one.metric,
        "value": _finite(one.value),
        "low": None if found is None else found.low,
        "high": None if found is None else found.high,
        "n": one.n,
        "unparsed": one.unparsed,
        "lost": one.lost,
        "parts": {name: _finite(value) for name, value in one.parts.items()},
        "more": {name: _finite(value) for name, value in one.more.items()},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _notes(run_id: str, config: EvalRunConfig, totals: Mapping[str, Total], rows: Sequence[Row]) -> list[str]:
    """What keeps the scores from being read as the papers' are."""
    e = config.eval
    found = []
    if e.limit is not None:
        found.append(f"partial: only the first {e.limit} examples of each benchmark (eval.limit)")
    missing = [name for name in e.benchmarks if not any(row.of == name for row in rows)]
    if missing:
        found.append(f"nothing yet of {', '.join(missing)}")
    few = [f"{label} {one.n}" for label, one in totals.items() if 0 < one.n < FEW]
    if few:
        found.append(f"too few examples to conclude anything (fewer than {FEW}): {', '.join(few)}")
    found += [
        f"{label}: every example has the same score; the bootstrap gives no width, which is no certainty"
        for label, one in totals.items()
        if one.n > 1 and _alike(_of(rows, label))
    ]
    found += [
        f"{label}: {one.lost} examples got no answer and are left out; `racelab resume {run_id}` asks for them again"
        for label, one in totals.items()
        if one.lost
    ]
    if "judgebench" in totals:
        found += judgebench_notes(judgebench_total(_scored(_of(rows, "judgebench"))))
        found += _one_game(config)
    return found + _quirk_notes(config)


def _one_game(config: EvalRunConfig) -> list[str]:
    """JudgeBench's second game is another draw of the judge: where it draws nothing there is one game."""
    if config.eval.rater == "reward-model" or getattr(config.judge, "temperature", 0.0) > 0:
        return []
    return [
        f"judgebench: judge={config.judge.kind} draws nothing, so its two games are one; JudgeBench's judge is sampled "
        "at T 0.6 (--judge URL, judge=qwen3-1.7b)"
    ]


def _scored(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.status != "lost"]


def _alike(rows: Sequence[Row]) -> bool:
    return len({row.score for row in _scored(rows)}) == 1


def _quirk_notes(config: EvalRunConfig) -> list[str]:
    """Quirks beside the protocol's own, and its own that are off, of the benchmarks that were asked."""
    asked = {
        quirk for quirk, of in QUIRK_BENCHMARKS.items() if not set(of).isdisjoint(config.eval.benchmarks)
    }
    own = asked.intersection(PROTOCOL_QUIRKS) if config.eval.protocol == "olmo3-adapt" else set()
    now = config.eval.in_force & asked
    found = []
    if now - own:
        found.append(f"quirks on that the protocol does not have: {', '.join(sorted(now - own))}")
    if own - now:
        found.append(f"quirks of the protocol that are off: {', '.join(sorted(own - now))}")
    if config.eval.thinking != "protocol":
        found.append(f"eval.thinking={config.eval.thinking}: the protocol reads some answers otherwise")
    return found
