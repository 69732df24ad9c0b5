"""From the spool to MLflow, exactly once, whatever dies in between."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from racelab.experiments import fence
from racelab.experiments.errors import ConfigError, FencedError, RunFolderError, UnreachableError
from racelab.experiments.fsio import write_json_atomic
from racelab.experiments.ports import Tracker
from racelab.experiments.runfolder import RunFolder, read_json
from racelab.experiments.tracking import mlflow_store
from racelab.experiments.tracking import shipper as shipper_module
from racelab.experiments.tracking.address import run_uri, stored_config
from racelab.experiments.tracking.description import flatten
from racelab.experiments.tracking.mlflow_store import (
    MlflowStore,
    tracking_uri,
    valid_key,
    without_credentials,
)
from racelab.experiments.tracking.shipper import Shipper, backlog, sync
from racelab.experiments.tracking.spool import SpoolWriter
from racelab.experiments.tracking.tracker import NullTracker, SpoolTracker
from racelab.experiments.types import StepRecord

CONFIG = {"seed": 3, "race": {"G": 8, "notes": "x" * 7000}}


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its tables made: copying it saves a second per test."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowStore.open(f"sqlite:///{path}")
    return path


@pytest.fixture
def root(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    runs = tmp_path / "all runs"  # a space, since people have them
    runs.mkdir()
    shutil.copy(empty_database, runs / "mlflow.db")
    return runs


def make(root: Path, **info: Any) -> RunFolder:
    return RunFolder.create(
        root, "toy", composed_yaml=yaml.safe_dump(CONFIG), overrides=["seed=3"],
        info={"kind": "train", "method": "race", "seed": 3, **info},
    )  # fmt: skip


def step_record(step: int, value: float = 0.5) -> StepRecord:
    return StepRecord(
        step,
        {"train/reward/mean": value, "train/optim/kl": math.nan if step == 2 else 0.25},
        {"val_examples": [{"step": step, "task": "t", "example_id": "e", "reward": value}]},
    )


def run_attempt(run: RunFolder, steps: range, status: str | None, value: float = 0.5, **options: Any) -> None:
    with run.lock():
        attempt = run.begin_attempt(from_step=steps.start - 1)
        tracker = SpoolTracker(run, attempt, **{"ship": False, **options})
        for step in steps:
            tracker.record(step_record(step, value))
        if status is not None:
            tracker.close(status)


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def history(run: RunFolder, name: str) -> list[tuple[int, float]]:
    store = client(run_uri(run))
    points = store.get_metric_history(run.info()["mlflow_run_id"], name)
    return sorted((p.step, p.value) for p in points)


def mlflow_run(run: RunFolder) -> Any:
    return client(run_uri(run)).get_run(run.info()["mlflow_run_id"])


def test_sync_delivers_all_once_and_a_second_sync_adds_nothing(root: Path) -> None:
    run = make(root)
    run_attempt(run, range(1, 6), "finished")
    assert backlog(run) == 11
    report = sync(run)
    assert (report.delivered, report.backlog, report.mlflow_run_id) == (11, 0, run.info()["mlflow_run_id"])
    assert sync(run).delivered == 0
    assert history(run, "train/reward/mean") == [(s, 0.5) for s in range(1, 6)]
    assert history(run, "train/optim/kl") == [(s, 0.25) for s in (1, 3, 4, 5)]
    assert history(run, "health/nonfinite/train/optim/kl") == [(2, 1.0)]
    stored = mlflow_run(run)
    assert (stored.info.status, stored.info.run_name) == ("FINISHED", "toy")
    assert stored.data.params == {"seed": "3", "race.G": "8", "race.notes": "x" * 6000}
    tags = stored.data.tags
    assert {"racelab.kind": "train", "racelab.method": "race", "racelab.attempt": "1"}.items() <= tags.items()
    assert "racelab train seed=3" in tags["mlflow.note.content"]
    store = client(run_uri(run))
    paths = {a.path for f in (None, "tables", "config") for a in store.list_artifacts(stored.info.run_id, f)}
    assert {
        "manifest.json", "attempts.json", "config/composed.yaml", "tables/val_examples.parquet",
        "tables/val_examples.json",
    } <= paths  # fmt: skip
    assert len(store.search_runs([stored.info.experiment_id])) == 1


def test_killed_between_a_batch_and_its_position(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is sent again with the same timestamps, so the store keeps one of each."""
    run = make(root)
    run_attempt(run, range(1, 5), "finished")
    worker = Shipper(run, run_uri(run))
    worker.connect()

    def die(self: Shipper) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Shipper, "_save", die)
        with pytest.raises(KeyboardInterrupt):
            worker.ship()
    assert history(run, "train/reward/mean") == [(s, 0.5) for s in range(1, 5)]
    assert backlog(run) == 9
    assert sync(run).delivered == 9
    assert history(run, "train/reward/mean") == [(s, 0.5) for s in range(1, 5)]


def test_a_run_counts_as_delivered_only_once_it_is_closed(root: Path) -> None:
    """Killed after the last point but before tables and final status: sync still has something to do."""
    run = make(root)
    run_attempt(run, range(1, 3), "finished")
    assert Shipper(run, run_uri(run)).ship() == 4
    assert backlog(run) == 1
    assert mlflow_run(run).info.status == "RUNNING"
    assert sync(run).delivered == 1
    assert mlflow_run(run).info.status == "FINISHED"


def test_large_backlogs_go_in_batches(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = MlflowStore.log
    monkeypatch.setattr(
        MlflowStore,
        "log",
        lambda self, i, points=(), **kw: sizes.append(len(points)) or real(self, i, points, **kw),
    )
    run = make(root)
    with run.lock():
        tracker = SpoolTracker(run, run.begin_attempt(), ship=False)
        for step in range(1, 8):
            tracker.metrics(step, {f"a/m{i}": float(i) for i in range(300)})
        tracker.close("finished")
    sync(run)
    assert [n for n in sizes if n] == [900, 900, 300]
    assert history(run, "a/m299") == [(s, 299.0) for s in range(1, 8)]


def test_what_a_resumed_run_redid_is_not_sent(root: Path) -> None:
    run = make(root)
    run_attempt(run, range(1, 6), None, value=0.1)
    run_attempt(run, range(4, 7), "finished", value=0.9)  # went on from step 3
    sync(run)
    assert history(run, "train/reward/mean") == [(1, 0.1), (2, 0.1), (3, 0.1), (4, 0.9), (5, 0.9), (6, 0.9)]
    assert mlflow_run(run).data.tags["racelab.attempt"] == "2"


def test_resuming_after_the_end_reopens_the_mlflow_run(root: Path) -> None:
    run = make(root)
    run_attempt(run, range(1, 3), "failed")
    sync(run)
    assert mlflow_run(run).info.status == "FAILED"
    (run.path / "config" / "composed.yaml").write_text("seed: 4\nextra: 1\n")
    run_attempt(run, range(3, 4), "interrupted")
    sync(run)
    stored = mlflow_run(run)
    assert stored.info.status == "KILLED"
    assert (stored.data.params["seed"], stored.data.params["extra"]) == (
        "3",
        "1",
    )  # MLflow's params never change
    assert [s for s, _ in history(run, "train/reward/mean")] == [1, 2, 3]


def test_a_store_that_lost_the_run_gets_everything_again(root: Path, empty_database: Path) -> None:
    run = make(root)
    run_attempt(run, range(1, 4), "finished")
    first = sync(run).mlflow_run_id
    shutil.copy(empty_database, root / "mlflow.db")
    write_json_atomic(
        run.spool_dir / "shipped.json",
        read_json(run.spool_dir / "shipped.json") | {"attempts": {"1": {"offset": 0, "records": 0}}},
    )
    assert sync(run).mlflow_run_id != first
    assert [s for s, _ in history(run, "train/reward/mean")] == [1, 2, 3]


def test_a_run_deleted_in_mlflow_is_not_made_anew(root: Path) -> None:
    run = make(root)
    run_attempt(run, range(1, 2), "failed")
    mlflow_id = sync(run).mlflow_run_id
    client(run_uri(run)).delete_run(mlflow_id)
    run_attempt(run, range(2, 3), "finished")
    with pytest.raises(UnreachableError, match=r"was deleted .*`mlflow runs restore"):
        sync(run)


def test_sync_closes_a_killed_run(root: Path) -> None:
    run = make(root)
    code = (
        "import os, signal, sys\n"
        "from racelab.experiments.runfolder import RunFolder\n"
        "from racelab.experiments.tracking.tracker import SpoolTracker\n"
        "run = RunFolder.open(sys.argv[1])\n"
        "lock = run.lock()\n"
        "tracker = SpoolTracker(run, run.begin_attempt(), ship=False)\n"
        "tracker.metrics(1, {'a/b': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(run.path)], check=False)
    assert run.status() == "stale"
    report = sync(run)
    assert (report.closed_stale, report.backlog) == (True, 0)
    assert (run.status(), run.info()["reason"]) == ("interrupted", "killed")
    stored = mlflow_run(run)
    assert (stored.info.status, stored.data.tags["racelab.end_reason"]) == ("KILLED", "killed")
    assert read_json(run.path / "manifest.json")["complete"] is False
    assert sync(run).delivered == 0


def test_sync_leaves_a_live_run_open(root: Path) -> None:
    run = make(root)
    with run.lock():
        tracker = SpoolTracker(run, run.begin_attempt(), ship=False)
        tracker.record(step_record(1))
        report = sync(run)
        assert (report.live, report.delivered, report.closed_stale) == (True, 2, False)
        assert mlflow_run(run).info.status == "RUNNING"
        with shipper_module._ship_lock(run, 1):
            assert sync(run).live


def test_sync_leaves_a_run_whose_shipper_goes_as_sync_gives_up_waiting(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(root)
    with run.lock():
        SpoolTracker(run, run.begin_attempt(), ship=False).close("finished", "")
    take, shipper = shipper_module.file_lock, contextlib.ExitStack()
    shipper.enter_context(shipper_module._ship_lock(run, 1))

    @contextlib.contextmanager
    def lock(path: Path, wait_s: float) -> Iterator[None]:
        try:
            with take(path, min(wait_s, 0.0)):
                yield
        except RunFolderError:
            shipper.close()
            raise

    monkeypatch.setattr(shipper_module, "file_lock", lock)
    report = sync(run)
    assert (report.live, report.delivered) == (True, 0)


def test_the_cells_of_a_sweep_share_a_parent(root: Path) -> None:
    runs = [make(root, sweep="grid's 1") for _ in range(2)]
    for run in runs:
        run_attempt(run, range(1, 2), "finished")
        sync(run)
    parents = {mlflow_run(run).data.tags["mlflow.parentRunId"] for run in runs}
    assert len(parents) == 1
    parent = client(run_uri(runs[0])).get_run(parents.pop())
    assert (parent.info.status, parent.info.run_name) == ("FINISHED", "grid's 1")


def cell(root: Path, sweep: str | None = "grid") -> RunFolder:
    """A finished run that has the id which every run of this cell has."""
    info = {"kind": "train", "method": "race", **({"sweep": sweep} if sweep else {})}
    run = RunFolder.create(
        root,
        "toy",
        composed_yaml=yaml.safe_dump(CONFIG),
        overrides=[],
        info=info,
        run_id="full-s0-0123456789",
    )
    run_attempt(run, range(1, 3), "finished")
    return run


def grid_folder(root: Path) -> RunFolder:
    return RunFolder.create(
        root, "grid", composed_yaml="", overrides=[], info={"kind": "sweep"}, run_id="grid"
    )


def test_the_same_cell_in_two_roots_is_two_runs_with_two_parents(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of cells and sweeps come again; the runs behind them are told apart by their uid."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root / 'mlflow.db'}")
    other = tmp_path / "other"
    sweeps = [grid_folder(root), grid_folder(other)]
    runs = [cell(root), cell(other)]
    ids = [sync(run).mlflow_run_id for run in runs]
    assert ids[0] != ids[1]
    assert [len(history(run, "train/reward/mean")) for run in runs] == [2, 2]
    tags = [mlflow_run(run).data.tags for run in runs]
    assert [t["racelab.uid"] for t in tags] == [run.info()["uid"] for run in runs]
    assert [t["racelab.run_id"] for t in tags] == ["full-s0-0123456789"] * 2
    parents = [client(run_uri(runs[0])).get_run(t["mlflow.parentRunId"]).data.tags for t in tags]
    assert [p["racelab.uid"] for p in parents] == [sweep.info()["uid"] for sweep in sweeps]


def test_a_cell_run_again_after_its_folder_was_removed_is_another_run_though_the_first_was_deleted(
    root: Path,
) -> None:
    run = cell(root, sweep=None)
    first = sync(run).mlflow_run_id
    client(run_uri(run)).delete_run(first)
    shutil.rmtree(run.path)
    again = cell(root, sweep=None)
    assert sync(again).mlflow_run_id != first
    assert history(again, "train/reward/mean") == [(1, 0.5), (2, 0.5)]


def test_a_run_of_before_the_uid_is_found_by_its_id_among_those_without_one(root: Path) -> None:
    store = MlflowStore.open(tracking_uri(root))
    newer = store.ensure_run("racelab", "old", "n", 2, {}, uid="a" * 32)
    old = store.ensure_run("racelab", "old", "n", 1, {})
    assert old != newer
    assert store.ensure_run("racelab", "old", "n", 1, {}) == old
    assert store.ensure_run("racelab", "old", "n", 2, {}, uid="a" * 32) == newer


def test_the_shipper_process_delivers_while_the_run_goes_on(root: Path) -> None:
    run = make(root)
    run_attempt(run, range(1, 6), "finished", ship=True, wait_s=60)
    assert (backlog(run), run.status()) == (0, "finished")
    assert read_json(run.spool_dir / "ship_status.json")["state"] == "delivered"
    stored = mlflow_run(run)
    assert stored.info.status == "FINISHED"
    assert "racelab.heartbeat" in stored.data.tags
    assert [s for s, _ in history(run, "health/spool_backlog")] == [1, 2, 3, 4, 5]
    assert sync(run).delivered == 0


def test_a_dead_server_costs_no_time(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    run = make(root)
    with run.lock():
        tracker = SpoolTracker(run, run.begin_attempt(), uri=uri, wait_s=60)
        begin = time.process_time()
        for step in range(1, 201):
            tracker.record(step_record(step))
        assert (time.process_time() - begin) / 200 < 0.005
        begin = time.monotonic()
        tracker.close("finished")
        assert time.monotonic() - begin < 30
        assert tracker.shipper is not None
        assert tracker.shipper.wait(30) == 4
    assert "no tracking server" in caplog.text
    assert "racelab sync" in caplog.text
    assert backlog(run) == 401
    assert read_json(run.spool_dir / "ship_status.json")["state"] == "gave_up"
    with pytest.raises(
        UnreachableError, match=rf"no tracking server at {uri} .*start it, then `racelab sync`"
    ):
        sync(run)


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert tracking_uri(Path("runs")) == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert tracking_uri(tmp_path, "sqlite:///own.db") == f"sqlite:///{tmp_path}/own.db"
    for bad, words in {
        "./mlruns": "is a folder",
        "file:///tmp/mlruns": "is a folder",
        "http://127.0.0.1:99999": "Port out of range",
        "http://me:hush@host:port": "Port could not be cast",
        "http://[half": "Invalid IPv6",
        "http:foo": "of no kind",
        "http:///x": "names no host",
        "ftp://x": "of no kind",
        "sqlite:own.db": "of no kind",
    }.items():
        with pytest.raises(ConfigError, match=words) as caught:
            tracking_uri(tmp_path, bad)
        assert "hush" not in str(caught.value)
    assert tracking_uri(tmp_path, "postgresql+psycopg2://u:p@db/x") == "postgresql+psycopg2://u:p@db/x"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hush@host:5000")
    assert tracking_uri(tmp_path) == "http://me:hush@host:5000"
    assert without_credentials("http://me:hush@host:5000") == "http://host:5000"
    run = make(tmp_path)
    with run.lock():
        SpoolTracker(run, run.begin_attempt(), ship=False).close("finished")
    assert all("hush" not in p.read_text(errors="replace") for p in run.path.rglob("*") if p.is_file())
    assert run_uri(run) == "http://me:hush@host:5000"


def test_flatten_and_names() -> None:
    assert flatten({"a": {"b": 1, "c": [1, 2]}, "d": None, "e": {}}) == {
        "a.b": "1", "a.c": "[1, 2]", "d": "None", "e": "{}",
    }  # fmt: skip
    assert valid_key("eval/math(500)/avg") == "eval/math_500_/avg"


def test_tracker_states_and_refusals(root: Path) -> None:
    run = make(root)
    with run.lock():
        run.begin_attempt()
        tracker = SpoolTracker(run, run.begin_attempt(from_step=7), ship=False)
        assert tracker.state() == {"attempt": 2, "offset": 0, "last_step": 7}
        tracker.rows("phases", [{"index": 0}])
        tracker.tags({"phase": "policy"})
        tracker.metrics(8, {"a/b": 1})
        state = tracker.state()
        assert state == {"attempt": 2, "offset": (run.spool_dir / "2.jsonl").stat().st_size, "last_step": 8}
        with pytest.raises(ValueError, match="table 'phases' has step 'x'"):
            tracker.rows("phases", [{"step": "x"}])
        with pytest.raises(ValueError, match="status 'done'"):
            tracker.close("done")
        tracker.close("finished", "budget")
        tracker.close("failed")
    assert (run.status(), run.info()["reason"]) == ("finished", "budget")
    null = NullTracker()
    assert isinstance(null, Tracker)
    assert isinstance(tracker, Tracker)
    null.record(step_record(1))
    null.close("finished")
    assert null.state() == {}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A real `mlflow server` on loopback, started when told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--workers", "1"]
        words += ["--artifacts-destination", str(self.folder / "artifacts")]
        with open(self.folder / "server.log", "wb") as log:
            self.process = subprocess.Popen(
                words, stdout=log, stderr=log, start_new_session=True, cwd=self.folder,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )  # fmt: skip
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.3)
        raise AssertionError((self.folder / "server.log").read_text())

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(30)
            self.process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.stop()


@pytest.mark.slow
def test_a_server_that_was_down_gets_everything_once(root: Path, server: Server) -> None:
    run = make(root)
    run_attempt(run, range(1, 31), "finished", ship=True, uri=server.uri)
    assert backlog(run) == 61
    server.start()
    assert sync(run).backlog == 0
    assert sync(run).delivered == 0
    assert history(run, "train/reward/mean") == [(s, 0.5) for s in range(1, 31)]
    stored = mlflow_run(run)
    assert stored.info.status == "FINISHED"
    names = {a.path for a in client(server.uri).list_artifacts(stored.info.run_id, "tables")}
    assert "tables/val_examples.parquet" in names


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle(root: Path, server: Server) -> None:
    server.start()
    run = make(root)
    with run.lock():
        tracker = SpoolTracker(run, run.begin_attempt(), uri=server.uri, wait_s=60)
        tracker.record(step_record(1))
        deadline = time.monotonic() + 60
        while backlog(run) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert backlog(run) == 0
        server.stop()
        for step in range(2, 21):
            tracker.record(step_record(step))
        time.sleep(3)
        begin = time.monotonic()
        tracker.close("finished")
        assert time.monotonic() - begin < 30
        assert tracker.shipper is not None
        assert tracker.shipper.wait(60) == 4
    server.start()
    assert sync(run).backlog == 0
    assert history(run, "train/reward/mean") == [(s, 0.5) for s in range(1, 21)]
    assert mlflow_run(run).info.status == "FINISHED"


@pytest.mark.slow
def test_a_killed_trainer_is_closed_by_its_shipper(root: Path) -> None:
    run = make(root)
    code = (
        "import os, signal, sys\n"
        "from racelab.experiments.runfolder import RunFolder\n"
        "from racelab.experiments.tracking.tracker import SpoolTracker\n"
        "run = RunFolder.open(sys.argv[1])\n"
        "lock = run.lock()\n"
        "tracker = SpoolTracker(run, run.begin_attempt())\n"
        "tracker.metrics(1, {'a/b': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(run.path)], check=False)
    deadline = time.monotonic() + 90
    status = run.spool_dir / "ship_status.json"
    while time.monotonic() < deadline:
        if status.exists() and read_json(status)["state"] == "delivered":
            break
        time.sleep(0.2)
    assert mlflow_run(run).info.status == "KILLED"
    assert history(run, "a/b") == [(1, 1.0)]
    assert run.status() == "stale"
    assert sync(run).closed_stale


@pytest.mark.slow
def test_many_processes_may_meet_at_a_fresh_store(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from racelab.experiments.tracking.mlflow_store import MlflowStore\n"
        "store = MlflowStore.open(sys.argv[1])\n"
        "print(store.ensure_run('e', 'same', 'n', 1, {}))\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, f"sqlite:///{tmp_path}/mlflow.db"], stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    answers = {child.communicate(timeout=180)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0] * 6
    assert len(answers) == 1


def test_a_run_that_named_no_store_goes_where_the_variable_points(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, bound = make(root), make(root)
    free.update(tracking={"uri": "http://old:5000", "configured": False, "experiment": "racelab"})
    bound.update(tracking={"uri": "http://old:5000", "configured": True, "experiment": "racelab"})
    assert run_uri(free) == "http://old:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:pw@new:5000")
    assert run_uri(free) == "http://me:pw@new:5000"
    assert run_uri(bound) == "http://old:5000"
    free.update(tracking={"uri": "http://old:5000", "experiment": "racelab"})  # of before the field
    assert run_uri(free) == "http://me:pw@new:5000"
    (free.path / "config" / "composed.yaml").write_text(
        "tracking: {uri: 'http://old:5000'}\n", encoding="utf-8"
    )
    assert run_uri(free) == "http://old:5000"


def test_a_recorded_address_that_is_none_names_the_run(root: Path) -> None:
    run = make(root)
    run.update(tracking={"uri": "http://127.0.0.1:99999", "configured": True, "experiment": "racelab"})
    with pytest.raises(RunFolderError, match=rf"{run.run_id}/run\.json: .*Port out of range"):
        run_uri(run)


def test_sync_rebuilds_tables_that_are_gone_and_needs_no_description(root: Path) -> None:
    run = make(root)
    run_attempt(run, range(1, 3), "finished")
    shutil.rmtree(run.path / "tables")
    for file in ("config/composed.yaml", "config/overrides.json", "env/environment.json"):
        (run.path / file).unlink()
    assert sync(run).delivered == 5
    table = run.path / "tables" / "val_examples.parquet"
    assert table.is_file()
    table.unlink()
    assert sync(run).delivered == 0
    assert table.is_file()


def test_a_config_that_is_no_yaml_is_named(root: Path) -> None:
    run = make(root)
    (run.path / "config" / "composed.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(RunFolderError, match=r"composed\.yaml is not YAML"):
        stored_config(run)


def test_a_folder_that_cannot_be_written_is_not_in_use(root: Path) -> None:
    run = make(root)
    run_attempt(run, range(1, 3), "finished")
    (run.spool_dir / "ship.lock").mkdir()  # as unwritable as a read-only disk, also for root
    with pytest.raises(RunFolderError, match=r"cannot lock .*ship\.lock"):
        sync(run)


def test_what_mlflow_says_is_told_without_the_password() -> None:
    with (
        pytest.raises(UnreachableError, match=r"http://host:1/api refused") as caught,
        mlflow_store._told("http://me:hush@host:1"),
    ):
        raise OSError("http://me:hush@host:1/api refused")
    assert "hush" not in str(caught.value)


def test_the_shipper_of_a_replaced_attempt_delivers_nothing_more_and_closes_nothing(root: Path) -> None:
    """The last step and the end were in the spool when the attempt was replaced, but had not been delivered."""
    run = make(root)
    fence.take(run.path, "A", {"job_id": "12", "restart": 0, "node": "node1"})
    with fence.hold(run.path, "A"), run.lock():
        attempt = run.begin_attempt()
        tracker = SpoolTracker(run, attempt)
        tracker.record(step_record(1))
        deadline = time.monotonic() + 60
        while backlog(run) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert backlog(run) == 0
        assert tracker.shipper is not None
        os.kill(tracker.shipper.pid, signal.SIGSTOP)
        tracker.record(step_record(2))
        SpoolWriter(run.spool_dir / f"{attempt}.jsonl").append(
            [{"kind": "end", "step": 2, "status": "failed", "reason": ""}]
        )
        run.update(status="failed")
        fence.take(run.path, "B", {"job_id": "12", "restart": 1, "node": "node2"})
        status = (run.spool_dir / "ship_status.json").read_bytes()
        os.kill(tracker.shipper.pid, signal.SIGCONT)
        assert tracker.shipper.wait(30) == 1
        with pytest.raises(FencedError):
            tracker.close("finished")
    assert history(run, "train/reward/mean") == [(1, 0.5)]
    assert mlflow_run(run).info.status == "RUNNING"
    assert mlflow_run(run).data.tags["racelab.slurm_job_id"] == "12"
    assert (run.spool_dir / "ship_status.json").read_bytes() == status
    assert "taken over by job 12 (restart 1) on node2" in (run.path / "attempts/1/shipper.log").read_text()


def test_a_shipper_that_was_replaced_before_it_began_opens_no_store(root: Path) -> None:
    run = make(root)
    run_attempt(run, range(1, 3), None)
    fence.take(run.path, "B", {})
    (root / "mlflow.db").unlink()
    words = [
        sys.executable,
        "-P",
        "-m",
        "racelab.experiments.tracking.shipper",
        str(run.path),
        "--parent",
        "1",
    ]
    done = subprocess.run(
        words, env={**os.environ, **fence.variables_of(run.path, "A")}, timeout=60, check=False
    )
    assert done.returncode == 1
    assert not (root / "mlflow.db").exists()
    assert not (run.spool_dir / "ship_status.json").exists()


def test_a_store_is_asked_for_nothing_once_the_attempt_was_replaced(root: Path) -> None:
    """Whatever the shipper is about to do when it happens."""
    run = make(root)
    run_attempt(run, range(1, 3), "finished")
    fence.take(run.path, "A", {})
    with fence.hold(run.path, "A"):
        worker = Shipper(run, run_uri(run))
        worker.connect()
        fence.take(run.path, "B", {})
        before = mlflow_run(run).to_dictionary()
        for call in (worker.ship, worker.heartbeat, worker.finish, worker.mark_killed):
            with pytest.raises(FencedError):
                call()
        with pytest.raises(FencedError):
            worker.send_artifacts((".",))
        with pytest.raises(FencedError):
            Shipper(run, run_uri(run)).connect()
    assert mlflow_run(run).to_dictionary() == before
    assert history(run, "train/reward/mean") == []
    assert sync(run).backlog == 0  # by a person, who is fenced by nothing


def test_no_shipper_where_the_environment_says_so_but_sync_knows_the_store(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACELAB_SHIP", "0")
    run = make(root)
    uri = f"sqlite:///{root / 'mlflow.db'}"
    with run.lock():
        tracker = SpoolTracker(run, run.begin_attempt(), ship=True, uri=uri, experiment="other")
        assert tracker.shipper is None
        tracker.record(step_record(1))
        tracker.close("finished")
    assert run.info()["tracking"] == {"uri": uri, "configured": True, "experiment": "other"}
    assert not (run.spool_dir / "ship_status.json").exists()
    assert sync(run).delivered == 3
    assert history(run, "train/reward/mean") == [(1, 0.5)]
