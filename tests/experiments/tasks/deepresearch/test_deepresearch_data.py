"""The known rubric schemas, the five sources with their caps, local files, the packaged prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.tasks.deepresearch.data import SOURCES, Pool, hub_rows, instance, load_pool, split
from racelab.experiments.tasks.deepresearch.rubric import RubricError, normalised

RAR = [
    {"title": "Key Fact", "description": "Essential Criteria: names the fact.", "weight": 5},
    {"title": "No Guess", "description": "Pitfall Criteria: guesses.", "weight": -1},
]


def tulu(source: str, query: str) -> dict[str, Any]:
    """A row as rl-research/dr-tulu-rl-data has it."""
    truth = {"query": query, "rubrics": [{"description": "Covers it.", "title": "Cover", "weight": 1.0}]}
    return {
        "source": source,
        "question_type": "long_form",
        "messages": [{"content": query, "role": "user"}],
        "ground_truth": json.dumps(truth),
        "dataset": "general_rubric",
    }


def rar(question: str) -> dict[str, Any]:
    """A row as the RaR sets have it."""
    return {"question": question, "reference_answer": "secret", "rubric": RAR, "rubric_count": 2}


def hub(name: str) -> Iterable[Mapping[str, Any]]:
    if name.startswith("rl-research"):
        marks = ("rl_rag_train_os_x", "rl_rag_train_sqa_x", "rl_rag_train_sa_x")
        return [tulu(mark, f"{mark} {n}?") for mark in marks for n in range(2600)]
    return [rar(f"{name} {n}?") for n in range(2000)]


def test_the_five_sources_with_their_caps() -> None:
    """2 k, 2 k, 5 k (2.6 k there), 1.5 k, 0.5 k."""
    pool = load_pool("hub", hub)
    names = [i.data["source"] for i in pool.instances]
    assert {s.name: names.count(s.name) for s in SOURCES} == {
        "openscholar": 2000,
        "scholarqa-cs2": 2000,
        "searcharena": 2600,
        "rar-science": 1500,
        "rar-medicine": 500,
    }
    assert len({i.instance_id for i in pool.instances}) == len(pool.instances)
    one = next(i for i in pool.instances if i.data["source"] == "rar-science")
    assert one.data["rubric"] == [
        {"id": "c1", "title": "Key Fact", "description": RAR[0]["description"], "weight": 5.0, "leak_safe_hint": ""},
        {"id": "c2", "title": "No Guess", "description": RAR[1]["description"], "weight": -1.0, "leak_safe_hint": ""},
    ]  # fmt: skip
    assert "secret" not in json.dumps(dict(one.data))


def test_a_slice_that_is_not_there_is_an_error() -> None:
    with pytest.raises(DataError, match="openscholar"):
        load_pool("hub", lambda name: [rar("x?")])


def test_a_local_file_may_have_any_of_the_schemas(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "Ours?", "rubric": [{"description": "x is said", "leak_safe_hint": "h"}]},
        rar("RaR?"),
        tulu("s", "Tulu?"),
        {"question": "As text?", "rubric": json.dumps(RAR)},
        {"question": "Old?", "rubric": {"rubrics": [{"Ingredient": "names x", "Handle": "X", "points": 2}]}},
        {"question": "RaR?", "rubric": RAR},
        {"question": "No rubric?"},
        {"rubric": RAR},
        {"question": "Only pitfalls?", "rubric": [RAR[1]]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    pool = load_pool(str(file))
    assert [i.data["prompt"] for i in pool.instances] == ["Ours?", "RaR?", "Tulu?", "As text?", "Old?"]
    assert pool.instances[0].instance_id == "prompts/a"
    assert pool.instances[0].data["rubric"][0]["leak_safe_hint"] == "h"
    assert pool.instances[4].data["rubric"][0]["title"] == "X"
    assert pool.instances[4].data["rubric"][0]["weight"] == 2.0
    assert pool.left_out == {
        "a question or id twice": 1,
        "no list of criteria": 1,
        "no question": 1,
        "no weight is above 0": 1,
    }


@pytest.mark.parametrize(
    "raw", [None, 3, "{", [], [{"title": "x"}], [{"description": "x", "weight": "heavy"}]]
)
def test_rubrics_that_cannot_be_used(raw: object) -> None:
    with pytest.raises(RubricError):
        normalised(raw)


def test_ids_that_occur_twice_are_numbered_anew() -> None:
    items = normalised([{"id": "a", "description": "x"}, {"id": "a", "description": "y"}])
    assert [i.id for i in items] == ["c1", "c2"]
    assert normalised([i.json() for i in items]) == items


def test_errors_name_the_mend(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="package, hub"):
        load_pool("prompts.csv")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="no usable row"):
        load_pool(str(tmp_path / "empty.jsonl"))


def test_the_package_splits_the_same_way_every_time_and_validation_does_not_move() -> None:
    pool = load_pool("package")
    assert len(pool.instances) == 10
    assert pool.left_out == {}
    train, validation = split(pool, train=6, validation=2, seed=0)
    more, same = split(pool, train=8, validation=2, seed=0)
    assert validation == same
    assert train == more[:6]
    assert not {i.instance_id for i in train} & {i.instance_id for i in validation}
    with pytest.raises(ConfigError, match="10 examples"):
        split(pool, train=9, validation=2, seed=0)
    assert split(Pool(()), train=0, validation=0, seed=0) == ([], [])


@pytest.mark.slow
def test_the_hub_reader_reads_what_datasets_reads(tmp_path: Path) -> None:
    """`load_dataset` takes a folder as it takes a name of the hub."""
    rows = [{**rar(f"{n}?"), "reference_answer": None} for n in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = list(hub_rows(str(tmp_path)))
    assert [set(row) for row in found] == [{"question", "rubric"}] * 3
    assert instance("rar-science", found[0]).data["rubric"][1]["weight"] == -1.0
    with pytest.raises(DataError, match=r"task\.data"):
        hub_rows(str(tmp_path / "nothing"))
