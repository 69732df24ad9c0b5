"""What `racelab eval` adds to generation, and how fast examples are marked and compared.

Run: python bench/evaluate.py [--rounds 3]

Prints one JSON object a line: the embedded model's answers alone against the whole examination of the same questions
(ratio; the sides alternate), examples marked and written per second behind a model that takes no time, and the
comparison of two evaluations of 14,000 examples with 2,000 replicates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command sets it

import numpy as np

from racelab.analysis.paired import compare
from racelab.experiments.backends.local.model import open_language_model
from racelab.experiments.evaluation.examine import AnswerExaminer
from racelab.experiments.evaluation.olmo3.common import TaskSettings
from racelab.experiments.evaluation.olmo3.gsm8k import Gsm8k
from racelab.experiments.evaluation.rows import answer_rows, example_rows
from racelab.experiments.evaluation.subject.local import LocalSubject
from racelab.experiments.evaluation.totals import Row
from racelab.experiments.evaluation.types import Answer, Ask, Example
from racelab.experiments.models.assets import resolve_model
from racelab.experiments.rng import torch_generator
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import GenerationRequest, StepRecord

BATCH, TOKENS, QUESTIONS, MANY, PAIRS = 16, 64, 32, 2_000, 14_000


def examples(n: int) -> list[Example]:
    records = [
        (f"bench:{i}", {"question": f"What is {i} plus {i}?", "answer": f"Twice {i}.\n#### {2 * i}"})
        for i in range(n)
    ]
    return Gsm8k(TaskSettings()).read(records)


class Instant:
    """A model that takes no time; half of what it says is right."""

    def answers(
        self, asks: Sequence[Ask], wanted: Sequence[int], purpose: str
    ) -> Iterator[tuple[int, tuple[Answer, ...]]]:
        text = "I add the two numbers. " * 40
        for i in wanted:
            yield i, (Answer(f"{text}Therefore, the final answer is $\\boxed{{{2 * i + i % 2}}}$."),)

    def describe(self) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass


def examined(benchmark: Gsm8k, found: list[Example], subject: LocalSubject | Instant) -> float:
    """Seconds of asking, answering, marking and writing all of them."""
    with tempfile.TemporaryDirectory() as root:
        run = RunFolder.create(Path(root), "bench", composed_yaml="", overrides=[], info={"kind": "eval"})
        with run.lock():
            tracker = SpoolTracker(run, run.begin_attempt(), ship=False)
            begun = time.perf_counter()
            wanted = frozenset(e.example_id for e in found)
            for one in AnswerExaminer(benchmark, found, subject).examine(wanted):
                tables = {
                    "eval_answers": answer_rows(one, "gsm8k", 0),
                    "eval_examples": example_rows(one, "gsm8k", {"step": 0}),
                }
                tracker.record(StepRecord(0, {}, tables))
            return time.perf_counter() - begun


def overhead(rounds: int) -> dict[str, float]:
    model = open_language_model(resolve_model("smollm2-135m"), role="frozen", compute_dtype="float32")
    benchmark, found = Gsm8k(TaskSettings(max_tokens=TOKENS)), examples(QUESTIONS)
    subject = LocalSubject(model, seed=0, batch=BATCH)

    def bare() -> float:
        begun = time.perf_counter()
        for number in range(QUESTIONS // BATCH):
            asks = [benchmark.ask(e) for e in found[number * BATCH : (number + 1) * BATCH]]
            requests = [
                GenerationRequest(tuple(model.chat(a.user)), 1, TOKENS, a.temperature, a.top_p) for a in asks
            ]
            model.generate(requests, torch_generator(0, "eval:gsm8k", number))
        return time.perf_counter() - begun

    bare()
    sides = [(bare(), examined(benchmark, found, subject)) for _ in range(rounds)]
    plain, whole = (statistics.median(side) for side in zip(*sides, strict=True))
    return {"generate_s": plain, "evaluate_s": whole, "ratio": whole / plain}


def marking() -> dict[str, float]:
    seconds = examined(Gsm8k(TaskSettings()), examples(MANY), Instant())
    return {"examples": MANY, "marked_and_written_per_s": MANY / seconds}


def comparing() -> dict[str, float]:
    rng = np.random.default_rng(0)
    sides = [
        [Row("popqa", str(i), "", float(right), "scored") for i, right in enumerate(rng.random(PAIRS) < p)]
        for p in (0.31, 0.33)
    ]
    begun = time.perf_counter()
    compare({"0": sides[0]}, {"0": sides[1]}, "race", "olmo3-adapt", rng, replicates=2_000)
    return {"examples": PAIRS, "replicates": 2_000, "compare_s": time.perf_counter() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for part in (overhead(args.rounds), marking(), comparing()):
        print(json.dumps({k: round(v, 3) for k, v in part.items()}))


if __name__ == "__main__":
    main()
