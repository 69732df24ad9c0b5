"""CPU time of routing one step: 64 groups of 8 responses of 1,000 words. Target: at most 400 ms on one core.

Run: python bench/routing.py
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from racelab.experiments.methods.race.routing import Thresholds, route, signals

N, G, WORDS, D = 64, 8, 1000, 384


def main() -> None:
    """Prints the best and the median of seven rounds."""
    rng = np.random.default_rng(0)
    vocabulary = np.array([f"word{i}" for i in range(5000)])
    texts = [[" ".join(rng.choice(vocabulary, WORDS)) + "." for _ in range(G)] for _ in range(N)]
    rewards_NG = np.round(rng.uniform(0, 1, (N, G)), 2)
    emb_NGD = rng.normal(size=(N, G, D))
    emb_NGD /= np.linalg.norm(emb_NGD, axis=-1, keepdims=True)
    thresholds = Thresholds()
    times = []
    for _ in range(7):
        start = time.process_time()
        for j in range(N):
            route(signals(rewards_NG[j], texts[j], emb_NGD[j]), thresholds)
        times.append(1000 * (time.process_time() - start))
    print(
        f"routing ({N}, {G}) x {WORDS} words: best {min(times):.0f} ms, median {np.median(times):.0f} ms CPU"
    )


if __name__ == "__main__":
    main()
