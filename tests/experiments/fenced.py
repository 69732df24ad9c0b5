"""A run with a fence, and real processes that work on it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from racelab.experiments import fence
from racelab.experiments.runfolder import RunFolder

LAUNCH = {"uid": "20260304T050607-abcdef", "batch": "train", "index": 4, "number": 1}
JOB = {"job_id": "12_4", "restart": 1, "node": "node3"}
WAIT_S = 30
_PRELUDE = """
import os, signal, sys, time
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import SpoolWriter
def say(word): print(word, flush=True)
run = RunFolder.open(sys.argv[1])
"""
WRITE_FOR_EVER = """
with run.lock():
    spool = SpoolWriter(run.spool_dir / f"{run.begin_attempt()}.jsonl")
    step = 0
    while True:
        step += 1
        spool.append([{"kind": "metrics", "step": step, "values": {"a/b": 1.0}}])
        run.update(steps=step)
        if step == 20: say("writing")
"""


def make(root: Path, **info: Any) -> RunFolder:
    """In a folder with a space, since people have them."""
    return RunFolder.create(root / "all runs", "toy", composed_yaml="", overrides=[], info=info)


def taken(run: RunFolder, token: str, **facts: Any) -> str:
    """A job takes the run; its token."""
    fence.take(run.path, token, {**JOB, **facts})
    return token


@contextlib.contextmanager
def process(code: str, run: RunFolder, token: str = "") -> Iterator[subprocess.Popen[str]]:
    """A Python process that works on the run, with its fence if there is a token; killed at the end."""
    environment = {**os.environ, **(fence.variables_of(run.path, token) if token else {})}
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _PRELUDE + code, str(run.path)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def heard(child: subprocess.Popen[str], seconds: float = WAIT_S) -> str:
    """The next line that the process says; "" if it says nothing for so long, or has ended."""
    assert child.stdout is not None
    deadline, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        # byte by byte: what a buffer holds back, select does not see
        if not select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return ""
        byte = os.read(child.stdout.fileno(), 1)
        if not byte:
            return ""
        line += byte
    return line.decode().strip()


def contents(run: RunFolder) -> dict[str, bytes]:
    """Every file of the run but those that only say who works on it."""
    return {
        str(path.relative_to(run.path)): path.read_bytes()
        for path in sorted(run.path.rglob("*"))
        if path.is_file() and path.name not in ("lock", "heartbeat", "fence", ".fence.lock")
    }
