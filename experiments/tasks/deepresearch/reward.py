"""The reward of an episode (RLDS App. D.4), without any model or service.

    r          = 0.7 r_rubric + 0.1 r_citation + 0.1 r_format + 0.1 r_search
    r_citation = 0.6 F1_cite + 0.4 r_citation-format, or r_citation-format alone where F1 is switched off
    r_format   = 0.5 [has answer block] + 0.3 [has cite] + 0.2 [has tool call]
    r_search   = min(n_tool_calls / 3, 1)

Open in the paper, and what is done here:

- an answer without any citation has r_citation-format 0 (else saying nothing would be the safest citation);
- r_citation-format counts different ids: naming a good one often does not hide an invented one;
- criteria of negative weight (pitfalls of the RaR sources) take away what they are worth, in proportion to how far
  the answer falls into them; the sum is over the positive weights and clipped to [0, 1];
- the length penalty grows in a straight line from the soft to the hard length, in characters of the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

FULL = 5
"""The judge's best grade of a criterion; 0 is the worst."""
_SEARCHES = 3
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Buckets:
    """Criteria by verdict; a pitfall is met where it was avoided."""

    fully: int
    partial: int
    not_met: int


def rubric_score(grades: Sequence[int], weights: Sequence[float]) -> float:
    """sum_k w_k g_k / 5 over the sum of the positive weights, clipped to [0, 1].

    Args:
        grades: 0..5 [C].
        weights: [C], at least one above 0.

    Raises:
        ValueError: the lengths differ, a grade is out of range, or no weight is above 0.
    """
    if len(grades) != len(weights):
        raise ValueError(f"{len(grades)} grades for {len(weights)} weights")
    if not all(0 <= g <= FULL for g in grades):
        raise ValueError(f"grades outside 0..{FULL}: {list(grades)}")
    total = sum(w for w in weights if w > 0)
    if not total > 0:
        raise ValueError("no weight is above 0")
    got = sum(w * g for w, g in zip(weights, grades, strict=True)) / FULL
    return _unit(got / total)


def buckets(grades: Sequence[int], weights: Sequence[float]) -> Buckets:
    """How many criteria are fully met (5), partially (1-4), and not at all (0)."""
    good = [g if w > 0 else FULL - g for g, w in zip(grades, weights, strict=True)]
    fully, none = good.count(FULL), good.count(0)
    return Buckets(fully, len(good) - fully - none, none)


def citation_format(cited: Collection[str], retrieved: Collection[str]) -> float:
    """Share of the different cited ids that a tool returned; 0 without any citation."""
    ids = set(cited)
    return len(ids & set(retrieved)) / len(ids) if ids else 0.0


def claim_f1(recall: float, relevant: Sequence[bool]) -> float:
    """Harmonic mean of how much of a claim its snippets support and the share of them that are relevant.

    Args:
        recall: in [0, 1].
        relevant: one per id of the cite tag; an id that was never retrieved is not relevant.
    """
    precision = sum(relevant) / len(relevant) if relevant else 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


def citation_reward(form: float, f1: float | None) -> float:
    """0.6 F1_cite + 0.4 r_citation-format, or the latter alone where there is no F1."""
    return _unit(form if f1 is None else 0.6 * f1 + 0.4 * form)


def format_reward(*, has_answer: bool, has_cite: bool, has_tool_call: bool) -> float:
    """0.5 [has answer block] + 0.3 [has cite] + 0.2 [has tool call]."""
    return _unit(0.5 * has_answer + 0.3 * has_cite + 0.2 * has_tool_call)


def search_reward(n_tool_calls: int) -> float:
    """min(n / 3, 1)."""
    return min(n_tool_calls / _SEARCHES, 1.0)


def length_penalty(n_chars: int, *, soft: int, hard: int, largest: float) -> float:
    """0 up to `soft` characters, `largest` from `hard` on, a straight line between."""
    if n_chars >= hard:
        return largest
    if n_chars <= soft:
        return 0.0
    return largest * (n_chars - soft) / (hard - soft)


def total_reward(
    parts: tuple[float, float, float, float],
    weights: tuple[float, float, float, float],
    penalty: float = 0.0,
) -> float:
    """The weighted sum of (rubric, citation, format, search) less the penalty, not below 0."""
    return max(0.0, round(sum(w * p for w, p in zip(weights, parts, strict=True)) - penalty, _DIGITS))


def _unit(value: float) -> float:
    """Clipped to [0, 1]; the last bits, which the order of a sum decides, rounded away."""
    return min(1.0, max(0.0, round(value, _DIGITS)))
