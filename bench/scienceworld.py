"""One ScienceWorld simulator: steps per CPU second, memory, and the package's own environment beside it.

Run: python bench/scienceworld.py [--rounds N] [--json]

Both sides play the same commands in the same worlds, in turn, so that a busy machine is busy for both. CPU seconds are
those of the Java process and of this one. Targets: 70 steps per CPU second once warm (loading the worlds included), and
400 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# This file has the package's name, and its folder comes first where it is run as a script.
sys.path.remove(str(Path(__file__).resolve().parent))

import yaml

import racelab.configs
from racelab.configs.schema_rlds import ScienceWorldTask
from racelab.experiments.episodes import Instance
from racelab.experiments.tasks.scienceworld.task import ScienceWorld

WORLDS = (
    ("find-living-thing", 0),
    ("boil", 1),
    ("test-conductivity", 2),
    ("grow-plant", 3),
    ("chemistry-mix-paint-tertiary-color", 4),
    ("inclined-plane-friction-named-surfaces", 5),
)
ROOMS = ("kitchen", "art studio", "greenhouse", "outside", "workshop", "living room", "bedroom")
WARM_UP = 3  # rounds in which Java compiles
STEPS_PER_CPU_S, MEMORY_MB = 70.0, 400.0


def commands() -> list[str]:
    """29 turns as an agent takes them: walks, looks, tries, waits, one in five rejected."""
    found = [
        c for room in ROOMS for c in (f"teleport to {room}", "look around", "look at door", "open cupboard")
    ]
    return [*found, "wait"]


def cpu_s(pid: int) -> float:
    """User and system seconds of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """Most memory that the process has had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def timed(pid: int, play: Callable[[], int]) -> tuple[int, float, float]:
    """Steps, CPU seconds, wall seconds."""
    cpu, own, wall = cpu_s(pid), time.process_time(), time.perf_counter()
    steps = play()
    return steps, cpu_s(pid) - cpu + time.process_time() - own, time.perf_counter() - wall


class Ours:
    def __init__(self) -> None:
        folder = Path(racelab.configs.__file__).parent
        values = yaml.safe_load((folder / "rlds" / "task" / "scienceworld.yaml").read_text(encoding="utf-8"))
        self.task = ScienceWorld(ScienceWorldTask(**{**values, "jvms": 1}))
        simulator = self.task._pool.lease()
        self.pid = simulator.pid
        self.task._pool.give_back(simulator)

    def round(self) -> int:
        steps = 0
        for name, variation in WORLDS:
            env = self.task.open(Instance("scienceworld", name, {"task": name, "variation": variation}))
            env.reset()
            for command in commands():
                env.step(f"<think>bench</think><action>{command}</action>")
                steps += 1
            env.stop("turns")
            env.result()
            env.close()
        return steps

    def close(self) -> None:
        self.task.close()


class Theirs:
    def __init__(self) -> None:
        from scienceworld import ScienceWorldEnv

        self.env = ScienceWorldEnv("", envStepLimit=1000)
        self.pid = self.env._gateway.java_process.pid

    def round(self) -> int:
        steps = 0
        for name, variation in WORLDS:
            self.env.load(name, variation, "easy")
            self.env.reset()
            for command in commands():
                self.env.step(command)
                steps += 1
        return steps

    def close(self) -> None:
        self.env.close()


def main() -> int:
    """Prints the table; 1 if ours misses a target in CPU seconds or memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    ours, theirs = Ours(), Theirs()
    rows: dict[str, list[tuple[int, float, float]]] = {"ours": [], "package": []}
    try:
        for _ in range(WARM_UP):
            ours.round()
        theirs.round()
        for _ in range(arguments.rounds):
            rows["ours"].append(timed(ours.pid, ours.round))
            rows["package"].append(timed(theirs.pid, theirs.round))
        memory = {"ours": memory_mb(ours.pid), "package": memory_mb(theirs.pid)}
    finally:
        ours.close()
        theirs.close()
    table = {}
    for side, runs in rows.items():
        steps, cpu, wall = (sum(run[i] for run in runs) for i in range(3))
        table[side] = {
            "steps_per_cpu_s": round(steps / cpu, 1),
            "steps_per_s": round(steps / wall, 1),
            "peak_mb": round(memory[side]),
        }
    ratio = table["ours"]["steps_per_cpu_s"] / table["package"]["steps_per_cpu_s"]
    if arguments.json:
        print(json.dumps({**table, "ratio": round(ratio, 1)}, indent=2))
    else:
        print(f"{'':10}{'steps/CPU s':>12}{'steps/s':>10}{'peak MB':>10}")
        for side, row in table.items():
            print(f"{side:10}{row['steps_per_cpu_s']:12.1f}{row['steps_per_s']:10.1f}{row['peak_mb']:10.0f}")
        print(f"ratio of steps per CPU second: {ratio:.1f}")
    return int(table["ours"]["steps_per_cpu_s"] < STEPS_PER_CPU_S or table["ours"]["peak_mb"] > MEMORY_MB)


if __name__ == "__main__":
    sys.exit(main())
