"""`racelab ui`: the MLflow pages over the project's runs, on this machine only, until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path
from typing import IO

from racelab.cli.console import on_terminal, print_json, say
from racelab.cli.sync import deliver_launched
from racelab.cli.train import run_root
from racelab.experiments.errors import ConfigError, RunFolderError, UnreachableError
from racelab.experiments.tracking.mlflow_store import (
    ENVIRONMENT,
    MlflowStore,
    probe,
    tracking_uri,
    without_credentials,
)

HOST = "127.0.0.1"
START_S = 120.0
"""Seconds that the server may take to answer."""
STOP_S = 15.0
_SERVER_ENVIRONMENT = {**ENVIRONMENT, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def ui(port: int, open_browser: bool, root: Path | None, json_output: bool) -> int:
    """Serves until interrupted, or names the address of a store that is a server already.

    Raises:
        KeyboardInterrupt: Ctrl-C; the server is stopped first.
        UnreachableError: the server did not start, or the configured one does not answer.
    """
    folder = run_root(str(root) if root else "")
    uri = tracking_uri(folder)
    if uri.startswith(("http://", "https://")):
        probe(uri)
        _tell(without_credentials(uri), None, uri, open_browser, json_output)
        return 0
    if not folder.is_dir():
        raise RunFolderError(f"no runs in {folder}; start one with: racelab train")
    deliver_launched(folder)
    # Creates the tables once, under the lock that the runs use too, before the server touches the file.
    MlflowStore.open(uri)
    port = _free_port(port)
    with tempfile.TemporaryFile() as log:
        server = _start(uri, port, log)
        try:
            _wait(server, f"http://{HOST}:{port}", log)
            _tell(f"http://{HOST}:{port}", server.pid, uri, open_browser, json_output)
            server.wait()
        finally:
            _stop(server)
        raise UnreachableError(f"the MLflow server ended by itself: {_last_line(log)}; see `racelab doctor`")


def _free_port(port: int) -> int:
    """The port asked for if nobody has it, a free one for 0."""
    with socket.socket() as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"--port {port}: {error.strerror or error}; leave --port out for a free one"
            ) from error
        return int(probe_socket.getsockname()[1])


def _start(uri: str, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-P", "-m", "mlflow", "server", "--backend-store-uri", uri, "--workers", "1"]
    return subprocess.Popen(
        [*words, "--host", HOST, "--port", str(port)],
        env={**os.environ, **_SERVER_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches us alone; we stop the whole group
    )


def _wait(server: subprocess.Popen[bytes], url: str, log: IO[bytes]) -> None:
    """Until the server answers."""
    deadline = time.monotonic() + START_S
    # A proxy set in the environment must not be asked for this machine's own port.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline and server.poll() is None:
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            opener.open(f"{url}/health", timeout=2) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise UnreachableError(f"the MLflow server did not start: {_last_line(log)}; see `racelab doctor`")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ends the server with all its workers; nothing is left behind."""
    for signum, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signum)
        try:
            server.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)  # a worker that outlived its parent


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def _tell(url: str, pid: int | None, store: str, open_browser: bool, json_output: bool) -> None:
    if json_output:
        print_json({"url": url, "pid": pid, "store": without_credentials(store)})
    else:
        print(url)
    sys.stdout.flush()
    if pid is not None and not json_output:
        say("Ctrl-C stops it")
    has_screen = sys.platform == "darwin" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    # Without a screen, webbrowser would start a text browser inside this terminal.
    if open_browser and has_screen and on_terminal() and not json_output:
        webbrowser.open(url)
