"""Pages and PDFs from the open web, within limits: checked addresses, few redirects, known types, capped sizes.

`httpx` counts its time-out anew for every read, so a server that sends a byte now and then would keep a connection, and
the place of whoever waits for it, for ever. `_Watchdog` cuts it at the deadline, wherever the exchange has got to.

No proxy of the environment is used: it would resolve the name a second time. Every connection is used once, so that a
connection to one name's address is never reused for another name. Imported lazily: `httpx` is only needed here and in
`serper.py`.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
import urllib.parse
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import httpx

from racelab.experiments.models.api_reply import retry_after
from racelab.experiments.tasks.deepresearch.faults import Deadline, FaultError, Patience
from racelab.experiments.tasks.deepresearch.guard import Guard, Target, connect_url, host_header

MAX_REDIRECTS: Final = 5
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_CLOSED: Final = frozenset({401, 402, 403, 407, 451})
_AGENT: Final = (
    "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/131.0.0.0 Safari/537.36"
)
"""D.4: "a browser-like User-Agent"."""
_TEXT: Final = frozenset(
    {"application/xhtml+xml", "application/xml", "application/json", "application/rss+xml"}
)
_HTML: Final = frozenset({"text/html", "application/xhtml+xml"})
_PDF: Final = frozenset(
    {"application/pdf", "application/x-pdf", "application/octet-stream", "binary/octet-stream", ""}
)
_MAGIC: Final = b"%PDF-"
_MAGIC_WITHIN: Final = 1024  # as readers do, some files begin with a few other bytes
_PAGE_BYTES: Final = 8 << 20
_TRY_SHARE: Final = 4  # one try gets a quarter of the whole time, so that a slow server can be asked again


@dataclass(frozen=True, slots=True)
class Body:
    """What came.

    Attributes:
        url: after redirects.
        content_type: without parameters, lower case.
        charset: as the server says; "" if it does not.
        data: whole, unpacked.
    """

    url: str
    content_type: str
    charset: str
    data: bytes


class Fetcher:
    """Fetches what the guard lets through."""

    def __init__(self, guard: Guard, patience: Patience, *, timeout_s: float, pdf_bytes: int) -> None:
        """Keeps the limits; `timeout_s` is that of a whole tool call."""
        self._guard, self._patience = guard, patience
        self._try_s, self._pdf_bytes = timeout_s / _TRY_SHARE, pdf_bytes

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """Shared: it takes longer to make than most requests."""
        return ssl.create_default_context()

    def page(self, url: str, deadline: Deadline, faults: Counter[str]) -> Body:
        """A text.

        Raises:
            FaultError: of any kind; all failed tries are counted in `faults`.
        """
        return self._persist(url, False, deadline, faults)

    def pdf(self, url: str, deadline: Deadline, faults: Counter[str]) -> Body:
        """A PDF.

        Raises:
            FaultError: `paywall` where a page comes instead, or the server wants a login or money.
        """
        return self._persist(url, True, deadline, faults)

    def _persist(self, url: str, pdf: bool, deadline: Deadline, faults: Counter[str]) -> Body:
        return self._patience.persist(
            lambda: self._once(url, pdf, Deadline(min(deadline.at, time.monotonic() + self._try_s))),
            deadline=deadline,
            faults=faults,
        )

    def _once(self, url: str, pdf: bool, deadline: Deadline) -> Body:
        """One try, redirects followed by hand."""
        for _ in range(MAX_REDIRECTS + 1):
            target = self._guard.check(url)
            found = self._get(target, pdf, deadline)
            if isinstance(found, Body):
                return found
            url = found
        raise FaultError("redirects", f"more than {MAX_REDIRECTS} redirects")

    def _get(self, target: Target, pdf: bool, deadline: Deadline) -> Body | str:
        """The body, or where to look instead."""
        headers = {
            "Host": host_header(target),
            "User-Agent": _AGENT,
            "Accept": "application/pdf,*/*;q=0.8" if pdf else "text/html,text/plain;q=0.9,*/*;q=0.5",
            "Accept-Language": "en",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        deadline.check()
        tls = self._tls if target.scheme == "https" else False
        watchdog = _Watchdog(deadline)
        try:
            with (
                watchdog,
                httpx.Client(verify=tls, trust_env=False, timeout=max(deadline.left, 0.01)) as client,
                client.stream(
                    "GET",
                    connect_url(target),
                    headers=headers,
                    follow_redirects=False,
                    extensions={"sni_hostname": target.host, "trace": watchdog.trace},
                ) as response,
            ):
                if response.status_code in _REDIRECTS:
                    return _next(target, response)
                _check_status(response, pdf)
                kind, charset = _content_type(response)
                _check_type(kind, pdf)
                limit = self._pdf_bytes if pdf else _PAGE_BYTES
                data = _read(response, limit)
        except httpx.TimeoutException:
            raise _too_slow() from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, OSError):
            if watchdog.cut:
                raise _too_slow() from None
            raise FaultError("connection", "the connection failed", again=True) from None
        if watchdog.cut:  # a body without a length ends where the connection does: this one is not whole
            raise _too_slow()
        _check_data(data, pdf)
        return Body(target.url, kind, charset, data)


class _Watchdog:
    """Cuts the connection of one exchange at a deadline.

    Attributes:
        cut: it did.
    """

    def __init__(self, deadline: Deadline) -> None:
        """Starts counting."""
        self.cut = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(deadline.left, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """The `trace` extension of httpx: learns of the connection, and of its second form once it is encrypted."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
                if self.cut:
                    self._shut()

    def _end(self) -> None:
        with self._lock:
            self.cut = True
            self._shut()

    def _shut(self) -> None:
        """Wakes a thread that reads, which closing the socket would not. Nothing is said to the peer (TLS)."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # closed already
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def _too_slow() -> FaultError:
    return FaultError("timeout", "the server is too slow", again=True)


def _next(target: Target, response: httpx.Response) -> str:
    place = response.headers.get("location", "")
    if not place:
        raise FaultError("bad_reply", "a redirect that leads nowhere")
    try:
        return str(urllib.parse.urljoin(target.url, place))
    except ValueError:
        raise FaultError("refused_address", "a redirect to no web address") from None


def _check_status(response: httpx.Response, pdf: bool) -> None:
    status = response.status_code
    if status == 429:
        raise FaultError(
            "429", "the server is busy (HTTP 429)", again=True, wait_s=retry_after(response.headers)
        )
    if status >= 500:
        raise FaultError(
            "5xx", f"the server failed (HTTP {status})", again=True, wait_s=retry_after(response.headers)
        )
    if pdf and status in _CLOSED:
        raise FaultError("paywall", f"the paper is not free to read (HTTP {status})")
    if status >= 400:
        raise FaultError("4xx", f"there is no such page (HTTP {status})")
    if not 200 <= status < 300:
        raise FaultError("bad_reply", f"no page (HTTP {status})")


def _content_type(response: httpx.Response) -> tuple[str, str]:
    kind, _, rest = response.headers.get("content-type", "").partition(";")
    charset = rest.partition("charset=")[2].partition(";")[0].strip(" \"'")
    return kind.strip().lower(), charset.lower()


def _check_type(kind: str, pdf: bool) -> None:
    if pdf:
        if kind in _HTML:
            raise FaultError("paywall", "a web page came in place of the PDF: the paper is behind a paywall")
        if kind not in _PDF:
            raise FaultError("not_text", "this is no PDF")
    elif kind == "application/pdf":
        raise FaultError("not_text", "this is a PDF; use read_paper for it")
    elif not (kind.startswith("text/") or kind in _TEXT):
        raise FaultError("not_text", "this is no text")


def _check_data(data: bytes, pdf: bool) -> None:
    if pdf and _MAGIC not in data[:_MAGIC_WITHIN]:
        raise FaultError("paywall", "what came is not a PDF: the paper is behind a paywall")
    if not pdf and b"\0" in data[:_MAGIC_WITHIN]:
        raise FaultError("not_text", "this is no text")


def _read(response: httpx.Response, limit: int) -> bytes:
    """The body, unpacked and not larger than allowed."""
    too_large = FaultError("too_large", f"larger than {limit / (1 << 20):g} MB")
    said = response.headers.get("content-length", "")
    if said.isdigit() and int(said) > limit:
        raise too_large
    body = bytearray()
    for chunk in _unpacked(response, limit):
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def _unpacked(response: httpx.Response, limit: int) -> Iterator[bytes]:
    """Parts of the body. Nobody asked for a packed one; it is unpacked a little more than `limit` at most."""
    packing = response.headers.get("content-encoding", "identity").strip().lower()
    if packing in ("", "identity"):
        yield from response.iter_raw()
        return
    if packing not in ("gzip", "x-gzip", "deflate"):
        raise FaultError("not_text", "packed in an unknown way")
    unpacker = zlib.decompressobj(47)
    try:
        for chunk in response.iter_raw():
            yield unpacker.decompress(chunk, limit + 1)
            if unpacker.unconsumed_tail:  # more than the limit in this part alone
                raise FaultError("too_large", f"larger than {limit / (1 << 20):g} MB")
        yield unpacker.flush()
    except zlib.error:
        raise FaultError("unreadable", "packed badly") from None
