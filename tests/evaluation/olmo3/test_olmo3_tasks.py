"""Six tasks of olmo3-adapt: what is asked, what is right, wrong or unreadable, and every quirk on and off."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.errors import DataError
from racelab.experiments.evaluation.data import read_local
from racelab.experiments.evaluation.olmo3.agieval import AgiEval
from racelab.experiments.evaluation.olmo3.bbh import Bbh
from racelab.experiments.evaluation.olmo3.common import TaskSettings
from racelab.experiments.evaluation.olmo3.gpqa import Gpqa, cleaned
from racelab.experiments.evaluation.olmo3.gsm8k import Gsm8k
from racelab.experiments.evaluation.olmo3.mmlu import Mmlu
from racelab.experiments.evaluation.olmo3.popqa import SHOTS, PopQa
from racelab.experiments.evaluation.types import Answer, Benchmark

PLAIN = TaskSettings()
GSM8K = {"question": "How many?", "answer": "3 * 4 = <<3*4=12>>12\n#### 1,212"}
MMLU = {
    "subject": "high_school_physics",
    "question": "Which?",
    "choices": ["one", "two", "six", "ten"],
    "answer": 1,
}
GPQA = {
    "Question": "Why? ",
    "Correct Answer": " right [title] one ",
    "Incorrect Answer 1": "w1 [note]",
    "Incorrect Answer 2": "w2  b",
    "Incorrect Answer 3": None,
    "Record ID": "rec1",
    "High-level domain": "Physics",
}
AGIEVAL = {
    "task": "lsat-ar",
    "passage": "Six\n\n\nmen.",
    "question": "Who is (A)first?",
    "options": ["(A)Ann", "(B) Bob", "C. Cy", "Dan"],
    "label": "B",
    "answer": None,
}
JOINED = {
    "task": "sat-math",
    "query": "Q: What is 1+1? Answer Choices: (A)1 (B)2\nA: Among A through B, the answer is",
    "choices": ["(A)1", "(B)2"],
    "gold": [1],
}
BBH = {"task": "snarks", "input": "Which?\nOptions:\n(A) x\n(B) y", "target": "(B)"}
POPQA = {"id": 17, "question": "Who?", "prop": "author", "possible_answers": '["Jules VERNE", "jv-1"]'}
ALL = [
    (Gsm8k, GSM8K),
    (Mmlu, MMLU),
    (Gpqa, GPQA),
    (AgiEval, AGIEVAL),
    (AgiEval, JOINED),
    (Bbh, BBH),
    (PopQa, POPQA),
]


def one(task, record):
    (example,) = task.read([("d.jsonl:1", record)])
    return example


def mark(task, record, text):
    (found,) = task.mark(one(task, record), [Answer(text, n_tokens=3)]).marks
    return found


def score(task, record, text):
    found = mark(task, record, text)
    return found.score, found.status


def test_what_is_asked_for_a_sum():
    ask = Gsm8k(PLAIN).ask(one(Gsm8k(PLAIN), GSM8K))
    assert ask.user == (
        "Solve the following grade school math word problem:\nHow many?\n\n"
        'Show your work and conclude with "Therefore, the final answer is \\boxed{answer}." where answer is just the '
        "final number that solves the problem. E.g., if the answer is 6, conclude with "
        '"Therefore, the final answer is \\boxed{6}."'
    )
    assert (ask.n, ask.temperature, ask.top_p, ask.max_tokens) == (1, 0.6, 0.95, 131072)
    assert (ask.system, ask.stop, ask.layout, ask.thinking) == (None, (), "chat", None)


def test_sums():
    task = Gsm8k(PLAIN)
    assert one(task, GSM8K).fields["gold"] == "1212"
    right = mark(task, GSM8K, r"9 </think> Therefore, the final answer is \boxed{1,212}.")
    assert (right.label, right.score, right.status) == ("gsm8k", 1.0, "scored")
    assert right.details == {"exact_match_flex": 1.0, "exact_match": 1.0, "format": 1.0}
    loose = mark(task, GSM8K, "So it costs $1212")  # a bare number: right, but not as asked
    assert loose.details == {"exact_match_flex": 1.0, "exact_match": 0.0, "format": 0.1}
    assert score(task, GSM8K, r"the answer is \boxed{1212 apples}") == (0.0, "scored")
    assert score(task, GSM8K, r"the answer is \boxed{1213}") == (0.0, "scored")
    assert score(task, GSM8K, "I give up") == (0.0, "unparsed")


def test_sums_and_thinking():
    """The number before the tag counts only where the thinking is kept; a second tag cuts again."""
    text = "1212 </think> no idea"
    assert score(Gsm8k(PLAIN), GSM8K, text) == (0.0, "unparsed")
    assert score(Gsm8k(TaskSettings(thinking="keep")), GSM8K, text) == (1.0, "scored")
    assert score(Gsm8k(PLAIN), GSM8K, "</think> 1212 </think> no idea") == (0.0, "unparsed")


def test_sums_below_zero():
    """Unsigned, the gold -5 reads 5: the boxed -5 is then wrong and a bare -5 right."""
    record = {"question": "x", "answer": "#### -5"}
    on, off = Gsm8k(TaskSettings(quirks=frozenset({"gsm8k-unsigned"}))), Gsm8k(PLAIN)
    assert (one(on, record).fields["gold"], one(off, record).fields["gold"]) == ("5", "-5")
    assert [score(task, record, r"the answer is \boxed{-5}")[0] for task in (on, off)] == [0.0, 1.0]
    assert [score(task, record, r"the answer is \boxed{5}")[0] for task in (on, off)] == [1.0, 0.0]
    assert [score(task, record, "it is -5")[0] for task in (on, off)] == [1.0, 1.0]


def test_a_files_name_stands_for_the_subject_of_mmlu(tmp_path):
    bare = {key: value for key, value in MMLU.items() if key != "subject"}
    (tmp_path / "anatomy.jsonl").write_text(json.dumps(bare) + "\n")
    (tmp_path / "own.jsonl").write_text(json.dumps({**MMLU, "subject": "marketing"}) + "\n")
    examples = Mmlu(PLAIN).read(read_local(str(tmp_path), "eval.data.mmlu"))
    assert [example.domain for example in examples] == ["anatomy", "marketing"]
    with pytest.raises(DataError, match="'subject'"):
        Mmlu(PLAIN).read([("f:1", bare)])


def test_mmlu():
    task = Mmlu(PLAIN)
    example = one(task, MMLU)
    assert (example.example_id, example.domain) == ("high_school_physics-0", "high_school_physics")
    assert task.ask(example).user == (
        "The following are multiple choice questions about high school physics. Summarize your reasoning concisely, "
        "then conclude with 'Therefore, the answer is: X' where X is one of A, B, C, or D.\n\n"
        "Question: Which?\n A. one\n B. two\n C. six\n D. ten\n"
    )
    assert score(task, MMLU, "(A) </think> Therefore, the answer is: B") == (1.0, "scored")
    assert score(task, MMLU, "Therefore, the answer is: (b).") == (1.0, "scored")
    assert score(task, MMLU, "Therefore, the answer is: C") == (0.0, "scored")
    assert score(task, MMLU, "no clue") == (0.0, "unparsed")
    assert score(task, MMLU, "") == (0.0, "unparsed")
    assert one(task, {**MMLU, "answer": "D"}).fields["gold"] == "D"
    assert one(task, {**MMLU, "answer": "3", "choices": '["a", "b", "c", " "]'}).fields["gold"] == "D"


def test_the_article_counts_as_an_answer_under_its_quirk():
    record = {**MMLU, "answer": 0}
    text = "This is a riddle"
    assert score(Mmlu(TaskSettings(quirks=frozenset({"article-a"}))), record, text) == (1.0, "scored")
    assert score(Mmlu(PLAIN), record, text) == (0.0, "unparsed")


def test_gpqa():
    """Python's Random(111) turns [w1, w2, w3, right] into [w1, w3, right, w2], Random(112) into [w1, w2, w3, right]."""
    task = Gpqa(PLAIN)
    second = {**GPQA, "Record ID": "rec2"}
    first, other = task.read([("d:1", GPQA), ("d:2", second)])
    assert first.fields["options"] == ORDER_0
    assert other.fields["options"] == ORDER_1
    assert (first.fields["gold"], other.fields["gold"]) == GOLDS
    assert (first.example_id, first.domain) == ("rec1", "Physics")
    phrase = '"Therefore, the answer is (ANSWER_LETTER)" where (ANSWER_LETTER) is one of (A), (B), (C), (D).'
    a, b, c, d = ORDER_0
    assert task.ask(first).user == (
        "Answer the following multiple-choice question by giving the correct answer letter in parentheses. Provide "
        f"CONCISE reasoning for the answer, and make sure to finish the response with {phrase}\n\n"
        f"Question: Why? \nChoices:\n (A) {a}\n (B) {b}\n (C) {c}\n (D) {d}\n\n\n"
        f"Answer the above question and REMEMBER to finish your response with the exact phrase {phrase}"
    )
    gold = GOLDS[0]
    wrong = "B" if gold == "A" else "A"
    assert score(task, GPQA, f"({wrong})</think>Therefore, the answer is ({gold})") == (1.0, "scored")
    assert score(task, GPQA, f"Therefore, the answer is ({wrong})") == (0.0, "scored")
    assert score(task, GPQA, f"({gold})</think>unsure") == (0.0, "unparsed")
    assert score(Gpqa(TaskSettings(thinking="keep")), GPQA, f"({gold})</think>unsure") == (1.0, "scored")


ORDER_0 = ("w1 ", " ", "right. one", "w2 b")
ORDER_1 = ("w1 ", "w2 b", " ", "right. one")
GOLDS = ("C", "D")


def test_gpqa_options_are_cleaned():
    assert cleaned(" right [title] one ") == "right.  one".replace("  ", " ")
    assert cleaned("a [x] b   c") == "a b  c"
    assert cleaned("") == " "


def test_agieval():
    task = AgiEval(PLAIN)
    example = one(task, AGIEVAL)
    phrase = (
        '"Therefore, the answer is (ANSWER_LETTER)" where (ANSWER_LETTER) is one of '
        "(A), (B), (C), (D), (E), etc."
    )
    # a label gets its blank, repeated line ends go, an option without a label loses a leading A to E
    assert task.ask(example).user == (
        "Answer the following multiple-choice question by giving the correct answer letter in parentheses. Provide "
        f"CONCISE reasoning for the answer, and make sure to finish the response with {phrase}\n\n"
        "Passage: Six\nmen.\nQuestion: Who is (A) first?\n (A) Ann\n (B) Bob\n (C) Cy\n (D) an\n\n"
        f"Answer the above question and REMEMBER to finish your response with the exact phrase {phrase}"
    )
    assert score(task, AGIEVAL, "(A)</think>Therefore, the answer is (B).") == (1.0, "scored")
    assert score(task, AGIEVAL, "Therefore, the answer is (F).") == (0.0, "scored")
    assert score(task, AGIEVAL, "none fits") == (0.0, "unparsed")


def test_agieval_of_the_hub():
    task = AgiEval(PLAIN)
    example = one(task, JOINED)
    assert dict(example.fields) == {
        "passage": "",
        "question": "What is 1+1?",
        "options": ("(A)1", "(B)2"),
        "gold": "B",
    }
    passage = {**JOINED, "query": "Two men. " + JOINED["query"]}
    assert one(task, passage).fields["passage"] == "Two men."
    assert len(task.sources) == 8
    assert (task.sources[0].name, task.sources[0].domain) == ("hails/agieval-lsat-ar", "lsat-ar")


def test_agieval_passes_over_its_other_sets():
    other = {**AGIEVAL, "task": "sat-en-without-passage"}
    found = AgiEval(PLAIN).read([("d:1", other), ("d:2", AGIEVAL), ("d:3", AGIEVAL)])
    assert [example.example_id for example in found] == ["lsat-ar-0", "lsat-ar-1"]
    with pytest.raises(DataError, match="no record belongs to lsat-ar"):
        AgiEval(PLAIN).read([("d:1", other)])


def test_bbh_asks():
    task = Bbh(PLAIN)
    assert task.ask(one(task, {**BBH, "task": "ruin_names"})).user == (
        "Select the humorous edit that 'ruins' the input movie or musical artist name.\n\n"
        "Q: Which?\nOptions:\n(A) x\n(B) y\nA: Let's think step by step."
    )
    assert len(task.sources) == 27
    assert task.sources[0].config == "boolean_expressions"


@pytest.mark.parametrize(
    ("task", "target", "text", "right"),
    [
        ("boolean_expressions", "False", "So the answer is False.", 1),
        ("boolean_expressions", "False", "true or false? FALSE", 1),
        ("boolean_expressions", "True", "so the answer is false; True", 0),
        ("navigate", "No", "Yes. no", 1),
        # inside a word, after a phrase
        ("web_of_lies", "No", "The answer is nothing", 1),
        ("formal_fallacies", "invalid", "The answer is invalid.", 1),
        ("formal_fallacies", "invalid", "The argument is valid.", 0),
        ("dyck_languages", "] }", "So the answer is ] }.", 1),
        ("dyck_languages", "] }", "So the answer is ] ) }", 0),
        ("multistep_arithmetic_two", "-12", "the answer is -12", 1),
        # punctuation is ignored, the sign with it
        ("multistep_arithmetic_two", "-12", "the answer is 12", 1),
        ("object_counting", "8", "3 + 5 = 8", 1),
        ("word_sorting", "ant bee", "So the answer is ant bee.", 1),
        ("word_sorting", "ant bee", "ant bee is correct", 1),
        ("word_sorting", "ant bee", "sorted: ant, bee", 0),
        ("snarks", "(B)", "So the answer is (B).", 1),
        ("snarks", "(B)", "(A) or (b)", 1),
        ("snarks", "(B)", "the answer is (A). (B)", 0),
    ],
)
def test_bbh(task, target, text, right):
    assert score(Bbh(PLAIN), {"task": task, "input": "x", "target": target}, text) == (right, "scored")


def test_bbh_brackets_lose_to_a_blank_between_words():
    """With no phrase the stand-alone pattern comes first, and a blank between two words is one."""
    record = {"task": "dyck_languages", "input": "x", "target": "] }"}
    assert score(Bbh(PLAIN), record, "closing with ] }") == (0.0, "unparsed")
    assert score(Bbh(PLAIN), record, "] }") == (1.0, "scored")


def test_bbh_keeps_the_thinking():
    text = "So the answer is (B).</think>It is (A)."
    assert score(Bbh(PLAIN), BBH, text) == (1.0, "scored")
    assert score(Bbh(TaskSettings(thinking="strip")), BBH, text) == (0.0, "scored")


def test_bbh_letters_without_parentheses():
    on = Bbh(TaskSettings(quirks=frozenset({"bbh-bare-letter"})))
    assert score(on, BBH, "The answer is B") == (0.0, "unparsed")
    assert score(Bbh(PLAIN), BBH, "The answer is B") == (1.0, "scored")
    assert score(Bbh(PLAIN), BBH, "(B), I say") == (1.0, "scored")


def test_popqa():
    task = PopQa(PLAIN)
    example = one(task, POPQA)
    assert (example.example_id, example.domain) == ("17", "author")
    user = task.ask(example).user
    assert user.startswith(
        "Q: What is Thomas Widdrington's occupation? A: politician\n\nQ: In what city was "
    )
    assert user.endswith("Q: Who is the mother of Terry Fox? A: Betty Fox\n\nQ: Who? A:")
    assert len(SHOTS) == 15
    assert user.count("\n\n") == 15
    assert score(task, POPQA, "It was Jules VERNE.") == (1.0, "scored")
    assert score(task, POPQA, "xjules vernex") == (1.0, "scored")
    assert score(task, POPQA, "Jules verne") == (1.0, "scored")
    assert score(task, POPQA, "Jules Verne") == (0.0, "scored")
    assert score(task, POPQA, "JV-1") == (0.0, "scored")
    assert score(task, POPQA, "Jv-1") == (1.0, "scored")
    assert score(task, POPQA, "  ") == (0.0, "unparsed")
    text = "jv-1 perhaps</think>Nobody"
    assert score(task, POPQA, text) == (1.0, "scored")
    assert score(PopQa(TaskSettings(thinking="strip")), POPQA, text) == (0.0, "scored")
    assert one(task, {**POPQA, "possible_answers": ["x", ""], "prop": None}).fields["aliases"] == ("x",)


@pytest.mark.parametrize(("kind", "record"), ALL)
def test_token_bounds(kind, record):
    """The launcher's bound holds, except for five tasks under token-override (PopQA is no such task)."""
    quirk = frozenset({"token-override"})
    bound = [
        kind(s).ask(one(kind(s), record)).max_tokens
        for s in (PLAIN, TaskSettings(max_tokens=100), TaskSettings(max_tokens=100, quirks=quirk))
    ]
    assert bound == [131072, 100, 100 if kind is PopQa else 131072]
    assert kind(TaskSettings(max_tokens=10**6)).ask(one(kind(PLAIN), record)).max_tokens == 131072
    assert kind(TaskSettings(think=True)).ask(one(kind(PLAIN), record)).thinking is True


@pytest.mark.parametrize(("kind", "record"), ALL)
def test_rows_of_answers(kind, record):
    task = kind(PLAIN)
    assert isinstance(task, Benchmark)
    found = task.mark(one(task, record), [Answer("?", finished=False, n_tokens=9)])
    (row,) = found.answers
    assert row == {
        "idx": 0,
        "role": "answer",
        "text": "?",
        "finished": False,
        "n_tokens": 9,
        "extracted": None,
        "score": 0.0,
        "error": "",
    }
    assert found.marks[0].label == task.name


@pytest.mark.parametrize(("kind", "record"), ALL)
def test_every_needed_field_is_missed_by_name(kind, record):
    optional = {"Record ID", "High-level domain", "prop", "passage", "answer"} - (
        {"answer"} if kind in (Gsm8k, Mmlu) else set()
    )
    optional |= {"Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"}
    for key in set(record) - optional:
        if key == "query":  # without it the record is read as AGIEval's own
            continue
        with pytest.raises(DataError, match=f"^d.jsonl:1: field '{key}' is missing; the record has "):
            one(kind(PLAIN), {k: v for k, v in record.items() if k != key})
        for bad in (None, math.nan, 3.5, True, {}):
            with pytest.raises(DataError, match=f"^d.jsonl:1: field '{key}' has type "):
                one(kind(PLAIN), {**record, key: bad})


@pytest.mark.parametrize(
    ("kind", "record", "message"),
    [
        (Gsm8k, {**GSM8K, "answer": "twelve"}, "field 'answer' ends without a number; end it with '#### 42'"),
        (Gsm8k, {**GSM8K, "question": " "}, "field 'question' is blank; give a text or remove the record"),
        (Gsm8k, {**GSM8K, "question": "a\x00"}, "field 'question' holds a NUL character; remove it"),
        (Mmlu, {**MMLU, "answer": 4}, "field 'answer' is 4; it must be 0 to 3"),
        (Mmlu, {**MMLU, "answer": "E"}, "field 'answer' has type str; a whole number is needed"),
        (Mmlu, {**MMLU, "choices": ["x"]}, "field 'choices' holds 1 texts, at least 2 are needed"),
        (Mmlu, {**MMLU, "choices": ["x", 1]}, "field 'choices[1]' has type int; a text is needed"),
        (Mmlu, {**MMLU, "choices": "x"}, "field 'choices' has type str; a list or its JSON text is needed"),
        (Mmlu, {**MMLU, "choices": list("abcde")}, "field 'choices' holds 5 texts; MMLU has four"),
        (AgiEval, {**AGIEVAL, "label": "G"}, "field 'label' is 'G'; it must be one of ABCDE"),
        (AgiEval, {**AGIEVAL, "task": "lsat"}, "field 'task' is 'lsat'; it must be one of lsat-ar, lsat-lr"),
        (AgiEval, {**JOINED, "gold": [2]}, "field 'gold' must be a list of one index below 2"),
        (AgiEval, {**JOINED, "gold": [0, 1]}, "field 'gold' must be a list of one index below 2"),
        (AgiEval, {**JOINED, "query": "x"}, "field 'query' has no 'Q: ' or no 'Answer Choices:'"),
        (Bbh, {**BBH, "task": "bbh"}, "field 'task' is 'bbh'; it must be one of boolean_expressions"),
        (PopQa, {**POPQA, "possible_answers": "[]"}, "field 'possible_answers' holds 0 texts"),
        (
            PopQa,
            {**POPQA, "possible_answers": "{"},
            "field 'possible_answers' has type str; a list or its JSON",
        ),
    ],
)
def test_records_that_cannot_be_used(kind, record, message):
    with pytest.raises(DataError) as caught:
        one(kind(PLAIN), record)
    assert str(caught.value).startswith(f"d.jsonl:1: {message}")


@pytest.mark.parametrize(("kind", "record"), [(Gpqa, GPQA), (PopQa, POPQA)])
def test_ids_that_occur_twice(kind, record):
    with pytest.raises(DataError, match=r"^d:2: id '.*' occurs already in d:1; make the ids unique"):
        kind(PLAIN).read([("d:1", record), ("d:2", record)])


@given(
    st.text(max_size=120), st.sampled_from(ALL), st.sampled_from(["protocol", "strip", "keep"]), st.booleans()
)
@settings(max_examples=100, deadline=None)
def test_any_text_is_marked(text, task, thinking, quirks):
    kind, record = task
    own = frozenset({"gsm8k-unsigned", "article-a", "bbh-bare-letter"} if quirks else ())
    found = mark(kind(TaskSettings(thinking=thinking, quirks=own)), record, text)
    assert found.score in (0.0, 1.0)
    assert found.status == "scored" or found.score == 0.0
