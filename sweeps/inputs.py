"""Whether runs have what they need, asked before the first of them starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from racelab.configs.schema import ApiJudgeConfig, Config
from racelab.configs.schema_eval import EvalRunConfig
from racelab.configs.schema_rlds import (
    DeepResearchTask,
    FrozenLakeTask,
    HotpotQaTask,
    RldsRunConfig,
    ScienceWorldTask,
)
from racelab.experiments.errors import DataError, MissingDependencyError, RacelabError
from racelab.sweeps.cells import Cell

if TYPE_CHECKING:
    from racelab.experiments.data.sources import PromptData

_NO_INPUT: Final = {"run", "learner", "validation", "checkpoint"}
"""Sections that say nothing about data, models and addresses."""


def check_inputs(cells: Sequence[Cell], root: Path, dry_run: bool) -> list[str]:
    """Data, models and addresses, each distinct set once; a dry run asks neither a model nor the network.

    The prompts are those of data and seed, whatever the method; what the method needs beside them is asked for each.
    Of an RLDS run a dry run checks what `check_task` does.

    Returns:
        What a dry run finds missing that may be there where the sweep is to run: address and key of the API model or
        of the judge.

    Raises:
        RacelabError: of the first cell whose inputs are not there; the message names it.
    """
    from racelab.experiments.data.load import load_prompts

    loaded: set[str] = set()
    lacks: dict[str, None] = {}
    check = _InputCheck(root)
    for cell in cells:
        c = cell.config
        try:
            if isinstance(c, EvalRunConfig):
                if (key := _key(c.model_dump(mode="json", exclude=_NO_INPUT))) not in loaded:
                    loaded.add(key)
                    check.evaluation(c, dry_run)
            elif isinstance(c, RldsRunConfig):
                if not dry_run:
                    check.task(c)
                elif (key := _key(c.task.model_dump(mode="json"))) not in loaded:
                    loaded.add(key)
                    check_task(c)
            elif not dry_run:
                check(c)
            elif (
                c.data.source != "hub"
                and (key := _key([c.data.model_dump(mode="json"), c.run.seed])) not in loaded
            ):
                loaded.add(key)
                load_prompts(c.data, c.run.seed)
        except RacelabError as error:
            raise type(error)(f"cell {cell.label} (seed {cell.seed}): {error}") from error
        if dry_run and isinstance(c, Config) and (lack := _api_lacks(c)):
            lacks[f"cell {cell.label}: {lack}"] = None
    return list(lacks)


def check_task(config: RldsRunConfig) -> None:
    """What a dry run of an RLDS run asks: its files, and ScienceWorld's names where its package is installed.

    Files of questions and passages can be large: of those only the presence is asked.

    Raises:
        RacelabError: in the words of the run itself.
    """
    task = config.task
    if isinstance(task, FrozenLakeTask) and task.boards:
        from racelab.experiments.tasks.common import read_instances

        read_instances(task.boards, "task.boards")
    elif isinstance(task, HotpotQaTask):
        _check_questions(task)
    elif isinstance(task, DeepResearchTask) and task.data not in ("package", "hub"):
        from racelab.experiments.tasks.deepresearch.data import load_pool

        load_pool(task.data)
    elif isinstance(task, ScienceWorldTask):
        _check_names(task)


def _check_questions(config: HotpotQaTask) -> None:
    """Raises DataError if a file of questions or passages is not there; a name of the hub is not asked for."""
    from racelab.experiments.tasks.hotpotqa.data import corpus_file, read_rows

    data = Path(config.data).expanduser()
    if data.suffix.lower() in (".json", ".jsonl", ".parquet"):
        read_rows(data)  # the rows are read when they are asked for
    if config.retriever.url.strip():
        return
    corpus = corpus_file(config.retriever.corpus)
    try:
        corpus.open("rb").close()
    except OSError as error:
        raise DataError(
            f"{corpus}: cannot be read ({error.strerror or error}); give a corpus that can"
        ) from None


def _check_names(config: ScienceWorldTask) -> None:
    """Raises ConfigError for a task or simplification that the package does not have; starts no Java."""
    from racelab.experiments.tasks.scienceworld.installation import find_package
    from racelab.experiments.tasks.scienceworld.splits import check_names, task_names

    try:
        names = task_names(find_package()[0] / "tasks.json")
    except MissingDependencyError:  # it may be there where the sweep is to run
        return
    check_names(config, names)


def _api_lacks(config: Config) -> str:
    """What the servers of a config need and this process has not; empty if nothing. None of them is asked."""
    from racelab.experiments.models.api_settings import api_settings, check, server_settings
    from racelab.experiments.needs import asks_api

    asked = [api_settings(config.api)] if asks_api(config) else []
    if isinstance(config.judge, ApiJudgeConfig):
        asked.append(server_settings(config.judge, "judge"))
    try:
        for settings in asked:
            check(replace(settings, cache_dir=None))
    except RacelabError as error:
        return str(error)
    return ""


def _key(values: object) -> str:
    return json.dumps(values, sort_keys=True)


@dataclass
class _InputCheck:
    """Finds the inputs of configs, and remembers what it has found."""

    root: Path
    prompts: dict[str, PromptData] = field(default_factory=dict)
    seen: set[tuple[str, str]] = field(default_factory=set)

    def evaluation(self, config: EvalRunConfig, dry_run: bool) -> None:
        """The same for an evaluation; a dry run looks for its files only."""
        from racelab.experiments.evaluation.build import check_files, find_evaluation

        if dry_run:
            check_files(config)
        else:
            find_evaluation(config, self.root)

    def task(self, config: RldsRunConfig) -> None:
        """The same for an RLDS run: its task, its model and its addresses."""
        from racelab.experiments.build_rlds import find_task

        parts = config.model_dump(mode="json", include={"task", "model", "backend", "tracking"})
        key = ("rlds", _key(parts))
        if key not in self.seen:
            self.seen.add(key)
            find_task(config, self.root).close()

    def __call__(self, config: Config) -> None:
        """Raises RacelabError if an input is not there."""
        from racelab.experiments.build import find_inputs
        from racelab.experiments.needs import find_needs

        values = config.model_dump(mode="json", exclude=_NO_INPUT)
        method = values.pop("method")
        key, whole = _key([values, config.run.seed, method["prompts_per_step"]]), _key(method)
        if (key, whole) in self.seen:
            return
        self.seen.add((key, whole))
        if key in self.prompts:
            find_needs(config, self.prompts[key])
        else:
            self.prompts[key] = find_inputs(config, self.root).prompts
