"""`racelab eval` of a model behind our own `serve judge`: the whole way over HTTP, with nothing set but the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from racelab.cli.serve_chat import ChatServer

from ..experiments.api_server import ApiServer, Behaviour, ok
from ..experiments.tiny_run import write_tiny_model
from .conftest import Result
from .test_eval import SUMS, boxed, gsm8k, rows, runs, write
from .test_serve_judge import serving

Call = Callable[..., Result]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RACELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    """The engine of `serve judge` with a tiny model, whose window holds the questions and some 50 tokens more."""
    from racelab.experiments.backends.local.model import open_language_model

    folder = write_tiny_model(tmp_path_factory.mktemp("served") / "model")
    model = open_language_model(folder, role="frozen", compute_dtype="float32", window=400)
    with serving(model) as server:
        yield server


def test_our_own_server_answers_the_protocol_s_questions_with_the_room_that_they_leave(
    call: Call, home: Path, own: ChatServer
) -> None:
    done = call(
        "eval", own.url, "--benchmarks", "gsm8k", f"eval.data.gsm8k={gsm8k(home)}", "tracking=none", "--json"
    )
    assert done.code == 0, done.err
    answers = rows(runs(home / "runs")[0], "eval_answers")
    assert len(answers) == len(SUMS)
    for row in answers:
        assert (row["error"], bool(row["text"])) == ("", True)
        assert row["finished"] or 20 < row["n_tokens"] < 100


def test_a_question_that_fills_the_window_is_answered_with_nothing_as_on_this_machine(
    call: Call, home: Path, own: ChatServer
) -> None:
    data = gsm8k(home, [("a sum" + " and one" * 60, 61), *SUMS[:1]])
    done = call(
        "eval", own.url, "--benchmarks", "gsm8k", f"eval.data.gsm8k={data}", "tracking=none", "--json"
    )
    assert done.code == 0, done.err
    first, second = rows(runs(home / "runs")[0], "eval_answers")
    assert (first["text"], first["finished"]) == ("", False)
    assert first["error"] == "prompt exceeds the server's window"
    assert second["error"] == ""


def test_a_server_whose_window_holds_no_question_leaves_no_rows(call: Call, home: Path) -> None:
    body = b'{"error": {"message": "long", "type": "x", "code": "context_length_exceeded"}}'

    def script(prompt: str) -> Behaviour:
        return ok("x") if prompt.strip() == "Hi" else Behaviour(status=400, body=body)

    with ApiServer(script, models={"m": {}}) as server:
        data = f"eval.data.gsm8k={gsm8k(home)}"
        done = call("eval", server.url, "--benchmarks", "gsm8k", data, "tracking=none", "--json")
    assert done.code == 4
    assert "longer than its window" in done.err + done.out
    assert rows(runs(home / "runs")[0]) == []


def test_another_model_at_the_same_address_and_name_gets_its_own_scores(call: Call, home: Path) -> None:
    replies: dict[str, Any] = {"now": boxed(4)}
    data = gsm8k(home, SUMS[:1])
    scores = []
    with ApiServer(lambda prompt: replies["now"], models={"m": {}}) as server:
        for reply in (boxed(4), boxed(5)):
            replies["now"] = reply
            words = (f"eval.data.gsm8k={data}", "tracking=none", f"run.name=at-{len(scores)}", "--json")
            done = call("eval", server.url, "--benchmarks", "gsm8k", *words)
            assert done.code == 0, done.err
            scores.append(done.json()["scores"]["gsm8k"]["value"])
    assert scores == [1.0, 0.0]


def test_a_pair_that_the_judge_s_window_does_not_hold_is_unread_and_not_lost(call: Call, home: Path) -> None:
    body = b'{"error": {"message": "long", "type": "x", "code": "context_length_exceeded"}}'
    pairs = [
        {"pair_id": str(k), "source": "livebench-math", "question": f"question {k}", "label": "A>B",
         "response_A": "good", "response_B": "bad"}
        for k in range(3)
    ]  # fmt: skip

    def script(prompt: str) -> Behaviour:
        if '"score"' not in prompt:
            return ok(
                '{"criteria": [{"criterion": "Is right", "weight": 0.6}, {"criterion": "Is short", "weight": 0.4}]}'
            )
        if "question 2" in prompt:
            return Behaviour(status=400, body=body)
        return ok('{"score": 90}' if "good" in prompt else '{"score": 5}')

    data = f"eval.data.judgebench={write(home / 'pairs.jsonl', pairs)}"
    with ApiServer(script, models={"m": {}}) as server:
        rubric = ("--suite", "rubric", "--benchmarks", "judgebench", "--judge", server.url)
        done = call("eval", server.url, *rubric, data, "tracking=none", "--json")
        assert done.code == 0, done.err
        refused = call("eval", server.url, *rubric, data, "rubric.format=lines", "tracking=none")
    score = done.json()["scores"]["judgebench"]
    assert (score["n"], score["unparsed"], score["lost"]) == (3, 1, 0)
    assert [row["score"] for row in rows(runs(home / "runs")[0])] == [1.0, 1.0, 0.0]
    assert (refused.code, "rubric.format=lines" in refused.err) == (2, True)
    assert len(runs(home / "runs")) == 1  # nothing was made for what cannot be
