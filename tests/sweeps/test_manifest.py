"""Finding runs by what people type."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from racelab.experiments.errors import RunFolderError
from racelab.experiments.runfolder import RunFolder, write_json_atomic
from racelab.sweeps.manifest import list_runs, resolve, survey

FIELDS = {
    "run_id", "name", "kind", "method", "variant", "task", "condition", "seed", "status", "path",
    "mlflow_run_id",    "started", "steps",
}  # fmt: skip


def make(root: Path, name: str, day: int, suffix: str = "aaaaaa", **info: object) -> RunFolder:
    return RunFolder.create(
        root, name, composed_yaml="", overrides=[], info=info, suffix=lambda: suffix,
        clock=lambda: datetime(2026, 5, day, tzinfo=UTC),
    )  # fmt: skip


def test_newest_first_with_the_promised_fields(tmp_path: Path) -> None:
    make(tmp_path, "old", 1)
    make(tmp_path / "sweep-1", "new", 3, kind="ablate", method="race", variant="no_pool", seed=2, steps=30)
    make(tmp_path, "middle", 2)
    (tmp_path / "notes").mkdir()
    runs = list_runs(tmp_path)
    assert [r.name for r in runs] == ["new", "middle", "old"]
    newest = runs[0].to_json()
    assert newest.keys() >= FIELDS
    assert newest | {
        "kind": "ablate", "method": "race", "variant": "no_pool", "seed": 2, "status": "queued", "steps": 30,
        "mlflow_run_id": None, "path": str(tmp_path / "sweep-1" / newest["run_id"]),
    } == newest  # fmt: skip
    assert list_runs(tmp_path / "missing") == []


def test_a_killed_run_is_listed_as_stale(tmp_path: Path) -> None:
    run = make(tmp_path, "x", 1)
    with run.lock():
        run.begin_attempt()
        assert list_runs(tmp_path)[0].status == "running"
    assert list_runs(tmp_path)[0].status == "stale"


def test_every_way_to_name_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(tmp_path, "alpha", 1), make(tmp_path, "beta", 2)
    assert resolve(tmp_path, first.run_id) == first
    assert resolve(tmp_path, "20260501") == first
    assert resolve(tmp_path, "beta") == second
    assert resolve(tmp_path, "latest") == second
    assert resolve(tmp_path / "elsewhere", str(first.path)) == first
    monkeypatch.chdir(tmp_path)
    assert resolve("elsewhere", first.run_id) == first  # a folder name, typed inside the root


def test_ambiguous_and_unknown_names_list_the_near_ones(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no runs in .*racelab train"):
        resolve(tmp_path, "latest")
    first = make(tmp_path, "alpha", 1, "aaaaaa")
    second = make(tmp_path, "alpha", 1, "bbbbbb")
    with pytest.raises(RunFolderError, match=rf"'alpha' means 2 runs: .*{first.run_id} \(alpha, queued\)"):
        resolve(tmp_path, "alpha")
    with pytest.raises(RunFolderError, match=r"'2026' means 2 runs.*give the whole run id"):
        resolve(tmp_path, "2026")
    assert resolve(tmp_path, second.run_id[:-3]) == second
    with pytest.raises(RunFolderError, match=rf"no run 'alhpa' .*near: {second.run_id} \(alpha"):
        resolve(tmp_path, "alhpa")
    with pytest.raises(RunFolderError, match=r"no run 'zzz' .*the newest are"):
        resolve(tmp_path, "zzz")
    with pytest.raises(RunFolderError, match=r"no run in .*run.json is missing"):
        resolve(tmp_path, str(tmp_path / "nope"))


def test_another_schema_is_not_listed_but_explained(tmp_path: Path) -> None:
    run = make(tmp_path, "x", 1)
    make(tmp_path, "y", 2)
    write_json_atomic(run.path / "run.json", run.info() | {"schema": 2})
    assert [r.name for r in list_runs(tmp_path)] == ["y"]
    with pytest.raises(RunFolderError, match=r"has schema 2"):
        resolve(tmp_path, run.run_id)


def test_a_damaged_run_keeps_no_other_from_being_listed(tmp_path: Path) -> None:
    bad = make(tmp_path, "x", 1)
    make(tmp_path, "y", 2)
    write_json_atomic(bad.path / "run.json", bad.info() | {"steps": "many"})
    found, damaged = survey(tmp_path)
    assert [info.name for info in found] == ["y"]
    assert list(damaged) == [bad.path]
    assert "steps is 'many'" in damaged[bad.path]


def test_the_newest_that_trained_is_no_evaluation(tmp_path: Path) -> None:
    make(tmp_path, "old", 1, kind="train", method="race")
    with_cells = make(tmp_path, "cells", 2, kind="sweep", method="race")
    evaluation = make(tmp_path, "eval", 3, kind="eval", method="eval")
    several = make(tmp_path, "evals", 4, kind="sweep", method="eval")
    assert resolve(tmp_path, "latest") == several
    assert resolve(tmp_path, "latest", trained=True) == with_cells
    assert resolve(tmp_path, evaluation.run_id, trained=True) == evaluation
    make(tmp_path / "other", "eval", 1, kind="eval", method="eval")
    with pytest.raises(
        RunFolderError, match="has trained, all are evaluations; start one with `racelab train`"
    ):
        resolve(tmp_path / "other", "latest", trained=True)
