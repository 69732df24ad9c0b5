"""The splits, and the sources that they need."""

from collections import Counter

import pytest

from racelab.experiments.errors import ConfigError, MissingDependencyError, UnreachableError
from racelab.experiments.fsio import read_json
from racelab.experiments.tasks.scienceworld import installation as machine
from racelab.experiments.tasks.scienceworld import splits
from racelab.experiments.tasks.scienceworld.task import ScienceWorld


@pytest.fixture(scope="module")
def names(installation):
    return splits.task_names(installation.tasks_file)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache") / "scienceworld" / "variations.json"


@pytest.fixture(scope="module")
def variations(names, start, cache):
    return splits.read_variations(names, cache, start)


def per_task(instances):
    return Counter(instance.data["task"] for instance in instances)


def test_the_sizes_of_table_2_come_from_half_of_each_tasks_variations(make_config, variations):
    config = make_config()
    train = splits.instances(config, variations, "train")
    validation = splits.instances(config, variations, "validation")
    assert (len(train), len(validation)) == (1796, 887)
    assert len(variations) == 30
    assert per_task(train) == {task: len(numbers) // 2 for task, (numbers, _) in variations.items()}
    assert per_task(validation) == {task: len(numbers) // 2 for task, (_, numbers) in variations.items()}
    for side, instances in enumerate((train, validation)):
        assert all(i.data["variation"] in variations[i.data["task"]][side] for i in instances)
    ids = [i.instance_id for i in (*train, *validation)]
    assert len(set(ids)) == len(ids)


def test_the_same_seed_gives_the_same_split(make_config, variations):
    def ids(**changes):
        return [i.instance_id for i in splits.instances(make_config(**changes), variations, "train")]

    assert ids() == ids()
    assert ids() != ids(data_seed=1)
    assert set(ids()) != set(ids(data_seed=1))
    assert ids(train_examples=100) == ids()[:100]


def test_the_first_examples_are_a_mixture(make_config, variations):
    first = splits.instances(make_config(validation_examples=64), variations, "validation")
    assert len(per_task(first)) > 10


def test_a_share_of_one_takes_all(make_config, variations):
    config = make_config(variation_share=1.0, train_examples=1)
    every = {(task, i) for task, (numbers, _) in variations.items() for i in numbers}
    all_of_them = splits.instances(
        config.model_copy(update={"train_examples": len(every)}), variations, "train"
    )
    assert {(i.data["task"], i.data["variation"]) for i in all_of_them} == every


def test_variations_are_asked_once(names, variations, cache):
    def never():
        raise AssertionError("asked again")

    assert splits.read_variations(names, cache, never) == variations
    assert set(read_json(cache)) == set(names)


@pytest.mark.parametrize("text", ["", "[]", '{"boil": 3}', '{"boil": [[0], [1]]}'])
def test_a_cache_that_cannot_be_read_is_asked_for_again(names, tmp_path, text):
    kept = tmp_path / "variations.json"
    kept.write_text(text)

    class Asked(Exception):
        pass

    def ask():
        raise Asked

    with pytest.raises(Asked):
        splits.read_variations(names, kept, ask)


def test_the_list_of_17_has_each_topic_on_both_sides(make_config, names, installation, variations):
    topics = {entry["task_name"]: entry["topic"] for entry in read_json(installation.tasks_file)}
    trained = make_config().train_tasks
    assert len(set(trained)) == 17
    assert len(names) == 30
    assert {topics[name] for name in trained} == set(topics.values())
    assert {topics[name] for name in set(names) - set(trained)} == set(topics.values())
    config = make_config(split="tasks", train_examples=10, validation_examples=10)
    assert splits._tasks(config, variations, "train") == set(trained)
    assert splits._tasks(config, variations, "validation") == set(names) - set(trained)
    assert set(per_task(splits.instances(config, variations, "train"))) <= set(trained)
    assert not set(per_task(splits.instances(config, variations, "validation"))) & set(trained)


def test_more_examples_than_there_are(make_config, variations):
    with pytest.raises(
        ConfigError, match=r"task.train_examples=1797, but .* has 1796; set task.train_examples=1796"
    ):
        splits.instances(make_config(train_examples=1797), variations, "train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_tasks": ("boill",)}, "'boill', which is no ScienceWorld task; near: boil"),
        ({"train_tasks": ("find-anmal", "boil")}, "near: find-animal"),
        ({"train_tasks": ("boil", "boil")}, "twice"),
        ({"train_tasks": (), "split": "tasks"}, "trains on 0 of 30 tasks"),
        ({"simplification": "easi"}, "'easi', which ScienceWorld does not know; near: easy"),
        ({"simplification": "openDoors,teleport"}, "near: teleportAction"),
    ],
)
def test_names_in_the_config(make_config, names, changes, message):
    with pytest.raises(ConfigError, match=message):
        splits.check_names(make_config(**changes), names)


def test_good_names(make_config, names):
    for simplification in ("", "easy", "openDoors,teleportAction"):
        splits.check_names(make_config(simplification=simplification), names)


def test_without_the_package(make_config, monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'racelab\[tasks\]'"):
        ScienceWorld(make_config())


def test_without_java(make_config, monkeypatch, tmp_path, installation):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UnreachableError, match="apt-get install default-jre-headless") as caught:
        ScienceWorld(make_config())
    assert caught.value.exit_code == 4


def test_java_home_comes_first(monkeypatch, tmp_path, installation):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert machine.find_installation().java == str(java)
