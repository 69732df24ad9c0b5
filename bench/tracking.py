"""What tracking costs a step: `python bench/tracking.py [--uri URI] [--steps N] [--step-s S]`.

Steps as large as those of the embedded RACE run (60 metrics, 4 groups, 32 samples with texts), the shipper
process delivering beside it. A dead server is tried with `--uri http://127.0.0.1:9`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.shipper import backlog
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import StepRecord


def record(step: int, source: random.Random) -> StepRecord:
    """One step's worth of values."""
    metrics = {f"section{i // 10}/part/name{i}": source.random() for i in range(60)}
    rewards = [source.random() for _ in range(8)]
    groups = [{"step": step, "prompt_id": f"p{i}", "rewards": rewards, "mean": 0.5} for i in range(4)]
    text = "a response of ordinary length, " * 10
    samples = [{"step": step, "group": i // 8, "idx": i % 8, "text": text} for i in range(32)]
    return StepRecord(step, metrics, {"groups": groups, "samples": samples})


def main() -> None:
    """Prints one JSON object: milliseconds per step, the worst, and their share of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri", default=None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-s", type=float, default=7.4, help="seconds of the step to compare with")
    parser.add_argument(
        "--pause-s", type=float, default=0.05, help="between steps, for the shipper to meet them"
    )
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    source = random.Random(0)
    blocks: list[float] = []
    try:
        run = RunFolder.create(
            folder, "bench", composed_yaml="seed: 0\n", overrides=[], info={"kind": "bench"}
        )
        with run.lock():
            tracker = SpoolTracker(run, run.begin_attempt(), uri=args.uri)
            for step in range(1, args.steps + 1):
                content = record(step, source)
                begin = time.perf_counter()
                tracker.record(content)
                blocks.append(time.perf_counter() - begin)
                time.sleep(args.pause_s)
            begin = time.perf_counter()
            tracker.close("finished")
            close_s = time.perf_counter() - begin
            if tracker.shipper is not None:
                tracker.shipper.wait(120)
        figures = {
            "steps": args.steps,
            "median_ms": round(1000 * statistics.median(blocks), 3),
            "max_block_ms": round(1000 * max(blocks), 3),
            "share_of_step": round(statistics.mean(blocks) / args.step_s, 6),
            "close_s": round(close_s, 2),
            "backlog": backlog(run),
            "shipper_cpu_s": round(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]), 2),
        }
        print(json.dumps(figures))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
