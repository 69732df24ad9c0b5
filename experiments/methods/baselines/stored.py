"""Prompts and samples inside a method's state, as JSON values and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from racelab.experiments.types import Prompt, Sample


def prompt_state(prompt: Prompt) -> dict[str, Any]:
    """JSON values."""
    return {
        "prompt_id": prompt.prompt_id,
        "text": prompt.text,
        "source": prompt.source,
        "category": prompt.category,
        "check": None if prompt.check is None else dict(prompt.check),
    }


def sample_state(sample: Sample) -> dict[str, Any]:
    """JSON values without the log-probabilities: nothing that is stored is asked for them again."""
    return {"tokens": list(sample.tokens), "text": sample.text, "finished": sample.finished}


def sample_from_state(state: Mapping[str, Any]) -> Sample:
    """Undoes `sample_state`."""
    return Sample(tuple(state["tokens"]), (), state["text"], state["finished"])
