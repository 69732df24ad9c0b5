"""How far a judge can be trusted: what it gives to attacks, and how well it ranks (for a run's summary)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from racelab.experiments.models.text import STOPWORDS, words
from racelab.experiments.ports import Judge
from racelab.experiments.types import FloatArray, JudgeItem, Prompt, Rubric, Sample

Case = tuple[Prompt, Rubric]


def _keywords(prompt: str, rubric: Rubric) -> list[str]:
    text = " ".join([prompt, *(c.text for c in rubric.criteria)])
    found = [w for w in words(text) if w not in STOPWORDS and len(w) > 2]
    return list(dict.fromkeys(found)) or ["word"]


def _echo(rubric: Rubric) -> str:
    return " ".join(c.text.rstrip(".") + "." for c in rubric.criteria)


def _claim(rubric: Rubric) -> str:
    return (
        "My answer "
        + ", and it ".join(c.text[:1].lower() + c.text[1:].rstrip(".") for c in rubric.criteria)
        + "."
    )


ATTACKS: dict[str, Callable[[str, Rubric], str]] = {
    "empty": lambda x, r: "",
    "one_word": lambda x, r: "Yes.",
    "prompt_copied": lambda x, r: x,
    "question_echoed": lambda x, r: f"You are asking: {x} That is a good question.",
    "rubric_echoed": lambda x, r: _echo(r),
    "rubric_claimed": lambda x, r: _claim(r),
    "repetition": lambda x, r: " ".join([_keywords(x, r)[0]] * 12),
    "keyword_stuffing": lambda x, r: " ".join(_keywords(x, r)),
    "generic": lambda x, r: "Sure, I would be happy to help you with that. Please let me know what you need.",
}
"""Responses that satisfy nothing, made from a prompt and its rubric."""


def attack_suite(judge: Judge, cases: Sequence[Case]) -> dict[str, float]:
    """Mean score of each attack over the cases, in [0, 1]; NaN scores are left out (all NaN gives NaN).

    Attacks have no end token of their own, so they are given as finished: the harder case for the judge.
    """
    items = [
        JudgeItem(p, r, tuple(Sample((), (), make(p.text, r), True) for make in ATTACKS.values()))
        for p, r in cases
    ]
    return dict(zip(ATTACKS, _column_means(judge.score(items).scores), strict=True))


def _column_means(scores: Sequence[FloatArray]) -> list[float]:
    table = np.array(scores).reshape(len(scores), len(ATTACKS))
    return [float(c[np.isfinite(c)].mean()) if np.isfinite(c).any() else float("nan") for c in table.T]


def auc(positive: Sequence[float], negative: Sequence[float]) -> float:
    """Chance that a positive scores above a negative, ties counting half; NaN if either is empty.

    NaN scores are left out.
    """
    p, n = (np.asarray(v, dtype=np.float64) for v in (positive, negative))
    p, n = p[np.isfinite(p)], n[np.isfinite(n)]
    if not p.size or not n.size:
        return float("nan")
    return float(np.mean((p[:, None] > n) + 0.5 * (p[:, None] == n)))


def within_group_auc(scores: Sequence[Sequence[float]], outcomes: Sequence[Sequence[bool]]) -> float:
    """AUC of the scores against rule outcomes inside each group, pooled over all (pass, fail) pairs.

    Only pairs of responses to the same prompt count, so easy and hard prompts cannot lend each other ranks.
    Groups whose outcomes are all alike add nothing; NaN if there is no pair at all.
    """
    won = pairs = 0.0
    for group, passed in zip(scores, outcomes, strict=True):
        s, ok = np.asarray(group, dtype=np.float64), np.asarray(passed, dtype=bool)
        seen = np.isfinite(s)
        n = float((seen & ok).sum() * (seen & ~ok).sum())
        if n:
            won += n * auc(s[ok].tolist(), s[~ok].tolist())
            pairs += n
    return won / pairs if pairs else float("nan")


def own_vs_other_response_auc(judge: Judge, items: Sequence[JudgeItem]) -> float:
    """AUC of own responses over those of the next item's prompt, both judged under the own prompt and rubric.

    Mean over the items with a rubric; NaN with fewer than two items.
    """
    swapped = [JudgeItem(a.prompt, a.rubric, b.responses) for a, b in _neighbours(items)]
    return _mean_auc(judge, items, swapped)


def own_vs_other_rubric_auc(judge: Judge, items: Sequence[JudgeItem]) -> float:
    """AUC of the scores of the same responses under their own rubric over those under the next item's rubric.

    About 0.5 says that the judge does not read the rubric. Mean over items; NaN with fewer than two items.
    """
    swapped = [JudgeItem(a.prompt, b.rubric, a.responses) for a, b in _neighbours(items)]
    return _mean_auc(judge, items, swapped)


def judge_report(
    judge: Judge, items: Sequence[JudgeItem], outcomes: Sequence[Sequence[bool]] | None = None
) -> dict[str, float]:
    """Everything above in one flat dict: `auc_rules`, `auc_own_response`, `auc_own_rubric`, `attack_<name>`.

    Args:
        judge: a judge that is ready to score.
        items: base responses with a rubric each; items without one are left out.
        outcomes: rule outcomes of the same responses; None leaves `auc_rules` out.
    """
    kept = [i for i, item in enumerate(items) if item.rubric is not None]
    live = [items[i] for i in kept]
    report = {
        "auc_own_response": own_vs_other_response_auc(judge, live),
        "auc_own_rubric": own_vs_other_rubric_auc(judge, live),
    }
    if outcomes is not None:
        scores = [s.tolist() for s in judge.score(live).scores]
        report["auc_rules"] = within_group_auc(scores, [outcomes[i] for i in kept])
    attacks = attack_suite(judge, [(i.prompt, i.rubric) for i in live if i.rubric is not None])
    return report | {f"attack_{name}": value for name, value in attacks.items()}


def _neighbours(items: Sequence[JudgeItem]) -> list[tuple[JudgeItem, JudgeItem]]:
    live = [i for i in items if i.rubric is not None]
    return list(zip(live, [*live[1:], *live[:1]], strict=True)) if len(live) > 1 else []


def _mean_auc(judge: Judge, items: Sequence[JudgeItem], swapped: Sequence[JudgeItem]) -> float:
    live = [i for i in items if i.rubric is not None]
    if not swapped:
        return float("nan")
    own, other = judge.score(live).scores, judge.score(swapped).scores
    values = np.array([auc(a.tolist(), b.tolist()) for a, b in zip(own, other, strict=True)])
    seen = values[np.isfinite(values)]
    return float(seen.mean()) if seen.size else float("nan")
