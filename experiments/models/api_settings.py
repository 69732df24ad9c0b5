"""How a server is asked, and what of it can be wrong before anything is asked. Knows neither the SDK nor a reply."""

from __future__ import annotations

import importlib.util
import os
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from racelab.experiments.errors import ConfigError, MissingDependencyError
from racelab.experiments.fsio import explain
from racelab.experiments.models.assets import cache_dir
from racelab.experiments.models.chat import ChatRequest

if TYPE_CHECKING:
    from racelab.configs.schema import ApiConfig, ServerConfig

URL_VARIABLE: Final = "OPENAI_BASE_URL"


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """The section `api`, or another that names a server.

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
        section: of the config, for the messages.
        address_key: the config key that holds the address, for the messages; empty: the section's `base_url`.
        empty_ok: a reply without a word is a reply and not a failed try; an evaluation scores it.
        fit: a request that the server finds too long is made once more without `max_tokens`, so that the window alone
            bounds the reply. One that is still too long says something of the prompt and is no sign of a server that
            answers nobody.
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
    section: str = "api"
    address_key: str = ""
    empty_ok: bool = False
    fit: bool = False

    @property
    def where(self) -> str:
        """The config key of the address."""
        return self.address_key or f"{self.section}.base_url"

    def request(self, user: str, system: str | None = None) -> ChatRequest:
        """A request that is sampled as this section says."""
        return ChatRequest(system, user, self.max_tokens, self.temperature)


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
        cache_dir=_replies(api.cache),
        temperature=api.temperature,
        max_tokens=api.max_tokens,
    )


def server_settings(
    server: ServerConfig, section: str, *, base_url: str = "", address_key: str = "", empty_ok: bool = False
) -> ApiSettings:
    """The same for a section that says nothing about sampling (`server`, `judge`).

    Args:
        server: the section.
        section: its name.
        base_url: instead of the section's own.
        address_key: the key that `base_url` came from.
        empty_ok: see `ApiSettings`.
    """
    return ApiSettings(
        base_url=base_url or server.base_url,
        model=server.model,
        key_env=server.key_env,
        timeout_s=server.timeout_s,
        max_retries=server.max_retries,
        backoff_s=server.backoff_s,
        max_backoff_s=server.max_backoff_s,
        concurrency=server.concurrency,
        cache_dir=_replies(server.cache),
        section=section,
        address_key=address_key,
        empty_ok=empty_ok,
        fit=True,
    )


def _replies(cache: bool) -> Path | None:
    return cache_dir() / "api" if cache else None


def check(settings: ApiSettings) -> None:
    """Finds what can be found before a run starts; the server is not asked.

    Raises:
        ConfigError: no address or none that can be one, no key, or a cache folder that cannot be.
        MissingDependencyError: `openai` is not installed.
    """
    base_url(settings)
    find_key(settings)
    if settings.cache_dir is not None:
        _make_folder(settings)
    if importlib.util.find_spec("openai") is None:
        raise MissingDependencyError("an API model needs: pip install 'racelab[api]'")


def base_url(settings: ApiSettings) -> str:
    """The server's address, without a slash at the end. The SDK's own default is never used: it costs money.

    Raises:
        ConfigError: there is none, or it is no plain http address.
    """
    found = (settings.base_url or os.environ.get(URL_VARIABLE, "")).strip().rstrip("/")
    where = settings.where if settings.base_url else URL_VARIABLE
    if not found:
        raise ConfigError(
            f"{settings.where} is empty and {URL_VARIABLE} is not set; give one of them, as http://host:8000/v1"
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
            f"{where} holds a user, a password or a query; leave them out, the key comes from "
            f"{settings.section}.key_env"
        )
    return found


def find_key(settings: ApiSettings) -> str:
    """The key; "" where the server wants none.

    Raises:
        ConfigError: its variable is empty, or holds what no header can.
    """
    if not settings.key_env:
        return ""
    key = os.environ.get(settings.key_env, "").strip()
    if not key:
        raise ConfigError(
            f"{settings.key_env} is not set; export the key of the API in it, or set {settings.section}.key_env= "
            "if the server wants none"
        )
    if not re.fullmatch(r"[!-~]+", key):  # it goes into an HTTP header
        raise ConfigError(f"{settings.key_env} holds spaces or signs that no key has; export it again")
    return key


def _make_folder(settings: ApiSettings) -> None:
    folder = settings.cache_dir
    assert folder is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache of replies {folder} cannot be made: {explain(error)}; set {settings.section}.cache=false"
        ) from error
