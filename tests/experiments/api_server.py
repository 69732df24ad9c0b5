"""A chat server on loopback that can misbehave, for tests of whatever asks an OpenAI-compatible endpoint.

    python tests/experiments/api_server.py --port 0     # prints its URL and serves until it is killed

It knows the standard library only. What it does is scripted: `ApiServer(script)` takes a function from the prompt to a
`Behaviour`, a mapping from a word of the prompt to one, or a list that is worked off in order (the last one stays).
Where the script says nothing, `ANSWERS` replies.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

# --- what a server can do ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Behaviour:
    """One answer.

    Attributes:
        text: the reply's text, put into a well-formed completion; None for no choices at all.
        finish: its `finish_reason`.
        status: HTTP status; from 400 on the body is an error object.
        headers: added to the answer's.
        body: sent as it stands instead of a completion.
        delay_s: before the answer.
        drip_s: between the bytes of the body.
        drop: close the connection without an answer.
        reasoning: the model's thinking, beside the text.
    """

    text: str | None = ""
    finish: str = "stop"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    body: bytes | None = None
    delay_s: float = 0.0
    drip_s: float = 0.0
    drop: bool = False
    reasoning: str | None = None


def ok(text: str) -> Behaviour:
    return Behaviour(text)


def status(code: int, retry_after: str | float | None = None) -> Behaviour:
    return Behaviour(status=code, headers={} if retry_after is None else {"Retry-After": str(retry_after)})


def slow(seconds: float, text: str = "late") -> Behaviour:
    return Behaviour(text, delay_s=seconds)


def dripping(seconds: float, text: str = "drop by drop") -> Behaviour:
    """Every byte in time, the whole never."""
    return Behaviour(text, drip_s=seconds)


def truncated(text: str = "This reply ends in the mid") -> Behaviour:
    return Behaviour(text, finish="length")


def malformed() -> Behaviour:
    return Behaviour(body=b'{"choices": [{"message": {"content": "never clo')


def empty() -> Behaviour:
    return Behaviour(None)


def html() -> Behaviour:
    page = b"<!doctype html><title>Bad gateway</title><h1>Bad gateway</h1>"
    return Behaviour(body=page, content_type="text/html")


def wrong_type(text: str = "not said to be JSON") -> Behaviour:
    """A good completion under a content type that is none."""
    return Behaviour(text, content_type="text/plain")


def dropped() -> Behaviour:
    return Behaviour(drop=True)


# --- what it says by itself -------------------------------------------------------------------------------------

_COMMON_WORDS = (
    "about above after again answer asked below between brief could criteria criterion describe every example "
    "explain following given grader grading instruction name please prompt question reply request response "
    "rubric rubrics should task their there these thing those three under user using weight what where which "
    "while without would write your"
)
_COMMON = frozenset(_COMMON_WORDS.split())
_MARKER = re.compile(
    r"(?:^|\n)\W*(?:question|request|prompt|task|instruction)s?\W*:\W*|<(?:question|prompt)>", re.I
)


def subject(prompt: str) -> str:
    """A content word of what the prompt is about: of the text behind its last `Request:`, `Question:` or the like."""
    body = _MARKER.split(prompt)[-1]
    for text in (body, prompt):
        found = [w for w in re.findall(r"[^\W\d_]{4,}", text) if w.lower() not in _COMMON]
        if found:
            return found[0].lower()
    return "request"


def rubric(prompt: str) -> str:
    word = subject(prompt)
    rows = [(f"Speaks of {word} from the first sentence", 0.5), (f"Says nothing false about {word}", 0.3)]
    rows.append(("Is easy to follow", 0.2))
    return json.dumps({"criteria": [{"criterion": c, "weight": w} for c, w in rows]})


def items(prompt: str) -> str:
    word = subject(prompt)
    rows = [
        ("Subject", f"Essential Criteria: Speaks of {word}.", 5),
        ("Truth", f"Essential Criteria: Makes no false claim about {word}.", 5),
        ("Reason", f"Important Criteria: Gives a reason for what it says about {word}.", 4),
        ("Detail", f"Important Criteria: Gives one concrete detail of {word}.", 3),
        ("Order", "Important Criteria: Its sentences follow from one another.", 3),
        ("Length", "Optional Criteria: Is as short as the matter allows.", 2),
        ("Digression", f"Pitfall Criteria: Leaves {word} for another matter.", -1),
    ]
    return json.dumps([{"title": t, "description": d, "weight": w} for t, d, w in rows])


def coin(prompt: str) -> str:
    """YES or NO, the same for the same prompt."""
    return "YES" if zlib.crc32(prompt.encode()) % 2 else "NO"


def _says(*words: str) -> Callable[[str], bool]:
    return lambda prompt: all(w in prompt for w in words)


def _compares(prompt: str) -> bool:
    """A YES/NO question that compares criteria with one another."""
    kinds = ("overlap", "duplicate", "redundan", "conflict", "contradict", "same thing", "misalign")
    return _says("YES", "NO")(prompt) and any(k in prompt.lower() for k in kinds)


ANSWERS: list[tuple[Callable[[str], bool], Callable[[str], str]]] = [
    (_says('"title"', '"description"'), items),
    (_says('"criterion"'), rubric),
    (_compares, lambda prompt: "NO"),
    (_says("YES", "NO"), coin),
    (lambda prompt: True, lambda prompt: f"A few words about {subject(prompt)}."),
]
"""(is it asked?, the reply); the first that fits. Insert others in front of what they are more special than."""


def answer(prompt: str) -> str:
    """The reply of the default script."""
    return next(reply(prompt) for asked, reply in ANSWERS if asked(prompt))


# --- the server -------------------------------------------------------------------------------------------------

Script = Callable[[str], Behaviour | None] | Mapping[str, Behaviour] | Sequence[Behaviour] | None


@dataclass(frozen=True)
class Received:
    """One request: when it came (monotonic seconds), its path, headers (lower case) and JSON body."""

    at: float
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def prompt(self) -> str:
        """All turns, one after the other."""
        return "\n".join(str(m.get("content")) for m in self.body.get("messages", []))


class ApiServer:
    """Serves while the `with` block runs.

    Attributes:
        url: the base URL, `http://127.0.0.1:<port>/v1`.
        requests: what was received, in order.
        most_at_once: the largest number of requests in hand at the same time.
        models: what `GET /models` lists, each with more facts or without; None: there is no such path.
    """

    def __init__(
        self, script: Script = None, port: int = 0, models: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.requests: list[Received] = []
        self.models = models
        self.most_at_once = 0
        self._script, self._in_hand = script, 0
        self._connections: set[socket.socket] = set()
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> ApiServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):  # kept alive by the client, they would be served on
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        """Serves in this thread until it is interrupted."""
        self._server.serve_forever()

    def pause(self, seconds: float) -> None:
        """A delay that the end of the server cuts short."""
        if seconds > 0:
            self._closing.wait(seconds)

    def behaviour(self, received: Received) -> Behaviour:
        """What to do about a request, which is noted down."""
        with self._lock:
            index = len(self.requests)
            self.requests.append(received)
        found: Behaviour | None = None
        if callable(self._script):
            found = self._script(received.prompt)
        elif isinstance(self._script, Mapping):
            found = next((b for word, b in self._script.items() if word in received.prompt), None)
        elif self._script:
            found = self._script[min(index, len(self._script) - 1)]
        return found if found is not None else ok(answer(received.prompt))

    def opened(self, connection: socket.socket) -> None:
        """Notes a connection down."""
        self._connections.add(connection)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request as in hand."""
        with self._lock:
            self._in_hand += 1
            self.most_at_once = max(self.most_at_once, self._in_hand)
        try:
            yield
        finally:
            with self._lock:
                self._in_hand -= 1


def _handler(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are two writes; the second would wait 40 ms

        def setup(self) -> None:
            super().setup()
            server.opened(self.connection)

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a client may not wait for a slow answer
                super().handle()

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {k.lower(): v for k, v in self.headers.items()}
            received = Received(time.monotonic(), self.path, headers, json.loads(raw or b"{}"))
            with (
                server.counted(),
                contextlib.suppress(ConnectionError),
            ):  # a client may not wait for a slow answer
                how = server.behaviour(received)
                server.pause(how.delay_s)
                self._answer(how, received)

        def do_GET(self) -> None:
            listed = server.models if self.path.endswith("/models") else None
            entries = [{"id": name, "object": "model", **more} for name, more in (listed or {}).items()]
            body = json.dumps({"object": "list", "data": entries}).encode()
            self.send_response(404 if listed is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _answer(self, how: Behaviour, received: Received) -> None:
            if how.drop:
                self.close_connection = True
                return
            body = how.body if how.body is not None else json.dumps(_payload(how, received)).encode()
            self.send_response(how.status)
            for name, value in {"Content-Type": how.content_type, **how.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not how.drip_s:
                self.wfile.write(body)
                return
            for i in range(len(body)):
                server.pause(how.drip_s)
                self.wfile.write(body[i : i + 1])

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    return Handler


def _payload(how: Behaviour, received: Received) -> dict[str, Any]:
    """A completion, or an error object that repeats what it was sent, as some servers do."""
    if how.status >= 400:
        said = f"{received.headers.get('authorization')}: {received.prompt}"
        return {"error": {"message": said, "code": "not_today", "type": "error"}}
    message = {"role": "assistant", "content": how.text}
    if how.reasoning is not None:
        message |= {"reasoning_content": how.reasoning, "content": how.text or None}
    turn = {"index": 0, "finish_reason": how.finish, "message": message}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": received.body.get("model"),
        "choices": [] if how.text is None else [turn],
        "usage": {
            "prompt_tokens": len(received.prompt.split()),
            "completion_tokens": len((how.text or "").split()),
        },
    }


def main() -> int:
    """Serves the default script until it is killed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    server = ApiServer(port=parser.parse_args().port)
    print(server.url, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
