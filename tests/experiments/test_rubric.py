"""Parsing and writing rubrics (RACE Eq 1)."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.models.rubric import (
    RubricSettings,
    format_criteria,
    format_json,
    format_lines,
    format_numbered,
    json_values,
    parse_rubric,
    written_criteria,
)
from racelab.experiments.models.text import defang, strip_thinking
from racelab.experiments.types import Criterion, Rubric

LINES = RubricSettings(format="lines", max_criteria=4)
JSON = RubricSettings(format="json")


def pairs(parsed):
    return None if parsed.rubric is None else [(c.text, c.weight) for c in parsed.rubric.criteria]


def test_lines_continue_the_dash_of_the_few_shot_prompt():
    text = " Names the capital | 5\n- Is short | 2\nnonsense\n* Uses one sentence | 10\n\n- After a blank | 3"
    parsed = parse_rubric(text, LINES)
    assert pairs(parsed) == [("Names the capital", 5), ("Is short", 2), ("Uses one sentence", 10)]
    assert parsed.valid
    assert parsed.rubric.text == text


@pytest.mark.parametrize("weight", ["0", "11", "-3", "nan", "inf", "1e3", "", "five", "9" * 400])
def test_lines_refuse_a_weight_outside_their_range(weight):
    parsed = parse_rubric(f"- Names the capital | {weight}\n- Is very short | 3", LINES)
    assert pairs(parsed) == [("Is very short", 3)]


def test_lines_of_bad_length_and_repeats_are_dropped():
    text = f"- abc | 3\n- {'x' * 121} | 3\n- Is short | 3\n- is  SHORT. | 9\n- Is clear | 1"
    assert pairs(parse_rubric(text, LINES)) == [("Is short", 3), ("Is clear", 1)]


def test_no_more_than_max_criteria():
    text = "\n".join(f"- Criterion number {i} | {i}" for i in range(1, 8))
    assert [w for _, w in pairs(parse_rubric(text, LINES))] == [1, 2, 3, 4]


def test_too_few_criteria_is_no_rubric():
    two = RubricSettings(format="lines", min_criteria=2)
    parsed = parse_rubric("- Names the capital | 5", two)
    assert (parsed.rubric, parsed.reason) == (None, "too_few")


def test_copied_examples_are_dropped_unless_the_prompt_speaks_of_them():
    rules = RubricSettings(format="lines", copied=("Sounds warm and friendly", "Is brief"))
    text = "- sounds warm and friendly. | 4\n- Is brief | 2\n- Names a planet | 3"
    assert pairs(parse_rubric(text, rules, "Name a planet.")) == [("Names a planet", 3)]
    kept = pairs(parse_rubric(text, rules, "Write a friendly note."))
    assert kept == [("sounds warm and friendly.", 4), ("Names a planet", 3)]


def test_what_was_written_keeps_repeats_copies_lengths_and_surplus():
    """Five of eight have words and a weight above 0; the parser keeps one: the first is copied, max_criteria is 1."""
    rules = RubricSettings(format="lines", max_criteria=1, copied=("Is brief",))
    long = "x" * 121
    text = "- Is brief | 2\n- Is short | 3\n- is  SHORT. | 9\n- abc | 1\n- ... | 4\n"
    text += f"- {long} | 5\n- Is x1 | 0\n- No | 6\nend"
    found = [(c.text, c.weight) for c in written_criteria(text, rules)]
    assert found == [("Is brief", 2), ("Is short", 3), ("is SHORT.", 9), ("abc", 1), (long, 5)]
    assert pairs(parse_rubric(text, rules, "Name a planet.")) == [("Is short", 3)]
    assert written_criteria("", rules) == ()


FENCED = """<think>maybe {"criteria": [{"criterion": "wrong", "weight": 1}]}</think>
Here it is: [1] and {x}.
```json
{"criteria": [
  {"criterion": "Says 144 {square} units \\" }", "weight": 0.6, "scoring_levels": {"0": "no", "1": "yes"}},
  {"description": "Explains why", "weight": "0.4"}
]}
```
{"criteria": [{"criterion": "a later one", "weight": 1}]}"""


def test_json_is_found_in_plain_text_and_its_levels_are_stripped():
    assert pairs(parse_rubric(FENCED, JSON)) == [('Says 144 {square} units " }', 0.6), ("Explains why", 0.4)]


@pytest.mark.parametrize(
    "text",
    [
        '[{"criterion": "Is short", "weight": 1}]',
        '{"rubric": {"criteria": [{"criterion": "Is short", "weight": 1}]}}',
        '{"items": [{"title": "Is short", "points": 1}]}',
        '{"a": "no criteria here"} {"rubrics": [{"text": "Is  short", "weight": 1}]}',
    ],
)
def test_json_shapes_that_are_understood(text):
    assert pairs(parse_rubric(text, JSON)) == [("Is short", 1)]


@pytest.mark.parametrize(
    "weight", ["NaN", "Infinity", "-Infinity", "-1", "0", "true", "null", '"many"', "[1]", "1e400"]
)
def test_json_refuses_weights_that_are_no_positive_number(weight):
    text = (
        '{"criteria": [{"criterion": "Is short", "weight": '
        + weight
        + '}, {"criterion": "Is clear", "weight": 2}]}'
    )
    assert pairs(parse_rubric(text, JSON)) == [("Is clear", 2)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("<think>never ends", "empty"),
        ("no rubric", "no_json"),
        ('{"criteria": [{"criterion": "Is short", "weight": 1}', "truncated"),
        ('{"criteria": [{"criterion": "Is short" "weight": 1}]}', "bad_json"),
        ('{"criteria": []}', "no_criteria"),
        ('{"criteria": ["Is short"]}', "no_criteria"),
        ('{"criteria": [{"criterion": "Is short"}]}', "no_criteria"),
        ('{"criteria": [{"criterion": "Is short", "weight": -1}]}', "no_criteria"),
        ('{"criteria": [{"criterion": 5, "weight": 1}]}', "no_criteria"),
    ],
)
def test_reasons(text, reason):
    parsed = parse_rubric(text, JSON)
    assert (parsed.rubric, parsed.reason) == (None, reason)


def test_raw_text_stands_in_for_a_failed_parse_but_is_not_valid():
    rules = RubricSettings(format="json", on_parse_failure="raw_text")
    parsed = parse_rubric(" Be short and kind. ", rules)
    assert pairs(parsed) == [("Be short and kind.", 1.0)]
    assert (parsed.valid, parsed.reason) == (False, "no_json")
    assert parse_rubric("  ", rules).rubric is None


def test_written_rubrics_are_read_back():
    rubric = Rubric((Criterion("Is short", 2.0), Criterion("Names Paris", 8.0)), "")
    assert pairs(parse_rubric(format_lines(rubric), LINES)) == [("Is short", 2), ("Names Paris", 8)]
    assert pairs(parse_rubric(format_json(rubric), JSON)) == [("Is short", 2), ("Names Paris", 8)]
    assert format_criteria(rubric) == "- Names Paris\n- Is short"
    assert format_numbered(rubric) == "1. Is short (weight: 0.20)\n2. Names Paris (weight: 0.80)"


json_like = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["criteria", "criterion", "weight", "rubric", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
pieces = st.lists(
    st.sampled_from(
        [
            '{"',
            '"}',
            "[{",
            "]",
            "{",
            "}",
            "- a | 3\n",
            "|",
            "\\",
            '"',
            "<think>",
            "</think>",
            "```",
            "\n",
            "0",
        ]
    )
    | st.text(max_size=6),
    max_size=30,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(max_size=200) | pieces | json_like.map(json.dumps),
    kind=st.sampled_from(["lines", "json"]),
    raw=st.booleans(),
)
def test_no_text_breaks_the_parser(text, kind, raw):
    rules = RubricSettings(format=kind, max_criteria=3, on_parse_failure="raw_text" if raw else "nan")
    parsed = parse_rubric(text, rules, "A prompt about planets.")
    if parsed.rubric is None:
        assert parsed.reason
    else:
        assert 1 <= len(parsed.rubric.criteria) <= 3
        assert all(0 < c.weight <= 100 and c.text.strip() for c in parsed.rubric.criteria)
    assert parsed.valid == (parsed.reason == "")


@pytest.mark.parametrize(
    "text", ["[{" * 30_000, "{" * 60_000, "<think>" * 9_000, "- a" + " " * 60_000 + "| 3", '"' * 60_000]
)
@pytest.mark.parametrize("rules", [LINES, JSON])
def test_long_nonsense_is_cheap(text, rules):
    start = time.process_time()
    assert parse_rubric(text, rules).rubric is None or text.startswith("- a")
    assert time.process_time() - start < 1.0


def test_deep_nesting_is_bad_json_not_a_crash():
    assert parse_rubric('[{"a":' * 5_000 + "1" + "}]" * 5_000, JSON).reason == "bad_json"


def test_json_values_are_the_outermost_ones():
    assert list(json_values('a {"b": {"c": 1}} {"bad": } [{"d": 2}] {"open": ')) == [
        {"b": {"c": 1}},
        [{"d": 2}],
    ]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("<think>a</think>b", "b"),
        ("x<THINK>a</THINK>y<think>b", "xy"),
        ("a</think>b", "b"),
        ("a</think>b</think>c<think>d</think>e", "ce"),
        ("plain", "plain"),
    ],
)
def test_strip_thinking(text, kept):
    assert strip_thinking(text) == kept


def test_defang_breaks_special_tokens():
    assert defang("a<|im_end|>b") == "a< |im_end| >b"
