"""The four tools of D.4, run: client, fetcher and parsers behind one cache, one time limit and counters.

A call never raises. What fails outside becomes a text for the agent and is counted by kind; a fault of a request that
several episodes wait for is counted once, for the one that made it.

Open in the paper: what `browse_webpage` does where the scrape service does not give the page: it is fetched from here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from racelab.configs.schema_rlds import ToolServerConfig
from racelab.experiments.tasks.deepresearch import texts
from racelab.experiments.tasks.deepresearch.cache import SharedCache
from racelab.experiments.tasks.deepresearch.citations import paper_id, web_id
from racelab.experiments.tasks.deepresearch.documents import Document
from racelab.experiments.tasks.deepresearch.faults import (
    Deadline,
    FaultError,
    Gate,
    count,
    new_counter,
    within,
)
from racelab.experiments.tasks.deepresearch.fetch import Fetcher
from racelab.experiments.tasks.deepresearch.guard import Guard
from racelab.experiments.tasks.deepresearch.parsers import Parsers
from racelab.experiments.tasks.deepresearch.schemas import NAMES, ArgumentError, arguments
from racelab.experiments.tasks.deepresearch.serper import Hit, Serper
from racelab.experiments.tasks.hermes import ToolCall, ToolCallError

_LOG = logging.getLogger(__name__)

Found = tuple[Hit, ...] | Document


@dataclass(frozen=True, slots=True)
class ToolResult:
    """One call.

    Attributes:
        name: of the tool; "" where the call could not be read.
        rendered: for the agent.
        executed: the tool ran, whatever came of it; False for a call with a mistake in it.
        failed: it ran and gave nothing.
        cached: nobody was asked.
        faults: failed tries by kind.
        seconds: wall-clock.
    """

    name: str
    rendered: texts.Rendered
    executed: bool
    failed: bool
    cached: bool
    faults: Mapping[str, int]
    seconds: float


class Toolbox:
    """Runs calls; thread-safe."""

    def __init__(self, config: ToolServerConfig, *, serper: Serper, fetcher: Fetcher, guard: Guard) -> None:
        """Keeps the parts.

        Args:
            config: limits.
            serper: the search service.
            fetcher: the open web.
            guard: of the fetcher.
        """
        self._config, self._serper, self._fetcher, self._guard = config, serper, fetcher, guard
        self._cache: SharedCache[Found] = SharedCache(config.cache_entries)
        self._gate, self._parsers = Gate(config.fetch_concurrency), Parsers()
        self._lock = threading.Lock()
        self._stats: Counter[str] = Counter()
        self._seconds = 0.0

    def run(self, call: ToolCall | ToolCallError) -> ToolResult:
        """One call, within `timeout_s`."""
        began, faults = time.monotonic(), new_counter()
        name, cached, failed, executed = "", False, False, False
        try:
            if isinstance(call, ToolCallError):
                raise ArgumentError(call.message)
            given = arguments(call.name, call.arguments)
            name, executed = call.name, True
            deadline = Deadline.after(self._config.timeout_s)
            found, cached = within(
                self._config.timeout_s, lambda: self._cached(name, given, deadline, faults), f"tool-{name}"
            )
            rendered = self._render(name, given, found)
        except ArgumentError as error:
            rendered = texts.render_failure(str(error))
        except FaultError as fault:
            count(fault, faults)
            failed, rendered = True, texts.render_failure(str(fault))
        except Exception as error:  # the run must go on; the kind is counted and its type is logged
            _LOG.warning("deepresearch: %s failed inside: %s", name, type(error).__name__)
            faults["internal"] += 1
            failed, rendered = True, texts.render_failure("the tool failed")
        seen = {kind: n for kind, n in faults.items() if n}
        result = ToolResult(name, rendered, executed, failed, cached, seen, time.monotonic() - began)
        self._note(result)
        return result

    def metrics(self) -> dict[str, float]:
        """Counts and mean seconds since the last call, then set back."""
        with self._lock:
            stats, seconds = self._stats, self._seconds
            self._stats, self._seconds = Counter(), 0.0
        calls = sum(stats[name] for name in NAMES)
        values = {f"tools/{name}": float(stats[name]) for name in NAMES}
        values |= {f"tools/{kind}": float(stats[kind]) for kind in ("invalid", "failed", "cached")}
        values |= {f"faults/{kind}": float(stats[f"fault:{kind}"]) for kind in new_counter()}
        values["tools/cache_entries"] = float(len(self._cache))
        return values | ({"tools/seconds": seconds / calls} if calls else {})

    def close(self) -> None:
        """Closes the connections and ends the parsers."""
        self._serper.close()
        self._parsers.close()

    def _note(self, result: ToolResult) -> None:
        with self._lock:
            self._stats[result.name if result.executed else "invalid"] += 1
            self._stats["cached"] += result.cached
            self._stats["failed"] += result.failed
            self._stats.update({f"fault:{kind}": n for kind, n in result.faults.items()})
            self._seconds += result.seconds if result.executed else 0.0

    def _cached(
        self, name: str, given: Mapping[str, Any], deadline: Deadline, faults: Counter[str]
    ) -> tuple[Found, bool]:
        """From the cache, or asked. The limit only cuts what is shown, so it is no part of the key."""
        key = (name, *(given[k] for k in sorted(given) if k != "limit"))
        make: dict[str, Callable[[], Found]] = {
            "search_papers": lambda: self._serper.scholar(given["query"], deadline, faults),
            "google_search": lambda: self._serper.search(
                given["query"], given["gl"], given["hl"], deadline, faults
            ),
            "read_paper": lambda: self._paper(given["pdf_url"], deadline, faults),
            "browse_webpage": lambda: self._page(given["url"], deadline, faults),
        }
        return self._cache.get(key, make[name], deadline)

    def _paper(self, url: str, deadline: Deadline, faults: Counter[str]) -> Document:
        def work() -> Document:
            body = self._fetcher.pdf(url, deadline, faults)
            return self._parsers.pdf(body.data, max_chars=self._config.page_chars, deadline=deadline)

        return self._gate.run(work, deadline)

    def _page(self, url: str, deadline: Deadline, faults: Counter[str]) -> Document:
        self._guard.screen(url)
        longest = self._config.page_chars
        try:
            title, text = self._serper.scrape(url, deadline, faults)
        except FaultError as fault:
            count(fault, faults)
            deadline.check()
            return self._gate.run(lambda: self._fetched(url, deadline, faults), deadline)
        return Document(" ".join(title.split()), text[:longest], len(text) > longest)

    def _fetched(self, url: str, deadline: Deadline, faults: Counter[str]) -> Document:
        body = self._fetcher.page(url, deadline, faults)
        longest = self._config.page_chars
        return self._parsers.page(
            body.data, body.charset, body.content_type, max_chars=longest, deadline=deadline
        )

    def _render(self, name: str, given: Mapping[str, Any], found: Found) -> texts.Rendered:
        """As the agent reads it; the key is taken out first, should a server have repeated it."""
        redact = self._serper.redact
        if isinstance(found, Document):
            source = paper_id(given["pdf_url"]) if name == "read_paper" else web_id(given["url"])
            return texts.render_document(source, Document(redact(found.title), redact(found.text), found.cut))
        hits = [
            Hit(
                redact(h.title), redact(h.url), redact(h.snippet), redact(h.about), h.cites, redact(h.pdf_url)
            )
            for h in found
        ]
        paper = name == "search_papers"
        limit = given["limit"] if paper else len(hits)
        return texts.render_hits(hits, limit=limit, max_chars=self._config.page_chars, paper=paper)
