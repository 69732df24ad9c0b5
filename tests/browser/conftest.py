"""A store with one tiny run, the tracking server over it, and a headless Chromium looking at it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent.parent
SHOTS = ROOT / "build" / "ci"
START_S = 90.0
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass(frozen=True, slots=True)
class Site:
    """A served store: where, and what is in it."""

    url: str
    experiment: str
    run_id: str
    run_name: str


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_run(uri: str) -> tuple[str, str, str]:
    """One finished run of 12 steps; returns (experiment id, run id, run name)."""
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.create_experiment("racelab")
    run = client.create_run(experiment, run_name="race-embedded-seed0", start_time=1_700_000_000_000)
    points = [
        Metric(name, value, 1_700_000_000_000 + 1000 * step, step)
        for step in range(12)
        for name, value in (("train/reward/mean", 0.4 + step / 40), ("race/trqc/q_ema", 0.3 - step / 60))
    ]
    tags = [RunTag("racelab.kind", "race"), RunTag("racelab.seed", "0")]
    client.log_batch(run.info.run_id, metrics=points, params=[Param("run.seed", "0")], tags=tags)
    client.set_terminated(run.info.run_id, "FINISHED", end_time=1_700_000_012_000)
    return experiment, run.info.run_id, "race-embedded-seed0"


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers; its log is in the error otherwise."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.3)
    raise AssertionError(f"no answer from {url} (exit {server.poll()}):\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The tracking UI over a fresh store."""
    home = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{home}/mlflow.db"
    experiment, run_id, name = write_run(uri)
    port = free_port()
    log = home / "server.log"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--port", str(port)]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, cwd=home, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}", server, log)
        yield Site(f"http://127.0.0.1:{port}", experiment, run_id, name)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(10)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium; a missing one is a failure, never a skip."""
    path = shutil.which("chromium")
    assert path is not None, "Chromium is needed: apt-get install chromium"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page that reaches this machine only; a script error in it fails the test."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(60_000)
    context.route(
        lambda url: urlsplit(url).hostname not in {"127.0.0.1", None},
        lambda route: route.abort("blockedbyclient"),
    )
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    context.close()
    assert errors == []


@pytest.fixture(scope="session")
def shots() -> Path:
    """Where screenshots go."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    return SHOTS
