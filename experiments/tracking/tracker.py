"""The tracker that the training loop talks to: it appends to the spool and does nothing else.

A separate process (`shipper.py`) brings the spool to MLflow; neither a slow nor a dead server is felt here. With
RACELAB_SHIP=0 in the environment no such process is started, whatever the config says: for a machine that does not
reach the store. `run.json` names the store all the same, for `racelab sync`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from racelab.experiments.errors import RacelabError, RunFolderError
from racelab.experiments.fsio import explain, read_json
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.mlflow_store import ENVIRONMENT, tracking_uri, without_credentials
from racelab.experiments.tracking.spool import ENDS, SpoolWriter, now_ms, split_nonfinite
from racelab.experiments.tracking.tables import write_tables
from racelab.experiments.types import StepRecord

_LOG: Final = logging.getLogger(__name__)
SHIP_VARIABLE: Final = "RACELAB_SHIP"
"""Environment variable: 0 leaves the delivery to `racelab sync`."""
_STATUS_EVERY_S: Final = 5.0
_SETTLED: Final = frozenset({"delivered", "gave_up", "unreachable", "error"})


class NullTracker:
    """A tracker that forgets everything."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Forgets."""

    def rows(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Forgets."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Forgets."""

    def record(self, record: StepRecord) -> None:
        """Forgets."""

    def state(self) -> dict[str, Any]:
        """Nothing to resume from."""
        return {}

    def close(self, status: str, reason: str = "") -> None:
        """Nothing to close."""


class SpoolTracker:
    """Writes attempt `attempt` of `run`; the caller holds the run's lock and has called `begin_attempt`."""

    def __init__(
        self,
        run: RunFolder,
        attempt: int,
        *,
        ship: bool = True,
        uri: str | None = None,
        experiment: str = "racelab",
        wait_s: float = 20.0,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        """Opens the spool and starts the shipper.

        Args:
            run: the folder.
            attempt: what `run.begin_attempt` returned.
            ship: whether to bring the spool to MLflow while the run goes on; `sync` can do it later. RACELAB_SHIP=0
                in the environment starts no shipper, but still records where `sync` is to deliver.
            uri: of the MLflow store; default MLFLOW_TRACKING_URI, else a sqlite file beside the runs.
            experiment: MLflow experiment.
            wait_s: how long `close` waits for a store that answers.
            clock: milliseconds since the epoch.

        Raises:
            RunFolderError: the spool cannot be opened.
            ConfigError: `uri` is of a kind that cannot be used.
        """
        self.run = run
        self.attempt = attempt
        self._wait_s = wait_s
        self._address = tracking_uri(run.path.parent, uri) if ship else ""
        if ship:
            address = without_credentials(self._address)
            run.update(tracking={"uri": address, "configured": bool(uri), "experiment": experiment})
        self._spool = SpoolWriter(run.spool_dir / f"{attempt}.jsonl", clock)
        self._step = next((int(a["from_step"]) for a in run.attempts() if a["attempt"] == attempt), 0)
        self._closed = False
        self._backlog = 0
        self._counted = -1
        self._next_status = 0.0
        ship = ship and os.environ.get(SHIP_VARIABLE) != "0"
        self.shipper: subprocess.Popen[bytes] | None = self._start_shipper() if ship else None

    def record(self, record: StepRecord) -> None:
        """Metrics and rows of one step in one write call; rows alone where there are no metrics."""
        self._append(
            *([self._metrics(record.step, record.metrics)] if record.metrics else []),
            *(entry for table, rows in record.tables.items() for entry in self._rows(table, rows)),
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See `ports.Tracker`."""
        self._append(self._metrics(step, values))

    def rows(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """See `ports.Tracker`. A row without a step belongs to the step of the last metrics."""
        self._append(*self._rows(table, rows))

    def tags(self, values: Mapping[str, str]) -> None:
        """See `ports.Tracker`."""
        self._append({"kind": "tags", "step": self._step, "values": {k: str(v) for k, v in values.items()}})

    def state(self) -> dict[str, Any]:
        """{attempt, offset, last_step} after everything has reached the disk."""
        return {"attempt": self.attempt, "offset": self._spool.sync(), "last_step": self._step}

    def close(self, status: str, reason: str = "") -> None:
        """Ends the attempt: end record, tables, `run.json`; then waits for the shipper if the store answers.

        Args:
            status: finished, failed or interrupted.
            reason: one line, for people.

        Raises:
            ValueError: another status.
            RunFolderError: the end record cannot be written.
            FencedError: this process was replaced; the run is left open.
        """
        if status not in ENDS:
            raise ValueError(f"status {status!r} is none of {sorted(ENDS)}")
        if self._closed:
            return
        self._closed = True
        self._spool.append([{"kind": "end", "step": self._step, "status": status, "reason": reason}])
        self._spool.sync()
        self._spool.close()
        try:
            write_tables(self.run)
        except RacelabError as error:  # the spool has everything, so the run is not lost
            _LOG.warning("%s; `racelab sync` builds the tables later", error)
        self.run.update(status=status, reason=reason)
        self._wait()

    def ship_status(self) -> dict[str, Any]:
        """The shipper's last word: {state, message, at, pid, records}; empty before its first."""
        try:
            status: dict[str, Any] = read_json(self.run.spool_dir / "ship_status.json")
        except RunFolderError:
            return {}
        # an earlier attempt's shipper may have left the file
        return status if self.shipper is not None and status.get("pid") == self.shipper.pid else {}

    def _append(self, *records: Mapping[str, Any]) -> None:
        self._spool.append(records)

    def _metrics(self, step: int, values: Mapping[str, float]) -> dict[str, Any]:
        finite = split_nonfinite(values)
        if (
            self.shipper is not None and step > self._counted
        ):  # once a step: a second point would be another value
            self._counted = step
            finite.setdefault("health/spool_backlog", float(self._lines_behind()))
        self._step = max(self._step, step)
        return {"kind": "metrics", "step": step, "values": finite}

    def _rows(self, table: str, rows: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
        by_step: dict[int, list[dict[str, object]]] = {}
        for row in rows:
            step = row.get("step", self._step)
            if not isinstance(step, int):
                raise ValueError(f"a row of table {table!r} has step {step!r}, which is not an integer")
            by_step.setdefault(step, []).append(dict(row))
        return [{"kind": "rows", "step": s, "table": table, "rows": found} for s, found in by_step.items()]

    def _lines_behind(self) -> int:
        now = time.monotonic()
        if now >= self._next_status:
            self._next_status = now + _STATUS_EVERY_S
            done = self.ship_status().get("records", {}).get(str(self.attempt), 0)
            self._backlog = max(0, self._spool.lines - int(done))
        return self._backlog

    def _start_shipper(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if without_credentials(self._address) != self._address:
            environment["MLFLOW_TRACKING_URI"] = self._address
        words = [sys.executable, "-P", "-m", "racelab.experiments.tracking.shipper", str(self.run.path)]
        folder = self.run.path / "attempts" / str(self.attempt)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "shipper.log", "ab") as log:
                # its own session: Ctrl-C in the terminal is for the trainer, which then says how it ended
                return subprocess.Popen(
                    [*words, "--parent", str(os.getpid())], cwd=self.run.path, env=environment,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise RunFolderError(f"cannot start the shipper of {self.run.path}: {explain(error)}") from error

    def _wait(self) -> None:
        """Until all is delivered, or the store is known not to answer, or the time is up."""
        if self.shipper is None:
            return
        deadline = time.monotonic() + self._wait_s
        while time.monotonic() < deadline and self.shipper.poll() is None:
            if self.ship_status().get("state") in _SETTLED:
                break
            time.sleep(0.05)
        status = self.ship_status()
        if status.get("state") != "delivered":
            why = status.get("message") or "the store has not taken everything yet"
            _LOG.warning("%s (run `racelab sync` to deliver %s)", why, self.run.run_id)
