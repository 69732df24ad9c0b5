"""The FrozenLake token grid on one core: environment, rollouts, one update, warm-up.

Run: python bench/grid.py [--warm]

CPU seconds, least of some rounds. Targets: 50,000 environment steps a second, 2,200 episodes a second at 160 rows, 160
episodes turned into values in 15 ms, an update of 160 rows in 107 ms, the warm-up in 40 s (only with --warm; without it
the model walks at random, which makes episodes about as long).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch

from racelab.configs.schema_rlds import GridConfig
from racelab.experiments.backends.local.grid import GridModel
from racelab.experiments.backends.local.head import Coefficient
from racelab.experiments.episodes import AgentSampling, Episode, Start
from racelab.experiments.tasks.frozenlake.boards import FROZEN, Boards, make_boards, to_instance
from racelab.experiments.tasks.frozenlake.grid_actor import GridActor, _episodes, _Plan
from racelab.experiments.tasks.frozenlake.grid_play import Walkers
from racelab.experiments.warmup import warmed_model

MAX_TURNS, ROUNDS = 10, 7
SIZES = {"4x4": ((4,), 10), "5x5 to 8x8": ((5, 6, 7, 8), 12)}
GROUPS = ((1, 10), (16, 10), (64, 10), (300, 1))


def best(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Least CPU seconds of some rounds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def boards_of(kind: str, count: int) -> Boards:
    sizes, max_path = SIZES[kind]
    rng = np.random.default_rng(0)
    return make_boards(
        count, sizes=sizes, frozen_probability=(0.65, 0.85), min_path=2, max_path=max_path, rng=rng
    )


def environment(boards: Boards, rows: int) -> float:
    """Steps a second of `rows` random walkers, those that ended left out."""
    board_R = np.arange(rows) % len(boards)
    action_TR = np.random.default_rng(1).integers(4, size=(MAX_TURNS, rows))
    steps = 0

    def walk() -> None:
        nonlocal steps
        steps, live, walkers = 0, np.arange(rows), Walkers(boards, board_R)
        for action_R in action_TR:
            steps += len(live)
            live = live[walkers.step(live, action_R[live]) == FROZEN]

    seconds = best(walk)
    return steps / seconds


def rollouts(model: GridModel, boards: Boards) -> list[Episode]:
    """Prints episodes a second; the episodes of 16 boards x 10."""
    actor, rng = GridActor(model, MAX_TURNS), torch.Generator().manual_seed(0)
    known = [to_instance(boards, i, "train") for i in range(300)]
    kept: list[Episode] = []
    for prompts, g in GROUPS:
        starts = [Start(instance) for instance in known[:prompts] for _ in range(g)]
        sampling = AgentSampling(1.0)
        seconds = best(
            lambda starts=starts, sampling=sampling: actor.play(starts, sampling, rng)  # type: ignore[misc]
        )
        print(f"rollouts, {prompts} boards x {g}: {prompts * g / seconds:,.0f} episodes/s (target 2,200)")
        if (prompts, g) == (16, 10):
            kept = [e for e in actor.play(starts, sampling, rng) if e is not None]
            plan = _Plan(starts, model.tokens, MAX_TURNS)
            played = actor._roll(plan, sampling, rng)
            built = best(lambda starts=starts, plan=plan, played=played: _episodes(starts, plan, played))  # type: ignore[misc]
            print(f"160 episodes as values: {1000 * built:.1f} ms (target 15)")
    return kept


def update(model: GridModel, episodes: list[Episode]) -> None:
    """Prints milliseconds of one gradient, with and without a reference."""
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for episode in episodes:
        groups.setdefault(episode.prompt, []).append(episode.tokens())
    pairs = list(groups.items())

    def coefficient(_: torch.Tensor | None) -> Coefficient:
        return lambda logp, part: (torch.full_like(logp, 1e-3), torch.full_like(logp, 1e-3))

    def gradient(reference: GridModel | None) -> None:
        for w in model.core.masters.values():
            w.grad = None
        model.accumulate(pairs, 1.0, coefficient, reference)

    turns = np.mean([len(e.turns) for e in episodes])
    for name, reference in (("alone", None), ("with reference", model.frozen_copy())):
        seconds = best(lambda reference=reference: gradient(reference))  # type: ignore[misc]
        print(
            f"update of {len(episodes)} rows, {turns:.1f} turns, {name}: {1000 * seconds:.0f} ms (target 107)"
        )


def main() -> None:
    """All parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", action="store_true", help="the preset's warm-up first, timed")
    warm = parser.parse_args().warm
    torch.set_num_threads(1)
    for kind in SIZES:
        rate = environment(boards_of(kind, 500), 1000)
        print(f"grid environment, {kind}, 1,000 rows: {rate:,.0f} steps/s (target 50,000)")
    print(f"grid environment, 4x4, 160 rows: {environment(boards_of('4x4', 16), 160):,.0f} steps/s")
    boards = boards_of("4x4", 20_000 if warm else 1_000)
    grid = GridConfig(
        width=96,
        layers=3,
        heads=4,
        warmup_steps=250 if warm else 0,
        warmup_batch=128,
        warmup_lr=1e-3,
    )
    start = time.process_time()
    model = warmed_model(grid, boards, MAX_TURNS, 0)
    if warm:
        print(f"warm-up of 250 steps: {time.process_time() - start:.0f} s (target 40)")
    update(model, rollouts(model, boards))


if __name__ == "__main__":
    main()
