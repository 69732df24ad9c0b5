"""The filter as a program: what it answers to calls of both machines, worked out by a small BPF interpreter."""

from __future__ import annotations

import errno
import struct

import pytest

from racelab.experiments.evaluation.sandbox.box import filter as calls

ALLOW, KILL = 0x7FFF0000, 0x80000000
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# From the kernel's tables.
NUMBERS = {
    "x86_64": {"read": 0, "openat": 257, "socket": 41, "socketpair": 53, "clone": 56, "clone3": 435, "kill": 62,
               "tgkill": 234, "chmod": 90, "fchmodat": 268, "unshare": 272, "mount": 165, "ptrace": 101, "ioctl": 16,
               "fcntl": 72, "setsid": 112, "prlimit64": 302, "truncate": 76, "mkdirat": 258, "unlinkat": 263},
    "aarch64": {"read": 63, "openat": 56, "socket": 198, "socketpair": 199, "clone": 220, "clone3": 435, "kill": 129,
                "tgkill": 131, "fchmodat": 53, "unshare": 97, "mount": 40, "ptrace": 117, "ioctl": 29, "fcntl": 25,
                "setsid": 157, "prlimit64": 261, "truncate": 45, "mkdirat": 34, "unlinkat": 35},
}  # fmt: skip


def answer(code: bytes, arch: int, number: int, *arguments: int) -> int:
    """What the filter returns for a call."""
    words = [argument & (1 << 64) - 1 for argument in (*arguments, *[0] * (6 - len(arguments)))]
    data = struct.pack("<IIQ6Q", number, arch, 0, *words)
    steps = list(struct.iter_unpack("=HBBI", code))
    at = value = 0
    while True:
        kind, yes, no, operand = steps[at]
        at += 1
        if kind == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif kind == 0x54:
            value &= operand
        elif kind == 0x06:
            return operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[kind]
            at += yes if holds else no


def refused(error: int) -> int:
    return 0x50000 | error


@pytest.mark.parametrize("machine", sorted(MACHINES))
@pytest.mark.parametrize("alone", [False, True])
def test_what_is_refused_by_every_means(machine: str, alone: bool) -> None:
    code = calls.build(machine, alone=alone, signals=not alone, truncates=True, process=7)
    arch, numbers = MACHINES[machine], NUMBERS[machine]

    def ask(name: str, *arguments: int) -> int:
        return answer(code, arch, numbers[name], *arguments)

    for name in ("read", "openat", "mkdirat", "unlinkat"):
        assert ask(name) == ALLOW
    for name in ("socket", "unshare", "mount", "ptrace"):
        assert ask(name) == refused(errno.EPERM)
    assert ask("socketpair", 1, 1 | 0o2000000) == ALLOW  # AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC
    assert ask("socketpair", 1, 2) == refused(errno.EPERM)
    assert ask("socketpair", 1, 5) == refused(errno.EPERM)
    assert ask("socketpair", 2, 1) == refused(errno.EPERM)
    assert ask("clone", 0x1200011) == ALLOW  # fork
    assert ask("clone", 0x3D0F00) == ALLOW  # a thread
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert ask("clone", flag | 17) == refused(errno.EPERM)
    assert ask("clone3") == refused(errno.ENOSYS)
    assert ask("prlimit64", 0) == ALLOW
    assert ask("prlimit64", 1234) == refused(errno.EPERM)
    assert answer(code, arch, 463) == refused(errno.ENOSYS)
    assert answer(code, arch, 0x40000000 | 41) == refused(errno.ENOSYS)  # socket by the x32 numbers
    assert answer(code, 0x40000003, numbers["read"]) == KILL  # 32-bit code


@pytest.mark.parametrize("machine", sorted(MACHINES))
def test_what_is_refused_without_namespaces(machine: str) -> None:
    arch, numbers = MACHINES[machine], NUMBERS[machine]
    alone = calls.build(machine, alone=True, signals=False, truncates=False, process=7)
    inside = calls.build(machine, alone=False, signals=True, truncates=True, process=7)
    for name in ("fchmodat", "setsid", "truncate", *(["chmod"] if machine == "x86_64" else [])):
        assert answer(alone, arch, numbers[name]) == refused(errno.EPERM)
        assert answer(inside, arch, numbers[name]) == ALLOW
    for name, arguments, expected in (
        ("kill", (0, 9), ALLOW),
        ("kill", (7, 9), ALLOW),
        ("kill", (8, 9), refused(errno.EPERM)),
        ("kill", (-1, 9), refused(errno.EPERM)),
        ("kill", (-7, 9), refused(errno.EPERM)),
        ("tgkill", (7, 7), ALLOW),
        ("tgkill", (8, 8), refused(errno.EPERM)),
        ("ioctl", (1, 0x5401), ALLOW),
        ("ioctl", (1, 0x40086602), refused(errno.ENOTTY)),
        ("fcntl", (1, 2), ALLOW),
        ("fcntl", (1, 8, 1), refused(errno.EPERM)),
        ("fcntl", (1, 10, 9), refused(errno.EPERM)),
    ):
        assert answer(alone, arch, numbers[name], *arguments) == expected, (name, arguments)
        assert answer(inside, arch, numbers[name], *arguments) == ALLOW


def test_signals_are_left_to_what_confines_them() -> None:
    code = calls.build("x86_64", alone=True, signals=True, truncates=True, process=7)
    assert answer(code, MACHINES["x86_64"], NUMBERS["x86_64"]["kill"], 8, 15) == ALLOW
    assert answer(code, MACHINES["x86_64"], NUMBERS["x86_64"]["truncate"]) == ALLOW
