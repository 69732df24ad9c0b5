"""Rollouts as HTML for people: the same as `racelab show RUN --rollout ID` prints, for the report or as a page.

Self-contained: no script, no link to anything outside, one style sheet. Everything that a model, a web page or a task
wrote is escaped; the page also forbids the browser to load or run anything. Colours follow the reader's light or dark
scheme, and every colour's value stands beside it in digits, for those who cannot tell green from red.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from racelab.analysis.transcript_text import (
    DEMONSTRATION,
    SUBTASK_COLUMNS,
    blocks,
    facts,
    grading_label,
    notes,
    signed,
    subtask_cells,
    turn_words,
    visible,
)
from racelab.analysis.transcript_types import Rollout, Transcript, TurnView

_FOLD = 1_500
"""Texts of more characters are folded; the system prompt and the demonstration always are."""
_DEEPEST = 0.45
"""Opacity of the largest advantage: text on it keeps a contrast above 7 on white and on the dark ground."""
_GREEN, _RED = "46,160,67", "218,54,51"

STYLE = """
.rollout{--ink:#1b1f23;--ground:#fff;--faint:#57606a;--line:#d0d7de;--soft:#f6f8fa;
 color:var(--ink);background:var(--ground);font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto 3rem}
@media (prefers-color-scheme:dark){.rollout{--ink:#e6edf3;--ground:#14171a;--faint:#9da7b1;--line:#3d444d;
 --soft:#1d2126}}
.rollout h2{font-size:1.3rem;margin:1.5rem 0 .5rem}
.rollout h3{font-size:1rem;margin:1.2rem 0 .3rem}
.rollout dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;margin:0}
.rollout dt,.rollout .faint{color:var(--faint);font-weight:400}
.rollout dd{margin:0;overflow-wrap:anywhere}
.rollout table{border-collapse:collapse;margin:1rem 0}
.rollout th,.rollout td{border-bottom:1px solid var(--line);padding:.2rem .8rem .2rem 0;text-align:right;
 font-variant-numeric:tabular-nums}
.rollout th:first-child,.rollout td:first-child{text-align:left}
.rollout pre{font:13px/1.45 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:.3rem 0;
 padding:.5rem .7rem;border-radius:4px;background:var(--soft)}
.rollout pre.reply{border-left:4px solid var(--line);background-color:var(--ground)}
.rollout .mark{font-weight:600;margin-right:.8rem}
.rollout .value{font-variant-numeric:tabular-nums;margin:0 .8rem}
.rollout .strip{display:flex;flex-wrap:wrap;gap:3px;margin:.8rem 0;padding:0;list-style:none}
.rollout .strip a{display:block;min-width:2.6rem;padding:.1rem .3rem;text-align:center;color:inherit;
 text-decoration:none;border:1px solid var(--line);border-radius:3px;font-size:.85rem}
nav.rollout a{color:inherit}
.rollout summary{cursor:pointer;color:var(--faint)}
"""
"""Of a fragment. Every rule is held inside of `.rollout`, so that it touches nothing else of a report."""

_PAGE_STYLE = (
    "body{margin:0;padding:1rem;background:#fff}@media (prefers-color-scheme:dark){body{background:#14171a}}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(transcripts: Sequence[Transcript]) -> str:
    """A whole page of one rollout or several."""
    first = transcripts[0]
    r = first.rollout
    title = f"rollout {r.place}" if len(transcripts) == 1 else f"rollouts of {r.step}:{r.group}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(first.run_name)}: {_text(title)}</title>\n"
        f"<style>{_PAGE_STYLE}{STYLE}</style>\n</head>\n<body>\n"
        + (_contents(transcripts) if len(transcripts) > 1 else "")
        + "\n".join(fragment(t) for t in transcripts)
        + "\n</body>\n</html>\n"
    )


def fragment(t: Transcript) -> str:
    """A `<section class="rollout">`; a report puts `STYLE` into its head once."""
    name = _anchor(t)
    facts_html = "".join(f"<dt>{_text(label)}</dt><dd>{_text(text)}</dd>" for label, text in facts(t))
    parts = [
        f'<section class="rollout" id="{name}">',
        f"<h2>{_text(t.run_name)}: rollout {_text(t.rollout.place)}</h2>",
        f"<dl>{facts_html}</dl>",
        _subtasks(t),
        _strip(t, name),
        *(f'<p class="faint">{_text(text)}</p>' for _, text in notes(t)),
        *(_folded(label, text, _opened(label, text)) for label, text in blocks(t)),
        *(_turn(t, turn, name) for turn in t.turns),
        _folded(grading_label(t), visible(t.grading)) if t.grading else "",
        _folded("instance", visible(_json(t.instance))) if t.instance else "",
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _opened(label: str, text: str) -> bool:
    return len(text) <= _FOLD and not label.startswith(("system prompt", DEMONSTRATION))


def _anchor(t: Transcript) -> str:
    return f"rollout-{t.rollout.place.replace(':', '-')}"


def _contents(transcripts: Sequence[Transcript]) -> str:
    """Which rollouts a page has."""
    items = "".join(
        f'<li><a href="#{_anchor(t)}">{_text(t.rollout.place)}</a> {_text(_summary(t.rollout))}</li>'
        for t in transcripts
    )
    return f'<nav class="rollout"><ul>{items}</ul></nav>\n'


def _summary(r: Rollout) -> str:
    kind = f"retry of {r.parent} from turn {r.retry_from}" if r.is_retry else "original"
    return f"{kind}, reward {signed(r.reward)}, end: {r.end_reason}"


def _text(text: str) -> str:
    """Escaped, control characters made visible."""
    return escape(visible(text))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1, default=str)


def _subtasks(t: Transcript) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in SUBTASK_COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in subtask_cells(row)) + "</tr>"
        for row in t.subtasks
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _strip(t: Transcript, name: str) -> str:
    """All turns at a glance: a cell each, that leads to it."""
    cells = "".join(
        f'<li><a href="#{name}-turn-{turn.index}"{_ground(t, turn)} title="{_text(_title(turn))}">'
        f"{turn.index}{' ◆' if turn.pivots else ''}</a></li>"
        for turn in t.turns
    )
    return f'<ul class="strip" aria-label="turns">{cells}</ul>'


def _title(turn: TurnView) -> str:
    return ", ".join([signed(turn.advantage), *turn_words(turn)])


def _ground(t: Transcript, turn: TurnView) -> str:
    """The style attribute of a turn's advantage; "" where there is none."""
    strength = t.strength(turn)
    if not strength or turn.advantage is None:
        return ""
    colour = _GREEN if turn.advantage > 0 else _RED
    return f' style="background-color:rgba({colour},{_DEEPEST * strength:.3f});border-color:rgb({colour})"'


def _turn(t: Transcript, turn: TurnView, name: str) -> str:
    words = turn_words(turn)
    marks = "".join(
        f'<span class="{"mark" if word.startswith("◆") else "faint value"}">{_text(word)}</span>'
        for word in words
    )
    head = f'<h3 id="{name}-turn-{turn.index}">Turn {turn.index}<span class="value">{signed(turn.advantage)}</span>'
    reply = _text(turn.text) or '<span class="faint">(nothing)</span>'
    return f'{head}{marks}</h3>\n<pre class="reply"{_ground(t, turn)}>{reply}</pre>\n{_observation(turn)}'


def _observation(turn: TurnView) -> str:
    if not turn.observation:
        return ""
    text = visible(turn.observation)
    if len(text) > _FOLD:
        return _folded("observation", text)
    return f'<div class="faint">observation</div><pre class="seen">{_text(text)}</pre>'


def _folded(label: str, text: str, opened: bool = False) -> str:
    """A text behind its label; it opens without a script."""
    size = f"{len(text):,} characters"
    return (
        f"<details{' open' if opened else ''}><summary>{_text(label)}, {size}</summary>"
        f"<pre>{_text(text)}</pre></details>"
    )
