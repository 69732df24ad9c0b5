"""The record of a sweep whose cells ran as jobs: once, whole, by whoever sees the last of them end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from racelab.experiments.fsio import file_lock, write_json_atomic
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import SpoolWriter, read_spool
from racelab.experiments.tracking.tracker import SHIP_VARIABLE
from racelab.sweeps.cells import Cell, Spec, make_cells, open_cell
from racelab.sweeps.collect import collect
from racelab.sweeps.run import make_plan, open_sweep

SUMMARY = {"validation": {"judged_reward": {"before": 0.25, "after": 0.375, "difference": 0.125}}}


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return make_cells([Spec("a", seed, ("tracking=none",)) for seed in range(3)])


def started(root: Path, cells: list[Cell]) -> tuple[RunFolder, list[RunFolder]]:
    """A sweep and its cells, queued."""
    plan = make_plan("grid", "racelab sweep grid.yaml launcher=slurm", root, cells, fresh=False)
    sweep = open_sweep(plan)
    sweep.update(launcher="slurm")
    return sweep, [open_cell(root, c, r, sweep.run_id) for c, r in zip(plan.cells, plan.run_ids, strict=True)]


def end(run: RunFolder, status: str, reason: str = "") -> None:
    """What an attempt leaves."""
    with run.lock():
        attempt = run.begin_attempt()
        writer = SpoolWriter(run.spool_dir / f"{attempt}.jsonl")
        writer.append([{"kind": "end", "step": 1, "status": status, "reason": reason}])
        if status == "finished":
            write_json_atomic(run.path / "summary.json", SUMMARY)
        run.update(status=status, reason=reason)


def rows(sweep: RunFolder) -> list[dict[str, Any]]:
    """Of the cells, as far as they count."""
    return [row for record in read_spool(sweep) if record["kind"] == "rows" for row in record["rows"]]


def stands(sweep: RunFolder) -> tuple[str, str, int]:
    return sweep.status(), sweep.info()["reason"], len(sweep.attempts())


def test_the_record_is_written_once_all_have_ended_and_again_when_one_of_them_has_changed(
    tmp_path: Path, cells: list[Cell]
) -> None:
    sweep, (one, two, three) = started(tmp_path, cells)
    end(one, "finished")
    end(two, "interrupted", "stopped")
    assert collect(sweep) is False
    assert stands(sweep) == ("queued", "", 0)

    end(three, "failed", "bad luck")
    assert collect(sweep) is True
    assert stands(sweep) == ("failed", f"not finished: {two.run_id}, {three.run_id}", 1)
    assert [(row["cell"], row["status"], row["reason"], row["reward"]) for row in rows(sweep)] == [
        ("a-s0", "finished", "", 0.375),
        ("a-s1", "interrupted", "stopped", None),
        ("a-s2", "failed", "bad luck", None),
    ]
    assert sweep.info()["steps"] == 3
    assert collect(sweep) is False

    three.update(status="queued")  # it goes on as another job
    assert collect(sweep) is False
    end(three, "finished")
    assert collect(sweep) is True
    assert stands(sweep) == ("interrupted", f"not finished: {two.run_id}", 2)
    end(two, "interrupted", "stopped again")  # as before, but later
    assert collect(sweep) is True
    end(two, "finished")
    assert collect(sweep) is True
    assert stands(sweep) == ("finished", "", 4)
    assert [(row["cell"], row["status"]) for row in rows(sweep)] == [
        (f"a-s{seed}", "finished") for seed in range(3)
    ]
    last = [record for record in read_spool(sweep) if record["kind"] == "metrics"][-1]
    assert (last["values"]["cells/finished"], last["values"]["a/reward"]) == (3.0, 0.375)


def test_a_cell_that_is_not_there_has_not_ended(tmp_path: Path, cells: list[Cell]) -> None:
    sweep, (one, two, three) = started(tmp_path, cells)
    for run in (one, two, three):
        end(run, "finished")
    (three.path / "run.json").rename(three.path / "gone")
    assert collect(sweep) is False
    (three.path / "gone").rename(three.path / "run.json")
    assert collect(sweep) is True


def test_of_several_processes_at_once_one_writes(tmp_path: Path, cells: list[Cell]) -> None:
    """One that collects keeps the others out, and so does one that runs the sweep on this machine."""
    sweep, runs = started(tmp_path, cells)
    for run in runs:
        end(run, "finished")
    with file_lock(sweep.path / ".collect.lock"):
        assert collect(sweep) is False
    with sweep.lock():
        assert collect(sweep) is False
    words = [sys.executable, "-m", "racelab.sweeps.collect", str(sweep.path)]
    processes = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "")
    assert stands(sweep) == ("finished", "", 1)
    assert len(rows(sweep)) == 3


def test_what_cannot_be_written_is_said_with_the_exit_code(tmp_path: Path, cells: list[Cell]) -> None:
    sweep, _ = started(tmp_path, cells)
    (sweep.path / "config" / "composed.yaml").write_text("cells: 7\n")
    done = subprocess.run(
        [sys.executable, "-m", "racelab.sweeps.collect", str(sweep.path)],
        stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("the record of the sweep could not be written: ")
    assert "does not name the sweep's cells" in done.stderr


def test_to_a_file_nothing_is_shipped_but_where_to_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite on a shared disk is no place for several writers: `racelab sync` delivers. A server is written to."""
    monkeypatch.delenv(SHIP_VARIABLE, raising=False)
    store = tmp_path / "store.db"
    served = ("tracking.wait_s=0", "tracking.uri=http://127.0.0.1:9")
    for name, words in (("file", (f"tracking.uri=sqlite:///{store}",)), ("server", served)):
        made = make_cells([Spec("a", 0, words)])
        sweep, (run,) = started(tmp_path / name, made)
        end(run, "finished")
        assert collect(sweep) is True
        assert sweep.info()["tracking"]["uri"] == words[-1].removeprefix("tracking.uri=")
        assert (sweep.path / "attempts" / "1" / "shipper.log").exists() is (name == "server")
        assert SHIP_VARIABLE not in os.environ
    assert not store.exists()
