"""`racelab train judge=api` through the real command line, on a tiny model and a scripted server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from racelab.analysis.load import load_metrics
from racelab.experiments.fsio import read_json
from racelab.experiments.runfolder import RunFolder

from ..experiments.api_server import ApiServer, Behaviour, ok, status
from ..experiments.tiny_run import overrides, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def words(model: Path, root: Path, url: str, **more: object) -> list[str]:
    """A run of two steps; the server is asked as the others are, and its replies are not kept."""
    values: dict[str, object] = {
        "judge": "api",
        "judge.base_url": url,
        "judge.model": "judge",
        "judge.cache": "false",
        "judge.max_retries": 0,
        "run.max_steps": 2,
        "run.threads": 1,
        "data.heldout": 2,
        "validation.temperatures": "[1.0]",
        "validation.samples": 1,
        "validation.judge_report": "false",
        "probe.at_steps": "[]",
        **more,
    }
    found = overrides(model, root, **values)
    return [word for word in found if not word.startswith("judge.calibration")]


def only_run(root: Path) -> RunFolder:
    (folder,) = [p for p in root.iterdir() if (p / "run.json").exists()]
    return RunFolder.open(folder)


def steps(run: RunFolder) -> Any:
    metrics = load_metrics(run)
    return metrics[metrics["train/clock/phase_kind"].notna()]


def test_a_run_under_a_judge_behind_a_server(model: Path, tmp_path: Path, call: Callable[..., Any]) -> None:
    lock, count = threading.Lock(), [0]

    def script(prompt: str) -> Behaviour:
        with lock:
            count[0] += 1
            return ok(
                f'{{"reasoning": "so so", "score": {count[0] % 7 * 10}}}' if count[0] % 5 else "no idea"
            )

    with ApiServer(script) as server:
        done = call("train", *words(model, tmp_path / "r", server.url))
    assert done.code == 0, done.err
    run = only_run(tmp_path / "r")
    said = read_json(run.path / "setup.json")["judge"]
    assert (said["kind"], said["model"], said["server"]["base_url"]) == ("api", "judge", server.url)
    found = steps(run)
    assert found["health/judge_parse_fail"].sum() > 0
    assert found["health/judge_infra_fail"].sum() == 0
    assert found["train/reward/mean"].notna().all()


def test_a_server_that_is_not_there_is_found_before_the_run(
    model: Path, tmp_path: Path, call: Callable[..., Any]
) -> None:
    with ApiServer(lambda prompt: ok("x")) as server:
        url = server.url  # nobody listens there any more
    done = call("train", *words(model, tmp_path / "r", url))
    assert done.code == 4
    assert "judge.base_url" in done.err
    assert not (tmp_path / "r").exists()


def test_a_judge_that_dies_costs_its_scores_only(
    model: Path, tmp_path: Path, call: Callable[..., Any]
) -> None:
    """The health check and the view before training are answered; then every request is refused."""
    with ApiServer(lambda prompt: ok('{"score": 40}')) as server:
        asked: list[int] = []

        def dies(prompt: str) -> Behaviour:
            asked.append(1)
            return ok('{"score": 40}') if len(asked) < 4 else status(500)

        server._script = dies
        done = call("train", *words(model, tmp_path / "r", server.url))
    assert done.code == 0, done.err
    found = steps(only_run(tmp_path / "r"))
    assert found["health/judge_infra_fail"].sum() > 0
