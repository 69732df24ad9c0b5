"""Evaluations on disk as `racelab eval` leaves them, made without a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from racelab.analysis.summary import summarise
from racelab.configs.compose import Composed, compose
from racelab.configs.schema_eval import EvalRunConfig
from racelab.experiments.environment import Surroundings, surroundings
from racelab.experiments.fsio import write_json_atomic
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.session import new_run
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import StepRecord

Scores = Mapping[str, Sequence[float | None]]
DOMAINS = ("Math", "Coding")


@functools.cache
def _compose(words: tuple[str, ...]) -> Composed:
    return compose(words)


@functools.cache
def _around() -> Surroundings:
    return surroundings(Path.cwd())


def make_eval(
    root: Path,
    scores: Scores,
    *words: str,
    suite: str = "race",
    seed: int = 0,
    evaluates: Mapping[str, object] | None = None,
    status: str = "finished",
    name: str = "",
    data: str = "d1",
    details: Mapping[str, object] | None = None,
) -> RunFolder:
    """`scores`: label -> score of example e0, e1, ... (None: lost)."""
    names = ",".join(label for label in scores if label != "ifeval-answer")
    words = (f"suite={suite}", "tracking=none", f"eval.benchmarks=[{names}]", f"run.seed={seed}", *words)
    composed = _compose(words)
    config = composed.config
    assert isinstance(config, EvalRunConfig)
    facts = dict(evaluates or {"kind": "packaged", "source": "smollm2-135m", "sha256": "aa"})
    run = new_run(
        config, root=root, composed_yaml=composed.yaml, overrides=list(words), command="racelab eval", name=name,
        more={"evaluates": facts}, around=_around(),
    )  # fmt: skip
    write_json_atomic(run.path / "setup.json", {"subject": facts, "data": dict.fromkeys(scores, data)})
    with run.lock():
        tracker = SpoolTracker(run, run.begin_attempt(), ship=False, uri=f"sqlite:///{root}/mlflow.db")
        for label, values in scores.items():
            for i, score in enumerate(values):
                row = {
                    "step": 0, "checkpoint": None, "policy_step": None, "suite": suite, "seed": seed, "judge": "",
                    "protocol": config.eval.protocol, "benchmark": label, "domain": DOMAINS[i % 2],
                    "example_id": f"e{i}", "score": score, "status": "lost" if score is None else "scored",
                    "details": dict(details or {}),
                }  # fmt: skip
                tracker.record(StepRecord(0, {}, {"eval_examples": [row]}))
        run.update(steps=sum(map(len, scores.values())))
        if status != "running":
            write_json_atomic(run.path / "summary.json", summarise(run))
            tracker.close(status, "")
    return run
