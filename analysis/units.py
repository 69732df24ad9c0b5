"""A benchmark's score as a sum over what can be drawn anew: examples, and the pairs of RewardBench 2's Ties.

    score = sum over units of share;   micro: score_i / n;   macro: score_i / (D · n_d) for D domains of n_d examples

A mean over domains keeps its domains: units are drawn anew inside their stratum, so that the sizes, and with them the
shares, stay what they are. A prompt of Ties says something only beside its partner, so the pair is the unit, and
whole pairs are a stratum (as are prompts whose partner is missing). This makes every score here linear in its units.
Shapes: n units, S seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import numpy as np

from racelab.analysis.stats import FloatArray
from racelab.experiments.evaluation.preference.rewardbench2 import SUBSETS, TIES, gap, ties
from racelab.experiments.evaluation.totals import Row, is_macro

Key = tuple[str, str]
"""(stratum, unit)."""
_REF, _TIED = "ref", "tied"
_ACCURATE: Final = 0.3
"""Weight of either accuracy in the score of Ties."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What each unit adds to the score, for one seed or more.

    Attributes:
        strata: [S, m] each; their columns together are the n units.
    """

    strata: tuple[FloatArray, ...]

    @property
    def all(self) -> FloatArray:
        """[S, n]."""
        found: FloatArray = np.concatenate(self.strata, axis=1)
        return found

    @property
    def values(self) -> FloatArray:
        """[S]: the score of each seed."""
        found: FloatArray = self.all.sum(axis=1)
        return found


def shares(label: str, protocol: str, runs: Sequence[Sequence[Row]]) -> Shares | None:
    """The shares of one label; None if no row has a score.

    Args:
        label: of the rows.
        protocol: decides how the score is made.
        runs: S lists of the rows of one label, lost ones left out; all of the same examples, in any order.
    """
    found = [_shares(label, protocol, rows) for rows in runs]
    keys = sorted(found[0])
    if not keys:
        return None
    table = np.array([[of[key] for key in keys] for of in found], dtype=np.float64)
    sizes = [len(list(group)) for _, group in groupby(keys, key=lambda key: key[0])]
    return Shares(tuple(np.split(table, np.cumsum(sizes)[:-1], axis=1)))


def _shares(label: str, protocol: str, rows: Sequence[Row]) -> dict[Key, float]:
    if label == "rewardbench2":
        return _rewardbench2(rows)
    if label == "judgebench" or is_macro(label, protocol):
        return _macro(_by_domain(rows))
    return {("", row.example_id): row.score / len(rows) for row in rows}


def _by_domain(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.domain:
            found.setdefault(row.domain, []).append(row)
    return found


def _macro(by: Mapping[str, Sequence[Row]], domains: int | None = None) -> dict[Key, float]:
    """Every domain counts alike; `domains`: how many there are, if more than these."""
    d = domains or len(by)
    return {(name, row.example_id): row.score / (d * len(rows)) for name, rows in by.items() for row in rows}


def _rewardbench2(rows: Sequence[Row]) -> dict[Key, float]:
    """The mean of the subsets; Ties only if it holds a whole pair, as in `rewardbench2_total`."""
    by = {name: of for name, of in _by_domain(rows).items() if name in SUBSETS}
    tied = _ties([row.details for row in by.pop(TIES, [])])
    domains = len(by) + bool(tied)
    return {**_macro(by, domains), **{key: value / domains for key, value in tied.items()}}


def _ties(details: Sequence[Mapping[str, Any]]) -> dict[Key, float]:
    """(stratum, pair) -> what it adds to `ties(details)`; {} without a whole pair.

    The accuracies are means over all prompts of their kind, the other terms over whole pairs: of one pair alone `ties`
    gives .3 accurate(tied) + .3 accurate(ref) + rest.
    """
    found: dict[str, dict[str, Mapping[str, Any]]] = {_REF: {}, _TIED: {}}
    for d in details:
        found[d["kind"]][d["pair"]] = d
    accurate = {
        kind: {p: float(gap(d["right"], d["wrong"]) > 0) for p, d in of.items()} for kind, of in found.items()
    }
    whole = found[_REF].keys() & found[_TIED].keys()
    if not whole:
        return {}
    result: dict[Key, float] = {}
    for pair in found[_REF].keys() | found[_TIED].keys():
        kinds = [kind for kind in (_REF, _TIED) if pair in found[kind]]
        share = math.fsum(_ACCURATE * accurate[kind][pair] / len(found[kind]) for kind in kinds)
        if pair in whole:
            alone = ties([found[_REF][pair], found[_TIED][pair]])
            rest = alone - _ACCURATE * (accurate[_REF][pair] + accurate[_TIED][pair])
            share += rest / len(whole)
        result[f"{TIES}/{'+'.join(kinds)}", pair] = share
    return result
