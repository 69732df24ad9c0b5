r"""Passages and how to find them in this process: BM25, or a sentence encoder with a flat index.

A corpus is a file in the format of Search-R1 (arXiv:2503.09516), one passage a line:

    {"id": "17", "contents": "\"Title\"\ntext"}

Equal scores are ordered by position in the file, and a query's hits do not depend on the queries beside it, so the same
corpus and query give the same hits. BM25 gives no passage that shares no word with the query; `Dense` always gives k.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from racelab.experiments.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    from racelab.experiments.ports import Encoder

FAISS_CHUNK: Final = 16
"""Queries of one search: from 20 on FAISS takes another path, whose rounding differs."""
_E5: Final = re.compile(r"(?:^|[-_/.])e5(?:[-_.]|$)", re.IGNORECASE)
_EXTRA: Final = "pip install 'racelab[tasks]'"


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of a corpus.

    Attributes:
        passage_id: unique in its corpus.
        contents: the title in quotes, a line end, the text.
    """

    passage_id: str
    contents: str

    @property
    def title(self) -> str:
        """Without the quotes; "" where the contents have one line only."""
        head, line_end, _ = self.contents.partition("\n")
        head = head.strip()
        quoted = len(head) > 1 and head[0] == head[-1] == '"'
        return (head[1:-1] if quoted else head) if line_end else ""

    @property
    def text(self) -> str:
        """What follows the title."""
        head, line_end, tail = self.contents.partition("\n")
        return tail if line_end else head


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage and its score, whose scale is the engine's own."""

    passage: Passage
    score: float


class Engine(Protocol):
    """Finds passages; may be used by several threads."""

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """At most `top_k` hits per query, best first; fewer where the corpus has no more."""

    def describe(self) -> dict[str, object]:
        """Kind, corpus and settings (JSON values)."""


def read_corpus(path: str | Path) -> list[Passage]:
    """All passages of a .jsonl file, in its order; blank lines are skipped.

    Raises:
        DataError: no such file, unreadable, empty, or a line that is no passage or repeats an id; the message opens
            with `file:line`.
    """
    file = Path(path).expanduser()
    passages, seen = [], set()
    for where, passage in _passages(file):
        if passage.passage_id in seen:
            raise DataError(
                f"{where}: id {passage.passage_id!r} stands there twice; give every passage its own"
            )
        seen.add(passage.passage_id)
        passages.append(passage)
    if not passages:
        raise DataError(f"{file}: no passages; the file is empty")
    return passages


def _passages(file: Path) -> Iterator[tuple[str, Passage]]:
    """Line by line: the Wikipedia of Search-R1 has 21 million."""
    number = 0
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{file}:{number}"
                    yield where, _passage(line, where)
    except UnicodeDecodeError:
        raise DataError(
            f"{file}:{number + 1}: not UTF-8 text near this line; save the file as UTF-8"
        ) from None
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror or error}); give a corpus that can"
        ) from None


def _passage(line: str, where: str) -> Passage:
    shape = '{"id": "1", "contents": "\\"Title\\"\\ntext"}'
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"{where}: malformed JSON: {reason}; a line is {shape}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object, got {type(record).__name__}; a line is {shape}")
    found, contents = record.get("id"), record.get("contents")
    if isinstance(found, int) and not isinstance(found, bool):
        found = str(found)
    if not isinstance(found, str) or not found:
        raise DataError(f"{where}: field 'id' is missing or no text; a line is {shape}")
    if not isinstance(contents, str) or not contents.strip():
        raise DataError(f"{where}: field 'contents' is missing, blank or no text; a line is {shape}")
    return Passage(found, contents)


def _best(scores: npt.NDArray[Any], k: int) -> npt.NDArray[np.int64]:
    """Positions of the k highest scores [k], best first, equal ones by position."""
    k = min(k, len(scores))
    if k < len(scores):
        bar = np.partition(scores, len(scores) - k)[len(scores) - k]
        above, equal = np.flatnonzero(scores > bar), np.flatnonzero(scores == bar)
        chosen = np.concatenate([above, equal[: k - len(above)]])
    else:
        chosen = np.arange(len(scores))
    return chosen[np.lexsort((chosen, -scores[chosen]))]


class BM25:
    """Okapi BM25 as in Lucene (k1 = 1.5, b = 0.75), over title and text, English stop words left out."""

    def __init__(self, passages: Sequence[Passage], corpus: str = "") -> None:
        """Builds the index.

        Args:
            passages: at least one.
            corpus: name for `describe`.

        Raises:
            MissingDependencyError: `bm25s` is not installed.
        """
        try:
            import bm25s  # type: ignore[import-untyped]
        except ImportError:
            raise MissingDependencyError(f"engine bm25 needs: {_EXTRA}") from None
        self._tokenize: Any = bm25s.tokenize
        self._passages, self._corpus = passages, corpus
        self._index: Any = bm25s.BM25()
        self._index.index(self._tokens([p.contents for p in passages]), show_progress=False)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """At most `top_k` hits per query, best first; none that shares no word with it."""
        return [self._one(query, top_k) for query in queries]

    def _one(self, query: str, top_k: int) -> list[Hit]:
        known = [word for word in self._tokens([query])[0] if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        return [Hit(self._passages[i], float(scores[i])) for i in _best(scores, top_k) if scores[i] > 0]

    def _tokens(self, texts: Sequence[str]) -> list[list[str]]:
        found: list[list[str]] = self._tokenize(
            list(texts), stopwords="en", return_ids=False, show_progress=False
        )
        return found

    def describe(self) -> dict[str, object]:
        """Kind, corpus, its size."""
        return {"engine": "bm25", "corpus": self._corpus, "passages": len(self._passages)}


class Dense:
    """Inner products of unit vectors in an exact FAISS index (RLDS D.2: E5 and FAISS)."""

    def __init__(
        self,
        passages: Sequence[Passage],
        encoder: Encoder,
        *,
        corpus: str = "",
        encoder_name: str = "",
        index: Path | None = None,
    ) -> None:
        """Encodes the corpus, unless `index` is a file that holds its vectors.

        Args:
            passages: at least one.
            encoder: gives rows of unit length.
            corpus: name for `describe`.
            encoder_name: decides the prefixes, see `prefixes`; and for `describe`.
            index: a FAISS file; read if it is there, else written.

        Raises:
            DataError: the file is no FAISS index, or not of this corpus and encoder, or cannot be written.
            MissingDependencyError: `faiss` is not installed.
        """
        try:
            import faiss
        except ImportError:
            raise MissingDependencyError(f"engine dense needs: {_EXTRA}") from None
        self._passages, self._encoder, self._lock = passages, encoder, threading.Lock()
        self._query, self._passage = prefixes(encoder_name)
        self._about = {
            "engine": "dense",
            "corpus": corpus,
            "passages": len(passages),
            "encoder": encoder_name,
        }
        self._index: Any
        if index is not None and index.exists():
            self._index = _read_index(faiss, index, len(passages), self._vectors(["width"]).shape[1])
        else:
            self._index = self._encoded(faiss)
            if index is not None:
                _write_index(faiss, self._index, index)
        encoder.forget()  # else a passage's vector, rounded as in its batch, would stand in for an equal query's

    def _encoded(self, faiss: Any) -> Any:
        built = None
        for start in range(0, len(self._passages), 1024):
            rows = self._vectors([self._passage + p.contents for p in self._passages[start : start + 1024]])
            built = built or faiss.IndexFlatIP(rows.shape[1])
            built.add(rows)
        return built

    def _vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(self._encoder.embed(texts), dtype=np.float32)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """The `top_k` nearest passages of each query, or all where the corpus has fewer."""
        with self._lock:  # the encoder is not made for several threads
            rows = [self._vectors([self._query + query]) for query in queries]  # one by one: see the module
        chunks = [np.concatenate(rows[i : i + FAISS_CHUNK]) for i in range(0, len(rows), FAISS_CHUNK)]
        return [hits for chunk in chunks for hits in self._nearest(chunk, min(top_k, len(self._passages)))]

    def _nearest(self, rows_QD: npt.NDArray[np.float32], k: int) -> list[list[Hit]]:
        """FAISS orders equal scores as it likes, so ask on until none at the edge is left out."""
        ask = min(k + 1, len(self._passages))
        while True:
            scores, found = self._index.search(rows_QD, ask)
            if ask == len(self._passages) or (scores[:, k - 1] > scores[:, -1]).all():
                break
            ask = min(2 * ask, len(self._passages))
        return [
            [Hit(self._passages[row[j]], float(score[j])) for j in np.lexsort((row, -score))[:k]]
            for score, row in zip(scores, found, strict=True)
        ]

    def describe(self) -> dict[str, object]:
        """Kind, corpus, its size, encoder."""
        return dict(self._about)


def prefixes(encoder: str) -> tuple[str, str]:
    """What an encoder wants before a query and before a passage: E5 (arXiv:2212.03533) was trained with both."""
    return ("query: ", "passage: ") if _E5.search(encoder) else ("", "")


def _read_index(faiss: Any, file: Path, passages: int, width: int) -> Any:
    try:
        index = faiss.read_index(str(file))
    except RuntimeError as error:
        line = (str(error).splitlines() or ["unreadable"])[0]
        raise DataError(
            f"{file}: cannot be read as a FAISS index ({line}); remove it or give another"
        ) from None
    if (index.ntotal, index.d) != (passages, width):
        raise DataError(
            f"{file}: holds {index.ntotal} vectors of width {index.d}, the corpus and encoder give {passages} of "
            f"{width}; give the index of this corpus, or a new file to build it"
        )
    return index


def _write_index(faiss: Any, index: Any, file: Path) -> None:
    partial = file.with_name(f".{file.name}.partial")
    try:
        faiss.write_index(index, str(partial))
        partial.replace(file)
    except (RuntimeError, OSError):
        partial.unlink(missing_ok=True)
        raise DataError(f"{file}: the index cannot be written; give a file in a folder that can be") from None


def open_engine(
    engine: str, corpus: Path, encoder: str = "minilm", *, index: Path | None = None, device: str = "cpu"
) -> BM25 | Dense:
    """The engine over a corpus file.

    Args:
        engine: `bm25` or `dense`.
        corpus: see `read_corpus`.
        encoder: dense: `minilm`, a folder or a hub name (`assets.resolve_model`).
        index: dense: see `Dense`.
        device: dense: of the encoder.

    Raises:
        DataError: of the corpus or the index.
        ModelError: of the encoder.
        MissingDependencyError: a package is not installed.
        UnreachableError: the hub does not answer.
    """
    passages = read_corpus(corpus)
    if engine == "bm25":
        return BM25(passages, corpus.name)
    from racelab.experiments.models.assets import resolve_model
    from racelab.experiments.models.encoder import SentenceEncoder

    model = SentenceEncoder(resolve_model(encoder), device=device)
    return Dense(passages, model, corpus=corpus.name, encoder_name=encoder, index=index)
