"""File, line and comment of every value."""

from __future__ import annotations

from pathlib import Path

import pytest

from racelab.configs.compose import compose
from racelab.configs.keys import CONFIG_DIR, groups
from racelab.configs.sources import read_sources

TEXT = """\
# The whole file.
a: 1 # beside
# above b,
# in two lines
b:
  c: "x # y" # after a quoted sign
  d: [1, 2]

e: 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_keys_lines_texts_and_comments(file: Path) -> None:
    found = [(s.key, s.text, s.line, s.comment) for s in read_sources(file, "model")]
    assert found == [
        ("model.a", "1", 2, "beside"),
        ("model.b", "", 5, "above b, in two lines"),
        ("model.b.c", '"x # y"', 6, "after a quoted sign"),
        ("model.b.d", "[1, 2]", 7, ""),
        ("model.e", "3", 9, ""),
    ]


def test_a_global_file_has_keys_from_the_root_and_its_defaults_are_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("# @package _global_\ndefaults:\n  - sane\nrun:\n  seed: 1\n", encoding="utf-8")
    assert [s.key for s in read_sources(path, "preset")] == ["run", "run.seed"]


def test_the_line_in_force_comes_last_through_presets_that_build_on_others() -> None:
    chain = compose([]).sources()["method.trqc.q_target"]
    assert [s.file.relative_to(CONFIG_DIR).as_posix() for s in chain] == [
        "method/race.yaml",
        "sane/race.yaml",
        "embedded/race.yaml",
    ]
    assert chain[0].comment == "Table 7"


def test_a_variant_stands_above_preset_and_method() -> None:
    chain = compose(["variant=static-thresholds"]).sources()["method.trqc.eta_sigma"]
    assert [s.file.relative_to(CONFIG_DIR).as_posix() for s in chain] == [
        "method/race.yaml",
        "embedded/race.yaml",
        "variant/static-thresholds.yaml",
    ]


@pytest.mark.parametrize(
    ("preset", "method"),
    [("sane", "race"), ("paper", "race"), *(("embedded", method) for method in groups()["method"])],
)
def test_every_value_of_a_preset_has_a_line_that_holds_it(preset: str, method: str) -> None:
    import yaml

    composed = compose([f"preset={preset}", f"method={method}"])
    lines = composed.sources()

    def check(value: object, key: str) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                check(inner, f"{key}.{name}" if key else name)
            return
        written = yaml.safe_load(lines[key][-1].text)
        assert (float(written) if isinstance(value, float) else written) == value, key

    check(composed.config.model_dump(mode="json"), "")
