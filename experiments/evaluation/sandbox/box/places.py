"""What of the machine's file system a program may see: what an interpreter and its libraries need, and no more."""

from __future__ import annotations

import os

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
SETTINGS = tuple(
    f"/etc/{name}"
    for name in (
        "alternatives",
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
        "localtime",
        "mime.types",
        "nsswitch.conf",
    )
)
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))


def to_read(python: list[str]) -> list[str]:
    """All that may be read: system, a few settings, and the interpreter's folders, each also by its real path.

    A folder inside one that is listed is left out; so is `/`.
    """
    listed = [path for path in (*SYSTEM, *SETTINGS) if os.path.lexists(path)]
    for path in sorted({*python, *map(os.path.realpath, python)}):
        inside = any(path == other or path.startswith(f"{other}/") for other in listed)
        if path != "/" and os.path.exists(path) and not inside:
            listed.append(path)
    return listed
