"""Plays episodes of a task with a language model, turn-exact: what is trained on is what was sampled.

All live episodes of a wave move in step: one call of the model for all of their next replies, then one step of each
environment, side by side in threads since environments wait for servers and simulators. A wave is as large as the task
lets environments be open at once. The ids of a reply are kept as sampled; between two replies stands a bridge
(`models/dialogue.py`). The same generator gives the same episodes, however the threads run.
A task's demonstration, if it has one, is part of every prompt, as turns of the conversation.

A retry y⁽²⁾ (RLDS §3.2) starts from its parent's turns before `retry_from`: the environment replays them, and their ids
and bridges are taken over as they are. What the reflection adds stands in the system prompt, in the user turn before
the first new reply (placement `user_turn`), or is the system prompt (`prompt_rewrite`, ERL).

Ours, where the paper is silent: the model's window counts as a response budget; a retry that no longer fits is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from racelab.experiments.episodes import AgentSampling, Episode, Observation, Result, Start, Turn
from racelab.experiments.errors import DataError
from racelab.experiments.ports import DialogueModel, Environment, Task
from racelab.experiments.types import GenerationRequest, Sample

if TYPE_CHECKING:
    import torch

_THREADS = 16  # environments stepped at once; most of the time they wait
_CHARS_PER_TOKEN, _OVERHEAD = 3, 20  # estimate of an observation's tokens (App. D.2)
_HINT = "Advice from an earlier attempt: "  # before the addition in a user turn

Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(slots=True)
class _Play:
    """One episode while it is played.

    Attributes:
        context: ids so far: prompt, replies, bridges.
        replayed: turns that are the parent's.
        result: set when the episode is over.
    """

    start: Start
    env: Environment
    system: str
    first_observation: str
    prompt: tuple[int, ...]
    bare_prompt: tuple[int, ...]
    context: list[int]
    turns: list[Turn] = field(default_factory=list)
    bare_bridge: tuple[int, ...] | None = None
    result: Result | None = None

    def episode(self) -> Episode:
        """The finished episode."""
        assert self.result is not None
        return Episode(
            instance=self.start.instance,
            prompt=self.prompt,
            system=self.system,
            first_observation=self.first_observation,
            turns=tuple(self.turns),
            result=self.result,
            retry_from=self.start.retry_from,
            addition=self.start.addition,
            is_retry=self.start.parent is not None,
            bare_prompt=self.bare_prompt,
            bare_bridge=self.bare_bridge,
        )


class TextActor:
    """Implements `ports.Actor` in text."""

    def __init__(
        self,
        model: DialogueModel,
        task: Task,
        *,
        max_turns: int,
        max_prompt_tokens: int,
        max_response_tokens: int,
        max_turn_tokens: int,
        placement: Literal["system_prompt", "user_turn"] = "system_prompt",
        prompt_rewrite: bool = False,
    ) -> None:
        """Keeps the parts.

        Args:
            model: plays; its weights may change between two calls of `play`.
            task: what is played.
            max_turns: replies of an episode.
            max_prompt_tokens: limit of an original's prompt.
            max_response_tokens: of an episode after the prompt, observations included.
            max_turn_tokens: of one reply.
            placement: where the addition of a retry goes.
            prompt_rewrite: the addition replaces the system prompt instead.
        """
        self._model, self._task = model, task
        self._max_turns, self._max_prompt_tokens = max_turns, max_prompt_tokens
        self._max_response_tokens, self._max_turn_tokens = max_response_tokens, max_turn_tokens
        self._rewrite = prompt_rewrite
        self._in_user_turn = placement == "user_turn" and not prompt_rewrite

    def play(
        self, starts: Sequence[Start], sampling: AgentSampling, rng: torch.Generator
    ) -> list[Episode | None]:
        """One episode per start, in order. See the port.

        None stands where a retry's prefix could not be replayed exactly, is over, or does not fit the model's window
        or the response budget together with the addition.

        Raises:
            DataError: the prompt of an original is longer than `max_prompt_tokens` or the model's window, or its
                environment is over before the first reply.
        """
        size = self._task.concurrency or len(starts)
        episodes: list[Episode | None] = []
        for first in range(0, len(starts), max(size, 1)):
            episodes += self._wave(starts[first : first + size], sampling, rng)
        return episodes

    def _wave(
        self, starts: Sequence[Start], sampling: AgentSampling, rng: torch.Generator
    ) -> list[Episode | None]:
        """Episodes played in step; every environment is closed at the end, whatever happens."""
        with ExitStack() as stack:
            # the pool is entered last and so left first: no environment is closed while a thread steps it
            closing = stack.enter_context(ExitStack())
            pool = stack.enter_context(ThreadPoolExecutor(min(len(starts), _THREADS), "environment"))
            opened = _all(pool, lambda start: self._open(start, closing), starts)
            plays = [self._begin(start, *pair) for start, pair in zip(starts, opened, strict=True)]
            live = [p for p in plays if p is not None]
            while live:
                self._turn(live, self._replies(live, sampling, rng), pool)
                live = [p for p in live if p.result is None]
            return [None if p is None else p.episode() for p in plays]

    # ---- beginning -----------------------------------------------------------------------------------

    def _open(self, start: Start, closing: ExitStack) -> tuple[Environment, Observation | None]:
        """An environment where the first reply is sampled, and what it says there; in a thread."""
        env = self._task.open(start.instance)
        closing.callback(env.close)
        if start.parent is None:
            return env, env.reset()
        within = 0 <= start.retry_from < len(start.parent.turns)
        return env, env.replay(start.parent.turns[: start.retry_from]) if within else None

    def _begin(self, start: Start, env: Environment, seen: Observation | None) -> _Play | None:
        """The play before its first reply. Tokenizers are not made for threads: this is not in one."""
        if start.parent is not None:
            return None if seen is None or seen.done else self._retry(start, start.parent, env)
        assert seen is not None
        return self._original(start, env, seen)

    def _original(self, start: Start, env: Environment, seen: Observation) -> _Play:
        system = self._task.system_prompt()
        prompt = self._opening(system, seen.text)
        where = f"task {self._task.name}: instance {start.instance.instance_id}"
        if len(prompt) > self._max_prompt_tokens:
            raise DataError(
                f"{where}: its first prompt has {len(prompt)} tokens, but task.max_prompt_tokens is "
                f"{self._max_prompt_tokens}; raise the key or leave the instance out"
            )
        if len(prompt) >= self._model.window:
            raise DataError(
                f"{where}: its first prompt has {len(prompt)} tokens, which fill the model's window of "
                f"{self._model.window}; choose a model with a longer one"
            )
        if seen.done:
            raise DataError(f"{where}: it is over before the first reply; leave the instance out")
        return _Play(start, env, system, seen.text, prompt, prompt, list(prompt))

    def _retry(self, start: Start, parent: Episode, env: Environment) -> _Play | None:
        """A play that stands before turn `retry_from` with the parent's ids; None if there is no room for it."""
        turns = list(parent.turns[: start.retry_from])
        first = parent.first_observation
        bare, bare_bridge = self._task.system_prompt(), None
        bare_prompt = self._opening(bare, first)
        if not self._in_user_turn:
            system = start.addition if self._rewrite else self._task.system_prompt(start.addition)
            prompt = self._opening(system, first)
        elif not turns:
            system, prompt = bare, self._opening(bare, _with_hint(first, start.addition))
        else:
            system, prompt = bare, bare_prompt
            last = turns[-1]
            hinted = self._bridge(last, _with_hint(last.observation, start.addition))
            turns[-1], bare_bridge = replace(last, bridge=hinted), last.bridge
        play = _Play(start, env, system, first, prompt, bare_prompt, list(prompt), turns, bare_bridge)
        for turn in turns:
            play.context += turn.tokens + turn.bridge
        return play if self._room(play) > 0 else None

    def _opening(self, system: str, user: str) -> tuple[int, ...]:
        """System prompt, the turns of the demonstration, the first observation, the header of the first reply."""
        shown = self._task.demonstration
        users = [*(said for said, _ in shown), user]
        ids = list(self._model.opening(system, users[0], self._task.tools))
        for (_, reply), following in zip(shown, users[1:], strict=True):
            ids += [*self._model.encode(reply), *self._model.bridge(following, ended=False)]
        return tuple(ids)

    def _bridge(self, turn: Turn, observation: str) -> tuple[int, ...]:
        """Ids from a reply to the next; the end of turn is added unless it was sampled."""
        ended = turn.finished and turn.tokens[-1:] == (
            self._model.eos_id,
        )  # else cut, or ended by a stop string
        return tuple(self._model.bridge(observation, ended=ended))

    # ---- one turn ------------------------------------------------------------------------------------

    def _room(self, play: _Play) -> int:
        """Tokens that the episode may still add to its context, by its budget and the model's window."""
        used = len(play.context) - len(play.prompt)
        return min(self._max_response_tokens - used, self._model.window - len(play.context))

    def _replies(self, live: Sequence[_Play], sampling: AgentSampling, rng: torch.Generator) -> list[Sample]:
        """The next reply of each; equal contexts are one request, so that their prefix is computed once."""
        asked: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for i, play in enumerate(live):
            limit = min(self._max_turn_tokens, self._room(play))
            asked.setdefault((tuple(play.context), limit), []).append(i)
        requests = [
            GenerationRequest(
                prefix, len(who), limit, sampling.temperature, sampling.top_p, tuple(self._task.stops)
            )
            for (prefix, limit), who in asked.items()
        ]
        found: dict[int, Sample] = {}
        for who, samples in zip(asked.values(), self._model.generate(requests, rng), strict=True):
            found.update(zip(who, samples, strict=True))
        return [found[i] for i in range(len(live))]

    def _turn(self, live: Sequence[_Play], samples: Sequence[Sample], pool: ThreadPoolExecutor) -> None:
        """One step of every environment, and what follows from it."""
        pairs = list(zip(live, samples, strict=True))
        seen = _all(pool, lambda pair: pair[0].env.step(pair[1].text), pairs)
        over: list[tuple[_Play, str]] = []
        for (play, sample), said in zip(pairs, seen, strict=True):
            turn = Turn(
                sample.text, sample.tokens, sample.logprobs, sample.finished, said.text, info=said.info
            )
            play.context += sample.tokens
            reason, bridge = ("", ()) if said.done else self._next(play, turn)
            play.turns.append(replace(turn, bridge=bridge))
            play.context += bridge
            if said.done or reason:
                over.append((play, reason))
        _all(pool, lambda pair: _finish(*pair), over)

    def _next(self, play: _Play, turn: Turn) -> tuple[str, tuple[int, ...]]:
        """Why the episode must stop here ("" if it goes on), and the bridge to its next reply."""
        if len(play.turns) + 1 >= self._max_turns:
            return "turns", ()
        room = self._room(play)
        if estimated_tokens(turn.observation) > room:
            return "response_budget", ()
        bridge = self._bridge(turn, turn.observation)
        return ("response_budget", ()) if len(bridge) >= room else ("", bridge)


def _finish(play: _Play, reason: str) -> None:
    """Stops the environment if it has not ended by itself, and asks for the result; in a thread."""
    if reason:
        end = play.env.stop(reason)
        last = play.turns[-1]
        play.turns[-1] = replace(last, observation=end.text, info={**last.info, **end.info})
    play.result = play.env.result()


def estimated_tokens(observation: str) -> int:
    """What an observation will take of the response budget: 3 characters per token + 20 (RLDS App. D.2)."""
    return -(-len(observation) // _CHARS_PER_TOKEN) + _OVERHEAD


def _with_hint(observation: str, addition: str) -> str:
    return f"{observation}\n\n{_HINT}{addition}"


def _all(pool: ThreadPoolExecutor, work: Callable[[Item], Value], items: Iterable[Item]) -> list[Value]:
    """Results in order. All of them are awaited before an error, that of the first item in order, is raised."""
    jobs = [pool.submit(work, item) for item in items]
    wait(jobs)
    return [job.result() for job in jobs]
