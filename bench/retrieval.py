"""Time of one search in this process. Target: BM25 over 1,000 passages in 2 ms.

Run: python bench/retrieval.py [--dense]

The passages are random words of a skewed vocabulary, 80 a passage, about as long as HotpotQA's; the queries have twelve
words. Then the corpus grows. `--dense` adds MiniLM, whose time is that of encoding the query, and one HTTP round trip.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from racelab.experiments.models.retrieval import BM25, Dense, Passage

WORDS, QUERY_WORDS, QUERIES = 80, 12, 200


def texts(n: int, words: int, seed: int) -> list[str]:
    """Words drawn as often as Zipf's law has it, from 20,000."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, 20_001)
    drawn = rng.choice(20_000, (n, words), p=share / share.sum())
    return [" ".join(f"word{i}" for i in row) for row in drawn]


def passages(n: int) -> list[Passage]:
    return [Passage(str(i), f'"Title {i}"\n{text}') for i, text in enumerate(texts(n, WORDS, 0))]


def milliseconds(search: Callable[[str], object], queries: list[str]) -> tuple[float, float]:
    """Median and 99th percentile of one search, wall clock."""
    search(queries[0])
    times = []
    for query in queries:
        start = time.perf_counter()
        search(query)
        times.append(1000 * (time.perf_counter() - start))
    return float(np.median(times)), float(np.percentile(times, 99))


def main() -> None:
    """Prints the target's line, the growth with the corpus, and on demand the dense engine and the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dense", action="store_true", help="also MiniLM and the server")
    args = parser.parse_args()

    queries = texts(QUERIES, QUERY_WORDS, 1)
    for n in (1_000, 10_000, 100_000):
        start = time.perf_counter()
        engine = BM25(passages(n))
        built = time.perf_counter() - start
        median, worst = milliseconds(lambda q, e=engine: e.search([q], 5), queries)  # type: ignore[misc]
        print(f"bm25, {n:7,} passages: median {median:.2f} ms, 99 % {worst:.2f} ms; built in {built:.1f} s")
    if args.dense:
        dense(queries)


def dense(queries: list[str]) -> None:
    from racelab.cli.serve import bound
    from racelab.experiments.models.assets import resolve_model
    from racelab.experiments.models.encoder import SentenceEncoder
    from racelab.experiments.models.retriever_client import HttpRetriever

    start = time.perf_counter()
    engine = Dense(passages(1_000), SentenceEncoder(resolve_model("minilm")))
    built = time.perf_counter() - start
    median, worst = milliseconds(lambda q: engine.search([q], 5), queries)
    print(
        f"dense minilm, 1,000 passages: median {median:.1f} ms, 99 % {worst:.1f} ms; built in {built:.1f} s"
    )
    with bound("127.0.0.1", 0) as server:
        server.engine = BM25(passages(1_000))
        server.listen()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        remote = HttpRetriever(server.url)
        median, worst = milliseconds(lambda q: remote.search(q, 5), queries)
        print(f"bm25 over HTTP, 1,000 passages: median {median:.1f} ms, 99 % {worst:.1f} ms")
        server.shutdown()


if __name__ == "__main__":
    main()
