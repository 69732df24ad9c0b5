"""lm-eval's tasks with their data, as examples that can be asked. Loads lm-eval (about two seconds), but no model.

Everything that can be wrong with a benchmark, its data or this machine is found here, before a model is loaded. With a
local file the hub is not asked for anything: tasks get their rows by `custom_dataset`, lm-eval's own hook.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from racelab.experiments.data.checks import shown
from racelab.experiments.data.hub import HubWords, load_table
from racelab.experiments.errors import ConfigError, DataError, MissingDependencyError
from racelab.experiments.evaluation.data import records
from racelab.experiments.evaluation.harness.code_metric import RunCode, sandboxed
from racelab.experiments.evaluation.harness.records import rows_of
from racelab.experiments.evaluation.harness.stock import StockTask, stock_tasks
from racelab.experiments.evaluation.types import Example

_SEED = 0
"""lm-eval's own seed of Python's generator, from which GPQA shuffles its choices."""
_FEWSHOT_SEED = 1234
"""lm-eval's own."""
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


@dataclass(frozen=True, slots=True)
class Item:
    """An example with lm-eval's view of it.

    Attributes:
        example: id `task:place in the split`; the domain is the subset.
        task: lm-eval's task.
        instances: lm-eval's requests: one where an answer is generated, one per choice where choices are rated. The
            first argument of each is the JSON of the messages (see `_messages`).
    """

    example: Example
    task: Any
    instances: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class StockBenchmark:
    """A benchmark of lm-eval, ready to be asked."""

    stock: StockTask
    items: tuple[Item, ...]


def load_stock(
    benchmark: str,
    data_path: str | Path = "",
    *,
    limit: int | None = None,
    likelihoods: bool = True,
    run_code: RunCode | None = None,
) -> StockBenchmark:
    """Reads the data and lets lm-eval build its requests.

    Args:
        benchmark: our name.
        data_path: file or folder (`records.py` says what it holds); empty: from the hub.
        limit: the first n examples, in the order of the file, or of lm-eval's tasks; None: all.
        likelihoods: whether the model under test gives log-probs.
        run_code: the sandbox, for benchmarks that run code.

    Raises:
        ConfigError: lm-eval has no such benchmark, it needs log-probs that are not to be had, or a package is missing.
        DataError: the data cannot be read, or lack what the task needs.
        UnreachableError: the hub does not answer and there is no cached copy.
        SandboxError: code cannot be confined here.
    """
    (stock,) = stock_tasks([benchmark], likelihoods=likelihoods)
    if find_spec("lm_eval") is None or find_spec("datasets") is None:
        raise MissingDependencyError("eval.protocol=lm-eval needs lm-eval: pip install 'racelab[eval]'")
    if stock.name == "ifeval":
        from racelab.experiments.evaluation.olmo3.checkers import load_checkers

        load_checkers()  # finds NLTK's data and seeds the language detection before lm-eval loads the same
    import lm_eval.tasks  # before the stand-in, so that nothing else of it meets that

    root = Path(lm_eval.tasks.__file__).parent / stock.folder
    with contextlib.ExitStack() as scope:
        scope.enter_context(_quiet())
        if stock.name == "mbpp_plus":
            if run_code is None:
                raise ConfigError(
                    "mbpp_plus runs model code: it needs a sandbox; leave it out of eval.benchmarks"
                )
            scope.enter_context(sandboxed(run_code))
        manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(root))
        leaves = {_subset(config): config for config in _leaves(manager.task_index, stock.task)}
        items: list[Item] = []
        for config, table in _tables(stock, leaves, data_path, limit):
            with seeded():
                items += _items(_task(manager, config, table), _subset(config))
    return StockBenchmark(stock, tuple(items))


def _tables(
    stock: StockTask, leaves: Mapping[str, Mapping[str, Any]], data_path: str | Path, limit: int | None
) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """(configuration, table) of each task that has examples, in lm-eval's order."""
    if data_path:
        rows = rows_of(stock, records(str(data_path), (), f"eval.data.{stock.name}"), leaves, limit)
        for subset, config in leaves.items():
            if subset in rows:
                yield config, _table(rows[subset], f"{data_path}: {subset or stock.name}")
        return
    left = limit
    for config in leaves.values():
        if left == 0:
            return
        table = _hub_table(stock, config)
        table = table if left is None else table.select(range(min(left, len(table))))
        left = None if left is None else left - len(table)
        yield config, table


def _table(rows: list[dict[str, Any]], where: str) -> Any:
    import datasets
    import pyarrow as pa

    try:
        return datasets.Dataset.from_list(rows)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"{where}: a column has values of several types ({shown(str(error))}); give each column one type"
        ) from None


def _hub_table(stock: StockTask, config: Mapping[str, Any]) -> Any:
    """The split that is asked, and no other: none of the tasks draws its few-shot examples from a split."""
    name, subset = stock.dataset or config["dataset_path"], config.get("dataset_name")
    words = HubWords(
        who="benchmarks from the hub need",
        where=name,
        refused=f"check your access, or set eval.data.{stock.name} to a file",
        silent=f"download the data and set eval.data.{stock.name}",
        mend=f"set eval.data.{stock.name} to a file",
    )
    return load_table(name, _split(config), words, config=subset)


def _task(manager: Any, config: Mapping[str, Any], table: Any) -> Any:
    """lm-eval's task over this table.

    A split that the task names but is not asked is empty: lm-eval opens it, and takes nothing from it.
    """
    names = {config[key] for key in _SPLITS if config.get(key)}
    splits = {name: table if name == _split(config) else table.select([]) for name in names}
    # A task inside a group is how lm-eval takes a registered task with some of its keys replaced.
    wanted = {"task": config["task"], "custom_dataset": lambda **_: splits}
    task = manager.load([{"group": "racelab", "task": [wanted]}])["tasks"][config["task"]]
    task.set_fewshot_seed(_FEWSHOT_SEED)
    if task.config.process_docs is not None:
        # Each time it looks at its documents, lm-eval processes them again, and GPQA's choices would be shuffled anew
        # between question and mark. lm-eval relies on a cache on the disk there; here they are processed once.
        random.seed(_SEED)
        splits[_split(config)] = task.config.process_docs(table)
        task.config.process_docs = None
    return task


def _items(task: Any, subset: str) -> list[Item]:
    task.build_all_requests(
        limit=None,
        rank=0,
        world_size=1,
        apply_chat_template=True,
        fewshot_as_multiturn=False,
        chat_template=_messages,
    )
    found: dict[int, list[Any]] = {}
    for instance in task.instances:
        found.setdefault(instance.doc_id, []).append(instance)
    return [
        Item(
            Example(
                f"{task.task_name}:{number}", subset, {"target": str(task.doc_to_target(instances[0].doc))}
            ),
            task,
            tuple(sorted(instances, key=lambda instance: int(instance.idx))),
        )
        for number, instances in found.items()
    ]


def _messages(messages: list[dict[str, str]], **_: object) -> str:
    """Stands where lm-eval applies a chat template: keeps the messages for the model under test to do so."""
    return json.dumps(messages)


def _leaves(index: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """The configurations of the tasks below a task, group or tag, in lm-eval's order."""
    entry = index[name]
    members = (entry.cfg or {}).get("task")
    if isinstance(members, str):
        yield entry.cfg
        return
    for member in members if members is not None else sorted(entry.tags):
        yield from _leaves(index, member)


def _subset(config: Mapping[str, Any]) -> str:
    """What a record calls its subset: the configuration of the data set, or the end of its name (AGIEval)."""
    path, name = str(config["dataset_path"]), config.get("dataset_name")
    if "agieval-" in path:
        return path.rpartition("agieval-")[2]
    return "" if name in (None, "main", "gpqa_main") else str(name)


def _split(config: Mapping[str, Any]) -> str:
    """The split that is asked."""
    return str(config.get("test_split") or config["validation_split"])


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Python's own generator as lm-eval seeds it; afterwards it stands where it stood."""
    state = random.getstate()
    random.seed(_SEED)
    try:
        yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Neither progress bars nor remarks on the configuration of tasks that are not ours."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
