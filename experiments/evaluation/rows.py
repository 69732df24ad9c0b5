"""The rows that an evaluation writes, and what of them is there when it goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from racelab.experiments.evaluation.totals import Row
from racelab.experiments.evaluation.types import Examined
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import read_spool


def example_rows(examined: Examined, benchmark: str, common: Mapping[str, Any]) -> list[dict[str, object]]:
    """Rows of `eval_examples`: one per mark. A score that is none is null."""
    example = examined.example
    return [
        {
            **common,
            "benchmark": mark.label,
            "domain": example.domain,
            "judge": mark.judge,
            "example_id": example.example_id,
            "score": None if math.isnan(mark.score) else mark.score,
            "status": mark.status,
            "details": dict(mark.details),
        }
        for mark in examined.marks
    ]


def answer_rows(examined: Examined, benchmark: str, step: int) -> list[dict[str, object]]:
    """Rows of `eval_answers`: all that was generated for the example."""
    example_id = examined.example.example_id
    return [
        {"step": step, "benchmark": benchmark, "example_id": example_id, **row} for row in examined.answers
    ]


@dataclass(frozen=True, slots=True)
class Recorded:
    """The newest of what a run has written down.

    Attributes:
        rows: (label, example id) -> its mark.
        finished: (benchmark, example id, idx) -> of an answer that came: whether it ended by itself. False: it was cut.
    """

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    finished: dict[tuple[str, str, int], bool] = field(default_factory=dict)


def recorded(folder: RunFolder) -> dict[tuple[str, str], Row]:
    """(label, example id) -> the newest row that the run has of it."""
    return read_recorded(folder).rows


def read_recorded(folder: RunFolder) -> Recorded:
    """Marks and answers of a run, texts left out."""
    found = Recorded()
    for record in read_spool(folder):
        if record["kind"] != "rows":
            continue
        if record["table"] == "eval_examples":
            for row in record["rows"]:
                details = row.get("details")
                if isinstance(details, str):
                    row = {**row, "details": json.loads(details)}
                found.rows[str(row["benchmark"]), str(row["example_id"])] = Row.of_table(row)
        elif record["table"] == "eval_answers":
            for row in record["rows"]:
                if row.get("role") == "answer":
                    _note_answer(found.finished, row)
    return found


def _note_answer(finished: dict[tuple[str, str, int], bool], row: Mapping[str, Any]) -> None:
    """An answer that never came counts as none, whatever came before it."""
    key = (str(row["benchmark"]), str(row["example_id"]), int(row.get("idx") or 0))
    finished.pop(key, None)
    if row.get("text") is not None:
        finished[key] = bool(row.get("finished"))
