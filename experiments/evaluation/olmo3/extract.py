"""How olmo3-adapt finds the answer in a text, and how it compares it with the right one.

Four steps, from the sentence that was asked for to any pattern at all; each gives the answer and a number for how well
the wanted form was kept. The templates and their order are the protocol's (OLMES, `configs/regexes.py` and
`tasks/utils.py`, as EvoLM carries them); what they let through is kept, odd or not:

- letters count in either case, and after a phrase also at the head of a word: "the answer is because" gives B;
- with no phrase, the article "a" counts as A (quirk `article-a`);
- as a last resort the last capital counts, even inside a word.

Left out: the list's two last templates, which can match only where an earlier one has.

Models that loop write long runs of one character, on which such patterns would take time quadratic in the length. Runs
of white space are therefore cut (`squeeze`), which no answer can notice.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

Finder = Callable[[str], "str | None"]
"""Gives the last match of something in a text; None: it does not occur."""

TEMPLATES = (
    r"therefore,?\s*the\s*answer\s*is:?\s*\(?(X)\b",
    r"so\s+the\s+answer\s+is\s+(X)\.?",
    r"the\s+correct\s+answer\s+is:?\s*(X)",
    r"the\s+answer\s+is\s+(X)\.?",
    r"a:\s*(X)",
    r"answer:\s*(X)",
    r"\b(X)\)?\s+is\s+correct",
    r"\((X)\)",
    r"\b(X)\b",
)
"""Tried in this order, in either case; X stands for a task's answer pattern."""
IS_CORRECT = 6
STANDALONE = 8

_LONG_SPACE = re.compile(r"\s{65,}")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Extracted:
    """What was found.

    Attributes:
        answer: "" if nothing was.
        form: 1 as it was asked for, 0.5 after another phrase, 0.2 or 0.1 as a bare pattern, 0 nothing.
    """

    answer: str
    form: float


def extract_answer(
    text: str,
    answers: Sequence[Finder],
    *,
    exact: Finder | None = None,
    templates: Sequence[Finder] = (),
    prefixes: Sequence[re.Pattern[str]] = (),
    after: Callable[[str], str] | None = None,
) -> Extracted:
    """The answer of a text, from the first step that gives one.

    Args:
        text: what is scored.
        answers: bare patterns, tried last, in this order; the first that occurs at all ends the search.
        exact: the sentence that was asked for.
        templates: phrases with the answer in them, in this order.
        prefixes: phrases before an answer, in this order; of each the last occurrence counts.
        after: takes the answer from what follows a prefix; "": there is none.
    """
    if exact is not None and (found := exact(text)):
        return Extracted(found, 1.0)
    for i, template in enumerate(templates):
        if found := template(text):
            return Extracted(found, 1.0 if i == 0 else 0.5)
    for i, prefix in enumerate(prefixes):
        end = max((match.end() for match in prefix.finditer(text)), default=None)
        if end is not None and after is not None and (found := after(text[end:].strip().strip("."))):
            return Extracted(found, 1.0 if i == 0 else 0.5)
    for i, pattern in enumerate(answers):
        bare = pattern(text)
        if bare is not None:
            return Extracted(bare, 0.2 if i == 0 else 0.1)
    return Extracted("", 0.0)


def extract_letter(text: str, letters: str, *, exact: bool, article: bool) -> Extracted:
    """The letter of an option.

    Args:
        text: what is scored.
        letters: a range such as `A-D`.
        exact: whether "Therefore, the answer is (X)" was asked for as it stands.
        article: quirk `article-a`. Without it the steps that know no phrase count a stand-alone capital only, and no
            "A" that opens a sentence and is followed by a word in lower case.

    Returns:
        The letter as it was written, in either case, without parentheses.
    """
    form, templates, answers = _letter_finders(letters, article)
    return extract_answer(squeeze(text), answers, exact=form if exact else None, templates=templates)


@cache
def _letter_finders(letters: str, article: bool) -> tuple[Finder, tuple[Finder, ...], tuple[Finder, ...]]:
    answer = rf"\(?([{letters}])\)?"
    templates = [
        last(re.compile(template.replace("X", answer), re.IGNORECASE), group=2) for template in TEMPLATES
    ]
    bare = last(re.compile(answer))
    if not article:
        templates[STANDALONE] = bare = _capital(re.compile(rf"\b[{letters}]\b"))
    exact = last(re.compile(rf"Therefore, the answer is \(([{letters}])\)"))
    return exact, tuple(templates), (bare,)


def last(pattern: re.Pattern[str], group: int = 1) -> Finder:
    """Finds the last match of a pattern and gives one of its groups."""

    def find(text: str) -> str | None:
        found = None
        for match in pattern.finditer(text):
            found = match
        return None if found is None else found[group]

    return find


def _capital(pattern: re.Pattern[str]) -> Finder:
    """Finds the last letter that is not the article at the head of a sentence."""
    article = re.compile(r"A\s+[a-z]")

    def find(text: str) -> str | None:
        found = None
        for match in pattern.finditer(text):
            before = text[max(0, match.start() - 70) : match.start()].rstrip(" \t\"'*")
            opens = not before or before[-1] in ".!?:;\n"
            if not (opens and article.match(text, match.start())):
                found = match
        return None if found is None else found[0]

    return find


def squeeze(text: str) -> str:
    """The text with every run of white space cut to 64 characters; a run with a line break keeps one."""
    return _LONG_SPACE.sub(lambda run: run[0][:63] + ("\n" if "\n" in run[0] else " "), text)


def same(answer: str, gold: str, *, punctuation: bool) -> bool:
    """Whether two answers are equal in lower case.

    Args:
        answer: the model's.
        gold: the right one.
        punctuation: whether it counts; else the 32 ASCII signs are deleted on both sides (a minus sign among them).
    """
    a, b = answer.lower(), gold.lower()
    return a == b if punctuation else a.translate(_PUNCTUATION) == b.translate(_PUNCTUATION)
