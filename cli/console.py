"""Where words go: data to stdout, talk to stderr; boxes and colours only on a terminal."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_BARS = "▁▂▃▄▅▆▇█"


def on_terminal() -> bool:
    """Whether stdout is a terminal; a closed one (`>&-`) is none."""
    return sys.stdout is not None and sys.stdout.isatty()


def console(stderr: bool = False) -> Console:
    """A rich console for stdout or stderr; it honours NO_COLOR by itself."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=not on_terminal())


def say(text: str) -> None:
    """One line of talk, on stderr; that nobody reads there any more changes nothing."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        discard(sys.stderr)


@contextlib.contextmanager
def results() -> Iterator[None]:
    """Around the last words of a command that did something: without a reader they are lost, its exit code is not."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)


def discard(stream: TextIO) -> None:
    """Sends a stream whose reader (head, tee) has gone to the null device, what waits in its buffer included."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def print_json(value: object) -> None:
    """Strict JSON on stdout; what is not finite becomes null."""
    print(json.dumps(_strict(value), ensure_ascii=False, indent=2, allow_nan=False, default=str))


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return value


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> None:
    """A table on stdout: boxed on a terminal, else aligned columns with two spaces between, nothing cut.

    Args:
        columns: headings.
        rows: cells.
        right: columns that are set flush right.
        whole: columns that are not folded on a narrow terminal as long as others can be.
    """
    if on_terminal():
        from rich.box import ROUNDED
        from rich.table import Table
        from rich.text import Text

        table = Table(box=ROUNDED, header_style="bold")
        for name in columns:
            table.add_column(
                name, justify="right" if name in right else "left", overflow="fold", no_wrap=name in whole
            )
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console().print(table)
        return
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(line, widths, columns, strict=True)
        ]
        print("  ".join(cells).rstrip())


def number(value: object, digits: int = 3) -> str:
    """A number for people; `-` where there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.{digits}f}" if math.isfinite(value) else "-"


def seconds(value: object) -> str:
    """Seconds as `8s`, `3m05s`, `2h10m`; `-` where there are none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return "-"
    total = round(value)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last `width` finite values as bars, scaled to their own range."""
    finite = [value for value in values if math.isfinite(value)][-width:]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    if high == low:
        return _BARS[3] * len(finite)
    scale = (len(_BARS) - 1) / (high - low)
    return "".join(_BARS[round((value - low) * scale)] for value in finite)
