"""A launch's own copy of racelab: jobs that wait in the queue run the code they were submitted with.

`<root>/.launches/code/<hash>/` holds `racelab/`, the package with its data, and `code.json`, the version and git
state it was taken at. The name is a hash of both, so launches of the same code share a copy, and a copy never changes:
its files are read-only. Its folders are not, for Python's `__pycache__`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Final

from racelab.experiments.errors import RunFolderError
from racelab.experiments.fsio import explain
from racelab.sweeps.fingerprint import COPY_FACTS, code_state
from racelab.sweeps.slurm.folder import LAUNCHES

PACKAGE: Final = "racelab"
_MEMBERS: Final = ("__init__.py", "analysis", "cli", "configs", "experiments", "py.typed", "sweeps")
_LEFT_OUT: Final = (".pyc", "~", ".swp", ".swo", ".orig", ".rej", ".tmp")
_MODE: Final = 0o444


def take(root: Path) -> Path:
    """The folder that holds a copy of the racelab that runs now, made if it is not there yet.

    Args:
        root: folder of the runs.

    Returns:
        Absolute path, for PYTHONPATH.

    Raises:
        RunFolderError: the package cannot be read, or nothing can be written under the root.
    """
    files = _contents()
    target = _target(root, files)
    try:
        if target.is_dir():
            _restore(target, files)
        else:
            _create(target, files)
    except OSError as error:
        raise RunFolderError(f"cannot copy racelab's code to {target}: {explain(error)}") from error
    return target


def place(root: Path) -> Path:
    """Where `take` puts the code that runs now; nothing is written.

    Raises:
        RunFolderError: the package cannot be read.
    """
    return _target(root, _contents())


def _target(root: Path, files: dict[str, bytes]) -> Path:
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return root.absolute() / LAUNCHES / "code" / digest.hexdigest()[:16]


def _contents() -> dict[str, bytes]:
    """Name below the copy -> content, in an order that is always the same."""
    package = _package()
    files = {}
    try:
        for member in _MEMBERS:
            for name, path in _walk(package / member, f"{PACKAGE}/{member}"):
                files[name] = path.read_bytes()
        files[COPY_FACTS] = _code(package)
    except OSError as error:
        raise RunFolderError(f"cannot read racelab's own code in {package}: {explain(error)}") from error
    return dict(sorted(files.items()))


def _package() -> Path:
    import racelab

    return Path(str(racelab.__file__)).parent


def _walk(path: Path, name: str) -> list[tuple[str, Path]]:
    """(name, file) of a file or of all files in a folder, links followed, without caches and editors' files."""
    if not path.is_dir():
        return [(name, path)]
    found = []
    for entry in os.scandir(path):
        if entry.name != "__pycache__" and not entry.name.startswith((".", "#")):
            if entry.is_dir():
                found += _walk(Path(entry.path), f"{name}/{entry.name}")
            elif not entry.name.endswith(_LEFT_OUT):
                found.append((f"{name}/{entry.name}", Path(entry.path)))
    return found


def _code(package: Path) -> bytes:
    """The state of the code; that of a copy, which has no repository, is beside it."""
    known = package.parent / COPY_FACTS
    if known.is_file():
        return known.read_bytes()
    return (json.dumps(code_state(), indent=1, sort_keys=True) + "\n").encode()


def _create(target: Path, files: dict[str, bytes]) -> None:
    """Writes a copy under another name, then renames it: who sees the target sees all of it."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(3)}.tmp")
    try:
        for folder in sorted({os.path.dirname(name) for name in files}):
            (temporary / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write(temporary / name, content)
        try:
            os.rename(temporary, target)
        except OSError:
            if not target.is_dir():  # there if another launch was quicker, and then it is the same
                raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(temporary)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(_MODE)


def _restore(target: Path, files: dict[str, bytes]) -> None:
    """Puts back what is missing or cut: scratch file systems delete files that nobody has read for weeks."""
    for name, content in files.items():
        path = target / name
        try:
            whole = path.stat().st_size == len(content)
        except FileNotFoundError:
            whole = False
        if not whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(3)}.tmp")
            _write(temporary, content)
            os.replace(temporary, path)
