"""What rubrics look like (RACE Tables 1, 10, 11): pure functions of text.

The lexicons decide by patterns whether a criterion is `specific` (names an expected value) or a `constraint`.
`evolm` follows the patterns of Li et al.'s statistics script, for comparison with Table 11; `ours` is
stricter about what counts as a value. Redundancy needs a model and has its own file (`redundancy.py`).

A rubric is valid if the method's own parser takes it; what is counted of it is all that was written, with the repeats
and the surplus that this parser drops.

Deviations from Li et al.'s script:
  * shares are taken over the criteria of all valid rubrics together; their script takes the share inside each rubric,
    then the mean over all prompts, unparsed ones counting 0;
  * "e.g." counts as an example whatever follows; in their script only if a letter does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Literal

from racelab.experiments.models.rubric import RubricSettings, is_grounded, parse_rubric, written_criteria
from racelab.experiments.types import Criterion

Lexicon = Literal["evolm", "ours"]

LABEL_ONLY_CHARS = 40
"""A criterion of at most this many characters is a label (RACE §4)."""

_PATTERNS: dict[str, tuple[re.Pattern[str], re.Pattern[str]]] = {
    "evolm": (
        re.compile(r"\d|= |equals |formula|equation|code|pattern|exact|verbatim", re.IGNORECASE),
        re.compile(
            r"\b(?:avoid|exclud|forbid)|\b(?:keyword|prohibit|restrict|must not|should not|do not)\b",
            re.IGNORECASE,
        ),
    ),
    "ours": (
        re.compile(
            r"\d|[=<>\u2264\u2265]|\b(?:equals?|exactly|verbatim)\b|[\"\u201c][^\"\u201d]+[\"\u201d]"
            r"|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|twelve|hundred)\b",
            re.IGNORECASE,
        ),
        re.compile(
            r"\b(?:avoid|exclud|forbid|prohibit|restrict|limit)|\b(?:no more|no less|no fewer|at most|"
            r"at least|only|never|without|must not|should not|do not|does not|cannot|between)\b",
            re.IGNORECASE,
        ),
    ),
}

_KINDS: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "negation": r"\b(?:avoids?|does not|must not|should not|do not|without|never|refrain|prohibit)\b"
        r"|\bexclud|\bno\s+\w",
        "examples": r"\b(?:such as|for example|for instance|including)\b|\be\.g\.",
        "correctness": r"\b(?:correct|accurat)|\berror-free\b",
        "completeness": r"\b(?:include|cover|address)|\b(?:comprehensive|thorough)\b",
    }.items()
}
"""Further kinds of criteria that Li et al.'s script counts; the same under both lexicons."""


@dataclass(frozen=True, slots=True)
class CriterionFlags:
    """One criterion of a probe, a row of the table `rubric_probe`."""

    criterion: str
    weight: float
    chars: int
    label_only: bool
    specific: bool
    constraint: bool
    grounded: bool
    negation: bool
    examples: bool
    correctness: bool
    completeness: bool


FLAGS = (
    "label_only",
    "specific",
    "constraint",
    "grounded",
    "negation",
    "examples",
    "correctness",
    "completeness",
)
"""What is counted as a share of the criteria."""


@dataclass(frozen=True, slots=True)
class RubricStats:
    """One probe prompt's rubric; `criteria` is empty if it did not parse."""

    valid: bool
    criteria: tuple[CriterionFlags, ...]

    @property
    def weights(self) -> list[float]:
        """The weights as written."""
        return [c.weight for c in self.criteria]


def is_specific(criterion: str, lexicon: Lexicon = "evolm") -> bool:
    """Names a concrete expected value (Table 11, "Specific")."""
    return _PATTERNS[lexicon][0].search(criterion) is not None


def is_constraint(criterion: str, lexicon: Lexicon = "evolm") -> bool:
    """States a limit or a prohibition (Table 11, "Constraint")."""
    return _PATTERNS[lexicon][1].search(criterion) is not None


def criterion_flags(criterion: Criterion, prompt: str, lexicon: Lexicon = "evolm") -> CriterionFlags:
    """All that is counted of one criterion."""
    text = criterion.text
    return CriterionFlags(
        criterion=text,
        weight=criterion.weight,
        chars=len(text),
        label_only=len(text) <= LABEL_ONLY_CHARS,
        specific=is_specific(text, lexicon),
        constraint=is_constraint(text, lexicon),
        grounded=is_grounded(text, prompt),
        **{kind: pattern.search(text) is not None for kind, pattern in _KINDS.items()},
    )


def rubric_stats(text: str, prompt: str, settings: RubricSettings, lexicon: Lexicon = "evolm") -> RubricStats:
    """Parses one generated rubric and flags all criteria written; a raw-text stand-in counts as not valid.

    The parser keeps text and weight of a criterion alone, so its scoring levels add to no length.
    """
    if not parse_rubric(text, settings, prompt).valid:
        return RubricStats(False, ())
    written = written_criteria(text, settings)
    return RubricStats(True, tuple(criterion_flags(c, prompt, lexicon) for c in written))


def probe_metrics(stats: Sequence[RubricStats]) -> dict[str, float]:
    """The `race/probe` metrics of one checkpoint, without the section.

    Validity is a share of prompts; the number of criteria and what is said of the weights are means over valid
    rubrics; all others are means over the criteria of valid rubrics (Table 11). What has no basis is left out.
    The largest weight is as written, its share (`top1_share_mean`) is of the rubric's sum, the spread is the
    population's.

    Raises:
        ValueError: no rubrics at all.
    """
    if not stats:
        raise ValueError("probe_metrics needs at least one rubric")
    valid = [s for s in stats if s.valid]
    rows = [c for s in valid for c in s.criteria]
    metrics = {"json_valid_frac": len(valid) / len(stats)}
    if not rows:
        return metrics
    weights = [s.weights for s in valid]
    return metrics | {
        "n_criteria_mean": len(rows) / len(valid),
        "criterion_chars_mean": fmean(c.chars for c in rows),
        **{f"{flag}_frac": fmean(getattr(c, flag) for c in rows) for flag in FLAGS},
        "max_weight_mean": fmean(max(w) for w in weights),
        "top1_share_mean": fmean(max(w) / sum(w) for w in weights),
        "weight_std_mean": fmean(pstdev(w) for w in weights),
    }
