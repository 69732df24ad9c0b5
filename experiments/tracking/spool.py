"""The spool: one append-only JSON-lines file per attempt, the only record that a run has to write.

A line is one of

- `{"kind": "metrics", "step", "ts", "values": {name: number}}`
- `{"kind": "rows", "step", "ts", "table", "rows": [{column: value}]}`
- `{"kind": "tags", "step", "ts", "values": {name: text}}`
- `{"kind": "end", "step", "ts", "status", "reason"}`

`ts` is milliseconds since the epoch, fixed when the line is written, so that delivering a line twice is
recognised as the same point. JSON knows no NaN: in rows NaN and infinities become null, in metrics they
become `health/nonfinite/<name>` = 1.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from racelab.experiments import fence
from racelab.experiments.errors import DataError, RunFolderError
from racelab.experiments.fsio import explain, unwritten
from racelab.experiments.runfolder import RunFolder

Record = dict[str, Any]
KINDS: Final = frozenset({"metrics", "rows", "tags", "end"})
ENDS: Final = frozenset({"finished", "failed", "interrupted"})
"""Statuses that an end record may have."""
_TAIL_BLOCK: Final = 1 << 16


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class SpoolWriter:
    """Appends to `spool/<attempt>.jsonl`, one write call per `append`.

    What `append` returned from survives the death of the process; what `sync` returned from survives the
    death of the machine. A line torn by a killed process is cut off when its file is opened again.
    """

    def __init__(self, path: Path, clock: Callable[[], int] = now_ms) -> None:
        """Opens or creates `path`; cuts a torn last line.

        Raises:
            RunFolderError: that is impossible.
            FencedError: this process was replaced; nothing has changed.
        """
        self.path = path
        self._clock = clock
        fence.check(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self.offset = whole_lines(self._fd)
            os.ftruncate(self._fd, self.offset)
        except OSError as error:
            raise unwritten(f"cannot open {path}", error) from error
        self.lines = 0
        """Lines written through this writer."""

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes the records in one call; each gets its `ts`.

        Raises:
            DiskError: the disk is full; the lines before are whole and none of the new ones is there.
            RunFolderError: it cannot be written; the same.
            FencedError: this process was replaced; none of the new lines is there.
            ValueError: a record that JSON cannot hold, or of an unknown kind.
        """
        stamp = self._clock()
        lines = [encode({**record, "ts": stamp}) for record in records]
        if not lines:
            return
        data = b"".join(lines)
        done = 0
        fence.check(self.path)
        try:
            while done < len(data):
                done += os.pwrite(self._fd, memoryview(data)[done:], self.offset + done)
        except OSError as error:
            os.ftruncate(self._fd, self.offset)
            raise unwritten(f"cannot append to {self.path}", error) from error
        self.offset += len(data)
        self.lines += len(lines)

    def sync(self) -> int:
        """Waits until the disk has everything; returns the length of the file in bytes."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise unwritten(f"cannot flush {self.path}", error) from error
        return self.offset

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def whole_lines(fd: int) -> int:
    """Length in bytes of the file up to and including its last newline."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _TAIL_BLOCK)
        cut = os.pread(fd, end - start, start).rfind(b"\n")
        if cut >= 0:
            return start + cut + 1
        end = start
    return 0


def encode(record: Mapping[str, Any]) -> bytes:
    """One line.

    Raises:
        ValueError: the kind is unknown or a value has no JSON form; the message names it.
    """
    if record.get("kind") not in KINDS:
        raise ValueError(f"spool record of unknown kind {record.get('kind')!r}")
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain)
    except ValueError:  # NaN or infinity somewhere: the common case has none, so only now walk the values
        text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except TypeError as error:
        raise ValueError(f"spool record of kind {record['kind']!r} has no JSON form: {error}") from error
    return text.encode("utf-8", "replace") + b"\n"


def plain(value: object) -> object:
    """Scalars and arrays of numpy, and tensors, as Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r:.60}")


def finite(value: Any) -> Any:
    """`value` with every NaN and infinity replaced by None, at any depth."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    return finite(plain(value))


def split_nonfinite(values: Mapping[str, float]) -> dict[str, float]:
    """Metrics that a store can hold: a value that is not finite is counted under `health/nonfinite/<name>`.

    Example: {"train/reward/mean": nan, "perf/time/step_s": 2.0} gives
    {"health/nonfinite/train/reward/mean": 1.0, "perf/time/step_s": 2.0}.
    """
    result: dict[str, float] = {}
    for name, value in values.items():
        number = float(value)
        if math.isfinite(number):
            result[name] = number
        else:
            result[f"health/nonfinite/{name}"] = 1.0
    return result


def spool_files(run: RunFolder) -> dict[int, Path]:
    """Attempt number -> file, in the order of the attempts."""
    found = {int(path.stem): path for path in run.spool_dir.glob("*.jsonl") if path.stem.isdigit()}
    return dict(sorted(found.items()))


def last_valid_steps(attempts: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Attempt -> last step of it that no later attempt has redone; attempts without an entry were not.

    Example: attempts 1 (from 0), 2 (from 10) and 3 (from 4) give {1: 4, 2: 4}.
    """
    limits: dict[int, int] = {}
    void = _void(attempts)
    for earlier in attempts:
        number = int(earlier["attempt"])
        later = [a for a in attempts if int(a["attempt"]) > number and int(a["attempt"]) not in void]
        if later:
            limits[number] = min(int(a["from_step"]) for a in later)
    return limits


def cut_offsets(attempts: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Attempt -> byte offset of its file from which on a later attempt has redone it (see `begin_attempt`).

    An attempt between the checkpoint's and the one that goes on from it left nothing that was restored: its offset is
    0, and what it had redone itself counts again. Example: attempt 2 goes on at offset 50 of attempt 1, attempt 3 at
    offset 90 of attempt 1 (a checkpoint that could not be read for a while): {1: 90, 2: 0}.
    """
    void = _void(attempts)
    cuts = dict.fromkeys(sorted(void), 0)
    for entry in attempts:
        cut = entry.get("cut")
        if cut and int(entry["attempt"]) not in void:
            number, offset = int(cut["attempt"]), int(cut["offset"])
            cuts[number] = min(offset, cuts.get(number, offset))
    return cuts


def _void(attempts: Sequence[Mapping[str, Any]]) -> set[int]:
    """Attempts of which nothing was restored: those between a checkpoint's attempt and the one that goes on there."""
    void: set[int] = set()
    for entry in reversed(attempts):
        number, cut = int(entry["attempt"]), entry.get("cut")
        if cut and number not in void:
            others = (int(other["attempt"]) for other in attempts)
            void |= {between for between in others if int(cut["attempt"]) < between < number}
    return void


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[Record, int]]:
    """The records from byte `offset` on, each with the offset after it; a torn last line is left out.

    Raises:
        DataError: a whole line that is not a record; the message names file and byte.
        RunFolderError: the file cannot be read.
    """
    try:
        with open(path, "rb") as handle:
            handle.seek(offset)
            for line in handle:
                if not line.endswith(b"\n"):
                    return
                yield _decode(line, path, offset), offset + len(line)
                offset += len(line)
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {explain(error)}") from error


def _decode(line: bytes, path: Path, offset: int) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path} is damaged at byte {offset} ({error}); remove that line by hand") from error
    if not isinstance(record, dict) or not _is_record(record):
        raise DataError(f"{path} has no spool record at byte {offset}; remove that line by hand")
    return record


def _is_record(record: Mapping[str, Any]) -> bool:
    """Whether a line has what its kind promises, so that no reader needs to ask again."""
    if type(record.get("step")) is not int or type(record.get("ts")) is not int:
        return False
    kind = record.get("kind")
    if kind == "rows":
        rows = record.get("rows")
        return isinstance(record.get("table"), str) and isinstance(rows, list)
    if kind == "end":
        return record.get("status") in ENDS
    return kind in KINDS and isinstance(record.get("values"), dict)


def read_spool(run: RunFolder) -> Iterator[Record]:
    """All records in order of attempt and time, each with its `attempt`, superseded steps left out.

    A resumed run redoes steps: of attempt a, what lies after the `from_step` of a later attempt is dropped.
    Lines of kind `tags` and `end` are facts about the attempt and are always kept.

    Raises:
        DataError: a damaged line.
        RunFolderError: the folder cannot be read.
    """
    attempts = run.attempts()
    limits, cuts = last_valid_steps(attempts), cut_offsets(attempts)
    for attempt, path in spool_files(run).items():
        limit, cut = limits.get(attempt, math.inf), cuts.get(attempt, math.inf)
        for record, after in read_lines(path):
            if record["kind"] in ("tags", "end") or (record["step"] <= limit and after <= cut):
                record["attempt"] = attempt
                yield record


def last_end(run: RunFolder) -> Record | None:
    """The end record of the newest attempt, None while that attempt runs (or was killed)."""
    files = spool_files(run)
    entries = run.attempts()
    newest = max((int(entry["attempt"]) for entry in entries), default=0)
    if newest not in files:
        return None
    last: Record | None = None
    for record, _ in read_lines(files[newest], _tail_offset(files[newest])):
        last = record
    return {**last, "attempt": newest} if last is not None and last["kind"] == "end" else None


def last_step(run: RunFolder) -> int:
    """Highest step in the spool that still counts, 0 if there is none."""
    return max((int(record["step"]) for record in read_spool(run)), default=0)


def _tail_offset(path: Path) -> int:
    """Offset of the last whole line."""
    with open(path, "rb") as handle:
        end = whole_lines(handle.fileno())
        position = end - 1
        while position > 0:
            start = max(0, position - _TAIL_BLOCK)
            cut = os.pread(handle.fileno(), position - start, start).rfind(b"\n")
            if cut >= 0:
                return start + cut + 1
            position = start
    return 0
