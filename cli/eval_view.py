"""What an evaluation says: progress while it runs, its scores when it is done."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

from racelab.cli.console import number, print_table, say, seconds
from racelab.configs.schema_eval import BENCHMARKS
from racelab.experiments.evaluation.totals import benchmark_of

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from racelab.experiments.types import StepRecord

_LINE_EVERY_S = 5.0
_REDRAW_HZ = 4


class EvalProgress(Protocol):
    """The face of a running evaluation."""

    def start(self, title: str) -> None:
        """Opens."""

    def update(self, record: StepRecord) -> None:
        """One example is done; see `EvalSession._show` for the values of `status`."""

    def note(self, text: str) -> None:
        """A line of talk."""

    def stop(self) -> None:
        """Closes; a second call does nothing."""


def make_progress(json_output: bool, stream: IO[str] | None = None) -> EvalProgress:
    """Nothing under --json, a bar on a terminal, lines elsewhere (on stderr)."""
    stream = stream or sys.stderr
    if json_output:
        return Silent()
    return Bar() if stream.isatty() else Lines()


class Silent:
    """Says nothing."""

    def start(self, title: str) -> None:
        """Nothing."""

    def update(self, record: StepRecord) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class Lines:
    """A line every few seconds. A batch brings many examples in one instant: what is said is how it stands after it."""

    def __init__(self) -> None:
        """Nothing has been said yet."""
        self._newest: StepRecord | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, title: str) -> None:
        """The title."""
        say(title)
        self._thread = threading.Thread(target=self._talk, name="racelab-progress", daemon=True)
        self._thread.start()

    def update(self, record: StepRecord) -> None:
        """How far; said at once only of a benchmark that is done."""
        self._newest = record
        if record.status["done"] == record.status["total"]:
            self._say()

    def note(self, text: str) -> None:
        """The text."""
        say(text)

    def stop(self) -> None:
        """Ends the lines."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _talk(self) -> None:
        while not self._over.wait(_LINE_EVERY_S):
            self._say()

    def _say(self) -> None:
        record, self._newest = self._newest, None
        if record is not None:
            s = record.status
            lost = f"  lost={s['lost']}" if s["lost"] else ""
            far = f"{s['benchmark']}: {s['done']}/{s['total']}"
            say(f"{far}  mean={number(s['mean'])}{lost}  eta={seconds(s['eta_s'])}")


class Bar:
    """One bar per benchmark; talk scrolls above."""

    def __init__(self) -> None:
        """Nothing is drawn yet."""
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def start(self, title: str) -> None:
        """Opens the bars."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True, highlight=False),
            refresh_per_second=_REDRAW_HZ,
        )
        self._progress.start()
        self.note(title)

    def update(self, record: StepRecord) -> None:
        """Moves the bar of the benchmark."""
        if self._progress is None:
            return
        s = record.status
        name, total = str(s["benchmark"]), int(str(s["total"]))
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, said="")
        lost = f"  lost {s['lost']}" if s["lost"] else ""
        said = f"mean {number(s['mean'])}{lost}  ETA {seconds(s['eta_s'])}"
        self._progress.update(self._tasks[name], completed=int(str(s["done"])), said=said)

    def note(self, text: str) -> None:
        """A line above the bars."""
        from rich.text import Text

        if self._progress is not None:
            self._progress.console.print(Text(text, style="dim"))

    def stop(self) -> None:
        """Leaves the bars on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def percent(value: object) -> str:
    """A fraction in per cent with one decimal, as the papers print scores."""
    return number(100 * value, 1) if isinstance(value, int | float) else "-"


def interval(low: object, high: object) -> str:
    """`[12.1, 20.4]` of fractions."""
    return f"[{percent(low)}, {percent(high)}]" if isinstance(low, int | float) else "-"


def print_scores(summary: Mapping[str, Any]) -> None:
    """The table of an evaluation's scores on stdout, and what must be known to read it on stderr."""
    stored: Mapping[str, Mapping[str, Any]] = summary["scores"]
    scores = {label: stored[label] for label in sorted(stored, key=_place)}
    rows = [
        [
            label,
            percent(s["value"]),
            interval(s.get("low"), s.get("high")),
            f"{s['n']:,}",
            f"{s['unparsed']:,}",
            f"{s['lost']:,}",
            str(s["metric"]),
        ]
        for label, s in scores.items()
    ]
    if summary.get("avg") is not None:
        rows.append(["average", percent(summary["avg"]), "-", "-", "-", "-", "mean over the suite"])
    right = ["score", "95 % interval", "examples", "unparsed", "lost"]
    print_table(
        ["benchmark", "score", "95 % interval", "examples", "unparsed", "lost", "metric"], rows, right
    )
    say(
        f"suite {summary['suite']}, protocol {summary['protocol']}, seed {summary['seed']}; scores in per cent, "
        "intervals by a bootstrap over examples"
    )
    for line in summary.get("notes", []):
        say(f"note: {line}")


def _place(label: str) -> int:
    """Where a label stands in a table: in the order of the suites."""
    return BENCHMARKS.index(benchmark_of(label))


def print_eval_cells(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table with an evaluation a line: its scores in per cent."""
    named = {name for row in rows for name in row.get("scores") or {}}
    labels = [
        *sorted(named - {"avg"}, key=lambda name: (_place(name), name)),
        *(["avg"] if "avg" in named else []),
    ]
    lacking = [sum((row.get("lost") or {}).values()) for row in rows]
    last = ["lost", "took"] if any(lacking) else ["took"]
    shown = [
        [
            str(row["label"]),
            str(row["seed"]),
            str(row["status"]),
            *(percent((row.get("scores") or {}).get(name)) for name in labels),
            *([f"{count:,}"] if any(lacking) else []),
            seconds(row.get("wall_s")),
        ]
        for row, count in zip(rows, lacking, strict=True)
    ]
    print_table(["cell", "seed", "status", *labels, *last], shown, right=["seed", *labels, *last])
