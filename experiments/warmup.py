"""Makes the small FrozenLake transformer's first weights: supervised, on random walks.

It teaches what boards and moves are and that a hint is usually followed; no expert move is shown. A walk takes
uniformly random actions. At one random turn it may see a hint, each action and none alike, which it obeys 9 times
in 10. Every token is predicted, also the last one of a walk that ended: HOLE or GOAL in place of a position, so the
model learns what its moves lead to. Actions without a hint are noise that cannot be predicted and weigh a quarter: at
equal weights the model knew the goal with probability 0.29 after 250 steps instead of 0.87. The boards are those that
the run trains on.

Several walks share a board (its header is computed once, which is most of the work).

The result is a model folder under `<root>/.cache/grid-<hash>/`, made once for all runs that would make the same.
torch is imported inside the functions.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from racelab.configs.schema_rlds import FrozenLakeTask, GridConfig
from racelab.experiments.errors import RunFolderError
from racelab.experiments.fsio import explain, file_lock
from racelab.experiments.models.grid_tokens import ACT, HINTS, N_ACTIONS, POS, GridTokens
from racelab.experiments.rng import numpy_generator, torch_generator
from racelab.experiments.tasks.frozenlake.boards import FROZEN, Boards
from racelab.experiments.tasks.frozenlake.grid_play import Walkers
from racelab.experiments.tasks.frozenlake.task import TRAIN, FrozenLake
from racelab.experiments.types import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

    from racelab.experiments.backends.local.grid import GridModel
    from racelab.experiments.backends.local.head import Coefficient

Group = tuple[tuple[int, ...], list[tuple[int, ...]]]

OBEDIENCE = 0.9
"""Share of the hints that a walk follows."""
FREE_ACTION_WEIGHT = 0.25
"""Weight in the loss of an action that no hint asks for; every other token weighs 1."""
WALKS_PER_BOARD = 4
_FORMAT = 1  # raise it when anything below changes what a seed gives
_WAIT_S = 900.0  # another process is making the same model


def grid_folder(grid: GridConfig, task: FrozenLakeTask, seed: int, root: Path) -> Path:
    """The folder of the warmed-up model; made if nobody has yet.

    Args:
        grid: sizes and warm-up.
        task: boards and turns.
        seed: of the first weights and the walks. The same seed gives the same bytes on one machine.
        root: folder of the runs.

    Returns:
        folder with config.json and model.safetensors.

    Raises:
        RunFolderError: the folder cannot be written, or another process holds it for a quarter of an hour.
        ConfigError, DataError: the boards; see `FrozenLake.boards`.
    """
    boards = FrozenLake(task).boards(TRAIN)
    folder = root / ".cache" / f"grid-{_key(grid, boards, task.max_turns, seed)}"
    if folder.is_dir():
        return folder
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.parent / f"{folder.name}.lock", wait_s=_WAIT_S):
            if not folder.is_dir():
                temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
                warmed_model(grid, boards, task.max_turns, seed).save(temporary)
                os.chmod(temporary, 0o755)
                os.rename(temporary, folder)
                temporary = None
    except OSError as error:
        raise RunFolderError(f"cannot write {folder}: {explain(error)}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _key(grid: GridConfig, boards: Boards, max_turns: int, seed: int) -> str:
    """16 hex digits of all that decides the weights."""
    told = {
        "format": _FORMAT,
        "grid": grid.model_dump(mode="json"),
        "boards": hashlib.sha256(boards.cells_MC.tobytes() + boards.start_M.tobytes()).hexdigest(),
        "side": boards.side,
        "max_turns": max_turns,
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def warmed_model(
    grid: GridConfig,
    boards: Boards,
    max_turns: int,
    seed: int,
    log: Callable[[int, float], None] | None = None,
) -> GridModel:
    """Draws the weights and trains them on random walks, with AdamW at a constant rate.

    Args:
        grid: sizes, steps, walks per step, learning rate.
        boards: to walk on.
        max_turns: of a walk.
        seed: see `grid_folder`.
        log: called with (step from 1, loss: weighted mean of the negative log-likelihoods).
    """
    import torch

    from racelab.experiments.backends.local.grid import new_grid_model
    from racelab.experiments.backends.local.grid_net import GridSpec

    spec = GridSpec(boards.side, grid.width, grid.layers, grid.heads, max_turns)
    model = new_grid_model(spec, torch_generator(seed, "grid-weights"))
    rng = numpy_generator(seed, "grid-walks")
    weights = list(model.core.masters.values())
    optimizer = torch.optim.AdamW(weights, lr=grid.warmup_lr, weight_decay=0.0, fused=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order, whatever the run uses
    try:
        for step in range(1, grid.warmup_steps + 1):
            groups = random_walks(boards, grid.warmup_batch, max_turns, rng)
            slope = -torch.from_numpy(token_weights(groups, spec.tokens.vocab)).float()
            optimizer.zero_grad(set_to_none=True)
            logp = model.accumulate(groups, 1.0, _fixed(slope), None)
            optimizer.step()
            if log is not None:
                log(step, float(logp @ slope))
    finally:
        torch.set_num_threads(threads)
    return model


def _fixed(slope: Tensor) -> Callable[[Tensor | None], Coefficient]:
    """A loss that is linear in the log-probs."""
    return lambda _: lambda logp, part: (slope[part], None)


def token_weights(groups: Sequence[Group], vocab: int) -> FloatArray:
    """Share of each token of each walk in the loss, flat; they sum to 1."""
    weights = []
    for prompt, walks in groups:
        for walk in walks:
            before = (prompt[-1], *walk[1:-1:2])
            share = np.ones(len(walk))
            share[::2] = [1.0 if seen >= vocab else FREE_ACTION_WEIGHT for seen in before]
            weights.append(share)
    flat = np.concatenate(weights)
    shares: FloatArray = flat / flat.sum()
    return shares


def random_walks(boards: Boards, count: int, max_turns: int, rng: np.random.Generator) -> list[Group]:
    """Random walks as groups of (prompt, walks), one per board.

    Args:
        boards: drawn from, with replacement.
        count: walks, `WALKS_PER_BOARD` on a board.
        max_turns: of a walk.
        rng: the draws.

    Returns:
        a walk that sees its hint on the very first position has a prompt, and so a group, of its own.
    """
    tokens = GridTokens(boards.side)
    board_R = np.repeat(rng.integers(len(boards), size=-(-count // WALKS_PER_BOARD)), WALKS_PER_BOARD)[:count]
    action_RT = rng.integers(N_ACTIONS, size=(count, max_turns))
    turn_R, hint_R = rng.integers(max_turns, size=count), rng.integers(HINTS, size=count)
    obeys = np.flatnonzero((rng.random(count) < OBEDIENCE) & (hint_R > 0))
    action_RT[obeys, turn_R[obeys]] = hint_R[obeys] - 1
    walkers = Walkers(boards, board_R)
    seen_RT = np.empty(
        (count, max_turns + 1), dtype=np.int64
    )  # what the walk saw before each turn, and at its end
    seen_RT[:, 0] = POS + walkers.cell_R
    length_R = np.full(count, max_turns)
    live = np.arange(count)
    for t in range(max_turns):
        kind = walkers.step(live, action_RT[live, t])
        on = kind == FROZEN
        seen_RT[live, t + 1] = np.where(on, POS + walkers.cell_R[live], kind)
        length_R[live[~on]] = t + 1
        live = live[on]
    seen_RT[np.arange(count), turn_R] += np.where(turn_R < length_R, hint_R * tokens.vocab, 0)
    walk_RT = np.stack([ACT + action_RT, seen_RT[:, 1:]], axis=2).reshape(count, 2 * max_turns)
    headers = {b: tokens.head(boards.cells_MC[b].tolist()) for b in set(board_R.tolist())}
    rows = zip(board_R.tolist(), seen_RT[:, 0].tolist(), walk_RT.tolist(), length_R.tolist(), strict=True)
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for board, first, walk, length in rows:
        groups.setdefault((*headers[board], first), []).append(tuple(walk[: 2 * length]))
    return list(groups.items())
