"""One ScienceWorld simulator in a Java process of its own, spoken to over py4j.

The package's `ScienceWorldEnv` is not used: each of its steps lists all valid actions, and its Java process has no
memory bound. The process here

- holds one simulator, since two threads in one process disturb each other;
- ends when its standard input closes, that is with this process, however that one ends;
- listens on a loopback port, and only to who knows a token that it prints at its start;
- stands in a session of its own, so that a Ctrl-C in a terminal does not end it in the middle of a step;
- gives the same observations for the same variation and actions. The simulator seeds its generator with the variation,
  but it walks through sets in the order of identity hashes, and that order reaches the draws. So the hashes are made
  constant (`-XX:hashCode=2`). Without it hardly any two loads are alike, and neither the rollouts of a group nor a
  replayed prefix would see one world. Throughput is the same either way.

Every way in which a process can fail becomes a `SimulatorFaultError`; after one the process is of no more use.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import queue
import re
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, Literal

from racelab.experiments.tasks.scienceworld.installation import Installation

_START_S: Final = 60.0  # a start takes one second on an idle machine
_EXIT_S: Final = 1.0  # how long a process whose socket broke may take to be seen as ended
_HUNG_SHARE: Final = 0.9  # of the time-out: what failed later than that did so because of the time-out

FaultKind = Literal["start", "dead", "hung", "error"]


class SimulatorFaultError(Exception):
    """A simulator that cannot be used any more.

    Attributes:
        kind: start (it never came up); dead (its process ended); hung (no answer in time); error (it raised, or
            refused to load).
    """

    def __init__(self, kind: FaultKind, message: str) -> None:
        """Keeps the kind beside the message."""
        super().__init__(message)
        self.kind: FaultKind = kind


@dataclass(frozen=True, slots=True)
class State:
    """What the simulator says after a command.

    Attributes:
        text: the observation.
        score: as the simulator has it now: 0 to 1, or -1 after a mistake that ends the task.
        completed: the task is done.
        moves: the simulator's clock.
    """

    text: str
    score: float
    completed: bool
    moves: int


class Simulator:
    """One running process. Used by one thread at a time."""

    def __init__(self, installation: Installation, heap_mb: int, timeout_s: float) -> None:
        """Starts the process and waits until it listens.

        Args:
            installation: see `find_installation`.
            heap_mb: the most that Java may take for its objects; the process is about 120 MB larger.
            timeout_s: for each answer.

        Raises:
            SimulatorFaultError: it did not come up.
        """
        self._timeout_s = timeout_s
        self.fault = ""
        """Why it cannot be used any more; "" while it can."""
        self._errors: deque[str] = deque(maxlen=20)
        # the simulator writes a list of its object types into the folder that it runs in
        self._scratch = tempfile.TemporaryDirectory(
            prefix="racelab-scienceworld-", ignore_cleanup_errors=True
        )
        self._process = _launch(installation, heap_mb, self._scratch.name)
        try:
            port, token = self._address()
            self._gateway = _connect(port, token, timeout_s)
            self._simulator = self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        except BaseException as error:
            self.close()
            if isinstance(error, SimulatorFaultError) or not isinstance(error, Exception):
                raise
            raise SimulatorFaultError("start", f"the simulator did not come up: {_line(error)}") from error

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can still be used, as far as can be seen without asking it."""
        return not self.fault and self._process.poll() is None

    def load(self, task: str, variation: int, simplification: str) -> str:
        """Builds the world of one variation.

        Args:
            task: one of the package's names.
            variation: of the task.
            simplification: such as `easy`.

        Returns:
            The task's instruction.

        Raises:
            SimulatorFaultError: the process failed, or does not know the task or the variation.
        """
        refusal = str(self._ask(self._simulator.load, task, variation, simplification, False))
        if refusal:
            self.fault = "error"
            raise SimulatorFaultError("error", f"cannot load {task} {variation}: {refusal}")
        return str(self._ask(self._simulator.getTaskDescription))

    def step(self, command: str) -> State:
        """Sends one command.

        Raises:
            SimulatorFaultError: the process failed.
        """
        ask, of = self._ask, self._simulator
        text = str(ask(of.step, command))
        return State(text, float(ask(of.getScore)), bool(ask(of.getCompleted)), int(ask(of.getNumMoves)))

    def templates(self) -> tuple[str, ...]:
        """The commands that the loaded task knows, as `open OBJ`, sorted; see `step` for what it raises."""
        listed = json.loads(str(self._ask(self._simulator.getPossibleActionsWithIDs)))
        return tuple(sorted(str(entry["action_example"]) for entry in listed))

    def variations(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The train and dev variations of the loaded task; see `step` for what it raises."""
        of = self._simulator
        return self._numbers(of.getVariationsTrain), self._numbers(of.getVariationsDev)

    def close(self) -> None:
        """Ends the process. May be called twice."""
        self.fault = self.fault or "closed"
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        self._scratch.cleanup()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        gateway = getattr(self, "_gateway", None)
        if gateway is not None:
            with contextlib.suppress(Exception):
                gateway.close()

    def _numbers(self, method: Any) -> tuple[int, ...]:
        listed = self._ask(method)
        text = str(self._ask(listed.toString))  # one question instead of one per number
        return tuple(int(number) for number in re.findall(r"-?\d+", text))

    def _ask(self, method: Any, *arguments: object) -> Any:
        """Calls a method of the process.

        Raises:
            SimulatorFaultError: it has failed before, or does now.
        """
        if self.fault:
            raise SimulatorFaultError("dead", f"the simulator cannot be used any more ({self.fault})")
        started = time.monotonic()
        self.fault = (
            "interrupted"  # stays if this thread is torn away, since the answer would stay in the pipe
        )
        try:
            answer = method(*arguments)
        except Exception as error:
            kind = self._kind(error, time.monotonic() - started)
            self.fault = kind
            raise SimulatorFaultError(kind, f"the simulator failed ({kind}): {_line(error)}") from error
        self.fault = ""
        return answer

    def _kind(self, error: Exception, seconds: float) -> FaultKind:
        if type(error).__name__ == "Py4JJavaError":
            return "error"
        if seconds >= _HUNG_SHARE * self._timeout_s:
            return "hung"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
            return "dead"
        return "error"

    def _address(self) -> tuple[int, str]:
        """Port and token, which the process prints on two lines; what else it prints before is passed over."""
        lines: queue.Queue[str | None] = queue.Queue()
        readers = []
        for stream, keep in ((self._process.stdout, lines), (self._process.stderr, None)):
            assert stream is not None
            reader = threading.Thread(
                target=_drain, args=(stream, keep, self._errors), name="racelab-scienceworld", daemon=True
            )
            reader.start()
            readers.append(reader)
        until, found = time.monotonic() + _START_S, list[str]()
        while len(found) < 2:
            try:
                line = lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise SimulatorFaultError("start", f"no word from Java in {_START_S:.0f} s") from None
            if line is None:
                self._process.wait(_START_S)
                for reader in readers:  # what it complained of may still be on its way
                    reader.join(1.0)
                said = "; ".join(self._errors) or f"exit status {self._process.returncode}"
                raise SimulatorFaultError("start", f"Java ended at once: {said[:400]}")
            if found or line.isdecimal():
                found.append(line)
            else:
                self._errors.append(line)
        return int(found[0]), found[1]


def _launch(installation: Installation, heap_mb: int, folder: str) -> subprocess.Popen[str]:
    command = [
        installation.java,
        f"-Xmx{heap_mb}m",
        "-XX:+UseSerialGC",
        "-XX:+ExitOnOutOfMemoryError",
        "-XX:-UsePerfData",  # leaves a file behind where a process is killed
        "-XX:+IgnoreUnrecognizedVMOptions",  # the next one is HotSpot's own
        "-XX:+UnlockExperimentalVMOptions",
        "-XX:hashCode=2",
        "-classpath",
        os.pathsep.join((str(installation.gateway_jar), str(installation.jar))),
        "py4j.GatewayServer",
        "--die-on-broken-pipe",
        "--enable-auth",
        "0",
    ]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise SimulatorFaultError(
            "start", f"cannot run {installation.java}: {error.strerror or error}"
        ) from error


def _drain(stream: IO[str], lines: queue.Queue[str | None] | None, errors: deque[str]) -> None:
    """Reads to the end, so that the process never waits for a reader; passes the first lines on."""
    left = 50 if lines is not None else 0
    with contextlib.suppress(OSError, ValueError):
        for line in stream:
            if lines is None:
                errors.append(line.strip())
            elif left:
                left -= 1
                lines.put(line.strip())
    if lines is not None:
        lines.put(None)
    with contextlib.suppress(OSError):
        stream.close()


def _connect(port: int, token: str, timeout_s: float) -> Any:
    """A py4j gateway that neither tries again on its own nor writes to the log.

    py4j's own client repeats a failed command (a step could happen twice) and reports it through the root logger.
    Its memory management is off: it talks to the process from finalizers, in whatever thread they run.
    """
    py4j = importlib.import_module("py4j.java_gateway")
    logger = logging.getLogger("py4j")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    parameters = py4j.GatewayParameters(
        port=port, auth_token=token, read_timeout=timeout_s, enable_memory_management=False
    )
    gateway = py4j.JavaGateway(gateway_parameters=parameters)
    client = gateway._gateway_client

    def send(command: str, retry: bool = True, binary: bool = False) -> Any:
        connection = client._get_connection()
        try:
            answer = connection.send_command(command)
        except BaseException:
            connection.close(True)
            raise
        client._give_back_connection(connection)
        return answer

    client.send_command = send
    return gateway


def _line(error: BaseException) -> str:
    """The first line of what it says, and of what caused it."""
    chain: Sequence[BaseException] = [
        e for e in (error, getattr(error, "cause", None)) if isinstance(e, BaseException)
    ]
    return "; ".join(str(e).strip().partition("\n")[0] or type(e).__name__ for e in chain)
