"""Which addresses are refused, and that every connection goes to the address that was checked."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from racelab.experiments.tasks.deepresearch.faults import Deadline, FaultError, Patience, new_counter
from racelab.experiments.tasks.deepresearch.fetch import Fetcher
from racelab.experiments.tasks.deepresearch.guard import Guard, connect_url, host_header, public, resolve

REFUSED = [
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "192.0.0.170", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0",
    "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::", "2001:0:7f00:1::", "2001:db8::1",
    "not an address",
]  # fmt: skip
URLS = [
    "http://127.0.0.1/", "http://localhost/", "http://2130706433/", "http://0177.0.0.1/", "http://0x7f.1/",
    "http://127.1/", "http://[::1]/", "http://[::ffff:10.0.0.1]/", "http://169.254.169.254/latest/meta-data/",
    "http://2852039166/", "http://0/", "http://good.example@127.0.0.1/", "http://u:p@example.org/",
    "ftp://example.org/", "file:///etc/passwd", "gopher://127.0.0.1:70/", "javascript:alert(1)", "data:text/html,x",
    "//example.org/", "http://", "http:///x", "http://example.org:0/", "http://exa mple.org/", "http://exa\\mple.org/",
    "http://example.org:99999/", "http://[::1", "http://%31%32%37.0.0.1/", "http://１２７.0.0.1/", "http://127。0。0。1/",
    "http://１２７．１/", "http://ｌｏｃａｌｈｏｓｔ/", "http://127.0.0.1\u200b/", "http://8.8.8.8:22/", "http://8.8.8.8:6379/",
    "https://8.8.8.8:8000/", f"http://{'a' * 300}.net/", f"http://{'ü' * 3000}.net/", "http://ü..net/", "http://ü％.net/",
]  # fmt: skip


@pytest.mark.parametrize("address", REFUSED)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address: str) -> None:
    assert public(address)


@pytest.mark.parametrize("url", URLS)
def test_the_guard_refuses(url: str) -> None:
    with pytest.raises(FaultError) as error:
        Guard().check(url)
    assert error.value.kind == "refused_address"
    if "example.org" not in url:
        with pytest.raises(FaultError):
            Guard().screen(url)


def test_one_private_address_among_many_is_enough() -> None:
    guard = Guard(resolve=lambda host, port: ["8.8.8.8", "10.0.0.1"])
    with pytest.raises(FaultError, match="refused"):
        guard.check("http://example.org/")


def test_a_public_host_keeps_its_name_and_gets_its_checked_address() -> None:
    target = Guard(resolve=lambda host, port: ["93.184.216.34"]).check("https://Example.org/a?b=c#d")
    assert (target.host, target.port, target.address) == ("example.org", 443, "93.184.216.34")
    assert connect_url(target) == "https://93.184.216.34:443/a?b=c"


def test_names_beyond_ascii_are_asked_for_as_the_dns_has_them() -> None:
    asked: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["93.184.216.34"]

    guard = Guard(["straße.example:99"], resolve=resolve)
    target = guard.check("http://Bücher.example/ä")
    assert (target.host, host_header(target)) == ("xn--bcher-kva.example", "xn--bcher-kva.example")
    assert guard.check("http://faß.de./").host == "xn--fa-hia.de"
    assert guard.check("http://straße.example:99/").port == 99
    assert asked == ["xn--bcher-kva.example", "xn--fa-hia.de", "xn--strae-oqa.example"]


@pytest.mark.parametrize("port", [80, 443, 8080, 8443])
def test_ports_of_the_web_are_let_through(port: int) -> None:
    guard = Guard(resolve=lambda host, port: ["8.8.8.8"])
    for scheme in ("http", "https"):
        assert guard.check(f"{scheme}://example.org:{port}/").port == port


def test_an_exception_without_a_port_holds_for_every_port() -> None:
    assert Guard(["127.0.0.1"]).check("http://127.0.0.1:5123/").port == 5123


def test_no_such_host_is_no_refusal() -> None:
    with pytest.raises(FaultError) as error:
        Guard(resolve=lambda host, port: []).check("http://nowhere.example/")
    assert error.value.kind == "connection"


def test_an_exception_holds_for_its_port_only() -> None:
    guard = Guard(["127.0.0.1:8080"])
    assert guard.check("http://127.0.0.1:8080/").address == "127.0.0.1"
    for url in (
        "http://127.0.0.1:8081/",
        "http://127.0.0.1/",
        "http://127.0.0.2:8080/",
        "http://localhost:8080/",
    ):
        with pytest.raises(FaultError):
            guard.check(url)


def test_an_alias_leads_to_its_own_server_only() -> None:
    guard = Guard(aliases={"replay.invalid": ("127.0.0.1", 5)}, resolve=resolve)
    assert connect_url(guard.check("http://replay.invalid/x")) == "http://127.0.0.1:5/x"
    with pytest.raises(FaultError):
        guard.check("http://127.0.0.1:5/x")


# --- fetching ---------------------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        type(self).seen.append((self.headers["host"], self.path))
        number = self.path.rpartition("/")[2]
        if self.path.startswith("/hop/"):
            self._send(302, b"", {"Location": f"/hop/{int(number) - 1}" if number != "0" else "/end"})
        elif self.path == "/away":
            self._send(302, b"", {"Location": "http://169.254.169.254/latest/"})
        elif self.path == "/scheme":
            self._send(302, b"", {"Location": "file:///etc/passwd"})
        elif self.path == "/bomb":
            import gzip

            self._send(200, gzip.compress(bytes(40 << 20)), {"Content-Encoding": "gzip"})
        elif self.path == "/packed":
            import gzip

            self._send(200, gzip.compress(b"<p>packed</p>"), {"Content-Encoding": "gzip"})
        elif self.path == "/international":
            self._send(302, b"", {"Location": "http://b\u00fccher.example/end"})
        elif self.path == "/image":
            self._send(200, b"\x89PNG", {"Content-Type": "image/png"})
        elif self.path == "/nul":
            self._send(200, b"a\0b")
        else:
            self._send(200, b"<p>hello</p>", {"Set-Cookie": "a=b"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "text/html",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def fetch(url: str, guard: Guard) -> tuple[bytes, Counter[str]]:
    faults = new_counter()
    fetcher = Fetcher(guard, Patience(0, 0.01), timeout_s=20.0, pdf_bytes=1 << 20)
    return fetcher.page(url, Deadline.after(5.0), faults).data, faults


def fails(url: str, guard: Guard) -> str:
    with pytest.raises(FaultError) as error:
        fetch(url, guard)
    return error.value.kind


def site(port: int) -> Guard:
    return Guard(aliases={"site.example": ("127.0.0.1", port)})


def test_redirects_are_followed_five_times(port: int) -> None:
    assert fetch("http://site.example/hop/4", site(port))[0] == b"<p>hello</p>"
    assert fails("http://site.example/hop/5", site(port)) == "redirects"


def test_a_redirect_to_a_private_address_or_another_scheme_is_refused(port: int) -> None:
    assert fails("http://site.example/away", site(port)) == "refused_address"
    assert fails("http://site.example/scheme", site(port)) == "refused_address"


def test_bodies_that_are_no_text_or_too_large_when_unpacked(port: int) -> None:
    assert fails("http://site.example/image", site(port)) == "not_text"
    assert fails("http://site.example/nul", site(port)) == "not_text"
    assert fails("http://site.example/bomb", site(port)) == "too_large"
    assert fetch("http://site.example/packed", site(port))[0] == b"<p>packed</p>"


def test_the_server_is_asked_by_name_at_the_checked_address(port: int) -> None:
    """The name is looked up once: a second, different answer of the name server has no chance."""
    answers = iter([["127.0.0.1"]])
    guard = Guard([f"rebind.example:{port}"], resolve=lambda host, _: next(answers))
    _Handler.seen.clear()
    assert fetch(f"http://rebind.example:{port}/x", guard)[0] == b"<p>hello</p>"
    assert _Handler.seen == [(f"rebind.example:{port}", "/x")]
    assert next(answers, None) is None


def test_a_proxy_of_the_environment_is_not_used(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "")
        assert fetch("http://site.example/", site(port))[0] == b"<p>hello</p>"


def test_a_page_of_a_name_beyond_ascii_is_read(port: int) -> None:
    guard = Guard([f"bücher.example:{port}"], resolve=lambda host, _: ["127.0.0.1"])
    _Handler.seen.clear()
    assert fetch(f"http://bücher.example:{port}/x", guard)[0] == b"<p>hello</p>"
    assert _Handler.seen == [(f"xn--bcher-kva.example:{port}", "/x")]


class Dripping:
    """A server that sends a start and then a byte every 50 ms, for ever."""

    def __init__(self, start: bytes, drip: bytes = b"x") -> None:
        self._start, self._drip, self._stop = start, drip, threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._drop, args=(self._socket.accept()[0],), daemon=True).start()

    def _drop(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(4096)
            connection.sendall(self._start)
            while not self._stop.wait(0.05):
                connection.sendall(self._drip)

    def __enter__(self) -> Dripping:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._socket.close()


_OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
DRIPS = {
    "status": (b"", b"H"),
    "headers": (_OK, b"X-A: b\r\n"),
    "one header": (_OK + b"X-A: ", b"b"),
    "body without a length": (_OK + b"\r\n", b"x"),
    "body": (_OK + b"Content-Length: 100000\r\n\r\n", b"x"),
    "silent body without a length": (_OK + b"\r\nx", b""),
}


@pytest.mark.parametrize("kind", DRIPS)
def test_a_server_that_drips_is_left_at_the_deadline(kind: str) -> None:
    with Dripping(*DRIPS[kind]) as server:
        fetcher = Fetcher(site(server.port), Patience(0, 0.01), timeout_s=1.6, pdf_bytes=1 << 20)
        faults, began = new_counter(), time.monotonic()
        with pytest.raises(FaultError) as error:
            fetcher.page("http://site.example/", Deadline.after(5.0), faults)
        assert error.value.kind == "timeout"
        assert 0.3 < time.monotonic() - began < 1.0  # one try has 0.4 s
