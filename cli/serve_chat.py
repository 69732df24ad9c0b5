"""The HTTP side of `serve judge` with a model of our own: OpenAI's chat completions, as far as a judge needs them.

POST /v1/chat/completions  see `models/chat_wire.py`
GET  /v1/models            what is served
GET  /health               whether it is, without a key
"""

from __future__ import annotations

import hmac
import select
import socket
import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as StillWaiting
from typing import Any, Final

from racelab.cli import http_server
from racelab.cli.console import say
from racelab.cli.http_server import JsonHandler, JsonServer, error_line
from racelab.experiments.errors import DataError
from racelab.experiments.models.chat_batches import Batches, BusyError, Job, StoppedError
from racelab.experiments.models.chat_wire import Completion, WireError, models, parse, problem, reply

COMPLETIONS: Final = "/v1/chat/completions"
_LOOK_S: Final = 1.0
"""How often a waiting request looks whether its client is still there."""


class ChatServer(JsonServer):
    """One thread per connection; the attributes are the caller's to set before `listen`.

    Attributes:
        batches: answers the requests.
        name: of the model.
        window: tokens, messages and reply together.
        rows: replies to one request at most.
        key: what `Authorization: Bearer` must hold; "": nothing.
    """

    batches: Batches
    name: str
    window: int
    rows: int
    since: int = 0

    @property
    def url(self) -> str:
        """What a client takes for its base URL."""
        return f"{self.address}/v1"


def bound(host: str, port: int) -> ChatServer:
    """A server that has its port, and does not listen yet. Raises ConfigError."""
    server = http_server.bound(ChatServer, host, port, _Handler)
    server.since = int(time.time())
    return server


class _Handler(JsonHandler):
    """Answers one connection's requests."""

    server: ChatServer

    def problem(self, text: str, status: int) -> dict[str, Any]:
        return problem(text, status)

    def do_GET(self) -> None:
        path = self._path()
        if path == "/health":
            self.answer(
                200, {"status": "ok", "model": self.server.name, "waiting": self.server.batches.waiting}
            )
        elif path != "/v1/models":
            self.refuse(404, f"no such path; POST {COMPLETIONS}, GET /v1/models, GET /health")
        elif self._may():
            self.answer(200, models(self.server.name, self.server.window, self.server.since))

    def do_POST(self) -> None:
        if not self._may():
            return
        body = self.body()
        if body is None:
            return
        if self._path() != COMPLETIONS:
            self.refuse(404, f"no such path; POST {COMPLETIONS}")
            return
        if not self.says_json():
            return
        try:
            request = parse(body, self.server.name, self.server.rows)
            job = self.server.batches.submit(request)
        except WireError as error:
            self.answer(error.status, problem(str(error), error.status, error.field, error.code))
        except DataError as error:
            self.refuse(400, str(error))
        except BusyError as error:
            self.refuse(429, str(error), headers={"Retry-After": str(error.wait_s)})
        except StoppedError:
            self.refuse(503, "the server is stopping", close=True)
        else:
            self._reply(request, job)

    def _reply(self, request: Completion, job: Job) -> None:
        """Waits for the samples and sends them; a client that leaves takes its request with it."""
        while True:
            try:
                samples = job.result.result(_LOOK_S)
            except StillWaiting:
                if _has_left(self.connection):
                    job.gone = self.close_connection = True
                    return
            except StoppedError:
                self.refuse(503, "the server is stopping", close=True)
                return
            except Exception as error:
                say(error_line(error))
                self.refuse(500, f"the model failed ({type(error).__name__})")
                return
            else:
                self.answer(200, reply(request, self.server.name, len(job.generation.prefix), samples))
                return

    def _path(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    def _may(self) -> bool:
        """Whether the key is right; if not, that has been answered."""
        if not self.server.key:
            return True
        scheme, _, sent = self.headers.get("Authorization", "").partition(" ")
        # Bytes: compare_digest takes no text outside ASCII. Headers are decoded as Latin-1.
        right = hmac.compare_digest(sent.strip().encode("latin-1", "replace"), self.server.key.encode())
        if right and scheme.lower() == "bearer":
            return True
        asks: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}
        self.refuse(401, "no key, or a wrong one; send Authorization: Bearer KEY", close=True, headers=asks)
        return False


def _has_left(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection."""
    try:
        ready = select.poll()
        ready.register(connection, select.POLLIN)
        return bool(ready.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True
