"""From rows to scores, and what the tracker is told of them."""

from __future__ import annotations

from racelab.experiments.evaluation.totals import Row, metrics_of, suite_totals


def test_counts_are_logged_when_they_are_zero_too() -> None:
    """Else a run that lost examples, and went on until it had them all, would keep the count of before."""
    rows = [Row("gsm8k", f"e{i}", "", score, "scored") for i, score in enumerate((1.0, 0.0))]
    assert metrics_of(suite_totals(rows, "olmo3-adapt"), "race") == {
        "eval/race/gsm8k": 0.5,
        "eval/race/gsm8k_n": 2.0,
        "eval/race/gsm8k_unparsed": 0.0,
        "eval/race/gsm8k_lost": 0.0,
    }
