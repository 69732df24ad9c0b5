"""A run's folder: written whole, locked, and honest about who works on it."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from racelab.experiments import fsio
from racelab.experiments.environment import git_diff, redact
from racelab.experiments.errors import DiskError, RunFolderError
from racelab.experiments.runfolder import STALE_S, RunFolder, read_json, write_json_atomic

HOLD = """
import sys, time
from racelab.experiments.runfolder import RunFolder
run = RunFolder.open(sys.argv[1])
lock = run.lock()
run.begin_attempt()
print("held", flush=True)
time.sleep(60)
"""


def make(root: Path, name: str = "toy", **info: object) -> RunFolder:
    return RunFolder.create(root, name, composed_yaml="seed: 1\n", overrides=["seed=1"], info=info)


def test_create_writes_the_promised_files(tmp_path: Path) -> None:
    at = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    run = RunFolder.create(
        tmp_path, "toy", composed_yaml="seed: 7\n", overrides=["seed=7"], suffix=lambda: "abc123",
        clock=lambda: at,
        info={"kind": "train", "method": "race", "variant": "full", "seed": 7, "steps": 30},
    )  # fmt: skip
    assert run.run_id == "20260304T050607-abc123"
    record = read_json(run.path / "run.json")
    expected = {"schema": 1, "status": "queued", "kind": "train", "method": "race", "seed": 7, "steps": 30}
    assert expected.items() <= record.items()
    assert record["started"] == "2026-03-04T05:06:07.000+00:00"
    assert (run.path / "config" / "composed.yaml").read_text() == "seed: 7\n"
    assert read_json(run.path / "config" / "overrides.json") == ["seed=7"]
    assert read_json(run.path / "env" / "environment.json")["packages"]["numpy"]
    assert RunFolder.open(run.path) == run
    assert run.status() == "queued"


def test_a_run_of_an_id_that_comes_again_has_another_uid(tmp_path: Path) -> None:
    uids = []
    for root in (tmp_path / "a", tmp_path / "b"):
        run = RunFolder.create(root, "toy", composed_yaml="", overrides=[], info={}, run_id="full-s0")
        run.update(status="failed")
        uids.append(run.info()["uid"])
    assert uids[0] != uids[1]
    assert [len(uid) for uid in uids] == [32, 32]


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    suffixes = iter(["aa", "aa", "bb"])
    at = datetime(2026, 1, 1, tzinfo=UTC)
    runs = [
        RunFolder.create(
            tmp_path,
            "x",
            composed_yaml="",
            overrides=[],
            info={},
            suffix=lambda: next(suffixes),
            clock=lambda: at,
        )
        for _ in range(2)
    ]
    assert [r.run_id for r in runs] == ["20260101T000000-aa", "20260101T000000-bb"]


@pytest.mark.parametrize("name", ["../evil", "a/b", "..", "", ".hidden", "a..b", "a\nb", "x" * 121])
def test_names_that_leave_the_root_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunFolderError, match="run name"):
        make(tmp_path / "runs", name)
    assert not (tmp_path / "runs").exists()


def test_open_names_the_mend_for_another_schema(tmp_path: Path) -> None:
    run = make(tmp_path)
    write_json_atomic(run.path / "run.json", run.info() | {"schema": 99})
    with pytest.raises(RunFolderError, match=r"schema 99.*schema 1.*racelab version"):
        RunFolder.open(run.path)
    with pytest.raises(RunFolderError, match="racelab runs"):
        RunFolder.open(tmp_path)


def test_a_second_process_is_refused_and_a_killed_holder_leaves_a_stale_run(tmp_path: Path) -> None:
    run = make(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        assert run.status() == "running"
        with pytest.raises(RunFolderError, match=rf"pid {child.pid} on host {socket.gethostname()}"):
            run.lock()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert run.status() == "stale"
    with run.lock():
        assert run.begin_attempt(from_step=3) == 2
        assert run.status() == "running"
    assert [(a["attempt"], a["from_step"]) for a in run.attempts()] == [(1, 0), (2, 3)]
    run.update(status="finished")
    assert run.status() == "finished"


def test_an_old_heartbeat_makes_a_held_run_stale(tmp_path: Path) -> None:
    run = make(tmp_path)
    with run.lock():
        run.begin_attempt()
        old = time.time() - STALE_S - 1
        os.utime(run.path / "heartbeat", (old, old))
        assert run.status() == "stale"


def test_a_holder_on_another_host_is_judged_by_its_heartbeat(tmp_path: Path) -> None:
    run = make(tmp_path)
    with run.lock():
        run.begin_attempt()
    write_json_atomic(run.path / "lock", {"pid": 1, "host": "elsewhere"})
    assert run.status() == "running"
    os.utime(run.path / "heartbeat", (0, 0))
    assert run.status() == "stale"


def test_update_keeps_other_fields_and_refuses_unknown_status(tmp_path: Path) -> None:
    run = make(tmp_path, kind="train")
    run.update(mlflow_run_id="m1")
    assert (run.info()["kind"], run.info()["mlflow_run_id"]) == ("train", "m1")
    with pytest.raises(RunFolderError, match="status 'done'"):
        run.update(status="done")


def test_a_full_disk_leaves_the_old_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json_atomic(path, {"v": 1})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fsio.os, "fsync", full)
    with pytest.raises(DiskError, match=r"a\.json: no space left on the disk; free some") as caught:
        write_json_atomic(path, {"v": 2})
    assert "\n" not in str(caught.value)
    assert json.loads(path.read_text()) == {"v": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_full_disk_at_creation_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fsio.os, "fsync", full)
    with pytest.raises(RunFolderError, match="no space"):
        make(tmp_path)
    assert os.listdir(tmp_path) == []


def test_secrets_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    run = RunFolder.create(
        tmp_path, "s",
        composed_yaml="judge:\n  api_key: sk-verysecret\n  api_key_env: KEY\n  max_tokens: 5\n",
        overrides=["+judge.api_key=sk-verysecret", "rollout.max_tokens=5"], info={},
    )  # fmt: skip
    stored = "".join(p.read_text() for p in run.path.rglob("*") if p.is_file())
    assert "verysecret" not in stored
    assert "HF_TOKEN" in stored
    yaml = (run.path / "config" / "composed.yaml").read_text()
    assert yaml == "judge:\n  api_key: ***\n  api_key_env: KEY\n  max_tokens: 5\n"
    assert redact("api_key: null") == "api_key: null"


def test_git_state_and_diff_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    git = ["git", "-C", str(repo), "-c", "user.name=t", "-c", "user.email=t@t"]
    (repo / "a.txt").write_text("one\n")
    (repo / "prod.env").write_text("KEY=1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    (repo / "a.txt").write_text("two http://me:pw@host\n")
    (repo / "prod.env").write_text("KEY=hush\n")
    monkeypatch.chdir(repo)
    run = make(tmp_path / "runs")
    state = read_json(run.path / "env" / "environment.json")["git"]
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert (state["sha"], state["dirty"]) == (head, True)
    diff = (run.path / "env" / "git.diff").read_text()
    assert "+two http://host\n" in diff
    assert "hush" not in diff
    assert git_diff(tmp_path) == ""


def test_a_password_in_an_address_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # not in a repository, whose changes are stored too
    word = "tracking.uri=http://me:hu@sh@host:5000/x"
    run = RunFolder.create(
        tmp_path, "s", composed_yaml="tracking:\n  uri: http://me:hu@sh@host:5000/x\n", overrides=[word],
        info={"command": f"racelab train {word} judge.api_key=hush 'run.name=a b'"},
    )  # fmt: skip
    stored = "".join(p.read_text() for p in run.path.rglob("*") if p.is_file())
    assert "hu@" not in stored
    assert "hush" not in stored
    assert read_json(run.path / "config" / "overrides.json") == ["tracking.uri=http://host:5000/x"]
    assert run.info()["command"].startswith("racelab train tracking.uri=http://host:5000/x ")
    assert run.info()["command"].endswith(" 'run.name=a b'")
    for kept in ("sqlite:////a/b@c.db", "see http://host/@x", "hf://org/model@main", "http://host me@b"):
        assert redact(kept) == kept


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("status", None),
        ("status", "asleep"),
        ("steps", "many"),
        ("started", "now"),
        ("name", 3),
        ("tracking", []),
    ],
)
def test_a_damaged_record_is_said_when_the_run_is_opened(tmp_path: Path, key: str, value: object) -> None:
    run = make(tmp_path)
    write_json_atomic(run.path / "run.json", run.info() | {key: value})
    with pytest.raises(RunFolderError, match=rf"run\.json is damaged: {key} "):
        RunFolder.open(run.path)


def test_damaged_attempts_are_said(tmp_path: Path) -> None:
    run = make(tmp_path)
    for damage in ({}, [3], [{"attempt": 1}]):
        write_json_atomic(run.path / "attempts.json", damage)
        with pytest.raises(RunFolderError, match=r"attempts\.json is damaged"):
            run.attempts()


def test_a_run_in_use_says_how_to_stop_it(tmp_path: Path) -> None:
    run = make(tmp_path)
    with (
        run.lock(),
        pytest.raises(RunFolderError, match=rf"in use by pid {os.getpid()} .*`kill {os.getpid()}`"),
    ):
        run.lock()


def test_the_number_of_an_attempt_is_claimed_without_any_lock(tmp_path: Path) -> None:
    """Two hosts that do not see each other's locks must not write the same spool file."""
    run = make(tmp_path)
    (
        run.path / "attempts" / "1"
    ).mkdir()  # by a process that has not come to write attempts.json, or never will
    assert run.begin_attempt() == 2
    assert [entry["attempt"] for entry in run.attempts()] == [2]
