"""CPU seconds of a controller replay, tables read included: 1,000 policy steps of 64 groups. Limit: 2 s.

`python bench/replay.py [--steps N] [--groups N] [--repeat N] [--json]`. The run folder is synthetic (random rewards,
fixed phases of 25 and 12 steps), written by the real spool and tables; its decisions are those of a replay, so a second
one must find no difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd

from racelab.analysis.replay import Replayed, replay
from racelab.analysis.replay_diff import to_json
from racelab.analysis.replay_log import KIND, Log, build_log, integrity, load_log
from racelab.configs.compose import compose
from racelab.experiments.methods.grpo import mean, sigma
from racelab.experiments.methods.race.phase import PhaseKind
from racelab.experiments.methods.race.routing import tie_rate
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.tracker import SpoolTracker
from racelab.experiments.types import StepRecord

LIMIT_S, G, PHASES = 2.0, 8, (25, 12)


def synthetic(n_policy: int, n_groups: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Table `groups` without decisions, and the metrics that a replay reads."""
    rng = np.random.default_rng(0)
    groups: list[dict[str, Any]] = []
    metrics: list[dict[str, Any]] = []
    policy = 0
    while policy < n_policy:
        step = len(metrics) + 1
        if (step - 1) % sum(PHASES) >= PHASES[0]:
            reward, gain = rng.uniform(-1, 1, 2).tolist()
            values = {KIND: 1.0, "race/rubric_reward/mean": reward, "race/rubric_reward/gain_mean": gain}
            metrics.append({"step": step, **values})
            continue
        policy += 1
        metrics.append({"step": step, KIND: 0.0})
        for rewards_G in np.round(rng.beta(2, 2, (n_groups, 1)) + rng.normal(0, 0.06, (n_groups, G)), 3):
            d_tri, d_emb = rng.uniform(0, 0.5, 2).tolist()
            signals = (mean(rewards_G), sigma(rewards_G), tie_rate(rewards_G), d_tri, d_emb)
            names = ("mean", "std", "tie_rate", "d_tri", "d_emb")
            row = dict(zip(names, signals, strict=True))
            groups.append({"step": step, "prompt_id": "p", "rewards": rewards_G.tolist(), **row})
    return pd.DataFrame(groups), pd.DataFrame(metrics).set_index("step")


def write(run: RunFolder, log: Log, replayed: Replayed) -> None:
    """The log with the replay's decisions, as a training run writes it."""
    ended = {int(p["end"]): p for p in replayed.phases}
    with run.lock():
        tracker = SpoolTracker(run, run.begin_attempt(), ship=False)
        for d in replayed.decisions:
            t = d.before
            thresholds = {
                "sigma_rt": t.sigma_rt,
                "tau_tie": t.tau_tie,
                "d_tri_star": t.d_tri,
                "tau_sat": t.tau_sat,
            }
            rows: list[dict[str, object]] = [
                {k: log.columns[k][row] for k in ("prompt_id", "rewards", "mean", "std", "tie_rate")}
                | {"step": d.step, "d_tri": log.signals[row].d_tri, "d_emb": log.signals[row].d_emb}
                | {"route": route.value, **thresholds}
                for row, route in zip(d.fed.rows, d.routes, strict=True)
            ]
            metrics = {f"some/other/name{i}": float(i) for i in range(50)} | dict(d.fed.metrics)
            metrics |= {"race/pool/size": float(d.pool)}
            if d.kind is PhaseKind.POLICY:
                metrics |= {"race/trqc/q_ema": d.q_ema, "race/switch/f_sat_ema": d.f_ema}
            phases = [dict(ended[d.step])] if d.step in ended else []
            tracker.record(StepRecord(d.step, metrics, {"groups": rows, "phases": phases}))
        tracker.close("finished")


def measure(run: RunFolder, method: Any, settings: Any) -> dict[str, float]:
    """CPU seconds of one replay, part by part; other load hardly matters to them."""
    eps_tie = method.routing.eps_tie
    started = time.process_time()
    log = load_log(run)
    loaded = time.process_time()
    replayed = replay(log, method, settings, eps_tie)
    decided = time.process_time()
    result = to_json(log, replayed) | {"integrity": integrity(log, eps_tie)}
    ended = time.process_time()
    return {
        "groups": len(log.signals),
        "read_s": round(loaded - started, 3),
        "replay_s": round(decided - loaded, 3),
        "compare_s": round(ended - decided, 3),
        "total_s": round(ended - started, 3),
        "limit_s": LIMIT_S,
        "differences": result["n_differences"],
    }


def main() -> int:
    """Prints the seconds; 1 if they are above the limit or the replay finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3, help="the least total counts")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    words = ["preset=sane", "method.phase.mode=fixed", f"method.phase.fixed=[{PHASES[0]},{PHASES[1]}]"]
    composed = compose([*words, f"run.policy_updates={arguments.steps}", "backend=local"])
    method, settings = composed.config.method, composed.config.run
    with tempfile.TemporaryDirectory() as folder:
        log = build_log(*synthetic(arguments.steps, arguments.groups), pd.DataFrame({"index": []}))
        run = RunFolder.create(
            Path(folder), "bench", composed_yaml=composed.yaml, overrides=words, info={"seed": 0}
        )
        write(run, log, replay(log, method, settings, method.routing.eps_tie))
        figures = min(
            (measure(run, method, settings) for _ in range(max(1, arguments.repeat))),
            key=lambda f: f["total_s"],
        )
    print(json.dumps(figures) if arguments.json else "  ".join(f"{k} {v}" for k, v in figures.items()))
    return int(figures["total_s"] > LIMIT_S or figures["differences"] > 0)


if __name__ == "__main__":
    sys.exit(main())
