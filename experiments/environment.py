"""What a run was run with: versions, platform, git. Values of environment variables are never stored."""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

_PREFIXES: Final = (
    "RACELAB_",
    "MLFLOW_",
    "CUDA_",
    "OMP_",
    "MKL_",
    "SLURM_",
    "HF_",
    "TORCH_",
    "NCCL_",
    "RAY_",
)
_MAX_DIFF_BYTES: Final = 5_000_000
_GIT_TIMEOUT_S: Final = 20
_KEYS: Final = r"(?:api_key|password|secret|access_token|auth_token|hf_token)"
_SECRET: Final = re.compile(
    rf"(?im)^(?P<key>[ \t+]*(?:[\w.]*\.)?(?:\w+_)?{_KEYS}[ \t]*[=:])"
    r"(?![ \t]*(?:null\b|''|\"\"|$))(?P<value>.+)$"
)
_USER_INFO: Final = re.compile(r"(?i)(?<=://)[^\s/:@]*:[^\s/]*@|(?:(?<=http://)|(?<=https://))[^\s/]+@")
_NOT_IN_DIFF: Final = (
    ":(top,exclude)*.env",
    ":(top,exclude)*.pem",
    ":(top,exclude)*.key",
    ":(top,exclude)*secret*",
)


def redact(text: str) -> str:
    """`text` (YAML or `key=value` lines) with the values of password-like keys replaced by `***`.

    The `user:password@` of an address is left out altogether, so that the address still serves: who resumes
    or syncs gives the password in MLFLOW_TRACKING_URI.
    """
    return _USER_INFO.sub("", _SECRET.sub(r"\g<key> ***", text))


def redact_command(line: str) -> str:
    """A shell command line with each of its words redacted."""
    try:
        return shlex.join(redact(word) for word in shlex.split(line))
    except ValueError:  # not a shell's line: better too much taken away than too little
        return redact(line)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What `env/` of a run folder holds; looked up once for all cells of a sweep, since git takes its time.

    Attributes:
        environment: see `snapshot`.
        diff: see `git_diff`.
    """

    environment: Mapping[str, Any]
    diff: str


def surroundings(folder: Path) -> Surroundings:
    """Of a run that is started in `folder` now."""
    return Surroundings(snapshot(folder), git_diff(folder))


def snapshot(folder: Path) -> dict[str, Any]:
    """Python, platform, every installed package's version, git state of `folder`, names of set variables.

    Only the NAMES of environment variables are kept, and only of the families that change a run: their values
    may be secrets.
    """
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": dict(package_versions()),
        "git": git_state(folder),
        "variables_set": sorted(key for key in os.environ if key.startswith(_PREFIXES)),
    }


@functools.cache
def package_versions() -> tuple[tuple[str, str], ...]:
    """(name, version) of every installed package, by name; looked up once per process."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name, distribution.version)
    return tuple(sorted(found.items(), key=lambda item: item[0].lower()))


def git_state(folder: Path) -> dict[str, Any] | None:
    """{sha, branch, dirty} of the repository that holds `folder`, None outside of one or without git."""
    sha = _git(folder, "rev-parse", "HEAD")
    if sha is None:
        return None
    branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD") or ""
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no") or ""
    return {"sha": sha.strip(), "branch": branch.strip(), "dirty": bool(changed.strip())}


def git_diff(folder: Path) -> str:
    """Uncommitted changes of tracked files but key files; empty if none, cut with a note beyond 5 MB.

    Code is left as it is, but for the `user:password@` of addresses.
    """
    diff = _git(folder, "diff", "--no-color", "--no-ext-diff", "HEAD", "--", ":/", *_NOT_IN_DIFF) or ""
    diff = _USER_INFO.sub("", diff)
    if len(diff) > _MAX_DIFF_BYTES:
        return diff[:_MAX_DIFF_BYTES] + f"\n# cut here: the diff has {len(diff)} characters\n"
    return diff


def _git(folder: Path, *words: str) -> str | None:
    """Output of a git command, None where it cannot be had (no git, no repository, no commit yet)."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
