"""The warmed-up grid model: what is shown to it, what it learns, and that it is made once."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from racelab.configs.schema_rlds import FrozenLakeTask, GridConfig
from racelab.experiments import warmup
from racelab.experiments.backends.local.grid import open_grid_model
from racelab.experiments.errors import RunFolderError
from racelab.experiments.models.assets import model_sha256
from racelab.experiments.tasks.frozenlake.boards import GOAL, HOLE, WALL, from_rows, moves
from racelab.experiments.tasks.frozenlake.task import FrozenLake
from racelab.experiments.warmup import grid_folder, random_walks, warmed_model

from .grid_models import some_boards

TASK = FrozenLakeTask.model_validate(
    {
        "name": "frozenlake",
        "train_examples": 60,
        "validation_examples": 20,
        "data_seed": 0,
        "prompts_per_step": 4,
        "group_sizes": {"scalar": 4, "reflect": 3},
        "max_turns": 5,
        "max_prompt_tokens": 1024,
        "max_response_tokens": 4096,
        "max_turn_tokens": 1024,
        "temperature": 1.0,
        "top_p": 1.0,
        "demonstration": False,
        "sizes": [3, 4],
        "frozen_probability": [0.65, 0.85],
        "min_path": 1,
        "max_path": 6,
        "slippery": False,
        "boards": "",
    }
)
GRID = GridConfig(width=16, layers=1, heads=2, warmup_steps=3, warmup_batch=8, warmup_lr=1e-3)


def test_walks_obey_the_rules_of_the_game():
    boards = some_boards(20, sizes=(3, 4))
    vocab, after = 25, moves(4)
    kinds, hinted, followed = set(), 0, 0
    for prompt, walks in random_walks(boards, 400, 5, np.random.default_rng(0)):
        cells = list(prompt[1:17])
        for walk in walks:
            sequence = [prompt[17], *walk]
            for k in range(0, len(walk), 2):
                hint, here, action = sequence[k] // vocab, sequence[k] % vocab - 9, walk[k] - 5
                assert 0 <= action < 4
                hinted += hint > 0
                followed += hint == action + 1
                there = int(after[here, action])
                there = here if cells[there] == WALL else there
                last = k == len(walk) - 2
                if cells[there] in (HOLE, GOAL):
                    assert last
                    assert walk[k + 1] == cells[there]
                    kinds.add(cells[there])
                else:
                    assert walk[k + 1] % vocab == 9 + there
                    assert not last or len(walk) == 10
    assert kinds == {HOLE, GOAL}
    # A hint (4 of 5) is seen if the walk gets so far; of these 0.9 + 0.1 / 4 = 0.925 are followed.
    assert hinted > 100
    assert followed / hinted == pytest.approx(0.925, abs=4 * (0.925 * 0.075 / hinted) ** 0.5)


def test_walks_share_their_board():
    groups = random_walks(some_boards(50), 40, 5, np.random.default_rng(1))
    assert sum(len(walks) for _, walks in groups) == 40
    assert len({prompt[:10] for prompt, _ in groups}) <= 40 / warmup.WALKS_PER_BOARD


def test_free_actions_weigh_a_quarter():
    """Six tokens: a hinted action, its outcome, a free action, its outcome, ...: 1 + 1 + 1/4 + 1 + 1/4 + 1 = 4.5."""
    hinted, walk = 25 * 2 + 9, (6, 10, 5, 9, 8, 1)
    got = warmup.token_weights([((4, *range(16), hinted), [walk]), ((4, *range(16), 9), [(5, 2)])], 25)
    np.testing.assert_allclose(got * (4.5 + 1.25), [1, 1, 0.25, 1, 0.25, 1, 0.25, 1])
    assert got.sum() == pytest.approx(1)


def test_the_same_seed_gives_the_same_bytes_whatever_the_threads(tmp_path: Path):
    one = grid_folder(GRID, TASK, 7, tmp_path / "a")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two = grid_folder(GRID, TASK, 7, tmp_path / "b")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert one.parent == tmp_path / "a" / ".cache"
    assert one.name == two.name
    assert one.name.startswith("grid-")
    for name in ("config.json", "model.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert sorted(p.name for p in one.parent.iterdir()) == [one.name, f"{one.name}.lock"]
    model = open_grid_model(one)
    assert (model.spec.side, model.spec.max_turns) == (4, 5)
    assert model_sha256(one) == model_sha256(two)


def test_whatever_changes_the_weights_changes_the_folder(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(warmup, "warmed_model", _Blank)
    cases = [
        (GRID, TASK, 0),
        (GRID, TASK, 1),
        (GRID.model_copy(update={"warmup_steps": 4}), TASK, 0),
        (GRID.model_copy(update={"width": 18}), TASK, 0),
        (GRID, TASK.model_copy(update={"max_turns": 6}), 0),
        (GRID, TASK.model_copy(update={"data_seed": 1}), 0),
        (GRID, TASK.model_copy(update={"sizes": (3, 5)}), 0),
    ]
    assert len({grid_folder(*case, tmp_path) for case in cases}) == len(cases)
    # What only the run uses does not.
    assert grid_folder(GRID, TASK.model_copy(update={"temperature": 0.5}), 0, tmp_path) == grid_folder(
        *cases[0], tmp_path
    )


class _Blank:
    """In place of a model: counts, and saves an empty file."""

    made = 0

    def __init__(self, *_: object) -> None:
        type(self).made += 1

    def save(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"")


def test_several_runs_at_once_make_it_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(_Blank, "made", 0)
    monkeypatch.setattr(warmup, "warmed_model", _Blank)
    ready, found = threading.Barrier(4), []

    def run() -> None:
        ready.wait()
        found.append(grid_folder(GRID, TASK, 0, tmp_path))

    runs = [threading.Thread(target=run) for _ in range(4)]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert _Blank.made == 1


def test_an_interrupted_warm_up_leaves_nothing_that_could_be_taken_for_a_model(tmp_path: Path, monkeypatch):
    class Fails(_Blank):
        def save(self, folder: Path) -> None:
            super().save(folder)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(warmup, "warmed_model", Fails)
        with pytest.raises(KeyboardInterrupt):
            grid_folder(GRID, TASK, 0, tmp_path)
    assert [p.suffix for p in (tmp_path / ".cache").iterdir()] == [".lock"]
    assert open_grid_model(grid_folder(GRID, TASK, 0, tmp_path)).n_parameters > 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / ".cache").write_text("a file")
    with pytest.raises(RunFolderError, match=r"cannot write .*grid-"):
        grid_folder(GRID, TASK, 0, tmp_path)


def test_boards_of_a_file_decide_the_canvas(tmp_path: Path):
    rows = ["SFFFF", "FFFFF", "FFFFF", "FFFFF", "FFFFG"]
    assert from_rows([rows], ["here"]).side == 5
    file = tmp_path / "boards.jsonl"
    file.write_text('{"rows": ["SFFFF", "FFFFF", "FFFFF", "FFFFF", "FFFFG"]}\n')
    task = TASK.model_copy(update={"boards": str(file), "validation_examples": 1})
    assert open_grid_model(grid_folder(GRID, task, 0, tmp_path)).spec.side == 5


@pytest.mark.slow
def test_the_warm_up_teaches_moves_holes_and_hints():
    """The preset's model on validation boards: what it expects of positions, holes, goals and hinted actions."""
    values = {**TASK.model_dump(), "sizes": (4,), "max_turns": 10, "max_path": 10, "train_examples": 20_000}
    lake = FrozenLake(FrozenLakeTask.model_validate({**values, "min_path": 2}))
    grid = GridConfig(width=96, layers=3, heads=4, warmup_steps=250, warmup_batch=128, warmup_lr=1e-3)
    losses = []
    model = warmed_model(grid, lake.boards("train"), 10, 0, lambda _, loss: losses.append(loss))
    assert losses[-1] < 0.5 * losses[10]
    seen: dict[str, list[float]] = {"position": [], "hole": [], "goal": [], "hint": []}
    groups = random_walks(lake.boards("validation"), 400, 10, np.random.default_rng(0))
    for (prompt, walks), scores in zip(groups, model.logprobs(groups), strict=True):
        for walk, logp in zip(walks, scores, strict=True):
            sequence, share = (prompt[-1], *walk), np.exp(logp)
            seen["position"].extend(share[1:-1:2])
            if walk[-1] in (HOLE, GOAL):
                seen["hole" if walk[-1] == HOLE else "goal"].append(share[-1])
            seen["hint"].extend(share[k] for k in range(0, len(walk), 2) if sequence[k] // 25 == walk[k] - 4)
    means = {name: float(np.mean(values)) for name, values in seen.items()}
    assert means["position"] > 0.9
    assert means["hole"] > 0.75
    assert means["goal"] > 0.4
    assert means["hint"] > 0.7
