"""Which evaluations the words of `racelab compare` mean, and whether they can be compared at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from racelab.cli.train import reference
from racelab.configs.compose import read_composed
from racelab.configs.schema_eval import EvalRunConfig
from racelab.experiments.errors import ConfigError, RunFolderError
from racelab.experiments.evaluation.rows import recorded
from racelab.experiments.evaluation.totals import Row
from racelab.experiments.fsio import read_json
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.manifest import find_runs, resolve
from racelab.sweeps.run import members

_ROUTE: Final = frozenset(
    {"base_url", "key_env", "timeout_s", "max_retries", "backoff_s", "max_backoff_s", "concurrency", "cache"}
)
"""How a judge is reached, which decides no score."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One that can be compared.

    Attributes:
        folder: of the evaluation.
        config: stored with it.
        facts: of the model under test.
        rows: its marks.
        data: benchmark -> digest of its examples.
    """

    folder: RunFolder
    config: EvalRunConfig
    facts: Mapping[str, Any]
    rows: tuple[Row, ...]
    data: Mapping[str, str]

    @property
    def seed(self) -> str:
        """`<seed of the training>/<seed of the evaluation>`; the latter alone for a model that no run trained."""
        trained, own = self.facts.get("seed"), self.config.run.seed
        return str(own) if trained is None else f"{trained}/{own}"

    def to_json(self) -> dict[str, Any]:
        """What identifies it."""
        of = {key: self.facts[key] for key in ("source", "run_id", "checkpoint") if key in self.facts}
        return {"run_id": self.folder.run_id, "name": self.folder.info()["name"], "seed": self.seed, "of": of}


@dataclass(frozen=True, slots=True)
class Side:
    """What is typed for A or B.

    Attributes:
        typed: the words.
        runs: seed -> evaluation.
        notes: which were taken and which were not.
    """

    typed: str
    runs: Mapping[str, Evaluation]
    notes: tuple[str, ...]


def find_side(typed: str, suite: str | None, root: Path) -> Side:
    """The evaluations of one side.

    Args:
        typed: an evaluation, a training run, a sweep of either, or several with commas.
        suite: only evaluations of it; None: whatever there is, if it is one.
        root: folder of the runs.

    Raises:
        ConfigError: nothing evaluated, several suites, a sweep of several things, or a seed twice.
        RunFolderError: no such run.
    """
    words = (
        [typed]
        if (Path(typed) / "run.json").is_file()
        else [w.strip() for w in typed.split(",") if w.strip()]
    )
    if not words:
        raise ConfigError("a side to compare is empty; name an evaluation, a run or a sweep")
    notes: list[str] = []
    taken = [one for word in words for one in _of_run(resolve(root, word), suite, root, notes)]
    found: dict[str, Evaluation] = {}
    for one in (_opened(folder) for folder in taken):
        if one.seed in found:
            raise ConfigError(
                f"{typed}: {found[one.seed].folder.run_id} and {one.folder.run_id} have the same seed {one.seed}; "
                "name one of them"
            )
        found[one.seed] = one
    return Side(typed, found, tuple(notes))


def _of_run(run: RunFolder, suite: str | None, root: Path, notes: list[str]) -> list[RunFolder]:
    kind = run.info().get("kind")
    if kind == "sweep":
        return [one for cell in _cells(run, notes) for one in _of_run(cell, suite, root, notes)]
    if kind != "eval":
        return _evaluations_of(run, suite, root, notes)
    own = run.info().get("suite")
    if suite is not None and own != suite:
        raise ConfigError(f"{run.run_id} is an evaluation of suite {own}, not {suite}; leave --suite out")
    return [run]


def _cells(sweep: RunFolder, notes: list[str]) -> list[RunFolder]:
    """The finished cells of a sweep, which must be seeds of one thing."""
    entries = members(sweep)
    labels = list(dict.fromkeys(str(entry["label"]) for entry in entries))
    if len(labels) > 1:
        of = [str(entry["run_id"]) for entry in entries if entry["label"] == labels[0]]
        raise ConfigError(
            f"{sweep.run_id} is a sweep over {', '.join(labels)}; a side is one of them: name its cells with commas, "
            f"as {','.join(of)}"
        )
    paths = [sweep.path.parent / str(entry["run_id"]) for entry in entries]
    there = [RunFolder.open(path) for path in paths if (path / "run.json").is_file()]
    ended = [cell for cell in there if cell.status() == "finished"]
    if not ended:
        raise ConfigError(
            f"no cell of {sweep.run_id} has finished; go on with: {sweep.info().get('command')}"
        )
    if len(ended) < len(paths):
        notes.append(
            f"{len(paths) - len(ended)} of {len(paths)} cells of {sweep.run_id} have not finished, left out"
        )
    return ended


def _evaluations_of(run: RunFolder, suite: str | None, root: Path, notes: list[str]) -> list[RunFolder]:
    """Of a training run: those of its newest evaluated checkpoint, the newest one per seed."""
    every = [one for one in _finished_evals(root) if _facts(one).get("run_id") == run.run_id]
    fitting = [one for one in every if suite in (None, one.info().get("suite"))]
    if not fitting:
        option = f" --suite {suite}" if suite else ""
        raise ConfigError(
            f"{run.run_id} has no finished evaluation{f' of suite {suite}' if suite else ''} under {root}; first: "
            f"racelab eval {reference(run)}{option}"
        )
    for key, mend in (("suite", "choose with --suite"), ("protocol", "name one of its evaluations")):
        values = sorted({str(one.info().get(key)) for one in fitting})
        if len(values) > 1:
            ids = ", ".join(one.run_id for one in fitting)
            raise ConfigError(
                f"{run.run_id} was evaluated under {key} {' and '.join(values)} ({ids}); {mend}"
            )
    newest = max(_checkpoint(one) for one in fitting)
    by_seed: dict[object, RunFolder] = {}
    for one in sorted(fitting, key=lambda e: (str(e.info()["started"]), e.run_id)):
        if _checkpoint(one) == newest:
            by_seed[one.info().get("seed")] = one
    chosen = list(by_seed.values())
    if len(chosen) < len(fitting):
        names = ", ".join(one.run_id for one in chosen)
        notes.append(
            f"{run.run_id}: of {len(fitting)} evaluations the newest of step {newest} counts: {names}"
        )
    return chosen


def _finished_evals(root: Path) -> Iterable[RunFolder]:
    for run in find_runs(root):
        if run.info().get("kind") == "eval" and run.status() == "finished":
            yield run


def _facts(run: RunFolder) -> Mapping[str, Any]:
    found = run.info().get("evaluates")
    return found if isinstance(found, Mapping) else {}


def _checkpoint(run: RunFolder) -> int:
    found = _facts(run).get("checkpoint")
    return found if isinstance(found, int) else -1


def _opened(folder: RunFolder) -> Evaluation:
    """Raises ConfigError for one that has more examples to come."""
    config = read_composed(folder.path / "config" / "composed.yaml", to_look=True).config
    if not isinstance(config, EvalRunConfig):
        raise RunFolderError(f"{folder.path / 'config' / 'composed.yaml'} is not that of an evaluation")
    rows = tuple(recorded(folder).values())
    status = folder.status()
    if status != "finished" and not (status == "failed" and any(row.status == "lost" for row in rows)):
        raise ConfigError(
            f"{folder.run_id} has not finished ({status}); go on with: racelab eval --resume {reference(folder)}"
        )
    setup = folder.path / "setup.json"
    data = read_json(setup).get("data") if setup.is_file() else None
    return Evaluation(folder, config, _facts(folder), rows, data if isinstance(data, dict) else {})


def check_alike(sides: Sequence[Side]) -> tuple[str, ...]:
    """Lines on what differs and may: budgets, thinking of the model, how rubrics are written.

    Raises:
        ConfigError: a difference that makes the scores measure other things, or an evaluation on both sides.
    """
    _refuse_twice(sides)
    every = [one for side in sides for one in side.runs.values()]
    first, found = every[0], dict[str, None]()
    for other in every[1:]:
        shared = first.data.keys() & other.data.keys()
        alike = bool(shared) and all(first.data[name] == other.data[name] for name in shared)
        mine, theirs = _must(first, not alike), _must(other, not alike)
        odd = next((key for key in mine if key in theirs and mine[key] != theirs[key]), None)
        if odd is not None:
            raise ConfigError(
                f"{first.folder.run_id} and {other.folder.run_id} differ in {odd}: {mine[odd]} and {theirs[odd]}; "
                "compare evaluations that measure the same (racelab eval with the same options for both)"
            )
        loose, others = _may(first.config), _may(other.config)
        for key, value in loose.items():
            if value != others[key]:
                found[
                    f"{first.folder.run_id} and {other.folder.run_id} differ in {key}: {value} and {others[key]}"
                ] = None
    return tuple(found)


def _refuse_twice(sides: Sequence[Side]) -> None:
    """An evaluation on both sides would be compared with itself: no difference, whatever the two sides are."""
    ids = [{one.folder.run_id for one in side.runs.values()} for side in sides]
    twice = sorted(set.intersection(*ids))
    if twice:
        raise ConfigError(f"{twice[0]} stands on both sides; leave it out of one of them")


def _must(one: Evaluation, limited: bool) -> dict[str, Any]:
    """Key -> what must be the same; `limited`: `--limit` too, where the examples are not known to be the same."""
    c, e = one.config, one.config.eval
    found: dict[str, Any] = {
        "eval.suite": e.suite,
        "eval.protocol": e.protocol,
        "eval.quirks": ", ".join(sorted(e.in_force)) or "none",
        "eval.thinking": e.thinking,
        "eval.think_end": e.think_end,
    }
    if limited:
        found["eval.limit (--limit)"] = "all" if e.limit is None else e.limit
    if e.suite == "rubric":
        found |= {"eval.rater": e.rater, **_judge(c)}
    return found | {
        f"eval.data.{name} (SHA-256 of what was read)": digest for name, digest in one.data.items()
    }


def _judge(config: EvalRunConfig) -> dict[str, Any]:
    """What decides a judge's scores; a server without a model's name is told by its address."""
    judge = config.judge.model_dump()
    route = _ROUTE if judge.get("model") else _ROUTE - {"base_url"}
    return {f"judge.{key}": value for key, value in judge.items() if key not in route}


def _may(config: EvalRunConfig) -> dict[str, Any]:
    """Key -> what decides scores too, and may be what is compared."""
    e = config.eval
    found: dict[str, Any] = {
        "eval.max_tokens": e.max_tokens,
        "eval.budgets": dict(e.budgets),
        "subject.thinking": config.subject.thinking,
        "subject.max_length": config.subject.max_length,
    }
    if e.suite == "rubric":
        found |= {f"rubric.{key}": value for key, value in config.rubric.model_dump().items()}
    return found
