"""What names a cell, how its config is composed, and its folder when many want it at once."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.configs.compose import compose
from racelab.configs.schema import Config
from racelab.experiments.errors import ConfigError
from racelab.experiments.runfolder import RunExistsError, RunFolder
from racelab.sweeps import composing
from racelab.sweeps.cells import (
    Spec,
    config_hash,
    ids_hash,
    make_cells,
    newest_name,
    numbered,
    open_cell,
    slug,
)
from racelab.sweeps.composing import compose_cells, last_words


def hash_of(*words: str) -> str:
    return config_hash(compose(["preset=embedded", *words]).config)


def test_what_does_not_change_the_result_does_not_change_the_hash() -> None:
    plain = hash_of()
    for word in ("run.name=other", "run.root=/elsewhere", "tracking=none", "checkpoint.every=3"):
        assert hash_of(word) == plain, word
    for word in (
        "run.seed=1",
        "run.policy_updates=9",
        "method.group_size=5",
        "learner.lr=0.5",
        "data.limit=12",
    ):
        assert hash_of(word) != plain, word


def test_a_data_file_counts_with_its_content_however_its_path_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same relative path in two folders is two data sets, and an edited file is another one."""
    for folder, text in (("a", "1\n"), ("b", "2\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jsonl").write_text(text)
    words = ("data=file", "data.path=x.jsonl")
    monkeypatch.chdir(tmp_path / "a")
    first = hash_of(*words)
    assert first == hash_of("data=file", f"data.path={tmp_path}/b/../a/x.jsonl")
    monkeypatch.chdir(tmp_path / "b")
    second = hash_of(*words)
    (tmp_path / "b" / "x.jsonl").write_text("3\n")
    assert len({first, second, hash_of(*words)}) == 3


@pytest.mark.parametrize("key", ["model.source", "judge.source", "encoder.source"])
def test_a_model_folder_counts_with_its_place_and_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    found = set()
    for folder in ("a", "b"):
        (tmp_path / folder / "m").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / folder)
        found.add(hash_of(f"{key}=./m"))
    (tmp_path / "b" / "m" / "model.safetensors").write_bytes(b"1")
    found.add(hash_of(f"{key}=./m"))
    assert len(found) == 3
    assert hash_of(f"{key}={tmp_path}/b/m") in found


def test_preference_pairs_count_with_their_content(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    words = ("method=rubric-arm", f"method.pairs={file}")
    found = {hash_of(*words)}
    for text in ("1\n", "2\n"):
        file.write_text(text)
        found.add(hash_of(*words))
    assert len(found) == 3


def test_a_word_of_the_schema_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = hash_of("judge.source=policy")
    (tmp_path / "policy").mkdir()
    assert hash_of("judge.source=policy") == plain


def test_equal_configs_have_one_id_however_they_are_written() -> None:
    (a,) = make_cells([Spec("x", 1, ("preset=embedded", "learner.lr=1e-4"))])
    (b,) = make_cells([Spec("x", None, ("learner.lr=0.0001", "run.seed=0", "run.seed=1"))])
    assert a.cell_id == b.cell_id
    assert a.cell_id == f"x-s1-{config_hash(a.config)}"


def test_two_cells_that_are_the_same_run_are_an_error_that_names_both() -> None:
    specs = [Spec("a", 0, ("learner.lr=1e-4",)), Spec("b", 0, ("learner.lr=0.0001",))]
    with pytest.raises(ConfigError, match=r"cells a \(seed 0\) and b \(seed 0\) are the same run"):
        make_cells(specs)
    with pytest.raises(ConfigError, match="no cells"):
        make_cells([])


def test_only_seeds_of_the_same_words_share_a_label() -> None:
    """Long labels are cut at 60 characters, and `a b` and `a-b` are written alike."""
    long = "x" * 70
    specs = [
        Spec(label, seed, (f"learner.lr={rate}",))
        for label, rate in ((f"{long}1", 0.1), (f"{long}2", 0.2), ("a b", 0.3), ("a-b", 0.4), ("a-b-2", 0.5))
        for seed in (0, 1)
    ]
    cells = make_cells(specs)
    assert [cell.label for cell in cells[::2]] == [f"{long}1", f"{'x' * 58}-2", "a b", "a-b-2", "a-b-2-2"]
    assert [cell.label for cell in cells[1::2]] == [cell.label for cell in cells[::2]]
    assert len({cell.cell_id.rpartition("-")[0] for cell in cells}) == 10


def test_of_a_key_that_stands_twice_the_last_word_counts() -> None:
    assert last_words(["a=1", "b=2", "a=3"]) == ["b=2", "a=3"]


@given(st.text(max_size=150))
def test_a_slug_is_always_a_name_that_a_folder_may_have(label: str) -> None:
    from racelab.experiments.runfolder import check_name

    assert check_name(f"{slug(label)}-s0-0123456789-2")


WORDS = {
    "learner.lr": ["1e-4", "0.5", ".1"],
    "method.group_size": ["2", "6"],
    "method.phase.fixed": ["[50,50]", "[1,2]"],
    "method.phase.tau_sat": ["0.2", "0.9"],  # 0.2 needs the range of some presets
    "method.rubric.on_parse_failure": ["nan", "raw_text"],
    "method.trqc.q_target": ["0.3"],  # a variant's value may refer to what stands beside it
    "method.rubric_reward.invalid_reward": ["null", "-0.5"],
    "run.name": ["''", "'a.b'", "plain"],
    "validation.temperatures": ["[1.0,0.5]"],
    "judge": ["likelihood", "json"],
    "judge.calibration_prompts": ["3"],  # a key of one judge only
    "preset": ["sane", "embedded", "paper"],
    "variant": ["full", "static-thresholds", "low-quarantine"],
    "data": ["file"],
    "data.path": ["x.jsonl"],  # without it the choice above is not whole
}


def test_cells_of_several_presets_and_variants_compose_as_hydra_would() -> None:
    cells = [
        [
            f"preset={preset}",
            f"variant={variant}",
            "method.rubric.on_parse_failure=nan",
            f"run.seed={seed}",
            *more,
        ]
        for preset, variant, seed, more in (
            ("embedded", "static-thresholds", 1, ["method.trqc.q_target=0.3"]),
            ("embedded", "low-quarantine", 2, ["method.trqc.q_target=0.3", "run.name='a.b'"]),
            ("paper", "low-quarantine", 2, ["learner.lr=.1", "method.phase.fixed=[1,2]"]),
            ("paper", "low-quarantine", 3, ["judge=json", "judge.high=5"]),
        )
    ]
    assert compose_cells(cells) == [compose(words).config for words in cells]


@pytest.mark.slow
@given(
    st.lists(
        st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in WORDS.items()}),
        min_size=2,
        max_size=4,
    )
)
@settings(max_examples=12, deadline=None)
def test_cells_compose_as_hydra_would_one_by_one(cells: list[dict[str, str]]) -> None:
    wordlists = [[f"{key}={value}" for key, value in cell.items()] for cell in cells]
    single: list[Config] = []
    problem = ""
    for words in wordlists:
        try:
            single.append(compose(words).config)
        except ConfigError as error:
            problem = str(error)
            break
    if not problem:
        assert compose_cells(wordlists) == single
        return
    with pytest.raises(ConfigError) as caught:
        compose_cells(wordlists)
    assert str(caught.value) == problem


def test_a_key_that_a_yaml_file_refers_to_is_left_to_hydra() -> None:
    """low-quarantine takes its target from method.sensitivity; putting that key in by hand would miss the target."""
    key = "method.sensitivity.low_quarantine.q_target"
    cells = [["variant=low-quarantine", f"{key}={value}"] for value in (0.11, 0.12)]
    configs = compose_cells(cells)
    assert configs == [compose(words).config for words in cells]
    assert [config.method.trqc.q_target for config in configs] == [0.11, 0.12]  # type: ignore[union-attr]


def test_a_reference_from_a_users_file_counts_too(tmp_path: Path) -> None:
    (tmp_path / "preset").mkdir()
    text = "# @package _global_\ndefaults: [embedded]\nrun: {samples_every: '${run.policy_updates}'}\n"
    (tmp_path / "preset" / "mine.yaml").write_text(text)
    cells = [["preset=mine", f"run.policy_updates={n}"] for n in (3, 4)]
    assert [config.run.samples_every for config in compose_cells(cells, [tmp_path])] == [3, 4]


def test_a_thousand_cells_compose_in_seconds_with_hydra_called_for_each_value_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """10 x 10 x 10 cells: the base, and ten rounds of one value per axis: 11 compositions."""
    calls = []
    monkeypatch.setattr(composing, "compose", lambda *words: (calls.append(words), compose(*words))[1])
    specs = [
        Spec(f"{a}-{b}-{c}", None, (f"learner.lr={a + 1}e-5", f"method.group_size={b + 2}", f"run.seed={c}"))
        for a in range(10)
        for b in range(10)
        for c in range(10)
    ]
    started = time.monotonic()
    cells = make_cells(specs)
    assert len({cell.cell_id for cell in cells}) == 1000
    assert len(calls) == 11
    assert time.monotonic() - started < 20  # 1.3 s on an idle core


@given(
    st.one_of(
        st.integers(-(10**17), 10**17).map(str),
        st.from_regex(r"-?(0|[1-9][0-9]{0,5})\.[0-9]{1,8}(e-?[0-9]{1,2})?", fullmatch=True),
    )
)
@settings(max_examples=200, deadline=None)
def test_a_plain_number_is_what_hydra_reads(text: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    found = composing._number(text)
    read = OverridesParser.create().parse_override(f"a={text}").value()
    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize(
    "text",
    [
        "01",
        "1_000",
        "1e5",
        ".5",
        "1.",
        "+3",
        "0x10",
        "nan",
        "inf",
        "1 ",
        "",
        "-",
        "١",
        "true",
        "[1]",
        "1.0E3",
    ],
)
def test_any_other_text_is_left_to_hydra(text: str) -> None:
    assert composing._number(text) is None


def test_a_thousand_seeds_cost_two_compositions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(composing, "compose", lambda *words: (calls.append(words), compose(*words))[1])
    cells = make_cells([Spec("x", seed, ("learner.lr=1e-5",)) for seed in range(1000)])
    assert [cell.seed for cell in cells] == [cell.config.run.seed for cell in cells] == list(range(1000))
    assert len(calls) <= 2


def test_the_first_cell_that_cannot_be_composed_is_the_error() -> None:
    with pytest.raises(ConfigError, match=r"method\.group_size"):
        compose_cells([["method.group_size=4"], ["method.group_size=1"]])


def test_the_hash_of_a_sweep_does_not_depend_on_the_order_of_its_cells() -> None:
    cells = make_cells([Spec("a", seed, ()) for seed in (0, 1)])
    assert ids_hash(cells) == ids_hash(cells[::-1]) != ids_hash(cells[:1])


def test_folders_are_counted_from_two(tmp_path: Path) -> None:
    assert newest_name(tmp_path, "a") == ("a", 0)
    for number in (1, 2):
        folder = tmp_path / numbered("a", number)
        folder.mkdir()
        (folder / "run.json").write_text("{}")
        assert newest_name(tmp_path, "a") == (folder.name, number)


def make(root: Path, run_id: str) -> RunFolder:
    return RunFolder.create(
        root, "n", composed_yaml="a: 1\n", overrides=[], info={"kind": "train"}, run_id=run_id
    )


def test_a_given_id_is_taken_once_and_nothing_is_left_of_the_second(tmp_path: Path) -> None:
    run = make(tmp_path, "cell-1")
    assert (run.run_id, run.path, run.status()) == ("cell-1", tmp_path / "cell-1", "queued")
    with pytest.raises(RunExistsError, match="cell-1"):
        make(tmp_path, "cell-1")
    assert [path.name for path in tmp_path.iterdir()] == ["cell-1"]
    assert RunFolder.open(run.path) == run


def test_processes_that_make_one_folder_at_the_same_instant_all_get_the_same_whole_one(
    tmp_path: Path,
) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from racelab.sweeps.cells import Spec, make_cells, open_cell\n"
        "(cell,) = make_cells([Spec('x', 0, ())])\n"
        "time.sleep(max(0.0, float(sys.argv[2]) - time.time()))\n"
        "run = open_cell(Path(sys.argv[1]), cell, cell.cell_id, 'sweep-1')\n"
        "print(run.path, run.info()['started'], len(run.attempts()), (run.path / 'env/environment.json').is_file())\n"
    )
    at = str(time.time() + 2)
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), at], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 3
    assert len(said) == 1, said
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cells_folder_says_what_it_is(tmp_path: Path) -> None:
    (cell,) = make_cells([Spec("static", 2, ("variant=static-thresholds",))])
    run = open_cell(tmp_path, cell, cell.cell_id, "sweep-x")
    info = run.info()
    assert {key: info[key] for key in ("kind", "sweep", "label", "seed", "variant", "status", "name")} == {
        "kind": "train", "sweep": "sweep-x", "label": "static", "seed": 2, "variant": "static-thresholds",
        "status": "queued", "name": "static-s2",
    }  # fmt: skip
    assert info["command"] == "racelab train variant=static-thresholds run.seed=2"
    assert open_cell(tmp_path, cell, cell.cell_id, "sweep-y") == run
