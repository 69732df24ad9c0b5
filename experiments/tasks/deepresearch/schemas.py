"""The four tools as OpenAI function schemas, and their arguments checked (RLDS App. D.4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

DEFAULT_LIMIT: Final = 5
MAX_LIMIT: Final = 10
_QUERY_CHARS: Final = 500
_URL_CHARS: Final = 2000
_CODE: Final = re.compile(r"[a-zA-Z]{2}(?:-[a-zA-Z]{2,4})?")


def _function(
    name: str, description: str, required: list[str], **properties: dict[str, Any]
) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


TOOLS: Final[tuple[Mapping[str, Any], ...]] = (
    _function(
        "search_papers",
        "Search the scientific literature. Returns titles, where they appeared, how often they are cited, snippets, "
        "and the address of the PDF where there is one.",
        ["query"],
        query=_text("What to search for."),
        limit={
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_LIMIT,
            "description": f"How many papers to show; {DEFAULT_LIMIT} if left out.",
        },
    ),
    _function(
        "read_paper",
        "Download a paper and return its text.",
        ["pdf_url"],
        pdf_url=_text("Address of the PDF, as search_papers gives it."),
    ),
    _function(
        "google_search",
        "Search the open web. Returns titles, addresses and snippets.",
        ["query"],
        query=_text("What to search for."),
        gl=_text("Country to search from, as us."),
        hl=_text("Language of the results, as en."),
    ),
    _function(
        "browse_webpage",
        "Return the text of one web page.",
        ["url"],
        url=_text("Address of the page."),
    ),
)
NAMES: Final = tuple(str(tool["function"]["name"]) for tool in TOOLS)


class ArgumentError(Exception):
    """Arguments that the tool cannot take; the text is for the agent."""


def arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call, checked; what was left out has its default, "" for a text.

    A limit beyond 1..10 is moved to the nearest end. Arguments that the tool does not have are ignored.

    Raises:
        ArgumentError: no such tool, or an argument is missing or of the wrong kind.
    """
    if name == "search_papers":
        return {"query": _query(given), "limit": _limit(given.get("limit", DEFAULT_LIMIT))}
    if name == "google_search":
        return {"query": _query(given), "gl": _code(given, "gl"), "hl": _code(given, "hl")}
    if name == "read_paper":
        return {"pdf_url": _required(given, "pdf_url", _URL_CHARS)}
    if name == "browse_webpage":
        return {"url": _required(given, "url", _URL_CHARS)}
    raise ArgumentError(f"there is no tool {name[:40]!r}; the tools are {', '.join(NAMES)}")


def _required(given: Mapping[str, Any], name: str, longest: int) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ArgumentError(f'the argument "{name}" is missing or not a text')
    if len(value) > longest:
        raise ArgumentError(f'the argument "{name}" is longer than {longest} characters')
    return value.strip()


def _query(given: Mapping[str, Any]) -> str:
    return " ".join(_required(given, "query", _QUERY_CHARS).split())


def _limit(value: Any) -> int:
    whole = isinstance(value, float) and value.is_integer()
    if isinstance(value, bool) or not (whole or isinstance(value, int)):
        raise ArgumentError(f'the argument "limit" is not a whole number from 1 to {MAX_LIMIT}')
    return min(max(int(value), 1), MAX_LIMIT)


def _code(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if value is None or value == "":
        return ""
    if not isinstance(value, str) or not _CODE.fullmatch(value):
        raise ArgumentError(f'the argument "{name}" is no code such as us or en')
    return value.lower()
