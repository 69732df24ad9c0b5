"""From the records of a local file to the columns that lm-eval's tasks read.

A record has the columns of the hub's data set (`stock.py`), and one that names its subset where there are several:
`subject` in MMLU, `task` in BBH and AGIEval; in a folder the files' names will do. AGIEval's own files are taken too,
a letter for the place of MMLU's answer, and `text` in place of MBPP+'s `prompt`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from racelab.experiments.data.rows import listed
from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.harness.stock import Kind, StockTask
from racelab.experiments.evaluation.olmo3.common import list_field, number_field, text_field, texts_field
from racelab.experiments.evaluation.types import Record

_LETTERS = "ABCDEFG"
_SHOWN_TESTS = 3
"""Of `test_list`, by lm-eval's prompt of MBPP+."""


def rows_of(
    stock: StockTask, records: Iterable[Record], subsets: Iterable[str], limit: int | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Subset -> its rows, in the order of the data; subsets without a row are left out.

    Args:
        stock: whose columns are read.
        records: of the file.
        subsets: those that lm-eval knows.
        limit: so many records are taken, whatever their subset.

    Raises:
        DataError: a column is missing or of the wrong type, a subset is not known, or there is no record; the message
            opens with `file:line`.
    """
    known = list(subsets)
    found: dict[str, list[dict[str, Any]]] = {}
    for number, (where, record) in enumerate(records):
        if number == limit:
            break
        column = (
            stock.subset if stock.subset in record else "task"
        )  # that of a folder's files (`data.records`)
        subset = text_field(record, column, where) if stock.subset else ""
        if subset not in known:
            raise DataError(
                f"{where}: {column} {subset!r} is none of {stock.task}'s: {listed(known)}; mend or remove it"
            )
        found.setdefault(subset, []).append(_row(stock, subset, record, where))
    return found


def _row(stock: StockTask, subset: str, record: Mapping[str, Any], where: str) -> dict[str, Any]:
    if stock.name == "agieval":
        if "query" not in record:
            record = _as_query(subset, record, where)
        if subset == "math":
            return {key: text_field(record, key, where) for key in ("query", "answer")}
    if stock.name == "mbpp_plus" and "prompt" not in record and "text" in record:
        record = {**record, "prompt": record["text"]}
    if stock.name == "mmlu":
        record = _with_place(record)
    row = {key: _value(record, key, kind, where) for key, kind in stock.columns}
    _refuse_what_breaks(stock, row, where)
    return row


def _value(record: Mapping[str, Any], key: str, kind: Kind, where: str) -> Any:
    if kind == "text":
        return text_field(record, key, where)
    if kind == "number":
        return number_field(record, key, where)
    return list(texts_field(record, key, where) if kind == "texts" else list_field(record, key, where))


def _with_place(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """MMLU's answer as a place, where it is a letter."""
    answer = record.get("answer")
    letter = answer.strip() if isinstance(answer, str) else ""
    return {**record, "answer": _LETTERS.index(letter)} if letter in tuple(_LETTERS) else record


def _refuse_what_breaks(stock: StockTask, row: Mapping[str, Any], where: str) -> None:
    """What the task's template or scorer would fall over, long after the first answer."""
    if stock.name == "mmlu" and (len(row["choices"]) != 4 or row["answer"] not in range(4)):
        raise DataError(
            f"{where}: 4 choices and an answer of 0 to 3, or A to D, are needed; mend or remove the record"
        )
    if stock.name == "mbpp_plus" and (n := len(row["test_list"])) < _SHOWN_TESTS:
        raise DataError(
            f"{where}: field 'test_list' holds {n} test{'' if n == 1 else 's'}, {_SHOWN_TESTS} are needed, since "
            "lm-eval's prompt shows so many; mend or remove the record"
        )
    if stock.name == "agieval":
        gold = row["gold"]
        if not gold or not all(isinstance(g, int) and 0 <= g < len(row["choices"]) for g in gold):
            raise DataError(
                f"{where}: field 'gold' {gold!r} is no list of places in 'choices', from 0; mend it"
            )
    if stock.name == "ifeval":
        names, kwargs = row["instruction_id_list"], row["kwargs"]
        if len(kwargs) != len(names) or not all(isinstance(k, Mapping) for k in kwargs):
            raise DataError(
                f"{where}: 'kwargs' needs one object for each of the {len(names)} instructions; mend it"
            )


def _as_query(subset: str, record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """AGIEval's own layout (passage, question, options, label, answer) as the columns of its copy for lm-eval.

    The copy's `query` is AGIEval's own zero-shot prompt: `<passage>Q: <question> Answer Choices: <options, blanks
    between>`, a line break, `A: Among A through <last letter>, the answer is`.
    """
    opening = text_field(record, "passage", where, blank=True) + "Q: " + text_field(record, "question", where)
    if subset == "math":
        return {"query": f"{opening}\nA: The answer is", "answer": text_field(record, "answer", where)}
    options = list(texts_field(record, "options", where))
    label = text_field(record, "label", where).strip("() ")
    if len(options) > len(_LETTERS) or label not in _LETTERS[: len(options)]:
        raise DataError(
            f"{where}: label {label!r} is none of the {len(options)} options; mend or remove the record"
        )
    last = _LETTERS[len(options) - 1]
    query = f"{opening} Answer Choices: {' '.join(options)}\nA: Among A through {last}, the answer is"
    return {"query": query, "choices": options, "gold": [_LETTERS.index(label)]}
