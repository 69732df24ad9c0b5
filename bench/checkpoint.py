"""Seconds to save and to load a checkpoint: `python bench/checkpoint.py --mb 430 --dir DIR`."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from racelab.experiments.checkpoint import CheckpointStore


def main() -> None:
    """Prints one JSON object: medians and maxima in seconds, hashing and fsync included."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=430, help="megabytes of tensors")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", default=None, help="where to write; the temporary folder by default")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    count, rest = 60, args.mb * 1_000_000 // 4
    tensors = {f"layer.{i}": torch.randn(rest // count, generator=generator) for i in range(count)}
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    save, load = [], []
    try:
        store = CheckpointStore(folder, keep_last=1)
        for step in range(1, args.repeats + 1):
            start = time.perf_counter()
            store.save(step, tensors, {"step": step})
            save.append(time.perf_counter() - start)
            start = time.perf_counter()
            loaded = store.load_latest()
            load.append(time.perf_counter() - start)
            if not torch.equal(loaded.tensors["layer.7"], tensors["layer.7"]):
                raise SystemExit("the loaded tensors differ from the saved ones")
    finally:
        shutil.rmtree(folder)
    figures = {
        "megabytes": args.mb,
        "save_s_median": round(statistics.median(save), 3),
        "save_s_max": round(max(save), 3),
        "load_s_median": round(statistics.median(load), 3),
        "load_s_max": round(max(load), 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
