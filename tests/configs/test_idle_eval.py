"""Words of an evaluation that change nothing: refused with the word and the mend, and only then."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from racelab.configs.compose import compose, read_composed
from racelab.configs.idle_eval import RULES, refuse_idle
from racelab.configs.keys import EVAL, leaf_keys, section_keys
from racelab.configs.schema_eval import QUIRK_BENCHMARKS, EvalRunConfig
from racelab.experiments.errors import ConfigError

RACE, RUBRIC = ("suite=race",), ("suite=rubric",)
GSM8K = (*RACE, "eval.benchmarks=[gsm8k]")
STOCK = (*RACE, "eval.protocol=lm-eval")
REWARD = (*RUBRIC, "eval.rater=reward-model")
URL, HERE = "http://host/v1", "org/model"


@cache
def built(*words: str) -> EvalRunConfig:
    config = compose(words).config
    assert isinstance(config, EvalRunConfig)
    return config


def refuse(base: Sequence[str], words: Sequence[str], *sources: str) -> None:
    refuse_idle(words, built(*base, *words), sources)


@pytest.mark.parametrize(
    ("base", "word", "source", "said"),
    [
        (RACE, "judge=api", HERE, "add --suite rubric"),
        (RACE, "judge=likelihood", HERE, "add --suite rubric"),  # the default, and typed all the same
        (RACE, "judge.slope=2", HERE, "add --suite rubric"),
        (RACE, "rubric.max_tokens=9", HERE, "add --suite rubric"),
        (RACE, "encoder=minilm", HERE, "add --suite rubric"),
        (RACE, "encoder.max_length=9", HERE, "add --suite rubric"),
        (RACE, "eval.judgebench_split=claude", HERE, "add --suite rubric"),
        (RACE, "eval.rater=rubric", HERE, "add --suite rubric"),
        (RACE, "backend=verl", HERE, "elsewhere and give its URL"),
        (RACE, "subject.compute_dtype=bfloat16", URL, "behind a URL"),
        (RACE, "eval.batch=4", URL, "server.concurrency"),
        (RACE, "server.concurrency=4", HERE, "on this machine"),
        (GSM8K, "eval.budgets={gsm8k: 5, mmlu: 9}", HERE, "mmlu is not asked; leave it out, or add mmlu"),
        (GSM8K, "eval.data.mmlu=x", HERE, "mmlu is not asked"),
        (GSM8K, "eval.code.timeout_s=3", HERE, "only mbpp_plus"),
        (GSM8K, "eval={limit: 3, code: {memory_mb: 99}}", HERE, "only mbpp_plus"),
        (STOCK, "eval.code.workers=3", HERE, "one program at a time"),
        (STOCK, "eval.think_end=x", HERE, "lm-eval scores as it does"),
        (STOCK, "eval.thinking=protocol", HERE, "lm-eval scores as it does"),
        (STOCK, "eval.quirks=[]", HERE, "lm-eval scores as it does"),
        (RUBRIC, "eval.thinking=keep", HERE, "the rubric suite takes thinking out"),
        (RUBRIC, "eval.think_end=x", HERE, "the rubric suite takes thinking out"),
        (REWARD, "judge=api", HERE, "asks no judge"),
        (REWARD, "judge.slope=2", HERE, "asks no judge"),
        (REWARD, "subject.engine=fast", HERE, "asks no judge"),
        (REWARD, "eval.batch=3", HERE, "asks no judge"),
        (REWARD, "rubric.max_tokens=3", HERE, "asks no judge"),
        (REWARD, "encoder.max_length=9", HERE, "asks no judge"),
        ((*RUBRIC, "judge=digit"), "encoder.max_length=9", HERE, "only judge=likelihood"),
        ((*RUBRIC, "eval.benchmarks=[judgebench]"), "rubric.temperature=0", HERE, "rubric.retry_temperatures"),
        ((*RUBRIC, "eval.benchmarks=[rewardbench2]"), "rubric.retry_temperatures=[1]", HERE, "asks for a rubric again"),
        ((*RUBRIC, "eval.data.judgebench=x"), "eval.judgebench_split=gpt", HERE, "on the hub"),
        (RACE, "eval.quirks=[judgebench-system-twice]", HERE, "leave judgebench-system-twice out"),
        (RACE, "eval.quirks=[article-a,rewardbench2-any-credit]", HERE, "leave rewardbench2-any-credit out"),
        (GSM8K, "eval.quirks=[article-a]", HERE, "is of mmlu, gpqa, agieval, not asked here"),
    ],
)  # fmt: skip
def test_a_word_that_says_nothing_is_refused(
    base: tuple[str, ...], word: str, source: str, said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        refuse(base, [word], source)
    assert str(error.value).startswith(f"{word}: changes nothing here: ")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("base", "words", "source"),
    [
        (RACE, ["backend=local", "eval.batch=4", "subject.compute_dtype=bfloat16"], HERE),
        (RACE, ["server.concurrency=4", "eval.max_tokens=9", "subject.thinking=true"], URL),
        (RACE, ["eval.quirks=[]", "eval.code.workers=2", "eval.budgets={gsm8k: 3}", "eval.data.bbh=x"], HERE),
        (RACE, ["eval.thinking=strip", "eval.think_end='</t>'", "eval.quirks=[article-a,token-override]"], URL),
        (STOCK, ["eval.code.timeout_s=3", "eval.max_tokens=9"], HERE),
        (RUBRIC, ["judge=api", "judge.high=10", "rubric.temperature=0", "eval.judgebench_split=claude"], HERE),
        (RUBRIC, ["encoder.max_length=9", "judge.slope=2", "eval.quirks=[rewardbench2-any-credit]"], HERE),
        (REWARD, ["subject.compute_dtype=bfloat16", "eval.judgebench_split=claude", "subject.max_length=9"], HERE),
    ],
)  # fmt: skip
def test_a_word_that_is_heard_is_not_refused(base: tuple[str, ...], words: list[str], source: str) -> None:
    refuse(base, words, source)


def test_a_word_that_several_models_share_need_be_heard_by_one_only() -> None:
    refuse(RACE, ["eval.batch=4", "server.concurrency=3"], URL, HERE)
    with pytest.raises(ConfigError, match=r"eval\.batch"):
        refuse(RACE, ["eval.batch=4"], URL, "HTTPS://other/v1")


def test_the_message_names_the_option_that_was_typed_once() -> None:
    words = ["judge=api-thinking", "judge.base_url=x"]
    with pytest.raises(ConfigError) as error:
        refuse_idle(words, built(*RACE, *words), (), dict.fromkeys(words, "--judge x"))
    assert str(error.value).startswith("--judge x: changes nothing here")
    assert len(str(error.value).splitlines()) == 1


def test_every_word_that_says_nothing_has_a_line() -> None:
    with pytest.raises(ConfigError) as error:
        refuse(GSM8K, ["eval.limit=1", "eval.data.bbh=x", "rubric.top_p=1"], HERE)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == [
        "eval.data.bbh=x",
        "rubric.top_p=1",
    ]


def test_a_config_with_such_values_is_read_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    composed = compose([*GSM8K, "eval.batch=4", "eval.data.mmlu=x", "judge=api", "backend=verl"])
    file = tmp_path / "composed.yaml"
    file.write_text(composed.yaml)
    assert read_composed(file).config == composed.config


def test_the_rules_speak_of_keys_that_there_are() -> None:
    known = {*leaf_keys(EVAL), *section_keys(EVAL)}
    assert {key for rule in RULES for key in rule.keys} <= known
    assert {name for of in QUIRK_BENCHMARKS.values() for name in of} <= {
        key.rpartition(".")[2] for key in leaf_keys(EVAL) if key.startswith("eval.data.")
    }
