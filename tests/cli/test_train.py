"""`racelab train` through the real command line, with a tiny model and every other part real."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from racelab.experiments.checkpoint import CheckpointStore
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import read_spool

from ..experiments.tiny_run import STEPS, overrides, write_tiny_model

Words = list[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def racelab(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "racelab.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=300)


def only_run(root: Path) -> RunFolder:
    (folder,) = [p for p in root.iterdir() if (p / "run.json").exists()]
    return RunFolder.open(folder)


def final_tensors(run: RunFolder) -> bytes:
    newest = max((run.path / "checkpoints").glob("step-*"))
    return (newest / "tensors.safetensors").read_bytes()


def remembered(run: RunFolder) -> list[tuple[Any, ...]]:
    """Everything in the spool that still counts, clock readings left out."""
    found = []
    for record in read_spool(run):
        if record["kind"] == "metrics":
            values = {
                k: v for k, v in record["values"].items() if "/time/" not in k and "tokens_per_s" not in k
            }
            found.append(("metrics", record["step"], sorted(values.items())))
        elif record["kind"] == "rows":
            found.append((record["table"], record["step"], json.dumps(record["rows"], sort_keys=True)))
    return sorted(found)


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One run that nobody disturbed."""
    root = tmp_path_factory.mktemp("whole")
    done = racelab("train", *overrides(model, root), "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["step"]) == ("finished", STEPS)
    return only_run(root)


PROMISED = [
    "run.json",
    "attempts.json",
    "config/composed.yaml",
    "config/overrides.json",
    "env/environment.json",
    "setup.json",
    "summary.json",
    "manifest.json",
    "spool/1.jsonl",
    "tables/groups.parquet",
    "tables/phases.parquet",
    "tables/samples.parquet",
    "tables/rubric_groups.parquet",
    "tables/val_examples.parquet",
    "tables/rubric_probe.parquet",
    "tables/probe_groups.parquet",
    "tables/rubric_probe.parquet",
]


def test_a_run_leaves_everything_it_promises(finished: RunFolder):
    assert finished.status() == "finished"
    for name in PROMISED:
        assert (finished.path / name).is_file(), name
    summary = json.loads((finished.path / "summary.json").read_text())
    assert [(p["kind"], p["length"]) for p in summary["phases"]][:3] == [
        ("policy", 3),
        ("rubric", 2),
        ("policy", 3),
    ]
    assert summary["health"]["cost_mismatch"] == 0
    assert summary["steps"] == {"policy": 8, "rubric": 4}


def test_the_summary_for_people_names_the_next_command(
    finished: RunFolder, capsys: pytest.CaptureFixture[str]
):
    from racelab.cli.summary import print_summary

    summary = json.loads((finished.path / "summary.json").read_text())
    print_summary(
        summary, {"wall_s": 60.0, "peak_gib": 1.0, "attempts": 1}, finished, "racelab", finished.run_id
    )
    text = capsys.readouterr().out
    for part in (
        "8 policy and 4 rubric updates; 1.0 min",
        "Is it only sharpening?",
        f"racelab show {finished.run_id}",
    ):
        assert part in text


def test_weights_changed_and_both_roles_were_trained(finished: RunFolder):
    from safetensors.numpy import load_file

    newest = max((finished.path / "checkpoints").glob("step-*"))
    tensors = load_file(newest / "tensors.safetensors")
    assert any(abs(t).max() > 0 for name, t in tensors.items() if name.startswith("exp_avg/"))
    state = json.loads((newest / "state.json").read_text())
    assert (state["method"]["phase"]["policy_steps"], state["method"]["phase"]["rubric_steps"]) == (8, 4)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(
    finished: RunFolder, model: Path, tmp_path: Path
):
    again, other = tmp_path / "again", tmp_path / "other"
    assert racelab("train", *overrides(model, again)).returncode == 0
    assert racelab("train", *overrides(model, other, **{"run.seed": 1})).returncode == 0
    assert final_tensors(only_run(again)) == final_tensors(finished)
    assert remembered(only_run(again)) == remembered(finished)
    assert final_tensors(only_run(other)) != final_tensors(finished)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def spool_lines(root: Path) -> int:
    return sum(p.read_bytes().count(b"\n") for p in root.glob("*/spool/*.jsonl"))


def start(words: Words) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "racelab.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_sigterm_saves_says_how_to_go_on_and_the_resumed_run_is_the_same(
    finished: RunFolder, model: Path, tmp_path: Path
):
    process = start(["train", *overrides(model, tmp_path)])
    wait_for(lambda: any(tmp_path.glob("*/checkpoints/step-*")), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    run = only_run(tmp_path)
    assert process.returncode == 143
    assert f"train --resume {run.path}" in err
    assert run.status() == "interrupted"
    resumed = racelab("train", "--resume", str(run.path))
    assert resumed.returncode == 0, resumed.stderr
    assert final_tensors(run) == final_tensors(finished)
    assert remembered(run) == remembered(finished)


EVENTS: dict[str, object] = {
    "method.phase.mode": "event",
    "method.phase.mu_sat": 0.0,
    "method.phase.sigma_sw": 1.0,
    "method.phase.alpha": 0.5,
    "method.phase.tau_sat": 0.7,
    "method.phase.window": 1,
    "method.phase.policy_window": 1,
    "method.phase.rubric_window": 1,
    "method.phase.max_rubric_steps": 3,
}
"""Every group counts as saturated, so both triggers fire and both controllers adapt within twelve steps."""


@pytest.fixture(scope="module")
def finished_by_events(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("events")
    done = racelab("train", *overrides(model, root, **EVENTS), "--json")
    assert done.returncode == 0, done.stderr
    reasons = {p["end_reason"] for p in json.loads(done.stdout)["phases"]}
    assert {"saturation", "plateau"} <= reasons
    return only_run(root)


def same(run: RunFolder, whole: RunFolder) -> None:
    """Weights, optimiser, method state and everything remembered are equal."""
    assert final_tensors(run) == final_tensors(whole)
    newest, other = (max((r.path / "checkpoints").glob("step-*")) for r in (run, whole))
    states = [json.loads((folder / "state.json").read_text()) for folder in (newest, other)]
    for key in ("method", "backend", "rng", "stream"):
        assert states[0][key] == states[1][key], key
    assert remembered(run) == remembered(whole)


def kill_and_resume(words: Words, root: Path, moment: Callable[[], bool]) -> RunFolder:
    process = start(["train", *words])
    wait_for(moment, process)
    process.kill()
    process.communicate()
    run = only_run(root)
    assert run.status() == "stale"
    resumed = racelab("train", "--resume", str(run.path))
    assert resumed.returncode == 0, resumed.stderr
    return run


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_sigkill_at_a_random_moment_changes_nothing(
    finished: RunFolder, finished_by_events: RunFolder, model: Path, tmp_path: Path, seed: int
):
    whole, more = [(finished, {}), (finished_by_events, EVENTS)][seed % 2]
    lines = sum(p.read_bytes().count(b"\n") for p in (whole.path / "spool").glob("*.jsonl"))
    moment = random.Random(seed).randrange(1, lines)
    words = overrides(model, tmp_path, **more)
    same(kill_and_resume(words, tmp_path, lambda: spool_lines(tmp_path) >= moment), whole)


@pytest.mark.slow
def test_sigkill_after_the_last_view_was_written_leaves_it_once(
    finished: RunFolder, model: Path, tmp_path: Path
):
    def view_is_there() -> bool:
        return any(b'"model":"trained"' in p.read_bytes() for p in tmp_path.glob("*/spool/*.jsonl"))

    same(kill_and_resume(overrides(model, tmp_path), tmp_path, view_is_there), finished)


@pytest.mark.slow
def test_a_second_process_on_the_same_run_is_refused(model: Path, tmp_path: Path):
    words = overrides(model, tmp_path, **{"run.max_steps": 400})
    process = start(["train", *words])
    try:
        wait_for(lambda: spool_lines(tmp_path) > 2, process)
        refused = racelab("train", "--resume", str(only_run(tmp_path).path))
        assert refused.returncode == 2
        assert f"in use by pid {process.pid}" in refused.stderr
    finally:
        process.kill()
        process.communicate()


BAD: dict[str, tuple[dict[str, object], str]] = {
    "unknown key": ({"method.grup_size": 8}, "method.group_size"),
    "unknown preset": ({"preset": "embeded"}, "embedded"),
    "impossible value": ({"method.group_size": 1}, "method.group_size"),
    "missing data file": ({"data": "file", "data.path": "nowhere.jsonl"}, "nowhere.jsonl"),
    "model folder without weights": ({"model.source": "{tmp}/empty"}, "empty"),
    "wrong hash": ({"model.sha256": "0" * 64}, "0000"),
    "backend that is not there": ({"backend": "verl"}, "backend=local"),
    "tracking address of an unknown kind": ({"tracking": "mlflow", "tracking.uri": "'/tmp/x'"}, "/tmp/x"),
    "option that the backend cannot honour": ({"backend.nodes": 2}, "backend.nodes"),
    "prompts longer than allowed": ({"data.max_prompt_tokens": 20, "data.on_long_prompt": "error"}, "tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(case: str, model: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    changes, part = BAD[case]
    more = {k: str(v).replace("{tmp}", str(tmp_path)) for k, v in changes.items()}
    if more.get("data") == "file":
        words = list(overrides(model, tmp_path / "runs", **more))
    else:
        words = overrides(model, tmp_path / "runs", **more)
    done = racelab("train", *words)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == (4 if case.startswith("backend that") else 2), done.stderr
    assert len(errors) == 1, done.stderr
    assert part in errors[0]
    assert "Traceback" not in done.stderr
    left = list((tmp_path / "runs").glob("*/run.json"))
    assert all(json.loads(p.read_text())["status"] == "failed" for p in left)


def test_a_finished_run_is_not_run_again(finished: RunFolder):
    done = racelab("train", "--resume", str(finished.path), "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["status"], found["run_id"]) == (0, "finished", finished.run_id)
    assert found["steps"] == {"policy": 8, "rubric": 4}


def test_a_run_that_never_got_a_model_is_recorded_as_failed(model: Path, tmp_path: Path):
    words = overrides(model, tmp_path / "runs", **{"model.train_from_layer": 99})
    assert racelab("train", *words).returncode == 2
    runs = [RunFolder.open(p.parent) for p in (tmp_path / "runs").glob("*/run.json")]
    assert [run.status() for run in runs] in ([], ["failed"])


def test_a_malformed_data_file_is_named_with_its_line(model: Path, tmp_path: Path):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "one"}\n{"prompt": 3}\n')
    done = racelab("train", *overrides(model, tmp_path / "runs", data="file", **{"data.path": data}))
    assert done.returncode == 2
    assert "prompts.jsonl:2" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_dry_run_starts_nothing(model: Path, tmp_path: Path):
    done = racelab("train", *overrides(model, tmp_path / "runs"), "--dry-run", "--seeds", "0,1", "--json")
    assert [row["seed"] for row in json.loads(done.stdout)] == [0, 1]
    assert not (tmp_path / "runs").exists()


def test_the_paper_preset_says_its_cluster_and_warns(tmp_path: Path):
    done = racelab("train", "preset=paper", f"run.root={tmp_path}", "--dry-run", "--json")
    (row,) = json.loads(done.stdout)
    assert (row["nodes"], row["gpus"], row["backend"]) == (2, 16, "verl")
    assert any("q_target" in f for f in row["findings"])
    assert any("d_tri" in f for f in row["findings"])


@pytest.mark.slow
def test_a_disk_without_space_for_a_checkpoint_fails_in_one_line(model: Path, tmp_path: Path):
    """RLIMIT_FSIZE stands in for a full disk at the edge: the kernel refuses to let a file grow."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (160_000, 160_000)); "
        "from racelab.cli.main import main; main(sys.argv[1:])"
    )
    words = overrides(model, tmp_path / "runs", **{"model.train_from_layer": 0, "checkpoint.every": 1})
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *words], capture_output=True, text=True, timeout=300
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1, done.stderr
    assert len(errors) == 1
    run = only_run(tmp_path / "runs")
    assert run.status() == "failed"
    store = CheckpointStore(run.path / "checkpoints")
    assert [p.name for p in store.folder.iterdir() if not p.name.startswith("step-")] == []
    assert all(store.load(step).step == step for step in store.steps())


@pytest.mark.slow
def test_a_dead_tracking_server_costs_nothing_and_sync_delivers_once(model: Path, tmp_path: Path):
    """The port is closed while the run trains; then a real server opens on it."""
    import mlflow

    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    words = overrides(model, tmp_path / "runs", tracking="mlflow")
    done = racelab("train", *words, MLFLOW_TRACKING_URI=uri)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "runs")
    assert re.search(r"\d+ records wait for MLflow", done.stderr)
    with tracking_server(port, tmp_path):
        first = json.loads(racelab("sync", str(run.path), "--json").stdout)
        second = json.loads(racelab("sync", str(run.path), "--json").stdout)
        client = mlflow.MlflowClient(uri)
        delivered = client.get_metric_history(run.info()["mlflow_run_id"], "train/reward/mean")
    assert [m.step for m in delivered] == [1, 2, 3, 6, 7, 8, 11, 12]
    assert counts(first)["delivered"] > 0
    assert (counts(second)["delivered"], counts(second)["backlog"]) == (0, 0)


def counts(report: Any) -> dict[str, int]:
    """The one run's entry of `racelab sync --json`."""
    (entry,) = report if isinstance(report, list) else [report]
    return dict(entry)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def tracking_server(port: int, folder: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--workers", "1"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    server = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < end, "the tracking server did not start"
            time.sleep(0.2)
        yield
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)
