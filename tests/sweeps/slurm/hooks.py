"""What happens around a call of one of Slurm's tools: lines of shell before and after the stand-in's own work."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from .fake_slurm import FakeSlurm


def hook(
    slurm: FakeSlurm, tool: str, monkeypatch: pytest.MonkeyPatch, before: str = "", after: str = ""
) -> None:
    """Lines around every call of `tool` from now on, but for `sbatch --test-only`; `$PPID` is who calls it."""
    folder = slurm.folder / "hooked"
    if not folder.is_dir():
        folder.mkdir()
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    path, fake = folder / tool, slurm.folder / tool
    path.write_text(
        f"""#!/bin/bash
[ "$1" = --test-only ] && exec '{fake}' "$@"
{before}
'{fake}' "$@"
code=$?
{after}
exit $code
"""
    )
    path.chmod(0o755)


def submitted(slurm: FakeSlurm) -> int:
    """How many scripts sbatch was asked to submit."""
    return sum("--test-only" not in words for words in slurm.calls("sbatch"))


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
