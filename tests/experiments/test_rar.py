"""RaR: its checklist, its three aggregations, its tries."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.methods.baselines.rar import PREDEFINED, explicit_weight, rar
from racelab.experiments.models.chat import ChatRequest
from racelab.experiments.models.prompts.rar import PROPOSE
from racelab.experiments.models.proposals import RarItem, read_rar

from .scripted_chat import G, ScriptedChat, World, calls, method_config, parts

ROWS: list[dict[str, Any]] = [
    {"title": "Answer", "description": "Essential: Names the number 42.", "weight": 5},
    {"title": "Reason", "description": "Important Criteria: Says why.", "weight": 3},
    {"title": "Size", "description": "Optional - Is one sentence.", "weight": "1"},
    {"title": "Slip", "description": "Pitfall Criteria: Names 41.", "weight": -2},
    {"title": "Tone", "description": "Is friendly.", "weight": 2},
]
CHECKLIST = json.dumps(ROWS)
TEXTS = [
    "Essential: Names the number 42.",
    "Important Criteria: Says why.",
    "Optional - Is one sentence.",
    "Avoids: Names 41.",
    "Is friendly.",
]


def method(world: World, chat: Any, *overrides: str) -> Any:
    return rar(method_config("rar", *overrides), parts(world, chat), policy_updates=9, max_steps=None)


def test_a_checklist_is_read_with_categories_and_a_pitfall_in_its_positive_reading():
    items = read_rar(f"<think>[1]</think>Sure:\n```json\n{CHECKLIST}\n```", 1, 20)
    assert items is not None
    assert [i.text for i in items] == TEXTS
    assert [i.weight for i in items] == [5, 3, 1, 2, 2]
    assert [i.category for i in items] == ["essential", "important", "optional", "pitfall", ""]
    assert [i.negative for i in items] == [False, False, False, True, False]


def test_explicit_weights_are_those_of_the_category():
    items = read_rar(CHECKLIST, 1, 20)
    assert items is not None
    assert [explicit_weight(i) for i in items] == [1.0, 0.7, 0.3, 0.9, 0.7]
    assert explicit_weight(RarItem("essential", "Avoids: x", 2.0, negative=True)) == 0.9
    assert explicit_weight(RarItem("pitfall", "Avoids: x", 2.0)) == 0.9


@pytest.mark.parametrize(
    "row",
    [
        {"description": "Essential: Says why."},
        {"description": "Essential: Says why.", "weight": 0},
        {"description": "Essential: Says why.", "weight": True},
        {"description": "Essential: Says why.", "weight": "much"},
        {"description": "Essential: Says why.", "weight": 1e400},
        {"description": "Essential: Says why.", "weight": 101},
        {"description": "Essential:", "weight": 5},
        {"title": "Why", "weight": 5},
        ["Essential: Says why.", 5],
        {"description": "Essential: " + "why " * 300, "weight": 5},
    ],
)
def test_an_item_without_text_or_weight_is_left_out(row):
    assert read_rar(json.dumps([row]), 1, 20) is None
    both = read_rar(json.dumps([row, ROWS[0]]), 1, 20)
    assert both is not None
    assert [i.text for i in both] == TEXTS[:1]


def test_number_of_items():
    assert read_rar(CHECKLIST, 6, 20) is None
    assert [i.text for i in read_rar(json.dumps({"rubric": {"items": ROWS}}), 5, 3) or ()] == TEXTS[:3]
    assert read_rar(json.dumps(ROWS + ROWS), 6, 20) is None  # repeated items count once
    assert read_rar(CHECKLIST[:-1], 1, 20) is None  # cut
    assert read_rar("- Essential: Names 42 (5)", 1, 20) is None


def test_of_equal_items_the_first_counts():
    again = {"description": "essential:  names the number 42", "weight": 1}
    items = read_rar(json.dumps([*ROWS, again]), 5, 20)
    assert items is not None
    assert [(i.text, i.weight) for i in items] == list(zip(TEXTS, [5, 3, 1, 2, 2], strict=True))


KEYS = st.sampled_from(["items", "description", "weight"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
)


@given(st.text(max_size=300) | JSON.map(json.dumps))
def test_reading_never_raises_and_weights_are_positive(text):
    items = read_rar(text, 1, 20)
    assert items is None or all(0 < i.weight <= 100 and i.text for i in items)


def test_implicit_is_one_judge_call_an_answer_under_the_whole_checklist():
    """Table 14: one rubric a prompt and G answer scores."""
    world, chat = World(lambda texts, i: i / 4, prompts=2), ScriptedChat(lambda r: CHECKLIST)
    m = method(world, chat)
    state, record = m.step(m.start())
    assert [r.user for r in chat.requests] == [PROPOSE.render(prompt=f"Explain matter {i}") for i in range(2)]
    for item in world.judged:
        assert item.rubric is not None
        assert [(c.text, c.weight) for c in item.rubric.criteria] == list(
            zip(TEXTS, [5, 3, 1, 2, 2], strict=True)
        )
    assert calls(record, "rubric_gen") == (2, 2, 2)
    assert calls(record, "judge_eval") == (2 * G, 2 * G, 2 * G)
    assert record.metrics["health/cost_mismatch"] == 0
    assert record.tables["groups"][0]["rewards"] == [0, 0.25, 0.5, 0.75]
    _, second = m.step(state)
    assert calls(second, "rubric_gen") == (0, 0, 2)


def test_explicit_is_a_share_by_category_weights():
    """Weights 1, .7, .3, .9, .7 sum to 3.6.

    Answer 0 has nothing: 0. Answer 1 has 42 and avoids 41: 1.9/3.6 = 19/36. Answer 2 says why and is friendly:
    1.4/3.6 = 7/18. Answer 3 has everything: 1.
    """
    has = [set(), {0, 3}, {1, 4}, {0, 1, 2, 3, 4}]
    world = World(lambda texts, i: 0.5 if TEXTS.index(texts[0]) in has[i] else 0.49)
    m = method(world, ScriptedChat(lambda r: CHECKLIST), "method.aggregation=explicit")
    _, record = m.step(m.start())
    assert record.tables["groups"][0]["rewards"] == pytest.approx([0, 19 / 36, 7 / 18, 1], abs=1e-12)
    assert calls(record, "judge_eval") == (2 * 5 * G, 2 * 5 * G, 2 * 5 * G)
    assert calls(record, "rubric_gen") == (2, 2, 2)
    assert record.metrics["health/cost_mismatch"] == 0


def test_predefined_asks_nobody_for_a_rubric():
    """Four items of equal weight; answer i satisfies the first i of them: i/4."""
    order = [c.text for c in PREDEFINED.criteria]
    world = World(lambda texts, i: float(order.index(texts[0]) < i))
    m = method(world, None, "method.aggregation=predefined")
    state, record = m.step(m.start())
    assert record.tables["groups"][0]["rewards"] == [0, 0.25, 0.5, 0.75]
    assert calls(record, "judge_eval") == (2 * 4 * G, 2 * 4 * G, 2 * 4 * G)
    assert calls(record, "rubric_gen") == (0, 0, 0)
    assert "cost/calls/external_calls" not in record.metrics
    assert record.metrics["health/cost_mismatch"] == 0
    assert m.load(json.loads(json.dumps(state.state()))) == state


def test_what_cannot_be_read_is_asked_again_with_another_draw():
    """p0 replies well at the third try, p1 never: 3 + 3 rubrics; the next time p1 has the draws 3, 4, 5."""

    def reply(request: ChatRequest) -> str | None:
        if "matter 0" in request.user and request.draw == 2:
            return CHECKLIST
        return None if request.draw % 2 else '[{"title": "cut'

    world, chat = World(lambda texts, i: i / 4, prompts=2), ScriptedChat(reply, remember=True)
    m = method(world, chat)
    state, record = m.step(m.start())
    assert [[r.draw for r in batch] for batch in chat.batches] == [[0, 0], [1, 1], [2, 2]]
    assert calls(record, "rubric_gen") == (6, 6, 2)
    assert calls(record, "external_calls") == (6, 6, 2)
    assert calls(record, "judge_eval") == (G, G, 2 * G)
    assert [g["rewards"] for g in record.tables["groups"]] == [[0, 0.25, 0.5, 0.75], [None] * G]
    assert [(r["n_criteria"], r["tries"]) for r in record.tables["static_rubrics"]] == [(5, 3), (0, 3)]
    assert record.metrics["health/cost_mismatch"] == 0
    state, record = m.step(state)
    assert [r.draw for batch in chat.batches[3:] for r in batch] == [3, 4, 5]
    assert (dict(state.drawn), calls(record, "rubric_gen")) == ({"p1": 6}, (3, 3, 2))


def test_items_of_a_rubric_that_is_not_there_cost_no_judge_call():
    m = method(World(lambda texts, i: 1.0), ScriptedChat(lambda r: None), "method.aggregation=explicit")
    _, record = m.step(m.start())
    assert record.tables["groups"][0]["rewards"] == [None] * G
    assert calls(record, "judge_eval") == (0, 0, 0)
    assert record.metrics["health/cost_mismatch"] == 0


def test_a_judge_that_is_away_gives_no_reward():
    world = World(lambda texts, i: float("nan"))
    m = method(world, ScriptedChat(lambda r: CHECKLIST), "method.aggregation=explicit")
    _, record = m.step(m.start())
    assert record.tables["groups"][0]["rewards"] == [None] * G
    assert record.metrics["health/judge_infra_fail"] == 2 * 5 * G
    assert record.metrics["health/cost_mismatch"] == 0
