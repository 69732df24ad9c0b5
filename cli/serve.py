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
import socket
import socketserver
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from racelab.cli.console import say
from racelab.experiments.errors import ConfigError
from racelab.experiments.fsio import explain
from racelab.experiments.models.api_reply import clean
from racelab.experiments.models.retrieval import Engine, open_engine
from racelab.experiments.models.retriever_client import PATH, to_json

DEFAULT_TOP_K: Final = 5
MAX_TOP_K: Final = 1000
MAX_QUERIES: Final = 1024
_MAX_BODY: Final = 4 << 20
_IDLE_S: Final = 60.0
"""A connection that is silent for so long is closed, so that it holds no thread."""


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
    """A server that has its port, and does not listen yet.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        return RetrieverServer(host, port)
    except (OSError, OverflowError) as error:
        why = explain(error) if isinstance(error, OSError) else "no such port"
        raise _taken(host, port, why) from None


class RetrieverServer(ThreadingHTTPServer):
    """One thread per connection."""

    daemon_threads = True
    request_queue_size = 128
    engine: Engine

    def __init__(self, host: str, port: int) -> None:
        """Binds; `engine` and `listen` are the caller's."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler, bind_and_activate=False)
        try:
            self.server_bind()
        except BaseException:
            self.server_close()
            raise

    @property
    def url(self) -> str:
        """Of `/retrieve`, with the port that was chosen."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"

    def server_bind(self) -> None:
        """As the base class, but for its look-up of the host's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line for an error of ours; a client that left is no news. The base class prints tracebacks of both."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            say(_line(error))

    def listen(self) -> None:
        """From now on connections are taken; `serve_forever` answers them. Raises ConfigError."""
        try:
            self.server_activate()
        except OSError as error:
            raise _taken(str(self.server_address[0]), self.server_port, explain(error)) from None


def _taken(host: str, port: int, why: str) -> ConfigError:
    return ConfigError(
        f"--port {port} of --host {host} cannot be had ({why}); choose another, 0 takes a free one"
    )


def _line(error: BaseException) -> str:
    return f"error: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


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


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection's requests."""

    server: RetrieverServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "racelab", ""
    timeout = _IDLE_S
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdecimal():
            self._answer(400, {"error": "no Content-Length; send the body's length"}, close=True)
        elif len(length) > 9 or int(length) > _MAX_BODY:
            self._answer(413, {"error": f"the body is larger than {_MAX_BODY} bytes"}, close=True)
        else:
            self._retrieve(self.rfile.read(int(length)))

    def _retrieve(self, body: bytes) -> None:
        if self.path.partition("?")[0].rstrip("/") != PATH:
            self._answer(404, {"error": f"no such path; POST {PATH}"})
            return
        try:
            queries, top_k, scores = parse(body)
        except BodyError as error:
            self._answer(400, {"error": str(error)})
            return
        try:
            answer = to_json(self.server.engine.search(queries, top_k), scores)
        except Exception as error:  # one query must not end the connection without a word
            say(_line(error))
            self._answer(500, {"error": f"the search failed ({type(error).__name__})"})
            return
        self._answer(200, answer)

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/health":
            self._answer(200, self.server.engine.describe())
        else:
            self._answer(404, {"error": f"no such path; POST {PATH}, GET /health"})

    def _answer(self, status: int, value: dict[str, Any], *, close: bool = False) -> None:
        body = json.dumps(value).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if close:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # nobody waits for it any more
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a training step makes hundreds of requests."""
