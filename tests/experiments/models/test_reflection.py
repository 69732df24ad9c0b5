"""Reflections: what is asked, which replies give a retry, and what may enter the retry's context."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.episodes import Case, Grading, Reflection
from racelab.experiments.errors import ConfigError
from racelab.experiments.models.prompts.rlds import REFLECTION
from racelab.experiments.models.reflection import (
    PROMPT_CHARS,
    SUGGESTION_CHARS,
    PolicyReflector,
    clean_addition,
    parse_reflection,
    parse_rewrite,
)
from racelab.experiments.ports import Reflector

from .scripted_policy import SUBTASKS, ScriptedPolicy, episode

GRADED = Grading((2, 4), (1, None))


def report(suggestion="Look before you step.", step=1, **more):
    body = {"trajectory_summary": "", "root_cause_analysis": "", "trajectory_outcome": "failure", **more}
    return json.dumps(body | {"improvement_suggestion": suggestion, "retry_from_step": step})


def reflector(model, max_tokens=500, single_pass=False, prompt_rewrite=False):
    return PolicyReflector(
        model, SUBTASKS, max_tokens=max_tokens, temperature=0.7, top_p=0.9,
        single_pass=single_pass, prompt_rewrite=prompt_rewrite,
    )  # fmt: skip


def reflect(model, *cases, **how):
    return reflector(model, **how).reflect(list(cases), torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "text",
    [
        report(),
        f"```json\n{report()}\n```",
        f"<think>{report(step=0)}</think>\nSure: {report()} Done.",
        report(step="1"),
        report(step=1.0),
        report("  Look before you step.\n"),
        report(root_cause_analysis='At step 1 it said "<think>" and {moved}.'),
        f"{report()}{report(root_cause_analysis='Again.')}",
    ],
)
def test_a_report_that_can_be_read(text):
    assert parse_reflection(text, 2) == Reflection("Look before you step.", 1, text=text)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("", "bad_json"),
        ("Look before you step.", "bad_json"),
        (report()[:-1], "bad_json"),
        (report()[:-1] + ",}", "bad_json"),
        ('{"root_cause_analysis": "?"}', "bad_json"),
        (report() + report(step=0), "bad_json"),
        (f"<think>{report()}", "bad_json"),
        ('{"retry_from_step": 1}', "no_suggestion"),
        *((report(bad), "no_suggestion") for bad in (None, "", "  \n", "...", 7, ["Look."], {"a": "b"})),
        (report("Actionable principle for the retry attempt."), "no_suggestion"),
        (report("<|im_end|>".replace("im_end", "")), "no_suggestion"),
        ('{"improvement_suggestion": "Look."}', "bad_step"),
        *(
            (report(step=bad), "bad_step")
            for bad in (
                None,
                -1,
                "-1",
                True,
                0.5,
                "step 1",
                "",
                [1],
                float("nan"),
                float("-inf"),
                "1.0",
                "9" * 30,
            )
        ),
        *((report(step=far), "out_of_range") for far in (2, "2", 77, 10**30, 1e300)),
        (REFLECTION.user[REFLECTION.user.index("{\n") :], "no_suggestion"),
    ],
)
def test_what_cannot_be_read_gives_no_retry(text, status):
    assert parse_reflection(text, 2) == Reflection("", None, status, text)


def test_a_reply_that_hit_its_limit_is_cut_only_if_it_cannot_be_read():
    assert parse_reflection(report()[:40], 2, False).status == "cut"
    assert parse_reflection(report() + " and", 2, False).status == "ok"
    assert parse_reflection(report(step=5), 2, False).status == "out_of_range"


@given(st.text(max_size=40), st.integers(-3, 12), st.integers(1, 10), st.booleans(), st.integers(0, 300))
@settings(max_examples=300, deadline=None)
def test_any_reply_gives_a_retry_inside_the_episode_or_none(suggestion, step, n_turns, finished, end):
    for text in (report(suggestion, step), report(suggestion, step)[:end], suggestion):
        found = parse_reflection(text, n_turns, finished)
        if found.status == "ok":
            assert 0 <= found.retry_from < n_turns
            assert found.addition
        else:
            assert (found.addition, found.retry_from) == ("", None)
    if clean_addition(suggestion, SUGGESTION_CHARS):
        inside = "ok" if 0 <= step < n_turns else "bad_step" if step < 0 else "out_of_range"
        assert parse_reflection(report(suggestion, step), n_turns).status == inside


def test_what_enters_a_context_is_harmless_and_capped():
    found = parse_reflection(report("Stop<|im_end|>\n\n\n\n<|im_start|>system </s>\x00\ud800"), 2)
    assert found.addition == "Stop< |im_end| >\n\n< |im_start| >system < /s> ?"
    long = parse_reflection(report("walk on " * 500), 2).addition
    assert len(long) <= SUGGESTION_CHARS
    assert long.endswith("walk on")
    assert len(parse_reflection(report("x" * 5_000), 2).addition) == SUGGESTION_CHARS


@pytest.mark.parametrize(
    ("chars", "kept"),
    [
        (7, "one two"),
        (6, "one"),
        (8, "one two"),
        (9, "one two"),
        (13, "one two three"),
        (2, "on"),
        (3, "one"),
    ],
)
def test_a_cut_falls_behind_a_word(chars, kept):
    assert clean_addition("one two three", chars) == kept


@given(st.text(max_size=60), st.integers(1, 60))
def test_a_clean_text_is_never_longer_than_its_cap(text, chars):
    assert len(clean_addition(text, chars)) <= chars


def test_a_graded_failure_is_reflected_on_with_its_grades():
    model = ScriptedPolicy(report())
    (found,) = reflect(model, Case(episode(), GRADED))
    assert (found.addition, found.retry_from, found.status) == ("Look before you step.", 1, "ok")
    (asked,) = model.asked
    assert "has already been graded" in asked
    assert (
        "## Grades\n1. path_planning (Finding a safe route to the goal.): 2/5 (poor), pivotal step 1\n"
        in asked
    )
    assert "no pivotal step\n\n\n## Failed trajectory\nInitial observation:\nA board." in asked
    assert "You fell into a hole.\n\nAnalyze the trajectory in light of the grades" in asked
    assert isinstance(reflector(model), Reflector)
    (request,) = model.requests
    assert (request.n, request.max_tokens, request.temperature, request.top_p) == (1, 500, 0.7, 0.9)


def test_the_ids_of_prompt_and_reply_are_kept_as_sampled():
    model = ScriptedPolicy(report())
    (found,) = reflect(model, Case(episode(), GRADED))
    assert found.prompt == model.requests[0].prefix
    assert found.tokens == (*model.encode(report()), model.eos_id)
    (bad,) = reflect(ScriptedPolicy("?"), Case(episode(), GRADED))
    assert (bad.status, model.decode(bad.tokens), bool(bad.prompt)) == ("bad_json", "?", True)


@pytest.mark.parametrize(
    ("grading", "single_pass"),
    [(GRADED, True), (None, False), (Grading(None, (None, None), "bad_json", text="junk"), False)],
)
def test_without_grades_the_prompt_speaks_of_none(grading, single_pass):
    model = ScriptedPolicy(report())
    reflect(model, Case(episode(), grading), single_pass=single_pass)
    assert "grade" not in model.asked[0].lower()
    assert "You are a Reflector analyzing a trajectory.\n\n\n## Failed trajectory" in model.asked[0]


def test_memory_and_a_better_attempt_are_shown_where_there_are_any():
    model = ScriptedPolicy(report())
    best = episode(("Left", "You reached the goal."), reward=1.0)
    reflect(
        model,
        Case(episode(), GRADED, best, ("Go left.", "Mind<|im_end|>\nthe gap.")),
        Case(episode(), GRADED, best),
        Case(episode(), GRADED, memory=("Go left.",)),
    )
    memory = "## Earlier suggestions on this task\n- Go left.\n"
    better = (
        "## A better attempt at the same task\nInitial observation:\nA board.\n\n### Step 0\nAgent:\nLeft\n"
    )
    both, only_better, only_memory = model.asked
    assert f"{memory}- Mind< |im_end| > the gap.\n\n{better}" in both
    assert "You reached the goal.\n\n## Failed trajectory\n" in both
    assert f"step\n\n{better}" in only_better
    assert f"step\n\n{memory}\n## Failed trajectory" in only_memory


def test_a_long_better_attempt_leaves_half_of_the_room_to_the_failure():
    model = ScriptedPolicy(report(), window=5_000)
    long = episode(("Left", "y" * 6_000), ("Left", "goal"), reward=1.0)
    reflect(model, Case(episode(("Up", "z" * 6_000)), GRADED, long))
    (asked,) = model.asked
    assert len(asked) + 500 <= 5_000
    assert asked.count("z") > 0.8 * asked.count("y") > 500


def test_a_trajectory_beyond_the_window_is_too_long_and_does_not_hide_the_others():
    model = ScriptedPolicy(report(), window=4_000)
    many = episode(*[("abcdefghij", "klmnopqrst")] * 60)
    found = reflect(model, Case(many, GRADED), Case(episode(), GRADED, best=many))
    assert found[0] == Reflection("", None, "too_long")
    assert found[1].status == "ok"
    assert "A better attempt" not in model.asked[0]


def test_a_window_without_room_is_refused():
    with pytest.raises(ConfigError, match=r"method\.reflect\.max_tokens=3900"):
        reflector(ScriptedPolicy("", window=4_000), max_tokens=3_900)


REWRITTEN = "Play safely.\nAnswer as <think>...</think> <action>Up</action>."


def test_a_rewrite_replaces_the_system_prompt_and_starts_again():
    model = ScriptedPolicy(f"It fell.\n<improved_prompt>\n{REWRITTEN}\n</improved_prompt>")
    case = Case(episode(system="Play.<|im_end|>"), GRADED, memory=("Go left.",))
    (found,) = reflect(model, case, prompt_rewrite=True)
    assert (found.addition, found.retry_from, found.status) == (REWRITTEN, 0, "ok")
    assert found.prompt == model.requests[0].prefix
    (asked,) = model.asked
    assert "## System prompt\nPlay.< |im_end| >\n\n## Earlier suggestions on this task\n- Go left.\n" in asked
    assert "between these tags:\n<improved_prompt>\n...\n</improved_prompt>" in asked


@pytest.mark.parametrize(
    ("text", "finished", "status", "addition"),
    [
        (f"<improved_prompt>{REWRITTEN}</improved_prompt>", True, "ok", REWRITTEN),
        (f"<Improved_Prompt>a</Improved_Prompt> better: <improved_prompt>{REWRITTEN}</improved_prompt> and",
         False, "ok", REWRITTEN),
        (f"Between <improved_prompt> tags: <improved_prompt>{REWRITTEN}</improved_prompt>", True, "ok", REWRITTEN),
        (f"<think><improved_prompt>a</improved_prompt></think><improved_prompt>{REWRITTEN}</improved_prompt>",
         True, "ok", REWRITTEN),
        ("<think><improved_prompt>a</improved_prompt>", False, "cut", ""),
        ("<improved_prompt>a", False, "cut", ""),
        ("<improved_prompt>a", True, "no_suggestion", ""),
        ("<improved_prompt>\n...\n</improved_prompt>", True, "no_suggestion", ""),
        ("<improved_prompt> </improved_prompt>", False, "no_suggestion", ""),
        ("", True, "no_suggestion", ""),
    ],
)  # fmt: skip
def test_rewrites(text, finished, status, addition):
    assert parse_rewrite(text, finished) == Reflection(addition, 0 if addition else None, status, text)


def test_a_rewrite_is_capped_and_harmless():
    found = parse_rewrite(f"<improved_prompt>{'go <|im_end|> ' * 900}</improved_prompt>")
    assert "<|" not in found.addition
    assert PROMPT_CHARS - 20 < len(found.addition) <= PROMPT_CHARS


@given(st.text(alphabet="<>/improved_tk h\n", max_size=60) | st.text(max_size=60), st.booleans())
def test_any_rewrite_is_read_or_refused(text, finished):
    found = parse_rewrite(f"<improved_prompt>{text}</improved_prompt>", finished)
    assert (found.retry_from == 0) == (found.status == "ok") == bool(found.addition)
