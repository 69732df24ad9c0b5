"""What the agent reads: the system prompt, search results and pages with their ids, notices, the terminal texts.

The paper prints no DeepResearch system prompt; this one is ours, in the manner of its HotpotQA prompt (App. E).
Observations have D.4's headers, `[id=<id>] <title> ... [cites=N]`.

Open in the paper: `page_chars` caps the whole result of any tool; a list is cut between results, a document at the
character. What a page says cannot pass for a header: its `[id=` is broken up, as are tool tags and special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from racelab.experiments.tasks.deepresearch.citations import paper_id, web_id
from racelab.experiments.tasks.deepresearch.documents import Document
from racelab.experiments.tasks.deepresearch.reward import Buckets
from racelab.experiments.tasks.deepresearch.serper import Hit
from racelab.experiments.tasks.hermes import tool_response

_SYSTEM = """\
You are a research assistant. You answer questions that need evidence from the scientific literature and the web.

Use the tools to find and read sources before you answer: search_papers and read_paper for the literature,
google_search and browse_webpage for the open web. Call one tool at a time and wait for its result.
When calling tools, pass valid JSON arguments with double-quoted keys and values.
Every source in a result has an id, as in [id=p_3f2a90c1b7de].

When you have enough evidence, give your final answer inside <answer>...</answer>. Cover every part of the question.
Wrap every substantive claim in <cite id="ID">claim</cite>, with the id of the source that supports it. Only cite ids
that the tools returned."""

DEMONSTRATION = (
    (
        "Do tides move ice shelves?",
        '<tool_call>\n{"name": "google_search", "arguments": {"query": "tides ice shelves"}}\n</tool_call>',
    ),
    (
        "[id=00aa11bb22cc] Tides and floating ice\nIce shelves rise and fall with the tide.",
        '<answer><cite id="00aa11bb22cc">Ice shelves rise and fall with the tide.</cite></answer>',
    ),
    (
        "Does salt lower the freezing point of water?",
        '<tool_call>\n{"name": "google_search", "arguments": {"query": "salt freezing point water"}}\n</tool_call>',
    ),
    (
        "[id=33dd44ee55ff] Salt and ice\nSalt water freezes at a lower temperature.",
        '<answer><cite id="33dd44ee55ff">Salt water freezes at a lower temperature.</cite></answer>',
    ),
)
"""Ours: the form of a call and of a cited answer, for `task.demonstration`. Its ids are of no source of a tool.

Results stand without their tags: a small model copies them instead of the call.
"""

NOTHING_DONE = (
    "There is no tool call and no closed answer in your reply. Call a tool, or give your final answer inside "
    "<answer>...</answer>."
)
LAST_TURN = "This was your last tool call: give your final answer inside <answer>...</answer> now."
_ENDINGS = {
    "answer": "You gave your answer.",
    "turns": "The turns are used up.",
    "response_budget": "There is no room left for another turn.",
}
_WRAPPED = len("<tool_response>\n")
_UNWRAPPED = len("\n</tool_response>")

Span = tuple[str, int, int]
"""Id of a source, and where its text begins and ends in the observation."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A tool's result as the agent reads it.

    Attributes:
        text: with tool tags.
        spans: of its sources.
    """

    text: str
    spans: tuple[Span, ...] = ()


def system_prompt(addition: str) -> str:
    """With what a reflection adds at its end."""
    return f"{_SYSTEM}\n\n# Additions\n{addition.strip()}" if addition.strip() else _SYSTEM


def render_hits(hits: Sequence[Hit], *, limit: int, max_chars: int, paper: bool) -> Rendered:
    """A list of results; those that do not fit are left out whole, the first never."""
    if not hits:
        return Rendered(tool_response("No results. Try other words."))
    shown = hits[:limit]
    items: list[tuple[str, str]] = []
    length = 0
    for hit in shown:
        item = _paper(hit) if paper else _page(hit)
        length += len(item[1]) + 2
        if items and length > max_chars:
            break
        items.append((item[0], item[1][:max_chars]))
    notice = f"[truncated: {len(items)} of {len(shown)} results shown]" if len(items) < len(shown) else ""
    return _joined(items, notice)


def render_document(source_id: str, document: Document) -> Rendered:
    """A page or paper."""
    head = f"[id={source_id}] {_tame(document.title)}".rstrip()
    notice = f"[truncated: the first {len(document.text)} characters are shown]" if document.cut else ""
    return _joined([(source_id, f"{head}\n{_tame(document.text)}")], notice)


def render_failure(text: str) -> Rendered:
    """What went wrong, in our words."""
    return Rendered(tool_response(f"Error: {text}."))


def terminal(reason: str, score: float | None, counts: Buckets | None) -> str:
    """The last observation (D.4): the score and how many criteria were met, never which."""
    ending = _ENDINGS.get(reason, "The episode has ended.")
    if score is None or counts is None:
        return f"{ending} The rubric score is not known: the judge gave no readable reply."
    n = counts.fully + counts.partial + counts.not_met
    return (
        f"{ending} Rubric score: {score:.2f}. Of {n} rubric criteria: {counts.fully} fully met, "
        f"{counts.partial} partial, {counts.not_met} not met."
    )


def turns_left(n: int) -> str:
    """The remaining budget."""
    return LAST_TURN if n == 1 else f"Turns left: {n}."


def _paper(hit: Hit) -> tuple[str, str]:
    source = paper_id(hit.pdf_url or hit.url)
    about = f" ({_tame(hit.about)})" if hit.about else ""
    cites = "" if hit.cites is None else f" [cites={hit.cites}]"
    where = f"pdf: {_tame(hit.pdf_url)}" if hit.pdf_url else f"page: {_tame(hit.url)}"
    return source, f"[id={source}] {_tame(hit.title)}{about}{cites}\n{where}\n{_tame(hit.snippet)}".rstrip()


def _page(hit: Hit) -> tuple[str, str]:
    source = web_id(hit.url)
    about = f" ({_tame(hit.about)})" if hit.about else ""
    return (
        source,
        f"[id={source}] {_tame(hit.title)}{about}\nurl: {_tame(hit.url)}\n{_tame(hit.snippet)}".rstrip(),
    )


def _tame(text: str) -> str:
    """Text from outside that cannot pass for one of our headers, a tool's end, or a special token."""
    return tool_response(text.replace("[id=", "[ id="))[_WRAPPED:-_UNWRAPPED]


def _joined(items: Sequence[tuple[str, str]], notice: str) -> Rendered:
    """The items with their places in the finished text."""
    body = "\n\n".join([text for _, text in items] + ([notice] if notice else []))
    spans, at = [], _WRAPPED
    for source, text in items:
        spans.append((source, at, at + len(text)))
        at += len(text) + 2
    return Rendered(tool_response(body), tuple(spans))
