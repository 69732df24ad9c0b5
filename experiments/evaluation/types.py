"""The values that move through an evaluation, and what each part of it asks of the others.

An example is asked (or rated), answered and marked; a benchmark's score is made from the marks alone (`totals.py`), so
that a report needs the rows of a run and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

Status = Literal["scored", "unparsed", "lost"]
"""`unparsed`: an answer came, but nothing that can be scored stands in it (the protocol then says what it scores).
`lost`: no answer came, for want of a server, say: it says nothing about the model, has no score, and is asked for again
when the evaluation goes on."""

Record = tuple[str, Mapping[str, Any]]
"""`file:line` (or `name:split:row n` of a hub data set) and the columns."""


@dataclass(frozen=True, slots=True)
class Example:
    """One example of a benchmark, read and checked.

    Attributes:
        example_id: the data's own id where it has one, else made from its place; unique inside the benchmark, stable
            whatever `limit` is.
        domain: subject, subtask or source; "" where the benchmark has none.
        fields: what the benchmark needs of the record.
    """

    example_id: str
    domain: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One question to the model under test.

    Attributes:
        user: the user's turn; for layout `text` the whole prompt.
        n: answers wanted.
        max_tokens: of one answer, thinking included; less where the model's window is smaller.
        temperature: 0 is greedy.
        top_p: nucleus.
        system: the system's turn; None: none is sent.
        stop: an answer also ends at one of these strings.
        layout: `chat` goes through the chat template, `text` is continued as it stands.
        thinking: whether a model that can think is let to; None: as its template has it.
    """

    user: str
    n: int = 1
    max_tokens: int = 131_072
    temperature: float = 0.6
    top_p: float = 0.95
    system: str | None = None
    stop: tuple[str, ...] = ()
    layout: Literal["chat", "text"] = "chat"
    thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        text: with the thinking block, if there was one; None if nothing came (`error` says why).
        finished: False if it was cut at the token budget, or never came.
        n_tokens: generated, as far as the engine says; 0 if unknown.
        error: one line; "" where there is a text.
    """

    text: str | None
    finished: bool = True
    n_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """What one example gives under one label.

    Attributes:
        label: the benchmark's name; IFEval gives two, one for each protocol (`ifeval`, `ifeval-answer`).
        score: the primary metric of this example; NaN if it is lost.
        details: further metrics, numbers or lists of numbers, from which `totals.py` makes the rest.
        status: see `Status`.
        judge: who judged; "" where nobody did.
    """

    label: str
    score: float
    details: Mapping[str, Any] = field(default_factory=dict)
    status: Status = "scored"
    judge: str = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """An example with its marks and all that was generated for it.

    Attributes:
        example: see there.
        marks: one per label.
        answers: rows of the table `eval_answers` without the columns that the session adds: {idx, role, text, finished,
            n_tokens, extracted, score, error}; role is `answer`, `rubric` or `judge`.
    """

    example: Example
    marks: tuple[Mark, ...]
    answers: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class HubSource:
    """Where a benchmark's data stand on the hub."""

    name: str
    split: str
    config: str | None = None
    domain: str = ""


@runtime_checkable
class Benchmark(Protocol):
    """One benchmark under one protocol: how its examples are read, asked and marked. Pure but for the sandbox."""

    @property
    def name(self) -> str:
        """As in `eval.benchmarks`."""

    @property
    def sources(self) -> tuple[HubSource, ...]:
        """Its data on the hub, in this order."""

    def read(self, records: Iterable[Record]) -> list[Example]:
        """The examples in the order of the data.

        Raises:
            DataError: a field is missing or of the wrong type; the message opens with `file:line`.
        """

    def ask(self, example: Example) -> Ask:
        """The question."""

    def mark(self, example: Example, answers: Sequence[Answer]) -> Examined:
        """Marks `ask(example).n` answers, each with a text (lost ones never come here)."""


@runtime_checkable
class Subject(Protocol):
    """The model under test."""

    def describe(self) -> Mapping[str, Any]:
        """What was asked: kind, source, hash, engine, settings (JSON values), secrets left out."""

    def answers(
        self, asks: Sequence[Ask], wanted: Sequence[int], purpose: str
    ) -> Iterator[tuple[int, tuple[Answer, ...]]]:
        """The answers to `asks[i]` for each i in `wanted`, as they come, in any order.

        What is answered to `asks[i]` depends on `asks`, the seed and `purpose` alone, not on `wanted`: batches are made
        over all of `asks`, so that an evaluation that goes on gives what an uninterrupted one would. (A server's own
        sampling cannot be held to that; there the replies that came are kept.)

        Args:
            asks: of all examples, in their order.
            wanted: indices to answer.
            purpose: names the draws: the benchmark, and which question of it.

        Raises:
            UnreachableError: no question can be answered (no server, wrong key).
        """

    def close(self) -> None:
        """Gives memory back and stops what was started."""


@runtime_checkable
class Examiner(Protocol):
    """One benchmark with all that it takes: model under test, judge, sandbox."""

    @property
    def name(self) -> str:
        """Of the benchmark."""

    @property
    def examples(self) -> Sequence[Example]:
        """All of them, `limit` already taken."""

    def examine(self, wanted: frozenset[str]) -> Iterator[Examined]:
        """The examples with these ids, as they are done, in any order."""
