"""What an evaluation says: progress while it runs, its scores when it is done."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import IO, TYPE_CHECKING, Any, Protocol

from racelab.cli.console import number, on_terminal, print_table, say, seconds
from racelab.experiments.evaluation.totals import in_order

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from racelab.experiments.types import StepRecord

Columns = dict[str, list[str]]
"""Heading -> its cells."""
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
            say(f"{far}  mean={_mean(s['mean'])}{lost}  eta={seconds(s['eta_s'])}")


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
        said = f"mean {_mean(s['mean'])}{lost}  ETA {seconds(s['eta_s'])}"
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


def _mean(value: object) -> str:
    """A running mean, with its unit: it stands in no table that says so."""
    return f"{percent(value)} %" if isinstance(value, int | float) else "-"


def percent(value: object) -> str:
    """A fraction in per cent with one decimal, as the papers print scores."""
    return number(100 * value, 1) if isinstance(value, int | float) else "-"


def interval(low: object, high: object) -> str:
    """`[12.1, 20.4]` of fractions."""
    return f"[{percent(low)}, {percent(high)}]" if isinstance(low, int | float) else "-"


def print_scores(summary: Mapping[str, Any]) -> None:
    """The table of an evaluation's scores on stdout, and what must be known to read it on stderr."""
    stored: Mapping[str, Mapping[str, Any]] = summary["scores"]
    scores = {label: stored[label] for label in in_order(stored)}
    columns = {
        "benchmark": list(scores),
        **{head: [of(s) for s in scores.values()] for head, of in _OF_SCORE},
    }
    if summary.get("avg") is not None:
        last = {"benchmark": "average", "score": percent(summary["avg"]), "metric": "mean over the suite"}
        for head, cells in columns.items():
            cells.append(last.get(head, "-"))
    spare = [
        "metric",
        *(h for h in ("unparsed", "lost", "cut") if not any(c.strip("0-") for c in columns[h])),
    ]
    left_out = []
    while spare and not _fits(columns):
        left_out.append(spare.pop(0))
        del columns[left_out[-1]]
    fixed = {"benchmark": columns.pop("benchmark")}
    for part in _parts(fixed, columns):
        _print_columns(fixed | part, left=("benchmark", "metric"))
    if left_out:
        say(f"columns that do not fit: {', '.join(left_out)}")
    judge = f", judge {summary['judge']}" if summary.get("judge") else ""
    say(
        f"suite {summary['suite']}, protocol {summary['protocol']}, seed {summary['seed']}{judge}; scores in per cent, "
        "intervals by a bootstrap over examples"
    )
    for line in summary.get("notes", []):
        say(f"note: {line}")


_OF_SCORE: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("score", lambda s: percent(s["value"])),
    ("95 % interval", lambda s: interval(s.get("low"), s.get("high"))),
    ("examples", lambda s: f"{s['n']:,}"),
    ("cut", lambda s: f"{s['cut']:,}" if s.get("answers") else "-"),
    ("unparsed", lambda s: f"{s['unparsed']:,}"),
    ("lost", lambda s: f"{s['lost']:,}"),
    ("metric", lambda s: str(s["metric"])),
)
"""Heading -> the text of a score's cell. `cut`: answers that the token budget ended."""


def _fits(columns: Mapping[str, Sequence[str]]) -> bool:
    """Whether the boxed table is no wider than the terminal; a file or a pipe takes any width."""
    width = 1 + sum(3 + max(map(len, [head, *cells])) for head, cells in columns.items())
    return not on_terminal() or width <= shutil.get_terminal_size().columns


def _print_columns(columns: Mapping[str, Sequence[str]], left: Sequence[str]) -> None:
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    print_table(
        list(columns), rows, [head for head in columns if head not in left], whole=[next(iter(columns))]
    )


def print_eval_cells(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each evaluation with its scores in per cent, and one for the mean over the seeds of a label.

    On a narrow terminal `took` is left out, then the status if it is the same everywhere; what is still too wide stands
    in several tables, one below the other.
    """
    lines = _with_means(rows)
    labels = in_order(name for row in rows for name in row.get("scores") or {})
    lacking = any(row.get("lost") for row in rows)
    fixed = {
        "cell": [str(row["label"]) for row in lines],
        "seed": [str(row["seed"]) for row in lines],
        "status": [str(row["status"]) for row in lines],
    }
    scores = {name: [_score_cell(row, name) for row in lines] for name in labels}
    last = {"lost": [_lost_cell(row) for row in lines]} if lacking else {}
    took = {"took": [seconds(row.get("wall_s")) for row in lines]}
    timed = _fits(fixed | scores | last | took)
    if timed:
        last |= took
    elif not _fits(fixed | scores | last) and {row["status"] for row in rows} == {"finished"}:
        del fixed["status"]
    for part in _parts(fixed, scores | last):
        _print_columns(fixed | part, left=("cell", "status"))
    if any(scores.values()):
        means = "mean: of the finished seeds, ± their standard deviation; " if len(lines) > len(rows) else ""
        span = "; took: without the start of the process" if timed else ""
        say(f"scores in per cent; {means}examples: {_sizes(rows)}{span}")
        _say_notes([row for row in rows if row.get("scores")])


def _with_means(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows, and below the last one of a label of which several have finished their mean and standard deviation."""
    found: list[Mapping[str, Any]] = []
    for label in dict.fromkeys(row["label"] for row in rows):
        own = [row for row in rows if row["label"] == label]
        found += own
        ended = [row["scores"] for row in own if row["status"] == "finished" and row.get("scores")]
        names = dict.fromkeys(name for scores in ended for name in scores)
        values = {name: [scores[name] for scores in ended if name in scores] for name in names}
        if len(ended) > 1:
            means = {name: (fmean(of), stdev(of)) for name, of in values.items() if len(of) > 1}
            found.append({"label": label, "seed": "mean", "status": f"of {len(ended)}", "scores": means})
    return found


def _score_cell(row: Mapping[str, Any], name: str) -> str:
    """`41.3`, of a mean `41.3 ± 1.2`."""
    value = (row.get("scores") or {}).get(name)
    return " ± ".join(map(percent, value)) if isinstance(value, tuple) else percent(value)


def _lost_cell(row: Mapping[str, Any]) -> str:
    return "-" if row["seed"] == "mean" else f"{sum((row.get('lost') or {}).values()):,}"


def _parts(fixed: Columns, more: Columns) -> list[Columns]:
    """`more` in as few parts as fit beside `fixed`, at least one column in each."""
    parts: list[Columns] = [{}]
    for head, cells in more.items():
        if parts[-1] and not _fits({**fixed, **parts[-1], head: cells}):
            parts.append({})
        parts[-1][head] = cells
    return parts


def _sizes(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many examples have a score: `gsm8k 200, bbh 199 to 200`, or `200 of each`."""
    counts = [row.get("n") or {} for row in rows]
    found: dict[str, str] = {}
    for label in in_order(label for of in counts for label in of):
        low, high = (least([of[label] for of in counts if label in of]) for least in (min, max))
        found[label] = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    if len(found) > 1 and len(set(found.values())) == 1:
        return f"{next(iter(found.values()))} of each"
    return ", ".join(f"{label} {n}" for label, n in found.items())


def _say_notes(rows: Sequence[Mapping[str, Any]]) -> None:
    """What holds of all these evaluations, once; where the rest stands."""
    from racelab.analysis.eval_summary import few_note

    shared = [line for line in rows[0]["notes"] if all(line in row["notes"] for row in rows)]
    least: dict[str, int] = {}
    for row in rows:
        least |= {label: min(n, least.get(label, n)) for label, n in row["n"].items()}
    for line in dict.fromkeys([*shared, *few_note(least)]):
        say(f"note: {line}")
    more = next((row["run_id"] for row in rows if len(row["notes"]) > len(shared)), None)
    if more is not None:
        say(f"not all have the same notes; those of one: racelab show {more}")
