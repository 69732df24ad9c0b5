"""The client against servers that answer well, badly, slowly and not at all."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.models.retrieval import BM25, Passage
from racelab.experiments.models.retriever_client import (
    Clock,
    HttpRetriever,
    LocalRetriever,
    RetrieverError,
    to_json,
)

GOOD = {"result": [[{"document": {"id": "7", "contents": '"T"\ntext'}, "score": 1.5}]]}
Behaviour = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def answer(
    handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, length: int | None = None
) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def good(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    answer(handler, json.dumps(GOOD).encode())


class Server:
    """Answers with the next of `plan`, then well; keeps what it was asked."""

    def __init__(self) -> None:
        self.plan: list[Behaviour] = []
        self.asked: list[dict[str, Any]] = []
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.asked.append({**asked, "path": self.path})
                    behaviour = outer.plan.pop(0) if outer.plan else good
                with contextlib.suppress(OSError):  # the client has given up
                    behaviour(self, asked)

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/retrieve"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.http.shutdown()
    found.http.server_close()


def client(server: Server, **settings: Any) -> tuple[HttpRetriever, list[float]]:
    waits: list[float] = []
    return HttpRetriever(
        server.url, sleep=waits.append, **{"timeout_s": 5.0, "max_retries": 2, **settings}
    ), waits


def status(code: int) -> Behaviour:
    return lambda handler, asked: answer(handler, b"Traceback: secret", code)


def body(text: str) -> Behaviour:
    return lambda handler, asked: answer(handler, text.encode())


def test_a_query_as_search_r1_wants_it(server: Server) -> None:
    retriever, waits = client(server)
    [hit] = retriever.search("who \ud800?", 3)
    assert (hit.passage, hit.score) == (Passage("7", '"T"\ntext'), 1.5)
    assert server.asked == [{"queries": ["who ??"], "topk": 3, "return_scores": True, "path": "/retrieve"}]
    assert waits == []
    assert retriever.describe() == {"engine": "http", "url": server.url}


def test_a_passing_fault_is_tried_again_with_growing_waits(server: Server) -> None:
    server.plan = [status(500), status(429), good]
    retriever, waits = client(server, backoff_s=0.5)
    assert len(retriever.search("q", 1)) == 1
    assert waits == [0.5, 1.0]
    counted = retriever.metrics()
    assert (counted["retriever_calls"], counted["retriever_failed"], counted["retriever_retried"]) == (
        1,
        0,
        2,
    )


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        (status(500), "HTTP status 500"),
        (status(503), "HTTP status 503"),
        (body("<html>"), "malformed JSON"),
        (body("[" * 100_000), "malformed JSON"),
        (body("[]"), '"result"'),
        (body('{"result": []}'), '"result"'),
        (body('{"result": [[{"contents": "x"}]]}'), '"document"'),
        (body('{"result": [[{"document": {"id": 1}, "score": 1}]]}'), '"contents"'),
        (body('{"result": [[{"document": {"id": 1, "contents": "x"}}]]}'), '"score"'),
        (lambda handler, asked: answer(handler, b'{"result"', length=900), "cut off|connection failed"),
        (lambda handler, asked: handler.connection.close(), "connection failed"),
    ],
)
def test_a_lasting_fault_is_an_error_that_tells_nothing_of_the_server(
    server: Server, behaviour: Behaviour, says: str
) -> None:
    server.plan = [behaviour] * 3
    retriever, waits = client(server)
    with pytest.raises(RetrieverError, match=says) as error:
        retriever.search("q", 1)
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)
    assert "127.0.0.1" not in str(error.value)
    assert (len(server.asked), len(waits)) == (3, 2)
    assert retriever.metrics()["retriever_failed"] == 1


def test_a_refused_query_is_not_sent_again(server: Server) -> None:
    server.plan = [status(400)]
    retriever, _ = client(server)
    with pytest.raises(RetrieverError, match="HTTP status 400"):
        retriever.search("q", 1)
    assert len(server.asked) == 1


def silent(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    time.sleep(0.6)


def dripping(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    for _ in range(12):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


@pytest.mark.parametrize(("behaviour", "says"), [(silent, "no answer within 0.2 s"), (dripping, "too slow")])
def test_a_slow_server_costs_the_time_out_and_no_more(
    server: Server, behaviour: Behaviour, says: str
) -> None:
    server.plan = [behaviour]
    retriever, _ = client(server, timeout_s=0.2, max_retries=0)
    start = time.monotonic()
    with pytest.raises(RetrieverError, match=says):
        retriever.search("q", 1)
    assert time.monotonic() - start < 0.55


def test_more_hits_than_asked_for_are_left(server: Server) -> None:
    server.plan = [body(json.dumps({"result": [GOOD["result"][0] * 9]}))]
    assert len(client(server)[0].search("q", 4)) == 4


def test_threads_share_a_client_and_its_limit(server: Server) -> None:
    lock, waiting, most = threading.Lock(), 0, 0

    def slow(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        """Counts until just before the answer: once it is sent, the client may already have sent the next request."""
        nonlocal waiting, most
        with lock:
            waiting += 1
            most = max(most, waiting)
        time.sleep(0.02)
        with lock:
            waiting -= 1
        good(handler, asked)

    server.plan = [slow] * 24
    retriever, _ = client(server, concurrency=3)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda i: retriever.search(str(i), 1), range(24)))
    assert all(len(hits) == 1 for hits in found)
    assert sorted(int(a["queries"][0]) for a in server.asked) == list(range(24))
    assert 2 <= most <= 3
    assert retriever.metrics()["retriever_calls"] == 24


def test_the_check_before_a_run(server: Server) -> None:
    client(server)[0].check()
    assert server.asked[0]["topk"] == 1
    server.plan = [status(404)]
    with pytest.raises(UnreachableError, match=r"HTTP status 404.*racelab serve retriever --corpus FILE"):
        client(server)[0].check()
    server.plan = [body("{}")]
    with pytest.raises(UnreachableError, match="Search-R1"):
        client(server)[0].check()


def test_nobody_there() -> None:
    retriever = HttpRetriever("http://127.0.0.1:9", max_retries=1, sleep=lambda s: None)
    assert retriever.url == "http://127.0.0.1:9/retrieve"
    with pytest.raises(UnreachableError, match=r"task\.retriever\.url: no retriever answers at .*refused"):
        retriever.check()
    with pytest.raises(RetrieverError, match="connection failed: connection refused"):
        retriever.search("q", 1)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://h/x",
        "http://",
        "http://h:port/",
        "http://h/a b",
        "http://u:p@h/",
        "http://[::1",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"task\.retriever\.url .* give one as http://127\.0\.0\.1:8000/retrieve"
    ):
        HttpRetriever(url)


def test_the_clock() -> None:
    clock = Clock()
    for i in range(1, 21):
        clock.add(i / 1000, failed=i == 20, retried=int(i > 18))
    assert clock.take() == pytest.approx(
        {
            "retriever_calls": 20, "retriever_failed": 1, "retriever_retried": 2, "retriever_ms": 10.5,
            "retriever_ms_p95": 19,
        }
    )  # fmt: skip
    assert clock.take() == {"retriever_calls": 0, "retriever_failed": 0, "retriever_retried": 0}


def test_the_local_one_is_the_engine_with_a_clock() -> None:
    engine = BM25([Passage("0", '"A"\nred fox'), Passage("1", '"B"\nblue hen')])
    retriever = LocalRetriever(engine)
    retriever.check()
    assert retriever.search("hen", 5) == engine.search(["hen"], 5)[0]
    assert retriever.metrics()["retriever_calls"] == 1
    assert retriever.describe() == engine.describe()
    found = engine.search(["hen", "nothing"], 1)
    assert to_json(found, scores=False) == {"result": [[{"id": "1", "contents": '"B"\nblue hen'}], []]}
