"""How FrozenLake becomes tokens: the vocabulary that the small grid transformer and its actor share.

A board on a canvas of side * side cells and an episode on it are one sequence:

    HEAD cell_0 .. cell_{C-1} | POS+start  ACT+a_0  POS+p_1  ACT+a_1  ...

The part before the bar is the header (1 + C tokens). A cell's token is its kind (FROZEN, HOLE, GOAL, WALL of
`tasks/frozenlake/boards.py`, 0..3), an action's ACT + its index, a position's POS + the cell of the canvas. A hint
("go left here") is not a token of its own: it rides on the position token of its turn as token + hint * vocab, where
hint 0 is none and 1 + a is action a. Tokens are predicted without their hint.

The agent may sample any token; one that is no action is an invalid action, which costs the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEAD, ACT, POS = 4, 5, 9
N_CELLS, N_ACTIONS = 4, 4
HINTS = 1 + N_ACTIONS


@dataclass(frozen=True, slots=True)
class GridTokens:
    """The vocabulary of a canvas.

    Attributes:
        side: of the canvas.
    """

    side: int

    @property
    def cells(self) -> int:
        """C."""
        return self.side * self.side

    @property
    def vocab(self) -> int:
        """Tokens without hint."""
        return POS + self.cells

    @property
    def ids(self) -> int:
        """Tokens with every hint: each id is below it."""
        return HINTS * self.vocab

    @property
    def header(self) -> int:
        """Length of the header."""
        return 1 + self.cells

    def head(self, cells: Sequence[int]) -> tuple[int, ...]:
        """The header of a board, given row by row."""
        return (HEAD, *cells)
