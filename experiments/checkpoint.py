"""Checkpoints that are either whole or not there.

`step-00000012/` holds `tensors.safetensors`, `state.json` and `manifest.json` (sizes and SHA-256 of the two).
It is written under another name, flushed to the disk and renamed, so no reader ever sees a part of one.
Loading checks the hashes and executes nothing that is stored. Torch is imported by the methods that need it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import queue
import re
import shutil
import struct
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from racelab.experiments import fence
from racelab.experiments.errors import CheckpointError, RunFolderError
from racelab.experiments.fsio import explain, now_iso, remove_tree, rename, unique, write_json_atomic

if TYPE_CHECKING:
    import torch

SCHEMA: Final = 1
TENSORS: Final = "tensors.safetensors"
STATE: Final = "state.json"
MANIFEST: Final = "manifest.json"
_STEP: Final = re.compile(r"step-(\d{8,})")
_RESERVE_BYTES: Final = 16 << 20  # manifest, state and the spool's next lines
_CHUNK: Final = 8 << 20
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        step: global update step.
        tensors: on the CPU, by name.
        state: the JSON state, as given to `save`.
        score: as given to `save`.
        path: its folder.
        skipped: newer checkpoints that were damaged and passed over, one line each.
    """

    step: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]
    score: float | None
    path: Path
    skipped: tuple[str, ...] = ()


class CheckpointStore:
    """The checkpoints of one run; one process writes at a time (it holds the run's lock).

    Example: with `keep_last=2` and scores 0.1, 0.9, 0.3, 0.2 at steps 1-4, steps 2 (best), 3 and 4 remain.
    """

    def __init__(
        self, folder: str | os.PathLike[str], keep_last: int = 2, pinned: Collection[int] = ()
    ) -> None:
        """Keeps the rules.

        Args:
            folder: made if missing.
            keep_last: at least 1; the best by score is kept besides.
            pinned: steps whose checkpoints, once saved, are kept for ever and not counted among the last.

        Raises:
            CheckpointError: `keep_last` is below 1.
        """
        if keep_last < 1:
            raise CheckpointError(f"keep_last is {keep_last}; at least 1 checkpoint must be kept")
        self.folder = Path(folder).absolute()
        self.keep_last = keep_last
        self.pinned = frozenset(pinned)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        return sorted(self._paths())

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is or would be."""
        return self.folder / f"step-{step:08d}"

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
        score: float | None = None,
    ) -> Path:
        """Writes a checkpoint, then removes those that need not be kept.

        Args:
            step: replaces an earlier checkpoint of the same step.
            tensors: any device, any strides; written as they are.
            state: JSON values.
            score: higher is better; None or NaN takes no part in the choice of the best.

        Raises:
            CheckpointError: not enough space, or the state has no JSON form. The checkpoints there before are
                intact and nothing half-written is left.
            FencedError: this process was replaced; no checkpoint has been put in place or removed.
        """
        fence.check(self.folder)  # now, rather than after minutes of writing
        body = _state_bytes(state)
        header, ordered = _header(tensors)
        need = len(header) + sum(t.numel() * t.element_size() for _, t in ordered) + len(body)
        temporary = self.folder / f".tmp-{self.path(step).name}-{unique()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._recover()
            self._check_space(need)
            temporary.mkdir()
            files = {
                TENSORS: _write_tensors(temporary / TENSORS, header, ordered),
                STATE: _write_bytes(temporary / STATE, body),
            }
            manifest = {
                "schema": SCHEMA, "step": step, "score": _real(score), "saved": now_iso(), "files": files,
            }  # fmt: skip
            write_json_atomic(temporary / MANIFEST, manifest)
            _fsync_folder(temporary)
            self._put_in_place(temporary, self.path(step))
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"cannot save checkpoint {self.path(step)}: {explain(error)}") from error
        except RunFolderError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"cannot save checkpoint {self.path(step)}: {error}") from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune(newest=step)
        return self.path(step)

    def load_latest(self) -> Checkpoint:
        """The newest undamaged checkpoint; each damaged one passed over is logged as a warning.

        Raises:
            CheckpointError: there is none.
        """
        return self._load_first(self.steps()[::-1])

    def load(self, step: int, *, fallback: bool = False) -> Checkpoint:
        """The checkpoint of `step`.

        Args:
            step: must be one of `steps()`.
            fallback: if it is damaged, take the newest undamaged one before it, with a warning.

        Raises:
            CheckpointError: there is none, or it is damaged (and, with `fallback`, all before it).
        """
        steps = self.steps()
        if step not in steps:
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.folder}; there are {steps or 'none'}"
            )
        if fallback:
            return self._load_first([s for s in steps[::-1] if s <= step])
        try:
            return self._load(step)
        except CheckpointError as error:
            others = [s for s in steps if s != step]
            raise CheckpointError(f"{error}; take another of {others}" if others else str(error)) from error

    def best(self) -> int | None:
        """Step of the highest score (the later one of equals), None if no checkpoint has a score."""
        return self._best(self.steps())

    def _best(self, steps: list[int]) -> int | None:
        scored = {step: self._score(step) for step in steps}
        known = [(score, step) for step, score in scored.items() if score is not None]
        return max(known)[1] if known else None

    def _load_first(self, candidates: list[int]) -> Checkpoint:
        skipped: list[str] = []
        for step in candidates:
            try:
                loaded = self._load(step)
            except CheckpointError as error:
                _LOG.warning("%s; falling back to an earlier checkpoint", error)
                skipped.append(str(error))
            else:
                return Checkpoint(
                    step, loaded.tensors, loaded.state, loaded.score, loaded.path, tuple(skipped)
                )
        why = f"all are damaged ({skipped[0]})" if skipped else "none has been saved"
        raise CheckpointError(f"no usable checkpoint in {self.folder}: {why}; start the run afresh")

    def _load(self, step: int) -> Checkpoint:
        import safetensors
        from safetensors.torch import load_file

        folder = self._paths()[step]
        manifest = _manifest(folder)
        for name in (TENSORS, STATE):
            _verify(folder / name, manifest["files"].get(name))
        try:
            tensors = load_file(folder / TENSORS)
            state = json.loads((folder / STATE).read_bytes())
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error
        return Checkpoint(int(manifest["step"]), tensors, state, manifest["score"], folder)

    def _score(self, step: int) -> float | None:
        try:
            return _real(_manifest(self._paths()[step])["score"])
        except CheckpointError:
            return None

    def _paths(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        found: dict[int, Path] = {}
        for path in self.folder.iterdir():
            # a step being replaced has for an instant only its old folder
            match = _STEP.fullmatch(path.name.removeprefix(".old-"))
            if match and (path.name[0] != "." or int(match[1]) not in found):
                found[int(match[1])] = path
        return found

    def _check_space(self, need: int) -> None:
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if free < need + _RESERVE_BYTES:
            raise CheckpointError(
                f"no space for a checkpoint in {self.folder}: {need + _RESERVE_BYTES:,} bytes needed, "
                f"{free:,} free; free some and resume the run, or lower the number of checkpoints kept"
            )

    def _put_in_place(self, temporary: Path, target: Path) -> None:
        old = self.folder / f".old-{target.name}"
        if target.exists():
            rename(target, old)
        rename(temporary, target)
        _fsync_folder(self.folder)
        remove_tree(old)

    def _recover(self) -> None:
        """Tidies what a killed process left: parts go, a step caught while replaced gets its name back."""
        for path in self.folder.glob(".tmp-step-*"):
            remove_tree(path)
        for path in self.folder.glob(".old-step-*"):
            target = self.folder / path.name.removeprefix(".old-")
            if target.exists():
                remove_tree(path)
            else:
                rename(path, target)

    def _prune(self, newest: int) -> None:
        """Keeps the last `keep_last` up to `newest`, the best of all, and the pinned ones.

        A checkpoint of a later step than the one just saved belongs to an attempt that was redone: it goes.
        """
        steps = self.steps()
        valid = [step for step in steps if step <= newest]
        free = [step for step in valid if step not in self.pinned]
        keep = {*free[-self.keep_last :], self._best(valid), *self.pinned.intersection(valid)}
        for step in steps:
            if step not in keep:
                # renamed first: a half-removed folder must not look like a checkpoint
                doomed = self.folder / f".tmp-{self.path(step).name}-gone"
                with contextlib.suppress(OSError):
                    rename(self.path(step), doomed)
                remove_tree(doomed)


def _real(score: float | None) -> float | None:
    return None if score is None or not math.isfinite(score) else float(score)


def _state_bytes(state: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(state, allow_nan=True, ensure_ascii=False, sort_keys=True).encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's state has no JSON form: {error}") from error


def _header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[tuple[str, torch.Tensor]]]:
    """The safetensors header (8-byte length, JSON, padding to 8 bytes) and the tensors in file order.

    Widest dtypes come first, as the format's own writer does, so that every tensor lies aligned.
    """
    import torch

    names = {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
        torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
        torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    }  # fmt: skip
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    entries: dict[str, Any] = {}
    position = 0
    for name, tensor in ordered:
        if tensor.dtype not in names:
            raise CheckpointError(f"tensor {name!r} has dtype {tensor.dtype}, which checkpoints cannot hold")
        size = tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, ordered


def _chunks(header: bytes, ordered: list[tuple[str, torch.Tensor]]) -> Iterator[memoryview]:
    import torch

    yield memoryview(header)
    for _, tensor in ordered:
        if tensor.numel() == 0:
            continue
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        view = flat.numpy().data
        for start in range(0, len(view), _CHUNK):
            yield view[start : start + _CHUNK]


def _write_tensors(path: Path, header: bytes, ordered: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Writes the file while a second thread hashes the same chunks (hashlib lets go of the interpreter)."""
    digest = hashlib.sha256()
    todo: queue.Queue[memoryview | None] = queue.Queue(maxsize=4)

    def hash_all() -> None:
        while (chunk := todo.get()) is not None:
            digest.update(chunk)

    hasher = threading.Thread(target=hash_all, name="racelab-checkpoint-hash", daemon=True)
    hasher.start()
    size = 0
    try:
        with open(path, "wb", buffering=0) as handle:
            for chunk in _chunks(header, ordered):
                todo.put(chunk)
                _write_fully(handle.fileno(), chunk)
                size += len(chunk)
            os.fsync(handle.fileno())
    finally:
        todo.put(None)
        hasher.join()
    return {"bytes": size, "sha256": digest.hexdigest()}


def _write_fully(fd: int, chunk: memoryview) -> None:
    done = 0
    while done < len(chunk):
        done += os.write(fd, chunk[done:])


def _write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    with open(path, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _fsync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {MANIFEST} cannot be read ({error})"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise CheckpointError(
            f"checkpoint {folder} has another schema than {SCHEMA}; use the racelab it is from"
        )
    if not {"step", "score", "files"} <= manifest.keys():
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} lacks step, score or files")
    return manifest


def _verify(path: Path, entry: Mapping[str, Any] | None) -> None:
    if entry is None:
        raise CheckpointError(f"checkpoint {path.parent} is damaged: {MANIFEST} does not list {path.name}")
    digest = hashlib.sha256()
    size = 0
    try:
        with open(path, "rb", buffering=0) as handle:
            while data := handle.read(_CHUNK):
                digest.update(data)
                size += len(data)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path.parent} is damaged: {path.name}: {explain(error)}"
        ) from error
    if size != entry["bytes"]:
        raise CheckpointError(f"checkpoint {path} is damaged: {size} bytes instead of {entry['bytes']}")
    if digest.hexdigest() != entry["sha256"]:
        raise CheckpointError(f"checkpoint {path} is damaged: its SHA-256 differs from {MANIFEST}")
