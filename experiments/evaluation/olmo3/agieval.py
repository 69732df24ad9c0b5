"""AGIEval, the eight English sets of the protocol: law school, logic, college and civil-service exams.

The layout of AGIEval's own files (v1) is the protocol's. Deviation: those files are on no hub, so the hub's copies
`hails/agieval-*` are taken, whose passage and question are one text; they are parted at the marks that AGIEval's code
puts between them, which loses white space at their ends. To ask exactly as the protocol does, set eval.data.agieval to
the folder `data/v1` of github.com/ruixiangcui/AGIEval; sets in it that are not among the eight are passed over.

Kept oddity: an option without a label of its own loses a leading capital A to E ("Beijing" reads "eijing").
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from racelab.experiments.data.rows import listed
from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.olmo3.common import (
    TaskSettings,
    list_field,
    question,
    text_field,
    texts_field,
)
from racelab.experiments.evaluation.olmo3.letters import mark_letter, with_sentences
from racelab.experiments.evaluation.types import Answer, Ask, Examined, Example, HubSource, Record

SETS = (
    "lsat-ar",
    "lsat-lr",
    "lsat-rc",
    "logiqa-en",
    "sat-math",
    "sat-en",
    "aqua-rat",
    "gaokao-english",
)
LABELS = "ABCDE"
_OTHER_SETS = re.compile(r"gaokao-.*|jec-qa-.*|logiqa-zh|math|sat-en-without-passage")
_OWN_LABEL = re.compile(r"^\s*\([A-E]\)\s*|^\s*[A-E][.?]?\s*")


@dataclass(frozen=True, slots=True)
class AgiEval:
    """AGIEval English under olmo3-adapt.

    A mark's score is the exact match of the letter; its details are `exact_match` and `format`. The total is the mean
    over the eight sets (the domains) of their means.
    """

    settings: TaskSettings

    @property
    def name(self) -> str:
        """As in `eval.benchmarks`."""
        return "agieval"

    @property
    def sources(self) -> tuple[HubSource, ...]:
        """Its data on the hub."""
        return tuple(HubSource(f"hails/agieval-{name}", "test", domain=name) for name in SETS)

    def read(self, records: Iterable[Record]) -> list[Example]:
        """Columns: task, passage (may be empty), question, options, label; or task, query, choices, gold.

        Raises:
            DataError: a field is missing or of the wrong type, the task is none of AGIEval's, or no record belongs to
                the eight.
        """
        seen: Counter[str] = Counter()
        examples = []
        where = "AGIEval"
        for where, record in records:
            task = text_field(record, "task", where)
            if task not in SETS:
                if _OTHER_SETS.fullmatch(task):
                    continue
                raise DataError(f"{where}: field 'task' is {task!r}; it must be one of {listed(SETS)}")
            fields = _joined(record, where) if "query" in record else _own(record, where)
            examples.append(Example(f"{task}-{seen[task]}", task, fields))
            seen[task] += 1
        if not examples:
            raise DataError(f"{where}: no record belongs to {listed(SETS)}; give data that do")
        return examples

    def ask(self, example: Example) -> Ask:
        """Passage, question and options between the two sentences."""
        fields = example.fields
        passage = f"Passage: {fields['passage']}\n" if fields["passage"] else ""
        options = "\n".join(
            f" ({label}) {_OWN_LABEL.sub('', text)}"
            for label, text in zip(LABELS, fields["options"], strict=False)
        )
        query = f"{passage}Question: {fields['question']}\n{options}"
        query = re.sub(r"(\([A-G]\))(\w)", r"\1 \2", query)
        query = re.sub(r"\n{2,}", "\n", query)
        user = with_sentences(query, "(A), (B), (C), (D), (E), etc")
        return question(user, self.settings, overrides=True)

    def mark(self, example: Example, answers: Sequence[Answer]) -> Examined:
        """1 if the letter is the right one."""
        return mark_letter(self.name, example, answers, self.settings, letters="A-F", exact=True)


def _own(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """AGIEval's own layout."""
    options = _options(record, "options", where)
    label = text_field(record, "label", where).strip()
    if label not in tuple(LABELS):
        raise DataError(f"{where}: field 'label' is {label!r}; it must be one of {LABELS}")
    return {
        "passage": text_field(record, "passage", where, blank=True),
        "question": text_field(record, "question", where),
        "options": options,
        "gold": label,
    }


def _joined(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The hub's layout: query is passage, "Q: ", question, "Answer Choices:", options, and a cue."""
    options = _options(record, "choices", where)
    head, mark, _ = text_field(record, "query", where).rpartition("Answer Choices:")
    passage, q, asked = head.rpartition("Q: ")
    if not mark or not q or not asked.strip():
        raise DataError(
            f"{where}: field 'query' has no 'Q: ' or no 'Answer Choices:'; give AGIEval's own files"
        )
    gold = list_field(record, "gold", where)
    index = gold[0] if len(gold) == 1 else None
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(options):
        raise DataError(f"{where}: field 'gold' must be a list of one index below {len(options)}")
    return {
        "passage": passage.strip(),
        "question": asked.strip(),
        "options": options,
        "gold": LABELS[index],
    }


def _options(record: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    options = texts_field(record, key, where, least=2, blank=True)
    if len(options) > len(LABELS):
        raise DataError(
            f"{where}: field {key!r} holds {len(options)} texts; at most {len(LABELS)} have a letter"
        )
    return options
