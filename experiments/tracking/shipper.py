"""Brings a run's spool to MLflow: a separate, low-priority process, so that the trainer never waits.

`python -m racelab.experiments.tracking.shipper RUN --parent PID` follows the spool until the end record is
delivered, or until the trainer is gone and the rest is delivered, or gives up at the end if the store does
not answer. What is left is delivered by `sync`. The position in the spool is written after every delivered
batch; a batch sent twice (killed between the two) adds nothing, since every point carries its first
timestamp.

The process inherits its trainer's fence. It asks before each call that changes the store, so the shipper of a replaced
attempt delivers nothing more, does not close the MLflow run, and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from racelab.experiments import fence
from racelab.experiments.errors import DataError, InUseError, RacelabError, RunFolderError, UnreachableError
from racelab.experiments.fsio import file_lock, now_iso, read_json, write_json_atomic
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.address import run_uri, stored_config
from racelab.experiments.tracking.description import file_sha256, flatten, run_tags, tag_key
from racelab.experiments.tracking.mlflow_store import (
    MAX_METRICS,
    MlflowStore,
    Point,
    without_credentials,
)
from racelab.experiments.tracking.spool import (
    Record,
    SpoolWriter,
    cut_offsets,
    last_end,
    last_valid_steps,
    read_lines,
    spool_files,
)
from racelab.experiments.tracking.tables import tables_current, write_tables

HEARTBEAT_S: Final = 30.0
POLL_S: Final = 0.25
SHIP_EVERY_S: Final = 2.0
_MAX_BACKOFF_S: Final = 60.0
_FINAL: Final = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What `sync` did.

    Attributes:
        delivered: spool records delivered by this call.
        backlog: records still to be delivered.
        closed_stale: the run said it was running though its process had died; it is now `interrupted`.
        live: another process is working on the run or delivering it; this call left it alone.
    """

    run_id: str
    mlflow_run_id: str | None
    delivered: int
    backlog: int
    closed_stale: bool = False
    live: bool = False


class Shipper:
    """Delivers one run's spool to one store, from where the last delivery stopped."""

    def __init__(self, run: RunFolder, uri: str) -> None:
        """Args: run: opened. uri: with credentials, if it needs any; only the bare address is stored."""
        self.run = run
        self.uri = uri
        self.delivered = 0
        """Records delivered by this object."""
        self._store: MlflowStore | None = None
        self._position = read_position(run, uri)

    def connect(self) -> None:
        """Opens the store, finds or creates the MLflow run, sends config and params. Done once.

        Raises:
            UnreachableError: the store does not answer.
            FencedError: this process's trainer was replaced.
        """
        if self._store is not None:
            return
        self._store = MlflowStore.open(self.uri)
        try:
            self._introduce()
        except BaseException:
            self._store = None
            raise
        self.send_artifacts(("config", "env"))

    def _introduce(self) -> None:
        """What the store has to know of a run before its numbers."""
        info = self.run.info()
        experiment = str(info.get("tracking", {}).get("experiment") or "racelab")
        tags = run_tags(self.run)
        if info.get("sweep"):
            tags["mlflow.parentRunId"] = self._parent(experiment, str(info["sweep"]))
        started = _started_ms(info)
        known = self._position["mlflow_run_id"]
        mlflow_id = self._target().ensure_run(
            experiment, self.run.run_id, info["name"], started, tags, known, info.get("uid")
        )
        if mlflow_id != known:  # a new store, or one that has lost the run: all is to be sent (again)
            self._position |= {"mlflow_run_id": mlflow_id, "attempts": {}, "artifacts": {}}
            self._save()
        if info.get("mlflow_run_id") != mlflow_id:
            self.run.update(mlflow_run_id=mlflow_id)
        if last_end(self.run) is None:
            self._target().set_status(mlflow_id, "RUNNING")
        self._send_params()
        self._target().log(mlflow_id, tags=tags)

    def _target(self) -> MlflowStore:
        """The store, for one call that changes it. Raises FencedError if this process's trainer was replaced."""
        assert self._store is not None
        fence.check(self.run.path)
        return self._store

    @property
    def mlflow_id(self) -> str:
        """Known after `connect`."""
        return str(self._position["mlflow_run_id"])

    def _parent(self, experiment: str, sweep: str) -> str:
        """The MLflow id of the run's sweep; made here if the sweep's own shipper was not first.

        A sweep whose folder is not beside the run has no shipper, so nobody but this would ever close it. Its uid
        is not known either: runs that are left without their sweep share one parent, which no sweep has.
        """
        name, tags, started = sweep, {"racelab.kind": "sweep"}, int(time.time() * 1000)
        uid = None
        folder = self.run.path.parent / sweep
        known = (folder / "run.json").is_file()
        if known:
            whole = RunFolder.open(folder)
            info = whole.info()
            name, tags, started, uid = info["name"], run_tags(whole), _started_ms(info), info.get("uid")
        parent = self._target().ensure_run(experiment, sweep, name, started, tags, uid=uid)
        if not known:
            self._target().set_status(parent, "FINISHED")
        return parent

    def _send_params(self) -> None:
        wanted = flatten(stored_config(self.run))
        there = self._target().params(self.mlflow_id)
        new = {key: value for key, value in wanted.items() if key not in there}
        self._target().log(self.mlflow_id, params=new)

    def ship(self) -> int:
        """Delivers every whole record that is there now, but not the newest attempt's end record.

        Returns the number of records delivered.

        Raises:
            UnreachableError: the store stopped answering; what was delivered is remembered.
            DataError: a damaged spool line.
        """
        self.connect()
        before = self.delivered
        attempts = self.run.attempts()
        limits, cuts = last_valid_steps(attempts), cut_offsets(attempts)
        for attempt, path in spool_files(self.run).items():
            bounds = limits.get(attempt, math.inf), cuts.get(attempt, math.inf)
            self._ship_file(attempt, path, *bounds, newest=attempt not in limits)
        return self.delivered - before

    def _ship_file(self, attempt: int, path: Path, limit: float, cut: float, newest: bool) -> None:
        place = self._place(attempt)
        points: list[Point] = []
        tags: dict[str, str] = {}
        offset, count = place["offset"], 0
        for record, after in read_lines(path, offset):
            if record["kind"] == "end" and newest:
                break
            fresh = [(n, v, record["ts"], record["step"]) for n, v in record["values"].items()] if (
                record["kind"] == "metrics" and record["step"] <= limit and after <= cut
            ) else []  # fmt: skip
            if points and len(points) + len(fresh) > MAX_METRICS:
                self._deliver(place, points, tags, offset, count)
                points, tags, count = [], {}, 0
            points += fresh
            if record["kind"] == "tags":
                tags |= {tag_key(key): value for key, value in record["values"].items()}
            offset, count = after, count + 1
        if count:
            self._deliver(place, points, tags, offset, count)

    def _deliver(
        self, place: dict[str, int], points: list[Point], tags: dict[str, str], offset: int, count: int
    ) -> None:
        self._target().log(self.mlflow_id, points, tags=tags)
        place["offset"] = offset
        place["records"] += count
        self._save()
        self.delivered += count

    def heartbeat(self) -> None:
        """Tags the MLflow run with the present time."""
        self.connect()
        self._target().log(self.mlflow_id, tags={"racelab.heartbeat": now_iso()})

    def finish(self) -> None:
        """Delivers the newest attempt's end: artifacts, final status, and at last the end record itself."""
        end = last_end(self.run)
        if end is None:
            return
        self.ship()
        self.send_artifacts(("config", "env", "tables", "."))
        last = {"racelab.end_reason": end.get("reason") or end["status"], "racelab.heartbeat": now_iso()}
        self._target().log(self.mlflow_id, tags=run_tags(self.run) | last)
        self._target().set_status(self.mlflow_id, _FINAL[end["status"]], end["ts"])
        place = self._place(end["attempt"])
        path = spool_files(self.run)[end["attempt"]]
        for _, after in read_lines(path, place["offset"]):
            place["offset"] = after
            place["records"] += 1
            self.delivered += 1
        self._save()

    def mark_killed(self) -> None:
        """Closes the MLflow run of a trainer that died without a word."""
        self.connect()
        self._target().log(self.mlflow_id, tags={"racelab.end_reason": "killed"})
        self._target().set_status(self.mlflow_id, "KILLED", int(time.time() * 1000))

    def send_artifacts(self, folders: tuple[str, ...]) -> None:
        """Uploads the files that are new or have changed since they were last sent."""
        self.connect()
        sent = self._position["artifacts"]
        for folder in folders:
            place = self.run.path / folder
            for file in sorted(place.iterdir()) if place.is_dir() else ():
                top = folder == "."
                if file.name.startswith(".") or not file.is_file():
                    continue
                if top and file.name not in ("manifest.json", "attempts.json", "run.json"):
                    continue
                digest = file_sha256(file)
                key = file.name if top else f"{folder}/{file.name}"
                if sent.get(key) != digest:
                    self._target().artifact(self.mlflow_id, file, None if top else folder)
                    sent[key] = digest
        self._save()

    def _place(self, attempt: int) -> dict[str, int]:
        places: dict[str, dict[str, int]] = self._position["attempts"]
        return places.setdefault(str(attempt), {"offset": 0, "records": 0})

    def _save(self) -> None:
        write_json_atomic(self.run.spool_dir / "shipped.json", self._position)

    def records_of(self, attempt: int) -> int:
        """Records of one attempt delivered so far."""
        return self._place(attempt)["records"]


def _started_ms(info: Mapping[str, Any]) -> int:
    """When a run was made, in milliseconds since the epoch."""
    return int(datetime.fromisoformat(info["started"]).timestamp() * 1000)


def read_position(run: RunFolder, uri: str) -> dict[str, Any]:
    """What `uri` has got of the run: {uri, mlflow_run_id, attempts: {n: {offset, records}}, artifacts}."""
    bare = without_credentials(uri)
    path = run.spool_dir / "shipped.json"
    if path.exists():
        stored: dict[str, Any] = read_json(path)
        if stored.get("uri") == bare:
            return stored
    return {"uri": bare, "mlflow_run_id": None, "attempts": {}, "artifacts": {}}


def backlog(run: RunFolder) -> int:
    """Spool records that the run's store has not got yet."""
    places = read_position(run, run_uri(run))["attempts"]
    return sum(
        sum(1 for _ in read_lines(path, places.get(str(attempt), {}).get("offset", 0)))
        for attempt, path in spool_files(run).items()
    )


def sync(run: RunFolder) -> SyncReport:
    """Delivers, in this process, what the store lacks, and closes the run if its process died.

    Raises:
        UnreachableError: the store does not answer. A stale run is closed in its folder all the same.
        DataError: a damaged spool line.
    """
    closed = close_stale(run)
    if not spool_files(run):
        return SyncReport(run.run_id, run.info().get("mlflow_run_id"), 0, 0)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_ship_lock(run, wait_s=0.5))
        except InUseError:
            return SyncReport(run.run_id, run.info().get("mlflow_run_id"), 0, backlog(run), closed, live=True)
        if backlog(run) == 0:
            # nothing to say, so nothing to connect for
            if not run.is_held():
                _refresh_tables(run)
            return SyncReport(run.run_id, run.info().get("mlflow_run_id"), 0, 0, closed)
        shipper = Shipper(run, run_uri(run))
        shipper.ship()
        live = run.is_held()
        if not live:
            _refresh_tables(run)
            shipper.finish()
        write_status(run, "delivered" if backlog(run) == 0 else "ok", shipper)
        return SyncReport(run.run_id, shipper.mlflow_id, shipper.delivered, backlog(run), closed, live)


def close_stale(run: RunFolder, status: str = "interrupted", reason: str = "killed") -> bool:
    """Writes the end that a killed trainer could not write, so that the store gets it too; whether that was needed."""
    if run.status() != "stale":
        return False
    try:
        lock = run.lock()
    except RunFolderError:  # hung, but alive: not ours to close
        return False
    with lock:
        attempts = run.attempts()
        attempt = int(attempts[-1]["attempt"]) if attempts else run.begin_attempt()
        if last_end(run) is None:
            path = run.spool_dir / f"{attempt}.jsonl"
            step = max((int(r["step"]) for r, _ in read_lines(path)), default=0) if path.exists() else 0
            writer = SpoolWriter(path)
            writer.append([{"kind": "end", "step": step, "status": status, "reason": reason}])
            writer.sync()
            writer.close()
        end: Record = last_end(run) or {}
        _refresh_tables(run)
        run.update(status=end.get("status", status), reason=end.get("reason", reason))
    return True


def _refresh_tables(run: RunFolder) -> None:
    """Builds the tables unless they are there and hold the whole spool already."""
    if not tables_current(run):
        write_tables(run)


def _ship_lock(run: RunFolder, wait_s: float) -> contextlib.AbstractContextManager[None]:
    return file_lock(run.spool_dir / "ship.lock", wait_s)


def write_status(run: RunFolder, state: str, shipper: Shipper | None = None, message: str = "") -> None:
    """`spool/ship_status.json`, for the trainer and for `racelab show`.

    `state` is starting, ok, unreachable, gave_up, delivered or error; `records` counts what was delivered of
    each attempt.
    """
    records = {str(a): shipper.records_of(a) for a in spool_files(run)} if shipper else {}
    status = {"state": state, "message": message, "at": now_iso(), "pid": os.getpid(), "records": records}
    write_json_atomic(run.spool_dir / "ship_status.json", status)


def follow(run: RunFolder, parent: int) -> int:
    """The life of the shipper process; returns its exit code (0: all delivered).

    Raises:
        FencedError: its trainer was replaced.
    """
    shipper = Shipper(run, run_uri(run))
    backoff, next_try, next_beat, last_tries = 1.0, 0.0, 0.0, 2
    write_status(run, "starting")
    for alive, ended in _turns(run, parent):
        now = time.monotonic()
        over = ended or not alive
        if now < next_try and not over:
            continue
        try:
            shipper.ship()
            if ended:
                shipper.finish()
            elif not alive:
                shipper.mark_killed()
            elif now >= next_beat:
                shipper.heartbeat()
                next_beat = now + HEARTBEAT_S
        except UnreachableError as error:
            last_tries -= over
            if over and last_tries == 0:
                write_status(run, "gave_up", shipper, str(error))
                return 4
            write_status(run, "unreachable", shipper, str(error))
            next_try, backoff = now + backoff, min(_MAX_BACKOFF_S, 2 * backoff)
        else:
            write_status(run, "delivered" if over else "ok", shipper)
            if over:
                return 0
            next_try, backoff = now + SHIP_EVERY_S, 1.0
    return 0


def _turns(run: RunFolder, parent: int) -> Iterator[tuple[bool, bool]]:
    """(trainer alive, run ended with its tables built), a few times a second, for ever."""
    while True:
        alive = os.getppid() == parent
        ended = last_end(run) is not None and (not alive or run.info()["status"] != "running")
        yield alive, ended
        time.sleep(POLL_S)


def main(words: list[str] | None = None) -> int:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(prog="racelab.experiments.tracking.shipper")
    parser.add_argument("run")
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args(words)
    with contextlib.suppress(OSError):
        os.nice(10)
    run = RunFolder.open(args.run)
    try:
        with _ship_lock(run, wait_s=120):
            return follow(run, args.parent)
    except RacelabError as error:
        print(error, file=sys.stderr)
        with contextlib.suppress(RacelabError, DataError):
            write_status(run, "error", message=str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
