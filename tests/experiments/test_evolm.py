"""EvoLM: its buffer, its rewards, its steps over scripted models."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.configs.compose import compose
from racelab.experiments.methods.baselines.common import Scored, _mean_metrics, _unusable
from racelab.experiments.methods.baselines.evolm import Evolm, EvolmState, _json_form, _lines_form
from racelab.experiments.methods.baselines.evolm_buffer import OldAnswer, ReplayBuffer
from racelab.experiments.methods.baselines.evolm_reward import base_rewards, final_rewards
from racelab.experiments.methods.registry import METHODS
from racelab.experiments.models.generator import Candidate
from racelab.experiments.parts import Parts
from racelab.experiments.rng import Streams
from racelab.experiments.types import (
    Criterion,
    JudgeItem,
    JudgeScores,
    Prompt,
    Rubric,
    Sample,
    TokenBatch,
    UpdateStats,
)

G = 4
NAN = math.nan
RUBRIC = Rubric((Criterion("Is short", 3.0), Criterion("Is kind", 2.0)), "- Is short | 3\n- Is kind | 2")
RAW = Rubric((Criterion("no rubric", 1.0),), "no rubric")
SPREAD = (0.1, 0.9, 0.3, 0.5)


def sample(text: str, n: int = 3) -> Sample:
    return Sample(tuple(range(1, n + 1)), (-1.0,) * n, text, True)


class World:
    """Scripted models. Answers are numbered through the run; groups and pairs get the next scripted scores."""

    def __init__(self, rewards: Sequence[Any] = (), pairs: Sequence[tuple[float, float]] = ()) -> None:
        self.rewards, self.pairs = list(rewards), list(pairs)
        self.batches: list[TokenBatch] = []
        self.judged: list[JudgeItem] = []
        self.taken = self.answers = 0
        self.unusable: set[int] = set()
        """Numbers of the rubrics, of one prompt in one call, that do not parse."""
        self.raw = False
        """Whether the raw text stands in for those."""

    def take(self, n: int) -> list[Prompt]:
        self.taken += n
        check = {"kind": "any_word", "words": ["red"]}
        return [Prompt(f"p{i}", f"prompt {i}", check=check) for i in range(self.taken - n, self.taken)]

    def responses(self, prompts: Sequence[Prompt], n: int, rng: Any) -> list[tuple[Sample, ...]]:
        out = []
        for p in prompts:
            out.append(tuple(sample(f"answer {self.answers + i} to {p.text}") for i in range(n)))
            self.answers += n
        return out

    def rubrics(self, prompts: Sequence[Prompt], n: int, rng: Any) -> list[list[Candidate]]:
        return [
            [
                Candidate(sample("no rubric"), RAW if self.raw else None, False)
                if i in self.unusable
                else Candidate(sample(RUBRIC.text), RUBRIC, True)
                for i in range(n)
            ]
            for _ in prompts
        ]

    def response_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        return (7, int(prompt.prompt_id[1:]))

    def rubric_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        return (8, int(prompt.prompt_id[1:]))

    def score(self, items: Sequence[JudgeItem]) -> JudgeScores:
        self.judged += items
        scores, calls = [], 0
        for item in items:
            n = len(item.responses)
            if item.rubric is None:
                scores.append(np.full(n, NAN))
                continue
            calls += n
            scores.append(np.array(self.pairs.pop(0) if n == 2 else self.rewards.pop(0), dtype=float))
        return JudgeScores(tuple(scores), calls)

    def embed(self, texts: Sequence[str]) -> Any:
        return np.eye(len(texts))

    def forget(self) -> None:
        pass

    def update(self, batch: TokenBatch) -> UpdateStats:
        self.batches.append(batch)
        if not batch.groups:
            return UpdateStats()
        return UpdateStats(stepped=True, n_samples=batch.n_samples, n_tokens=batch.n_tokens)


def evolm(world: World, *overrides: str, updates: int = 100, rng: Streams | None = None) -> Evolm:
    words = [
        "method=evolm",
        f"method.group_size={G}",
        "method.prompts_per_step=2",
        "method.entries_per_rubric_step=2",
        "method.fixed=[2,1]",
        *overrides,
    ]
    any_world: Any = world
    parts = Parts(*[any_world] * 6, rng or Streams(0))
    return Evolm(compose(words).config.method, parts, policy_updates=updates, max_steps=None)


def run(method: Evolm, steps: int, state: EvolmState | None = None) -> tuple[EvolmState, list[Any]]:
    state, records = state or method.start(), []
    for _ in range(steps):
        state, record = method.step(state)
        records.append(record)
    return state, records


# --- rewards ---


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("preference", [1.0, 0.0, 0.0, NAN]),
        ("margin", [0.5, 0.0, -0.25, NAN]),
        ("separation", [0.85, 0.0, 0.0, NAN]),
    ],
)
def test_base_rewards(base, expected):
    """Margins 1/2, 0 (a tie), -1/4: separation 7/10 + 3/10 x 1/2 = 85/100."""
    found = base_rewards(np.array([0.5, 0.0, -0.25, NAN]), base)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-15)


def test_final_rewards():
    """f = 1/4: 3/4 x 1 + 1/4 x 1 = 1, 3/4 x 1 + 0 = 3/4, 3/4 x 0 + 1/4 = 1/4; no score NaN; no rubric -1/2."""
    base = np.array([1.0, 1.0, 0.0, NAN, NAN])
    valid = np.array([True, False, True, True, False])
    usable = np.array([True, True, True, True, False])
    found = final_rewards(base, valid, usable, format_weight=0.25, invalid_reward=-0.5)
    np.testing.assert_allclose(found, [1.0, 0.75, 0.25, NAN, -0.5])
    assert math.isnan(final_rewards(base, valid, usable, format_weight=0.0)[4])


@given(st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=8), st.sampled_from(["preference", "separation"]))
def test_base_rewards_lie_in_the_unit_interval_and_never_fall_with_the_margin(margins, base):
    margins = np.sort(np.array(margins))
    found = base_rewards(margins, base)
    assert np.all((found >= 0.0) & (found <= 1.0))
    assert np.all(np.diff(found) >= 0.0)
    assert np.all((found > 0.0) == (margins > 0.0))


def test_an_unknown_base_reward_is_an_error():
    with pytest.raises(ValueError, match="unknown"):
        base_rewards(np.zeros(2), "sum")  # type: ignore[arg-type]


def form(text: str) -> Candidate:
    return Candidate(sample(text), RUBRIC, True)


def two(first: str, second: str) -> str:
    rows = (f'{{"criterion": "{c}", "weight": {w}}}' for c, w in (("Is short", first), ("Is kind", second)))
    return f'{{"criteria": [{", ".join(rows)}]}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (two("0.5", "0.5"), True),
        (two("0.65", "0.5"), True),  # 1.15
        (two("0.35", "0.5"), True),  # 0.85
        (two("0.66", "0.5"), False),
        (two("0.34", "0.5"), False),
        (two("1.1", "-0.1"), False),
        (two("1", "0"), False),
        (two("true", "0.1"), False),
        (two('"0.5"', "0.5"), False),
        (two("NaN", "0.5"), False),
        ("<think>" + two("3", "3") + "</think>" + two("0.5", "0.5"), True),
        ('{"criteria": [{"criterion": "Is short", "weight": 1.0}]}', False),
        ('{"criteria": [{"criterion": " ", "weight": 0.5}, {"criterion": "Is kind", "weight": 0.5}]}', False),
        ('[{"criterion": "Is short", "weight": 0.5}, {"criterion": "Is kind", "weight": 0.5}]', False),
        ('{"criteria": "none"}', False),
        ("no JSON", False),
    ],
)
def test_the_form_of_a_json_rubric(text, expected):
    assert _json_form(form(text)) is expected


def test_the_form_of_a_rubric_in_lines_is_two_criteria_of_any_weights():
    assert _lines_form(form("")) is True
    assert _lines_form(Candidate(sample(""), Rubric(RUBRIC.criteria[:1], ""), True)) is False


# --- buffer ---


def old(step: int, prompt: str = "p0") -> OldAnswer:
    return OldAnswer(step, Prompt(prompt, "?"), sample(f"{step}"))


def buffer(*steps: int, capacity: int = 10) -> ReplayBuffer:
    return ReplayBuffer(capacity).push([old(s) for s in steps])


def steps_of(answers: Sequence[OldAnswer]) -> list[int]:
    return sorted(a.policy_step for a in answers)


def test_the_buffer_forgets_the_oldest_first():
    first = buffer(1, 2, capacity=3)
    assert [a.policy_step for a in first.push([old(3), old(4)]).answers] == [2, 3, 4]
    assert [a.policy_step for a in first.push([old(s) for s in range(3, 9)]).answers] == [6, 7, 8]
    assert len(first) == 2


@pytest.mark.parametrize(
    ("min_age", "max_age", "expected", "fallback"),
    [
        (0, None, [1, 4, 6, 9], 0),
        (2, 6, [4, 6], 0),  # now 10: ages 9, 6, 4, 1; the limits are inside
        (4, 4, [6], 0),
        (5, 5, [1, 4], 1),  # none is 5: those of 5 and more
        (12, 20, [1, 4], 2),  # none is 12: half of it
        (40, None, [1, 4], 3),  # none is 20: the oldest half
    ],
)
def test_entries_are_drawn_by_age(min_age, max_age, expected, fallback):
    drawn = buffer(1, 4, 6, 9).draw(10, 10, min_age=min_age, max_age=max_age, rng=np.random.default_rng(0))
    assert steps_of(drawn.answers) == expected
    assert drawn.fallback == fallback


def test_the_last_fallbacks():
    """The only entry has age 0: min_age 1 halves to max(1, 0) = 1, half of one entry is none, so anything."""
    drawn = buffer(5).draw(3, 5, min_age=1, max_age=2, rng=np.random.default_rng(0))
    assert (steps_of(drawn.answers), drawn.fallback) == ([5], 4)
    with pytest.raises(ValueError, match="empty"):
        ReplayBuffer(3).draw(1, 1, min_age=0, max_age=None, rng=np.random.default_rng(0))


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(0, 40),
    st.none() | st.integers(0, 40),
    st.integers(0, 2**32),
)
def test_a_draw_is_always_possible_and_never_takes_an_entry_twice(steps, n, low, high, seed):
    held = ReplayBuffer(20).push([old(s, f"p{i}") for i, s in enumerate(sorted(steps))])
    drawn = held.draw(n, 30, min_age=low, max_age=high, rng=np.random.default_rng(seed))
    ids = [a.entry_id for a in drawn.answers]
    assert 1 <= len(ids) == len(set(ids)) <= n
    assert {*ids} <= {a.entry_id for a in held.answers}
    if drawn.fallback == 0:
        assert all(low <= 30 - a.policy_step <= (99 if high is None else high) for a in drawn.answers)


def test_every_eligible_entry_is_drawn_alike():
    """4 entries, 2 drawn: each in half of the draws; 2,000 draws have a standard deviation of 22."""
    rng = np.random.default_rng(0)
    counts = dict.fromkeys([1, 2, 3, 4], 0)
    for _ in range(2000):
        for a in buffer(1, 2, 3, 4).draw(2, 5, min_age=0, max_age=None, rng=rng).answers:
            counts[a.policy_step] += 1
    assert all(abs(c - 1000) < 110 for c in counts.values())


def test_a_buffer_survives_json():
    held = ReplayBuffer(3).push(
        [OldAnswer(2, Prompt("p", "t", "s", "c", {"kind": "regex"}), Sample((1, 2), (), "é", False))]
    )
    assert ReplayBuffer.from_state(json.loads(json.dumps(held.state()))) == held


# --- steps ---


def test_a_policy_step_scores_each_group_under_one_live_rubric_and_keeps_the_first_answers():
    world = World([SPREAD, SPREAD])
    state, (record,) = run(evolm(world), 1)
    assert [g.prefix for g in world.batches[0].groups] == [(7, 0), (7, 1)]
    assert [(a.entry_id, a.answer.text, a.answer.logprobs) for a in state.buffer.answers] == [
        ("1:p0", "answer 0 to prompt 0", ()),
        ("1:p1", "answer 4 to prompt 1", ()),
    ]
    calls = {
        k.removeprefix("cost/calls/"): v for k, v in record.metrics.items() if k.startswith("cost/calls/")
    }
    kinds = {"policy_gen": 8, "rubric_gen": 2, "judge_eval": 8, "learner_samples": 8}
    assert calls == {f"{k}{end}": v for k, v in kinds.items() for end in ("", "_expected", "_printed")}
    assert record.metrics["health/cost_mismatch"] == 0.0
    assert record.metrics["evolm/buffer/size"] == 2.0
    assert record.metrics["train/reward/mean"] == pytest.approx(0.45)


def test_a_prompt_without_a_usable_rubric_costs_no_judge_call_and_is_kept_as_an_old_answer():
    world = World()
    world.unusable = {0}
    state, (record,) = run(evolm(world), 1)
    assert world.batches[0].groups == ()
    assert len(state.buffer) == 2
    assert record.metrics["cost/calls/judge_eval"] == 0.0
    assert record.metrics["cost/calls/judge_eval_printed"] == 8.0
    assert record.metrics["health/cost_mismatch"] == 0.0
    assert record.metrics["health/rubric_parse_fail"] == 1.0


def test_a_rubric_step_prefers_the_fresh_answer_to_the_old_one():
    """Margins 0.2, 0, -0.1, 0.4: preferences 1, 0, 0, 1, of mean 1/2 and deviation 1/2: advantages 1, -1, -1, 1."""
    pairs = [(0.7, 0.5), (0.5, 0.5), (0.4, 0.5), (0.9, 0.5)]
    world = World([SPREAD] * 4, pairs * 2)
    method = evolm(world)
    state, _ = run(method, 2)
    before = len(world.judged)
    state, (record,) = run(method, 1, state)
    items = world.judged[before:]
    drawn = {a.answer.text for a in state.buffer.answers}
    assert len(items) == 2 * G
    assert all(item.responses[1].text in drawn and item.responses[0].text not in drawn for item in items)
    assert all(r.text.endswith(f"to {item.prompt.text}") for item in items for r in item.responses)
    for group in world.batches[-1].groups:
        assert group.prefix[0] == 8
        assert [float(s.advantages[0]) for s in group.samples] == pytest.approx([1, -1, -1, 1], abs=1e-6)
    row = record.tables["rubric_groups"][0]
    assert row["margins"] == pytest.approx([0.2, 0.0, -0.1, 0.4])
    assert row["base_rewards"] == row["final_rewards"] == [1.0, 0.0, 0.0, 1.0]
    assert (row["m_old"], row["usable"]) == (None, 4)
    assert row["step"] == 3
    assert record.metrics["race/rubric_reward/mean"] == 0.5
    assert record.metrics["race/rubric_reward/margin_mean"] == pytest.approx(0.125)
    assert record.metrics["race/rubric_reward/reversed_frac"] == 0.25
    assert record.metrics["evolm/valid_frac"] == 1.0
    assert len(record.tables["samples"]) == 2 * G


def test_a_rubric_step_costs_what_is_printed_and_the_fresh_answers():
    """N = 2 entries: 2 answers, 2 x 4 rubrics, 2 x 2 x 3 judge calls where one of the four does not parse."""
    world = World([SPREAD] * 4, [(0.7, 0.5)] * 6)
    method = evolm(world)
    state, _ = run(method, 2)
    world.unusable = {3}
    _, (record,) = run(method, 1, state)
    m = {k.removeprefix("cost/calls/"): v for k, v in record.metrics.items()}
    assert [m[k] for k in ("policy_gen", "rubric_gen", "judge_eval", "learner_samples")] == [2, 8, 12, 8]
    assert [m[f"{k}_printed"] for k in ("policy_gen", "rubric_gen", "judge_eval", "learner_samples")] == [
        0,
        8,
        16,
        8,
    ]
    assert record.metrics["health/cost_mismatch"] == 0.0
    assert record.metrics["health/rubric_parse_fail"] == 0.25


@pytest.mark.parametrize(("configured", "expected"), [("null", None), ("0.0", 0.0)])
def test_unusable_candidates_get_the_configured_reward(configured, expected):
    world = World([SPREAD] * 4, [(0.7, 0.5)] * 6)
    method = evolm(world, f"method.rubric_reward.invalid_reward={configured}")
    state, _ = run(method, 2)
    world.unusable = {3}
    _, (record,) = run(method, 1, state)
    assert record.tables["rubric_groups"][0]["final_rewards"] == [1.0, 1.0, 1.0, expected]


def test_a_stand_in_of_raw_text_is_judged_but_has_not_the_form():
    """Margin 1/5, f = 1/2: 1/2 x 1/5 + 1/2 for a rubric of two criteria, 1/2 x 1/5 for the text that does not parse."""
    world = World([SPREAD] * 4, [(0.7, 0.5)] * 8)
    method = evolm(world, "method.rubric_reward.base=margin", "method.rubric_reward.format_weight=0.5")
    state, _ = run(method, 2)
    world.unusable, world.raw = {3}, True
    _, (record,) = run(method, 1, state)
    row = record.tables["rubric_groups"][0]
    assert row["final_rewards"] == pytest.approx([0.6, 0.6, 0.6, 0.1])
    assert row["usable"] == 4
    assert record.metrics["cost/calls/judge_eval"] == 16.0
    assert record.metrics["health/cost_mismatch"] == 0.0
    assert record.metrics["evolm/valid_frac"] == 0.75


def test_a_missing_score_is_no_reward():
    world = World([SPREAD] * 4, [(NAN, 0.5), (0.7, NAN), (0.7, 0.5), (0.4, 0.5)] * 2)
    method = evolm(world, "method.rubric_reward.base=margin", "method.rubric_reward.format_weight=0.5")
    _, records = run(method, 3)
    found = records[-1].tables["rubric_groups"][0]["final_rewards"]
    assert found[:2] == [None, None]
    assert found[2:] == pytest.approx([0.6, 0.45])  # 1/2 x 1/5 + 1/2, 1/2 x (-1/10) + 1/2


def test_phases_alternate_with_fixed_lengths_and_only_policy_steps_count_for_the_budget():
    world = World([SPREAD] * 100, [(0.7, 0.5)] * 1000)
    method = evolm(world, "method.fixed=[3,2]", updates=7)
    state, ended = method.start(), []
    while not method.done(state):
        state, record = method.step(state)
        ended += record.tables.get("phases", [])
    ended += method.finish(state, "budget")
    found = [(p["kind"], p["index"], p["start"], p["end"], p["end_reason"]) for p in ended]
    assert found == [
        ("policy", 0, 1, 3, "fixed"),
        ("rubric", 1, 4, 5, "fixed"),
        ("policy", 2, 6, 8, "fixed"),
        ("rubric", 3, 9, 10, "fixed"),
        ("policy", 4, 11, 11, "budget"),
    ]
    assert (state.phase.policy_steps, state.phase.rubric_steps) == (7, 4)


def test_a_full_last_policy_phase_is_followed_by_its_rubric_phase():
    """RACE App. D at a smaller size: 6 policy updates in phases of 3 and 2 end at step 10, with 4 rubric updates."""
    world = World([SPREAD] * 100, [(0.7, 0.5)] * 1000)
    method = evolm(world, "method.fixed=[3,2]", updates=6)
    state = method.start()
    while not method.done(state):
        state, _ = method.step(state)
    assert (state.step, state.phase.policy_steps, state.phase.rubric_steps) == (10, 6, 4)
    assert method.finish(state, "budget") == []


def test_the_clock_of_both_kinds_of_step():
    world = World([SPREAD] * 10, [(0.7, 0.5)] * 100)
    _, records = run(evolm(world), 4)
    names = ("policy_step", "rubric_step", "phase_index", "phase_kind")
    found = [tuple(r.metrics[f"train/clock/{n}"] for n in names) for r in records]
    assert found == [(1, 0, 0, 0), (2, 0, 0, 0), (2, 1, 1, 1), (3, 1, 2, 0)]
    assert [r.step for r in records] == [1, 2, 3, 4]
    assert records[1].metrics["race/phase/policy_len"] == 2.0
    assert "policy phase of 2 steps" in records[1].status["event"]


def test_active_sampling_drops_even_groups_but_keeps_their_answers():
    """A round draws only what is missing: 2 prompts, then 1, then 1, then 1; 5 prompts x 4 answers = 20."""
    world = World([SPREAD, (0.5,) * 4, (0.5,) * 4, (0.5,) * 4, SPREAD, SPREAD])
    state, (record,) = run(evolm(world, "method.active_sampling_rounds=5"), 1)
    assert world.taken == 5
    assert record.metrics["cost/calls/policy_gen"] == record.metrics["cost/calls/policy_gen_expected"] == 20
    assert [g.prefix for g in world.batches[0].groups] == [(7, 0), (7, 4)]
    assert [a.prompt.prompt_id for a in state.buffer.answers] == ["p0", "p1", "p2", "p3", "p4"]
    assert record.metrics["health/cost_mismatch"] == 0.0


def test_rounds_of_a_step_count_by_their_prompts():
    """3 prompts, 2 rubrics of no use and a metric of 1; then 1 prompt, none and 5: (2 + 0) / 4, (3 + 5) / 4."""

    def scored(rubrics: list[Rubric | None], value: float) -> Scored:
        n = len(rubrics)
        return Scored(
            (np.zeros(G),) * n, tuple(rubrics), (), JudgeScores(()), {}, {}, {}, metrics={"a": value}
        )

    rounds = [scored([None, None, RUBRIC], 1.0), scored([RUBRIC], 5.0)]
    assert _unusable(rounds) == 0.5
    assert _mean_metrics(rounds) == {"a": 2.0}
    assert _mean_metrics([rounds[0], replace(rounds[1], metrics={})]) == {"a": 1.0}


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(stop):
    """Whatever the phase it stops in; the scripted world and the random streams are put where they were."""
    script, pairs = [SPREAD] * 20, [(0.7, 0.5), (0.2, 0.5), (0.5, 0.5), (0.9, 0.4)] * 20
    world = World(script, pairs)
    rng = Streams(0)
    method = evolm(world, "method.buffer.capacity=5", rng=rng)
    state, _ = run(method, stop)
    stored, streams = json.loads(json.dumps(state.state())), json.loads(json.dumps(rng.state()))
    again = World(list(world.rewards), list(world.pairs))
    again.taken, again.answers = world.taken, world.answers
    fresh = Streams(99)
    fresh.load_state(streams)
    resumed = evolm(again, "method.buffer.capacity=5", rng=fresh)
    loaded = resumed.load(stored)
    assert loaded == state
    after, records = run(method, 4, state)
    after_again, records_again = run(resumed, 4, loaded)
    assert after_again == after
    assert [r.tables for r in records_again] == [r.tables for r in records]
    assert [b.groups[0].prefix for b in again.batches] == [b.groups[0].prefix for b in world.batches[stop:]]


def test_the_method_is_registered_and_stops_at_the_step_limit():
    assert METHODS["evolm"] is Evolm
    method = evolm(World([SPREAD] * 4, [(0.7, 0.5)] * 20))
    method.max_steps = 2
    state, _ = run(method, 2)
    assert method.done(state)
    assert method.finish(method.start(), "interrupted") == []
