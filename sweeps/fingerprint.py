"""What decides a cell's result beside the words of its config: local files that it names, and racelab's own code."""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from racelab.configs.keys import CONFIG_DIR
from racelab.configs.schema_eval import BENCHMARKS
from racelab.configs.schema_rlds import AnyConfig
from racelab.experiments.environment import git_diff, git_state
from racelab.experiments.fsio import read_json

COPY_FACTS: Final = "code.json"
"""File beside a copy of the package: the `code_state` of what was copied."""
_PATH_KEYS: Final = (
    "data.path",
    "model.source",
    "judge.source",
    "encoder.source",
    "method.pairs",
    "method.source",
    "task.data",
    "task.boards",
    "task.retriever.corpus",
    "task.retriever.encoder",
    "subject.source",
    *(f"eval.data.{name}" for name in BENCHMARKS),
)
"""Keys whose value may be a file or a folder of this machine."""
_NO_PATHS: Final = frozenset(
    {"package", "policy", "fit", "smollm2-135m", "embedded", "minilm", "grid", "hub", ""}
)
"""Values of these keys that are never a path, whatever the working directory holds."""
_HASHED_BYTES: Final = 64 << 20
"""Up to here a file is known by its content, beyond by its time."""
_FOLDER_FILES: Final = (".safetensors", ".bin", ".json", ".jsonl", ".parquet", ".csv")


def local_inputs(config: AnyConfig) -> dict[str, Any]:
    """Key -> what its path stands for, for the keys that name an existing file or folder."""
    found = {}
    for key in _PATH_KEYS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        content = None if value is None or value in _NO_PATHS else _content(str(value))
        if content is not None:
            found[key] = content
    return found


def _content(value: str) -> list[Any] | None:
    """Absolute path, and of a file its size and SHA-256, of a folder the size and time of its files.

    None for what is not there or cannot be read: loading it says so with better words.
    """
    try:
        path = Path(value).expanduser().resolve()
        if path.is_file():
            return [str(path), *_of_file(path)]
        if (path / "run.json").is_file():  # a run to evaluate: its newest checkpoint
            return [str(path), max((f.name for f in (path / "checkpoints").glob("step-*")), default="")]
        if path.is_dir():
            files = sorted(f for f in path.iterdir() if f.suffix in _FOLDER_FILES and f.is_file())
            return [str(path), [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]]
    except (OSError, RuntimeError, ValueError):  # also a home or a name that cannot be
        pass
    return None


def _of_file(path: Path) -> tuple[int, int | str]:
    stat = path.stat()
    big = stat.st_size > _HASHED_BYTES
    return stat.st_size, stat.st_mtime_ns if big else _sha256(path, stat.st_size, stat.st_mtime_ns)


@functools.cache
def _sha256(path: Path, size: int, mtime_ns: int) -> str:
    """Of a file's content; size and time are there so that a changed file is read again."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def code_state() -> dict[str, str | None]:
    """The racelab that runs now: its version, and the commit and a hash of the changes of its own repository.

    An installed package has no repository: the one that happens to hold its environment is another's. A copy that was
    made for jobs says of what in the file beside it.
    """
    root = CONFIG_DIR.resolve()
    copied = root.parent.parent / COPY_FACTS
    if copied.is_file():
        facts: dict[str, str | None] = read_json(copied)
        return facts
    git = None if {"site-packages", "dist-packages"} & set(root.parts) else git_state(root)
    diff = git_diff(root) if git is not None else ""
    return {
        "version": _version(),
        "sha": None if git is None else str(git["sha"]),
        "diff": hashlib.sha256(diff.encode()).hexdigest()[:9] if diff else None,
    }


def _version() -> str | None:
    try:
        return metadata.version("racelab")
    except metadata.PackageNotFoundError:
        return None


def code_name(code: dict[str, Any]) -> str:
    """`racelab 1.0 at 0123abcde with changes 4567fghij`, of what is known."""
    words = [f"racelab {code.get('version') or '?'}"]
    words += [f"at {code['sha'][:9]}"] if code.get("sha") else []
    words += [f"with changes {code['diff']}"] if code.get("diff") else []
    return " ".join(words)
