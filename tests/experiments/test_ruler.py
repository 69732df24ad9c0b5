"""The ruler that all methods are measured by: nothing that a method samples with may change it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from racelab.configs.compose import compose
from racelab.configs.keys import groups
from racelab.experiments.build import ruler
from racelab.experiments.models.configured import make_generator
from racelab.experiments.models.generator import GeneratorSettings
from racelab.experiments.ports import LanguageModel
from racelab.experiments.validation import at_temperature

NO_MODEL = cast(LanguageModel, object())


def settings(*words: str) -> GeneratorSettings:
    config = compose(words).config
    parts: Any = SimpleNamespace(untrained=make_generator(config.method, NO_MODEL))
    return ruler(parts, config).settings


@pytest.mark.parametrize("method", groups()["method"])
@pytest.mark.parametrize("preset", ["embedded", "paper"])
def test_every_method_is_measured_by_the_same_sampling(method: str, preset: str) -> None:
    words = [f"preset={preset}", f"method={method}"]
    race = settings(f"preset={preset}")
    own = settings(
        *words, "method.rubric.temperature=0.3", "method.rubric.top_p=0.5", "method.response.top_p=0.5"
    )
    assert (own.response, own.rubric) == (race.response, race.rubric)
    assert (own.response.top_p, own.rubric.top_p) == (1.0, 1.0)


def test_a_view_at_another_temperature_sees_the_whole_distribution() -> None:
    config = compose(["method.response.top_p=0.9"]).config
    model = make_generator(config.method, NO_MODEL)
    cool = at_temperature(model, 0.4)
    assert (cool.settings.response.temperature, cool.settings.response.top_p) == (0.4, 1.0)
    assert cool.settings.rubric == model.settings.rubric
