"""A person at the cluster's login node: the real command line, in a folder of its own, and what it leaves there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from racelab.experiments.runfolder import RunFolder

from ..experiments.tiny_run import overrides
from .lab import Cluster, NotThereError

CALL_S = 120.0
"""How long one command line may take."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a command line gave."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Its stdout, read as JSON."""
        return json.loads(self.out)


@dataclass(frozen=True, slots=True)
class Desk:
    """Where commands are typed: `folder` is the working directory and RACELAB_HOME, the runs are in `<folder>/runs`.

    Attributes:
        cluster: that the commands reach.
        folder: of its own.
        model: the tiny model.
    """

    cluster: Cluster
    folder: Path
    model: Path

    @property
    def root(self) -> Path:
        """Of the runs."""
        return self.folder / "runs"

    def environment(self, **more: str) -> dict[str, str]:
        """Of every command line."""
        return self.cluster.environment(RACELAB_HOME=str(self.folder), **more)

    def words(self, *words: str) -> list[str]:
        """A command line of racelab, whole."""
        return [sys.executable, "-m", "racelab.cli.main", *words]

    def racelab(self, *words: str, timeout: float = CALL_S, **more: str) -> Result:
        """Runs a command line to its end."""
        done = subprocess.run(
            self.words(*words),
            cwd=self.folder,
            env=self.environment(**more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def well(self, *words: str, timeout: float = CALL_S, **more: str) -> Result:
        """Runs a command line that must end with 0."""
        result = self.racelab(*words, timeout=timeout, **more)
        assert result.code == 0, f"racelab {shlex.join(words)}\n{result.out}\n{result.err}"
        return result

    def start(self, *words: str, **more: str) -> subprocess.Popen[bytes]:
        """Starts a command line in a session of its own; what it says goes to `<folder>/said`."""
        with (self.folder / "said").open("ab") as said:
            return subprocess.Popen(
                self.words(*words),
                cwd=self.folder,
                env=self.environment(**more),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def tiny(self, **more: object) -> list[str]:
        """Overrides for a RACE run of seconds; keys with dots are given as `**{"run.seed": 1}`."""
        words = overrides(self.model, self.root, **more)
        return [word for word in words if not word.startswith("run.root=")]  # RACELAB_HOME says it

    def train(self, *words: str, **more: object) -> str:
        """Submits a tiny run; its run id."""
        line = ["train", *self.tiny(**more), "launcher=slurm", *words, "--json"]
        (job,) = self.well(*line).json()["jobs"]
        return str(job["run_id"])

    def jobs(self, *words: str) -> list[dict[str, Any]]:
        """What `racelab jobs --json` says."""
        found: list[dict[str, Any]] = self.well("jobs", *words, "--json").json()
        return found

    def job(self, run: str) -> dict[str, Any]:
        """What `racelab jobs` says of one run."""
        (found,) = self.jobs(run)
        return found

    def finish(self, what: str, timeout: float) -> list[dict[str, Any]]:
        """`racelab jobs WHAT --wait --json`: all tasks at their end; whether that was a good one is the caller's."""
        try:
            result = self.racelab("jobs", what, "--wait", "--json", timeout=timeout)
        except subprocess.TimeoutExpired as error:
            said = self.racelab("jobs", what).out
            raise NotThereError(
                f"{what} has not ended within {timeout:g} s\n{said}\n{self.cluster.picture()}\n{self.logs()}"
            ) from error
        assert result.code in (0, 1), result.err
        found: list[dict[str, Any]] = result.json()
        assert (result.code == 0) == all(task["state"] == "finished" for task in found)
        return found

    def succeed(self, what: str, timeout: float) -> list[dict[str, Any]]:
        """As `finish`, and all must have finished."""
        found = self.finish(what, timeout)
        bad = [(task["name"], task["state"], task["reason"]) for task in found if task["state"] != "finished"]
        assert bad == [], self.logs()
        return found

    def agrees_with_sacct(self, what: str) -> None:
        """Every job of `what` is completed, says accounting, on the nodes and by the ids that `racelab jobs` says.

        A run has finished a moment before Slurm says so, and accounting lags by up to 2 s.
        """
        arrays = sorted({task["job_id"].partition("_")[0] for task in self.jobs(what)})

        def same() -> bool:
            ours = {task["job_id"]: (task["slurm_state"], task["node"]) for task in self.jobs(what)}
            theirs = {row["JobID"]: (row["State"], row["NodeList"]) for row in self.cluster.sacct(*arrays)}
            return ours == theirs and {state for state, _ in theirs.values()} == {"COMPLETED"}

        self.cluster.wait(same, 30, f"sacct and racelab jobs {what} to say the same")

    def logs(self) -> str:
        """The end of everything that jobs have printed, for an error message."""
        files = [*self.root.glob(".launches/*/log/*"), *self.root.glob("*/attempts/*.log")]
        return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-1500:]}" for file in sorted(files))

    def runs(self) -> list[str]:
        """Names of the run folders."""
        return sorted(p.name for p in self.root.glob("*") if (p / "run.json").is_file())

    def launches(self) -> list[Path]:
        """Folders of the launches, oldest first."""
        return sorted(p.parent for p in self.root.glob(".launches/*/launch.json"))

    def read(self, run: str, name: str) -> Any:
        """A JSON file of a run; None if it is not there."""
        file = self.root / run / name
        return json.loads(file.read_text()) if file.is_file() else None

    def attempts(self, run: str) -> list[dict[str, Any]]:
        """Of a run, oldest first."""
        return list(self.read(run, "attempts.json") or ())

    def checkpoints(self, run: str) -> list[int]:
        """Steps of the checkpoints that are complete, ascending."""
        folders = (self.root / run / "checkpoints").glob("step-*/manifest.json")
        return sorted(int(file.parent.name.removeprefix("step-")) for file in folders)

    def wait_checkpoint(self, run: str, step: int, timeout: float = 90) -> None:
        """Until the run has saved `step` or a later one."""
        self.cluster.wait(
            lambda: max(self.checkpoints(run), default=-1) >= step,
            timeout,
            f"checkpoint {step} of {run}\n{self.logs()}",
        )

    def wait_attempt(self, run: str, number: int, timeout: float) -> dict[str, Any]:
        """Until the run's attempt `number` has begun."""

        def begun() -> dict[str, Any] | None:
            attempts = self.attempts(run)
            return attempts[number - 1] if len(attempts) >= number else None

        found = self.cluster.wait(begun, timeout, f"attempt {number} of {run}\n{self.logs()}")
        assert found is not None
        return found

    def spool(self, run: str, attempt: int) -> bytes:
        """What an attempt of a run has recorded so far."""
        file = self.root / run / "spool" / f"{attempt}.jsonl"
        return file.read_bytes() if file.exists() else b""

    def weights(self, run: str) -> tuple[int, str]:
        """Step of the last checkpoint, and the SHA-256 of its tensors."""
        step = self.checkpoints(run)[-1]
        file = self.root / run / "checkpoints" / f"step-{step:08d}" / "tensors.safetensors"
        return step, hashlib.sha256(file.read_bytes()).hexdigest()

    def table(self, run: str, name: str) -> list[dict[str, Any]]:
        """Rows of a run's table that count, without the attempt that wrote them and the time."""
        from racelab.analysis.load import load_table

        frame = load_table(RunFolder.open(self.root / run), name)
        rows: list[dict[str, Any]] = frame.drop(columns=["attempt", "ts"], errors="ignore").to_dict("records")
        assert rows, f"run {run} has no table {name}"
        return rows

    def metrics(self, run: str) -> dict[tuple[int, str], float]:
        """(step, name) -> value of a run's metrics, those that measure time or memory left out.

        Raises:
            AssertionError: a step stands there twice.
        """
        rows = [row for row in self.table(run, "metrics") if not row["name"].startswith("perf/")]
        found = {(row["step"], row["name"]): row["value"] for row in rows}
        assert len(found) == len(rows), "a step stands twice in the table of metrics"
        return found

    def mlflow(self, run: str) -> dict[str, str]:
        """Tags of a run in the store beside the runs."""
        number = self.read(run, "run.json")["mlflow_run_id"]
        with contextlib.closing(sqlite3.connect(self.root / "mlflow.db", timeout=20)) as store:
            return dict(store.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (number,)).fetchall())


def stalling_sbatch(folder: Path, when: Literal["before", "after"]) -> dict[str, str]:
    """A `sbatch` in front of the real one that stands still before or after submitting.

    It writes its pid to `<folder>/stalled` then, and goes on when there is a file `<folder>/go`.

    Returns:
        Environment variables that put it in front.
    """
    real = shutil.which("sbatch")
    assert real is not None
    place = folder / "bin"
    place.mkdir()
    stall = [
        f"echo $$ > {shlex.quote(str(folder / 'stalled'))}",
        f"for i in $(seq 600); do [ -e {shlex.quote(str(folder / 'go'))} ] && break; sleep 0.1; done",
    ]
    call = f'{shlex.quote(real)} "$@"'
    lines = [
        "#!/usr/bin/env bash",
        f'case "$*" in *--test-only*) exec {call} ;; esac',
        *([*stall, f"exec {call}"] if when == "before" else [f"said=$({call})", *stall, 'echo "$said"']),
    ]
    script = place / "sbatch"
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)
    return {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}"}
