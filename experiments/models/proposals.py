"""Asking a stronger model for rubrics, and reading what it replies.

A reply that cannot be read is a failed try, never an error: the caller asks again with another `draw`, so that a cache
of replies does not give the bad one back, and counts. Thinking and fences around JSON are ignored. The readers return
None where there is nothing to read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from racelab.configs import schema
from racelab.experiments.models.chat import Calls, ChatModel, ChatRequest, Reply
from racelab.experiments.models.generator import SamplingSettings
from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.rubric import json_values
from racelab.experiments.models.text import content_words, strip_thinking

T = TypeVar("T")

_LISTS = ("criteria", "rubric", "rubrics", "items", "checklist")
_TEXTS = ("criterion", "item", "description", "text", "statement")
_CHARS = (3, 1000)
_LIMIT = 100.0
_SPACES = re.compile(r"\s+")
_YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_CATEGORY = re.compile(r"\W*(essential|important|optional|pitfall)(?: criteri(?:a|on))?\W*[:.—–-]\s*", re.I)


def proposal_sampling(method: schema.StaticRubricCommon, api: schema.ApiConfig) -> SamplingSettings:
    """How a proposer's replies are sampled: as the section `api` says, or as the rubric role of the policy does."""
    role = method.rubric
    return {
        "api": SamplingSettings(api.max_tokens, api.temperature),
        "untrained": SamplingSettings(role.max_tokens, role.temperature, role.top_p),
    }[method.proposer]


class Proposer:
    """A chat model, its sampling, and what was asked of it.

    Attributes:
        asked: requests so far, those included that a cache answered.
    """

    def __init__(self, model: ChatModel, sampling: SamplingSettings) -> None:
        """Keeps the parts and begins to count."""
        self._model, self._sampling = model, sampling
        self._before = model.calls
        self.asked = 0

    @property
    def calls(self) -> Calls:
        """The model's own counts since then."""
        return self._model.calls - self._before

    def request(self, template: RoleTemplate, draw: int = 0, **fields: str) -> ChatRequest:
        """A request of that template."""
        how = self._sampling
        return ChatRequest(
            template.system, template.render(**fields), how.max_tokens, how.temperature, how.top_p, draw
        )

    def ask(self, requests: Sequence[ChatRequest]) -> list[Reply]:
        """One reply per request, in order; nobody is asked for an empty list."""
        if not requests:
            return []
        self.asked += len(requests)
        return self._model.complete(requests)


@dataclass(frozen=True, slots=True)
class RarItem:
    """One item of RaR's checklist.

    Attributes:
        category: essential, important, optional, pitfall; empty if the description names none.
        text: what a grader reads. A pitfall stands in its positive reading, "Avoids: ...".
        weight: as proposed, above 0 (a pitfall's without its sign).
        negative: the proposed weight was below 0.
    """

    category: str
    text: str
    weight: float
    negative: bool = False


def read_rar(text: str, least: int, most: int) -> tuple[RarItem, ...] | None:
    """RaR's checklist of `{title, description, weight}`, at most `most` items; None if fewer than `least` are usable.

    An item without a description or without a weight in ±(0, 100] is left out, and so is one that repeats.
    """
    for rows in _lists(text):
        items: dict[str, RarItem] = {}
        for row in rows:
            if (item := _rar_item(row)) is not None:
                items.setdefault(item_key(item.text), item)
        if len(items) >= max(least, 1):
            return tuple(items.values())[:most]
    return None


def read_items(text: str, least: int, most: int) -> tuple[str, ...] | None:
    """Statements: a JSON list of strings or of objects with a text; None if fewer than `least` are usable.

    Repeated items and placeholders (`<statement>`) are left out, and so are those beyond `most`.
    """
    for rows in _lists(text):
        items: dict[str, str] = {}
        for row in rows:
            found = _squeeze(_text(row))
            if _CHARS[0] <= len(found) <= _CHARS[1] and content_words(found) and not found.startswith("<"):
                items.setdefault(item_key(found), found)
        if len(items) >= max(least, 1):
            return tuple(items.values())[:most]
    return None


def read_yes(text: str, *, last: bool = False) -> bool | None:
    """The first bare yes or no outside the thinking; `last`: the last one, where reasons may come before."""
    found = _YES_NO.findall(strip_thinking(text))
    return None if not found else found[-1 if last else 0].lower() == "yes"


def read_numbers(text: str, n: int) -> tuple[float, ...] | None:
    """The list of exactly `n` finite numbers in a JSON object."""
    for rows in _lists(text, also=("weights",)):
        numbers = [float(v) for v in rows if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) == len(rows) == n and all(map(math.isfinite, numbers)):
            return tuple(numbers)
    return None


def read(reply: Reply, reader: Callable[[str], T | None]) -> T | None:
    """What the reader makes of a reply; None also if none came."""
    return None if reply.text is None else reader(reply.text)


def item_key(text: str) -> str:
    """What two items have in common that say the same in the same words."""
    return _squeeze(text).strip(" .").casefold()


def _lists(text: str, also: Sequence[str] = ()) -> Iterator[list[object]]:
    """The lists in a reply: bare ones, and those under the usual keys of an object."""
    for value in json_values(strip_thinking(text)):
        yield from _inside(value, (*_LISTS, *also))


def _inside(value: object, keys: Sequence[str], depth: int = 2) -> Iterator[list[object]]:
    if isinstance(value, list):
        yield value
    elif isinstance(value, dict) and depth:
        for key in keys:
            yield from _inside(value.get(key), keys, depth - 1)


def _text(row: object) -> str:
    if isinstance(row, dict):
        row = next((row[k] for k in _TEXTS if isinstance(row.get(k), str)), "")
    return row if isinstance(row, str) else ""


def _rar_item(row: object) -> RarItem | None:
    if not isinstance(row, dict):
        return None
    description, weight = _squeeze(_text(row)), row.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float | str):
        return None
    try:
        number = float(weight)
    except (ValueError, OverflowError):
        return None
    prefix = _CATEGORY.match(description)
    body = description[prefix.end() :] if prefix else description
    if not 0.0 < abs(number) <= _LIMIT or len(description) > _CHARS[1] or not content_words(body):
        return None
    category = prefix[1].lower() if prefix else ""
    if number < 0.0 or category == "pitfall":
        return RarItem(category, f"Avoids: {body}", abs(number), number < 0.0)
    return RarItem(category, description, number)


def _squeeze(text: str) -> str:
    return _SPACES.sub(" ", text).strip()
