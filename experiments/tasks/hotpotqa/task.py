"""HotpotQA as a task: data, tool, texts, environment (RLDS App. C.2, D.2 and E)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from racelab.configs.schema_rlds import HotpotQaTask, RetrieverConfig
from racelab.experiments.episodes import Instance, Subtask
from racelab.experiments.errors import ConfigError
from racelab.experiments.models.retrieval import open_engine
from racelab.experiments.models.retriever_client import HttpRetriever, LocalRetriever, Retriever
from racelab.experiments.models.text import defang
from racelab.experiments.tasks.hermes import STOP
from racelab.experiments.tasks.hotpotqa.data import NAME, corpus_file, load, read_rows
from racelab.experiments.tasks.hotpotqa.env import TOOL, HotpotQaEnvironment, Rules
from racelab.experiments.tasks.hotpotqa.taxonomy import DEMONSTRATION, SUBTASKS, SYSTEM_PROMPT

_STOPS: Final = (STOP,)


class HotpotQa:
    """Implements `ports.Task`. The retriever is opened, or a remote one asked once, when the task is made."""

    def __init__(self, config: HotpotQaTask) -> None:
        """Reads the questions and opens the retriever.

        Args:
            config: the section `task`.

        Raises:
            DataError: of the questions, the corpus or its index.
            ConfigError: too few questions, a bad URL, or questions that the corpus cannot answer.
            ModelError: of the encoder.
            MissingDependencyError: a package is not installed.
            UnreachableError: no retriever answers at the URL, or the hub does not.
        """
        self.name: str = NAME
        self.subtasks: tuple[Subtask, ...] = SUBTASKS
        self.tools: tuple[Mapping[str, Any], ...] = (search_tool(config),)
        self.concurrency: int | None = None
        self.stops: tuple[str, ...] = _STOPS
        self._config = config
        self._rules = Rules(
            default_top_k=config.default_top_k,
            max_top_k=config.max_top_k,
            result_chars=config.result_chars,
            total_chars=config.total_chars,
            f1_threshold=config.f1_threshold,
            official_yes_no=config.official_yes_no,
        )
        _check(config)
        remote = _remote(config.retriever)  # what takes long comes last: a download, then an index
        if remote:
            remote.check()
        self._questions = load(config)
        self._retriever: Retriever = remote or _local(config.retriever)

    @property
    def demonstration(self) -> tuple[tuple[str, str], ...]:
        """Two questions, each searched for and answered, if the config asks for it."""
        return DEMONSTRATION if self._config.demonstration else ()

    def train(self) -> Sequence[Instance]:
        """`task.train_examples` questions."""
        return self._questions.train

    def validation(self) -> Sequence[Instance]:
        """`task.validation_examples` questions, none of which is in `train`."""
        return self._questions.validation

    def system_prompt(self, addition: str = "") -> str:
        """App. E, and below it what a reflection adds."""
        return f"{SYSTEM_PROMPT}\n\n{defang(addition)}" if addition else SYSTEM_PROMPT

    def open(self, instance: Instance) -> HotpotQaEnvironment:
        """An episode of one question."""
        data = instance.data
        return HotpotQaEnvironment(
            data["question"], data["answers"], self._retriever, self._rules, data.get("titles", ())
        )

    def metrics(self) -> Mapping[str, float]:
        """Of the retriever, see `retriever_client.Clock.take`."""
        return self._retriever.metrics()

    def describe(self) -> dict[str, object]:
        """Where questions and passages come from, and the rules (JSON values)."""
        return {
            "task": NAME,
            "data": self._config.data,
            "train_sha256": _digest(self._questions.train),
            "validation_sha256": _digest(self._questions.validation),
            "dropped_rows": self._questions.dropped,
            "retriever": self._retriever.describe(),
            "rules": {name: getattr(self._rules, name) for name in Rules.__slots__},
        }

    def close(self) -> None:
        """Nothing runs beside."""


def search_tool(config: HotpotQaTask) -> dict[str, Any]:
    """The one tool, as an OpenAI function schema."""
    top_k = {
        "type": "integer",
        "minimum": 1,
        "maximum": config.max_top_k,
        "default": config.default_top_k,
        "description": "How many passages to return.",
    }
    return {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Search an encyclopedia for passages.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "top_k": top_k,
                },
                "required": ["query"],
            },
        },
    }


def _remote(config: RetrieverConfig) -> HttpRetriever | None:
    """A client of the server at `url`; None without one."""
    if not config.url.strip():
        return None
    return HttpRetriever(
        config.url,
        timeout_s=config.timeout_s,
        max_retries=config.max_retries,
        concurrency=config.concurrency,
    )


def _local(config: RetrieverConfig) -> LocalRetriever:
    """An engine in this process."""
    return LocalRetriever(open_engine(config.engine, corpus_file(config.corpus), config.encoder))


def _check(config: HotpotQaTask) -> None:
    """Raises ConfigError for what the schema cannot see, DataError for a file of questions that is not there."""
    if config.default_top_k > config.max_top_k:
        raise ConfigError(
            f"task.default_top_k={config.default_top_k} is above task.max_top_k={config.max_top_k}; lower it"
        )
    data = Path(config.data).expanduser()
    if data.suffix.lower() in (".json", ".jsonl", ".parquet"):
        read_rows(data)  # only looks whether it is there: the rows are read when they are asked for
    packaged = (config.data == "package", config.retriever.corpus == "package")
    if not config.retriever.url.strip() and packaged == (False, True):
        raise ConfigError(
            f"task.data={config.data} asks what the packaged passages cannot answer; set task.retriever.url, or "
            "task.retriever.corpus to a .jsonl file"
        )


def _digest(instances: Sequence[Instance]) -> str:
    """Hash of the questions in their order."""
    return hashlib.sha256("\n".join(i.instance_id for i in instances).encode()).hexdigest()
