"""An evaluation: the model under test, then one benchmark after the other, an example at a time.

Every example is written down as it is done, in one piece, so an evaluation that was killed goes on with the examples
that have no row yet and ends with the table of one that was not. Rows and scores stand at the step of the checkpoint
that is evaluated (0 for a model that is no run's).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, cast

from racelab.configs.schema_eval import EvalRunConfig
from racelab.experiments.attempt import Attempt, Talk
from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.build import Evaluation, open_examiners
from racelab.experiments.evaluation.rows import answer_rows, example_rows, recorded
from racelab.experiments.evaluation.totals import Row, metrics_of, suite_totals
from racelab.experiments.evaluation.types import Examined, Examiner
from racelab.experiments.fsio import read_json, write_json_atomic
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import StopAtOnce, StopRequest
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import StepRecord


class EvalSession(Attempt):
    """Runs one attempt on one folder. The caller made the folder (or found it) and keeps the inputs."""

    failed_code = 4  # an evaluation fails at its end only for examples that no server answered

    def __init__(
        self, config: EvalRunConfig, folder: RunFolder, inputs: Evaluation, talk: Talk, stop: StopRequest
    ) -> None:
        """Keeps the parts; nothing is opened yet."""
        super().__init__(config, folder, inputs, talk, stop)
        self.config, self.evaluation = config, inputs
        self.step = inputs.step or 0
        self._rows: dict[tuple[str, str], Row] = {}
        self._lost: set[tuple[str, str]] = set()
        self._sums: dict[str, tuple[int, float]] = {}  # label -> scored examples, and the sum of their scores

    def _begin(self) -> int:
        # All that earlier attempts wrote stands at this step, and counts.
        return self.folder.begin_attempt(from_step=self.step)

    def _do(self, tracker: SpoolTracker) -> tuple[str, str, int]:
        for line in self.evaluation.lines:
            self.talk.note(line)
        for row in recorded(self.folder).values():
            self._note(row)
        self._remember()
        todo = [name for name in self.config.eval.benchmarks if self._missing(name)]
        if todo:
            with open_examiners(self.config, self.evaluation, todo, self.talk.note) as examiners:
                for examiner in examiners:
                    if not self._examine(examiner, tracker):
                        return self._stopped(len(self._rows))
        return self._end(tracker)

    def _so_far(self, step: int) -> str:
        total = sum(map(len, self.evaluation.examples.values()))
        missing = sum(len(self._missing(name)) for name in self.config.eval.benchmarks)
        return f"{total - missing} of {total} examples"

    def _remember(self) -> None:
        """Writes down, once, what is evaluated and on what; an evaluation that goes on must find the same."""
        file = self.folder.path / "setup.json"
        now = self.evaluation.identity()
        if not file.exists():
            write_json_atomic(file, now)
            self.folder.update(evaluates=dict(self.evaluation.found.facts))
            return
        stored = read_json(file)
        for key, value in now.items():
            if stored.get(key) != value:
                raise DataError(
                    f"{file} was written with another {key}; put it back as it was, or start a new evaluation (--fresh)"
                )

    def _missing(self, benchmark: str) -> frozenset[str]:
        """Ids of the examples that have no mark yet, or were lost."""
        done = {row.example_id for row in self._rows.values() if row.of == benchmark and row.status != "lost"}
        return frozenset(e.example_id for e in self.evaluation.examples[benchmark]) - done

    def _examine(self, examiner: Examiner, tracker: SpoolTracker) -> bool:
        """All missing examples of one benchmark. False if asked to stop meanwhile."""
        wanted, total = self._missing(examiner.name), len(examiner.examples)
        self.talk.note(f"{examiner.name}: {total - len(wanted)} of {total} examples done")
        started, before = time.monotonic(), total - len(wanted)
        done = before
        for examined in self._until_asked(examiner.examine(wanted)):
            self._write(examiner.name, examined, tracker)
            done += 1
            pace = (time.monotonic() - started) / (done - before)
            self._show(examiner.name, done, total, pace * (total - done))
        if self.stop.signum:
            return False
        totals = self._totals([examiner.name])
        tracker.metrics(self.step, metrics_of(totals, self.config.eval.suite))
        for label, one in totals.items():
            counts = f"{one.n} examples, {one.unparsed} unparsed, {one.lost} lost"
            value = f"{100 * one.value:.1f} %" if one.n else "-"
            self.talk.note(f"{label}: {one.metric} {value} ({counts})")
        return True

    def _until_asked(self, examined: Iterator[Examined]) -> Iterator[Examined]:
        """All of them, or those that came before a stop request: an answer under way is asked for again next time."""
        with contextlib.closing(cast("Generator[Examined]", examined)):
            while True:
                try:
                    with self.stop.at_once():
                        one = next(examined, None)
                except StopAtOnce:
                    return
                if one is None:
                    return
                yield one

    def _write(self, benchmark: str, examined: Examined, tracker: SpoolTracker) -> None:
        c, evaluation = self.config, self.evaluation
        common: Mapping[str, Any] = {
            "step": self.step,
            "checkpoint": evaluation.step,
            "policy_step": evaluation.policy_step,
            "suite": c.eval.suite,
            "protocol": c.eval.protocol,
            "seed": c.run.seed,
        }
        marks = example_rows(examined, benchmark, common)
        answers = answer_rows(examined, benchmark, self.step)
        tracker.record(StepRecord(self.step, {}, {"eval_answers": answers, "eval_examples": marks}))
        for row in map(Row.of_table, marks):
            self._note(row)

    def _note(self, row: Row) -> None:
        """Takes a row in; of an example that was lost before, in its place."""
        key = (row.label, row.example_id)
        self._rows[key] = row
        if row.status == "lost":
            self._lost.add(key)
            return
        self._lost.discard(key)
        n, summed = self._sums.get(row.label, (0, 0.0))
        self._sums[row.label] = (n + 1, summed + row.score)

    def _totals(self, benchmarks: list[str]) -> dict[str, Any]:
        rows = [row for row in self._rows.values() if row.of in benchmarks]
        return suite_totals(rows, self.config.eval.protocol)

    def _show(self, benchmark: str, done: int, total: int, eta_s: float) -> None:
        n, summed = self._sums.get(benchmark, (0, 0.0))
        status = {
            "benchmark": benchmark,
            "done": done,
            "total": total,
            "mean": summed / n if n else None,
            "lost": len(self._lost),
            "eta_s": eta_s,
        }
        self.talk.show(StepRecord(done, {}, {}, status))

    def _end(self, tracker: SpoolTracker) -> tuple[str, str, int]:
        totals = self._totals(list(self.config.eval.benchmarks))
        values = metrics_of(totals, self.config.eval.suite, average_too=True)
        if values:
            tracker.metrics(self.step, values)
        self.talk.finish(self.folder)
        if self._lost:
            n = len(self._lost)
            reason = f"{n} {'example' if n == 1 else 'examples'} got no answer"
            return "failed", reason, len(self._rows)
        tracker.tags({"end_reason": "all examples done"})
        return "finished", "", len(self._rows)
