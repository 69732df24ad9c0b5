"""`runs`, `show` and `sync` on a run as a training leaves it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from racelab.cli.runs import last_progress
from racelab.cli.summary import print_summary
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import SpoolWriter

Call = Callable[..., Any]
Make = Callable[..., Any]
KEYS = {
    "run_id", "name", "kind", "method", "variant", "task", "condition", "seed", "status", "path",
    "mlflow_run_id", "started", "steps",
}  # fmt: skip
"""What scripts may rely on."""


def killed(run: RunFolder) -> None:
    """As if the process of the run had been killed some time ago."""
    old = time.time() - 1000
    os.utime(run.path / "heartbeat", (old, old))


def test_no_runs_is_an_empty_list_and_a_hint(call: Call) -> None:
    assert call("runs", "--json").json() == []
    plain = call("runs")
    assert (plain.code, plain.out) == (0, "")
    assert "racelab train" in plain.err


def test_runs_lists_the_newest_first_with_step_and_reward(call: Call, make_run: Make) -> None:
    old = make_run("old", rewards=(0.25,))
    old.update(started="2020-01-01T00:00:00.000+00:00")
    make_run("new", rewards=(0.25, 0.75))
    rows = call("runs", "--json").json()
    assert [row["name"] for row in rows] == ["new", "old"]
    assert set(rows[0]) >= KEYS
    assert [(row["last_step"], row["last_reward"], row["status"]) for row in rows] == [
        (3, 0.75, "finished"),
        (2, 0.25, "finished"),
    ]
    lines = call("runs").out.splitlines()
    assert lines[0].split() == ["run", "name", "method", "status", "step", "reward", "started", "folder"]
    assert lines[1].split()[1:6] == ["new", "race/full", "finished", "3", "0.750"]
    assert lines[1].endswith(os.path.join("runs", rows[0]["run_id"]))


def test_limit(call: Call, make_run: Make) -> None:
    for index in range(3):
        make_run(f"run{index}", rewards=(0.5,))
    assert len(call("runs", "--limit", "2", "--json").json()) == 2
    assert len(call("runs", "--limit", "0", "--json").json()) == 3
    shown = call("runs", "--limit", "1")
    assert len(shown.out.splitlines()) == 2
    assert "2 older runs are not shown" in shown.err


def test_off_a_terminal_there_are_no_boxes_and_no_colours(call: Call, make_run: Make) -> None:
    make_run()
    out = call("runs").out + call("show", "latest").out
    assert not set("│─╭╰┃━\x1b") & set(out)


def test_a_killed_run_is_stale(call: Call, make_run: Make) -> None:
    killed(make_run(status="running"))
    assert call("runs", "--json").json()[0]["status"] == "stale"


def test_progress_is_read_from_the_end_of_a_long_record(make_run: Make) -> None:
    run = make_run()
    writer = SpoolWriter(run.spool_dir / "1.jsonl")
    filler = {"kind": "rows", "step": 8, "table": "x", "rows": [{"text": "x" * 300_000}]}
    writer.append([filler, filler, {"kind": "metrics", "step": 9, "values": {"train/reward/mean": 0.875}}])
    writer.close()
    progress = last_progress(run)
    assert (progress.step, progress.reward) == (9, 0.875)


def test_show_tells_what_happened(call: Call, make_run: Make) -> None:
    run = make_run()
    found = call("show", "latest", "--json").json()
    assert found["run_id"] == run.run_id
    assert found["last_step"] == 3
    assert found["seconds"] == 5.0
    assert found["overrides"] == ["tracking=none"]
    assert found["metrics"]["train/reward/mean"] == {"first": 0.25, "last": 0.5, "min": 0.25, "max": 0.5}
    assert [(p["kind"], p["length"], p["end_reason"]) for p in found["phases"]] == [
        ("policy", 2, "saturation")
    ]
    out = call("show", run.run_id[:12]).out
    for part in (run.run_id, "race/full, seed 0", "saturation", "reward, policy steps", "tracking=none"):
        assert part in out


def test_show_step_gives_the_texts_with_their_scores(call: Call, make_run: Make) -> None:
    make_run()
    (group,) = call("show", "tiny", "--step", "1", "--json").json()["groups"]
    assert group["prompt"] == "What is 1?"
    assert group["rubric"] == "- names the number"
    assert group["routing"]["route"] == "rubric_failed"
    assert group["samples"] == [
        {"idx": 0, "text": "It is 1.\nReally.", "score": 0.25},
        {"idx": 1, "text": "", "score": None},
    ]
    lines = [line.strip() for line in call("show", "tiny", "--step", "1").out.splitlines()]
    assert "0.250  It is 1." in lines
    assert "Really." in lines
    assert "-  (nothing)" in lines
    assert "route  rubric_failed  mean 0.250  σ 0.100  ties 0.500  d_tri 0.900" in lines


def test_show_step_of_a_rubric_step_gives_the_candidates(call: Call, make_run: Make) -> None:
    make_run()
    (group,) = call("show", "tiny", "--step", "3", "--json").json()["groups"]
    assert group["role"] == "rubric"
    assert group["rubric"] is None
    assert [(s["text"], s["score"]) for s in group["samples"]] == [
        ("- candidate 0", 0.0),
        ("- candidate 1", 0.25),
    ]
    assert "2 candidate rubrics" in call("show", "tiny", "--step", "3").out


def test_a_step_without_texts_says_which_have_some(call: Call, make_run: Make) -> None:
    make_run()
    result = call("show", "tiny", "--step", "99")
    assert result.code == 2
    assert "steps 1-3" in result.err


def test_show_works_while_the_run_goes_on(call: Call, make_run: Make) -> None:
    make_run(status="running")
    assert call("show", "tiny", "--json").json()["last_step"] == 3
    assert len(call("show", "tiny", "--step", "2", "--json").json()["groups"]) == 1


@pytest.mark.parametrize("words", [["show", "tinny"], ["sync", "tinny"]])
def test_an_unknown_run_says_what_is_near(call: Call, make_run: Make, words: list[str]) -> None:
    make_run()
    result = call(*words)
    assert result.code == 2
    assert "(tiny, finished)" in result.err


@pytest.mark.slow
def test_sync_leaves_runs_without_mlflow_alone_unless_named(call: Call, make_run: Make) -> None:
    make_run()
    assert call("sync", "--json").json() == []
    (report,) = call("sync", "tiny", "--json").json()
    assert report["delivered"] > 0
    assert report["backlog"] == 0
    assert call("runs", "--json").json()[0]["mlflow_run_id"] == report["mlflow_run_id"]
    (again,) = call("sync", "tiny", "--json").json()
    assert again["delivered"] == 0
    assert "up to date" in call("sync", "tiny").out


def test_sync_closes_the_dead_even_when_the_store_is_away_and_says_so_with_4(
    call: Call, make_run: Make
) -> None:
    run = make_run(status="running")
    killed(run)
    run.update(tracking={"uri": "http://127.0.0.1:9", "configured": True, "experiment": "racelab"})
    result = call("sync")
    assert result.code == 4
    assert len(result.err.splitlines()) == 1
    assert "127.0.0.1:9" in result.err
    assert call("runs", "--json").json()[0]["status"] == "interrupted"


def test_one_damaged_run_stops_neither_runs_nor_doctor(call: Call, make_run: Make) -> None:
    make_run("good")
    garbled, cut, wrong = make_run("garbled"), make_run("cut"), make_run("wrong")
    with (garbled.spool_dir / "1.jsonl").open("ab") as file:
        file.write(b"garbage\n")
    with (cut.spool_dir / "1.jsonl").open("ab") as file:
        file.write(b'{"kind":"metrics"}\n')
    record = wrong.info()
    del record["status"]
    (wrong.path / "run.json").write_text(json.dumps(record), encoding="utf-8")
    result = call("runs")
    assert result.code == 0
    rows = {line.split()[0]: line.split() for line in result.out.splitlines()[1:]}
    assert rows[garbled.run_id][3:6] == ["finished", "-", "-"]
    assert rows[cut.run_id][3:6] == ["finished", "-", "-"]
    assert rows[wrong.run_id][1:4] == ["-", "-", "damaged"]
    assert "good" in result.out
    assert len(result.err.splitlines()) == 3
    assert "status is None" in result.err
    assert "status is None" in call("sync").err
    steps = {row["name"]: row["last_step"] for row in call("runs", "--json").json()}
    assert steps == {"good": 3, "garbled": None, "cut": None}


def test_one_run_that_cannot_be_synced_does_not_stop_the_others(call: Call, make_run: Make) -> None:
    bad, good = make_run("bad", overrides=()), make_run("good", overrides=())
    bad.update(
        started="2020-01-01T00:00:00.000+00:00",
        tracking={"uri": "http://127.0.0.1:99999", "configured": True, "experiment": "racelab"},
    )
    result = call("sync", "--json")
    assert result.code == 2
    assert [report["run_id"] for report in result.json()] == [good.run_id]
    assert result.err.startswith(f"error: {bad.path}/run.json: ")
    assert "Port out of range" in result.err
    assert len(result.err.splitlines()) == 1


def test_the_summary_of_earlier_code_has_dashes(make_run: Make, capsys: pytest.CaptureFixture[str]) -> None:
    summary = {"run_id": "r", "name": "old", "steps": {"policy": 2, "rubric": 1}}
    print_summary(summary, {}, make_run(), "racelab", "old")
    out = capsys.readouterr().out
    assert "2 policy and 1 rubric updates; - min, peak memory - GiB." in out
    assert "judged reward" in out
