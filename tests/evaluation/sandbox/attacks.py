"""What model-written code may try, each as a function that asserts that it came to nothing.

Only the standard library and the sandbox itself: the file is also run by a bare interpreter as another user
(`python attacks.py MEANS CASE DENIED`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from racelab.experiments.errors import ConfigError
from racelab.experiments.evaluation.sandbox import (
    CodeResult,
    Limits,
    SandboxError,
    check_sandbox,
    run_code,
    run_many,
)
from racelab.experiments.evaluation.sandbox.box import filter as calls
from racelab.experiments.evaluation.sandbox.box import linux

ROOMY = Limits(timeout_s=120.0, cpu_s=60)
"""For what ends by itself, also on a busy machine."""
SECRET = "planted-5f1c"


def ok(program: str, means: Any, limits: Limits = ROOMY) -> CodeResult:
    result = run_code(program, limits, means=means)
    assert result.passed, result
    assert result.outcome == "passed"
    assert result.exit_code == 0
    return result


def named(name: str) -> str:
    """Lines that give a process, and what it forks, a name of its own."""
    return f"import ctypes, os\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\n"


def alive(name: str) -> list[str]:
    """Ids of processes with that name, dead ones that are still listed left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "comm").read_text().strip() == name and ") Z " not in (folder / "stat").read_text():
                found.append(folder.name)
    return found


def fresh_name() -> str:
    return f"t{os.getpid()}x{time.monotonic_ns() % 10**5}"


@contextlib.contextmanager
def users_file() -> Iterator[Path]:
    """A file of the user's, which anybody may change as far as its rights go."""
    with tempfile.TemporaryDirectory(prefix="users-") as folder:
        os.chmod(folder, 0o777)
        path = Path(folder, "precious.txt")
        path.write_text("kept")
        path.chmod(0o666)
        yield path


def plain_programs(means: Any) -> None:
    assert ok("print('out')\nimport sys; print('err', file=sys.stderr)", means).stdout == "out\n"
    ok(
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 3\nassert asyncio.run(f()) == 3",
        means,
    )
    ok(
        "import threading\nt = [threading.Thread(target=print) for _ in range(5)]\n[x.start() for x in t]",
        means,
    )
    ok("import tempfile\nwith tempfile.NamedTemporaryFile() as f:\n    f.write(b'x')", means)
    ok("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nassert A(1) == A(1)", means)
    ok("import subprocess\nassert subprocess.run(['/bin/sh', '-c', 'exit 3']).returncode == 3", means)
    ok(
        "x: 'unknown' = 1\nassert __name__ == '__main__'\nassert 'racelab' not in __import__('sys').modules",
        means,
    )


def failures(means: Any) -> None:
    for program in (
        "assert 1 == 2",
        "1/0",
        "def f(:",
        "import sys; sys.exit(3)",
        "raise SystemExit('no')",
        "\0",
        "'\ud800'",
    ):
        result = run_code(program, ROOMY, means=means)
        assert (result.passed, result.outcome) == (False, "failed"), (program, result)
        assert result.exit_code == (3 if "3" in program else 1)
    assert "ZeroDivisionError" in run_code("1/0", ROOMY, means=means).stderr


def early_exit(means: Any) -> None:
    for leave in (
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import sys; sys.exit()",
        "exit()",
        "quit(0)",
        "raise SystemExit",
        "raise SystemExit(0)",
        "import os; os.execv('/bin/true', ['true'])",
        "import os\nif os.fork(): os._exit(0)",
        "import threading, os; t = threading.Thread(target=os._exit, args=(0,)); t.start(); t.join()",
        "import atexit, os; atexit.register(os._exit, 0); raise ValueError",
        "import sys, os; sys.excepthook = lambda *_: os._exit(0); 1/0",
    ):
        result = run_code(f"{leave}\nassert 1 == 2", ROOMY, means=means)
        assert not result.passed, (leave, result)
        assert result.outcome == "failed", (leave, result)


def endless_loop(means: Any) -> None:
    start = time.monotonic()
    result = run_code("while True: pass", Limits(timeout_s=1.0), means=means)
    assert (result.outcome, result.exit_code) == ("timeout", None)
    assert 1.0 <= result.seconds <= time.monotonic() - start < 60.0
    assert run_code("import time; time.sleep(600)", Limits(timeout_s=0.5), means=means).outcome == "timeout"


def processor_time(means: Any) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    for program in ("while True: pass", stubborn):
        result = run_code(program, Limits(timeout_s=300.0, cpu_s=1), means=means)
        assert (result.outcome, result.exit_code) == ("timeout", None)
        assert result.seconds < 250.0


def fork_bomb(means: Any) -> None:
    name = fresh_name()
    bomb = named(name) + "while True:\n    try: os.fork()\n    except OSError: pass"
    result = run_code(bomb, Limits(timeout_s=3.0, processes=16), means=means)
    assert result.outcome in ("timeout", "killed"), result
    assert not alive(name)
    ok("import os\nif not os.fork(): os._exit(0)\nos.wait()", means)


def number_of_processes(means: Any) -> None:
    name = fresh_name()
    many = named(name) + (
        "import time\nfor _ in range(100):\n    if not os.fork(): time.sleep(100); os._exit(0)\ntime.sleep(2)"
    )
    limits = dataclasses.replace(ROOMY, processes=20)
    assert not run_code(many, limits, means=means).passed
    assert not alive(name)
    few = many.replace("range(100)", "range(18)")
    ok(few, means, limits)
    assert not alive(name)


def busy_user(means: Any) -> None:
    """The user's own threads, more than the limit, do not keep a program from starting some."""
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(150)]
    for thread in threads:
        thread.start()
    try:
        ok(
            "import threading\nt = [threading.Thread(target=print) for _ in range(8)]\n[x.start() for x in t]",
            means,
        )
    finally:
        done.set()


def allocation(means: Any) -> None:
    result = run_code("x = bytearray(10 << 30)", ROOMY, means=means)
    assert result.outcome == "memory", result
    ok("try:\n    bytearray(10 << 30)\n    raise SystemExit(5)\nexcept MemoryError: pass", means)


def allocation_by_many(means: Any) -> None:
    many = (
        "import os, time\nfor _ in range(9):\n    if not os.fork():\n        x = b'1' * (40 << 20)\n"
        "        time.sleep(60)\ntime.sleep(60)"
    )
    limits = dataclasses.replace(ROOMY, memory_mb=200)
    assert run_code(many, limits, means=means).outcome == "memory"


def deletion(means: Any) -> None:
    program = """
import os, shutil
path = {path!r}
folder = os.path.dirname(path)
attempts = [
    lambda: os.unlink(path), lambda: os.truncate(path, 0), lambda: open(path, "w"), lambda: open(path, "a"),
    lambda: open(path, "r+"), lambda: os.rename(path, path + "2"), lambda: os.rename(path, "mine"),
    lambda: os.chmod(path, 0), lambda: os.chmod(folder, 0), lambda: os.utime(path, (1, 1)),
    lambda: os.chown(path, os.getuid(), -1), lambda: shutil.rmtree(folder), lambda: os.link(path, "mine"),
    lambda: os.symlink("x", folder + "/new"), lambda: os.mkdir(folder + "/new"), lambda: open(folder + "/new", "w"),
    lambda: os.setxattr(path, "user.x", b"1"), lambda: os.replace("own", path), lambda: os.mkdir("../new"),
    lambda: open("../new", "w"), lambda: os.rmdir(os.getcwd()), lambda: os.unlink(os.__file__),
    lambda: open(os.__file__, "a"), lambda: os.mkfifo(folder + "/new"), lambda: os.chmod(os.__file__, 0),
]
open("own", "w").close()
for number, attempt in enumerate(attempts):
    try:
        attempt()
    except OSError:
        continue
    raise SystemExit(10 + number)
assert os.system("rm -rf " + folder + " ; echo > " + path) != 0
"""
    with users_file() as path:
        path.chmod(0o646)
        before = path.stat()
        ok(program.format(path=str(path)), means)
        after = path.stat()
        assert path.read_text() == "kept"
        assert (after.st_mode, after.st_mtime_ns, after.st_uid) == (
            before.st_mode,
            before.st_mtime_ns,
            before.st_uid,
        )
        assert os.listdir(path.parent) == ["precious.txt"]


def reading(means: Any) -> None:
    """Files of the user's, home folder and open files are out of sight."""
    program = """
import os, stat
for path in ({path!r}, "/etc/shadow", {home!r}, "/var/log", "/run"):
    try:
        found = os.listdir(path) if os.path.isdir(path) else [open(path).read()]
        assert not set(found) - {{part for prefix in {prefixes!r} for part in prefix.split("/")}}, (path, found)
    except OSError:
        pass
for place in range(3, 256):
    try:
        kind = os.fstat(place).st_mode
    except OSError:
        continue
    assert stat.S_ISFIFO(kind) or stat.S_ISDIR(kind), (place, kind)
"""
    with users_file() as path, path.open() as held:
        os.set_inheritable(held.fileno(), True)
        home = os.path.expanduser("~")
        home = home if os.path.isdir(home) and home != "/" else "/home"
        ok(program.format(path=str(path), home=home, prefixes=[sys.prefix, sys.base_prefix]), means)


def network(means: Any) -> None:
    program = """
import os, socket, subprocess, sys
def attempts():
    inet = [("tcp", ("127.0.0.1", {tcp})), ("udp", ("127.0.0.1", {udp}))]
    for kind, where in inet + [("unix", {unix!r}), ("unix", {path!r})]:
        try:
            family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
            s = socket.socket(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM)
            if kind == "udp": s.sendto(b"x", where)
            else: s.connect(where)
            s.sendall(b"x")
            print("reached", kind)
            return 1
        except OSError:
            pass
    try:
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        a.sendto(b"x", {unix_udp!r})
        print("reached by a pair")
        return 1
    except OSError:
        pass
    return 0
assert attempts() == 0
child = os.fork()
if child == 0:
    os._exit(attempts())
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
script = "import socket; socket.create_connection(('127.0.0.1', {tcp}), 5)"
try:
    assert subprocess.run([sys.executable, "-I", "-S", "-c", script], stderr=-3).returncode != 0
except OSError:
    pass
"""
    abstract = f"\0racelab-{os.getpid()}-{time.monotonic_ns()}"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o777)
        servers = []
        for family, kind, where in (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, abstract),
            (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "s")),
            (socket.AF_UNIX, socket.SOCK_DGRAM, abstract + "d"),
        ):
            server = stack.enter_context(socket.socket(family, kind))
            server.bind(where)
            server.setblocking(False)
            if kind == socket.SOCK_STREAM:
                server.listen()
            servers.append(server)
        (folder / "s").chmod(0o777)
        text = program.format(
            tcp=servers[0].getsockname()[1],
            udp=servers[1].getsockname()[1],
            unix=abstract,
            path=str(folder / "s"),
            unix_udp=abstract + "d",
        )
        ok(text, means)
        for server in servers:
            with contextlib.suppress(BlockingIOError):
                got: object = server.accept() if server.type == socket.SOCK_STREAM else server.recv(10)
                raise AssertionError(f"{server} was reached: {got!r}")


def environment(means: Any) -> None:
    program = """
import os, glob
assert not os.environ, os.environ
key = {secret!r}
for name in ("environ", "mem", "maps", "fd/0", "root", "cwd"):
    named = ["/proc/%s/%s" % (who, name) for who in ({parent}, os.getppid(), "self", 1)]
    for path in named + glob.glob("/proc/[0-9]*/" + name):
        if name in ("mem", "root", "cwd", "fd/0") and path.split("/")[2] in ("self", str(os.getpid())):
            continue
        try:
            with open(path, "rb") as file:
                assert key.encode() not in file.read(1 << 20), path
                assert name not in ("mem", "root", "cwd"), path
        except OSError:
            pass
assert os.system('test -z "$RACELAB_PLANTED"') == 0
"""
    os.environ["RACELAB_PLANTED"] = SECRET
    ok(program.format(secret=SECRET[:7] + SECRET[7:], parent=os.getpid()), means)


def signals(means: Any) -> None:
    """Other processes of the user are neither killed nor changed."""
    program = """
import os, resource, signal
for attempt in (
    lambda: os.kill({victim}, 9), lambda: os.kill({victim}, 0), lambda: os.killpg({victim}, 9),
    lambda: resource.prlimit({victim}, resource.RLIMIT_NOFILE, (3, 3)),
    lambda: os.setpriority(os.PRIO_PROCESS, {victim}, 19), lambda: os.sched_setaffinity({victim}, [0]),
    lambda: os.setuid(0), lambda: os.chroot("."),
):
    try:
        attempt()
    except OSError:
        continue
    raise SystemExit(9)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    os.kill(-1, signal.SIGTERM)
except OSError:
    pass
"""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as victim:
        try:
            ok(program.format(victim=victim.pid), means)
            assert victim.poll() is None
        finally:
            victim.kill()


def more_rights(means: Any) -> None:
    """No namespaces, no tracing, no rights of root; setuid programs give none."""
    program = """
import ctypes, os, subprocess
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x00020000, 0x40000000, 0x10000000 | 0x00020000):
    assert libc.unshare(flags) == -1, hex(flags)
assert libc.mount(b"x", b"/", b"tmpfs", 0, None) == -1
assert libc.umount2(b"/", 2) == -1
assert libc.ptrace(16, os.getppid(), 0, 0) == -1
"""
    tail = """
assert os.getuid() != 0 and os.geteuid() != 0
try:
    os.setuid(0)
    raise SystemExit(7)
except OSError:
    pass
assert libc.prctl(39, 0, 0, 0, 0) == 1  # no_new_privs
for capability in range(41):
    assert libc.prctl(23, capability, 0, 0, 0) == 0, capability
"""
    ok(program + (tail if means == "namespaces" or os.getuid() == 0 else ""), means)


def output_flood(means: Any) -> None:
    limits = Limits(timeout_s=2.0, output_bytes=1000)
    result = run_code("while True: print('x' * 10000)", limits, means=means)
    assert result.outcome == "timeout"
    assert result.stdout == "x" * 1000
    result = run_code(
        "import os\nos.write(2, b'\\xff' * 5000)", dataclasses.replace(ROOMY, output_bytes=9), means=means
    )
    assert (result.passed, result.stderr) == (True, "\ufffd" * 9)


def huge_file(means: Any) -> None:
    program = """
import os
try:
    with open("big", "wb") as file:
        for _ in range(100):
            file.write(b"x" * (1 << 20))
    raise SystemExit(4)
except OSError:
    pass
assert 0 < os.path.getsize("big") <= 2 << 20
"""
    ok(program, means, dataclasses.replace(ROOMY, file_mb=2))


def full_folder(means: Any) -> None:
    """Many files, each of which may be there, come to an end, also in a folder that cannot be listed."""
    limits = dataclasses.replace(ROOMY, file_mb=1)
    megabytes = "for i in range(9999):\n    with open(str(i), 'wb') as f: f.write(b'x' * (1 << 20))"
    for program in (
        megabytes,
        "import os\nos.mkdir('d', 0o300)\nos.chdir('d')\n" + megabytes,
        "for i in range(999999): open(str(i), 'w').close()",
        "import os\nopen('a', 'w').close()\nfor i in range(999999): os.symlink('a', str(i))",
    ):
        result = run_code(program, limits, means=means)
        assert not result.passed, (program, result)
        if means == "seccomp":
            assert (result.outcome, result.exit_code) == ("killed", None), (program, result)
            assert result.stderr.endswith("or were more than 4096\n"), result
        else:
            assert "No space left on device" in result.stderr, result
    few = "import time\nopen('6', 'w').close()\n" + megabytes.replace("9999", "6")
    ok(f"{few}\nfor i in range(7, 4000): open(str(i), 'w').close()\ntime.sleep(0.3)", means, limits)


def daemons(means: Any) -> None:
    name = fresh_name()
    program = named(name) + (
        "import signal, time\nr, w = os.pipe()\nif os.fork() == 0:\n    try: os.setsid()\n    except OSError: pass\n"
        "    signal.signal(signal.SIGHUP, signal.SIG_IGN)\n    if os.fork() == 0:\n        os.write(w, b'x')\n"
        "        os.closerange(0, 255)\n        time.sleep(600)\n    os._exit(0)\nos.read(r, 1)\n"
    )
    ok(program, means)
    assert not alive(name)
    assert run_code(program + "time.sleep(600)", Limits(timeout_s=2.0), means=means).outcome == "timeout"
    assert not alive(name)


def killed_from_outside(means: Any) -> None:
    """With the process that asked for a run goes the run."""
    name = fresh_name()
    program = named(name) + "import time\nopen('x', 'w').close()\nos.fork()\ntime.sleep(600)"
    folder = tempfile.mkdtemp()
    asking = os.fork()
    if asking == 0:
        try:
            tempfile.mkdtemp = lambda **_: folder  # type: ignore[assignment, misc]
            run_code(program, Limits(timeout_s=500.0), means=means)
        finally:
            os._exit(0)
    end = time.monotonic() + 60.0
    while len(alive(name)) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(asking, signal.SIGKILL)
    os.waitpid(asking, 0)
    while alive(name) or os.path.exists(folder):
        assert time.monotonic() < end, alive(name)
        time.sleep(0.05)


def folder_removed(means: Any) -> None:
    made: list[str] = []
    original = tempfile.mkdtemp

    def spy(*args: Any, **kwargs: Any) -> str:
        made.append(original(*args, **kwargs))
        return made[-1]

    tempfile.mkdtemp = spy
    hard = "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')\nos.mkdir('shut', 0)\n"
    try:
        ok("open('a', 'w').write('x')\nimport os\nos.makedirs('b/c')\nos.mkdir('b/shut', 0)", means)
        ok(hard, means)
        run_code("open('a', 'w').write('x')\nwhile True: pass", Limits(timeout_s=1.0), means=means)
    finally:
        tempfile.mkdtemp = original
    assert len(made) == 3
    assert not [folder for folder in made if os.path.lexists(folder)]


def eight_at_a_time(means: Any) -> None:
    programs = [f"import time\ntime.sleep(0.5)\nprint({i})\nassert {i} % 5" for i in range(16)]
    results = run_many(programs, ROOMY, 8, means=means)
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(16)]
    assert [result.passed for result in results] == [i % 5 != 0 for i in range(16)]


def killed_by_signal(means: Any) -> None:
    result = run_code("import os, signal\nsignal.raise_signal(signal.SIGSEGV)", ROOMY, means=means)
    assert (result.outcome, result.exit_code) == ("killed", None)


def refused(means: Any) -> None:
    """Nothing runs, neither by default nor when asked for by name."""
    del means
    with contextlib.suppress(ConfigError):
        raise AssertionError(check_sandbox())
    for wanted in (None, "namespaces", "seccomp"):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)
            try:
                result = run_code(f"open({folder + '/ran'!r}, 'w')", ROOMY, means=wanted)  # type: ignore[arg-type]
            except SandboxError as error:
                words = str(error)
            else:
                raise AssertionError(result)
            assert "\n" not in words
            assert not os.listdir(folder)


def chosen(means: Any) -> None:
    """What is found by trying is the means that is left."""
    assert check_sandbox().means == means, check_sandbox()
    assert check_sandbox().user == (os.geteuid() == 0 and linux.spare_user() is not None)
    ok("pass", None)


CASES: dict[str, Callable[[Any], None]] = {
    case.__name__: case
    for case in (
        plain_programs, failures, early_exit, endless_loop, processor_time, fork_bomb, number_of_processes,
        busy_user, allocation, allocation_by_many, deletion, reading, network, environment, signals, more_rights,
        output_flood, huge_file, full_folder, daemons, killed_from_outside, folder_removed, eight_at_a_time,
        killed_by_signal,
    )
}  # fmt: skip


def deny(names: list[str]) -> None:
    """Makes this machine one that lacks something: a filter answers EPERM for it from here on."""
    column = 0 if os.uname().machine == "x86_64" else 1
    eperm = calls._refuse(1)
    steps: list[calls.Step] = [(calls._LOAD, 0, 0, calls._NR)]
    for name in names:
        if name == "namespaces":
            steps += calls._when(calls.COMMON["unshare"][column], [eperm])
        elif name == "landlock":
            steps += calls._when(444, [eperm])
        else:  # prctl(PR_SET_SECCOMP)
            prctl = (157, 167)[column]
            allow = (calls._RETURN, 0, 0, calls._ALLOW)
            steps += calls._when(prctl, [calls._argument(0), (calls._EQUAL, 0, 1, 22), eperm, allow])
    steps.append((calls._RETURN, 0, 0, calls._ALLOW))
    import struct

    calls.install(b"".join(struct.pack("=HBBI", *step) for step in steps))


def main() -> None:
    means, case, denied = sys.argv[1:4]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if denied != "-":
        deny(denied.split(","))
    {**CASES, "refused": refused, "chosen": chosen}[case](None if means == "-" else means)


if __name__ == "__main__":
    main()
