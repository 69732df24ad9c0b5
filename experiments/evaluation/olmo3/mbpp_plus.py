"""MBPP+: does model-written Python pass EvalPlus's tests? Ten answers to a problem, pass@k.

The programs are run by whoever is handed in (`run_code` of the sandbox); nothing is ever run here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from racelab.experiments.data.rows import listed
from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.olmo3.common import (
    TaskSettings,
    place,
    question,
    row,
    scored_text,
    text_field,
    unique,
)
from racelab.experiments.evaluation.types import Answer, Ask, Examined, Example, HubSource, Mark, Record

if TYPE_CHECKING:
    from racelab.experiments.evaluation.sandbox import CodeResult

SAMPLES = 10
KS = (1, 5, 10)
OWN_TOKENS = 999_999
SENTENCE = "Here is the completed function:"
"""The answer's block stands after this sentence; the prompt asks for it."""

_OPENING = r"```(?:python\n)?\n*"
_AFTER_SENTENCE = re.compile(re.escape(SENTENCE) + r"\n*" + _OPENING)
_ANYWHERE = re.compile(_OPENING)
_FENCE = "```"
_DOCSTRING = '    """The function asked for."""\n\n'
# As OLMES runs it, a program is no main module: what an answer puts under `if __name__ == "__main__":` is not run.
_NOT_MAIN = '__name__ = "builtins"\n'


@dataclass(frozen=True)
class MbppPlus:
    """MBPP+ under olmo3-adapt.

    A mark's score is pass@1 = c / n, c of n answers having passed; its details are `pass_at_1`, `pass_at_5`,
    `pass_at_10` (null where there are fewer answers than k), `n` and `c`. Each total is the mean over problems.

    Besides the hub's columns (task_id, prompt, code, test) the MultiPL-E layout of MBPP is read (name, prompt,
    entry_point, test). Its tests are MBPP's own three or so, not EvalPlus's, and its prompt shows types: its scores are
    not MBPP+'s and must not be put beside them.

    As in OLMES, nothing stands between task and signature, and the signature ends at the reference's first colon
    wherever that is: where it then is no Python (an annotation), every answer fails. An answer without code is not run;
    OLMES runs the bare signature, which fails.

    Attributes:
        settings: of the run.
        run_code: runs a program confined and tells whether it ended well; may be called from several threads.
    """

    settings: TaskSettings
    run_code: Callable[[str], CodeResult]

    @property
    def name(self) -> str:
        """As in `eval.benchmarks`."""
        return "mbpp_plus"

    @property
    def sources(self) -> tuple[HubSource, ...]:
        """378 problems."""
        return (HubSource("evalplus/mbppplus", "test"),)

    def read(self, records: Iterable[Record]) -> list[Example]:
        """Either layout.

        Raises:
            DataError: a field is missing or of the wrong type.
        """
        return unique((where, _example(record, where)) for where, record in records)

    def ask(self, example: Example) -> Ask:
        """Task and signature, no tests; ten answers."""
        return question(prompt(example.fields["task"]), self.settings, n=SAMPLES, own=OWN_TOKENS)

    def mark(self, example: Example, answers: Sequence[Answer]) -> Examined:
        """Runs one program per answer that holds a block of code, one after the other.

        Raises:
            RacelabError: the sandbox cannot be set up.
        """
        rows = []
        passed = 0
        blocks = 0
        for idx, answer in enumerate(answers):
            code = extract(scored_text(answer.text or "", self.settings, strips=True))
            if not code.strip():
                rows.append(row(idx, answer, None, 0.0))
                continue
            blocks += 1
            result = self.run_code(program(example.fields, code))
            passed += result.passed
            rows.append(row(idx, answer, code, float(result.passed), _fault(result)))
        n = len(answers)
        details: dict[str, Any] = {f"pass_at_{k}": pass_at(k, n, passed) for k in KS}
        details |= {"n": n, "c": passed}
        mark = Mark(self.name, passed / n, details, "scored" if blocks else "unparsed")
        return Examined(example, (mark,), tuple(rows))


def prompt(task: str) -> str:
    """The user's turn: the protocol's own words."""
    return (
        f"{task}\n\nProvide CONCISE reasoning on how to arrive at the answer, and make sure to finish the response "
        f"with the following:\n\n{SENTENCE}\n\n```python\n(CODE)\n```\n"
        "where (CODE) is the code for the complete function."
    )


def extract(text: str) -> str:
    """The last block after the fixed sentence, else (also if that is empty) the last fenced block, else "".

    Indentation is kept, white space at the end is not. Between the sentence and its block only line breaks may stand.
    The one tag that is taken off is `python`: any other remains as the first line of the code.
    """
    return _last(_blocks(text, _AFTER_SENTENCE)) or _last(_blocks(text, _ANYWHERE))


def _blocks(text: str, opening: re.Pattern[str]) -> Iterator[str]:
    """What stands between each opening and the next three backticks; in time linear in the length."""
    at = 0
    while (start := opening.search(text, at)) and (end := text.find(_FENCE, start.end())) >= 0:
        yield text[start.end() : end].rstrip()
        at = end + len(_FENCE)


def _last(blocks: Iterable[str]) -> str:
    *_, found = ("", *blocks)
    return found


def program(fields: Mapping[str, Any], code: str) -> str:
    """The reference's signature with a docstring (it brings the reference's imports), the answer, the tests.

    An answer that is a body alone, indented, so becomes the body of the signature.
    """
    return f"{_NOT_MAIN}{fields['stub']}{code}\n{fields['test']}"


def pass_at(k: int, n: int, c: int) -> float | None:
    """1 − C(n−c, k) / C(n, k): the chance that one of k of the n answers, drawn at random, is one of the c right ones.

    Chen et al. 2021, arXiv 2107.03374, Eq. 1. None if k > n.
    """
    if k > n:
        return None
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def _fault(result: CodeResult) -> str:
    """One line about a program that did not pass."""
    if result.passed:
        return ""
    said = result.stderr.strip().splitlines()
    return f"{result.outcome}: {said[-1][:200]}" if said else str(result.outcome)


def _example(record: Mapping[str, Any], where: str) -> Example:
    test = text_field(record, "test", where)
    words = text_field(record, "prompt", where)
    if "code" in record:
        signature, colon, _ = text_field(record, "code", where).partition(":")
        if not colon:
            raise DataError(
                f"{where}: field 'code' has no colon, so no signature; give the reference solution"
            )
        task = f"{words}{signature}:"
        stub = f"{signature}:\n{_DOCSTRING}"
        name = record.get("task_id")
    elif "entry_point" in record:
        task, stub, name = words.rstrip(), words.rstrip() + "\n\n", record.get("name")
    else:
        raise DataError(
            f"{where}: field 'code' (MBPP+) or 'entry_point' (MultiPL-E) is missing; the record has {listed(record)}"
        )
    fields = {"task": task, "stub": stub, "test": test}
    return Example(place(where) if name is None else str(name), "", fields)
