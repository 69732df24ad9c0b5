"""The conditions of an RLDS sweep against each other: tables, plain sentences, and a picture in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from racelab.analysis.rlds_words import FEW, counted, too_few
from racelab.cli.console import number, print_table, say
from racelab.cli.summary_rlds import interval, mean_interval
from racelab.experiments.errors import RacelabError
from racelab.experiments.runfolder import RunFolder
from racelab.sweeps.run import members

if TYPE_CHECKING:
    from racelab.analysis.rlds_curves import Curve

PICTURE: Final = "comparison.png"
_FEW_SEEDS: Final = 5
_ENDED: Final = "linear between evaluations; mean over seeds; -: a run had ended before"
_TITLES: Final = {
    "updates": "equal updates (measured; mean over seeds; -: no evaluation there)",
    "tokens": f"equal sampled tokens ({_ENDED})",
    "cpu_s": f"equal CPU seconds ({_ENDED})",
}


def comparison(sweep: RunFolder, draw: bool) -> dict[str, Any] | None:
    """Task -> `rlds_curves.compare_task` of the finished cells of a sweep; None without two of them to compare.

    A record that cannot be read is a word on stderr: what the sweep itself did is not lost by it.

    Args:
        sweep: its folder.
        draw: write the picture into it.
    """
    if sweep.info().get("paper") == "race":
        return None
    try:
        from racelab.analysis.rlds_curves import compare

        curves = _curves(sweep)
        if len(curves) < 2:
            return None
        found = compare(curves)
        if draw:
            from racelab.analysis.rlds_plot import plot

            title = "; ".join(f"{task}: {', '.join(of['conditions'])}" for task, of in found.items())
            plot(curves, found, title, sweep.path / PICTURE)
        return found
    except RacelabError as error:
        say(f"warning: the conditions are not compared: {error}")
        return None


def _curves(sweep: RunFolder) -> list[Curve]:
    from racelab.analysis.rlds_curves import read_curve

    found = []
    for entry in members(sweep):
        path = sweep.path.parent / str(entry["run_id"])
        if (path / "run.json").is_file():
            curve = read_curve(RunFolder.open(path), str(entry["label"]))
            if curve is not None:
                found.append(curve)
    return found


def print_comparison(found: Mapping[str, Any], sweep: RunFolder) -> None:
    """`comparison`'s dict on stdout."""
    for task, of in found.items():
        print()
        _results(task, of)
        for axis, title in _TITLES.items():
            _curve(title, of["curves"][axis], of["token_notes"] if axis == "tokens" else ())
    if (sweep.path / PICTURE).is_file():
        print(f"\nPicture: {sweep.path / PICTURE}")


def _results(task: str, of: Mapping[str, Any]) -> None:
    conditions, differences = of["conditions"], of["differences"]
    few_last, n = (f(c["evaluations"] for c in conditions.values()) for f in (min, max))
    result = "last evaluation" if n == 1 else f"mean of last {n if few_last == n else f'{few_last} to {n}'}"
    examples = max(c["examples"] for c in conditions.values())
    few = examples < FEW
    words = too_few(examples) if few else "95 % intervals over seeds and examples, paired"
    print(f"{task}: validation reward on {counted(examples, 'example')} ({words})")
    for note in of["notes"]:
        print(f"  NOTE: {note}")
    against = [
        b for b in ("rlvr", "base-reflection") if any(name.endswith(f" - {b}") for name in differences)
    ]
    rows = [
        [
            name,
            ",".join(map(str, c["seeds"])),
            mean_interval(c["last_five"], "value"),
            number(c["best"]),
            number(c["last"]),
            *(interval(differences.get(f"{name} - {b}") or {}, "value") for b in against),
        ]
        for name, c in conditions.items()
    ]
    heads = ["condition", "seeds", result, "best", "last", *(f"less {b}" for b in against)]
    print_table(heads, rows, right=["best", "last"])
    for sentence in of["verdicts"]:
        print(sentence)
    if of["blind_walker"] is not None:
        print(f"A walker that heads for the goal and does not see holes solves {number(of['blind_walker'])}.")
    seeds = min(len(c["seeds"]) for c in conditions.values())
    if few:
        return
    if seeds == 1:
        print("With one seed the interval is over examples only: another seed may well fall outside.")
    elif seeds < _FEW_SEEDS:
        print(f"{seeds} seeds understate how much seeds differ: the true interval is wider.")


def _curve(title: str, found: Mapping[str, Any], said: Sequence[str]) -> None:
    at: Sequence[float] = found["at"]
    print(f"\nAt {title}")
    for note in said:
        print(f"  NOTE: {note}.")
    digits = 0 if all(float(v).is_integer() for v in at) else 1 if at[-1] >= len(at) else 2
    heads = ["condition", *(number(float(v), digits) for v in at)]
    rows = [[name, *(number(v) for v in values)] for name, values in found["reward"].items()]
    print_table(heads, rows, right=heads[1:])
