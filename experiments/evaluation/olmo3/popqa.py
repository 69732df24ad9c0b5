"""PopQA: short questions on entities of all degrees of fame, after fifteen worked ones in the same turn.

An answer is right if an alias of the object occurs in it anywhere, as it is written, in lower case, or with its first
letter upper and the rest lower. Nothing is normalised and the thinking counts, so that a model which names many
candidates is right often. (A blank alias, which every text holds, is left out.)

The fifteen are those of the protocol: the first of the sixteen that OLMES fixes, one for each relation but "capital",
from PopQA itself (Mallen et al. 2023, MIT licence).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from racelab.experiments.evaluation.olmo3.common import (
    TaskSettings,
    examined,
    number_field,
    question,
    scored_text,
    text_field,
    texts_field,
    unique,
)
from racelab.experiments.evaluation.types import Answer, Ask, Examined, Example, HubSource, Record

SHOTS = (
    ("What is Thomas Widdrington's occupation?", "politician"),
    ("In what city was Glover Morrill Allen born?", "Walpole"),
    ("What genre is The Arab?", "adventure film"),
    ("Who is the father of Qasim ibn Muhammad ibn Abi Bakr?", "Muhammad ibn Abi Bakr"),
    ("In what country is Cora?", "United States of America"),
    ("Who was the producer of Genre?", "Don Hertzfeldt"),
    ("Who was the director of Up in the Air?", "Howard Bretherton"),
    ("What is Lima the capital of?", "Peru"),
    ("Who was the screenwriter for Trivandrum Lodge?", "Anoop Menon"),
    ("Who was the composer of 1983?", "Gopi Sundar"),
    ("What color is chalk?", "white"),
    ("What is the religion of Spring Arbor University?", "Free Methodist Church"),
    ("What sport does Harry Clay play?", "association football"),
    ("Who is the author of B²FH paper?", "William Alfred Fowler"),
    ("Who is the mother of Terry Fox?", "Betty Fox"),
)


@dataclass(frozen=True, slots=True)
class PopQa:
    """PopQA under olmo3-adapt.

    A mark's score is 1 if an alias occurs in the answer; its details are `exact_match`. The total is the mean over
    questions. The example's domain is the relation (`prop`), where the data name it.
    """

    settings: TaskSettings

    @property
    def name(self) -> str:
        """As in `eval.benchmarks`."""
        return "popqa"

    @property
    def sources(self) -> tuple[HubSource, ...]:
        """Its data on the hub."""
        return (HubSource("akariasai/PopQA", "test"),)

    def read(self, records: Iterable[Record]) -> list[Example]:
        """Columns: id, question, possible_answers (a list, or its JSON text); optional: prop.

        Raises:
            DataError: a field is missing or of the wrong type, or an id occurs twice.
        """
        found = []
        for where, record in records:
            aliases = texts_field(record, "possible_answers", where, blank=True)
            fields = {
                "question": text_field(record, "question", where),
                "aliases": tuple(alias for alias in aliases if alias.strip()),
            }
            domain = text_field(record, "prop", where, blank=True)
            found.append((where, Example(_id(record, where), domain, fields)))
        return unique(found)

    def ask(self, example: Example) -> Ask:
        """The fifteen and the question."""
        worked = "".join(f"Q: {q} A: {a}\n\n" for q, a in SHOTS)
        return question(f"{worked}Q: {example.fields['question']} A:", self.settings)

    def mark(self, example: Example, answers: Sequence[Answer]) -> Examined:
        """1 if an alias occurs."""
        text = scored_text(answers[0].text or "", self.settings, strips=False)
        alias = next((a for a in example.fields["aliases"] if occurs(a, text)), "")
        right = float(alias != "")
        parsed = bool(text.strip())
        return examined(self.name, example, answers[0], alias, right, {"exact_match": right}, parsed=parsed)


def occurs(alias: str, text: str) -> bool:
    """Whether one of the three spellings of an alias is a part of the text."""
    return alias in text or alias.lower() in text or alias.capitalize() in text


def _id(record: Mapping[str, Any], where: str) -> str:
    value = record.get("id")
    return (
        text_field(record, "id", where) if isinstance(value, str) else str(number_field(record, "id", where))
    )
