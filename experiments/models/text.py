"""Small text functions shared by the rubric parser, the guards and the probe statistics."""

from __future__ import annotations

import re
from collections.abc import Sequence

_THINK_TAG = re.compile(r"(</?think(?:ing)?>)", re.IGNORECASE)
_TOKEN = re.compile(r"\w+|[^\w\s]")
_WORD = re.compile(r"\w+")

_STOP = (
    "a about all also am an and any are as at be been but by can could did do does for from get give had "
    "has have he her here his how i if in into is it its just let like may me more most must my no not of "
    "on one or our out please shall she should so some such than that the their them then there these "
    "they this those to up us use very was we were what when where which who why will with would write "
    "you your"
)
STOPWORDS = frozenset(_STOP.split())
"""Words too common to show that two texts speak of the same thing."""


def strip_thinking(text: str) -> str:
    """The text without `<think>` spans.

    A closed span is dropped. After a closing tag without an opening one (that one was part of the prompt)
    only what follows is kept; before an opening tag that is never closed (the text was cut) only what
    precedes.
    """
    kept: list[str] = []
    thinking = False
    for i, part in enumerate(_THINK_TAG.split(text)):
        if i % 2 == 0:
            if not thinking:
                kept.append(part)
        elif part.startswith("</"):
            if not thinking:
                kept.clear()
            thinking = False
        else:
            thinking = True
    return "".join(kept)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the stop strings that stands in it, as servers give it."""
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]


def defang(text: str) -> str:
    """The text with special-token spellings broken up, so that a model's output cannot end a chat turn.

    `LanguageModel.encode` recognises special tokens written in a text; a generated `<|im_end|>` must not
    become one inside a judge prompt.
    """
    return text.replace("<|", "< |").replace("|>", "| >")


def tokens(text: str) -> list[str]:
    """Lower-case words and single punctuation marks (RACE Eq 6 uses the same)."""
    return _TOKEN.findall(text.lower())


def words(text: str) -> list[str]:
    """Lower-case words, punctuation left out."""
    return _WORD.findall(text.lower())


def ngrams(items: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of `n` neighbouring items, in order; empty if there are fewer than `n`."""
    return [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]


def stem(word: str) -> str:
    """A crude stem, so that 'mentions' meets 'mention', 'cities' 'city' and 'rectangles' 'rectangle'."""
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    for suffix in ("ing", "ed", "es", "s", "e"):
        if len(word) - len(suffix) >= 3 and word.endswith(suffix) and not word.endswith("ss"):
            return word[: -len(suffix)]
    return word


def content_words(text: str) -> set[str]:
    """Stems of the words that carry meaning: no stop words, and single letters only if they are digits."""
    return {stem(w) for w in words(text) if w not in STOPWORDS and (len(w) > 1 or w.isdigit())}
