"""A rollout read back from the tables, its words, and its page."""

from __future__ import annotations

import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.analysis.load import load_table
from racelab.analysis.transcript import _demonstration, load_rollouts, load_transcripts, transcript_steps
from racelab.analysis.transcript_html import fragment, page
from racelab.analysis.transcript_text import blocks, cut, facts, grading_label, notes, ranges, signed, visible
from racelab.analysis.transcript_types import Place, Scaling, Transcript
from racelab.experiments.errors import ConfigError, DataError
from racelab.experiments.runfolder import RunFolder

from .rollout_run import HOSTILE, LONG, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("runs"))


def one(run: RunFolder, group: int, idx: int) -> Transcript:
    (found,) = load_transcripts(run, 2, group, idx)
    return found


@pytest.mark.parametrize(
    ("text", "place"),
    [("3", Place(3)), ("3:0", Place(3, 0)), ("12:4:7", Place(12, 4, 7)), (" 3:1 ", Place(3, 1))],
)
def test_a_place_is_a_step_a_group_or_a_rollout(text: str, place: Place) -> None:
    assert Place.parse(text) == place


@pytest.mark.parametrize("text", ["", "a", "1:", ":1", "1:2:3:4", "-1", "1:-2", "²", "1.0"])
def test_what_is_no_place_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match="STEP:GROUP:IDX"):
        Place.parse(text)


def test_an_original_with_grades(run: RunFolder) -> None:
    t = one(run, 0, 0)
    assert (t.run_id, t.task, t.condition, t.rollout.place) == (run.run_id, "hotpotqa", "rlds", "2:0:0")
    assert (t.rollout.reward, t.rollout.solved, t.rollout.end_reason) == (1.0, True, "answer")
    assert (t.rollout.adv_sdae, t.rollout.adv_grpo) == (1.3, 0.7071)
    assert [(s.name, s.phi, s.grade, s.pivot, s.pivot_turn, s.advantage) for s in t.subtasks] == [
        ("plan", 0.75, 5, 0, 0, 0.4),
        ("act", 0.25, 3, 12, 1, 0.1),  # clamped to the last turn, as the kernel of Eq 3 is
    ]
    assert [(x.advantage, x.pivots, x.tokens) for x in t.turns] == [
        (1.5, ("plan",), (1, 2, 3)),
        (0.75, ("act",), (9,)),
    ]
    assert [t.strength(x) for x in t.turns] == [1.0, 0.5]
    assert not any(x.masked or x.drawn for x in t.turns)
    assert t.token_turn == (0, 0, 0, -1, 1)
    assert t.instance is not None
    assert t.instance["data"]["answers"] == ["A & B"]
    assert t.retries == ()


def test_an_original_without_grades_names_its_retry(run: RunFolder) -> None:
    t = one(run, 0, 1)
    assert (t.rollout.grades, t.rollout.pivots, t.rollout.parse_status) == (None, None, "bad_json")
    assert [(s.grade, s.pivot, s.advantage) for s in t.subtasks] == [(None, None, -0.5), (None, None, -0.5)]
    assert [(x.retry, x.retry_from, x.delta_R, x.delta_grades, x.used) for x in t.retries] == [
        (2, 1, 1.0, None, True)
    ]
    assert [x.masked for x in t.turns] == [False, False]
    words = dict(facts(t))
    assert words["kind"] == "original, retried"
    assert (
        words["retries"] == "idx 2 from turn 1, δR +1.000, auxiliary loss: retry distillation (weight 0.625)"
    )


def test_a_retry_has_its_reflection_and_a_masked_prefix(run: RunFolder) -> None:
    t = one(run, 0, 2)
    assert (t.rollout.parent, t.rollout.retry_from) == (1, 1)
    assert (t.addition, t.reflection, t.grading) == ("Look twice.", '{"report": "hasty"}', '{"plan": 4}')
    assert [(x.sampled, x.masked, x.advantage) for x in t.turns] == [(False, True, 0.0), (True, False, 0.9)]
    assert [x.pivots for x in t.turns] == [(), ("act",)]
    assert [link.retry for link in t.retries] == [2]
    assert dict(facts(t))["kind"] == "retry of 2:0:1 from turn 1"


def test_a_run_that_masks_both_sides_masks_the_original_up_to_its_retry(tmp_path: Path) -> None:
    both = write_run(tmp_path, "method.mask_prefix=both")
    assert [x.masked for x in one(both, 0, 1).turns] == [True, False]
    assert [x.masked for x in one(both, 0, 0).turns] == [False, False]


def test_dynamic_weights_are_those_of_the_step(tmp_path: Path) -> None:
    logged = {"rlds/phi/plan": 0.5, "rlds/phi/act": 0.5}
    moved = write_run(tmp_path, "method.sdae.phi_eta=0.5", metrics=logged)
    assert [s.phi for s in one(moved, 0, 0).subtasks] == [0.5, 0.5]


def test_grid_tokens_are_drawn_as_words_and_never_against_the_record(run: RunFolder) -> None:
    t = one(run, 1, 0)
    assert t.drawn
    assert "\nA D\nD B\n" in t.first_observation
    assert "\nD D\nA B\n" in t.turns[0].observation
    assert "reached the goal" in t.turns[1].observation
    assert [x.drawn for x in t.turns] == [True, True]
    assert (t.largest, [t.strength(x) for x in t.turns]) == (0.0, [0.0, 0.0])
    lost = one(run, 1, 1)
    assert not lost.drawn
    assert [lost.first_observation, *(x.observation for x in lost.turns)] == ["", "", ""]


def test_a_running_run_reads_the_same(run: RunFolder, tmp_path: Path) -> None:
    live = write_run(tmp_path, status="running")
    for a, b in zip(load_transcripts(run, 2, 0), load_transcripts(live, 2, 0), strict=True):
        assert {**a.to_json(), "run_id": ""} == {**b.to_json(), "run_id": ""}
    assert transcript_steps(live) == transcript_steps(run) == [2]


def test_lists(run: RunFolder) -> None:
    assert [r.place for r in load_rollouts(run, 2)] == ["2:0:0", "2:0:1", "2:0:2", "2:1:0", "2:1:1"]
    assert [r.place for r in load_rollouts(run, 2, 1)] == ["2:1:0", "2:1:1"]
    assert [r.place for r in load_rollouts(run, 1)] == ["1:0:0"]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((9, 0, 0), r"no rollouts of step 9; there are rollouts of steps 1-2"),
        ((2, 5, 0), r"has no group 5; it has 0-1"),
        ((2, 0, 7), r"no rollout 7; it has 0-2 \(2: retries\)"),
        ((2, 1, 7), r"no rollout 7; it has 0-1$"),
        (
            (1, 0, 0),
            r"kept no transcripts of step 1; there are transcripts of step 2 \(run.transcripts_every\)",
        ),
    ],
)
def test_what_is_not_there_is_named(run: RunFolder, place: tuple[int, int, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_transcripts(run, *place)


def test_signs() -> None:
    assert [signed(x) for x in (0.1234, -2.0, 0.0, -0.0001, None, math.nan)] == [
        "+0.123", "-2.000", "+0.000", "+0.000", "-", "-",
    ]  # fmt: skip


@given(st.text())
def test_no_text_acts_on_a_terminal(text: str) -> None:
    shown = visible(text)
    assert all(c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160) for c in shown)
    assert not any("\u202a" <= c <= "\u202e" or "\ud800" <= c <= "\udfff" for c in shown)
    assert visible(shown) == shown


def test_cut_and_ranges() -> None:
    assert cut("a\nb\nc", 2, 99) == ("a\nb", 2)
    assert cut("abcdef", 9, 4) == ("abcd", 2)
    assert cut("abc\n", 1, 3) == ("abc\n", 0)
    assert ranges([1, 2, 3, 8, 10, 11]) == "1-3, 8, 10-11"
    assert ranges(range(10, 400, 10)).endswith("120, ..., 390")


class Reader(HTMLParser):
    """What a browser would make of a page: elements with attributes, and the text of each `pre`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)
        if tag == "pre":
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "pre":
            self.texts[-1] += data


def test_the_page_holds_every_text_and_nothing_that_acts(run: RunFolder) -> None:
    text = page(load_transcripts(run, 2, 0))
    read = Reader(text)
    assert visible(HOSTILE) in read.texts
    assert LONG in read.texts
    assert {tag for tag, _ in read.tags}.isdisjoint({"script", "img", "link", "iframe", "form", "bold"})
    links = [attrs["href"] for tag, attrs in read.tags if tag == "a"]
    ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {link and link[1:] for link in links} <= set(ids)
    assert not any(
        name in attrs for _, attrs in read.tags for name in ("src", "onclick", "onload", "onerror")
    )
    assert "\x1b" not in text
    assert all(word not in text for word in ("http://127.0.0.1:9/x.png'>", "url(", "@import", "<script"))


def test_a_colour_is_as_deep_as_the_advantage(run: RunFolder) -> None:
    def grounds(idx: int) -> list[str | None]:
        read = Reader(fragment(one(run, 0, idx)))
        return [attrs.get("style") for tag, attrs in read.tags if attrs.get("class") == "reply"]

    green, red = "rgba(46,160,67,{})", "rgba(218,54,51,{})"
    for found, wanted in (
        (grounds(0), [green.format("0.450"), green.format("0.225")]),
        (grounds(1), [red.format("0.450")] * 2),
        (grounds(2), [None, green.format("0.450")]),
    ):
        for style, colour in zip(found, wanted, strict=True):
            assert style is None if colour is None else colour in (style or "")


def test_without_sdae_the_scalar_advantage_is_what_was_trained_with(run: RunFolder) -> None:
    t = one(run, 0, 0)
    plain = replace(t, rollout=replace(t.rollout, adv_sdae=None, grades=None, parse_status=None))
    words = dict(facts(plain))
    assert (words["advantage"], words["grading"]) == ("scalar GRPO +0.707 (trained with)", "none")
    assert dict(notes(plain))["from A_ik"] == (
        "GRPO is the reward, standardised within the group; A_ik (RLDS Eq 1) is not trained with; every turn has the "
        "same value."
    )


KERNEL = "turn values: times the pivot kernel (σ = 1 turn), mean one over the tokens"


@pytest.mark.parametrize(
    ("idx", "changed", "words"),
    [
        (0, {}, [f"(σ_batch + ε), σ_batch = 0.250 (this step); {KERNEL}; GRPO is", "RLDS Eqs 1-3."]),
        (0, {"sigma_batch": None}, [f"(σ_batch + ε), σ_batch the std of the sums over the step; {KERNEL};"]),
        (0, {"kernel_sigma": None}, ["(this step); every turn has Â_i, as there is no pivot kernel;"]),
        (0, {"amplification": 2.0}, [f"(this step); {KERNEL}"]),
        (
            2,
            {"amplification": 2.0},
            ["(this step), in a retry times 2 if above 0 (method.positive_amplification);"],
        ),
        (
            0,
            {"decomposed": False},
            ["no rollout of the group has grades, so Â_i is that of GRPO (RLDS §3.3)"],
        ),
    ],
)
def test_how_an_advantage_came_about(
    run: RunFolder, idx: int, changed: dict[str, Any], words: list[str]
) -> None:
    t = one(run, 0, idx)
    said = dict(notes(replace(t, scaling=replace(t.scaling, **changed))))["from A_ik"]
    assert all(word in said for word in words)


def test_the_formula_gives_the_logged_advantage(run: RunFolder) -> None:
    t = one(run, 0, 0)
    assert t.scaling.sigma_batch is not None
    total = sum(s.phi * s.advantage for s in t.subtasks if s.advantage is not None)
    assert total / t.scaling.sigma_batch == pytest.approx(t.rollout.adv_sdae)


def test_where_sigma_is_nothing_there_is_no_kernel(tmp_path: Path) -> None:
    flat = write_run(tmp_path, metrics={"rlds/stage2/sigma_batch": 0.0})
    assert one(flat, 0, 0).scaling == Scaling(True, 0.0, None, 1.0)
    plain = write_run(tmp_path, "condition=rlds-no-kernel")
    assert one(plain, 0, 0).scaling == Scaling(True, 0.25, None, 1.0)


def test_worked_examples_are_shown_folded_or_said_to_be_lost(run: RunFolder) -> None:
    t = one(run, 0, 0)
    assert t.demonstration == (("Where?", "I ask."), ("<b>There.", "There"))
    label = "demonstration: 2 turns (task.demonstration=true)"
    assert dict(blocks(t))[label] == "user: Where?\nreply: I ask.\nuser: <b>There.\nreply: There"
    assert f"<details><summary>{label}, " in fragment(t)
    assert not any("demonstration" in name for name, _ in blocks(one(run, 0, 1)))
    lost = dict(blocks(replace(t, demonstration=None)))
    assert lost["demonstration (task.demonstration=true)"] == "(its texts were not kept by this run)"


def test_a_demonstration_that_an_older_run_did_not_keep_is_missed() -> None:
    assert _demonstration(None, True) is None
    assert _demonstration(None, False) == ()
    assert _demonstration([], True) == ()


@pytest.mark.parametrize(
    ("grader", "said", "label"),
    [
        ("policy", "bad_json, graded by the policy itself", "grader's reply"),
        ("form", "bad_json, graded by the policy in a form", "grader's form, filled in by the policy"),
        ("random", "bad_json, grades drawn at random", "grader's reply"),
        ("scripted", "bad_json, graded by a program", "grader's reply"),
    ],
)
def test_who_graded_is_said(run: RunFolder, grader: str, said: str, label: str) -> None:
    t = replace(one(run, 0, 1), grader=grader)
    assert (dict(facts(t))["grading"], grading_label(t)) == (said, label)


def test_the_letters_of_a_board_are_explained(run: RunFolder) -> None:
    t = replace(one(run, 1, 0), task="frozenlake")
    letters = "A agent, B goal, C hole, D safe (the symbols that {} is shown, RLDS App. D.1)"
    assert dict(facts(t))["board"] == letters.format("an agent of the text task")
    assert dict(facts(replace(t, drawn=False)))["board"] == letters.format("the agent")
    assert letters.format("an agent of the text task") in fragment(t)
    assert "board" not in dict(facts(replace(t, first_observation="")))


def test_a_page_is_named_after_its_run_and_says_that_there_is_no_advantage(run: RunFolder) -> None:
    text = page([one(run, 1, 0)])
    assert "<title>toy: rollout 2:1:0</title>" in text
    assert "No advantage in this rollout" in text
    assert "No advantage" not in page([one(run, 0, 0)])


@pytest.mark.parametrize("status", ["finished", "running"])
def test_a_table_can_be_read_by_step_and_column(tmp_path: Path, status: str) -> None:
    run = write_run(tmp_path, status=status)
    whole = load_table(run, "rollouts")
    some = load_table(run, "rollouts", step=2, columns=["idx", "R", "nothing"])
    assert list(some.columns) == ["idx", "R"]
    pd.testing.assert_frame_equal(some, whole.loc[whole["step"] == 2, ["idx", "R"]].reset_index(drop=True))
    assert load_table(run, "transcripts", step=1).empty
