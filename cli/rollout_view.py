"""`racelab show RUN --rollout STEP[:GROUP[:IDX]]`: a rollout turn by turn, or a list of rollouts.

On a terminal the replies are coloured and long texts are cut (`--full` cuts none). Off it everything is printed, as
plain text.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from racelab.analysis.transcript import load_rollouts, load_transcripts, transcript_steps
from racelab.analysis.transcript_text import (
    SUBTASK_COLUMNS,
    blocks,
    cut,
    facts,
    grading_label,
    notes,
    ranges,
    signed,
    subtask_cells,
    turn_words,
    visible,
)
from racelab.analysis.transcript_types import Place, Rollout, Transcript, TurnView
from racelab.cli.console import console, on_terminal, print_json, print_table
from racelab.cli.train import command, reference
from racelab.experiments.errors import ConfigError, RunFolderError
from racelab.experiments.fsio import explain
from racelab.experiments.runfolder import RunFolder

_LINES, _CHARS = 16, 1_200
"""Of a text on a terminal that is no reply; replies are never cut."""
_LABEL = 11
_PALE = (238, 238, 238)
_DEEP = {True: (96, 200, 120), False: (240, 120, 112)}
"""Background of a reply, from hardly any advantage to the largest: above 0, below 0. The letters on it are black."""


def show_rollout(run: RunFolder, text: str, html: Path | None, full: bool, json_output: bool) -> int:
    """Prints what `text` names, or writes it as a page.

    Args:
        run: of an RLDS condition; no sweep.
        text: see `Place.parse`.
        html: file of the page; it is replaced.
        full: cut nothing on a terminal.
        json_output: everything as JSON; with `html` both.

    Raises:
        ConfigError: `text` is malformed, or names a whole step where a page is wanted.
        DataError: there is no such rollout, or its transcript was not kept.
        RunFolderError: the page cannot be written.
    """
    place = Place.parse(text)
    if html is not None:
        _write_page(run, place, html)
    if place.group is None or place.idx is None:
        if json_output or html is None:
            _list(run, place, load_rollouts(run, place.step, place.group), json_output)
        return 0
    (transcript,) = load_transcripts(run, place.step, place.group, place.idx)
    if json_output:
        print_json(transcript.to_json())
    elif html is None:
        _print(transcript, full)
    return 0


def _write_page(run: RunFolder, place: Place, file: Path) -> None:
    """The rollout, or all of the group, as one page."""
    from racelab.analysis.transcript_html import page
    from racelab.cli.console import say

    if place.group is None:
        raise ConfigError(f"--html shows a rollout or a group; name one, as --rollout {place.step}:0")
    text = page(load_transcripts(run, place.step, place.group, place.idx))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"cannot write {file}: {explain(error)}; name another with --html") from error
    say(f"wrote {file}")


def _list(run: RunFolder, place: Place, rollouts: Sequence[Rollout], json_output: bool) -> None:
    if json_output:
        print_json({"run_id": run.run_id, "step": place.step, "rollouts": [asdict(r) for r in rollouts]})
        return
    print(f"{run.info().get('name')}  {run.run_id}  step {place.step}")
    kept = transcript_steps(run)
    if place.step not in kept:  # above the list, which may be long
        there = f"only of {ranges(kept)}" if kept else "of no step"
        print(f"No transcripts were kept of this step, {there} (run.transcripts_every)\n")
    columns = ["rollout", "kind", "reward", "solved", "end", "turns", "grades", "Â_i", "GRPO", "instance"]
    right = ["reward", "turns", "Â_i", "GRPO"]
    print_table(columns, [_row(r) for r in rollouts], right)
    if place.step in kept:
        first = rollouts[0]
        print(f"\nTurn by turn: {command()} show {reference(run)} --rollout {first.place}")


def _row(r: Rollout) -> list[str]:
    return [
        r.place,
        f"retry of {r.parent} from {r.retry_from}" if r.is_retry else "original",
        signed(r.reward),
        {True: "yes", False: "no", None: "-"}[r.solved],
        visible(r.end_reason),
        str(r.n_turns),
        "-" if r.grades is None else " ".join("-" if g is None else str(g) for g in r.grades),
        signed(r.adv_sdae),
        signed(r.adv_grpo),
        visible(r.instance_id),
    ]


def _print(t: Transcript, full: bool) -> None:
    for label, text in facts(t):
        _block(label, text)
    print()
    print_table(SUBTASK_COLUMNS, [subtask_cells(row) for row in t.subtasks], list(SUBTASK_COLUMNS[1:]))
    print()
    for label, text in notes(t):
        _block(label, text)
    texts = blocks(t)
    if t.grading:
        texts.append((grading_label(t), visible(t.grading)))
    for label, text in texts:
        _heading(f"\n{label[:1].upper()}{label[1:]}")
        _block("", _short(text, full))
    for turn in t.turns:
        _turn(t, turn, full)


def _turn(t: Transcript, turn: TurnView, full: bool) -> None:
    words = [f"Turn {turn.index}", signed(turn.advantage), *turn_words(turn)]
    _heading("\n" + visible("  ".join(words)))
    _block("reply", visible(turn.text) or "(nothing)", _style(t, turn))
    if turn.observation:
        _block("observation", _short(visible(turn.observation), full))


def _short(text: str, full: bool) -> str:
    """The text, on a terminal its beginning."""
    if full or not on_terminal():
        return text
    kept, left = cut(text, _LINES, _CHARS)
    return f"{kept}\n... {left:,} more characters (--full)" if left else text


def _style(t: Transcript, turn: TurnView) -> str:
    """Of a reply; "" for one without advantage."""
    strength = t.strength(turn)
    if not strength or turn.advantage is None:
        return ""
    deep = _DEEP[turn.advantage > 0]
    red, green, blue = (round(a + (b - a) * strength) for a, b in zip(_PALE, deep, strict=True))
    return f"black on rgb({red},{green},{blue})"


def _heading(text: str) -> None:
    _line(text, "bold")


def _block(label: str, text: str, style: str = "") -> None:
    """A label and a text beside it, wrapped on a terminal; off it one line for each of the text's."""
    indent = _LABEL + 4
    width = max(40, shutil.get_terminal_size().columns - indent) if on_terminal() else 10**6
    lines = [part for line in text.splitlines() or [""] for part in (textwrap.wrap(line, width) or [""])]
    for i, line in enumerate(lines):
        _line(line, style, f"  {label if i == 0 else '':>{_LABEL}}  ")


def _line(text: str, style: str = "", before: str = "") -> None:
    """One line; the style is for terminals."""
    if not on_terminal():
        print((before + text).rstrip())
        return
    from rich.text import Text

    console().print(Text(before).append(text, style or None), soft_wrap=True)
