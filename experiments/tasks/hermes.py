"""Tool calls in Hermes format, as the chat templates of Qwen and others write them (RLDS App. B and D.2).

    <tool_call>
    {"name": "search", "arguments": {"query": "who wrote the iliad", "top_k": 3}}
    </tool_call>

A call that cannot be read is a `ToolCallError`, whose message is meant for the agent: it says what to write instead.
A last block without its end tag counts as closed, since an engine may stop before the tag instead of after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from racelab.experiments.models.text import defang

_OPEN: Final = "<tool_call>"
STOP: Final = "</tool_call>"
"""The string that ends a reply with a call."""
_SHAPE: Final = '{"name": "<tool>", "arguments": {...}}'
_TOO_DEEP: Final = "it is nested too deeply"
_END_OF_RESPONSE: Final = re.compile(r"</(?=tool_response>)", re.IGNORECASE)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that could be read; whether there is such a tool, and such arguments, is the environment's to say.

    Attributes:
        name: of the tool.
        arguments: JSON values by name; texts hold no lone surrogates (they are no Unicode and cannot be sent).
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCallError:
    """A call that could not be read.

    Attributes:
        message: one line for the agent.
    """

    message: str


def parse_tool_calls(text: str) -> list[ToolCall | ToolCallError]:
    """Every `<tool_call>` block of a reply, in order; [] if there is none.

    A block ends at its end tag, at the next start tag, or with the reply.
    """
    blocks = text.split(_OPEN)[1:]
    return [_parse(block.partition(STOP)[0]) for block in blocks]


def without_tool_calls(text: str) -> str:
    """The reply without its `<tool_call>` blocks: what stands inside them is an argument, not an answer."""
    head, *blocks = text.split(_OPEN)
    return head + "".join(block.partition(STOP)[2] for block in blocks)


def tool_response(text: str) -> str:
    """A tool's answer as the templates render it, for a user turn.

    What a page or passage says cannot end the response or the turn: its end tags and special tokens are broken up.
    """
    return f"<tool_response>\n{_END_OF_RESPONSE.sub('< /', defang(text))}\n</tool_response>"


def _parse(block: str) -> ToolCall | ToolCallError:
    try:
        value = json.loads(block.strip(), parse_constant=_no_constant)
    except ValueError as error:
        why = (
            f"{error.msg} at character {error.pos}"
            if isinstance(error, json.JSONDecodeError)
            else "no number"
        )
        return _invalid(why)
    except RecursionError:
        return _invalid(_TOO_DEEP)
    if not isinstance(value, dict):
        return ToolCallError(f"the tool call is not a JSON object; write {_SHAPE}")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCallError(f'the tool call has no "name"; write {_SHAPE}')
    if not isinstance(arguments, dict):
        return ToolCallError(f'the "arguments" of the tool call are not a JSON object; write {_SHAPE}')
    try:
        return ToolCall(_unicode(name), {_unicode(k): _unicode(v) for k, v in arguments.items()})
    except RecursionError:  # json goes deeper than a function in Python can
        return _invalid(_TOO_DEEP)


def _invalid(why: str) -> ToolCallError:
    return ToolCallError(f"the tool call is not valid JSON ({why}); write {_SHAPE} between the tags")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _unicode(value: Any) -> Any:
    r"""Lone surrogates (JSON's `"\ud800"`) replaced, at any depth."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_unicode(v) for v in value]
    if isinstance(value, dict):
        return {_unicode(k): _unicode(v) for k, v in value.items()}
    return value
