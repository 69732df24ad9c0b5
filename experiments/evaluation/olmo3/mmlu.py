"""MMLU: questions with four options from 57 subjects, answered after a short reasoning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.olmo3.common import (
    TaskSettings,
    number_field,
    present,
    question,
    text_field,
    texts_field,
)
from racelab.experiments.evaluation.olmo3.letters import mark_letter
from racelab.experiments.evaluation.types import Answer, Ask, Examined, Example, HubSource, Record

LABELS = "ABCD"


@dataclass(frozen=True, slots=True)
class Mmlu:
    """MMLU under olmo3-adapt.

    A mark's score is the exact match of the letter; its details are `exact_match` and `format`. The total is the mean
    over subjects (the domains) of their means.
    """

    settings: TaskSettings

    @property
    def name(self) -> str:
        """As in `eval.benchmarks`."""
        return "mmlu"

    @property
    def sources(self) -> tuple[HubSource, ...]:
        """Its data on the hub."""
        return (HubSource("cais/mmlu", "test", config="all"),)

    def read(self, records: Iterable[Record]) -> list[Example]:
        """Columns: subject (or task, as of a file's name), question, choices (four texts), answer (0 to 3, or A to D).

        Raises:
            DataError: a field is missing or of the wrong type, or the answer is none of the choices.
        """
        seen: Counter[str] = Counter()
        examples = []
        for where, record in records:
            column = "task" if "task" in record and "subject" not in record else "subject"
            subject = text_field(record, column, where)
            choices = texts_field(record, "choices", where, least=2, blank=True)
            if len(choices) > len(LABELS):
                raise DataError(f"{where}: field 'choices' holds {len(choices)} texts; MMLU has four")
            fields = {
                "question": text_field(record, "question", where),
                "choices": choices,
                "gold": _gold(record, where, len(choices)),
            }
            examples.append(Example(f"{subject}-{seen[subject]}", subject, fields))
            seen[subject] += 1
        return examples

    def ask(self, example: Example) -> Ask:
        """Subject, question and options."""
        subject = example.domain.replace("_", " ")
        options = "".join(
            f" {label}. {text}\n" for label, text in zip(LABELS, example.fields["choices"], strict=False)
        )
        user = (
            f"The following are multiple choice questions about {subject}. Summarize your reasoning concisely, then "
            "conclude with 'Therefore, the answer is: X' where X is one of A, B, C, or D.\n\n"
            f"Question: {example.fields['question']}\n{options}"
        )
        return question(user, self.settings, overrides=True)

    def mark(self, example: Example, answers: Sequence[Answer]) -> Examined:
        """1 if the letter is the right one."""
        return mark_letter(self.name, example, answers, self.settings, letters="A-D", exact=False)


def _gold(record: Mapping[str, Any], where: str, n: int) -> str:
    value = present(record, "answer", where)
    if isinstance(value, str) and value.strip() in tuple(LABELS[:n]):
        return value.strip()
    index = number_field(record, "answer", where)
    if not 0 <= index < n:
        raise DataError(f"{where}: field 'answer' is {index}; it must be 0 to {n - 1}")
    return LABELS[index]
