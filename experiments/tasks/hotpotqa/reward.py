"""How an answer to a HotpotQA question is scored (RLDS App. D.2).

Texts are normalised as by SQuAD, HotpotQA and Search-R1 (arXiv:2503.09516). One rule of ours: two texts of which
normalising leaves nothing do not match ("" is no answer). The official rule that `yes`, `no` and `noanswer` match
exactly or not at all is an option; without it, "yes indeed" has F1 2/3 against "yes".
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_WHOLE: Final = frozenset({"yes", "no", "noanswer"})
_STYLES: Final = (
    "boxed", "fbox", "mbox", "hbox", "underline", "emph", "operatorname", "boldsymbol", "bm",
    *(f"text{kind}" for kind in ("", "bf", "it", "rm", "sf", "tt", "sc", "sl", "up", "md", "normal")),
    *(f"math{kind}" for kind in ("rm", "bf", "it", "sf", "tt", "normal")),
)  # fmt: skip
"""Commands that change how an answer looks, not what it says."""
# A second backslash before a command is that of a model that writes as in JSON. Else two are a line break, and do not
# escape the brace after them.
_BRACE: Final = re.compile(r"\\\\?boxed\s*\{|\\\\|\\[{}]|[{}]")
_STYLE: Final = re.compile(rf"(\\\\?(?:{'|'.join(_STYLES)})\b\s*(?=\{{))|\\\\|\\~|~")
_SAYS_NOTHING: Final = re.compile(r"[\s{}]*")


@dataclass(frozen=True, slots=True)
class Score:
    """Of one answer.

    Attributes:
        reward: R_i.
        em: normalised texts are equal.
        f1: over tokens, before the threshold; in [0, 1].
    """

    reward: float
    em: bool
    f1: float


def normalise(text: str) -> str:
    """Lower case; ASCII punctuation, then a, an, the removed; white space folded."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> bool:
    """Equal once normalised, and not empty."""
    found = normalise(prediction)
    return bool(found) and found == normalise(gold)


def f1_score(prediction: str, gold: str, *, official_yes_no: bool = False) -> float:
    """Token F1 of the normalised texts, in [0, 1].

    Args:
        prediction: of the agent.
        gold: the right answer.
        official_yes_no: 0 where either is yes, no or noanswer and the other is not the same.
    """
    found, right = normalise(prediction), normalise(gold)
    if official_yes_no and found != right and (found in _WHOLE or right in _WHOLE):
        return 0.0
    ours, theirs = found.split(), right.split()
    same = (Counter(ours) & Counter(theirs)).total()
    if not same:
        return 0.0
    precision, recall = same / len(ours), same / len(theirs)
    return 2 * precision * recall / (precision + recall)


def score(
    prediction: str, answers: Sequence[str], *, threshold: float = 0.3, official_yes_no: bool = False
) -> Score:
    """1 for an exact match; else F1, or 0 where it is below `threshold`. The best of several right answers counts.

    Args:
        prediction: of the agent.
        answers: right ones, at least one.
        threshold: smallest F1 that is worth anything.
        official_yes_no: see `f1_score`.
    """
    em = any(exact_match(prediction, gold) for gold in answers)
    f1 = max(f1_score(prediction, gold, official_yes_no=official_yes_no) for gold in answers)
    return Score(1.0 if em else f1 if f1 >= threshold and f1 > 0 else 0.0, em, f1)


def boxed_answer(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` of a text, or None.

    Braces nest and `\{` is a letter. A box that is not closed, or is blank (as where an agent speaks of \boxed{}), is
    no answer; of a box in a box the outer one counts. `\text`, an inner `\boxed` and their like are dropped, their
    content is kept with its braces; `~` and the line break `\\` are blanks. Blank is what then holds braces and white
    space only.
    """
    boxes: list[tuple[int, str]] = []
    open_braces: list[tuple[int, int] | None] = []  # of a box: where it and its content begin
    for found in _BRACE.finditer(text):
        sign = found.group()
        if sign == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None:
                while boxes and boxes[-1][0] > start[0]:
                    boxes.pop()
                boxes.append((start[0], text[start[1] : found.start()]))
        elif sign[-1] == "{" and sign != "\\{":
            open_braces.append((found.start(), found.end()) if sign != "{" else None)
    answers = [_STYLE.sub(_plain, content).strip() for _, content in boxes]
    return next((answer for answer in reversed(answers) if not _SAYS_NOTHING.fullmatch(answer)), None)


def _plain(found: re.Match[str]) -> str:
    r"""What replaces a match of `_STYLE`: nothing a style, a blank `\\` and `~`; the accent `\~` stays."""
    return "" if found[1] else found[0] if found[0] == r"\~" else " "
