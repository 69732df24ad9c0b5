"""What confinement costs a program: `python bench/sandbox.py --runs 50`.

Prints one JSON object for each means: median seconds of an empty program bare and confined, one after another and
`workers` at a time, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import get_args

from racelab.experiments.evaluation.sandbox import SandboxError, run_code, run_many
from racelab.experiments.evaluation.sandbox.types import Means


def bare() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-S", "-E", "-c", "pass"], check=True)
    return time.perf_counter() - start


def confined(means: Means) -> float:
    start = time.perf_counter()
    if not run_code("pass", means=means).passed:
        raise SystemExit("an empty program did not pass")
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    for means in get_args(Means):
        try:
            confined(means)
        except SandboxError as error:
            print(json.dumps({"means": means, "error": str(error)}))
            continue
        pairs = [(bare(), confined(means)) for _ in range(args.runs)]
        plain, boxed = (statistics.median(side) for side in zip(*pairs, strict=True))
        start = time.perf_counter()
        run_many(["pass"] * args.runs, None, args.workers, means=means)
        each = (time.perf_counter() - start) / args.runs
        print(
            json.dumps(
                {
                    "means": means,
                    "root": os.geteuid() == 0,
                    "bare_s": round(plain, 4),
                    "confined_s": round(boxed, 4),
                    "ratio": round(boxed / plain, 2),
                    "workers": args.workers,
                    "side_by_side_s": round(each, 4),
                }
            )
        )


if __name__ == "__main__":
    main()
