"""The line of FrozenLake above which a policy must have learnt where holes are: a walker that does not see them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from racelab.configs.schema_rlds import FrozenLakeTask, RldsRunConfig
from racelab.experiments.errors import RacelabError


def blind_walker(config: RldsRunConfig) -> float | None:
    """Expected success on the validation boards of a walker that heads for the goal and does not see holes.

    It takes each move that brings it nearer (Manhattan distance) with equal probability. On 4x4 boards that is the
    line above which a policy must have learnt where holes are. None for other tasks, or if the boards cannot be had.
    """
    if not isinstance(config.task, FrozenLakeTask):
        return None
    from racelab.experiments.tasks.frozenlake.boards import from_instances
    from racelab.experiments.tasks.frozenlake.task import FrozenLake

    try:
        slice_ = FrozenLake(config.task).validation()[: config.validation.examples]
        boards = from_instances(slice_)
    except RacelabError:
        return None
    chances = [
        walk_blindly(cells.reshape(boards.side, boards.side), int(start), config.task.max_turns)
        for cells, start in zip(boards.cells_MC, boards.start_M, strict=True)
    ]
    return float(np.mean(chances)) if chances else None


def walk_blindly(cells: npt.NDArray[np.int8], start: int, turns: int) -> float:
    """Exact chance that the walker of `blind_walker` reaches the goal of one board [side, side] in `turns` moves.

    Example: with the goal one step right and one down of the start and a hole on one of the two ways it is 1/2.
    """
    from racelab.experiments.tasks.frozenlake.boards import GOAL, HOLE

    side = len(cells)
    (goal_row,), (goal_column,) = np.nonzero(cells == GOAL)
    row, column = divmod(start, side)
    if abs(goal_row - row) + abs(goal_column - column) > turns:
        return 0.0

    def chance(row: int, column: int) -> float:
        if cells[row, column] == HOLE:
            return 0.0
        down, right = int(np.sign(goal_row - row)), int(np.sign(goal_column - column))
        ways = [(row + down, column)] * (down != 0) + [(row, column + right)] * (right != 0)
        if not ways:
            return 1.0
        if (row, column) not in known:
            known[row, column] = sum(chance(*way) for way in ways) / len(ways)
        return known[row, column]

    known: dict[tuple[int, int], float] = {}
    return chance(row, column)
