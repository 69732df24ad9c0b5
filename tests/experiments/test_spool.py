"""The spool: append-only, whole lines, superseded steps dropped."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments import fence
from racelab.experiments.errors import DataError, DiskError, FencedError
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking import spool as spool_module
from racelab.experiments.tracking.spool import (
    SpoolWriter,
    cut_offsets,
    encode,
    last_end,
    last_step,
    last_valid_steps,
    read_lines,
    read_spool,
    split_nonfinite,
)


def metrics(step: int, **values: float) -> dict[str, object]:
    return {"kind": "metrics", "step": step, "values": values}


def make(root: Path) -> RunFolder:
    return RunFolder.create(root, "toy", composed_yaml="", overrides=[], info={})


def test_one_write_call_per_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = os.pwrite
    monkeypatch.setattr(spool_module.os, "pwrite", lambda *a: calls.append(1) or real(*a))
    writer = SpoolWriter(tmp_path / "1.jsonl", clock=lambda: 1234)
    writer.append(
        [metrics(1, a=1.5), {"kind": "rows", "step": 1, "table": "samples", "rows": [{"text": "é"}]}]
    )
    assert len(calls) == 1
    records = [r for r, _ in read_lines(tmp_path / "1.jsonl")]
    assert records[0] == {"kind": "metrics", "step": 1, "values": {"a": 1.5}, "ts": 1234}
    assert records[1]["rows"] == [{"text": "é"}]
    assert writer.offset == (tmp_path / "1.jsonl").stat().st_size


def test_values_without_json_form() -> None:
    line = json.loads(encode({
        "kind": "rows", "step": 1, "table": "groups",
        "rows": [{"rewards": np.array([0.5, math.nan]), "std": np.float32(math.inf), "n": np.int64(3)}],
    }))  # fmt: skip
    assert line["rows"] == [{"rewards": [0.5, None], "std": None, "n": 3}]
    with pytest.raises(ValueError, match=r"no JSON form.*object"):
        encode({"kind": "tags", "step": 0, "values": {"x": object()}})
    with pytest.raises(ValueError, match="unknown kind 'nope'"):
        encode({"kind": "nope"})


def test_nonfinite_metrics_are_counted_not_stored() -> None:
    got = split_nonfinite({"train/optim/kl": math.nan, "a/b": -math.inf, "perf/time/step_s": 2})
    assert got == {
        "health/nonfinite/train/optim/kl": 1.0,
        "health/nonfinite/a/b": 1.0,
        "perf/time/step_s": 2.0,
    }


def test_a_killed_writer_leaves_a_readable_file_and_reopening_cuts_the_tail(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    code = (
        "import sys, os, signal\n"
        "from pathlib import Path\n"
        "from racelab.experiments.tracking.spool import SpoolWriter\n"
        "w = SpoolWriter(Path(sys.argv[1]))\n"
        "for k in range(3): w.append([{'kind': 'metrics', 'step': k, 'values': {'a': k}}])\n"
        'os.pwrite(w._fd, b\'{"kind": "metr\', w.offset)\n'
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [r["step"] for r, _ in read_lines(path)] == [0, 1, 2]
    writer = SpoolWriter(path)
    writer.append([metrics(3, a=3)])
    assert [r["step"] for r, _ in read_lines(path)] == [0, 1, 2, 3]
    assert path.read_bytes().count(b"\n") == 4


def test_a_full_disk_loses_no_earlier_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SpoolWriter(tmp_path / "1.jsonl")
    writer.append([metrics(1, a=1)])
    real = os.pwrite

    def half(fd: int, data: memoryview, offset: int) -> int:
        if len(data) > 20:
            return real(fd, data[:20], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool_module.os, "pwrite", half)
    with pytest.raises(DiskError, match=r"1\.jsonl: no space left on the disk; free some"):
        writer.append([metrics(2, a=2)])
    assert (tmp_path / "1.jsonl").stat().st_size == writer.offset  # the part that did fit is gone
    monkeypatch.undo()
    writer.append([metrics(3, a=3)])
    assert [r["step"] for r, _ in read_lines(tmp_path / "1.jsonl")] == [1, 3]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    good = encode(metrics(1, a=1) | {"ts": 1})
    path.write_bytes(good + b"garbage\n" + good)
    with pytest.raises(DataError, match=rf"1\.jsonl is damaged at byte {len(good)}"):
        list(read_lines(path))


def test_superseded_steps_by_hand() -> None:
    # attempt 2 went on from step 10, attempt 3 from step 4: of 1 and 2, only steps <= 4 still count
    entries = [
        {"attempt": 1, "from_step": 0},
        {"attempt": 2, "from_step": 10},
        {"attempt": 3, "from_step": 4},
    ]
    assert last_valid_steps(entries) == {1: 4, 2: 4}
    assert last_valid_steps([{"attempt": 1, "from_step": 0}]) == {}


def test_a_resumed_run_reads_as_one_line_of_steps(tmp_path: Path) -> None:
    run = make(tmp_path)
    for attempt, (start, stop) in enumerate([(0, 8), (5, 10)], start=1):
        assert run.begin_attempt(from_step=start) == attempt
        writer = SpoolWriter(run.spool_dir / f"{attempt}.jsonl")
        for step in range(start + 1, stop + 1):
            writer.append([metrics(step, a=attempt)])
    assert [(r["step"], r["attempt"]) for r in read_spool(run)] == [
        *[(s, 1) for s in range(1, 6)],
        *[(s, 2) for s in range(6, 11)],
    ]
    assert last_step(run) == 10
    assert last_end(run) is None
    writer.append([{"kind": "end", "step": 10, "status": "finished", "reason": ""}])
    end = last_end(run)
    assert end is not None
    assert (end["status"], end["attempt"]) == ("finished", 2)
    run.begin_attempt(from_step=10)
    assert last_end(run) is None


@settings(deadline=None, max_examples=60)  # the disk sets the pace
@given(
    plan=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=5),
)
def test_every_step_counts_once(
    plan: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However often a run resumes, each step up to the last is read once, from the newest attempt."""
    run = make(tmp_path_factory.mktemp("r"))
    reached = 0
    newest: dict[int, int] = {}
    for number, (wish, length) in enumerate(plan, start=1):
        start = min(wish, reached)
        run.begin_attempt(from_step=start)
        writer = SpoolWriter(run.spool_dir / f"{number}.jsonl")
        newest = {s: a for s, a in newest.items() if s <= start}
        for step in range(start + 1, start + length + 1):
            writer.append([metrics(step, a=0)])
            newest[step] = number
        writer.close()
        reached = start + length
    assert [(r["step"], r["attempt"]) for r in read_spool(run)] == sorted(newest.items())


def test_what_a_later_attempt_redoes_of_the_same_step_is_dropped(tmp_path: Path) -> None:
    """Attempt 1 wrote a view at step 2 behind the checkpoint's place; attempt 2 goes on there and writes it again."""
    run = make(tmp_path)
    first = SpoolWriter(run.spool_dir / "1.jsonl")
    run.begin_attempt()
    first.append([{"kind": "metrics", "step": 2, "values": {"a": 1.0}}])
    place = {"attempt": 1, "offset": first.sync()}
    first.append([{"kind": "metrics", "step": 2, "values": {"view": 1.0}}])
    first.close()
    run.begin_attempt(from_step=2, cut=place)
    second = SpoolWriter(run.spool_dir / "2.jsonl")
    second.append([{"kind": "metrics", "step": 2, "values": {"view": 1.0}}])
    second.close()
    assert [(r["attempt"], r["values"]) for r in read_spool(run)] == [(1, {"a": 1.0}), (2, {"view": 1.0})]


def test_an_attempt_that_left_no_checkpoint_is_superseded_as_a_whole(tmp_path: Path) -> None:
    """Attempt 1 saves at step 2, attempt 2 is stopped before it saves, attempt 3 goes on from attempt 1."""
    run = make(tmp_path)
    run.begin_attempt()
    first = SpoolWriter(run.spool_dir / "1.jsonl")
    first.append([metrics(2, a=1.0)])
    place = {"attempt": 1, "offset": first.sync()}
    first.close()
    for value in (2.0, 3.0):
        attempt = run.begin_attempt(from_step=2, cut=place)
        writer = SpoolWriter(run.spool_dir / f"{attempt}.jsonl")
        writer.append([metrics(2, a=value)])
        writer.close()
    assert cut_offsets(run.attempts()) == {1: place["offset"], 2: 0}
    assert [(r["attempt"], r["values"]["a"]) for r in read_spool(run)] == [(1, 1.0), (3, 3.0)]


def test_what_an_attempt_redid_in_vain_counts_again(tmp_path: Path) -> None:
    """Attempt 2 goes on at step 1 (the checkpoint of step 2 cannot be read for a while) and saves nothing.

    Attempt 3 goes on at step 2 of attempt 1, so its line is 1, 2 of attempt 1 and 3 of its own.
    """
    run = make(tmp_path)
    run.begin_attempt()
    first = SpoolWriter(run.spool_dir / "1.jsonl")
    places = []
    for step in (1, 2, 3):
        first.append([metrics(step, a=1.0)])
        places.append({"attempt": 1, "offset": first.sync()})
    run.begin_attempt(from_step=1, cut=places[0])
    SpoolWriter(run.spool_dir / "2.jsonl").append([metrics(2, a=2.0), metrics(3, a=2.0)])
    run.begin_attempt(from_step=2, cut=places[1])
    SpoolWriter(run.spool_dir / "3.jsonl").append([metrics(3, a=3.0)])
    assert [(r["step"], r["attempt"]) for r in read_spool(run)] == [(1, 1), (2, 1), (3, 3)]
    assert last_valid_steps(run.attempts()) == {1: 2, 2: 2}
    assert cut_offsets(run.attempts()) == {1: places[1]["offset"], 2: 0}


def test_a_line_of_a_replaced_attempt_is_not_written(tmp_path: Path) -> None:
    run = make(tmp_path)
    fence.take(run.path, "A", {})
    path = run.spool_dir / "1.jsonl"
    with fence.hold(run.path, "A"):
        writer = SpoolWriter(path)
        writer.append([metrics(1, a=1.0)])
        fence.take(run.path, "B", {})
        before = path.read_bytes()
        path.write_bytes(before + b'{"kind": "me')  # torn, by whoever has the run now
        with pytest.raises(FencedError):
            SpoolWriter(path)
        with pytest.raises(FencedError):
            writer.append([metrics(2, a=1.0)])
    assert path.read_bytes() == before + b'{"kind": "me'
    assert writer.lines == 1


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "metrics", "ts": 1, "values": {}},
        {"kind": "metrics", "step": "3", "ts": 1, "values": {}},
        {"kind": "metrics", "step": 3, "ts": 1},
        {"kind": "rows", "step": 3, "ts": 1, "table": "groups"},
        {"kind": "end", "step": 3, "ts": 1, "status": "asleep"},
    ],
)
def test_a_line_without_what_its_kind_promises_is_damage(tmp_path: Path, line: dict[str, object]) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"1\.jsonl has no spool record at byte 0"):
        list(read_lines(path))
