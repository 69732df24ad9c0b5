"""The frozen judges by name (`judge.kind`). Adding one: a class, a settings dataclass, a line in `JUDGES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from racelab.experiments.errors import ConfigError
from racelab.experiments.models.chat import ChatModel
from racelab.experiments.models.judge_api import ApiJudge, ApiJudgeSettings
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

JudgeSettings = LikelihoodSettings | DigitSettings | JsonSettings | ApiJudgeSettings


@dataclass(frozen=True, slots=True)
class _Made:
    """What a judge may be made of."""

    settings: Any
    model: LanguageModel | None
    encoder: Encoder | None
    chat: ChatModel | None
    model_id: str

    def the_model(self, kind: str) -> LanguageModel:
        if self.model is None:
            raise ConfigError(f"judge.kind={kind} needs a language model; set judge.source")
        return self.model


def _likelihood(made: _Made) -> Judge:
    if made.encoder is None:
        raise ConfigError("judge.kind=likelihood needs an encoder; set `encoder`")
    model = made.the_model("likelihood")
    return LikelihoodJudge(model, made.encoder, settings=made.settings, model_id=made.model_id)


def _digit(made: _Made) -> Judge:
    return DigitJudge(made.the_model("digit"), settings=made.settings, model_id=made.model_id)


def _json(made: _Made) -> Judge:
    return JsonJudge(made.the_model("json"), settings=made.settings, model_id=made.model_id)


def _api(made: _Made) -> Judge:
    if made.chat is None:
        raise ConfigError("judge.kind=api needs a server; set judge.base_url")
    return ApiJudge(made.chat, made.settings)


JUDGES: dict[str, tuple[type, Callable[[_Made], Judge]]] = {
    "likelihood": (LikelihoodSettings, _likelihood),
    "digit": (DigitSettings, _digit),
    "json": (JsonSettings, _json),
    "api": (ApiJudgeSettings, _api),
}
"""`judge.kind` -> its settings class and its maker."""


def build_judge(
    kind: str,
    *,
    model: LanguageModel | None = None,
    encoder: Encoder | None = None,
    chat: ChatModel | None = None,
    settings: JudgeSettings | None = None,
    model_id: str = "",
) -> Judge:
    """A judge of that kind.

    Args:
        kind: `likelihood`, `digit`, `json` or `api`.
        model: the frozen language model; needed by all but `api`.
        encoder: needed by `likelihood` only.
        chat: the model behind a server; needed by `api` only.
        settings: of the kind's own class; None takes its defaults.
        model_id: name or hash of the model, for `describe`.

    Raises:
        ConfigError: unknown kind, settings of another kind, or a part that is needed and missing.
    """
    if kind not in JUDGES:
        raise ConfigError(f"judge.kind {kind!r} is unknown; take one of {', '.join(JUDGES)}")
    settings_class, make = JUDGES[kind]
    if settings is not None and not isinstance(settings, settings_class):
        raise ConfigError(f"judge.kind={kind} takes {settings_class.__name__}, not {type(settings).__name__}")
    return make(_Made(settings, model, encoder, chat, model_id))


def redrawn(judge: Judge, draw: int) -> Judge:
    """The judge whose sampled replies are draw number `draw` (0: those of `judge`).

    A judge that draws nothing, or that samples nothing at temperature 0 in this process, is returned as it is: asking
    it again is of no use.
    """
    return judge.redrawn(draw) if isinstance(judge, JsonJudge | ApiJudge) else judge


__all__ = ["JUDGES", "Calibration", "JudgeSettings", "LikelihoodJudge", "build_judge", "redrawn"]
