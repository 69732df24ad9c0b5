"""A store with one tiny run, the tracking server over it, and a headless Chromium looking at it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

if TYPE_CHECKING:
    from racelab.experiments.runfolder import RunFolder

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


def write_run(root: Path) -> RunFolder:
    """One finished run of 12 steps through the project's own record and shipper."""
    from racelab.experiments.runfolder import RunFolder
    from racelab.experiments.tracking.tracker import SpoolTracker

    run = RunFolder.create(
        root,
        "race-embedded-seed0",
        composed_yaml="run:\n  seed: 0\n  policy_updates: 12\n",
        overrides=["run.policy_updates=12"],
        info={"kind": "race", "method": "race", "variant": "full", "seed": 0, "steps": 12},
    )
    with run.lock():
        tracker = SpoolTracker(run, run.begin_attempt(), wait_s=START_S)
        for step in range(12):
            tracker.metrics(step, {"train/reward/mean": 0.4 + step / 40, "race/trqc/q_ema": 0.3 - step / 60})
            tracker.rows("phases", [{"step": step, "index": 0, "kind": "policy"}])
        tracker.close("finished")
    assert tracker.ship_status()["state"] == "delivered"
    return run


def experiment_id(root: Path) -> str:
    """MLflow's number of the experiment `racelab`."""
    with contextlib.closing(sqlite3.connect(root / "mlflow.db")) as store:
        ((number,),) = store.execute(
            "SELECT experiment_id FROM experiments WHERE name = 'racelab'"
        ).fetchall()
    return str(number)


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
    """`racelab ui` over a fresh folder of runs."""
    root = tmp_path_factory.mktemp("store") / "runs"
    run = write_run(root)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = root / "server.log"
    command = [
        sys.executable,
        "-m",
        "racelab.cli.main",
        "ui",
        "--no-open",
        "--port",
        str(port),
        "--root",
        str(root),
    ]
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, cwd=root, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for(url, server, log)
        yield Site(url, experiment_id(root), str(run.info()["mlflow_run_id"]), str(run.info()["name"]))
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
    context = browser.new_context(viewport={"width": 1400, "height": 2400})
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
