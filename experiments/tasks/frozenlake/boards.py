"""FrozenLake boards (RLDS App. D.1): drawn at random, checked for a path, written to and read from instances.

Many boards are one array: `C` = side * side cells of a square canvas, row by row; `M` boards. A board that is smaller
than the canvas stands in its upper left corner and is padded with walls, which stop the agent as the canvas' edge does.

What D.1 leaves open: start and goal are two different free cells, uniformly at random (Fig. 10 shows the agent in the
middle of a board); the path has at least `min_path` steps; no board occurs twice, and none of the validation slice is
trained on. The paper checks the path by depth-first search and we by breadth-first search: the length is the shortest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from racelab.experiments.episodes import Instance, IntArray
from racelab.experiments.errors import ConfigError, DataError

FROZEN, HOLE, GOAL, WALL = 0, 1, 2, 3
FAR = 99
"""Distance of holes, of walls and of cells without a path to the goal in fewer steps."""
ACTIONS = ("Up", "Down", "Left", "Right")
"""An action is an index of it."""

Cells = npt.NDArray[np.int8]
Steps = npt.NDArray[np.int16]

_LETTERS = {"S": FROZEN, "F": FROZEN, "H": HOLE, "G": GOAL}
_SHIFTS = ((-1, 0), (1, 0), (0, -1), (0, 1))  # row and column of each action
_BARREN_ROUNDS = 20
_LEAST_ROUND = 256


@dataclass(frozen=True, slots=True)
class Boards:
    """M boards on a canvas of side * side = C cells.

    Attributes:
        side: of the canvas.
        cells_MC: FROZEN, HOLE, GOAL or WALL.
        start_M: cell of the agent at first; itself FROZEN.
        dist_MC: fewest steps to the goal; FAR for holes, walls and what cannot be left towards it.
        size_M: side of each board before padding.
    """

    side: int
    cells_MC: Cells
    start_M: IntArray
    dist_MC: Steps
    size_M: IntArray

    def __len__(self) -> int:
        """M."""
        return len(self.start_M)

    def take(self, index: IntArray | slice | Sequence[int]) -> Boards:
        """The boards at `index`, on the same canvas."""
        at = index if isinstance(index, slice) else np.asarray(index, dtype=np.int64)
        return Boards(self.side, self.cells_MC[at], self.start_M[at], self.dist_MC[at], self.size_M[at])

    def on(self, side: int) -> Boards:
        """The same boards on another canvas, which must be large enough for each of them."""
        if side == self.side:
            return self
        shared, m = min(side, self.side), len(self)

        def moved(old: npt.NDArray[Any], fill: int) -> npt.NDArray[Any]:
            new = np.full((m, side, side), fill, dtype=old.dtype)
            new[:, :shared, :shared] = old.reshape(m, self.side, self.side)[:, :shared, :shared]
            return new.reshape(m, side * side)

        row_M, column_M = np.divmod(self.start_M, self.side)
        cells_MC, dist_MC = moved(self.cells_MC, WALL), moved(self.dist_MC, FAR)
        return Boards(side, cells_MC, row_M * side + column_M, dist_MC, self.size_M)

    def path_M(self) -> IntArray:
        """Steps of the shortest path from start to goal [M]."""
        return self.dist_MC[np.arange(len(self)), self.start_M].astype(np.int64)


def moves(side: int) -> IntArray:
    """The next cell for every cell and action [C, 4]; the canvas' edge leaves the agent in place.

    Walls are cells like others here: the caller looks whether the next cell is one.
    """
    row, column = np.divmod(np.arange(side * side, dtype=np.int64), side)
    return np.stack(
        [np.clip(row + r, 0, side - 1) * side + np.clip(column + c, 0, side - 1) for r, c in _SHIFTS], axis=1
    )


def board_keys(boards: Boards) -> list[bytes]:
    """One key per board: equal boards on equal canvases, and only they, have equal keys."""
    start = boards.start_M.astype(np.int16)[:, None].view(np.int8)
    packed = np.ascontiguousarray(np.concatenate([boards.cells_MC, start], axis=1))
    return [row.tobytes() for row in packed]


def make_boards(
    count: int,
    *,
    sizes: Sequence[int],
    frozen_probability: tuple[float, float],
    min_path: int,
    max_path: int,
    rng: np.random.Generator,
    exclude: Collection[bytes] = frozenset(),
) -> Boards:
    """Draws `count` different boards on a canvas of the largest size (D.1).

    Args:
        count: boards.
        sizes: sides, each as likely as the others among the candidates.
        frozen_probability: a board's share of frozen cells is uniform in between.
        min_path: fewest steps that the shortest path may have.
        max_path: most steps; below FAR.
        rng: the draws.
        exclude: keys (`board_keys`) of boards that must not occur.

    Raises:
        ConfigError: the ranges allow too few different boards.
    """
    if max_path >= FAR:
        raise ConfigError(
            f"task.max_path={max_path}: paths of {FAR} steps and more are not measured; lower it"
        )
    side = max(sizes)
    seen, parts, have, barren = set(exclude), [], 0, 0
    while have < count:
        found = _candidates(max(2 * (count - have), _LEAST_ROUND), side, sizes, frozen_probability, rng)
        path_M = found.path_M()
        found = found.take(np.flatnonzero((path_M >= min_path) & (path_M <= max_path)))
        new = []
        for i, key in enumerate(board_keys(found)):
            if key not in seen:
                seen.add(key)
                new.append(i)
        new = new[: count - have]
        barren = 0 if new else barren + 1
        if barren == _BARREN_ROUNDS:
            raise ConfigError(
                f"task.sizes={list(sizes)}, frozen_probability={list(frozen_probability)} and paths of {min_path} to "
                f"{max_path} steps gave {have} different boards of {count}; widen them or ask for fewer examples"
            )
        parts.append(found.take(new))
        have += len(new)
    return join(parts) if parts else Boards(side, *_empty(side))


def to_instance(boards: Boards, i: int, split: str) -> Instance:
    """The board at i as JSON values: `rows` of S (start), F (frozen), H (hole), G (goal), and `path`, its length.

    The id is made of the split and a hash of the board, so that it does not depend on where the board stands.
    """
    size, side = int(boards.size_M[i]), boards.side
    letters = np.frombuffer(b"FHG#", dtype=np.uint8)[boards.cells_MC[i]]
    letters[boards.start_M[i]] = ord("S")
    text = letters.tobytes().decode("ascii")
    rows = [text[row * side : row * side + size] for row in range(size)]
    path = int(boards.dist_MC[i, boards.start_M[i]])
    name = hashlib.sha256("/".join(rows).encode()).hexdigest()[:16]
    return Instance("frozenlake", f"{split}-{name}", {"rows": rows, "path": path})


def from_instances(instances: Sequence[Instance], side: int | None = None) -> Boards:
    """The boards of instances, on a canvas of `side`, or of the largest of them.

    Raises:
        DataError: an instance holds no valid board; the message opens with its id.
    """
    boards = from_rows([i.data.get("rows") for i in instances], [i.instance_id for i in instances], side)
    for instance, path in zip(instances, boards.path_M(), strict=True):
        said = instance.data.get("path", path)
        if said != path:
            raise DataError(
                f"{instance.instance_id}: `path` is {said}, but the board's is {path}; drop the key"
            )
    return boards


def from_rows(rows: Sequence[object], where: Sequence[str], side: int | None = None) -> Boards:
    """Boards written as lists of strings.

    Args:
        rows: a list of strings per board.
        where: what the message of an error opens with, one per board.
        side: of the canvas; None: of the largest board.

    Raises:
        DataError: not a square of S, F, H and G with one S and one G, too large for the canvas, or without a path.
    """
    boards = [checked_rows(r, w) for r, w in zip(rows, where, strict=True)]
    canvas = side or max((len(b) for b in boards), default=1)
    cells_MC = np.full((len(boards), canvas, canvas), WALL, dtype=np.int8)
    start_M = np.zeros(len(boards), dtype=np.int64)
    for i, (board, place) in enumerate(zip(boards, where, strict=True)):
        size = len(board)
        if size > canvas:
            raise DataError(f"{place}: a board of side {size} does not fit a canvas of side {canvas}")
        cells_MC[i, :size, :size] = [[_LETTERS[c] for c in row] for row in board]
        row = next(r for r, line in enumerate(board) if "S" in line)
        start_M[i] = row * canvas + board[row].index("S")
    size_M = np.array([len(b) for b in boards], dtype=np.int64)
    made = _measured(canvas, cells_MC.reshape(len(boards), canvas * canvas), start_M, size_M)
    lost = np.flatnonzero(made.path_M() >= FAR)
    if lost.size:
        raise DataError(f"{where[int(lost[0])]}: no path of fewer than {FAR} steps leads from S to G")
    return made


def checked_rows(rows: object, where: str) -> list[str]:
    """The rows of one board; their form is checked, whether there is a path is not (see `from_rows`)."""
    if not isinstance(rows, list | tuple) or not rows or not all(isinstance(row, str) for row in rows):
        raise DataError(f'{where}: `rows` must be a list of strings such as ["SF", "HG"]')
    if any(len(row) != len(rows) for row in rows):
        lengths = sorted({len(row) for row in rows})
        raise DataError(f"{where}: a board is square, but there are {len(rows)} rows of length {lengths}")
    text = "".join(rows)
    unknown = sorted(set(text) - set(_LETTERS))
    if unknown:
        raise DataError(f"{where}: unknown cell {unknown[0]!r}; use S, F, H and G")
    for letter, name in (("S", "start"), ("G", "goal")):
        if text.count(letter) != 1:
            raise DataError(f"{where}: {text.count(letter)} cells are {letter} ({name}); exactly one must be")
    return list(rows)


def _candidates(
    m: int, side: int, sizes: Sequence[int], probability: tuple[float, float], rng: np.random.Generator
) -> Boards:
    """Random boards [M = m], not yet filtered: most have a path, some have none."""
    size_M = np.asarray(sizes, dtype=np.int64)[rng.integers(len(sizes), size=m)]
    frozen_M = rng.uniform(*probability, size=m)
    cells_MC = (rng.random((m, side * side)) >= frozen_M[:, None]).astype(np.int8)  # True is HOLE
    row, column = np.divmod(np.arange(side * side), side)
    inside_MC = (row < size_M[:, None]) & (column < size_M[:, None])
    cells_MC[~inside_MC] = WALL
    # Two different cells of the board: the goal is drawn from those that are left, and steps over the start.
    start_M = rng.integers(size_M * size_M)
    goal_M = rng.integers(size_M * size_M - 1)
    goal_M += goal_M >= start_M
    at = np.arange(m)
    start_M = start_M // size_M * side + start_M % size_M
    cells_MC[at, start_M] = FROZEN
    cells_MC[at, goal_M // size_M * side + goal_M % size_M] = GOAL
    return _measured(side, cells_MC, start_M, size_M)


def _measured(side: int, cells_MC: Cells, start_M: IntArray, size_M: IntArray) -> Boards:
    """With distances: all boards flood outwards from their goals at once, one step a round."""
    m = len(start_M)
    cells = cells_MC.T.reshape(side, side, m)  # the boards last: every operation below runs along memory
    blocked = (cells == HOLE) | (cells == WALL)
    dist = np.full((side + 2, side + 2, m), FAR, dtype=np.int8)  # FAR + 1 still fits
    inner = dist[1:-1, 1:-1]
    inner[cells == GOAL] = 0
    while True:
        near = inner - 1
        for r, c in _SHIFTS:
            np.minimum(near, dist[1 + r : side + 1 + r, 1 + c : side + 1 + c], out=near)
        near += 1
        near[blocked] = FAR
        np.minimum(near, FAR, out=near)
        if np.array_equal(near, inner):
            break
        inner[...] = near
    return Boards(side, cells_MC, start_M, inner.reshape(side * side, m).T.astype(np.int16), size_M)


def join(parts: Sequence[Boards]) -> Boards:
    """Boards one after the other, on a canvas that holds the largest; at least one part."""
    side = max(part.side for part in parts)
    same = [part.on(side) for part in parts]
    return Boards(
        side,
        np.concatenate([part.cells_MC for part in same]),
        np.concatenate([part.start_M for part in same]),
        np.concatenate([part.dist_MC for part in same]),
        np.concatenate([part.size_M for part in same]),
    )


def _empty(side: int) -> tuple[Cells, IntArray, Steps, IntArray]:
    """The arrays of no boards."""
    none = np.zeros(0, dtype=np.int64)
    return np.zeros((0, side * side), np.int8), none, np.zeros((0, side * side), np.int16), none
