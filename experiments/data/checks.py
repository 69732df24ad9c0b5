"""Declarative rules that decide, without any model, whether a response does what the prompt asks.

A check is a plain JSON object with a `kind`. Words are compared case-insensitively and whole; a word that
ends in `*` also matches longer words (`photosynth*`). An empty response never passes.

| kind | keys | passes when |
|---|---|---|
| `any_word` | `words`, `min` = 1 | at least `min` of the words occur |
| `all_words` | `words` | all of them occur |
| `not_words` | `words` | none of them occurs |
| `regex` | `pattern`, `ignore_case` = true | the pattern is found (`re.search`) |
| `min_words`, `max_words` | `n` | the response has at least / at most `n` words |
| `sentence_count` | `n`, or `min` and/or `max` | that many sentences |
| `n_items` | `n`, or `min` and/or `max` | that many different list items (`count_items`) |
| `starts_with`, `ends_with` | `any` | it starts / ends with one of these texts, outer quotes apart |
| `number` | `value`, `which` = `last`, `tolerance` = 0, `max_numbers` = 6 | that number is given |
| `all_of`, `any_of` | `checks` | all / one of them pass |
| `reasoning_gym` | `dataset`, `entry`, `threshold` = 0.99 | the data set's own scorer gives that much |

Numbers are found by `find_numbers`; a response with more than `max_numbers` different ones fails, so that
listing many numbers does not help.

Example: `{"kind": "all_of", "checks": [{"kind": "min_words", "n": 3}, {"kind": "number", "value": 7}]}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from racelab.experiments.errors import DataError

Check = Mapping[str, object]

_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|St|vs|etc|e\.g|i\.e|a\.m|p\.m)\.", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?\u2026]+[\"'\u201d\u2019)\]*]*(?=\s|$)")
_LIST_LINE = re.compile(r"^\s*(?:[-*\u2022]|\d+[.)])\s+(.*\S)", re.MULTILINE)
_ITEM_SPLIT = re.compile(r"[,;\n]|\band\b|\bor\b|&", re.IGNORECASE)
_OUTER = " \t\r\n\"'\u201c\u201d\u2018\u2019`*"
_NUMBER = re.compile(r"(?<![\w.])(?:[-\u2212](?=\d))?(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?:\s?/\s?(\d+))?")
_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = dict(
    zip(
        ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"),
        range(20, 100, 10),
        strict=True,
    )
)
_NUMBER_WORD = re.compile(
    rf"\b(?:(?P<tens>{'|'.join(_TENS)})(?:[ -](?P<unit>{'|'.join(_UNITS[1:10])}))?"
    rf"|(?P<small>{'|'.join(sorted(_UNITS, key=len, reverse=True))}))(?P<hundred> hundred)?\b",
    re.IGNORECASE,
)


def count_words(text: str) -> int:
    """Words: runs of letters or digits; an apostrophe or hyphen inside keeps them together."""
    return len(_WORD.findall(text))


def count_sentences(text: str) -> int:
    """Sentences: `.`, `!` or `?` before white space or the end closes one; an unfinished last one counts."""
    plain = _ABBREVIATION.sub(lambda m: m.group().replace(".", ""), text)
    return sum(1 for part in _SENTENCE_END.split(plain) if _WORD.search(part))


def count_items(text: str) -> int:
    """Different items of a list.

    With two or more bulleted or numbered lines, these are the items; otherwise the parts between commas,
    semicolons, line breaks, "and", "or" and "&". Case and outer punctuation do not make items different.
    """
    lines = _LIST_LINE.findall(text)
    parts = lines if len(lines) >= 2 else _ITEM_SPLIT.split(text)
    return len({" ".join(_WORD.findall(part.casefold())) for part in parts} - {""})


def find_numbers(text: str, with_one: bool = True) -> list[float]:
    """Numbers in reading order: `7`, `-2.5`, `1,000`, `3/4` and words from zero to ninety-nine (hundred).

    Args:
        text: any text.
        with_one: the word "one" counts; it often only means "a", so the caller may leave it out.
    """
    found: list[tuple[int, float]] = []
    for m in _NUMBER.finditer(text):
        value = float(m[1].replace(",", "") + (m[2] or ""))
        if m[3]:
            value = value / float(m[3]) if float(m[3]) else float("nan")
        found.append((m.start(), -value if m[0][0] in "-\u2212" else value))
    for m in _NUMBER_WORD.finditer(text):
        tens, unit, small, hundred = (m[k] and m[k].lower() for k in ("tens", "unit", "small", "hundred"))
        if small == "one" and not hundred and not with_one:
            continue
        total = _UNITS.index(small) if small else _TENS[tens] + (_UNITS.index(unit) if unit else 0)
        found.append((m.start(), float(total * (100 if hundred else 1))))
    return [value for _, value in sorted(found, key=lambda pair: pair[0])]


def has_word(text: str, word: str) -> bool:
    """True if `word` (or phrase) occurs whole, whatever its case; a final `*` allows any ending."""
    return _compiled(_word_pattern(word), re.IGNORECASE).search(text) is not None


@lru_cache(maxsize=8192)  # a few thousand words and patterns; re's own cache holds 512
def _compiled(pattern: str, flags: int) -> re.Pattern[str]:
    return re.compile(pattern, flags)


@lru_cache(maxsize=8192)
def _word_pattern(word: str) -> str:
    stem, tail = word.removesuffix("*"), r"\w*" if word.endswith("*") else r"(?!\w)"
    return r"(?<!\w)" + r"\s+".join(map(re.escape, stem.split())) + tail


# --- one scorer per kind; arguments are validated before they are called ---


def _within(check: Mapping[str, Any], value: int) -> float:
    low, high = check.get("n", check.get("min", 0)), check.get("n", check.get("max", float("inf")))
    return float(low <= value <= high)


def _any_word(check: Mapping[str, Any], text: str) -> float:
    return float(sum(has_word(text, w) for w in check["words"]) >= check.get("min", 1))


def _all_words(check: Mapping[str, Any], text: str) -> float:
    return float(all(has_word(text, w) for w in check["words"]))


def _not_words(check: Mapping[str, Any], text: str) -> float:
    return float(not any(has_word(text, w) for w in check["words"]))


def _regex(check: Mapping[str, Any], text: str) -> float:
    flags = re.IGNORECASE if check.get("ignore_case", True) else 0
    return float(_compiled(check["pattern"], flags).search(text) is not None)


def _starts_with(check: Mapping[str, Any], text: str) -> float:
    return float(text.lstrip(_OUTER).casefold().startswith(tuple(a.casefold() for a in check["any"])))


def _ends_with(check: Mapping[str, Any], text: str) -> float:
    return float(text.rstrip(_OUTER).casefold().endswith(tuple(a.casefold() for a in check["any"])))


def _number(check: Mapping[str, Any], text: str) -> float:
    value, tolerance = float(check["value"]), float(check.get("tolerance", 0))
    found = find_numbers(text, with_one=abs(value - 1) <= tolerance)
    if not found or len(set(found)) > check.get("max_numbers", 6):
        return 0.0
    pick = {"last": found[-1:], "first": found[:1], "any": found}[check.get("which", "last")]
    return float(any(abs(x - value) <= tolerance + 1e-9 for x in pick))


def _all_of(check: Mapping[str, Any], text: str) -> float:
    return sum(_score(part, text) for part in check["checks"]) / len(check["checks"])


def _any_of(check: Mapping[str, Any], text: str) -> float:
    return max(_score(part, text) for part in check["checks"])


def _reasoning_gym(check: Mapping[str, Any], text: str) -> float:
    from racelab.experiments.data.gym import score_entry

    return score_entry(check["dataset"], check["entry"], text)


# --- what each kind accepts ---


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_texts(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(v, str) and v.strip("* ") for v in value)


def _is_pattern(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(value) and bool(_compiled(value, 0))
    except re.error:
        return False


_INT = (_is_int, "a whole number >= 0")
_FLOAT = (_is_number, "a finite number")
_TEXTS = (_is_texts, "a non-empty list of texts")
_CHECKS = (lambda v: isinstance(v, list | tuple) and bool(v), "a non-empty list of checks")
_TEXT = (lambda v: isinstance(v, str) and bool(v), "a non-empty text")
_RANGE = {"n": _INT, "min": _INT, "max": _INT}
_Rule = tuple[Callable[[Any], bool], str]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Scorer and keys of one kind. `required` keys must be there; with `one_of`, at least one of these."""

    scorer: Callable[[Mapping[str, Any], str], float]
    keys: Mapping[str, _Rule]
    required: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()


_KINDS: dict[str, _Kind] = {
    "any_word": _Kind(_any_word, {"words": _TEXTS, "min": _INT}, ("words",)),
    "all_words": _Kind(_all_words, {"words": _TEXTS}, ("words",)),
    "not_words": _Kind(_not_words, {"words": _TEXTS}, ("words",)),
    "regex": _Kind(
        _regex,
        {
            "pattern": (_is_pattern, "a valid regular expression"),
            "ignore_case": (lambda v: isinstance(v, bool), "true or false"),
        },
        ("pattern",),
    ),
    "min_words": _Kind(lambda c, t: float(count_words(t) >= c["n"]), {"n": _INT}, ("n",)),
    "max_words": _Kind(lambda c, t: float(count_words(t) <= c["n"]), {"n": _INT}, ("n",)),
    "sentence_count": _Kind(lambda c, t: _within(c, count_sentences(t)), _RANGE, (), ("n", "min", "max")),
    "n_items": _Kind(lambda c, t: _within(c, count_items(t)), _RANGE, (), ("n", "min", "max")),
    "starts_with": _Kind(_starts_with, {"any": _TEXTS}, ("any",)),
    "ends_with": _Kind(_ends_with, {"any": _TEXTS}, ("any",)),
    "number": _Kind(
        _number,
        {
            "value": _FLOAT,
            "which": (lambda v: v in ("last", "first", "any"), "last, first or any"),
            "tolerance": (lambda v: _is_number(v) and v >= 0, "a number >= 0"),
            "max_numbers": _INT,
        },
        ("value",),
    ),
    "all_of": _Kind(_all_of, {"checks": _CHECKS}, ("checks",)),
    "any_of": _Kind(_any_of, {"checks": _CHECKS}, ("checks",)),
    "reasoning_gym": _Kind(
        _reasoning_gym,
        {
            "dataset": _TEXT,
            "entry": (lambda v: isinstance(v, Mapping) and "answer" in v, "an object with an answer"),
            "threshold": (lambda v: _is_number(v) and 0 < v <= 1, "a number in (0, 1]"),
        },
        ("dataset", "entry"),
    ),
}


def kinds() -> tuple[str, ...]:
    """All kinds of check, sorted."""
    return tuple(sorted(_KINDS))


def shown(name: object) -> str:
    """A name for a one-line message: escaped unless printable, at most 40 characters."""
    text = str(name)
    return text[:40] if text.isprintable() else repr(text)[:40]


def validate(check: object, prompt_id: str = "?") -> None:
    """Raises DataError, naming the prompt and the key, unless `check` is well formed."""
    _validate(check, f"prompt {shown(prompt_id)}: check")


def _validate(check: object, where: str) -> None:
    if not isinstance(check, Mapping):
        raise DataError(f"{where}: expected an object with a `kind`, got {type(check).__name__}")
    kind = check.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise DataError(f"{where}.kind: unknown kind {kind!r:.60}; use one of {', '.join(kinds())}")
    spec = _KINDS[kind]
    for key in check:
        if key != "kind" and key not in spec.keys:
            raise DataError(
                f"{where}.{shown(key)}: unknown key for kind {kind}; it takes {', '.join(spec.keys)}"
            )
    for key in spec.required:
        if key not in check:
            raise DataError(f"{where}.{key}: missing; kind {kind} needs it")
    if spec.one_of and not any(key in check for key in spec.one_of):
        keys = ", ".join(spec.one_of)
        raise DataError(f"{where}.{spec.one_of[0]}: missing; kind {kind} needs one of {keys}")
    if "n" in check and ("min" in check or "max" in check):
        raise DataError(f"{where}.n: give either n, or min and max")
    for key, value in check.items():
        if key != "kind" and not spec.keys[key][0](value):
            raise DataError(f"{where}.{key}: expected {spec.keys[key][1]}, got {value!r:.60}")
    if kind in ("all_of", "any_of"):
        for i, part in enumerate(cast("list[object]", check["checks"])):
            _validate(part, f"{where}.checks[{i}]")


def _score(check: Mapping[str, Any], text: str) -> float:
    return _KINDS[check["kind"]].scorer(check, text) if text.strip() else 0.0


def _passes(check: Mapping[str, Any], text: str) -> bool:
    if check["kind"] == "all_of":
        return all(_passes(part, text) for part in check["checks"])
    if check["kind"] == "any_of":
        return any(_passes(part, text) for part in check["checks"])
    return _score(check, text) >= float(check.get("threshold", 1.0))


def passes(check: Check, text: str, prompt_id: str = "?") -> bool:
    """True if the response satisfies the check; never for an empty response.

    Raises:
        DataError: the check is malformed; the message names `prompt_id` and the key.
        MissingDependencyError: a `reasoning_gym` check without that package.
    """
    validate(check, prompt_id)
    return bool(text.strip()) and _passes(check, text)


def score(check: Check, text: str, prompt_id: str = "?") -> float:
    """A graded value in [0, 1]: the mean over the parts of `all_of`, the best of `any_of`, else 0 or 1.

    `reasoning_gym` gives its own partial credit. `passes` implies a score of 1, except for a `reasoning_gym`
    check with a lower threshold.

    Raises:
        DataError: the check is malformed.
        MissingDependencyError: a `reasoning_gym` check without that package.
    """
    validate(check, prompt_id)
    return _score(check, text)
