"""Items judged one by one, and the weighted share of those that hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.models.items import ItemQuestion, judge_items, weighted_share
from racelab.experiments.types import Prompt

from .scripted_chat import World, sample

NAN = math.nan
PROMPT = Prompt("p0", "Explain rain")


def question(*items: str, answers: int = 3) -> ItemQuestion:
    return ItemQuestion(PROMPT, items, tuple(sample(f"answer {i}") for i in range(answers)))


def test_each_item_is_a_rubric_of_its_own_and_holds_from_the_threshold_on():
    """Answer i scores 0.25 i + 0.25 on `clouds`: 0.25, 0.5, 0.75; with threshold 0.5 the last two hold. `sun` never."""
    world = World(lambda texts, i: 0.25 * i + 0.25 if texts == ("clouds",) else 0.49)
    answers = judge_items(world, [question("clouds", "sun"), question(), question("sun", answers=2)], 0.5)
    assert answers.holds[0].tolist() == [[0, 0], [1, 0], [1, 0]]
    assert answers.holds[1].shape == (3, 0)
    assert answers.holds[2].tolist() == [[0], [0]]
    assert answers.scored.calls == 3 + 3 + 2
    found = [[(c.text, c.weight) for c in i.rubric.criteria] for i in world.judged if i.rubric]
    assert found == [[("clouds", 1.0)], [("sun", 1.0)], [("sun", 1.0)]]


def test_a_missing_score_is_neither_yes_nor_no():
    world = World(lambda texts, i: NAN if i == 1 else 1.0)
    answers = judge_items(world, [question("clouds")], 0.5)
    assert answers.holds[0].ravel().tolist()[::2] == [1.0, 1.0]
    assert math.isnan(answers.holds[0][1, 0])
    assert answers.scored.infra_failures == 1


def test_no_question_costs_no_call():
    world = World(lambda texts, i: 1.0)
    assert judge_items(world, [], 0.5).scored.calls == 0
    assert world.judged == []


def test_weighted_share():
    """Weights 1, 0.7, 0.3 sum to 2: rows give 1/2, (0.7 + 0.3)/2 = 1/2, 2/2, 0; a missing item counts as no: 0.3/2."""
    holds = np.array([[1, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0], [NAN, 0, 1], [NAN, NAN, NAN]])
    found = weighted_share(holds, [1.0, 0.7, 0.3])
    assert found[:5].tolist() == [0.5, 0.5, 1.0, 0.0, 0.15]
    assert math.isnan(found[5])


def test_negative_weights_take_off_and_the_share_stays_in_bounds():
    """Weights 3, -1, |.| sum to 4: both hold (3 - 1)/4 = 1/2; the second alone -1/4, clipped to 0."""
    assert weighted_share(np.array([[1, 1], [0, 1], [1, 0]]), [3.0, -1.0]).tolist() == [0.5, 0.0, 0.75]


def test_no_items_is_no_reward():
    assert np.isnan(weighted_share(np.zeros((3, 0)), [])).all()


def test_weights_must_fit():
    with pytest.raises(ValueError, match="2 items have 1 weights"):
        weighted_share(np.ones((1, 2)), [1.0])
    with pytest.raises(ValueError, match="all weights are 0"):
        weighted_share(np.ones((1, 2)), [0.0, 0.0])


@given(st.data())
def test_shares_do_not_depend_on_the_order_or_the_scale_of_items(data):
    n = data.draw(st.integers(1, 6))
    weights = data.draw(st.lists(st.floats(0.1, 5.0), min_size=n, max_size=n))
    cell = st.sampled_from([0.0, 1.0, NAN])
    holds = np.array(data.draw(st.lists(st.lists(cell, min_size=n, max_size=n), min_size=1, max_size=5)))
    order = data.draw(st.permutations(range(n)))
    found = weighted_share(holds, weights)
    shuffled = weighted_share(holds[:, list(order)], [weights[k] for k in order])
    np.testing.assert_array_equal(found, shuffled)  # to the last bit: equal answers must tie
    np.testing.assert_allclose(found, weighted_share(holds, [3.0 * w for w in weights]), atol=1e-11)
    valid = found[~np.isnan(found)]
    assert ((valid >= 0) & (valid <= 1)).all()
    assert np.isnan(found).tolist() == np.isnan(holds).all(axis=1).tolist()
