"""Pages that are written to stop their reader: bounded time, processes that end, places that are freed."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from racelab.experiments.tasks.deepresearch.documents import html_document
from racelab.experiments.tasks.deepresearch.faults import Deadline, FaultError, Patience
from racelab.experiments.tasks.deepresearch.fetch import Fetcher
from racelab.experiments.tasks.deepresearch.guard import Guard
from racelab.experiments.tasks.deepresearch.parsers import Parsers
from racelab.experiments.tasks.deepresearch.recordings import tiny_pdf
from racelab.experiments.tasks.deepresearch.serper import Serper
from racelab.experiments.tasks.deepresearch.tools import Toolbox
from racelab.experiments.tasks.hermes import ToolCall

from .research_kit import config

PIECES = [
    "<title>",
    "<svg>",
    "<script>",
    "<![CDATA[",
    "<!--",
    "<div>",
    "<title ",
    "</svg",
    "<a b='",
    "<svg></svg>",
]
ARTICLE = (
    "<html><head><title>Ice &amp; tides</title></head>"
    "<body><article><p>Ice shelves rise.</p></article></body></html>"
)
FREEZES = ARTICLE.replace("rise.", "rise. " + r"\(" * 100_000)
"""More than a minute within one regular expression of a parser."""


def page(text: str) -> tuple[str, str, bool]:
    found = html_document(text.encode(), "utf-8", "text/html", max_chars=20_000)
    return found.title, found.text, found.cut


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("before", ["", ARTICLE[:80]], ids=["bare", "in a page"])
def test_two_megabytes_of_anything_take_less_than_a_second(piece: str, before: str) -> None:
    page(ARTICLE)  # imports
    text = before + piece * (2_000_000 // len(piece))
    began = time.process_time()
    with contextlib.suppress(FaultError):  # most hold no text
        page(text)
    assert time.process_time() - began < 1.0


def test_a_large_page_is_read_without_what_is_not_shown_and_cut() -> None:
    hidden = f"<style>{'a' * 500_000}</STYLE ><!-- <script> --><script>'<svg>'{'b' * 600_000}</script><svg><g/></svg>"
    paragraphs = "".join(f"<p>Tide number {i} is as high as the one before it.</p>" for i in range(30))
    title, text, cut = page(ARTICLE.replace("<article>", f"{hidden}<article>{paragraphs}"))
    assert (title, cut) == ("Ice & tides", True)
    assert "Tide number 29" in text
    assert "Ice shelves rise" in text
    assert "aaaa" not in text
    assert page("<html><svg><svg><b>aaaa</b></svg></svg><style>aaaa</style><p>Short.</p>")[1] == "Short."
    many = "<p>One more line of text, and a long one.</p>" * 20_000
    assert page(f"<body>{many}</body>")[2]


def test_titles() -> None:
    for head, title in (
        ("<TITLE class=a>A\n  &lt;b&gt;</TITLE >", "A <b>"),
        ("<title>İ</title>", "İ"),
        ("<title>never closed", ""),
        ("<title", ""),
        ("", ""),
        (f"<title>{'x' * 5000}</title>", "x" * 200),
    ):
        assert page(f"<html><body><p>Some words.</p>{head}</body></html>")[0] == title


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parsers() -> Iterator[Parsers]:
    made = Parsers(longest_s=1.5)
    yield made
    made.close()


def read(parsers: Parsers, text: str, seconds: float = 30.0) -> str:
    return parsers.page(
        text.encode(), "utf-8", "text/html", max_chars=20_000, deadline=Deadline.after(seconds)
    ).text


def test_a_process_reads_pages_and_pdfs_and_is_used_again(parsers: Parsers) -> None:
    assert read(parsers, ARTICLE) == "Ice shelves rise."
    [first] = parsers._idle
    found = parsers.pdf(tiny_pdf("Sleep", "Waves."), max_chars=100, deadline=Deadline.after(30.0))
    assert (found.title, "Waves." in found.text, found.cut) == ("Sleep", True, False)
    for broken, kind in ((b"%PDF-1.4 nothing", "unreadable"), (b"", "unreadable")):
        with pytest.raises(FaultError) as error:
            parsers.pdf(broken, max_chars=100, deadline=Deadline.after(30.0))
        assert error.value.kind == kind
    assert parsers._idle == [first]


def test_a_page_that_would_freeze_the_process_is_given_up_and_others_are_read_meanwhile(
    parsers: Parsers,
) -> None:
    ticks, stop = [time.monotonic()], threading.Event()

    def tick() -> None:
        while not stop.wait(0.02):
            ticks.append(time.monotonic())

    clock = threading.Thread(target=tick)
    clock.start()
    began = time.monotonic()
    with pytest.raises(FaultError) as error:
        read(parsers, FREEZES)
    stop.set()
    clock.join()
    assert error.value.kind == "timeout"
    assert 1.4 < time.monotonic() - began < 4.0
    assert max(b - a for a, b in itertools.pairwise(ticks)) < 0.5
    assert read(parsers, ARTICLE) == "Ice shelves rise."


def test_a_process_that_ends_fails_one_document_and_close_ends_all(parsers: Parsers) -> None:
    own = Parsers()
    assert read(own, ARTICLE)
    [process] = own._idle
    process.kill()
    process.wait()
    assert read(own, ARTICLE) == "Ice shelves rise."  # it was seen to be gone
    [process] = own._idle
    own.close()
    assert process.poll() is not None
    own.close()


def test_the_deadline_of_the_call_holds_too(parsers: Parsers) -> None:
    began = time.monotonic()
    with pytest.raises(FaultError, match="too long"):
        read(parsers, FREEZES, seconds=0.3)
    assert time.monotonic() - began < 1.4


def test_no_key_is_in_the_environment_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "secret-of-a-test")
    own = Parsers()
    assert read(own, ARTICLE)
    if os.path.exists("/proc/self/environ"):
        with open(f"/proc/{own._idle[0].pid}/environ", "rb") as file:
            assert b"secret-of-a-test" not in file.read()
    own.close()


# --- the whole way ------------------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    stop = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        if self.path == "/drip":
            while not self.stop.wait(0.05):
                self.wfile.write(b"x")
        self.wfile.write((FREEZES if self.path == "/freeze" else ARTICLE).encode())

    def do_POST(self) -> None:
        self.send_error(404)  # no scrape service: pages are fetched here

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_hostile_pages_do_not_keep_the_places_of_others() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    address = ("127.0.0.1", int(server.server_address[1]))
    c = config(tools={"timeout_s": 2.0, "fetch_concurrency": 1, "max_retries": 0}).tools
    patience, guard = Patience(0, 0.01), Guard(aliases={"site.example": address})
    serper = Serper(f"http://127.0.0.1:{address[1]}", "", "", patience, timeout_s=2.0, concurrency=4)
    fetcher = Fetcher(guard, patience, timeout_s=2.0, pdf_bytes=1 << 20)
    toolbox = Toolbox(c, serper=serper, fetcher=fetcher, guard=guard)

    def browse(path: str) -> tuple[str, bool, float]:
        result = toolbox.run(ToolCall("browse_webpage", {"url": f"http://site.example/{path}"}))
        return result.rendered.text, result.failed, result.seconds

    try:
        for path in ("drip", "freeze"):
            _, failed, seconds = browse(path)
            assert failed
            assert seconds < 2.5
            text, failed, seconds = browse(f"good-{path}")
            assert "Ice shelves rise" in text
            assert seconds < 1.5
    finally:
        _Handler.stop.set()
        toolbox.close()
        server.shutdown()
        server.server_close()
