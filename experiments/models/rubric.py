"""Rubrics as text: parsing a model's output into R_x = {(c_k, w_k)} (RACE Eq 1), and writing one back.

Two formats. `json`: a JSON object or list in plain text, fenced or not; its criteria are objects with a text
and a weight. `lines`: one `- criterion | weight` per line, for models too small for JSON. Parsing never
raises: what cannot be read gives None and a reason that can be counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from racelab.experiments.models.text import content_words, strip_thinking, words
from racelab.experiments.types import Criterion, Rubric

RubricFormat = Literal["lines", "json"]

_MAX_CHARS = 65_536  # a longer output is not a rubric; the bound keeps parsing linear and cheap
_TEXT_KEYS = ("criterion", "description", "requirement", "text", "item", "title", "name")
_WEIGHT_KEYS = ("weight", "points")
_LIST_KEYS = ("criteria", "rubric", "rubrics", "items")
_JSON_START = re.compile(r'\{\s*["}]|\[\s*[{\[\]"]')
_NUMBER = re.compile(r"\d{1,6}(?:\.\d{1,6})?")
_RAW_CHARS = 4_000
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class RubricSettings:
    """What counts as a usable rubric.

    Attributes:
        format: `lines` or `json`.
        min_criteria: fewer usable criteria than this: no rubric.
        max_criteria: further criteria are left out.
        on_parse_failure: `nan` gives no rubric; `raw_text` makes the whole text one criterion of weight 1
            (implicit aggregation needs no parse).
        copied: criteria of the few-shot examples; one of them in the output is dropped unless it shares a
            word of five letters or more with the prompt.
        chars: shortest and longest criterion in characters; None: (5, 120) for lines, (3, 1000) for json.
        max_weight: weights lie in (0, max_weight]; None: 10 for lines, 100 for json.
    """

    format: RubricFormat = "json"
    min_criteria: int = 1
    max_criteria: int = 10
    on_parse_failure: Literal["nan", "raw_text"] = "nan"
    copied: tuple[str, ...] = ()
    chars: tuple[int, int] | None = None
    max_weight: float | None = None

    @property
    def char_range(self) -> tuple[int, int]:
        """Bounds in force for the length of a criterion."""
        return self.chars or {"lines": (5, 120), "json": (3, 1000)}[self.format]

    @property
    def weight_limit(self) -> float:
        """Largest weight in force."""
        return self.max_weight if self.max_weight is not None else {"lines": 10.0, "json": 100.0}[self.format]


@dataclass(frozen=True, slots=True)
class ParsedRubric:
    """The outcome of a parse.

    Attributes:
        rubric: None if there is no usable one.
        reason: empty if the text parsed; otherwise `empty`, `no_json`, `bad_json`, `truncated`,
            `no_criteria` or `too_few`. Under `raw_text` a failed parse has both a rubric and a reason.
    """

    rubric: Rubric | None
    reason: str = ""

    @property
    def valid(self) -> bool:
        """True if the text itself parsed (a raw-text stand-in does not count)."""
        return not self.reason


def parse_rubric(text: str, settings: RubricSettings, prompt: str = "") -> ParsedRubric:
    """Reads the rubric in `text` (RACE Eq 1). Never raises.

    Thinking is stripped first. Criteria that repeat, whose weight is not a finite number in (0, max_weight],
    whose length is out of range, or which are copied from the examples are dropped.

    Args:
        text: a model's output.
        settings: format and limits.
        prompt: the prompt it was written for; only the filter of copied criteria looks at it.
    """
    body = _body(text)
    if not body:
        return ParsedRubric(None, "empty")
    pairs, reason = _pairs(body, settings.format)
    kept = tuple(_usable(pairs, settings, prompt))
    if not reason and len(kept) < settings.min_criteria:
        reason = "too_few" if kept else "no_criteria"
    if not reason:
        return ParsedRubric(Rubric(kept, text))
    if settings.on_parse_failure == "raw_text":
        return ParsedRubric(Rubric((Criterion(body[:_RAW_CHARS], 1.0),), text), reason)
    return ParsedRubric(None, reason)


def written_criteria(text: str, settings: RubricSettings) -> tuple[Criterion, ...]:
    """What `text` says, for statistics: with repeats, copies, and any number and length of criteria. Never raises.

    Only criteria without words or without a usable weight are left out. Those that `parse_rubric` keeps are all in it.
    """
    pairs, _ = _pairs(_body(text), settings.format)
    weighed = ((t, _weight(weight, settings.weight_limit)) for t, weight in pairs)
    return tuple(Criterion(t, w) for t, w in weighed if w is not None and content_words(t))


def is_grounded(criterion: str, prompt: str) -> bool:
    """Shares a content word or a number with the prompt (Table 11, "Grounded"; the rule is ours)."""
    return not content_words(criterion).isdisjoint(content_words(prompt))


def format_lines(rubric: Rubric) -> str:
    """`- criterion | weight` lines, as the `lines` format reads them."""
    return "\n".join(f"- {c.text} | {c.weight:g}" for c in rubric.criteria)


def format_criteria(rubric: Rubric) -> str:
    """`- criterion` lines, the heaviest first, for prompts in which weights would only confuse."""
    ordered = sorted(rubric.criteria, key=lambda c: -c.weight)
    return "\n".join(f"- {c.text}" for c in ordered)


def format_numbered(rubric: Rubric) -> str:
    """`n. criterion (weight: w)` lines with weights that sum to 1, for judges that can weigh."""
    total = sum(c.weight for c in rubric.criteria)
    return "\n".join(
        f"{i}. {c.text} (weight: {c.weight / total:.2f})" for i, c in enumerate(rubric.criteria, 1)
    )


def format_json(rubric: Rubric) -> str:
    """The rubric as the JSON object that the `json` format reads."""
    rows = [{"criterion": c.text, "weight": c.weight} for c in rubric.criteria]
    return json.dumps({"criteria": rows}, ensure_ascii=False)


def json_values(text: str) -> Iterator[object]:
    """Every balanced JSON object or list in plain text, outermost ones in order. A bad one is skipped."""
    for body in _balanced(text):
        value = _loads(body) if body is not None else None
        if value is not None:
            yield value


def _body(text: str) -> str:
    """What is read of an output."""
    return strip_thinking(text)[:_MAX_CHARS].strip()


def _pairs(body: str, form: RubricFormat) -> tuple[list[tuple[str, object]], str]:
    """(criterion, weight) pairs as they stand, and why there is none."""
    return {"lines": _from_lines, "json": _from_json}[form](body)


def _usable(
    pairs: Iterable[tuple[str, object]], settings: RubricSettings, prompt: str
) -> Iterator[Criterion]:
    low, high = settings.char_range
    copied = {_key(c) for c in settings.copied}
    long_words = {w for w in words(prompt) if len(w) > 4}
    seen: set[str] = set()
    for text, raw_weight in pairs:
        weight = _weight(raw_weight, settings.weight_limit)
        key = _key(text)
        if weight is None or key in seen or not low <= len(text) <= high or not content_words(text):
            continue
        if key in copied and not long_words & set(words(key)):
            continue
        seen.add(key)
        yield Criterion(text, weight)
        if len(seen) == settings.max_criteria:
            return


def _key(text: str) -> str:
    return _SPACES.sub(" ", text).strip(" .").casefold()


def _weight(value: object, limit: float) -> float | None:
    """The weight as a number, or None if it is not one in (0, limit]."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and 0 < number <= limit else None


def _from_lines(body: str) -> tuple[list[tuple[str, object]], str]:
    """(criterion, weight) of each line up to the first blank one.

    The few-shot prompt ends in "-", so the first line comes without its dash.
    """
    lines = ("- " + body.lstrip("-* \t")).split("\n")
    block: list[tuple[str, object]] = []
    for line in lines:
        if not line.strip():
            break
        criterion, bar, weight = line.strip().rpartition("|")
        if bar and criterion[:1] in ("-", "*") and _NUMBER.fullmatch(weight.strip()):
            block.append((_SPACES.sub(" ", criterion[1:]).strip(), weight.strip()))
    return block, "" if block else "no_criteria"


def _from_json(body: str) -> tuple[list[tuple[str, object]], str]:
    """(criterion, weight) pairs of the first balanced JSON value that holds criteria."""
    reason = "no_json"
    for part in _balanced(body):
        if part is None:
            return [], "truncated"
        value = _loads(part)
        if value is None:
            reason = "bad_json"
            continue
        pairs = [pair for row in _criteria_list(value) if (pair := _pair(row)) is not None]
        if pairs:
            return pairs, ""
        reason = "no_criteria"
    return [], reason


def _balanced(text: str) -> Iterator[str | None]:
    """Outermost balanced JSON-looking parts in order; None once for one that is still open at the end."""
    position = 0
    while (start := _JSON_START.search(text, position)) is not None:
        end = _closing(text, start.start())
        if end is None:
            yield None
            return
        yield text[start.start() : end]
        position = end


def _closing(text: str, start: int) -> int | None:
    """Index behind the bracket that closes the one at `start`; brackets inside strings do not count."""
    depth, quoted, escaped = 0, False, False
    for i in range(start, len(text)):
        char = text[i]
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth == 0:
                return i + 1
    return None


def _loads(body: str) -> object:
    try:
        return json.loads(body, strict=False)
    except (ValueError, RecursionError):  # a number with too many digits is a ValueError as well
        return None


def _criteria_list(value: object, depth: int = 2) -> list[object]:
    """The list of criteria in a parsed JSON value, or []."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict) or depth == 0:
        return []
    for key in _LIST_KEYS:
        found = _criteria_list(value.get(key), depth - 1)
        if found:
            return found
    return []


def _pair(row: object) -> tuple[str, object] | None:
    """(text, weight) of one JSON criterion; its `scoring_levels` and other keys are left out."""
    if not isinstance(row, dict):
        return None
    text = next((row[k] for k in _TEXT_KEYS if isinstance(row.get(k), str) and row[k].strip()), None)
    weight = next((row[k] for k in _WEIGHT_KEYS if k in row), None)
    return None if text is None or weight is None else (_SPACES.sub(" ", text).strip(), weight)
