r"""Documents parsed in processes of their own.

The libraries that read pages and PDFs take time or memory without bound on some input, in part inside one regular
expression, during which no other thread of the process runs: 100 KB of `\(` in a paragraph are enough. So each
document goes to a process that is killed when it takes too long. It is kept for the next document otherwise, since a
start takes some tenths of a second.

Such a process gets no environment but what Python needs to start (no keys), has a memory bound, stands in a session of
its own, so that a Ctrl-C in a terminal does not reach it, and ends when its standard input closes, that is with this
process, however that one ends.

Each way it is one line of JSON; to the process, the bytes of the document follow.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping
from typing import IO, Any, Final

from racelab.experiments.tasks.deepresearch.documents import Document, html_document, pdf_document
from racelab.experiments.tasks.deepresearch.faults import Deadline, FaultError, Gate

LONGEST_S: Final = 20.0
"""For one document. An ordinary one takes a tenth of a second."""
_MEMORY: Final = 4 << 30
_PLACES: Final = 8
_ENVIRONMENT: Final = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL", "TMPDIR")


class Parsers:
    """A few processes, started when there is work; thread-safe."""

    def __init__(self, *, longest_s: float = LONGEST_S) -> None:
        """Starts none yet; there are never more than the machine has cores, and 8 at most."""
        self._longest_s = longest_s
        self._gate = Gate(min(os.cpu_count() or 1, _PLACES))
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._closed = False

    def page(
        self, data: bytes, charset: str, content_type: str, *, max_chars: int, deadline: Deadline
    ) -> Document:
        """As `html_document`.

        Raises:
            FaultError: as it does; `timeout`; `unreadable` also where the process ends.
        """
        job = {"kind": "page", "charset": charset, "type": content_type, "max_chars": max_chars}
        return self._run(job, data, deadline)

    def pdf(self, data: bytes, *, max_chars: int, deadline: Deadline) -> Document:
        """As `pdf_document`. Raises: as `page`."""
        return self._run({"kind": "pdf", "max_chars": max_chars}, data, deadline)

    def close(self) -> None:
        """Ends the processes; one at work ends with its document."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)

    def _run(self, job: Mapping[str, object], data: bytes, deadline: Deadline) -> Document:
        reply = self._gate.run(lambda: self._ask(job, data, deadline), deadline)
        if "fault" in reply:
            raise FaultError(reply["fault"], reply["why"])
        return Document(reply["title"], reply["text"], reply["cut"])

    def _ask(self, job: Mapping[str, object], data: bytes, deadline: Deadline) -> dict[str, Any]:
        deadline.check()
        seconds = min(self._longest_s, deadline.left)
        process, late = self._take(), threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            reply = _exchange(process, {**job, "seconds": seconds, "bytes": len(data)}, data)
        except (OSError, ValueError):  # it has ended, within the line or before
            _end(process)
            if late.is_set():
                raise FaultError("timeout", "the document takes too long to read") from None
            raise FaultError("unreadable", "the document cannot be read") from None
        except BaseException:
            _end(process)
            raise
        finally:
            timer.cancel()
            timer.join()
        if late.is_set():  # just after it had answered
            _end(process)
        else:
            self._put(process)
        return reply

    def _take(self) -> subprocess.Popen[bytes]:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.poll() is None:
                    return process
                _end(process)
        return _start()

    def _put(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        _end(process)


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        start_new_session=True,
    )


def _exchange(process: subprocess.Popen[bytes], job: Mapping[str, object], data: bytes) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(job).encode() + b"\n")
    process.stdin.write(data)
    process.stdin.flush()
    reply: dict[str, Any] = json.loads(process.stdout.readline())  # of nothing: a ValueError
    return reply


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written yet
                pipe.close()
    process.wait()


# --- inside the process -------------------------------------------------------------------------------------------


def serve(jobs: IO[bytes], replies: IO[bytes]) -> None:
    """Answers one job after another until there are no more."""
    while line := jobs.readline():
        job = json.loads(line)
        data = jobs.read(job["bytes"])
        signal.alarm(int(job["seconds"]) + 2)  # should the process that waits be gone
        reply = _reply(job, data)
        signal.alarm(0)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _reply(job: Mapping[str, Any], data: bytes) -> dict[str, object]:
    longest = job["max_chars"]
    try:
        if job["kind"] == "pdf":
            found = pdf_document(data, max_chars=longest, deadline=Deadline.after(job["seconds"]))
        else:
            found = html_document(data, job["charset"], job["type"], max_chars=longest)
    except FaultError as fault:
        return {"fault": fault.kind, "why": str(fault)}
    return {"title": found.title, "text": found.text, "cut": found.cut}


def main() -> None:
    """The process: jobs come from standard input; what a library prints is dropped."""
    import resource

    with contextlib.suppress(OSError, ValueError):  # not every system takes it
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    warnings.simplefilter("ignore")
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
