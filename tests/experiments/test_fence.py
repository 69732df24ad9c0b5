"""A replaced attempt: real processes that go on, or wake up, after another has taken their run."""

from __future__ import annotations

import ast
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from racelab.experiments import fence
from racelab.experiments.attempt import Talk, TrainAttempt
from racelab.experiments.checkpoint import Checkpoint
from racelab.experiments.errors import ConfigError, FencedError, RunFolderError
from racelab.experiments.fsio import read_json, write_json_atomic
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import StopRequest
from racelab.experiments.tracking.description import run_note, run_tags
from racelab.experiments.tracking.spool import last_end
from racelab.experiments.tracking.tracker import SpoolTracker

from .fenced import JOB, LAUNCH, WAIT_S, WRITE_FOR_EVER, contents, heard, make, process, taken

OTHER = {**LAUNCH, "uid": "20260305T050607-abcdef"}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make(tmp_path)


def test_a_replaced_process_ends_at_its_next_write(run: RunFolder) -> None:
    """In flight when the fence was taken is at most one write: one line, or one run.json."""
    with process(WRITE_FOR_EVER, run, taken(run, "A")) as child:
        assert heard(child) == "writing"
        taken(run, "B", restart=2)
        lines = (run.spool_dir / "1.jsonl").read_bytes().count(b"\n")
        _, error = child.communicate(timeout=WAIT_S)
    assert child.returncode == 1
    last = error.splitlines()[-1]
    assert last.startswith("racelab.experiments.errors.FencedError: run ")
    assert "taken over by job 12_4 (restart 2) on node3 at 20" in last
    after = (run.spool_dir / "1.jsonl").read_bytes()
    assert after.endswith(b"\n")
    assert after.count(b"\n") <= lines + 1
    assert after.count(b"\n") - run.info()["steps"] in (0, 1)
    assert [a["attempt"] for a in run.attempts()] == [1]


SLEEP_THEN_WRITE = """
with run.lock():
    spool = SpoolWriter(run.spool_dir / f"{run.begin_attempt()}.jsonl")
    spool.append([{"kind": "metrics", "step": 1, "values": {"a/b": 1.0}}])
    say("going to sleep")
    os.kill(os.getpid(), signal.SIGSTOP)
    spool.append([{"kind": "metrics", "step": 2, "values": {"a/b": 1.0}}])
"""


def test_a_frozen_process_that_wakes_up_after_the_takeover_writes_nothing(run: RunFolder) -> None:
    with process(SLEEP_THEN_WRITE, run, taken(run, "A")) as child:
        assert heard(child) == "going to sleep"
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        taken(run, "B")
        before = contents(run)
        child.send_signal(signal.SIGCONT)
        _, error = child.communicate(timeout=WAIT_S)
    assert "FencedError" in error
    assert contents(run) == before
    assert b'"step":2' not in before["spool/1.jsonl"]


TRY_EVERYTHING = """
import torch
from racelab.experiments.checkpoint import CheckpointStore
from racelab.experiments.errors import FencedError
from racelab.experiments.tracking.shipper import write_status
from racelab.experiments.tracking.spool import SpoolWriter
from racelab.experiments.tracking.tables import write_tables
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.models.reward_model import write_head
store = CheckpointStore(run.path / "checkpoints", keep_last=1)
weights = {"w": torch.ones(4)}
lock = run.lock()
tracker = SpoolTracker(run, run.begin_attempt(), ship=False)
tracker.metrics(1, {"a/b": 1.0})
for step in (1, 2): store.save(step, weights, {})
write_tables(run)
say("replace me")
sys.stdin.readline()
def again():
    with run.lock(): pass
for attempt in (
    lambda: tracker.metrics(2, {"a/b": 1.0}),
    lambda: tracker.close("finished"),
    lambda: SpoolWriter(run.spool_dir / "2.jsonl"),
    lambda: SpoolTracker(run, 1, ship=True),
    lambda: store.save(2, weights, {"other": 1}),
    lambda: store.save(3, weights, {}),
    lambda: store._recover(),
    lambda: store._prune(newest=0),
    lambda: write_tables(run),
    lambda: write_status(run, "ok"),
    lambda: run.update(status="failed"),
    lambda: run.begin_attempt(),
    lambda: write_head(run.path / "reward_model", [1.0, 2.0], {}),
    again,
):
    try: attempt()
    except FencedError: say("fenced")
    else: say("written")
lock.release()
say("end")
"""


def test_nothing_that_a_replaced_process_tries_changes_the_run(run: RunFolder) -> None:
    half = run.path / "checkpoints" / ".tmp-step-00000009-1-ff"
    with process(TRY_EVERYTHING, run, taken(run, "A")) as child:
        assert heard(child, 60) == "replace me"
        taken(run, "B")
        half.mkdir()  # of the process that has the run now
        (half / "tensors.safetensors").write_bytes(b"half")
        before = contents(run)
        output, _ = child.communicate("\n", timeout=60)
    assert output.splitlines() == ["fenced"] * 14 + ["end"]
    assert contents(run) == before
    assert sorted(p.name for p in (run.path / "attempts").iterdir()) == ["1"]


def test_only_the_run_itself_is_fenced_by_whatever_way_it_is_reached(run: RunFolder, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(run.path.parent)
    beside = run.path.parent / f"{run.run_id}-2"
    beside.mkdir()
    taken(run, "A")
    with fence.hold(run.path, "B"):
        write_json_atomic(beside / "a.json", 1)
        for path in (run.path / "a.json", link / run.run_id / "a.json", run.path / "tables" / "a.json"):
            with pytest.raises(FencedError):
                write_json_atomic(path, 1)
    with fence.hold(link / run.run_id, "B"), pytest.raises(FencedError):
        write_json_atomic(run.path / "a.json", 1)
    with fence.hold(run.path, "A"):
        write_json_atomic(run.path / "a.json", 1)
    assert sorted(p.name for p in run.path.iterdir() if "a.json" in p.name) == ["a.json"]


def test_a_replaced_process_makes_no_temporary_file(run: RunFolder) -> None:
    """It would fail to, here; and asks before."""
    taken(run, "B")
    with fence.hold(run.path, "A"), pytest.raises(FencedError):
        write_json_atomic(run.path / "no such folder" / "a.json", 1)


def test_a_fence_that_is_gone_or_damaged_lets_nobody_write(run: RunFolder) -> None:
    with fence.hold(run.path, "A"):
        with pytest.raises(FencedError, match="is gone"):
            run.update(steps=1)
        for damage in ("{", "[]", '{"token": "B"}'):
            (run.path / "fence").write_text(damage)
            with pytest.raises(RunFolderError, match=r"fence .*remove it, and resume"):
                run.update(steps=1)
        (run.path / "fence").unlink()
        (run.path / "fence").mkdir()
        with pytest.raises(RunFolderError, match=r"cannot read .*fence"):
            run.update(steps=1)
    run.update(steps=1)  # without a fence nothing is asked


def test_half_a_fence_is_an_error(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACELAB_FENCE", "A")
    with pytest.raises(ConfigError, match="RACELAB_FENCE_RUN"):
        run.update(steps=1)
    monkeypatch.setenv("RACELAB_FENCE_RUN", "runs/x")
    with pytest.raises(ConfigError, match="absolute"):
        run.update(steps=1)
    monkeypatch.delenv("RACELAB_FENCE")
    monkeypatch.delenv("RACELAB_FENCE_RUN")
    monkeypatch.setenv("RACELAB_FENCE_WAIT", "long")
    taken(run, "A")
    with fence.hold(run.path, "A"), pytest.raises(ConfigError, match="RACELAB_FENCE_WAIT='long'"):
        run.lock()


def test_a_job_that_the_run_was_taken_from_cannot_take_it_back(tmp_path: Path) -> None:
    """The process was stopped after it had looked whose the run is, and before it took the fence."""
    run = make(tmp_path, launch=LAUNCH)
    taken(run, "A", launch=LAUNCH, restart=0)
    taken(run, "B", launch=LAUNCH, restart=1)
    for restart in (0, None):
        with pytest.raises(FencedError, match=r"job 12_4 \(restart 1\) on node3"):
            taken(run, "C", launch=LAUNCH, restart=restart)
    run.update(launch=OTHER)
    with pytest.raises(FencedError, match=f"{OTHER['uid']} to work on now, not launch {LAUNCH['uid']}"):
        taken(run, "C", launch=LAUNCH, restart=2)
    assert fence.read(run.path) is not None
    taken(run, "D", launch=OTHER, restart=0)  # the same job id, of a cluster that lost its state
    present = fence.read(run.path)
    assert present is not None
    assert (present.token, present.host, present.pid) == ("D", socket.gethostname(), os.getpid())
    run.update(launch=None)
    with pytest.raises(FencedError, match="nobody's job"):
        taken(run, "E", launch=OTHER, restart=1)


class Trainer(TrainAttempt):
    """Writes a step, does what the test wants, writes another."""

    def __init__(self, folder: RunFolder, between: Any) -> None:
        tracking = SimpleNamespace(mlflow=False, uri="", experiment="racelab", wait_s=0)
        checkpoint, evaluation = SimpleNamespace(keep_last=1), SimpleNamespace(at_steps=())
        config: Any = SimpleNamespace(tracking=tracking, checkpoint=checkpoint, eval=evaluation)
        self.notes: list[str] = []
        talk = Talk(lambda _: None, self.notes.append, lambda _: None)
        super().__init__(config, folder, None, talk, StopRequest())
        self.between = between

    def _work(self, tracker: SpoolTracker, checkpoint: Checkpoint | None) -> tuple[str, str, int]:
        tracker.metrics(1, {"a/b": 1.0})
        self.between()
        tracker.metrics(2, {"a/b": 1.0})
        return "finished", "", 2


def test_a_fenced_attempt_leaves_the_end_of_the_run_to_the_other(run: RunFolder) -> None:
    before: dict[str, bytes] = {}

    def replaced() -> None:
        taken(run, "B")
        before.update(contents(run))

    trainer = Trainer(run, replaced)
    with fence.hold(run.path, taken(run, "A")), pytest.raises(FencedError):
        trainer.run()
    assert contents(run) == before
    assert trainer.notes == []  # nothing went wrong that would have to be said beside the error itself
    assert (run.info()["status"], last_end(run)) == ("running", None)
    assert run.holder() is None  # it let go, so nobody waits for it


def test_who_goes_on_by_hand_takes_the_run_from_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")  # an salloc shell
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    run = make(tmp_path, launch=LAUNCH)
    taken(run, "A", launch=LAUNCH)
    seen: dict[str, Any] = {}

    def look() -> None:
        seen.update(launch=run.info()["launch"], fence=fence.read(run.path), held=fence.held(run.path))
        seen["lock"] = (run.holder() or {})["fence"]
        with fence.hold(run.path, "A"), pytest.raises(FencedError, match=f"pid {os.getpid()} on host"):
            run.update(steps=9)
        with pytest.raises(FencedError, match="nobody's job"):
            taken(run, "C", launch=LAUNCH, restart=2)

    assert Trainer(run, look).run().status == "finished"
    assert seen["launch"] is None
    assert seen["fence"].by_hand
    assert seen["fence"].token == seen["held"] == seen["lock"] != "A"
    assert fence.held(run.path) == ""
    entry = run.attempts()[0]
    assert [entry[k] for k in ("slurm_job_id", "slurm_restart", "node", "launch")] == ["77", None, None, None]
    assert run.holder() is None


def test_by_hand_again_is_fenced_again_but_a_run_of_no_launcher_never(tmp_path: Path, run: RunFolder) -> None:
    had = make(tmp_path, launch=None)
    taken(had, "A")
    tokens = set()
    for _ in range(2):
        Trainer(had, lambda: tokens.add(fence.held(had.path))).run()
    assert len(tokens - {"", "A"}) == 2
    Trainer(run, lambda: tokens.add(fence.held(run.path))).run()
    assert "" in tokens
    assert not (run.path / "fence").exists()
    assert "launch" not in run.info()


def test_an_attempt_says_which_job_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, launch=LAUNCH)
    assert "racelab.host" not in run_tags(run)
    with fence.hold(run.path, taken(run, "A", launch=LAUNCH)):
        run.begin_attempt()
    entry = run.attempts()[-1]
    expected = {"slurm_job_id": "12_4", "slurm_restart": 1, "node": "node3", "launch": LAUNCH["uid"]}
    assert expected.items() <= entry.items()
    for name, value in {
        "SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "5", "SLURMD_NODENAME": "node2",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    fence.take(run.path, "B", {})
    with fence.hold(run.path, "B"):
        run.begin_attempt()
    entry = run.attempts()[-1]
    assert [entry[k] for k in ("slurm_job_id", "slurm_restart", "node")] == ["12_5", 0, "node2"]
    tags = run_tags(run)
    assert tags["racelab.slurm_job_id"] == "12_5"
    assert (tags["racelab.node"], tags["racelab.host"]) == ("node2", socket.gethostname())
    assert tags["racelab.attempt"] == "2"
    assert "\n- job 12_5 on node2, attempt 2\n" in run_note(run)
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURMD_NODENAME"):
        monkeypatch.delenv(name)
    run.begin_attempt()
    tags = run_tags(run)  # by hand now: the store must not go on to show the job of before
    assert (tags["racelab.slurm_job_id"], tags["racelab.node"], tags["racelab.attempt"]) == ("", "", "3")
    assert "- job " not in run_note(run)


def test_an_attempt_of_before_the_fences_is_read(run: RunFolder) -> None:
    old = {
        "attempt": 1,
        "from_step": 0,
        "started": "",
        "pid": 1,
        "host": "h",
        "slurm_job_id": None,
        "cut": None,
    }
    write_json_atomic(run.path / "attempts.json", [old])
    tags = run_tags(run)
    assert (tags["racelab.attempt"], tags["racelab.host"]) == ("1", "h")
    assert "racelab.node" not in tags


_GUARDED = (
    "runfolder.py",
    "runlock.py",
    "checkpoint.py",
    "attempt.py",
    "session_race.py",
    "session_rlds.py",
    "tracking/spool.py",
    "tracking/tables.py",
    "tracking/tracker.py",
    "tracking/shipper.py",
)
_CHANGES = {
    "replace",
    "rename",
    "rmtree",
    "unlink",
    "ftruncate",
    "pwrite",
    "write_text",
    "write_bytes",
    "remove",
}
_KNOWN = {
    ("checkpoint.py", "save", "rmtree"),  # its own temporary folder, whose name nobody else has
    ("runfolder.py", "create", "rmtree"),  # a folder that was never a run
    ("runfolder.py", "_named", "rename"),  # into being
    ("runlock.py", "_sign", "ftruncate"),  # asks the fence
    ("runlock.py", "_sign", "pwrite"),
    ("runlock.py", "release", "ftruncate"),  # if the signature is its own
    ("tracking/spool.py", "__init__", "ftruncate"),  # asks the fence
    ("tracking/spool.py", "append", "ftruncate"),  # takes back its own part of a line
    ("tracking/spool.py", "append", "pwrite"),  # asks the fence
    ("tracking/tables.py", "discard", "unlink"),  # its own temporary file
}


def test_nobody_who_writes_into_a_run_goes_round_the_fence() -> None:
    """A new `os.replace` and the like in these files is to be `fsio.rename`, or to be explained above."""
    folder = Path(fence.__file__).parent
    found = set()
    for name in _GUARDED:
        for function in ast.walk(ast.parse((folder / name).read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if (
                    isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Attribute)
                    and call.func.attr in _CHANGES
                    and not (call.func.attr == "replace" and ast.unparse(call.func.value) != "os")
                ):
                    found.add((name, function.name, call.func.attr))
    assert found == _KNOWN


def test_the_file_of_a_fence(run: RunFolder) -> None:
    token = fence.new_token()
    made = fence.take(run.path, token, JOB)
    record = read_json(run.path / "fence")
    assert record == {
        "token": token, "job_id": "12_4", "restart": 1, "node": "node3", "host": socket.gethostname(),
        "pid": os.getpid(), "since": made.since, "launch": None, "by_hand": False,
    }  # fmt: skip
    assert len(token) == 32
    assert fence.read(run.path) == made
    assert fence.new_token() != token
