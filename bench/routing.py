"""CPU time of one step's routing, TRQC and phase switching, all but the encoder. Target: 400 ms on one core.

Run: python bench/routing.py [--step-s S]

The batch of the target is 64 groups of 8 responses of 1,000 words; then G and the length grow, one at a time. Last, the
batch of the embedded preset against a step of S seconds.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from racelab.experiments.methods.race.controllers import TrqcConfig, trqc
from racelab.experiments.methods.race.phase import (
    PhaseConfig,
    after_policy_step,
    initial_state,
    saturation_fraction,
)
from racelab.experiments.methods.race.routing import Thresholds, quarantine_rate, route, signals
from racelab.experiments.types import FloatArray

N, G, WORDS, D = 64, 8, 1000, 384
ROUNDS = 7


@dataclass(frozen=True)
class Batch:
    """Rewards [N, G], texts, embeddings [N, G, D]."""

    rewards_NG: FloatArray
    texts: list[list[str]]
    emb_NGD: FloatArray


def batch(n: int, g: int, words: int) -> Batch:
    """Random texts over 5,000 words: nearly every trigram is new, which is the slow case."""
    rng = np.random.default_rng(0)
    vocabulary = np.array([f"word{i}" for i in range(5000)])
    texts = [[" ".join(rng.choice(vocabulary, words)) + "." for _ in range(g)] for _ in range(n)]
    emb_NGD = rng.normal(size=(n, g, D))
    emb_NGD /= np.linalg.norm(emb_NGD, axis=-1, keepdims=True)
    return Batch(np.round(rng.uniform(0, 1, (n, g)), 2), texts, emb_NGD)


def decide(b: Batch) -> None:
    """Eqs 5-9, 18-20, 12-13 and 21-22 for one policy step."""
    thresholds, config = Thresholds(), PhaseConfig()
    seen = [
        signals(rewards_G, texts, emb_GD)
        for rewards_G, texts, emb_GD in zip(b.rewards_NG, b.texts, b.emb_NGD, strict=True)
    ]
    routes = [route(group, thresholds) for group in seen]
    controlled = trqc(thresholds, 0.0, quarantine_rate(routes), TrqcConfig())
    f_sat = saturation_fraction(seen, controlled.thresholds)
    after_policy_step(initial_state(config), f_sat, len(routes), controlled.thresholds, config)


def milliseconds(n: int, g: int, words: int) -> tuple[float, float]:
    """Best and median CPU time of a step."""
    b, times = batch(n, g, words), []
    for _ in range(ROUNDS):
        start = time.process_time()
        decide(b)
        times.append(1000 * (time.process_time() - start))
    return min(times), float(np.median(times))


def main() -> None:
    """Prints the batch of the target, the growth with G and with the length, and the share of an embedded step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-s", type=float, default=7.4, help="seconds of an embedded step")
    args = parser.parse_args()

    best, median = milliseconds(N, G, WORDS)
    print(f"routing ({N}, {G}) x {WORDS} words: best {best:.0f} ms, median {median:.0f} ms CPU")
    for g in (4, 8, 16, 32):
        best, _ = milliseconds(N, g, WORDS)
        print(f"  G = {g:2}: best {best:4.0f} ms, {best / (N * g * WORDS) * 1e6:.0f} ns a word")
    for words in (250, 500, 1000, 2000, 4000):
        best, _ = milliseconds(N, G, words)
        print(f"  {words:4} words: best {best:4.0f} ms, {best / (N * G * words) * 1e6:.0f} ns a word")
    best, _ = milliseconds(6, 8, 18)
    print(
        f"embedded (6, 8) x 18 words: best {best:.2f} ms, {best / args.step_s / 10:.3f} % of {args.step_s:g} s"
    )


if __name__ == "__main__":
    main()
