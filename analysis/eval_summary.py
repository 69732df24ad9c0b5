"""What came of an evaluation: its scores, each with a bootstrap interval, and what must be known to read them."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from racelab.analysis.paired import score_interval
from racelab.analysis.rlds_words import counted
from racelab.configs.schema_eval import PROTOCOL_QUIRKS, QUIRK_BENCHMARKS, EvalRunConfig
from racelab.experiments.errors import RunFolderError
from racelab.experiments.evaluation.preference.judgebench import judgebench_notes, judgebench_total
from racelab.experiments.evaluation.rows import Recorded, read_recorded
from racelab.experiments.evaluation.totals import (
    Row,
    Total,
    average,
    benchmark_of,
    lacks_domains,
    suite_totals,
)
from racelab.experiments.fsio import read_json
from racelab.experiments.rng import numpy_generator
from racelab.experiments.runfolder import RunFolder

FEW: Final = 100
"""Examples below which a score is shown, and called too few: at 100 the interval of a rate of 0.5 is 20 points wide."""
_NO_WIDTH: Final = 1e-9
"""An interval below this is rounding."""


def summarise_eval(folder: RunFolder, config: EvalRunConfig) -> dict[str, Any]:
    """Scores, average and notes of an evaluation that has finished, or of what there is of it.

    Args:
        folder: of the evaluation.
        config: the one stored with it.
    """
    info, e = folder.info(), config.eval
    found = read_recorded(folder)
    rows = list(found.rows.values())
    totals = suite_totals(rows, e.protocol)
    scores = {label: _score(one, _of(rows, label), found, config) for label, one in totals.items()}
    return {
        "family": "eval",
        "run_id": folder.run_id,
        "name": info["name"],
        "path": str(folder.path),
        "suite": e.suite,
        "protocol": e.protocol,
        "seed": config.run.seed,
        "subject": dict(info.get("evaluates") or {"source": config.subject.source}),
        "judge": ", ".join(sorted({row.judge for row in rows if row.judge})) or None,
        "scores": scores,
        "avg": average(totals, e.suite),
        "notes": _notes(folder, config, totals, rows, scores),
    }


def _of(rows: Sequence[Row], label: str) -> list[Row]:
    return [row for row in rows if row.label == label]


def _score(one: Total, rows: Sequence[Row], recorded: Recorded, config: EvalRunConfig) -> dict[str, Any]:
    """JSON values; what is not known is null."""
    rng = numpy_generator(config.run.seed, f"interval:{one.label}")
    found = score_interval(rows, one.label, config.eval.protocol, rng)
    ends = [end for (name, _, _), end in recorded.finished.items() if name == benchmark_of(one.label)]
    return {
        "metric": one.metric,
        "value": _finite(one.value),
        "low": None if found is None else found.low,
        "high": None if found is None else found.high,
        "n": one.n,
        "unparsed": one.unparsed,
        "lost": one.lost,
        "answers": len(ends),
        "cut": ends.count(False),
        "parts": {name: _finite(value) for name, value in one.parts.items()},
        "more": {name: _finite(value) for name, value in one.more.items()},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _notes(
    folder: RunFolder,
    config: EvalRunConfig,
    totals: Mapping[str, Total],
    rows: Sequence[Row],
    scores: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """What keeps the scores from being read as the papers' are."""
    e = config.eval
    found = []
    if e.limit is not None:
        first = "example" if e.limit == 1 else f"{e.limit:,} examples"
        turns = "" if e.limit == 1 else ", its domains in turns"
        found.append(f"partial: only the first {first} of each benchmark{turns} (eval.limit)")
    found += _incomplete(folder, config, rows)
    lacking = (lacks_domains(one, _scored(_of(rows, label)), e.protocol) for label, one in totals.items())
    found += [
        *filter(None, lacking),
        *_cut(scores),
        *few_note({label: one.n for label, one in totals.items()}),
    ]
    found += [
        f"{label}: {_why_no_width(_of(rows, label))}; the bootstrap gives no width, which is no certainty"
        for label, one in scores.items()
        if one["low"] is not None and one["high"] - one["low"] < _NO_WIDTH
    ]
    found += [
        f"{label}: {counted(one.lost, 'example')} got no answer and {'is' if one.lost == 1 else 'are'} left out; "
        f"`racelab resume {folder.run_id}` asks for {'it' if one.lost == 1 else 'them'} again"
        for label, one in totals.items()
        if one.lost
    ]
    found += _unread(config, totals, rows)
    if "judgebench" in totals:
        found += _one_game(config)
    return found + _quirk_notes(config)


def _unread(config: EvalRunConfig, totals: Mapping[str, Total], rows: Sequence[Row]) -> list[str]:
    """A judge in whose replies no score can be read, and what to do about it."""
    found = []
    if "rewardbench2" in totals and totals["rewardbench2"].unparsed:
        one = totals["rewardbench2"]
        found.append(
            f"rewardbench2: in {one.unparsed:,} of {counted(one.n, 'example')} no score could be read"
        )
    if "judgebench" in totals:
        found += judgebench_notes(judgebench_total(_scored(_of(rows, "judgebench"))))
    if found and config.eval.rater == "rubric":
        found.append(
            "for a judge that cannot be read take a larger one (--judge); its replies are in the table eval_answers, "
            "role judge"
        )
    return found


def few_note(counts: Mapping[str, int]) -> list[str]:
    """A line on the labels with too few examples; `counts`: label -> examples that have a score."""
    few = [f"{label} {n}" for label, n in counts.items() if 0 < n < FEW]
    return [f"too few examples to conclude anything (fewer than {FEW}): {', '.join(few)}"] if few else []


def _incomplete(folder: RunFolder, config: EvalRunConfig, rows: Sequence[Row]) -> list[str]:
    """What has not been asked yet; how many examples there are was written down as the evaluation began."""
    done = Counter(benchmark for benchmark, _ in {(row.of, row.example_id) for row in rows})
    wanted = _counts(folder)
    missing = [
        f"{name} {done[name]:,} of {wanted[name]:,} examples" if name in wanted else f"{name} none yet"
        for name in config.eval.benchmarks
        if done[name] < wanted.get(name, 1)
    ]
    return [f"not complete: {', '.join(missing)}"] if missing else []


def _counts(folder: RunFolder) -> dict[str, int]:
    """Benchmark -> its examples; {} where the evaluation came to nothing before it knew."""
    with contextlib.suppress(RunFolderError):
        found = read_json(folder.path / "setup.json")
        counts = found.get("n") if isinstance(found, dict) else None
        return {str(k): v for k, v in counts.items() if type(v) is int} if isinstance(counts, dict) else {}
    return {}


def _cut(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Answers that the token budget ended, a benchmark's once."""
    by_name = {benchmark_of(label): one for label, one in scores.items()}
    return [
        f"{name}: {one['cut']:,} of {counted(one['answers'], 'answer')} {'was' if one['cut'] == 1 else 'were'} cut at "
        f"the token budget ({_share(one['cut'], one['answers'])})"
        for name, one in by_name.items()
        if one["cut"]
    ]


def _share(part: int, whole: int) -> str:
    """In whole per cent, but neither none nor all of it where it is not."""
    share = 100 * part / whole
    return "under 1 %" if share < 1 else "over 99 %" if 99 < share < 100 else f"{share:.0f} %"


def _why_no_width(rows: Sequence[Row]) -> str:
    scored = _scored(rows)
    if len(scored) == 1:
        return "there is one example"
    if _alike(rows):
        return "every example has the same score"
    return "no domain has examples with different scores"


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
