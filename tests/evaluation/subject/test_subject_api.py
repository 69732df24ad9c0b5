"""Answers of a server: as they come, seeded one by one, with their thinking, and lost ones said to be lost."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.evaluation.subject.api import ApiSubject
from racelab.experiments.evaluation.types import Answer, Ask, Subject
from racelab.experiments.models.api import ApiModel, ApiSettings

from ...experiments.api_server import ApiServer, Behaviour, ok, slow, status


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def subject(url: str, *, cache: Path | None = None, **more: Any) -> ApiSubject:
    settings = ApiSettings(
        url, "m", key_env="", timeout_s=5.0, max_retries=1, backoff_s=0.001, max_backoff_s=0.002,
        concurrency=3, cache_dir=cache, section="server", empty_ok=True, fit=True,
    )  # fmt: skip
    return ApiSubject(ApiModel(settings), **{"seed": 4, **more})


def test_a_question_is_sent_as_it_stands() -> None:
    with ApiServer([ok("four")]) as server:
        one = subject(server.url, thinking=False)
        assert isinstance(one, Subject)
        ask = Ask("2+2?", max_tokens=64, temperature=0.3, top_p=0.8, system="s", stop=("Q:",))
        ((index, answers),) = one.answers([ask], [0], "gsm8k")
    (body,) = [r.body for r in server.requests]
    seed = body.pop("seed")
    assert 0 <= seed < 2**31
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2?"}],
        "max_tokens": 64,
        "temperature": 0.3,
        "top_p": 0.8,
        "stop": ["Q:"],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert (index, answers) == (0, (Answer("four", n_tokens=1),))


def test_every_answer_has_a_seed_of_its_own_whatever_is_wanted(tmp_path: Path) -> None:
    asks = [Ask("same", n=3), Ask("same", n=2), Ask("same")]

    def seeds(wanted: list[int], purpose: str = "b", **more: Any) -> dict[int, set[int]]:
        with ApiServer([ok("x")]) as server:
            for index in wanted:
                list(subject(server.url, **more).answers(asks, [index], purpose))
            found, bodies = {}, [r.body["seed"] for r in server.requests]
        for index in wanted:
            found[index] = {bodies.pop(0) for _ in range(asks[index].n)}
        return found

    whole = seeds([0, 1, 2])
    assert len(set.union(*whole.values())) == 6
    assert seeds([1]) == {1: whole[1]}
    assert seeds([1], "other") != seeds([1])
    assert seeds([1], seed=5) != seeds([1])
    assert len(seeds([0], cache=tmp_path)[0]) == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_an_evaluation_that_goes_on_reads_what_came_from_the_cache(tmp_path: Path) -> None:
    asks = [Ask(f"q{i}", n=2) for i in range(3)]
    with ApiServer([Behaviour("4", reasoning="2+2")]) as server:
        first = dict(subject(server.url, cache=tmp_path).answers(asks, range(3), "b"))
        again = dict(subject(server.url, cache=tmp_path).answers(asks, range(3), "b"))
    assert first == again
    assert first[0][0] == Answer("<think>2+2</think>4", n_tokens=1)
    assert len(server.requests) == 6


def test_a_slow_question_holds_up_no_other() -> None:
    with ApiServer({"slow": slow(0.8, "late"), "q": ok("soon")}) as server:
        asks = [Ask("slow", n=2), *[Ask(f"q{i}") for i in range(5)]]
        came = [index for index, _ in subject(server.url).answers(asks, range(6), "b")]
    assert came[-1] == 0
    assert sorted(came) == list(range(6))


def test_a_reply_that_never_came_is_lost_and_the_others_are_not() -> None:
    script = {"bad": status(500), "long": Behaviour(status=400, body=_too_long()), "q": ok("fine")}
    asks = [Ask("bad"), Ask("q"), Ask("long", n=2)]
    with ApiServer(script) as server:
        answers = dict(subject(server.url).answers(asks, range(3), "b"))
    assert answers[0] == (Answer(None, finished=False, error="HTTP 500 (not_today)"),)
    assert answers[1][0].text == "fine"
    assert answers[2] == (Answer("", finished=False, error="prompt exceeds the server's window"),) * 2


def _too_long() -> bytes:
    return b'{"error": {"message": "too long", "code": "context_length_exceeded", "type": "error"}}'


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (Behaviour("4", reasoning="r"), Answer("<think>r</think>4")),
        (Behaviour("", finish="length", reasoning="r"), Answer("<think>r", finished=False)),
        (Behaviour("4 an", finish="length", reasoning="r"), Answer("<think>r</think>4 an", finished=False)),
        (Behaviour("", reasoning="r"), Answer("<think>r</think>")),
        (Behaviour(""), Answer("")),
        (Behaviour("<think>r</think>4"), Answer("<think>r</think>4")),
    ],
)
def test_thinking_that_the_server_keeps_apart_stands_in_front_again(reply: Behaviour, answer: Answer) -> None:
    with ApiServer([reply]) as server:
        ((_, (got,)),) = subject(server.url).answers([Ask("q")], [0], "b")
    assert (got.text, got.finished, got.error) == (answer.text, answer.finished, "")


@pytest.mark.parametrize(
    ("window", "bound", "sent"),
    [
        (4096, 131_072, None),
        (4096, 4096, None),
        (4096, 4095, 4095),
        (None, 131_072, None),
        (None, 999_999, None),
        (None, 8192, 8192),
    ],
)
def test_a_bound_that_the_window_makes_idle_is_not_sent(
    window: int | None, bound: int, sent: int | None
) -> None:
    with ApiServer([ok("x")]) as server:
        list(subject(server.url, window=window).answers([Ask("q", max_tokens=bound)], [0], "b"))
    assert [r.body.get("max_tokens") for r in server.requests] == [sent]


VLLM = (
    b'{"error": {"message": "This model\'s maximum context length is 9 tokens.", "type": "x", "code": 400}}'
)


@pytest.mark.parametrize("body", [None, VLLM])
def test_where_question_and_bound_are_too_much_the_window_alone_bounds_the_answer(body: bytes | None) -> None:
    refused = Behaviour(status=400, body=body or _too_long())
    with ApiServer([refused, ok("fine")]) as server:
        ((_, answers),) = subject(server.url, window=64).answers([Ask("q", max_tokens=60)], [0], "b")
    assert [r.body.get("max_tokens") for r in server.requests] == [60, None]
    assert answers == (Answer("fine", n_tokens=1),)


def test_shortened_answers_have_a_file_of_their_own_in_the_cache(tmp_path: Path) -> None:
    refused = Behaviour(status=400, body=_too_long())
    with ApiServer([refused, ok("room"), ok("whole")]) as server:
        for _ in range(2):  # the second time the bound fits, and is another question
            list(subject(server.url, cache=tmp_path).answers([Ask("q", max_tokens=60)], [0], "b"))
    kept = sorted(json.loads(file.read_text())["text"] for file in tmp_path.iterdir())
    assert kept == ["room", "whole"]


def test_a_server_that_refuses_everything_leaves_no_answers() -> None:
    asks = [Ask(f"q{i}", max_tokens=60) for i in range(40)]
    for said, body in (("longer than its window", _too_long()), ("refuses every request", None)):
        came: list[int] = []
        with ApiServer([Behaviour(status=400, body=body)]) as server:
            one = subject(server.url)
            with pytest.raises(UnreachableError, match=said):
                came.extend(i for i, _ in one.answers(asks, range(40), "b"))
        assert came == []


def test_questions_beyond_the_window_cost_the_others_nothing() -> None:
    asks = [*[Ask(f"long {i}") for i in range(40)], Ask("short"), *[Ask(f"long {i}") for i in range(40, 80)]]
    script = {"long": Behaviour(status=400, body=_too_long()), "short": ok("fine")}
    with ApiServer(script) as server:
        one = subject(server.url)
        answers = dict(one.answers(asks, range(81), "b"))
        rest = dict(one.answers(asks, [0, 1], "b"))
        alone = dict(subject(server.url).answers(asks, [0, 1], "b"))  # an evaluation that goes on
    assert len(answers) == 81
    assert answers[40][0].text == "fine"
    assert rest == alone == {i: answers[i] for i in (0, 1)}
    assert answers[0] == (Answer("", finished=False, error="prompt exceeds the server's window"),)


def test_a_refusal_waits_until_the_server_has_answered_somebody() -> None:
    refused = Behaviour(status=400, body=_too_long())
    with ApiServer({"long": refused, "short": slow(0.3, "fine")}) as server:
        asks = [Ask("long"), Ask("short")]
        came = [i for i, _ in subject(server.url).answers(asks, [0, 1], "b")]
    assert came == [0, 1]


def test_a_server_that_refuses_every_question_is_told_from_one_that_is_away() -> None:
    asks = [Ask(f"q{i}") for i in range(30)]
    with (
        ApiServer([status(400)]) as server,
        pytest.raises(UnreachableError, match=r"up to 9000 tokens: set eval\.max_tokens"),
    ):
        list(subject(server.url).answers([Ask(f"q{i}", max_tokens=9000) for i in range(30)], range(30), "b"))
    with (
        ApiServer([status(400)]) as server,
        pytest.raises(UnreachableError, match=r"without max_tokens: set eval\.max_tokens"),
    ):
        list(subject(server.url).answers(asks, range(30), "b"))
    with pytest.raises(UnreachableError, match="no server at"):
        list(subject(server.url).answers(asks, range(30), "b"))


def test_plain_text_cannot_be_continued_by_a_chat_server() -> None:
    with ApiServer([ok("x")]) as server, pytest.raises(ConfigError, match="popqa continues plain text"):
        list(subject(server.url).answers([Ask("q", layout="text")], [0], "popqa"))


def test_who_stops_reading_asks_nothing_more() -> None:
    with ApiServer([slow(0.02, "x")]) as server:
        answers = subject(server.url).answers([Ask(f"q{i}") for i in range(60)], range(60), "b")
        next(answers)
        answers.close()
        time.sleep(0.1)
    assert len(server.requests) <= 12
