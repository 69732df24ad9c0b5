"""`serve retriever`: speaks Search-R1's API to our own client, refuses bad bodies, stops as told."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from racelab.cli.serve import MAX_QUERIES, BodyError, RetrieverServer, bound, parse, retriever
from racelab.configs.compose import compose
from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.models.retrieval import open_engine
from racelab.experiments.models.retriever_client import HttpRetriever, LocalRetriever
from racelab.experiments.tasks.hotpotqa.data import corpus_file
from racelab.experiments.tasks.hotpotqa.task import HotpotQa


@pytest.fixture
def server() -> Iterator[RetrieverServer]:
    with bound("127.0.0.1", 0) as found:
        found.engine = open_engine("bm25", corpus_file("package"))
        found.listen()
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(server: RetrieverServer, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
    with contextlib.closing(connection):
        text = body if isinstance(body, bytes | None) else json.dumps(body)
        connection.request(method, path, text, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_a_round_trip_gives_what_the_engine_gives(server: RetrieverServer) -> None:
    remote, local = HttpRetriever(server.url, timeout_s=5), LocalRetriever(server.engine)
    remote.check()
    for query, k in (("Tern Bridge", 3), ("Who designed Gannet Light?", 50), ("zzz", 5), ("ü“ \n", 2)):
        assert remote.search(query, k) == local.search(query, k)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: remote.search("river Ilvane", 1 + i % 9), range(64)))
    assert [len(hits) for hits in found] == [len(local.search("river Ilvane", 1 + i % 9)) for i in range(64)]


def test_a_task_searches_over_http_as_in_process(server: RetrieverServer) -> None:
    words = ["task=hotpotqa", "preset=embedded"]
    remote = HotpotQa(compose([*words, f"task.retriever.url={server.url}"]).config.task)
    local = HotpotQa(compose(words).config.task)
    body = json.dumps({"name": "search", "arguments": {"query": "Tern Bridge", "top_k": 3}})
    texts = [t.open(t.train()[0]).step(f"<tool_call>{body}</tool_call>").text for t in (remote, local)]
    assert texts[0] == texts[1]
    assert texts[0].startswith('<tool_response>\n[1] "Tern Bridge"')
    assert remote.describe()["retriever"] == {"engine": "http", "url": server.url}
    assert remote.metrics()["retriever_calls"] == 1


def test_several_queries_with_and_without_scores(server: RetrieverServer) -> None:
    body = {"queries": ["Tern Bridge", "Lunmoor"], "topk": 2, "return_scores": True}
    code, scored = ask(server, "POST", "/retrieve", body)
    assert (code, len(scored["result"]), len(scored["result"][0])) == (200, 2, 2)
    top = scored["result"][0][0]
    assert top["document"]["contents"].startswith('"Tern Bridge"\n')
    assert top["score"] > scored["result"][0][1]["score"] > 0
    code, bare = ask(server, "POST", "/retrieve/", {"queries": ["Tern Bridge Veldmark"]})
    assert (code, len(bare["result"][0])) == (200, 5)
    assert top["document"] in bare["result"][0]
    assert ask(server, "GET", "/health") == (
        200,
        {"engine": "bm25", "corpus": "corpus.jsonl", "passages": 94},
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", '"queries"'),
        (b"\xff", "not JSON"),
        ({}, '"queries"'),
        ({"queries": "x"}, '"queries"'),
        ({"queries": []}, '"queries"'),
        ({"queries": [1]}, '"queries"'),
        ({"queries": ["x"] * (MAX_QUERIES + 1)}, "at most 1024"),
        ({"queries": ["x"], "topk": 0}, '"topk"'),
        ({"queries": ["x"], "topk": "3"}, '"topk"'),
        ({"queries": ["x"], "topk": True}, '"topk"'),
        ({"queries": ["x"], "topk": 1001}, "from 1 to 1000"),
        ({"queries": ["x"], "return_scores": 1}, '"return_scores"'),
    ],
)
def test_a_bad_body_is_refused_with_a_line(server: RetrieverServer, body: Any, says: str) -> None:
    code, answer = ask(server, "POST", "/retrieve", body)
    assert code == 400
    assert says in answer["error"]
    assert "\n" not in answer["error"]
    assert ask(server, "GET", "/health")[0] == 200


def test_other_paths_lengths_and_bodies(server: RetrieverServer) -> None:
    assert ask(server, "POST", "/other", {"queries": ["x"]})[0] == 404
    assert ask(server, "GET", "/")[0] == 404
    for length, code in (("99999999", 413), ("9" * 40, 413), ("-1", 400), ("x", 400)):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as raw:
            raw.sendall(
                f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()
            )
            assert raw.makefile("rb").readline().split()[1] == str(code).encode()


def test_web_pages_of_elsewhere_get_no_passages(server: RetrieverServer) -> None:
    body = {"queries": ["x"]}
    assert ask(server, "POST", "/retrieve", body, Host="evil.example")[0] == 403
    assert ask(server, "POST", "/retrieve", body, Origin="http://evil.example")[0] == 403
    assert ask(server, "GET", "/health", Host="evil.example")[0] == 403
    assert ask(server, "POST", "/retrieve", body, Host="localhost")[0] == 200


def test_an_engine_that_breaks_is_a_500_and_no_end(
    server: RetrieverServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("index gone\nsecond line")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "search", broken)
        code, answer = ask(server, "POST", "/retrieve", {"queries": ["x"]})
    assert (code, answer) == (500, {"error": "the search failed (RuntimeError)"})
    assert "index gone" in capsys.readouterr().err
    assert ask(server, "POST", "/retrieve", {"queries": ["x"]})[0] == 200


def test_a_client_that_resets_is_no_news(
    server: RetrieverServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, shutdown = threading.Semaphore(0), server.shutdown_request

    def seen(request: Any) -> None:
        shutdown(request)
        ended.release()

    monkeypatch.setattr(server, "shutdown_request", seen)
    for sent in (b"", b"POST /retr", b"POST /retrieve HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"):
        raw = socket.create_connection(("127.0.0.1", server.server_port), timeout=5)
        raw.sendall(sent)
        time.sleep(0.05)  # the handler reads by now
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
        assert ended.acquire(timeout=5)
    assert capfd.readouterr().err == ""
    assert ask(server, "GET", "/health")[0] == 200


def test_an_error_of_the_server_itself_is_one_line(
    server: RetrieverServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("no description\nsecond line")

    monkeypatch.setattr(server.engine, "describe", broken)
    with pytest.raises(http.client.HTTPException):
        ask(server, "GET", "/health")
    assert ask(server, "POST", "/retrieve", {"queries": ["x"]})[0] == 200
    err = capfd.readouterr().err
    assert "RuntimeError: no description" in err
    assert len(err.splitlines()) == 1


def test_parse_takes_what_search_r1_sends() -> None:
    assert parse(b'{"queries": ["a"], "topk": null}') == (["a"], 5, False)
    assert parse(b'{"queries": ["a"], "return_scores": null}') == (["a"], 5, False)
    assert parse(rb'{"queries": ["\ud800"], "topk": 3, "return_scores": true}') == (["?"], 3, True)
    with pytest.raises(BodyError):
        parse(b"[" * 100_000)


def test_what_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--engine lucene: no such engine; give bm25 or dense"):
        retriever("package", "lucene", "minilm", "127.0.0.1", 0)
    with pytest.raises(ConfigError, match="--index is the file of a dense index"):
        retriever("package", "bm25", "minilm", "127.0.0.1", 0, index=tmp_path / "x")
    (tmp_path / "bad.jsonl").write_text('{"id": "1", "contents": "x"}\n{"id": 2}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: field 'contents'"):
        retriever(str(tmp_path / "bad.jsonl"), "bm25", "minilm", "127.0.0.1", 0)
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(
            ConfigError, match=rf"--port {taken.server_port} of --host 127\.0\.0\.1 cannot be had"
        ):
            retriever("package", "bm25", "minilm", "127.0.0.1", taken.server_port)
    with pytest.raises(ConfigError, match="no such port"):
        bound("127.0.0.1", 70000)


# `main` puts every command's exit codes around the body; here the command is the body itself.
_PROGRAM = """
import signal, sys
from racelab.cli.main import _on_sigterm
from racelab.cli.serve import retriever
signal.signal(signal.SIGTERM, _on_sigterm)
try:
    sys.exit(retriever("package", "bm25", "minilm", "127.0.0.1", 0))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_process_names_its_address_and_stops_on_a_signal(signum: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert HttpRetriever(url, timeout_s=5).search("Tern Bridge", 1)[0].passage.title == "Tern Bridge"
        process.send_signal(signum)
        out, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert (process.returncode, out) == (code, "")
    said, usage, end = err.splitlines()
    assert said == "serving 94 passages of the package with bm25; Ctrl-C stops it"
    words = shlex.split(usage)
    assert words[1:5] == ["curl", "-s", url, "-d"]
    assert parse(words[5].rstrip(";").encode()) == (["..."], 2, False)
    assert words[-1] == f"task.retriever.url={url}"
    assert end == "stopped"


def test_a_server_that_a_script_starts_with_an_ampersand_stops_on_sigint() -> None:
    """Such a process inherits that SIGINT is ignored."""
    words = ["serve", "retriever", "--corpus", "package", "--port", "0"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "racelab.cli.main", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert time.monotonic() - started < 2
    assert (process.returncode, err.splitlines()[-1]) == (130, "stopped")
