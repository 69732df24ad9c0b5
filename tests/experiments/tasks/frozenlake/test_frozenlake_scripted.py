"""The scripted grader and reflector: grades, pivots and hints worked by hand; the line of the hole-blind walker."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from racelab.experiments.episodes import Case, Episode, Grading, Instance, Turn
from racelab.experiments.ports import Grader, Reflector
from racelab.experiments.tasks.frozenlake.boards import ACTIONS, from_rows, make_boards, to_instance
from racelab.experiments.tasks.frozenlake.env import FrozenLakeEnv
from racelab.experiments.tasks.frozenlake.scripted import (
    BoardCache,
    ScriptedGrader,
    ScriptedReflector,
    blind_success,
)

# Distances to the goal:    6 5 4 H / 5 H 3 2 / 4 3 2 1 / H 2 1 G
FOUR = ["SFFH", "FHFF", "FFFF", "HFFG"]
# 4 5 H / 3 H 1 / 2 1 G: the cell right of the start leads nowhere.
THREE = ["SFH", "FHF", "FFG"]
OPEN = ["SFFF", "FFFF", "FFFF", "FFFG"]  # 6 steps
SEVEN = ["SFFFF", "FFFFF", "FFFFF", "FFFFG", "FFFFF"]
MIDDLE = ["FFF", "FSF", "FFG"]
INNER = ["FFFFF", "FFFFF", "FFSFF", "FFFGF", "FFFFF"]


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def play(rows: list[str], actions: str, max_turns: int = 10) -> Episode:
    """U, D, L, R; anything else is an invalid reply."""
    words = {word[0]: word for word in ACTIONS}
    instance = Instance("frozenlake", "/".join(rows), {"rows": rows})
    env = FrozenLakeEnv(instance, max_turns)
    first, turns = env.reset(), []
    for letter in actions:
        reply = f"<action>{words.get(letter, '?')}</action>"
        seen = env.step(reply)
        turns.append(Turn(reply, (7,), (0.0,), True, seen.text, info=seen.info))
    if not seen.done:
        env.stop("response_budget")
    return Episode(instance, (), "", first.text, tuple(turns), env.result())


GOLDEN = {
    "hole fall": (play(FOUR, "RD"), (1, 1, 5, 5, 5), (1, 1, None, None, None)),
    "straight to the goal": (play(FOUR, "RRDDRD"), (5, 5, 5, 5, 5), (1, 1, None, None, 0)),
    "two bumps, then the goal": (play(FOUR, "UURRDDRD"), (4, 5, 5, 5, 3), (3, 3, None, None, 0)),
    "to and fro until the turns ran out": (
        play(FOUR, "RLRL", max_turns=4),
        (1, 5, 2, 2, 5),
        (1, None, 1, 1, None),
    ),
    "solved with a detour into a dead end": (play(THREE, "RLDDRR"), (3, 5, 4, 4, 5), (0, 1, 1, 0, 0)),
    "half the way, then bumps": (play(FOUR, "RRDUUU", max_turns=6), (2, 5, 4, 3, 3), (3, None, 3, 3, 4)),
    "most of the way, then out of budget": (
        play(FOUR, "DDRR", max_turns=10),
        (2, 5, 5, 4, 5),
        (None, None, None, None, None),
    ),
    "nearly there, then a bump": (
        play(FOUR, "RRDDRR", max_turns=6),
        (3, 5, 5, 4, 4),
        (5, None, None, None, 5),
    ),
    "in just twice the steps": (play(OPEN, "UUUUUURRRDDD", 12), (3, 4, 5, 5, 1), (9, None, None, None, 0)),
    "in more than that": (play(OPEN, "UUUUUUURRRDDD", 13), (2, 4, 5, 5, 1), (10, None, None, None, 0)),
    "in 10/7 of the steps": (play(SEVEN, "UUURRRRDDD", 10), (4, 4, 5, 5, 2), (7, None, None, None, 0)),
    "at the edge in the second turn": (play(MIDDLE, "RD"), (5, 4, 5, 5, 5), (1, None, None, None, 1)),
    "never at the edge": (play(INNER, "RD"), (5, 4, 5, 5, 5), (1, None, None, None, None)),
    "invalid replies": (play(FOUR, "??", max_turns=2), (1, 4, 3, 4, 5), (0, None, 0, None, None)),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    episode, grades, pivots = GOLDEN[name]
    assert ScriptedGrader().grade([episode], rng()) == [Grading(grades, pivots)]


def test_a_batch_of_different_boards_is_graded_as_one_by_one():
    episodes = [episode for episode, _, _ in GOLDEN.values()]
    assert ScriptedGrader().grade(episodes, rng()) == [Grading(g, p) for _, g, p in GOLDEN.values()]
    assert (
        ScriptedGrader(BoardCache(capacity=1)).grade(episodes * 2, rng())
        == [Grading(g, p) for _, g, p in GOLDEN.values()] * 2
    )
    assert ScriptedGrader().grade([], rng()) == []
    assert ScriptedReflector().reflect([], rng()) == []


def test_grades_never_leave_the_scale():
    episode = play(FOUR, "U" * 10 + "RLRLRLRLRL", max_turns=20)
    (grading,) = ScriptedGrader().grade([episode], rng())
    assert grading.grades == (1, 5, 1, 1, 1)


def test_hints_name_the_first_turn_without_progress_and_a_move_that_helps():
    fall, detour = play(FOUR, "RD"), play(THREE, "RL", max_turns=2)
    reflections = ScriptedReflector().reflect([Case(fall, None), Case(detour, None)], rng())
    assert [(r.addition, r.retry_from, r.status, r.prompt) for r in reflections] == [
        ("Right", 1, "ok", ()),
        ("Down", 0, "ok", ()),
    ]
    said = ScriptedReflector(say=lambda action, episode: f"{action} on {episode.instance.instance_id}")
    assert said.reflect([Case(fall, None)], rng())[0].addition == "Right on SFFH/FHFF/FFFF/HFFG"


def test_an_episode_that_made_progress_all_along_is_retried_from_the_start():
    (reflection,) = ScriptedReflector().reflect([Case(play(FOUR, "DDR", max_turns=3), None)], rng())
    assert reflection.retry_from == 0
    assert reflection.addition in ("Right", "Down")


def test_several_good_moves_are_equally_likely_and_poor_hints_name_any_move():
    cases = [Case(play(FOUR, "U", max_turns=1), None)] * 2000
    said = [r.addition for r in ScriptedReflector().reflect(cases, rng())]
    assert set(said) == {"Right", "Down"}
    assert said.count("Right") == pytest.approx(1000, abs=100)
    blind = [r.addition for r in ScriptedReflector(hint_accuracy=0.0).reflect(cases, rng())]
    assert all(blind.count(word) == pytest.approx(500, abs=90) for word in ACTIONS)
    half = [r.addition for r in ScriptedReflector(hint_accuracy=0.5).reflect(cases, rng())]
    assert half.count("Up") == pytest.approx(250, abs=70)
    assert said == [r.addition for r in ScriptedReflector().reflect(cases, rng())], "drawn from the generator"


def test_following_the_hint_makes_progress():
    """On random boards and walks: the distance falls where the hint is obeyed, and pivots and grades are in range."""
    generator = np.random.default_rng(3)
    boards = make_boards(
        40, sizes=(4, 5, 7), frozen_probability=(0.65, 0.85), min_path=2, max_path=12, rng=generator
    )
    episodes = []
    for i in range(len(boards)):
        rows = to_instance(boards, i, "train").data["rows"]
        walk, env = "", FrozenLakeEnv(Instance("frozenlake", "x", {"rows": rows}), 10)
        seen = env.reset()
        while not seen.done:
            walk += "UDLR?"[generator.integers(5)]
            seen = env.step(f"<action>{ {w[0]: w for w in ACTIONS}.get(walk[-1], '?') }</action>")
        episodes.append(play(rows, walk))
    for grading, episode in zip(ScriptedGrader().grade(episodes, rng()), episodes, strict=True):
        assert grading.grades is not None
        assert all(1 <= grade <= 5 for grade in grading.grades)
        assert all(pivot is None or 0 <= pivot < len(episode.turns) for pivot in grading.pivots)
    reflections = ScriptedReflector().reflect([Case(e, None) for e in episodes], rng())
    for i, (reflection, episode) in enumerate(zip(reflections, episodes, strict=True)):
        assert reflection.retry_from is not None
        env = FrozenLakeEnv(episode.instance, 10)
        env.replay(episode.turns[: reflection.retry_from])
        before = env.replay(episode.turns[: reflection.retry_from])
        assert before is not None
        after = env.step(f"<action>{reflection.addition}</action>")
        size, side = int(boards.size_M[i]), boards.side
        dist = boards.dist_MC[i].reshape(side, side)[:size, :size].ravel()
        assert dist[after.info["cell"]] == dist[before.info["cell"]] - 1


def test_they_are_what_the_ports_ask_for():
    assert isinstance(ScriptedGrader(), Grader)
    assert isinstance(ScriptedReflector(), Reflector)


def test_the_walker_that_is_blind_to_holes():
    # Diagonal: first step Right into the hole or Down past it; then one way each.
    boards = from_rows([["SH", "FG"], ["SF", "FG"], ["SFF", "HHF", "FFG"]], ["a", "b", "c"])
    assert blind_success(boards, 10).tolist() == [0.5, 1.0, 0.25]
    assert blind_success(boards, 2).tolist() == [0.5, 1.0, 0.0], "too few turns for the third"


def test_the_blind_walker_as_played_out():
    generator = np.random.default_rng(5)
    boards = make_boards(
        300, sizes=(4,), frozen_probability=(0.65, 0.85), min_path=2, max_path=10, rng=generator
    )
    won = 0
    for i in range(300):
        cell, goal = int(boards.start_M[i]), int((boards.cells_MC[i] == 2).argmax())
        while cell != goal and boards.cells_MC[i, cell] != 1:
            steps = [4] * (goal // 4 > cell // 4) + [-4] * (goal // 4 < cell // 4)
            steps += [1] * (goal % 4 > cell % 4) + [-1] * (goal % 4 < cell % 4)
            cell += steps[generator.integers(len(steps))]
        won += cell == goal
    assert blind_success(boards, 10).mean() == pytest.approx(won / 300, abs=0.08)
