"""A grader and a reflector that know FrozenLake's solution: the stand-in for a model too small to write JSON.

They are privileged: grades come from the distances to the goal, the hint is a move that shortens the way. What a run with
them shows is an upper bound, and no evidence that a policy can grade or reflect on itself; such a run says so.

A turn is described by what the environment noted of it (`info["action"]`, `info["cell"]`), so the same code reads episodes
of the text environment and of the token grid. With d the distance to the goal before the turn and d' after it:

| subtask | grade | pivot of a success | pivot of a failure |
|---|---|---|---|
| path_planning | solved: 2, and 1 for each of 1/2, 0.7, 1 that (shortest path / turns) reaches; else 1, and 1 for each of 0.34, 0.67 of the way covered at best | first turn with one good move only (at the latest the last) | first turn with d' >= d |
| hazard_identification | fell: 1; never beside a hole: 4; else 5 | first turn beside a hole | the fall |
| state_position_tracking | 5, less 1 for each turn undone or invalid | the first of them | the first of them |
| dead_end_detection | 5, less 1 for each move with d' > d, less 1 if the turns ran out | the first of them | the first of them |
| boundary_awareness | 5, less 1 for each move against the edge | the first of them, else first turn at an edge | the first of them |

Grades end at 1; where there is no such turn, the pivot is None. On a grid without ice no cell is a trap, so a move away from
the goal is what comes nearest to a dead end.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from racelab.experiments.episodes import Case, Episode, Grading, Instance, IntArray, Reflection
from racelab.experiments.tasks.frozenlake.boards import (
    ACTIONS,
    FAR,
    GOAL,
    HOLE,
    WALL,
    Boards,
    from_instances,
    join,
    moves,
)

if TYPE_CHECKING:
    import torch

Mask = npt.NDArray[np.bool_]
Say = Callable[[str, Episode], str]
"""The addition to a retry's context, from the action's word and the failed episode."""

_CACHED_BOARDS = 4096
_OPPOSITE = (1, 0, 3, 2)  # of each action


def say_word(action: str, episode: Episode) -> str:
    """The action's word alone: what the token grid takes as a hint."""
    return action


class BoardCache:
    """The parsed boards of the last instances that were asked for."""

    def __init__(self, capacity: int = _CACHED_BOARDS) -> None:
        """Holds up to `capacity` boards; the oldest leave first."""
        self._boards: dict[str, Boards] = {}
        self._capacity = capacity

    def get(self, instances: Sequence[Instance]) -> tuple[Boards, IntArray]:
        """The different boards among the instances, and which of them each instance has [N].

        Raises:
            DataError: an instance holds no valid board.
        """
        unique = {instance.instance_id: instance for instance in instances}
        missing = [instance for key, instance in unique.items() if key not in self._boards]
        if missing:
            parsed = from_instances(missing)
            for i, instance in enumerate(missing):
                self._boards[instance.instance_id] = parsed.take([i]).on(int(parsed.size_M[i]))
        row = {key: i for i, key in enumerate(unique)}
        boards = join([self._boards[key] for key in unique])
        while len(self._boards) > self._capacity:
            del self._boards[next(iter(self._boards))]
        return boards, np.array([row[instance.instance_id] for instance in instances], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Moments:
    """What happened in each turn of N episodes, the longest of which has U turns.

    Attributes:
        live_NU: the episode has this turn.
        invalid_NU, fell_NU, bump_NU: no action; onto a hole; against the edge.
        undone_NU: back to where the agent stood before its last move.
        away_NU: a move that lengthened the way.
        slip_NU: no progress, for any of these reasons.
        beside_hole_NU, at_edge_NU: where the turn began.
        forced_NU: only one move made progress.
        good_NUA: which moves make progress.
        path_N: shortest way at first.
        nearest_N: shortest way at best, after any turn.
        turns_N: of each episode.
        solved_N, in_hole_N: how it ended.
    """

    live_NU: Mask
    invalid_NU: Mask
    fell_NU: Mask
    bump_NU: Mask
    undone_NU: Mask
    away_NU: Mask
    slip_NU: Mask
    beside_hole_NU: Mask
    at_edge_NU: Mask
    forced_NU: Mask
    good_NUA: Mask
    path_N: IntArray
    nearest_N: IntArray
    turns_N: IntArray
    solved_N: Mask
    in_hole_N: Mask


def moments(episodes: Sequence[Episode], cache: BoardCache) -> Moments:
    """Reads the episodes turn by turn; at least one episode.

    Raises:
        DataError: an instance holds no valid board.
    """
    boards, board_N = cache.get([episode.instance for episode in episodes])
    action_NU, before_NU, after_NU, turns_N = _walks(episodes, boards, board_N)
    n, u = action_NU.shape
    live_NU = np.arange(u) < turns_N[:, None]
    cell = boards.cells_MC.ravel()
    dist = boards.dist_MC.ravel()
    base_N1 = (board_N * boards.side**2)[:, None]  # of each episode's board in the two flat arrays
    around_NUA = moves(boards.side)[before_NU]
    around_cell = cell[base_N1[..., None] + around_NUA]
    d0, d1 = dist[base_N1 + before_NU], dist[base_N1 + after_NU]
    good_NUA = dist[base_N1[..., None] + around_NUA] < d0[..., None]
    invalid = action_NU < 0
    moved = before_NU != after_NU
    fell_NU = live_NU & (cell[base_N1 + after_NU] == HOLE)
    undone_NU = np.zeros((n, u), dtype=np.bool_)
    undone_NU[:, 1:] = live_NU[:, 1:] & moved[:, 1:] & (after_NU[:, 1:] == before_NU[:, :-1])
    return Moments(
        live_NU=live_NU,
        invalid_NU=live_NU & invalid,
        fell_NU=fell_NU,
        bump_NU=live_NU & ~invalid & ~moved,
        undone_NU=undone_NU,
        away_NU=live_NU & moved & (d1 > d0) & ~fell_NU,
        slip_NU=live_NU & (d1 >= d0),
        beside_hole_NU=live_NU & (around_cell == HOLE).any(2),
        at_edge_NU=live_NU & ((around_NUA == before_NU[..., None]) | (around_cell == WALL)).any(2),
        forced_NU=live_NU & (good_NUA.sum(2) == 1),
        good_NUA=good_NUA,
        path_N=d0[:, 0].astype(np.int64),
        nearest_N=np.where(live_NU, d1, FAR).min(1).astype(np.int64),
        turns_N=turns_N,
        solved_N=(live_NU & (cell[base_N1 + after_NU] == GOAL)).any(1),
        in_hole_N=fell_NU.any(1),
    )


def grades_and_pivots(m: Moments) -> tuple[IntArray, IntArray]:
    """Grades 1..5 [N, K] and pivots [N, K], -1 where there is none: the table above."""
    share_N = m.path_N / m.turns_N
    covered_N = 1 - m.nearest_N / m.path_N
    solved_path_N = 2 + (share_N >= 0.5) + (share_N >= 0.7) + (share_N >= 1)
    failed_path_N = 1 + (covered_N >= 0.34) + (covered_N >= 0.67)
    near_N = m.beside_hole_NU.any(1)
    hazard_N = np.where(m.in_hole_N, 1, np.where(near_N, 5, 4))
    astray_NU = m.undone_NU | m.invalid_NU
    ran_out_N = ~m.solved_N & ~m.in_hole_N
    grades_NK = np.stack(
        [
            np.where(m.solved_N, solved_path_N, failed_path_N),
            hazard_N,
            5 - astray_NU.sum(1),
            5 - m.away_NU.sum(1) - ran_out_N,
            5 - m.bump_NU.sum(1),
        ],
        axis=1,
    )
    bumped_N = m.bump_NU.any(1)
    pivots_NK = np.stack(
        [
            np.where(m.solved_N, _first(m.forced_NU), _first(m.slip_NU)),
            np.where(m.solved_N, _first(m.beside_hole_NU), _first(m.fell_NU)),
            _first(astray_NU),
            _first(m.away_NU),
            np.where(bumped_N | ~m.solved_N, _first(m.bump_NU), _first(m.at_edge_NU)),
        ],
        axis=1,
    )
    return np.maximum(grades_NK, 1), pivots_NK


class ScriptedGrader:
    """Grades by distance; `ports.Grader`."""

    def __init__(self, cache: BoardCache | None = None) -> None:
        """May share its boards with a reflector."""
        self._cache = cache or BoardCache()

    def grade(self, episodes: Sequence[Episode], rng: torch.Generator) -> list[Grading]:
        """One grading per episode; nothing is drawn."""
        if not episodes:
            return []
        grades_NK, pivots_NK = grades_and_pivots(moments(episodes, self._cache))
        return [
            Grading(tuple(grades), tuple(None if pivot < 0 else pivot for pivot in pivots))
            for grades, pivots in zip(grades_NK.tolist(), pivots_NK.tolist(), strict=True)
        ]


class ScriptedReflector:
    """Names the first turn without progress and a better move for it; `ports.Reflector`."""

    def __init__(
        self, hint_accuracy: float = 1.0, say: Say = say_word, cache: BoardCache | None = None
    ) -> None:
        """Sets how good the hints are and how they read.

        Args:
            hint_accuracy: share of hints that name a good move; the others name any of the four.
            say: turns the action into the addition.
            cache: shared with a grader.
        """
        self._accuracy, self._say, self._cache = hint_accuracy, say, cache or BoardCache()

    def reflect(self, cases: Sequence[Case], rng: torch.Generator) -> list[Reflection]:
        """One reflection per case; of several good moves one is drawn.

        An episode that made progress in every turn (the way was longer than the budget) is retried from turn 0.
        """
        import torch

        if not cases:
            return []
        episodes = [case.episode for case in cases]
        m = moments(episodes, self._cache)
        turn_N = _first(m.slip_NU, 0)
        draws = torch.rand(len(cases), len(ACTIONS) + 2, generator=rng).numpy()
        good_NA = m.good_NUA[np.arange(len(cases)), turn_N]
        action_N = np.where(good_NA, draws[:, : len(ACTIONS)], -1.0).argmax(1)
        any_N = (draws[:, -2] * len(ACTIONS)).astype(np.int64)  # a draw is below 1
        action_N = np.where(draws[:, -1] < self._accuracy, action_N, any_N)
        return [
            Reflection(self._say(ACTIONS[action], episode), turn)
            for episode, action, turn in zip(episodes, action_N.tolist(), turn_N.tolist(), strict=True)
        ]


def blind_success(boards: Boards, max_turns: int) -> npt.NDArray[np.float64]:
    """Chance that a walker reaches the goal which heads straight for it and ignores holes [M].

    Each step is one of those that shorten the way as it would be without holes, all equally likely. This is the
    plateau that a policy reaches before it has learnt what a hole is; reports draw it as a line.
    """
    m, side = len(boards), boards.side
    row, column = np.divmod(np.arange(side * side), side)
    goal_M = (boards.cells_MC == GOAL).argmax(1)
    far_MC = np.abs(row - goal_M[:, None] // side) + np.abs(column - goal_M[:, None] % side)
    next_CA = moves(side)
    closer_MCA = far_MC[:, next_CA] < far_MC[:, :, None]
    share_MCA = closer_MCA / np.maximum(closer_MCA.sum(2, keepdims=True), 1)
    from_CA = next_CA[:, _OPPOSITE]  # where an action that ends in a cell came from
    came_CA = from_CA != np.arange(side * side)[:, None]
    open_MC, at, won_M = boards.cells_MC != HOLE, np.arange(m), np.zeros(m)
    chance_MC = np.zeros((m, side * side))
    chance_MC[at, boards.start_M] = 1.0
    for _ in range(max_turns):
        moving_MCA = chance_MC[:, :, None] * share_MCA
        chance_MC = (moving_MCA[:, from_CA, np.arange(len(ACTIONS))] * came_CA).sum(2) * open_MC
        won_M += chance_MC[at, goal_M]  # and nothing leaves the goal: no step is closer to it
    return won_M


def _walks(
    episodes: Sequence[Episode], boards: Boards, board_N: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Actions, cells before and after [N, U] (cells of the boards' canvas), turns [N]."""
    turns_N = np.array([len(episode.turns) for episode in episodes], dtype=np.int64)
    live_NU = np.arange(turns_N.max()) < turns_N[:, None]
    infos = [turn.info for episode in episodes for turn in episode.turns]
    action_NU = np.full(live_NU.shape, -1, dtype=np.int64)
    action_NU[live_NU] = [info["action"] for info in infos]
    own_NU = np.zeros(live_NU.shape, dtype=np.int64)
    own_NU[live_NU] = [info["cell"] for info in infos]
    size_N1, side = boards.size_M[board_N][:, None], boards.side
    after_NU = own_NU // size_N1 * side + own_NU % size_N1
    before_NU = np.concatenate([boards.start_M[board_N][:, None], after_NU[:, :-1]], axis=1)
    return action_NU, before_NU, after_NU, turns_N


def _first(mask_NU: Mask, none: int = -1) -> IntArray:
    """The first True of each row [N], or `none`."""
    return np.where(mask_NU.any(1), mask_NU.argmax(1), none)
