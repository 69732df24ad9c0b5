"""Questions of HotpotQA: the packaged ones, a file in either of the data set's two schemas, or the hub.

    official  {"_id", "question", "answer", "supporting_facts": [["Title", 0], ...], "context": ...}, a JSON list
    hub       {"id", "question", "answer", "supporting_facts": {"title": [...], "sent_id": [...]}, "context": ...}

A file is a .json list, .jsonl or .parquet with rows of either kind. The contexts are not read: the agent searches. The
titles of the supporting facts are kept, if there are any, to measure whether the search found them. `answer` may be a
list of right answers, as may `golden_answers` (Search-R1's files).

Rows that nobody can answer (the answer normalises to nothing) and repeated questions are left out and counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from racelab.configs.schema_rlds import HotpotQaTask
from racelab.experiments.data.files import read_jsonl
from racelab.experiments.data.hub import HubWords, load_table
from racelab.experiments.data.rows import clean_text, normalise, text_id
from racelab.experiments.episodes import Instance
from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.rng import numpy_generator
from racelab.experiments.tasks.hotpotqa import reward

NAME: Final = "hotpotqa"
_HERE: Final = Path(__file__).parent
_HUB: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_COLUMNS: Final = ("_id", "id", "question", "answer", "golden_answers", "supporting_facts")


@dataclass(frozen=True, slots=True)
class Questions:
    """What a task plays.

    Attributes:
        train: training examples.
        validation: the fixed slice; no question is in both.
        dropped: rows left out because they repeat a question or cannot be answered.
    """

    train: tuple[Instance, ...]
    validation: tuple[Instance, ...]
    dropped: int


def corpus_file(corpus: str) -> Path:
    """The file of `task.retriever.corpus`: the packaged one or that of the name."""
    return _HERE / "corpus.jsonl" if corpus == "package" else Path(corpus).expanduser()


def load(config: HotpotQaTask) -> Questions:
    """The two slices, drawn with `task.data_seed`; the validation slice does not depend on `train_examples`.

    A hub data set has splits of its own: training examples come from `train`, the others from `validation`.

    Raises:
        DataError: a file or row that cannot be used.
        ConfigError: fewer questions than asked for, or a name that is no data.
        MissingDependencyError: `datasets` is not installed.
        UnreachableError: the hub does not answer.
    """
    n_train, n_validation, seed = config.train_examples, config.validation_examples, config.data_seed
    path = Path(config.data).expanduser()
    known_ending = path.suffix.lower() in (".json", ".jsonl", ".parquet")
    if config.data == "package" or known_ending:
        rows, dropped = _instances(
            _of_types(config, read_rows(_HERE / "questions.jsonl" if config.data == "package" else path))
        )
        _enough(config, "train_examples and task.validation_examples", n_train + n_validation, len(rows))
        drawn = _shuffled(rows, seed, "hotpotqa")
        return Questions(drawn[n_validation : n_validation + n_train], drawn[:n_validation], dropped)
    name, _ = _name_and_configuration(config.data)
    if not (_HUB.fullmatch(name) or Path(name).expanduser().is_dir()):
        raise ConfigError(
            f"task.data={config.data}: no such data; give package, a .json, .jsonl or .parquet file, or a hub name"
        )
    held, held_dropped = _instances(_of_types(config, _hub_rows(config.data, "validation")))
    _enough(config, "validation_examples", n_validation, len(held))
    validation = _shuffled(held, seed, "hotpotqa validation")[:n_validation]
    rows, dropped = _instances(_of_types(config, _hub_rows(config.data, "train")))
    asked = {_key(instance) for instance in validation}
    free = [instance for instance in rows if _key(instance) not in asked]
    _enough(config, "train_examples", n_train, len(free))
    train = _shuffled(free, seed, "hotpotqa train")[:n_train]
    return Questions(train, validation, dropped + held_dropped + len(rows) - len(free))


def _of_types(
    config: HotpotQaTask, rows: Iterable[tuple[str, Mapping[str, Any]]]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows whose field `type` is asked for; all of them if none is named."""
    wanted = config.question_types
    return ((where, row) for where, row in rows if not wanted or row.get("type") in wanted)


def _shuffled(rows: Sequence[Instance], seed: int, purpose: str) -> tuple[Instance, ...]:
    return tuple(rows[i] for i in numpy_generator(seed, purpose).permutation(len(rows)))


def _enough(config: HotpotQaTask, key: str, wanted: int, there: int) -> None:
    if wanted > there:
        raise ConfigError(
            f"task.{key} ask for {wanted:,} questions, task.data={config.data} has {there:,}; lower them, "
            "or give more data"
        )


def _key(instance: Instance) -> str:
    return normalise(instance.data["question"]).lower()


def _instances(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[list[Instance], int]:
    """The usable rows, the first of each question, and how many were left out."""
    found: dict[str, Instance] = {}
    ids: dict[str, str] = {}
    dropped = 0
    for where, row in rows:
        instance = to_instance(row, where)
        if _key(instance) in found or not any(map(reward.normalise, instance.data["answers"])):
            dropped += 1
        elif instance.instance_id in ids:
            raise DataError(
                f"{where}: id {instance.instance_id!r} is also that of {ids[instance.instance_id]}; "
                "give every question its own"
            )
        else:
            found[_key(instance)] = instance
            ids[instance.instance_id] = where
    return list(found.values()), dropped


def to_instance(row: Mapping[str, Any], where: str) -> Instance:
    """One row of either schema; `data` holds question, answers and supporting titles.

    Raises:
        DataError: a field is missing or of the wrong kind; the message opens with `where`.
    """
    question, answers = row.get("question"), row.get("answer", row.get("golden_answers"))
    if not isinstance(question, str):
        raise DataError(f"{where}: field 'question' is missing or no text")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise DataError(
            f"{where}: field 'answer' is missing or no text; the test split has none, give another"
        )
    found = row.get("_id", row.get("id"))
    if found is None:
        found = text_id(NAME, question)
    if isinstance(found, bool) or not isinstance(found, str | int) or found == "":
        raise DataError(f"{where}: field 'id' is no text")
    data = {
        "question": clean_text(question, where, "question").strip(),
        "answers": [clean_text(a, where, "answer").strip() for a in answers],
        "titles": _titles(row.get("supporting_facts"), where),
    }
    return Instance(NAME, str(found), data)


def _titles(facts: object, where: str) -> list[str]:
    """Titles of the supporting facts, each once, in order; [] if there are none."""
    if isinstance(facts, Mapping):
        titles = facts.get("title")
    else:
        titles = (
            [f[0] if isinstance(f, list) and f else None for f in facts] if isinstance(facts, list) else facts
        )
    if titles is None:
        return []
    if not isinstance(titles, list) or not all(isinstance(t, str) for t in titles):
        raise DataError(
            f"{where}: field 'supporting_facts' is neither [[title, sentence], ...] nor "
            '{"title": [...], "sent_id": [...]}'
        )
    return list(dict.fromkeys(titles))


def read_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """`file:line` (`file:row n` in .json and .parquet) and the row.

    Raises:
        DataError: no such file, or it cannot be read as what its ending says.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; set task.data to a file that exists")
    ending = path.suffix.lower()
    if ending == ".jsonl":
        return read_jsonl(path)
    return _json_rows(path) if ending == ".json" else _parquet_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: malformed JSON: {next(iter(str(error).splitlines()), '')}; mend it"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); mend its rights or its disk") from None
    if not isinstance(rows, list):
        raise DataError(f"{path}: expected a JSON list of questions; one object per line is a .jsonl")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}:row {number}: expected an object, got {type(row).__name__}")
        yield f"{path}:row {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            present = [name for name in file.schema_arrow.names if name in _COLUMNS]
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=present):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", row
    except (pa.ArrowException, OSError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise DataError(f"{path}: not a readable parquet file: {reason}") from None


def _hub_rows(data: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rows of one split; `org/name` means its configuration `distractor`, `org/name:other` another one."""
    name, config = _name_and_configuration(data)
    words = HubWords(
        who="questions from the hub need",
        where=f"task.data={name}",
        refused="check name and access",
        silent="download a file and set task.data to it",
        broken=f"configuration {config!r}, split {split!r} cannot be loaded",
        mend="another configuration is written org/name:configuration",
    )
    table = load_table(name, split, words, config=config)
    present = [name for name in table.column_names if name in _COLUMNS]
    for number, row in enumerate(table.select_columns(present), 1):
        yield f"{data}:{split}:row {number}", row


def _name_and_configuration(data: str) -> tuple[str, str]:
    head, slash, tail = data.rpartition("/")
    name, _, configuration = tail.partition(":")
    return f"{head}{slash}{name}", configuration or "distractor"
