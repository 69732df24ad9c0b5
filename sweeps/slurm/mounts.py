"""Whether a folder is one that only this machine sees. Says so only of what it knows to be local."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LOCAL: Final = {
    "memory file system": "tmpfs ramfs devtmpfs",
    "layer of a container": "overlay aufs squashfs",
    "local disk": "ext2 ext3 ext4 xfs btrfs zfs f2fs jfs reiserfs bcachefs vfat exfat",
}
"""In words -> the kernel's names."""
_MOUNTS: Final = Path("/proc/self/mounts")
_EXPORTS: Final = (Path("/etc/exports"), Path("/etc/exports.d"))


def local(path: Path, mounts: str | None = None, exports: str | None = None) -> str:
    """What a folder is on, in words, if other machines do not see it: `local disk (ext4 at /)`.

    "" for network and cluster file systems, for what this machine exports by NFS, and for kinds that are not known.

    Args:
        path: need not be there yet.
        mounts: what /proc/self/mounts says; None: read it.
        exports: what /etc/exports and its like say; None: read them.
    """
    real = os.path.realpath(path)
    where, kind = "", ""
    for place, name in _mounted(_read(_MOUNTS) if mounts is None else mounts):
        if _within(real, place) and len(place) >= len(where):
            where, kind = place, name
    found = next((words for words, kinds in _LOCAL.items() if kind in kinds.split()), "")
    if not found or any(_within(real, folder) for folder in _exported(exports)):
        return ""
    return f"{found} ({kind} at {where})"


def is_elsewhere(name: str, address: str, host: str) -> bool:
    """Whether a node of the cluster is another machine than this one."""
    if address in ("localhost", "::1") or address.startswith("127."):
        return False
    here = socket.gethostname().partition(".")[0]
    return here not in {text.partition(".")[0] for text in (name, address, host)}


def _mounted(text: str) -> Iterator[tuple[str, str]]:
    """(folder, kind) of each line; later lines lie over earlier ones."""
    for line in text.splitlines():
        _, place, kind, *_ = line.split(" ")
        yield re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), place), kind


def _exported(text: str | None) -> Iterator[str]:
    """The folders of /etc/exports and the files of /etc/exports.d."""
    if text is None:
        single, folder = _EXPORTS
        text = "\n".join(map(_read, [single, *sorted(folder.glob("*.exports"))]))
    for line in text.splitlines():
        word, *_ = line.split("#")[0].split() or [""]
        if word.startswith("/"):
            yield word


def _within(path: str, folder: str) -> bool:
    return folder == "/" or path == folder or path.startswith(f"{folder}/")


def _read(path: Path) -> str:
    """Its text; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
