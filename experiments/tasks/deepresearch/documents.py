"""PDFs and web pages as text (RLDS App. D.4). Imported lazily: it loads parsers.

Deviation: the paper converts PDFs "to markdown" without naming a converter. Here it is the text of each page in
reading order under the document's title, by `pypdf`; headings and tables are not recognised.
"""

from __future__ import annotations

import html
import io
import logging
import re
from dataclasses import dataclass

from racelab.experiments.tasks.deepresearch.faults import Deadline, FaultError

_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_NOT_SHOWN = re.compile(r"<(script|style|noscript|template|svg)\b.*?</\1\s*>", re.IGNORECASE | re.DOTALL)
_BLANK_LINES = re.compile(r"\n\s*\n\s*")
_TITLE_CHARS = 200


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
        return _document("", text, max_chars, False)
    found = _TITLE.search(text)
    title = html.unescape(found.group(1)) if found else ""
    try:
        body = _main_text(text)
    except Exception:  # a parser's own errors have many kinds
        raise FaultError("unreadable", "the page cannot be read") from None
    if not body.strip():
        raise FaultError("unreadable", "the page holds no text")
    return _document(title, body, max_chars, False)


def _main_text(page: str) -> str:
    import markdownify
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    body: str | None = trafilatura.extract(page, output_format="markdown", include_links=False)
    if body and body.strip():
        return body
    return str(markdownify.markdownify(_TITLE.sub("", _NOT_SHOWN.sub("", page)), heading_style="ATX"))


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
