"""Replies as they come, what a request may say beside its text, and the health check."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.models.api import ApiModel, ApiSettings
from racelab.experiments.models.api_health import Served, check_server, find_served
from racelab.experiments.models.api_reply import completion
from racelab.experiments.models.chat import Calls, ChatRequest, Reply

from .api_server import ApiServer, Behaviour, ok, slow, status, truncated


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk_very_secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def settings(url: str, model: str = "big-model", **more: Any) -> ApiSettings:
    how: dict[str, Any] = {"timeout_s": 5.0, "max_retries": 1, "backoff_s": 0.001, "max_backoff_s": 0.002}
    return ApiSettings(url, model, **{**how, **more})


def ask(text: str, **more: Any) -> ChatRequest:
    return ChatRequest(None, text, 20, **more)


# --- streaming -----------------------------------------------------------------------------------------------------


def test_a_slow_reply_holds_up_no_other() -> None:
    script = {"slow": slow(0.8, "late"), "quick": ok("soon")}
    with ApiServer(script) as server:
        model = ApiModel(settings(server.url, concurrency=2))
        asked = [ask("slow"), *[ask(f"quick {i}") for i in range(6)]]
        came = [(index, reply.text) for index, reply in model.stream(asked)]
    assert sorted(index for index, _ in came) == list(range(7))
    assert came[-1] == (0, "late")
    assert server.most_at_once == 2
    assert model.calls.made == 7


def test_who_stops_reading_gives_up_the_rest() -> None:
    with ApiServer([slow(0.02, "x")]) as server:
        model = ApiModel(settings(server.url, concurrency=2))
        stream = model.stream([ask(str(i)) for i in range(50)])
        next(stream)
        stream.close()
        time.sleep(0.1)
    assert len(server.requests) <= 8


def test_a_failed_reply_is_one_and_the_stream_goes_on() -> None:
    with ApiServer({"bad": status(500), "good": ok("fine")}) as server:
        replies = dict(ApiModel(settings(server.url)).stream([ask("good 1"), ask("bad"), ask("good 2")]))
    assert [replies[i].text for i in range(3)] == ["fine", None, "fine"]
    assert replies[1].error == "HTTP 500 (not_today)"


def test_a_server_that_refuses_the_first_replies_ends_the_stream_before_all_are_asked() -> None:
    with ApiServer([status(400)]) as server:
        model = ApiModel(settings(server.url, concurrency=4, section="server"))
        with pytest.raises(UnreachableError, match=r"refuses every request \(HTTP 400.*the section server"):
            list(model.stream([ask(str(i)) for i in range(100)]))
    assert len(server.requests) < 30


def test_equal_requests_are_made_once_and_all_answered(tmp_path: Path) -> None:
    with ApiServer([ok("x")]) as server:
        model = ApiModel(settings(server.url, cache_dir=tmp_path))
        replies = dict(model.stream([ask("a"), ask("a"), ask("b")]))
    assert [replies[i].cached for i in range(3)] == [False, True, False]
    assert (model.calls.made, model.calls.cached) == (2, 1)


# --- what a request says -------------------------------------------------------------------------------------------


def test_stop_seed_and_thinking_are_sent_where_they_are_set_and_only_there() -> None:
    with ApiServer([ok("x")]) as server:
        model = ApiModel(settings(server.url))
        model.complete([ask("plain")])
        model.complete([ask("full", stop=("Q:", "\n\n"), seed=7, thinking=False)])
    plain, full = (r.body for r in server.requests)
    assert not {"stop", "seed", "chat_template_kwargs"} & plain.keys()
    assert full["stop"] == ["Q:", "\n\n"]
    assert full["seed"] == 7
    assert full["chat_template_kwargs"] == {"enable_thinking": False}


def test_another_seed_stop_or_thinking_is_another_file_and_plain_requests_keep_theirs(tmp_path: Path) -> None:
    assert ask("a").identity() == {
        "system": None, "user": "a", "max_tokens": 20, "temperature": 0.0, "top_p": 1.0, "draw": 0,
    }  # fmt: skip
    others = [ask("a"), ask("a", seed=1), ask("a", seed=2), ask("a", stop=("x",)), ask("a", thinking=True)]
    others.append(ask("a", seed=1, draw=1))
    with ApiServer([ok("x")]) as server:
        ApiModel(settings(server.url, cache_dir=tmp_path)).complete(others)
    assert len(list(tmp_path.iterdir())) == len(others) == len(server.requests)


def test_reasoning_and_token_counts_survive_the_cache(tmp_path: Path) -> None:
    with ApiServer([Behaviour("so 4", reasoning="two and two")]) as server:
        how = settings(server.url, cache_dir=tmp_path)
        (first,) = ApiModel(how).complete([ask("a")])
        (again,) = ApiModel(how).complete([ask("a")])
    assert first == Reply("so 4", reasoning="two and two")
    assert again == Reply("so 4", cached=True, reasoning="two and two")
    assert (first.n_tokens, again.n_tokens) == (2, 2)


def test_a_reply_without_a_word_is_a_failure_or_a_reply_as_the_settings_say(tmp_path: Path) -> None:
    cut = Behaviour("", finish="length", reasoning="hm")
    with ApiServer({"cut": cut, "mute": ok("")}) as server:
        strict = ApiModel(settings(server.url)).complete([ask("cut")])
        lax = ApiModel(settings(server.url, empty_ok=True, cache_dir=tmp_path))
        replies = lax.complete([ask("cut"), ask("mute")])
        assert list(tmp_path.iterdir()) == []  # asked again another time
    assert strict[0].text is None
    assert replies == [Reply("", finished=False, reasoning="hm"), Reply("")]
    assert lax.calls.failed == 0


def test_the_reasoning_may_have_either_name_and_must_be_a_text() -> None:
    body = b'{"choices": [{"message": {"content": "x", "%s": %s}}]}'
    for name, value, reasoning in [(b"reasoning", b'"r"', "r"), (b"reasoning_content", b'"r"', "r"),
                                   (b"reasoning", b"3", ""), (b"reasoning", b"null", "")]:  # fmt: skip
        assert completion("application/json", body % (name, value)).reply.reasoning == reasoning


# --- the health check ------------------------------------------------------------------------------------------------


def test_the_only_model_of_the_server_is_taken_with_its_window() -> None:
    with ApiServer([truncated("H")], models={"qwen": {"max_model_len": 4096}}) as server:
        assert find_served(settings(server.url, model="")) == Served("qwen", 4096)
        assert check_server(settings(server.url, model="qwen")) == "qwen"
    assert [r.body["max_tokens"] for r in server.requests] == [1, 1]
    assert {r.body["model"] for r in server.requests} == {"qwen"}


def test_a_named_model_needs_no_list() -> None:
    with ApiServer([ok("H")]) as server:
        assert find_served(settings(server.url, model="mine")) == Served("mine")


@pytest.mark.parametrize(
    ("models", "model", "words"),
    [
        ({"a": {}, "b": {}}, "", r"serves a, b; name one in server\.model"),
        ({}, "", r"does not say which models it serves; name one in server\.model"),
        (None, "", r"does not say which models it serves"),
    ],
)
def test_which_model_must_be_plain(models: Any, model: str, words: str) -> None:
    with (
        ApiServer([ok("H")], models=models) as server,
        pytest.raises(UnreachableError, match=words) as error,
    ):
        check_server(settings(server.url, model=model, section="server"))
    assert error.value.exit_code == 4
    assert server.requests == []


def test_an_address_without_its_last_part_is_met_with_the_whole_one() -> None:
    with ApiServer([ok("H")], models=None) as server:
        short = server.url.removesuffix("/v1")
        for typed in (short, f"{short}/"):
            with pytest.raises(UnreachableError, match=f"its address may be {server.url}, else name one"):
                check_server(settings(typed, model="", section="server"))


def test_an_unknown_model_is_answered_with_the_near_ones() -> None:
    with ApiServer([status(404)], models={"qwen-small": {}, "llama": {}}) as server:
        with pytest.raises(UnreachableError, match=r"no model 'qwen-smal'.*did you mean qwen-small\?"):
            check_server(settings(server.url, model="qwen-smal"))
        with pytest.raises(UnreachableError, match="it serves qwen-small, llama"):
            check_server(settings(server.url, model="zzz"))


def test_a_refused_key_names_its_variable_and_not_itself() -> None:
    with (
        ApiServer([status(401)], models={"a": {}}) as server,
        pytest.raises(UnreachableError, match=r"refuses the key in OPENAI_API_KEY \(HTTP 401\)") as error,
    ):
        check_server(settings(server.url, model=""))
    assert "sk_very" not in str(error.value)


def test_nothing_that_listens_names_the_key_of_the_address() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}/v1"
    with pytest.raises(UnreachableError, match=r"no server at http.*correct subject\.source"):
        check_server(settings(url, address_key="subject.source"))
    with pytest.raises(ConfigError, match=r"judge\.base_url is empty"):
        check_server(settings("", section="judge"))


def test_a_model_that_gives_no_reply_is_unreachable() -> None:
    with (
        ApiServer([status(503)], models={"a": {}}) as server,
        pytest.raises(UnreachableError, match=r"no reply for a to a request of one token \(HTTP 503"),
    ):
        check_server(settings(server.url, model=""))


def test_counts_add_up_over_a_stream() -> None:
    with ApiServer([ok("one two")]) as server:
        model = ApiModel(settings(server.url))
        list(model.stream([ask("a"), ask("b")]))
    assert model.calls == Calls(made=2, prompt_tokens=2, completion_tokens=4)
