"""What a running training says: a live panel on a terminal, one line a step elsewhere, nothing under --json.

The values come from `StepRecord.status`: phase ("policy" or "rubric"), policy_step, policy_budget, reward,
routes (route -> number of groups), sigma_rt, tau_tie, tau_sat, tau_imp, f_ema, q_ema, q_target, pool,
tokens_per_s, step_s, eta_s, event (text, "" for none). A value that is missing is shown as `-`.

A method whose steps are all updates of the policy gives `columns` (label -> number) instead of phases, routes,
thresholds and pool: those are shown, whatever they are. Its steps may be quick, so off a terminal there is a line for
the first, the last, and one every few seconds.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Protocol

from racelab.cli.console import number, seconds, sparkline

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from racelab.experiments.types import StepRecord

_ROUTES = (
    ("informative", "green", ("informative",)),
    ("collapsed", "yellow", ("collapsed", "diversity_collapsed")),
    ("failed", "red", ("failed", "rubric_failed")),
    ("invalid", "magenta", ("invalid",)),
)
"""Label, colour, and the names under which `status["routes"]` may hold it."""
_THRESHOLDS = (
    ("σ_rt", "sigma_rt"),
    ("τ_tie", "tau_tie"),
    ("τ_sat", "tau_sat"),
    ("τ_imp", "tau_imp"),
)
_HISTORY = 400
_LINE_EVERY_S = 5.0


class Display(Protocol):
    """The face of a run."""

    def start(self, title: str, total_policy_updates: int) -> None:
        """Opens; called once, before the first step."""

    def update(self, record: StepRecord) -> None:
        """Shows one step."""

    def note(self, text: str) -> None:
        """Shows a line that is not a step (a phase change, a warning, a checkpoint)."""

    def stop(self) -> None:
        """Closes; a second call does nothing."""


def make_display(json_output: bool, stream: IO[str] | None = None) -> Display:
    """The display that fits: none under --json, a panel on a terminal, plain lines otherwise (on stderr)."""
    stream = stream or sys.stderr
    if json_output:
        return Silent()
    return Panel() if stream.isatty() else PlainLines(stream)


class Silent:
    """Says nothing."""

    def start(self, title: str, total_policy_updates: int) -> None:
        """Nothing."""

    def update(self, record: StepRecord) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


def _routes(status: Mapping[str, object]) -> dict[str, int]:
    """Label -> number of groups, from whatever names the method uses; routes that are absent count 0."""
    found = status.get("routes")
    counts = found if isinstance(found, Mapping) else {}
    return {label: sum(int(counts.get(name, 0)) for name in names) for label, _, names in _ROUTES}


def _columns(status: Mapping[str, object]) -> Mapping[str, object] | None:
    """`columns`, None for a method with phases."""
    found = status.get("columns")
    return found if isinstance(found, Mapping) else None


def _short_time(value: object) -> str:
    """Seconds; below ten with a decimal."""
    short = isinstance(value, int | float) and 0 <= value < 10
    return f"{value:.1f}s" if short else seconds(value)


def _reward(status: Mapping[str, object]) -> float:
    value = status.get("reward")
    return float(value) if isinstance(value, int | float) else math.nan


class PlainLines:
    """One line a step, `key=value` words that a person can read and grep can cut. No box characters."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        """Writes to `stream`; stderr by default."""
        self._stream = stream or sys.stderr
        self._budget = 0
        self._next = 0.0

    def start(self, title: str, total_policy_updates: int) -> None:
        """Names the run and its budget."""
        self._budget = total_policy_updates
        self._say(f"{title}: {total_policy_updates} policy update{'' if total_policy_updates == 1 else 's'}")

    def update(self, record: StepRecord) -> None:
        """One line."""
        s = record.status
        columns = _columns(s)
        if columns is not None:
            self._update_line(s, columns)
            return
        words = [f"step {record.step}", str(s.get("phase", "-"))]
        words.append(
            f"policy {number(s.get('policy_step'))}/{number(s.get('policy_budget') or self._budget)}"
        )
        words.append(f"reward={number(s.get('reward'))}")
        if s.get("phase") == "policy":
            counts = ",".join(f"{label}:{count}" for label, count in _routes(s).items() if count)
            words.append(f"routes={counts or '-'}")
            words.append(f"f={number(s.get('f_ema'))}/{number(s.get('tau_sat'))}")
            words.append(f"q={number(s.get('q_ema'))}/{number(s.get('q_target'))}")
        words.append(f"pool={number(s.get('pool'))}")
        words.append(f"tok/s={number(s.get('tokens_per_s'), 0)}")
        words.append(f"took={seconds(s.get('step_s'))} eta={seconds(s.get('eta_s'))}")
        if s.get("event"):
            words.append(f"[{s['event']}]")
        self._say("  ".join(words))

    def _update_line(self, s: Mapping[str, object], columns: Mapping[str, object]) -> None:
        """The line of an update, unless one has just been written and there are more to come."""
        budget = s.get("policy_budget") or self._budget
        last = s.get("policy_step") == budget
        if time.monotonic() < self._next and not last and not s.get("event"):
            return
        self._next = time.monotonic() + _LINE_EVERY_S
        words = [f"update {number(s.get('policy_step'))}/{number(budget)}"]
        words.append(f"reward={number(s.get('reward'))}")
        words += [f"{label}={number(value)}" for label, value in columns.items()]
        words.append(f"tok/s={number(s.get('tokens_per_s'), 0)}")
        words.append(f"took={_short_time(s.get('step_s'))} eta={seconds(s.get('eta_s'))}")
        if s.get("event"):
            words.append(f"[{s['event']}]")
        self._say("  ".join(words))

    def note(self, text: str) -> None:
        """The text, as it is."""
        self._say(text)

    def stop(self) -> None:
        """Nothing to close."""

    def _say(self, line: str) -> None:
        try:
            print(line, file=self._stream, flush=True)
        except BrokenPipeError:
            # Whoever read along has gone; a training must not die of that.
            self._stream = io.StringIO()


class Panel:
    """One live panel; events scroll above it and stay in the terminal's history."""

    def __init__(self, console: Console | None = None) -> None:
        """Draws on `console`; stderr by default."""
        from rich.console import Console

        self._console = console or Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._title = ""
        self._budget = 0
        self._record: StepRecord | None = None
        self._policy_rewards: deque[float] = deque(maxlen=_HISTORY)
        self._rubric_rewards: deque[float] = deque(maxlen=_HISTORY)

    def start(self, title: str, total_policy_updates: int) -> None:
        """Opens the panel."""
        from rich.live import Live

        self._title, self._budget = title, total_policy_updates
        self._live = Live(self.render(), console=self._console, refresh_per_second=4, transient=False)
        self._live.start()

    def update(self, record: StepRecord) -> None:
        """Redraws with a step's values; its event, if any, is kept above the panel."""
        self._record = record
        rewards = self._policy_rewards if record.status.get("phase") == "policy" else self._rubric_rewards
        rewards.append(_reward(record.status))
        if record.status.get("event"):
            self.note(f"step {record.step}: {record.status['event']}")
        if self._live is not None:
            self._live.update(self.render())

    def note(self, text: str) -> None:
        """A line above the panel."""
        from rich.text import Text

        self._console.print(Text(text, style="dim"))

    def stop(self) -> None:
        """Leaves the last state on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self) -> RenderableType:
        """The panel as it stands."""
        from rich.box import ROUNDED
        from rich.panel import Panel as Frame
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        if self._record is None:
            grid.add_row("state", Text("loading models"))
        else:
            for label, value in self._rows(self._record):
                grid.add_row(label, value)
        title = Text(self._title, style="bold")
        return Frame(grid, title=title, title_align="left", box=ROUNDED, expand=False)

    def _rows(self, record: StepRecord) -> list[tuple[str, RenderableType]]:
        from rich.text import Text

        s = record.status
        name = "progress" if _columns(s) is not None else "phase"
        rows: list[tuple[str, RenderableType]] = [(name, self._progress(record))]
        for label, rewards in (("reward", self._policy_rewards), ("rubric reward", self._rubric_rewards)):
            if rewards:
                rows.append((label, Text(f"{number(rewards[-1])}  {sparkline(list(rewards))}")))
        if s.get("routes"):
            routes = Text()
            for (label, colour, _), count in zip(_ROUTES, _routes(s).values(), strict=True):
                routes.append(f"{label} {count}  ", style=colour if count else "dim")
            rows.append(("routes", routes))
        words = f"{number(s.get('tokens_per_s'), 0)} tokens/s   step {_short_time(s.get('step_s'))}"
        speed = ("speed", Text(f"{words}   ETA {seconds(s.get('eta_s'))}"))
        columns = _columns(s)
        if columns is not None:
            shown = "   ".join(f"{label.replace('_', ' ')} {number(v)}" for label, v in columns.items())
            return [*rows, ("rollouts", Text(shown)), speed]
        switch = f"f̂ {number(s.get('f_ema'))} / τ_sat {number(s.get('tau_sat'))}"
        quarantine = f"q̂ {number(s.get('q_ema'))} / q* {number(s.get('q_target'))}"
        return [
            *rows,
            ("thresholds", Text("  ".join(f"{name} {number(s.get(key), 4)}" for name, key in _THRESHOLDS))),
            ("controllers", Text(f"{switch}   {quarantine}")),
            ("pool", Text(f"{number(s.get('pool'))} entries")),
            speed,
        ]

    def _progress(self, record: StepRecord) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        s = record.status
        phase, done = str(s.get("phase", "-")), s.get("policy_step")
        budget = s.get("policy_budget") or self._budget
        line = Table.grid(padding=(0, 1))
        phases = _columns(s) is None
        where = f"policy {number(done)}/{number(budget)}, step {record.step}"
        line.add_row(
            *[Text(phase, style="bold cyan" if phase == "policy" else "bold magenta")] * phases,
            Text(where if phases else f"update {number(done)}/{number(budget)}"),
            ProgressBar(
                total=max(1, budget if isinstance(budget, int) else 1),
                completed=done if isinstance(done, int) else 0,
                width=24,
            ),
        )
        return line
