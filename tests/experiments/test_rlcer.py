"""RLCER: validity and rewards by hand, its rubrics as text, its two steps over scripted models."""

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
from racelab.experiments.methods.baselines.rlcer import Rlcer, RlcerState
from racelab.experiments.methods.baselines.rlcer_reward import (
    answer_reward,
    correlation,
    cot_share,
    rubric_reward,
    valid_items,
)
from racelab.experiments.methods.grpo import grpo_batch, prefixed_batch
from racelab.experiments.methods.registry import METHODS
from racelab.experiments.models.answer_rubrics import AnswerRubricWriter
from racelab.experiments.models.generator import SamplingSettings
from racelab.experiments.models.rubric import RubricSettings
from racelab.experiments.parts import Parts
from racelab.experiments.rng import Streams
from racelab.experiments.types import (
    Check,
    Criterion,
    GenerationRequest,
    Prompt,
    Rubric,
    Sample,
    TokenBatch,
    UpdateStats,
    Verdicts,
)

G = 4
NAN = math.nan
RED = {"kind": "any_word", "words": ["red"]}


def yes(text: str) -> Any:
    """`1101` as booleans."""
    return np.array([c == "1" for c in text], dtype=np.bool_)


def table(*rows: str) -> Any:
    """One row per answer."""
    return np.array([yes(r) for r in rows], dtype=np.bool_)


# --- equations ---


def test_correlation():
    """z = 1100. v = 1000: (4 x 1 - 1 x 2) / sqrt(1 x 3 x 2 x 2) = 2 / sqrt(12) = 1 / sqrt(3); v = 0010 its opposite."""
    z = yes("1100")
    assert correlation(yes("1100"), z) == 1.0
    assert correlation(yes("0011"), z) == -1.0
    assert correlation(yes("1000"), z) == pytest.approx(3**-0.5, abs=1e-12)
    assert correlation(yes("0010"), z) == pytest.approx(-(3**-0.5), abs=1e-12)
    assert correlation(yes("1010"), z) == 0.0
    assert math.isnan(correlation(yes("1111"), z))
    assert math.isnan(correlation(z, yes("0000")))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=16))
def test_correlation_is_pearsons(pairs):
    v, z = (np.array(column, dtype=np.bool_) for column in zip(*pairs, strict=True))
    found = correlation(v, z)
    if v.all() or z.all() or not v.any() or not z.any():
        assert math.isnan(found)
        return
    assert found == pytest.approx(np.corrcoef(v, z)[0, 1], abs=1e-9)
    assert correlation(~v, z) == -found
    assert correlation(z, v) == found


def test_valid_items():
    """Columns 1100, 1000, 0010, 1111, 1010 against z = 1100: correlations 1, 0.58, -0.58, none, 0."""
    holds = table("11011", "10010", "00111", "00010")
    assert valid_items(holds, yes("1100"), 0.2).tolist() == [True, True, False, False, False]
    assert valid_items(holds, yes("1100"), 0.6).tolist() == [True, False, False, False, False]


def test_an_item_at_the_threshold_is_not_valid():
    """G = 10, five right, the item holds for five, three of them right: (10 x 3 - 25) / 25 = 1/5."""
    v, z = yes("1110011000"), yes("1111100000")
    assert valid_items(v[:, None], z, 0.2).tolist() == [False]
    assert valid_items(v[:, None], z, 0.199).tolist() == [True]


@pytest.mark.parametrize("z", [yes("111"), yes("000"), None])
def test_without_a_contrast_in_correctness_the_items_that_vary_are_valid_or_else_all(z):
    assert valid_items(table("110", "010", "010"), z, 0.2).tolist() == [True, False, False]
    assert valid_items(table("10", "10", "10"), z, 0.2).tolist() == [True, True]
    assert valid_items(np.zeros((3, 0), dtype=np.bool_), z, 0.2).tolist() == []


def test_cot_share():
    """Valid points 4, 2, -3: (got + 3) / 9. Holds 4 and -3: (1 + 3)/9; holds 4, 2: 1; holds -3 alone: 0; none: 3/9."""
    points, valid = [4.0, 2.0, -3.0, 5.0], yes("1110")
    assert cot_share(yes("1011"), points, valid) == pytest.approx(4 / 9)
    assert cot_share(yes("1100"), points, valid) == 1.0
    assert cot_share(yes("0010"), points, valid) == 0.0
    assert cot_share(yes("0001"), points, valid) == pytest.approx(3 / 9)
    assert cot_share(yes("1111"), points, yes("0000")) == 0.0
    assert cot_share(yes(""), [], yes("")) == 0.0


@given(st.data())
def test_cot_share_is_a_share_that_merits_raise_and_faults_lower(data):
    k = data.draw(st.integers(1, 8))
    points = data.draw(st.lists(st.sampled_from([-5.0, -1.0, 1.0, 2.0, 5.0]), min_size=k, max_size=k))
    holds = np.array(data.draw(st.lists(st.booleans(), min_size=k, max_size=k)))
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=k, max_size=k)))
    share = cot_share(holds, points, valid)
    assert 0.0 <= share <= 1.0
    j = data.draw(st.integers(0, k - 1))
    more = cot_share(np.where(np.arange(k) == j, True, holds), points, valid)
    less = cot_share(np.where(np.arange(k) == j, False, holds), points, valid)
    assert (more > less) == (bool(valid[j]) and points[j] > 0)
    assert (more < less) == (bool(valid[j]) and points[j] < 0)


@pytest.mark.parametrize(
    ("correct", "cot", "expected"),
    [(True, 0.5, 2.25), (False, 0.5, -1.75), (None, 0.5, 0.25), (True, NAN, 2.0), (False, 0.0, -2.0)],
)
def test_answer_reward(correct, cot, expected):
    """Weights 2 and 1/2."""
    assert answer_reward(correct, cot, outcome_weight=2.0, cot_weight=0.5) == expected


def test_rubric_reward():
    """K_valid / K + 1 for K > 0, else 0."""
    assert rubric_reward(yes("1100")) == 1.5
    assert rubric_reward(yes("000")) == 1.0
    assert rubric_reward(yes("1")) == 2.0
    assert rubric_reward(yes("")) == 0.0


def sample(text: str, n: int = 3) -> Sample:
    return Sample(tuple(range(1, n + 1)), (-1.0,) * n, text, True)


def test_a_batch_of_prefixes_compares_across_them():
    """Rewards 2, 1, 2, 1: mean 3/2, deviation 1/2, advantages 1, -1, 1, -1; one sample of 3 tokens: 1/(2 x 4 x 3)."""
    prefixes = [(1,), (2,), (1,), (3,)]
    group = (prefixes, [sample("a")] * 4, np.array([2.0, 1.0, 2.0, 1.0]))
    batch = prefixed_batch([group, group], n_all_groups=2)
    assert [g.prefix for g in batch.groups] == [(1,), (2,), (3,)] * 2
    assert [[float(s.advantages[0]) for s in g.samples] for g in batch.groups[:3]] == [
        pytest.approx(a, abs=1e-6) for a in ([1, 1], [-1], [-1])
    ]
    assert {float(w) for g in batch.groups for s in g.samples for w in s.weights} == {1 / 24}


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=6))
def test_equal_prefixes_make_the_usual_batch(rewards):
    samples = [sample("x", n + 1) for n in range(len(rewards))]
    one = grpo_batch([((5, 6), samples, np.array(rewards))], n_all_groups=3, normalisation="over_all_groups")
    own = prefixed_batch(
        [([(5, 6)] * len(samples), samples, np.array(rewards))],
        n_all_groups=3,
        normalisation="over_all_groups",
    )
    (a,), (b,) = one.groups, own.groups
    assert a.prefix == b.prefix
    for x, y in zip(a.samples, b.samples, strict=True):
        assert x.tokens == y.tokens
        np.testing.assert_array_equal(x.advantages, y.advantages)
        np.testing.assert_array_equal(x.weights, y.weights)


def test_a_sample_needs_a_prefix_and_a_reward():
    with pytest.raises(ValueError, match="rewards"):
        prefixed_batch([([(1,), (1,)], [sample("a")] * 2, np.zeros(3))], n_all_groups=1)
    with pytest.raises(ValueError, match="zip"):
        prefixed_batch([([(1,)], [sample("a")] * 2, np.zeros(2))], n_all_groups=1)


# --- rubrics as text ---


class Model:
    """One token per character; a rubric's text depends on the answer that it is asked about."""

    eos_id = 0
    window = 20_000

    def __init__(self, rubric_of: dict[str, str] | None = None) -> None:
        self.rubric_of = rubric_of or {}
        self.requests: list[list[GenerationRequest]] = []

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))

    def chat(self, user: str, system: str | None = None) -> list[int]:
        return self.encode(user)

    def generate(self, requests: Sequence[GenerationRequest], rng: Any) -> list[list[Sample]]:
        self.requests.append(list(requests))
        return [[self._one(self.decode(r.prefix))] for r in requests]

    def _one(self, asked: str) -> Sample:
        text = next((t for key, t in self.rubric_of.items() if key in asked), "none")
        return Sample(tuple(self.encode(text)), (-1.0,) * len(text), text, True)

    def logprobs(self, groups: Any, temperature: float = 1.0) -> Any:
        raise AssertionError("not asked for")


def writer(model: Model | None = None, **parsing: Any) -> AnswerRubricWriter:
    return AnswerRubricWriter(
        model or Model(),
        sampling=SamplingSettings(50, 0.7, 0.9),
        parsing=RubricSettings(**{"format": "json", "max_criteria": 4, **parsing}),
        drop_copied_examples=True,
    )


def items(*rows: tuple[str, object]) -> str:
    return json.dumps({"items": [{"category": "other", "criterion": c, "points": p} for c, p in rows]})


PROMPT = Prompt("p", "Name a colour.", check=RED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (items(("Checks itself", 4), ("Rambles on", -3)), [("Checks itself", 4.0), ("Rambles on", -3.0)]),
        (json.dumps([{"criterion": "Checks itself", "points": 1}]), [("Checks itself", 1.0)]),
        ("Here:\n```json\n" + items(("Checks  itself", 2)) + "\n```", [("Checks itself", 2.0)]),
        (
            "<think>" + items(("Not this", 5)) + "</think>" + items(("Checks the sum", 1)),
            [("Checks the sum", 1.0)],
        ),
        (items(("Checks itself", 3), ("Checks itself", -3)), [("Checks itself", 3.0)]),
        (items(("Checks itself", -3), ("checks itself.", 3)), [("Checks itself", -3.0)]),
        (
            items(("Too heavy", 6), ("Nothing", 0), ("A word", "2"), ("A truth", True), ("Right", 5)),
            [("Right", 5.0)],
        ),
        (
            items(*((f"Item number {i}", -1) for i in range(9))),
            [(f"Item number {i}", -1.0) for i in range(4)],
        ),
        (f'{{"rubric": {items(("Checks itself", 4))}}}', [("Checks itself", 4.0)]),
        (f'{{"rubric": {{"rubric": {items(("Checks itself", 4))}}}}}', None),
        (items(), None),
        ('{"items": "none"}', None),
        ('{"items": [{"criterion": "Cut off", "points": 1}', None),
        ('{"items": [{"criterion": "Endless", "points": Infinity}]}', None),
        ("", None),
    ],
)
def test_json_items_have_points_of_both_signs(text, expected):
    found = writer().parse(text, PROMPT)
    assert (found and [(c.text, c.weight) for c in found.criteria]) == expected
    if found:
        assert found.text == text


def test_lines_have_weights_and_copies_of_the_examples_are_dropped():
    text = " Says that the tree saves water | 5\n- Names a colour | 2\n\n"
    found = writer(format="lines").parse(text, PROMPT)
    assert found is not None
    assert [(c.text, c.weight) for c in found.criteria] == [("Names a colour", 2.0)]
    assert writer(format="lines", min_criteria=2).parse(text, PROMPT) is None


def test_lines_have_at_most_five_points():
    found = writer(format="lines").parse("Names a colour | 6\n- Is one word | 5\n- Is red | 10", PROMPT)
    assert found is not None
    assert [(c.text, c.weight) for c in found.criteria] == [("Is one word", 5.0)]


def test_every_answer_is_asked_about_by_itself_in_one_batch():
    model = Model({"red": items(("Says red", 5))})
    answers = [sample("<think>hm</think>red"), sample("blue<|im_end|>")]
    ((first, second),) = writer(model).write([PROMPT], [answers], None)  # type: ignore[arg-type]
    (requests,) = model.requests
    assert [(r.n, r.max_tokens, r.temperature, r.top_p) for r in requests] == [(1, 50, 0.7, 0.9)] * 2
    assert model.decode(first.prefix).endswith("Answer:\nred")
    assert model.decode(second.prefix).endswith("Answer:\nblue< |im_end| >")
    assert first.rubric is not None
    assert second.rubric is None


# --- steps ---


RUBRICS = {
    "red 0": items(("Says red", 4), ("Says blue", -2)),
    "red 1": items(("Says red", 5), ("Is an answer", 1)),
    "blue 2": items(("Says blue", 3)),
    "blue 3": "no rubric",
}
"""By answer. Correct are the red ones."""
ANSWERS = ("red 0", "red 1", "blue 2", "blue 3")


class World:
    """Scripted models around one `Model`: four answers to every prompt, two of them right."""

    def __init__(self, rule: Any = RED, answers: Sequence[str] = ANSWERS) -> None:
        self.model = Model(RUBRICS)
        self.rule, self.answers = rule, answers
        self.batches: list[TokenBatch] = []
        self.checks: list[Check] = []
        self.taken = 0
        self.per_item = False

    def take(self, n: int) -> list[Prompt]:
        self.taken += n
        return [Prompt(f"p{i}", f"prompt {i}", check=self.rule) for i in range(self.taken - n, self.taken)]

    def responses(self, prompts: Sequence[Prompt], n: int, rng: Any) -> list[tuple[Sample, ...]]:
        return [tuple(sample(t) for t in self.answers[:n]) for _ in prompts]

    def response_prefix(self, prompt: Prompt) -> tuple[int, ...]:
        return (7, int(prompt.prompt_id[1:]))

    def verify(self, checks: Sequence[Check]) -> Verdicts:
        """An item holds if its last word stands in the answer; every text is "an answer"."""
        self.checks += checks
        holds = [np.array([i.split()[-1] in f"{c.answer.text} answer" for i in c.items]) for c in checks]
        calls = sum(len(c.items) for c in checks) if self.per_item else len(checks)
        return Verdicts(tuple(holds), calls, parse_failures=1)

    def embed(self, texts: Sequence[str]) -> Any:
        return np.eye(len(texts))

    def forget(self) -> None:
        pass

    def update(self, batch: TokenBatch) -> UpdateStats:
        self.batches.append(batch)
        if not batch.groups:
            return UpdateStats()
        return UpdateStats(stepped=True, n_samples=batch.n_samples, n_tokens=batch.n_tokens)


def rlcer(world: World, *overrides: str, updates: int = 100, max_steps: int | None = None) -> Rlcer:
    words = [
        "method=rlcer",
        "judge=json",
        "method.verifier=list",
        f"method.group_size={G}",
        "method.prompts_per_step=2",
        "method.rubric.format=json",
        "method.rubric.drop_copied_examples=false",
        *overrides,
    ]
    any_world: Any = world
    parts = replace(Parts(*[any_world] * 6, Streams(0)), verifier=any_world)
    return Rlcer(compose(words).config.method, parts, policy_updates=updates, max_steps=max_steps)


def test_a_policy_step_by_hand():
    """z = 1100. Rubric 0: "Says red" 1100 valid, "Says blue" 0011 not: answer 0 has 4/4, reward 1 + 1.
    Rubric 1: "Says red" valid, "Is an answer" 1111 not: answer 1 has 5/5, reward 1 + 1.
    Rubric 2: "Says blue" not valid: no item, share 0, reward -1 + 0. Answer 3 has no rubric: -1.
    Rewards 2, 2, -1, -1: mean 1/2, deviation 3/2, advantages 1, 1, -1, -1.
    """
    world = World()
    state, record = rlcer(world).step(RlcerState())
    assert record.tables["groups"][0]["rewards"] == [2.0, 2.0, -1.0, -1.0]
    assert [g.prefix for g in world.batches[0].groups] == [(7, 0), (7, 1)]
    assert [float(s.advantages[0]) for s in world.batches[0].groups[0].samples] == pytest.approx(
        [1, 1, -1, -1], abs=1e-6
    )
    m = record.metrics
    assert m["rlcer/outcome_mean"] == 0.0
    assert m["rlcer/cot_mean"] == pytest.approx(2 / 3)
    assert m["rlcer/valid_items_frac"] == pytest.approx(2 / 5)
    assert m["rlcer/no_rule_frac"] == 0.0
    assert m["health/rubric_parse_fail"] == 0.25
    assert m["health/judge_parse_fail"] == 1.0
    assert not any(name in m for name in ("race/signal/all_ge_0_8_frac", "race/signal/collapsed_low_frac"))
    assert m["race/signal/sigma_mean"] == pytest.approx(1.5)
    assert [r["rubric_text"] for r in record.tables["samples"]] == [RUBRICS[a] for a in ANSWERS] * 2
    assert [g.rewards for g in state.pending] == [(1.5, 1.5, 1.0, 0.0)] * 2
    assert state.pending[0].usable == (True, True, True, False)


def test_every_answer_is_checked_against_every_rubric_of_its_group():
    """2 prompts, 3 usable rubrics, 4 answers: 24 of the 32 checks that Table 14 prints."""
    world = World()
    _, record = rlcer(world).step(RlcerState())
    assert [c.answer.text for c in world.checks[:G]] == list(ANSWERS)
    assert {c.items for c in world.checks[:G]} == {("Says red", "Says blue")}
    m = {k.removeprefix("cost/calls/"): v for k, v in record.metrics.items()}
    kinds = ("policy_gen", "rubric_gen", "judge_eval", "learner_samples")
    assert [m[k] for k in kinds] == [8, 8, 24, 8]
    assert [m[f"{k}_printed"] for k in kinds] == [8, 8, 32, 8]
    assert record.metrics["health/cost_mismatch"] == 0.0


def test_a_judge_that_only_scores_costs_a_call_per_item():
    """2 prompts x (2 + 2 + 1 items) x 4 answers = 40."""
    world = World()
    world.per_item = True
    _, record = rlcer(world, "method.verifier=items").step(RlcerState())
    assert record.metrics["cost/calls/judge_eval"] == 40.0
    assert record.metrics["health/cost_mismatch"] == 0.0


def test_a_rubric_step_compares_the_rubrics_of_a_prompt_behind_their_own_prefixes():
    """Rewards 3/2, 3/2, 1, 0: mean 1; deviations 1/2, 1/2, 0, -1; sigma sqrt(3/8)."""
    world = World()
    method = rlcer(world)
    state, _ = method.step(method.start())
    state, record = method.step(state)
    groups = world.batches[1].groups
    assert [world.model.decode(g.prefix).splitlines()[-1] for g in groups] == list(ANSWERS) * 2
    found = [float(g.samples[0].advantages[0]) for g in groups[:G]]
    assert found == pytest.approx([d / math.sqrt(3 / 8) for d in (0.5, 0.5, 0.0, -1.0)], abs=1e-6)
    assert [world.model.decode(g.samples[0].tokens) for g in groups[:G]] == [RUBRICS[a] for a in ANSWERS]
    m = {k.removeprefix("cost/calls/"): v for k, v in record.metrics.items()}
    kinds = ("policy_gen", "rubric_gen", "judge_eval", "learner_samples")
    assert [m[k] for k in kinds] == [m[f"{k}_printed"] for k in kinds] == [0, 0, 0, 8]
    assert record.metrics["health/cost_mismatch"] == 0.0
    assert record.metrics["race/rubric_reward/mean"] == 1.0
    assert record.metrics["race/rubric_reward/unusable_frac"] == 0.25
    assert [r["score"] for r in record.tables["samples"]] == [1.5, 1.5, 1.0, 0.0] * 2
    assert (state.pending, state.step, record.step) == ((), 2, 2)


@pytest.mark.parametrize(
    ("rule", "answers", "rewards", "outcome"),
    [
        (None, ANSWERS, [1.0, 5 / 5, 1.0, 0.0], 0.0),
        ({"kind": "any_word", "words": ["blue", "red"]}, ANSWERS, [2.0, 2.0, 2.0, 1.0], 1.0),
        ({"kind": "any_word", "words": ["green"]}, ANSWERS, [0.0, 0.0, 0.0, -1.0], -1.0),
    ],
)
def test_without_a_contrast_in_correctness_the_items_that_vary_count(rule, answers, rewards, outcome):
    """Rubric 0: both items vary, answer 0 has (4 + 2) / 6; rubric 1: "Says red" alone, 5/5; rubric 2: 3/3."""
    _, record = rlcer(World(rule, answers)).step(RlcerState())
    assert record.tables["groups"][0]["rewards"] == pytest.approx(rewards)
    assert record.metrics["rlcer/outcome_mean"] == outcome
    assert record.metrics["rlcer/no_rule_frac"] == float(rule is None)


def test_weights_of_outcome_and_share():
    world = World()
    _, record = rlcer(world, "method.outcome_weight=2.0", "method.cot_weight=0.5").step(RlcerState())
    assert record.tables["groups"][0]["rewards"] == [2.5, 2.5, -2.0, -2.0]


def test_correctness_looks_at_the_answer_without_its_thinking():
    world = World(answers=("<think>red</think>blue 2", "red 1", "blue 2", "blue 3"))
    _, record = rlcer(world).step(RlcerState())
    assert record.tables["groups"][0]["rewards"][0] < 0


def test_an_answer_that_leaves_the_window_no_room_gets_no_rubric_and_its_rubric_no_reward():
    world = World(answers=("red 0", "red 1 " + "x" * 30_000, "blue 2", "blue 3"))
    method = rlcer(world)
    state, record = method.step(method.start())
    assert record.tables["groups"][0]["rewards"][1] == 1.0  # its outcome alone
    assert record.metrics["cost/calls/rubric_gen"] == 6.0
    assert record.metrics["cost/calls/rubric_gen_printed"] == 8.0
    assert record.metrics["health/cost_mismatch"] == 0.0
    assert math.isnan(state.pending[0].rewards[1])
    state = method.load(json.loads(json.dumps(state.state())))
    _, record = method.step(state)
    assert record.metrics["cost/calls/learner_samples"] == 6.0
    assert record.metrics["health/cost_mismatch"] == 0.0
    assert record.tables["samples"][1]["score"] is None


def test_groups_that_active_sampling_drops_train_neither_role():
    """Nobody has a usable rubric and all are wrong: every round is even, nothing trains, nothing is pending."""
    world = World(answers=("blue 3",) * 4)
    method = rlcer(world, "method.active_sampling_rounds=2")
    state, record = method.step(method.start())
    assert (world.taken, state.pending) == (4, ())
    assert record.metrics["cost/calls/rubric_gen"] == 16.0
    assert record.metrics["health/cost_mismatch"] == 0.0
    state, record = method.step(state)
    assert [b.groups for b in world.batches] == [(), ()]
    assert record.metrics["train/optim/stepped"] == 0.0
    assert record.metrics["health/cost_mismatch"] == 0.0
    assert state.step == 2


def test_steps_alternate_and_the_last_policy_step_gets_its_rubric_step():
    method = rlcer(World(), updates=3)
    state, kinds = method.start(), []
    while not method.done(state):
        state, record = method.step(state)
        kinds.append(record.metrics["train/clock/phase_kind"])
    assert kinds == [0, 1, 0, 1, 0, 1]
    assert (state.policy_steps, state.rubric_steps) == (3, 3)
    (row,) = method.finish(state, "budget")
    assert (row["kind"], row["start"], row["end"], row["end_reason"]) == ("joint", 1, 6, "budget")
    assert method.finish(method.start(), "interrupted") == []


def test_the_step_limit_may_fall_between_the_two():
    method = rlcer(World(), max_steps=3)
    state = method.start()
    while not method.done(state):
        state, _ = method.step(state)
    assert (state.policy_steps, state.rubric_steps) == (2, 1)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(stop):
    world = World()
    method = rlcer(world)
    state = method.start()
    for _ in range(stop):
        state, _ = method.step(state)
    again = World()
    again.taken = world.taken
    resumed = rlcer(again)
    loaded = resumed.load(json.loads(json.dumps(state.state())))
    assert loaded == state
    for _ in range(3):
        state, record = method.step(state)
        loaded, record_again = resumed.step(loaded)
        assert loaded == state
        assert record_again.tables == record.tables
        mine, other = world.batches[-1], again.batches[-1]
        assert [g.prefix for g in mine.groups] == [g.prefix for g in other.groups]
        for a, b in zip(mine.groups, other.groups, strict=True):
            assert [s.tokens for s in a.samples] == [s.tokens for s in b.samples]
            np.testing.assert_array_equal(a.samples[0].advantages, b.samples[0].advantages)


def test_the_method_is_registered_and_needs_a_verifier():
    assert METHODS["rlcer"] is Rlcer
    any_world: Any = World()
    config = compose(["method=rlcer"]).config.method
    with pytest.raises(ValueError, match="verifier"):
        Rlcer(config, Parts(*[any_world] * 6, Streams(0)), policy_updates=1, max_steps=None)


# --- real parts ---

_ONLY_RACE = ("method.pool", "method.phase", "method.routing")
_NOT_RLCER = ("method.entries_per_rubric_step", "method.rubric.on_parse_failure", "judge.calibration")
_WORDS = {"evolm": ((), ["method.fixed=[2,2]"]), "rlcer": (_NOT_RLCER, ["judge=digit"])}
"""The digit judge has no scales to measure on rubrics that parse."""


def noise_rubric(writer: AnswerRubricWriter, text: str, prompt: Prompt) -> Rubric | None:
    """Two items of whatever a tiny model writes; nothing from a text of an odd length."""
    halves = (text[: len(text) // 2], text[len(text) // 2 :])
    criteria = (Criterion(f"Says {halves[0]}", 3.0), Criterion(f"Says {halves[1]}", -2.0))
    return Rubric(criteria, text) if len(text) % 2 == 0 else None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evolm", "rlcer"])
def test_a_resumed_run_of_real_parts_is_the_same_bit_by_bit(name, tmp_path, monkeypatch):
    """Six steps; after three, state, weights, streams and data position go through JSON into new parts."""
    from racelab.experiments.build import build_parts, calibrated, find_inputs
    from racelab.experiments.methods.registry import make_method
    from racelab.experiments.needs import equip

    from .tiny_run import overrides, write_tiny_model

    monkeypatch.setattr(AnswerRubricWriter, "parse", noise_rubric)
    left_out, more = _WORDS[name]
    words = overrides(write_tiny_model(tmp_path / "model"), tmp_path / "runs")
    words = [w for w in words if not w.startswith((*_ONLY_RACE, *left_out))]
    config = compose([*words, f"method={name}", *more]).config
    inputs = find_inputs(config, tmp_path / "runs")

    def opened() -> tuple[Parts, Any]:
        parts, prompts, _ = build_parts(config, inputs)
        parts = replace(parts, judge=calibrated(parts, config, prompts, None))
        parts, _ = equip(parts, config, inputs.needs, tmp_path)
        return parts, make_method(config, parts)

    def walk(parts: Parts, method: Any, state: Any, steps: int) -> tuple[Any, list[Any]]:
        records = []
        for _ in range(steps):
            parts.forget()
            state, record = method.step(state)
            records.append(record)
        return state, records

    parts, method = opened()
    state, early = walk(parts, method, method.start(), 3)
    stored = json.loads(json.dumps([state.state(), parts.rng.state(), parts.stream.state()]))
    tensors = {k: t.clone() for k, t in parts.backend.state_tensors().items()}
    meta = json.loads(json.dumps(parts.backend.state_meta()))
    state, late = walk(parts, method, state, 3)

    again, resumed = opened()
    again.backend.load_state(tensors, meta)
    again.rng.load_state(stored[1])
    again.stream.load_state(stored[2])
    state_again, late_again = walk(again, resumed, resumed.load(stored[0]), 3)
    assert json.dumps(state_again.state()) == json.dumps(state.state())
    assert [json.dumps(r.tables) for r in late_again] == [json.dumps(r.tables) for r in late]
    for key, tensor in parts.backend.state_tensors().items():
        assert tensor.equal(again.backend.state_tensors()[key]), key
    assert [r.metrics["health/cost_mismatch"] for r in early + late] == [0.0] * 6
    assert any(r.metrics["train/optim/stepped"] for r in early)
    assert {r.metrics["train/clock/phase_kind"] for r in late} == {0.0, 1.0}
    if name == "rlcer":
        assert all(r.metrics["cost/calls/judge_eval"] > 0 for r in early[::2])


def test_half_a_point_is_no_penalty() -> None:
    """Points 1/2 and -1, the first holds, the second does not: (1/2 - (-1)) / (1/2 + 1) = 1."""
    assert cot_share(np.array([True, False]), [0.5, -1.0], np.array([True, True])) == 1.0
