"""What rubrics look like (RACE Tables 1, 10, 11): pure functions of text.

The lexicons decide by patterns whether a criterion is `specific` (names an expected value) or a `constraint`.
`evolm` follows the patterns of Li et al.'s statistics script, for comparison with Table 11; `ours` is
stricter about what counts as a value. Redundancy needs a judge model and is not here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from racelab.experiments.models.rubric import RubricSettings, is_grounded, parse_rubric

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


@dataclass(frozen=True, slots=True)
class CriterionFlags:
    """One criterion of a probe, a row of the table `rubric_probe`."""

    criterion: str
    chars: int
    label_only: bool
    specific: bool
    constraint: bool
    grounded: bool


@dataclass(frozen=True, slots=True)
class RubricStats:
    """One probe prompt's rubric; `criteria` is empty if it did not parse."""

    valid: bool
    criteria: tuple[CriterionFlags, ...]


def is_specific(criterion: str, lexicon: Lexicon = "evolm") -> bool:
    """Names a concrete expected value (Table 11, "Specific")."""
    return _PATTERNS[lexicon][0].search(criterion) is not None


def is_constraint(criterion: str, lexicon: Lexicon = "evolm") -> bool:
    """States a limit or a prohibition (Table 11, "Constraint")."""
    return _PATTERNS[lexicon][1].search(criterion) is not None


def criterion_flags(criterion: str, prompt: str, lexicon: Lexicon = "evolm") -> CriterionFlags:
    """All that is counted of one criterion."""
    return CriterionFlags(
        criterion=criterion,
        chars=len(criterion),
        label_only=len(criterion) <= LABEL_ONLY_CHARS,
        specific=is_specific(criterion, lexicon),
        constraint=is_constraint(criterion, lexicon),
        grounded=is_grounded(criterion, prompt),
    )


def rubric_stats(text: str, prompt: str, settings: RubricSettings, lexicon: Lexicon = "evolm") -> RubricStats:
    """Parses one generated rubric and flags its criteria; a raw-text stand-in counts as not valid."""
    parsed = parse_rubric(text, settings, prompt)
    if not parsed.valid or parsed.rubric is None:
        return RubricStats(False, ())
    return RubricStats(True, tuple(criterion_flags(c.text, prompt, lexicon) for c in parsed.rubric.criteria))


def probe_metrics(stats: Sequence[RubricStats]) -> dict[str, float]:
    """The `race/probe` metrics of one checkpoint.

    Validity is a share of prompts; the number of criteria a mean over valid rubrics; all others are means
    over the criteria of valid rubrics (Table 11), left out if there are none.

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
    n = len(rows)
    return metrics | {
        "n_criteria_mean": n / len(valid),
        "criterion_chars_mean": sum(c.chars for c in rows) / n,
        "label_only_frac": sum(c.label_only for c in rows) / n,
        "specific_frac": sum(c.specific for c in rows) / n,
        "constraint_frac": sum(c.constraint for c in rows) / n,
        "grounded_frac": sum(c.grounded for c in rows) / n,
    }
