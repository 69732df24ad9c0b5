"""A scalar reward model in place of rubric and judge (RACE §6.1: Skywork-Reward-V2); the policy alone is trained.

Choices where the published code does otherwise or RACE is silent:
  * the reward is sigmoid(logit); theirs is 10 sigmoid(logit), which advantages do not see;
  * an answer that was cut at its length limit is scored as it stands (theirs: 0);
  * an answer beyond the reward model's `max_length` has no score.

`source=fit` is for runs of the embedded size: a head on the untrained policy, fitted to preference pairs at the start.
The run keeps the head and the name of the model below it, not a folder that `AutoModelForSequenceClassification` loads,
which would be a second copy of that model; `reward_model.export_classifier` makes such a folder of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from racelab.configs import schema
from racelab.experiments.errors import ConfigError
from racelab.experiments.methods.baselines.common import PolicyOnly, Scored, text_sample
from racelab.experiments.models.reward_fit import FitSettings, fitted_classifier
from racelab.experiments.models.reward_model import ClassifierRewardModel, open_classifier
from racelab.experiments.parts import Parts
from racelab.experiments.ports import RewardModel
from racelab.experiments.types import JudgeScores, Pair, Prompt, Sample


class ScalarScorer:
    """G scores a prompt, without a rubric; a `common.Scorer`."""

    def __init__(self, model: RewardModel) -> None:
        """Keeps the model."""
        self._model = model

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]]) -> Scored:
        """A score for each response; those beyond the model's window count as calls that failed."""
        scores = self._model.score(prompts, responses)
        made = sum(len(s) for s in scores)
        asked = sum(map(len, responses))
        failed = sum(int(np.isnan(s).sum()) for s in scores)
        return Scored(
            rewards=tuple(scores),
            rubrics=(None,) * len(prompts),
            rubric_samples=tuple(text_sample("") for _ in prompts),
            judged=JudgeScores((), calls=made, infra_failures=failed),
            measured={"rubric_gen": 0, "judge_eval": made},
            expected={"rubric_gen": 0, "judge_eval": asked},
            printed={"rubric_gen": 0, "judge_eval": asked},
            unusable=0.0,
        )


def scalar_rm(
    config: schema.ScalarRmConfig, parts: Parts, *, policy_updates: int, max_steps: int | None
) -> PolicyOnly:
    """The method over `parts.reward_model`.

    Raises:
        ConfigError: there is no reward model among the parts.
    """
    if parts.reward_model is None:
        raise ConfigError("method=scalar-rm needs a reward model; set method.source")
    scorer = ScalarScorer(parts.reward_model)
    return PolicyOnly(config, parts, scorer, policy_updates=policy_updates, max_steps=max_steps)


def make_reward_model(
    config: schema.ScalarRmConfig,
    model: schema.ModelConfig,
    *,
    found: Path | None,
    base: Path,
    pairs: Sequence[Pair],
    folder: Path,
    seed: int,
    device: str,
) -> tuple[ClassifierRewardModel, tuple[str, ...]]:
    """The reward model that the config names, and lines for the log.

    Args:
        config: how long a conversation may be, and how to fit.
        model: the policy's section; a fitted head stands on its source, and any reward model computes in its type.
        found: folder of a sequence-classification model; None fits a head.
        base: folder of the policy as it was before training.
        pairs: to fit to.
        folder: where the fitted head is kept; a head that is there already (a resumed run) is used.
        seed: of the run.
        device: `cpu` or `cuda`.
    """
    if found is not None:
        classifier = open_classifier(found, dtype=model.compute_dtype, device=device)
        return ClassifierRewardModel(classifier, max_length=config.max_length), ()
    classifier, report = fitted_classifier(
        folder,
        base,
        pairs,
        FitSettings(config.holdout, config.l2, seed, config.max_length),
        source=model.source,
        revision=model.revision,
        dtype=model.compute_dtype,
        device=device,
    )
    return ClassifierRewardModel(classifier, max_length=config.max_length), (report.line(),)
