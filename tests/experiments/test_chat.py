"""A model of this process as text in, text out, on a tiny random Llama."""

from __future__ import annotations

import pytest
import torch

from racelab.experiments.backends.local.model import LocalModel, open_language_model
from racelab.experiments.models.chat import Calls, ChatModel, ChatRequest, LocalChat, Reply
from racelab.experiments.types import GenerationRequest

from .tiny_run import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    torch.set_num_threads(1)
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return open_language_model(folder, role="frozen", compute_dtype="float32", window=300)


def sampled(text: str, draw: int = 0, max_tokens: int = 12) -> ChatRequest:
    return ChatRequest(None, text, max_tokens, temperature=1.0, draw=draw)


def test_a_greedy_reply_is_the_models_own(model: LocalModel) -> None:
    chat = LocalChat(model)
    assert isinstance(chat, ChatModel)
    requests = [ChatRequest("Be brief.", f"Question {i}", 5 + i) for i in range(5)]
    expected = [
        model.generate(
            [GenerationRequest(tuple(model.chat(r.user, r.system)), 1, r.max_tokens, 0.0)],
            torch.Generator(),
        )[0][0]
        for r in requests
    ]
    assert chat.complete(requests) == [Reply(s.text, s.finished) for s in expected]


def test_a_sampled_reply_does_not_depend_on_what_else_is_asked(model: LocalModel) -> None:
    chat = LocalChat(model, seed=3)
    (alone,) = chat.complete([sampled("Why?")])
    others = [ChatRequest(None, "greedy", 4), sampled("Why not?"), sampled("Why?", draw=1)]
    mixed = LocalChat(model, seed=3, batch=1).complete([*others, sampled("Why?")])
    assert mixed[3] == alone
    assert mixed[1:3] == chat.complete(others)[1:]  # and asking again gives the same


def test_another_draw_or_seed_gives_another_reply(model: LocalModel) -> None:
    chat = LocalChat(model, seed=3)
    texts = [r.text for r in chat.complete([sampled("Why?", draw=i) for i in range(4)])]
    texts += [r.text for r in LocalChat(model, seed=4).complete([sampled("Why?")])]
    assert len(set(texts)) == 5


def test_replies_are_in_the_order_of_the_requests_whatever_the_batches(model: LocalModel) -> None:
    requests = [sampled(str(i)) if i % 2 else ChatRequest(None, str(i), 6) for i in range(7)]
    together = LocalChat(model, batch=2).complete(requests)
    assert together == [LocalChat(model).complete([r])[0] for r in requests]


def test_a_request_beyond_the_window_fails_alone(model: LocalModel) -> None:
    """One byte is one token: the chat template adds `<bos>user:` and `<eos><bos>a:`, 6 + 4 = 10 tokens."""
    chat = LocalChat(model)
    short, long = ChatRequest(None, "x" * 20, 6), ChatRequest(None, "x" * 285, 6)
    replies = chat.complete([short, long, short])
    assert replies[1] == Reply(
        None,
        finished=False,
        error="295 tokens of prompt + 6 to generate exceed the model's window of 300",
    )
    assert replies[0] == replies[2]
    assert replies[0].text is not None
    assert (chat.calls.made, chat.calls.failed, chat.calls.prompt_tokens) == (3, 1, 60)
    assert chat.complete([ChatRequest(None, "x" * 284, 6)])[0].text is not None  # exactly full


def test_a_cut_reply_says_so(model: LocalModel) -> None:
    replies = LocalChat(model).complete([sampled("a", draw=i, max_tokens=1) for i in range(3)])
    assert [r.finished for r in replies] == [False, False, False]
    assert LocalChat(model).calls == Calls()


def test_text_cannot_end_its_own_turn() -> None:
    class Recorder:
        eos_id, window = 0, 100

        def chat(self, user: str, system: str | None = None) -> list[int]:
            self.seen = (system, user)
            return [1] * 200

    recorder = Recorder()
    LocalChat(recorder).complete([ChatRequest("s<|im_end|>", "u<|im_start|>", 5)])  # type: ignore[arg-type]
    assert recorder.seen == ("s< |im_end| >", "u< |im_start| >")


def test_nothing_asked_is_nothing_done(model: LocalModel) -> None:
    chat = LocalChat(model, seed=5, model_id="tiny")
    assert chat.complete([]) == []
    assert chat.calls == Calls()
    assert chat.describe() == {"kind": "local", "model": "tiny", "seed": 5}


def test_counts_add_and_subtract() -> None:
    a, b = Calls(1, 2, 3, 4, 5, 6), Calls(10, 20, 30, 40, 50, 60)
    assert a + b == Calls(11, 22, 33, 44, 55, 66)
    assert b - a == Calls(9, 18, 27, 36, 45, 54)
