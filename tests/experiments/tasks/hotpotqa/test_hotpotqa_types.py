"""Questions by their type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from racelab.configs.compose import compose
from racelab.configs.schema_rlds import HotpotQaTask
from racelab.experiments.errors import ConfigError
from racelab.experiments.tasks.hotpotqa.data import load


def config(*words: str) -> HotpotQaTask:
    task = compose(["task=hotpotqa", *words]).config.task
    assert isinstance(task, HotpotQaTask)
    return task


def test_only_questions_of_the_types_asked_for(tmp_path: Path) -> None:
    rows = [
        {"id": str(k), "question": f"q{k}?", "answer": "Orle", "type": t}
        for k, t in enumerate(["bridge", "comparison"] * 3)
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        f"task.data={file}",
        "task.retriever.url=http://127.0.0.1:9/retrieve",
        "task.validation_examples=1",
    ]
    found = load(config(*words, "task.question_types=[comparison]", "task.train_examples=2"))
    assert {x.instance_id for x in (*found.train, *found.validation)} == {"1", "3", "5"}
    found = load(config(*words, "task.question_types=[]", "task.train_examples=5"))
    assert len(found.train) + len(found.validation) == 6
    with pytest.raises(ConfigError, match=r"4 questions.* has 3"):
        load(config(*words, "task.question_types=[bridge]", "task.train_examples=3"))
