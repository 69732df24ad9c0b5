"""A model behind an OpenAI-compatible server as the model under test."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from racelab.experiments.errors import ConfigError, UnreachableError
from racelab.experiments.evaluation.types import Answer, Ask
from racelab.experiments.models.api import ApiModel
from racelab.experiments.models.chat import ChatRequest, Reply
from racelab.experiments.rng import derived_seed

_UNBOUNDED = 131_072  # tokens; what the protocols say where an answer may be as long as it likes
_SEEDS = 2**31  # what every server takes for a seed


class ApiSubject:
    """Asks a server, several questions at a time, and hands each answer on as it comes; implements `Subject`.

    Every answer has a seed of its own, made from the evaluation's; whether the server heeds it is its affair. Thinking
    that the server keeps apart is put back in front of the answer, so that a protocol sees what a model of this
    machine would have written.

    A bound that the window makes idle is not sent: server and window then bound question and answer together, as for a
    model of this machine. A question that the window does not hold is answered with nothing and says so. What was
    refused is held back until the server has answered something, so that a server which refuses everything leaves no
    answers behind.
    """

    def __init__(
        self,
        model: ApiModel,
        *,
        seed: int,
        thinking: bool | None = None,
        think_end: str = "</think>",
        window: int | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Keeps the parts.

        Args:
            model: opened with `empty_ok` and `fit`.
            seed: of all answers.
            thinking: where a question does not say.
            think_end: the tag that closes a thinking block.
            window: of the model, where the server says so.
            facts: what `describe` says of the model.
        """
        self._model, self._seed, self._thinking = model, seed, thinking
        self._end, self._window, self._facts = think_end, window, dict(facts or {})
        self._answered = False  # the server has answered a question of this evaluation

    def describe(self) -> dict[str, Any]:
        """What was asked and how (JSON values); no key."""
        how = {"window": self._window, "seed": self._seed, "thinking": self._thinking}
        return {**self._facts, "server": self._model.describe(), **how}

    def answers(
        self, asks: Sequence[Ask], wanted: Sequence[int], purpose: str
    ) -> Iterator[tuple[int, tuple[Answer, ...]]]:
        """See the protocol; a question is yielded when all its answers have come.

        Raises:
            UnreachableError: as `ApiModel.stream`, or the window holds no question at all.
            ConfigError: a question that is not put through the chat template.
        """
        places = [(i, draw) for i in wanted for draw in range(asks[i].n)]
        requests = [self._request(asks[i], i, draw, purpose) for i, draw in places]
        given: dict[int, dict[int, Answer]] = {}
        held: list[tuple[int, tuple[Answer, ...]]] = []  # whole, and not handed on yet
        try:
            for k, reply in self._model.stream(requests):
                i, draw = places[k]
                mine = given.setdefault(i, {})
                mine[draw] = self._answer(reply)
                self._answered = self._answered or reply.text is not None
                if len(mine) == asks[i].n:
                    del given[i]
                    held.append((i, tuple(mine[d] for d in range(asks[i].n))))
                if self._answered:
                    yield from held
                    held.clear()
        except UnreachableError as error:
            raise _explained(error, requests) from error
        if len(held) == len(asks) > 1 and all(a.text == "" for _, answers in held for a in answers):
            raise UnreachableError(
                f"{self._model.describe()['base_url']} finds every question of {purpose} longer than its window; serve "
                "the model with a longer one, or leave the benchmark out"
            )
        yield from held

    def close(self) -> None:
        """Nothing to give back: what is under way is given up with the iterator."""

    def _request(self, ask: Ask, index: int, draw: int, purpose: str) -> ChatRequest:
        if ask.layout == "text":
            raise ConfigError(
                f"{purpose} continues plain text, and a chat server only answers turns; evaluate the model on this "
                "machine"
            )
        idle = ask.max_tokens >= (self._window or _UNBOUNDED)
        return ChatRequest(
            ask.system,
            ask.user,
            None if idle else ask.max_tokens,
            ask.temperature,
            ask.top_p,
            draw=draw,
            stop=ask.stop,
            seed=derived_seed(self._seed, f"eval:{purpose}:{index}", draw) % _SEEDS,
            thinking=self._thinking if ask.thinking is None else ask.thinking,
        )

    def _answer(self, reply: Reply) -> Answer:
        if reply.text is None:
            if reply.too_long:
                return Answer("", finished=False, error="prompt exceeds the server's window")
            return Answer(None, finished=False, error=reply.error)
        return Answer(self._whole(reply), reply.finished, n_tokens=reply.n_tokens)

    def _whole(self, reply: Reply) -> str:
        """Thinking and answer in one; a thinking block that was cut has no end."""
        text = reply.text or ""
        if not reply.reasoning:
            return text
        ended = bool(text) or reply.finished
        return f"{self._end.replace('/', '', 1)}{reply.reasoning}{self._end if ended else ''}{text}"


def _explained(error: UnreachableError, requests: Sequence[ChatRequest]) -> UnreachableError:
    """The error, and what may be wrong with the bound where all questions are refused."""
    if "(HTTP 4" not in str(error) or not requests:
        return error
    bounds = [request.max_tokens for request in requests]
    longest = max((b for b in bounds if b is not None), default=None)
    how = (
        "without max_tokens: set eval.max_tokens if it wants one"
        if longest is None
        else f"for up to {longest} tokens: set eval.max_tokens if that is more than it gives"
    )
    return UnreachableError(f"{error}; it was asked {how}")
