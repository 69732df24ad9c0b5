"""Boards: the constraints of App. D.1, distances against a plain search, serialisation, malformed boards."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.episodes import Instance
from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.tasks.frozenlake.boards import (
    ACTIONS,
    FAR,
    FROZEN,
    GOAL,
    HOLE,
    WALL,
    Boards,
    board_keys,
    from_instances,
    from_rows,
    join,
    make_boards,
    moves,
    to_instance,
)

PAPER = {"sizes": (5, 6, 7, 8), "frozen_probability": (0.65, 0.85), "min_path": 2, "max_path": 12}


def draw(count: int, seed: int = 0, **changes) -> Boards:
    return make_boards(count, rng=np.random.default_rng(seed), **{**PAPER, **changes})


def same(a: Boards, b: Boards) -> bool:
    return a.side == b.side and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        and getattr(a, name).dtype == getattr(b, name).dtype
        for name in ("cells_MC", "start_M", "dist_MC", "size_M")
    )


def plain_search(rows: list[str]) -> list[list[int]]:
    """Steps to G from every cell that is no hole, by a queue."""
    n = len(rows)
    (goal,) = [(r, c) for r in range(n) for c in range(n) if rows[r][c] == "G"]
    found, queue = {goal: 0}, deque([goal])
    while queue:
        r, c = queue.popleft()
        for y, x in ((r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)):
            if 0 <= y < n and 0 <= x < n and rows[y][x] != "H" and (y, x) not in found:
                found[y, x] = found[r, c] + 1
                queue.append((y, x))
    return [[found.get((r, c), FAR) for c in range(n)] for r in range(n)]


def test_generated_boards_keep_the_constraints_of_the_paper():
    boards = draw(2000)
    assert len(boards) == 2000
    assert boards.side == 8
    assert set(boards.size_M.tolist()) == {5, 6, 7, 8}
    assert boards.path_M().min() == 2
    assert boards.path_M().max() == 12
    assert ((boards.cells_MC == GOAL).sum(1) == 1).all()
    assert (boards.cells_MC[np.arange(2000), boards.start_M] == FROZEN).all()
    assert ((boards.cells_MC != WALL).sum(1) == boards.size_M**2).all()
    holes = (boards.cells_MC == HOLE).sum(1) / boards.size_M**2
    assert 0.15 < holes.mean() < 0.30, "1 - p is uniform in [0.15, 0.35]; start, goal and the path lower it"
    assert len(set(board_keys(boards))) == 2000
    assert len(set(draw(500, sizes=(4,)).start_M.tolist())) == 16, "the start is anywhere"


def test_distances_are_those_of_a_plain_search():
    boards = draw(60, seed=1)
    for i in range(len(boards)):
        rows, size = to_instance(boards, i, "train").data["rows"], int(boards.size_M[i])
        grid = boards.dist_MC[i].reshape(8, 8)
        assert grid[:size, :size].tolist() == plain_search(rows)
        assert (grid[size:] == FAR).all()
        assert (grid[:, size:] == FAR).all()


def test_the_same_generator_gives_the_same_boards_and_excluded_ones_never_come():
    assert same(draw(300), draw(300))
    assert not same(draw(300), draw(300, seed=1))
    held = draw(2000, sizes=(3,), min_path=1, seed=2)
    rest = draw(500, sizes=(3,), min_path=1, seed=2, exclude=set(board_keys(held)))
    assert not set(board_keys(held)) & set(board_keys(rest))


def test_ranges_that_allow_too_few_boards_end_with_a_message():
    with pytest.raises(ConfigError, match=r"gave 12 different boards of 50; widen them"):
        draw(50, sizes=(2,), min_path=2, max_path=3)
    with pytest.raises(ConfigError, match=r"gave 0 different boards of 1"):
        draw(1, sizes=(2,), min_path=5, max_path=9)
    with pytest.raises(ConfigError, match=r"task\.max_path=99"):
        draw(1, max_path=99)


def test_moves_by_hand():
    assert ACTIONS == ("Up", "Down", "Left", "Right")
    assert moves(2).tolist() == [[0, 2, 0, 1], [1, 3, 0, 1], [0, 2, 2, 3], [1, 3, 2, 3]]
    assert moves(3)[4].tolist() == [1, 7, 3, 5]


def test_one_board_by_hand():
    boards = from_rows([["SF", "HG"]], ["here"], side=3)
    assert boards.cells_MC.tolist() == [[FROZEN, FROZEN, WALL, HOLE, GOAL, WALL, WALL, WALL, WALL]]
    assert boards.dist_MC.tolist() == [[2, 1, FAR, FAR, 0, FAR, FAR, FAR, FAR]]
    assert (boards.start_M.tolist(), boards.size_M.tolist(), boards.path_M().tolist()) == ([0], [2], [2])
    instance = to_instance(boards, 0, "validation")
    assert instance.data == {"rows": ["SF", "HG"], "path": 2}
    assert instance.instance_id == to_instance(boards.on(2), 0, "validation").instance_id
    assert instance.instance_id != to_instance(boards, 0, "train").instance_id


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(3, 10), min_size=1, max_size=4, unique=True),
    seed=st.integers(0, 999),
    more=st.integers(0, 3),
)
def test_boards_survive_being_written_and_moved(sizes, seed, more):
    boards = draw(12, seed=seed, sizes=tuple(sizes), max_path=30)
    instances = [to_instance(boards, i, "train") for i in range(12)]
    assert len({instance.instance_id for instance in instances}) == 12
    assert same(from_instances(instances, boards.side), boards)
    wide = from_instances(instances, boards.side + more)
    assert same(wide, boards.on(boards.side + more))
    assert same(wide.on(boards.side), boards)
    ones = [from_instances([instance]) for instance in instances]
    assert same(join(ones).on(boards.side), boards)
    assert same(boards.take([3, 1]), join([boards.take([3]), boards.take([1])]))
    assert same(boards.take(slice(2, 5)), boards.take(np.array([2, 3, 4])))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "must be a list of strings"),
        ([], "must be a list of strings"),
        ("SG", "must be a list of strings"),
        ([1, 2], "must be a list of strings"),
        (["SF", "HGF"], r"square, but there are 2 rows of length \[2, 3\]"),
        (["SFF", "HGF"], r"square, but there are 2 rows of length \[3\]"),
        (["SF", "XG"], "unknown cell 'X'; use S, F, H and G"),
        (["FF", "HG"], r"0 cells are S \(start\); exactly one"),
        (["SS", "HG"], r"2 cells are S \(start\); exactly one"),
        (["SF", "HF"], r"0 cells are G \(goal\); exactly one"),
        (["SH", "HG"], "no path of fewer than 99 steps leads from S to G"),
    ],
)
def test_malformed_boards_are_named(rows, message):
    good = Instance("frozenlake", "good", {"rows": ["SF", "HG"]})
    with pytest.raises(DataError, match=f"^bad: .*{message}"):
        from_instances([good, Instance("frozenlake", "bad", {"rows": rows})])


def test_a_wrong_path_and_a_small_canvas_are_named():
    with pytest.raises(DataError, match=r"^a: `path` is 3, but the board's is 2"):
        from_instances([Instance("frozenlake", "a", {"rows": ["SF", "HG"], "path": 3})])
    with pytest.raises(DataError, match=r"^a: a board of side 2 does not fit a canvas of side 1"):
        from_instances([Instance("frozenlake", "a", {"rows": ["SF", "HG"]})], side=1)
    assert len(from_instances([])) == 0


def test_a_path_of_more_steps_than_can_be_counted_counts_as_none():
    """A snake of 15 columns: 119 steps, which FAR cannot tell from infinity."""
    rows = ["F" * 15 if r % 2 == 0 else ("H" * 14 + "F" if r % 4 == 1 else "F" + "H" * 14) for r in range(15)]
    rows[0], rows[-1] = "S" + rows[0][1:], rows[-1][:-1] + "G"
    with pytest.raises(DataError, match=r"^here: no path of fewer than 99 steps"):
        from_rows([rows], ["here"])
