"""This side of a run: starts the first process, bounds what it prints, and removes what it leaves."""

from __future__ import annotations

import functools
import marshal
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from racelab.experiments.evaluation.sandbox.types import CodeResult, Limits, Means, Outcome, SandboxError

_BOX = "racelab.experiments.evaluation.sandbox.box"
_PARTS = (
    "",
    "linux",
    "filter",
    "landlock",
    "places",
    "namespaces",
    "program",
    "stored",
    "supervise",
    "launch",
)
"""In the order in which they need each other."""
_BOOT = """
import marshal, sys
modules, job = marshal.load(sys.stdin.buffer)
for name, code in modules:
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
    package, _, last = name.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], last, module)
module.main(job)
"""
_GRACE_S = 60.0
"""The far side ends every run in time by itself; after this long it is taken for stuck."""
_LIBRARIES = "LD_LIBRARY_PATH"
_WHY = {
    "files": "its files held more than eight times file_mb together, or were more than 4096",
    "processes": "it had more processes and threads than it may",
}
"""What is added to the standard error of a program that was killed for a reason that its status does not show."""


class RefusedError(SandboxError):
    """The machine does not give what confines the code; nothing was run."""


@dataclass(slots=True)
class _Heard:
    """What came through the three pipes."""

    stdout: bytearray
    stderr: bytearray
    report: bytearray


def execute(program: str, limits: Limits, means: Means) -> CodeResult:
    """Runs a program by one means.

    Raises:
        RefusedError: this means is not to be had here; the message says which call was refused.
        SandboxError: the run could not be started or came to no end.
    """
    start = time.monotonic()
    with _folder() as folder:
        report, reporter = os.pipe()
        job = _job(program, limits, means, folder, reporter)
        try:
            process = _start(reporter)
        except OSError as error:
            os.close(report)
            raise SandboxError(f"sandbox: {sys.executable or 'python'} cannot be started: {error}") from None
        finally:
            os.close(reporter)
        heard = _Heard(bytearray(), bytearray(), bytearray())
        try:
            with suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.write(job)
                process.stdin.flush()
            _listen(process, report, heard, limits)
        finally:
            os.close(report)
            _end(process, heard)
    return _result(heard, limits, time.monotonic() - start)


def _start(reporter: int) -> subprocess.Popen[bytes]:
    """A bare interpreter: no environment, no site-packages, no open files, no terminal."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-E", "-X", "utf8", "-c", _BOOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={_LIBRARIES: os.environ[_LIBRARIES]} if _LIBRARIES in os.environ else {},
        cwd="/",
        pass_fds=(reporter,),
        start_new_session=True,
    )


def _job(program: str, limits: Limits, means: Means, folder: str, reporter: int) -> bytes:
    """See `box.supervise.Job`."""
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    job = {
        "program": program,
        "means": means,
        "folder": folder,
        "python": sorted({os.path.abspath(path) for path in (*prefixes, *packages)}),
        "packages": packages,
        "report": reporter,
        "timeout_s": limits.timeout_s,
        "cpu_s": limits.cpu_s,
        "memory_mb": limits.memory_mb,
        "file_mb": limits.file_mb,
        "processes": limits.processes,
    }
    try:
        return marshal.dumps((_parts(), job))
    except (ValueError, UnicodeEncodeError) as error:
        raise SandboxError(f"sandbox: the program cannot be sent: {error}") from None


@functools.cache
def _parts() -> tuple[tuple[str, CodeType], ...]:
    """The far side's modules, compiled."""
    parts = []
    for part in _PARTS:
        path = Path(__file__).parent / "box" / f"{part or '__init__'}.py"
        code = compile(path.read_bytes(), f"<{part or 'box'}>", "exec", dont_inherit=True)
        parts.append((f"{_BOX}.{part}" if part else _BOX, code))
    return tuple(parts)


@contextmanager
def _folder() -> Iterator[str]:
    """The run's own empty folder; removed with all that is in it.

    For root it stands in /tmp, because another user must be able to walk there.
    """
    shared = "/tmp" if os.geteuid() == 0 and os.path.isdir("/tmp") else None
    try:
        folder = os.path.realpath(tempfile.mkdtemp(prefix="racelab-code-", dir=shared))
    except OSError as error:
        raise SandboxError(f"sandbox: no temporary folder: {error}; set TMPDIR to one with space") from None
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: str) -> None:
    """Removes a tree that was left by somebody who may have made it hard: no rights, or very deep."""
    with suppress(OSError):
        os.rmdir(folder)  # nearly always empty
        return
    with suppress(OSError, RecursionError):
        shutil.rmtree(folder)
        return
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        subprocess.run([*command, "--", folder], check=False, stderr=subprocess.DEVNULL)


def _listen(process: subprocess.Popen[bytes], report: int, heard: _Heard, limits: Limits) -> None:
    """Reads all three pipes to their ends, and keeps no more than `output_bytes` of what the program prints."""
    assert process.stdout is not None
    assert process.stderr is not None
    end = time.monotonic() + limits.timeout_s + _GRACE_S
    with selectors.DefaultSelector() as ready:
        for place, into, most in (
            (process.stdout.fileno(), heard.stdout, limits.output_bytes),
            (process.stderr.fileno(), heard.stderr, limits.output_bytes),
            (report, heard.report, 4096),
        ):
            ready.register(place, selectors.EVENT_READ, (into, most))
        while ready.get_map():
            if time.monotonic() > end:
                raise SandboxError(f"sandbox: a run did not end within {limits.timeout_s + _GRACE_S:g} s")
            for key, _ in ready.select(1.0):
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    ready.unregister(key.fd)
                into, most = key.data
                into += chunk[: max(0, most - len(into))]


def _end(process: subprocess.Popen[bytes], heard: _Heard) -> None:
    """The far side ends everything when its standard input closes; if it cannot, it is killed with what it started."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    words = _lines(heard).get("started")
    if process.returncode != 0 and words and words[0] != "0":
        with suppress(OSError):
            os.killpg(int(words[0]), signal.SIGKILL)


def _lines(heard: _Heard) -> dict[str, list[str]]:
    """First word to the others."""
    lines = heard.report.decode("utf-8", "replace").splitlines()
    return {words[0]: words[1:] for words in (line.split(" ") for line in lines)}


def _result(heard: _Heard, limits: Limits, seconds: float) -> CodeResult:
    lines = _lines(heard)
    stdout, stderr = (bytes(kept).decode("utf-8", "replace") for kept in (heard.stdout, heard.stderr))
    if "refused" in lines:
        raise RefusedError(" ".join(lines["refused"]))
    if "started" not in lines:
        last = stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise SandboxError(f"sandbox: {sys.executable} did not start the program: {last[0]}")
    if "ended" not in lines:  # killed from outside, for want of memory, say
        return CodeResult(False, "killed", stdout, stderr, None, seconds)
    facts = lines["ended"]
    status, reason, reached = int(facts[0]), facts[1], facts[2] == "1"
    if reason in _WHY:
        stderr += f"\nracelab: the program was ended: {_WHY[reason]}\n"
    code = (
        os.WEXITSTATUS(status) if status >= 0 and os.WIFEXITED(status) and reason in ("-", "memory") else None
    )
    outcome = _outcome(status, reason, code, reached)
    return CodeResult(outcome == "passed", outcome, stdout, stderr, code, seconds)


def _outcome(status: int, reason: str, code: int | None, reached: bool) -> Outcome:
    """See `CodeResult.outcome`."""
    if reason in ("wall", "cpu"):
        return "timeout"
    if reason == "memory":
        return "memory"
    if code is None:
        by_cpu = status >= 0 and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
        return "timeout" if by_cpu else "killed"
    return "passed" if code == 0 and reached else "failed"
