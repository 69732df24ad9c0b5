"""Per-rollout-group training-signal routing: Eqs 5-9 and the quarantine rate, Eq 18, of the RACE paper.

    tau_tie = |{i < j : |r_i - r_j| < eps_tie}| / (G (G - 1) / 2)                          (5)
    d_tri   = unique trigrams / all trigrams, pooled over the G responses                  (6)
    d_emb   = 2 / (G (G - 1)) sum_{i<j} (1 - e_i . e_j)                                    (7)
    degenerate          <=> std(r) <= sigma_rt  or  tau_tie >= tau_tie*                    (8)
    diversity-collapsed <=> degenerate  and  d_tri <= d_tri*  and  d_emb <= d_emb*         (9)
    rubric-failed       <=> degenerate otherwise;  informative <=> not degenerate

A group with fewer than two valid scores is `invalid`: not routed, in neither q nor f_sat, only counted.
Diversity is measured on all G responses, whether or not they were scored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np

from racelab.experiments.methods.grpo import MIN_VALID, SCORE_DIGITS, mean, sigma, valid
from racelab.experiments.types import FloatArray

_WORD = re.compile(r"\w+|[^\w\s]")
_OPEN, _CLOSE = "<think>", "</think>"


class Route(StrEnum):
    """What becomes of a rollout group (Table 3)."""

    INFORMATIVE = "informative"
    DIVERSITY_COLLAPSED = "diversity_collapsed"
    RUBRIC_FAILED = "rubric_failed"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """All starred thresholds. Defaults: Table 7; mu_sat from App. D.5; d_emb is not printed.

    Attributes:
        sigma_rt: routing std threshold (Eq 8), adapted by TRQC.
        tau_tie: tie-rate threshold (Eq 8), adapted by TRQC.
        d_tri: distinct-trigram floor (Eq 9). G equal responses have d_tri = 1/G: see `reachable_d_tri`.
        d_emb: cosine-distance floor (Eq 9).
        tau_sat: saturation-rate threshold that enters the rubric phase, adapted per phase.
        tau_imp: least improvement that keeps the rubric phase going, adapted per phase.
        sigma_sw: a saturated group has at most this std (Eq 12).
        mu_sat: and at least this mean (Eq 12).
    """

    sigma_rt: float = 0.03
    tau_tie: float = 0.70
    d_tri: float = 0.05
    d_emb: float = 0.05
    tau_sat: float = 0.40
    tau_imp: float = 0.005
    sigma_sw: float = 0.06
    mu_sat: float = 0.8

    def state(self) -> dict[str, float]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> Thresholds:
        """Undoes `state`."""
        return cls(**state)


@dataclass(frozen=True, slots=True)
class GroupSignals:
    """What routing and switching know of a group.

    Attributes:
        mean: over the valid scores, NaN if none.
        std: population, over the valid scores, exactly 0 if they are all equal, NaN if none.
        tie_rate: Eq 5 over the valid pairs, NaN if none.
        d_tri: Eq 6.
        d_emb: Eq 7.
        n_valid: scores that are usable.
    """

    mean: float
    std: float
    tie_rate: float
    d_tri: float
    d_emb: float
    n_valid: int

    @property
    def usable(self) -> bool:
        """True if there are enough valid scores to route the group."""
        return self.n_valid >= MIN_VALID

    def state(self) -> dict[str, float]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> GroupSignals:
        """Undoes `state`."""
        return cls(**{**state, "n_valid": int(state["n_valid"])})  # type: ignore[arg-type]


def tie_rate(rewards_G: FloatArray, eps_tie: float = 0.025) -> float:
    """Eq 5: share of the pairs of valid scores closer than `eps_tie`; NaN with fewer than two valid."""
    scores = valid(rewards_G)
    if scores.size < MIN_VALID:
        return float("nan")
    first, second = np.triu_indices(scores.size, k=1)
    gaps = np.round(np.abs(scores[first] - scores[second]), SCORE_DIGITS)
    return float(np.count_nonzero(gaps < eps_tie)) / first.size


def strip_thinking(text: str) -> str:
    """The text without its thinking: `<think>...</think>` blocks go.

    A block that was never closed goes to the end of the text (the answer was never reached); a closing tag
    without an opening one (the template opened it) takes all before it.
    """
    head, closed, tail = text.partition(_CLOSE)
    if closed and _OPEN not in head:
        text = tail
    parts = []
    while _OPEN in text:
        before, _, rest = text.partition(_OPEN)
        parts.append(before)
        text = rest.partition(_CLOSE)[2]
    return "".join([*parts, text])


def words(text: str) -> list[str]:
    """Lower-case runs of word characters and single punctuation marks, thinking stripped."""
    return _WORD.findall(strip_thinking(text).lower())


def trigrams(text: str) -> list[tuple[str, str, str]]:
    """All trigrams of one response, in order (T_all of Eq 6 is the pool of these)."""
    tokens = words(text)
    return list(zip(tokens, tokens[1:], tokens[2:], strict=False))


def distinct_trigram_ratio(texts: Sequence[str]) -> float:
    """Eq 6: unique over all trigrams; trigrams never span two responses.

    Where no response has three tokens: unique responses / G, so that a group of equal short answers still
    reads as low diversity.

    Raises:
        ValueError: without a response.
    """
    if not texts:
        raise ValueError("d_tri needs at least one response")
    tokens_G = [words(text) for text in texts]
    unique: set[tuple[str, str, str]] = set()
    total = 0
    for tokens in tokens_G:
        unique.update(zip(tokens, tokens[1:], tokens[2:], strict=False))
        total += max(len(tokens) - 2, 0)
    if not total:
        return len({tuple(tokens) for tokens in tokens_G}) / len(texts)
    return len(unique) / total


def embedding_distance(emb_GD: FloatArray) -> float:
    """Eq 7 in O(G D): the dot products of all pairs sum to (|sum e|^2 - sum |e|^2) / 2.

    Args:
        emb_GD: embeddings [G, D], rows of unit length.

    Returns:
        Mean pairwise cosine distance in [0, 2]; NaN if G < 2.

    Raises:
        ValueError: if the array is not two-dimensional.
    """
    emb_GD = np.asarray(emb_GD, dtype=np.float64)
    if emb_GD.ndim != 2:
        raise ValueError(f"embeddings of one group must have shape [G, D], got {emb_GD.shape}")
    n = len(emb_GD)
    if n < 2:
        return float("nan")
    sum_D = emb_GD.sum(axis=0)
    dots = float(sum_D @ sum_D) - float(np.sum(emb_GD * emb_GD))
    return min(max(1.0 - dots / (n * (n - 1)), 0.0), 2.0)


def reachable_d_tri(n_samples: int, floor: float = 0.05) -> float:
    """A d_tri* that G equal responses can fall under: they score about 1/G, so at least 1.05/G."""
    return max(floor, 1.05 / n_samples)


def signals(
    rewards_G: FloatArray, texts: Sequence[str], emb_GD: FloatArray, eps_tie: float = 0.025
) -> GroupSignals:
    """All routing statistics of one group.

    Args:
        rewards_G: scores [G], NaN where there is none.
        texts: the G responses.
        emb_GD: their embeddings [G, D].
        eps_tie: Eq 5.

    Raises:
        ValueError: if the three do not describe the same number of responses.
    """
    if not len(rewards_G) == len(texts) == len(emb_GD):
        raise ValueError(
            f"a group has {len(rewards_G)} rewards, {len(texts)} texts and {len(emb_GD)} embeddings"
        )
    return GroupSignals(
        mean=mean(rewards_G),
        std=sigma(rewards_G),
        tie_rate=tie_rate(rewards_G, eps_tie),
        d_tri=distinct_trigram_ratio(texts),
        d_emb=embedding_distance(emb_GD),
        n_valid=int(valid(rewards_G).size),
    )


def is_degenerate(group: GroupSignals, thresholds: Thresholds) -> bool:
    """Eq 8. Low spread, or many ties."""
    std, tie_rate = round(group.std, SCORE_DIGITS), round(group.tie_rate, SCORE_DIGITS)
    return std <= thresholds.sigma_rt or tie_rate >= thresholds.tau_tie


def route(group: GroupSignals, thresholds: Thresholds) -> Route:
    """Eqs 8-9, applied in the order of Table 3."""
    if not group.usable:
        return Route.INVALID
    if not is_degenerate(group, thresholds):
        return Route.INFORMATIVE
    if group.d_tri <= thresholds.d_tri and group.d_emb <= thresholds.d_emb:
        return Route.DIVERSITY_COLLAPSED
    return Route.RUBRIC_FAILED


def quarantine_rate(routes: Sequence[Route]) -> float:
    """Eq 18: quarantined over processed groups; invalid ones are not processed. NaN if none was."""
    processed = [r for r in routes if r is not Route.INVALID]
    if not processed:
        return float("nan")
    return sum(r is not Route.INFORMATIVE for r in processed) / len(processed)
