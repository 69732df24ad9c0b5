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
import importlib.util
import itertools
import json
import os
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from racelab.experiments.errors import (
    ConfigError,
    MissingDependencyError,
    RunFolderError,
    UnreachableError,
)
from racelab.experiments.fsio import explain, read_json, write_json_atomic
from racelab.experiments.models.api_reply import (
    FailedTryError,
    Outcome,
    Silence,
    clean,
    completion,
    read_body,
    retry_after,
)
from racelab.experiments.models.assets import cache_dir
from racelab.experiments.models.chat import Calls, ChatRequest, Reply

if TYPE_CHECKING:
    import openai

    from racelab.configs.schema import ApiConfig

_URL_VARIABLE: Final = "OPENAI_BASE_URL"
_AGAIN: Final = frozenset({408, 409, 425, 429})
"""Statuses that may pass; so may all from 500 on."""
_GENERAL: Final = frozenset({402, 429, 502, 503, 504})
"""Statuses that have nothing to do with the request: no money, no quota, no server behind the gateway."""
_NO_SERVER: Final = frozenset({"ConnectError", "ConnectTimeout", "ProxyError"})
"""Causes of a connection error that say that nothing listens there."""
_CODE: Final = re.compile(r"[a-z][a-z_]{2,50}")
_CONNECT_S: Final = 10.0  # what is not there should not take a whole time-out to notice


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """The section `api`.

    Attributes:
        base_url: where `/chat/completions` hangs, as `http://host:8000/v1`; empty: $OPENAI_BASE_URL.
        model: its name on that server.
        key_env: the environment variable that holds the key; empty: the server wants none.
        timeout_s: for one whole answer.
        max_retries: further tries of a request that failed.
        backoff_s: before the first of them; twice as long before each next one.
        max_backoff_s: the longest wait, also when the server asks for more (Retry-After).
        concurrency: requests under way at a time.
        cache_dir: folder of replies, shared by any number of processes; None: every request is made.
        temperature: of `request`.
        max_tokens: of `request`.
    """

    base_url: str
    model: str
    key_env: str = "OPENAI_API_KEY"
    timeout_s: float = 60.0
    max_retries: int = 5
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    concurrency: int = 8
    cache_dir: Path | None = None
    temperature: float = 0.0
    max_tokens: int = 2048

    def request(self, user: str, system: str | None = None) -> ChatRequest:
        """A request that is sampled as this section says."""
        return ChatRequest(system, user, self.max_tokens, self.temperature)


def check(settings: ApiSettings) -> None:
    """Finds what can be found before a run starts; the server is not asked.

    Raises:
        ConfigError: no address or none that can be one, no key, or a cache folder that cannot be.
        MissingDependencyError: `openai` is not installed.
    """
    base_url(settings)
    _key(settings)
    if settings.cache_dir is not None:
        _make_folder(settings.cache_dir)
    if importlib.util.find_spec("openai") is None:
        raise MissingDependencyError("an API model needs: pip install 'racelab[api]'")


def base_url(settings: ApiSettings) -> str:
    """The server's address, without a slash at the end. The SDK's own default is never used: it costs money.

    Raises:
        ConfigError: there is none, or it is no plain http address.
    """
    found = (settings.base_url or os.environ.get(_URL_VARIABLE, "")).strip().rstrip("/")
    where = "api.base_url" if settings.base_url else _URL_VARIABLE
    if not found:
        raise ConfigError(
            f"api.base_url is empty and {_URL_VARIABLE} is not set; give one of them, as http://host:8000/v1"
        )
    try:
        parts = urllib.parse.urlsplit(found)
        plain = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half a pair of brackets
        plain = False
    if not plain or re.search(r"\s", found):
        raise ConfigError(f"{where} is no http address; give one as http://host:8000/v1")
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"{where} holds a user, a password or a query; leave them out, the key comes from api.key_env"
        )
    return found


def api_settings(api: ApiConfig) -> ApiSettings:
    """The client's settings; replies are kept beside the converted models, for all runs."""
    return ApiSettings(
        base_url=api.base_url,
        model=api.model,
        key_env=api.key_env,
        timeout_s=api.timeout_s,
        max_retries=api.max_retries,
        backoff_s=api.backoff_s,
        max_backoff_s=api.max_backoff_s,
        concurrency=api.concurrency,
        cache_dir=cache_dir() / "api" if api.cache else None,
        temperature=api.temperature,
        max_tokens=api.max_tokens,
    )


def _key(settings: ApiSettings) -> str:
    """The key; "" where the server wants none."""
    if not settings.key_env:
        return ""
    key = os.environ.get(settings.key_env, "").strip()
    if not key:
        raise ConfigError(
            f"{settings.key_env} is not set; export the key of the API in it, or set api.key_env= "
            "if the server wants none"
        )
    if not re.fullmatch(r"[!-~]+", key):  # it goes into an HTTP header
        raise ConfigError(f"{settings.key_env} holds spaces or signs that no key has; export it again")
    return key


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache of replies {folder} cannot be made: {explain(error)}; set api.cache=false"
        ) from error


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
        self._client = _open_client(settings, self._url)
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
        stop = threading.Event()
        first: dict[object, int] = {}  # request -> the index that asks it
        asked = [first.setdefault(r if self.settings.cache_dir else i, i) for i, r in enumerate(requests)]
        jobs = {i: self._pool.submit(self._one, requests[i], stop) for i in first.values()}
        try:
            done, _ = wait(jobs.values(), return_when=FIRST_EXCEPTION)
        finally:  # after an error or an interrupt nobody wants the rest
            stop.set()
            for job in jobs.values():
                job.cancel()
        for job in done:
            job.result()  # raises what it raised
        outcomes = {i: job.result() for i, job in jobs.items()}
        repeated = Calls(cached=len(requests) - len(jobs))
        with self._lock:
            self._calls += sum((o.calls for o in outcomes.values()), repeated)
            silent = self._silence.heed([(requests[i].user, o) for i, o in outcomes.items() if o.calls.made])
        if silent:
            raise UnreachableError(
                f"{self._url} {silent}; correct the section api, or see to the server or the account's quota, then "
                "resume the run"
            )
        return [
            outcomes[j].reply if i == j else replace(outcomes[j].reply, cached=True)
            for i, j in enumerate(asked)
        ]

    def _one(self, request: ChatRequest, stop: threading.Event) -> Outcome:
        """One request: from the cache, or asked and then put there."""
        messages = _messages(request)
        file = self._cache_file(request, messages)
        known = _cached(file)
        if known is not None:
            return Outcome(Reply(known, cached=True), Calls(cached=1))
        outcome = self._ask_again_and_again(request, messages, stop)
        if file is not None and outcome.reply.finished:
            with contextlib.suppress(RunFolderError):  # costs asking again, nothing else
                write_json_atomic(file, {"text": outcome.reply.text})
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
                        f"no server at {self._url} ({failure}); start it, or correct api.base_url or "
                        f"{_URL_VARIABLE}"
                    ) from None
                reply = Reply(None, finished=False, error=str(failure))
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
        headers = {} if self.settings.key_env else {"Authorization": openai.Omit()}
        try:
            with self._client.chat.completions.with_streaming_response.create(
                model=self.settings.model,
                messages=turns,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                extra_headers=headers,
            ) as response:
                self._answered = True
                kind = response.headers.get("content-type", "").partition(";")[0].strip()
                return completion(kind, read_body(response.iter_bytes(), deadline))
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
        status, key_env = error.status_code, self.settings.key_env
        if status in (401, 403):
            which = f"the key in {key_env}" if key_env else "a request without a key"
            mend = f"put a valid one into {key_env}" if key_env else "name the key's variable in api.key_env"
            return UnreachableError(f"{self._url} refuses {which} (HTTP {status}); {mend}")
        if status == 404:
            return UnreachableError(
                f"{self._url} has no model {self.settings.model!r}, or is no API's address (HTTP 404); correct "
                "api.model or api.base_url (which often ends in /v1)"
            )
        code = error.code if isinstance(error.code, str) else ""
        tells = _CODE.fullmatch(code) and self._client.api_key not in code
        again = status in _AGAIN or status >= 500
        return FailedTryError(
            f"HTTP {status} ({code})" if tells else f"HTTP {status}",
            again=again,
            wait_s=retry_after(error.response.headers),
            refused=not again,
            general=status in _GENERAL,
        )

    def _cache_file(self, request: ChatRequest, messages: list[dict[str, str]]) -> Path | None:
        """Named by the hash of all that decides the reply."""
        if self.settings.cache_dir is None:
            return None
        how = {k: v for k, v in asdict(request).items() if k not in ("system", "user")}
        body = json.dumps([self._url, self.settings.model, messages, how], sort_keys=True)
        return self.settings.cache_dir / f"{hashlib.sha256(body.encode()).hexdigest()}.json"


def _open_client(settings: ApiSettings, url: str) -> openai.OpenAI:
    """The SDK's client; it tries once, since the tries are counted here."""
    import httpx
    import openai

    return openai.OpenAI(
        base_url=url,
        # Given none, the SDK would take $OPENAI_API_KEY, which is not for this server.
        api_key=_key(settings) or "none",
        timeout=httpx.Timeout(settings.timeout_s, connect=min(settings.timeout_s, _CONNECT_S)),
        max_retries=0,
    )


def _messages(request: ChatRequest) -> list[dict[str, str]]:
    turns = [] if request.system is None else [{"role": "system", "content": clean(request.system)}]
    return [*turns, {"role": "user", "content": clean(request.user)}]


def _cached(file: Path | None) -> str | None:
    """The text in a cache file; None if there is none or it is damaged."""
    if file is None:
        return None
    try:
        value = read_json(file)
    except RunFolderError:
        return None
    text = value.get("text") if isinstance(value, dict) else None
    return text if isinstance(text, str) and text else None


def _cause(error: BaseException) -> tuple[str, str]:
    """The kind of the transport's own error, and words for it; only a connection's text is known to be harmless."""
    cause = error.__cause__ or error
    name = type(cause).__name__
    return name, str(cause) if name == "ConnectError" else name
