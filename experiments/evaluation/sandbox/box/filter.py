"""A filter of system calls (seccomp-BPF), made by hand for x86_64 and aarch64.

Two sets. `COMMON` goes with every means: no sockets, no namespaces, nothing that reaches into other processes or the
kernel. `ALONE` comes on top where there are no namespaces: what Landlock does not see (rights, owners and times of
files) and what would reach the user's other processes. Calls newer than the table answer as an old kernel would.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from racelab.experiments.evaluation.sandbox.box.linux import no_new_privileges, prctl

_PR_SET_SECCOMP, _FILTER = 22, 2
_ARCHITECTURES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
_NEWEST = 462
_ALLOW, _REFUSE, _KILL = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_NR, _ARCH = 0, 4
_NEW_NAMESPACE = 0x7E02_0000

Step = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""

# (x86_64, aarch64); None: there is none.
COMMON: dict[str, tuple[int | None, int | None]] = {
    # network
    "socket": (41, 198),
    "connect": (42, 203),
    "accept": (43, 202),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept4": (288, 242),
    # namespaces and mounts
    "chroot": (161, 51),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "pivot_root": (155, 41),
    "setns": (308, 268),
    "umount2": (166, 39),
    "unshare": (272, 97),
    # other processes
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "setpriority": (141, 140),
    # what outlives the run, or is not counted as its memory
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "msgctl": (71, 187),
    "msgget": (68, 186),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "semctl": (66, 191),
    "semget": (64, 190),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "shmget": (29, 194),
    # the kernel: seldom used, often broken
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "modify_ldt": (154, None),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
ALONE: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "chown": (92, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fremovexattr": (199, 16),
    "fsetxattr": (190, 7),
    "futimesat": (261, None),
    "lchown": (94, None),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "removexattr": (197, 14),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "setxattr": (188, 5),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
}
SIGNALS: dict[str, tuple[int | None, int | None]] = {
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tkill": (200, 130),
}
TRUNCATE: dict[str, tuple[int | None, int | None]] = {"truncate": (76, 45)}
_SELF_ONLY = ((302, 261), (144, 119), (142, 118), (314, 274), (203, 122))
"""prlimit64, sched_setscheduler, sched_setparam, sched_setattr, sched_setaffinity: first argument is a process."""
_CLONE, _CLONE3, _SOCKETPAIR = (56, 220), (435, 435), (53, 199)
_KILL_CALL, _TGKILL, _IOCTL, _FCNTL = (62, 129), (234, 131), (16, 29), (72, 25)
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: harmless, and asked of every file that Python opens."""
_OWNER_OF_SIGNALS = (8, 10, 15)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX: with them a pipe sends signals to any process of the user."""


def architecture() -> str | None:
    """The machine's name if there is a table for it (64-bit x86 and Arm), else None."""
    machine = os.uname().machine
    known = machine in _ARCHITECTURES and struct.calcsize("P") == 8
    return machine if known else None


def build(machine: str, alone: bool, signals: bool, truncates: bool, process: int) -> bytes:
    """The filter as an array of sock_filter.

    Args:
        machine: `x86_64` or `aarch64`.
        alone: no namespaces confine the process: add `ALONE`, and what goes by argument.
        signals: something else keeps signals inside the run.
        truncates: Landlock watches truncate(2).
        process: id of the process that installs it; it may always signal itself.
    """
    column, arch = _ARCHITECTURES[machine]
    refused = dict(COMMON)
    if alone:
        refused |= ALONE
        refused |= {} if signals else SIGNALS
        refused |= {} if truncates else TRUNCATE
    steps: list[Step] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
    ]
    steps += [(_AT_LEAST, 0, 1, _NEWEST + 1), _refuse(errno.ENOSYS)]
    steps += _when(_CLONE3[column], [_refuse(errno.ENOSYS)])
    for numbers in refused.values():
        steps += _when(numbers[column], [_refuse(errno.EPERM)])
    steps += _by_argument(column)
    if alone:
        steps += _by_argument_alone(column, signals, process)
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def install(code: bytes) -> None:
    """Puts a filter over this process and all that it will start, for good.

    Raises:
        Unavailable: the kernel has no filters, or a sandbox around this one forbids them.
    """
    no_new_privileges()
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HP", len(code) // 8, ctypes.addressof(buffer)))
    prctl("seccomp", _PR_SET_SECCOMP, _FILTER, ctypes.addressof(program))


def _by_argument(column: int) -> list[Step]:
    """Calls that are refused for some arguments only, under every means."""
    eperm = _refuse(errno.EPERM)
    steps = _when(
        _CLONE[column], [_argument(0), (_ANY_BIT, 0, 1, _NEW_NAMESPACE), eperm, (_RETURN, 0, 0, _ALLOW)]
    )
    # A pair of AF_UNIX streams can reach nothing else (a datagram socket could be pointed elsewhere); asyncio needs it.
    pair: list[Step] = [_argument(0), (_EQUAL, 1, 0, 1), eperm, _argument(1), (_AND, 0, 0, 0xF)]
    steps += _when(_SOCKETPAIR[column], [*pair, *_one_of((1,), errno.EPERM)])
    for numbers in _SELF_ONLY:
        steps += _when(numbers[column], [_argument(0), *_one_of((0,), errno.EPERM)])
    return steps


def _by_argument_alone(column: int, signals: bool, process: int) -> list[Step]:
    """The same where no namespaces stand round the process."""
    steps = _when(_IOCTL[column], [_argument(1), *_one_of(_IOCTLS, errno.ENOTTY)])
    if not signals:
        steps += _when(_KILL_CALL[column], [_argument(0), *_one_of((0, process), errno.EPERM)])
        steps += _when(_TGKILL[column], [_argument(0), *_one_of((process,), errno.EPERM)])
        owner: list[Step] = [_argument(1)]
        for command in _OWNER_OF_SIGNALS:
            owner += [(_EQUAL, 0, 1, command), _refuse(errno.EPERM)]
        steps += _when(_FCNTL[column], [*owner, (_RETURN, 0, 0, _ALLOW)])
    return steps


def _when(number: int | None, block: list[Step]) -> list[Step]:
    """The block, which returns on every way through it, for one call."""
    return [] if number is None else [(_EQUAL, 0, len(block), number), *block]


def _one_of(values: tuple[int, ...], error: int) -> list[Step]:
    """Allows the loaded word if it is one of these."""
    steps: list[Step] = []
    for value in values:
        steps += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*steps, _refuse(error)]


def _argument(index: int) -> Step:
    """Loads the low word of an argument (both machines are little-endian)."""
    return (_LOAD, 0, 0, 16 + 8 * index)


def _refuse(error: int) -> Step:
    return (_RETURN, 0, 0, _REFUSE | error)
