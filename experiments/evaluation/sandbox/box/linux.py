"""The few calls of Linux that Python 3.11 has no function for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 1024, 2048, 4096, 16384
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
_MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x2008_0522

SIGKILL = 9

libc = ctypes.CDLL(None, use_errno=True)


class Unavailable(Exception):
    """A means that this machine does not give; the message says which call was refused and why."""


def check(what: str, result: int) -> int:
    """Passes a result on; a negative one is an error.

    Raises:
        Unavailable: `what`, and the reason as errno has it.
    """
    if result < 0:
        raise Unavailable(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def syscall(what: str, number: int, *args: object) -> int:
    """A system call that libc does not wrap.

    Raises:
        Unavailable: it failed.
    """
    return check(what, libc.syscall(ctypes.c_long(number), *args))


def prctl(what: str, option: int, first: int = 0, second: int = 0) -> int:
    """An operation on this process, as the manual of prctl has it.

    Raises:
        Unavailable: it failed.
    """
    words = [ctypes.c_ulong(word) for word in (first, second, 0, 0)]
    return check(what, libc.prctl(ctypes.c_int(option), *words))


def unshare(flags: int) -> None:
    """Leaves namespaces for new ones.

    Raises:
        Unavailable: the kernel, a container or a security module forbids it.
    """
    check("unshare", libc.unshare(ctypes.c_int(flags)))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mounts, binds or changes a mount.

    Raises:
        Unavailable: it failed.
    """
    encoded = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    check(f"mount {target}", libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None))


def change_root(folder: str) -> None:
    """Makes `folder`, a mount point, the root of this mount namespace, and lets go of all that was outside it.

    Raises:
        Unavailable: it failed.
    """
    os.chdir(folder)
    check("pivot_root", libc.pivot_root(b".", b"."))
    check("umount", libc.umount2(b".", ctypes.c_int(_MNT_DETACH)))
    os.chdir("/")


def no_new_privileges() -> None:
    """No setuid program gives rights from here on; an unprivileged process needs it before a filter."""
    prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent() -> None:
    """This process is killed when the thread that made it ends. A change of user undoes it."""
    prctl("pdeathsig", _PR_SET_PDEATHSIG, SIGKILL)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process."""
    prctl("subreaper", _PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """No process without privileges looks into this one, not even one of the same user."""
    prctl("dumpable", _PR_SET_DUMPABLE, 0)


def drop_capabilities(user: int | None) -> None:
    """Gives up every capability, for this process and all that it starts; root becomes `user` meanwhile.

    Raises:
        Unavailable: it failed, or the user cannot be taken.
    """
    capability = 0
    while libc.prctl(ctypes.c_int(_PR_CAPBSET_DROP), ctypes.c_ulong(capability), 0, 0, 0) == 0:
        capability += 1  # fails at the end of the list, or at once without the right to (then there are none)
    if user is not None:
        become(user)
    libc.prctl(ctypes.c_int(_PR_CAP_AMBIENT), ctypes.c_ulong(_PR_CAP_AMBIENT_CLEAR_ALL), 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    check("capset", libc.capset(header, (ctypes.c_uint32 * 6)()))


def become(user: int) -> None:
    """Takes a user id and the group of the same number, and keeps no other group.

    Raises:
        Unavailable: root may not (a container can forbid it).
    """
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError as error:
        raise Unavailable(f"root may not become user {user}: {error.strerror}") from None


def spare_user() -> int | None:
    """A user id that no account has and no other run uses, or None if this namespace has no second one.

    1,879,048,192 to 2,147,352,575 belong to nobody (systemd's table of ids); a container may map fewer.
    """
    ranges = _mapped("/proc/self/uid_map")
    wanted = 0x7000_0000 + os.getpid()
    if any(first <= wanted < first + count for first, count in ranges):
        return wanted
    top = max((first + count for first, count in ranges), default=0)
    return top - 3 - os.getpid() % min(4096, top // 2) if top > 10_000 else None


def _mapped(path: str) -> Sequence[tuple[int, int]]:
    """(first id inside, how many) of an id map."""
    with open(path) as file:
        rows = [line.split() for line in file]
    return [(int(row[0]), int(row[2])) for row in rows]
