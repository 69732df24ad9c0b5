"""Running model-written code, one program or many at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from racelab.experiments.errors import ConfigError
from racelab.experiments.evaluation.sandbox.check import check_sandbox
from racelab.experiments.evaluation.sandbox.process import RefusedError, execute
from racelab.experiments.evaluation.sandbox.types import CodeResult, Limits, Means, SandboxError


def run_code(program: str, limits: Limits | None = None, *, means: Means | None = None) -> CodeResult:
    """Runs a program confined, or not at all.

    Args:
        program: Python source.
        limits: default: `Limits()`.
        means: one of the two; default: what `check_sandbox` found.

    Raises:
        SandboxError: it cannot be confined, or the run could not be started; it was not run.
    """
    try:
        chosen = means or check_sandbox().means
    except ConfigError as error:
        raise SandboxError(str(error)) from None
    try:
        return execute(program, limits or Limits(), chosen)
    except RefusedError as error:
        raise SandboxError(f"sandbox: the code was not run, {chosen} cannot be had: {error}") from None


def run_many(
    programs: Sequence[str], limits: Limits | None = None, workers: int = 0, *, means: Means | None = None
) -> list[CodeResult]:
    """Runs programs side by side; results in the order of the programs.

    Args:
        programs: Python sources.
        limits: of each.
        workers: at a time; 0: one per core that this process may use.
        means: as in `run_code`.

    Raises:
        SandboxError: as `run_code`; what has not begun by then is not run.
    """
    if not programs:
        return []
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        tasks = [pool.submit(run_code, program, limits, means=means) for program in programs]
        try:
            return [task.result() for task in tasks]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
