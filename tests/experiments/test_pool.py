"""Eqs 10-11 and the first-in-first-out pool."""

import json
import math

import numpy as np
import pytest

from racelab.experiments.methods.race import pool as pools
from racelab.experiments.methods.race.pool import Pool
from racelab.experiments.types import Criterion, PoolEntry, Prompt, RolloutGroup, Rubric, Sample

NAN = math.nan


def sample(text):
    return Sample(tokens=(1, 2), logprobs=(-0.1, -1 / 3), text=text, finished=text != "cut")


def entry(i, margin=0.5, check=None):
    prompt = Prompt(f"p{i}", f"ask {i}", "package", "math", check)
    return PoolEntry(f"{i}:p{i}", prompt, sample("good"), sample("cut"), margin, i, f"rubric {i}")


def entries(*numbers):
    return [entry(i) for i in numbers]


def ids(pool):
    return [e.pushed_step for e in pool.entries]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.2, 0.9, 0.1, 0.5], (1, 2)),
        ([0.9, 0.9, 0.1, 0.1], (0, 2)),
        ([0.7, 0.7, 0.7], (0, 1)),
        ([0.5, 0.9], (1, 0)),
        ([NAN, 0.9, NAN, 0.4, 0.95], (4, 3)),
        ([NAN, 0.3, 0.3], (1, 2)),
        ([np.inf, 0.3, -np.inf, 0.4], (3, 1)),
    ],
)
def test_best_and_worst(rewards, expected):
    assert pools.best_and_worst(np.array(rewards)) == expected


@pytest.mark.parametrize("rewards", [[], [0.5], [NAN, 0.5], [NAN, NAN]])
def test_a_pair_needs_two_valid_scores(rewards):
    with pytest.raises(ValueError, match="a pair needs 2 valid scores"):
        pools.best_and_worst(np.array(rewards))
    with pytest.raises(ValueError, match="a pair needs 2 valid scores"):
        pools.margin(np.array(rewards))


def test_pair_golden():
    """Eq 10. (1/4, 3/4, -, 3/4, 1/4): the first argmax is 1, the first argmin over the others 0; equal scores: 0, 1."""
    assert pools.best_and_worst(np.array([0.25, 0.75, NAN, 0.75, 0.25])) == (1, 0)
    assert pools.best_and_worst(np.array([0.5, 0.5, 0.5])) == (0, 1)


def test_margin_golden():
    """Eq 11. 3/4 - 1/4 = 1/2."""
    assert pools.margin(np.array([0.5, 0.25, NAN, 0.75])) == 0.5
    assert pools.margin(np.array([0.7] * 6)) == 0.0


def test_tie_break_only():
    assert pools.tie_break_only(0.0)
    assert pools.tie_break_only(1e-15)
    assert not pools.tie_break_only(0.01)
    assert pools.tie_break_only(0.01, eps=0.01)
    assert not pools.tie_break_only(0.011, eps=0.01)


def rollout(rewards, rubric):
    responses = tuple(sample(f"y{i}") for i in range(len(rewards)))
    return RolloutGroup(
        Prompt("p9", "ask"), rubric, sample("raw rubric"), responses, np.array(rewards), np.eye(len(rewards))
    )


def test_make_entry():
    rubric = Rubric((Criterion("is right", 1.0),), "parsed rubric")
    got = pools.make_entry(rollout([0.25, NAN, 0.75, 0.5], rubric), policy_step=3, pushed_step=7)
    assert got.entry_id == "3:p9"
    assert (got.preferred.text, got.rejected.text) == ("y2", "y0")
    assert got.margin == 0.5
    assert got.pushed_step == 7
    assert got.rubric_text == "parsed rubric"
    assert got.prompt.prompt_id == "p9"


def test_make_entry_without_a_parsed_rubric_keeps_the_raw_text():
    got = pools.make_entry(rollout([0.25, 0.75], None), policy_step=1, pushed_step=1)
    assert got.rubric_text == "raw rubric"


def test_at_least_keeps_the_margin_itself():
    """0.57 - 0.56 is 0.00999999999999990 in binary, and still a margin of 0.01."""
    rows = [entry(0, 0.0), entry(1, 0.57 - 0.56), entry(2, 0.009), entry(3, 0.5)]
    assert [e.pushed_step for e in pools.at_least(rows, 0.01)] == [1, 3]
    assert len(pools.at_least(rows, 0.0)) == 4


def test_push_is_first_in_first_out_and_leaves_the_old_pool_alone():
    empty = Pool(capacity=3)
    first = empty.push(entries(0, 1))
    second = first.push(entries(2, 3))
    assert (ids(empty), ids(first), ids(second)) == ([], [0, 1], [1, 2, 3])
    assert (first.pushed, first.evicted) == (2, 0)
    assert (second.pushed, second.evicted) == (2, 1)
    assert second.capacity == 3
    assert len(second) == 3
    third = second.push([])
    assert (ids(third), third.pushed, third.evicted) == ([1, 2, 3], 0, 0)


def test_a_push_larger_than_the_pool_keeps_its_newest():
    got = Pool(capacity=2, entries=tuple(entries(0))).push(entries(1, 2, 3))
    assert (ids(got), got.pushed, got.evicted) == ([2, 3], 3, 2)


def test_capacity_is_checked():
    fresh = Pool()
    assert (fresh.capacity, fresh.pushed, fresh.evicted) == (2048, 0, 0)
    assert Pool(capacity=1).push(entries(1)).entries
    with pytest.raises(ValueError, match="at least 1"):
        Pool(capacity=0)
    with pytest.raises(ValueError, match="2 entries do not fit a pool of 1"):
        Pool(capacity=1, entries=tuple(entries(0, 1)))


def test_sample_draws_different_entries_and_leaves_them_in():
    pool = Pool(capacity=10, entries=tuple(entries(*range(10))))
    rng = np.random.default_rng(0)
    for n in (1, 4, 10):
        got = [e.pushed_step for e in pool.sample(n, rng)]
        assert len(got) == len(set(got)) == n
    assert len(pool) == 10
    assert len(pool.sample(64, rng)) == 10
    assert Pool().sample(4, rng) == []


def test_sample_is_uniform_and_seeded():
    pool = Pool(capacity=4, entries=tuple(entries(*range(4))))
    rng = np.random.default_rng(1)
    counts = np.zeros(4)
    for _ in range(2000):
        for e in pool.sample(2, rng):
            counts[e.pushed_step] += 1
    assert np.abs(counts / 2000 - 0.5).max() < 0.05  # 4.5 standard errors
    again = [pool.sample(3, np.random.default_rng(5)) for _ in range(2)]
    assert again[0] == again[1]


def test_ages_and_ties_golden():
    """Steps 1 and 4 seen at 10: (9 + 6)/2 = 7.5. One of two margins is 0: 1/2."""
    pool = Pool(entries=(entry(1, 0.0), entry(4, 0.25)))
    assert pool.mean_age(10) == 7.5
    assert pool.tie_break_only_frac() == 0.5
    assert math.isnan(Pool().mean_age(10))
    assert math.isnan(Pool().tie_break_only_frac())


def test_state_survives_json_exactly():
    check = {"kind": "contains", "words": ["a", "b"], "n": 2}
    pool = Pool(capacity=3).push([entry(0, 0.1 + 0.2), entry(1, check=check), *entries(2, 3)])
    back = Pool.from_state(json.loads(json.dumps(pool.state())))
    assert back == pool
    assert (back.pushed, back.evicted, back.capacity) == (4, 1, 3)
    assert back.entries[0].prompt.check == check
    assert back.entries[1].rejected == sample("cut")
    assert isinstance(back.entries[0].preferred.tokens, tuple)
