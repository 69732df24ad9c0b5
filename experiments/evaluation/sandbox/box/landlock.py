"""Landlock: an unprivileged process gives up the file system, but for the paths that it names."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from racelab.experiments.evaluation.sandbox.box.linux import Unavailable, no_new_privileges, syscall

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
"""From which version on how many rights are known."""
SCOPES_SINCE, _SCOPES = 6, 0b11
"""Abstract sockets and signals stay inside."""


def version() -> int:
    """The kernel's Landlock version; 0 if there is none."""
    try:
        return syscall("landlock", _CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    except Unavailable:
        return 0


def restrict(abi: int, read: Iterable[str], devices: Iterable[str], write: Iterable[str]) -> None:
    """From here on files are read below `read`, devices used, and all is allowed below `write`; nothing else.

    Paths that do not exist are passed over. What was open before stays usable.

    Raises:
        Unavailable: the kernel refuses.
    """
    known = max(count for since, count in _RIGHTS.items() if since <= abi)
    handled = (1 << known) - 1
    scopes = _SCOPES if abi >= SCOPES_SINCE else 0
    attributes = struct.pack("=QQQ", handled, 0, scopes)[: 24 if scopes else 8]
    ruleset = syscall(
        "landlock_create_ruleset", _CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)
    )
    reading = _EXECUTE | _READ_FILE | _READ_DIR
    for path in read:
        _allow(ruleset, path, reading & handled)
    for path in devices:
        _allow(ruleset, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & handled)
    for path in write:
        _allow(ruleset, path, handled)
    no_new_privileges()
    syscall("landlock_restrict_self", _RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= _OF_FILES
    rule = struct.pack("=Qi", rights, place)
    syscall("landlock_add_rule", _ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
    os.close(place)
