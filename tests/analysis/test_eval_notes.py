"""What the summary of an evaluation says of its quirks and of a judge that draws nothing."""

from __future__ import annotations

import pytest

from racelab.analysis.eval_summary import _one_game, _quirk_notes
from racelab.configs.compose import compose
from racelab.configs.schema_eval import EvalRunConfig


def config(*words: str) -> EvalRunConfig:
    made = compose(words).config
    assert isinstance(made, EvalRunConfig)
    return made


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["suite=race"], []),
        (["suite=rubric", "eval.quirks=[]"], []),
        (["suite=race", "eval.quirks=[judgebench-system-twice]", "eval.benchmarks=[popqa]"], []),
        (
            ["suite=rubric", "eval.quirks=[rewardbench2-any-credit]"],
            ["quirks on that the protocol does not have: rewardbench2-any-credit"],
        ),
        (
            ["suite=race", "eval.benchmarks=[gsm8k]", "eval.quirks=[]"],
            ["quirks of the protocol that are off: gsm8k-unsigned"],
        ),
    ],
)
def test_only_quirks_of_what_was_asked_are_spoken_of(words: list[str], said: list[str]) -> None:
    assert _quirk_notes(config(*words)) == said


@pytest.mark.parametrize(
    ("words", "games"),
    [
        (["judge=likelihood"], 1),
        (["judge=digit"], 1),
        (["judge=json"], 1),
        (["judge=api"], 1),
        (["judge=api-thinking"], 2),
        (["judge=qwen3-1.7b"], 2),
        (["eval.rater=reward-model"], 2),  # it is no judge; its two games are one by nature
    ],
)
def test_a_judge_that_draws_nothing_plays_one_game_and_the_summary_says_so(
    words: list[str], games: int
) -> None:
    notes = _one_game(config("suite=rubric", *words))
    assert ["its two games are one" in note for note in notes] == [True] * (2 - games)
