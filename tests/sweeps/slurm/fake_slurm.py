"""A cluster in a file: programs that stand in for squeue, sacct, scontrol, sbatch and scancel.

They print what Slurm 22.05.8 prints for the options that racelab passes (recorded from a real one; `test_parsing.py`
holds the recordings), fail on other options, keep their state in `state.json` and log every call. Time stands still:
a job changes only when a test says so.

    slurm = FakeSlurm.install(tmp_path / "slurm", monkeypatch)      # first on PATH
    slurm.add("12", name="x", tasks=3)                              # 12_0, 12_1, 12_2, PENDING; sbatch does the same
    slurm.set("12_0", state="RUNNING", nodes="node1", start="2024-11-30T08:00:00", elapsed_s=60)
    slurm.set("12_1", state="FAILED", nodes="node1", exit="3:0", start=..., end=...)
    slurm.set("12_1", queue=False)      # squeue has forgotten it, sacct has not
    slurm.set("12_2", record=False)     # and the other way round
    slurm.setting(accounting=False)     # see SETTINGS
    slurm.calls("squeue")               # the arguments of each call
    slurm.job("12_0")["state"]          # what became of it; see JOB

SETTINGS and JOB are in `fake_slurm_tools.py`, which the programs are copies of.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from .fake_slurm_tools import SETTINGS, matching, new_job, open_state

TOOLS = ("squeue", "sacct", "scontrol", "sbatch", "scancel")
SOURCE = Path(__file__).with_name("fake_slurm_tools.py")


class FakeSlurm:
    """The cluster, for a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def install(cls, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> FakeSlurm:
        """Makes the folder with the programs and puts it first on PATH."""
        folder.mkdir()
        source = f"#!{sys.executable} -IS\n" + SOURCE.read_text(encoding="utf-8")
        for tool in TOOLS:
            path = folder / tool
            path.write_text(source, encoding="utf-8")
            path.chmod(0o755)
        (folder / "state.json").write_text(json.dumps({**SETTINGS, "jobs": {}}))
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        slurm = cls(folder)
        slurm.setting(**settings)
        return slurm

    def setting(self, **settings: Any) -> None:
        """Sets some of SETTINGS; `config`, `partitions` and `nodes` are merged with what is there."""
        unknown = settings.keys() - SETTINGS.keys()
        assert not unknown, unknown
        with open_state(str(self.folder)) as state:
            for key, value in settings.items():
                if key in ("partitions", "nodes"):
                    for name, fields in value.items():
                        state[key].setdefault(name, {}).update(fields)
                elif key == "config":
                    state[key].update(value)
                else:
                    state[key] = value
            if "accounting" in settings:
                kind = "slurmdbd" if settings["accounting"] else "none"
                state["config"]["AccountingStorageType"] = f"accounting_storage/{kind}"

    def add(self, job_id: str, *, tasks: int = 0, **fields: Any) -> str:
        """Adds a job, or an array of some tasks; `fields` as in JOB. Returns the id."""
        with open_state(str(self.folder)) as state:
            for task in [f"{job_id}_{i}" for i in range(tasks)] or [job_id]:
                state["jobs"][task] = new_job(fields)
            state["next_id"] = max(state["next_id"], int(job_id.partition("_")[0]) + 1)
        return job_id

    def set(self, *ids: str, **fields: Any) -> None:
        """Changes jobs; `12` stands for all tasks of an array."""
        with open_state(str(self.folder)) as state:
            for job_id in ids:
                found = matching(state, job_id)
                assert found, f"no job {job_id}"
                for task in found:
                    state["jobs"][task] = new_job({**state["jobs"][task], **fields})

    def jobs(self) -> dict[str, dict[str, Any]]:
        """All jobs, by id, tasks of arrays one by one."""
        with open_state(str(self.folder)) as state:
            return dict(state["jobs"])

    def job(self, job_id: str) -> dict[str, Any]:
        """One of them."""
        return self.jobs()[job_id]

    def calls(self, tool: str = "") -> list[list[str]]:
        """The arguments of every call so far, in order: of one tool, or of all with the tool's name first."""
        every = [(call["tool"], call["arguments"]) for call in self._log()]
        return [words if tool else [name, *words] for name, words in every if tool in ("", name)]

    def environments(self, tool: str) -> list[dict[str, str]]:
        """The environment of every call of a tool."""
        return [call["environment"] for call in self._log() if call["tool"] == tool]

    def forget_calls(self) -> None:
        """Empties the log."""
        (self.folder / "calls.jsonl").unlink(missing_ok=True)

    def _log(self) -> list[dict[str, Any]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
