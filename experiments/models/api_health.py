"""Whether a server answers at all, asked before a run makes its folder: its models, then one token of one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from racelab.configs.suggest import did_you_mean, near
from racelab.experiments.errors import UnreachableError
from racelab.experiments.models.api import ApiModel, base_url, check, no_key, open_client, refusal
from racelab.experiments.models.api_settings import URL_VARIABLE, ApiSettings
from racelab.experiments.models.chat import ChatRequest

_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class Served:
    """A model of a server.

    Attributes:
        model: its name there.
        window: longest sequence in tokens, where the server says so (vLLM does).
    """

    model: str
    window: int | None = None


def check_server(settings: ApiSettings) -> str:
    """The name of the model that the server answers with; see `find_served`."""
    return find_served(settings).model


def find_served(settings: ApiSettings) -> Served:
    """The model that is meant, proved to answer by a request of one token. Nothing is cached.

    Raises:
        ConfigError: no address, no key (`api_settings.check`).
        MissingDependencyError: `openai` is not installed.
        UnreachableError: nothing listens, the key is refused, there is no such model, none or several where none is
            named, or the model gives no reply.
    """
    check(settings)
    url = base_url(settings)
    listed = _listed(settings, url)
    served = _meant(settings, url, listed)
    asked = replace(settings, model=served.model, cache_dir=None, empty_ok=True)
    try:
        (reply,) = ApiModel(asked).complete([ChatRequest(None, "Hi", 1)])
    except UnreachableError as error:
        others = _unknown(settings.model, listed) if listed and served not in listed else ""
        raise UnreachableError(f"{error}{others}") from error
    if reply.text is None:
        raise UnreachableError(
            f"{url} gives no reply for {served.model} to a request of one token ({reply.error}); see to the server, or "
            f"correct {settings.section}.model"
        )
    return served


def _meant(settings: ApiSettings, url: str, listed: Sequence[Served]) -> Served:
    """The named one, whether it is listed or not (not all servers list all); else the only one."""
    named = settings.model
    if named:
        return next((s for s in listed if s.model == named), Served(named))
    if len(listed) == 1:
        return listed[0]
    if listed:
        raise UnreachableError(f"{url} serves {_names(listed)}; name one in {settings.section}.model")
    longer = _longer(url)
    mend = f"its address may be {longer}, else name" if longer else "name"
    raise UnreachableError(
        f"{url} does not say which models it serves; {mend} one in {settings.section}.model"
    )


def _longer(url: str) -> str:
    """The address that was probably meant, where the common last part of one is missing; else ""."""
    return "" if url.rstrip("/").endswith("/v1") else f"{url.rstrip('/')}/v1"


def _unknown(model: str, listed: Sequence[Served]) -> str:
    close = near(model, [s.model for s in listed])
    return did_you_mean(close) or f"; it serves {_names(listed)}"


def _names(listed: Sequence[Served]) -> str:
    more = len(listed) - _SHOWN
    return ", ".join(s.model for s in listed[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _listed(settings: ApiSettings, url: str) -> list[Served]:
    """What `GET /models` says; nothing where a server has no such path or says it in another way."""
    import httpx
    import openai

    client = open_client(settings, url)
    try:
        answer: Any = client.models.with_raw_response.list(extra_headers=no_key(settings))
        value = answer.http_response.json()
    except openai.APIStatusError as error:
        status = error.status_code
        fatal = refusal(settings, url, status) if status in (401, 403) else ""
        if fatal:
            raise UnreachableError(fatal) from None
        return []
    except (openai.APIConnectionError, httpx.HTTPError):
        raise UnreachableError(
            f"no server at {url}; start it, or correct {settings.where} or {URL_VARIABLE}"
        ) from None
    except (openai.OpenAIError, ValueError, RecursionError):
        return []
    finally:
        client.close()
    entries = value.get("data") if isinstance(value, dict) else None
    return [
        Served(entry["id"], _window(entry))
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    ]


def _window(entry: dict[str, Any]) -> int | None:
    value = entry.get("max_model_len")
    return value if type(value) is int and value > 0 else None
