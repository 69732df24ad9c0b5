"""Rubric and reward-model raters on scripted models: what is asked, what is retried, what is kept apart."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from racelab.experiments.errors import UnreachableError
from racelab.experiments.evaluation.preference.examiner import RatingExaminer
from racelab.experiments.evaluation.preference.judgebench import JudgeBench
from racelab.experiments.evaluation.preference.raters import RewardModelRater, RubricRater, Writing
from racelab.experiments.evaluation.preference.rating import Item, Plan, Rater
from racelab.experiments.evaluation.preference.rewardbench2 import RewardBench2
from racelab.experiments.evaluation.types import Answer, Examiner
from racelab.experiments.models.chat import Calls, Reply
from racelab.experiments.models.judge_api import ApiJudge, ApiJudgeSettings
from racelab.experiments.models.judge_prompted import JsonJudge, JsonSettings
from racelab.experiments.models.prompts.templates import RUBRIC_JSON, RUBRIC_LINES
from racelab.experiments.models.rubric import RubricSettings
from racelab.experiments.types import JudgeScores, Sample

NAN = math.nan
LINES = Writing(
    RUBRIC_LINES,
    RubricSettings("lines", copied=RUBRIC_LINES.examples, on_parse_failure="raw_text"),
    max_tokens=50,
    temperature=1.0,
    top_p=0.95,
    retry_temperatures=(0.6, 0.3),
    budgets={"short": 7},
)
GOOD = " Names the planet | 3\n- Is short | 1"
ITEMS = [Item(f"i{k}", f"Name planet {k}.", ("good", "bad")) for k in range(3)]


class ScriptedSubject:
    """Answers by a function of (prompt, temperature); None is an answer that never came."""

    def __init__(self, say=lambda prompt, temperature: GOOD, order=lambda wanted: wanted):
        self.say, self.order, self.asked = say, order, []

    def describe(self):
        return {}

    def answers(self, asks, wanted, purpose):
        self.asked.append((list(asks), list(wanted), purpose))
        for i in self.order(list(wanted)):
            text = self.say(asks[i].user, asks[i].temperature)
            yield i, (Answer(text, text is not None, 3, "" if text is not None else "HTTP 500"),)

    def close(self):
        raise AssertionError("its opener closes it")


class ByWord:
    """1.0 for a response that holds `good`, else 0.0; NaN for `odd`."""

    def __init__(self):
        self.items = []

    def score(self, items):
        self.items.append(list(items))
        return JudgeScores(tuple(self._row(item) for item in items))

    @staticmethod
    def _row(item):
        value = {"good": 1.0, "bad": 0.0} if item.rubric else {}
        return np.array([value.get(r.text, NAN) for r in item.responses])

    def describe(self):
        return {"kind": "word"}


def rater(subject=None, judge=None, writing=LINES, **more):
    return RubricRater(subject or ScriptedSubject(), judge or ByWord(), writing, name="word/judge", **more)


def rate(made, items=ITEMS, wanted=None, plan=Plan(), purpose="bench"):  # noqa: B008
    return dict(made.rate(items, list(range(len(items))) if wanted is None else wanted, plan, purpose))


def test_the_rubric_is_written_without_seeing_the_responses():
    subject, judge = ScriptedSubject(), ByWord()
    made = rater(subject, judge)
    assert isinstance(made, Rater)
    found = rate(made, wanted=[0, 2])
    assert {i: r.scores for i, r in found.items()} == {0: ((1.0, 0.0),), 2: ((1.0, 0.0),)}
    ((asks, wanted, purpose),) = subject.asked
    assert (len(asks), wanted, purpose) == (3, [0, 2], "bench:rubric:0")
    ask = asks[0]
    assert ask.user == RUBRIC_LINES.render(prompt="Name planet 0.")
    assert (ask.layout, ask.stop, ask.system, ask.max_tokens) == ("text", RUBRIC_LINES.stop, None, 50)
    assert (ask.temperature, ask.top_p, ask.n) == (1.0, 0.95, 1)
    ((item,), _) = judge.items
    assert [c.text for c in item.rubric.criteria] == ["Names the planet", "Is short"]
    assert json.loads(json.dumps(made.describe()))["judge"] == {"kind": "word"}


def test_prompts_cannot_end_a_turn_and_budgets_hold():
    subject = ScriptedSubject()
    writing = Writing(RUBRIC_JSON, RubricSettings("json"), 50, 1.0, 1.0, budgets={"short": 7}, thinking=True)
    rate(rater(subject, writing=writing), [Item("x", "so <|im_end|>", ("a", "b"))], purpose="short")
    (ask,) = subject.asked[0][0]
    assert "so < |im_end| >" in ask.user
    assert (ask.layout, ask.system, ask.max_tokens, ask.thinking) == ("chat", RUBRIC_JSON.system, 7, True)


def test_copied_examples_are_no_criteria_and_thinking_is_stripped():
    copied = " Thanks the neighbour | 5\n- Names the planet | 3"
    judge = ByWord()
    made = rater(ScriptedSubject(lambda p, t: f"<think>hm</think>{copied}"), judge)
    rate(made, [Item("x", "Name it.", ("<think>bad</think>good", "bad"))])
    ((item,),) = judge.items
    assert [c.text for c in item.rubric.criteria] == ["Names the planet"]
    assert [r.text for r in item.responses] == ["good", "bad"]


def test_rubrics_that_cannot_be_read_are_asked_for_again():
    """Item 0 is read at once, item 1 at the second try, item 2 never: its last try is used as it stands."""

    def say(prompt, temperature):
        if "planet 0." in prompt or ("planet 1." in prompt and temperature == 0.3):
            return GOOD
        return f"no rubric at {temperature}"

    subject, judge = ScriptedSubject(say), ByWord()
    found = rate(rater(subject, judge), plan=Plan(games=2, retry=True), purpose="short")
    assert [(wanted, purpose) for _, wanted, purpose in subject.asked] == [
        ([0, 1, 2], "short:rubric:0"),
        ([1, 2], "short:rubric:1"),
    ]
    assert [asks[0].temperature for asks, _, _ in subject.asked] == [0.6, 0.3]
    assert all(len(asks) == 3 and asks[0].max_tokens == 7 for asks, _, _ in subject.asked)
    assert all(r.scores == ((1.0, 0.0), (1.0, 0.0)) for r in found.values())
    rubrics = [[row for row in found[i].rows if row["role"] == "rubric"] for i in range(3)]
    assert [len(rows) for rows in rubrics] == [1, 2, 2]
    assert [row["idx"] for row in rubrics[2]] == [0, 1]
    assert rubrics[2][-1]["error"] == "no_criteria"
    assert rubrics[1][-1]["extracted"] == "- Names the planet | 3\n- Is short | 1"
    (last,) = [item for batch in judge.items for item in batch if item.prompt.prompt_id == "i2"]
    assert [c.text for c in last.rubric.criteria] == ["no rubric at 0.3"]


def test_without_retries_the_first_try_is_used_and_an_empty_one_scores_nothing():
    subject = ScriptedSubject(lambda p, t: "" if "planet 1." in p else "raw words")
    found = rate(rater(subject))
    assert len(subject.asked) == 1
    assert found[0].scores == ((1.0, 0.0),)
    assert np.isnan(found[1].scores).all()
    assert found[1].lost == ""
    assert found[1].rows[0]["error"] == "empty"


def test_a_rubric_that_never_came_loses_the_item():
    subject = ScriptedSubject(lambda p, t: None if "planet 1." in p else GOOD)
    found = rate(rater(subject), plan=Plan(retry=True))
    assert (found[1].lost, found[1].scores) == ("HTTP 500", ())
    assert found[1].rows[0]["error"] == "HTTP 500"
    assert found[0].lost == found[2].lost == ""


class Drawing:
    """A language model whose reply is drawn from the generator that it is given; counts its batches."""

    eos_id, window = 0, 9000

    def __init__(self):
        self.batches = []

    def encode(self, text):
        return [ord(c) for c in text]

    def chat(self, user, system=None):
        return self.encode(f"{system}{user}>")

    def generate(self, requests, rng):
        self.batches.append(len(requests))
        drawn = torch.randint(101, (len(requests),), generator=rng).tolist()
        return [[Sample((1, 2), (), f'{{"score": {n}}}', True)] for n in drawn]


def test_the_second_game_of_a_judge_that_samples_is_another_draw():
    model = Drawing()
    judge = JsonJudge(model, settings=JsonSettings(temperature=0.6))
    found = rate(rater(judge=judge), plan=Plan(games=2))
    assert model.batches == [2] * 6
    assert all(r.scores[0] != r.scores[1] for r in found.values())
    again = rate(rater(judge=judge), wanted=[1], plan=Plan(games=2))
    assert again[1] == found[1]  # whatever else is wanted
    shuffled = rate(rater(ScriptedSubject(order=lambda w: w[::-1]), judge), plan=Plan(games=2))
    assert shuffled == found  # in whatever order the rubrics come


def test_a_greedy_judge_of_this_process_is_asked_once():
    model = Drawing()
    found = rate(rater(judge=JsonJudge(model)), plan=Plan(games=2))
    assert model.batches == [2] * 3
    assert all(r.scores[0] == r.scores[1] for r in found.values())
    rows = [row for row in found[0].rows if row["role"] == "judge"]
    assert [row["idx"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["text"].startswith('{"score"')
    assert (rows[0]["n_tokens"], rows[0]["score"]) == (2, found[0].scores[0][0])


class ScriptedChat:
    def __init__(self, reply):
        self.reply, self.calls, self.batches = reply, Calls(), []

    def complete(self, requests):
        self.batches.append(list(requests))
        return [self.reply(r) for r in requests]

    def describe(self):
        return {"kind": "scripted", "model": "m"}


def answer_of(request):
    return request.user.split("grade:\n")[1].split("\n")[0]


def test_a_server_is_asked_for_several_items_at_once_and_for_both_games():
    chat = ScriptedChat(lambda r: Reply('{"score": 50}'))
    found = rate(rater(judge=ApiJudge(chat), together=2), plan=Plan(games=2))
    assert [len(b) for b in chat.batches] == [4, 4, 2, 2]
    assert [{r.draw for r in b} for b in chat.batches] == [{0}, {1}, {0}, {1}]
    assert found[2].scores == ((0.5, 0.5), (0.5, 0.5))


def test_a_reply_without_a_score_is_no_lost_call():
    def reply(request):
        return Reply(None, False, error="HTTP 503") if "planet 1." in request.user else Reply("hm")

    examiner = RatingExaminer(
        JudgeBench(),
        JudgeBench().read(
            (f"f:{k}", {"pair_id": str(k), "source": "livecodebench", "question": f"Name planet {k}.",
             "response_A": "good", "response_B": "bad", "label": "A>B"}) for k in range(2)
        ),
        rater(judge=ApiJudge(ScriptedChat(reply))),
    )  # fmt: skip
    unread, lost = examiner.examine(frozenset({"0", "1"}))
    (mark,) = unread.marks
    assert (mark.status, mark.score, mark.judge) == ("unparsed", 0.0, "word/judge")
    assert mark.details["games"] == [[None, None], [None, None]]
    assert [row["error"] for row in unread.answers] == ["", *["no score"] * 4]
    (mark,) = lost.marks
    assert (mark.status, mark.judge) == ("lost", "word/judge")
    assert math.isnan(mark.score)
    assert lost.answers[-1]["error"] == "HTTP 503"


def test_a_server_that_is_gone_ends_the_evaluation():
    def gone(request):
        raise UnreachableError("no server")

    made = rater(judge=ApiJudge(ScriptedChat(gone), ApiJudgeSettings(strict=True)))
    with pytest.raises(UnreachableError):
        rate(made)


def records(n=3):
    for k in range(n):
        yield f"f.jsonl:{k}", {
            "id": str(k), "prompt": f"Name planet {k}.", "chosen": ["good"], "rejected": ["bad", "odd", "bad"],
            "subset": "Focus",
        }  # fmt: skip


def test_the_examiner_marks_what_is_wanted():
    bench = RewardBench2()
    examples = bench.read(records())
    examiner = RatingExaminer(bench, examples, rater())
    assert isinstance(examiner, Examiner)
    assert (examiner.name, len(examiner.examples)) == ("rewardbench2", 3)
    found = list(examiner.examine(frozenset({"Focus/0", "Focus/2"})))
    assert [e.example.example_id for e in found] == ["Focus/0", "Focus/2"]
    (mark,) = found[0].marks
    assert (mark.label, mark.score, mark.status, mark.judge) == ("rewardbench2", 1.0, "scored", "word/judge")
    assert mark.details == {"right": [1.0], "wrong": [0.0, None, 0.0], "credit": 1.0}
    assert [row["role"] for row in found[0].answers] == ["rubric", *["judge"] * 4]
    assert {frozenset(row) for row in found[0].answers} == {
        frozenset({"idx", "role", "text", "finished", "n_tokens", "extracted", "score", "error"})
    }
    assert not list(examiner.examine(frozenset()))


class Length:
    """The logit is the response's length; a response of more than 5 letters is too long."""

    def logits(self, prompts, responses):
        return [np.array([float(len(s.text)) if len(s.text) < 6 else NAN for s in ys]) for ys in responses]

    def describe(self):
        return {"kind": "classifier"}


def test_a_reward_model_rates_without_a_rubric():
    made = RewardModelRater(Length(), name="reward-model/length")
    assert isinstance(made, Rater)
    found = rate(made, [Item("x", "Say.", ("<think>", "ab", "abc"))], plan=Plan(games=2))
    assert [s.tolist() for s in np.array(found[0].scores)] == [
        [pytest.approx(NAN, nan_ok=True), 2.0, 3.0]
    ] * 2
    assert [row["error"] for row in found[0].rows] == [
        "the conversation is longer than the reward model's window", "", "",
    ]  # fmt: skip
    assert {row["role"] for row in found[0].rows} == {"judge"}
    assert made.describe() == {"kind": "reward-model", "judge": {"kind": "classifier"}}
