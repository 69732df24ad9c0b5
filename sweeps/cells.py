"""A cell of a sweep: a config with a name that depends on nothing but what decides its result, and its run folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from racelab.configs.compose import to_yaml
from racelab.configs.schema_rlds import AnyConfig
from racelab.experiments.environment import Surroundings, surroundings
from racelab.experiments.errors import ConfigError
from racelab.experiments.runfolder import RunExistsError, RunFolder
from racelab.sweeps.composing import compose_cells, last_words
from racelab.sweeps.fingerprint import code_state, local_inputs

_NO_RESULT: Final = ("tracking", "launcher", "checkpoint")
"""Sections that do not change what a run computes."""
_NO_RESULT_KEYS: Final = ("name", "root")
"""Keys of `run` that do not either."""
_LABEL_LENGTH: Final = 60
_WRITERS: Final = 16
_HASH_LENGTH: Final = 10


@dataclass(frozen=True, slots=True)
class Spec:
    """A cell before it is composed.

    Attributes:
        label: what the cells of several seeds have in common, for people and for the summary metrics.
        seed: sets run.seed; None: as the overrides say.
        overrides: words as on the command line.
    """

    label: str
    seed: int | None
    overrides: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """All words, the seed last."""
        return last_words([*self.overrides, *([] if self.seed is None else [f"run.seed={self.seed}"])])


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep.

    Attributes:
        cell_id: `<label>-s<seed>-<hash>`: equal for equal labels and configs.
        label: see `Spec`.
        seed: of the run.
        overrides: all words, the seed among them.
        config: composed and checked.
    """

    cell_id: str
    label: str
    seed: int
    overrides: tuple[str, ...]
    config: AnyConfig


def config_hash(config: AnyConfig) -> str:
    """Ten hex digits over what decides the result: not the run's name and root, tracking, launcher, checkpoints.

    A local file counts with its content, however its path is typed; a model folder with its files' sizes and times.
    """
    values = config.model_dump(mode="json")
    kept = {name: block for name, block in values.items() if name not in _NO_RESULT}
    kept["run"] = {key: value for key, value in values["run"].items() if key not in _NO_RESULT_KEYS}
    for key, content in local_inputs(config).items():
        *sections, name = key.split(".")
        block = kept
        for section in sections:
            block = block[section]
        block[name] = content
    text = json.dumps(kept, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]


def make_cells(specs: Sequence[Spec], config_dirs: Sequence[Path] = ()) -> list[Cell]:
    """Composes and checks every cell.

    Raises:
        ConfigError: there are none, one does not compose, or two are the same run.
    """
    if not specs:
        raise ConfigError("the sweep has no cells: every one is excluded, or an axis has no values")
    specs = _with_own_labels(specs)
    configs = compose_cells([spec.words for spec in specs], config_dirs)
    cells = [_cell(spec, config) for spec, config in zip(specs, configs, strict=True)]
    seen: dict[str, Cell] = {}
    for cell in cells:
        other = seen.setdefault(cell.cell_id.rpartition("-")[2], cell)
        if other is not cell:
            raise ConfigError(
                f"cells {other.label} (seed {other.seed}) and {cell.label} (seed {cell.seed}) are the same run; "
                "leave one of them out"
            )
    return cells


def _with_own_labels(specs: Sequence[Spec]) -> list[Spec]:
    """The specs with one label per set of words: only seeds of one thing share it, for means are over a label.

    Example: of two sets with the label `a-b` the second gets `a-b-2`. Labels that are cut alike count as equal.
    """
    taken: dict[str, tuple[str, ...]] = {}
    found: list[Spec] = []
    for spec in specs:
        words = tuple(word for word in last_words(spec.overrides) if word.partition("=")[0] != "run.seed")
        label, number = spec.label, 1
        while taken.setdefault(slug(label), words) != words:
            number += 1
            label = f"{slug(spec.label)[: _LABEL_LENGTH - len(f'-{number}')]}-{number}"
        found.append(replace(spec, label=label))
    return found


def _cell(spec: Spec, config: AnyConfig) -> Cell:
    seed = config.run.seed
    cell_id = f"{slug(spec.label)}-s{seed}-{config_hash(config)}"
    return Cell(cell_id, spec.label, seed, tuple(spec.words), config)


def slug(label: str) -> str:
    """`label` as part of a file name: other characters become `-`, and it is cut at 60 characters.

    Example: `data.path=/a b` gives `data.path=-a-b`.
    """
    text = re.sub(r"[^A-Za-z0-9._=+@,-]+", "-", label)
    text = re.sub(r"\.{2,}", ".", text)[:_LABEL_LENGTH].strip("-.,")
    return text if text[:1].isalnum() else f"c{text}"


def ids_hash(cells: Iterable[Cell]) -> str:
    """Ten hex digits over the cells' ids, whatever their order."""
    text = "\n".join(sorted(cell.cell_id for cell in cells))
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]


def newest_name(root: Path, name: str) -> tuple[str, int]:
    """The newest of the folders `name`, `name-2`, `name-3`, ... and its number; (`name`, 0) if there is none."""
    found, number = name, 0
    while (root / (following := numbered(name, number + 1)) / "run.json").is_file():
        found, number = following, number + 1
    return found, number


def numbered(name: str, number: int) -> str:
    """The name of the `number`-th folder: `name`, `name-2`, `name-3`, ..."""
    return name if number <= 1 else f"{name}-{number}"


def open_cells(
    root: Path, cells: Sequence[tuple[Cell, str, Mapping[str, object]]], sweep: str
) -> list[RunFolder]:
    """`open_cell` for (cell, run id, further facts) each, several at a time: most of it is waiting for the disk."""
    around = surroundings(Path.cwd())
    code_state()  # once, before the threads ask for it
    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="racelab-cells") as pool:
        made = [
            pool.submit(open_cell, root, cell, run_id, sweep, more, around) for cell, run_id, more in cells
        ]
        return [one.result() for one in made]


def open_cell(
    root: Path,
    cell: Cell,
    run_id: str,
    sweep: str,
    more: Mapping[str, object] = MappingProxyType({}),
    around: Surroundings | None = None,
) -> RunFolder:
    """The run folder of a cell; made, with status `queued` and the facts in `more`, if it is not there.

    Raises:
        RunFolderError: nothing can be written there, or what is there is damaged.
    """
    path = root / run_id
    if not path.exists():
        with contextlib.suppress(RunExistsError):  # another sweep was quicker
            return _create(root, cell, run_id, sweep, more, around)
    return RunFolder.open(path)


def _create(
    root: Path,
    cell: Cell,
    run_id: str,
    sweep: str,
    more: Mapping[str, object],
    around: Surroundings | None,
) -> RunFolder:
    from racelab.experiments.session import new_run

    return new_run(
        cell.config,
        root=root,
        composed_yaml=to_yaml(cell.config),
        overrides=list(cell.overrides),
        command=shlex.join(["racelab", "train", *cell.overrides]),
        name=cell.config.run.name or f"{slug(cell.label)}-s{cell.seed}",
        run_id=run_id,
        more={"sweep": sweep, "label": cell.label, "code": code_state(), **more},
        around=around,
    )
