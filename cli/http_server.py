"""A small JSON server: one thread per connection, silent connections closed, errors of ours one line on stderr."""

from __future__ import annotations

import ipaddress
import json
import socket
import socketserver
import sys
import urllib.parse
from collections.abc import Mapping
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeVar

from racelab.cli.console import say
from racelab.experiments.errors import ConfigError
from racelab.experiments.fsio import explain

MAX_BODY: Final = 4 << 20
"""Bytes."""
_IDLE_S: Final = 60.0
"""A connection that is silent for so long is closed, so that it holds no thread."""


class JsonServer(ThreadingHTTPServer):
    """Binds first and listens later: a taken port should not cost the time that a model or an index takes."""

    daemon_threads = True
    request_queue_size = 128
    key: str = ""
    """What clients must send, where the handler asks for it; "": nothing."""

    def __init__(self, host: str, port: int, handler: type[JsonHandler]) -> None:
        """Binds; `listen` is the caller's."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler, bind_and_activate=False)
        try:
            self.server_bind()
        except BaseException:
            self.server_close()
            raise

    @property
    def address(self) -> str:
        """`http://host:port`, with the port that was chosen."""
        return address(str(self.server_address[0]), int(self.server_address[1]))

    def foreign(self, headers: Message) -> str:
        """Why a request is taken for one that a web page of elsewhere sends; "" for all others.

        A browser on this machine reaches what listens on loopback, and a page can have its own name point there. So
        where nothing else keeps it out, the request must be addressed to this machine; and never may another origin
        stand in it. Programs send no origin.
        """
        hosts = headers.get_all("Host", [])
        mine = str(self.server_address[0])
        if is_loopback(mine) and not self.key and not all(_is_local(host, mine) for host in hosts):
            return "the Host header names another machine; ask for 127.0.0.1 or localhost"
        own = {host.strip().lower() for host in hosts}
        origins = {text.strip().lower().partition("://")[2] for text in headers.get_all("Origin", [])}
        return "" if origins <= own else "requests of web pages of another origin are not answered"

    def server_bind(self) -> None:
        """As the base class, but for its look-up of the host's name, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line for an error of ours; a client that left is no news. The base class prints tracebacks of both."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            say(error_line(error))

    def listen(self) -> None:
        """From now on connections are taken; `serve_forever` answers them. Raises ConfigError."""
        try:
            self.server_activate()
        except OSError as error:
            raise taken(str(self.server_address[0]), self.server_port, explain(error)) from None


AnyServer = TypeVar("AnyServer", bound=JsonServer)


def bound(kind: type[AnyServer], host: str, port: int, handler: type[JsonHandler]) -> AnyServer:
    """A server that has its port, and does not listen yet.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        return kind(host, port, handler)
    except (OSError, OverflowError) as error:
        why = explain(error) if isinstance(error, OSError) else "no such port"
        raise taken(host, port, why) from None


def taken(host: str, port: int, why: str) -> ConfigError:
    """The error of an address that cannot be had."""
    return ConfigError(
        f"--port {port} of --host {host} cannot be had ({why}); choose another, 0 takes a free one"
    )


def address(host: str, port: int) -> str:
    """`http://host:port`."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_local(header: str, mine: str) -> bool:
    """Whether a Host header names this machine's own addresses; no name that others could have point there."""
    try:
        name = urllib.parse.urlsplit(f"//{header.strip()}").hostname or ""
    except ValueError:
        return False
    return name == mine or is_loopback(name)


def error_line(error: BaseException) -> str:
    """Kind and first line."""
    return f"error: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


class JsonHandler(BaseHTTPRequestHandler):
    """Reads bodies and answers in JSON."""

    server: JsonServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "racelab", ""
    timeout = _IDLE_S
    disable_nagle_algorithm = True

    def parse_request(self) -> bool:
        """As the base class; then what the server takes for a web page's is refused, whatever it asks for."""
        if not super().parse_request():
            return False
        why = self.server.foreign(self.headers)
        if why:
            self.refuse(403, why, close=True)
        return not why

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class says of a request that it cannot read, in JSON and without what was sent."""
        if self.request_version == self.default_request_version:  # HTTP/0.9, whose answers have no header
            self.request_version = self.protocol_version
        self.refuse(int(code), HTTPStatus(code).phrase.lower(), close=True)

    def problem(self, text: str, status: int) -> dict[str, Any]:
        """The body that says what is wrong with a request."""
        return {"error": text}

    def body(self) -> bytes | None:
        """What was sent; None if it cannot be had, which has then been answered."""
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdecimal():
            self.refuse(400, "no Content-Length; send the body's length", close=True)
        elif len(length) > 9 or int(length) > MAX_BODY:
            self.refuse(413, f"the body is larger than {MAX_BODY} bytes", close=True)
        else:
            return self.rfile.read(int(length))
        return None

    def says_json(self) -> bool:
        """Whether the body is said to be JSON, as no page can say unasked; if not, that has been answered."""
        if self.headers.get_content_type() == "application/json":
            return True
        self.refuse(415, "the body must be JSON; send Content-Type: application/json")
        return False

    def refuse(
        self, status: int, text: str, *, close: bool = False, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answers with one line that says what is wrong."""
        self.answer(status, self.problem(text, status), close=close, headers=headers)

    def answer(
        self,
        status: int,
        value: Mapping[str, Any],
        *,
        close: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Sends `value`; `close`: the connection ends here, for what follows on it has not been read."""
        body = json.dumps(value).encode()
        extra = {**(headers or {}), **({"Connection": "close"} if close else {})}
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, text in extra.items():
                self.send_header(name, text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except OSError:  # nobody waits for it any more
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a training step makes hundreds of requests."""
