"""RACE's step over scripted parts: what is trained on, what is pooled, what is written down."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from racelab.configs.compose import compose
from racelab.experiments.methods.race.phase import PhaseKind
from racelab.experiments.methods.race.state import RaceState
from racelab.experiments.methods.race.step import Race
from racelab.experiments.models.generator import Candidate, Rollout
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
RUBRIC = Rubric((Criterion("Is short", 1.0),), "- Is short | 1")
NAN = math.nan


def sample(text: str, n: int = 3) -> Sample:
    return Sample(tuple(range(1, n + 1)), (-1.0,) * n, text, True)


class World:
    """Scripted models: every rollout group gets the next scripted rewards, every rubric pair the next margin."""

    def __init__(
        self, rewards: Sequence[Sequence[float]] = (), pairs: Sequence[tuple[float, float]] = ()
    ) -> None:
        self.rewards = list(rewards)
        self.pairs = list(pairs)
        self.batches: list[TokenBatch] = []
        self.taken = 0
        self.usable = True
        self.diverse = True

    # data
    def take(self, n: int) -> list[Prompt]:
        self.taken += n
        return [Prompt(f"p{self.taken - n + i}", f"prompt {self.taken - n + i}") for i in range(n)]

    # generator
    def rollouts(self, prompts: Sequence[Prompt], n: int, rng: Any) -> list[Rollout]:
        rubric = RUBRIC if self.usable else None
        texts = [f"answer {i} with words {i}{i}" if self.diverse else "same words again" for i in range(n)]
        return [Rollout(sample("r"), rubric, tuple(sample(t) for t in texts)) for _ in prompts]

    def rubrics(self, prompts: Sequence[Prompt], n: int, rng: Any) -> list[list[Candidate]]:
        rubric = RUBRIC if self.usable else None
        return [[Candidate(sample("rubric"), rubric, rubric is not None) for _ in range(n)] for _ in prompts]

    def response_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        return (7, int(prompt.prompt_id[1:]))

    def rubric_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        return (8, int(prompt.prompt_id[1:]))

    # judge
    def score(self, items: Sequence[JudgeItem]) -> JudgeScores:
        scores, calls = [], 0
        for item in items:
            n = len(item.responses)
            if item.rubric is None:
                scores.append(np.full(n, NAN))
                continue
            calls += n
            scores.append(np.array(self.pairs.pop(0) if n == 2 else self.rewards.pop(0), dtype=float))
        return JudgeScores(tuple(scores), calls)

    # encoder
    def embed(self, texts: Sequence[str]) -> Any:
        rows = np.eye(8)[[hash_of(t) for t in texts]]
        return rows

    def forget(self) -> None:
        pass

    # backend
    def update(self, batch: TokenBatch) -> UpdateStats:
        self.batches.append(batch)
        if not batch.groups:
            return UpdateStats()
        return UpdateStats(stepped=True, n_samples=batch.n_samples, n_tokens=batch.n_tokens)


def hash_of(text: str) -> int:
    return sum(text.encode()) % 8


def race(world: World, *overrides: str, updates: int = 100) -> Race:
    words = [
        f"method.group_size={G}",
        "method.prompts_per_step=2",
        "method.entries_per_rubric_step=2",
        "method.routing.sigma_rt=0.05",
        "method.routing.tau_tie=0.9",
        "method.pool.min_pool=1",
        "method.phase.alpha=1.0",
        "method.phase.tau_sat=0.5",
        "method.phase.sigma_sw=0.05",
        "method.phase.mu_sat=0.8",
        "method.rubric_reward.min_grounded=0",
        "method.phase.tau_sat_range=[0.05,0.95]",
        "method.routing.d_tri=0.6",
        "method.routing.d_emb=0.25",
        *overrides,
    ]
    config = compose(words).config.method
    any_world: Any = world
    parts = Parts(any_world, any_world, any_world, any_world, any_world, any_world, Streams(0))
    return Race(config, parts, policy_updates=updates, max_steps=None)


INFORMATIVE = (0.1, 0.9, 0.3, 0.5)
FAILED = (0.5, 0.52, 0.5, 0.5)
SATURATED = (0.9, 0.92, 0.9, 0.9)


def test_only_informative_groups_train_and_failures_enter_the_pool():
    """Group 0 has population std sqrt(0.0875) = 0.2958 > 0.05, group 1 has 0.00866 <= 0.05 over diverse texts."""
    world = World([INFORMATIVE, FAILED])
    method = race(world)
    state, record = method.step(method.start())
    (batch,) = world.batches
    assert [g.prefix for g in batch.groups] == [(7, 0)]
    assert [len(g.samples) for g in batch.groups] == [G]
    (entry,) = state.pool.entries
    assert (entry.prompt.prompt_id, entry.preferred.text[:8], entry.rejected.text[:8]) == (
        "p1",
        "answer 1",
        "answer 0",
    )
    assert entry.margin == pytest.approx(0.02)
    assert record.metrics["race/route/informative_frac"] == 0.5
    assert record.metrics["race/route/rubric_failed_frac"] == 0.5
    assert record.metrics["health/cost_mismatch"] == 0.0
    assert record.metrics["cost/calls/learner_samples"] == G
    assert [r["route"] for r in record.tables["groups"]] == ["informative", "rubric_failed"]


def test_collapsed_groups_are_masked_and_not_pooled():
    """Equal texts: distinct trigrams 1/4 <= 0.6, cosine distance 0 <= 0.25."""
    world = World([FAILED, FAILED])
    world.diverse = False
    method = race(world)
    state, record = method.step(method.start())
    assert len(state.pool) == 0
    assert world.batches[0].groups == ()
    assert record.metrics["race/route/diversity_collapsed_frac"] == 1.0
    assert record.metrics["train/optim/stepped"] == 0.0


def test_no_gradient_filtering_trains_on_all_groups_but_still_pools():
    world = World([INFORMATIVE, FAILED])
    method = race(world, "method.routing.mask_uninformative=false")
    state, record = method.step(method.start())
    assert [g.prefix for g in world.batches[0].groups] == [(7, 0), (7, 1)]
    assert len(state.pool) == 1
    assert record.metrics["health/cost_mismatch"] == 0.0


def test_uniform_pool_takes_every_group_with_a_pair():
    world = World([INFORMATIVE, FAILED])
    method = race(world, "method.pool.fill=uniform")
    state, _ = method.step(method.start())
    assert [e.prompt.prompt_id for e in state.pool.entries] == ["p0", "p1"]
    assert len(world.batches[0].groups) == 1


def test_filter_only_drops_groups_without_any_spread():
    world = World([FAILED, (0.5, 0.5, 0.5, 0.5)])
    method = race(world, "method.routing.mode=sigma_zero", "method.pool.fill=uniform")
    method.step(method.start())
    assert [g.prefix for g in world.batches[0].groups] == [(7, 0)]


def test_routing_off_is_plain_grpo():
    world = World([FAILED, SATURATED] * 3)
    method = race(world, "method.routing.mode=off")
    state = method.start()
    for _ in range(3):
        state, _ = method.step(state)
    assert [len(b.groups) for b in world.batches] == [2, 2, 2]
    assert (len(state.pool), state.phase.kind) == (0, PhaseKind.POLICY)


def test_groups_without_a_usable_rubric_are_invalid_and_cost_no_judge_call():
    world = World()
    world.usable = False
    method = race(world)
    state, record = method.step(method.start())
    assert record.metrics["race/route/invalid_frac"] == 1.0
    assert record.metrics["cost/calls/judge_eval"] == 0.0
    assert record.metrics["cost/calls/judge_eval_printed"] == 2 * G
    assert record.metrics["health/cost_mismatch"] == 0.0
    assert "race/route/quarantine_rate" not in record.metrics
    assert state.q_ema == 0.0


def test_nan_rewards_train_with_zero_advantage():
    """Valid rewards 0.2 and 0.8: mean 0.5, population std 0.3, advantages -1 and +1; the missing ones get 0."""
    world = World([(0.2, NAN, 0.8, NAN), INFORMATIVE])
    method = race(world)
    method.step(method.start())
    rows = [float(s.advantages[0]) for s in world.batches[0].groups[0].samples]
    assert rows == pytest.approx([-1.0, 0.0, 1.0, 0.0], abs=1e-6)


def test_saturation_opens_the_rubric_phase_and_a_plateau_closes_it():
    """f_sat = 1/2 >= 0.5 with alpha 1; then rubric rewards 0.4, 0.4, 0.4, 0.4 with W = 2: Delta = 0 <= 0.02.

    Each candidate's margin is 0.03 against m_old 0.02: 0.03 / (0.02 + 0.05) = 3/7.
    """
    world = World([SATURATED, INFORMATIVE], [(0.53, 0.5)] * (4 * G))
    method = race(world)
    state, first = method.step(method.start())
    assert state.phase.kind is PhaseKind.RUBRIC
    assert first.tables["phases"][0]["end_reason"] == "saturation"
    records = []
    while state.phase.kind is PhaseKind.RUBRIC:
        state, record = method.step(state)
        records.append(record)
    assert len(records) == 4
    assert records[0].metrics["race/rubric_reward/mean"] == pytest.approx(3 / 7)
    assert records[0].metrics["race/rubric_reward/gain_mean"] == pytest.approx(0.01)
    assert records[-1].tables["phases"][0]["end_reason"] == "plateau"
    assert [b.groups[0].prefix for b in world.batches[1:]] == [(8, 0)] * 4
    assert records[0].metrics["cost/calls/judge_eval"] == 2 * G
    assert records[0].metrics["health/cost_mismatch"] == 0.0
    assert (state.phase.f_ema, state.phase.policy_t) == (0.0, 0)


def test_a_small_pool_defers_the_switch_and_says_so():
    world = World([SATURATED, INFORMATIVE] * 2)
    method = race(world, "method.pool.min_pool=3")
    state, record = method.step(method.start())
    assert (state.phase.kind, state.phase.deferred) == (PhaseKind.POLICY, 1)
    assert record.metrics["race/switch/deferred_switch"] == 1.0
    assert "deferred" in str(record.status["event"])


@pytest.mark.parametrize(("configured", "expected"), [("-1.0", -1.0), ("null", NAN)])
def test_unusable_candidates_get_the_configured_reward(configured, expected):
    world = World([SATURATED, INFORMATIVE])
    method = race(world, f"method.rubric_reward.invalid_reward={configured}")
    state, _ = method.step(method.start())
    world.usable = False
    state, record = method.step(state)
    found = record.tables["rubric_groups"][0]["final_rewards"]
    assert found == [None if math.isnan(expected) else expected] * G
    assert record.metrics["cost/calls/judge_eval"] == 0.0
    assert record.metrics["health/cost_mismatch"] == 0.0
    assert ("race/rubric_reward/mean" in record.metrics) is not math.isnan(expected)


def test_zero_gains_are_static_thresholds():
    script = [INFORMATIVE, FAILED, SATURATED, INFORMATIVE, FAILED, FAILED]
    gains = [f"method.trqc.{k}=0" for k in ("eta_sigma", "eta_tau")]
    gains += [f"method.phase.{k}=0" for k in ("eta_policy", "eta_rubric")]
    world = World(script)
    method = race(world, *gains, "method.phase.tau_sat=0.95")
    state = start = method.start()
    for _ in range(3):
        state, _ = method.step(state)
    assert state.thresholds == start.thresholds
    assert state.q_ema > 0.0


def test_trqc_moves_the_thresholds_that_the_next_step_routes_by():
    """q = 1, q_hat = 0.3 x 1 = 0.3; e = (0.3 - 0.25) / (0.25 + 0.001) = 0.05/0.251; sigma_rt = 0.05 - 0.002 e."""
    world = World([FAILED, FAILED, INFORMATIVE, INFORMATIVE])
    method = race(
        world,
        "method.trqc.alpha_q=0.3",
        "method.trqc.q_target=0.25",
        "method.trqc.eps_q=0.001",
        "method.trqc.eta_sigma=0.002",
        "method.phase.tau_sat=0.95",
    )
    state, first = method.step(method.start())
    assert first.metrics["race/trqc/sigma_rt"] == 0.05
    _, second = method.step(state)
    assert second.tables["groups"][0]["sigma_rt"] == pytest.approx(0.05 - 0.002 * 0.05 / 0.251, abs=1e-15)


def test_fixed_phases_are_exactly_fifty_for_two_hundred_and_ten_steps():
    world = World([INFORMATIVE, FAILED] * 210, [(0.6, 0.5)] * (210 * 2 * G))
    method = race(world, "method.phase.mode=fixed", "method.phase.fixed=[50,50]", updates=110)
    state, ended = method.start(), []
    while not method.done(state):
        state, record = method.step(state)
        ended += record.tables["phases"]
    assert [(p["kind"], p["length"], p["end_reason"]) for p in ended] == [
        ("policy", 50, "fixed"),
        ("rubric", 50, "fixed"),
        ("policy", 50, "fixed"),
        ("rubric", 50, "fixed"),
    ]
    assert state.step == 210


def test_state_survives_json_and_the_next_step_is_the_same():
    script = [INFORMATIVE, FAILED, SATURATED, FAILED, FAILED, INFORMATIVE]
    first, again = World(script), World(script[4:])
    method = race(first, "method.phase.tau_sat=0.95")
    state = method.start()
    for _ in range(2):
        state, _ = method.step(state)
    stored = json.loads(json.dumps(state.state()))
    again.taken = 4
    resumed = race(again, "method.phase.tau_sat=0.95")
    loaded = resumed.load(stored)
    assert loaded == state
    assert isinstance(loaded, RaceState)
    after, record = method.step(state)
    after_again, record_again = resumed.step(loaded)
    assert after_again == after
    assert record_again.tables == record.tables


def test_budget_counts_policy_steps_only():
    world = World([INFORMATIVE, FAILED] * 2)
    method = race(world, updates=2)
    state = method.start()
    while not method.done(state):
        state, _ = method.step(state)
    assert state.phase.policy_steps == 2
    (row,) = method.finish(state, "budget")
    assert (row["kind"], row["length"], row["end_reason"]) == ("policy", 2, "budget")


def test_candidates_that_do_not_speak_of_their_prompt_can_be_refused():
    """RUBRIC is "Is short"; the prompts say "prompt 0": nothing is shared, so every candidate gets -1, uncalled."""
    world = World([SATURATED, INFORMATIVE])
    method = race(world, "method.rubric_reward.min_grounded=1", "method.rubric_reward.invalid_reward=-1.0")
    state, _ = method.step(method.start())
    _, record = method.step(state)
    assert record.tables["rubric_groups"][0]["final_rewards"] == [-1.0] * G
    assert record.metrics["cost/calls/judge_eval"] == 0.0


def test_a_gradient_that_is_not_finite_is_counted():
    class Broken(World):
        def update(self, batch: TokenBatch) -> UpdateStats:
            return UpdateStats(stepped=False, grad_norm=NAN, n_samples=batch.n_samples)

    method = race(Broken([INFORMATIVE, INFORMATIVE]))
    _, record = method.step(method.start())
    assert record.metrics["health/nonfinite/train/optim/grad_norm"] == 1.0
    assert record.metrics["train/optim/stepped"] == 0.0


def test_a_raw_text_stand_in_is_no_usable_candidate():
    class Raw(World):
        def rubrics(self, prompts: Sequence[Prompt], n: int, rng: Any) -> list[list[Candidate]]:
            return [[Candidate(sample("noise"), RUBRIC, False) for _ in range(n)] for _ in prompts]

    method = race(Raw([SATURATED, INFORMATIVE]), "method.rubric_reward.invalid_reward=-1.0")
    state, _ = method.step(method.start())
    _, record = method.step(state)
    assert record.tables["rubric_groups"][0]["final_rewards"] == [-1.0] * G
    assert record.metrics["health/rubric_parse_fail"] == 1.0
