"""One RLDS step over scripted parts: who is retried, what reaches the learner, what is written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from racelab.configs.compose import compose
from racelab.configs.schema_rlds import RldsRunConfig
from racelab.experiments.data.instances import InstanceStream
from racelab.experiments.episodes import (
    AgentSampling,
    Case,
    Episode,
    Grading,
    Instance,
    Reflection,
    Result,
    Start,
    Subtask,
    Turn,
)
from racelab.experiments.methods.rlds.batch import REFLECT, RETRY, split
from racelab.experiments.methods.rlds.parts import RldsParts
from racelab.experiments.methods.rlds.step import Rlds, RldsState
from racelab.experiments.rng import Streams
from racelab.experiments.types import StepRecord, TokenBatch, UpdateStats

SUBTASKS = (Subtask("plan", "Plans.", 0.75), Subtask("act", "Acts.", 0.25))
GOAL, END, BRIDGE = 7, 99, 50


def turn(token: int, last: bool) -> Turn:
    """Two sampled ids and, unless it is the last, a bridge of two."""
    bridge = () if last else (BRIDGE, BRIDGE + 1)
    return Turn(f"t{token}", (token, END), (-1.0, -0.5), True, "seen", bridge)


def episode(instance: Instance, tokens: Sequence[int], start: Start | None = None) -> Episode:
    reward = float(tokens[-1] == GOAL)
    turns = tuple(turn(t, u == len(tokens) - 1) for u, t in enumerate(tokens))
    retry = start is not None and start.parent is not None
    return Episode(
        instance,
        prompt=(1, 3) if retry else (1, 2),
        system="s",
        first_observation="o",
        turns=turns,
        result=Result(reward, reward == 1.0, "end", {"tool_calls": 2.0}),
        retry_from=start.retry_from if start else 0,
        addition=start.addition if start else "",
        is_retry=retry,
        bare_prompt=(1, 2),
    )


class Play:
    """Originals from a script by instance; a retry repeats its parent's turns and then reaches the goal, or fails."""

    def __init__(
        self, script: Mapping[str, Sequence[Sequence[int]]], retry: Sequence[int] = (8, GOAL)
    ) -> None:
        self.script, self.retry, self.starts, self.drop = script, retry, list[Start](), False
        self.taken: dict[str, int] = {}

    def play(self, starts: Sequence[Start], sampling: AgentSampling, rng: Any) -> list[Episode | None]:
        self.starts += starts
        out: list[Episode | None] = []
        for start in starts:
            if start.parent is not None:
                kept = [t.tokens[0] for t in start.parent.turns[: start.retry_from]]
                out.append(None if self.drop else episode(start.instance, [*kept, *self.retry], start))
                continue
            k = self.taken.get(start.instance.instance_id, 0)
            self.taken[start.instance.instance_id] = k + 1
            rows = self.script[start.instance.instance_id]
            out.append(episode(start.instance, rows[k % len(rows)]))
        return out


class Grade:
    def __init__(self, grades: Mapping[int, tuple[int, ...] | None]) -> None:
        self.grades = grades

    def grade(self, episodes: Sequence[Episode], rng: Any) -> list[Grading]:
        out = []
        for e in episodes:
            grades = self.grades.get(e.turns[-1].tokens[0], (3, 3))
            status: Any = "ok" if grades else "bad_json"
            out.append(
                Grading(grades, (0, None) if grades else (None, None), status, text="said", n_tokens=4)
            )
        return out


class Reflect:
    def __init__(self, retry_from: int | None = 1) -> None:
        self.retry_from, self.cases = retry_from, list[Case]()

    def reflect(self, cases: Sequence[Case], rng: Any) -> list[Reflection]:
        self.cases += cases
        status: Any = "ok" if self.retry_from is not None else "bad_json"
        said = "turn left" if self.retry_from is not None else ""
        return [Reflection(said, self.retry_from, status, "text", (5, 6), (60, 61, 62)) for _ in cases]


class Learner:
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.batches = list[TokenBatch]()

    def update(self, batch: TokenBatch) -> UpdateStats:
        self.batches.append(batch)
        return UpdateStats(stepped=True, n_samples=batch.n_samples, n_tokens=batch.n_tokens)


class World:
    """A task of two instances."""

    name, subtasks, tools, concurrency, stops = "frozenlake", SUBTASKS, (), None, ()
    demonstration = ()

    def metrics(self) -> dict[str, float]:
        return {"faults": 0.0}


INSTANCES = [Instance("frozenlake", name, {"n": name}) for name in ("a", "b")]
FAIL, LOSE = [1, 2, 3], [1, 4]
SCRIPT = {"a": [FAIL, [1, GOAL], LOSE], "b": [FAIL, FAIL, LOSE]}


def config(*words: str) -> RldsRunConfig:
    made = compose(
        [
            "task=frozenlake",
            "model=smollm2-135m",
            "method.grader=policy",
            "method.reflector=policy",
            "task.prompts_per_step=2",
            "method.group_size=3",
            "run.updates=4",
            "run.transcripts_every=1",
            *words,
        ]
    ).config
    assert isinstance(made, RldsRunConfig)
    return made


def make(
    *words: str, play: Play | None = None, grade: Grade | None = None, reflect: Reflect | None = None
) -> tuple[Rlds, Learner]:
    learner: Any = Learner()
    task: Any = World()
    parts = RldsParts(
        actor=play or Play(SCRIPT),
        grader=grade or Grade({3: (1, 5), 4: (2, 2), GOAL: (5, 3)}),
        reflector=reflect or Reflect(),
        task=task,
        backend=learner,
        stream=InstanceStream(INSTANCES, 0),
        rng=Streams(0),
    )
    return Rlds(config(*words), parts), learner


def one_step(*words: str, **world: Any) -> tuple[RldsState, StepRecord, TokenBatch]:
    method, learner = make(*words, **world)
    state, record = method.step(method.start())
    return state, record, learner.batches[0]


def test_the_lowest_half_of_the_failures_is_retried_at_most_r_of_a_group() -> None:
    play, reflect = Play(SCRIPT), Reflect()
    _, record, _ = one_step(play=play, reflect=reflect)
    retried = [
        (s.instance.instance_id, s.retry_from, s.addition) for s in play.starts if s.parent is not None
    ]
    assert sorted(retried) == [("a", 1, "turn left"), ("b", 1, "turn left"), ("b", 1, "turn left")]
    assert len(reflect.cases) == 3  # ceil(0.5 * 2) and ceil(0.5 * 3)
    assert record.metrics["rlds/reflect/n_candidates"] == 3
    _, record, _ = one_step("method.reflect.max_retries=1")
    assert record.metrics["rlds/reflect/n_candidates"] == 2


def test_originals_and_retries_form_one_group_and_each_knows_its_place() -> None:
    _, record, _ = one_step()
    rows = record.tables["rollouts"]
    for group in (0, 1):
        mine = [r for r in rows if r["group"] == group]
        assert [r["idx"] for r in mine] == list(range(len(mine)))
        assert [r["is_retry"] for r in mine] == [False] * 3 + [True] * (len(mine) - 3)
        parents = [mine[int(str(r["parent"]))] for r in mine[3:]]
        assert not any(p["solved"] for p in parents)
        assert [r["retry_from_step"] for r in mine] == [None] * 3 + [1] * (len(mine) - 3)
    assert sum(bool(r["is_retry"]) for r in rows) == 3
    assert record.metrics["health/cost_mismatch"] == 0


def test_the_learner_sees_each_row_under_the_context_that_it_was_sampled_in() -> None:
    _, record, batch = one_step()
    policy = [(g.prefix, s) for g in batch.groups for s in g.samples if s.part == "policy"]
    originals = [s for prefix, s in policy if prefix == (1, 2)]
    retries = [(prefix, s) for prefix, s in policy if prefix[:2] == (1, 3)]
    assert len(originals) == 6
    assert [prefix for prefix, _ in retries] == [
        (1, 3, 1, END, BRIDGE, BRIDGE + 1)
    ] * 3  # the replayed turn is context
    for _, sample in retries:
        assert sample.tokens == (8, END, BRIDGE, BRIDGE + 1, GOAL, END)
        assert (sample.weights > 0).tolist() == [True, True, False, False, True, True]
        assert (sample.advantages != 0).tolist() == [True, True, False, False, True, True]
    total = sum(float(s.weights.sum()) for _, s in policy)
    assert total == pytest.approx(1.0)  # token mean over what is not masked
    assert record.metrics["cost/calls/learner_samples"] == batch.n_samples


def test_good_retries_teach_the_reflection_and_the_response_without_it() -> None:
    _, record, batch = one_step("method.auxiliary.reflect_coef=0.05")
    by_part = {
        part: [(g.prefix, s) for g in batch.groups for s in g.samples if s.part == part]
        for part in (REFLECT, RETRY)
    }
    assert [(p, s.tokens) for p, s in by_part[REFLECT]] == [((5, 6), (60, 61, 62))] * 3
    for _, sample in by_part[REFLECT]:
        np.testing.assert_allclose(sample.weights, 0.05 / 3 / 3)  # coefficient, delta share, token mean
    for prefix, sample in by_part[RETRY]:
        assert prefix == (1, 2, 1, END, BRIDGE, BRIDGE + 1)  # the original prompt
        np.testing.assert_allclose(sample.weights, np.array([1, 1, 0, 0, 1, 1]) * 0.10 / 3 / 4)
    pairs = record.tables["retry_pairs"]
    assert [(p["delta_R"], p["used"], p["reflect_used"]) for p in pairs] == [(1.0, True, True)] * 3
    assert [p["weight"] for p in pairs] == pytest.approx([1 / 3] * 3)
    assert all(p["delta_grades"] in ([4.0, -2.0], [3.0, 1.0]) for p in pairs)


def test_a_retry_that_is_no_better_teaches_nothing_by_imitation() -> None:
    _, record, batch = one_step(play=Play(SCRIPT, retry=(8, 9)))
    assert {s.part for g in batch.groups for s in g.samples} == {"policy"}
    assert [p["used"] for p in record.tables["retry_pairs"]] == [False] * 3


def test_an_unreadable_reflection_and_a_lost_prefix_give_no_retry_and_are_counted() -> None:
    _, record, _ = one_step(reflect=Reflect(None))
    assert not record.tables["retry_pairs"]
    assert record.metrics["rlds/parse/reflect_bad_json"] == 3
    kept = [(r["status"], r["retry_from_step"], r["text"]) for r in record.tables["reflections"]]
    assert kept == [("bad_json", None, "text")] * 3
    assert record.metrics["rlds/reflect/parse_fail_frac"] == 1.0
    play = Play(SCRIPT)
    play.drop = True
    _, record, _ = one_step(play=play)
    assert record.metrics["rlds/reflect/replay_fail"] == 3
    assert record.metrics["health/cost_mismatch"] == 0


def test_no_parse_failure_is_a_grade_and_a_group_without_grades_is_plain_grpo() -> None:
    _, record, _ = one_step(grade=Grade({3: None, 4: None, GOAL: None}))
    assert record.metrics["rlds/parse/graded_frac"] == 0.0
    assert record.metrics["rlds/parse/grade_bad_json"] == 9
    assert record.metrics["rlds/fallback/groups_without_grades"] == 2
    assert not any(name.startswith("rlds/grade/") for name in record.metrics)
    for row in record.tables["rollouts"]:
        assert row["grades"] is None
        assert row["A_sdae"] == pytest.approx(row["A_grpo"])


def test_rlvr_is_scalar_grpo_without_grades_retries_or_pairs() -> None:
    play = Play(SCRIPT)
    _, record, batch = one_step("condition=rlvr", "method.group_size=3", play=play)
    assert all(start.parent is None for start in play.starts)
    assert not record.tables["retry_pairs"]
    adv = [row["A_grpo"] for row in record.tables["rollouts"] if row["group"] == 0]
    rewards = np.array([row["R"] for row in record.tables["rollouts"] if row["group"] == 0], dtype=float)
    np.testing.assert_allclose(
        adv, (rewards - rewards.mean()) / (rewards.std() + 1e-6) if rewards.std() else 0 * rewards, atol=1e-6
    )
    assert {s.part for g in batch.groups for s in g.samples} == {"policy"}
    assert not any(name.startswith(("rlds/grade", "rlds/stage")) for name in record.metrics)


def test_base_reflection_differs_from_rlds_in_the_advantages_alone() -> None:
    _, base, left = one_step("condition=base-reflection", "method.group_size=3")
    _, full, right = one_step("condition=rlds", "method.group_size=3")
    assert [(g.prefix, [(s.tokens, s.part) for s in g.samples]) for g in left.groups] == [
        (g.prefix, [(s.tokens, s.part) for s in g.samples]) for g in right.groups
    ]
    assert base.tables["retry_pairs"] == full.tables["retry_pairs"]
    assert any(
        not np.allclose(a.advantages, b.advantages)
        for x, y in zip(left.groups, right.groups, strict=True)
        for a, b in zip(x.samples, y.samples, strict=True)
    )


def test_masking_both_sides_takes_the_shared_prefix_out_of_the_retried_original_too() -> None:
    _, _, batch = one_step("method.mask_prefix=both")
    masked = [
        s
        for g in batch.groups
        for s in g.samples
        if s.part == "policy" and g.prefix == (1, 2) and s.weights[0] == 0
    ]
    assert len(masked) == 3
    assert all(s.weights[4] > 0 for s in masked)


def test_memory_keeps_the_last_suggestions_and_survives_a_checkpoint() -> None:
    reflect = Reflect()
    method, _ = make("method.reflect.memory=2", reflect=reflect)
    state, _ = method.step(method.start())
    assert state.memory == ("turn left", "turn left")
    again = method.load(state.state())
    assert again == state
    method.step(again)
    assert reflect.cases[-1].memory == ("turn left", "turn left")
    assert reflect.cases[0].memory == ()


def test_dynamic_weights_start_at_the_static_ones_and_move_with_the_retries() -> None:
    method, _ = make("method.sdae.phi_eta=0.5", "method.sdae.phi_prior=2")
    start = method.start()
    assert start.phi.weights_K.tolist() == [0.75, 0.25]
    state, _ = method.step(start)
    assert state.phi.weights_K[0] > 0.75
    assert method.load(state.state()) == state
    method, _ = make()
    state, _ = method.step(method.start())
    assert state.phi.weights_K.tolist() == [0.75, 0.25]


def test_split_leaves_out_what_the_reflection_added_where_it_stood_in_a_bridge() -> None:
    base = episode(INSTANCES[0], [1, 2, GOAL])
    retry = Episode(
        **{f: getattr(base, f) for f in base.__dataclass_fields__} | {"retry_from": 2, "bare_bridge": (77,)}
    )
    context, tokens, turns = split(retry, bare=True)
    assert context == (1, 2, 1, END, BRIDGE, BRIDGE + 1, 2, END, 77)
    assert tokens == (GOAL, END)
    assert turns.tolist() == [2, 2]
    assert split(retry)[0][-2:] == (BRIDGE, BRIDGE + 1)


def test_transcripts_hold_the_ids_that_were_sampled_and_their_advantages() -> None:
    _, record, _ = one_step()
    row = record.tables["transcripts"][0]
    assert row["demonstration"] == []
    assert row["instance"] == {"task": INSTANCES[0].task, "instance_id": "a", "data": dict(INSTANCES[0].data)}
    turns: Any = row["turns"]
    ids = [i for t in turns for i in t["tokens"]]
    assert ids[1::2] == [END] * len(turns)
    assert len(row["token_turn"]) == len(row["token_adv"])  # type: ignore[arg-type]
    assert all(a == 0.0 for a, u in zip(row["token_adv"], row["token_turn"], strict=True) if u == -1)  # type: ignore[call-overload]


def test_the_divisor_of_eq_2_is_logged_where_it_was_used() -> None:
    _, record, _ = one_step("method.positive_amplification=1.0")
    sigma = record.metrics["rlds/stage2/sigma_batch"]
    for row in record.tables["rollouts"]:
        adv_K: Any = row["A_k"]
        total = sum(s.weight * a for s, a in zip(SUBTASKS, adv_K, strict=True))
        assert row["A_sdae"] == pytest.approx(total / (sigma + 1e-6))
    for words, grade in (
        (("condition=base-reflection", "method.group_size=3"), None),
        ((), Grade({3: None, 4: None, GOAL: None})),
    ):
        _, record, _ = one_step(*words, grade=grade)
        assert "rlds/stage2/sigma_batch" not in record.metrics


def test_a_transcript_keeps_the_worked_examples_that_the_agent_was_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(World, "demonstration", (("at 1", "right"), ("at 2", "right")))
    _, record, _ = one_step()
    for row in record.tables["transcripts"]:
        assert row["demonstration"] == [["at 1", "right"], ["at 2", "right"]]


def test_a_reflector_does_not_read_random_grades() -> None:
    reflect = Reflect()
    _, record, _ = one_step(
        "condition=rlds-random-grades", "method.grader=random", "method.group_size=3", reflect=reflect
    )
    assert all(case.grading is None for case in reflect.cases)
    assert record.metrics["cost/calls/grade_gen"] == 0  # nobody was asked
    assert record.metrics["cost/calls/reflect_gen"] == 3
    assert record.metrics["health/cost_mismatch"] == 0


def test_a_difference_of_rounding_is_no_success() -> None:
    class Fractions(Play):
        def play(self, starts: Sequence[Start], sampling: AgentSampling, rng: Any) -> list[Episode | None]:
            out = super().play(starts, sampling, rng)
            for k, (start, e) in enumerate(zip(starts, out, strict=True)):
                assert e is not None
                reward = 0.1 + 0.2 if start.parent is not None else 0.3
                fields = {f: getattr(e, f) for f in e.__dataclass_fields__}
                out[k] = Episode(**fields | {"result": Result(reward, False, "end")})
            return out

    _, record, batch = one_step(play=Fractions(SCRIPT))
    assert record.metrics["rlds/reflect/success_frac"] == 0.0
    assert {s.part for g in batch.groups for s in g.samples} == {"policy"}
