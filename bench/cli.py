"""How long the command line takes: help, composing with the check, and a bare interpreter to compare with.

`python bench/cli.py [--repeat N] [--json]`. CPU seconds (user + system) of a child process, least of N, so
that other work on the machine hardly matters; wall seconds beside them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

CASES = {
    "bare interpreter": ["-c", "pass"],
    "racelab --help": ["-m", "racelab.cli.main", "--help"],
    "racelab --version": ["-m", "racelab.cli.main", "--version"],
    "compose and check": [
        "-c",
        "from racelab.configs.compose import compose; from racelab.configs.check import reachability; "
        "reachability(compose([]).config)",
    ],
    "racelab config check preset=paper": ["-m", "racelab.cli.main", "config", "check", "preset=paper"],
}
LIMITS_S = {"racelab --help": 0.4, "compose and check": 1.0}
"""What the design allows (wall, on an idle machine)."""


def measure(words: list[str]) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of one child process."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> int:
    """Prints the table; 1 if a case is above its limit in CPU seconds, which other load cannot explain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[dict[str, str | float | None]] = []
    over = False
    for name, words in CASES.items():
        runs = [measure(words) for _ in range(max(1, arguments.repeat))]
        cpu, wall = min(run[0] for run in runs), min(run[1] for run in runs)
        limit = LIMITS_S.get(name)
        over = over or (limit is not None and cpu > limit)
        rows.append({"case": name, "cpu_s": round(cpu, 3), "wall_s": round(wall, 3), "limit_s": limit})
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print(f"{'case':36} {'cpu s':>7} {'wall s':>7} {'limit s':>8}")
        for row in rows:
            limit_text = "" if row["limit_s"] is None else f"{row['limit_s']:.1f}"
            print(f"{row['case']:36} {row['cpu_s']:7.3f} {row['wall_s']:7.3f} {limit_text:>8}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
