"""PDFs and web pages as text (RLDS App. D.4). Loads parsers; `parsers.py` runs it in processes of its own.

Deviation: the paper converts PDFs "to markdown" without naming a converter. Here it is the text of each page in
reading order under the document's title, by `pypdf`; headings and tables are not recognised.

Of a page with more than 1,000,000 characters or 30,000 tags, scripts, styles, drawings and comments are taken out, and
the rest is cut there: 20,000 characters are shown of it. What is done here takes time in proportion to the page's
length, whatever it says. That cannot be said of the parsers.
"""

from __future__ import annotations

import html
import io
import logging
import re
import string
from dataclasses import dataclass

from racelab.experiments.tasks.deepresearch.faults import Deadline, FaultError

_MAX_CHARS = 1_000_000
_MAX_TAGS = 30_000  # 20 to 30 microseconds each
_TITLE_CHARS = 200
_TITLE_SOURCE = 2_000  # characters of a title that are looked at
_BLANK_LINES = re.compile(r"\n\s*\n\s*")
_HIDDEN = re.compile(r"<(?:(script|style|svg)\b|!--)", re.IGNORECASE | re.ASCII)
_HIDDEN_END = {
    name: re.compile(end, re.IGNORECASE | re.ASCII)
    for name, end in (("script", r"</script\b"), ("style", r"</style\b"), ("svg", r"</svg\b"), ("", "-->"))
}
_NOT_SHOWN = ("script", "style", "noscript", "template", "svg", "title")
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)  # unlike str.lower it keeps the length


@dataclass(frozen=True, slots=True)
class Document:
    """A text.

    Attributes:
        title: one line; may be empty.
        text: markdown or plain; not longer than what was asked for.
        cut: there was more.
    """

    title: str
    text: str
    cut: bool


def pdf_document(data: bytes, *, max_chars: int, deadline: Deadline) -> Document:
    """The text of a PDF; pages beyond `max_chars` are not parsed.

    Raises:
        FaultError: `unreadable`, also for one that is encrypted or holds no text (scanned pages), or `timeout`.
    """
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.ERROR)  # it reports every oddity of every file
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise FaultError("unreadable", "the PDF is encrypted")
        title = (reader.metadata.title or "") if reader.metadata else ""
        parts: list[str] = []
        length, rest = 0, False
        for page in reader.pages:
            deadline.check()
            if length > max_chars:
                rest = True
                break
            parts.append(page.extract_text().strip())
            length += len(parts[-1]) + 2
    except FaultError:
        raise
    except Exception:  # pypdf meets broken files with errors of many kinds
        raise FaultError("unreadable", "the PDF cannot be read") from None
    text = "\n\n".join(p for p in parts if p)
    if not text.strip():
        raise FaultError("unreadable", "the PDF holds no text, only images")
    return _document(title, text, max_chars, rest)


def html_document(data: bytes, charset: str, content_type: str, *, max_chars: int) -> Document:
    """The main text of a page as markdown, by `trafilatura`; where it finds none, the whole page by `markdownify`.

    Raises:
        FaultError: `unreadable` where there is no text at all.
    """
    text = _decoded(data, charset)
    if content_type not in ("text/html", "application/xhtml+xml"):
        return _document("", text[:_MAX_CHARS], max_chars, len(text) > _MAX_CHARS)
    title = _title(text)
    page = _bounded(text)
    try:
        body = _main_text(page)
    except Exception:  # a parser's own errors have many kinds
        raise FaultError("unreadable", "the page cannot be read") from None
    if not body.strip():
        raise FaultError("unreadable", "the page holds no text")
    return _document(title, body, max_chars, len(page) < len(text))


def _title(page: str) -> str:
    """What the first title element says; empty if it is not closed."""
    lower = page[:_MAX_CHARS].translate(_LOWER)
    start = lower.find("<title")
    begin = lower.find(">", start) + 1 if start >= 0 else 0
    end = lower.find("</title", begin) if begin else -1
    return html.unescape(page[begin : min(end, begin + _TITLE_SOURCE)]) if end >= 0 else ""


def _bounded(page: str) -> str:
    """The page, or what the parsers get of one that is too large."""
    if len(page) > _MAX_CHARS or page.count("<") > _MAX_TAGS:
        page = _without_hidden(page)[:_MAX_CHARS]
    place = -1
    for _ in range(_MAX_TAGS + 1):
        place = page.find("<", place + 1)
        if place < 0:
            return page
    return page[:place]


def _without_hidden(page: str) -> str:
    """The page without scripts, styles, drawings and comments; one that is not closed stays."""
    kept: list[str] = []
    place, never_closed = 0, set[str]()
    while (start := _HIDDEN.search(page, place)) is not None:
        name = (start.group(1) or "").lower()
        end = None if name in never_closed else _HIDDEN_END[name].search(page, start.end())
        if end is None:
            never_closed.add(name)
            kept.append(page[place : start.end()])
            place = start.end()
        else:
            kept.append(page[place : start.start()])
            place = page.find(">", end.start()) + 1 or len(page)
    return "".join([*kept, page[place:]])


def _main_text(page: str) -> str:
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    body: str | None = trafilatura.extract(page, output_format="markdown", include_links=False)
    return body if body and body.strip() else _whole_text(page)


def _whole_text(page: str) -> str:
    """By lxml: the parser of the standard library, markdownify's own choice, is quadratic in what is not closed."""
    import bs4
    import markdownify

    soup = bs4.BeautifulSoup(page, "lxml")
    for element in soup(_NOT_SHOWN):
        if not element.decomposed:  # with one around it
            element.decompose()
    return str(markdownify.MarkdownConverter(heading_style="ATX").convert_soup(soup))


def _decoded(data: bytes, charset: str) -> str:
    for name in (charset, "utf-8"):
        try:
            if name:
                return data.decode(name)
        except (LookupError, UnicodeDecodeError, ValueError):
            continue
    return data.decode("utf-8", "replace")


def _document(title: str, text: str, max_chars: int, rest: bool) -> Document:
    text = _BLANK_LINES.sub("\n\n", text).strip()
    return Document(" ".join(title.split())[:_TITLE_CHARS], text[:max_chars], rest or len(text) > max_chars)
