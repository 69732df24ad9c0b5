"""Keeps lm-eval's code metric out of this process: model code runs in the sandbox or not at all.

lm-eval's MBPP helpers load the metric `code_eval` of the package `evaluate` as they are imported, and run programs with
it at once. That metric confines nothing (it asks for HF_ALLOW_CODE_EVAL=1, which is never set here). While the helpers
are imported, a stand-in for the package gives them a metric that has each program run by `run_code`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Protocol

_HELPERS = "lm_eval.tasks.mbpp.utils"
_PACKAGE = "evaluate"


class Outcome(Protocol):
    """What became of a program."""

    @property
    def passed(self) -> bool:
        """It ended of its own accord, without an error."""


RunCode = Callable[[str], Outcome]


class SandboxedCodeEval:
    """Answers as `code_eval` does, as far as the helpers ask."""

    def __init__(self, run_code: RunCode) -> None:
        """Keeps the sandbox."""
        self._run_code = run_code

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
    ) -> tuple[dict[str, float], dict[str, object]]:
        """pass@1: the share of passing programs, each the prediction followed by the tests, meaned over the tasks."""
        if list(k) != [1]:
            raise ValueError(f"only pass@1 is known, not k={list(k)}")
        shares = [
            sum(self._run_code(program(code, tests)).passed for code in codes) / len(codes)
            for tests, codes in zip(references, predictions, strict=True)
        ]
        return {"pass@1": sum(shares) / len(shares)}, {}


def program(code: str, tests: str) -> str:
    """What is run: the code and its tests as `code_eval` runs them, in a namespace without a name.

    So `if __name__ == "__main__"` is not entered, and leaving early (`sys.exit(0)`) is a failure, not a pass: the tests
    were not reached.
    """
    return (
        f"source = {code + chr(10) + tests!r}\n"
        "try:\n"
        "    exec(source, {})\n"
        "except BaseException as error:\n"
        "    raise SystemExit(f'{type(error).__name__}: {error}') from None\n"
    )


@contextmanager
def sandboxed(run_code: RunCode) -> Iterator[None]:
    """While this lasts, an import of lm-eval's MBPP helpers binds them to the sandbox.

    Afterwards they are forgotten, so that no later import finds them bound to this sandbox; what was taken from them
    keeps it.
    """
    stand_in = ModuleType(_PACKAGE)
    stand_in.load = lambda name: SandboxedCodeEval(run_code)  # type: ignore[attr-defined]
    before = {name: sys.modules.pop(name, None) for name in (_PACKAGE, _HELPERS)}
    sys.modules[_PACKAGE] = stand_in
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
