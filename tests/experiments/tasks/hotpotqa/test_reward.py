r"""HotpotQA's score and the parsing of \boxed, with numbers worked by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.tasks.hotpotqa.reward import boxed_answer, exact_match, f1_score, normalise, score


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Quick, Brown-Fox!", "quick brownfox"),
        ("An apple a day", "apple day"),
        ("theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("“Curly” quotes stay", "“curly” quotes stay"),
        ("the", ""),
        ("  \t\n", ""),
        ("a.n", ""),  # punctuation goes before the articles, as in SQuAD's script
    ],
)
def test_normalise(text: str, normal: str) -> None:
    assert normalise(text) == normal


def test_nothing_matches_nothing_is_no_match() -> None:
    assert not exact_match("", "")
    assert not exact_match("The", "a")
    assert f1_score("", "") == 0.0
    assert score("the", ["a"]).reward == 0.0


def test_f1_by_hand() -> None:
    # two of three and two of four words: p = 2/3, r = 1/2, F1 = 2pr/(p+r) = 4/7
    assert f1_score("red green blue", "red green grey black") == pytest.approx(4 / 7)
    # repeated words count as often as both have them: p = 2/3, r = 1
    assert f1_score("no no no", "no no") == pytest.approx(0.8)
    assert f1_score("x", "y") == 0.0


def test_reward_is_one_f1_or_nothing() -> None:
    assert score("The Tern Bridge!", ["tern bridge"]).reward == 1.0
    half = score("Tern Bridge near Quillhaven", ["Tern Bridge"])  # p = 1/2, r = 1
    assert (half.em, half.f1, half.reward) == (False, pytest.approx(2 / 3), pytest.approx(2 / 3))
    weak = score("b c d e f g h i bridge", ["Tern Bridge"])  # p = 1/9, r = 1/2: F1 = 2/11
    assert (weak.reward, weak.f1) == (0.0, pytest.approx(2 / 11))


def test_the_threshold_itself_is_worth_its_f1() -> None:
    # one of four and one of four: F1 = 1/4
    assert score("b c d e", ["e f g h"], threshold=0.25).reward == 0.25
    assert score("b c d e", ["e f g h"], threshold=0.2501).reward == 0.0
    assert score("b", ["c"], threshold=0.0).reward == 0.0


def test_the_best_of_several_answers_counts() -> None:
    found = score("412,000", ["four hundred and twelve thousand", "412000"])
    assert (found.em, found.f1, found.reward) == (True, 1.0, 1.0)


def test_the_official_rule_for_yes_and_no() -> None:
    assert score("yes indeed", ["yes"]).reward == pytest.approx(2 / 3)
    assert score("yes indeed", ["yes"], official_yes_no=True).reward == 0.0
    assert score("no", ["no way out"], official_yes_no=True).f1 == 0.0
    assert score("Yes.", ["yes"], official_yes_no=True).reward == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"It is \boxed{Paris}.", "Paris"),
        (r"\boxed{a} and then \boxed{b}", "b"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{Tern Bridge}}", "{Tern Bridge}"),
        (r"\boxed{a \boxed{b} c}", "a {b} c"),
        (r"\boxed{\boxed{Paris}}", "{Paris}"),
        (r"\boxed{\boxed{}}", None),
        (r"\boxed{\text{}}", None),
        (r"\boxed{~ \\}", None),
        (r"\boxed{x} or \boxed{\boxed{ }}", "x"),
        (r"\boxed{New York\\}", "New York"),
        (r"\boxed{New\\York}", "New York"),
        (r"\boxed{a\\\}b}", r"a \}b"),
        (r"\boxed{New~York}", "New York"),
        (r"\boxed{pi\~na}", r"pi\~na"),
        (r"\\boxed{\\text{Paris}}", "{Paris}"),
        (r"\boxed{\texture{x}}", r"\texture{x}"),
        (r"\boxed {x}", "x"),
        (r"\boxed{f\}x}", r"f\}x"),
        (r"\\boxed{x}", "x"),
        (r"I will put it inside \boxed{} when I know", None),
        (r"\boxed{ }", None),
        (r"\boxed{x} or \boxed{}", "x"),
        (r"\boxed{cut off", None),
        (r"\boxed{open { \boxed{in}", "in"),
        (r"} } \boxed{x} }", "x"),
        ("boxed{x}", None),
        ("", None),
    ],
)
def test_boxed(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    "content",
    [
        *(
            f"\\{style}{{the Tern Bridge}}"
            for style in (
                "text", "textbf", "textsf", "texttt", "textsc", "emph", "mbox", "fbox", "underline", "mathrm",
                "mathsf", "operatorname", "boxed",
            )
        ),
        r"\underline{\textbf {Tern Bridge}}",
        r"\boxed{\text{Tern~Bridge}}",
        r"Tern Bridge\\",
    ],
)  # fmt: skip
def test_a_style_inside_the_box_does_not_cost_the_match(content: str) -> None:
    answer = boxed_answer(f"\\boxed{{{content}}}")
    assert answer is not None
    assert score(answer, ["Tern Bridge"]).em


def test_many_open_boxes_take_no_time() -> None:
    assert boxed_answer("\\boxed{" * 50_000 + "x" + "}" * 50_000) is not None
    assert boxed_answer("\\boxed{" * 50_000) is None
    assert boxed_answer("\\boxed{" + "\\" * 50_000 + "}") is None


_WORDS = st.lists(st.sampled_from(["a", "red", "green", "yes", "no", "The", "blue."]), max_size=6).map(
    " ".join
)


@given(_WORDS, _WORDS, st.floats(0.01, 1.0), st.booleans())
def test_invariants(prediction: str, gold: str, threshold: float, official: bool) -> None:
    found = score(prediction, [gold], threshold=threshold, official_yes_no=official)
    assert 0.0 <= found.f1 <= 1.0 + 1e-12
    assert found.reward in (0.0, 1.0) or found.reward == found.f1 >= threshold
    assert found.em == (found.reward == 1.0 and normalise(prediction) == normalise(gold))
    assert f1_score(prediction, gold) == pytest.approx(f1_score(gold, prediction))
