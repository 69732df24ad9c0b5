"""What a sweep says of its cells, and the record of the sweep's own run."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from racelab.experiments import runlock
from racelab.experiments.errors import RunFolderError
from racelab.experiments.fsio import file_lock, write_json_atomic
from racelab.experiments.runfolder import RunFolder, RunLock
from racelab.experiments.signals import StopRequest
from racelab.experiments.tracking.spool import SpoolWriter, read_spool
from racelab.sweeps import launch
from racelab.sweeps.cells import Cell, Spec, make_cells, open_cell
from racelab.sweeps.launch import CellState
from racelab.sweeps.record import cell_row, last_stamp, means, numbers, wall_seconds
from racelab.sweeps.run import Plan, _end, make_plan, members, open_sweep, rows_of, run_sweep

SUMMARY = {
    "steps": {"policy": 8, "rubric": 3},
    "phases": [
        {"kind": "policy", "length": 3, "end_reason": "saturation"},
        {"kind": "rubric", "length": 3, "end_reason": "plateau"},
        {"kind": "policy", "length": 4, "end_reason": "saturation"},
        {"kind": "policy", "length": 1, "end_reason": "budget"},
    ],
    "quarantine_rate": 0.25,
    "collapse_rate": None,
    "validation": {
        "judged_reward": {"before": 0.25, "after": 0.375, "difference": 0.125},
        "rule_success": {"before": None, "after": None, "difference": None},
    },
}


def test_the_numbers_of_a_summary() -> None:
    """Policy phases that ended by themselves: (3 + 4) / 2 = 3.5; the budget cut the last, of length 1."""
    assert numbers(SUMMARY) == {
        "reward": 0.375,
        "reward_gain": 0.125,
        "quarantine_rate": 0.25,
        "policy_updates": 8.0,
        "rubric_updates": 3.0,
        "n_phases": 4.0,
        "policy_phase_len": 3.5,
        "rubric_phase_len": 3.0,
    }
    assert numbers({}) == {}


def test_means_are_over_the_finished_cells_of_a_label() -> None:
    """full: (0.5 + 0.75) / 2 = 0.625; std with n - 1: sqrt(2 * (1/8)^2 / 1) = sqrt(1/32) = 0.1767767.

    static: one cell, so no std; the failed cell counts nowhere.
    """
    rows = [
        row("full", "finished", 0.5),
        row("full", "finished", 0.75),
        row("full", "failed", 9.0),
        row("static", "finished", 0.25),
        row("other", "failed", 1.0),
    ]
    found = means(rows)
    assert found == {
        "full/reward": 0.625,
        "full/reward_std": pytest.approx(0.1767767, abs=1e-7),
        "static/reward": 0.25,
    }


def row(label: str, status: str, reward: float) -> dict[str, Any]:
    from racelab.sweeps.record import NAMES

    return {"label": label, "status": status, **dict.fromkeys(NAMES), "reward": reward}


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    rates = {"a": "1e-4", "b": "2e-4"}
    return make_cells(
        [
            Spec(label, seed, ("tracking=none", f"learner.lr={rate}"))
            for label, rate in rates.items()
            for seed in (0, 1)
        ]
    )


class Ended:
    """A child that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code


@dataclass
class Children:
    """In the place of processes: cells end at once, those in `fail` badly and the others well."""

    started: list[str] = field(default_factory=list)
    fail: set[str] = field(default_factory=set)

    def spawn(self, state: CellState, jobs: int) -> Ended:
        name, run = f"{state.cell.label}-s{state.cell.seed}", state.folder
        self.started.append(name)
        bad = name in self.fail
        with run.lock():
            attempt = run.begin_attempt()
            writer = SpoolWriter(run.spool_dir / f"{attempt}.jsonl")
            writer.append(
                [{"kind": "end", "step": 1, "status": "failed" if bad else "finished", "reason": ""}]
            )
            if not bad:
                write_json_atomic(run.path / "summary.json", SUMMARY)
            run.update(status="failed" if bad else "finished", reason="bad luck" if bad else "")
        state.log.write_text("error: bad luck\n" if bad else "")
        return Ended(int(bad))


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    found = Children()
    monkeypatch.setattr(launch, "_spawn", found.spawn)
    monkeypatch.setattr(launch, "POLL_S", 0.0)
    return found


class Nobody:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def start(self, name: str, states: object) -> None: ...

    def changed(self, state: CellState) -> None: ...

    def tick(self, states: object) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stop(self) -> None: ...


def start(plan: Plan, view: Nobody | None = None, resume: bool = False) -> Any:
    with StopRequest() as stop:
        return run_sweep(plan, 1, resume, view or Nobody(), stop)


def plan(root: Path, cells: list[Cell], fresh: bool = False) -> Plan:
    return make_plan("grid", "racelab sweep grid.yaml", root, cells, fresh)


def test_a_sweep_is_a_run_with_a_row_per_cell_and_means_over_seeds(
    tmp_path: Path, cells: list[Cell], children: Children
) -> None:
    result = start(plan(tmp_path, cells))
    assert (result.status, result.exit_code) == ("finished", 0)
    sweep = result.folder
    info = sweep.info()
    assert (info["kind"], info["status"], info["steps"], info["command"]) == (
        "sweep", "finished", 4, "racelab sweep grid.yaml",
    )  # fmt: skip
    rows = [row for record in read_spool(sweep) if record["kind"] == "rows" for row in record["rows"]]
    assert [(row["cell"], row["status"], row["reward"]) for row in rows] == [
        (f"{label}-s{seed}", "finished", 0.375) for label in "ab" for seed in (0, 1)
    ]
    last = [r for r in read_spool(sweep) if r["kind"] == "metrics"][-1]
    assert (last["step"], last["values"]["cells/finished"]) == (4, 4.0)
    assert (last["values"]["b/reward"], last["values"]["b/reward_std"]) == (0.375, 0.0)
    assert (sweep.path / "tables" / "cells.parquet").is_file()
    assert [RunFolder.open(tmp_path / m["run_id"]).info()["sweep"] for m in members(sweep)] == [
        sweep.run_id
    ] * 4


def test_started_again_only_the_failed_cell_runs_in_the_same_folders_and_the_same_parent(
    tmp_path: Path, cells: list[Cell], children: Children
) -> None:
    children.fail = {"a-s1"}
    first = start(plan(tmp_path, cells))
    assert (first.status, first.exit_code) == ("failed", 1)
    assert [row["status"] for row in first.rows] == ["finished", "failed", "finished", "finished"]
    assert first.rows[1]["reason"] == "bad luck"
    assert first.folder.info()["reason"].startswith("not finished: a-s1-")
    assert rows_of(first.folder)[1]["status"] == "failed"
    children.fail = set()
    second = start(plan(tmp_path, cells), resume=True)
    assert (second.status, second.exit_code, second.folder) == ("finished", 0, first.folder)
    assert children.started == ["a-s0", "a-s1", "b-s0", "b-s1", "a-s1"]
    rows = [row["cell"] for r in read_spool(second.folder) if r["kind"] == "rows" for row in r["rows"]]
    assert sorted(rows) == ["a-s0", "a-s1", "b-s0", "b-s1"]
    third = start(plan(tmp_path, cells))
    assert (third.status, len(children.started), len(third.folder.attempts())) == ("finished", 5, 2)


def test_who_gives_up_waiting_as_the_other_process_lets_go_of_the_sweep_records_it(
    tmp_path: Path, cells: list[Cell], children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes run the sweep: the lock of the other is gone right after this one was told that it is in use."""
    grid = plan(tmp_path, cells)
    other, take = open_sweep(grid).lock(), RunFolder.lock

    def lock(folder: RunFolder) -> RunLock:
        try:
            return take(folder)
        except RunFolderError:
            other.release()
            raise

    monkeypatch.setattr(runlock, "_LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(RunFolder, "lock", lock)
    result = start(grid)
    assert (result.status, result.exit_code) == ("finished", 0)
    assert (result.folder.status(), len(result.folder.attempts())) == ("finished", 1)


def test_a_lock_that_is_taken_but_not_yet_signed_leaves_the_record_to_the_other_process(
    tmp_path: Path, cells: list[Cell], children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has the flock, and no holder nor heartbeat tells so yet: the cells are run all the same."""
    monkeypatch.setattr(runlock, "_LOCK_WAIT_S", 0.0)
    grid = plan(tmp_path, cells)
    sweep = open_sweep(grid)
    with file_lock(sweep.path / "lock"):
        assert not sweep.is_held()
        result = start(grid)
    assert (result.status, result.exit_code) == ("finished", 0)
    assert (sweep.status(), sweep.attempts()) == ("queued", [])


def test_a_sweep_whose_lock_cannot_be_made_is_an_error(
    tmp_path: Path, cells: list[Cell], children: Children
) -> None:
    grid = plan(tmp_path, cells)
    (open_sweep(grid).path / "lock").mkdir()  # as unwritable as a read-only disk, also for root
    with pytest.raises(RunFolderError, match="cannot lock"):
        start(grid)
    assert children.started == []


@pytest.mark.slow
def test_a_store_that_was_away_gets_one_parent_whichever_run_comes_first(
    tmp_path: Path, cells: list[Cell], children: Children
) -> None:
    """A cell is delivered before its sweep: it makes the parent, which the sweep then finds and fills."""
    import mlflow

    from racelab.experiments.tracking.shipper import sync

    sweep = start(plan(tmp_path, cells[:2])).folder
    runs = [RunFolder.open(tmp_path / str(member["run_id"])) for member in members(sweep)]
    for run in (runs[0], sweep, runs[1]):
        sync(run)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    parent = client.get_run(sweep.info()["mlflow_run_id"])
    assert (parent.info.run_name, parent.info.status) == ("grid", "FINISHED")
    assert parent.data.tags["racelab.run_id"] == sweep.run_id
    assert parent.data.metrics["a/reward"] == 0.375
    for run in runs:
        tags = client.get_run(run.info()["mlflow_run_id"]).data.tags
        assert tags["mlflow.parentRunId"] == parent.info.run_id
    experiment = client.get_experiment_by_name("racelab")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 3


def test_fresh_starts_anew_beside_and_goes_on_there(
    tmp_path: Path, cells: list[Cell], children: Children
) -> None:
    first = start(plan(tmp_path, cells))
    fresh = start(plan(tmp_path, cells, fresh=True))
    assert fresh.folder.run_id == f"{first.folder.run_id}-2"
    assert [m["run_id"] for m in members(fresh.folder)] == [f"{cell.cell_id}-2" for cell in cells]
    assert len(children.started) == 8
    assert plan(tmp_path, cells).run_id == fresh.folder.run_id
    assert plan(tmp_path, cells).statuses() == ["finished"] * 4


def test_a_cell_that_another_sweep_has_finished_is_not_run_again(
    tmp_path: Path, cells: list[Cell], children: Children
) -> None:
    start(plan(tmp_path, cells[:1]))
    result = start(plan(tmp_path, cells))
    assert [state.skipped for state in result.states] == [True, False, False, False]
    assert children.started == ["a-s0", "a-s1", "b-s0", "b-s1"]


def test_a_reused_cell_is_named_since_it_stays_a_child_of_the_sweep_that_ran_it(
    tmp_path: Path, cells: list[Cell], children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    from racelab.cli.show import show
    from racelab.experiments.tracking.description import run_tags

    first = start(plan(tmp_path, cells[:1])).folder
    assert "racelab.reused_cells" not in run_tags(first)
    second = start(plan(tmp_path, cells)).folder
    mine = cells[0].cell_id
    tags = run_tags(second)
    assert tags["racelab.reused_cells"] == mine
    assert f"- cells of another sweep, whose children they are: `{mine}`" in tags["mlflow.note.content"]
    show(str(second.path), step=None, rollout=None, html=None, full=False, root=None, json_output=False)
    assert f"  reused    {mine}: children of another sweep in MLflow\n" in capsys.readouterr().out
    shutil.rmtree(first.path)  # the same id comes again, but not the same sweep
    again = start(plan(tmp_path, cells[:1])).folder
    assert again.info()["reused_cells"] == [mine]


def test_what_has_finished_under_another_label_is_not_run_again(tmp_path: Path, children: Children) -> None:
    """`b` is `a` under another name; seed 1 of it has failed, so it runs anew under the new name."""
    words = ("tracking=none", "learner.lr=1e-4")
    first, second = (make_cells([Spec(label, seed, words) for seed in (0, 1)]) for label in "ab")
    children.fail = {"a-s1"}
    start(plan(tmp_path, first))
    result = start(plan(tmp_path, second))
    assert children.started == ["a-s0", "a-s1", "b-s1"]
    assert [state.folder.run_id for state in result.states] == [first[0].cell_id, second[1].cell_id]
    assert [row["label"] for row in result.rows] == ["b", "b"]
    assert plan(tmp_path, second, fresh=True).run_ids == (second[0].cell_id, f"{second[1].cell_id}-2")


def test_nothing_to_resume_is_an_error_and_leaves_nothing(tmp_path: Path, cells: list[Cell]) -> None:
    from racelab.experiments.errors import ConfigError

    with pytest.raises(ConfigError, match="no cell of the sweep grid has been started"):
        start(plan(tmp_path / "runs", cells), resume=True)
    assert not (tmp_path / "runs").exists()


def test_finished_cells_of_other_code_are_named(
    tmp_path: Path, cells: list[Cell], children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another commit, another version, other uncommitted changes; of the last cell nothing is known."""
    from racelab.sweeps import run as run_module

    now = {"version": "2.0", "sha": "f" * 40, "diff": None}
    monkeypatch.setattr(run_module, "code_state", lambda: now)
    result = start(plan(tmp_path, cells))
    for state, other in zip(
        result.states, ({}, {"sha": "0" * 40}, {"version": "1.9", "diff": "abc"}, None), strict=True
    ):
        state.folder.update(code=None if other is None else {**now, **other})
    view = Nobody()
    start(plan(tmp_path, cells), view)
    (line,) = view.notes
    assert line.startswith("2 finished cells were made by other code than racelab 2.0 at fffffffff (a-s1-")
    assert "by racelab 2.0 at 000000000;" in line
    assert "by racelab 1.9 at fffffffff with changes abc)" in line
    assert "--fresh" in line


def test_the_code_is_that_of_the_package_wherever_the_command_is_typed(
    tmp_path: Path, cells: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    from racelab.sweeps.fingerprint import code_state

    code_state.cache_clear()
    here = code_state()
    monkeypatch.chdir(tmp_path)
    code_state.cache_clear()
    assert code_state() == here
    assert here["version"]
    run = open_cell(tmp_path, cells[0], "x", "sweep-x")
    assert run.info()["code"] == here


def test_of_a_long_record_only_the_end_is_read(tmp_path: Path) -> None:
    """The first line is broken and nobody minds; the last, longer than a block, counts."""
    from racelab.experiments.fsio import write_text_atomic

    file = tmp_path / "1.jsonl"
    assert last_stamp(file) is None
    write_text_atomic(file, "")
    assert last_stamp(file) is None
    with file.open("a") as handle:
        handle.write("broken\n")
    line = {"kind": "metrics", "step": 1, "ts": 7, "values": {"x" * 200_000: 1.0}}
    with file.open("a") as handle:
        handle.write(json.dumps(line) + "\n" + '{"torn')
    assert last_stamp(file) == 7


def test_wall_seconds_are_over_all_attempts(tmp_path: Path) -> None:
    """3 s in the first attempt, 4.5 in the second: 7.5."""
    from datetime import UTC, datetime

    run = RunFolder.create(tmp_path, "n", composed_yaml="", overrides=[], info={"kind": "train", "seed": 1})
    assert wall_seconds(run) is None
    for attempt, seconds in ((1, 3.0), (2, 4.5)):
        run.begin_attempt()
        entries = run.attempts()
        entries[-1]["started"] = datetime.fromtimestamp(1_000.0 * attempt, UTC).isoformat()
        write_json_atomic(run.path / "attempts.json", entries)
        at = int(1_000 * (1_000.0 * attempt + seconds))
        writer = SpoolWriter(run.spool_dir / f"{attempt}.jsonl", lambda at=at: at)  # type: ignore[misc]
        writer.append([{"kind": "metrics", "step": 1, "values": {}}])
    assert wall_seconds(run) == pytest.approx(7.5)
    assert math.isclose(cell_row(run, "x", "finished")["wall_s"], 7.5)


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([("finished", 0), ("failed", 4)], 4),
        ([("failed", 4), ("failed", 4)], 4),
        ([("failed", 4), ("failed", 1)], 1),
        ([("failed", 4), ("failed", None)], 1),
        ([("finished", 0), ("finished", None)], 0),
    ],
)
def test_a_sweep_that_lacked_only_a_server_ends_with_4(
    tmp_path: Path, cells: list[Cell], ends: list[tuple[launch.Status, int | None]], code: int
) -> None:
    states = [
        CellState(cell, open_cell(tmp_path, cell, cell.cell_id, "s"), status, code=own)
        for cell, (status, own) in zip(cells, ends, strict=False)
    ]
    with StopRequest() as stop:
        assert _end(states, stop)[1] == code
