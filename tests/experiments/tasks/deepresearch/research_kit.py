"""The task's config from its YAML files, and replies of a scripted agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from racelab.configs.schema_rlds import DeepResearchTask
from racelab.experiments.episodes import Observation, Turn

_CONFIGS = Path(__file__).parents[4] / "configs" / "rlds"


def config(**changes: Any) -> DeepResearchTask:
    """The embedded preset with full pages, ten turns, and waits that a test can afford."""
    base = yaml.safe_load((_CONFIGS / "task" / "deepresearch.yaml").read_text())
    small = yaml.safe_load((_CONFIGS / "embedded" / "deepresearch.yaml").read_text())["task"]
    merged = _merged(
        _merged(base, small), {"max_turns": 10, "tools": {"page_chars": 20_000, "backoff_s": 0.01}}
    )
    return DeepResearchTask.model_validate(_merged(merged, changes))


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{k: _merged(base[k], v) if isinstance(v, dict) and k in base else v for k, v in over.items()},
    }


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def turn(reply: str, observation: Observation) -> Turn:
    """A recorded turn, its info as a file would give it back."""
    info = json.loads(json.dumps(dict(observation.info)))
    return Turn(reply, (1,), (0.0,), True, observation.text, (), info)


SLEEP = "sleep after learning memory consolidation slow wave REM"
"""A recorded query of /scholar."""
