"""Tables as frames: the same from parquet as from the spool."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from racelab.analysis import load as load_module
from racelab.analysis.load import load_manifest, load_metrics, load_table
from racelab.experiments.errors import DataError
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.tables import TABLES
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import StepRecord

Live = tuple[RunFolder, SpoolTracker]


def record(step: int, value: float) -> StepRecord:
    return StepRecord(
        step,
        {"train/reward/mean": value, "race/pool/size": float(step)}
        if step % 2
        else {"train/reward/mean": value},
        {
            "groups": [{"step": step, "prompt_id": "p", "rewards": [value, math.nan], "saturated": step > 1}],
            "phases": [{"step": step, "index": step, "thresholds_before": {"tau": 0.5}}],
            "own": [{"step": step, "note": "n"}],
        },
    )


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    """A run whose second attempt redid steps 3 and 4."""
    run = RunFolder.create(tmp_path, "toy", composed_yaml="", overrides=[], info={})
    with run.lock():
        first = SpoolTracker(run, run.begin_attempt(), ship=False)
        for step in range(1, 5):
            first.record(record(step, 0.25))
        second = SpoolTracker(run, run.begin_attempt(from_step=2), ship=False)
        for step in range(3, 6):
            second.record(record(step, 0.75))
        yield run, second


def test_parquet_and_spool_give_the_same_frames(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    run, tracker = live
    assert load_manifest(run) is None
    before = {name: load_table(run, name) for name in ("groups", "phases", "own", "metrics", "rollouts")}
    tracker.close("finished")
    manifest = load_manifest(run)
    assert manifest is not None
    assert manifest["complete"] is True
    monkeypatch.setattr(load_module, "_from_spool", None)  # parquet it must be now
    for name, frame in before.items():
        pd.testing.assert_frame_equal(load_table(run, name), frame)


def test_values_come_back_as_they_were(live: Live) -> None:
    run, _ = live
    groups = load_table(run, "groups")
    assert list(groups.columns) == list(TABLES["groups"])
    assert list(groups["step"]) == [1, 2, 3, 4, 5]
    assert list(groups["attempt"]) == [1, 1, 2, 2, 2]
    first = groups["rewards"][0]
    assert first[0] == 0.25
    assert math.isnan(first[1])
    assert list(groups["saturated"]) == [False, True, True, True, True]
    assert load_table(run, "phases")["thresholds_before"][4] == {"tau": 0.5}
    assert list(load_table(run, "own")["note"]) == ["n"] * 5


def test_tables_behind_the_spool_are_not_used(live: Live) -> None:
    run, tracker = live
    tracker.close("interrupted")
    third = SpoolTracker(run, run.begin_attempt(from_step=5), ship=False)
    third.record(record(6, 1.0))
    assert list(load_metrics(run).index) == [1, 2, 3, 4, 5, 6]


def test_metrics_against_step(live: Live) -> None:
    run, _ = live
    metrics = load_metrics(run)
    assert list(metrics["train/reward/mean"]) == [0.25, 0.25, 0.75, 0.75, 0.75]
    assert [None if math.isnan(v) else v for v in metrics["race/pool/size"]] == [1.0, None, 3.0, None, 5.0]


def test_the_last_value_of_a_step_counts(live: Live) -> None:
    run, tracker = live
    tracker.metrics(5, {"train/reward/mean": 0.5})
    assert load_metrics(run)["train/reward/mean"][5] == 0.5


def test_known_but_empty_and_unknown_tables(live: Live) -> None:
    run, _ = live
    empty = load_table(run, "rollouts")
    assert (len(empty), list(empty.columns)) == (0, list(TABLES["rollouts"]))
    with pytest.raises(DataError, match="no table 'grups'; it has groups, metrics, own, phases"):
        load_table(run, "grups")


def test_a_broken_table_is_named(live: Live) -> None:
    run, tracker = live
    tracker.close("finished")
    (run.path / "tables" / "groups.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"cannot read .*groups\.parquet .*racelab sync"):
        load_table(run, "groups")


def test_a_table_that_was_removed_is_read_from_the_spool(live: Live) -> None:
    run, tracker = live
    tracker.close("finished")
    whole = load_table(run, "groups")
    (run.path / "tables" / "groups.parquet").unlink()
    pd.testing.assert_frame_equal(load_table(run, "groups"), whole)
    (run.path / "manifest.json").write_text("{", encoding="utf-8")
    pd.testing.assert_frame_equal(load_table(run, "groups"), whole)
