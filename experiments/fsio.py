"""Small files that are never half-written nor written by a replaced process, and locks between processes.

All changes of a run folder but the spool's appends go through `write_text_atomic`, `rename` and `remove_tree`, which
ask the fence immediately before they change anything: who writes through them cannot forget to (see `fence.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from racelab.experiments import fence
from racelab.experiments.errors import DiskError, FencedError, InUseError, RunFolderError


def now_iso() -> str:
    """The present in UTC, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write_text_atomic(path: Path, text: str) -> None:
    """Replaces `path` as a whole: temporary file beside it, fsync, rename.

    Raises:
        DiskError: the disk is full; `path` is then as it was before.
        RunFolderError: the folder cannot be written; the same.
        FencedError: this process was replaced; `path` is as it was before.
    """
    fence.check(path)
    temporary = path.with_name(f".{path.name}.{unique()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        rename(temporary, path)  # asks the fence again: the disk may have taken its time
    except OSError as error:
        _unlink(temporary)
        raise unwritten(f"cannot write {path}", error) from error
    except FencedError:
        _unlink(temporary)
        raise


def _unlink(temporary: Path) -> None:
    with contextlib.suppress(OSError):
        temporary.unlink()


def unique() -> str:
    """A part of a temporary file's name that no other process has, nor one with the same pid on another host."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def rename(source: Path, target: Path) -> None:
    """`os.replace`, unless this process was replaced.

    Raises:
        FencedError: it was; nothing has changed.
        OSError: as `os.replace`.
    """
    fence.check(target)
    os.replace(source, target)


def remove_tree(path: Path) -> None:
    """Removes a folder as far as that is possible, unless this process was replaced.

    Raises:
        FencedError: it was; nothing has changed.
    """
    fence.check(path)
    shutil.rmtree(path, ignore_errors=True)


def write_json_atomic(path: Path, value: object) -> None:
    """`write_text_atomic` of the JSON text of `value` (sorted keys, so equal values give equal bytes).

    Raises:
        RunFolderError: as `write_text_atomic`.
        ValueError: `value` holds NaN or an infinity, which JSON does not know.
    """
    write_text_atomic(
        path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
    )


def read_json(path: Path) -> Any:
    """The JSON value in `path`.

    Raises:
        RunFolderError: the file is missing, unreadable or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {explain(error)}") from error
    except ValueError as error:
        raise RunFolderError(
            f"{path} is not JSON ({error}); restore it from a copy or remove the run"
        ) from error


_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def unwritten(what: str, error: OSError) -> RunFolderError:
    """The error to raise for a write that failed: a DiskError where there was no room.

    Args:
        what: could not be done, as `cannot write FILE`.
        error: of the system.
    """
    kind = DiskError if error.errno in _NO_ROOM else RunFolderError
    return kind(f"{what}: {explain(error)}")


def explain(error: OSError) -> str:
    """What went wrong and the mend, in a few words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left on the disk; free some and resume the run"
    if error.errno == errno.EFBIG:
        return "the file would exceed the size limit (ulimit -f); raise it and resume the run"
    return (error.strerror or str(error)).lower()


@contextlib.contextmanager
def file_lock(path: Path, wait_s: float = 30.0) -> Iterator[None]:
    """A short exclusive section across processes, by `flock` on `path`.

    Raises:
        InUseError: not obtained within `wait_s` seconds.
        RunFolderError: `path` cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunFolderError(f"cannot lock {path}: {explain(error)}") from error
    try:
        if not try_flock(fd, wait_s):
            raise InUseError(
                f"{path} is locked by another process for over {wait_s:.0f} s; see who with `fuser`"
            )
        yield
    finally:
        os.close(fd)


def try_flock(fd: int, wait_s: float) -> bool:
    """Takes the exclusive flock of an open file; False if another holds it for longer than `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        else:
            return True


def is_locked(path: Path) -> bool:
    """Whether another open file holds the flock of `path`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)
