"""FrozenLake as a task: boards, prompt, environment (RLDS App. D.1, Fig. 10).

Boards are drawn from `task.data_seed`, whatever the run's seed: the validation slice first, then the training boards,
none of which is in the slice. `task.boards` names a .jsonl file instead, one board a line:

    {"rows": ["SFFH", "FFFF", "HFFF", "FFFG"], "split": "validation"}

`split` is `validation` (the default) or `train`; a split of which the file has no board is drawn as ever.

Where a reflection's addition goes is not printed; Fig. 10 says "consult any additions below", so it ends the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from racelab.configs.schema_rlds import FrozenLakeTask
from racelab.experiments.episodes import Instance
from racelab.experiments.errors import DataError
from racelab.experiments.rng import numpy_generator
from racelab.experiments.tasks.common import ACTION_END, read_instances
from racelab.experiments.tasks.frozenlake.boards import (
    Boards,
    board_keys,
    from_rows,
    make_boards,
    to_instance,
)
from racelab.experiments.tasks.frozenlake.env import FrozenLakeEnv
from racelab.experiments.tasks.frozenlake.taxonomy import DEMONSTRATION, SUBTASKS, SYSTEM_PROMPT

TRAIN, VALIDATION = "train", "validation"


class BoardInstances(Sequence[Instance]):
    """Boards as instances, made when they are asked for."""

    def __init__(self, boards: Boards, split: str) -> None:
        """Keeps the boards; the split is part of the ids."""
        self._boards, self._split = boards, split

    def __len__(self) -> int:
        """Boards."""
        return len(self._boards)

    @overload
    def __getitem__(self, index: int) -> Instance: ...

    @overload
    def __getitem__(self, index: slice) -> BoardInstances: ...

    def __getitem__(self, index: int | slice) -> Instance | BoardInstances:
        """One instance, or a part of them."""
        if isinstance(index, slice):
            return BoardInstances(self._boards.take(index), self._split)
        return to_instance(self._boards, range(len(self))[index], self._split)


class FrozenLake:
    """The task of `task=frozenlake`."""

    name = "frozenlake"
    subtasks = SUBTASKS
    tools: tuple[Mapping[str, Any], ...] = ()
    concurrency: int | None = None
    stops = (ACTION_END,)

    def __init__(self, config: FrozenLakeTask) -> None:
        """Draws and reads nothing yet."""
        self._config = config

    @property
    def demonstration(self) -> tuple[tuple[str, str], ...]:
        """Two moves on a board, if the config asks for it."""
        return DEMONSTRATION if self._config.demonstration else ()

    def train(self) -> Sequence[Instance]:
        """The training boards.

        Raises:
            ConfigError: the config allows too few different boards.
            DataError: of `task.boards`; see `boards`.
        """
        return BoardInstances(self.boards(TRAIN), TRAIN)

    def validation(self) -> Sequence[Instance]:
        """The fixed validation slice; raises what `train` does."""
        return BoardInstances(self.boards(VALIDATION), VALIDATION)

    def boards(self, split: str) -> Boards:
        """The boards of `train` or `validation`, both on the same canvas.

        Raises:
            ConfigError: the config allows too few different boards.
            DataError: the file of `task.boards` cannot be used; the message opens with `file:line`.
        """
        return self._splits[split]

    def system_prompt(self, addition: str = "") -> str:
        """Fig. 10's prompt with empty rules and playbook; the addition, if there is one, ends it."""
        return f"{SYSTEM_PROMPT}\n\n# Additions\n{addition.strip()}" if addition.strip() else SYSTEM_PROMPT

    def open(self, instance: Instance) -> FrozenLakeEnv:
        """A game on the instance's board."""
        return FrozenLakeEnv(instance, self._config.max_turns)

    def metrics(self) -> Mapping[str, float]:
        """There is no outside service to count."""
        return {}

    def describe(self) -> dict[str, object]:
        """Where the boards are from, and a hash of each split."""
        return {
            "task": self.name,
            "boards": self._config.boards or "generated",
            "data_seed": self._config.data_seed,
            "hashes": {split: _digest(boards) for split, boards in self._splits.items()},
        }

    def close(self) -> None:
        """Nothing is held."""

    @cached_property
    def _splits(self) -> dict[str, Boards]:
        given = self._read() if self._config.boards else {}
        validation = given.get(VALIDATION)
        if validation is None:
            validation = self._draw(VALIDATION, self._config.validation_examples, given.values())
        train = given.get(TRAIN)
        if train is None:
            train = self._draw(TRAIN, self._config.train_examples, [validation])
        side = max(train.side, validation.side)
        return {TRAIN: train.on(side), VALIDATION: validation.on(side)}

    def _draw(self, split: str, count: int, without: Iterable[Boards]) -> Boards:
        """Random boards, none of which is in `without`."""
        c, side = self._config, max(self._config.sizes)
        # What does not fit the canvas cannot be drawn on it.
        fits = [boards.take((boards.size_M <= side).nonzero()[0]).on(side) for boards in without]
        return make_boards(
            count,
            sizes=c.sizes,
            frozen_probability=c.frozen_probability,
            min_path=c.min_path,
            max_path=c.max_path,
            rng=numpy_generator(c.data_seed, f"frozenlake-{split}"),
            exclude={key for boards in fits for key in board_keys(boards)},
        )

    def _read(self) -> dict[str, Boards]:
        """The splits that the file holds, the first so many boards of each."""
        c, found, seen = self._config, dict[str, list[tuple[object, str]]](), dict[str, str]()
        for where, record in read_instances(c.boards, "task.boards"):
            split = record.get("split", VALIDATION)
            if split not in (TRAIN, VALIDATION):
                raise DataError(f"{where}: `split` is {split!r}; use {TRAIN} or {VALIDATION}")
            found.setdefault(str(split), []).append((record.get("rows"), where))
            first = seen.setdefault(str(record.get("rows")), where)
            if first != where:
                raise DataError(f"{where}: the same board as {first}; drop one of them")
        wanted, boards = {TRAIN: c.train_examples, VALIDATION: c.validation_examples}, {}
        for split, lines in found.items():
            if len(lines) < wanted[split]:
                raise DataError(
                    f"{c.boards}: {len(lines)} {split} boards, but task.{split}_examples={wanted[split]}; lower it"
                )
            rows, places = zip(*lines[: wanted[split]], strict=True)
            boards[split] = from_rows(rows, places)
        return boards


def _digest(boards: Boards) -> str:
    """A hash of the boards in their order, whatever the canvas."""
    own = boards.on(int(boards.size_M.max()))
    return hashlib.sha256(b"".join(board_keys(own))).hexdigest()[:16]
