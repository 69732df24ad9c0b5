"""A graph on this machine: its stages one after the other, each a child process of the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Final, Literal

from racelab.cli.console import print_json, results, say, seconds
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.signals import StopRequest
from racelab.sweeps.cells import open_cell
from racelab.sweeps.launch import POLL_S, child_environment, child_words
from racelab.sweeps.slurm.stages import Planned, Runs

Status = Literal["finished", "failed", "interrupted", "not run"]
_PAST: Final[Mapping[Status, str]] = {
    "failed": "failed",
    "interrupted": "was interrupted",
    "not run": "was not run",
}
_INTERRUPTED: Final = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a stage ended.

    Attributes:
        status: not run: it waits for the success of a stage that had none, or somebody stopped the graph.
        exit_code: of its command; None if that was not run.
        reason: one line, "" if it went well.
        took_s: seconds.
    """

    status: Status
    exit_code: int | None
    reason: str
    took_s: float


def run_here(stages: Sequence[Planned], json_output: bool) -> int:
    """Runs the stages in order. Returns 0, 1 if one did not finish, or 128 + the signal that stopped the graph."""
    ended: dict[str, Ended] = {}
    with StopRequest() as stop:
        for planned in stages:
            ended[planned.stage.name] = _stage(planned, ended, stop, json_output)
            _say_end(planned.stage.name, ended[planned.stage.name])
    with results():
        if json_output:
            print_json(
                [
                    {
                        "stage": name,
                        "status": end.status,
                        "exit_code": end.exit_code,
                        "reason": end.reason,
                        "took_s": end.took_s,
                    }
                    for name, end in ended.items()
                ]
            )
    if stop.signum:
        return stop.exit_code
    return int(any(end.status != "finished" for end in ended.values()))


def _stage(planned: Planned, ended: Mapping[str, Ended], stop: StopRequest, json_output: bool) -> Ended:
    """Runs one stage, unless it cannot run any more."""
    name = planned.stage.name
    if stop.signum:
        return Ended("not run", None, f"stopped by {_signal_name(stop.signum)}", 0.0)
    for after in planned.stage.waits:
        if after.condition == "ok" and (status := ended[after.stage].status) != "finished":
            return Ended(
                "not run", None, f"it needs the success of {after.stage}, which {_PAST[status]}", 0.0
            )
    say(f"stage {name}: {planned.command}")
    words = _child(planned)
    started = time.monotonic()
    # Under --json stdout is for the one result of the graph.
    code = _run(words, stop, sys.stderr if json_output else None)
    took = time.monotonic() - started
    if code == 0:
        return Ended("finished", 0, "", took)
    if stop.signum or code in _INTERRUPTED:
        return Ended("interrupted", code, f"stopped by {_signal_name(stop.signum or code - 128)}", took)
    reason = f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
    return Ended("failed", code, reason, took)


def _child(planned: Planned) -> list[str]:
    """The command line of the child: of one run, its folder (made here, so that its id is the one that was planned)."""
    if planned.runs is not None and planned.runs.single:
        child = child_words(_folder(planned.runs))
        return child[: child.index("--json")]
    return [sys.executable, "-P", "-m", "racelab.cli.main", *planned.typed]


def _run(words: Sequence[str], stop: StopRequest, stdout: IO[str] | None) -> int:
    """The exit code of a child, which gets the signals that this process gets."""
    child = subprocess.Popen(
        words,
        env=child_environment(os.environ, 1),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        start_new_session=True,
    )
    passed_on = False
    try:
        while (code := child.poll()) is None:
            if stop.signum and not passed_on:
                child.send_signal(stop.signum)
                passed_on = True
            time.sleep(POLL_S)
    except BaseException:  # a second Ctrl-C
        child.kill()
        child.wait()
        raise
    return code


def _folder(runs: Runs) -> RunFolder:
    (cell,), (run_id,) = runs.plan.cells, runs.plan.run_ids
    return open_cell(runs.plan.root, cell, run_id, "")


def _say_end(name: str, end: Ended) -> None:
    took = f" after {seconds(end.took_s)}" if end.exit_code is not None else ""
    say(f"stage {name}: {end.status}{took}{f': {end.reason}' if end.reason else ''}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
