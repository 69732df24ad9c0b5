"""A job's process with the cluster around it: its launch, a scripted child, and Slurm's commands on PATH.

The child does in a moment what a training does in minutes, with the same folders, locks and exit codes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.slurm.folder import End, LaunchFolder, intent
from racelab.sweeps.slurm.model import Assignment, Batch

from .fake_slurm import FakeSlurm
from .launches import make_batch, make_launch

CHILD = """
import json, os, signal, sys, time
from pathlib import Path
from racelab.experiments import fence
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import StopRequest

run = RunFolder.open(sys.argv[1])
what = (run.path / "what").read_text().split()
names = ("RACELAB_", "OMP_")
seen = {k: v for k, v in os.environ.items() if k.startswith(names)}
(run.path / "seen.json").write_text(json.dumps(seen))
if "refuse" in what:
    print("Traceback (most recent call last):")
    sys.exit("error: no model in there")
if "mute" in what:
    sys.exit(3)
with StopRequest() as stop, run.lock():
    run.begin_attempt()
    if "die" in what:
        os.kill(os.getpid(), signal.SIGKILL)
    if "crash" in what:
        run.update(status="failed", reason="x")
        sys.exit("error: the loss is not finite")
    print("at work", flush=True)
    end = time.monotonic() + (60 if "long" in what else 0)
    while time.monotonic() < end and not ("deaf" not in what and stop.signum):
        time.sleep(0.02)
        if "heed" in what:
            fence.check(run.path)
        if (run.path / "signal-yourself").exists():
            os.kill(os.getpid(), signal.SIGTERM)
    if stop.signum and "save" in what:
        (run.path / "checkpoints" / f"step-{len(run.attempts()):08d}").mkdir()
    if stop.signum and "break" in what:
        sys.exit("error: the game's process is gone")
    run.update(status="interrupted" if stop.signum else "finished", steps=1)
sys.exit(stop.exit_code)
"""

WRAPPER = """
import sys
from racelab.sweeps.slurm import entry, handback, nodes, supervise, work

nodes.GATHER_S, handback.HOLD_S = 8.0, 2.0
handback.KILLED_S = 10.0
handback._ASK_S = 0.1
supervise.TERM_BUSY_S = 1.0
work.busy_after_s = lambda delay_s: 0.5
child = sys.argv.pop(1)

def words(task, run):
    script = [sys.executable, child, str(run)]
    return script if task.kind == "run" else [sys.executable, "-u", "-c", *task.words]

sys.exit(entry.main(words=words))
"""

SCONTROL = """#!/bin/sh
echo "$@" >> '{lab}/requeued'
if [ -e '{lab}/refuse' ]; then echo "Requested operation is presently disabled" >&2; exit 1; fi
'{lab}/slurm/scontrol' "$@" && kill -TERM $(cat '{lab}/pid')
"""
"""Slurm stops whoever asks for his own requeue."""


class Lab:
    """A launch with its runs, and the cluster as a job's process sees it."""

    def __init__(self, place: Path, slurm: FakeSlurm) -> None:
        self.place, self.root, self.slurm = place, place / "runs", slurm
        slurm.add("12", state="RUNNING", nodes="node3")
        self.bin = place / "bin"
        self.bin.mkdir()
        (self.bin / "scontrol").write_text(SCONTROL.format(lab=place))
        (self.bin / "scontrol").chmod(0o755)
        (place / "child.py").write_text(textwrap.dedent(CHILD))
        (place / "wrapper.py").write_text(textwrap.dedent(WRAPPER))
        self.processes: list[subprocess.Popen[str]] = []

    def launch(self, batch: Batch | None = None, what: str = "") -> LaunchFolder:
        launch = make_launch(self.root, batch or make_batch())
        self.folder = LaunchFolder.create(launch)
        for of, index, task in launch.tasks():
            if task.kind == "run":
                mine = Assignment(launch.uid, of.name, index, 1)
                run = RunFolder.create(
                    self.root, task.run, composed_yaml="tracking: {uri: null}\n", overrides=[],
                    info={"launch": mine.to_json()}, run_id=task.run,
                )  # fmt: skip
                (run.path / "what").write_text(what)
        for of in launch.batches:
            self.folder.record(intent(of, 1))
        return self.folder

    def state(self, word: str) -> None:
        self.slurm.set("12", state=word)

    def start(self, *arguments: str, out: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        """The process of a job; its arguments are the launch's first batch and submission 1 unless given."""
        output = subprocess.PIPE if out is None else os.open(out, os.O_WRONLY | os.O_CREAT)
        batch = self.folder.launch().batches[0].name
        environment = {
            **os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_PROCID": "0",
            "SLURM_NNODES": "1", "SLURMD_NODENAME": "node3", **variables,
        }  # fmt: skip
        words = arguments or (str(self.folder.path), batch, "1")
        process = subprocess.Popen(
            [sys.executable, "-u", "-P", self.place / "wrapper.py", self.place / "child.py", *words],
            env=environment, stdout=output, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if environment["SLURM_PROCID"] == "0":
            (self.place / "pid").write_text(str(process.pid))
        self.processes.append(process)
        return process

    def run(self, name: str = "run-0") -> RunFolder:
        return RunFolder.open(self.root / name)

    def end(self, index: int = 0) -> End:
        found = self.folder.end("cells", index)
        assert found is not None, "no End"
        return found

    @property
    def requeued(self) -> list[str]:
        file = self.place / "requeued"
        calls = file.read_text().splitlines() if file.exists() else []
        return [call for call in calls if call.startswith("requeue")]

    def at_work(self, name: str = "run-0") -> Callable[[], bool]:
        return lambda: any("at work" in log.read_text() for log in (self.root / name).glob("attempts/*.log"))


def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def ended(process: subprocess.Popen[str], seconds: float = 30.0) -> tuple[int, str]:
    said, _ = process.communicate(timeout=seconds)
    return process.returncode, said


def wire(end: End) -> tuple[Any, ...]:
    return end.status, end.exit_code, end.job_id, end.restart, end.node
