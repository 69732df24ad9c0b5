"""The task: splits, fixed boards from a file, prompt, taxonomy."""

from __future__ import annotations

import json

import pytest

from racelab.configs.schema_rlds import FrozenLakeTask
from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.ports import Task
from racelab.experiments.tasks.frozenlake.boards import board_keys, from_instances, moves
from racelab.experiments.tasks.frozenlake.task import FrozenLake
from racelab.experiments.tasks.frozenlake.taxonomy import SUBTASKS, SYSTEM_PROMPT

VALUES = {
    "name": "frozenlake",
    "train_examples": 400,
    "validation_examples": 100,
    "data_seed": 0,
    "prompts_per_step": 4,
    "group_sizes": {"scalar": 4, "reflect": 3},
    "max_turns": 10,
    "max_prompt_tokens": 1024,
    "max_response_tokens": 4096,
    "max_turn_tokens": 1024,
    "temperature": 1.0,
    "top_p": 1.0,
    "demonstration": False,
    "sizes": [4],
    "frozen_probability": [0.65, 0.85],
    "min_path": 2,
    "max_path": 10,
    "slippery": False,
    "boards": "",
}
ROWS = [["SF", "HG"], ["SFF", "FHF", "FFG"], ["GFFF", "FFFF", "FFFF", "FFFS"]]


def task(**changes) -> FrozenLake:
    return FrozenLake(FrozenLakeTask.model_validate({**VALUES, **changes}))


def file_of(tmp_path, lines: list[dict]) -> str:
    path = tmp_path / "boards.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return str(path)


def test_splits_are_fixed_disjoint_and_without_doubles():
    one, two, other = task(), task(), task(data_seed=1)
    train, held = one.train(), one.validation()
    assert (len(train), len(held)) == (400, 100)
    assert list(train) == list(two.train())
    assert list(held) == list(two.validation())
    assert held[0] != other.validation()[0]
    ids = [instance.instance_id for instance in (*train, *held)]
    assert len(set(ids)) == 500
    rows = {tuple(instance.data["rows"]) for instance in (*train, *held)}
    assert len(rows) == 500, "no validation board is trained on"


def test_the_slice_does_not_depend_on_the_number_of_training_boards():
    assert list(task(train_examples=4).validation()) == list(task().validation())


def test_a_small_space_of_boards_is_shared_out_without_overlap():
    small = {"sizes": [2], "max_path": 2, "min_path": 1, "prompts_per_step": 1}
    t = task(**small, train_examples=20, validation_examples=10)
    keys = board_keys(t.boards("train")), board_keys(t.boards("validation"))
    assert (len(set(keys[0])), len(set(keys[1])), len(set(keys[0] + keys[1]))) == (20, 10, 30)
    with pytest.raises(ConfigError, match=r"task\.sizes=\[2\], .* different boards of 2000; widen them"):
        task(**small, train_examples=2000, validation_examples=1).train()


def test_instances_behave_as_a_sequence():
    held = task().validation()
    assert held[-1] == held[99]
    assert list(held[2:4]) == [held[2], held[3]]
    assert from_instances(held[:5], 4).path_M().tolist() == [held[i].data["path"] for i in range(5)]
    with pytest.raises(IndexError):
        held[100]


def test_prompt_and_taxonomy():
    t = task()
    assert isinstance(t, Task)
    assert t.system_prompt() == SYSTEM_PROMPT
    assert t.system_prompt("  Never step on C. \n") == f"{SYSTEM_PROMPT}\n\n# Additions\nNever step on C."
    assert (t.stops, t.tools, t.concurrency) == (("</action>",), (), None)
    assert sum(s.weight for s in SUBTASKS) == pytest.approx(1.0)
    assert [(s.name, s.weight) for s in SUBTASKS] == [
        ("path_planning", 0.35),
        ("hazard_identification", 0.25),
        ("state_position_tracking", 0.15),
        ("dead_end_detection", 0.15),
        ("boundary_awareness", 0.10),
    ]
    assert t.metrics() == {}
    t.close()
    t.close()


def test_fixed_validation_boards(tmp_path):
    lines = [{"rows": rows, "note": "any"} for rows in ROWS]
    t = task(boards=file_of(tmp_path, lines), validation_examples=3)
    assert [instance.data["rows"] for instance in t.validation()] == ROWS
    assert [instance.data["path"] for instance in t.validation()] == [2, 4, 6]
    assert len(t.train()) == 400
    assert not set(board_keys(t.boards("train"))) & set(board_keys(t.boards("validation")))
    assert (
        t.describe()["hashes"]
        == task(boards=file_of(tmp_path, lines), validation_examples=3).describe()["hashes"]
    )
    assert len(task(boards=file_of(tmp_path, lines), validation_examples=2).validation()) == 2
    env = t.open(t.validation()[0])
    env.reset()
    assert env.step("<action>Right</action>").info["cell"] == moves(2)[0, 3]


def test_fixed_boards_of_both_splits_share_a_canvas(tmp_path):
    lines = [{"rows": ROWS[0], "split": "train"}, {"rows": ROWS[2], "split": "validation"}]
    t = task(boards=file_of(tmp_path, lines), train_examples=1, validation_examples=1, prompts_per_step=1)
    assert [i.data["rows"] for i in (*t.train(), *t.validation())] == [ROWS[0], ROWS[2]]
    assert t.boards("train").side == t.boards("validation").side == 4
    only = file_of(tmp_path, [lines[0]])
    t = task(boards=only, train_examples=1, prompts_per_step=1, sizes=[2], max_path=2, validation_examples=5)
    assert tuple(ROWS[0]) not in {tuple(i.data["rows"]) for i in t.validation()}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"rows": ["SX", "FG"]}, {"rows": ROWS[1]}], r"boards\.jsonl:1: unknown cell 'X'"),
        ([{"rows": ROWS[0]}, {"board": 1}], r"boards\.jsonl:2: `rows` must be a list"),
        (
            [{"rows": ROWS[0], "split": "test"}],
            r"boards\.jsonl:1: `split` is 'test'; use train or validation",
        ),
        ([{"rows": ROWS[0]}, {"rows": ROWS[0]}], r"boards\.jsonl:2: the same board as .*boards\.jsonl:1"),
        ([{"rows": ROWS[1]}], r"1 validation boards, but task\.validation_examples=2; lower it"),
        ([], r"boards\.jsonl: empty; set task\.boards"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        task(boards=file_of(tmp_path, lines), validation_examples=2).validation()


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file; set task\.boards"):
        task(boards=str(tmp_path / "gone.jsonl")).train()
    with pytest.raises(DataError, match=r"boards\.csv: not a \.jsonl file; set task\.boards"):
        task(boards=str(tmp_path / "boards.csv")).train()
