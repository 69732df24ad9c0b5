"""What only some methods need: whom they ask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from racelab.configs.compose import compose
from racelab.experiments.errors import ConfigError
from racelab.experiments.fsio import read_json, write_json_atomic
from racelab.experiments.models.prompts.rar import PROPOSE
from racelab.experiments.needs import Needs, describe, equip, find_needs
from racelab.experiments.session_race import RaceSession

from .scripted_chat import World, parts

NO_DATA: Any = None


@pytest.fixture(autouse=True)
def _no_api(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)


def test_predefined_items_need_no_api_and_open_none(tmp_path: Path) -> None:
    config = compose(["method=rar", "method.aggregation=predefined"]).config
    assert find_needs(config, NO_DATA) == Needs()
    world = World(lambda texts, i: 0.0)
    equipped, lines = equip(parts(world, None), config, Needs(), tmp_path)
    assert (equipped.proposer, lines) == (None, ())


@pytest.mark.parametrize(
    "words",
    [
        ["method=rar"],
        ["method=rar", "method.aggregation=explicit"],
        ["method=rrd"],
        ["method=rar", "method.aggregation=predefined", "probe.redundancy=api"],
    ],
)
def test_whoever_asks_an_api_needs_its_address(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="OPENAI_BASE_URL"):
        find_needs(compose(words).config, NO_DATA)


def test_what_is_asked_is_described_without_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk_secret")
    config = compose(["method=rar", "api.base_url=http://h:1/v1", "api.model=big", "api.cache=false"]).config
    world = World(lambda texts, i: 0.0)
    equipped, _ = equip(parts(world, None), config, Needs(), tmp_path)
    assert describe(equipped, config) == {
        "proposer": {"kind": "api", "base_url": "http://h:1/v1", "model": "big", "cache": False},
        "templates": {f"rar-propose/{PROPOSE.version}": PROPOSE.sha},
    }
    assert describe(parts(world, None), config) == {}
    rrd = compose(["method=rrd"]).config
    assert len(cast(Any, describe(equipped, rrd)["templates"])) == 5
    scorer = replace(parts(world, None), reward_model=cast(Any, equipped.proposer))
    assert list(describe(scorer, compose(["method=scalar-rm"]).config)) == ["reward_model"]


def test_a_resumed_run_leaves_what_was_written_down(tmp_path: Path) -> None:
    session = RaceSession.__new__(RaceSession)
    session.setup_file = tmp_path / "setup.json"
    write_json_atomic(session.setup_file, {"data": "d"})
    session._keep({})
    assert read_json(session.setup_file) == {"data": "d"}
    for model in ("first", "second"):
        session._keep({"proposer": {"model": model}})
    assert read_json(session.setup_file) == {"data": "d", "parts": {"proposer": {"model": "first"}}}
