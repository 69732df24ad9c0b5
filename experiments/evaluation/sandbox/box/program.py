"""Runs one program's text in the process that it is in, confined by now, and shows whether its end was reached."""

from __future__ import annotations

import atexit
import builtins
import os
import sys
from typing import Any

FILE_NAME = "program.py"
OUT_OF_MEMORY = b"memory"
_PREFIX = "racelab."


def run(text: str, nonce: int, reply: int) -> int:
    """Executes a program as a script is; returns the exit code.

    Only after its last statement is the nonce taken from a pipe and handed back: it was drawn after this process began
    and was in no memory that the program could read before.

    Args:
        text: Python source.
        nonce: file to read the nonce from.
        reply: file to write it to, or `OUT_OF_MEMORY`.
    """
    module = _main_module()
    code = 1
    try:
        exec(compile(text, FILE_NAME, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        code = _code_of(stop.code)
    except BaseException as error:
        if isinstance(error, MemoryError):
            os.write(reply, OUT_OF_MEMORY)
        _show(error)
    else:
        os.write(reply, os.read(nonce, 64))
        code = 0
    return _finish(code)


def _main_module() -> Any:
    """An empty `__main__`; nothing of racelab stays importable, and `exit` is there as in a script."""
    module = type(sys)("__main__")
    for name in [name for name in sys.modules if name.startswith(_PREFIX)]:
        del sys.modules[name]
    sys.modules["__main__"] = module
    sys.argv = [FILE_NAME]
    vars(builtins)["exit"] = vars(builtins)["quit"] = sys.exit
    return module


def _code_of(value: object) -> int:
    """What Python makes of the argument of sys.exit."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """The traceback without the frame of `run`; what goes wrong meanwhile is the program's doing."""
    try:
        trace = error.__traceback__
        error = error.with_traceback(trace and trace.tb_next)
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:
        return


def _finish(code: int) -> int:
    """Threads are waited for, exit functions called and output written, as at the end of a script."""
    try:
        threading: Any = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        return code or 120
    return code
