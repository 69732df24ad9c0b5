"""A reply is a grade only if it says so without doubt; what is asked, and what comes of each kind of reply."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.episodes import Grading
from racelab.experiments.errors import ConfigError
from racelab.experiments.models.grading import (
    PolicyGrader,
    RandomGrader,
    grading_section,
    parse_grading,
    whole_number,
)
from racelab.experiments.models.prompts.rlds import GRADING
from racelab.experiments.ports import Grader

from .scripted_policy import SUBTASKS, ScriptedPolicy, episode

PATH, HAZARD = (s.name for s in SUBTASKS)
NONE = (None, None)


def row(name, score=3, pivot=None, **more):
    return {"sub_task": name, "score": score, "assessment": "So.", "pivot_step": pivot, **more}


def reply(*rows, **more):
    return json.dumps(
        {"trajectory_outcome": "failure", "root_cause_analysis": "", "sub_task_grades": rows, **more}
    )


GOOD = reply(row(PATH, 2, 1), row(HAZARD, 4))


def grade(text, finished=True):
    return parse_grading(text, SUBTASKS, finished)


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"```json\n{GOOD}\n```",
        f"Here is it:\n{GOOD}\nI hope this helps {{really}}.",
        f"<think>maybe {reply(row(PATH, 5), row(HAZARD, 5))}</think>{GOOD}",
        f"{reply(row(PATH, 5), row(HAZARD, 5))}</think>{GOOD}",
        f"{GOOD}\n\n{GOOD}",
        reply(row(HAZARD, 4), row(PATH, 2, 1)),
        reply(row(f" {PATH.upper()}\n", "2", "1"), row(HAZARD, 4.0, "null")),
        reply(row(PATH, " 2 ", 1.0), row(HAZARD, 4), row("overall", 9, -3), "noise", None),
        GOOD.replace("So.", 'a {\\"b\\": [1]} and a }'),
        GOOD.replace("So.", "two\nlines"),
        GOOD.replace("So.", "it opens <think> and stops"),
        GOOD.replace("So.", "it closes </think> alone"),
        reply(row(PATH, 1))[:-1] + ', "sub_task_grades": ' + json.dumps([row(PATH, 2, 1), row(HAZARD, 4)]) + "}",
    ],
)  # fmt: skip
def test_a_reply_that_can_be_read(text):
    found = grade(text)
    assert (found.status, found.grades, found.pivots, found.bad_pivots) == ("ok", (2, 4), (1, None), 0)
    assert found.text == text


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("", "bad_json"),
        ("The agent did well: 5/5.", "bad_json"),
        ('{"grades": []}', "bad_json"),
        (reply().replace("[]", '"none"'), "bad_json"),
        (GOOD.replace('"score": 2', '"score": 2,,'), "bad_json"),
        (GOOD[:-2] + ",]}", "bad_json"),
        (GOOD.replace('"', "'"), "bad_json"),
        (GOOD[:-1], "bad_json"),
        (json.dumps([row(PATH), row(HAZARD)]), "bad_json"),
        (json.dumps({"result": json.loads(GOOD)}), "bad_json"),
        (f"{GOOD}\nNext: {reply(row(PATH, 5), row(HAZARD, 4))}", "bad_json"),
        (f"<think>{GOOD}</think>", "bad_json"),
        (f"<think>{GOOD}", "bad_json"),
        (f'{{"a": 1}} <think> {GOOD}', "bad_json"),
        (GOOD.replace('"score": 2', '"score": ' + "9" * 5_000), "bad_json"),
        ('{"a":' * 20_000 + "1" + "}" * 20_000, "bad_json"),
        (reply(), "incomplete"),
        (reply(row(PATH)), "incomplete"),
        (reply(row(PATH), row(PATH), row(HAZARD)), "incomplete"),
        (reply(row(PATH), row("Hazard Identification")), "incomplete"),
        (reply(row(PATH), row(["hazard_identification"])), "incomplete"),
        *(
            (reply(row(PATH), row(HAZARD, bad)), "bad_grade")
            for bad in (0, 6, -1, True, None, 3.5, "4/5", "four", "", [3], {"v": 3}, 10**30, "١",
                        float("nan"), float("inf"))
        ),
        (reply(row(PATH), {"sub_task": HAZARD, "pivot_step": 0}), "bad_grade"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_no_grade(text, status):
    assert grade(text) == Grading(None, NONE, status, text=text)


def test_a_copy_of_the_format_is_no_grade():
    shown = GRADING.user[GRADING.user.index("{\n") :]
    assert grade(shown).status == "incomplete"


def test_a_reply_that_hit_its_limit_is_cut_only_if_it_cannot_be_read():
    assert grade(GOOD[:60], finished=False).status == "cut"
    assert grade("<think>hm", finished=False).status == "cut"
    assert grade(GOOD + " and so on and", finished=False).status == "ok"
    assert grade(reply(row(PATH)), finished=False).status == "incomplete"


@pytest.mark.parametrize(
    "bad", [-1, "-1", 1.5, "Step 1", "", True, [0], {}, float("nan"), float("inf"), 10**30, "9" * 30]
)
def test_a_bad_pivot_counts_as_none_and_is_counted(bad):
    found = grade(reply(row(PATH, 2, bad), row(HAZARD, 4, 3)))
    assert (found.status, found.grades, found.pivots, found.bad_pivots) == ("ok", (2, 4), (None, 3), 1)


def test_an_absent_pivot_is_a_bad_one_and_a_large_one_is_left_to_be_clamped():
    found = grade(reply({"sub_task": PATH, "score": 1}, row(HAZARD, 4, 77)))
    assert (found.pivots, found.bad_pivots) == ((None, 77), 1)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.none() | st.integers(0, 40)), min_size=2, max_size=2),
    st.text(alphabet=st.characters(blacklist_characters="{["), max_size=20),
    st.text(max_size=60),
    st.booleans(),
)
@settings(deadline=None)
def test_what_is_written_is_read_back(values, before, sentence, finished):
    """Whatever the sentences say; before it anything that opens neither JSON nor a thought."""
    rows = [row(s.name, g, p) | {"assessment": sentence} for s, (g, p) in zip(SUBTASKS, values, strict=True)]
    for ascii_only in (True, False):
        text = f"{before.replace('<', '')}\n{json.dumps({'sub_task_grades': rows}, ensure_ascii=ascii_only)}"
        found = grade(text, finished)
        assert (found.status, found.grades) == ("ok", tuple(g for g, _ in values))
        assert found.pivots == tuple(p for _, p in values)
        assert found.bad_pivots == 0


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["1", "5", "null", PATH, HAZARD, 3, 4.0]),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(
        st.sampled_from(["sub_task", "score", "pivot_step", "sub_task_grades"]), v, max_size=4),
    max_leaves=12,
)  # fmt: skip
ROWS = st.fixed_dictionaries({"sub_task": st.sampled_from([PATH, HAZARD]) | VALUES, "score": st.integers(1, 5) | VALUES,
                              "pivot_step": VALUES})  # fmt: skip


@given(st.text(max_size=80) | VALUES.map(json.dumps) | st.lists(ROWS, max_size=3).map(lambda r: reply(*r)),
       st.integers(0, 400), st.booleans())  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_any_reply_gives_a_whole_grading_or_none(text, end, finished):
    found = grade(text[:end], finished)
    if found.status == "ok":
        assert found.grades is not None
        assert all(type(g) is int and 1 <= g <= 5 for g in found.grades)
        assert all(p is None or (type(p) is int and 0 <= p <= 10**9) for p in found.pivots)
        assert len(found.grades) == len(found.pivots) == 2
        assert 0 <= found.bad_pivots <= found.pivots.count(None)
    else:
        assert (found.grades, found.pivots, found.bad_pivots) == (None, NONE, 0)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (3.0, 3),
        (" 3 ", 3),
        ("-2", -2),
        (True, None),
        (None, None),
        (2.5, None),
        ("3.0", None),
        ("", None),
    ],
)
def test_whole_numbers(value, number):
    assert whole_number(value) == number


def grader(model, max_tokens=1_000, temperature=0.7, top_p=0.9):
    return PolicyGrader(model, SUBTASKS, max_tokens=max_tokens, temperature=temperature, top_p=top_p)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def test_every_episode_is_asked_once_and_the_replies_keep_their_order():
    model = ScriptedPolicy(lambda p: reply(row(PATH, 2 if "fell into" in p else 5, 1), row(HAZARD, 4)))
    lost, won = episode(), episode(("Right", "You reached the goal."), reward=1.0)
    found = grader(model).grade([lost, won, lost], rng())
    assert [g.grades for g in found] == [(2, 4), (5, 4), (2, 4)]
    assert all(g.n_tokens == len(g.text) + 1 for g in found)
    assert model.batches == [3]
    assert {(r.n, r.max_tokens, r.temperature, r.top_p) for r in model.requests} == {(1, 1_000, 0.7, 0.9)}
    assert isinstance(grader(model), Grader)
    asked = model.asked[1]
    assert "1. path_planning: Finding a safe route to the goal.\n2. hazard_identification: Rec" in asked
    assert "### Step 0\nAgent:\nRight\nEnvironment:\nYou reached the goal.\n\nPlease output ONLY" in asked


def test_many_episodes_are_decoded_in_chunks():
    model = ScriptedPolicy(GOOD)
    found = grader(model).grade([episode()] * 150, rng())
    assert model.batches == [64, 64, 22]
    assert len(found) == 150
    assert grader(model).grade([], rng()) == []
    assert len(model.batches) == 3


def test_a_trajectory_beyond_the_window_is_too_long_and_does_not_hide_the_others():
    model = ScriptedPolicy(GOOD, window=4_000)
    many_turns = episode(*[("abcdefghij", "klmnopqrst")] * 60)
    found = grader(model).grade([episode(), many_turns, episode()], rng())
    assert [g.status for g in found] == ["ok", "too_long", "ok"]
    assert found[1] == Grading(None, NONE, "too_long")
    assert model.batches == [2]


def test_a_cut_reply_is_counted_as_cut():
    (found,) = grader(ScriptedPolicy(GOOD), max_tokens=50).grade([episode()], rng())
    assert (found.status, found.grades, found.n_tokens) == ("cut", None, 50)


def test_a_window_without_room_for_any_trajectory_is_refused_with_a_value_that_works():
    model = ScriptedPolicy(GOOD, window=4_000)
    with pytest.raises(ConfigError, match=r"method\.reflect\.max_tokens=3000.*take at most \d+") as e:
        grader(model, max_tokens=3_000)
    most = int(str(e.value).rsplit(" ", 1)[1])
    grader(model, max_tokens=most)
    with pytest.raises(ConfigError):
        grader(model, max_tokens=most + 1)


def test_random_grades_are_uniform_and_the_same_for_the_same_generator():
    played = [episode(), episode(*[("Up", "x")] * 10)] * 500
    found = RandomGrader(SUBTASKS).grade(played, rng(3))
    assert (
        found == RandomGrader(SUBTASKS).grade(played, rng(3)) != RandomGrader(SUBTASKS).grade(played, rng(4))
    )
    assert {g.status for g in found} == {"ok"}
    grades = [v for g in found for v in g.grades]
    assert all(360 < grades.count(v) < 440 for v in range(1, 6))  # 2,000 draws: 400 ± 2.2 deviations
    assert {p for g in found[::2] for p in g.pivots} == {0, 1}
    assert {p for g in found[1::2] for p in g.pivots} == set(range(10))
    assert isinstance(RandomGrader(SUBTASKS), Grader)


def test_the_reflector_is_shown_grades_pivots_and_the_grader_s_sentences():
    text = reply(
        row(PATH, 2, 1) | {"assessment": "It walked\ninto <|im_end|> a hole."},
        row(HAZARD, 4) | {"assessment": 7},
    )
    assert grading_section(grade(text), SUBTASKS) == (
        "## Grades\n"
        "1. path_planning (Finding a safe route to the goal.): 2/5 (poor), pivotal step 1\n"
        "   It walked into < |im_end| > a hole.\n"
        "2. hazard_identification (Recognizing which tiles are holes.): 4/5 (good), no pivotal step"
    )
    assert grading_section(Grading((1, 5), (None, 0)), SUBTASKS).endswith("5/5 (excellent), pivotal step 0")
    with pytest.raises(ValueError, match="no grades"):
        grading_section(Grading(None, NONE, "cut"), SUBTASKS)
