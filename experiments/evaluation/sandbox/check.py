"""Which means of confinement this machine gives: tried, not guessed."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from contextlib import closing
from typing import get_args

from racelab.experiments.errors import ConfigError
from racelab.experiments.evaluation.sandbox.box.linux import spare_user
from racelab.experiments.evaluation.sandbox.process import execute
from racelab.experiments.evaluation.sandbox.types import Limits, Means, SandboxError, SandboxKind

_lock = threading.Lock()
_known: dict[int, SandboxKind] = {}
_PROBE = """
import os, socket
def reached():
    try:
        open({canary!r}, "r+").close()
        return "a file of the user"
    except OSError:
        pass
    try:
        os.unlink({canary!r})
        return "a file of the user"
    except OSError:
        pass
    try:
        socket.create_connection(("127.0.0.1", {port}), 5)
        return "the network"
    except OSError:
        pass
    if os.environ:
        return "the environment"
    if os.getuid() == 0:
        return "root"
what = reached()
assert not what, what
"""


def check_sandbox() -> SandboxKind:
    """How model-written code is confined here; the first time it is tried with a small program of our own.

    Raises:
        ConfigError: it cannot be confined here; the message says what is missing and what would mend it.
    """
    with _lock:
        user = os.geteuid()
        if user not in _known:
            _known[user] = _find(user == 0 and spare_user() is not None)
        return _known[user]


def _find(own_user: bool) -> SandboxKind:
    refusals = []
    for means in get_args(Means):
        try:
            left = _probe(means)
        except SandboxError as error:
            left = str(error)
        if not left:
            return SandboxKind(means, own_user)
        refusals.append(f"{means}: {left}")
    raise ConfigError(
        f"model-written code cannot be confined on this machine, so it is not run ({'; '.join(refusals)}); allow "
        "user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0), or use a "
        "kernel with Landlock (5.13 or newer, lsm=landlock), or run as an ordinary user, or leave mbpp_plus out of "
        "eval.benchmarks"
    )


def _probe(means: Means) -> str:
    """Runs a program that tries what must fail; returns what it could do, "" if nothing."""
    with (
        tempfile.NamedTemporaryFile(prefix="racelab-canary-") as canary,
        closing(socket.create_server(("127.0.0.1", 0))) as server,
    ):
        os.chmod(canary.name, 0o666)
        program = _PROBE.format(canary=canary.name, port=server.getsockname()[1])
        result = execute(program, Limits(timeout_s=60.0), means)
    if result.passed:
        return ""
    return (
        f"a program of our own {result.outcome}: {(result.stderr.strip().splitlines() or ['no words'])[-1]}"
    )
