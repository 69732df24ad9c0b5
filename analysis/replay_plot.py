"""A replay as a picture: what the log says as a line, what the replay says dashed, and the phases of both on top.

Colours are from the set of Okabe and Ito (2008), told apart by every kind of colour vision; line style says the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from racelab.analysis.replay import Replayed
from racelab.analysis.replay_diff import logged_values
from racelab.analysis.replay_log import Log
from racelab.experiments.errors import RunFolderError
from racelab.experiments.fsio import explain
from racelab.experiments.methods.race.phase import PhaseKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOGGED, _REPLAYED = "#0072B2", "#D55E00"
_PHASES = {"policy": "#56B4E9", "rubric": "#E69F00"}
_FAINT, _HATCH = "#666666", "#D0D0D0"
_DASHES = (0, (4, 2))
_DPI, _WIDTH = 150, 9.0


Series = tuple[list[int], list[float]]


@dataclass(frozen=True, slots=True)
class _Panel:
    """One axis: a value, the kind of step that has it, its label, and a threshold drawn thin beside it."""

    name: str
    label: str
    kind: PhaseKind = PhaseKind.POLICY
    thin: str = ""


_PANELS = (
    _Panel("q_ema", r"$\hat{q}$"),
    _Panel("sigma_rt", r"$\sigma_{rt}$"),
    _Panel("tau_tie", r"$\tau_{tie}$"),
    _Panel("f_ema", "$\\hat{f}$,  $\\tau_{sat}$ (thin)", thin="tau_sat"),
    _Panel("tau_imp", r"$\tau_{imp}$", PhaseKind.RUBRIC),
)


def plot(log: Log, replayed: Replayed, q_target: tuple[float, float], title: str, file: Path) -> None:
    """Draws log and replay into a PNG.

    Args:
        log: of the run.
        replayed: its replay.
        q_target: q* of the run, and of the replay.
        title: one line, or a few.
        file: its folder is made if it is not there.

    Raises:
        RunFolderError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels = [panel for panel in _PANELS if any(d.kind is panel.kind for d in replayed.decisions)]
    figure = Figure(figsize=(_WIDTH, 1.6 + 1.55 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [0.55, *[1.0] * len(panels)]
    axes: list[Axes] = list(
        figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    )
    _strip(axes[0], log.phases, replayed.phases)
    for axis, panel in zip(axes[1:], panels, strict=True):
        _lines(axis, log, replayed, panel)
        _shade(axis, replayed)
    _targets(axes[1], q_target)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_xlim(0.5, len(log.steps) + 0.5)
    axes[-1].set_xlabel("step", fontsize=9)
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels(axes[1:])
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    figure.legend(handles=_legend(replayed), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=_DPI, format="png", metadata={"Software": "racelab"})
    except OSError as error:
        raise RunFolderError(f"cannot write {file}: {explain(error)}; name another with --plot") from error


def _points(log: Log, replayed: Replayed, name: str, kind: PhaseKind) -> tuple[Series, Series]:
    """(steps, values) of the whole log and of the replay, each against its own steps of that kind."""
    logged = [(at.step, logged_values(log, at)[name]) for at in log.steps if at.kind is kind]
    ours = [
        (d.step, d.before.state().get(name, getattr(d, name, math.nan)))
        for d in replayed.decisions
        if d.kind is kind
    ]
    first, second = (
        ([s for s, v in points if not math.isnan(v)], [v for _, v in points if not math.isnan(v)])
        for points in (logged, ours)
    )
    return first, second


def _lines(axis: Axes, log: Log, replayed: Replayed, panel: _Panel) -> None:
    for name, width in ((panel.name, 1.6), (panel.thin, 0.8)):
        if name:
            logged, ours = _points(log, replayed, name, panel.kind)
            axis.plot(*logged, color=_LOGGED, lw=width, drawstyle="steps-post", solid_capstyle="butt")
            axis.plot(*ours, color=_REPLAYED, lw=width, ls=_DASHES, drawstyle="steps-post")
    axis.set_ylabel(panel.label, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.margins(y=0.12)


def _targets(axis: Axes, q_target: tuple[float, float]) -> None:
    """q* of both, or one grey line if it is the same."""
    own, other = q_target
    for level, colour in ((own, _LOGGED), (other, _REPLAYED)) if own != other else ((own, _FAINT),):
        axis.axhline(level, color=colour, lw=1.0, ls=":")
        axis.annotate(
            "$q^*$", (1.0, level), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8, color=colour, annotation_clip=False,
        )  # fmt: skip


def _strip(axis: Axes, logged: Sequence[Mapping[str, Any]], replayed: Sequence[Mapping[str, Any]]) -> None:
    """The phases of both as bars, one above the other."""
    for height, rows in ((1, logged), (0, replayed)):
        for phase in rows:
            start, end = int(phase["start"]), int(phase["end"])
            axis.broken_barh(
                [(start - 0.5, end - start + 1)], (height - 0.36, 0.72),
                facecolors=_PHASES[str(phase["kind"])], edgecolor="white", linewidth=0.8,
            )  # fmt: skip
    axis.set_yticks([1, 0], ["logged", "replayed"], fontsize=8)
    axis.set_ylim(-0.5, 1.5)
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.tick_params(left=False, bottom=False)


def _shade(axis: Axes, replayed: Replayed) -> None:
    """The replay's rubric phases, and the part in which it went another way than the run."""
    for phase in replayed.phases:
        if phase["kind"] == PhaseKind.RUBRIC.value:
            axis.axvspan(phase["start"] - 0.5, phase["end"] + 0.5, color=_PHASES["rubric"], alpha=0.12, lw=0)
    if replayed.parted is not None:
        end = replayed.decisions[-1].step + 0.5
        axis.axvspan(replayed.parted - 0.5, end, fc="none", ec=_HATCH, hatch="//", lw=0, zorder=0)
        axis.axvline(replayed.parted - 0.5, color=_FAINT, lw=0.8)


def _legend(replayed: Replayed) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Line2D([], [], color=_LOGGED, lw=1.6, label="logged"),
        Line2D([], [], color=_REPLAYED, lw=1.6, ls=_DASHES, label="replayed"),
        Patch(facecolor=_PHASES["policy"], label="policy phase"),
        Patch(facecolor=_PHASES["rubric"], label="rubric phase (shaded: replayed)"),
    ]
    if replayed.parted is not None:
        handles.append(Patch(fc="none", ec=_HATCH, hatch="///", label="counterfactual"))
    return handles
