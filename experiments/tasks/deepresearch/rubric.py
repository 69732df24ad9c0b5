"""A static rubric in the normalised schema {id, title, description, weight, leak_safe_hint} (RLDS App. D.4).

The public sources do not agree on names; `normalised` reads all of these, in this order:

    title           title, handle, name
    description     description, ingredient, criterion, text
    weight          weight, points; 1 where there is none
    leak_safe_hint  leak_safe_hint

Deviation: in the paper a model writes the leak-safe hints, for auxiliary distillation. Nothing here reads them: a hint
that the data brings is kept, a missing one stays empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

_TITLE: Final = ("title", "handle", "name")
_DESCRIPTION: Final = ("description", "ingredient", "criterion", "text")
_WEIGHT: Final = ("weight", "points")
_LISTS: Final = ("rubrics", "rubric", "criteria", "rubric_list")


class RubricError(ValueError):
    """No usable rubric; the text says why."""


@dataclass(frozen=True, slots=True)
class Item:
    """One criterion.

    Attributes:
        id: `c1`, `c2`, ... where the source has none.
        title: a few words; may be empty.
        description: what the judge reads.
        weight: finite and not 0; below 0 for a pitfall.
        leak_safe_hint: may be empty.
    """

    id: str
    title: str
    description: str
    weight: float
    leak_safe_hint: str = ""

    def json(self) -> dict[str, Any]:
        """The normalised schema."""
        return asdict(self)


def normalised(raw: object) -> tuple[Item, ...]:
    """A rubric of any of the known schemas. Criteria without a description or with weight 0 are left out.

    Args:
        raw: a list of objects, an object that holds one, or either as JSON text.

    Raises:
        RubricError: none is left, or no weight is above 0 (nothing to be earned).
    """
    rows = _rows(raw)
    items = [item for n, row in enumerate(rows, 1) if (item := _item(row, n)) is not None]
    if not items:
        raise RubricError("no criterion in it")
    if not any(item.weight > 0 for item in items):
        raise RubricError("no weight is above 0")
    if len({item.id for item in items}) < len(items):
        items = [
            Item(f"c{n}", i.title, i.description, i.weight, i.leak_safe_hint) for n, i in enumerate(items, 1)
        ]
    return tuple(items)


def _rows(raw: object) -> Sequence[object]:
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError):
            raise RubricError("not JSON") from None
    if isinstance(raw, dict):
        raw = next((raw[key] for key in _LISTS if key in raw), None)
        if isinstance(raw, str):
            return _rows(raw)
    if not isinstance(raw, list):
        raise RubricError("no list of criteria")
    return raw


def _item(row: object, n: int) -> Item | None:
    if not isinstance(row, dict):
        return None
    lower: Mapping[str, object] = {str(k).lower(): v for k, v in row.items()}
    description = _first_text(lower, _DESCRIPTION)
    weight = _weight(lower)
    if not description or weight is None:
        return None
    given = lower.get("id")
    name = str(given) if isinstance(given, str | int) and str(given) else f"c{n}"
    return Item(
        name, _first_text(lower, _TITLE), description, weight, _first_text(lower, ("leak_safe_hint",))
    )


def _first_text(row: Mapping[str, object], names: Sequence[str]) -> str:
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()
    return ""


def _weight(row: Mapping[str, object]) -> float | None:
    """The weight; 1 where the source has none, None for one that says nothing."""
    value = next((row[name] for name in _WEIGHT if row.get(name) is not None), 1.0)
    try:
        weight = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return weight if math.isfinite(weight) and weight != 0 and not isinstance(value, bool) else None
