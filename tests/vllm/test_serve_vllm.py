"""`serve judge` with the real vLLM on the CPU and the packaged model: asked directly, and as a judge of two answers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from racelab.experiments.errors import UnreachableError
from racelab.experiments.models.api import ApiModel, ApiSettings
from racelab.experiments.models.api_health import check_server
from racelab.experiments.models.assets import resolve_model
from racelab.experiments.models.judge_api import ApiJudge, ApiJudgeSettings
from racelab.experiments.types import Criterion, JudgeItem, Prompt, Rubric, Sample

pytestmark = pytest.mark.vllm
KEY = "s3cret"


@dataclass(frozen=True)
class Running:
    url: str
    process: subprocess.Popen[str]
    log: Path

    def ask(self, path: str, body: dict[str, Any] | None = None, key: str = KEY) -> tuple[int, Any]:
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        connection.request("POST" if body else "GET", parts.path + path, body and json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = resolve_model("smollm2-135m")
    log = tmp_path_factory.mktemp("vllm-judge") / "log.txt"
    words = ["serve", "judge", str(folder), "--engine", "vllm", "--port", "0", "--max-length", "2048"]
    with log.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "racelab.cli.main", *words, "--key-env", "JUDGE_KEY", "--name", "small"],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env={**os.environ, "JUDGE_KEY": KEY, "VLLM_CPU_KVCACHE_SPACE": "1"},
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, log.read_text()[-3000:]
        yield Running(url, process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def chat(user: str, **more: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": user}], "max_tokens": 24, **more}


def test_it_speaks_what_our_own_server_speaks(server: Running) -> None:
    code, answer = server.ask("/chat/completions", chat("What is the capital of France?", temperature=0))
    assert code == 200
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens"] > 0
    drawn = [server.ask("/chat/completions", chat("Say a word.", seed=s, n=2))[1] for s in (1, 2)]
    texts = [c["message"]["content"] for a in drawn for c in a["choices"]]
    assert len(texts) == 4
    assert len(set(texts)) > 1
    assert [m["id"] for m in server.ask("/models")[1]["data"]] == ["small"]
    long = server.ask("/chat/completions", chat("word " * 3000))
    assert long[0] == 400


def test_without_the_key_nobody_is_answered(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("", "other"):
        assert server.ask("/models", key=key)[0] == 401
        assert server.ask("/chat/completions", chat("x"), key=key)[0] == 401
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(UnreachableError):
        check_server(ApiSettings(base_url=server.url, model="", key_env=""))
    assert KEY not in server.log.read_text()


def test_two_answers_are_judged_through_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is too small for its scores to mean anything: what is tested is that they come."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("JUDGE_KEY", KEY)
    settings = ApiSettings(base_url=server.url, model="", key_env="JUDGE_KEY", timeout_s=120)
    name = check_server(settings)
    assert name == "small"
    chat_model = ApiModel(ApiSettings(base_url=server.url, model=name, key_env="JUDGE_KEY", timeout_s=120))
    judge = ApiJudge(chat_model, ApiJudgeSettings(max_tokens=128))
    rubric = Rubric((Criterion("Names the capital of France.", 1.0),), "")
    answers = tuple(Sample((), (), text, True) for text in ("It is Paris.", "I like trains."))
    item = JudgeItem(Prompt("p", "What is the capital of France?"), rubric, answers)
    scores = judge.score([item])
    assert chat_model.calls.made == 2
    assert chat_model.calls.failed == 0
    assert chat_model.calls.completion_tokens > 0
    assert (scores.calls, scores.infra_failures) == (2, 0)
    assert [reply.lost for reply in scores.replies[0]] == [False, False]


def test_it_stops_with_all_its_processes(server: Running) -> None:
    ours = _family(server.process.pid)
    assert len(ours) > 1
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 130
    assert server.log.read_text().splitlines().count("stopped") == 1
    deadline = time.monotonic() + 10
    while left := [pid for pid in ours if _runs(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
