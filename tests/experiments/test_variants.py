"""What makes each ablation, read from the tables that a run logs: the real step over scripted models.

The script mixes every kind of group. With G = 4 scores, sigma_rt = 0.05 and tau_tie = 0.9 (tie rates are k/6),
sigma_sw = 0.05 and mu_sat = 0.8, by hand:

- WIDE: std 0.296: informative.
- NEAR: range 0.03, so std <= 0.015: degenerate, margin 0.03.
- EQUAL: std 0: degenerate, margin 0.
- HIGH: as NEAR, its mean 0.9075 >= 0.8: saturated.
- LOST: one score alone is valid: invalid.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from racelab.configs.compose import compose
from racelab.configs.keys import groups
from racelab.configs.schema import RaceConfig
from racelab.experiments.methods.race.state import RaceState
from racelab.experiments.methods.race.step import Race
from racelab.experiments.models.generator import Rollout
from racelab.experiments.parts import Parts
from racelab.experiments.rng import Streams
from racelab.experiments.types import JudgeItem, JudgeScores, Prompt, TokenBatch

from .test_race_step import RUBRIC, World, sample

NAN = math.nan
WIDE, NEAR, EQUAL = (0.1, 0.3, 0.5, 0.9), (0.5, 0.53, 0.5, 0.5), (0.5, 0.5, 0.5, 0.5)
HIGH, LOST, TWO = (0.9, 0.93, 0.9, 0.9), (NAN, 0.4, NAN, NAN), (0.2, NAN, 0.8, NAN)
KINDS = (WIDE, NEAR, EQUAL, HIGH, HIGH, LOST, TWO)
G = 4
SMALL = (
    f"method.group_size={G}",
    "method.prompts_per_step=3",
    "method.entries_per_rubric_step=2",
    "method.routing={sigma_rt: 0.05, tau_tie: 0.9, d_tri: 0.6, d_emb: 0.25}",
    "method.pool.min_pool=1",
    "method.rubric_reward.min_grounded=0",
    "method.phase={sigma_sw: 0.05, mu_sat: 0.8, alpha: 0.3, tau_sat: 0.4, tau_sat_range: [0.05, 0.95]}",
)
THRESHOLDS = ("sigma_rt", "tau_tie", "d_tri_star", "d_emb_star", "sigma_sw", "mu_sat", "tau_sat")


class Script(World):
    """The same rewards in the same order for every variant; every seventh prompt gets G equal responses."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.draw = np.random.default_rng(seed)
        self.first = True
        self.texts: dict[str, list[str]] = {}

    def rollouts(self, prompts: Sequence[Prompt], n: int, rng: Any) -> list[Rollout]:
        found = []
        for p in prompts:
            same = int(p.prompt_id[1:]) % 7 == 6
            texts = [f"answer {0 if same else i} with words {0 if same else i * 11}" for i in range(n)]
            responses = tuple(sample(text, n=1 + i) for i, text in enumerate(texts))
            found.append(Rollout(sample("r"), RUBRIC, responses))
        return found

    def score(self, items: Sequence[JudgeItem]) -> JudgeScores:
        scores = [self._pair() if len(item.responses) == 2 else self._group() for item in items]
        return JudgeScores(tuple(scores), sum(len(item.responses) for item in items))

    def _pair(self) -> Any:
        return np.round(self.draw.uniform(0.0, 1.0, 2), 2)

    def _group(self) -> Any:
        """The first is NEAR, so that the pool is never empty."""
        kind = NEAR if self.first else KINDS[self.draw.integers(len(KINDS))]
        self.first = False
        return np.array(kind)


@dataclass(frozen=True)
class Played:
    """What a run left: tables, metrics and states by step, the prompts that its policy steps trained on."""

    config: RaceConfig
    tables: dict[str, list[dict[str, Any]]]
    metrics: list[dict[str, float]]
    states: list[RaceState]
    batches: list[TokenBatch]

    def trained(self, row: dict[str, Any]) -> bool:
        """Whether a row of `groups` was in its step's batch."""
        prefix = (7, int(row["prompt_id"][1:]))
        return prefix in {group.prefix for group in self.batches[row["step"] - 1].groups}

    def lengths(self, kind: str) -> list[int]:
        return [row["length"] for row in self.tables["phases"] if row["kind"] == kind]

    def ends(self) -> set[str]:
        return {row["end_reason"] for row in self.tables["phases"]}

    def series(self, column: str) -> list[float]:
        """A threshold over the steps, from `groups`."""
        return [row[column] for row in self.tables["groups"]]


@cache
def play(*words: str, updates: int = 60, max_steps: int | None = None, seed: int = 0) -> Played:
    """A whole run, until its budget."""
    config = compose([*SMALL, *words]).config.method
    assert isinstance(config, RaceConfig)
    world: Any = Script()
    method = Race(
        config,
        Parts(world, world, world, world, world, world, Streams(seed)),
        policy_updates=updates,
        max_steps=max_steps,
    )
    state = method.start()
    tables: dict[str, list[dict[str, Any]]] = defaultdict(list)
    metrics, states = [], [state]
    while not method.done(state):
        state, record = method.step(state)
        states.append(state)
        metrics.append({k: v for k, v in record.metrics.items() if not k.startswith("perf/")})
        for name, rows in record.tables.items():
            tables[name] += rows
    return Played(config, tables, metrics, states, world.batches)


def variant(name: str, *words: str, **kwargs: Any) -> Played:
    played = play(f"variant={name}", *words, **kwargs)
    assert played.config.variant == name
    return played


def pooled_routes(played: Played) -> set[str]:
    """Routes of the groups whose pairs the rubric steps trained on; an entry is named `policy step:prompt`."""
    route = {f"{row['policy_step']}:{row['prompt_id']}": row["route"] for row in played.tables["groups"]}
    return {route[row["entry_id"]] for row in played.tables["rubric_groups"]}


@pytest.mark.parametrize("name", groups()["variant"])
def test_every_variant_turns_more_than_once_and_its_ledger_agrees(name: str) -> None:
    """60 policy updates on the small settings; each call that was made was expected."""
    played = variant(name)
    kinds = [row["kind"] for row in played.tables["phases"]]
    assert len(kinds) >= 4
    assert kinds == (["policy", "rubric"] * len(kinds))[: len(kinds)]
    assert {m["health/cost_mismatch"] for m in played.metrics} == {0.0}
    assert {row["route"] for row in played.tables["groups"]} >= {"informative", "rubric_failed", "invalid"}


def test_full_trains_on_informative_groups_and_pools_the_failed_ones() -> None:
    played = variant("full")
    rows = played.tables["groups"]
    assert [played.trained(row) for row in rows] == [row["route"] == "informative" for row in rows]
    assert {row["route"] for row in rows} == {
        "informative",
        "rubric_failed",
        "diversity_collapsed",
        "invalid",
    }
    assert pooled_routes(played) == {"rubric_failed"}
    assert played.ends() <= {"saturation", "plateau", "cap"}
    for adapted in ("sigma_rt", "tau_tie", "tau_sat"):
        assert len(set(played.series(adapted))) > 1


def test_without_gradient_filtering_every_valid_group_trains_and_only_failed_ones_are_pooled() -> None:
    played = variant("no-gradient-filtering")
    rows = played.tables["groups"]
    assert [played.trained(row) for row in rows] == [row["route"] != "invalid" for row in rows]
    assert pooled_routes(played) == {"rubric_failed"}
    # The script does not see the weights: what full decides, this decides.
    assert repr(rows) == repr(variant("full").tables["groups"])  # repr: NaN is to equal NaN


def test_uniform_rubric_sampling_pools_every_pair_and_still_trains_on_informative_groups_only() -> None:
    """m_old of WIDE 0.8, TWO 0.6, NEAR and HIGH 0.03; EQUAL's 0 is below min_margin = 0.01."""
    played = variant("uniform-rubric-sampling")
    rows = played.tables["groups"]
    assert [played.trained(row) for row in rows] == [row["route"] == "informative" for row in rows]
    assert pooled_routes(played) == {"informative", "rubric_failed", "diversity_collapsed"}
    pushed = {row["step"]: 0 for row in rows}
    for row in rows:
        pushed[row["step"]] += row["route"] != "invalid" and row["std"] > 0
    found = [m["race/pool/pushed"] for m in played.metrics if "race/pool/pushed" in m]
    assert found == list(pushed.values())


def test_filter_only_drops_the_groups_with_equal_rewards_and_nothing_else() -> None:
    played = variant("filter-only")
    rows = [row for row in played.tables["groups"] if row["route"] != "invalid"]
    assert [played.trained(row) for row in rows] == [row["std"] > 0.0 for row in rows]
    assert {row["std"] for row in rows} >= {0.0}
    assert any(0.0 < row["std"] <= row["sigma_rt"] for row in rows)  # what RACE would have quarantined too
    for kept in ("sigma_rt", "tau_tie"):
        assert set(played.series(kept)) == {getattr(played.config.routing, kept)}
    assert "informative" in pooled_routes(played)
    assert played.ends() <= {"saturation", "plateau", "cap"}


def test_random_phases_lie_within_twice_their_target_and_come_from_the_seed() -> None:
    """L* = 4 and M* = 5: all of 1..7 and 1..9 occur, with the means 4 and 5."""
    played = variant("random-phase-length", updates=400)
    policy, rubric = played.lengths("policy"), played.lengths("rubric")
    assert set(policy) == set(range(1, 8))
    assert set(rubric) == set(range(1, 10))
    assert np.mean(policy) == pytest.approx(4, abs=3 * 2 / math.sqrt(len(policy)))  # std of U{1..7}: 2
    assert np.mean(rubric) == pytest.approx(5, abs=3 * 2.6 / math.sqrt(len(rubric)))  # of U{1..9}: 2.58
    assert played.ends() == {"random"}
    again = variant("random-phase-length", updates=200).lengths("policy")
    assert again == policy[: len(again)]
    assert variant("random-phase-length", updates=200, seed=1).lengths("policy") != again


def test_fixed_phases_are_exactly_fifty_in_a_run_of_210_steps() -> None:
    """The paper's 50, 50, with nothing said but preset and variant; steps 1-50, 51-100, ..., and 10 of the fifth."""
    played = variant("fixed-50-50", "preset=sane", updates=500, max_steps=210)
    assert [(row["kind"], row["start"], row["end"], row["length"]) for row in played.tables["phases"]] == [
        ("policy", 1, 50, 50),
        ("rubric", 51, 100, 50),
        ("policy", 101, 150, 50),
        ("rubric", 151, 200, 50),
    ]
    assert played.ends() == {"fixed"}
    assert len(played.metrics) == 210
    rows = played.tables["groups"]
    assert len(rows) == 110 * 3
    assert [played.trained(row) for row in rows] == [row["route"] == "informative" for row in rows]
    assert len(set(played.series("sigma_rt"))) > 1  # routing and its controller stay on
    assert set(played.series("tau_sat")) == {0.4}


def test_zero_gains_give_the_static_thresholds_trajectory_step_by_step() -> None:
    gains = "method.trqc={eta_sigma: 0.0, eta_tau: 0.0}", "method.phase={eta_policy: 0.0, eta_rubric: 0.0}"
    static, zero, full = variant("static-thresholds"), play(*gains), variant("full")
    assert zero.config.variant == "full"
    assert len(static.states) == len(zero.states) > 60
    for step, (one, other) in enumerate(zip(static.states, zero.states, strict=True)):
        assert one == other, step
    assert static.metrics == zero.metrics
    assert repr(static.tables) == repr(zero.tables)  # repr: NaN is to equal NaN
    assert [batch_values(b) for b in static.batches] == [batch_values(b) for b in zero.batches]
    for column in THRESHOLDS:
        assert len(set(static.series(column))) == 1
    tau_imp = {row[f"tau_imp_{when}"] for row in static.tables["phases"] for when in ("before", "after")}
    assert tau_imp == {static.config.phase.tau_imp}
    assert len({row["tau_imp_after"] for row in full.tables["phases"]}) > 1  # what static holds, full moves
    assert static.series("sigma_rt") != full.series("sigma_rt")[: len(static.series("sigma_rt"))]


@pytest.mark.parametrize(
    ("preset", "name", "targets"),
    [
        ("embedded", "full", (0.25, 4, 5)),
        ("embedded", "short-phases", (0.25, 2, 4)),
        ("embedded", "low-quarantine", (0.125, 4, 5)),
        ("sane", "full", (0.35, 25, 12)),
        ("sane", "short-phases", (0.20, 10, 5)),
        ("sane", "low-quarantine", (0.10, 25, 12)),
    ],
)
def test_the_controllers_follow_the_targets_of_table_16(
    preset: str, name: str, targets: tuple[float, int, int]
) -> None:
    """Read back from what is logged, with windows of one phase.

    Eq 19: q* = (q_hat - e_q eps_q) / (1 + e_q), eps_q = 1e-8; Eq 21: L* = L / (1 + e_P), M* = M / (1 + e_R).
    """
    windows = "method.phase={policy_window: 1, rubric_window: 1, tau_imp_range: [0.0, 1.0], tau_imp: 0.5}"
    played = variant(name, f"preset={preset}", windows, updates=120)
    q_target, policy_target, rubric_target = targets
    for m in played.metrics:
        if "race/trqc/error" in m:
            error = m["race/trqc/error"]
            assert (m["race/trqc/q_ema"] - 1e-8 * error) / (1 + error) == pytest.approx(q_target, rel=1e-12)
        for kind, target in (("policy", policy_target), ("rubric", rubric_target)):
            error = m.get(f"race/switch/err_{kind}_len")
            if error is not None:
                assert m[f"race/phase/{kind}_len"] / (1 + error) == pytest.approx(target)
    errors = {key for m in played.metrics for key in m if key.startswith("race/switch/err_")}
    assert errors == {"race/switch/err_policy_len", "race/switch/err_rubric_len"}


def batch_values(batch: TokenBatch) -> list[tuple[Any, ...]]:
    """A batch as plain numbers."""
    return [
        (group.prefix, [(s.tokens, s.advantages.tolist(), s.weights.tolist()) for s in group.samples])
        for group in batch.groups
    ]


def plain_grpo(rows: Sequence[Sequence[float | None]], prompt: int) -> list[tuple[Any, ...]]:
    """Eq 3 and the mean over tokens, samples, groups, in plain Python: what GRPO makes of the scripted rollouts.

    Response i of a prompt has the tokens 1..i+1. A score that is missing has advantage 0.
    """
    numbers = [(prompt + j, row) for j, row in enumerate(rows)]
    usable = [(j, row) for j, row in numbers if sum(r is not None for r in row) >= 2]
    batch = []
    for j, row in usable:
        known = [r for r in row if r is not None]
        centre = sum(known) / len(known)
        spread = math.sqrt(sum((r - centre) ** 2 for r in known) / len(known))
        samples = []
        for i, r in enumerate(row):
            advantage = 0.0 if r is None or len(set(known)) == 1 else (r - centre) / (spread + 1e-8)
            weight = 1 / (len(usable) * len(row) * (i + 1))
            samples.append((tuple(range(1, i + 2)), [advantage] * (i + 1), [weight] * (i + 1)))
        batch.append(((7, j), samples))
    return batch


def test_full_without_routing_is_plain_grpo() -> None:
    played = variant("full", "method.routing.mode=off", updates=40)
    assert len(played.batches) == 40
    rows = played.tables["groups"]
    assert {row["route"] for row in rows} == {"informative", "invalid"}
    for step, batch in enumerate(played.batches):
        mine = [row["rewards"] for row in rows if row["step"] == step + 1]
        expected, found = plain_grpo(mine, 3 * step), batch_values(batch)
        assert [(prefix, [s[0] for s in samples]) for prefix, samples in found] == [
            (prefix, [s[0] for s in samples]) for prefix, samples in expected
        ]
        for (_, ours), (_, theirs) in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one[1] == pytest.approx(other[1], rel=1e-9, abs=1e-12)
                assert one[2] == pytest.approx(other[2], rel=1e-12)
        assert batch.temperature == played.config.response.temperature
    assert played.tables["phases"] == []
    assert any(row["saturated"] for row in rows)  # saturation alone opens no rubric phase: the pool is empty
    assert played.states[-1].phase.deferred > 0
    assert len(played.states[-1].pool) == 0
