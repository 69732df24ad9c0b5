"""`racelab compare`, and how evaluations look in `show`, `runs` and a sweep's record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from racelab.analysis.summary import summarise
from racelab.cli.eval_view import print_eval_cells
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.record import cell_row, means

from .conftest import Result
from .eval_folders import make_eval

Call = Callable[..., Result]
GOOD, BAD = [1.0] * 20, [0.0] * 20
HALF = [1.0, 0.0] * 10


@pytest.fixture
def root(home: Path) -> Path:
    return home / "runs"


def test_two_evaluations(root: Path, call: Call) -> None:
    """GSM8K 20/20 against 10/20: ten wins, no loss, p = 2/1024; the interval of the difference excludes 0."""
    a = make_eval(root, {"gsm8k": GOOD, "gpqa": HALF})
    b = make_eval(root, {"gsm8k": HALF, "gpqa": HALF})
    done = call("compare", a.run_id, b.run_id)
    assert done.code == 0, done.err
    line = next(line for line in done.out.splitlines() if line.startswith("gsm8k "))
    for word in ("100.0", "50.0", "+50.0", "0.002", "0.004", "20", "10/10/0"):
        assert word in line
    assert "gsm8k: A is better by 50.0 points" in done.out
    assert "No difference is shown on gpqa" in done.out
    assert "too few examples to conclude anything (fewer than 100): gsm8k 20, gpqa 20" in done.err
    assert "one seed a side" in done.err
    assert call("compare", a.run_id, b.run_id).out == done.out


def test_json(root: Path, call: Call) -> None:
    a, b = make_eval(root, {"gsm8k": GOOD}), make_eval(root, {"gsm8k": HALF})
    found = call("compare", a.run_id, b.run_id, "--json", "--level", "0.9", "--replicates", "500").json()
    one = found["benchmarks"]["gsm8k"]
    assert (one["value_a"], one["value_b"], one["p"], one["n"]) == (1.0, 0.5, pytest.approx(2 / 1024), 20)
    assert one["difference"]["low"] < 0.5 < one["difference"]["high"]
    assert (found["level"], found["replicates"], found["average"]) == (0.9, 500, None)
    assert found["a"]["runs"][0]["run_id"] == a.run_id
    assert found["benchmarks"].keys() == {"gsm8k"}


def test_a_small_lead_after_holm_is_no_claim(root: Path, call: Call) -> None:
    """Six wins of 20, no loss: p = 2/64 = 0.031; with three more benchmarks Holm makes it 0.125."""
    six = [1.0] * 6 + [0.0] * 14
    a = make_eval(root, {"gsm8k": six, "gpqa": HALF, "bbh": HALF, "popqa": HALF})
    b = make_eval(root, {"gsm8k": BAD, "gpqa": HALF, "bbh": HALF, "popqa": HALF})
    out = call("compare", a.run_id, b.run_id).out
    assert "which excludes 0, but p after Holm is 0.125: no claim." in out
    assert "is better" not in out
    alone = call("compare", a.run_id, b.run_id, "--benchmarks", "gsm8k").out
    assert "gsm8k: A is better by 30.0 points" in alone
    assert "gpqa" not in alone


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["eval.limit=5"], {"data": "d2"}, "differ in eval.limit (--limit): all and 5"),
        (["eval.quirks=[]"], {}, "differ in eval.quirks"),
        (["eval.protocol=lm-eval"], {}, "differ in eval.protocol: olmo3-adapt and lm-eval"),
        (["eval.thinking=strip"], {}, "differ in eval.thinking: protocol and strip"),
        ([], {"data": "d2"}, "differ in eval.data.gsm8k"),
        ([], {"status": "running"}, "has not finished"),
    ],
)
def test_unlike_things_are_refused(
    words: list[str], options: dict[str, Any], message: str, root: Path, call: Call
) -> None:
    a, b = make_eval(root, {"gsm8k": GOOD}), make_eval(root, {"gsm8k": HALF}, *words, **options)
    done = call("compare", a.run_id, b.run_id)
    assert done.code == 2, done.err
    assert message in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""


def test_the_examples_count_not_the_limit(root: Path, call: Call) -> None:
    a, b = make_eval(root, {"gsm8k": GOOD}), make_eval(root, {"gsm8k": HALF}, "eval.limit=20")
    done = call("compare", a.run_id, b.run_id)
    assert done.code == 0, done.err
    for run in (a, b):
        (run.path / "setup.json").unlink()
    assert "differ in eval.limit (--limit): all and 20" in call("compare", a.run_id, b.run_id).err


def test_an_evaluation_on_both_sides_is_refused(root: Path, call: Call) -> None:
    a, b, k = (make_eval(root, {"gsm8k": GOOD}, seed=seed).run_id for seed in (0, 0, 1))
    for sides in ((f"{a},{k}", f"{b},{k}"), (k, k)):
        done = call("compare", *sides)
        assert (done.code, f"{k} stands on both sides" in done.err) == (2, True)


def test_p_of_a_benchmark_does_not_depend_on_the_others(root: Path, call: Call) -> None:
    """Fifteen of 30 examples differ: the sign flips are drawn, not gone through."""
    some, other = [1.0] * 10 + [0.0] * 20, [0.0] * 10 + [1.0] * 6 + [0.0] * 14
    a, b = (make_eval(root, {"gsm8k": one, "mmlu": one}) for one in (some, other))
    both = call("compare", a.run_id, b.run_id, "--json").json()["benchmarks"]
    alone = call("compare", a.run_id, b.run_id, "--benchmarks", "mmlu", "--json").json()["benchmarks"]
    for key in ("p", "difference"):
        assert alone["mmlu"][key] == both["mmlu"][key]
    assert both["gsm8k"]["p"] != both["mmlu"]["p"]


def test_another_suite_or_judge_is_refused(root: Path, call: Call) -> None:
    a, b = make_eval(root, {"gsm8k": GOOD}), make_eval(root, {"ifeval": GOOD}, suite="ifeval")
    assert "differ in eval.suite: race and ifeval" in call("compare", a.run_id, b.run_id).err
    details = {"games": [[1, 0], [1, 0]], "decisions": [1, 1], "label": "A>B"}
    pair: dict[str, Any] = {"suite": "rubric", "details": details}
    c = make_eval(root, {"judgebench": GOOD}, **pair)
    d = make_eval(root, {"judgebench": HALF}, "judge=json", "judge.source=org/strong", **pair)
    assert "differ in judge.source: policy and org/strong" in call("compare", c.run_id, d.run_id).err
    e = make_eval(root, {"judgebench": HALF}, "rubric.max_tokens=99", **pair)
    done = call("compare", c.run_id, e.run_id)
    assert done.code == 0, done.err
    assert "differ in rubric.max_tokens" in done.err


def test_other_examples_are_refused(root: Path, call: Call) -> None:
    a, b = make_eval(root, {"gsm8k": GOOD}), make_eval(root, {"gsm8k": HALF[:19]})
    done = call("compare", a.run_id, b.run_id)
    assert done.code != 0
    assert "'e19' is in A (seed 0), not in B (seed 0)" in done.err
    assert "same --limit and data" in done.err


def test_what_only_one_side_has_is_said(root: Path, call: Call) -> None:
    a, b = make_eval(root, {"gsm8k": GOOD, "gpqa": GOOD}), make_eval(root, {"gsm8k": HALF})
    assert (
        f"not compared, since not all have it: gpqa of {a.run_id}" in call("compare", a.run_id, b.run_id).err
    )
    asked = call("compare", a.run_id, b.run_id, "--benchmarks", "gpqa")
    assert (asked.code, f"{b.run_id} has no examples of it" in asked.err) == (2, True)


def test_training_runs_are_looked_up(root: Path, call: Call, make_run: Callable[..., RunFolder]) -> None:
    """The newest finished evaluation of the newest checkpoint counts; without one the message says what to type."""
    one, two = make_run("one"), make_run("two")
    missing = call("compare", "one", "two")
    assert missing.code == 2
    assert f"racelab eval {one.run_id}" in missing.err

    def of(run: RunFolder, step: int) -> dict[str, Any]:
        return {
            "evaluates": {"kind": "run", "run_id": run.run_id, "checkpoint": step, "seed": 0, "source": "x"}
        }

    make_eval(root, {"gsm8k": BAD}, **of(one, 5))
    make_eval(root, {"gsm8k": BAD}, **of(one, 9))
    newest = make_eval(root, {"gsm8k": GOOD}, **of(one, 9))
    newest.update(started="2999-01-01T00:00:00.000+00:00")
    make_eval(root, {"gsm8k": BAD}, **of(one, 12), status="running")
    other = make_eval(root, {"gsm8k": HALF}, **of(two, 3))
    done = call("compare", "one", "two")
    assert done.code == 0, done.err
    assert f"of 3 evaluations the newest of step 9 counts: {newest.run_id}" in done.err
    assert f"B: two: {other.run_id} (seed 0/0)" in done.err
    assert "100.0" in done.out
    make_eval(root, {"ifeval": GOOD}, suite="ifeval", **of(one, 9))
    assert "choose with --suite" in call("compare", "one", "two").err
    assert call("compare", "one", "two", "--suite", "race").code == 0


def test_several_with_commas_are_seeds(root: Path, call: Call) -> None:
    a = [make_eval(root, {"gsm8k": GOOD}, seed=s) for s in range(3)]
    b = [make_eval(root, {"gsm8k": HALF}, seed=s) for s in range(3)]
    words = [",".join(run.run_id for run in side) for side in (a, b)]
    done = call("compare", *words)
    assert done.code == 0, done.err
    assert "seeds: 3 of A, 3 of B, drawn in pairs" in done.err
    assert "the spread between seeds is underestimated" in done.err
    twice = call("compare", f"{a[0].run_id},{b[0].run_id}", words[1])
    assert "have the same seed 0; name one of them" in twice.err


def test_show_and_runs(root: Path, call: Call) -> None:
    run = make_eval(root, {"gsm8k": HALF, "gpqa": [1.0, None]}, "eval.limit=20", name="mine")
    shown = call("show", "mine")
    assert shown.code == 0, shown.err
    assert "evaluates smollm2-135m" in shown.out
    assert "50.0" in next(line for line in shown.out.splitlines() if line.startswith("gsm8k "))
    assert "partial: only the first 20 examples" in shown.err
    assert f"gpqa: 1 example got no answer and is left out; `racelab resume {run.run_id}`" in shown.err
    found = call("show", "mine", "--json").json()
    assert (found["family"], found["scores"]["gsm8k"]["value"], found["kind"]) == ("eval", 0.5, "eval")
    assert "it has no steps" in call("show", "mine", "--step", "1").err
    line = next(line for line in call("runs").out.splitlines() if run.run_id in line)
    assert "eval/race" in line
    assert "22 marks" in line


def test_the_summary_has_intervals_and_says_what_to_beware_of(root: Path) -> None:
    run = make_eval(root, {"gsm8k": HALF, "gpqa": GOOD}, "eval.quirks=[article-a]")
    found = summarise(run)
    s = found["scores"]["gsm8k"]
    assert (s["value"], s["n"], s["unparsed"], s["lost"], s["parts"]) == (
        0.5,
        20,
        0,
        0,
        {"Math": 1.0, "Coding": 0.0},
    )
    assert 0.2 < s["low"] < 0.4 < 0.6 < s["high"] < 0.8
    assert summarise(run) == found
    text = "\n".join(found["notes"])
    for words in (
        "too few examples",
        "gpqa: every example has the same score",
        "quirks of the protocol that are off",
    ):
        assert words in text
    assert found["avg"] is None


def test_a_sweep_records_scores_and_their_spread(root: Path) -> None:
    """1 and 1/2: mean 3/4, standard deviation sqrt(2 · (1/4)^2) = 0.35355."""
    runs = [make_eval(root, {"gsm8k": scores}, seed=s) for s, scores in enumerate((GOOD, HALF))]
    rows = [cell_row(run, "eval-race-x") for run in runs]
    assert [row["scores"] for row in rows] == [{"gsm8k": 1.0}, {"gsm8k": 0.5}]
    found = means(rows)
    assert found["eval-race-x/gsm8k"] == 0.75
    assert found["eval-race-x/gsm8k_std"] == pytest.approx(0.35355, abs=1e-5)


def test_a_cell_that_lost_examples_has_its_scores_and_counts_them(root: Path, capsys: Any) -> None:
    run = make_eval(root, {"gsm8k": [1.0, 0.0, None], "gpqa": HALF}, status="failed")
    row = cell_row(run, "x")
    assert (row["status"], row["scores"], row["lost"]) == (
        "failed",
        {"gsm8k": 0.5, "gpqa": 0.5},
        {"gsm8k": 1},
    )
    assert means([row]) == {}
    print_eval_cells([row])
    head, *_, line = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["lost", "took"]
    assert line.split()[5] == "1"


def _sweep(root: Path, name: str, cells: list[tuple[str, RunFolder]]) -> RunFolder:
    entries = [
        {"cell": f"{label}-s{i}", "run_id": run.run_id, "label": label, "seed": i}
        for i, (label, run) in enumerate(cells)
    ]
    return RunFolder.create(
        root, name, composed_yaml=yaml.safe_dump({"cells": entries}), overrides=[],
        info={"kind": "sweep", "command": "racelab eval x --seeds 0,1"},
    )  # fmt: skip


def test_the_cells_of_a_sweep_are_seeds(root: Path, call: Call) -> None:
    good = [make_eval(root, {"gsm8k": GOOD}, seed=s) for s in range(2)]
    half = [make_eval(root, {"gsm8k": HALF}, seed=s) for s in range(2)]
    _sweep(root, "a", [("x", run) for run in good])
    _sweep(root, "b", [("y", run) for run in half])
    done = call("compare", "a", "b")
    assert done.code == 0, done.err
    assert "seeds: 2 of A, 2 of B, drawn in pairs" in done.err
    shown = call("show", "a")
    assert shown.code == 0, shown.err
    assert "gsm8k" in shown.out
    assert "100.0" in shown.out
    _sweep(root, "mixed", [("x", good[0]), ("y", half[1])])
    mixed = call("compare", "mixed", "b")
    assert mixed.code == 2
    assert (
        f"is a sweep over x, y; a side is one of them: name its cells with commas, as {good[0].run_id}"
        in mixed.err
    )
