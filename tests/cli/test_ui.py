"""`ui`: starts, answers, names its address, stops cleanly with all its children; a server is only named."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]


def test_without_runs_there_is_nothing_to_show(call: Call) -> None:
    result = call("ui", "--no-open")
    assert result.code == 2
    assert "racelab train" in result.err


def test_a_port_in_use_is_said(call: Call, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from racelab.experiments.tracking.mlflow_store import MlflowStore

    monkeypatch.setattr(MlflowStore, "open", lambda uri: None)
    (home / "runs").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = call("ui", "--no-open", "--port", port)
    assert result.code == 2
    assert f"--port {port}" in result.err


def test_a_store_that_is_a_server_is_named_not_started(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url.replace("//", "//user:secret@"))
        result = call("ui", "--no-open", "--json")
    assert result.code == 0
    assert result.json() == {"url": url, "pid": None, "store": url}
    assert "secret" not in result.out + result.err


def test_a_server_that_is_away_exits_with_4(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert call("ui", "--no-open").code == 4


def group_is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_serves_until_it_is_told_to_stop(home: Path, make_run: Call, signum: int, code: int) -> None:
    make_run()
    process = subprocess.Popen(
        [sys.executable, "-m", "racelab.cli.main", "ui", "--no-open", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = []
        while not lines or lines[-1] != "}\n":
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            lines.append(line)
        told = json.loads("".join(lines))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{told['url']}/health", timeout=10) as answer:
            assert answer.status == 200
        assert told["url"].startswith("http://127.0.0.1:")
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    assert process.returncode == code
    assert "Traceback" not in err
    deadline = time.monotonic() + 10
    while not group_is_empty(told["pid"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert group_is_empty(told["pid"])
