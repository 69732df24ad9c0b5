"""The FrozenLake game in words (RLDS App. D.1, Fig. 10).

The grid is shown with symbols that carry no meaning: A is the agent, B the goal, C a hole, D a safe tile. A reply
moves the agent with one `<action>D</action>`, D one of Up, Down, Left, Right. Reward and end are read from the state
of the game and never from what the agent writes, so that no phrase can be played for the reward.

What D.1 leaves open:
- Fig. 10 prints the first observation, the prompt and the fall; the other texts are ours, in the same manner.
- Case and blanks inside of the tag do not matter. A reply with two tags or more is malformed.
- The turn budget is shown from the second observation on, as D.1 lists it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from racelab.experiments.episodes import Instance, Observation, Result, Turn
from racelab.experiments.tasks.common import tagged_actions
from racelab.experiments.tasks.frozenlake.boards import ACTIONS, checked_rows
from racelab.experiments.tasks.frozenlake.taxonomy import FELL, OBSERVATION_END, OBSERVATION_HEAD

AGENT = "A"
SYMBOLS = {"G": "B", "H": "C", "F": "D", "S": "D"}
"""Of the cells; the start is a safe tile like others."""
INVALID = -1
"""`info["action"]` of a reply that holds no action."""

REACHED = "The agent moved onto a 'B' tile and reached the goal."
OUT_OF_TURNS = "The agent hit the max step limit and did not reach the goal."
OUT_OF_BUDGET = "The response budget is too small for the next observation. The agent did not reach the goal."
BUMPED = "You moved against the edge of the grid, so you stayed where you were."
MALFORMED = (
    "Your reply held no valid action, so the turn was used up and nothing changed. Give exactly one of "
    + ", ".join(f"<action>{name}</action>" for name in ACTIONS)
    + "."
)

_INDEX = {name.casefold(): index for index, name in enumerate(ACTIONS)}
_ROW = (-1, 1, 0, 0)
_COLUMN = (0, 0, -1, 1)
_TRANSLATION = str.maketrans(SYMBOLS)


def parse_action(reply: str) -> int:
    """Index of the action, or INVALID: no tag, several tags, or something else inside of it."""
    found = tagged_actions(reply)
    return _INDEX.get(found[0].casefold(), INVALID) if len(found) == 1 else INVALID


class FrozenLakeEnv:
    """One game on one board.

    `info` of an observation: `action` (index of ACTIONS, or INVALID), `cell` (where the agent stands now, row * side +
    column of this board), `invalid`, `bump` (a move against the edge).
    """

    def __init__(self, instance: Instance, max_turns: int) -> None:
        """Reads the board.

        Args:
            instance: with `rows`; see `boards.to_instance`.
            max_turns: replies after which the game ends.

        Raises:
            DataError: the rows are no board.
        """
        rows = checked_rows(instance.data.get("rows"), instance.instance_id)
        self._side, self._cells, self._max_turns = len(rows), "".join(rows), max_turns
        self._grid = "\n".join(" ".join(row) for row in rows).translate(_TRANSLATION)
        self._start = self._cells.index("S")
        self._begin()

    def _begin(self) -> None:
        self._cell, self._turns, self._invalid, self._bumps = self._start, 0, 0, 0
        self._last: Observation | None = None
        self._end_reason = ""

    def reset(self) -> Observation:
        """The grid as it is at first, in the words of Fig. 10."""
        self._begin()
        return Observation(
            f"{OBSERVATION_HEAD}\n{self._render()}\n{OBSERVATION_END}", info={"cell": self._cell}
        )

    def step(self, reply: str) -> Observation:
        """Moves, or notes why not.

        Raises:
            RuntimeError: the game is over.
        """
        if self._end_reason:
            raise RuntimeError(f"the game is over ({self._end_reason}); open another")
        action = parse_action(reply)
        bump = self._move(action)
        invalid = action == INVALID
        self._turns += 1
        self._invalid += invalid
        self._bumps += bump
        info = {"action": action, "cell": self._cell, "invalid": invalid, "bump": bump}
        letter = self._cells[self._cell]
        if letter == "G":
            return self._end("goal", REACHED, info)
        if letter == "H":
            return self._end("hole", FELL, info)
        left = self._max_turns - self._turns
        if not left:
            return self._end("turns", OUT_OF_TURNS, info)
        note = f"{MALFORMED}\n" if invalid else f"{BUMPED}\n" if bump else ""
        budget = f"{left} of {self._max_turns} turns are left."
        self._last = Observation(
            f"{note}{OBSERVATION_HEAD}\n{self._render()}\n{budget}\n{OBSERVATION_END}", info=info
        )
        return self._last

    def replay(self, turns: Sequence[Turn]) -> Observation | None:
        """Plays the recorded replies again; None where an observation differs from the recorded one."""
        seen = self.reset()
        for turn in turns:
            if seen.done:
                return None
            seen = self.step(turn.text)
            if seen.text != turn.observation:
                return None
        return seen

    def stop(self, reason: str) -> Observation:
        """Ends a game that is not over; one that is over stays as it ended."""
        if self._end_reason and self._last is not None:
            return self._last
        texts = {"turns": OUT_OF_TURNS, "response_budget": OUT_OF_BUDGET}
        text = texts.get(reason, f"The game was stopped ({reason}). The agent did not reach the goal.")
        none: Mapping[str, Any] = {"action": INVALID, "cell": self._cell, "invalid": True, "bump": False}
        return self._end(reason, text, none if self._last is None else self._last.info)

    def result(self) -> Result:
        """1 on the goal, else 0 (D.1): no shaping, no step cost. Solved means that the goal was reached."""
        reached = self._end_reason == "goal"
        metrics = {
            "turns": float(self._turns),
            "invalid_turns": float(self._invalid),
            "bumps": float(self._bumps),
            "fell": float(self._end_reason == "hole"),
        }
        return Result(float(reached), reached, self._end_reason, metrics)

    def close(self) -> None:
        """Nothing is held."""

    def _move(self, action: int) -> bool:
        """Whether the move was against the edge."""
        if action == INVALID:
            return False
        row, column = divmod(self._cell, self._side)
        row, column = row + _ROW[action], column + _COLUMN[action]
        if not (0 <= row < self._side and 0 <= column < self._side):
            return True
        self._cell = row * self._side + column
        return False

    def _render(self) -> str:
        """The grid with the agent in it: cells stand two characters apart, and each line has one for its end."""
        at = 2 * self._cell
        return f"{self._grid[:at]}{AGENT}{self._grid[at + 1 :]}"

    def _end(self, reason: str, text: str, info: Mapping[str, Any]) -> Observation:
        self._end_reason, self._last = reason, Observation(text, done=True, info=info)
        return self._last
