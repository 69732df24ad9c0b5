"""What an evaluation needs: everything that can be wrong with the outside is found before a model is loaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from racelab.configs.schema_eval import RUBRIC_SUITE, BenchmarkName, EvalRunConfig
from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.data import check_path, records
from racelab.experiments.evaluation.examine import AnswerExaminer
from racelab.experiments.evaluation.registry import RUNS_CODE, code_runner, make_benchmark
from racelab.experiments.evaluation.subject.find import find_subject
from racelab.experiments.evaluation.subject.found import Found
from racelab.experiments.evaluation.types import Examiner, Example
from racelab.experiments.tracking.mlflow_store import tracking_uri

if TYPE_CHECKING:
    from racelab.experiments.evaluation.types import Subject


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Found and read, nothing loaded.

    Attributes:
        found: the model under test.
        examples: benchmark -> its examples, `limit` taken.
        lines: what to say; that of the model under test is said by whoever opens it.
        tasks: benchmark -> what asks and marks it: one of ours, one of lm-eval's, or one that is rated.
    """

    found: Found
    examples: Mapping[str, Sequence[Example]]
    lines: tuple[str, ...] = ()
    tasks: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """Global step of the checkpoint under test; None for a model that is no run's."""
        return None if self.found.trained is None else self.found.trained.step

    @property
    def policy_step(self) -> int | None:
        """Policy updates at that step."""
        value = self.found.facts.get("policy_step")
        return value if isinstance(value, int) else None

    def identity(self) -> dict[str, Any]:
        """What an evaluation that goes on must find as it was."""
        digests = {name: _digest(of) for name, of in self.examples.items()}
        counts = {name: len(of) for name, of in self.examples.items()}
        return {"subject": dict(self.found.facts), "data": digests, "n": counts}


def check_files(config: EvalRunConfig) -> None:
    """Looks for the files of `eval.data`; asks neither a model nor the network.

    Raises:
        DataError: one is missing.
        MissingDependencyError: data are to come from the hub, and the package for that is missing.
    """
    for name in config.eval.benchmarks:
        check_path(getattr(config.eval.data, name), f"eval.data.{name}")


def find_evaluation(config: EvalRunConfig, root: Path, known: Mapping[str, Any] | None = None) -> Evaluation:
    """Reads the data and finds the model under test, the judge and the sandbox.

    Args:
        config: of the evaluation.
        root: folder of the runs.
        known: facts of the model that an earlier attempt evaluated (`evaluates` of `run.json`).

    Raises:
        RacelabError: one line naming the file, key, package or server that is missing or wrong.
    """
    check_files(config)
    if config.tracking.mlflow:
        tracking_uri(root, config.tracking.uri or None)  # a bad address is an error now
    lines: list[str] = []
    if RUNS_CODE & set(config.eval.benchmarks):
        lines.append(_confined())
    found = find_subject(config, root, known=known)
    if config.eval.suite == "rubric":
        from racelab.experiments.evaluation.preference.open import find_rater

        lines += find_rater(config, found)
    tasks: dict[str, Any] = {name: _task(name, config, found) for name in config.eval.benchmarks}
    examples: dict[str, Sequence[Example]] = {
        name: _examples(name, task, config) for name, task in tasks.items()
    }
    return Evaluation(found, examples, tuple(lines), tasks)


def _confined() -> str:
    from racelab.experiments.evaluation.sandbox import check_sandbox

    return f"model-written code is confined by {check_sandbox()}"


def _task(name: BenchmarkName, config: EvalRunConfig, found: Found) -> Any:
    if name in RUBRIC_SUITE:
        from racelab.experiments.evaluation.preference.open import make_rated

        return make_rated(name, config)
    if config.eval.protocol == "lm-eval":
        from racelab.experiments.evaluation.harness.loading import load_stock

        stock = load_stock(
            name,
            getattr(config.eval.data, name),
            likelihoods=found.engine == "local",
            run_code=code_runner(config),
        )
        kept = spread([item.example.domain for item in stock.items], config.eval.limit)
        return replace(stock, items=tuple(stock.items[place] for place in kept))
    return make_benchmark(name, config)


def _examples(name: str, task: Any, config: EvalRunConfig) -> list[Example]:
    if config.eval.protocol == "lm-eval":
        return [item.example for item in task.items]
    examples: list[Example] = task.read(
        records(getattr(config.eval.data, name), task.sources, f"eval.data.{name}")
    )
    if not examples:
        raise DataError(f"eval.data.{name}: no examples; give a file that holds some")
    return [examples[place] for place in spread([e.domain for e in examples], config.eval.limit)]


def spread(domains: Sequence[str], limit: int | None) -> list[int]:
    """Places of `limit` examples, taken from the domains in turns: the data are often sorted by domain.

    A smaller limit keeps a part of what a larger one does; the places come in the order of the data.

    Example: of a a a b b c a limit of 4 keeps the places 0, 1, 3 and 5.
    """
    turns: Counter[str] = Counter()
    ranked: list[tuple[int, int]] = []
    for place, domain in enumerate(domains):
        ranked.append((turns[domain], place))
        turns[domain] += 1
    return sorted(place for _, place in sorted(ranked)[:limit])


@contextlib.contextmanager
def open_examiners(
    config: EvalRunConfig, evaluation: Evaluation, names: Sequence[BenchmarkName], note: Callable[[str], None]
) -> Iterator[list[Examiner]]:
    """Inside, the models are loaded. One examiner for each of `names`, in their order."""
    if config.run.threads:
        import torch

        torch.set_num_threads(config.run.threads)
    if config.eval.suite == "rubric":
        from racelab.experiments.evaluation.preference.open import open_rated

        with open_rated(config, evaluation.found, note) as make:
            yield [make(evaluation.tasks[name], evaluation.examples[name]) for name in names]
        return
    from racelab.experiments.evaluation.subject.open import open_subject

    subject = open_subject(config, evaluation.found, note)
    try:
        yield [_examiner(name, config, evaluation, subject) for name in names]
    finally:
        subject.close()


def _examiner(
    name: BenchmarkName, config: EvalRunConfig, evaluation: Evaluation, subject: Subject
) -> Examiner:
    task = evaluation.tasks[name]
    if config.eval.protocol == "lm-eval":
        from racelab.experiments.evaluation.harness.examiner import LmEvalExaminer

        return LmEvalExaminer(
            task,
            subject,
            model=getattr(subject, "language_model", None),
            max_tokens=config.eval.budget(name),
            thinking=config.subject.thinking,
        )
    workers = (config.eval.code.workers or os.cpu_count() or 1) if name in RUNS_CODE else 0
    return AnswerExaminer(task, evaluation.examples[name], subject, workers)


def _digest(examples: Sequence[Example]) -> str:
    """Twelve hex digits over ids and fields: the data as they were."""
    body = json.dumps(
        [[e.example_id, e.domain, dict(e.fields)] for e in examples], sort_keys=True, default=str
    )
    return hashlib.sha256(body.encode()).hexdigest()[:12]
