"""IFEval: does an answer follow instructions that a program can check? One generation, two scores.

`ifeval` is olmo3-adapt's: the checkers see the whole completion, thinking included, so that a model which thinks with
commas fails "no commas". `ifeval-answer` is RACE Appendix G's: the model thinks, and only the text after it is checked.
The two differ by tens of points for a thinking model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from racelab.experiments.data.rows import listed
from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.olmo3.checkers import Checkers, follows, load_checkers, made
from racelab.experiments.evaluation.olmo3.common import (
    TaskSettings,
    list_field,
    place,
    question,
    row,
    scored_text,
    text_field,
    texts_field,
    unique,
    wrong_type,
)
from racelab.experiments.evaluation.types import Answer, Ask, Examined, Example, HubSource, Mark, Record

WHOLE = "ifeval"
ANSWER = "ifeval-answer"


@dataclass(frozen=True)
class Ifeval:
    """IFEval under olmo3-adapt and as in RACE Appendix G.

    A mark's score is the prompt-level loose accuracy: 1 if every instruction is followed in one of eight readings of
    the text. Its details are `prompt_loose`, `prompt_strict` (0 or 1) and `inst_loose`, `inst_strict` (a list of 0 and
    1, one per instruction: an instruction-level accuracy is the mean over all instructions of all examples).

    With `thinking=keep` there is the first label only, with `strip` the second only: the other would be its copy.

    Attributes:
        settings: of the run.
        checkers: None: lm-eval's, loaded at the first `read` or `mark`.
    """

    settings: TaskSettings
    checkers: Checkers | None = None

    @property
    def name(self) -> str:
        """As in `eval.benchmarks`."""
        return WHOLE

    @property
    def sources(self) -> tuple[HubSource, ...]:
        """541 prompts; the split is called train."""
        return (HubSource("HuggingFaceH4/ifeval", "train"),)

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the marks, the primary one first."""
        return {"protocol": (WHOLE, ANSWER), "keep": (WHOLE,), "strip": (ANSWER,)}[self.settings.thinking]

    def read(self, records: Iterable[Record]) -> list[Example]:
        """Columns key (optional), prompt, instruction_id_list, kwargs.

        Raises:
            DataError: a field is missing, of the wrong type, or names an instruction that is not known.
            MissingDependencyError: lm-eval's checkers or NLTK's data are missing.
        """
        known = self._known()
        return unique((where, _example(record, where, known)) for where, record in records)

    def ask(self, example: Example) -> Ask:
        """The prompt as it stands."""
        return question(example.fields["prompt"], self.settings)

    def mark(self, example: Example, answers: Sequence[Answer]) -> Examined:
        """The same answer under each label."""
        (answer,) = answers
        text = answer.text or ""
        after = scored_text(text, self.settings, strips=True)
        marks = []
        faults: list[str] = []
        for label in self.labels:
            checked = text if label == WHOLE else after
            strict, loose, faults = _verdicts(self._known(), example.fields, checked)
            marks.append(_mark(label, strict, loose, blank=not checked.strip()))
        extracted = after if ANSWER in self.labels and after != text else None
        one = row(0, answer, extracted, marks[0].score, "; ".join(faults) or None)
        return Examined(example, tuple(marks), (one,))

    def _known(self) -> Checkers:
        return load_checkers() if self.checkers is None else self.checkers


def readings(text: str) -> tuple[str, ...]:
    """The eight texts of the loose accuracy: whole, without first line, last line, both; each also without asterisks.

    What loses a line is trimmed; the whole text is not. The order is IFEval's: it matters where a checker chokes.
    """
    lines = text.split("\n")
    cut = tuple("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))
    return (text, text.replace("*", ""), *cut, *(reading.replace("*", "") for reading in cut))


def _verdicts(
    checkers: Checkers, fields: Mapping[str, Any], text: str
) -> tuple[list[int], list[int], list[str]]:
    """Per instruction 0 or 1, strict and loose, and one line for each checker that refuses its arguments."""
    strict: list[int] = []
    loose: list[int] = []
    faults: list[str] = []
    variants = readings(text)
    for instruction, arguments in zip(fields["instructions"], fields["arguments"], strict=True):
        try:
            checker = made(checkers, instruction, arguments, fields["prompt"])
        except Exception as error:  # what a checker raises is its own affair: not followed, and said
            reason = (str(error).splitlines() or [""])[0][:200]
            faults.append(f"{instruction} refuses its arguments: {type(error).__name__}: {reason}")
            strict.append(0)
            loose.append(0)
            continue
        strict.append(int(follows(checker, text)))
        loose.append(int(follows(checker, *variants)))
    return strict, loose, faults


def _mark(label: str, strict: list[int], loose: list[int], blank: bool) -> Mark:
    details = {
        "prompt_strict": int(all(strict)),
        "prompt_loose": int(all(loose)),
        "inst_strict": strict,
        "inst_loose": loose,
    }
    return Mark(label, float(all(loose)), details, status="unparsed" if blank else "scored")


def _example(record: Mapping[str, Any], where: str, known: Checkers) -> Example:
    instructions = texts_field(record, "instruction_id_list", where)
    for name in instructions:
        if name not in known:
            raise DataError(f"{where}: instruction {name!r} is not known; known are {listed(sorted(known))}")
    arguments = list_field(record, "kwargs", where)
    if len(arguments) != len(instructions):
        raise DataError(
            f"{where}: field 'kwargs' holds {len(arguments)} entries for {len(instructions)} instructions"
        )
    for i, entry in enumerate(arguments):
        if entry is not None and not isinstance(entry, Mapping):
            raise wrong_type(where, f"kwargs[{i}]", entry, "an object")
    fields = {
        "prompt": text_field(record, "prompt", where),
        "instructions": instructions,
        "arguments": tuple(dict(entry or {}) for entry in arguments),
    }
    key = record.get("key")
    return Example(place(where) if key is None else str(key), "", fields)
