"""A model behind an OpenAI-compatible chat endpoint; implements `ChatModel`.

What goes wrong with one request (too many requests, a server error, no answer in time, a body that is no completion)
is tried again and then becomes a reply without a text, which the method counts. What would go wrong with every
request (wrong key, no such model, no server at all) is an error, since a run of failures is of no use. So is a server
that refuses all of the first requests, or is silent for several calls in a row (`api_reply.Silence`).

The key is read from its variable when the model is opened, and is in no setting, message, description or file. Neither
is what the server says about an error: some servers repeat the key or the prompt there.

Only whole replies are cached: a failed one may succeed the next time, and a cut one is asked for again, so that a
cache never makes a passing weakness of the server permanent.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from racelab.experiments.errors import RunFolderError, UnreachableError
from racelab.experiments.fsio import read_json, write_json_atomic
from racelab.experiments.models.api_reply import (
    FailedTryError,
    Outcome,
    Silence,
    clean,
    completion,
    read_body,
    retry_after,
    says_too_long,
)
from racelab.experiments.models.api_settings import (
    URL_VARIABLE,
    ApiSettings,
    api_settings,
    base_url,
    check,
    find_key,
)
from racelab.experiments.models.chat import Calls, ChatRequest, Reply

if TYPE_CHECKING:
    import openai

__all__ = ["ApiModel", "ApiSettings", "api_settings", "base_url", "check", "no_key", "open_client", "refusal"]

_AGAIN: Final = frozenset({408, 409, 425, 429})
"""Statuses that may pass; so may all from 500 on."""
_GENERAL: Final = frozenset({402, 429, 502, 503, 504})
"""Statuses that have nothing to do with the request: no money, no quota, no server behind the gateway."""
_NO_SERVER: Final = frozenset({"ConnectError", "ConnectTimeout", "ProxyError"})
"""Causes of a connection error that say that nothing listens there."""
_CODE: Final = re.compile(r"[a-z][a-z_]{2,50}")
_CALL: Final = 8  # replies of a stream that count as one call
_CONNECT_S: Final = 10.0  # what is not there should not take a whole time-out to notice


class ApiModel:
    """Asks a server, several requests at a time."""

    def __init__(
        self,
        settings: ApiSettings,
        *,
        sleep: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        """Opens the client; the server is first asked by `complete`.

        Args:
            settings: see there.
            sleep: waits that many seconds, or less if the event is set.

        Raises:
            ConfigError: as `check`.
            MissingDependencyError: as `check`.
        """
        check(settings)
        self.settings = settings
        self._url, self._sleep = base_url(settings), sleep
        self._client = open_client(settings, self._url)
        self._pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="api")
        self._lock = threading.Lock()
        self._calls = Calls()
        self._answered = False  # the server has answered something, if only an error
        self._silence = Silence()

    @property
    def calls(self) -> Calls:
        """What was asked so far."""
        return self._calls

    def describe(self) -> dict[str, object]:
        """Kind, address, model and whether replies are cached (JSON values)."""
        return {
            "kind": "api",
            "base_url": self._url,
            "model": self.settings.model,
            "cache": self.settings.cache_dir is not None,
        }

    def complete(self, requests: Sequence[ChatRequest]) -> list[Reply]:
        """One reply per request, in order; where there is a cache, equal requests are made once.

        Raises:
            UnreachableError: the server refuses the key, or has no such model or path, or nothing has ever
                listened there. Requests that have not begun are then not made. Or it answers nobody (`Silence`).
        """
        outcomes: dict[int, Outcome] = {}
        replies: dict[int, Reply] = {}
        for group, outcome in self._each(requests):
            outcomes[group[0]] = outcome
            replies.update(_shared(group, outcome.reply))
        repeated = Calls(cached=len(requests) - len(outcomes))
        self._count(sum((o.calls for o in outcomes.values()), repeated))
        self._heed([(requests[i].user, outcomes[i]) for i in sorted(outcomes)])
        return [replies[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[ChatRequest]) -> Iterator[tuple[int, Reply]]:
        """(index, reply) as the replies come, in any order: a slow one holds up no other.

        What is asked ahead of the caller is bounded. Who stops reading early gives up what is under way.

        Raises:
            UnreachableError: as `complete`; every few replies are a call, as far as `Silence` goes.
        """
        asked: list[tuple[str, Outcome]] = []
        try:
            for group, outcome in self._each(requests):
                self._count(outcome.calls + Calls(cached=len(group) - 1))
                asked.append((requests[group[0]].user, outcome))
                yield from _shared(group, outcome.reply)
                if len(asked) >= max(self.settings.concurrency, _CALL):
                    self._heed(asked)
                    asked = []
        except GeneratorExit:
            return
        self._heed(asked)

    def _each(self, requests: Sequence[ChatRequest]) -> Iterator[tuple[list[int], Outcome]]:
        """The indices of equal requests, made once where there is a cache, and what came of them; as they come."""
        groups: dict[object, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(request if self.settings.cache_dir else i, []).append(i)
        stop, todo = threading.Event(), iter(groups.values())
        jobs: dict[Future[Outcome], list[int]] = {}
        try:
            while True:
                for group in itertools.islice(todo, 2 * self.settings.concurrency - len(jobs)):
                    jobs[self._pool.submit(self._one, requests[group[0]], stop)] = group
                if not jobs:
                    return
                done, _ = wait(jobs, return_when=FIRST_COMPLETED)
                for job in sorted(done, key=lambda job: jobs[job]):
                    yield jobs.pop(job), job.result()  # raises what it raised
        finally:  # after an error or an interrupt nobody wants the rest
            stop.set()
            for job in jobs:
                job.cancel()

    def _count(self, calls: Calls) -> None:
        with self._lock:
            self._calls += calls

    def _heed(self, asked: Sequence[tuple[str, Outcome]]) -> None:
        """Raises UnreachableError if the server answers nobody."""
        with self._lock:
            silent = self._silence.heed(
                [
                    (user, o)
                    for user, o in asked
                    if o.calls.made and not (self.settings.fit and o.reply.too_long)
                ]
            )
        if silent:
            raise UnreachableError(
                f"{self._url} {silent}; correct the section {self.settings.section}, or see to the server or the "
                "account's quota, then resume the run"
            )

    def _one(self, request: ChatRequest, stop: threading.Event) -> Outcome:
        """One request: from the cache, or asked and then put there."""
        messages = _messages(request)
        file = self._cache_file(request, messages)
        known = _cached(file)
        if known is not None and (known.text or self.settings.empty_ok):
            return Outcome(known, Calls(cached=1))
        outcome = self._ask_again_and_again(request, messages, stop)
        reply = outcome.reply
        if self.settings.fit and reply.too_long and request.max_tokens is not None and not stop.is_set():
            # Prompt and bound together were too much: a reply that only the window bounds is shorter than the bound.
            shorter = self._one(replace(request, max_tokens=None), stop)
            return replace(shorter, calls=shorter.calls + Calls(retried=outcome.calls.retried + 1))
        if file is not None and reply.finished and (reply.text or reply.reasoning):
            with contextlib.suppress(RunFolderError):  # costs asking again, nothing else
                write_json_atomic(file, _stored(reply))
        return outcome

    def _ask_again_and_again(
        self, request: ChatRequest, messages: list[dict[str, str]], stop: threading.Event
    ) -> Outcome:
        """Tries until there is a reply, no hope, or no try left."""
        for tries in itertools.count():
            try:
                outcome = self._ask(request, messages)
            except FailedTryError as failure:
                if failure.again and tries < self.settings.max_retries:
                    self._sleep(stop, self._delay(tries, failure.wait_s))
                    if not stop.is_set():
                        continue
                if failure.absent and not self._answered:
                    raise UnreachableError(
                        f"no server at {self._url} ({failure}); start it, or correct {self.settings.where} or "
                        f"{URL_VARIABLE}"
                    ) from None
                reply = Reply(None, finished=False, error=str(failure), too_long=failure.too_long)
                outcome = Outcome(reply, Calls(failed=1), failure)
            return replace(outcome, calls=outcome.calls + Calls(made=1, retried=tries))
        raise AssertionError("unreachable")

    def _delay(self, tries: int, asked_s: float) -> float:
        """Seconds before the next try: doubled each time, or what the server asks for, and no longer than the cap."""
        own = self.settings.backoff_s * 2.0 ** min(tries, 32)
        return min(max(own, asked_s), self.settings.max_backoff_s)

    def _ask(self, request: ChatRequest, messages: list[dict[str, str]]) -> Outcome:
        """One try. Raises FailedTryError, or UnreachableError where no other can succeed."""
        import httpx
        import openai

        deadline = time.monotonic() + self.settings.timeout_s
        turns: Any = messages
        more: dict[str, Any] = {"stop": list(request.stop)} if request.stop else {}
        if request.max_tokens is not None:
            more["max_tokens"] = request.max_tokens
        if request.seed is not None:
            more["seed"] = request.seed
        if request.thinking is not None:
            more["extra_body"] = {"chat_template_kwargs": {"enable_thinking": request.thinking}}
        try:
            with self._client.chat.completions.with_streaming_response.create(
                model=self.settings.model,
                messages=turns,
                temperature=request.temperature,
                top_p=request.top_p,
                extra_headers=no_key(self.settings),
                **more,
            ) as response:
                self._answered = True
                kind = response.headers.get("content-type", "").partition(";")[0].strip()
                body = read_body(response.iter_bytes(), deadline)
                return completion(kind, body, empty_ok=self.settings.empty_ok)
        except (openai.APITimeoutError, httpx.TimeoutException) as error:
            absent = _cause(error)[0] in _NO_SERVER
            raise FailedTryError(
                f"no answer within {self.settings.timeout_s:g} s", absent=absent, general=absent
            ) from None
        except openai.APIStatusError as error:
            self._answered = True
            raise self._refusal(error) from None
        except (openai.OpenAIError, httpx.HTTPError) as error:
            name, why = _cause(error)
            absent = name in _NO_SERVER
            raise FailedTryError(f"the connection failed: {why}", absent=absent, general=True) from None

    def _refusal(self, error: openai.APIStatusError) -> Exception:
        """What an HTTP error status means."""
        status = error.status_code
        fatal = refusal(self.settings, self._url, status)
        if fatal:
            return UnreachableError(fatal)
        code = error.code if isinstance(error.code, str) else ""
        tells = _CODE.fullmatch(code) and self._client.api_key not in code
        again = status in _AGAIN or status >= 500
        return FailedTryError(
            f"HTTP {status} ({code})" if tells else f"HTTP {status}",
            again=again,
            wait_s=retry_after(error.response.headers),
            refused=not again,
            general=status in _GENERAL,
            too_long=not again and says_too_long(error.body),
        )

    def _cache_file(self, request: ChatRequest, messages: list[dict[str, str]]) -> Path | None:
        """Named by the hash of all that decides the reply."""
        if self.settings.cache_dir is None:
            return None
        how = {k: v for k, v in request.identity().items() if k not in ("system", "user")}
        body = json.dumps([self._url, self.settings.model, messages, how], sort_keys=True)
        return self.settings.cache_dir / f"{hashlib.sha256(body.encode()).hexdigest()}.json"


def refusal(settings: ApiSettings, url: str, status: int) -> str:
    """What an HTTP status says that every request would be told; "" for other statuses."""
    section, key_env = settings.section, settings.key_env
    if status in (401, 403):
        which = f"the key in {key_env}" if key_env else "a request without a key"
        mend = (
            f"put a valid one into {key_env}" if key_env else f"name the key's variable in {section}.key_env"
        )
        return f"{url} refuses {which} (HTTP {status}); {mend}"
    if status == 404:
        return (
            f"{url} has no model {settings.model!r}, or is no API's address (HTTP 404); correct "
            f"{section}.model or {settings.where} (which often ends in /v1)"
        )
    return ""


def no_key(settings: ApiSettings) -> dict[str, Any]:
    """Headers of a request to a server that wants no key: none in place of the SDK's own."""
    import openai

    return {} if settings.key_env else {"Authorization": openai.Omit()}


def open_client(settings: ApiSettings, url: str) -> openai.OpenAI:
    """The SDK's client; it tries once, since the tries are counted here."""
    import httpx
    import openai

    return openai.OpenAI(
        base_url=url,
        # Given none, the SDK would take $OPENAI_API_KEY, which is not for this server.
        api_key=find_key(settings) or "none",
        timeout=httpx.Timeout(settings.timeout_s, connect=min(settings.timeout_s, _CONNECT_S)),
        max_retries=0,
    )


def _messages(request: ChatRequest) -> list[dict[str, str]]:
    turns = [] if request.system is None else [{"role": "system", "content": clean(request.system)}]
    return [*turns, {"role": "user", "content": clean(request.user)}]


def _shared(group: Sequence[int], reply: Reply) -> list[tuple[int, Reply]]:
    """One reply for all equal requests; only the first of them was asked."""
    return [(i, reply if i == group[0] else replace(reply, cached=True)) for i in group]


def _stored(reply: Reply) -> dict[str, Any]:
    """A whole reply as the cache keeps it."""
    more = {"reasoning": reply.reasoning} if reply.reasoning else {}
    return {"text": reply.text, "n_tokens": reply.n_tokens, **more}


def _cached(file: Path | None) -> Reply | None:
    """The reply in a cache file; None if there is none or it is damaged."""
    if file is None:
        return None
    try:
        value = read_json(file)
    except RunFolderError:
        return None
    if not isinstance(value, dict):
        return None
    text, reasoning, n = value.get("text"), value.get("reasoning", ""), value.get("n_tokens", 0)
    whole = isinstance(text, str) and isinstance(reasoning, str) and type(n) is int
    return (
        Reply(text, cached=True, reasoning=reasoning, n_tokens=n) if whole and (text or reasoning) else None
    )


def _cause(error: BaseException) -> tuple[str, str]:
    """The kind of the transport's own error, and words for it; only a connection's text is known to be harmless."""
    cause = error.__cause__ or error
    name = type(cause).__name__
    return name, str(cause) if name == "ConnectError" else name
