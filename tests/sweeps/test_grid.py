"""From a grid file to cells, and every mistake in one named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.configs.keys import CONFIG_DIR, groups
from racelab.experiments.errors import ConfigError
from racelab.sweeps.cells import make_cells
from racelab.sweeps.grid import read_grid
from racelab.sweeps.literals import as_word

GRID = """\
name: rates
base: [preset=embedded]
axes:
  learner.lr: [1.0e-4, 3.0e-4]
  routing:
    full: []
    plain: [method.routing.mode=off, method.pool.fill=uniform]
seeds: [0, 1]
exclude:
  - {learner.lr: 3.0e-4, routing: plain}
  - {learner.lr: 1.0e-4, seed: 1}
include:
  - {label: slow, overrides: [learner.lr=1.0e-6]}
"""


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "grid.yaml"
    file.write_text(text)
    return file


def test_the_product_without_what_is_excluded_and_with_what_is_included(tmp_path: Path) -> None:
    """2 rates x 2 routings x 2 seeds = 8; the first rule takes 2, the second 2; 1 label x 2 seeds comes on top."""
    grid = read_grid(write(tmp_path, GRID))
    assert grid.name == "rates"
    assert [(spec.label, spec.seed) for spec in grid.specs] == [
        ("lr=0.0001,full", 0),
        ("lr=0.0001,plain", 0),
        ("lr=0.0003,full", 0),
        ("lr=0.0003,full", 1),
        ("slow", 0),
        ("slow", 1),
    ]
    assert grid.specs[1].words == [
        "preset=embedded",
        "learner.lr=0.0001",
        "method.routing.mode=off",
        "method.pool.fill=uniform",
        "run.seed=0",
    ]


def test_words_of_the_command_line_stand_above_the_base_and_seeds_replace_the_files(tmp_path: Path) -> None:
    text = "name: g\nbase: [preset=embedded, run.policy_updates=8]\naxes: {method.group_size: [4, 6]}\nseeds: [0]\n"
    grid = read_grid(write(tmp_path, text), ["run.policy_updates=2"], [5])
    assert [spec.words for spec in grid.specs] == [
        ["preset=embedded", "run.policy_updates=2", f"method.group_size={size}", "run.seed=5"]
        for size in (4, 6)
    ]


def test_seeds_alone_are_a_grid_with_the_name_as_label(tmp_path: Path) -> None:
    grid = read_grid(write(tmp_path, "name: plain\nseeds: [3]\n"))
    assert [(spec.label, spec.seed) for spec in grid.specs] == [("plain", 3)]


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("a", True, "a=true"),
        ("a", None, "a=null"),
        ("a", [50, 50], "a=[50,50]"),
        ("a", "sigma_zero", "a=sigma_zero"),
        ("a", "it's {this}, or", "a='it\\'s {this}, or'"),
        ("a", ["x y", 1.5], "a=['x y',1.5]"),
        ("a", "1234567", "a='1234567'"),
        ("a", ["true", "12e4567"], "a=['true','12e4567']"),
        ("a", "off", "a='off'"),
        ("a", "2026-01-01", "a='2026-01-01'"),
    ],
)
def test_a_value_becomes_the_word_that_says_it(key: str, value: object, word: str) -> None:
    assert as_word(key, value) == word


@given(text=st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=30))
def test_any_text_reaches_the_config_as_it_is(text: str) -> None:
    """Read back by the grammar that reads the command line."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(as_word("key", f" {text}")).value()
    assert str(parsed) == f" {text}"


@given(text=st.one_of(st.from_regex(r"[0-9a-fA-FeE_.+-]{1,8}", fullmatch=True), st.sampled_from(
    ["true", "NULL", "nUll", "nan", "-inf", "Infinity", "1_000", "0x1F", "0123", "12:30", "yes", "1e5", "@x"]
)))  # fmt: skip
def test_a_text_that_looks_like_something_else_stays_a_text(text: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import QuotedString

    parsed = OverridesParser.create().parse_override(as_word("key", text)).value()
    assert isinstance(parsed, str | QuotedString)
    assert (parsed.text if isinstance(parsed, QuotedString) else parsed) == text


def test_a_quoted_text_reaches_the_config_and_a_bare_number_is_one(tmp_path: Path) -> None:
    text = "name: g\naxes:\n  model.revision: ['1234567', '12e4567']\n  learner.lr: [1e-4]\n"
    cells = make_cells(read_grid(write(tmp_path, text)).specs)
    assert [(cell.config.model.revision, cell.config.learner.lr) for cell in cells] == [
        ("1234567", 1e-4),
        ("12e4567", 1e-4),
    ]


BAD = {
    "unknown key": ("name: g\naxis: {run.seed: [1]}\n", ":2: axis: no such key; did you mean axes"),
    "unknown config key": ("name: g\naxes:\n  method.grup_size: [4]\n", ":3: axes: method.grup_size: no such key"),
    "key twice": (
        "name: g\naxes:\n  run.seed: [1]\n  run.seed: [2]\n", ":4: axes: run.seed: stands twice, first in line 3;",
    ),
    "a word for the seed beside seeds": (
        "name: g\nbase: [run.seed=3]\nseeds: [0]\n", ":3: seeds: run.seed=3 and the list of seeds both say the seed",
    ),
    "no name": ("axes: {run.seed: [1]}\n", "name: is missing"),
    "bad name": ("name: a/b\nseeds: [1]\n", ":1: name: 'a/b' is no name"),
    "no values": ("name: g\naxes:\n  method.group_size: []\n", ":3: axes: method.group_size: must be a list"),
    "no cells": ("name: g\n", "no cells"),
    "all excluded": ("name: g\naxes: {method.group_size: [4]}\nexclude:\n- {method.group_size: 4}\n", "no cells"),
    "unknown axis in a rule": (
        "name: g\naxes: {method.group_size: [4]}\nexclude:\n- {group_size: 4}\n",
        ":4: exclude: 0: group_size: no such axis; did you mean method.group_size",
    ),
    "a rule that hits nothing": (
        "name: g\naxes: {method.group_size: [4]}\nexclude:\n- {method.group_size: 5}\n",
        ":4: exclude: 0: the rule {'method.group_size': 5} matches no cell",
    ),
    "a label that YAML reads as a truth value": (
        "name: g\naxes:\n  r:\n    off: []\n", ":3: axes: r: a label is a text; put quotes around on, off",
    ),
    "seeds that are none": ("name: g\nseeds: [1, 1]\n", ":2: seeds: must be a list of whole numbers"),
    "seeds twice": ("name: g\naxes: {run.seed: [1]}\nseeds: [0]\n", ":3: seeds: run.seed is an axis too"),
    "base that is no list": ("name: g\nbase: preset=paper\nseeds: [0]\n", ":2: base: must be a list of overrides"),
    "include without label": ("name: g\ninclude:\n- {overrides: []}\n", ":3: include: 0: needs a label"),
    "unknown key in include": (
        "name: g\ninclude:\n- {label: a, override: []}\n", ":3: include: 0: override: no such key; did you mean",
    ),
    "not YAML": ("name: [\n", "not valid YAML"),
    "a value that is a mapping": ("name: g\naxes:\n  run.seed: [{a: 1}]\n", ":3: axes: run.seed: 0: a value is"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_named_with_file_and_line(tmp_path: Path, case: str) -> None:
    text, part = BAD[case]
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_grid(file)
    assert str(caught.value).startswith(str(file))
    assert part in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_word_that_sets_an_axis_and_a_missing_file_are_errors(tmp_path: Path) -> None:
    file = write(tmp_path, "name: g\naxes:\n  method.group_size: [4, 6]\n")
    with pytest.raises(ConfigError, match=r"method\.group_size=8 sets an axis of the grid"):
        read_grid(file, ["method.group_size=8"])
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        read_grid(tmp_path / "nowhere.yaml")


def test_a_seed_on_the_command_line_is_refused_beside_seeds_and_taken_without(tmp_path: Path) -> None:
    text = "name: g\naxes: {method.group_size: [4]}\n"
    plain, seeded = write(tmp_path, text), tmp_path / "seeded.yaml"
    seeded.write_text(f"{text}seeds: [0, 1]\n")
    assert read_grid(plain, ["run.seed=3"]).specs[0].words[0] == "run.seed=3"
    for file, seeds in ((seeded, None), (plain, [5])):
        with pytest.raises(ConfigError, match=r"run\.seed=3 and the list of seeds both say the seed"):
            read_grid(file, ["run.seed=3"], seeds)


def test_the_shipped_grids_compose_and_are_no_config_group() -> None:
    """learning-rate: 3 x 2 less 1, times 3 seeds = 15; quarantine-target: 3 x 2 less 2, times 3 = 12."""
    found = {file.stem: make_cells(read_grid(file).specs) for file in (CONFIG_DIR / "sweep").glob("*.yaml")}
    assert {name: len(cells) for name, cells in found.items()} == {
        "learning-rate": 15,
        "quarantine-target": 12,
    }
    assert "sweep" not in groups()
