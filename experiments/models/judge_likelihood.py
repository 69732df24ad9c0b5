"""The likelihood judge: a frozen judge for models too small to rate (below about 1 B parameters).

    F = mean_t max(log p(y_t | x, R, y_<t), floor)          one pass, the whole rubric in the prompt
    M = sum_k w_k [ a cos(e(y), e(x + c_k)) + (1 - a) cos(e(y - x), e(c_k)) ] / sum_k w_k
    z = v_F min((F - mu_F) / s_F, cap) + v_M min((M - mu_M) / s_M, cap)
    J = round( sigmoid(slope z) * guards * (1 if y ended by itself else unfinished_factor), 2 )

e is the encoder, y - x the response without the prompt's words; mu and s are measured on base samples before
the run. Two decimals let ties and saturation exist. It cannot see arithmetic or negation. The caps keep very
likely text (copies, sharpened text) from winning by likelihood alone. Source: ours; it stands in for Eq 2 of
RACE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.models.guards import (
    GuardSettings,
    guard_factor,
    measure_guards,
    without_prompt_words,
)
from racelab.experiments.models.prompts.templates import JUDGE_LIKELIHOOD
from racelab.experiments.models.rubric import format_criteria
from racelab.experiments.models.text import defang
from racelab.experiments.ports import Encoder, LanguageModel
from racelab.experiments.types import FloatArray, JudgeItem, JudgeScores, Rubric, Sample

_MIN_SCALE = 1e-3  # a spread below this says that the calibration samples were all alike


@dataclass(frozen=True, slots=True)
class Calibration:
    """Mean and population standard deviation of F (nats per token) and M (cosine) on base samples."""

    mu_f: float
    sd_f: float
    mu_m: float
    sd_m: float
    n: int

    @classmethod
    def from_json(cls, values: Mapping[str, float]) -> Calibration:
        """Undoes `dataclasses.asdict`.

        Raises:
            ConfigError: a key is missing or its value is no finite number; a scale is not positive.
        """
        try:
            found = {k: float(values[k]) for k in ("mu_f", "sd_f", "mu_m", "sd_m", "n")}
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"judge calibration {dict(values)} lacks a number: {error}") from error
        if not all(map(math.isfinite, found.values())) or min(found["sd_f"], found["sd_m"]) <= 0:
            raise ConfigError(f"judge calibration {found} is not usable; calibrate again")
        return cls(found["mu_f"], found["sd_f"], found["mu_m"], found["sd_m"], int(found["n"]))


@dataclass(frozen=True, slots=True)
class LikelihoodSettings:
    """Constants of the score (see the module's formula).

    Attributes:
        slope: of the sigmoid.
        floor: log-probs below it count as it.
        likelihood_weight: v_F.
        relevance_weight: v_M.
        cap: largest z-score of either part.
        topic_share: a; the rest of M compares what is new in the response with the criterion alone.
        unfinished_factor: for a response cut at its token limit.
        guards: free shares of the guards.
    """

    slope: float = 1.2
    floor: float = -8.0
    likelihood_weight: float = 0.7
    relevance_weight: float = 1.3
    cap: float = 1.5
    topic_share: float = 0.5
    unfinished_factor: float = 0.6
    guards: GuardSettings = field(default_factory=GuardSettings)


class LikelihoodJudge:
    """Scores by likelihood under the rubric and relevance to it; implements `ports.Judge`."""

    def __init__(
        self,
        model: LanguageModel,
        encoder: Encoder,
        *,
        settings: LikelihoodSettings | None = None,
        calibration: Calibration | None = None,
        model_id: str = "",
    ) -> None:
        """Keeps the parts; `model_id` (name or hash of the frozen model) only goes into `describe`."""
        self._model, self._encoder, self._model_id = model, encoder, model_id
        self.settings = settings or LikelihoodSettings()
        self.calibration = calibration

    def calibrate(self, items: Sequence[JudgeItem]) -> Calibration:
        """Scales from base samples. Deterministic in the items; items without a rubric are left out.

        Raises:
            DataError: fewer than two responses, or all alike (a scale below 0.001).
        """
        live = [item for item in items if item.rubric is not None]
        parts = (self._fit(live), self._relevance(live))
        f, m = (np.concatenate(part) if part else np.zeros(0) for part in parts)
        seen = np.isfinite(f)
        if seen.sum() < 2 or min(f[seen].std(), m[seen].std()) < _MIN_SCALE:
            raise DataError(
                f"the judge cannot be calibrated on {int(seen.sum())} responses that hardly differ; "
                "raise judge.calibration_prompts or judge.calibration_samples"
            )
        f, m = f[seen], m[seen]
        return Calibration(float(f.mean()), float(f.std()), float(m.mean()), float(m.std()), int(seen.sum()))

    def with_calibration(self, calibration: Calibration) -> LikelihoodJudge:
        """The same judge with these scales."""
        return LikelihoodJudge(
            self._model,
            self._encoder,
            settings=self.settings,
            calibration=calibration,
            model_id=self._model_id,
        )

    def score(self, items: Sequence[JudgeItem]) -> JudgeScores:
        """One call per response, the whole rubric at once; no call where the rubric is None.

        A response that does not fit the model's window is cut to it; where not even the prompt fits, the
        scores are NaN and counted as infrastructure failures.

        Raises:
            ConfigError: the judge has no calibration.
        """
        if self.calibration is None:
            raise ConfigError("the likelihood judge has no calibration; call calibrate on base samples first")
        live = [item for item in items if item.rubric is not None]
        parts = iter(zip(live, self._fit(live), self._relevance(live), strict=True))
        scores = tuple(
            np.full(len(item.responses), np.nan) if item.rubric is None else self._combine(*next(parts))
            for item in items
        )
        unread = sum(
            int(np.isnan(s).sum()) for s, item in zip(scores, items, strict=True) if item.rubric is not None
        )
        return JudgeScores(scores, calls=sum(len(i.responses) for i in live), infra_failures=unread)

    def describe(self) -> dict[str, object]:
        """Kind, model, template, constants and calibration (JSON values)."""
        return {
            "kind": "likelihood",
            "model": self._model_id,
            "template": f"{JUDGE_LIKELIHOOD.name}/{JUDGE_LIKELIHOOD.version}",
            "template_sha": JUDGE_LIKELIHOOD.sha,
            "settings": asdict(self.settings),
            "calibration": None if self.calibration is None else asdict(self.calibration),
        }

    def _combine(self, item: JudgeItem, f: FloatArray, m: FloatArray) -> FloatArray:
        """The scores of one item from its F and M, [number of responses] each."""
        s, c = self.settings, self.calibration
        assert c is not None
        assert item.rubric is not None
        z = s.likelihood_weight * np.minimum((f - c.mu_f) / c.sd_f, s.cap)
        z += s.relevance_weight * np.minimum((m - c.mu_m) / c.sd_m, s.cap)
        factor = np.array([self._factor(item.prompt.text, item.rubric, r) for r in item.responses])
        with np.errstate(over="ignore"):
            scores: FloatArray = np.round(factor / (1 + np.exp(-s.slope * z)), 2)
        return scores

    def _factor(self, prompt: str, rubric: Rubric, response: Sample) -> float:
        factor = guard_factor(measure_guards(prompt, rubric, response.text), self.settings.guards)
        return factor if response.finished else factor * self.settings.unfinished_factor

    def _fit(self, items: Sequence[JudgeItem]) -> list[FloatArray]:
        """F of every response, one packed call for all; NaN where the prompt leaves no room in the window."""
        prefixes = [self._prefix(item) for item in items]
        room = [self._model.window - len(p) for p in prefixes]
        groups = [
            (p, [self._answer(r, n) for r in item.responses])
            for p, n, item in zip(prefixes, room, items, strict=True)
            if n > 0 and item.responses
        ]
        found = iter(self._model.logprobs(groups) if groups else [])
        return [
            np.array([np.maximum(lp, self.settings.floor).mean() for lp in next(found)])
            if n > 0 and item.responses
            else np.full(len(item.responses), np.nan)
            for n, item in zip(room, items, strict=True)
        ]

    def _prefix(self, item: JudgeItem) -> tuple[int, ...]:
        assert item.rubric is not None
        return JUDGE_LIKELIHOOD.encode(
            self._model, prompt=defang(item.prompt.text), criteria=defang(format_criteria(item.rubric))
        )

    def _answer(self, response: Sample, room: int) -> list[int]:
        """The judge's own token ids of a response, its end token included if it ended by itself.

        The text is encoded afresh: the score then depends on the text alone, not on how the policy split it.
        """
        ids = self._model.encode(defang(response.text))
        if response.finished or not ids:
            ids = [*ids, self._model.eos_id]
        return ids[:room]

    def _relevance(self, items: Sequence[JudgeItem]) -> list[FloatArray]:
        """M of every response; all texts embedded in one call."""
        plans = [_relevance_texts(item) for item in items]
        rows = self._encoder.embed([t for plan in plans for part in plan for t in part])
        out, at = [], 0
        for item, plan in zip(items, plans, strict=True):
            whole, rest, topics, criteria = (
                rows[at + sum(map(len, plan[:k])) : at + sum(map(len, plan[: k + 1]))] for k in range(4)
            )
            at += sum(map(len, plan))
            assert item.rubric is not None
            weights = np.array([c.weight for c in item.rubric.criteria])
            a = self.settings.topic_share
            similarity = a * whole @ topics.T + (1 - a) * rest @ criteria.T
            out.append(similarity @ weights / weights.sum())
        return out


def _relevance_texts(item: JudgeItem) -> tuple[list[str], list[str], list[str], list[str]]:
    """Responses, responses without the prompt's words, prompt + criterion, criterion."""
    assert item.rubric is not None
    answers = [r.text for r in item.responses]
    criteria = [c.text for c in item.rubric.criteria]
    prompt = item.prompt.text
    stripped = [without_prompt_words(a, prompt) for a in answers]
    return answers, stripped, [f"{prompt} {c}" for c in criteria], criteria
