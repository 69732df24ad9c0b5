"""What MLflow shows of a run besides its numbers: tags, the note, params; all from the run's folder."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from racelab.experiments.fsio import read_json
from racelab.experiments.runfolder import RunFolder

_TAGS: Final = ("kind", "paper", "method", "variant", "condition", "task", "seed", "schema", "config_sha256")

_PLACE: Final = ("slurm_job_id", "node", "host")
"""Keys of an attempt's entry."""


def run_tags(run: RunFolder) -> dict[str, str]:
    """The `racelab.*` tags and the Markdown note of a run, from its folder."""
    info = run.info()
    tags = {f"racelab.{key}": str(info[key]) for key in _TAGS if info.get(key) not in (None, "")}
    tags |= _attempt_tags(run.attempts())
    tags["racelab.path"] = str(run.path)
    if info.get("reused_cells"):
        tags["racelab.reused_cells"] = ", ".join(info["reused_cells"])
    config = run.path / "config" / "composed.yaml"
    if config.is_file():
        tags.setdefault("racelab.config_sha256", file_sha256(config))
    git = _json_or(run.path / "env" / "environment.json", {}).get("git")
    if git:
        tags["racelab.code_sha"] = git["sha"] + ("+changes" if git["dirty"] else "")
    tags["mlflow.note.content"] = run_note(run)
    return tags


def _attempt_tags(attempts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Which attempt the newest is, and where it ran; empty where only an earlier one had a job, to say no longer so."""
    if not attempts:
        return {"racelab.attempt": "0"}
    newest = attempts[-1]
    tags = {"racelab.attempt": str(newest["attempt"])}
    for key in _PLACE:
        if any(entry.get(key) for entry in attempts):
            tags[f"racelab.{key}"] = str(newest.get(key) or "")
    return tags


def _place(attempts: Sequence[Mapping[str, Any]]) -> str:
    """`job 12_4 on node3, attempt 2`; "" if the newest attempt is no job."""
    newest = attempts[-1] if attempts else {}
    if not newest.get("slurm_job_id"):
        return ""
    where = newest.get("node") or newest.get("host")
    return f"job {newest['slurm_job_id']}{f' on {where}' if where else ''}, attempt {newest['attempt']}"


def run_note(run: RunFolder) -> str:
    """What MLflow shows on top of the run's page (Markdown)."""
    info = run.info()
    words = _json_or(run.path / "config" / "overrides.json", [])
    command = info.get("command") or shlex.join(["racelab", "train", *words])
    facts = [f"- {key}: `{info[key]}`" for key in _TAGS if info.get(key) not in (None, "")]
    place = _place(run.attempts())
    reused = ", ".join(f"`{cell}`" for cell in info.get("reused_cells") or ())
    if reused:
        facts.append(f"- cells of another sweep, whose children they are: {reused}")
    return "\n".join([
        f"## {info['name']}",
        "",
        *facts,
        f"- folder: `{run.path}`",
        *([f"- {place}"] if place else []),
        "",
        "Reproduce:",
        "",
        "```bash",
        str(command),
        "```",
        "",
        f"Look closer: `racelab show {run.run_id}`. The run's tables are under Artifacts, `tables/`.",
    ])  # fmt: skip


def _json_or(file: Path, missing: Any) -> Any:
    """A file that describes the run but does not make it: without it the numbers are still worth sending."""
    return read_json(file) if file.is_file() else missing


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested config as `a.b.c` -> text. Lists stay together.

    Example: {"a": {"b": 1, "c": [1, 2]}, "d": None} gives {"a.b": "1", "a.c": "[1, 2]", "d": "None"}.
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def tag_key(key: str) -> str:
    """A tag's full name: `racelab.` unless it has a family already."""
    return key if key.startswith(("racelab.", "mlflow.")) else f"racelab.{key}"


def file_sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
