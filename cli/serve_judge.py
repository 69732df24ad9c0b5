"""`racelab serve judge`: a model behind OpenAI's chat API, by vLLM where there is one, else by our own local models."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from racelab.cli import serve_vllm
from racelab.cli.console import say
from racelab.cli.http_server import is_loopback
from racelab.cli.serve_chat import bound
from racelab.experiments.errors import ConfigError
from racelab.experiments.models.assets import resolve_model

_EMBEDDED: Final = "smollm2-135m"
_ROWS: Final = 16
_ENGINES: Final = ("auto", "vllm", "transformers")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be served, and where.

    Attributes:
        source: `embedded`, a folder or a hub name.
        name: what clients call it.
        host: address to listen at.
        port: 0: any free one.
        device: `auto`, `cpu`, `cuda` or `cuda:<n>`.
        max_length: tokens, messages and reply together; None: the model's own window.
        key: what clients must send; "": nothing.
        batch: replies decoded at a time; None: the engine's own number.
    """

    source: str
    name: str
    host: str
    port: int
    device: str
    max_length: int | None
    key: str
    batch: int | None


def judge(
    model: str,
    engine: str,
    host: str,
    port: int,
    device: str,
    max_length: int | None,
    vllm: str | None,
    key_env: str,
    batch: int | None,
    name: str | None,
    words: Sequence[str] = (),
) -> int:
    """Serves until SIGINT or SIGTERM, which end the process as for every command (130 and 143).

    The base URL goes to stdout once the model answers. Returns 130 after a SIGINT.

    Raises:
        ConfigError: an option that cannot be, an address that cannot be had or would be open to everybody.
        ModelError: no such model.
        UnreachableError: vLLM did not start, or ended by itself.
    """
    if engine not in _ENGINES:
        raise ConfigError(f"--engine {engine}: no such engine; give {', '.join(_ENGINES)}")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(f"--device {device}: no such device; give auto, cpu, cuda or cuda:1")
    found = None if engine == "transformers" else serve_vllm.find(vllm)
    if engine == "vllm" and found is None:
        raise ConfigError(serve_vllm.ABSENT)
    if found is None and words:
        raise ConfigError(f"{shlex.join(words)}: words for vLLM, which does not run here; leave them out")
    source = _EMBEDDED if model == "embedded" else model
    key = _key(host, key_env)
    wanted = Wanted(source, name or _name(source), host, port, device, max_length, key, batch)
    # A shell that starts a command with `&` has it ignore SIGINT; the handler is installed whatever was inherited.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if found is not None:
            say(f"engine: vLLM ({shlex.join(found.command)})")
            folder = resolve_model(source)
            return serve_vllm.serve(wanted, folder, found, words, lambda url: _told(url, wanted, key_env))
        say(
            f"engine: our own local models{'' if engine == 'transformers' else ' (vLLM is not installed here)'}"
        )
        return _serve(wanted, key_env)
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(wanted: Wanted, key_env: str) -> int:
    """With a model in this process."""
    with bound(wanted.host, wanted.port) as server:  # first: a taken port should not cost the time to load
        import torch

        from racelab.experiments.backends.local.model import open_language_model
        from racelab.experiments.models.chat_batches import Batches

        device = wanted.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = resolve_model(wanted.source)
        model = open_language_model(folder, role="frozen", device=device, window=wanted.max_length)
        server.rows = _ROWS if wanted.batch is None else wanted.batch
        server.batches = Batches(model, rows=server.rows)
        server.name, server.window, server.key = wanted.name, model.window, wanted.key
        try:
            server.listen()
            say(f"{wanted.source} on {device}, window {model.window}, {server.rows} replies at a time")
            _told(server.url, wanted, key_env)
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped")
            return 130
        except SystemExit:  # SIGTERM
            say("stopped")
            raise
        finally:
            server.batches.close()
    return 0


def _told(url: str, wanted: Wanted, key_env: str) -> None:
    """Names the address, and how a run is told of it."""
    words = [f"judge.base_url={url}", f"judge.model={wanted.name}"]
    words += [f"judge.key_env={key_env}"] if key_env else []
    say(f"serving {wanted.name}; Ctrl-C stops it")
    say(f"in a run: racelab train judge=api {shlex.join(words)}")
    print(url, flush=True)


def _name(source: str) -> str:
    """A folder is called by its own name."""
    folder = Path(source).expanduser()
    return folder.resolve().name or source if folder.is_dir() else source


def _key(host: str, key_env: str) -> str:
    """The key that clients must send; "" where none is wanted.

    Raises:
        ConfigError: none is named and others could reach the server, or it is not there or no key.
    """
    if not key_env:
        if not is_loopback(host):
            raise ConfigError(
                f"--host {host}: others could use the model; name the variable that holds a key with --key-env, "
                "or leave --host out"
            )
        return ""
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise ConfigError(
            f'--key-env {key_env}: not set; export {key_env}="$(openssl rand -hex 24)", or leave --key-env out'
        )
    if not re.fullmatch(r"[!-~]+", key):  # it goes into an HTTP header
        raise ConfigError(f"--key-env {key_env}: holds spaces or signs that no key has; export it again")
    return key
