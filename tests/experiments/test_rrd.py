"""RRD: the course of one prompt by hand, many prompts side by side, and the weights of its items."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from racelab.experiments.methods.baselines import rrd_weights
from racelab.experiments.methods.baselines.rrd import rrd
from racelab.experiments.models.chat import ChatRequest
from racelab.experiments.models.prompts import rrd as templates
from racelab.experiments.models.proposals import read_items, read_numbers, read_yes

from .scripted_chat import G, ScriptedChat, World, calls, lasting, method_config, parts

# --- weights ----------------------------------------------------------------------------------------------------


def test_whitened_weights_of_uncorrelated_items():
    """X'X/4 = diag(3/4, 1/4); shrunk and ridged diag(.7751, .3251).

    1/sqrt(.7751) = 1.1358504, 1/sqrt(.3251) = 1.7538462, sum 2.8896966: weights .3930691 and .6069309.
    """
    x = np.array([[1, 0], [1, 0], [1, 0], [0, 1]], dtype=float)
    assert rrd_weights.whitened(x) == pytest.approx([0.3930691, 0.6069309], abs=2e-7)


def test_whitened_items_that_hold_together_share_a_weight():
    """X'X/2 has 1/2 everywhere in the block of items 1 and 2, and 1/2 for item 3.

    Shrunk and ridged: block [[.5501, .45], [.45, .5501]], whose eigenvalue for (1, 1) is 1.0001; item 3 .5501.
    S^(-1/2) 1 = (.99995, .99995, 1/sqrt(.5501) = 1.3482772), sum 3.3481772: weights .2986550 twice, .4026899.
    """
    x = np.array([[1, 1, 0], [0, 0, 1]], dtype=float)
    assert rrd_weights.whitened(x) == pytest.approx([0.2986550, 0.2986550, 0.4026899], abs=2e-7)


def test_a_weight_below_zero_becomes_zero():
    """Item 1 holds with each of the items 2 to 5, which never hold together: given them it has nothing to add."""
    x = np.array([[1.0, *row] for row in np.eye(4)])
    found = rrd_weights.whitened(x)
    # S = .9 [[1, q], [q', I/4]] + .1001 I with q = 1/4 four times. With u = (1, 1, 1, 1)/2 the pair (item 1, u) has the
    # matrix [[1.0001, .45], [.45, .3251]], trace 1.3252, det .12263251, s = sqrt(det) = .35018925,
    # t = sqrt(trace + 2 s) = 1.42309487. M^(-1/2) = [[.3251 + s, -.45], [-.45, 1.0001 + s]] / (s t), applied to (1, 2):
    # item 1: .67528925 - .9 = -.22471075 < 0.
    assert found[0] == 0.0
    assert found[1:] == pytest.approx([0.25] * 4)


@pytest.mark.parametrize(
    "x", [np.array([[1.0, 0.0, 1.0]]), np.zeros((1, 3)), np.zeros((4, 3)), np.ones((4, 3))]
)
def test_whitened_weights_are_alike_where_nothing_tells_items_apart(x):
    """One answer: the identity. No item holds: 0.1001 I. All hold: the vector of ones is an eigenvector."""
    assert rrd_weights.whitened(x) == pytest.approx([1 / 3] * 3, abs=1e-12)


def test_no_items_have_no_weights():
    assert rrd_weights.whitened(np.zeros((4, 0))).shape == rrd_weights.uniform(0).shape == (0,)


def test_missing_scores_count_as_no():
    x = np.array([[1, 0], [1, np.nan], [1, 0], [np.nan, 1]])
    assert rrd_weights.whitened(x).tolist() == rrd_weights.whitened(np.nan_to_num(x)).tolist()


def test_normalised():
    """(2, -1, 6): negatives are 0, the rest over 8."""
    assert rrd_weights.normalised(np.array([2.0, -1.0, 6.0])).tolist() == [0.25, 0.0, 0.75]
    assert rrd_weights.normalised(np.array([0.125, 0.375])).tolist() == [0.25, 0.75]
    assert rrd_weights.normalised(np.array([1e308, 1e308])).tolist() == [0.5, 0.5]
    for nothing in ([0.0, 0.0], [-1.0, -2.0], [np.nan, 1.0], [np.inf, 1.0]):
        assert rrd_weights.normalised(np.array(nothing)).tolist() == [0.5, 0.5]


@settings(deadline=None)
@given(st.data())
def test_whitened_weights_are_a_distribution_and_follow_the_items(data):
    g, n = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 7))
    x = data.draw(arrays(np.float64, (g, n), elements=st.sampled_from([0.0, 1.0])))
    found = rrd_weights.whitened(x)
    assert (found >= 0).all()
    assert found.sum() == pytest.approx(1)
    columns, rows = data.draw(st.permutations(range(n))), data.draw(st.permutations(range(g)))
    assert rrd_weights.whitened(x[:, list(columns)]) == pytest.approx(found[list(columns)], abs=1e-9)
    assert rrd_weights.whitened(x[list(rows)]) == pytest.approx(found, abs=1e-9)


@settings(deadline=None)
@given(
    arrays(np.float64, st.tuples(st.integers(2, 8), st.integers(1, 6)), elements=st.sampled_from([0.0, 1.0]))
)
def test_whitened_weights_by_another_road(x):
    """Newton's iteration for the inverse root (Denman and Beavers) knows nothing of eigenvalues."""
    g, n = x.shape
    root = 0.9 * x.T @ x / g + (0.1 + 1e-4) * np.eye(n)
    inverse = np.eye(n)
    for _ in range(40):
        root, inverse = (root + np.linalg.inv(inverse)) / 2, (inverse + np.linalg.inv(root)) / 2
    raw = np.maximum(inverse @ np.ones(n), 0.0)
    assert rrd_weights.whitened(x) == pytest.approx(raw / raw.sum(), abs=1e-6)


# --- replies ----------------------------------------------------------------------------------------------------


def test_items_are_strings_or_objects_without_placeholders_and_repeats():
    rows = ["Names rain.", {"criterion": "Says  why"}, "names rain", "<statement>", "...", 7, {"weight": 1}]
    assert read_items(json.dumps({"criteria": rows}), 1, 9) == ("Names rain.", "Says why")
    assert read_items(json.dumps(rows), 1, 1) == ("Names rain.",)
    assert read_items(json.dumps(rows), 3, 9) is None
    assert read_items('<think>["Names rain"]</think> none', 1, 9) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("YES", True),
        ("**No.** Yes would be wrong", False),
        ("<think>yes yes</think>no", False),
        ("Nothing yesterday", None),
        ("", None),
    ],
)
def test_yes_and_no(text, expected):
    assert read_yes(text) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("There is no doubt: 1 makes 2 needless. YES", True),
        ("Is 1 in 2? Yes, partly.\n**No**", False),
        ("", None),
    ],
)
def test_the_last_yes_or_no_is_the_answer_where_reasons_come_first(text, expected):
    assert read_yes(text, last=True) is expected


def test_numbers():
    assert read_numbers('{"weights": [1, 0.5, -2]}', 3) == (1.0, 0.5, -2.0)
    for bad in ('{"weights": [1, 0.5]}', '{"weights": [1, "2", 3]}', '{"weights": [1, NaN, 3]}', "1, 2, 3"):
        assert read_numbers(bad, 3) is None


# --- the course of a prompt -------------------------------------------------------------------------------------

KINDS = {
    "propose": templates.PROPOSE,
    "split": templates.SPLIT,
    "overlap": templates.OVERLAP,
    "conflict": templates.CONFLICT,
    "weigh": templates.WEIGHTS,
}


def kind(request: ChatRequest) -> str:
    return next(k for k, t in KINDS.items() if request.user.startswith(t.user.split("{")[0][:60]))


def listed(*items: str) -> str:
    return json.dumps({"criteria": [{"criterion": i} for i in items]})


def new_item(request: ChatRequest) -> str:
    return request.user.rpartition("The new item:\n")[2]


def coarse_item(request: ChatRequest) -> str:
    return request.user.partition("The coarse item:\n")[2].partition("\n")[0]


ALPHA, BETA, GAMMA, COPY = "Mentions alpha", "Mentions beta", "Mentions gamma", "Speaks of alpha too"
HOLDS = {  # per answer
    ALPHA: (1, 1, 1, 0),
    BETA: (1, 0, 0, 0),
    GAMMA: (0, 1, 1, 0),
    "Dates alpha": (0, 1, 1, 0),
}


def script(request: ChatRequest) -> str | None:
    """ALPHA splits into two parts of which the second conflicts, later into a repetition and an overlap."""
    what = kind(request)
    if what == "propose":
        return listed(ALPHA, BETA, GAMMA, COPY)
    if what == "overlap":
        return "YES" if new_item(request) in (COPY, "Covers alpha") else "NO"
    if what == "conflict":
        return "YES" if new_item(request) == "Leaves out alpha" else "NO"
    if what == "split" and coarse_item(request) == ALPHA:
        again = "Dates alpha" in request.user
        return listed("dates alpha.", "Covers alpha") if again else listed("Dates alpha", "Leaves out alpha")
    return None if request.draw == 1 else "no idea"


def judged(texts: tuple[str, ...], i: int) -> float:
    return float(HOLDS[texts[0]][i])


def method(world: World, chat: Any, *overrides: str) -> Any:
    config = method_config("rrd", "method.prompts_per_step=1", "method.weights=uniform", *overrides)
    return rrd(config, parts(world, chat), policy_updates=9, max_steps=None)


def test_the_course_of_one_prompt():
    """Proposed 4; pruning asks 2 x 3 and drops the copy.

    Round 1: alpha (3 answers) and gamma (2) are split, gamma in vain three times: 1 rejection. Of alpha's parts one is
    added, one conflicts: 2 x 2 checks, 1 rejection. Splits: 2 + 1 + 1.
    Round 2: alpha, gamma and the new item (2 answers) are split: 3 + 2 + 2. Alpha's parts repeat (no question) and
    overlap (2 checks): 2 rejections, and 1 each for the two that give nothing: 4. Nothing added: stop.
    Requests: 1 + 4 + 7 splits + 6 + 4 + 2 checks = 24. Items judged: 4, G answers each.
    Uniform weights: answers hold 2, 3, 3, 0 of 4.
    """
    world, chat = World(judged), ScriptedChat(script)
    m = method(world, chat)
    _, record = m.step(m.start())
    rounds = [
        {"step": 1, "prompt_id": "p0", "round": n, "items": i, "added": a, "rejected": r}
        for n, i, a, r in [(0, 3, 3, 1), (1, 4, 1, 2), (2, 4, 0, 4)]
    ]
    assert record.tables["rrd_rounds"] == rounds
    assert record.tables["groups"][0]["rewards"] == [0.5, 0.75, 0.75, 0.0]
    assert calls(record, "rubric_gen") == (24, 24, 1)
    assert calls(record, "external_calls") == (24, 24, 1)
    assert calls(record, "judge_eval") == (4 * G, 4 * G, 4 * G)
    assert record.metrics["health/cost_mismatch"] == 0
    assert [r.criteria[0].text for i in world.judged if (r := i.rubric)] == [
        ALPHA,
        BETA,
        GAMMA,
        "Dates alpha",
    ]
    numbers = {k.rpartition("/")[2]: v for k, v in record.metrics.items() if k.startswith("train/rrd/")}
    assert numbers == {
        "items": 4,
        "rounds": 2,
        "rejected": 6,
        "proposal_calls": 1,
        "split_calls": 11,
        "check_calls": 12,
        "weight_calls": 0,
    }


def test_what_the_proposer_is_shown():
    chat = ScriptedChat(script)
    m = method(World(judged), chat)
    m.step(m.start())
    asked = {k: [r for r in chat.requests if kind(r) == k] for k in KINDS}
    (proposal,) = asked["propose"]
    assert proposal.user.endswith("Request:\nExplain matter 0")
    assert "Answer 1:\nanswer 0 of p0\n\nAnswer 2:" in proposal.user  # thinking is not shown
    split = asked["split"][0]
    assert "Answer 3:\nanswer 2 of p0" in split.user
    assert "answer 3 of p0" not in split.user  # it does not satisfy the item
    assert f"The other items:\n- {BETA}\n- {GAMMA}\n" in split.user
    assert [new_item(r) for r in asked["overlap"]] == [
        BETA,
        GAMMA,
        COPY,
        "Dates alpha",
        "Leaves out alpha",
        "Covers alpha",
    ]
    assert f"The list:\n- {ALPHA}\n- {BETA}\n- {GAMMA}\n\n" in asked["overlap"][2].user
    assert f"- {GAMMA}\n- Dates alpha\n\n" in asked["overlap"][4].user  # what was added counts at once
    assert asked["weigh"] == []


@pytest.mark.parametrize(
    ("overrides", "rounds"),
    [
        (["method.max_rounds=1"], 1),
        (["method.termination_threshold=2"], 1),
        (["method.termination_threshold=3"], 2),
        (["method.decomposition_trigger=4"], 1),
    ],
)
def test_when_the_growth_stops(overrides, rounds):
    """Round 1 rejects 2. A trigger of 4 splits nothing, so nothing is added."""
    world = World(judged)
    m = method(world, ScriptedChat(script), *overrides)
    _, record = m.step(m.start())
    assert record.tables["rrd_rounds"][-1]["round"] == rounds
    items = record.tables["rrd_rounds"][-1]["items"]
    assert items == (3 if "trigger" in overrides[0] else 4)
    assert calls(record, "judge_eval") == (items * G,) * 3  # what the last round adds is scored as well
    assert record.metrics["health/cost_mismatch"] == 0


def test_weights_of_the_proposer():
    """Weights 3, -1, 0, 1 become 3/4, 0, 0, 1/4: answers hold alpha, alpha and the date, the same, nothing."""

    def weighing(request: ChatRequest) -> str | None:
        return '{"weights": [3, -1, 0, 1]}' if kind(request) == "weigh" else script(request)

    chat = ScriptedChat(weighing)
    m = method(World(judged), chat, "method.weights=llm")
    _, record = m.step(m.start())
    assert record.tables["groups"][0]["rewards"] == [0.75, 1.0, 1.0, 0.0]
    assert calls(record, "rubric_gen") == (25, 25, 1)
    assert f"Items:\n- {ALPHA}\n" in chat.requests[-1].user
    assert "Give 4 numbers" in chat.requests[-1].user


def test_weights_that_the_proposer_does_not_give_are_alike():
    m = method(World(judged), ScriptedChat(script), "method.weights=llm")
    _, record = m.step(m.start())
    assert record.tables["groups"][0]["rewards"] == [0.5, 0.75, 0.75, 0.0]


def test_whitened_weights_score_the_answers():
    """Weights .0010753, .4644238, .2672505 twice, by Newton's iteration for the root instead of eigenvalues.

    Alpha holds with all others and says next to nothing of its own. Answer 0 has alpha and beta, the next two have
    alpha, gamma and the date.
    """
    m = method(World(judged), ScriptedChat(script), "method.weights=wu")
    _, record = m.step(m.start())
    found = record.tables["groups"][0]["rewards"]
    assert found == pytest.approx([0.4654990, 0.5355762, 0.5355762, 0.0], abs=2e-7)
    assert found[1] == found[2]  # a tie to the last bit


# --- many prompts -----------------------------------------------------------------------------------------------


def for_prompt(
    number: int, other: Callable[[ChatRequest], str | None]
) -> Callable[[ChatRequest], str | None]:
    """`other` where the request speaks of that prompt, `script` elsewhere."""
    return lambda r: other(r) if f"matter {number}" in r.user else script(r)


def test_prompts_go_side_by_side_and_get_what_they_would_get_alone():
    def plain(request: ChatRequest) -> str | None:
        return listed(BETA) if kind(request) == "propose" else None

    alone, together = ScriptedChat(script), ScriptedChat(for_prompt(1, plain))
    one = method(World(judged), alone)
    _, single = one.step(one.start())
    three = method(World(judged), together, "method.prompts_per_step=3")
    _, record = three.step(three.start())
    assert [g["rewards"] for g in record.tables["groups"]] == [
        [0.5, 0.75, 0.75, 0.0],
        [1.0, 0.0, 0.0, 0.0],
        [0.5, 0.75, 0.75, 0.0],
    ]
    assert len(together.batches) == len(alone.batches)
    assert max(map(len, together.batches)) == 2 * max(map(len, alone.batches))
    assert calls(record, "rubric_gen") == (49, 49, 3)
    assert calls(record, "judge_eval") == (9 * G, 9 * G, 9 * G)
    assert record.metrics["health/cost_mismatch"] == 0
    rows = [r for r in record.tables["rrd_rounds"] if r["prompt_id"] == "p0"]
    assert rows == single.tables["rrd_rounds"]


@pytest.mark.parametrize("reply", [None, "I cannot", '{"criteria": []}'])
def test_a_proposal_that_fails_is_no_reward_and_no_zero(reply):
    chat = ScriptedChat(for_prompt(1, lambda r: reply))
    m = method(World(judged), chat, "method.prompts_per_step=2")
    _, record = m.step(m.start())
    groups = record.tables["groups"]
    assert (groups[0]["rewards"], groups[1]["rewards"]) == ([0.5, 0.75, 0.75, 0.0], [None] * G)
    assert groups[1]["route"] == "invalid"
    assert calls(record, "rubric_gen") == (24 + 3, 24 + 3, 2)
    assert calls(record, "judge_eval") == (4 * G, 4 * G, 4 * G)
    assert record.metrics["health/rubric_parse_fail"] == 0.5
    assert record.metrics["health/cost_mismatch"] == 0
    assert [r.draw for r in chat.requests if "matter 1" in r.user] == [0, 1, 2]


def test_a_judge_that_is_away_gives_no_reward():
    m = method(World(lambda t, i: float("nan")), ScriptedChat(script))
    _, record = m.step(m.start())
    assert record.tables["groups"][0]["rewards"] == [None] * G
    assert record.metrics["health/judge_infra_fail"] == 3 * G
    assert record.metrics["health/cost_mismatch"] == 0


def test_checks_that_never_come_drop_nothing():
    def mute(request: ChatRequest) -> str | None:
        return None if kind(request) in ("overlap", "conflict") else script(request)

    m = method(World(lambda t, i: 0.0), ScriptedChat(mute))
    _, record = m.step(m.start())
    assert record.tables["rrd_rounds"][0]["items"] == 4


def test_a_cache_changes_what_is_paid_and_nothing_else():
    chat = ScriptedChat(lambda r: script(r) or "no idea", remember=True)
    fresh, again = (method(World(judged), chat) for _ in range(2))
    (_, first), (_, second) = fresh.step(fresh.start()), again.step(again.start())
    # within the first course nothing is asked twice, whatever the round
    assert calls(first, "external_calls") == (24, 24, 1)
    assert calls(second, "external_calls") == (24, 24, 1)
    assert [first.metrics["cost/api/cached"], second.metrics["cost/api/cached"]] == [0, 24]
    assert (first.metrics["health/cost_mismatch"], second.metrics["health/cost_mismatch"]) == (0, 0)
    assert first.tables == second.tables


def test_a_resumed_run_takes_the_same_next_step():
    world, again = World(judged), World(judged)
    first, resumed = method(world, ScriptedChat(script)), method(again, ScriptedChat(script))
    state, _ = first.step(first.start())
    loaded = resumed.load(json.loads(json.dumps(state.state())))
    again.taken = world.taken
    assert lasting(first.step(state)[1]) == lasting(resumed.step(loaded)[1])
