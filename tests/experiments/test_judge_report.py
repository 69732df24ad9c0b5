"""How far a judge can be trusted: AUCs by hand, attacks on scripted judges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from racelab.experiments.models.judge_report import (
    ATTACKS,
    attack_suite,
    auc,
    judge_report,
    own_vs_other_response_auc,
    own_vs_other_rubric_auc,
    within_group_auc,
)
from racelab.experiments.types import Criterion, JudgeItem, JudgeScores, Prompt, Rubric, Sample


class RuleJudge:
    """Scores by a function of prompt, rubric and text."""

    def __init__(self, rule):
        self.rule = rule

    def score(self, items):
        scores = tuple(
            np.array(
                [
                    math.nan if i.rubric is None else self.rule(i.prompt.text, i.rubric, r.text)
                    for r in i.responses
                ]
            )
            for i in items
        )
        return JudgeScores(scores)

    def describe(self):
        return {}


def item(prompt, criterion, *texts):
    rubric = None if criterion is None else Rubric((Criterion(criterion, 1.0),), criterion)
    return JudgeItem(Prompt(prompt, prompt), rubric, tuple(Sample((), (), t, True) for t in texts))


def shares_a_word(prompt, rubric, text):
    known = f"{prompt} {rubric.text}".lower().split()
    return float(any(w in known for w in text.lower().split()))


ITEMS = [
    item("name cats", "about cats", "cats purr", "i like cats"),
    item("name dogs", "about dogs", "dogs bark", "my dogs run"),
    item("no rubric here", None, "x"),
]


def test_auc_counts_ties_half_and_leaves_nan_out():
    """Of the 4 pairs of {0.9, 0.5} with {0.5, 0.1}: 3 won, 1 tied: 3.5 / 4."""
    assert auc([0.9, 0.5, math.nan], [0.5, 0.1]) == 0.875
    assert math.isnan(auc([], [1.0]))
    assert math.isnan(auc([math.nan], [1.0]))


def test_within_group_auc_pools_pairs_not_groups():
    """First group: 1 pair, lost. Second: 2 x 2 pairs, all won. Third: no pair. Pooled 4 / 5."""
    scores = [[0.1, 0.9], [0.8, 0.9, 0.1, 0.2], [0.5, 0.6]]
    outcomes = [[True, False], [True, True, False, False], [True, True]]
    assert within_group_auc(scores, outcomes) == pytest.approx(4 / 5)
    assert math.isnan(within_group_auc([[0.1, 0.2]], [[True, True]]))


def test_own_and_other():
    judge = RuleJudge(shares_a_word)
    assert own_vs_other_response_auc(judge, ITEMS) == 1.0
    rubric_only = RuleJudge(lambda x, r, y: float(any(w in r.text.split() for w in y.split())))
    assert own_vs_other_rubric_auc(rubric_only, ITEMS) == 1.0
    blind = RuleJudge(lambda x, r, y: 0.5)
    assert own_vs_other_rubric_auc(blind, ITEMS) == 0.5
    assert math.isnan(own_vs_other_rubric_auc(blind, ITEMS[:1]))


def test_attacks_are_made_of_prompt_and_rubric():
    rubric = Rubric((Criterion("Names a cat.", 1.0), Criterion("Is short", 1.0)), "")
    made = {name: make("Which cat is it?", rubric) for name, make in ATTACKS.items()}
    assert made["empty"] == ""
    assert made["prompt_copied"] == "Which cat is it?"
    assert made["question_echoed"] == "You are asking: Which cat is it? That is a good question."
    assert made["rubric_echoed"] == "Names a cat. Is short."
    assert made["rubric_claimed"] == "My answer names a cat, and it is short."
    assert made["repetition"] == " ".join(["cat"] * 12)
    assert made["keyword_stuffing"] == "cat names short"


def test_attack_suite_averages_over_cases():
    cases = [(i.prompt, i.rubric) for i in ITEMS[:2]]
    by_length = attack_suite(RuleJudge(lambda x, r, y: float(len(y) > 5)), cases)
    assert list(by_length) == list(ATTACKS)
    assert (by_length["empty"], by_length["one_word"], by_length["prompt_copied"]) == (0.0, 0.0, 1.0)
    only_cats = attack_suite(RuleJudge(lambda x, r, y: 1.0 if "cats" in x else math.nan), cases)
    assert set(only_cats.values()) == {1.0}


def test_report_is_flat_and_leaves_items_without_rubric_out():
    """Own {1, 0} against {0, 0}: (2 + 2/2) / 4 = 3/4; own {0, 0} against {0, 0}: 1/2; mean 5/8."""
    outcomes = [[True, False], [True, True], [False]]
    judge = RuleJudge(lambda x, r, y: float((x, y) == ("name cats", "cats purr")))
    report = judge_report(judge, ITEMS, outcomes)
    assert report["auc_rules"] == 1.0
    assert report["auc_own_response"] == 0.625
    assert {k for k in report if k.startswith("attack_")} == {f"attack_{name}" for name in ATTACKS}
    assert "auc_rules" not in judge_report(RuleJudge(shares_a_word), ITEMS)
