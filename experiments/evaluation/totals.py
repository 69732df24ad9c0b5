"""From the marks of examples to the scores of benchmarks. Pure: a report makes the same numbers from a run's table.

A benchmark's score is a mean over examples (micro), a mean over its domains (macro), or what its authors define; see
`docs/evaluation.md` for each. A lost example has no score and is in no mean; how many there are stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from racelab.configs.schema_eval import BENCHMARKS, RACE_SUITE, RUBRIC_SUITE
from racelab.experiments.evaluation.harness.stock import STOCK
from racelab.experiments.evaluation.preference.judgebench import judgebench_total
from racelab.experiments.evaluation.preference.rewardbench2 import rewardbench2_total
from racelab.experiments.evaluation.types import Status

IFEVAL_LABELS: Final = ("ifeval", "ifeval-answer")
"""With the thinking block, as olmo3-adapt has it; and after it (RACE App. G)."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of `eval_examples`, as far as a score needs it."""

    label: str
    example_id: str
    domain: str
    score: float
    status: Status
    details: Mapping[str, Any] = field(default_factory=dict)
    judge: str = ""

    @classmethod
    def of_table(cls, row: Mapping[str, Any]) -> Row:
        """From the columns of the table; a score that is null is that of a lost example."""
        score = row.get("score")
        return cls(
            label=str(row["benchmark"]),
            example_id=str(row["example_id"]),
            domain=str(row.get("domain") or ""),
            score=math.nan if score is None else float(score),
            status=row.get("status") or "scored",
            details=row.get("details") or {},
            judge=str(row.get("judge") or ""),
        )

    @property
    def of(self) -> str:
        """The benchmark behind the label."""
        return benchmark_of(self.label)


@dataclass(frozen=True, slots=True)
class Total:
    """The score of one label.

    Attributes:
        label: benchmark, or one of IFEval's two.
        metric: name of the score.
        value: the score, a fraction in [0, 1] (RewardBench 2: up to 1.0017, for its authors' term of .01 in Ties); NaN
            without any scored example.
        n: examples with a score, the unparsed ones included.
        unparsed: of those, answers in which nothing could be scored.
        lost: examples without an answer; not in `n`.
        parts: domain -> its own score.
        more: further metrics.
    """

    label: str
    metric: str
    value: float
    n: int
    unparsed: int
    lost: int
    parts: Mapping[str, float] = field(default_factory=dict)
    more: Mapping[str, float] = field(default_factory=dict)


def benchmark_of(label: str) -> str:
    """`ifeval-answer` is one of IFEval's labels; any other label is its benchmark."""
    return "ifeval" if label in IFEVAL_LABELS else label


def in_order(labels: Iterable[str]) -> list[str]:
    """The labels in the order of the suites, IFEval's in that of `IFEVAL_LABELS`; what else there is comes last."""
    order = [label for name in BENCHMARKS for label in (IFEVAL_LABELS if name == "ifeval" else (name,))]
    found = list(dict.fromkeys(labels))
    return [*(label for label in order if label in found), *(label for label in found if label not in order)]


def lacks_domains(one: Total, rows: Iterable[Row], protocol: str) -> str:
    """`mmlu: 2 of 57 subjects`, where fewer have a score than the benchmark has; else "".

    Args:
        one: the score.
        rows: of its label.
        protocol: decides what the benchmark has.
    """
    whole, word = DOMAINS.get(protocol, {}).get(one.label, (0, ""))
    there = {row.domain for row in rows if row.domain in one.parts}
    return f"{one.label}: {len(there)} of {whole} {word}" if len(there) < whole else ""


def is_macro(label: str, protocol: str) -> bool:
    """Whether the score is the mean over domains, each counted alike."""
    return label in _MACRO.get(protocol, ())


def suite_totals(rows: Sequence[Row], protocol: str) -> dict[str, Total]:
    """Label -> its score, in the order of the suites; labels without a row are left out."""
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        by_label.setdefault(row.label, []).append(row)
    return {label: total(label, by_label[label], protocol) for label in in_order(by_label)}


def total(label: str, rows: Sequence[Row], protocol: str) -> Total:
    """The score of one label from all its rows."""
    scored = [row for row in rows if row.status != "lost"]
    name, unparsed = metric_name(label, protocol), sum(row.status == "unparsed" for row in scored)
    value, parts, more = math.nan, dict[str, float](), dict[str, float]()
    if scored and label in _AUTHORS:
        found = _AUTHORS[label](scored)
        value, parts = found.pop("avg"), found
    elif scored:
        parts = _by_domain(scored)
        macro = is_macro(label, protocol)
        value = fmean(parts.values()) if macro else fmean(row.score for row in scored)
        more = _means(scored, name)
    return Total(label, name, value, len(scored), unparsed, len(rows) - len(scored), parts, more)


def average(totals: Mapping[str, Total], suite: str) -> float | None:
    """The suite's mean over its benchmarks (Table 4: over eight; Table 5 has two); None if one of them is missing."""
    wanted = RUBRIC_SUITE if suite == "rubric" else RACE_SUITE if suite == "race" else ()
    values = [totals[name].value for name in wanted if name in totals]
    if not wanted or len(values) < len(wanted) or any(math.isnan(v) for v in values):
        return None
    return fmean(values)


def metrics_of(totals: Mapping[str, Total], suite: str, average_too: bool = False) -> dict[str, float]:
    """`eval/<suite>/<label>` and what stands beside it, for the tracker."""
    found: dict[str, float] = {}
    for label, one in totals.items():
        if not math.isnan(one.value):
            found[f"eval/{suite}/{label}"] = one.value
        found |= {f"eval/{suite}/{label}_{name}": value for name, value in one.more.items()}
        # the counts are there when they are 0 too: an evaluation that goes on must overwrite those of before
        counts = {"n": one.n, "unparsed": one.unparsed, "lost": one.lost}
        found |= {f"eval/{suite}/{label}_{name}": float(count) for name, count in counts.items()}
    mean = average(totals, suite) if average_too else None
    return found if mean is None else {**found, f"eval/{suite}/avg": mean}


def metric_name(label: str, protocol: str) -> str:
    """What the score of a label is called."""
    if protocol == "lm-eval":
        return STOCK[label].primary if label in STOCK else "score"
    return _NAMES.get(label, "score")


def _by_domain(rows: Sequence[Row]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.domain:
            found.setdefault(row.domain, []).append(row.score)
    return {domain: fmean(values) for domain, values in found.items()}


def _means(rows: Sequence[Row], primary: str) -> dict[str, float]:
    """Means of the details that are numbers; of a list of them over all items of all examples (micro)."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.details.items():
            items = value if isinstance(value, list) else [value]
            if all(isinstance(item, int | float) for item in items):
                values.setdefault(name, []).extend(float(item) for item in items)
    return {name: fmean(found) for name, found in values.items() if found and name not in (primary, *_COUNTS)}


_AUTHORS: Final[Mapping[str, Callable[[Sequence[Row]], dict[str, float]]]] = {
    "rewardbench2": rewardbench2_total,
    "judgebench": judgebench_total,
}
"""Label -> what its authors define: `avg`, and what it is made of."""
_COUNTS: Final = ("n", "c")
"""Details that are counts: a mean of them says nothing (MBPP+: samples, and those that passed)."""
_MACRO: Final[Mapping[str, tuple[str, ...]]] = {"olmo3-adapt": ("mmlu", "agieval")}
"""Protocol -> labels whose score is a mean over domains. BBH is micro: sum of score times n over sum of n."""
DOMAINS: Final[Mapping[str, Mapping[str, tuple[int, str]]]] = {
    "olmo3-adapt": {
        "mmlu": (57, "subjects"),
        "bbh": (27, "tasks"),
        "agieval": (8, "sets"),
        "rewardbench2": (6, "subsets"),
        "judgebench": (4, "categories"),
    },
    "lm-eval": {"mmlu": (57, "subjects"), "bbh": (27, "tasks"), "agieval": (10, "sets")},
}
"""Protocol -> label -> how many domains the whole benchmark has, and what they are called."""
_NAMES: Final[Mapping[str, str]] = {
    "gsm8k": "exact_match_flex",
    "mbpp_plus": "pass_at_1",
    "bbh": "exact_match",
    "mmlu": "exact_match",
    "popqa": "exact_match",
    "gpqa": "exact_match",
    "zebralogic": "puzzle_accuracy",
    "agieval": "exact_match",
    "ifeval": "prompt_level_loose_acc",
    "ifeval-answer": "prompt_level_loose_acc",
    "rewardbench2": "avg",
    "judgebench": "avg",
}
