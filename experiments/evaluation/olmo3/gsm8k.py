r"""GSM8K: grade-school word problems; the answer is a number in \boxed{}.

The primary metric takes the answer however it was given (`exact_match_flex`); the strict one takes it only after a
phrase or in the sentence that was asked for. Kept oddities: a unit inside the box makes it wrong ("\boxed{5 apples}");
after a phrase without a box, what does not begin with a number is taken to the end of its line. Quirk `gsm8k-unsigned`:
the number pattern has no sign for integers, in the answers and in the gold; without it both keep a minus.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.olmo3.common import (
    TaskSettings,
    examined,
    question,
    scored_text,
    text_field,
)
from racelab.experiments.evaluation.olmo3.extract import Extracted, extract_answer, last, same, squeeze
from racelab.experiments.evaluation.types import Answer, Ask, Examined, Example, HubSource, Record

UNSIGNED = "gsm8k-unsigned"
STRICT_FORM = 0.4
"""Answers found in a worse form are blank for the strict metric."""

_SENTENCE = r"Therefore, the final answer is \boxed{"
_BOX = r"\boxed{"
_UNSIGNED_NUMBER = re.compile(r"([-+]?\d*\.\d+|\d+)")
_SIGNED_NUMBER = re.compile(r"((?:(?<![\w)])-)?(?:\d*\.\d+|\d+))")
_PREFIXES = tuple(
    re.compile(phrase, re.IGNORECASE)
    for phrase in (
        "therefore,? the final answer is",
        "therefore,? the answer is",
        "the final answer is",
        "the answer is",
        "answer is",
        "answer is:",
        "answer:",
    )
)
_WRAPPINGS = (("$", "$"), (r"\(", r"\)"), ("**", "**"), ("***", "***"), (r"\[", r"\]"))


@dataclass(frozen=True, slots=True)
class Gsm8k:
    """GSM8K under olmo3-adapt.

    A mark's score is `exact_match_flex`; its details are that, `exact_match` (strict) and `format`. Each total is the
    mean over problems.
    """

    settings: TaskSettings

    @property
    def name(self) -> str:
        """As in `eval.benchmarks`."""
        return "gsm8k"

    @property
    def sources(self) -> tuple[HubSource, ...]:
        """Its data on the hub."""
        return (HubSource("openai/gsm8k", "test", config="main"),)

    def read(self, records: Iterable[Record]) -> list[Example]:
        """Columns: question, answer (worked out, then "#### " and the number).

        Raises:
            DataError: a field is missing or of the wrong type, or the answer holds no number.
        """
        examples = []
        for i, (where, record) in enumerate(records):
            text = text_field(record, "question", where)
            gold = self._number(text_field(record, "answer", where).rsplit("####", 1)[-1])
            if gold is None:
                raise DataError(f"{where}: field 'answer' ends without a number; end it with '#### 42'")
            examples.append(Example(str(i), "", {"question": text, "gold": gold}))
        return examples

    def ask(self, example: Example) -> Ask:
        """The problem and the sentence to end with."""
        user = (
            f"Solve the following grade school math word problem:\n{example.fields['question']}\n\n"
            r'Show your work and conclude with "Therefore, the final answer is \boxed{answer}." where answer is just '
            "the final number that solves the problem. E.g., if the answer is 6, conclude with "
            r'"Therefore, the final answer is \boxed{6}."'
        )
        return question(user, self.settings, overrides=True)

    def mark(self, example: Example, answers: Sequence[Answer]) -> Examined:
        """1 if the number is the right one."""
        text = answers[0].text or ""
        for _ in range(2):  # the task cuts, and so does the extraction that it calls
            text = scored_text(text, self.settings, strips=True)
        found = self.extract(text)
        gold = example.fields["gold"]
        flex = float(_equal(found.answer, gold))
        strict = float(_equal(found.answer if found.form >= STRICT_FORM else "", gold))
        details = {"exact_match_flex": flex, "exact_match": strict, "format": found.form}
        return examined(
            self.name, example, answers[0], found.answer, flex, details, parsed=found.answer != ""
        )

    def extract(self, text: str) -> Extracted:
        """The number in a text that is scored."""
        text = re.sub(r"(\d),(\d)", r"\1\2", squeeze(text))
        text = _unwrapped(re.sub(r"\.\s*$", "", text).strip())
        number = self._pattern
        return extract_answer(
            text,
            (_last_box, last(number), _last_line),
            exact=_last_sentence,
            prefixes=_PREFIXES,
            after=lambda rest: _after(rest, number),
        )

    def _number(self, text: str) -> str | None:
        return last(self._pattern)(re.sub(r"(\d),(\d)", r"\1\2", text))

    @property
    def _pattern(self) -> re.Pattern[str]:
        return _UNSIGNED_NUMBER if UNSIGNED in self.settings.quirks else _SIGNED_NUMBER


def _unwrapped(text: str) -> str:
    r"""The text with one pair of each wrapping taken out of every line, and \[ \] around a line of its own.

    Of a wrapping the first opening and the last closing sign of a line are a pair, whatever stands around them.
    """
    for left, right in _WRAPPINGS:
        text = "\n".join(_unwrapped_line(line, left, right) for line in text.split("\n")).strip()
    return re.sub(r"\\\[\n(.*)\n\\\]", r"\1", text).strip()


def _unwrapped_line(line: str, left: str, right: str) -> str:
    start = line.find(left)
    end = line.rfind(right)
    if start < 0 or end < start + len(left):
        return line
    return line[:start] + line[start + len(left) : end] + line[end + len(right) :]


def _last_sentence(text: str) -> str | None:
    """What the sentence that was asked for boxes, up to the last brace of its line."""
    found = None
    for line in text.split("\n"):
        start, end = line.find(_SENTENCE), line.rfind("}")
        if start >= 0 and end >= start + len(_SENTENCE):
            found = line[start + len(_SENTENCE) : end]
    return found


def _boxes(text: str) -> list[tuple[str, int]]:
    """The boxes that close on their line: content up to the first brace, and where they end."""
    found, at, offset = [], 0, 0
    for line in text.split("\n"):
        while (start := line.find(_BOX, at)) >= 0 and (end := line.find("}", start)) >= 0:
            found.append((line[start + len(_BOX) : end], offset + end + 1))
            at = end + 1
        at, offset = 0, offset + len(line) + 1
    return found


def _last_box(text: str) -> str | None:
    boxes = _boxes(text)
    return boxes[-1][0] if boxes else None


def _last_line(text: str) -> str | None:
    """The protocol's pattern "any text" has its last match at the very end, where nothing is left."""
    return ""


def _after(rest: str, number: re.Pattern[str]) -> str:
    """The answer after a phrase: the first box, else a number right there, else the rest of the line."""
    if boxes := _boxes(rest):
        content, end = boxes[0]
        return content or rest[:end]
    found = number.match(rest)
    return found[1] if found else rest.split("\n", 1)[0]


def _equal(answer: str, gold: str) -> bool:
    """Equality after deleting commas, dollars, everything up to the last "#### ", and a final period."""
    return same(_bare(answer), _bare(gold), punctuation=True)


def _bare(text: str) -> str:
    text = text.replace(",", "").replace("$", "")
    return text[text.rfind("#### ") + 5 :].removesuffix(".") if "#### " in text else text.removesuffix(".")
