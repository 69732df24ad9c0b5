"""`replay-judge`: a stand-in for the rubric judge that compares words. It is no judge, only something that answers.

It reads the prompts of `rubric_judge.py` and writes replies in their form, the same for the same prompt. A criterion's
grade is the share of its content words that the answer has, in fifths; a claim is supported as far as its passages have
its words. For tests and for runs without a network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from racelab.experiments.models.text import content_words

NAME: Final = "replay-judge"
_FULLY: Final = 0.6
_PARTLY: Final = 0.3


def reply(user: str) -> str:
    """The reply to a prompt of `rubric_judge.py`; an empty object for any other."""
    try:
        material = json.loads(user.rpartition("\n")[2])
    except (ValueError, RecursionError):
        return "{}"
    if not isinstance(material, dict):
        return "{}"
    if "criteria" in material:
        return json.dumps({"grades": [_grade(c, str(material["answer"])) for c in material["criteria"]]})
    if "claims" in material:
        return json.dumps({"claims": [_support(c) for c in material["claims"]]})
    return "{}"


def _grade(criterion: Mapping[str, Any], answer: str) -> dict[str, int]:
    return {"n": criterion["n"], "score": int(5 * share(criterion["description"], answer) + 0.5)}


def _support(claim: Mapping[str, Any]) -> dict[str, Any]:
    passages = claim["passages"]
    whole = share(claim["claim"], " ".join(p["text"] for p in passages))
    relevant = [p["n"] for p in passages if share(claim["claim"], p["text"]) >= _PARTLY]
    return {"n": claim["n"], "support": 2 if whole >= _FULLY else int(whole >= _PARTLY), "relevant": relevant}


def share(wanted: str, text: str) -> float:
    """Share of the content words of `wanted` that `text` has; 0 if it has none."""
    words = content_words(wanted)
    return len(words & content_words(text)) / len(words) if words else 0.0
