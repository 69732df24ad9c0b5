"""The judge behind a server, on scripted chats and on a server that misbehaves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from racelab.configs.compose import compose
from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.models.api import ApiModel
from racelab.experiments.models.api_settings import ApiSettings
from racelab.experiments.models.configured import find_judge, judge_settings
from racelab.experiments.models.judge import build_judge, redrawn
from racelab.experiments.models.judge_api import ApiJudge, ApiJudgeSettings
from racelab.experiments.models.judge_prompted import JsonJudge, JsonSettings
from racelab.experiments.needs import redundancy_chat
from racelab.experiments.ports import Judge
from racelab.experiments.types import Criterion, JudgeItem, Prompt, Rubric, Sample

from .api_server import ApiServer, Behaviour, ok, status
from .scripted_chat import ScriptedChat

RUBRIC = Rubric((Criterion("Is short", 1.0), Criterion("Gives a real one", 3.0)), "")
NONE = pytest.approx(math.nan, nan_ok=True)


def item(*texts, rubric=RUBRIC):
    return JudgeItem(Prompt("p", "Name a planet."), rubric, tuple(Sample((), (), t, True) for t in texts))


def by_answer(request):
    return {"Mars": '{"score": 73}', "Venus": "hm"}.get(request.user.split("grade:\n")[1].split("\n")[0])


def test_scores_come_back_in_order_and_failures_are_kept_apart():
    chat = ScriptedChat(by_answer)
    judge = ApiJudge(chat)
    result = judge.score([item("Mars", "Venus"), item("Mars", rubric=None), item("Pluto", "Mars"), item()])
    assert [s.tolist() for s in result.scores] == [[0.73, NONE], [NONE], [NONE, 0.73], []]
    assert (result.calls, result.parse_failures, result.infra_failures) == (4, 1, 1)
    assert len(chat.batches) == 1
    (first, second), none, (third, _), _ = result.replies
    assert none == ()
    assert (first.text, first.error, first.lost) == ('{"score": 73}', "", False)
    assert (second.text, second.error, second.lost) == ("hm", "no score", False)
    assert (third.text, third.error, third.lost) == (None, "HTTP 500", True)
    assert isinstance(judge, Judge)


def test_replies_are_read_as_the_settings_say():
    chat = ScriptedChat(lambda r: '{"score": 80.5} or rather {"score": 10}')
    scores = [
        float(ApiJudge(chat, ApiJudgeSettings(reading=reading)).score([item("Mars")]).scores[0][0])
        for reading in ("last_json", "first_number")
    ]
    assert scores == [0.1, 0.805]


TOO_LONG = Behaviour(
    status=400, body=b'{"error": {"message": "long", "type": "x", "code": "context_length_exceeded"}}'
)


def test_what_the_server_s_window_does_not_hold_is_a_failure_and_not_lost():
    with ApiServer({"Mars": ok('{"score": 73}'), "Venus": TOO_LONG}) as server:
        chat = ApiModel(ApiSettings(server.url, "m", key_env="", max_retries=0, empty_ok=True, fit=True))
        judge = ApiJudge(chat, ApiJudgeSettings(strict=True))
        for _ in range(5):  # nor is it a sign of a server that answers nobody
            result = judge.score([item("Venus 1", "Venus 2")])
        both = judge.score([item("Mars", "Venus")])
    (reply, _) = result.replies[0]
    assert (reply.text, reply.error, reply.lost) == (None, "the prompt exceeds the judge's window", False)
    assert both.scores[0].tolist() == [0.73, NONE]


def test_the_prompt_is_that_of_the_json_judge():
    chat = ScriptedChat(lambda r: '{"score": 5}')
    how = ApiJudgeSettings(high=10, max_tokens=30, temperature=0.6, top_p=0.95)
    result = ApiJudge(chat, how).score([item("so <|im_end|> <think>hm</think>Mars")])
    assert result.scores[0].tolist() == [0.5]
    (request,) = chat.requests
    assert "1. Is short (weight: 0.25)\n2. Gives a real one (weight: 0.75)" in request.user
    assert "so < |im_end| > Mars" in request.user
    assert "between 0 and 10:" in request.user
    assert request.system is not None
    assert (request.max_tokens, request.temperature, request.top_p) == (30, 0.6, 0.95)


def test_another_draw_asks_for_another_reply():
    def requests(judge):
        judge.chat.batches.clear()
        judge.score([item("Mars")])
        return judge.chat.requests[0]

    judge = ApiJudge(ScriptedChat(by_answer), ApiJudgeSettings(temperature=0.6, seed=4))
    first, second = requests(judge), requests(redrawn(judge, 1))
    assert redrawn(judge, 0) is judge
    assert (first.draw, second.draw) == (0, 1)
    assert first.seed != second.seed
    assert replace(second, draw=0, seed=first.seed) == first
    greedy = ApiJudge(ScriptedChat(by_answer))
    assert requests(greedy).seed is None
    assert requests(redrawn(greedy, 1)) != requests(greedy)  # a server need not repeat itself


def test_other_judges_are_drawn_anew_only_if_they_draw():
    model = object()
    drawing = JsonJudge(model, settings=JsonSettings(temperature=0.6, seed=3))
    again = redrawn(drawing, 1)
    assert again is not drawing
    assert again.settings.seed != 3
    assert again.settings == redrawn(drawing, 1).settings
    assert again.settings != redrawn(drawing, 2).settings
    assert redrawn(drawing, 0) is drawing
    greedy = JsonJudge(model)
    assert redrawn(greedy, 1) is greedy


class Gone(ScriptedChat):
    def complete(self, requests):
        raise UnreachableError("no server at http://x")


def test_a_server_that_is_gone_gives_nan_and_is_an_error_where_that_is_wanted():
    result = ApiJudge(Gone(by_answer)).score([item("Mars", "Venus")])
    assert np.isnan(result.scores[0]).all()
    assert (result.calls, result.parse_failures, result.infra_failures) == (2, 0, 2)
    assert result.replies[0][0].error == "no server at http://x"
    with pytest.raises(UnreachableError, match="no server"):
        ApiJudge(Gone(by_answer), ApiJudgeSettings(strict=True)).score([item("Mars")])
    assert (
        ApiJudge(Gone(by_answer), ApiJudgeSettings(strict=True)).score([item("Mars", rubric=None)]).calls == 0
    )


def test_it_is_described_without_secrets_and_built_by_kind(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    chat = ApiModel(ApiSettings("http://127.0.0.1:9/v1", "j", key_env="JUDGE_KEY"))
    said = build_judge("api", chat=chat).describe()
    assert (said["kind"], said["model"], said["server"]["base_url"]) == ("api", "j", "http://127.0.0.1:9/v1")
    assert "sk-secret" not in json.dumps(said)
    with pytest.raises(ConfigError, match=r"judge\.base_url"):
        build_judge("api")
    with pytest.raises(ConfigError, match=r"judge\.source"):
        build_judge("json")


def test_the_section_judge_names_server_and_sampling():
    with ApiServer(lambda prompt: ok("hello")) as server:
        config = compose(["judge=api", f"judge.base_url={server.url}", "judge.model=j", "judge.high=10"]).race
        folder, found = find_judge(config.judge)
        assert folder is None
        assert (found.model, found.base_url, found.section) == ("j", server.url, "judge")
    settings = judge_settings(config.judge, 3)
    assert (settings.high, settings.max_tokens, settings.strict) == (10, config.judge.max_tokens, False)
    assert settings.seed != judge_settings(config.judge, 4).seed


def test_a_real_server_with_bad_and_refused_replies():
    """One reply has a score, one has none, one is refused: a score, a parse failure, an infrastructure failure."""
    script = {"Mars": ok('{"score": 40}'), "Venus": ok("hm"), "Pluto": status(400)}
    with ApiServer(script) as server:
        chat = ApiModel(ApiSettings(server.url, "j", key_env="", max_retries=0))
        result = ApiJudge(chat).score([item("Mars", "Venus", "Pluto")])
    assert result.scores[0].tolist() == [0.4, NONE, NONE]
    assert (result.calls, result.parse_failures, result.infra_failures) == (3, 1, 1)


def test_a_server_that_dies_in_the_middle_does_not_raise():
    with ApiServer(lambda prompt: ok('{"score": 40}')) as server:
        chat = ApiModel(ApiSettings(server.url, "j", key_env="", max_retries=0, timeout_s=2))
        assert ApiJudge(chat).score([item("Mars")]).scores[0].tolist() == [0.4]
    for _ in range(5):
        result = ApiJudge(chat).score([item("Venus")])
        assert (result.calls, result.infra_failures) == (1, 1)


def test_a_judge_without_a_server_says_which_key():
    config = compose(["judge=api", "judge.base_url=http://127.0.0.1:9/v1", "judge.model=j"]).race
    with pytest.raises(UnreachableError, match=r"judge\.base_url"):
        find_judge(config.judge)


def test_the_probe_may_ask_the_judge_behind_the_server():
    chat = ScriptedChat(by_answer)
    config = compose(["judge=api", "probe.redundancy=judge"]).race
    parts = SimpleNamespace(judge=ApiJudge(chat), judge_model=None)
    assert redundancy_chat(parts, config) is chat


def test_rlcer_cannot_ask_it_for_lists():
    with pytest.raises(ConfigError, match="judge=api does not give"):
        compose(["method=rlcer", "judge=api", "method.verifier=list"])
