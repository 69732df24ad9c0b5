"""The few things racelab asks of MLflow 3.17, each made safe to repeat.

MLflow is imported by `MlflowStore.open` only, so the addresses here can be worked out without it. Learnt by
trying: a fresh sqlite file opened by several processes at once fails in all but one (so: one file lock), a
dead server blocks for minutes with the default retries (so: 1 retry and a probe first), and a point that is
already there is recognised by key, step, timestamp and value (so: a batch may be sent again).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import socket
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from racelab.experiments.environment import redact
from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.fsio import file_lock

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

ENVIRONMENT: Final[Mapping[str, str]] = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "DO_NOT_TRACK": "true",
}
"""Set before MLflow is imported."""
MAX_METRICS: Final = 1_000
MAX_PAIRS: Final = 100
MAX_PARAM: Final = 6_000
MAX_TAG: Final = 8_000
_UID: Final = "racelab.uid"
_PROBE_S: Final = 2.0
_SQLITE: Final = "sqlite:///"
_SCHEMES: Final = frozenset({"http", "https", "postgresql", "mysql", "mssql", "databricks"})
_MEND: Final = "use sqlite:////absolute/mlflow.db or http://host:port (tracking.uri, MLFLOW_TRACKING_URI)"
_BAD_KEY: Final = re.compile(r"[^\w\-. /:]")

Point = tuple[str, float, int, int]
"""Metric name, value, timestamp in ms, step."""


def tracking_uri(root: Path, configured: str | None = None) -> str:
    """The store of the runs under `root`: `configured`, else MLFLOW_TRACKING_URI, else `<root>/mlflow.db`.

    Raises:
        ConfigError: a kind of address that loses data or is gone from MLflow (plain folders), or one that is
            none: another scheme, no host, no such port.
    """
    uri = configured or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return f"sqlite:///{root.absolute() / 'mlflow.db'}"
    parts = _split(uri)
    scheme = parts.scheme.partition("+")[0]
    if scheme == "sqlite" and uri.startswith(_SQLITE) and len(uri) > len(_SQLITE):
        return f"{_SQLITE}{Path(uri.removeprefix(_SQLITE)).absolute()}"
    if scheme in ("", "file"):
        raise ConfigError(
            f"tracking address {redact(uri)!r} is a folder, which MLflow no longer writes; {_MEND}"
        )
    if scheme not in _SCHEMES or not uri.startswith(f"{parts.scheme}://"):
        raise ConfigError(f"tracking address {redact(uri)!r} is of no kind that MLflow knows; {_MEND}")
    if scheme in ("http", "https") and not parts.hostname:
        raise ConfigError(f"tracking address {redact(uri)!r} names no host; {_MEND}")
    return uri


def _split(uri: str) -> urllib.parse.SplitResult:
    """The parts of an address. Raises ConfigError if its host or port is none."""
    try:
        parts = urllib.parse.urlsplit(uri)
        _ = parts.port  # parsed when asked for
    except ValueError as error:
        raise ConfigError(f"tracking address {redact(uri)!r}: {redact(str(error))}; {_MEND}") from error
    return parts


def without_credentials(uri: str) -> str:
    """`uri` without `user:password@`, to be stored and shown. Raises ConfigError if it is no address."""
    parts = _split(uri)
    if "@" not in parts.netloc:
        return uri
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def with_credentials(stored: str) -> str:
    """The address to connect to: MLFLOW_TRACKING_URI if it is `stored` plus credentials, else `stored`."""
    present = os.environ.get("MLFLOW_TRACKING_URI", "")
    return present if present and without_credentials(present) == stored else stored


def probe(uri: str, timeout_s: float = _PROBE_S) -> None:
    """Asks whether anything listens at an http address; says nothing of other stores.

    Raises:
        UnreachableError: nothing does, within `timeout_s`.
    """
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return
    proxies = urllib.request.getproxies()
    if parts.scheme in proxies and not urllib.request.proxy_bypass(parts.hostname):
        return  # the proxy answers for the server, so a direct connection tells nothing
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=timeout_s).close()
    except OSError as error:
        raise UnreachableError(
            f"no tracking server at {without_credentials(uri)} ({error}); start it, then `racelab sync`"
        ) from error


def valid_key(name: str) -> str:
    """`name` with what MLflow refuses in names replaced by `_`, at most 250 characters."""
    return _BAD_KEY.sub("_", name)[:250]


class MlflowStore:
    """A connection to one tracking store. All methods raise UnreachableError when it fails or refuses."""

    def __init__(self, client: MlflowClient, uri: str, lock: Path) -> None:
        """Use `open`."""
        self._client = client
        self.uri = uri
        self._lock_path = lock

    @classmethod
    def open(cls, uri: str) -> MlflowStore:
        """Connects; a sqlite store gets its tables, once, however many processes come at the same time.

        Raises:
            UnreachableError: no answer within seconds.
        """
        os.environ.update(ENVIRONMENT)
        probe(uri)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # its import sets the level anew
        lock = _lock_path(uri)
        if uri.startswith("sqlite:///"):
            lock.parent.mkdir(parents=True, exist_ok=True)
        with _told(uri), file_lock(lock, wait_s=120):
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_experiments(max_results=1)
        return cls(client, uri, lock)

    def ensure_run(
        self,
        experiment: str,
        run_id: str,
        name: str,
        started_ms: int,
        tags: Mapping[str, str],
        known: str | None = None,
        uid: str | None = None,
    ) -> str:
        """The MLflow id of a racelab run; it is created only if no run has its `racelab.uid` tag.

        A run of before the uid is looked for by its `racelab.run_id` tag, among the runs that have no uid either.

        Args:
            experiment: created if missing.
            run_id: racelab's id; other runs may have it too (the same cell in another root, or run again).
            name: shown in the list of runs.
            started_ms: start of the run.
            tags: for a new run.
            known: the MLflow id that it had, if any; saves the search.
            uid: what no other run has; None: not known.
        """
        with _told(self.uri), file_lock(self._lock_path, wait_s=120):
            if known is not None and self._exists(known):
                return known
            experiment_id = self._experiment(experiment)
            found = self._find(experiment_id, run_id, uid)
            if found is not None:
                self._refuse_deleted(found)
                return str(found.info.run_id)
            made = self._client.create_run(
                experiment_id,
                start_time=started_ms,
                tags={**_cut(tags), "racelab.run_id": run_id, **({_UID: uid} if uid else {})},
                run_name=name,
            )
            return str(made.info.run_id)

    def log(
        self,
        mlflow_id: str,
        points: Sequence[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Sends points, params and tags in as few calls as MLflow's limits allow."""
        from mlflow.entities import Metric, Param, RunTag

        metrics = [Metric(valid_key(n), value, ts, step) for n, value, ts, step in points]
        pairs = [Param(valid_key(k), v[:MAX_PARAM]) for k, v in (params or {}).items()]
        marks = [RunTag(valid_key(k), v) for k, v in _cut(tags or {}).items()]
        with _told(self.uri):
            for start in range(0, len(metrics), MAX_METRICS):
                self._client.log_batch(mlflow_id, metrics=metrics[start : start + MAX_METRICS])
            for start in range(0, len(pairs), MAX_PAIRS):
                self._client.log_batch(mlflow_id, params=pairs[start : start + MAX_PAIRS])
            for start in range(0, len(marks), MAX_PAIRS):
                self._client.log_batch(mlflow_id, tags=marks[start : start + MAX_PAIRS])

    def params(self, mlflow_id: str) -> dict[str, str]:
        """Params stored so far; MLflow refuses to change one."""
        with _told(self.uri):
            return dict(self._client.get_run(mlflow_id).data.params)

    def artifact(self, mlflow_id: str, file: Path, folder: str | None) -> None:
        """Uploads a file into an artifact folder, replacing what is there."""
        with _told(self.uri):
            self._client.log_artifact(mlflow_id, str(file), folder)

    def set_status(self, mlflow_id: str, status: str, end_ms: int | None = None) -> None:
        """RUNNING, or FINISHED, FAILED, KILLED with the time of the end."""
        with _told(self.uri):
            if end_ms is None:
                self._client.update_run(mlflow_id, status=status)
            else:
                self._client.set_terminated(mlflow_id, status=status, end_time=end_ms)

    def _find(self, experiment_id: str, run_id: str, uid: str | None) -> Run | None:
        """The run, deleted or not, if the experiment has it."""
        from mlflow.entities import ViewType

        key, value = (_UID, uid) if uid else ("racelab.run_id", run_id)
        mark = '"' if "'" in value else "'"
        found = self._client.search_runs(
            [experiment_id], f"tags.`{key}` = {mark}{value}{mark}", run_view_type=ViewType.ALL
        )
        return next((run for run in found if uid or _UID not in run.data.tags), None)

    def _exists(self, mlflow_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(mlflow_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        self._refuse_deleted(run)
        return True

    def _refuse_deleted(self, run: Run) -> None:
        info = run.info
        if info.lifecycle_stage == "deleted":
            raise UnreachableError(
                f"MLflow run {info.run_id} was deleted in {without_credentials(self.uri)}; restore it there "
                f"with `mlflow runs restore --run-id {info.run_id}`"
            )

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            place = None
            if self.uri.startswith("sqlite:///"):
                database = Path(self.uri.removeprefix("sqlite:///"))
                place = (database.parent / "mlartifacts" / valid_key(name).replace("/", "_")).as_uri()
            return str(self._client.create_experiment(name, artifact_location=place))
        if found.lifecycle_stage == "deleted":
            self._client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)


def _cut(tags: Mapping[str, str]) -> dict[str, str]:
    return {key: str(value)[:MAX_TAG] for key, value in tags.items()}


def _lock_path(uri: str) -> Path:
    """Beside the sqlite file; for a server one per address, shared by this user's processes on this host."""
    if uri.startswith("sqlite:///"):
        return Path(uri.removeprefix("sqlite:///")).with_suffix(".lock")
    digest = hashlib.sha256(without_credentials(uri).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"racelab-mlflow-{os.getuid()}-{digest}.lock"


@contextlib.contextmanager
def _told(uri: str) -> Iterator[None]:
    import sqlalchemy.exc
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, sqlalchemy.exc.SQLAlchemyError, OSError) as error:
        words = redact(" ".join(str(error).split()))[:300]  # MLflow quotes the address as it was given
        raise UnreachableError(
            f"the tracking store {without_credentials(uri)} failed: {words}; when it is well, `racelab sync`"
        ) from error
