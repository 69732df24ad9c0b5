"""FrozenLake on one core: steps of the text environment, drawing boards, scripted grading.

Run: python bench/frozenlake.py

Targets: 10,000 environment steps a second with observation text, opening and closing included; 20,000 boards in a few
seconds; 150 episodes graded or 75 reflected on in 15 ms.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch

from racelab.experiments.episodes import Case, Episode, Instance, Turn
from racelab.experiments.tasks.frozenlake.boards import ACTIONS, Boards, make_boards, to_instance
from racelab.experiments.tasks.frozenlake.env import FrozenLakeEnv
from racelab.experiments.tasks.frozenlake.scripted import ScriptedGrader, ScriptedReflector

SIZES = {"4x4": ((4,), 10), "5x5 to 8x8": ((5, 6, 7, 8), 12)}
MAX_TURNS = 10
ROUNDS = 7


def best(work: Callable[[], object]) -> float:
    """Least CPU seconds of some rounds."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def draw(kind: str, count: int) -> Boards:
    sizes, max_path = SIZES[kind]
    rng = np.random.default_rng(0)
    return make_boards(
        count, sizes=sizes, frozen_probability=(0.65, 0.85), min_path=2, max_path=max_path, rng=rng
    )


def walk(instance: Instance, replies: list[str]) -> Episode:
    """One episode of the text environment; the replies are used up in turn."""
    env = FrozenLakeEnv(instance, MAX_TURNS)
    seen = first = env.reset()
    turns = []
    for reply in replies:
        seen = env.step(reply)
        turns.append(Turn(reply, (), (), True, seen.text, info=seen.info))
        if seen.done:
            break
    result = env.result()
    env.close()
    return Episode(instance, (), "", first.text, tuple(turns), result)


def walks(kind: str, groups: int, size: int) -> Callable[[], list[Episode]]:
    """Random walks, `size` on each of `groups` boards."""
    boards, rng = draw(kind, groups), np.random.default_rng(1)
    starts = [to_instance(boards, i // size, "train") for i in range(groups * size)]
    chosen = rng.integers(len(ACTIONS), size=(groups * size, MAX_TURNS))
    thought = "<think>\n" + "The goal may be down there. " * 20 + "\n</think>\n"
    replies = [[f"{thought}<action>{ACTIONS[a]}</action>" for a in row] for row in chosen]
    return lambda: [walk(instance, said) for instance, said in zip(starts, replies, strict=True)]


def text_part() -> None:
    """Steps a second of the text environment, the episode's values built as an actor builds them."""
    for kind in SIZES:
        play = walks(kind, 300, 10)
        steps = sum(len(episode.turns) for episode in play())
        print(f"text environment, {kind}: {steps / best(play):,.0f} steps/s (target 10,000)")


def boards_part() -> None:
    """Drawing the paper's number of training boards."""
    for kind in SIZES:
        print(f"20,000 boards, {kind}: {best(lambda kind=kind: draw(kind, 20000)):.2f} s")


def scripted_part() -> None:
    """Grading and reflecting on the episodes of one step."""
    rng = torch.Generator().manual_seed(0)
    for kind in SIZES:
        episodes = walks(kind, 16, 9)()
        cases = [Case(episode, None) for episode in episodes[::2]]
        fresh = best(lambda episodes=episodes: ScriptedGrader().grade(episodes, rng))
        grader, reflector = ScriptedGrader(), ScriptedReflector()
        grade = best(lambda grader=grader, episodes=episodes: grader.grade(episodes, rng))
        reflect = best(lambda reflector=reflector, cases=cases: reflector.reflect(cases, rng))
        print(
            f"scripted, {kind}, {len(episodes)} episodes: grading {1000 * grade:.1f} ms ({1000 * fresh:.1f} with "
            f"boards not seen before), {len(cases)} reflections {1000 * reflect:.1f} ms (target 15)"
        )


PARTS = (boards_part, text_part, scripted_part)
"""The token grid has a part of its own here."""


def main() -> None:
    """All parts, one after the other."""
    for part in PARTS:
        part()


if __name__ == "__main__":
    main()
