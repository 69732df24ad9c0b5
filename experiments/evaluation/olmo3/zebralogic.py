"""ZebraLogic: grid puzzles, answered in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.olmo3.common import (
    TaskSettings,
    examined,
    list_field,
    parsed,
    place,
    question,
    scored_text,
    text_field,
    unique,
    wrong_type,
)
from racelab.experiments.evaluation.types import Answer, Ask, Examined, Example, HubSource, Record

EASY = frozenset({"2*2", "2*3", "2*4", "2*5", "2*6", "3*2", "3*3"})
"""Houses * attributes; all other sizes are hard."""
NUMBER_CELL = "zebralogic-number-cell"
_BLANK = "___"
_GOLD = "the gold ones are in allenai/ZebraLogicBench-private (grid_mode): ask for access, then hf auth login"

_REASONING = (
    "Given Clue 1, we know Peter is in House 2. According to Clue 2, Arnold is directly left of the one who only "
    "drinks water. The person in House 3 cannot be on the left of anyone, so Arnold must be in House 1. Thus, Peter "
    "drinks water, and Eric lives in House 3. Then, according to Clue 3, Eric drinks milk. Therefore, Arnold drinks "
    "tea."
)
_SOLVED = {
    "reasoning": _REASONING,
    "solution": {
        "House 1": {"Name": "Arnold", "Drink": "tea"},
        "House 2": {"Name": "Peter", "Drink": "water"},
        "House 3": {"Name": "Eric", "Drink": "milk"},
    },
}
# The benchmark's own words (ZeroEval, Apache-2.0), blanks at line ends included.
_OPENING = f"""
# Example Puzzle{" "}

There are 3 houses, numbered 1 to 3 from left to right, as seen from across the street. Each house is occupied by a \
different person. Each house has a unique attribute for each of the following characteristics:
 - Each person has a unique name: `Peter`, `Eric`, `Arnold`.
 - Each person has a unique favorite drink: `tea`, `water`, `milk`

## Clues for the Example Puzzle

1. Peter is in the second house.
2. Arnold is directly left of the one who only drinks water.
3. The one who only drinks water is directly left of the person who likes milk.

## Answer to the Example Puzzle

"""
_INSTRUCTION = (
    "# Instruction\n\nNow please solve the above puzzle. Present your reasoning and solution in the following json "
    "format:\n\n"
)

Table = Mapping[str, Mapping[str, str]]
"""House -> attribute -> value."""


@dataclass(frozen=True)
class Zebralogic:
    """ZebraLogic under olmo3-adapt.

    A mark's score is the puzzle accuracy: 1 if every cell is right. Its details are `cell_accuracy`, `parsed` (0 or 1)
    and `difficulty` (`easy` or `hard`, which is the example's domain too). Each total is a mean over puzzles, over all
    of them and by difficulty.

    Quirk `zebralogic-number-cell`: a number or boolean where a gold cell is looked up spoils the whole puzzle, which
    then counts as not parsed; so do a house that is null or a number, a house that is a text or list with the looked-up
    attribute's name in it, an object or list in a cell that turns out empty further in, and a list whose first element
    is no text. (A number inside an object in a cell is merely wrong.) Without the quirk nothing spoils a puzzle, and a
    number is compared as text (5 with "5").

    Attributes:
        settings: of the run.
    """

    settings: TaskSettings

    @property
    def name(self) -> str:
        """As in `eval.benchmarks`."""
        return "zebralogic"

    @property
    def sources(self) -> tuple[HubSource, ...]:
        """1000 puzzles; access is granted on request."""
        return (HubSource("allenai/ZebraLogicBench-private", "test", "grid_mode"),)

    def read(self, records: Iterable[Record]) -> list[Example]:
        """Columns id, size, puzzle, solution ({header, rows}, the first column is the house's number).

        Raises:
            DataError: a field is missing or of the wrong type, or the solution is one of blanks.
        """
        return unique((where, _example(record, where)) for where, record in records)

    def ask(self, example: Example) -> Ask:
        """A solved puzzle, the puzzle, and the form of the answer."""
        return question(prompt(example.fields["puzzle"], example.fields["table"]), self.settings)

    def mark(self, example: Example, answers: Sequence[Answer]) -> Examined:
        """Cells are compared without regard to case and blanks at the ends."""
        (answer,) = answers
        found = last_object(scored_text(answer.text or "", self.settings, strips=False))
        table: Table = example.fields["table"]
        right = None if found is None else _right_cells(found, table, NUMBER_CELL in self.settings.quirks)
        cells = sum(len(attributes) for attributes in table.values())
        score = float(right == cells)
        details = {
            "cell_accuracy": 0.0 if right is None else right / cells,
            "parsed": int(right is not None),
            "difficulty": example.domain,
        }
        return examined(self.name, example, answer, found or "", score, details, parsed=right is not None)


def prompt(puzzle: str, table: Table) -> str:
    """The user's turn; the form has a blank for every attribute of every house."""
    form = {
        "reasoning": _BLANK,
        "solution": {house: dict.fromkeys(attributes, _BLANK) for house, attributes in table.items()},
    }
    return (
        f"{_OPENING}{json.dumps(_SOLVED, indent=4)}\n\n# Puzzle to Solve \n\n{puzzle}\n\n\n"
        f"{_INSTRUCTION}{json.dumps(form, indent=4)}\n\n"
    )


def last_object(text: str) -> str | None:
    """The last {...} whose braces balance and that stands in no other.

    Braces are counted wherever they stand, in strings too; one that closes nothing is passed over, and one that is
    never closed hides all that follows.
    """
    depth = start = 0
    found = None
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            if depth == 0:
                start = brace.start()
            depth += 1
        elif depth:
            depth -= 1
            if depth == 0:
                found = text[start : brace.end()]
    return found


class _SpoiltError(Exception):
    """Under the quirk: the whole puzzle counts as not parsed."""


def _right_cells(found: str, gold: Table, quirk: bool) -> int | None:
    """How many cells are right; None if the answer counts as not parsed."""
    try:
        answer = json.loads(found.replace("\n", ""))
    except (ValueError, RecursionError):
        return None
    solution = answer.get("solution") if isinstance(answer, dict) else None
    houses = solution if isinstance(solution, dict) else {}
    look = _published_cell if quirk else _cell
    try:
        return sum(
            _plain(look(houses, house, attribute)) == _plain(value)
            for house, attributes in gold.items()
            for attribute, value in attributes.items()
        )
    except _SpoiltError:
        return None


def _cell(houses: Mapping[str, Any], house: str, attribute: str) -> str | int | float:
    """What stands in a cell: of an object its first value, of a list its first element; "" if nothing does."""
    given = houses.get(house)
    value = given.get(attribute) if isinstance(given, dict) else None
    while isinstance(value, dict):
        value = next(iter(value.values()), None)
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, str | int | float) else ""


def _published_cell(houses: Mapping[str, Any], house: str, attribute: str) -> str:
    """As `_cell`, under the quirk.

    Raises:
        _SpoiltError: what stands there would break the published scorer.
    """
    given = houses.get(house, {})
    if not isinstance(given, dict):
        if not isinstance(given, str | list) or attribute in given:
            raise _SpoiltError
        return ""
    value = given.get(attribute)
    if value in (None, "", [], {}):
        return ""
    if isinstance(value, int | float):
        raise _SpoiltError
    while isinstance(value, dict):
        if not value:
            raise _SpoiltError
        value = next(iter(value.values()))
    if isinstance(value, list):
        if not value or not isinstance(value[0], str):
            raise _SpoiltError
        value = value[0]
    return value if isinstance(value, str) else ""


def _plain(cell: object) -> str:
    return str(cell).lower().strip()


def _example(record: Mapping[str, Any], where: str) -> Example:
    table = _table(record, where)
    size = text_field(record, "size", where, blank=True) or f"{len(table)}*{len(next(iter(table.values())))}"
    if not re.fullmatch(r"\d+\*\d+", size):
        raise DataError(f"{where}: field 'size' is {size!r}; houses*attributes is needed, such as '3*4'")
    fields = {"puzzle": text_field(record, "puzzle", where), "table": table}
    name = text_field(record, "id", where, blank=True) or place(where)
    return Example(name, "easy" if size in EASY else "hard", fields)


def _table(record: Mapping[str, Any], where: str) -> Table:
    """The gold cells by house and attribute."""
    solution = parsed(record.get("solution"), "solution", where, "an object")
    if solution is None:
        raise DataError(f"{where}: field 'solution' is missing, so nothing can be scored; {_GOLD}")
    if not isinstance(solution, Mapping):
        raise wrong_type(where, "solution", solution, "an object")
    header = list_field(solution, "header", where)
    rows = list_field(solution, "rows", where)
    if len(header) < 2 or not rows:
        raise DataError(
            f"{where}: field 'solution' holds no cells; it needs a header (House, attributes) and rows"
        )
    table: dict[str, dict[str, str]] = {}
    for number, cells in enumerate(rows, 1):
        if isinstance(cells, str) or not isinstance(cells, Sequence) or len(cells) != len(header):
            raise DataError(
                f"{where}: row {number} of field 'solution' does not have the header's {len(header)} cells"
            )
        pairs = zip(header[1:], cells[1:], strict=True)
        table[f"House {number}"] = {str(attribute): str(cell) for attribute, cell in pairs}
    if all(cell == _BLANK for attributes in table.values() for cell in attributes.values()):
        raise DataError(f"{where}: field 'solution' holds blanks only; {_GOLD}")
    return table
