"""The judge, encoder and roles on the models that ship with the setup. The bounds are wide."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from racelab.configs.compose import compose
from racelab.experiments.data.checks import passes
from racelab.experiments.data.package import packaged_prompts
from racelab.experiments.models.encoder import SentenceEncoder
from racelab.experiments.models.generator import (
    Generator,
    GeneratorSettings,
    SamplingSettings,
    default_templates,
)
from racelab.experiments.models.judge_likelihood import LikelihoodJudge
from racelab.experiments.models.judge_prompted import DigitJudge
from racelab.experiments.models.judge_report import auc, judge_report
from racelab.experiments.models.rubric import RubricSettings
from racelab.experiments.types import JudgeItem, Sample

pytestmark = pytest.mark.slow

SEEN = compose([]).config.data.categories
"""The categories of the embedded run. Rewriting and constrained writing are not among them: their right answers repeat
the prompt, which this judge takes for copying."""
ROWS = [
    r
    for r in packaged_prompts()
    if r.difficulty == "tiny" and r.split == "train" and r.prompt.check and r.prompt.category in SEEN
][::4][:24]


@pytest.fixture(scope="module")
def parts():
    from racelab.experiments.backends.local.model import open_language_model
    from racelab.experiments.models.assets import resolve_model

    torch.set_num_threads(1)
    model = open_language_model(resolve_model("smollm2-135m"), role="frozen")
    return model, SentenceEncoder(resolve_model("minilm"), max_length=96)


@pytest.fixture(scope="module")
def rollouts(parts):
    templates = default_templates("lines")
    parsing = RubricSettings(format="lines", max_criteria=4, copied=templates.rubric.examples)
    settings = GeneratorSettings(SamplingSettings(24), SamplingSettings(40, 0.7), parsing)
    generator = Generator(parts[0], templates=templates, settings=settings)
    rng = torch.Generator().manual_seed(7)
    groups = generator.rollouts([r.prompt for r in ROWS], 8, rng)
    return [JudgeItem(r.prompt, g.rubric, g.responses) for r, g in zip(ROWS, groups, strict=True)]


@pytest.fixture(scope="module")
def judge(parts, rollouts):
    judge = LikelihoodJudge(*parts)
    return judge.with_calibration(judge.calibrate(rollouts))


def test_most_rubrics_parse(rollouts):
    assert sum(item.rubric is not None for item in rollouts) >= 11


def test_scores_are_spread_and_the_same_when_asked_again(judge, rollouts):
    first, second = judge.score(rollouts), judge.score(rollouts)
    scores = np.concatenate([s for s in first.scores if np.isfinite(s).all()])
    assert scores.min() >= 0
    assert scores.max() <= 1
    assert scores.std() > 0.1
    assert (np.round(scores, 2) == scores).all()
    for a, b in zip(first.scores, second.scores, strict=True):
        np.testing.assert_array_equal(a, b)


def test_attacks_do_not_pay_and_ranks_beat_chance(judge, rollouts):
    outcomes = [[passes(i.prompt.check, r.text) for r in i.responses] for i in rollouts]
    report = judge_report(judge, rollouts, outcomes)
    print({k: round(v, 3) for k, v in report.items()})
    for name in ("empty", "prompt_copied", "rubric_echoed", "repetition"):
        assert report[f"attack_{name}"] <= 0.05, name
    # restating keeps `nothing_new` (a quarter) at most: right answers that repeat the prompt must not get 0
    assert report["attack_question_echoed"] <= 0.25
    assert report["attack_one_word"] <= 0.15
    assert (
        max(report["attack_keyword_stuffing"], report["attack_rubric_claimed"], report["attack_generic"])
        <= 0.5
    )
    assert report["auc_own_response"] >= 0.7
    assert report["auc_own_rubric"] >= 0.5
    assert report["auc_rules"] >= 0.55


def test_good_answers_beat_the_same_prompts_wrong_ones_only_on_topic(judge, rollouts):
    """It cannot see arithmetic: the packaged wrong answers are near misses. Off-topic ones it does see."""
    good = [Sample((), (), r.good, True) for r in ROWS]
    other = good[3:] + good[:3]
    items = [
        JudgeItem(i.prompt, i.rubric, (g, o))
        for i, g, o in zip(rollouts, good, other, strict=True)
        if i.rubric
    ]
    scores = np.array(judge.score(items).scores)
    assert auc(scores[:, 0].tolist(), scores[:, 1].tolist()) >= 0.85


def test_the_digit_judge_runs(parts, rollouts):
    live = [i for i in rollouts if i.rubric is not None][:2]
    result = DigitJudge(parts[0]).score([JudgeItem(i.prompt, i.rubric, i.responses[:2]) for i in live])
    scores = np.concatenate(result.scores)
    assert result.calls == 4
    assert ((scores > 0) & (scores < 1)).all()
