"""A server on loopback that stands in for the search service, the web and the judge, from recordings.

    POST /search, /scholar, /scrape     the Serper API (an unknown query gets the answer of the nearest known one)
    GET  /papers/<name>.pdf             a small PDF
    GET  /pages/<name>                  a page as HTML
    POST /v1/chat/completions           `replay-judge`, which compares words (`replay_judge.py`)

It can misbehave: `inject("scholar", "429", "slow:2")` makes the next two requests of that kind go wrong. Faults are
`429[:seconds]` (with Retry-After), `500`, `403`, `slow[:seconds]` (late, then right), `drop`, `bad_json`, `echo` (an
error that repeats the request's headers), `paywall` (a page in place of what was asked for), `redirect[:address]`
(default: the cloud's metadata address), `oversized`, `binary`.

Standard library only. Runs in the process that starts it and binds 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import html
import json
import threading
from collections import Counter, deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

from racelab.experiments.tasks.deepresearch.recordings import Recordings, tiny_pdf
from racelab.experiments.tasks.deepresearch.replay_judge import NAME, reply

KINDS: Final = ("search", "scholar", "scrape", "pdf", "page", "chat")
FAULTS: Final = frozenset(
    "429 500 403 slow drop bad_json echo paywall redirect oversized binary".split()  # noqa: SIM905
)
_METADATA: Final = "http://169.254.169.254/latest/meta-data/"
_OVERSIZED: Final = 64 << 20


class ReplayServer:
    """Started by its constructor."""

    def __init__(self, recordings: Recordings | None = None, *, key: str = "") -> None:
        """Listens on a free port.

        Args:
            recordings: default: the packaged ones.
            key: requests to the search service need it as X-API-KEY; "": they need none.
        """
        self.recordings = recordings or Recordings.packaged()
        self.key = key
        self.stopping = threading.Event()
        self.requests: Counter[str] = Counter()
        """Requests so far, by kind."""
        self._faults: dict[str, deque[str]] = {kind: deque() for kind in KINDS}
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return "127.0.0.1", int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://127.0.0.1:{self.address[1]}"

    def inject(self, kind: str, *faults: str) -> None:
        """What happens to the next requests of a kind, one fault each, in order; "" is none.

        Raises:
            ValueError: no such kind or fault.
        """
        unknown = [f for f in faults if f and f.partition(":")[0] not in FAULTS]
        if kind not in KINDS or unknown:
            raise ValueError(f"no such fault: {kind} {unknown}")
        with self._lock:
            self._faults[kind].extend(faults)

    def next_fault(self, kind: str) -> tuple[str, str]:
        """Takes a fault and its argument from the list, and counts the request."""
        with self._lock:
            self.requests[kind] += 1
            fault = self._faults[kind].popleft() if self._faults[kind] else ""
        name, _, argument = fault.partition(":")
        return name, argument

    def close(self) -> None:
        """Stops; may be called twice."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, owner: ReplayServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner = owner

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        """Pages and PDFs."""
        path = urlsplit(self.path).path
        known = self.server.owner.recordings
        if path.startswith("/papers/"):
            paper = known.papers.get(path.removeprefix("/papers/").removesuffix(".pdf"))
            body = tiny_pdf(paper["title"], f"{paper['title']}\n\n{paper['text']}") if paper else None
            self._serve("pdf", body, "application/pdf")
        else:
            page = known.pages.get(path.removeprefix("/pages/"))
            self._serve("page", _html(page) if page else None, "text/html; charset=utf-8")

    def do_POST(self) -> None:
        """The search service and the judge."""
        path = urlsplit(self.path).path
        owner = self.server.owner
        try:
            asked = json.loads(self.rfile.read(int(self.headers.get("content-length", "0"))))
        except ValueError:
            return self._send(400, b"{}")
        if path == "/v1/chat/completions":
            return self._serve("chat", _completion(asked), "application/json")
        kind = path.strip("/")
        if kind not in ("search", "scholar", "scrape"):
            return self._send(404, b"{}")
        if owner.key and self.headers.get("x-api-key") != owner.key:
            return self._send(403, b'{"message": "Unauthorized."}')
        query = str(asked.get("url" if kind == "scrape" else "q", ""))
        found: object = getattr(owner.recordings, kind)(query)
        self._serve(kind, None if found is None else json.dumps(found).encode(), "application/json")
        return None

    def _serve(self, kind: str, body: bytes | None, content_type: str) -> None:
        """The answer, or what goes wrong with it."""
        fault, argument = self.server.owner.next_fault(kind)
        if fault == "slow":
            self.server.owner.stopping.wait(float(argument or 1.0))
        elif fault:
            return self._misbehave(fault, argument)
        if body is None:
            return self._send(404, b"not recorded", "text/plain")
        return self._send(200, body, content_type)

    def _misbehave(self, fault: str, argument: str) -> None:
        if fault == "429":
            self._send(429, b"{}", headers={"Retry-After": argument or "0"})
        elif fault in ("500", "403"):
            self._send(int(fault), b"{}")
        elif fault == "echo":
            self._send(500, json.dumps(dict(self.headers)).encode())
        elif fault == "bad_json":
            self._send(200, b'{"organic": [')
        elif fault == "paywall":
            self._send(200, b"<html><body>Log in to read this article.</body></html>", "text/html")
        elif fault == "redirect":
            self._send(302, b"", headers={"Location": argument or _METADATA})
        elif fault == "binary":
            self._send(200, b"\x89PNG\r\n\x1a\n" + bytes(64), argument or "image/png")
        elif fault == "oversized":
            self._pour(argument or "application/pdf")
        self.close_connection = self.close_connection or fault == "drop"

    def _pour(self, content_type: str) -> None:
        """A body without a length and almost without an end."""
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(OSError):
            for chunk in _endless():
                self.wfile.write(chunk)

    def _send(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def _endless() -> Iterator[bytes]:
    yield b"%PDF-1.4\n"
    for _ in range(_OVERSIZED // 65_536):
        yield bytes(65_536)


def _html(page: dict[str, Any]) -> bytes:
    paragraphs = "".join(f"<p>{html.escape(part)}</p>" for part in page["text"].split("\n\n"))
    title = html.escape(page["title"])
    return (
        f"<!doctype html><html><head><title>{title}</title></head><body><nav>Home About Contact</nav>"
        f"<main><article><h1>{title}</h1>{paragraphs}</article></main></body></html>"
    ).encode()


def _completion(asked: Any) -> bytes:
    """A chat completion of the stand-in."""
    turns = asked.get("messages") if isinstance(asked, dict) else None
    content = turns[-1].get("content") if isinstance(turns, list) and turns else ""
    message = {"role": "assistant", "content": reply(str(content))}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps(
        {"id": "replay", "object": "chat.completion", "created": 0, "model": NAME, "choices": [choice]}
    ).encode()
