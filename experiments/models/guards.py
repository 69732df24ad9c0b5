"""Guards of the likelihood judge: what a response must not win by (copying, repeating, saying nothing).

A small language model finds a text likely that it has just read, and an encoder finds a restated question
close to the question. Each guard below is a plain count on words; `guard_factor` turns them into one factor
in [0, 1].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from racelab.experiments.models.text import content_words, ngrams, stem, tokens, words
from racelab.experiments.types import Rubric

_EXCHANGE_WORDS = (
    "answer ask contain criterion criteria good great happy help know mention question reply request respond "
    "response rubric satisfy say sentence state sure task tell thank topic"
)
_EXCHANGE = frozenset(stem(w) for w in _EXCHANGE_WORDS.split())
"""Stems of words about the exchange itself: "You ask: ... Good question." says nothing new."""


_PUNCTUATION = frozenset(".,;:!?'\"()-`*\u2013\u2014\u2018\u2019\u201c\u201d\u2026")


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """How much of each a response may have before it costs.

    Attributes:
        copy_free: share of copied words that is free; above it the factor falls linearly, to 0 at 1.
        min_words: below it the factor is words / min_words.
        known_free: number of distinct content words that a response may take over from the prompt and the
            rubric (a good short answer may consist of them); each word of its own frees three more. Above
            that the factor falls linearly, to 0 at twice the number.
        nothing_new: factor of a response that adds no content word and no symbol to the prompt. A restated
            question is one; so is a right answer to "put this into the past tense", hence not 0.
    """

    copy_free: float = 0.25
    min_words: int = 4
    known_free: int = 5
    nothing_new: float = 0.25


@dataclass(frozen=True, slots=True)
class Guards:
    """What was found in one response.

    Attributes:
        repetition: share of its bigrams that repeat an earlier one, in [0, 1).
        copied: share of its words that lie in a run of three also found in the prompt or in one criterion.
        known: number of its distinct content words that stand in the prompt or in the rubric.
        own: number of its other distinct content words.
        new_words: number of its distinct content words that neither stand in the prompt nor speak of the
            exchange, and of its symbols that do not stand in the prompt.
        n_words: number of its words.
    """

    repetition: float
    copied: float
    known: int
    own: int
    new_words: int
    n_words: int


def measure_guards(prompt: str, rubric: Rubric, response: str) -> Guards:
    """Counts all guards of one response."""
    criteria = [c.text for c in rubric.criteria]
    bigrams = ngrams(tokens(response), 2)
    said, asked = content_words(response), content_words(prompt)
    known = asked.union(*(content_words(c) for c in criteria))
    return Guards(
        repetition=1 - len(set(bigrams)) / len(bigrams) if bigrams else 0.0,
        copied=copied_share(response, [prompt, *criteria]),
        known=len(said & known),
        own=len(said - known),
        new_words=len(said - asked - _EXCHANGE) + len(_symbols(response) - _symbols(prompt)),
        n_words=len(words(response)),
    )


def guard_factor(guards: Guards, settings: GuardSettings) -> float:
    """The product of all guards, in [0, 1]; 1 for a response that gives none of them cause."""
    copying = max(0.0, guards.copied - settings.copy_free) / (1 - settings.copy_free)
    stuffing = (guards.known - settings.known_free - 3 * guards.own) / settings.known_free
    length = min(1.0, guards.n_words / settings.min_words)
    kept = (1 - guards.repetition) * (1 - copying) * (1 - min(1.0, max(0.0, stuffing)))
    return kept * length * (1.0 if guards.new_words else settings.nothing_new)


def _symbols(text: str) -> set[str]:
    """Tokens that are neither words nor everyday punctuation: `#`, `[]`, `=`."""
    return {t for t in tokens(text) if not words(t)} - _PUNCTUATION


def copied_share(response: str, sources: Iterable[str], n: int = 3) -> float:
    """Share of the response's words that lie in a run of `n` words also found in one of the sources.

    Words are stemmed and punctuation is left out, so that small changes do not hide a copy. A source shorter
    than `n` words counts when it is found whole. 0 for a response without words.
    """
    said = [stem(w) for w in words(response)]
    hit = [False] * len(said)
    for source in sources:
        known = [stem(w) for w in words(source)]
        size = min(n, len(known))
        runs = set(ngrams(known, size)) if size else set()
        for i, run in enumerate(ngrams(said, size) if size else []):
            if run in runs:
                hit[i : i + size] = [True] * size
    return sum(hit) / len(said) if said else 0.0


def without_prompt_words(response: str, prompt: str) -> str:
    """The response without the words of the prompt: an echo of the prompt leaves nothing."""
    known = set(words(prompt))
    return " ".join(t for t in response.split() if not words(t) or not set(words(t)) <= known)
