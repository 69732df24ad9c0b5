"""`racelab doctor`: is everything here that a run needs? Each finding says how to mend it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from racelab.cli.console import print_json, print_table, say
from racelab.cli.train import run_root
from racelab.experiments.errors import RacelabError

if TYPE_CHECKING:
    from racelab.sweeps.slurm.folder import LaunchFolder

Level = Literal["ok", "note", "warning", "broken"]

_GIB = 2**30
_LEAST_DISK = 1 * _GIB
_GOOD_DISK = 5 * _GIB
_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "gguf")
_KEYS = ("HF_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY")
_TOOL_S = 20


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at.

    Attributes:
        level: `broken` if `train` cannot work without it; `warning` if something is missing or slow; `note`
            for what only other commands need.
        mend: what to do; "" if nothing.
    """

    name: str
    level: Level
    found: str
    mend: str = ""


def doctor(root: Path | None, json_output: bool) -> int:
    """Prints all checks; 1 if `train` cannot work here."""
    checks = examine(run_root(str(root) if root else ""))
    broken = [check for check in checks if check.level == "broken"]
    if json_output:
        print_json({"ok": not broken, "checks": [asdict(check) for check in checks]})
    else:
        rows = [[check.level, check.name, check.found, check.mend] for check in checks]
        print_table(["", "what", "found", "mend"], rows)
        say(
            f"train cannot work here: {', '.join(c.name for c in broken)}"
            if broken
            else "train can work here"
        )
    return 1 if broken else 0


def examine(root: Path) -> list[Check]:
    """All checks, in order; one that fails unexpectedly is itself a finding."""
    rooms: Sequence[Callable[[Path], Iterator[Check]]] = (
        _python, _packages, _torch, _config, _models, _folders, _store, _stale, _tools, _slurm, _keys,
    )  # fmt: skip
    found: list[Check] = []
    for room in rooms:
        try:
            found.extend(room(root))
        except (OSError, ImportError, RuntimeError, ValueError, LookupError, RacelabError) as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            found.append(
                Check(room.__name__.strip("_"), "broken", line, "see the message; then run make setup")
            )
    return found


def _python(root: Path) -> Iterator[Check]:
    version = platform.python_version()
    old = sys.version_info < (3, 11)
    yield Check("python", "broken" if old else "ok", version, "use Python 3.11 or newer" if old else "")


def _packages(root: Path) -> Iterator[Check]:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        yield Check("packages", "broken", f"missing: {', '.join(missing)}", "pip install 'racelab[local]'")
    else:
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in _NEEDED if name != "torch")
        yield Check("packages", "ok", versions)


def _torch(root: Path) -> Iterator[Check]:
    """Build, threads and GPU."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    yield Check("torch", "ok", f"{torch.__version__}, {build} build, {torch.get_num_threads()} threads")
    driver = shutil.which("nvidia-smi") is not None
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Check("gpu", "ok", names)
    elif driver and torch.version.cuda is None:
        yield Check("gpu", "warning", "a driver, but torch is a CPU build", "install a CUDA build of torch")
    elif driver:
        yield Check(
            "gpu", "warning", "a driver, but torch sees no GPU", "look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    else:
        yield Check("gpu", "note", "none; the embedded preset needs none")


def _config(root: Path) -> Iterator[Check]:
    from racelab.configs.check import reachability
    from racelab.configs.compose import compose

    findings = reachability(compose([]).config)
    keys = ", ".join(finding.key for finding in findings)
    if findings:
        yield Check("config", "warning", f"cannot be reached: {keys}", "racelab config check")
    else:
        yield Check("config", "ok", "the default composes and every target can be reached")


def _models(root: Path) -> Iterator[Check]:
    """The models of the default config, with their hashes; the first look may convert one."""
    from racelab.configs.compose import compose
    from racelab.experiments.models.assets import resolve_model

    config = compose([]).race
    for name, source in (("model", config.model.source), ("encoder", config.encoder.source)):
        try:
            folder = resolve_model(source)
        except RacelabError as error:
            yield Check(name, "broken", str(error), "make setup")
        except OSError as error:
            yield Check(
                name, "broken", f"{source}: {error}", "free disk, or set RACELAB_CACHE to a writable folder"
            )
        else:
            yield Check(name, "ok", f"{source}, hash as expected, in {folder}")


def _folders(root: Path) -> Iterator[Check]:
    """Free disk and the right to write, for the runs and for the models' cache."""
    from racelab.experiments.models.assets import cache_dir

    for name, folder in (("runs folder", root), ("cache folder", cache_dir())):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        found = f"{folder}, {free / _GIB:.1f} GiB free"
        if not there.is_dir() or not os.access(there, os.W_OK):
            mend = "set RACELAB_HOME or run.root" if root is folder else "set RACELAB_CACHE"
            yield Check(name, "broken", f"{there} cannot be written", f"{mend} to a folder of yours")
        elif free < _LEAST_DISK:
            yield Check(name, "broken", found, "free at least 1 GiB")
        elif free < _GOOD_DISK:
            yield Check(name, "warning", found, "5 GiB are comfortable")
        else:
            yield Check(name, "ok", found)


def _store(root: Path) -> Iterator[Check]:
    """The tracking store. A run never depends on it, so it is at worst a warning."""
    from racelab.experiments.tracking.mlflow_store import probe, tracking_uri, without_credentials

    try:
        uri = tracking_uri(root)
        probe(uri)
    except RacelabError as error:
        yield Check(
            "mlflow store", "warning", str(error), "mend MLFLOW_TRACKING_URI; runs go on, then racelab sync"
        )
        return
    file = Path(uri.removeprefix("sqlite:///"))
    fresh = uri.startswith("sqlite:///") and not file.exists()
    state = "not there yet, the first run makes it" if fresh else "there"
    version = metadata.version("mlflow")
    yield Check("mlflow store", "ok", f"{without_credentials(uri)}: {state} (mlflow {version})")


def _stale(root: Path) -> Iterator[Check]:
    from racelab.sweeps.manifest import survey

    found, damaged = survey(root)
    if damaged:
        names = ", ".join(path.name for path in damaged)
        yield Check("damaged runs", "warning", names, "racelab runs says what is wrong with each")
    stale = [info.run_id for info in found if info.status == "stale"]
    if stale:
        mend = f"racelab sync closes them; racelab train --resume {stale[0]} goes on"
        yield Check("runs", "warning", f"{len(stale)} of {len(found)} died: {', '.join(stale[:5])}", mend)
    else:
        yield Check("runs", "ok", f"{len(found)}, none died")


def _tools(root: Path) -> Iterator[Check]:
    """What only later commands need."""
    java = _first_line(["java", "-version"])
    yield Check("java", "note", java or "none; only ScienceWorld tasks need it")


def _slurm(root: Path) -> Iterator[Check]:
    """A cluster, where there is one: does it answer, and was everything submitted that was asked for?"""
    version = _first_line(["sbatch", "--version"])
    if not version:
        yield Check("slurm", "note", "none; only launcher=slurm needs it")
        return
    from racelab.sweeps.slurm.folder import all_launches
    from racelab.sweeps.slurm.scheduler import Scheduler

    try:
        limits = Scheduler().limits()
    except RacelabError as error:
        yield Check("slurm", "warning", f"{version}; {error}", "launcher=inline runs here meanwhile")
        return
    kept = "with" if limits.accounting else "without"
    partitions = ", ".join(limits.partitions) or "none"
    yield Check(
        "slurm", "ok", f"{version}, {kept} accounting, arrays of {limits.max_array}; partitions: {partitions}"
    )
    yield from _launches(all_launches(root))


def _launches(folders: Sequence[LaunchFolder]) -> Iterator[Check]:
    open_ends: list[str] = []
    damaged: list[str] = []
    for folder in folders:
        try:
            open_ends += [] if folder.is_settled() else [folder.uid]
        except RacelabError as error:
            damaged.append(str(error))
    if damaged:
        yield Check("damaged launches", "warning", damaged[0], "racelab jobs leaves them out")
    if open_ends:
        yield Check(
            "launches", "warning", f"not submitted: {', '.join(open_ends[:5])}", "racelab jobs submits them"
        )
    elif len(folders) > len(damaged):
        yield Check("launches", "ok", f"{len(folders) - len(damaged)}, all submitted")


def _first_line(words: Sequence[str]) -> str:
    """What a tool says of itself; "" if it is not there or fails."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[0] if lines and done.returncode == 0 else ""


def _keys(root: Path) -> Iterator[Check]:
    """Which keys are set; never their values."""
    present = [name for name in _KEYS if os.environ.get(name)]
    yield Check("keys", "note", f"set: {', '.join(present)}" if present else "none set; train needs none")
