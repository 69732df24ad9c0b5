"""reasoning-gym prompts: made from a seed, kept as JSON, scored by their own scorer."""

from __future__ import annotations

import json
import sys

import pytest

from racelab.experiments.data.checks import passes, score
from racelab.experiments.data.gym import extract_answer, read_gym, score_entry
from racelab.experiments.errors import ConfigError, DataError, MissingDependencyError

pytest.importorskip("reasoning_gym")
NAMES = ["chain_sum", "basic_arithmetic", "number_sorting"]


def test_prompts_are_seeded_and_survive_json():
    rows = read_gym(NAMES, 4, 5)
    assert len(rows) == 12
    assert len({p.prompt_id for p in rows}) == 12
    assert rows == read_gym(NAMES, 4, 5)
    assert rows[0].text != read_gym(NAMES, 4, 6)[0].text
    for p in rows:
        assert p.source == "reasoning-gym"
        assert p.category in NAMES
        assert json.loads(json.dumps(p.check)) == p.check


def test_right_answers_pass_and_wrong_ones_fail():
    for p in read_gym(["chain_sum"], 5, 0):
        answer = p.check["entry"]["answer"]
        for text in (
            answer,
            f"The answer is {answer}.",
            f"x\n<answer> {answer} </answer> y",
            f"It is **{answer}**",
        ):
            assert passes(p.check, text), text
        for text in ("", "I do not know", str(int(answer) + 1), p.text, f"{answer}1"):
            assert not passes(p.check, text), text
    for p in read_gym(["number_sorting"], 2, 0):
        assert passes(p.check, str(p.check["entry"]["answer"]))


@pytest.mark.parametrize(
    ("text", "reference", "expected"),
    [
        ("<answer>1</answer> then <ANSWER>\n2 </ANSWER>", "x", "2"),
        ("The answer is: blue.\nBye", "red", "blue"),
        ("Thinking.\nThe answer is 12 apples", "12", "12"),
        ("First 3, then\n**1,204.**", "7", "1204"),
        ("no idea", "7", "no idea"),
        ("line one\nline two.", "x", "line two"),
        ("1 2\n3 4", "5 6\n7 8", "1 2\n3 4"),
        ("He came.", "He went.", "He came."),
        ("a\nb", None, "a\nb"),
        ("  ", "x", ""),
    ],
)
def test_extraction(text, reference, expected):
    assert extract_answer(text, reference) == expected


def test_partial_credit_and_threshold():
    """The scorer gives len(oracle) / len(answer) = 3/7 where the oracle stands among other text."""
    entry = {"question": "q", "answer": "abc", "metadata": {}}
    check = {"kind": "reasoning_gym", "dataset": "leg_counting", "entry": entry, "threshold": 0.4}
    assert score(check, "abc def") == pytest.approx(0.42857142857142855)
    assert passes(check, "abc def")
    assert not passes({**check, "threshold": 0.5}, "abc def")


def test_what_cannot_be_used_is_named():
    with pytest.raises(ConfigError, match=r"no data set 'chain_sums'; did you mean chain_sum"):
        read_gym(["chain_sums"], 1, 0)
    with pytest.raises(ConfigError, match="given twice"):
        read_gym(["chain_sum", "chain_sum"], 1, 0)
    with pytest.raises(ConfigError, match="size must be >= 1"):
        read_gym(["chain_sum"], 0, 0)
    with pytest.raises(ConfigError, match="composite"):
        read_gym(["composite"], 1, 0)
    with pytest.raises(DataError, match=r"rearc.*leave it out"):
        read_gym(["rearc"], 1, 1)
    with pytest.raises(DataError, match="no data set 'nope'"):
        score_entry("nope", {"answer": "1"}, "1")


def test_a_scorer_that_stumbles_over_nonsense_gives_zero_but_a_broken_entry_is_an_error():
    (p,) = read_gym(["countdown"], 1, 0)
    assert score(p.check, "((") < 0.99
    with pytest.raises(DataError, match="cannot read the entry"):
        score_entry("sudoku", {"answer": "1"}, "1 + 2")
    with pytest.raises(DataError, match="composite has no scorer"):
        score_entry("composite", {"answer": "1"}, "1")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'racelab\[reasoning-gym\]'"):
        read_gym(["chain_sum"], 1, 0)


@pytest.mark.slow
def test_every_data_set_is_either_usable_or_refused():
    from reasoning_gym.factory import DATASETS

    refused = []
    for name in sorted(DATASETS):
        try:
            rows = read_gym([name], 2, 1)
        except (ConfigError, DataError):
            refused.append(name)
            continue
        for p in rows:
            answer = p.check["entry"]["answer"]
            if answer is not None:
                assert passes(p.check, str(answer)), p.prompt_id
            assert not passes(p.check, "")
    assert refused == ["arc_agi", "composite", "rearc"]
