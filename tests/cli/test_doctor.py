"""`doctor`: what is broken is said with its mend, what only others need breaks nothing."""

from __future__ import annotations

import os
import shutil
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from racelab.cli import doctor
from racelab.cli.doctor import Check
from racelab.experiments.errors import ModelError
from racelab.sweeps.slurm.folder import intent

from ..sweeps.slurm.fake_slurm import FakeSlurm
from ..sweeps.slurm.hooks import hook
from ..sweeps.slurm.world import launched

Call = Callable[..., Any]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """No torch and no models: their checks are replaced by good news, and tested on their own."""

    def good(root: Path) -> Iterator[Check]:
        yield Check("model", "ok", "there")

    monkeypatch.setattr(doctor, "_models", good)
    monkeypatch.setattr(doctor, "_torch", good)


def checks(call: Call) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in call("doctor", "--json").json()["checks"]}


def test_all_is_well_here(call: Call) -> None:
    result = call("doctor")
    assert result.code == 0
    assert result.err == "train can work here\n"
    assert "mlflow store" in result.out
    assert {check["level"] for check in checks(call).values()} <= {"ok", "note", "warning"}


def test_a_missing_package_is_broken_and_exits_with_1(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_NEEDED", ("torch", "surely_not_installed"))
    result = call("doctor", "--json")
    assert result.code == 1
    assert result.json()["ok"] is False
    assert checks(call)["packages"]["found"] == "missing: surely_not_installed"
    assert "racelab[local]" in checks(call)["packages"]["mend"]
    assert "train cannot work here: packages" in call("doctor").err


@pytest.mark.parametrize(
    ("free_gib", "level"), [(0.5, "broken"), (1.0, "warning"), (4.9, "warning"), (5.0, "ok"), (50.0, "ok")]
)
def test_free_disk(call: Call, monkeypatch: pytest.MonkeyPatch, free_gib: float, level: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, int(free_gib * 2**30)))
    assert checks(call)["runs folder"]["level"] == level


def test_a_model_that_is_not_what_it_should_be_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from racelab.experiments.models import assets

    def wrong(source: str) -> Path:
        raise ModelError(f"model {source}: SHA-256 is not the expected one")

    monkeypatch.setattr(assets, "resolve_model", wrong)
    found = list(doctor._models(Path()))
    assert [(check.name, check.level) for check in found] == [("model", "broken"), ("encoder", "broken")]
    assert "make setup" in found[0].mend


def test_a_dead_run_is_named_with_both_mends(call: Call, make_run: Call) -> None:
    run = make_run(status="running")
    old = time.time() - 1000
    os.utime(run.path / "heartbeat", (old, old))
    found = checks(call)["runs"]
    assert found["level"] == "warning"
    assert run.run_id in found["found"]
    assert f"--resume {run.run_id}" in found["mend"]


def test_a_store_that_is_away_is_a_warning_only(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    result = call("doctor", "--json")
    assert result.code == 0
    store = {check["name"]: check for check in result.json()["checks"]}["mlflow store"]
    assert store["level"] == "warning"


def test_keys_are_named_and_never_shown(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    result = call("doctor")
    assert "HF_TOKEN" in result.out
    assert "hf_secret_value" not in result.out + result.err


def test_a_check_that_fails_is_a_finding_and_the_others_still_run(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(root: Path) -> Iterator[Check]:
        raise RuntimeError("driver too old")
        yield

    broken.__name__ = "_torch"
    monkeypatch.setattr(doctor, "_torch", broken)
    found = checks(call)
    assert found["torch"] == {
        "name": "torch", "level": "broken", "found": "driver too old",
        "mend": "see the message; then run make setup",
    }  # fmt: skip
    assert "keys" in found


@pytest.mark.slow
def test_the_real_checks_pass_where_the_tests_run(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    from racelab.cli.doctor import examine

    found = {check.name: check for check in examine(Path.cwd())}
    assert [check.name for check in found.values() if check.level == "broken"] == []
    assert "hash as expected" in found["model"].found
    assert found["torch"].level == "ok"


def test_an_address_that_is_none_is_a_finding(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:99999")
    found = checks(call)["mlflow store"]
    assert found["level"] == "warning"
    assert "Port out of range" in found["found"]


def test_a_damaged_run_is_named(call: Call, make_run: Call) -> None:
    run = make_run()
    assert "damaged runs" not in checks(call)
    (run.path / "run.json").write_text("[]", encoding="utf-8")
    found = checks(call)
    assert (found["damaged runs"]["level"], found["damaged runs"]["found"]) == ("warning", run.run_id)
    assert found["runs"]["found"] == "0, none died"


# --- a cluster ----------------------------------------------------------------------------------------------


@pytest.fixture
def slurm(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    found = FakeSlurm.install(home / "slurm", monkeypatch)
    hook(found, "sbatch", monkeypatch, before='[ "$1" = --version ] && echo slurm-wlm 22.05.8 && exit')
    return found


def test_without_slurm_all_is_well(call: Call, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    (home / "bin").mkdir()
    monkeypatch.setenv("PATH", str(home / "bin"))
    found = checks(call)
    assert (found["slurm"]["level"], found["slurm"]["found"]) == (
        "note",
        "none; only launcher=slurm needs it",
    )
    assert "launches" not in found


def test_a_cluster_is_said_with_what_it_has(call: Call, slurm: FakeSlurm) -> None:
    found = checks(call)
    assert found["slurm"] == {
        "name": "slurm",
        "level": "ok",
        "found": "slurm-wlm 22.05.8, with accounting, arrays of 1001; partitions: cpu, short, gpu, high",
        "mend": "",
    }
    assert "launches" not in found
    slurm.setting(accounting=False, config={"MaxArraySize": "5"})
    assert "without accounting, arrays of 5" in checks(call)["slurm"]["found"]


def test_a_cluster_that_does_not_answer_is_a_warning_only(call: Call, slurm: FakeSlurm) -> None:
    slurm.setting(unreachable=True)
    result = call("doctor", "--json")
    assert result.code == 0
    found = {check["name"]: check for check in result.json()["checks"]}["slurm"]
    assert found["level"] == "warning"
    assert "Unable to contact slurm controller" in found["found"]
    assert "launcher=inline" in found["mend"]


def test_launches_that_were_not_submitted_or_are_damaged_are_named(
    call: Call, slurm: FakeSlurm, home: Path
) -> None:
    """Neither is a reason why `train` could not work here."""
    whole = launched(home / "runs", uid="20260102T030405-000001")
    whole.submit("12")
    assert checks(call)["launches"]["found"] == "1, all submitted"
    half = launched(home / "runs" / "elsewhere", uid="20260102T030405-000002")
    half.folder.record(intent(half.launch.batches[0], 1))
    half.folder.path.rename(whole.folder.path.with_name(half.launch.uid))
    found = checks(call)["launches"]
    assert (found["level"], found["found"]) == ("warning", f"not submitted: {half.launch.uid}")
    assert found["mend"] == "racelab jobs submits them"
    (whole.folder.path / "launch.json").write_text("[")
    result = call("doctor", "--json")
    assert result.code == 0
    rows = {check["name"]: check for check in result.json()["checks"]}
    assert rows["damaged launches"]["level"] == "warning"
    assert whole.launch.uid in rows["damaged launches"]["found"]
    assert rows["launches"]["found"] == f"not submitted: {half.launch.uid}"
