"""What a dry run finds missing of an RLDS run: the files that its task names, in the words of the run itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from racelab.cli.train import train
from racelab.configs.compose import compose
from racelab.configs.schema_rlds import RldsRunConfig
from racelab.experiments.errors import DataError, RacelabError
from racelab.experiments.tasks.registry import make_task
from racelab.sweeps.cells import Spec, make_cells
from racelab.sweeps.inputs import check_inputs, check_task


def config(*words: str) -> RldsRunConfig:
    found = compose([*words, "tracking=none"]).config
    assert isinstance(found, RldsRunConfig)
    return found


def says(call: object, *arguments: object) -> str:
    """The message that a call fails with."""
    assert callable(call)
    with pytest.raises(RacelabError) as error:
        call(*arguments)
    return str(error.value)


HOTPOT, LAKE, DEEP = "task=hotpotqa", "task=frozenlake", "task=deepresearch"
PASSAGE = '{"id": "1", "contents": "\\"A\\"\\ntext"}\n'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((HOTPOT, "task.data=gone.jsonl"), "gone.jsonl: no such file; set task.data to a file that exists"),
        (
            (HOTPOT, "task.data=gone.parquet"),
            "gone.parquet: no such file; set task.data to a file that exists",
        ),
        (
            (HOTPOT, "task.retriever.corpus=gone.jsonl", "task.retriever.url="),
            "gone.jsonl: cannot be read (No such file or directory); give a corpus that can",
        ),
        ((HOTPOT, "task.retriever.corpus=.", "task.retriever.url="), "cannot be read (Is a directory)"),
        ((LAKE, "task.boards=gone.jsonl"), "gone.jsonl: no such file; set task.boards to a file that exists"),
        ((LAKE, "task.boards=gone.txt"), "gone.txt: not a .jsonl file; set task.boards to one"),
        ((DEEP, "task.data=gone.jsonl"), "gone.jsonl: cannot be read (No such file or directory)"),
        ((DEEP, "task.data=gone"), "task.data=gone: take package, hub, or a file that ends in .jsonl"),
    ],
)
def test_a_missing_file_is_named_as_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    c = config(*words)
    said = says(check_task, c)
    assert message in said
    if words[0] != DEEP:  # whose packages a run asks for first

        def play() -> None:
            task = make_task(c.task)
            task.train()

        assert says(play) == said


def test_a_dry_run_of_one_run_or_of_a_sweep_fails_on_it(tmp_path: Path) -> None:
    words = [HOTPOT, f"task.data={tmp_path}/gone.jsonl"]
    with pytest.raises(DataError, match=r"no such file; set task\.data"):
        train(words, None, None, 1, False, True, (), False)
    cells = make_cells([Spec("mine", 3, tuple(words))])
    with pytest.raises(DataError, match=r"cell mine \(seed 3\): .*gone\.jsonl: no such file"):
        check_inputs(cells, tmp_path, dry_run=True)


def test_what_is_there_or_elsewhere_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.jsonl").write_text(PASSAGE)
    (tmp_path / "q.jsonl").write_text("not read\n")
    for words in (
        (HOTPOT,),
        (HOTPOT, "preset=paper"),
        (HOTPOT, "task.data='~/q.jsonl'", "task.retriever.corpus='~/c.jsonl'"),
        (HOTPOT, "task.retriever.url=http://127.0.0.1:9/retrieve", "task.retriever.corpus=gone.jsonl"),
        (LAKE,),
        (DEEP,),
        (DEEP, "preset=paper"),
    ):
        check_task(config(*words))


def test_a_dry_run_says_what_servers_lack_and_asks_none(tmp_path: Path) -> None:
    words = ("judge=api", "tracking=none", "judge.model=j")
    there = make_cells([Spec("a", 3, (*words, "judge.base_url=http://127.0.0.1:9/v1"))])
    assert check_inputs(there, tmp_path, dry_run=True) == []
    (line,) = check_inputs(make_cells([Spec("mine", 3, words)]), tmp_path, dry_run=True)
    assert line.startswith("cell mine: judge.base_url is empty")
