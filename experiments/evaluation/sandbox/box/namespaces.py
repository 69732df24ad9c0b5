"""Namespaces: a file system, a network, processes and IPC of the run's own, for root and for ordinary users."""

from __future__ import annotations

import os

from racelab.experiments.evaluation.sandbox.box import linux
from racelab.experiments.evaluation.sandbox.box.places import DEVICES, to_read

BOX = "/box"
"""The folder that the program works in, seen from inside."""
_FRESH = linux.CLONE_NEWPID | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
_KEPT = {
    os.ST_NOEXEC: linux.MS_NOEXEC,
    os.ST_NOATIME: linux.MS_NOATIME,
    os.ST_NODIRATIME: linux.MS_NODIRATIME,
    os.ST_RELATIME: linux.MS_RELATIME,
}


def enter(as_root: bool) -> None:
    """Leaves the user's namespaces but for the mounts (see `build`); the next child is process 1 of a new one.

    Args:
        as_root: with root's own right. An ordinary user first needs a user namespace, and is itself inside it (root
            that is the only user of its namespace is 65534 there, so that it has no rights of root).

    Raises:
        Unavailable: not allowed here.
    """
    if as_root:
        linux.unshare(_FRESH)
        return
    user, group = os.geteuid(), os.getegid()
    linux.unshare(_FRESH | linux.CLONE_NEWUSER)
    try:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user or 65534} {user} 1")
        _write("/proc/self/gid_map", f"{group or 65534} {group} 1")
    except OSError as error:
        raise linux.Unavailable(f"map of user ids: {error.strerror}") from None


def build(folder: str, python: list[str], owner: int, box_bytes: int) -> None:
    """Makes a root of its own at `folder`, moves into it, and stands in the box, which alone can be written.

    The box is in memory: it is gone with the last process, and cannot fill a disk.

    Args:
        folder: an empty folder; nothing is left in it.
        python: the interpreter's folders.
        owner: the user (and group) that the program runs as.
        box_bytes: what all files of the program may hold together.

    Raises:
        Unavailable: a mount is not allowed here.
    """
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    guarded = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", folder, "tmpfs", guarded, "mode=0755,size=4m,nr_inodes=4096")
    read = to_read(python)
    for path in (*read, *DEVICES):
        _show(path, folder)
    for name in (BOX, "/proc"):
        os.makedirs(folder + name, exist_ok=True)
    linux.mount("tmpfs", folder + BOX, "tmpfs", guarded, f"mode=0700,size={box_bytes},nr_inodes=16384")
    if owner != os.geteuid():
        os.chown(folder + BOX, owner, owner)
    linux.mount("proc", f"{folder}/proc", "proc", guarded | linux.MS_NOEXEC)
    _link(folder, BOX, "/tmp", "/var/tmp", "/dev/shm")
    _link(folder, "/proc/self/fd", "/dev/fd")
    _make_read_only(folder)
    linux.change_root(folder)
    linux.mount(None, "/", None, guarded | linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY)
    os.chdir(BOX)


def _show(path: str, folder: str) -> None:
    """Makes a path of the outside visible at the same place inside."""
    inside = folder + path
    if os.path.lexists(inside):
        return
    os.makedirs(os.path.dirname(inside), exist_ok=True)
    if os.path.islink(path) and path.count("/") == 1:
        os.symlink(os.readlink(path), inside)  # /lib -> usr/lib
        return
    if os.path.isdir(path):
        os.mkdir(inside)
    elif os.path.exists(path):
        os.close(os.open(inside, os.O_CREAT | os.O_WRONLY, 0o644))
    else:
        return
    linux.mount(path, inside, None, linux.MS_BIND | linux.MS_REC)


def _link(folder: str, target: str, *names: str) -> None:
    for name in names:
        if not os.path.lexists(folder + name):
            os.makedirs(os.path.dirname(folder + name), exist_ok=True)
            os.symlink(target, folder + name)


def _make_read_only(folder: str) -> None:
    """Every mount below the new root, those inside others too, but for the box."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [line.split(" ")[4] for line in file]
    for point in points:
        path = _unescaped(point)
        if not path.startswith(f"{folder}/") or path == folder + BOX:
            continue
        found = os.statvfs(path).f_flag
        flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID
        if not path.startswith(f"{folder}/dev/"):
            flags |= linux.MS_NODEV
        for held, flag in _KEPT.items():
            flags |= flag if found & held else 0
        linux.mount(None, path, None, flags)


def _unescaped(point: str) -> str:
    """The kernel writes blanks and the like as octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, character)
    return point


def _write(path: str, text: str) -> None:
    place = os.open(path, os.O_WRONLY)
    try:
        os.write(place, text.encode())
    finally:
        os.close(place)
