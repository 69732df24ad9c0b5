"""Clusters for the tests under this folder, all of which carry the marker `slurm`.

`cluster` is brought up once per session (and per worker of pytest-xdist) and given clean to every test; `further`
brings up clusters with other options for one module. RACELAB_SLURM_KEEP=1 leaves their folders, and the logs in them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..experiments.tiny_run import write_tiny_model
from .desk import Desk
from .lab import SCRIPTS, Cluster, Options

HERE = Path(__file__).resolve().parent
LONG = {"run.max_steps": 60, "checkpoint.every": 5}
"""A tiny run of about fifteen seconds, long enough to be interrupted."""
KEEP = os.environ.get("RACELAB_SLURM_KEEP") == "1"
REQUIRED = os.environ.get("CI") == "true" or os.environ.get("RACELAB_REQUIRE_SLURM") == "1"


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test under this folder."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def _ends_in_order() -> Iterator[None]:
    """Whoever stops pytest with SIGTERM gets the clusters taken down, too."""
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("stopped by SIGTERM", returncode=143))
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def slurm(_ends_in_order: None) -> None:
    """Slurm itself: installed if that may be done; without it CI fails and others skip."""
    if os.geteuid() != 0:
        problem = "the test cluster runs as root"
    else:
        done = subprocess.run(
            [SCRIPTS / "install.sh"], capture_output=True, text=True, timeout=600, check=False
        )
        problem = (done.stdout + done.stderr).strip() if done.returncode else ""
    if problem and REQUIRED:
        pytest.fail(problem)
    if problem:
        pytest.skip(problem)


@pytest.fixture(scope="session")
def session_cluster(slurm: None) -> Iterator[Cluster]:
    """The usual cluster, as the tests before have left it; SLURM_CONF leads to it."""
    cluster = Cluster.bring_up(Options())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment()["SLURM_CONF"])
        try:
            yield cluster
        finally:
            cluster.down(keep=KEEP)


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """The usual cluster: 4 nodes of 32 CPUs and 8 GPUs, accounting, requeue on preemption; no job, all nodes idle."""
    yield session_cluster
    session_cluster.restore()


@pytest.fixture(scope="module")
def further(slurm: None) -> Iterator[Callable[[Options], Cluster]]:
    """Clusters with other options, on ports of their own; down when the module's tests are over."""
    clusters: dict[Options, Cluster] = {}
    with contextlib.ExitStack() as stack:

        def bring_up(options: Options) -> Cluster:
            if options not in clusters:
                clusters[options] = Cluster.bring_up(options)
                stack.callback(clusters[options].down, keep=KEEP)
            return clusters[options]

        yield bring_up


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 20,000 parameters."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def desk(cluster: Cluster, tiny_model: Path) -> Desk:
    """The command line on the usual cluster, in a fresh folder that all nodes see."""
    return new_desk(cluster, tiny_model)


def new_desk(cluster: Cluster, model: Path, name: str = "desk") -> Desk:
    """A desk in a fresh folder below the cluster's."""
    place = cluster.folder / "desks"
    place.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place))
    return Desk(cluster, folder, model)


@dataclass(frozen=True, slots=True)
class Reference:
    """What the run `LONG` gives that nobody interrupts.

    Attributes:
        weights: step of its last checkpoint and SHA-256 of the tensors.
        metrics: (step, name) -> value.
    """

    weights: tuple[int, str]
    metrics: dict[tuple[int, str], float]


@pytest.fixture(scope="session")
def reference(session_cluster: Cluster, tiny_model: Path) -> Reference:
    """`LONG` trained on this machine, without Slurm."""
    desk = new_desk(session_cluster, tiny_model, "reference")
    desk.well("train", *desk.tiny(**LONG), timeout=300)
    (run,) = desk.runs()
    return Reference(desk.weights(run), desk.metrics(run))
