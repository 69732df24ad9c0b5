"""`racelab serve retriever`: passages over HTTP, in Search-R1's API (see `models/retriever_client.py`).

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
    GET  /health    what is served

A body that cannot be used is answered with status 400 and {"error": line}. Without `topk` there are 5 passages, without
`return_scores` the documents alone, as Search-R1's server has it; null counts as left out.
"""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path
from typing import Final

from racelab.cli import http_server
from racelab.cli.console import say
from racelab.cli.http_server import JsonHandler, JsonServer, error_line
from racelab.experiments.errors import ConfigError
from racelab.experiments.models.api_reply import clean
from racelab.experiments.models.retrieval import Engine, open_engine
from racelab.experiments.models.retriever_client import PATH, to_json

DEFAULT_TOP_K: Final = 5
MAX_TOP_K: Final = 1000
MAX_QUERIES: Final = 1024


def retriever(
    corpus: str,
    engine: str,
    encoder: str,
    host: str,
    port: int,
    index: Path | None = None,
    device: str = "cpu",
) -> int:
    """Serves until SIGINT or SIGTERM, which end the process as for every command (130 and 143).

    The address goes to stdout once the server listens. Returns 130 after a SIGINT.

    Args:
        corpus: a .jsonl file, or `package` for the small one of the HotpotQA task.
        engine: `bm25` or `dense`.
        encoder: dense: `minilm`, a folder or a hub name.
        host: address to listen at.
        port: 0: any free one.
        index: dense: a FAISS file that is read if it is there, else written.
        device: dense: of the encoder.
    """
    if engine not in ("bm25", "dense"):
        raise ConfigError(f"--engine {engine}: no such engine; give bm25 or dense")
    if index is not None and engine != "dense":
        raise ConfigError("--index is the file of a dense index; leave it out, or give --engine dense")
    # A shell that starts a command with `&` has it ignore SIGINT; the handler is installed whatever was inherited.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _serve(corpus, engine, encoder, host, port, index, device)
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(
    corpus: str, engine: str, encoder: str, host: str, port: int, index: Path | None, device: str
) -> int:
    with bound(host, port) as server:  # before the index is built: a taken port should not cost that time
        from racelab.experiments.tasks.hotpotqa.data import corpus_file

        server.engine = open_engine(engine, corpus_file(corpus), encoder, index=index, device=device)
        server.listen()
        about = server.engine.describe()
        source = "the package" if corpus == "package" else about["corpus"]
        say(f"serving {about['passages']:,} passages of {source} with {engine}; Ctrl-C stops it")
        say(_usage(server.url))
        try:
            print(server.url, flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped")
            return 130
        except SystemExit:  # SIGTERM
            say("stopped")
            raise
    return 0


def _usage(url: str) -> str:
    """How to ask the server, and how a run is told of it."""
    asked = f'curl -s {shlex.quote(url)} -d \'{{"queries": ["..."], "topk": 2}}\''
    return f"ask: {asked}; in a run: task.retriever.url={url}"


def bound(host: str, port: int) -> RetrieverServer:
    """A server that has its port, and does not listen yet. Raises ConfigError."""
    return http_server.bound(RetrieverServer, host, port, _Handler)


class RetrieverServer(JsonServer):
    """One thread per connection; `engine` is the caller's to set before `listen`."""

    engine: Engine

    @property
    def url(self) -> str:
        """Of `/retrieve`, with the port that was chosen."""
        return f"{self.address}{PATH}"


class BodyError(Exception):
    """A request that cannot be answered; one line."""


def parse(body: bytes) -> tuple[list[str], int, bool]:
    """Queries, top_k and whether scores are wanted.

    Raises:
        BodyError: names the field and what it takes.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise BodyError('the body is not JSON; send {"queries": ["..."], "topk": 5}') from None
    queries = value.get("queries") if isinstance(value, dict) else None
    if not isinstance(queries, list) or not queries or not all(isinstance(q, str) for q in queries):
        raise BodyError('"queries": must be a list of at least one text')
    if len(queries) > MAX_QUERIES:
        raise BodyError(f'"queries": at most {MAX_QUERIES} at a time')
    top_k = value.get("topk")
    top_k = DEFAULT_TOP_K if top_k is None else top_k
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= MAX_TOP_K:
        raise BodyError(f'"topk": must be a whole number from 1 to {MAX_TOP_K}')
    scores = value.get("return_scores")
    scores = False if scores is None else scores
    if not isinstance(scores, bool):
        raise BodyError('"return_scores": must be true or false')
    return [clean(q) for q in queries], top_k, scores


class _Handler(JsonHandler):
    """Answers one connection's requests."""

    server: RetrieverServer

    def do_POST(self) -> None:
        body = self.body()
        if body is not None:
            self._retrieve(body)

    def _retrieve(self, body: bytes) -> None:
        if self.path.partition("?")[0].rstrip("/") != PATH:
            self.refuse(404, f"no such path; POST {PATH}")
            return
        try:
            queries, top_k, scores = parse(body)
        except BodyError as error:
            self.refuse(400, str(error))
            return
        try:
            answer = to_json(self.server.engine.search(queries, top_k), scores)
        except Exception as error:  # one query must not end the connection without a word
            say(error_line(error))
            self.refuse(500, f"the search failed ({type(error).__name__})")
            return
        self.answer(200, answer)

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/health":
            self.answer(200, self.server.engine.describe())
        else:
            self.refuse(404, f"no such path; POST {PATH}, GET /health")
