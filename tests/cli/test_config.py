"""`config show`, `diff` and `check`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from racelab.configs.compose import compose

Call = Callable[..., Any]
Make = Callable[..., Any]


def test_show_prints_yaml_that_is_the_config(call: Call) -> None:
    result = call("config", "show", "preset=sane")
    assert result.code == 0
    assert result.err == ""
    assert yaml.safe_load(result.out) == compose(["preset=sane"]).config.model_dump(mode="json")


def test_show_json_is_the_same_config(call: Call) -> None:
    assert call("config", "show", "run.seed=4", "--json").json()["run"]["seed"] == 4


def test_show_source_names_file_and_line_or_the_command_line(call: Call) -> None:
    rows = {row["key"]: row for row in call("config", "show", "run.seed=4", "--source", "--json").json()}
    assert rows["run.seed"] == {"key": "run.seed", "value": 4, "source": "command line"}
    place, _, line = rows["method.trqc.q_target"]["source"].rpartition(":")
    assert place == "configs/embedded/race.yaml"
    text = (Path(__file__).parents[2] / place).read_text(encoding="utf-8").splitlines()
    assert text[int(line) - 1].strip().startswith("q_target:")
    assert "configs/embedded/race.yaml" in call("config", "show", "--source").out


def test_explain_gives_the_chain_with_the_comments(call: Call) -> None:
    found = call("config", "show", "--explain", "q_target", "method.trqc.q_target=0.3", "--json").json()
    assert found["key"] == "method.trqc.q_target"
    assert found["value"] == 0.3
    assert [step["value"] for step in found["set_by"]] == ["0.20", "0.35", "0.25", "0.3"]
    assert found["set_by"][0]["comment"] == "Table 7"
    out = call("config", "show", "--explain", "min_pool").out
    assert out.startswith("method.pool.min_pool: 3\n")
    assert "unstated: a rubric phase needs entries" in out


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("max_tokens", "method.response.max_tokens, method.rubric.max_tokens or api.max_tokens"),
        ("q_tagret", "method.trqc.q_target"),
    ],
)
def test_explain_suggests(call: Call, key: str, part: str) -> None:
    result = call("config", "show", "--explain", key)
    assert result.code == 2
    assert part in result.err


def test_diff_of_presets_shows_both_values_and_reasons(call: Call) -> None:
    rows = {row["key"]: row for row in call("config", "diff", "paper", "sane", "--json").json()}
    row = rows["method.trqc.q_target"]
    assert (row["a"], row["b"]) == (0.2, 0.35)
    assert row["a_comment"] == "Table 7"
    assert "24.5 %" in row["b_comment"]
    assert "run.seed" not in rows
    assert rows["judge.thinking"]["b"] is None
    text = call("config", "diff", "paper", "sane").out
    line = next(line for line in text.splitlines() if line.startswith("method.trqc.q_target"))
    assert "0.2" in line
    assert "0.35" in line
    assert "Table 7 | Table 13" in line


def test_diff_takes_overrides_and_runs(call: Call, make_run: Make) -> None:
    make_run(overrides=("tracking=none", "run.seed=7"))
    rows = call("config", "diff", "latest", "preset=embedded tracking=none run.seed=9", "--json").json()
    assert [(row["key"], row["a"], row["b"]) for row in rows] == [("run.seed", 7, 9)]
    same = call("config", "diff", "sane", "preset=sane")
    assert same.out == ""
    assert "no difference" in same.err


def test_show_takes_what_diff_takes(call: Call, make_run: Make) -> None:
    run = make_run(overrides=("tracking=none", "run.seed=7"))
    assert call("config", "show", run.run_id, "--json").json()["run"]["seed"] == 7
    assert yaml.safe_load(call("config", "show", "latest").out)["run"]["seed"] == 7
    assert call("config", "show", "latest", "--explain", "run.seed").out.startswith("run.seed: 7\n")
    assert call("config", "show", "sane").out == call("config", "show", "preset=sane").out
    for words, said in (
        (["latest", "run.seed=8"], "latest is shown as it stands"),
        (["latest", "--source"], "leave --source out"),
        (["papr"], "neither a preset nor a run"),
    ):
        done = call("config", "show", *words)
        assert (done.code, said in done.err) == (2, True), done.err


def test_diff_of_words_with_an_open_quotation_mark_is_one_line(call: Call) -> None:
    result = call("config", "diff", "embedded", "run.name='a")
    assert result.code == 2
    assert "run.name='a: a quotation mark is not closed" in result.err


def test_diff_of_nonsense_says_what_is_near(call: Call) -> None:
    result = call("config", "diff", "papr", "sane")
    assert result.code == 2
    assert "did you mean paper?" in result.err


def test_check_prints_findings_and_strict_makes_them_an_error(call: Call) -> None:
    assert call("config", "check").code == 0
    assert call("config", "check").out == ""
    assert call("config", "check", "--strict").code == 0
    assert call("config", "check", "preset=paper").code == 0
    strict = call("config", "check", "preset=paper", "--strict")
    assert strict.code == 2
    assert [line.partition("=")[0] for line in strict.out.splitlines()] == [
        "warning: method.trqc.q_target",
        "warning: method.routing.d_tri",
    ]
    found = call("config", "check", "preset=paper", "--json").json()
    assert found[0]["works"] == "method.trqc.q_target=0.35"


@pytest.mark.parametrize("words", [(), ("--strict",), ("--json",)])
def test_check_fails_for_what_cannot_train_without_strict_too(call: Call, words: tuple[str, ...]) -> None:
    result = call("config", "check", "method.routing.sigma_rt=0.6", *words)
    assert result.code == 2
    assert '"error"' in result.out or result.out.startswith("error: method.routing.sigma_rt=0.6: ")


def test_a_users_folder_is_taken(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine" / "preset").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [sane]\npreset: mine\nrun: {seed: 11}\n"
    (tmp_path / "mine" / "preset" / "own.yaml").write_text(text, encoding="utf-8")
    words = ("config", "show", "preset=own", "--config-dir", str(tmp_path / "mine"), "--json")
    assert call(*words).json()["run"]["seed"] == 11
