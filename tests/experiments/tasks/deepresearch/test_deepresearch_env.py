"""Whole episodes: reward, faults, secrets, replay of a prefix, and what is checked before a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from racelab.experiments.episodes import Instance, Turn
from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.ports import Environment, Task
from racelab.experiments.tasks.deepresearch.replay_server import ReplayServer
from racelab.experiments.tasks.deepresearch.task import DeepResearch

from .research_kit import SLEEP, call, config, turn

KEY = "sk-very-secret-4711"
PDF = "http://replay.invalid/papers/sleep-slow-wave.pdf"
PAPER = "p_e8dc58b6ccb1"
ANSWER = (
    '<answer>Sleep after learning improves recall compared with staying awake. <cite id="p_e8dc58b6ccb1">Recall of '
    'word pairs was 18 percent better after a night rich in slow wave sleep</cite>. <cite id="p_000000000000">REM '
    "sleep helps motor skills</cite></answer>"
)


@pytest.fixture(scope="module")
def shared() -> Iterator[DeepResearch]:
    task = DeepResearch(config(train_examples=8))
    yield task
    task.close()


def sleep(task: DeepResearch) -> Instance:
    return next(i for i in [*task.train(), *task.validation()] if i.instance_id == "package/sleep")


def test_it_is_a_task(shared: DeepResearch) -> None:
    assert isinstance(shared, Task)
    assert isinstance(shared.open(sleep(shared)), Environment)
    assert shared.stops == ("</tool_call>", "</answer>")
    assert shared.tools[0]["function"]["name"] == "search_papers"
    assert (len(shared.train()), len(shared.validation())) == (8, 2)
    assert shared.system_prompt("Read first.").endswith("# Additions\nRead first.")
    assert shared.system_prompt() == shared.system_prompt(" ")


def test_an_episode_gets_the_reward_of_d4(shared: DeepResearch) -> None:
    """Words that the answer shares with the five criteria give grades 4, 5·..: here only the formula is checked:
    citations: one of two ids known: form 1/2; claim 1 F1 1, claim 2 has no known id: F1 1/2; 0.6/2 + 0.4/2 = 1/2.
    format 1; two calls of three: search 2/3."""
    env = shared.open(sleep(shared))
    assert env.reset().text.startswith("How does sleep")
    assert "Turns left: 9." in env.step(call("search_papers", query=SLEEP)).text
    env.step(call("read_paper", pdf_url=PDF))
    last = env.step(ANSWER)
    assert last.done
    result, m = env.result(), env.result().metrics
    assert (m["citation_format"], m["citation_f1"], m["citation"], m["format"]) == (0.5, 0.5, 0.5, 1.0)
    assert m["search"] == pytest.approx(2 / 3)
    assert result.reward == pytest.approx(0.7 * m["rubric"] + 0.05 + 0.1 + 0.1 * 2 / 3)
    assert result.end_reason == "answer"
    assert 0.0 < m["rubric"] < 0.8
    assert not result.solved


def test_the_last_text_gives_counts_and_no_word_of_the_rubric(shared: DeepResearch) -> None:
    env = shared.open(sleep(shared))
    last = env.step(ANSWER)
    assert "Rubric score: 0.57. Of 5 rubric criteria: 0 fully met, 4 partial, 1 not met." in last.text
    told = json.dumps([last.text, dict(last.info), dict(env.result().metrics)])
    for item in sleep(shared).data["rubric"]:
        for secret in (item["title"], item["description"], item["leak_safe_hint"]):
            assert not secret or secret not in told


def test_solved_from_the_rubric_alone(shared: DeepResearch) -> None:
    env = shared.open(sleep(shared))
    good = [i["description"] for i in sleep(shared).data["rubric"] if i["weight"] > 0]
    env.step(f"<answer>{' '.join(good)}</answer>")
    assert env.result().solved
    assert env.result().metrics["rubric"] >= 0.8
    assert env.result().metrics["citation"] == 0.0


def test_turns_budget_and_replies_without_anything(shared: DeepResearch) -> None:
    env = shared.open(sleep(shared))
    for _ in range(8):
        assert "no tool call and no closed answer" in env.step("hm").text
    assert "your last tool call" in env.step("hm").text
    last = env.step("Slow wave sleep helps declarative memory, facts and word pairs.")
    assert last.done
    assert env.result().end_reason == "turns"
    m = env.result().metrics
    assert m["rubric"] > 0.0  # judged all the same, without the block's half of the format
    assert (m["format"], m["no_action"], m["turns"]) == (0.0, 9.0, 10.0)
    with pytest.raises(RuntimeError):
        env.step("more")


def test_stopped_from_outside(shared: DeepResearch) -> None:
    env = shared.open(sleep(shared))
    env.step(call("search_papers", query=SLEEP))
    last = env.stop("response_budget")
    assert last.done
    assert env.stop("turns").text == last.text
    result = env.result()
    assert result.end_reason == "response_budget"
    assert result.reward == pytest.approx(0.1 * 0.2 + 0.1 / 3)
    assert result.metrics["judge_calls"] == 0.0  # nothing to judge


def test_thinking_is_no_answer_and_an_answer_comes_before_a_call(shared: DeepResearch) -> None:
    env = shared.open(sleep(shared))
    assert not env.step("<think><answer>x</answer></think> hm").done
    assert not env.step(call("search_papers", query="<answer>x</answer>")).done
    both = env.step(f"<answer>x</answer>{call('search_papers', query=SLEEP)}")
    assert both.done
    assert env.result().metrics["tool_calls"] == 1.0


def test_only_the_first_call_of_a_reply_is_made(shared: DeepResearch) -> None:
    env = shared.open(sleep(shared))
    seen = env.step(call("search_papers", query=SLEEP) * 2)
    assert seen.text.count("<tool_response>") == 2
    assert seen.info["counts"]["tool_errors"] == 1


def test_a_replayed_prefix_gives_the_same_state_and_asks_nobody(shared: DeepResearch) -> None:
    replies = [call("search_papers", query=SLEEP), "hm", call("read_paper", pdf_url=PDF), call("nothing")]
    env = shared.open(sleep(shared))
    turns = [turn(r, env.step(r)) for r in replies]
    env.step(ANSWER)
    assert shared.server is not None
    before = shared.server.requests.total()
    again = shared.open(sleep(shared))
    last = again.replay(turns)
    assert last is not None
    assert last.text == turns[-1].observation
    assert shared.server.requests.total() == before
    again.step(ANSWER)
    assert again.result().reward == env.result().reward

    def timeless(metrics: Any) -> dict[str, float]:
        return {k: v for k, v in metrics.items() if not k.endswith("_s")}

    assert timeless(again.result().metrics) == timeless(env.result().metrics)


def test_a_prefix_that_does_not_fit_its_record_is_not_replayed(shared: DeepResearch) -> None:
    env = shared.open(sleep(shared))
    good = turn("x", env.step(call("search_papers", query=SLEEP)))
    ended = turn(ANSWER, env.step(ANSWER))
    cut = Turn("x", (1,), (0.0,), True, good.observation[5:], (), good.info)
    for turns in ([ended], [cut], [Turn("x", (1,), (0.0,), True, "y")], [good] * 10):
        assert shared.open(sleep(shared)).replay(turns) is None
    first = shared.open(sleep(shared)).replay([])
    assert first is not None
    assert first.text.startswith("How does sleep")


# --- faults and secrets -----------------------------------------------------------------------------------------


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DeepResearch, ReplayServer]]:
    """The task against a server on the network that wants a key and misbehaves; so does the judge's."""
    server = ReplayServer(key=KEY)
    monkeypatch.setenv("TEST_SERPER_KEY", KEY)
    monkeypatch.setenv("TEST_JUDGE_KEY", KEY + "-judge")
    port = server.address[1]
    for paper in server.recordings.papers.values():
        paper.setdefault("pdf", True)
    made = DeepResearch(
        config(
            train_examples=8,
            tools={
                "url": server.url,
                "key_env": "TEST_SERPER_KEY",
                "timeout_s": 4.0,
                "pdf_mb": 0.5,
                "allow_hosts": [f"127.0.0.1:{port}"],
            },
            judge={
                "base_url": f"{server.url}/v1",
                "key_env": "TEST_JUDGE_KEY",
                "backoff_s": 0.01,
                "timeout_s": 2.0,
            },
        )
    )
    yield made, server
    made.close()
    server.close()


def test_an_episode_through_every_fault_ends_with_a_score_and_leaks_no_key(
    guarded: tuple[DeepResearch, ReplayServer], caplog: pytest.LogCaptureFixture
) -> None:
    task, server = guarded
    pdf = f"http://127.0.0.1:{server.address[1]}/papers/sleep-slow-wave.pdf"
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("httpcore").setLevel(logging.DEBUG)
        env = task.open(sleep(task))
        server.inject("scholar", "429:0.1", "500", "echo", "slow:2")
        server.inject("pdf", "paywall", "redirect", "oversized", "binary")
        server.inject("chat", "500", "429:0.1", "echo")
        seen = [env.reset(), env.step(call("search_papers", query=SLEEP))]
        seen += [env.step(call("read_paper", pdf_url=pdf)) for _ in range(4)]
        seen.append(env.step(call("browse_webpage", url="http://169.254.169.254/latest/")))
        server.recordings.pages["echo"] = {"title": KEY, "text": f"Your key is {KEY}."}
        seen.append(env.step(call("browse_webpage", url="http://replay.invalid/pages/echo")))
        seen.append(env.step(ANSWER))
        result, metrics = env.result(), task.metrics()
    assert seen[-1].done
    assert result.reward > 0.0
    m = result.metrics
    assert (m["judge_fault"], m["citation_fault"]) == (0.0, 0.0)
    assert metrics["judge/retried"] == 3.0
    faults = {k.removeprefix("fault_"): n for k, n in m.items() if k.startswith("fault_") and n}
    assert faults == {
        "429": 1.0,
        "5xx": 2.0,
        "timeout": 1.0,
        "paywall": 1.0,
        "refused_address": 2.0,
        "too_large": 1.0,
        "not_text": 1.0,
    }
    assert {
        k.removeprefix("faults/"): n for k, n in metrics.items() if k.startswith("faults/") and n
    } == faults
    assert m["tool_failures"] == 5.0
    assert "[key]" in seen[-2].text
    artifacts = [[o.text, dict(o.info)] for o in seen]
    written = json.dumps([artifacts, dict(m), dict(metrics), task.describe(), repr(result)])
    logs = caplog.text + "".join(f"{r.__dict__}" for r in caplog.records)
    for held in (written, logs, repr(task), repr(env)):
        assert KEY not in held
    assert len(caplog.records) > 10  # the clients did log


def test_a_judge_without_a_readable_reply_is_counted(guarded: tuple[DeepResearch, ReplayServer]) -> None:
    task, server = guarded
    server.inject("chat", *["paywall"] * 99)
    env = task.open(sleep(task))
    env.step(call("search_papers", query=SLEEP))
    last = env.step(ANSWER)
    result = env.result()
    assert last.done
    assert "not known" in last.text
    assert (result.metrics["judge_fault"], result.metrics["citation_fault"], result.metrics["rubric"]) == (
        1,
        1,
        0,
    )
    assert not result.solved
    assert "citation_f1" not in result.metrics
    assert result.reward == pytest.approx(0.1 * 0.5 + 0.1 + 0.1 / 3)


def test_a_judge_that_is_gone_ends_the_run_before_the_next_episode(
    guarded: tuple[DeepResearch, ReplayServer],
) -> None:
    task, server = guarded
    server.inject("chat", "403", "403")
    env = task.open(sleep(task))
    assert env.step(ANSWER).done
    assert env.result().metrics["judge_fault"] == 1.0
    with pytest.raises(UnreachableError, match="judge is gone"):
        task.open(sleep(task))


# --- before the run ---------------------------------------------------------------------------------------------


def test_a_missing_key_says_which_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(UnreachableError, match="SERPER_API_KEY is not set") as error:
        DeepResearch(config(tools={"url": "http://127.0.0.1:9", "key_env": "SERPER_API_KEY"}))
    assert error.value.exit_code == 4


def test_a_wrong_key_and_no_server_are_found_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ReplayServer(key=KEY)
    monkeypatch.setenv("TEST_KEY", "wrong-secret")
    try:
        with pytest.raises(UnreachableError, match="valid key into TEST_KEY") as error:
            DeepResearch(config(tools={"url": server.url, "key_env": "TEST_KEY", "max_retries": 0}))
        assert "wrong-secret" not in str(error.value)
    finally:
        server.close()
    with pytest.raises(UnreachableError, match=r"task\.tools\.url"):
        DeepResearch(config(tools={"url": server.url, "max_retries": 0}))


def test_a_judge_that_is_not_there_is_found_before_the_run() -> None:
    with pytest.raises(UnreachableError, match="no server at"):
        DeepResearch(config(judge={"base_url": "http://127.0.0.1:9/v1", "max_retries": 0}))


def test_config_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="length_soft"):
        DeepResearch(config(length_penalty=0.2, length_soft=9, length_hard=9))
    for url in (
        "google.serper.dev",
        "https://user:secret@host/",
        "https://host/?key=secret",
        "http://host:port/",
    ):
        with pytest.raises(ConfigError, match=r"task\.tools\.url") as error:
            DeepResearch(config(tools={"url": url}))
        assert "secret" not in str(error.value)
    with pytest.raises(ConfigError, match="10 examples"):
        DeepResearch(config(train_examples=10))


def test_the_description_names_the_stand_in(shared: DeepResearch) -> None:
    told = json.dumps(shared.describe())
    assert "replay-judge" in told
    assert "gpt" not in told
    assert shared.describe() == shared.describe()


def test_closing_twice_is_fine() -> None:
    task = DeepResearch(config())
    task.close()
    task.close()
