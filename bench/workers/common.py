"""What both workers of bench/step.py share: prompts, reward, the pipe protocol. Standard library only."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

PROMPTS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue in two sentences.",
    "Give me three tips for learning to cook.",
    "Name a good habit and say why it helps.",
    "Describe a rainy day in the city.",
    "How do birds fly?",
    "Why is sleep important?",
]


def reward(text: str) -> float:
    """Share of capital letters, times five: cheap, and different for every sample."""
    return 5.0 * sum(c.isupper() for c in text) / max(len(text), 1)


def peak_gb() -> float:
    """Peak resident memory of this process in GB (1e9 bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def receive() -> dict[str, Any] | None:
    """The next command, or None when the other side is gone."""
    line = sys.stdin.readline()
    return json.loads(line) if line.strip() else None


def send(**values: Any) -> None:
    """Answer with one line of JSON behind a marker, so that chatter on stdout does no harm."""
    sys.__stdout__.write("@@" + json.dumps(values) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]
