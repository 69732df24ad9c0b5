"""Research prompts with static rubrics: the five sources of RLDS App. D.4, a local file, or those of the package.

D.4 names three slices of `rl-research/dr-tulu-rl-data` (told apart by its column `source`) and two RaR sets, each with
a cap. As those sets publish them:

    rl-research/dr-tulu-rl-data            source, messages, ground_truth = JSON text {"query", "rubrics": [...]}
    anisha2102/RaR-{Science,Medicine}-...  question, rubric = [{title, description, weight}]

A local .jsonl may have either schema, or ours: {id, prompt, rubric}. A row without a usable rubric is left out and
counted; so is a question that was there before. The published sets together hold fewer rows than the caps allow
(the paper's caps sum to 11 k, its Table 2 has 6,821).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from racelab.experiments.data.files import read_jsonl
from racelab.experiments.data.hub import HubWords, load_table
from racelab.experiments.episodes import Instance
from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.rng import numpy_generator
from racelab.experiments.tasks.deepresearch.rubric import RubricError, normalised

TASK: Final = "deepresearch"
PACKAGE_FILE: Final = Path(__file__).with_name("prompts.jsonl")
_LISTS: Final = ("rubric", "rubrics", "criteria", "rubric_list")
_QUESTIONS: Final = ("prompt", "question", "query")


@dataclass(frozen=True, slots=True)
class Source:
    """One of the five.

    Attributes:
        name: of the slice.
        hub: data set.
        cap: at most so many rows, the first ones.
        marks: a row belongs to the slice if its column `source` contains one of them; () takes all.
    """

    name: str
    hub: str
    cap: int
    marks: tuple[str, ...] = ()


SOURCES: Final = (
    Source("openscholar", "rl-research/dr-tulu-rl-data", 2000, ("_os_", "openscholar")),
    Source("scholarqa-cs2", "rl-research/dr-tulu-rl-data", 2000, ("_sqa_", "scholarqa")),
    Source("searcharena", "rl-research/dr-tulu-rl-data", 5000, ("_sa_", "searcharena")),
    Source("rar-science", "anisha2102/RaR-Science-20k-o3-mini", 1500),
    Source("rar-medicine", "anisha2102/RaR-Medicine-20k-o3-mini", 500),
)
"""D.4 with its caps."""


@dataclass(frozen=True, slots=True)
class Pool:
    """All usable examples.

    Attributes:
        instances: in the order of the sources.
        left_out: rows by reason.
    """

    instances: tuple[Instance, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)


Rows = Callable[[str], Iterable[Mapping[str, Any]]]
"""Name of a data set -> its training rows."""


def load_pool(data: str, rows: Rows | None = None) -> Pool:
    """All examples of `package`, `hub`, or a .jsonl file.

    Args:
        data: which.
        rows: reads a hub data set; default: `datasets`.

    Raises:
        DataError: no such file, malformed, or nothing usable in it.
        MissingDependencyError: `hub` without `datasets`.
        UnreachableError: the hub does not answer.
    """
    if data == "hub":
        return _hub(rows or hub_rows)
    path = PACKAGE_FILE if data == "package" else Path(data).expanduser()
    if path.suffix.lower() != ".jsonl":
        raise DataError(f"task.data={data}: take package, hub, or a file that ends in .jsonl")
    pool = _pool((path.stem if data != "package" else "package", row) for _, row in read_jsonl(path))
    if not pool.instances:
        raise DataError(
            f"{path}: no usable row ({_counted(pool.left_out)}); each needs a prompt and a rubric"
        )
    return pool


def split(pool: Pool, *, train: int, validation: int, seed: int) -> tuple[list[Instance], list[Instance]]:
    """Training and validation examples: a seeded permutation, validation first, so that it does not depend on `train`.

    Raises:
        ConfigError: there are not enough.
    """
    n = len(pool.instances)
    if train + validation > n:
        raise ConfigError(
            f"deepresearch has {n} examples, but task.train_examples={train} and task.validation_examples={validation} "
            f"ask for {train + validation}; lower them or give more data in task.data"
        )
    order = numpy_generator(seed, "deepresearch-split").permutation(n)
    drawn = [pool.instances[i] for i in order]
    return drawn[validation : validation + train], drawn[:validation]


def instance(source: str, row: Mapping[str, Any]) -> Instance:
    """A row of any of the known schemas.

    Raises:
        RubricError: it cannot be used.
    """
    truth = row.get("ground_truth")
    inner = _object(truth) if truth is not None else {}
    question = _question(row) or _question(inner) or _first_turn(row.get("messages"))
    if not question:
        raise RubricError("no question")
    raw = next((r[key] for r in (row, inner) for key in _LISTS if r.get(key)), None)
    items = normalised(raw)
    given = row.get("id")
    digest = hashlib.sha256(question.encode("utf-8", "replace")).hexdigest()[:12]
    name = given if isinstance(given, str) and given else digest
    data = {"prompt": question, "rubric": [item.json() for item in items], "source": source}
    return Instance(TASK, f"{source}/{name}", data)


def hub_rows(name: str) -> Iterable[Mapping[str, Any]]:
    """The training rows of a hub data set, through `datasets`; only columns that are read."""
    words = HubWords(
        who="task.data=hub needs",
        where=name,
        refused="check your access",
        silent="set task.data=package or to a .jsonl file",
        mend="set task.data to a .jsonl file",
    )
    table = load_table(name, "train", words)
    wanted = {"id", "source", "messages", "ground_truth", *_QUESTIONS, *_LISTS}
    rows: Iterable[Mapping[str, Any]] = table.select_columns([c for c in table.column_names if c in wanted])
    return rows


def _hub(rows: Rows) -> Pool:
    """The five sources, each up to its cap; a data set with several slices is read once."""
    held = {name: list(rows(name)) for name in dict.fromkeys(s.hub for s in SOURCES)}
    found = []
    for source in SOURCES:
        mine = [row for row in held[source.hub] if _belongs(row, source.marks)]
        if not mine:
            raise DataError(
                f"{source.hub}: no row of the slice {source.name}; its column `source` has other values"
            )
        found += [(source.name, row) for row in mine[: source.cap]]
    return _pool(found)


def _belongs(row: Mapping[str, Any], marks: Sequence[str]) -> bool:
    name = str(row.get("source", "")).lower()
    return not marks or any(mark in name for mark in marks)


def _pool(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Pool:
    left_out: Counter[str] = Counter()
    return _unique(_usable(rows, left_out), left_out)


def _usable(rows: Iterable[tuple[str, Mapping[str, Any]]], left_out: Counter[str]) -> Iterator[Instance]:
    for source, row in rows:
        try:
            yield instance(source, row)
        except RubricError as error:
            left_out[str(error)] += 1


def _unique(instances: Iterable[Instance], left_out: Counter[str]) -> Pool:
    """One of each question, and of each id."""
    kept: dict[str, Instance] = {}
    ids: set[str] = set()
    for one in instances:
        if one.data["prompt"] in kept or one.instance_id in ids:
            left_out["a question or id twice"] += 1
            continue
        kept[one.data["prompt"]] = one
        ids.add(one.instance_id)
    return Pool(tuple(kept.values()), dict(left_out))


def _object(value: object) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def _question(row: Mapping[str, Any]) -> str:
    for key in _QUESTIONS:
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            return value.strip()
    return ""


def _first_turn(messages: object) -> str:
    """The first user turn."""
    for turn in messages if isinstance(messages, list) else []:
        if isinstance(turn, dict) and turn.get("role") == "user" and isinstance(turn.get("content"), str):
            return str(turn["content"]).strip()
    return ""


def _counted(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{n} x {reason}" for reason, n in left_out.items()) or "the file is empty"
