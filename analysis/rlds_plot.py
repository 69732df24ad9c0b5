"""The conditions of a sweep as a picture: validation reward against updates, sampled tokens and CPU seconds.

A row of panels per task. Thick: mean over seeds, as far as all of them go; thin: the seeds. Colours are from the set
of Okabe and Ito (2008), told apart by every kind of colour vision; markers say the same. A marker is an evaluation:
where seeds were evaluated at different amounts their mean has none. The caption says so, and what the tokens leave out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from racelab.analysis.rlds_curves import AXES, Curve, FloatArray, named
from racelab.experiments.errors import RunFolderError
from racelab.experiments.fsio import explain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_FAINT = "#666666"
_DPI = 150
_POINTS = 60
_CAPTION_WIDTH = 170


def plot(curves: Sequence[Curve], compared: Mapping[str, Any], title: str, file: Path) -> None:
    """Draws the curves into a PNG.

    Args:
        curves: of finished runs.
        compared: `rlds_curves.compare` of them.
        title: one line.
        file: in a folder that is there.

    Raises:
        RunFolderError: the file cannot be written.
    """
    try:
        picture(curves, compared, title).savefig(
            file, dpi=_DPI, format="png", metadata={"Software": "racelab"}
        )
    except OSError as error:
        raise RunFolderError(f"cannot write {file}: {explain(error)}") from error


def picture(curves: Sequence[Curve], compared: Mapping[str, Any], title: str) -> Figure:
    """The picture itself; arguments as of `plot`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    tasks, caption = list(compared), _caption(compared)
    height = 1.0 + 3.3 * len(tasks) + 0.15 * caption.count("\n")
    figure = Figure(figsize=(11.0, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(tasks), len(AXES), squeeze=False, sharey="row")
    for axes, task in zip(grid, tasks, strict=True):
        by_name = named([c for c in curves if c.task == task])
        for axis, (key, label) in zip(axes, AXES.items(), strict=True):
            _draw(axis, by_name, key)
            _walker(axis, compared[task]["blind_walker"])
            axis.set_xlabel(label, fontsize=9)
            axis.tick_params(labelsize=8)
            axis.xaxis.set_major_locator(MaxNLocator(5))
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 600k
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(axis="y", color="#E5E5E5", lw=0.6)
            axis.set_axisbelow(True)
        axes[0].set_ylabel(f"{task}: validation reward", fontsize=9)
        lines = axes[0].get_legend_handles_labels()
        axes[-1].legend(*lines, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.supxlabel(caption, fontsize=7.5, x=0.01, ha="left")
    return figure


def _caption(compared: Mapping[str, Any]) -> str:
    """What the curves are, and whose tokens leave grading and reflection out."""
    said = [
        "Markers: evaluations, linear between them. Thick: mean over seeds; thin: single seeds; the mean ends where "
        "the first seed ends; time and tokens of updates only."
    ]
    for task, of in compared.items():
        said += [f"NOTE: {f'{task}, ' if len(compared) > 1 else ''}{note}." for note in of["token_notes"]]
    return "\n".join(line for sentence in said for line in textwrap.wrap(sentence, _CAPTION_WIDTH))


def _draw(axis: Axes, by_name: Mapping[str, Mapping[int, Curve]], key: str) -> None:
    """The conditions of one task against one kind of cost."""
    for number, (name, of) in enumerate(by_name.items()):
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        common = key == "updates" or len(of) == 1  # evaluations of all seeds at the same amounts
        if len(of) > 1:
            for curve in of.values():
                x_E, own = curve.at[key], None if common else marker
                axis.plot(x_E, curve.reward, color=colour, lw=0.7, alpha=0.35, marker=own, ms=3.0)
        x_P = _measured(of, key) if common else _between(of, key)
        y_P = np.mean([np.interp(x_P, c.at[key], c.reward) for c in of.values()], axis=0)
        axis.plot(x_P, y_P, color=colour, lw=2.0, marker=marker if common else None, ms=4.5, label=name)


def _measured(of: Mapping[int, Curve], key: str) -> FloatArray:
    """Amounts at which all seeds were evaluated [P]."""
    return np.array(sorted(set.intersection(*(set(c.at[key].tolist()) for c in of.values()))))


def _between(of: Mapping[int, Curve], key: str) -> FloatArray:
    """Amounts as far as all seeds go [P]."""
    return np.linspace(0.0, min(float(c.at[key][-1]) for c in of.values()), _POINTS)


def _walker(axis: Axes, level: float | None) -> None:
    """The line of the walker that does not see holes."""
    if level is not None:
        axis.axhline(level, color=_FAINT, lw=1.2, ls=(0, (4, 2)), label="walker blind to holes")
