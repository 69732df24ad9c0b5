r"""A retriever as an environment sees it: in this process, or a server that speaks Search-R1's API.

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
    ->  {"result": [[{"document": {"id": "17", "contents": "\"Title\"\ntext"}, "score": 1.5}]]}

What goes wrong with one query is tried again and then a `RetrieverError`, which the environment tells the agent. Both
retrievers may be used by any number of threads, and count calls and seconds.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.models.api_reply import clean
from racelab.experiments.models.retrieval import Engine, Hit, Passage

PATH: Final = "/retrieve"
_AGAIN: Final = frozenset({408, 425, 429})
"""Statuses that may pass; so may all from 500 on."""
_MAX_BODY: Final = 16 << 20
_MAX_BACKOFF_S: Final = 8.0
_START: Final = "racelab serve retriever --corpus FILE"


class RetrieverError(Exception):
    """A query that got no answer; the text is one line and names no address, so it may be shown to the agent."""


class Retriever(Protocol):
    """Finds passages for one query."""

    def search(self, query: str, top_k: int) -> list[Hit]:
        """At most `top_k` hits, best first. Raises RetrieverError."""

    def check(self) -> None:
        """Asks once. Raises UnreachableError where a run would only fail."""

    def metrics(self) -> dict[str, float]:
        """Counts and milliseconds since the last call; then they are zero again. See `Clock.take`."""

    def describe(self) -> dict[str, object]:
        """What is needed to find the same again (JSON values)."""


class Clock:
    """Counts of calls and how long they took; several threads may add."""

    def __init__(self) -> None:
        """Nothing counted."""
        self._lock = threading.Lock()
        self._seconds: list[float] = []
        self._failed = self._retried = 0

    def add(self, seconds: float, *, failed: bool = False, retried: int = 0) -> None:
        """One call, its further tries and waits included."""
        with self._lock:
            self._seconds.append(seconds)
            self._failed += failed
            self._retried += retried

    def take(self) -> dict[str, float]:
        """`retriever_calls`, `_failed`, `_retried`; with calls also `_ms` (mean) and `_ms_p95`. Back to zero."""
        with self._lock:
            seconds, failed, retried = sorted(self._seconds), self._failed, self._retried
            self._seconds, self._failed, self._retried = [], 0, 0
        counts = {
            "retriever_calls": float(len(seconds)),
            "retriever_failed": float(failed),
            "retriever_retried": float(retried),
        }
        if not seconds:
            return counts
        nearest_rank = seconds[math.ceil(0.95 * len(seconds)) - 1]
        mean = sum(seconds) / len(seconds)
        return {**counts, "retriever_ms": 1000 * mean, "retriever_ms_p95": 1000 * nearest_rank}


class LocalRetriever:
    """An engine in this process."""

    def __init__(self, engine: Engine) -> None:
        """Wraps the engine."""
        self._engine, self._clock = engine, Clock()

    def search(self, query: str, top_k: int) -> list[Hit]:
        """At most `top_k` hits, best first."""
        start = time.perf_counter()
        hits = self._engine.search([clean(query)], top_k)[0]
        self._clock.add(time.perf_counter() - start)
        return hits

    def check(self) -> None:
        """Nothing to ask: the engine was opened."""

    def metrics(self) -> dict[str, float]:
        """See `Clock.take`."""
        return self._clock.take()

    def describe(self) -> dict[str, object]:
        """The engine's."""
        return self._engine.describe()


class _FailedTryError(Exception):
    """One try without an answer; `again`: another may succeed."""

    def __init__(self, reason: str, *, again: bool = True) -> None:
        super().__init__(reason)
        self.again = again


class HttpRetriever:
    """A server that speaks Search-R1's API: Search-R1's own, or `racelab serve retriever`."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        max_retries: int = 3,
        concurrency: int = 64,
        backoff_s: float = 0.25,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Nothing is asked yet; see `check`.

        Args:
            url: with its path; `/retrieve` where it has none.
            timeout_s: for the whole answer of one try.
            max_retries: further tries of a query.
            concurrency: queries under way at a time; further ones wait.
            backoff_s: before the second try; twice as long before each next one, 8 s at most.
            sleep: waits that many seconds.

        Raises:
            ConfigError: the URL is none of http.
        """
        self.url = _checked(url)
        self._timeout_s, self._max_retries, self._backoff_s = timeout_s, max_retries, backoff_s
        self._slots, self._sleep, self._clock = threading.BoundedSemaphore(concurrency), sleep, Clock()

    def search(self, query: str, top_k: int) -> list[Hit]:
        """At most `top_k` hits, best first.

        Raises:
            RetrieverError: no answer that can be read, after all tries.
        """
        tries, start = 0, time.perf_counter()
        with self._slots:
            while True:
                try:
                    hits = self._ask(query, top_k)
                except _FailedTryError as failure:
                    if not failure.again or tries >= self._max_retries:
                        self._clock.add(time.perf_counter() - start, failed=True, retried=tries)
                        raise RetrieverError(str(failure)) from None
                    self._sleep(min(self._backoff_s * 2.0 ** min(tries, 32), _MAX_BACKOFF_S))
                    tries += 1
                else:
                    self._clock.add(time.perf_counter() - start, retried=tries)
                    return hits

    def check(self) -> None:
        """Asks for one passage, once: what is not there before a run will not be there in it.

        Raises:
            UnreachableError: no answer, or none of Search-R1's API.
        """
        try:
            self._ask("test", 1)
        except _FailedTryError as failure:
            raise UnreachableError(
                f"task.retriever.url: no retriever answers at {self.url} ({failure}); start one with `{_START}`, "
                "correct the URL, or leave it empty to search in this process"
            ) from None

    def metrics(self) -> dict[str, float]:
        """See `Clock.take`."""
        return self._clock.take()

    def describe(self) -> dict[str, object]:
        """Kind and address."""
        return {"engine": "http", "url": self.url}

    def _ask(self, query: str, top_k: int) -> list[Hit]:
        """One try."""
        body = json.dumps({"queries": [clean(query)], "topk": top_k, "return_scores": True}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        deadline = time.monotonic() + self._timeout_s
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                answer = _read(response, deadline)
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                again = error.code in _AGAIN or error.code >= 500
                raise _FailedTryError(f"HTTP status {error.code}", again=again) from None
        except TimeoutError:
            raise _FailedTryError(f"no answer within {self._timeout_s:g} s") from None
        except urllib.error.URLError as error:
            slow = isinstance(error.reason, TimeoutError)
            why = f"no answer within {self._timeout_s:g} s" if slow else _reason(error.reason)
            raise _FailedTryError(why) from None
        except (http.client.HTTPException, OSError) as error:
            raise _FailedTryError(_reason(error)) from None
        return _hits(answer, top_k)


def _checked(url: str) -> str:
    """The URL with a path. Raises ConfigError."""
    found, mend = url.strip(), "give one as http://127.0.0.1:8000/retrieve"
    try:
        parts = urllib.parse.urlsplit(found)
        plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half a pair of brackets
        plain = False
    if not plain or re.search(r"[^!-~]", found):
        raise ConfigError(f"task.retriever.url is no http address; {mend}")
    if parts.username is not None or parts.fragment:
        raise ConfigError(f"task.retriever.url holds a user, a password or a fragment; {mend}")
    return urllib.parse.urlunsplit(parts._replace(path=PATH)) if parts.path in ("", "/") else found


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body; a server that sends a byte now and then must not hold a rollout for ever."""
    body = bytearray()
    while chunk := response.read1(1 << 16):
        body += chunk
        if time.monotonic() > deadline:
            raise _FailedTryError("the answer was too slow")
        if len(body) > _MAX_BODY:
            raise _FailedTryError(f"the answer is larger than {_MAX_BODY} bytes", again=False)
    if response.length:  # read1 ends without a word where the connection does
        raise _FailedTryError("the answer was cut off")
    return bytes(body)


def _hits(answer: bytes, top_k: int) -> list[Hit]:
    """The hits of the one query in an answer."""
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        raise _FailedTryError("the answer is malformed JSON") from None
    rows = value.get("result") if isinstance(value, dict) else None
    if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], list):
        raise _FailedTryError('the answer holds no "result" of one query, as Search-R1\'s API has it')
    return [_hit(row) for row in rows[0][:top_k]]


def _hit(row: Any) -> Hit:
    document = row.get("document") if isinstance(row, dict) else None
    contents = document.get("contents") if isinstance(document, dict) else None
    score = row.get("score") if isinstance(row, dict) else None
    if not isinstance(document, dict) or not isinstance(contents, str):
        raise _FailedTryError('a hit has no "document" with "contents", as Search-R1\'s API has it')
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise _FailedTryError('a hit has no "score", as Search-R1\'s API has it')
    return Hit(Passage(clean(str(document.get("id", ""))), clean(contents)), float(score))


def _reason(error: object) -> str:
    """Words for a transport error, without the address."""
    if isinstance(error, OSError) and error.strerror:
        return f"the connection failed: {error.strerror.lower()}"
    return f"the connection failed: {type(error).__name__}"


def to_json(found: Sequence[Sequence[Hit]], scores: bool) -> dict[str, Any]:
    """The body of an answer, for the serving side."""

    def document(hit: Hit) -> dict[str, Any]:
        return {"id": hit.passage.passage_id, "contents": hit.passage.contents}

    rows = [
        [{"document": document(h), "score": h.score} if scores else document(h) for h in hits]
        for hits in found
    ]
    return {"result": rows}
