"""Checkpoints are whole or not there."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from racelab.experiments import checkpoint as module
from racelab.experiments import fence
from racelab.experiments.checkpoint import CheckpointStore
from racelab.experiments.errors import CheckpointError, FencedError


def weights(value: float = 1.0, n: int = 8) -> dict[str, torch.Tensor]:
    return {"w": torch.full((n,), value)}


def entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_every_dtype_and_stride_comes_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 4, generator=generator)
    tensors = {
        "f32": base, "transposed": base.t(), "bf16": base.bfloat16(), "f16": base.half(),
        "f64": base.double(),
        "i64": torch.arange(5), "u8": torch.arange(5, dtype=torch.uint8), "bool": base > 0,
        "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "slice": base[1:, 2],
        "gradient": base.clone().requires_grad_(True),
    }  # fmt: skip
    store = CheckpointStore(tmp_path)
    path = store.save(12, tensors, {"rng": [1, 2], "ema": float("nan")}, score=0.5)
    assert path.name == "step-00000012"
    loaded = store.load_latest()
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.tensors[name], tensor.detach()), name
    assert (loaded.step, loaded.score, loaded.state["rng"]) == (12, 0.5, [1, 2])
    assert load_file(path / "tensors.safetensors").keys() == tensors.keys()


def test_every_tensor_lies_aligned_in_the_file(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5), "c": torch.ones(3).half()}
    data = (CheckpointStore(tmp_path).save(1, tensors, {}) / "tensors.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    starts = {name: entry["data_offsets"][0] for name, entry in json.loads(data[8 : 8 + length]).items()}
    assert length % 8 == 0
    assert starts == {"b": 0, "c": 20, "a": 26}


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step, score in [(1, 0.1), (2, 0.9), (3, float("nan")), (4, 0.3), (5, None), (6, 0.9)]:
        store.save(step, weights(step), {}, score)
    assert store.steps() == [5, 6]  # equal scores: the later one is the best
    store.save(7, weights(), {}, 0.2)
    store.save(8, weights(), {}, 0.2)
    assert store.steps() == [6, 7, 8]
    assert store.best() == 6


def test_pinned_steps_stay_for_ever_and_count_for_nobody(tmp_path: Path) -> None:
    """With two kept beside them, the pinned 2 and 5 stay; of the others the last two, and the best (3)."""
    store = CheckpointStore(tmp_path, keep_last=2, pinned=[5, 2, 99])
    for step in range(1, 9):
        store.save(step, weights(step), {}, score=0.9 if step == 3 else 0.1)
    assert store.steps() == [2, 3, 5, 7, 8]
    store.save(9, weights(), {})
    assert store.steps() == [2, 3, 5, 8, 9]
    assert float(store.load(2).tensors["w"][0]) == 2.0


def test_a_pinned_step_of_a_redone_attempt_is_dropped(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, pinned=[2, 6])
    for step in (2, 4, 6, 5):
        store.save(step, weights(), {})
    assert store.steps() == [2, 5]


def test_steps_of_a_redone_attempt_are_dropped(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    for step in (2, 4, 6):
        store.save(step, weights(), {}, score=float(step))
    store.save(5, weights(5.0), {})
    assert store.steps() == [2, 4, 5]
    assert store.load_latest().step == 5


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(3, weights(1.0), {"v": 1})
    store.save(3, weights(2.0), {"v": 2})
    assert store.load(3).state == {"v": 2}
    assert entries(tmp_path) == ["step-00000003"]


def damage_byte(path: Path) -> None:
    data = bytearray((path / "tensors.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "tensors.safetensors").write_bytes(bytes(data))


def damage_cut(path: Path) -> None:
    os.truncate(path / "tensors.safetensors", 10)


def damage_state(path: Path) -> None:
    (path / "state.json").write_text("{}")


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def damage_gone(path: Path) -> None:
    (path / "tensors.safetensors").unlink()


@pytest.mark.parametrize("damage", [damage_byte, damage_cut, damage_state, damage_manifest, damage_gone])
def test_damage_falls_back_with_a_warning(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, weights(1.0), {"v": 1})
    damage(store.save(2, weights(2.0), {"v": 2}))
    with caplog.at_level(logging.WARNING):
        loaded = store.load_latest()
    assert (loaded.step, loaded.state, float(loaded.tensors["w"][0])) == (1, {"v": 1}, 1.0)
    assert len(loaded.skipped) == 1
    assert "step-00000002" in loaded.skipped[0]
    assert "damaged" in loaded.skipped[0]
    assert "falling back" in caplog.text
    assert store.load(2, fallback=True).step == 1
    with pytest.raises(CheckpointError, match=r"step-00000002.*take another of \[1\]"):
        store.load(2)


def test_a_cut_file_is_told_from_a_changed_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(1, weights(), {})
    size = (path / "tensors.safetensors").stat().st_size
    damage_cut(path)
    with pytest.raises(CheckpointError, match=f"10 bytes instead of {size}"):
        store.load(1)


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c")
    with pytest.raises(CheckpointError, match="none has been saved"):
        store.load_latest()
    damage_byte(store.save(1, weights(), {}))
    with pytest.raises(CheckpointError, match="all are damaged"):
        store.load_latest()
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9 .* there are \[1\]"):
        store.load(9)
    with pytest.raises(CheckpointError, match="keep_last is 0"):
        CheckpointStore(tmp_path, keep_last=0)


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_space_is_checked_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int, fits: bool
) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(1, weights(), {"v": 1})
    need = sum((path / name).stat().st_size for name in ("tensors.safetensors", "state.json")) + (16 << 20)
    disk = SimpleNamespace(f_bavail=need + spare, f_frsize=1)
    monkeypatch.setattr(module.os, "statvfs", lambda _: disk)
    if fits:
        store.save(2, weights(), {"v": 1})
        assert store.load_latest().step == 2
    else:
        with pytest.raises(CheckpointError, match="no space for a checkpoint") as caught:
            store.save(2, weights(), {"v": 1})
        assert "\n" not in str(caught.value)
        assert entries(tmp_path) == ["step-00000001"]
        assert store.load_latest().step == 1


def test_a_disk_that_fills_up_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, weights(), {})
    real = os.write

    def full(fd: int, data: memoryview) -> int:
        if len(data) > 40:
            return real(fd, data[:40])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    with pytest.raises(
        CheckpointError, match=r"step-00000002: no space left on the disk; free some"
    ) as caught:
        store.save(2, weights(n=1000), {})
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert entries(tmp_path) == ["step-00000001"]
    assert store.load_latest().step == 1


def test_a_real_file_size_limit(tmp_path: Path) -> None:
    """The kernel itself refuses the bytes; the process ends with the error, the good checkpoint stays."""
    code = (
        "import resource, sys, torch\n"
        "from racelab.experiments.checkpoint import CheckpointStore\n"
        "from racelab.experiments.errors import CheckpointError\n"
        "store = CheckpointStore(sys.argv[1])\n"
        "store.save(1, {'w': torch.ones(10)}, {})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "try:\n    store.save(2, {'w': torch.ones(100_000)}, {})\n"
        "except CheckpointError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "size limit (ulimit -f)" in done.stdout
    assert done.stdout.count("\n") == 1
    assert entries(tmp_path) == ["step-00000001"]
    assert CheckpointStore(tmp_path).load_latest().step == 1


def test_a_kill_while_saving_leaves_the_last_good_one(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, torch\n"
        "from racelab.experiments import checkpoint\n"
        "store = checkpoint.CheckpointStore(sys.argv[1])\n"
        "store.save(1, {'w': torch.ones(10)}, {})\n"
        "checkpoint.write_json_atomic = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "store.save(2, {'w': torch.ones(10)}, {})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    store = CheckpointStore(tmp_path)
    assert store.steps() == [1]
    assert store.load_latest().step == 1
    store.save(3, weights(), {})
    assert entries(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = store.save(4, weights(), {"v": 1})
    path.rename(tmp_path / ".old-step-00000004")
    assert store.load_latest().state == {"v": 1}
    store.save(5, weights(), {})
    assert entries(tmp_path) == ["step-00000004", "step-00000005"]


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="no JSON form"):
        store.save(1, weights(), {"x": object()})
    with pytest.raises(CheckpointError, match=r"'c' has dtype torch\.complex64"):
        store.save(1, {"c": torch.zeros(2, dtype=torch.complex64)}, {})
    assert store.steps() == []


def take(folder: Path, token: str) -> None:
    fence.take(folder, token, {"job_id": "12", "restart": 0, "node": "node1"})


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("step", [2, 3])
def test_a_replaced_attempt_neither_replaces_nor_adds_nor_prunes_nor_tidies(
    tmp_path: Path, step: int
) -> None:
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, keep_last=2)
    take(tmp_path, "A")
    with fence.hold(tmp_path, "A"):
        for known in (1, 2):
            store.save(known, weights(known), {})
        take(tmp_path, "B")
        (folder / ".tmp-step-00000003-7-ff").mkdir()  # the other attempt is just writing it
        (folder / ".tmp-step-00000003-7-ff" / "tensors.safetensors").write_bytes(b"half")
        before = files(folder)
        with pytest.raises(FencedError, match="job 12 on node1"):
            store.save(step, weights(9.0), {})
    assert files(folder) == before


class NeverAsked(dict[str, torch.Tensor]):
    """Tensors that nobody may take minutes to write."""

    def items(self):  # type: ignore[no-untyped-def]
        raise AssertionError


def test_a_replaced_attempt_does_not_begin_to_write(tmp_path: Path) -> None:
    take(tmp_path, "B")
    with fence.hold(tmp_path, "A"), pytest.raises(FencedError):
        CheckpointStore(tmp_path / "checkpoints").save(1, NeverAsked(), {})
    assert not (tmp_path / "checkpoints").exists()


class TakenWhileWriting(dict[str, torch.Tensor]):
    """Tensors that are asked for once the saving has begun; just then another attempt takes the run."""

    def __init__(self, folder: Path, n: int) -> None:
        super().__init__(weights(9.0, n))
        self.folder = folder

    def items(self):  # type: ignore[no-untyped-def]
        take(self.folder, "B")
        return super().items()


@pytest.mark.parametrize("step", [2, 3])
def test_an_attempt_that_is_replaced_while_it_writes_does_not_put_it_in_place(
    tmp_path: Path, step: int
) -> None:
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, keep_last=2)
    take(tmp_path, "A")
    with fence.hold(tmp_path, "A"):
        for known in (1, 2):
            store.save(known, weights(known), {})
        before = files(folder)
        with pytest.raises(FencedError):
            store.save(step, TakenWhileWriting(tmp_path, 1000), {})
    assert files(folder) == before
    assert entries(folder) == ["step-00000001", "step-00000002"]
