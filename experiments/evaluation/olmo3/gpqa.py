"""GPQA (main): questions by experts with four options, whose order is drawn from the row's number."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from racelab.experiments.evaluation.olmo3.common import TaskSettings, question, text_field, unique
from racelab.experiments.evaluation.olmo3.letters import mark_letter, with_sentences
from racelab.experiments.evaluation.types import Answer, Ask, Examined, Example, HubSource, Record

LABELS = "ABCD"
SEED = 111
"""Row i's options [wrong 1 to 3, right] are shuffled by Python's Random(SEED + i), i from 0 over all data."""


@dataclass(frozen=True, slots=True)
class Gpqa:
    """GPQA under olmo3-adapt.

    A mark's score is the exact match of the letter; its details are `exact_match` and `format`. The total is the mean
    over questions. The example's domain is the question's field of knowledge, where the data name it.
    """

    settings: TaskSettings

    @property
    def name(self) -> str:
        """As in `eval.benchmarks`."""
        return "gpqa"

    @property
    def sources(self) -> tuple[HubSource, ...]:
        """Its data on the hub (gated: its terms ask not to publish the questions)."""
        return (HubSource("Idavidrein/gpqa", "train", config="gpqa_main"),)

    def read(self, records: Iterable[Record]) -> list[Example]:
        """Columns: Question, Correct Answer, Incorrect Answer 1 to 3; optional: Record ID, High-level domain.

        Raises:
            DataError: a field is missing or of the wrong type, or an id occurs twice.
        """
        found = []
        for i, (where, record) in enumerate(records):
            right = cleaned(text_field(record, "Correct Answer", where))
            options = [
                cleaned(text_field(record, f"Incorrect Answer {k}", where, blank=True)) for k in (1, 2, 3)
            ]
            options.append(right)
            random.Random(SEED + i).shuffle(options)
            fields = {
                "question": text_field(record, "Question", where),
                "options": tuple(options),
                "gold": LABELS[options.index(right)],
            }
            name = text_field(record, "Record ID", where, blank=True) or str(i)
            domain = text_field(record, "High-level domain", where, blank=True)
            found.append((where, Example(name, domain, fields)))
        return unique(found)

    def ask(self, example: Example) -> Ask:
        """Question and options between the two sentences."""
        options = "".join(
            f" ({label}) {text}\n" for label, text in zip(LABELS, example.fields["options"], strict=True)
        )
        query = f"Question: {example.fields['question']}\nChoices:\n{options}"
        return question(with_sentences(query, "(A), (B), (C), (D)"), self.settings, overrides=True)

    def mark(self, example: Example, answers: Sequence[Answer]) -> Examined:
        """1 if the letter is the right one."""
        return mark_letter(self.name, example, answers, self.settings, letters="A-D", exact=True)


def cleaned(text: str) -> str:
    """An option as the protocol shows it: trimmed, marks of headings and what stands in brackets taken out.

    An option that is blank in the data is one blank.
    """
    if not text:
        return " "
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
