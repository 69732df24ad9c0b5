"""Prompts from a data set by its hub name, through `datasets.load_dataset`.

The paper trains on the prompts alone of the Tulu 3 preference mixture (§6.1),
`allenai/llama-3.1-tulu-3-8b-preference-mixture`: records with `prompt`, `chosen` and `rejected`. Where the
data has no prompt column, the first user turn of `chosen` is the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from racelab.experiments.data.rows import Columns, listed, to_prompt
from racelab.experiments.errors import DataError, MissingDependencyError, UnreachableError
from racelab.experiments.types import Prompt

HUB_COLUMNS = Columns(fallbacks=("chosen", "messages"))


def read_hub(
    name: str,
    split: str = "train",
    columns: Columns = HUB_COLUMNS,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> list[Prompt]:
    """All prompts of one split, in its order, not yet de-duplicated.

    Args:
        name: hub name, or a folder of .parquet, .jsonl or .csv files as `load_dataset` takes it.
        split: of the data set.
        columns: where the parts of a prompt stand.
        revision: commit, tag or branch; None: the newest.
        cache_dir: where `datasets` keeps its files; None: its own default.

    Raises:
        DataError: no such data set, split or column, or a record that cannot be used.
        MissingDependencyError: `datasets` is not installed.
        UnreachableError: the hub does not answer and there is no cached copy.
    """
    words = HubWords(
        who="prompts from the hub need",
        where=name,
        refused="check data.name and your access",
        silent="download a file and use data=file",
        mend="check data.name, data.split and data.revision",
    )
    table = load_table(name, split, words, revision=revision, cache_dir=cache_dir)
    present = [c for c in table.column_names if c in columns.wanted()]
    if not any(c in present for c in (columns.prompt, *columns.fallbacks)):
        has = listed(table.column_names)
        raise DataError(f"{name}: no column {columns.prompt!r}; it has {has}; set data.prompt_field")
    rows = table.select_columns(present)
    prompts = [to_prompt(r, columns, name, f"{name}:{split}:row {i}") for i, r in enumerate(rows, 1)]
    if not prompts:
        raise DataError(f"{name}: split {split!r} is empty")
    return prompts


@dataclass(frozen=True, slots=True)
class HubWords:
    """What is said when a data set cannot be had; each mend stands behind a semicolon.

    Attributes:
        who: opens the message that `datasets` is not installed.
        where: opens every other one.
        refused: the mend where the hub refuses.
        silent: the mend where it does not answer.
        broken: what cannot be done where the data set is no such thing.
        mend: of that.
    """

    who: str
    where: str
    refused: str
    silent: str
    mend: str
    broken: str = "cannot be loaded"


def load_table(
    name: str,
    split: str,
    words: HubWords,
    *,
    config: str | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> Any:
    """One split of a data set, through `datasets`.

    Raises:
        DataError: the hub refuses it, or it has no such configuration or split.
        MissingDependencyError: `datasets` is not installed.
        UnreachableError: the hub does not answer and there is no cached copy.
    """
    try:
        import datasets
    except ImportError:
        raise MissingDependencyError(f"{words.who}: pip install 'racelab[hub]'") from None
    # HTTPError is that of the hub's transport, which differs between its versions
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
    )

    cache = str(cache_dir) if cache_dir is not None else None
    try:
        return datasets.load_dataset(name, config, split=split, revision=revision, cache_dir=cache)
    except HfHubHTTPError as error:  # an answer, but not the data set
        raise DataError(f"{words.where}: the hub refuses it: {_first_line(error)}; {words.refused}") from None
    except (ConnectionError, TimeoutError, LocalEntryNotFoundError, HTTPError) as error:
        raise UnreachableError(
            f"{words.where}: the hub does not answer ({_first_line(error)}); {words.silent}"
        ) from None
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{words.where}: {words.broken}: {_first_line(error)}; {words.mend}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
