"""The recorded literature and web of the replay server, in the service's own shapes; small PDFs made on the fly.

All texts were written for racelab and are invented: papers, authors and numbers prove nothing. Their addresses lie
under `replay.invalid`, a name that no resolver knows (RFC 2606).
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from racelab.experiments.models.text import content_words

T = TypeVar("T")

HOST: Final = "replay.invalid"
PACKAGE_FILE: Final = Path(__file__).with_name("recordings.json")
_LINE: Final = 90
_LINES_A_PAGE: Final = 48


class Recordings:
    """What a recorded service knows."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        """Keeps it.

        Args:
            value: `papers` [{name, title, about, year, cites, snippet, text, pdf}], `scholar` [{query, papers}],
                `pages` [{name, title, snippet, text}], `search` [{query, pages}].
        """
        self.papers = {p["name"]: p for p in value["papers"]}
        self.pages = {p["name"]: p for p in value["pages"]}
        self._scholar, self._search = value["scholar"], value["search"]

    @classmethod
    def packaged(cls) -> Recordings:
        """Those that ship with racelab."""
        return cls(json.loads(PACKAGE_FILE.read_text(encoding="utf-8")))

    def scholar(self, query: str) -> dict[str, Any]:
        """An answer of `/scholar`: the recorded one, or that of the nearest recorded query."""
        found = nearest(query, self._scholar, lambda r: r["query"])
        return _answer(query, [self._paper(name) for name in found["papers"]] if found else [])

    def search(self, query: str) -> dict[str, Any]:
        """An answer of `/search`, likewise."""
        found = nearest(query, self._search, lambda r: r["query"])
        return _answer(query, [self._page(name) for name in found["pages"]] if found else [])

    def scrape(self, url: str) -> dict[str, Any] | None:
        """An answer of the scrape endpoint: the page of that address, or the nearest one; None if none is near."""
        page = self.pages.get(url.rpartition("/pages/")[2]) or nearest(
            url, self.pages.values(), lambda p: f"{p['name']} {p['title']}"
        )
        if page is None:
            return None
        return {"text": page["text"], "markdown": page["text"], "metadata": {"title": page["title"]}}

    def _paper(self, name: str) -> dict[str, Any]:
        paper = self.papers[name]
        row = {
            "title": paper["title"],
            "link": f"http://{HOST}/abstracts/{name}",
            "publicationInfo": paper["about"],
            "snippet": paper["snippet"],
            "year": paper["year"],
            "citedBy": paper["cites"],
        }
        return row | ({"pdfUrl": pdf_url(name)} if paper.get("pdf", True) else {})

    def _page(self, name: str) -> dict[str, Any]:
        page = self.pages[name]
        return {"title": page["title"], "link": page_url(name), "snippet": page["snippet"]}


def pdf_url(name: str) -> str:
    """Address of a recorded paper."""
    return f"http://{HOST}/papers/{name}.pdf"


def page_url(name: str) -> str:
    """Address of a recorded page."""
    return f"http://{HOST}/pages/{name}"


def nearest(query: str, rows: Iterable[T], key: Callable[[T], str]) -> T | None:
    """The row whose text is most like the query (Jaccard of content words); the first of equals, None if none is."""
    wanted = content_words(query.replace("-", " ").replace("/", " "))

    def likeness(row: T) -> float:
        words = content_words(key(row).replace("-", " "))
        return len(wanted & words) / len(wanted | words) if wanted & words else 0.0

    best = max(rows, key=likeness, default=None)
    return best if best is not None and likeness(best) > 0 else None


def _answer(query: str, organic: list[dict[str, Any]]) -> dict[str, Any]:
    for position, row in enumerate(organic, 1):
        row["position"] = position
    return {"searchParameters": {"q": query}, "organic": organic}


def tiny_pdf(title: str, text: str) -> bytes:
    """A PDF of plain text in Helvetica, as small as one can be; signs beyond Latin-1 become question marks."""
    lines = [line for part in text.split("\n") for line in textwrap.wrap(part, _LINE) or [""]]
    pages = [lines[i : i + _LINES_A_PAGE] for i in range(0, max(len(lines), 1), _LINES_A_PAGE)]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for i, page in enumerate(pages):
        body = b"BT /F1 11 Tf 14 TL 50 790 Td " + b"".join(_shown(line) + b" ' " for line in page) + b"ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        objects.append(f"<< /Length {len(body)} >>\nstream\n".encode() + body + b"\nendstream")
    objects.append(b"<< /Title " + _shown(title) + b" >>")
    return _file(objects)


def _shown(line: str) -> bytes:
    plain = line.encode("latin-1", "replace")
    return b"(" + plain.replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)") + b")"


def _file(objects: list[bytes]) -> bytes:
    """Objects numbered from 1, the last one the document's information."""
    out = bytearray(b"%PDF-1.4\n")
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n".encode() + body + b"\nendobj\n"
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{place:010d} 00000 n \n".encode() for place in places)
    out += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R /Info {len(objects)} 0 R >>\n".encode()
    return bytes(out + f"startxref\n{start}\n%%EOF\n".encode())
