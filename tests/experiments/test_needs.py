"""What only some methods need: whom they ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from racelab.configs.compose import compose
from racelab.experiments.errors import ConfigError
from racelab.experiments.needs import Needs, equip, find_needs

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
