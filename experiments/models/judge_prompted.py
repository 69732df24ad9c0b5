"""Judges that are asked for a score (RACE Eq 2), for models of 1 B and more: a digit, or a JSON reply.

The whole rubric stands in the prompt and one score comes back (implicit aggregation); never one call per
criterion.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.prompts.templates import JUDGE_DIGIT, JUDGE_JSON
from racelab.experiments.models.rubric import format_numbered, json_values
from racelab.experiments.models.text import defang, strip_thinking
from racelab.experiments.ports import LanguageModel
from racelab.experiments.rng import derived_seed
from racelab.experiments.types import (
    FloatArray,
    GenerationRequest,
    JudgeItem,
    JudgeReply,
    JudgeScores,
    Sample,
)

if TYPE_CHECKING:
    import torch

Reading = Literal["last_json", "first_number"]
"""How a reply is read: as judges are trained with (`parse_score`), or as JudgeBench does (`first_number`)."""

_FIRST_NUMBER: Final = re.compile(r"""(["'])score\1\s*:\s*["']?([+-]?(?:\d+(?:\.\d+)?|\.\d+))""")
_NO_THOUGHT = "<think>\n\n</think>\n\n"  # what thinking models take for "already thought"


@dataclass(frozen=True, slots=True)
class DigitSettings:
    """The scale of the digit judge: `low` to `high`, mapped linearly to [0, 1]; 0-9 and 1-10 are usual."""

    low: int = 0
    high: int = 9

    def __post_init__(self) -> None:
        """Refuses an empty or odd scale."""
        if not 0 <= self.low < self.high <= 100:
            raise ConfigError(f"judge scale {self.low} to {self.high}: take 0 <= low < high <= 100")


@dataclass(frozen=True, slots=True)
class JsonSettings:
    """How the JSON judge replies.

    Attributes:
        high: the largest score asked for (100, 10 or 1), mapped to 1.
        max_tokens: of a reply, thinking included.
        temperature: 0 is greedy. RACE's judge follows Li et al.: 0.6, top_p 0.95, thinking on.
        top_p: nucleus.
        thinking: False puts an empty thought in front of the reply of a model that would think.
        seed: sampled replies depend on it and on the prompt's tokens, on nothing else.
        reading: of a reply; evaluations read as their benchmarks do.
    """

    high: float = 100.0
    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    thinking: bool = False
    seed: int = 0
    reading: Reading = "last_json"


class DigitJudge:
    """The expected number under the model's next-token probabilities; implements `ports.Judge`."""

    def __init__(
        self, model: LanguageModel, *, settings: DigitSettings | None = None, model_id: str = ""
    ) -> None:
        """Keeps the parts; `model_id` only goes into `describe`."""
        self._model, self._model_id = model, model_id
        self.settings = settings or DigitSettings()
        self._labels = [model.encode(str(n)) for n in range(self.settings.low, self.settings.high + 1)]

    def score(self, items: Sequence[JudgeItem]) -> JudgeScores:
        """One call per response; no call where the rubric is None; prompts beyond the window give NaN."""
        slots = {"low": str(self.settings.low), "high": str(self.settings.high)}
        prefixes = [_prefixes(self._model, JUDGE_DIGIT, item, thinking=False, **slots) for item in items]
        longest = max(map(len, self._labels))
        fits = [p for row in prefixes for p in row if len(p) + longest <= self._model.window]
        found = iter(self._model.logprobs([(p, self._labels) for p in fits]) if fits else [])
        values = [
            [
                self._expectation(next(found)) if len(p) + longest <= self._model.window else math.nan
                for p in row
            ]
            for row in prefixes
        ]
        calls = sum(map(len, prefixes))
        return JudgeScores(_per_item(items, values), calls=calls, infra_failures=calls - len(fits))

    def describe(self) -> dict[str, object]:
        """Kind, model, template and scale (JSON values)."""
        return describe_judge("digit", self._model_id, JUDGE_DIGIT, asdict(self.settings))

    def _expectation(self, logprobs: Sequence[FloatArray]) -> float:
        """Mean of the scale under the labels' probabilities, mapped to [0, 1], two decimals.

        Where one label's tokens begin another's (1 and 10), the longer one's probability is taken off the
        shorter.
        """
        joint = [math.exp(float(lp.sum())) for lp in logprobs]
        own = [
            p
            - sum(q for b, q in zip(self._labels, joint, strict=True) if len(b) > len(a) and b[: len(a)] == a)
            for a, p in zip(self._labels, joint, strict=True)
        ]
        total = sum(own)
        if not total > 0:
            return math.nan
        return round(sum(i * p for i, p in enumerate(own)) / total / (len(own) - 1), 2)


class JsonJudge:
    """A generated reply that ends in {"score": number}; implements `ports.Judge`."""

    def __init__(
        self, model: LanguageModel, *, settings: JsonSettings | None = None, model_id: str = ""
    ) -> None:
        """Keeps the parts; `model_id` only goes into `describe`."""
        self._model, self._model_id = model, model_id
        self.settings = settings or JsonSettings()

    def score(self, items: Sequence[JudgeItem]) -> JudgeScores:
        """One call per response; no call where the rubric is None.

        A reply without a readable score gives NaN and is counted; so is a prompt beyond the window, or a
        model that cannot be reached.
        """
        how = self.settings
        prefixes = [
            _prefixes(self._model, JUDGE_JSON, item, thinking=how.thinking, high=f"{how.high:g}")
            for item in items
        ]
        flat = [p for row in prefixes for p in row]
        samples = json_samples(self._model, flat, how)
        replies = [self._reply(p, sample) for p, sample in zip(flat, samples, strict=True)]
        return scores_of(items, replies, how.high, how.reading)

    def redrawn(self, draw: int) -> JsonJudge:
        """The judge whose sampled replies are other draws; itself where nothing is drawn."""
        if draw == 0 or self.settings.temperature == 0:
            return self
        settings = replace(self.settings, seed=derived_seed(self.settings.seed, "draw", draw))
        return JsonJudge(self._model, settings=settings, model_id=self._model_id)

    def _reply(self, prefix: tuple[int, ...], sample: Sample | None) -> JudgeReply:
        if sample is not None:
            return JudgeReply(sample.text, sample.finished, len(sample.tokens))
        how, window = self.settings, self._model.window
        if fits(self._model, prefix, how):
            return JudgeReply(None, finished=False, error="the judge cannot be reached", lost=True)
        why = f"{len(prefix)} tokens of prompt + {how.max_tokens} exceed the judge's window of {window}"
        return JudgeReply(None, finished=False, error=why)

    def describe(self) -> dict[str, object]:
        """Kind, model, template and sampling (JSON values)."""
        return describe_judge("json", self._model_id, JUDGE_JSON, settings_said(asdict(self.settings)))


def scores_of(
    items: Sequence[JudgeItem], replies: Sequence[JudgeReply], high: float, reading: Reading = "last_json"
) -> JudgeScores:
    """The scores that stand in a writing judge's replies, and what failed.

    Args:
        items: what was to be judged.
        replies: one per response of the items that have a rubric, in order.
        high: the largest score.
        reading: of the replies.
    """
    read = _READERS[reading]
    rest = iter(replies)
    values: list[list[float]] = []
    said: list[tuple[JudgeReply, ...]] = []
    unread = 0
    for item in items:
        row = [next(rest) for _ in item.responses] if item.rubric is not None else []
        found = [math.nan if r.text is None else read(r.text, high) for r in row]
        failed = [r.text is not None and math.isnan(v) for r, v in zip(row, found, strict=True)]
        said.append(
            tuple(replace(r, error="no score") if bad else r for r, bad in zip(row, failed, strict=True))
        )
        unread += sum(failed)
        values.append(found)
    return JudgeScores(
        _per_item(items, values),
        calls=len(replies),
        parse_failures=unread,
        infra_failures=sum(r.text is None for r in replies),
        replies=tuple(said),
    )


def json_replies(
    model: LanguageModel, prefixes: Sequence[tuple[int, ...]], how: JsonSettings, *purpose: str
) -> list[str | None]:
    """The texts of `json_samples`."""
    return [None if s is None else s.text for s in json_samples(model, prefixes, how, *purpose)]


def json_samples(
    model: LanguageModel, prefixes: Sequence[tuple[int, ...]], how: JsonSettings, *purpose: str
) -> list[Sample | None]:
    """The reply to each prompt, all decoded in one batch; None where there is none.

    Args:
        model: of the judge.
        prefixes: prompts; one that leaves no room for a reply in the window gets none.
        how: sampling, and the seed.
        purpose: tells uses of one judge model apart: the draws are seeded by it, the setting and what is asked, so
            that asking the same again gives the same.
    """
    room = [i for i, p in enumerate(prefixes) if fits(model, p, how)]
    replies: list[Sample | None] = [None] * len(prefixes)
    if not room:
        return replies
    asked = [prefixes[i] for i in room]
    requests = [GenerationRequest(p, 1, how.max_tokens, how.temperature, how.top_p) for p in asked]
    try:
        samples = model.generate(requests, _rng([*purpose, how.seed, asked]))
    except UnreachableError:
        return replies
    for i, group in zip(room, samples, strict=True):
        replies[i] = group[0]
    return replies


def fits(model: LanguageModel, prefix: Sequence[int], how: JsonSettings) -> bool:
    """Whether prompt and reply have room in the window."""
    return len(prefix) + how.max_tokens <= model.window


def _rng(seed_parts: list[object]) -> torch.Generator:
    import torch

    body = json.dumps(seed_parts).encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(body).digest()[:7], "big"))


def closed_thought(model: LanguageModel, thinking: bool) -> tuple[int, ...]:
    """What is put in front of the reply of a model that would think, if it is not to; nothing for other models."""
    return () if thinking or len(model.encode("<think>")) != 1 else tuple(model.encode(_NO_THOUGHT))


def parse_score(reply: str, high: float) -> float:
    """The last `score` in a reply's JSON, divided by `high`, two decimals; NaN if there is none in [0, high].

    Thinking is stripped first, so that a score tried out while thinking is not taken for the verdict.
    """
    found = math.nan
    for value in json_values(strip_thinking(reply)):
        if isinstance(value, dict) and "score" in value:
            found = _number(value["score"])
    return round(found / high, 2) if 0 <= found <= high else math.nan


def first_number(reply: str, high: float) -> float:
    """JudgeBench's reading: the first number after a `score` key, divided by `high`; NaN if there is none.

    Thinking is stripped first. The reply need not be JSON, the number is not rounded, and one above `high` counts as it
    stands; one below 0 is none, as the authors' own mark of a failure (-1) is.

    Example:
        >>> first_number('{"score": 80} or rather {"score": 10}', 100.0)
        0.8
    """
    found = _FIRST_NUMBER.search(strip_thinking(reply))
    number = math.nan if found is None else float(found[2])
    return number / high if 0 <= number < math.inf else math.nan


_READERS: Final[Mapping[Reading, Callable[[str, float], float]]] = {
    "last_json": parse_score,
    "first_number": first_number,
}


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _prefixes(
    model: LanguageModel, template: RoleTemplate, item: JudgeItem, *, thinking: bool, **slots: str
) -> list[tuple[int, ...]]:
    """The judge's prompt for each response of an item; none where the rubric is None."""
    closing = closed_thought(model, thinking)
    return [(*template.encode(model, **fields, **slots), *closing) for fields in judge_fields(item)]


def judge_fields(item: JudgeItem) -> list[dict[str, str]]:
    """What fills a judge's template, for each response of an item; nothing where the rubric is None."""
    if item.rubric is None:
        return []
    common = {"prompt": defang(item.prompt.text), "criteria": defang(format_numbered(item.rubric))}
    return [{**common, "response": defang(strip_thinking(r.text))} for r in item.responses]


def _per_item(items: Sequence[JudgeItem], values: Sequence[Sequence[float]]) -> tuple[FloatArray, ...]:
    """One array per item; all NaN where there was no rubric."""
    return tuple(
        np.full(len(item.responses), np.nan) if item.rubric is None else np.array(row, dtype=np.float64)
        for item, row in zip(items, values, strict=True)
    )


def settings_said(settings: dict[str, Any], *unsaid: str) -> dict[str, object]:
    """Settings as `describe` has them: without those named, and without the reading that every training has."""
    return {
        name: value
        for name, value in settings.items()
        if name not in unsaid and (name, value) != ("reading", "last_json")
    }


def describe_judge(
    kind: str, model_id: str, template: RoleTemplate, settings: dict[str, object]
) -> dict[str, object]:
    """What is needed to ask a judge the same again (JSON values)."""
    return {
        "kind": kind,
        "model": model_id,
        "template": f"{template.name}/{template.version}",
        "template_sha": template.sha,
        "settings": settings,
    }
