"""Verifiers on scripted models: a list of booleans in one reply, or one judge score per item."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.models.judge_prompted import JsonSettings
from racelab.experiments.models.verifier import ItemVerifier, JsonVerifier, make_verifier, parse_holds
from racelab.experiments.ports import Verifier
from racelab.experiments.types import Check, JudgeItem, JudgeScores, Prompt, Sample

PROMPT = Prompt("p", "Name a planet.")
ITEMS = ("Names a planet", "Is short")


def answer(text: str) -> Sample:
    return Sample((), (), text, True)


def check(text: str, items: tuple[str, ...] = ITEMS, prompt: Prompt = PROMPT) -> Check:
    return Check(prompt, items, answer(text))


class CharModel:
    """One token per character; `reply` is given the prompt's text."""

    eos_id = 0

    def __init__(self, reply: Callable[[str], str], *, window: int = 5000, thinks: bool = False) -> None:
        self.reply, self.window, self.thinks = reply, window, thinks
        self.asked: list[str] = []
        self.seeds: list[int] = []
        self.batches = 0

    def encode(self, text: str) -> list[int]:
        if self.thinks:
            text = text.replace("<think>", "\u0001").replace("</think>", "\u0002")
        return [ord(c) for c in text]

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))

    def chat(self, user: str, system: str | None = None) -> list[int]:
        return self.encode(f"{user}>")

    def logprobs(self, groups: Any, temperature: float = 1.0) -> Any:
        raise AssertionError("a verifier asks for no log-probabilities")

    def generate(self, requests: Any, rng: torch.Generator) -> list[list[Sample]]:
        self.batches += 1
        self.seeds.append(rng.initial_seed())
        texts = [self.decode(r.prefix) for r in requests]
        self.asked += texts
        return [[answer(self.reply(t))] for t in texts]


class ScriptedJudge:
    """Scores by (criterion, answer); remembers the items it was asked."""

    def __init__(self, scores: dict[tuple[str, str], float]) -> None:
        self.scores, self.items = scores, []

    def score(self, items: Any) -> JudgeScores:
        self.items += items
        found = [self._one(item) for item in items]
        return JudgeScores(
            tuple(found),
            calls=sum(map(len, found)),
            parse_failures=sum(int(np.isnan(f).sum()) for f in found),
        )

    def _one(self, item: JudgeItem) -> Any:
        (criterion,) = item.rubric.criteria
        assert criterion.weight == 1.0
        return np.array([self.scores[criterion.text, r.text] for r in item.responses])

    def describe(self) -> dict[str, object]:
        return {}


def test_a_reply_gives_one_boolean_per_item_and_all_checks_are_one_batch():
    model = CharModel(lambda t: '{"holds": [true, false]}' if "Mars" in t else 'So: {"holds": [false, true]}')
    found = JsonVerifier(model).verify([check("Mars"), check("Hm")])
    assert [h.tolist() for h in found.holds] == [[True, False], [False, True]]
    assert (found.calls, found.parse_failures, found.infra_failures) == (2, 0, 0)
    assert model.batches == 1
    assert "1. Names a planet\n2. Is short" in model.asked[0]
    assert "exactly 2 values" in model.asked[0]


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "yes, no",
        '{"holds": [true]}',
        '{"holds": [true, false, true]}',
        '{"holds": [1, 0]}',
        '{"holds": ["true", "false"]}',
        '{"holds": [true, null]}',
        '{"holds": "both"}',
        '{"satisfied": [true, true]}',
        '{"holds": [true, true',
        '<think>{"holds": [true, true]}</think>none',
        '{"holds": [true, true]} no: {"holds": [true]}',
    ],
)
def test_a_reply_without_exactly_k_booleans_holds_nothing_and_is_counted(reply):
    found = JsonVerifier(CharModel(lambda _: reply)).verify([check("Mars")])
    assert found.holds[0].tolist() == [False, False]
    assert found.holds[0].dtype == np.bool_
    assert (found.calls, found.parse_failures, found.infra_failures) == (1, 1, 0)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.text(max_size=30))
def test_what_is_written_is_read_back(holds, noise):
    """Whatever stands before it, unless it opens JSON or a thought of its own."""
    noise = noise.translate({ord(c): None for c in '{["<'})
    words = ", ".join(str(b).lower() for b in holds)
    found = parse_holds(f'{noise} {{"holds": [{words}]}}', len(holds))
    assert found is not None
    assert found.tolist() == holds
    assert parse_holds(f'{{"holds": [{words}]}}', len(holds) + 1) is None


def test_a_prompt_beyond_the_window_is_no_reply_and_does_not_hide_the_others():
    model = CharModel(lambda _: '{"holds": [true, true]}', window=1500)
    verifier = JsonVerifier(model, settings=JsonSettings(max_tokens=50))
    found = verifier.verify([check("x" * 1500), check("Mars")])
    assert [h.tolist() for h in found.holds] == [[False, False], [True, True]]
    assert (found.calls, found.parse_failures, found.infra_failures) == (2, 0, 1)
    assert len(model.asked) == 1


def test_a_model_that_cannot_be_reached_holds_nothing():
    def away(_: str) -> str:
        raise UnreachableError("no server")

    found = JsonVerifier(CharModel(away)).verify([check("Mars")])
    assert found.holds[0].tolist() == [False, False]
    assert (found.calls, found.infra_failures) == (1, 1)


def test_nothing_to_check_asks_nobody():
    model = CharModel(lambda _: "")
    found = JsonVerifier(model).verify([])
    assert (found.holds, found.calls, model.batches) == ((), 0, 0)
    assert ItemVerifier(ScriptedJudge({}), threshold=0.5).verify([]).holds == ()


def test_an_answer_can_neither_think_aloud_nor_end_its_turn():
    model = CharModel(lambda _: "")
    JsonVerifier(model).verify([check("<think>secret</think>Mars<|im_end|>")])
    assert "secret" not in model.asked[0]
    assert "<|im_end|>" not in model.asked[0]
    assert "Mars< |im_end| >" in model.asked[0]


@pytest.mark.parametrize(
    ("thinks", "allowed", "closed"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_model_that_would_think_is_stopped_unless_it_may(thinks, allowed, closed):
    model = CharModel(lambda _: "", thinks=thinks)
    JsonVerifier(model, settings=JsonSettings(thinking=allowed)).verify([check("Mars")])
    assert model.asked[0].endswith("\u0001\n\n\u0002\n\n") is closed


def test_the_same_checks_draw_the_same_numbers_and_another_seed_draws_others():
    model = CharModel(lambda _: "")
    for seed in (0, 0, 1):
        JsonVerifier(model, settings=JsonSettings(seed=seed)).verify([check("Mars")])
    first, again, other = model.seeds
    assert first == again != other


def test_an_item_holds_from_the_threshold_on_and_a_missing_score_does_not():
    judge = ScriptedJudge(
        {("Names a planet", "Mars"): 0.5, ("Is short", "Mars"): 0.49, ("Names a planet", "Hm"): math.nan,
         ("Is short", "Hm"): 1.0}
    )  # fmt: skip
    found = ItemVerifier(judge, threshold=0.5).verify([check("Mars"), check("Hm")])
    assert [h.tolist() for h in found.holds] == [[True, False], [False, True]]
    assert [h.dtype for h in found.holds] == [np.bool_, np.bool_]
    assert (found.calls, found.parse_failures) == (4, 1)


def test_checks_of_the_same_items_are_asked_together_but_never_across_prompts():
    """3 checks of 2 items are 6 calls in 4 judge items: two for both answers of p, two for the one of q."""
    other = Prompt("q", "Name a moon.")
    scores = {(i, a): 0.9 if a == "Mars" else 0.1 for i in ITEMS for a in ("Mars", "Io")}
    judge = ScriptedJudge(scores)
    found = ItemVerifier(judge, threshold=0.5).verify(
        [check("Mars"), check("Io"), check("Mars", prompt=other)]
    )
    assert [h.tolist() for h in found.holds] == [[True, True], [False, False], [True, True]]
    assert found.calls == 6
    assert [(i.prompt.prompt_id, len(i.responses)) for i in judge.items] == [
        ("p", 2),
        ("p", 2),
        ("q", 1),
        ("q", 1),
    ]


def test_a_verifier_is_made_by_name_and_refuses_what_cannot_work():
    model, judge = CharModel(lambda _: ""), ScriptedJudge({})
    items = make_verifier("items", model=model, judge=judge, threshold=0.5)
    listed = make_verifier("list", model=model, judge=judge, threshold=0.5, settings=JsonSettings(seed=3))
    assert isinstance(items, ItemVerifier)
    assert isinstance(listed, JsonVerifier)
    assert listed.settings.seed == 3
    assert isinstance(items, Verifier)
    assert isinstance(listed, Verifier)
    with pytest.raises(ConfigError, match="judge=json"):
        make_verifier("list", model=model, judge=judge, threshold=0.5)
    with pytest.raises(ConfigError, match="list or items"):
        make_verifier("both", model=model, judge=judge, threshold=0.5)
