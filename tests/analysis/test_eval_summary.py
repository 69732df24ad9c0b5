"""What the summary of an evaluation counts and says beside its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from racelab.analysis.summary import stored_summary, summarise
from racelab.experiments.evaluation.totals import Row, Total, in_order, lacks_domains, total
from racelab.experiments.fsio import read_json, write_json_atomic
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import StepRecord

from ..cli.eval_folders import make_eval

HALF = [1.0, 0.0] * 60


def add(run: RunFolder, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The summary after one more attempt, which wrote these rows."""
    with run.lock():
        tracker = SpoolTracker(run, run.begin_attempt(from_step=0), ship=False)
        tracker.record(StepRecord(0, {}, {name: list(rows) for name, rows in tables.items()}))
        tracker.close("finished", "")
    return summarise(run)


def answer(
    name: str, example: int, finished: bool, text: str | None = "x", role: str = "answer"
) -> dict[str, Any]:
    return {
        "step": 0, "benchmark": name, "example_id": f"e{example}", "idx": 0, "role": role, "text": text,
        "finished": finished, "n_tokens": 1, "error": "",
    }  # fmt: skip


def test_answers_that_the_token_budget_cut_are_counted(tmp_path: Path) -> None:
    """e0 was cut and answered anew, e1 and e2 are cut, e3 never came, which is no cut."""
    run = make_eval(
        tmp_path, {"gsm8k": [1.0, 0.0, 0.0, None], "ifeval": [1.0], "ifeval-answer": [1.0], "gpqa": [0.0]}
    )
    rows = [
        answer("gsm8k", 0, False), answer("gsm8k", 0, True), answer("gsm8k", 1, False), answer("gsm8k", 2, False),
        answer("gsm8k", 3, False, None), answer("gsm8k", 0, False, role="judge"), answer("ifeval", 0, False),
        answer("gpqa", 0, True),
    ]  # fmt: skip
    found = add(run, {"eval_answers": rows})
    counts = {label: (one["answers"], one["cut"]) for label, one in found["scores"].items()}
    assert counts == {"gsm8k": (3, 2), "gpqa": (1, 0), "ifeval": (1, 1), "ifeval-answer": (1, 1)}
    assert [note for note in found["notes"] if "token budget" in note] == [
        "gsm8k: 2 of 3 answers were cut at the token budget (67 %)",
        "ifeval: 1 of 1 answer was cut at the token budget (100 %)",
    ]


def test_the_judge_is_named(tmp_path: Path) -> None:
    run = make_eval(tmp_path, {"rewardbench2": []}, suite="rubric")
    assert summarise(run)["judge"] is None
    row = {
        "step": 0, "benchmark": "rewardbench2", "domain": "Math", "example_id": "e0", "score": 0.25,
        "status": "unparsed", "judge": "json/qwen", "details": {"right": [None], "wrong": [None] * 3, "credit": 0.25},
    }  # fmt: skip
    found = add(run, {"eval_examples": [row]})
    assert found["judge"] == "json/qwen"
    notes = found["notes"]
    assert "rewardbench2: 1 of 6 subsets" in notes
    assert "rewardbench2: in 1 of 1 example no score could be read" in notes
    assert any(
        "take a larger one (--judge); its replies are in the table eval_answers" in note for note in notes
    )


def test_what_was_not_asked_yet_is_said_with_how_much_there_is(tmp_path: Path) -> None:
    run = make_eval(tmp_path, {"gsm8k": [1.0] * 4, "bbh": [], "gpqa": [1.0, 0.0]})
    assert "not complete: bbh none yet" in summarise(run)["notes"]
    setup = read_json(run.path / "setup.json")
    write_json_atomic(run.path / "setup.json", {**setup, "n": {"gsm8k": 20, "bbh": 7, "gpqa": 2}})
    notes = summarise(run)["notes"]
    assert "not complete: gsm8k 4 of 20 examples, bbh 0 of 7 examples" in notes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval.limit=1"], "partial: only the first example of each benchmark (eval.limit)"),
        (
            ["eval.limit=4"],
            "partial: only the first 4 examples of each benchmark, its domains in turns (eval.limit)",
        ),
    ],
)
def test_a_limit_is_said_in_english(tmp_path: Path, words: list[str], said: str) -> None:
    assert said in summarise(make_eval(tmp_path, {"gsm8k": [1.0]}, *words))["notes"]


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        (
            {"mmlu": [1.0, 0.0]},
            "mmlu: no domain has examples with different scores",
        ),  # one in each: no draw differs
        ({"gsm8k": [1.0, 1.0]}, "gsm8k: every example has the same score"),
        ({"gsm8k": [1.0]}, "gsm8k: there is one example"),
        ({"gsm8k": [1.0, 0.0]}, ""),
    ],
)
def test_an_interval_without_width_is_never_left_alone(
    tmp_path: Path, scores: dict[str, Any], why: str
) -> None:
    found = summarise(make_eval(tmp_path, scores))
    said = [note for note in found["notes"] if "the bootstrap gives no width" in note]
    assert said == ([f"{why}; the bootstrap gives no width, which is no certainty"] if why else [])


@pytest.mark.parametrize(
    ("label", "protocol", "domains", "said"),
    [
        ("mmlu", "olmo3-adapt", ["anatomy", "marketing"], "mmlu: 2 of 57 subjects"),
        ("bbh", "olmo3-adapt", ["snarks"], "bbh: 1 of 27 tasks"),
        ("bbh", "olmo3-adapt", [str(n) for n in range(27)], ""),
        ("agieval", "olmo3-adapt", [str(n) for n in range(8)], ""),
        ("agieval", "lm-eval", [str(n) for n in range(8)], "agieval: 8 of 10 sets"),
        ("gsm8k", "olmo3-adapt", [""], ""),
    ],
)
def test_missing_domains(label: str, protocol: str, domains: list[str], said: str) -> None:
    rows = [Row(label, f"e{n}", domain, 1.0, "scored") for n, domain in enumerate(domains)]
    assert lacks_domains(total(label, rows, protocol), rows, protocol) == said


def test_missing_domains_of_judgebench_are_no_shares_of_its_total() -> None:
    one = Total("judgebench", "avg", 0.5, 2, 0, 0, {"overall": 0.5, "Math": 0.5, "failed_scores": 0.0})
    rows = [Row("judgebench", "e0", "Math", 1.0, "scored"), Row("judgebench", "e1", "Coding", 0.0, "scored")]
    assert lacks_domains(one, rows, "olmo3-adapt") == "judgebench: 1 of 4 categories"


def test_the_order_is_that_of_the_suite(tmp_path: Path) -> None:
    assert in_order(["avg", "ifeval-answer", "bbh", "ifeval", "gsm8k"]) == [
        "gsm8k",
        "bbh",
        "ifeval",
        "ifeval-answer",
        "avg",
    ]
    stored = stored_summary(make_eval(tmp_path, {"agieval": HALF, "bbh": HALF, "gsm8k": HALF}))
    assert stored is not None
    assert list(stored["scores"]) == ["gsm8k", "bbh", "agieval"]
