"""What a running sweep says: one live table on a terminal, plain lines elsewhere, nothing under --json."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from racelab.analysis.rlds_words import counted
from racelab.cli.console import number, seconds
from racelab.configs.schema_eval import EvalRunConfig
from racelab.configs.schema_rlds import RldsRunConfig
from racelab.sweeps.launch import CellState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from racelab.sweeps.progress import Progress
    from racelab.sweeps.run import View

_LINE_EVERY_S = 30.0
_DRAW_EVERY_S = 1.0
_ORDER = ("running", "elsewhere", "failed", "interrupted", "waiting", "finished")
"""Which cells are shown first where the terminal is too low for all."""
_COLUMNS = {
    "race": ("seed", "status", "step", "policy", "phase", "reward", "elapsed", "ETA"),
    "rlds": ("seed", "status", "update", "reward", "solved", "retry success", "elapsed", "ETA"),
    "eval": ("seed", "status", "examples", "elapsed", "ETA"),
}
"""Kind of the cells -> headings after the cell's name."""
_STYLES = {
    "running": "cyan",
    "elsewhere": "yellow",
    "failed": "red",
    "interrupted": "yellow",
    "finished": "green",
}


def make_view(json_output: bool, stream: IO[str] | None = None) -> View:
    """The view that fits, on stderr."""
    stream = stream or sys.stderr
    if json_output:
        return Silent()
    return LiveTable() if stream.isatty() else PlainLines(stream)


class Silent:
    """Says nothing."""

    def start(self, name: str, states: Sequence[CellState]) -> None:
        """Nothing."""

    def changed(self, state: CellState) -> None:
        """Nothing."""

    def tick(self, states: Sequence[CellState]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


def counts(states: Sequence[CellState]) -> str:
    """`9 cells: 3 finished, 1 running, 5 waiting`."""
    statuses = [_standing(state) for state in states]
    words = [
        f"{statuses.count(s)} {s}"
        for s in ("finished", "failed", "running", "elsewhere", "interrupted", "waiting")
        if s in statuses
    ]
    return f"{counted(len(states), 'cell')}: {', '.join(words)}"


def _standing(state: CellState) -> str:
    """The status; of a cell that waits to go on, how it was left: interrupted (or killed), or failed."""
    if state.status != "waiting" or not state.attempts:
        return state.status
    return "failed" if state.folder.status() == "failed" else "interrupted"


def _began(state: CellState) -> str:
    """`started, in FOLDER`, or `goes on at update 213, in FOLDER` where there is a checkpoint to go on at."""
    kept = [
        int(path.name.removeprefix("step-"))
        for path in (state.folder.path / "checkpoints").glob("step-*")
        if path.name.removeprefix("step-").isdecimal()
    ]
    if not state.attempts or not any(kept):
        return f"started, in {state.folder.path}"
    return (
        f"goes on at {'step' if _kind(state) == 'race' else 'update'} {max(kept) + 1}, in {state.folder.path}"
    )


def cell_name(state: CellState) -> str:
    """`full-s0`."""
    return f"{state.cell.label}-s{state.cell.seed}"


class PlainLines:
    """A line when a cell starts or ends, and one for each running cell every half minute. No box characters."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        """Writes to `stream`; stderr by default."""
        self._stream = stream or sys.stderr
        self._next = 0.0

    def start(self, name: str, states: Sequence[CellState]) -> None:
        """Names the sweep and counts its cells."""
        self.note(f"{name}: {counts(states)}")
        self._next = time.monotonic() + _LINE_EVERY_S

    def changed(self, state: CellState) -> None:
        """One line."""
        if state.status == "running":
            self.note(f"{cell_name(state)}: {_began(state)}")
        elif state.status == "elsewhere":
            self.note(f"{cell_name(state)}: another process has it; waiting for it")
        elif state.status != "waiting":
            took = f" after {seconds(state.took_s)}" if state.took_s is not None else ""
            reason = f": {state.reason}" if state.reason else ""
            self.note(f"{cell_name(state)}: {state.status}{took}{reason}")

    def tick(self, states: Sequence[CellState]) -> None:
        """Every half minute, a line for each running cell."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LINE_EVERY_S
        for state in states:
            if state.status == "running":
                p = state.progress()
                self.note(
                    f"{cell_name(state)}: {_how_far(state, p)}  "
                    f"elapsed={seconds(state.elapsed())}  eta={seconds(p.eta_s)}"
                )

    def note(self, text: str) -> None:
        """The text, as it is."""
        try:
            print(text, file=self._stream, flush=True)
        except BrokenPipeError:
            self._stream = io.StringIO()  # whoever read along has gone; the sweep must not die of that

    def stop(self) -> None:
        """Nothing to close."""


def _how_far(state: CellState, p: Progress) -> str:
    """The middle of a running cell's line."""
    budget = number(state.cell.config.budget)
    if _kind(state) == "eval":
        return f"{number(p.examples or 0)} examples"
    if _kind(state) == "race":
        phase = p.phase or "untrained view"
        return f"step {number(p.step)}  policy {number(p.policy_step)}/{budget}  {phase}  reward={number(p.reward)}"
    if p.policy_step is None:
        return "before the first update"
    return (
        f"update {number(p.policy_step)}/{budget}  reward={number(p.reward)}  solved={number(p.solved)}  "
        f"retry_success={number(p.retry_success)}"
    )


def _kind(state: CellState) -> str:
    """RACE runs have phases; in RLDS runs every step is an update of the policy; an evaluation has examples."""
    if isinstance(state.cell.config, EvalRunConfig):
        return "eval"
    return "rlds" if isinstance(state.cell.config, RldsRunConfig) else "race"


class LiveTable:
    """One table that is redrawn; failures scroll above it and stay in the terminal's history."""

    def __init__(self, console: Console | None = None) -> None:
        """Draws on `console`; stderr by default."""
        from rich.console import Console

        self._console = console or Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._name = ""
        self._drawn = 0.0

    def start(self, name: str, states: Sequence[CellState]) -> None:
        """Opens the table."""
        from rich.live import Live

        self._name = name
        self._live = Live(self.render(states), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)

    def changed(self, state: CellState) -> None:
        """A failure is kept above the table."""
        self._drawn = 0.0
        if state.status == "failed":
            self.note(f"{cell_name(state)} failed: {state.reason} ({state.log})")

    def tick(self, states: Sequence[CellState]) -> None:
        """Redraws, once a second or when something has changed."""
        if self._live is not None and time.monotonic() >= self._drawn + _DRAW_EVERY_S:
            self._drawn = time.monotonic()
            self._live.update(self.render(states), refresh=True)

    def note(self, text: str) -> None:
        """A line above the table."""
        from rich.text import Text

        self._console.print(Text(text, style="dim"))

    def stop(self) -> None:
        """Leaves the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self, states: Sequence[CellState]) -> RenderableType:
        """The table as it stands; the least interesting cells are left out where the terminal is too low."""
        from rich.box import ROUNDED
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=ROUNDED, title=f"{self._name}   {counts(states)}", title_justify="left", header_style="bold"
        )
        table.add_column("cell", overflow="fold")
        kinds = set(map(_kind, states))
        kind = "race" if "race" in kinds else kinds.pop()
        for name in _COLUMNS[kind]:
            table.add_column(name, justify="left" if name in ("status", "phase") else "right", no_wrap=True)
        room = max(5, self._console.height - 8)
        kept = sorted(states, key=lambda state: _ORDER.index(state.status))[:room]
        for state in (s for s in states if any(s is k for k in kept)):
            table.add_row(*(Text(text, style=_STYLES.get(state.status, "")) for text in _cells(state, kind)))
        if len(states) > len(kept):
            hidden = len(states) - len(kept)
            table.caption = f"{counted(hidden, 'cell')} {'is' if hidden == 1 else 'are'} not shown"
        return table


def _cells(state: CellState, kind: str) -> list[str]:
    """A cell's row of the table, with the columns of `kind`."""
    head, elapsed = [state.cell.label, str(state.cell.seed), _standing(state)], seconds(state.elapsed())
    if state.status != "running":
        return [*head, *[""] * (len(_COLUMNS[kind]) - 4), elapsed, ""]
    p = state.progress()
    done = f"{number(p.policy_step)}/{number(state.cell.config.budget)}"
    if kind == "eval":
        middle = [number(p.examples or 0)]
    elif kind == "race":
        middle = [number(p.step), done, p.phase or "untrained view", number(p.reward)]
    else:
        middle = [done, number(p.reward), number(p.solved), number(p.retry_success)]
    return [*head, *middle, elapsed, seconds(p.eta_s)]
