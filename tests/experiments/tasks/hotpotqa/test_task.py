"""Data in every form it comes in, slices, packaged questions, and the task as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from racelab.configs.schema_rlds import HotpotQaTask
from racelab.experiments.errors import ConfigError, DataError, MissingDependencyError, UnreachableError
from racelab.experiments.models.retrieval import read_corpus
from racelab.experiments.ports import Task
from racelab.experiments.tasks.hotpotqa.data import corpus_file, load, read_rows, to_instance
from racelab.experiments.tasks.hotpotqa.task import HotpotQa
from racelab.experiments.tasks.hotpotqa.taxonomy import SUBTASKS, SYSTEM_PROMPT

OFFICIAL = {
    "_id": "5a7a", "question": "Who?", "answer": "Ann", "type": "bridge", "level": "hard",
    "supporting_facts": [["A", 0], ["B", 2], ["A", 1]], "context": [["A", ["One.", " Two."]], ["B", ["Three."]]],
}  # fmt: skip
HUB = {
    "id": "5a7a", "question": "Who?", "answer": "Ann", "type": "bridge", "level": "hard",
    "supporting_facts": {"title": ["A", "B", "A"], "sent_id": [0, 2, 1]},
    "context": {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]},
}  # fmt: skip


def config(**changes: Any) -> HotpotQaTask:
    """The packaged task, small."""
    retriever: Mapping[str, Any] = {
        "url": "", "corpus": "package", "engine": "bm25", "encoder": "minilm", "timeout_s": 5, "max_retries": 1,
        "concurrency": 4,
    }  # fmt: skip
    base: dict[str, Any] = {
        "name": "hotpotqa", "data": "package", "train_examples": 24, "validation_examples": 8, "data_seed": 0,
        "prompts_per_step": 2, "group_sizes": {"scalar": 4, "reflect": 3}, "max_turns": 3,
        "max_prompt_tokens": 1024, "max_response_tokens": 768, "max_turn_tokens": 48, "temperature": 0.7,
        "top_p": 1.0, "demonstration": False, "question_types": [], "default_top_k": 2, "max_top_k": 50,
        "result_chars": 240, "total_chars": 8000, "f1_threshold": 0.3, "official_yes_no": False,
        "retriever": {**retriever, **changes.pop("retriever", {})},
    }  # fmt: skip
    return HotpotQaTask.model_validate({**base, **changes})


def rows(n: int) -> list[dict[str, Any]]:
    return [{"_id": f"q{i}", "question": f"Question {i}?", "answer": f"answer {i}"} for i in range(n)]


def write(path: Path, value: Any) -> str:
    """A .json list, or a .jsonl of its items."""
    lines = "\n".join(map(json.dumps, value)) if path.suffix == ".jsonl" else json.dumps(value)
    path.write_text(lines, encoding="utf-8")
    return str(path)


def test_both_schemas_give_the_same_instance() -> None:
    wanted = {"question": "Who?", "answers": ["Ann"], "titles": ["A", "B"]}
    for row in (OFFICIAL, HUB):
        found = to_instance(row, "f:1")
        assert (found.task, found.instance_id, dict(found.data)) == ("hotpotqa", "5a7a", wanted)


def test_json_jsonl_and_parquet_are_read_alike(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([HUB]), tmp_path / "h.parquet")
    write(tmp_path / "o.json", [OFFICIAL])
    write(tmp_path / "h.jsonl", [HUB])
    found = [
        [to_instance(row, where) for where, row in read_rows(tmp_path / name)]
        for name in ("h.parquet", "o.json", "h.jsonl")
    ]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 1


def test_several_right_answers_and_no_id() -> None:
    found = to_instance({"question": "Who?", "golden_answers": ["Ann", "A. B."]}, "f:1")
    assert found.data["answers"] == ["Ann", "A. B."]
    assert found.instance_id == to_instance({"question": " Who? ", "answer": "x"}, "f:2").instance_id


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"answer": "x"}, "'question' is missing"),
        ({"question": " ", "answer": "x"}, "'question' is blank"),
        ({"question": "q"}, "'answer' is missing"),
        ({"question": "q", "answer": []}, "'answer' is missing"),
        ({"question": "q", "answer": [1]}, "'answer' is missing"),
        ({"question": "q", "answer": "a", "id": 1.5}, "'id' is no text"),
        ({"question": "q", "answer": "a", "supporting_facts": "A"}, "'supporting_facts' is neither"),
        ({"question": "q", "answer": "a", "supporting_facts": [[]]}, "'supporting_facts' is neither"),
    ],
)
def test_a_bad_row_names_its_place_and_field(row: Mapping[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=rf"^f:7: .*{says}"):
        to_instance(row, "f:7")


def test_bad_files_name_themselves(tmp_path: Path) -> None:
    for name, text, says in (
        ("a.json", "{}", "expected a JSON list"),
        ("b.json", "[1]", "row 1: expected an object"),
        ("c.json", "[", "malformed JSON"),
        ("d.jsonl", '{"question": "q"\n', "d.jsonl:1: malformed JSON"),
        ("e.parquet", "no parquet", "not a readable parquet file"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=says):
            list(read_rows(tmp_path / name))
    with pytest.raises(DataError, match=r"no such file; set task\.data"):
        read_rows(tmp_path / "none.json")


def test_slices_are_fixed_disjoint_and_seeded(tmp_path: Path) -> None:
    data = write(tmp_path / "q.jsonl", rows(50))
    found, again = (load(config(data=data)) for _ in range(2))
    assert found == again
    assert (len(found.train), len(found.validation), found.dropped) == (24, 8, 0)
    assert not {i.instance_id for i in found.train} & {i.instance_id for i in found.validation}
    more = load(config(data=data, train_examples=40))
    assert more.validation == found.validation
    assert more.train[:24] == found.train
    assert load(config(data=data, data_seed=1)).validation != found.validation


def test_repeated_and_unanswerable_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    extra = [
        {"_id": "x", "question": "question  3?", "answer": "other"},
        {"_id": "y", "question": "Which band?", "answer": "The The"},
    ]
    found = load(config(data=write(tmp_path / "q.jsonl", [*rows(32), *extra])))
    assert found.dropped == 2
    assert {i.instance_id for i in (*found.train, *found.validation)} == {f"q{i}" for i in range(32)}


def test_too_few_questions_names_keys_and_mend(tmp_path: Path) -> None:
    data = write(tmp_path / "q.json", rows(31))
    with pytest.raises(
        ConfigError, match=r"task\.train_examples and task\.validation_examples ask for 32 .* has 31"
    ):
        load(config(data=data))


def test_an_id_twice_names_both_lines(tmp_path: Path) -> None:
    twice = [*rows(32), {"_id": "q3", "question": "Another?", "answer": "b"}]
    with pytest.raises(DataError, match=r"q\.jsonl:33: id 'q3' is also that of .*q\.jsonl:4"):
        load(config(data=write(tmp_path / "q.jsonl", twice)))


def test_what_is_no_data_is_said() -> None:
    with pytest.raises(ConfigError, match=r"task\.data=nonsense: no such data"):
        load(config(data="nonsense"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set as the hub has it: a configuration `distractor` with two splits."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hotpot_qa"
    (folder / "distractor").mkdir(parents=True)
    for split, first, last in (("train", 0, 40), ("validation", 38, 50)):
        found = [{**HUB, "id": f"{split}{i}", "question": f"Question {i}?"} for i in range(first, last)]
        pq.write_table(pa.Table.from_pylist(found), folder / "distractor" / f"{split}.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: distractor\n  data_files:\n"
        "  - split: train\n    path: distractor/train.parquet\n"
        "  - split: validation\n    path: distractor/validation.parquet\n---\n"
    )
    return folder


def test_a_hub_data_set_keeps_its_splits(hub: Path) -> None:
    found = load(config(data=str(hub), validation_examples=12))
    assert {i.instance_id.rstrip("0123456789") for i in found.train} == {"train"}
    assert {i.instance_id for i in found.validation} == {f"validation{i}" for i in range(38, 50)}
    assert found.dropped == 2  # questions 38 and 39 stand in both splits
    assert found.train[0].data["titles"] == ["A", "B"]


def test_what_the_hub_lacks_is_named(hub: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.validation_examples ask for 13 .* has 12"):
        load(config(data=str(hub), validation_examples=13))
    with pytest.raises(DataError, match="configuration 'fullwiki'"):
        load(config(data=f"{hub}:fullwiki"))


def test_a_hub_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def away(*_: object, **__: object) -> object:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", away)
    with pytest.raises(UnreachableError, match=r"the hub does not answer \(no route\); download a file"):
        load(config(data="hotpotqa/hotpot_qa"))


def test_without_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"racelab\[hub\]"):
        load(config(data="hotpotqa/hotpot_qa"))


def test_packaged_questions_and_passages_fit_together() -> None:
    found = load(config())
    passages = {p.title: p for p in read_corpus(corpus_file("package"))}
    assert len(passages) >= 80
    everything = load(config(train_examples=44))
    instances = [*everything.train, *everything.validation]
    assert len(instances) == 52
    assert {"yes", "no"} <= {i.data["answers"][0] for i in instances}
    for instance in instances:
        titles, [answer] = instance.data["titles"], instance.data["answers"]
        assert len(titles) == 2
        assert all(title in passages for title in titles)
        text = " ".join(passages[title].contents for title in titles).lower()
        bare = answer.lower().removeprefix("as ").removeprefix("a ").removeprefix("the ")
        assert answer in ("yes", "no") or bare in text, instance
    assert found.dropped == 0


def test_the_task_as_a_whole() -> None:
    task = HotpotQa(config())
    assert isinstance(task, Task)
    assert (task.name, task.stops, task.concurrency) == ("hotpotqa", ("</tool_call>",), None)
    assert (len(task.train()), len(task.validation())) == (24, 8)
    parameters = task.tools[0]["function"]["parameters"]
    assert parameters["properties"]["top_k"] | {"description": ""} == {
        "type": "integer", "minimum": 1, "maximum": 50, "default": 2, "description": "",
    }  # fmt: skip
    assert parameters["required"] == ["query"]
    instance = task.train()[0]
    environment = task.open(instance)
    assert environment.reset().text == instance.data["question"]
    query = json.dumps({"name": "search", "arguments": {"query": instance.data["titles"][0]}})
    assert "[1]" in environment.step(f"<tool_call>{query}</tool_call>").text
    counted = task.metrics()
    assert counted["retriever_calls"] == 1
    assert counted["retriever_ms"] > 0
    assert task.metrics() == {"retriever_calls": 0, "retriever_failed": 0, "retriever_retried": 0}
    assert json.loads(json.dumps(task.describe()))["retriever"]["passages"] == 94
    task.close()
    task.close()


def test_the_system_prompt_takes_an_addition() -> None:
    task = HotpotQa(config())
    assert task.system_prompt() == SYSTEM_PROMPT
    assert task.system_prompt("Search first.") == f"{SYSTEM_PROMPT}\n\nSearch first."
    assert "<|im_end|>" not in task.system_prompt("x<|im_end|>")


def test_the_published_taxonomy() -> None:
    assert [(s.name, s.weight) for s in SUBTASKS] == [
        ("search_planning", 0.25),
        ("evidence_extraction", 0.30),
        ("search_iteration", 0.30),
        ("answer_grounding", 0.15),
    ]
    assert sum(s.weight for s in SUBTASKS) == pytest.approx(1)


def test_a_task_that_cannot_work_is_refused_before_it_starts(tmp_path: Path) -> None:
    data = write(tmp_path / "q.jsonl", rows(40))
    with pytest.raises(ConfigError, match=r"set task\.retriever\.url, or task\.retriever\.corpus"):
        HotpotQa(config(data=data))
    with pytest.raises(DataError, match=r"missing\.json: no such file; set task\.data"):
        HotpotQa(config(data=str(tmp_path / "missing.json")))
    with pytest.raises(ConfigError, match=r"task\.default_top_k=60 is above task\.max_top_k=50"):
        HotpotQa(config(default_top_k=60))
    with pytest.raises(ConfigError, match="is no http address"):
        HotpotQa(config(retriever={"url": "localhost:8000"}))
    with pytest.raises(UnreachableError, match="racelab serve retriever --corpus FILE"):
        HotpotQa(config(retriever={"url": "http://127.0.0.1:9/retrieve"}))
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        HotpotQa(config(retriever={"corpus": str(tmp_path / "none.jsonl")}))
