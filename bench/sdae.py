"""SDAE from rewards, grades and pivots to per-token advantages, against the equations written down plainly.

Run: python bench/sdae.py [--rounds 7] [--small] [--json]

1,024 rollouts x 4,096 tokens x 6 subtasks, float64, one thread; target 50 ms. Plain: the kernel as an array [N, K, T]
and one einsum, 64 rows at a time (all at once it would need gigabytes). The two alternate within a run, so that a busy
machine is busy for both; the results are compared. Memory: largest traced numpy allocation of a call, at N and at N / 2
rows. Beside it: the diagnostics of a step and their null, and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from racelab.experiments.methods.rlds import diagnostics
from racelab.experiments.methods.rlds.rows import Rows
from racelab.experiments.methods.rlds.sdae import Settings, token_advantages
from racelab.experiments.methods.rlds.turns import turn_counts
from racelab.experiments.types import FloatArray

K, TURNS, GROUP, TARGET_MS, NULL_DRAWS = 6, 30, 9, 50.0, 20
SETTINGS = Settings()


def batch(n: int, t: int) -> tuple[dict[str, Any], np.ndarray]:
    """(fields of `Rows` without the counts, turn_of_token_NT): about an eighth of the tokens are observations."""
    rng = np.random.default_rng(0)
    turns_NT = np.sort(rng.integers(0, TURNS, (n, t)), axis=1)
    turns_NT[rng.random((n, t)) < 0.125] = -1
    fields: dict[str, Any] = {
        "rewards_N": rng.random(n),
        "group_N": np.arange(n) // GROUP,
        "phi_K": np.array([0.20, 0.20, 0.20, 0.15, 0.15, 0.10]),
        "grades_NK": rng.integers(1, 6, (n, K)),
        "pivots_NK": rng.integers(-1, TURNS, (n, K)),
        "train_from_N": np.where(np.arange(n) % GROUP > 5, rng.integers(0, 9, n), 0),
    }
    return fields, turns_NT


def ours(fields: dict[str, Any], turns_NT: Any) -> Any:
    """Counts included."""
    rows = Rows(counts_NU=turn_counts(turns_NT, TURNS), **fields)
    return token_advantages([rows], [turns_NT], SETTINGS)[0].adv_NT


def plain(fields: dict[str, Any], turns_NT: np.ndarray) -> FloatArray:
    """Eqs 1-3 with m as an array [rows, K, T]."""
    rewards_N, phi_K, pivots_NK = (fields[f] for f in ("rewards_N", "phi_K", "pivots_NK"))
    points_NK = fields["grades_NK"] - 1.0
    total_N1 = points_NK.sum(1, keepdims=True)
    shares_NK = np.where(total_N1 > 0, points_NK / np.maximum(total_N1, 1.0), 1.0 / K) * rewards_N[:, None]
    adv_NK = np.empty_like(shares_NK)
    for group in np.unique(fields["group_N"]):
        rows = fields["group_N"] == group
        adv_NK[rows] = shares_NK[rows] - shares_NK[rows].mean(0)
    scale = (adv_NK @ phi_K).std() + SETTINGS.eps
    out_NT = np.empty(turns_NT.shape)
    for first in range(0, len(turns_NT), 64):
        some = slice(first, first + 64)
        own_NT = turns_NT[some] >= 0
        last_N1 = turns_NT[some].max(1)[:, None]
        pivot_NK1 = np.minimum(pivots_NK[some], last_N1)[:, :, None]
        m_NKT = np.exp(-0.5 * (turns_NT[some][:, None] - pivot_NK1) ** 2) * own_NT[:, None]
        m_NKT *= own_NT.sum(1)[:, None, None] / m_NKT.sum(2, keepdims=True)
        m_NKT = np.where(pivot_NK1 >= 0, m_NKT, own_NT[:, None])
        kept_NT = turns_NT[some] >= fields["train_from_N"][some][:, None]
        out_NT[some] = np.einsum("nk,nkt->nt", adv_NK[some] * phi_K, m_NKT) / scale * kept_NT
    return out_NT


def milliseconds(call: Callable[[], Any]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    call()
    return 1000 * (time.process_time() - start)


def megabytes(call: Callable[[], Any]) -> float:
    """Largest traced allocation of one call, results included."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def measure(n: int, t: int, rounds: int) -> dict[str, float]:
    """All figures."""
    import torch

    torch.set_num_threads(1)
    fields, turns_NT = batch(n, t)
    tensors = {name: torch.from_numpy(value) for name, value in fields.items()}
    turns_t = torch.from_numpy(turns_NT)
    gap = float(np.abs(ours(fields, turns_NT) - plain(fields, turns_NT)).max())
    times: dict[str, list[float]] = {"ours": [], "plain": [], "torch": []}
    for _ in range(rounds):
        times["ours"].append(milliseconds(lambda: ours(fields, turns_NT)))
        times["plain"].append(milliseconds(lambda: plain(fields, turns_NT)))
        times["torch"].append(milliseconds(lambda: ours(tensors, turns_t)))
    half = {name: value if name == "phi_K" else value[: n // 2] for name, value in fields.items()}
    rows = Rows(counts_NU=turn_counts(turns_NT, TURNS), **fields)
    rng = np.random.default_rng(0)
    figures = {f"{name}_ms_best": min(ms) for name, ms in times.items()}
    figures |= {f"{name}_ms_median": float(np.median(ms)) for name, ms in times.items()}
    return figures | {
        "plain_over_ours": float(np.median(times["plain"]) / np.median(times["ours"])),
        "largest_difference": gap,
        "result_mb": n * t * 8 / 1e6,
        "peak_mb": megabytes(lambda: ours(fields, turns_NT)),
        "peak_mb_half_the_rows": megabytes(lambda: ours(half, turns_NT[: n // 2])),
        "plain_peak_mb": megabytes(lambda: plain(fields, turns_NT)),
        "diagnostics_ms": milliseconds(lambda: diagnostics.stage_metrics([rows], SETTINGS)),
        f"null_of_{NULL_DRAWS}_ms": milliseconds(lambda: diagnostics.null([rows], SETTINGS, NULL_DRAWS, rng)),
    }


def main() -> int:
    """Prints the figures; 1 if the best time is above the target or the results differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--small", action="store_true", help="a sixteenth of the rows, to try the bench itself"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    n, t = (64 if arguments.small else 1024), 4096
    figures = measure(n, t, max(1, arguments.rounds))
    if arguments.json:
        print(json.dumps({"rows": n, "tokens": t, "subtasks": K, "target_ms": TARGET_MS, **figures}))
    else:
        print(f"{n} rollouts x {t} tokens x {K} subtasks, target {TARGET_MS:.0f} ms")
        for name, value in figures.items():
            print(f"  {name:24} {value:12.3g}" if value < 1e-3 else f"  {name:24} {value:12.1f}")
    return int(figures["ours_ms_best"] > TARGET_MS or figures["largest_difference"] > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
