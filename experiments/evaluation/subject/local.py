"""A language model of this process as the model under test. Imports torch when it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from racelab.experiments.evaluation.types import Answer, Ask
from racelab.experiments.models.judge_prompted import closed_thought
from racelab.experiments.models.text import before_stop
from racelab.experiments.ports import LanguageModel
from racelab.experiments.rng import torch_generator
from racelab.experiments.types import GenerationRequest

if TYPE_CHECKING:
    import torch


class LocalSubject:
    """Decodes batch by batch; implements `Subject`.

    The batches are stretches of all questions, whatever is still wanted of them, and each has a generator of its own:
    what a question is answered does not depend on what was answered before. A question is never shortened. One that
    does not fit the model's window is answered with nothing and says so, which is scored as a wrong answer is.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        seed: int,
        batch: int = 16,
        thinking: bool | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Keeps the parts.

        Args:
            model: frozen; its window bounds question and answer together.
            seed: of all answers.
            batch: answers decoded together, at most; a question that wants more has a batch of its own.
            thinking: where a question does not say.
            facts: what `describe` says of the model.
        """
        self._model, self._seed, self._batch = model, seed, batch
        self._thinking, self._facts = thinking, dict(facts or {})

    @property
    def language_model(self) -> LanguageModel:
        """The model, for what is measured by likelihood."""
        return self._model

    def describe(self) -> dict[str, Any]:
        """What was asked and how (JSON values)."""
        how = {
            "window": self._model.window,
            "batch": self._batch,
            "seed": self._seed,
            "thinking": self._thinking,
        }
        return {**self._facts, **how}

    def answers(
        self, asks: Sequence[Ask], wanted: Sequence[int], purpose: str
    ) -> Iterator[tuple[int, tuple[Answer, ...]]]:
        """See the protocol; answers come in the order of `asks`, a batch at a time."""
        todo = frozenset(wanted)
        for number, members in enumerate(stretches([ask.n for ask in asks], self._batch)):
            if todo.isdisjoint(members):
                continue
            rng = torch_generator(self._seed, f"eval:{purpose}", number)
            given = self._decode([asks[i] for i in members], rng)
            yield from ((i, answers) for i, answers in zip(members, given, strict=True) if i in todo)

    def close(self) -> None:
        """Gives the memory back; the subject answers nothing any more."""
        import gc

        import torch

        del self._model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _decode(self, asks: Sequence[Ask], rng: torch.Generator) -> list[tuple[Answer, ...]]:
        """The answers to one batch."""
        prompts = [self._prompt(ask) for ask in asks]
        window = self._model.window
        fits = [k for k, prompt in enumerate(prompts) if 0 < len(prompt) < window]
        requests = [_request(asks[k], prompts[k], window) for k in fits]
        drawn = dict(zip(fits, self._model.generate(requests, rng) if requests else [], strict=True))
        return [
            tuple(Answer(before_stop(s.text, ask.stop), s.finished, n_tokens=len(s.tokens)) for s in drawn[k])
            if k in drawn
            else unfit(ask, len(prompts[k]), window)
            for k, ask in enumerate(asks)
        ]

    def _prompt(self, ask: Ask) -> tuple[int, ...]:
        """Token ids up to where the answer begins."""
        if ask.layout == "text":
            return tuple(self._model.encode(ask.user))
        thinking = self._thinking if ask.thinking is None else ask.thinking
        closing = closed_thought(self._model, thinking=thinking is not False)
        return (*self._model.chat(ask.user, ask.system), *closing)


def stretches(counts: Sequence[int], batch: int) -> list[range]:
    """Neighbouring questions that want at most `batch` answers together, or a single one that wants more.

    Example:
        >>> stretches([1, 1, 1, 4, 1], 2)
        [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    """
    found: list[range] = []
    start = taken = 0
    for i, count in enumerate(counts):
        if i > start and taken + count > batch:
            found.append(range(start, i))
            start, taken = i, 0
        taken += count
    return [*found, range(start, len(counts))] if counts else []


def unfit(ask: Ask, n_prompt: int, window: int) -> tuple[Answer, ...]:
    """The answers to a question that the window does not hold."""
    why = f"prompt of {n_prompt} tokens exceeds the window of {window}" if n_prompt else "the prompt is empty"
    return (Answer("", finished=False, error=why),) * ask.n


def _request(ask: Ask, prompt: tuple[int, ...], window: int) -> GenerationRequest:
    room = min(ask.max_tokens, window - len(prompt))
    return GenerationRequest(prompt, ask.n, room, ask.temperature, ask.top_p, ask.stop)
