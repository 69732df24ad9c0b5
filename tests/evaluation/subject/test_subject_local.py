"""Answers of a model of this process: the same whatever was answered before, cut at stops, and never dropped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.backends.local.model import LocalModel, open_language_model
from racelab.experiments.evaluation.subject.local import LocalSubject, stretches
from racelab.experiments.evaluation.types import Answer, Ask, Subject
from racelab.experiments.types import GenerationRequest, Sample

from .worlds import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return open_language_model(folder, role="frozen", compute_dtype="float32", window=120)


def asks(count: int, **more: Any) -> list[Ask]:
    return [Ask(f"question {i}", max_tokens=8 + i % 3, temperature=1.0, **more) for i in range(count)]


def test_what_is_answered_does_not_depend_on_what_is_still_wanted(model: LocalModel) -> None:
    """Killed after any number of answers and gone on with, an evaluation gives what an uninterrupted one would."""
    questions = [*asks(5), Ask("three answers", n=3, max_tokens=9, temperature=0.8), Ask("x" * 400), *asks(4)]
    subject = LocalSubject(model, seed=5, batch=4)
    whole = dict(subject.answers(questions, range(len(questions)), "bench"))
    assert list(whole) == list(range(len(questions)))
    again = LocalSubject(model, seed=5, batch=4)
    for done in (1, 5, 9):
        rest = dict(again.answers(questions, range(done, len(questions)), "bench"))
        assert rest == {i: whole[i] for i in range(done, len(questions))}
    assert dict(again.answers(questions, [7, 2], "bench")) == {i: whole[i] for i in (2, 7)}
    assert len(set(whole[5])) > 1


def test_seed_and_purpose_name_the_draws(model: LocalModel) -> None:
    def given_to(seed: int, purpose: str) -> object:
        return dict(LocalSubject(model, seed=seed).answers(asks(2), [0, 1], purpose))

    assert isinstance(LocalSubject(model, seed=1), Subject)
    assert given_to(1, "a") == given_to(1, "a")
    assert given_to(1, "a") != given_to(2, "a")
    assert given_to(1, "a") != given_to(1, "b")


def test_an_answer_has_the_room_that_budget_and_window_leave(model: LocalModel) -> None:
    """The prompt is one token per byte: 100 of the 120, so 20 of the 30 tokens wanted fit, unless it ends before."""
    texts = [Ask("y" * 100, max_tokens=room, layout="text", temperature=1.0) for room in (30, 5)]
    answers = dict(LocalSubject(model, seed=0).answers(texts, [0, 1], "p"))
    for i, room in enumerate((20, 5)):
        (answer,) = answers[i]
        assert answer.n_tokens == room or (answer.finished and answer.n_tokens < room)


def test_a_question_beyond_the_window_is_answered_with_nothing_and_says_so(model: LocalModel) -> None:
    questions = [Ask("z" * 120, layout="text", n=2), Ask("", layout="text"), Ask("ok", max_tokens=2)]
    answers = dict(LocalSubject(model, seed=0).answers(questions, range(3), "p"))
    why = "prompt of 120 tokens exceeds the window of 120"
    assert answers[0] == (Answer("", finished=False, error=why),) * 2
    assert answers[1][0].error == "the prompt is empty"
    assert answers[2][0].n_tokens > 0
    assert dict(LocalSubject(model, seed=0).answers(questions[:1], [0], "p"))[0] == answers[0]


class Scripted:
    """Says what it is told to; notes the requests."""

    eos_id, window = 0, 1000

    def __init__(self, texts: Sequence[str], thinks: bool) -> None:
        self.texts, self.thinks, self.requests = list(texts), thinks, list[GenerationRequest]()

    def encode(self, text: str) -> list[int]:
        return [1] if text == "<think>" and self.thinks else [ord(c) for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def chat(self, user: str, system: str | None = None) -> list[int]:
        return self.encode(f"[{system}|{user}]")

    def generate(self, requests: Sequence[GenerationRequest], rng: Any) -> list[list[Sample]]:
        self.requests += requests
        return [
            [Sample((1, 2), (0.0, 0.0), text, True) for text in [self.texts.pop(0)] * r.n] for r in requests
        ]

    def logprobs(self, groups: Any, temperature: float = 1.0) -> Any:
        raise AssertionError("nobody asks for log-probs")


def test_the_question_reaches_the_model_as_it_stands() -> None:
    fake = Scripted(["a", "b"], thinks=False)
    questions = [
        Ask("<|im_end|> ?", n=2, max_tokens=5, temperature=0.6, top_p=0.95, system="be"),
        Ask("Q: 1\nA:", layout="text", stop=("\n", "Q:"), max_tokens=2000),
    ]
    list(LocalSubject(fake, seed=0).answers(questions, [0, 1], "p"))
    first, second = fake.requests
    assert fake.decode(first.prefix) == "[be|<|im_end|> ?]"
    assert (first.n, first.max_tokens, first.temperature, first.top_p) == (2, 5, 0.6, 0.95)
    assert fake.decode(second.prefix) == "Q: 1\nA:"
    assert (second.stop, second.max_tokens) == (("\n", "Q:"), 993)


def test_an_answer_ends_before_the_first_stop_string_as_a_server_gives_it() -> None:
    fake = Scripted([" 42 \nQ: next"], thinks=False)
    ((_, (answer,)),) = LocalSubject(fake, seed=0).answers([Ask("q", stop=("Q:", "\n"))], [0], "p")
    assert answer == Answer(" 42 ", n_tokens=2)


@pytest.mark.parametrize(
    ("thinks", "configured", "asked", "closed"),
    [
        (True, None, None, False),
        (True, False, None, True),
        (True, False, True, False),
        (True, None, False, True),
        (False, False, False, False),
    ],
)
def test_thinking_is_closed_in_front_of_the_answer(
    thinks: bool, configured: bool | None, asked: bool | None, closed: bool
) -> None:
    fake = Scripted(["a"], thinks)
    list(LocalSubject(fake, seed=0, thinking=configured).answers([Ask("q", thinking=asked)], [0], "p"))
    assert fake.decode(fake.requests[0].prefix).endswith("</think>\n\n") is closed


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 8))
def test_stretches_hold_every_question_once_and_no_more_answers_than_allowed(
    counts: list[int], batch: int
) -> None:
    found = stretches(counts, batch)
    assert [i for part in found for i in part] == list(range(len(counts)))
    assert all(len(part) == 1 or sum(counts[i] for i in part) <= batch for part in found)


def test_stretches_of_single_answers_are_fixed_places() -> None:
    assert stretches([1] * 7, 3) == [range(3), range(3, 6), range(6, 7)]
    assert stretches([], 3) == []


def test_what_it_says_of_itself(model: LocalModel, tmp_path: Path) -> None:
    subject = LocalSubject(model, seed=3, batch=2, thinking=True, facts={"kind": "folder", "sha256": "ab"})
    assert subject.describe() == {
        "kind": "folder", "sha256": "ab", "window": 120, "batch": 2, "seed": 3, "thinking": True,
    }  # fmt: skip
    assert subject.language_model is model
    subject.close()
