"""How far a running cell is: the end of its spool, read on from where the last look stopped."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from racelab.experiments.errors import DataError, RunFolderError
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import read_lines, spool_files

_PHASES = {0.0: "policy", 1.0: "rubric"}
_SOLVED = re.compile(r"task/[^/]+/solved_frac")


@dataclass(frozen=True, slots=True)
class Progress:
    """What the newest attempt's record says last; None where it says nothing yet.

    Attributes:
        step: global step.
        policy_step: policy updates done.
        phase: policy or rubric.
        reward: mean reward of the last policy step.
        eta_s: seconds to the end at the pace of this attempt.
        solved: share of that step's rollouts that solved their task (RLDS).
        retry_success: share of its retries that beat the original (RLDS).
        examples: rows of examples so far (evaluations).
    """

    step: int | None = None
    policy_step: int | None = None
    phase: str | None = None
    reward: float | None = None
    eta_s: float | None = None
    solved: float | None = None
    retry_success: float | None = None
    examples: int | None = None


class SpoolTail:
    """Follows the newest attempt of one run."""

    def __init__(self, run: RunFolder, policy_updates: int) -> None:
        """Args: run: opened. policy_updates: the budget, for the estimate of the end."""
        self._run, self._budget = run, policy_updates
        self._file: Path | None = None
        self._offset = 0
        self._first: tuple[int, int] | None = None
        self._now = Progress()

    def read(self) -> Progress:
        """The state now. A record that cannot be read is left to those who report on the run."""
        try:
            files = list(spool_files(self._run).values())
            if files and files[-1] != self._file:
                self._file, self._offset, self._first = files[-1], 0, None
            for record, after in read_lines(self._file, self._offset) if self._file else ():
                self._offset = after
                if record["kind"] == "rows" and record["table"] == "eval_examples":
                    done = (self._now.examples or 0) + len(record["rows"])
                    self._now = replace(self._now, examples=done)
                elif record["kind"] == "metrics":
                    self._take(int(record["step"]), int(record["ts"]), record["values"])
        except (DataError, RunFolderError):
            pass
        return self._now

    def _take(self, step: int, ts: int, values: dict[str, float]) -> None:
        done = values.get("train/clock/policy_step")
        if done is None:
            return
        policy_step = int(done)
        self._first = self._first or (policy_step, ts)
        self._now = Progress(
            step,
            policy_step,
            _PHASES.get(values.get("train/clock/phase_kind", -1.0)),
            values.get("train/reward/mean", self._now.reward),
            self._eta(policy_step, ts),
            next((v for name, v in values.items() if _SOLVED.fullmatch(name)), self._now.solved),
            values.get("rlds/reflect/success_frac", self._now.retry_success),
        )

    def _eta(self, policy_step: int, ts: int) -> float | None:
        assert self._first is not None
        since, began = self._first
        if policy_step <= since:
            return None
        return (ts - began) / 1000 / (policy_step - since) * max(0, self._budget - policy_step)
