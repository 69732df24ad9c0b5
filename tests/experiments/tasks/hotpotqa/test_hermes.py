"""Tool calls in Hermes format."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.tasks.hermes import (
    ToolCall,
    ToolCallError,
    parse_tool_calls,
    tool_response,
    without_tool_calls,
)

GOOD = '<tool_call>\n{"name": "search", "arguments": {"query": "who", "top_k": 3}}\n</tool_call>'
CALL = ToolCall("search", {"query": "who", "top_k": 3})


def test_a_call_with_text_around_it() -> None:
    assert parse_tool_calls(f"I look it up.\n{GOOD}\nthen") == [CALL]
    assert without_tool_calls(f"before{GOOD}after") == "beforeafter"


def test_a_reply_without_a_call() -> None:
    assert parse_tool_calls("The answer is \\boxed{7}.") == []
    assert without_tool_calls("plain") == "plain"


def test_a_last_block_without_end_tag_counts_as_closed() -> None:
    assert parse_tool_calls(GOOD.removesuffix("</tool_call>")) == [CALL]
    assert without_tool_calls("a" + GOOD.removesuffix("</tool_call>")) == "a"


def test_several_calls_keep_their_order_and_their_errors() -> None:
    found = parse_tool_calls(f"{GOOD}{GOOD.replace('who', 'why')}<tool_call>nonsense</tool_call>")
    assert found[:2] == [CALL, ToolCall("search", {"query": "why", "top_k": 3})]
    assert isinstance(found[2], ToolCallError)


@pytest.mark.parametrize(
    ("block", "word"),
    [
        ("", "not valid JSON"),
        ("{'name': 'search'}", "not valid JSON"),
        ('{"name": "search", "arguments": {"query": "a"}', "not valid JSON"),
        ('{"name": "search", "arguments": {"top_k": NaN}}', "not valid JSON"),
        ('{"name": "search", "arguments": {}} and more', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "s", "arguments": {"n": ' + "9" * 5000 + "}}", "not valid JSON"),
        ('["search"]', "not a JSON object"),
        ('{"arguments": {}}', '"name"'),
        ('{"name": 3, "arguments": {}}', '"name"'),
        ('{"name": "search"}', '"arguments"'),
        ('{"name": "search", "arguments": "query"}', '"arguments"'),
    ],
)
def test_what_cannot_be_read_says_what_to_write(block: str, word: str) -> None:
    [found] = parse_tool_calls(f"<tool_call>{block}</tool_call>")
    assert isinstance(found, ToolCallError)
    assert word in found.message
    assert '"arguments"' in found.message
    assert "\n" not in found.message


@pytest.mark.parametrize("depth", [200, 600, 900, 100_000])
def test_arguments_nested_too_deeply_are_a_mistake_of_the_agent(depth: int) -> None:
    value = "[" * depth + "]" * depth
    [found] = parse_tool_calls(f'<tool_call>{{"name": "s", "arguments": {{"a": {value}}}}}</tool_call>')
    if depth == 200:
        assert isinstance(found, ToolCall)
    elif depth == 100_000 or not isinstance(found, ToolCall):  # in between, Python's version decides
        assert isinstance(found, ToolCallError)
        assert "nested too deeply" in found.message


def test_lone_surrogates_are_replaced() -> None:
    [found] = parse_tool_calls(r'<tool_call>{"name": "s", "arguments": {"query": ["a\ud800"]}}</tool_call>')
    assert found == ToolCall("s", {"query": ["a\ufffd"]})


def test_a_response_cannot_be_ended_by_its_content() -> None:
    assert tool_response("[1] A b") == "<tool_response>\n[1] A b\n</tool_response>"
    assert tool_response("x</tool_response>y").count("</tool_response>") == 1
    assert "<|im_end|>" not in tool_response("x<|im_end|>y")


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8), st.integers())
)
def test_what_json_writes_is_read_back(arguments: dict[str, int]) -> None:
    text = json.dumps({"name": "tool", "arguments": arguments})
    assert parse_tool_calls(f"<tool_call>{text}</tool_call>") == [ToolCall("tool", arguments)]


_PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "{", "}", chr(34) + "name" + chr(34), ":", "a", "\\", "\n"]
)


@given(st.lists(_PIECES, max_size=30).map("".join))
def test_nothing_an_agent_writes_raises(text: str) -> None:
    parse_tool_calls(text)
    without_tool_calls(text)
