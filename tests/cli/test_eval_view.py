"""What an evaluation looks like: while it runs, its scores, the evaluations of a sweep; on terminals of any width."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from racelab.analysis.summary import summarise
from racelab.cli import console, eval_view
from racelab.cli.eval_view import Lines, print_eval_cells, print_scores
from racelab.experiments.types import StepRecord
from racelab.sweeps.record import cell_row

from .eval_folders import make_eval

HALF = [1.0, 0.0] * 60


def score(**more: Any) -> dict[str, Any]:
    return {
        "metric": "exact_match_flex", "value": 0.5, "low": 0.4, "high": 0.6, "n": 1319, "answers": 1319, "cut": 0,
        "unparsed": 0, "lost": 0, **more,
    }  # fmt: skip


def summary(**scores: dict[str, Any]) -> dict[str, Any]:
    return {
        "suite": "race",
        "protocol": "olmo3-adapt",
        "seed": 0,
        "scores": scores,
        "avg": None,
        "notes": ["n"],
    }


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes stdout a terminal of so many columns."""

    def make(columns: int) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        for module in (console, eval_view):
            monkeypatch.setattr(module, "on_terminal", lambda: True)
        monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((columns, 24)))

    return make


def test_progress_is_in_per_cent(capsys: Any) -> None:
    lines = Lines()
    status = {"benchmark": "gsm8k", "done": 3, "total": 3, "mean": 1 / 3, "lost": 0, "eta_s": 0.0}
    lines.update(StepRecord(3, {}, {}, status))
    lines.update(StepRecord(3, {}, {}, {**status, "mean": None}))
    first, second = capsys.readouterr().err.splitlines()
    assert first == "gsm8k: 3/3  mean=33.3 %  eta=0s"
    assert "mean=-  " in second


def test_cut_answers_and_the_judge_stand_beside_the_scores(capsys: Any) -> None:
    print_scores({**summary(gsm8k=score(cut=7), agieval=score(answers=0)), "judge": "api/qwen"})
    out, err = capsys.readouterr()
    head, gsm8k, agieval = out.splitlines()
    assert head.split()[-4:] == ["cut", "unparsed", "lost", "metric"]
    assert (gsm8k.split()[-4], agieval.split()[-4]) == ("7", "-")
    assert "seed 0, judge api/qwen; scores in per cent" in err


@pytest.mark.parametrize(
    ("columns", "lost", "left_out"),
    [
        (120, 0, ""),
        (80, 0, "metric"),
        (80, 5, "metric"),
        (60, 0, "metric, unparsed, lost"),
        (60, 5, "metric, unparsed, cut"),
    ],
)
def test_a_narrow_terminal_folds_nothing(
    narrow: Any, capsys: Any, columns: int, lost: int, left_out: str
) -> None:
    narrow(columns)
    print_scores(summary(**{"gsm8k": score(), "mbpp_plus": score(lost=lost), "ifeval-answer": score()}))
    out, err = capsys.readouterr()
    assert (f"columns that do not fit: {left_out}\n" in err) == bool(left_out)
    assert max(map(len, out.splitlines())) <= columns
    for label in ("gsm8k", "mbpp_plus", "ifeval-answer"):
        assert f"│ {label} " in out
    assert "[40.0, 60.0]" in out


def cells(root: Path) -> list[dict[str, Any]]:
    """Two seeds of a (50.0 and 100.0), one of b."""
    made = [("eval-race-a", 0, HALF), ("eval-race-a", 1, [1.0] * 119 + [None]), ("eval-race-b", 0, HALF)]
    names = ["gsm8k", "bbh", "mmlu", "zebralogic", "agieval"]
    runs = [make_eval(root, dict.fromkeys(names, of), "eval.limit=120", seed=seed) for _, seed, of in made]
    return [cell_row(run, label) for run, (label, _, _) in zip(runs, made, strict=True)]


def test_evaluations_of_several_seeds(tmp_path: Path, capsys: Any) -> None:
    rows = cells(tmp_path)
    assert rows[0]["n"]["gsm8k"] == 120
    print_eval_cells(rows)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["eval-race-a", "0"],
        ["eval-race-a", "1"],
        ["eval-race-a", "mean"],
        ["eval-race-b", "0"],
    ]
    assert lines[0].split()[3:8] == ["gsm8k", "bbh", "mmlu", "zebralogic", "agieval"]
    assert "75.0 ± 35.4" in lines[3]
    assert "scores in per cent; mean: of the finished seeds" in err
    assert "examples: 119 to 120 of each; took: " in err
    assert err.count("partial: only the first 120 examples") == 1
    assert err.count("mmlu: 2 of 57 subjects") == 1
    assert "not all have the same notes" in err


def test_many_scores_on_a_narrow_terminal_stand_in_several_tables(
    tmp_path: Path, narrow: Any, capsys: Any
) -> None:
    rows = cells(tmp_path)
    narrow(72)
    print_eval_cells(rows)
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 72
    assert out.count("│ eval-race-b ") == 2
    assert "took: " not in err


def test_too_few_is_said_once_whatever_was_lost(tmp_path: Path, capsys: Any) -> None:
    runs = [make_eval(tmp_path, {"gsm8k": of}) for of in ([1.0, 0.0], [1.0, None])]
    print_eval_cells([cell_row(run, "x") for run in runs])
    assert "too few examples to conclude anything (fewer than 100): gsm8k 1\n" in capsys.readouterr().err


def test_show_of_one_that_was_stopped(tmp_path: Path, call: Any, home: Path) -> None:
    from racelab.experiments.fsio import read_json, write_json_atomic

    run = make_eval(home / "runs", {"gsm8k": [1.0] * 4}, status="interrupted")
    setup = read_json(run.path / "setup.json")
    write_json_atomic(run.path / "setup.json", {**setup, "n": {"gsm8k": 20}})
    assert summarise(run)["scores"]["gsm8k"]["n"] == 4
    done = call("show", run.run_id)
    assert "note: not complete: gsm8k 4 of 20 examples" in done.err
