"""racelab's local backend, one GRPO step per command; see bench/step.py."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch
from common import PROMPTS, peak_gb, receive, reward, send

from racelab.experiments.backends.local.learner import LocalBackend, OptimSettings
from racelab.experiments.backends.local.model import LocalModel, open_language_model
from racelab.experiments.types import GenerationRequest, TokenBatch, TrainGroup, TrainSample


def step(
    backend: LocalBackend, rng: torch.Generator, prompts: int, samples: int, tokens: int
) -> dict[str, Any]:
    """Generate, score, train on all layers."""
    start, cpu = time.perf_counter(), time.process_time()
    policy = backend.policy
    prefixes = [tuple(policy.chat(PROMPTS[k % len(PROMPTS)])) for k in range(prompts)]
    out = policy.generate([GenerationRequest(p, samples, tokens) for p in prefixes], rng)
    between = time.perf_counter()
    groups = []
    for prefix, group in zip(prefixes, out, strict=True):
        r = np.array([reward(s.text) for s in group])
        adv = (r - r.mean()) / (r.std() + 1e-4)
        groups.append(
            TrainGroup(
                prefix,
                tuple(
                    TrainSample(
                        s.tokens, np.full(tokens, a), np.full(tokens, 1 / (prompts * samples * tokens))
                    )
                    for s, a in zip(group, adv, strict=True)
                ),
            )
        )
    stats = backend.update(TokenBatch(tuple(groups)))
    end = time.perf_counter()
    return {
        "wall": end - start,
        "cpu": time.process_time() - cpu,
        "generate": between - start,
        "tokens": stats.n_tokens,
        "stepped": stats.stepped,
        "peak_gb": peak_gb(),
    }


def matmul_limit(model: LocalModel, prompts: int, samples: int, tokens: int, repeats: int) -> float:
    """Seconds that the step's matrix products alone take on this machine, in the best layout.

    Decoding: every layer's linear maps and the head for all rows, `tokens` times, with the real weights in
    turn, so that they come from memory as they must. Training: forward, input gradient and weight gradient of
    the same maps for all completion tokens. Nothing else: no prefixes, attention, norms, softmax, optimiser.
    """
    core = model.core
    rows, n = prompts * samples, prompts * samples * tokens
    maps = [m for layer in core.layers for m in (layer.qkv, layer.o, layer.gu, layer.down)] + [core.head]
    spec = core.spec
    heads = spec.heads * spec.head_dim
    of_layer = [
        (heads + 2 * spec.kv_heads * spec.head_dim, spec.width),
        (spec.width, heads),
        (2 * spec.ffn, spec.width),
        (spec.width, spec.ffn),
    ]
    shapes = dict(zip(maps, [*of_layer * spec.layers, (spec.vocab, spec.width)], strict=True))
    best = float("inf")
    for _ in range(repeats):
        spent = 0.0
        for count, times in ((rows, tokens), (n, 1)):
            inputs = {k: torch.randn(count, k, dtype=torch.bfloat16) for k in {s[1] for s in shapes.values()}}
            loops = min(times, 4)
            start = time.perf_counter()
            for _ in range(loops):
                for m in maps:
                    m(inputs[shapes[m][1]])
            spent += (time.perf_counter() - start) / loops * times
        for outer, inner in set(shapes.values()):
            weight, x, g = (
                torch.randn(*s, dtype=torch.bfloat16) for s in ((outer, inner), (n, inner), (n, outer))
            )
            start = time.perf_counter()
            _ = g @ weight, g.t() @ x
            spent += (time.perf_counter() - start) * sum(s == (outer, inner) for s in shapes.values())
        best = min(best, spent)
    return best


def main() -> None:
    """Arguments: model folder, threads."""
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    model = open_language_model(folder, end_ids=())
    backend = LocalBackend(model, OptimSettings(lr=1e-6, max_tokens_per_microbatch=4096))
    rng = torch.Generator().manual_seed(0)
    send(ready=True)
    while (command := receive()) is not None:
        shape = [command[k] for k in ("prompts", "samples", "tokens")]
        if command["what"] == "step":
            send(**step(backend, rng, *shape))
        else:
            with torch.inference_mode():
                send(limit=matmul_limit(model, *shape, repeats=3))


if __name__ == "__main__":
    main()
