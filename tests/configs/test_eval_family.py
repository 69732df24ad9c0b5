"""The evaluation family of configurations: what ships, what is refused, and what belongs to whom."""

from __future__ import annotations

import re

import pytest

from racelab.configs.compose import compose, read_composed
from racelab.configs.keys import EVAL, family_of, groups, leaf_keys
from racelab.configs.schema_eval import BENCHMARKS, PROTOCOL_QUIRKS, RACE_SUITE, RUBRIC_SUITE, EvalRunConfig
from racelab.experiments.errors import ConfigError


def built(*words: str) -> EvalRunConfig:
    config = compose(words).config
    assert isinstance(config, EvalRunConfig)
    return config


def test_a_suite_makes_an_evaluation() -> None:
    assert family_of([("suite", "race")]) is EVAL
    assert groups((), EVAL)["suite"] == ["ifeval", "race", "rubric"]
    assert built("suite=race").eval.benchmarks == RACE_SUITE
    assert built("suite=ifeval").eval.benchmarks == ("ifeval",)
    assert built("suite=rubric").eval.benchmarks == RUBRIC_SUITE


def test_every_benchmark_has_a_path_of_its_own() -> None:
    keys = leaf_keys(EVAL)
    assert [name for name in BENCHMARKS if f"eval.data.{name}" not in keys] == []


def test_a_stored_evaluation_is_read_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    composed = compose(["suite=ifeval", "eval.limit=3", "subject.source='http://127.0.0.1:1/v1'"])
    file = tmp_path / "composed.yaml"
    file.write_text(composed.yaml)
    assert read_composed(file).config == composed.config


def test_the_quirks_in_force_are_the_protocols_unless_they_are_named() -> None:
    assert built("suite=race").eval.in_force == frozenset(PROTOCOL_QUIRKS)
    assert built("suite=race", "eval.quirks=[]").eval.in_force == frozenset()
    assert built("suite=race", "eval.quirks=[token-override]").eval.in_force == {"token-override"}
    assert built("suite=race", "eval.protocol=lm-eval").eval.in_force == frozenset()


def test_the_smallest_bound_counts() -> None:
    e = built("suite=race", "eval.max_tokens=100", "eval.budgets={gsm8k: 50, mmlu: 200}").eval
    assert [e.budget("gsm8k"), e.budget("mmlu"), e.budget("bbh")] == [50, 100, 100]
    assert built("suite=race").eval.budget("gsm8k") is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["suite=rase"], "did you mean suite=race"),
        (["suite=race", "eval.suite=ifeval"], "write suite=ifeval or suite=race or suite=rubric"),
        (["suite=race", "eval.benchmarks=[judgebench]"], "belongs to --suite rubric"),
        (["suite=rubric", "eval.benchmarks=[gsm8k]"], "does not belong to --suite rubric"),
        (["suite=race", "eval.benchmarks=[gsm8k,gsm8k]"], "names one twice"),
        (["suite=race", "eval.rater=reward-model"], "is for --suite rubric"),
        (["suite=rubric", "eval.protocol=lm-eval"], "has no rubric suite"),
        (["suite=race", "eval.protocol=lm-eval", "eval.quirks=[article-a]"], "are olmo3-adapt's"),
        (
            ["suite=race", "method.group_size=4"],
            "a key of RACE runs; this is one of evaluation; leave it out",
        ),
        (["suite=race", "preset=paper"], "a key of RACE runs"),
        (["eval.limit=3"], "`racelab eval` takes it"),
        (["task=frozenlake", "subject.source=x"], "a key of evaluation runs; this is one of RLDS"),
    ],
)
def test_what_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        compose(words)
