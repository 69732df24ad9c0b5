"""One GRPO step of racelab's local backend against TRL's GRPOTrainer, alternating in one run.

SmolLM2-135M, all layers trained, 4 prompts x 4 samples x 64 tokens, end token disabled on both sides. Ours:
float32 masters, bf16 compute. TRL: its best correct setting on CPU (bench/workers/trl_worker.py). It lives in
its own environment, `build/trl-venv`, made on first use (about 1.3 GB), and both run as worker processes that
are stepped through pipes, so that a noisy machine is noisy to both.

    python bench/step.py [--rounds 5] [--threads N] [--no-trl] [--no-growth] [--trl-python PATH] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
TRL_PACKAGES = ["trl==1.16.0", "transformers==5.24.0"]
SHAPE = {"prompts": 4, "samples": 4, "tokens": 64}
TARGET = 2.5


class Worker:
    """A child process that answers one JSON line per JSON line."""

    def __init__(self, python: str, script: str, arguments: list[str]) -> None:
        """Start it and wait until it is ready."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the worker)
        self._out = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [python, str(HERE / "workers" / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "TRL_OUT": self._out.name, "TOKENIZERS_PARALLELISM": "false"},
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@@"):
                answer: dict[str, Any] = json.loads(line[2:])
                return answer
        self._log.seek(0)
        raise SystemExit(f"bench: a worker ended early:\n{self._log.read()[-3000:]}")

    def ask(self, what: str, **values: Any) -> dict[str, Any]:
        """Send one command, wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, **values}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def trl_python() -> str:
    """The interpreter of TRL's environment, made on first use with the torch version that runs here."""
    import torch

    folder = BUILD / "trl-venv"
    python, stamp = folder / "bin" / "python", folder / ".ready"
    if not stamp.is_file():
        print(f"bench: installing {' '.join(TRL_PACKAGES)} into {folder} (once)", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
        subprocess.run([*pip, f"torch=={torch.__version__.split('+')[0]}"], check=True)
        subprocess.run([*pip, *TRL_PACKAGES], check=True)
        stamp.touch()
    return str(python)


def compare(ours: Worker, trl: Worker | None, rounds: int) -> dict[str, Any]:
    """Alternate steps of both; the first of each is a warm-up."""
    seen: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    for k in range(rounds + 1):
        for name, worker in (("ours", ours), ("trl", trl)):
            if worker is None:
                continue
            answer = worker.ask("step", **SHAPE)
            if k:
                seen[name].append(answer)
                print(f"  round {k} {name}: {answer['wall']:.2f} s", flush=True)
    result: dict[str, Any] = {}
    for name, steps in seen.items():
        if steps:
            median = {k: statistics.median(s[k] for s in steps) for k in ("wall", "cpu", "generate")}
            result[name] = {**median, "train": statistics.median(s["wall"] - s["generate"] for s in steps)}
            result[name]["peak_gb"] = steps[-1]["peak_gb"]
            result[name]["walls"] = [s["wall"] for s in steps]
    if trl is not None:
        pairs = [b["wall"] / a["wall"] for a, b in zip(seen["ours"], seen["trl"], strict=True)]
        result["ratio"] = result["trl"]["wall"] / result["ours"]["wall"]
        result["ratio_of_rounds"] = pairs
    limit = ours.ask("limit", **SHAPE)["limit"]
    result["matmul_limit"] = limit
    result["share_of_limit"] = limit / result["ours"]["wall"]
    return result


def growth(ours: Worker) -> list[dict[str, Any]]:
    """Step time of ours as samples, length and prompts grow, one at a time."""
    base = {"prompts": 4, "samples": 4, "tokens": 64}
    changes = [("samples", (4, 8, 16)), ("tokens", (64, 256, 1024)), ("prompts", (1, 2, 4, 8))]
    rows = []
    for key, values in changes:
        for value in values:
            answer = ours.ask("step", **{**base, key: value})
            rows.append({"varies": key, "value": value, **answer})
            rate = answer["tokens"] / answer["wall"]
            print(
                f"  {key:8s} {value:5d}: step {answer['wall']:7.2f} s, generate {answer['generate']:7.2f} s, "
                f"{rate:6.0f} tok/s, peak so far {answer['peak_gb']:.2f} GB",
                flush=True,
            )
    return rows


def table(result: dict[str, Any]) -> None:
    """Print the comparison."""
    tokens = SHAPE["prompts"] * SHAPE["samples"] * SHAPE["tokens"]
    print(
        f"\n{'':6s} {'step s':>8s} {'generate':>9s} {'train':>7s} {'cpu s':>7s} {'tok/s':>7s} {'peak GB':>8s}"
    )
    for name in ("ours", "trl"):
        if name in result:
            r = result[name]
            print(
                f"{name:6s} {r['wall']:8.2f} {r['generate']:9.2f} {r['train']:7.2f} {r['cpu']:7.2f} "
                f"{tokens / r['wall']:7.0f} {r['peak_gb']:8.2f}"
            )
    print(
        f"matmul-only limit {result['matmul_limit']:.2f} s; ours reaches {result['share_of_limit']:.0%} of it"
    )
    if "ratio" in result:
        low, high = min(result["ratio_of_rounds"]), max(result["ratio_of_rounds"])
        verdict = "reached" if result["ratio"] >= TARGET else "MISSED"
        print(
            f"TRL / ours: {result['ratio']:.2f} (rounds {low:.2f} to {high:.2f}); target {TARGET}: {verdict}"
        )


def main() -> None:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--no-growth", action="store_true")
    parser.add_argument("--trl-python", default="", help="an interpreter that already has TRL")
    parser.add_argument("--out", type=Path, default=BUILD / "bench" / "step.json")
    options = parser.parse_args()

    from racelab.experiments.models.assets import resolve_model

    folder = str(resolve_model("smollm2-135m"))
    shape = [str(v) for v in SHAPE.values()]
    ours = Worker(sys.executable, "ours_worker.py", [folder, str(options.threads)])
    trl = None
    if not options.no_trl:
        python = options.trl_python or trl_python()
        trl = Worker(python, "trl_worker.py", [folder, str(options.threads), *shape])
    try:
        result: dict[str, Any] = {
            "shape": SHAPE,
            "threads": options.threads,
            **compare(ours, trl, options.rounds),
        }
        table(result)
        if not options.no_growth:
            print("\ngrowth (ours; 4 prompts x 4 samples x 64 tokens but for the named size)")
            result["growth"] = growth(ours)
    finally:
        ours.close()
        if trl is not None:
            trl.close()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2), encoding="utf-8")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
