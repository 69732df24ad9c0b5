"""The frozen judges by name (`judge.kind`). Adding one: a class, a settings dataclass, a line in `JUDGES`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from racelab.experiments.errors import ConfigError
from racelab.experiments.models.judge_likelihood import (
    Calibration,
    LikelihoodJudge,
    LikelihoodSettings,
)
from racelab.experiments.models.judge_prompted import (
    DigitJudge,
    DigitSettings,
    JsonJudge,
    JsonSettings,
)
from racelab.experiments.ports import Encoder, Judge, LanguageModel

JudgeSettings = LikelihoodSettings | DigitSettings | JsonSettings


def _likelihood(
    model: LanguageModel, encoder: Encoder | None, settings: LikelihoodSettings | None, model_id: str
) -> Judge:
    if encoder is None:
        raise ConfigError("judge.kind=likelihood needs an encoder; set `encoder`")
    return LikelihoodJudge(model, encoder, settings=settings, model_id=model_id)


def _digit(
    model: LanguageModel, encoder: Encoder | None, settings: DigitSettings | None, model_id: str
) -> Judge:
    return DigitJudge(model, settings=settings, model_id=model_id)


def _json(
    model: LanguageModel, encoder: Encoder | None, settings: JsonSettings | None, model_id: str
) -> Judge:
    return JsonJudge(model, settings=settings, model_id=model_id)


JUDGES: dict[str, tuple[type, Callable[..., Judge]]] = {
    "likelihood": (LikelihoodSettings, _likelihood),
    "digit": (DigitSettings, _digit),
    "json": (JsonSettings, _json),
}
"""`judge.kind` -> its settings class and its maker."""


def build_judge(
    kind: str,
    *,
    model: LanguageModel,
    encoder: Encoder | None = None,
    settings: JudgeSettings | None = None,
    model_id: str = "",
) -> Judge:
    """A judge of that kind.

    Args:
        kind: `likelihood`, `digit` or `json`.
        model: the frozen language model.
        encoder: needed by `likelihood` only.
        settings: of the kind's own class; None takes its defaults.
        model_id: name or hash of the model, for `describe`.

    Raises:
        ConfigError: unknown kind, settings of another kind, or no encoder where one is needed.
    """
    if kind not in JUDGES:
        raise ConfigError(f"judge.kind {kind!r} is unknown; take one of {', '.join(JUDGES)}")
    settings_class, make = JUDGES[kind]
    if settings is not None and not isinstance(settings, settings_class):
        raise ConfigError(f"judge.kind={kind} takes {settings_class.__name__}, not {type(settings).__name__}")
    checked: Any = settings
    return make(model, encoder, checked, model_id)


__all__ = ["JUDGES", "Calibration", "JudgeSettings", "LikelihoodJudge", "build_judge"]
