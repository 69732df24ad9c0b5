"""Ids of sources, the answer block, and the `<cite id="...">` spans of an answer (RLDS App. D.4).

Open in the paper: ids are the first 12 hex digits of a SHA-1 of the address (`p_` before a paper's), so that a PDF
that was listed by a search keeps its id when it is read; a cite tag may name several ids, with commas or blanks
between; nested or unclosed cite tags are not claims, though the ids of the latter are cited.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import urllib.parse
from dataclasses import dataclass
from typing import Final

_ID_CHARS: Final = 12  # 48 bits: no two of a run's sources will meet, and a small model can still copy it
_CITE: Final = re.compile(r"""<cite\s+id\s*=\s*(?:"([^"<>]*)"|'([^'<>]*)')\s*>""", re.IGNORECASE)
_CITE_END: Final = re.compile(r"</cite\s*>", re.IGNORECASE)
_ANSWER: Final = re.compile(r"<answer>", re.IGNORECASE)
_ANSWER_END: Final = re.compile(r"</answer\s*>", re.IGNORECASE)
_SEPARATOR: Final = re.compile(r"[,;\s]+")


@dataclass(frozen=True, slots=True)
class Claim:
    """One cited span.

    Attributes:
        text: what the tag encloses, inner tags removed.
        ids: of its sources, in order, each once; may be empty.
    """

    text: str
    ids: tuple[str, ...]


def paper_id(url: str) -> str:
    """`p_` and a hash of the paper's address."""
    return f"p_{web_id(url)}"


def web_id(url: str) -> str:
    """A hash of a page's address; case of the host and what follows `#` do not matter."""
    try:
        parts = urllib.parse.urlsplit(url.strip())
        plain = parts._replace(scheme=parts.scheme.lower(), netloc=parts.netloc.lower(), fragment="").geturl()
    except ValueError:
        plain = url.strip()
    return hashlib.sha1(plain.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:_ID_CHARS]


def answer_block(text: str) -> str | None:
    """What stands in the first closed `<answer>` block; None if none is closed."""
    end = _ANSWER_END.search(text)
    if end is None:
        return None
    starts = [m.end() for m in _ANSWER.finditer(text, 0, end.start())]
    return text[starts[-1] : end.start()].strip() if starts else None


def without_answer_tags(text: str) -> str:
    """The text without the tags of an answer block that was never closed."""
    return _ANSWER_END.sub("", _ANSWER.sub("", text)).strip()


def claims(text: str) -> list[Claim]:
    """Every closed cite span, in order."""
    found = []
    tags = list(_CITE.finditer(text))
    ends = _CITE_END.finditer(text)
    end = next(ends, None)
    for tag, following in itertools.zip_longest(tags, tags[1:]):
        while end is not None and end.start() < tag.end():  # one pass, however many tags are never closed
            end = next(ends, None)
        if end is None or (following is not None and following.start() < end.start()):
            continue
        inner = " ".join(text[tag.end() : end.start()].split())
        if inner:
            found.append(Claim(inner, _ids(tag)))
    return found


def cited_ids(text: str) -> list[str]:
    """Different ids of all cite tags, in order of first mention."""
    return list(dict.fromkeys(i for match in _CITE.finditer(text) for i in _ids(match)))


def _ids(match: re.Match[str]) -> tuple[str, ...]:
    parts = _SEPARATOR.split((match.group(1) or match.group(2) or "").strip())
    return tuple(dict.fromkeys(p for p in parts if p))
