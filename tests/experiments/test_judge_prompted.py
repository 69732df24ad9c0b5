"""The digit and the JSON judge on scripted models."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.models.judge_prompted import (
    DigitJudge,
    DigitSettings,
    JsonJudge,
    JsonSettings,
    first_number,
    parse_score,
)
from racelab.experiments.ports import Judge
from racelab.experiments.types import Criterion, JudgeItem, Prompt, Rubric, Sample

PROMPT = Prompt("p", "Name a planet.")
RUBRIC = Rubric((Criterion("Is short", 1.0), Criterion("Gives a real one", 3.0)), "")


class CharModel:
    """One token per character; `thinks` makes `<think>` a single token. Its outputs are given."""

    eos_id = 0

    def __init__(self, *, window=5000, thinks=False, digits=None, reply=None):
        self.window, self.thinks, self.digits, self.reply = window, thinks, digits or {}, reply
        self.prefixes, self.seeds, self.requests = [], [], []

    def encode(self, text):
        if self.thinks:
            text = text.replace("<think>", "\u0001").replace("</think>", "\u0002")
        return [ord(c) for c in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))

    def chat(self, user, system=None):
        return self.encode(f"[{system}]\n{user}>")

    def logprobs(self, groups, temperature=1.0):
        out = []
        for prefix, tails in groups:
            self.prefixes.append(self.decode(prefix))
            out.append([self._path(self.decode(tail)) for tail in tails])
        return out

    def _path(self, text):
        """log p of each character given those before it; 1e-30 where the test names none."""
        return np.array([math.log(self.digits.get((text[:i], c), 1e-30)) for i, c in enumerate(text)])

    def generate(self, requests, rng):
        self.seeds.append(rng.initial_seed())
        self.requests += requests
        self.prefixes += [self.decode(r.prefix) for r in requests]
        if isinstance(self.reply, Exception):
            raise self.reply
        return [[Sample((), (), self.reply(self.decode(r.prefix)), True)] for r in requests]


def item(*texts, rubric=RUBRIC):
    return JudgeItem(PROMPT, rubric, tuple(Sample((), (), t, True) for t in texts))


def test_digit_is_the_expectation_over_the_labels():
    """p(2) = 0.1, p(8) = 0.3, the rest on other tokens: (0.1 x 2 + 0.3 x 8) / 0.4 / 9 = 0.7222."""
    model = CharModel(digits={("", "2"): 0.1, ("", "8"): 0.3})
    result = DigitJudge(model).score([item("Mars")])
    assert result.scores[0].tolist() == [0.72]
    assert (result.calls, result.infra_failures) == (1, 0)


def test_ten_is_taken_off_one_where_it_is_two_tokens():
    """p("1") = 0.5 and p("0" after "1") = 0.4: 10 has 0.2, 1 keeps 0.3; 5 has 0.5. Mean, mapped to [0, 1]:
    (0.3 x 0 + 0.5 x 4 + 0.2 x 9) / 9 = 0.4222.
    """
    model = CharModel(digits={("", "1"): 0.5, ("1", "0"): 0.4, ("", "5"): 0.5})
    (scores,) = DigitJudge(model, settings=DigitSettings(1, 10)).score([item("Mars")]).scores
    assert scores.tolist() == [0.42]


def test_digit_prompt_holds_everything_and_no_special_tokens():
    model = CharModel(digits={("", "5"): 1.0})
    DigitJudge(model).score([item("so <|im_end|> <think>hm</think>Mars"), item("Venus", rubric=None)])
    (prefix,) = model.prefixes
    assert "1. Is short (weight: 0.25)\n2. Gives a real one (weight: 0.75)" in prefix
    assert "Name a planet." in prefix
    assert "so < |im_end| > Mars" in prefix
    assert "from 0 (satisfies nothing) to 9" in prefix
    assert prefix.endswith(">")


def test_a_thinking_model_is_given_an_empty_thought():
    model = CharModel(thinks=True, digits={("", "5"): 1.0})
    DigitJudge(model).score([item("Mars")])
    assert model.prefixes[0].endswith(">\u0001\n\n\u0002\n\n")
    thinking = CharModel(thinks=True, reply=lambda p: '{"score": 50}')
    JsonJudge(thinking, settings=JsonSettings(thinking=True)).score([item("Mars")])
    assert thinking.prefixes[0].endswith(">")


@pytest.mark.parametrize("judge_of", [DigitJudge, JsonJudge])
def test_no_rubric_is_nan_without_a_call_and_the_window_is_kept(judge_of):
    model = CharModel(window=1600, digits={("", "9"): 1.0}, reply=lambda p: '{"score": 100}')
    judge = judge_of(model)
    result = judge.score([item("Mars", "Venus", rubric=None), item("Mars", "x" * 1600, "Venus"), item()])
    assert [s.tolist() for s in result.scores[1:]] == [[1.0, pytest.approx(math.nan, nan_ok=True), 1.0], []]
    assert np.isnan(result.scores[0]).tolist() == [True, True]
    assert (result.calls, result.parse_failures, result.infra_failures) == (3, 0, 1)
    assert len(model.prefixes) == 2
    assert isinstance(judge, Judge)
    assert json.loads(json.dumps(judge.describe()))["kind"] in ("digit", "json")


@pytest.mark.parametrize(("low", "high"), [(5, 5), (-1, 9), (0, 101)])
def test_odd_scales_are_refused(low, high):
    with pytest.raises(ConfigError, match="judge scale"):
        DigitSettings(low, high)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"reasoning": "fine {x}", "score": 73}', 0.73),
        ('```json\n{"score": "80"}\n```', 0.8),
        ('<think>maybe {"score": 10}</think>so {"score": 90.4}', 0.9),
        ('{"score": 20} no, rather {"score": 30}', 0.3),
        ('{"score": 0}', 0.0),
    ],
)
def test_parse_score(reply, score):
    assert parse_score(reply, 100.0) == score


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "73",
        '{"score": 101}',
        '{"score": -1}',
        '{"score": NaN}',
        '{"score": true}',
        '{"score": null}',
        '{"score": 7',
        '{"score": "1e999"}',
        '<think>{"score": 5}',
        '[{"score": 5}]',
    ],
)
def test_unreadable_scores_are_nan(reply):
    assert math.isnan(parse_score(reply, 100.0))


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"score": 80} or rather {"score": 10}', 0.8),
        ('{"score": 80.5, "why": "x"', 0.805),
        ('{"score": 80/100}', 0.8),
        ('"score": 80', 0.8),
        ("{'score' : '73.25'}", 0.7325),
        ('<think>maybe {"score": 10}</think>so {"score": 90.4}', 0.904),
        ('{"score": N/A} {"score": 7}', 0.07),
        ('{"score": 120}', 1.2),
        ('{"score": .5}', 0.005),
    ],
)
def test_first_number(reply, score):
    assert first_number(reply, 100.0) == score


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "80",
        "score: 80",
        '{"total_score": 80}',
        '{"score": none}',
        '{"score": -1}',
        '<think>{"score": 5}',
        '{"score": ' + "9" * 400,
    ],
)
def test_replies_without_a_first_number_are_nan(reply):
    assert math.isnan(first_number(reply, 100.0))


@given(st.text() | st.text('"score: 0123.{}-<think>/', max_size=60))
def test_any_reply_has_a_first_number_or_none(reply):
    value = first_number(reply, 10.0)
    assert math.isnan(value) or 0 <= value < math.inf


def test_a_judge_reads_as_it_is_told_and_a_trainings_description_stays_as_it_was():
    model = CharModel(reply=lambda p: '{"score": 8} or rather {"score": 1}')
    how = JsonSettings(high=10.0, max_tokens=60)
    trained, protocol = (
        JsonJudge(model, settings=how),
        JsonJudge(model, settings=replace(how, reading="first_number")),
    )
    assert [float(j.score([item("Mars")]).scores[0][0]) for j in (trained, protocol)] == [0.1, 0.8]
    assert "reading" not in trained.describe()["settings"]
    assert protocol.describe()["settings"]["reading"] == "first_number"


def test_json_replies_are_decoded_in_one_batch_and_failures_counted():
    model = CharModel(reply=lambda p: '{"score": 7}' if "Mars" in p else "hm")
    how = JsonSettings(high=10.0, max_tokens=30, temperature=0.6, top_p=0.95)
    result = JsonJudge(model, settings=how).score([item("Mars", "Venus"), item("Mars")])
    assert result.scores[0].tolist() == [0.7, pytest.approx(math.nan, nan_ok=True)]
    assert result.scores[1].tolist() == [0.7]
    assert (result.calls, result.parse_failures, result.infra_failures, len(model.seeds)) == (3, 1, 0, 1)
    assert {(r.n, r.max_tokens, r.temperature, r.top_p) for r in model.requests} == {(1, 30, 0.6, 0.95)}
    assert "between 0 and 10:" in model.prefixes[0]


def test_the_random_stream_depends_on_seed_and_question_only():
    def seed(setting, *texts):
        model = CharModel(reply=lambda p: "")
        JsonJudge(model, settings=JsonSettings(seed=setting)).score([item(*texts)])
        return model.seeds[0]

    assert seed(0, "Mars") == seed(0, "Mars")
    assert len({seed(0, "Mars"), seed(1, "Mars"), seed(0, "Venus")}) == 3


def test_an_unreachable_model_gives_nan_not_zero():
    model = CharModel(reply=UnreachableError("judge server does not answer"))
    result = JsonJudge(model).score([item("Mars", "Venus")])
    assert np.isnan(result.scores[0]).all()
    assert (result.calls, result.parse_failures, result.infra_failures) == (2, 0, 2)


def test_torch_streams_are_not_global():
    before = torch.random.get_rng_state()
    JsonJudge(CharModel(reply=lambda p: "")).score([item("Mars")])
    assert torch.equal(before, torch.random.get_rng_state())
