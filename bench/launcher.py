"""A sweep of 1,000 cells on a cluster: dry run, submission, and looking at it. Limits: 3 s, 10 s, 2 s and three calls.

`python bench/launcher.py [--cells N] [--repeat N] [--json] [--real]`. Wall seconds of the whole commands, Python's
start included, least of N. The scheduler's programs are stand-ins that answer from a file, so what is measured is ours;
the bare interpreter is there to compare with. `--real`: the cluster
that SLURM_CONF names, its jobs held and then cancelled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LIMITS_S = {"dry run": 3.0, "submit": 10.0, "jobs, all pending": 2.0, "jobs, half of them ended": 2.0}
LIMIT_CALLS = 3


def racelab(*words: str) -> float:
    """Wall seconds of one command. Raises RuntimeError with what it said if it fails."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "racelab.cli.main", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"racelab {' '.join(words)[:200]}: {done.stderr.strip()}")
    return time.perf_counter() - started


def bare() -> float:
    """Wall seconds of an interpreter that does nothing."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - started


@contextlib.contextmanager
def fake_cluster(folder: Path) -> Iterator[object]:
    """The tests' stand-ins, first on PATH."""
    import pytest

    sys.path.insert(0, str(REPOSITORY))
    from tests.sweeps.slurm.fake_slurm import FakeSlurm

    with pytest.MonkeyPatch.context() as patch:
        yield FakeSlurm.install(folder / "slurm", patch)


def end_some(root: Path, slurm: object, job: str, cells: int) -> None:
    """The first half of the cells as if their jobs had run: ended in the queue, with a record of 24 steps."""
    from racelab.experiments.runfolder import RunFolder
    from racelab.experiments.tracking.spool import SpoolWriter
    from racelab.sweeps.slurm.folder import End, all_launches

    folder = all_launches(root)[0]
    for batch, index, task in folder.launch().tasks():
        if index % 2 or index >= cells:
            continue
        run = RunFolder.open(root / task.run)
        number = run.begin_attempt()
        writer = SpoolWriter(run.spool_dir / f"{number}.jsonl")
        for step in range(1, 25):
            values = {"train/clock/policy_step": float(step), "train/reward/mean": 0.5}
            writer.append([{"kind": "metrics", "step": step, "values": values}])
        writer.append([{"kind": "end", "step": 24, "status": "finished", "reason": ""}])
        writer.close()
        run.update(status="finished", steps=24)
        end = End("finished", 0, "", f"{job}_{index}", 0, "node1", "2026-01-01T00:00:00.000+00:00", 24)
        folder.write_end(batch.name, index, end)
    ended = [f"{job}_{index}" for index in range(0, cells, 2)]
    slurm.set(*ended, state="COMPLETED", nodes="node1", exit="0:0")  # type: ignore[attr-defined]


def measure(cells: int, repeat: int, place: Path) -> tuple[dict[str, float], int]:
    """Case -> seconds, and the scheduler's calls of one look."""
    root = place / "runs"
    words = ["train", "--seeds", ",".join(map(str, range(cells))), "launcher=slurm", f"run.root={root}"]
    look = ["jobs", "--root", str(root), "--all"]
    found: dict[str, float] = {"bare interpreter": min(bare() for _ in range(repeat))}
    with fake_cluster(place) as slurm:
        found["dry run"] = min(racelab(*words, "--dry-run") for _ in range(repeat))
        found["submit"] = racelab(*words)
        found["jobs, all pending"] = min(racelab(*look) for _ in range(repeat))
        job = next(iter(slurm.jobs())).partition("_")[0]  # type: ignore[attr-defined]
        end_some(root, slurm, job, min(cells, 1000))
        slurm.forget_calls()  # type: ignore[attr-defined]
        racelab(*look)
        calls = len(slurm.calls())  # type: ignore[attr-defined]
        found["jobs, half of them ended"] = min(racelab(*look) for _ in range(repeat))
    return found, calls


def on_a_real_cluster(cells: int, place: Path) -> dict[str, float]:
    """The same against Slurm itself; the jobs are never started (begin in an hour), then cancelled."""
    if not os.environ.get("SLURM_CONF"):
        raise SystemExit("--real needs SLURM_CONF (tests/slurm/cluster/up.sh brings a cluster up)")
    root = place / "runs"
    seeds = ",".join(map(str, range(cells)))
    held = "launcher.extra=['--begin=now+3600']"
    found = {"submit": racelab("train", "--seeds", seeds, "launcher=slurm", held, f"run.root={root}")}
    found["jobs, all pending"] = racelab("jobs", "--root", str(root), "--all")
    found["cancel"] = racelab("cancel", "latest", "--root", str(root))
    found["jobs, all cancelled"] = racelab("jobs", "--root", str(root), "--all")
    return found


def main() -> int:
    """Prints the table; 1 if something is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--real", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="racelab-bench-") as name:
        if arguments.real:
            found, calls = on_a_real_cluster(arguments.cells, Path(name)), 0
        else:
            found, calls = measure(arguments.cells, arguments.repeat, Path(name))
    over = [case for case, seconds in found.items() if seconds > LIMITS_S.get(case, float("inf"))]
    if arguments.json:
        print(json.dumps({"cells": arguments.cells, "wall_s": found, "scheduler_calls": calls}, indent=2))
    else:
        print(f"{arguments.cells:,} cells")
        for case, seconds in found.items():
            limit = f"{LIMITS_S[case]:.0f}" if case in LIMITS_S else ""
            print(f"{case:28} {seconds:7.2f} s   {limit:>3}")
        print(f"{'scheduler calls of one look':28} {calls:7}     {LIMIT_CALLS:>3}")
    return int(bool(over) or calls > LIMIT_CALLS)


if __name__ == "__main__":
    sys.exit(main())
