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
    """Seconds that the step's matrix products alone take on this machine, best layout, nothing else.

    Decoding: every linear layer and the head for `samples x prompts` rows, `tokens` times. Training: forward,
    input gradient and weight gradient for all completion tokens.
    """
    spec = model.core.spec
    rows, n = prompts * samples, prompts * samples * tokens
    width = spec.heads * spec.head_dim
    shapes = [
        (spec.width, width + 2 * spec.kv_heads * spec.head_dim),
        (width, spec.width),
        (spec.width, 2 * spec.ffn),
        (spec.ffn, spec.width),
    ]
    layer, shapes = model.core.layers[0], [*shapes, (spec.width, spec.vocab)]
    linears = [layer.qkv, layer.o, layer.gu, layer.down, model.core.head]
    counts = [spec.layers] * 4 + [1]
    best = [float("inf")] * 3
    for _ in range(repeats):
        spent = [0.0, 0.0, 0.0]
        for (inner, outer), linear, count in zip(shapes, linears, counts, strict=True):
            small = torch.randn(rows, inner, dtype=torch.bfloat16)
            big, grad = (torch.randn(min(n, 1024), k, dtype=torch.bfloat16) for k in (inner, outer))
            weight = torch.randn(outer, inner, dtype=torch.bfloat16)
            share = n / min(n, 1024)
            for k, (times, call) in enumerate(
                [
                    (tokens, lambda a=small, f=linear: f(a)),
                    (share, lambda a=big, f=linear: f(a)),
                    (share, lambda a=big, g=grad, w=weight: (g @ w, g.t() @ a)),
                ]
            ):
                call()
                start = time.perf_counter()
                loops = 20 if k == 0 else 2
                for _ in range(loops):
                    call()
                spent[k] += (time.perf_counter() - start) / loops * times * count
        best = [min(a, b) for a, b in zip(best, spent, strict=True)]
    return sum(best)


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
