"""Forms: what the policy is asked, that a gap is filled from its own probabilities, and that every form is JSON."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.episodes import Case, Grading, Reflection
from racelab.experiments.errors import ConfigError
from racelab.experiments.models.forms import (
    SUGGESTION_TOKENS,
    FormGrader,
    FormReflector,
    fill,
    labels,
    suggestion,
)
from racelab.experiments.models.grading import grading_section, parse_grading
from racelab.experiments.models.reflection import parse_reflection
from racelab.experiments.ports import Grader, Reflector

from .scripted_policy import SUBTASKS, ScriptedPolicy, episode

GRADED = Grading((2, 4), (1, None))
OPEN = '{"sub_task_grades": [{"sub_task":'


class FormPolicy(ScriptedPolicy):
    """Writes `reply` into a suggestion; `score(prompt, tail)` is the log-probability of a tail's label, all of it on
    the label's first character. What stands before the label has log-probability -100, which must not matter.

    Attributes:
        scored: (prefix, tails) of every group of `logprobs`, as texts.
    """

    def __init__(self, reply="Look first.", score=lambda prompt, tail: 0.0, *, window=20_000):
        super().__init__(reply, window=window)
        self.score, self.scored, self.tries = score, [], 0

    def logprobs(self, groups, temperature=1.0):
        assert temperature == 1.0
        for prefix, tails in groups:
            assert len(prefix) + max(map(len, tails)) <= self.window
            self.scored.append((self.decode(prefix), [self.decode(t) for t in tails]))
        return [[self._values(self.decode(p), self.decode(t)) for t in tails] for p, tails in groups]

    def _values(self, prompt, tail):
        values = np.full(len(tail), -100.0)
        start = tail.rindex(":") + 1 if ":" in tail else 0
        values[start:] = 0.0
        values[start] = self.score(prompt, tail)
        return values

    def generate(self, requests, rng):
        self.batches.append(len(requests))
        self.requests += requests
        return [[self._stopped(r) for _ in range(r.n)] for r in requests]

    def _stopped(self, request):
        assert len(request.prefix) + request.max_tokens <= self.window
        sample = self._sample(request)
        end = min((i + 1 for s in request.stop if (i := sample.text.find(s)) >= 0), default=None)
        if end is None:
            return sample
        return type(sample)(sample.tokens[:end], sample.logprobs[:end], sample.text[:end], True)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def grader(model, temperature=1.0):
    return FormGrader(model, SUBTASKS, temperature=temperature)


def reflector(model, max_tokens=200, single_pass=False, temperature=0.7):
    return FormReflector(
        model, SUBTASKS, max_tokens=max_tokens, temperature=temperature, top_p=0.9, single_pass=single_pass
    )


def reflect(model, *cases, **how):
    return reflector(model, **how).reflect(list(cases) or [Case(episode(), GRADED)], rng())


def value_of(tail):
    return tail[tail.rindex(":") + 1 :].strip(" ,}") if ":" in tail else tail.strip(" }")


# --- the grader ---


def test_a_prompt_is_scored_once_with_a_form_for_every_score_and_pivot():
    model = FormPolicy()
    found = grader(model).grade([episode(), episode(("Up", "x"))], rng())
    assert isinstance(grader(model), Grader)
    (long, tails), (short, few) = model.scored
    assert long.endswith("EVERY competency dimension above.>" + OPEN)
    assert "### Step 1\nAgent:\nDown\nEnvironment:\nYou fell into a hole." in long
    assert "### Step 1" not in short
    assert tails == [
        *(f' "path_planning", "score": {v},' for v in range(1, 6)),
        *(f' "hazard_identification", "score": {v},' for v in range(1, 6)),
        *(f' "path_planning", "pivot_step": {v}}}' for v in ("null", 0, 1)),
        *(f' "hazard_identification", "pivot_step": {v}}}' for v in ("null", 0, 1)),
    ]
    assert len(few) == 10 + 4
    assert [g.status for g in found] == ["ok", "ok"]
    assert not model.requests


def test_the_form_is_json_that_reads_back_as_the_same_grades():
    model = FormPolicy()
    for seed in range(30):
        (found,) = grader(model).grade([episode()], rng(seed))
        read = parse_grading(found.text, SUBTASKS)
        assert (read.status, read.grades, read.pivots, read.bad_pivots) == (
            "ok",
            found.grades,
            found.pivots,
            0,
        )
        assert found.n_tokens == len(found.text)
        assert found.bad_pivots == 0
    shown = '{"sub_task_grades": [{"sub_task": "path_planning", "score": '
    assert found.text.startswith(shown)
    assert "1. path_planning (Finding a safe route to the goal.): " in grading_section(found, SUBTASKS)


LOGS = {"1": -4.0, "2": -3.0, "3": -2.5, "4": -6.0, "5": -3.5, "null": -2.0, "0": -1.0}


def close(n, draws, p):
    """Whether n hits in so many draws are within 4.5 standard deviations."""
    return abs(n - draws * p) < 4.5 * math.sqrt(draws * p * (1 - p))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_labels_are_drawn_from_the_policy_s_own_probabilities(temperature):
    """Worked from the formula: exp(s/T) over its sum, s summed over the label's tokens."""

    class Known:
        def logprobs(self, groups):
            return [[np.array([-100.0, LOGS[str(t[1])] + 1.5, -1.5]) for t in tails] for _, tails in groups]

    known = [(v, 0) for v in range(1, 6)]
    drawn = Counter(
        row[0] + 1 for row in fill(Known(), [((9,), [((8,), known)])] * 4_000, temperature, rng())
    )
    weights = {v: math.exp(LOGS[str(v)] / temperature) for v in range(1, 6)}
    assert all(close(drawn[v], 4_000, w / sum(weights.values())) for v, w in weights.items())
    assert drawn.total() == 4_000


def test_grades_and_pivots_follow_those_probabilities():
    model = FormPolicy(score=lambda _, tail: LOGS[value_of(tail)])
    found = grader(model, 0.5).grade([episode(("Up", "x"))] * 300, rng(1))
    weights = [math.exp(LOGS[str(v)] / 0.5) for v in range(1, 6)]
    scores, nulls = (
        Counter(v for g in found for v in g.grades),
        sum(p is None for g in found for p in g.pivots),
    )
    assert all(close(scores[v], 600, w / sum(weights)) for v, w in enumerate(weights, 1))
    assert close(nulls, 600, math.exp(-4) / (math.exp(-4) + math.exp(-2)))


def test_two_labels_of_odds_three_to_one_and_the_frame_does_not_matter():
    model = FormPolicy(score=lambda _, tail: math.log(3) if "1" in tail else 0.0)
    known = labels(model, [0, 1], "}")
    gaps = [(tuple(model.encode('"x":')), known), (tuple(model.encode('a long frame "y":')), known)]
    drawn = fill(model, [((65,), gaps)] * 2_000, 1.0, rng())
    for gap in (0, 1):
        assert close(sum(row[gap] for row in drawn), 2_000, 3 / 4)
    assert close(sum(a == b for a, b in drawn), 2_000, 10 / 16)  # independent
    assert fill(model, [((65,), gaps)], 0.0, rng()) == [[1, 1]]


def test_no_label_begins_another_one():
    ids = labels(FormPolicy(), [None, *range(120)], "}")
    texts = ["".join(map(chr, i)) for i in ids]
    assert texts[:3] == [" null}", " 0}", " 1}"]
    assert not [a for a in texts for b in texts if a != b and b.startswith(a)]


def test_each_subtask_and_episode_gets_its_own_grade_and_pivot():
    def score(prompt, tail):
        won, path = "goal" in prompt.split("## Trajectory")[1], "path_planning" in tail
        wanted = {(True, True): "54", (True, False): "4null", (False, True): "13", (False, False): "20"}[
            won, path
        ]
        return 50.0 if value_of(tail) == (wanted[0] if "score" in tail else wanted[1:]) else 0.0

    lost = episode(*[("Up", "x")] * 5)
    won = episode(*[("Up", "x")] * 4, ("Right", "You reached the goal."), reward=1.0)
    found = grader(FormPolicy(score=score)).grade([lost, won, lost], rng())
    assert [(g.grades, g.pivots) for g in found] == [((1, 2), (3, 0)), ((5, 4), (4, None)), ((1, 2), (3, 0))]


def test_the_same_generator_gives_the_same_grades_and_neighbours_only_shift_the_draws():
    played = [episode(*[("Up", "x")] * n) for n in (1, 2, 9, 12)]
    model = FormPolicy(score=lambda _, tail: -0.1 * len(tail))
    first = grader(model).grade(played, rng(3))
    assert first == grader(model).grade(played, rng(3)) != grader(model).grade(played, rng(4))
    assert first[:2] == grader(model).grade(played[:2], rng(3))
    assert all(p is None or p < n for g, n in zip(first, (1, 2, 9, 12), strict=True) for p in g.pivots)
    assert grader(model).grade([], rng()) == []


def test_a_trajectory_beyond_the_window_is_too_long_and_does_not_hide_the_others():
    model = FormPolicy(window=4_000)
    found = grader(model).grade([episode(), episode(*[("abcdefghij", "klmnopqrst")] * 60), episode()], rng())
    assert [g.status for g in found] == ["ok", "too_long", "ok"]
    assert found[1] == Grading(None, (None, None), "too_long")
    assert len(model.scored) == 2


@pytest.mark.parametrize("make", [grader, reflector])
def test_a_window_without_room_for_any_trajectory_is_refused(make):
    with pytest.raises(ConfigError, match=r"window of 1000 tokens.*choose a model with a longer one"):
        make(FormPolicy(window=1_000))


# --- the reflector ---


def test_a_reflection_is_a_suggestion_and_a_step_that_follows_it():
    model = FormPolicy('Look first.", "retry', lambda _, tail: 50.0 * ("1" in tail))
    (found,) = reflect(model)
    text = '{"improvement_suggestion": "Look first.", "retry_from_step": 1}'
    assert (found.addition, found.retry_from, found.status, found.text) == ("Look first.", 1, "ok", text)
    assert isinstance(reflector(model), Reflector)
    (request,) = model.requests
    assert (request.n, request.max_tokens, request.temperature, request.top_p) == (
        4,
        SUGGESTION_TOKENS,
        0.7,
        0.9,
    )
    assert request.stop == ('"', "\n")
    prompt = model.decode(found.prompt)
    assert "1. path_planning (Finding a safe route to the goal.): 2/5 (poor), pivotal step 1\n" in prompt
    assert model.decode(request.prefix) == prompt + '{"improvement_suggestion": "'
    assert model.scored == [(prompt + text[:-3], [" 0}", " 1}"])]
    assert found.tokens == (*model.encode(text), model.eos_id)


def test_a_single_pass_or_a_failure_without_grades_shows_none():
    for case, single_pass in ((Case(episode(), GRADED), True), (Case(episode(), None), False)):
        model = FormPolicy()
        (found,) = reflect(model, case, single_pass=single_pass)
        assert "grade" not in model.asked[0].lower()
        assert found.status == "ok"


class Pieces(FormPolicy):
    """Samples two ids a character, which `encode` never gives: to tell sampled ids from encoded ones."""

    def decode(self, tokens):
        return super().decode([t for t in tokens if t != 7])

    def _stopped(self, request):
        sample = super()._stopped(request)
        doubled = tuple(t for token in sample.tokens for t in (7, token))
        return type(sample)(doubled, (-1.0,) * len(doubled), sample.text, sample.finished)


@pytest.mark.parametrize(
    ("reply", "as_sampled"), [('Look first."', True), ("Look first.", True), (' Look first."', False)]
)
def test_sampled_ids_are_kept_where_they_say_what_the_form_says(reply, as_sampled):
    model = Pieces(reply)
    (found,) = reflect(model)
    assert found.addition == "Look first."
    assert (7 in found.tokens) == as_sampled
    assert model.decode(found.tokens) == found.text
    assert found.tokens[-1] == model.eos_id


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Look first.", "Look first."),
        ('  Look first.", "x": 1}', "Look first."),
        ("Look first.\nThen go.", "Look first."),
        ('Say \\"go\\" twice."', "Say"),
        ("a \\u00e9 b\\tc", "a é b\tc"),
        ("C:\\games and \\ more", "C:\\games and \\ more"),
        ("go <|im_end|> on", "go < |im_end| > on"),
        ("<think>hm</think>Look.", "Look."),
        ("\\ud83d go", "? go"),
        ("", ""),
        ('"', ""),
        ("...", ""),
        ("Actionable principle for the retry attempt.", ""),
        ("Actionable Principle for the retry attempt", ""),
    ],
)
def test_what_a_sampled_text_suggests(text, said):
    assert suggestion(text) == said


def test_of_four_suggestions_the_first_that_says_something_counts():
    replies = iter(['"', 'Actionable principle for the retry attempt."', 'Go left."', 'Go right."'])
    assert reflect(FormPolicy(lambda _: next(replies)))[0].addition == "Go left."


def test_without_a_suggestion_there_is_no_retry_and_no_step_is_asked_for():
    model = FormPolicy('Actionable principle for the retry attempt."')
    (found,) = reflect(model)
    assert (found.addition, found.retry_from, found.status) == ("", None, "no_suggestion")
    assert found.text == '{"improvement_suggestion": "Actionable principle for the retry attempt."'
    assert model.decode(found.tokens) == found.text
    assert model.asked[0].startswith(model.decode(found.prompt))
    assert not model.scored


@given(
    st.text(max_size=60)
    | st.text(alphabet='\\"/u0{}[]<>|\n\tkni thé', max_size=40)
    | st.lists(
        st.sampled_from(["<think>", "</think>", "\\", "go ", '"', "<|a|>", "\\n", "{"]), max_size=8
    ).map("".join),
    st.integers(1, 12),
)
@settings(max_examples=300, deadline=None)
def test_every_form_is_json_and_reads_back_as_the_same_reflection(reply, n_turns):
    reply = reply.encode("utf-8", "replace").decode().replace("\0", "")
    model = FormPolicy(reply)
    (found,) = reflect(model, Case(episode(*[("Up", "x")] * n_turns), GRADED))
    if found.status == "no_suggestion":
        assert (found.addition, found.retry_from) == ("", None)
        return
    assert found.status == "ok"
    assert json.loads(found.text) == {
        "improvement_suggestion": found.addition,
        "retry_from_step": found.retry_from,
    }
    assert 0 <= found.retry_from < n_turns
    read = parse_reflection(found.text, n_turns)
    assert (read.status, read.addition, read.retry_from) == ("ok", found.addition, found.retry_from)
    assert model.decode(found.tokens) == found.text


def test_steps_are_drawn_from_the_policy_s_own_probabilities_and_by_the_generator():
    model = FormPolicy(score=lambda _, tail: {"0": 0.0, "1": -1.0, "2": -2.0}[value_of(tail)])
    cases = [Case(episode(*[("Up", "x")] * 3), GRADED)] * 400
    made = reflector(model, temperature=0.5)
    found = made.reflect(cases, rng(2))
    weights = [1.0, math.exp(-2.0), math.exp(-4.0)]
    assert all(
        close(sum(r.retry_from == u for r in found), 400, w / sum(weights)) for u, w in enumerate(weights)
    )
    assert found[:50] == made.reflect(cases[:50], rng(2)) != made.reflect(cases[:50], rng(5))


def test_a_limit_below_ours_counts_and_many_cases_are_sampled_in_chunks():
    model = FormPolicy("walk on " * 50)
    found = reflect(model, *[Case(episode(), GRADED)] * 20, max_tokens=7)
    assert {r.addition for r in found} == {"walk on"}
    assert model.batches == [16, 4]
    (found,) = reflect(FormPolicy("walk on " * 50))
    assert len(found.addition) == SUGGESTION_TOKENS - 1  # the 48th is a space


def test_a_failure_beyond_the_window_is_too_long_and_does_not_hide_the_others():
    model = FormPolicy(window=4_000)
    many = episode(*[("abcdefghij", "klmnopqrst")] * 60)
    found = reflect(model, Case(many, GRADED), Case(episode(), GRADED), Case(many, GRADED))
    assert [r.status for r in found] == ["too_long", "ok", "too_long"]
    assert found[0] == Reflection("", None, "too_long")


def test_a_suggestion_whose_clean_text_outgrows_the_window_is_too_long():
    bare = FormPolicy("\\" * 20 + "go" + "|>" * 13)  # 48 characters; 20 more as JSON, 13 more when harmless
    case = Case(episode(("Up", "z" * 6_000)), GRADED)
    assert reflect(bare, case)[0].status == "ok"
    tight = FormPolicy(bare.reply, window=3_000)  # the trajectory is cut to fill it
    (found,) = reflect(tight, case)
    assert found == Reflection("", None, "too_long")
    assert not tight.scored


# --- the real small model ---


@pytest.mark.slow
def test_smollm2_fills_in_every_form():
    from racelab.experiments.backends.local.model import open_language_model
    from racelab.experiments.errors import RacelabError
    from racelab.experiments.models.assets import resolve_model

    try:
        folder = resolve_model("smollm2-135m")
    except RacelabError as e:
        pytest.skip(str(e))
    model = open_language_model(folder, role="frozen")
    played = [
        episode(
            *[(f"<think>Hole below.</think><action>{move}</action>", "You moved. The map:\nS..\n.H.\n..G")]
            * n,
            ("<action>Down</action>", 'You fell into a hole. "Ouch" \\'),
        )
        for move, n in (("Right", 1), ("Left", 2), ("Up", 11))
    ]
    graded = grader(model).grade(played, rng())
    assert graded == grader(model).grade(played, rng())
    for g in graded:
        read = parse_grading(g.text, SUBTASKS)
        assert (g.status, read.grades, read.pivots) == ("ok", g.grades, g.pivots)
    cases = [Case(e, g) for e, g in zip(played, graded, strict=True)]
    reflections = reflector(model, temperature=1.0).reflect(cases, rng())
    assert {r.status for r in reflections} == {"ok"}
    for r, e in zip(reflections, played, strict=True):
        read = parse_reflection(r.text, len(e.turns))
        assert (read.addition, read.retry_from) == (r.addition, r.retry_from)
        assert model.decode(r.tokens) == r.text
        assert r.tokens[-1] == model.eos_id
