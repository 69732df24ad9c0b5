"""The API client against a server on loopback that misbehaves."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.errors import ConfigError, MissingDependencyError, UnreachableError
from racelab.experiments.models.api import ApiModel, ApiSettings, base_url, check
from racelab.experiments.models.api_reply import FailedTryError, completion, read_body, retry_after
from racelab.experiments.models.chat import Calls, ChatModel, ChatRequest, Reply
from racelab.experiments.models.rubric import RubricSettings, is_grounded, parse_rubric

from .api_server import (
    ApiServer,
    Behaviour,
    answer,
    dripping,
    dropped,
    empty,
    html,
    malformed,
    ok,
    slow,
    status,
    truncated,
    wrong_type,
)

KEY = "sk_very_secret"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def settings(url: str, **more: Any) -> ApiSettings:
    """Quick tries."""
    how: dict[str, Any] = {"timeout_s": 5.0, "max_retries": 2, "backoff_s": 0.001, "max_backoff_s": 0.002}
    return ApiSettings(url, "big-model", **{**how, **more})


def ask(text: str, **more: Any) -> ChatRequest:
    return ChatRequest(None, text, 20, **more)


def closed_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}/v1"


# --- what is asked and what comes back ---------------------------------------------------------------------------


def test_a_request_says_all_that_was_asked_for() -> None:
    with ApiServer([ok("Mars is one.")]) as server:
        model = ApiModel(settings(server.url))
        replies = model.complete([ChatRequest("Be brief.", "Name a planet.", 7, temperature=0.5, top_p=0.9)])
    assert isinstance(model, ChatModel)
    assert replies == [Reply("Mars is one.")]
    (received,) = server.requests
    assert received.path == "/v1/chat/completions"
    assert received.headers["authorization"] == f"Bearer {KEY}"
    assert received.body == {
        "model": "big-model",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Name a planet."},
        ],
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
    }


def test_calls_count_requests_and_tokens() -> None:
    """Prompts of 1 and 2 words, replies of 3 words each (the server counts words): 3 and 6 tokens."""
    with ApiServer([ok("one two three")]) as server:
        model = ApiModel(settings(server.url))
        assert model.calls == Calls()
        model.complete([ask("a"), ask("b c")])
        before = model.calls
        assert before == Calls(made=2, prompt_tokens=3, completion_tokens=6)
        model.complete([ask("d")])
    assert model.calls - before == Calls(made=1, prompt_tokens=1, completion_tokens=3)


def test_nothing_asked_is_nothing_done() -> None:
    model = ApiModel(settings(closed_port()))
    assert model.complete([]) == []


def test_the_settings_make_requests() -> None:
    how = settings("http://h/v1", temperature=0.3, max_tokens=9)
    assert how.request("u", "s") == ChatRequest("s", "u", 9, 0.3)


def test_replies_are_in_the_order_of_the_requests() -> None:
    def later_first(prompt: str) -> Behaviour:
        return slow((7 - int(prompt)) * 0.02, f"reply {prompt}")

    with ApiServer(later_first) as server:
        replies = ApiModel(settings(server.url)).complete([ask(str(i)) for i in range(8)])
    assert [r.text for r in replies] == [f"reply {i}" for i in range(8)]


@pytest.mark.parametrize("bound", [1, 3])
def test_no_more_requests_at_a_time_than_allowed(bound: int) -> None:
    with ApiServer([slow(0.03)]) as server:
        ApiModel(settings(server.url, concurrency=bound)).complete([ask(str(i)) for i in range(9)])
    assert len(server.requests) == 9
    assert server.most_at_once == bound


def test_the_bound_holds_for_callers_in_several_threads() -> None:
    with ApiServer([slow(0.03)]) as server:
        model = ApiModel(settings(server.url, concurrency=2))
        callers = [
            threading.Thread(target=model.complete, args=([ask(f"{i}a"), ask(f"{i}b")],)) for i in range(3)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert server.most_at_once == 2
    assert model.calls.made == 6


def test_half_a_character_is_no_crash() -> None:
    body = b'{"choices": [{"message": {"content": "a \\ud83d b"}, "finish_reason": "stop"}]}'
    with ApiServer([Behaviour(body=body)]) as server:
        (reply,) = ApiModel(settings(server.url)).complete([ask("x \ud83d y")])
    assert reply.text == "a ? b"
    assert server.requests[0].prompt == "x ? y"


# --- faults ------------------------------------------------------------------------------------------------------

FAULTS = {
    "429": (status(429), "HTTP 429 (not_today)"),
    "500": (status(500), "HTTP 500"),
    "503": (status(503), "HTTP 503"),
    "malformed": (malformed(), "malformed JSON"),
    "not_utf8": (Behaviour(body=b'{"choices": "\xff"}'), "malformed JSON"),
    "empty_choices": (empty(), "no choices"),
    "no_object": (Behaviour(body=b"[]"), "no choices"),
    "empty_text": (ok(""), "the reply is empty"),
    "html": (html(), "not JSON by its content type"),
    "wrong_type": (wrong_type(), "not JSON by its content type"),
    "dropped": (dropped(), "the connection failed"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_stays_is_a_reply_without_a_text(name: str) -> None:
    fault, error = FAULTS[name]
    with ApiServer([fault]) as server:
        model = ApiModel(settings(server.url, max_retries=2))
        (reply,) = model.complete([ask("a")])
    assert reply.text is None
    assert not reply.finished
    assert error in reply.error
    assert "\n" not in reply.error
    assert len(server.requests) == 3
    assert model.calls == Calls(made=1, failed=1, retried=2)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_passes_is_tried_again(name: str) -> None:
    with ApiServer([FAULTS[name][0], ok("there")]) as server:
        model = ApiModel(settings(server.url))
        assert model.complete([ask("a")]) == [Reply("there")]
    assert (model.calls.made, model.calls.failed, model.calls.retried) == (1, 0, 1)


def test_a_fault_of_one_request_does_not_touch_the_others() -> None:
    with ApiServer({"bad": status(500), "good": ok("fine")}) as server:
        replies = ApiModel(settings(server.url)).complete([ask("good 1"), ask("bad"), ask("good 2")])
    assert [r.text for r in replies] == ["fine", None, "fine"]


def test_a_reply_cut_by_length_is_kept_and_says_so() -> None:
    with ApiServer([truncated("half a sen")]) as server:
        model = ApiModel(settings(server.url))
        assert model.complete([ask("a")]) == [Reply("half a sen", finished=False)]
    assert model.calls.made == len(server.requests) == 1


def test_a_reply_cut_before_its_first_word_is_a_failure_without_another_try() -> None:
    with ApiServer([truncated("")]) as server:
        (reply,) = ApiModel(settings(server.url)).complete([ask("a")])
    assert reply == Reply(None, finished=False, error="cut by max_tokens before the first word")
    assert len(server.requests) == 1


def test_a_request_that_the_server_calls_bad_is_not_tried_again() -> None:
    with ApiServer([status(400)]) as server:
        (reply,) = ApiModel(settings(server.url)).complete([ask("a")])
    assert reply == Reply(None, finished=False, error="HTTP 400 (not_today)")
    assert len(server.requests) == 1


@pytest.mark.parametrize("fault", [slow(30.0), dripping(0.03)], ids=["silent", "dripping"])
def test_an_answer_that_takes_too_long_is_given_up(fault: Behaviour) -> None:
    """The dripping server sends a byte every 0.03 s, so no single read is slow; 300 bytes would take 9 s."""
    with ApiServer([fault]) as server:
        model = ApiModel(settings(server.url, timeout_s=0.15, max_retries=1))
        began = time.monotonic()
        (reply,) = model.complete([ask("a")])
        took = time.monotonic() - began
    assert reply.text is None
    assert reply.error in ("no answer within 0.15 s", "the answer was too slow")
    assert len(server.requests) == 2
    assert took < 2.0


def test_a_body_without_end_is_given_up() -> None:
    chunks = (bytes(1 << 20) for _ in range(1000))
    with pytest.raises(FailedTryError, match="larger than"):
        read_body(chunks, time.monotonic() + 60)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "content", "finish_reason", "usage", "prompt_tokens"]),
            inner,
        )
    ),
    max_leaves=12,
)


@given(json_values.map(json.dumps).map(str.encode) | st.binary(max_size=30))
def test_no_body_is_worse_than_a_failed_try(body: bytes) -> None:
    try:
        outcome = completion("application/json", body)
    except FailedTryError:
        return
    assert outcome.reply.text
    assert outcome.calls.prompt_tokens >= 0


# --- waiting -----------------------------------------------------------------------------------------------------


def waits(behaviours: list[Behaviour], **more: Any) -> list[float]:
    """Seconds that the client wanted to wait before each further try."""
    waited: list[float] = []
    with ApiServer(behaviours) as server:
        model = ApiModel(settings(server.url, **more), sleep=lambda stop, s: waited.append(s))
        model.complete([ask("a")])
    return waited


def test_waits_double_up_to_the_cap() -> None:
    """0.5, 1, 2, then 4 is cut to 3, and so is 8."""
    assert waits([status(500)], max_retries=5, backoff_s=0.5, max_backoff_s=3.0) == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_the_server_may_ask_for_longer_but_not_beyond_the_cap() -> None:
    """7 s is longer than the own 0.5 s; 0.1 s is shorter than the own 1 s; an hour is cut to 10 s."""
    asked = [status(429, 7), status(429, 0.1), status(503, 3600), ok("x")]
    assert waits(asked, max_retries=5, backoff_s=0.5, max_backoff_s=10.0) == [7.0, 1.0, 10.0]


def test_the_wait_is_real() -> None:
    with ApiServer([status(429, 0.15), ok("x")]) as server:
        ApiModel(settings(server.url, max_backoff_s=5.0)).complete([ask("a")])
    first, second = server.requests
    assert 0.15 <= second.at - first.at < 2.0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("3", 3.0), ("2.5", 2.5), ("-1", 0.0), ("nan", 0.0), ("inf", 0.0), ("soon", 0.0), ("", 0.0)],
)
def test_retry_after_in_seconds(value: str, seconds: float) -> None:
    assert retry_after({"retry-after": value}) == seconds


def test_retry_after_as_a_date() -> None:
    later = datetime.now(UTC) + timedelta(seconds=100)
    assert 95 < retry_after({"retry-after": format_datetime(later, usegmt=True)}) <= 100
    assert retry_after({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0.0
    assert retry_after({}) == 0.0


# --- what stops a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (401, ["OPENAI_API_KEY", "401"]),
        (403, ["OPENAI_API_KEY", "403"]),
        (404, ["'big-model'", "api.base_url"]),
    ],
)
def test_what_would_fail_every_request_stops_the_run(code: int, words: list[str]) -> None:
    with ApiServer([Behaviour(status=code, delay_s=0.05)]) as server:
        model = ApiModel(settings(server.url, concurrency=2))
        with pytest.raises(UnreachableError) as caught:
            model.complete([ask(str(i)) for i in range(20)])
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert all(w in message for w in (*words, server.url))
    assert KEY not in message
    assert "\n" not in message
    assert len(server.requests) <= 4  # two were under way, two more may have begun before it was noticed


def test_a_server_that_wants_a_key_after_all_names_the_setting() -> None:
    with ApiServer([status(401)]) as server, pytest.raises(UnreachableError, match=r"api\.key_env"):
        ApiModel(settings(server.url, key_env="")).complete([ask("a")])


def test_an_error_ends_the_waits_of_the_others() -> None:
    released: list[bool] = []
    with ApiServer({"patience": status(429), "wrong": slow_refusal()}) as server:
        model = ApiModel(
            settings(server.url, concurrency=2), sleep=lambda stop, s: released.append(stop.wait(20.0))
        )
        with pytest.raises(UnreachableError):
            model.complete([ask("patience"), ask("wrong")])
        deadline = time.monotonic() + 5.0
        while not released and time.monotonic() < deadline:
            time.sleep(0.01)
        assert released == [True]
        assert len(server.requests) == 2  # and it is not tried once more


def slow_refusal() -> Behaviour:
    """The key is refused when the other request is already waiting."""
    return Behaviour(status=401, delay_s=0.1)


def test_no_server_on_the_first_call_stops_the_run() -> None:
    url = closed_port()
    model = ApiModel(settings(url))
    with pytest.raises(UnreachableError, match=f"no server at {url}.*api.base_url or OPENAI_BASE_URL"):
        model.complete([ask("a"), ask("b")])


def test_a_server_that_goes_away_later_does_not() -> None:
    with ApiServer([ok("x")]) as server:
        model = ApiModel(settings(server.url))
        model.complete([ask("a")])
    (reply,) = model.complete([ask("b")])
    assert reply.text is None
    assert "refused" in reply.error or "connection" in reply.error
    assert model.calls.failed == 1


def refusal(code: int, said: str) -> Behaviour:
    return Behaviour(status=code, body=json.dumps({"error": {"code": said}}).encode())


@pytest.mark.parametrize("code", [400, 402, 413, 422])
def test_a_server_that_refuses_the_whole_first_call_stops_the_run(code: int, tmp_path: Path) -> None:
    """What the cache answers is no reply of the server."""
    with ApiServer([ok("x"), refusal(code, "billing_hard_limit_reached")]) as server:
        how = settings(server.url, cache_dir=tmp_path)
        ApiModel(how).complete([ask("a")])
        model = ApiModel(how)
        model.complete([ask("a")])
        with pytest.raises(UnreachableError) as caught:
            model.complete([ask("a"), ask("b"), ask("c")])
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert (
        f"{server.url} refuses every request (HTTP {code} (billing_hard_limit_reached)); correct" in message
    )
    assert "quota" in message
    assert "\n" not in message
    assert model.calls == Calls(made=2, cached=2, failed=2)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (refusal(429, "insufficient_quota"), "HTTP 429 (insufficient_quota)"),
        (refusal(402, "no_money"), "HTTP 402 (no_money)"),
        (dropped(), "the connection failed"),
        (status(503), "HTTP 503"),
    ],
    ids=["quota", "money", "dropped", "503"],
)
def test_three_calls_in_a_row_without_a_reply_stop_the_run(fault: Behaviour, words: str) -> None:
    """Though the server has answered before, and though each time the same is asked."""
    with ApiServer({"good": ok("x"), "bad": fault}) as server:
        model = ApiModel(settings(server.url, max_retries=0))
        for text in ("good", "bad", "bad", "good", "bad", "bad"):
            model.complete([ask(text)])
            model.complete([])
        with pytest.raises(UnreachableError, match="gave no reply in 3 calls in a row") as caught:
            model.complete([ask("bad")])
    assert words in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("fault", [status(400), status(500), ok(""), truncated("")])
def test_one_request_that_always_fails_does_not_stop_the_run(fault: Behaviour) -> None:
    """A prompt that a filter refuses is asked about again and again; two others beside it are no accident."""
    with ApiServer([fault]) as server:
        model = ApiModel(settings(server.url, max_retries=0))
        for draw in range(5):
            assert model.complete([ask("a", draw=draw)])[0].text is None
        model.complete([ask("b")])
        with pytest.raises(UnreachableError, match="in 3 calls in a row"):
            model.complete([ask("c")])


# --- before the run ------------------------------------------------------------------------------------------------


def test_the_address_comes_from_the_setting_or_the_variable_and_never_from_the_sdk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"api\.base_url.*OPENAI_BASE_URL"):
        ApiModel(settings(""))
    monkeypatch.setenv("OPENAI_BASE_URL", "http://variable:1/v1/")
    assert base_url(settings("")) == "http://variable:1/v1"
    assert base_url(settings("https://setting/v1")) == "https://setting/v1"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host/v1",
        "http://",
        "http://host:port/v1",
        "http://host:99999",
        "http://[::1",
        "http://a b/",
    ],
)
def test_what_is_no_address_is_an_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^api\.base_url is no http address"):
        check(settings(url))


@pytest.mark.parametrize("url", ["http://me:sk_very_secret@host/v1", "http://host/v1?key=sk_very_secret"])
def test_a_secret_in_the_address_is_an_error_that_does_not_repeat_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"api\.key_env") as caught:
        check(settings(url))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_missing_key_names_its_variable(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("MY_KEY", raising=False)
    else:
        monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(ConfigError, match=r"^MY_KEY is not set; .*api\.key_env=") as caught:
        check(settings("http://h/v1", key_env="MY_KEY"))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", ["two words", "schlüssel", "a\nb"])
def test_a_key_that_no_header_can_hold_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", value)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY holds") as caught:
        check(settings("http://h/v1"))
    assert value not in str(caught.value)


def test_the_named_variable_is_the_one_that_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "mine\n")
    with ApiServer([ok("x")]) as server:
        ApiModel(settings(server.url, key_env="MY_KEY")).complete([ask("a")])
    assert server.requests[0].headers["authorization"] == "Bearer mine"


def test_a_server_that_wants_no_key_gets_none() -> None:
    with ApiServer([ok("x")]) as server:
        ApiModel(settings(server.url, key_env="")).complete([ask("a")])
    assert "authorization" not in server.requests[0].headers
    assert KEY not in str(server.requests[0])


def test_the_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'racelab\[api\]'"):
        check(settings("http://h/v1"))


def test_a_cache_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"file/cache cannot be made: not a directory; set api\.cache=false"
    ):
        check(settings("http://h/v1", cache_dir=tmp_path / "file" / "cache"))


def test_a_good_section_passes(tmp_path: Path) -> None:
    check(settings("http://h:8000/v1", cache_dir=tmp_path / "new" / "cache"))
    assert (tmp_path / "new" / "cache").is_dir()


# --- the cache -----------------------------------------------------------------------------------------------------


def test_what_is_cached_is_not_asked_again(tmp_path: Path) -> None:
    with ApiServer(lambda p: ok(f"re: {p}")) as server:
        how = settings(server.url, cache_dir=tmp_path)
        ApiModel(how).complete([ask("a"), ask("b")])
        model = ApiModel(how)
        assert model.complete([ask("b"), ask("a")]) == [
            Reply("re: b", cached=True),
            Reply("re: a", cached=True),
        ]
    assert len(server.requests) == 2
    assert model.calls == Calls(cached=2)


def test_whatever_decides_the_reply_decides_the_file(tmp_path: Path) -> None:
    others = [
        ask("b"),
        ask("a", temperature=0.5),
        ask("a", top_p=0.5),
        ask("a", draw=1),
        ChatRequest(None, "a", 21),
        ChatRequest("", "a", 20),
        ChatRequest("s", "a", 20),
    ]
    with ApiServer([ok("x")]) as server, ApiServer([ok("y")]) as other:
        how = settings(server.url, cache_dir=tmp_path)
        ApiModel(how).complete([ask("a")])
        model = ApiModel(how)
        model.complete(others)
        assert model.calls.made == len(others)
        elsewhere = ApiModel(settings(other.url, cache_dir=tmp_path))
        assert elsewhere.complete([ask("a")])[0].text == "y"
        assert (
            ApiModel(ApiSettings(server.url, "m2", cache_dir=tmp_path)).complete([ask("a")])[0].cached
            is False
        )
    assert len(list(tmp_path.iterdir())) == 1 + len(others) + 2


def test_equal_requests_are_made_once_where_there_is_a_cache(tmp_path: Path) -> None:
    requests = [ask("a"), ask("b"), ask("a"), ask("a")]
    with ApiServer([ok("x")]) as server:
        model = ApiModel(settings(server.url, cache_dir=tmp_path))
        assert [r.cached for r in model.complete(requests)] == [False, False, True, True]
        assert (model.calls.made, model.calls.cached) == (2, 2)
        assert len(server.requests) == 2
        without = ApiModel(settings(server.url))
        assert not any(r.cached for r in without.complete(requests))
    assert without.calls.made == 4


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"text": 3}', b'{"text": ""}', b"\xff\xfe"])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    with ApiServer([ok("whole")]) as server:
        how = settings(server.url, cache_dir=tmp_path)
        ApiModel(how).complete([ask("a")])
        (file,) = tmp_path.iterdir()
        file.write_bytes(damage)
        assert ApiModel(how).complete([ask("a")]) == [Reply("whole")]
        assert ApiModel(how).complete([ask("a")]) == [Reply("whole", cached=True)]
    assert len(server.requests) == 2


@pytest.mark.parametrize("bad", [truncated("half"), status(500)], ids=["cut", "failed"])
def test_only_whole_replies_are_cached(tmp_path: Path, bad: Behaviour) -> None:
    with ApiServer([bad, ok("whole")]) as server:
        how = settings(server.url, cache_dir=tmp_path, max_retries=0)
        ApiModel(how).complete([ask("a")])
        assert list(tmp_path.iterdir()) == []
        assert ApiModel(how).complete([ask("a")]) == [Reply("whole")]


def test_a_cache_that_is_full_costs_nothing_but_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with ApiServer([ok("x")]) as server:
        model = ApiModel(settings(server.url, cache_dir=folder))
        folder.rmdir()  # as good as a disk that cannot be written
        assert model.complete([ask("a")]) == [Reply("x")]


_PROCESS = """
import sys
from pathlib import Path
from racelab.experiments.models.api import ApiModel, ApiSettings
from racelab.experiments.models.chat import ChatRequest
model = ApiModel(ApiSettings(sys.argv[1], "m", cache_dir=Path(sys.argv[2]), concurrency=4))
replies = model.complete([ChatRequest(None, f"q{i}", 20) for i in range(12)])
print(*[r.text for r in replies], sep="|")
"""


def test_processes_share_the_cache(tmp_path: Path) -> None:
    with ApiServer(lambda p: slow(0.01, f"re {p}")) as server:
        command = [sys.executable, "-c", _PROCESS, server.url, str(tmp_path)]
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        said = [p.communicate(timeout=60)[0].strip() for p in both]
        assert said == ["|".join(f"re q{i}" for i in range(12))] * 2
        asked = len(server.requests)
        assert 12 <= asked <= 24
        assert len(list(tmp_path.iterdir())) == 12
        model = ApiModel(ApiSettings(server.url, "m", cache_dir=tmp_path))
        assert all(r.cached for r in model.complete([ask(f"q{i}") for i in range(12)]))
    assert len(server.requests) == asked


# --- secrets -------------------------------------------------------------------------------------------------------


def test_neither_key_nor_prompt_is_told_to_anybody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server repeats both in its error objects, and the key once as its error code."""
    caplog.set_level(logging.INFO)
    as_code = Behaviour(status=422, body=json.dumps({"error": {"code": KEY}}).encode())
    said: list[str] = []
    with ApiServer({"one": status(400), "two": status(500), "three": as_code, "four": ok("f")}) as server:
        model = ApiModel(settings(server.url, cache_dir=tmp_path))
        replies = model.complete([ask(f"confidential {n}") for n in ("one", "two", "three", "four")])
        said += [r.error for r in replies]
        assert [r.text for r in replies] == [None, None, None, "f"]
    with ApiServer([status(401)]) as server:
        with pytest.raises(UnreachableError) as caught:
            ApiModel(settings(server.url)).complete([ask("confidential")])
        said.append(str(caught.value))
    said += [repr(model), repr(model.settings), json.dumps(model.describe()), repr(model.calls), caplog.text]
    said += [p.read_text() for p in tmp_path.iterdir()]
    assert not [s for s in said if KEY in s]
    assert not [s for s in said if "confidential" in s]


def test_describe_is_what_decides_the_replies(tmp_path: Path) -> None:
    model = ApiModel(settings("http://h:1/v1/", cache_dir=tmp_path))
    assert model.describe() == {
        "kind": "api",
        "base_url": "http://h:1/v1",
        "model": "big-model",
        "cache": True,
    }


# --- the server's own answers ----------------------------------------------------------------------------------------


def test_the_server_writes_a_rubric_about_the_prompt() -> None:
    from racelab.experiments.models.prompts.templates import RUBRIC_JSON

    prompt = RUBRIC_JSON.user.replace("{prompt}", "Explain why volcanoes erupt.")
    parsed = parse_rubric(answer(prompt), RubricSettings(format="json"))
    assert parsed.rubric is not None
    assert [is_grounded(c.text, "Explain why volcanoes erupt.") for c in parsed.rubric.criteria] == [
        True,
        True,
        False,
    ]


def test_the_server_writes_items_and_verdicts() -> None:
    asked = 'Question: Why do volcanoes erupt?\nReply with a list of {"title": .., "description": .., "weight": ..}'
    found = json.loads(answer(asked))
    assert len(found) == 7
    assert all(set(row) == {"title", "description", "weight"} for row in found)
    assert "volcanoes" in found[0]["description"]
    verdicts = {answer(f"Does answer {i} satisfy the item? Say YES or NO.") for i in range(20)}
    assert verdicts == {"YES", "NO"}
    assert answer("Do these two overlap? Say YES or NO.") == "NO"


def test_the_server_runs_by_itself() -> None:
    command = [sys.executable, str(Path(__file__).with_name("api_server.py")), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Tell me of whales."}]})
        request = urllib.request.Request(f"{url}/chat/completions", body.encode())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as response:
            reply = json.load(response)
    finally:
        process.kill()
        process.communicate()
    assert reply["choices"][0]["message"]["content"] == "A few words about tell."
