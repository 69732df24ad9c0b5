"""A client of the Serper API: `/search`, `/scholar` and the scrape endpoint (RLDS App. D.4).

The key travels in the header X-API-KEY and nowhere else: it is in no message, description or representation, and
whatever a server says in an error is not passed on, since some repeat the request there. Imported lazily.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

from racelab.experiments.models.api_reply import retry_after
from racelab.experiments.tasks.deepresearch.faults import Deadline, FaultError, Gate, Patience

RESULTS: Final = 10
"""D.4: always asked for, so that equal queries are equal requests."""
_MAX_BODY: Final = 8 << 20
_TRY_SHARE: Final = 4  # as in `fetch.py`
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class Hit:
    """One search result.

    Attributes:
        title: one line.
        url: of the page.
        snippet: what the engine shows of it.
        about: authors, venue and year of a paper, or the date of a page; may be empty.
        cites: number of papers that cite it; None for a page, or where it is not said.
        pdf_url: of a paper that can be downloaded; else empty.
    """

    title: str
    url: str
    snippet: str
    about: str = ""
    cites: int | None = None
    pdf_url: str = ""


class Serper:
    """Asks the service; thread-safe."""

    def __init__(
        self, url: str, scrape_url: str, key: str, patience: Patience, *, timeout_s: float, concurrency: int
    ) -> None:
        """Opens the client; the service is first asked by a search.

        Args:
            url: base address of `/search` and `/scholar`.
            scrape_url: the scrape endpoint; empty: `/scrape` under `url`.
            key: "" where the service wants none.
            patience: tries and waits.
            timeout_s: of a whole tool call; one try gets a quarter of it.
            concurrency: requests under way at a time.
        """
        self._url = url.rstrip("/")
        self._scrape_url = scrape_url or f"{self._url}/scrape"
        self._patience, self._gate = patience, Gate(concurrency)
        self._try_s = timeout_s / _TRY_SHARE
        local = urllib.parse.urlsplit(self._url).hostname in _LOOPBACK
        # without any https address no certificates need be loaded, which takes longer than a test
        tls = any(address.lower().startswith("https:") for address in (self._url, self._scrape_url))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
        self._client = httpx.Client(verify=tls, trust_env=not local, limits=limits, follow_redirects=False)
        self._headers = {"X-API-KEY": key} if key else {}
        self._key = key

    def search(
        self, query: str, gl: str, hl: str, deadline: Deadline, faults: Counter[str]
    ) -> tuple[Hit, ...]:
        """Organic results of the open web.

        Raises:
            FaultError: of the last try; all failed tries are counted in `faults`. So for all methods.
        """
        body = {"q": query, "num": RESULTS} | {k: v for k, v in (("gl", gl), ("hl", hl)) if v}
        return _hits(self._post(f"{self._url}/search", body, deadline, faults), paper=False)

    def scholar(self, query: str, deadline: Deadline, faults: Counter[str]) -> tuple[Hit, ...]:
        """Papers."""
        body = {"q": query, "num": RESULTS}
        return _hits(self._post(f"{self._url}/scholar", body, deadline, faults), paper=True)

    def scrape(self, url: str, deadline: Deadline, faults: Counter[str]) -> tuple[str, str]:
        """Title and markdown of a page."""
        value = self._post(self._scrape_url, {"url": url, "includeMarkdown": True}, deadline, faults)
        text = value.get("markdown") or value.get("text")
        if not isinstance(text, str) or not text.strip():
            raise FaultError("bad_reply", "the page holds no text", absent=True)
        metadata = value.get("metadata")
        title = metadata.get("title") if isinstance(metadata, dict) else None
        return (title if isinstance(title, str) else ""), text

    def redact(self, text: str) -> str:
        """The text without the key, should a server have repeated it."""
        return text.replace(self._key, "[key]") if self._key else text

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _post(
        self, url: str, body: Mapping[str, object], deadline: Deadline, faults: Counter[str]
    ) -> dict[str, Any]:
        """The JSON object of an answer. The place among `concurrency` is free while it waits for the next try."""
        return self._patience.persist(
            lambda: self._gate.run(lambda: self._once(url, body, deadline), deadline),
            deadline=deadline,
            faults=faults,
        )

    def _once(self, url: str, body: Mapping[str, object], whole: Deadline) -> dict[str, Any]:
        deadline = Deadline(min(whole.at, time.monotonic() + self._try_s))
        deadline.check()
        try:
            with self._client.stream(
                "POST", url, json=dict(body), headers=self._headers, timeout=max(deadline.left, 0.01)
            ) as response:
                _check_status(response)
                data = _read(response, deadline)
        except httpx.TimeoutException:
            raise FaultError("timeout", "the search service is too slow", again=True) from None
        except httpx.ConnectError:
            text = "the search service cannot be reached"
            raise FaultError("connection", text, again=True, absent=True) from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError):
            raise FaultError(
                "connection", "the connection to the search service failed", again=True
            ) from None
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise FaultError("bad_reply", "the search service sent no JSON object", again=True)
        return value


def _check_status(response: httpx.Response) -> None:
    status = response.status_code
    wait = retry_after(response.headers)
    if status == 429:
        raise FaultError("429", "the search service is busy (HTTP 429)", again=True, wait_s=wait)
    if status >= 500 or status in (408, 425):
        kind = "5xx" if status >= 500 else "timeout"
        raise FaultError(kind, f"the search service failed (HTTP {status})", again=True, wait_s=wait)
    if status in (401, 403):
        raise FaultError("4xx", f"the search service refuses the key (HTTP {status})")
    if not 200 <= status < 300:
        raise FaultError(
            "4xx", f"the search service refuses the request (HTTP {status})", absent=status in (404, 405)
        )


def _read(response: httpx.Response, deadline: Deadline) -> bytes:
    body = bytearray()
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > _MAX_BODY:
            raise FaultError("too_large", "the search service's answer is too large")
        if not deadline.left:
            raise FaultError("timeout", "the search service is too slow", again=True)
    return bytes(body)


def _hits(value: Mapping[str, Any], *, paper: bool) -> tuple[Hit, ...]:
    """The organic results that have an address; the service leaves out `organic` where it found nothing."""
    rows = value.get("organic", [])
    if not isinstance(rows, list):
        raise FaultError("bad_reply", "the search service sent no list of results")
    hits = (_hit(row, paper) for row in rows[:RESULTS] if isinstance(row, dict))
    return tuple(hit for hit in hits if hit.url or hit.pdf_url)


def _hit(row: Mapping[str, Any], paper: bool) -> Hit:
    if not paper:
        return Hit(_line(row, "title"), _line(row, "link"), _line(row, "snippet"), _line(row, "date"))
    about = _line(row, "publicationInfo") or _line(row.get("publicationInfo"), "summary")
    year = row.get("year")
    if isinstance(year, int | str) and str(year) not in about:
        about = f"{about}, {year}" if about else str(year)
    cites = row.get("citedBy")
    cites = cites.get("total") if isinstance(cites, dict) else cites
    return Hit(
        _line(row, "title"),
        _line(row, "link"),
        _line(row, "snippet"),
        about,
        cites if isinstance(cites, int) and not isinstance(cites, bool) else None,
        _line(row, "pdfUrl"),
    )


def _line(row: object, name: str) -> str:
    value = row.get(name) if isinstance(row, dict) else None
    return " ".join(value.split()) if isinstance(value, str) else ""
