"""FrozenLake on the token grid: many episodes stepped at once, as arrays.

The rules are those of the text environment: the canvas' edge and walls leave the agent in place, an action that is
none costs the turn, holes and the goal end the episode. Letters: R rows (episodes), T turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from racelab.experiments.episodes import IntArray
from racelab.experiments.tasks.frozenlake.boards import FROZEN, WALL, Boards, moves


class Walkers:
    """R agents, each on its board, stepped together.

    Attributes:
        cell_R: where each stands (cell of the canvas).
    """

    def __init__(self, boards: Boards, board_R: IntArray) -> None:
        """Each row starts at the start of the board at `board_R`."""
        self.cell_R: IntArray = boards.start_M[board_R].astype(np.int64)
        self._cells = boards.cells_MC.ravel().astype(np.int64)
        self._offset_R = board_R * boards.cells_MC.shape[1]
        self._moves = np.concatenate([moves(boards.side), np.arange(boards.side**2)[:, None]], axis=1)

    def step(self, rows: IntArray, action: IntArray) -> IntArray:
        """Moves the agents at `rows`.

        Args:
            rows: [r].
            action: index into ACTIONS, or -1: invalid [r].

        Returns:
            kind of the cell on which each stands now [r]: FROZEN, HOLE or GOAL.
        """
        here = self.cell_R[rows]
        there = self._moves[here, action]  # -1 is the last column: stay
        kind: IntArray = self._cells[self._offset_R[rows] + there]
        if (kind == WALL).any():
            there = np.where(kind == WALL, here, there)
            kind = np.where(kind == WALL, FROZEN, kind)
        self.cell_R[rows] = there
        return kind


@dataclass(slots=True)
class Played:
    """What R rows did, in up to T turns.

    Attributes:
        token_RT: sampled tokens (without hint).
        action_RT: index into ACTIONS, -1: none.
        logprob_RT: of the tokens.
        cell_RT: cell of the canvas after each turn.
        turns_R: turns taken.
        kind_R: kind of the last cell.
        exact_R: the replayed turns went as their parent's did.
    """

    token_RT: IntArray
    action_RT: IntArray
    logprob_RT: npt.NDArray[np.float64]
    cell_RT: IntArray
    turns_R: IntArray
    kind_R: IntArray
    exact_R: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls, rows: int, turns: int) -> Played:
        """Nothing done yet."""
        return cls(
            token_RT=np.zeros((rows, turns), dtype=np.int64),
            action_RT=np.full((rows, turns), -1, dtype=np.int64),
            logprob_RT=np.zeros((rows, turns)),
            cell_RT=np.zeros((rows, turns), dtype=np.int64),
            turns_R=np.full(rows, turns, dtype=np.int64),
            kind_R=np.full(rows, FROZEN, dtype=np.int64),
            exact_R=np.ones(rows, dtype=bool),
        )
