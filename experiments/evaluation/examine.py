"""One benchmark of questions and answers, from its examples to their marks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from racelab.experiments.evaluation.types import Answer, Benchmark, Examined, Example, Mark, Subject


class AnswerExaminer:
    """Asks the model under test, and marks what it answers; implements `Examiner`."""

    def __init__(
        self, benchmark: Benchmark, examples: Sequence[Example], subject: Subject, workers: int = 0
    ) -> None:
        """Keeps the parts.

        Args:
            benchmark: how to ask and mark.
            examples: all, in their order.
            subject: the model under test.
            workers: threads that mark, where marking takes long (it runs programs); 0: none, it is done at once.
        """
        self._benchmark, self._subject, self._workers = benchmark, subject, workers
        self._examples = tuple(examples)

    @property
    def name(self) -> str:
        """Of the benchmark."""
        return self._benchmark.name

    @property
    def examples(self) -> Sequence[Example]:
        """All, in their order."""
        return self._examples

    def examine(self, wanted: frozenset[str]) -> Iterator[Examined]:
        """See the protocol; marking goes on while the next answers are generated."""
        asks = [self._benchmark.ask(example) for example in self._examples]
        indices = [i for i, example in enumerate(self._examples) if example.example_id in wanted]
        answered = self._subject.answers(asks, indices, self.name)
        if not self._workers:
            for index, answers in answered:
                yield self._mark(index, answers)
            return
        waiting: deque[Future[Examined]] = deque()
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="racelab-mark")
        try:
            for index, answers in answered:
                waiting.append(pool.submit(self._mark, index, answers))
                while waiting and (waiting[0].done() or len(waiting) > 2 * self._workers):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _mark(self, index: int, answers: Sequence[Answer]) -> Examined:
        example = self._examples[index]
        lost = [answer for answer in answers if answer.text is None]
        if not lost:
            return self._benchmark.mark(example, answers)
        rows = tuple(
            {
                "idx": i,
                "role": "answer",
                "text": answer.text,
                "finished": answer.finished,
                "n_tokens": answer.n_tokens,
                "error": answer.error,
            }
            for i, answer in enumerate(answers)
        )
        return Examined(example, (Mark(self.name, math.nan, status="lost"),), rows)
