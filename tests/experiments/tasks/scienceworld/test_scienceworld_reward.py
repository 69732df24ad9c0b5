"""RLDS App. D.3's reward, by hand, and the taxonomy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racelab.experiments.tasks.scienceworld.reward import (
    EXPERIMENTAL_VERBS,
    VERBS,
    Shaping,
    procedure_required,
    reasons,
    running_max,
    shape,
    verb_of,
)
from racelab.experiments.tasks.scienceworld.taxonomy import COMMANDS, SUBTASKS, SYSTEM_PROMPT

THOUGHT, BARE = "<think>so</think><action>x</action>", "<action>x</action>"


def shaped(scores, commands, task="boil", replies=None, **numbers):
    replies = [THOUGHT] * len(commands) if replies is None else replies
    return shape(scores, commands, replies, task, Shaping(**numbers))


def test_a_plain_episode():
    """Rising score, an experiment, reasoning: 0.75 + 0.05 · 2/18."""
    found = shaped([0.0, 0.25, 0.75], ["open door", "activate stove"])
    assert found.reward == pytest.approx(0.75 + 0.05 * 2 / 18)
    assert (found.raw, found.stagnant, found.no_experiment, found.no_reasoning) == (0.75, False, False, False)


@pytest.mark.parametrize(
    ("scores", "stagnant"),
    [
        ([0.0, 0.2, 0.2], True),  # reached, then idle
        ([0.2, 0.2], True),  # the world began so
        ([0.2, 0.2, 0.3], False),  # it rose above the start
        ([0.0, 0.0, 0.2], False),  # in the last turn: no time to improve
        ([0.0, 0.2, 0.1], True),  # a falling score is no improvement
        ([0.0, 0.2, -1.0], True),  # neither is a mistake
        ([0.0, 0.0, 0.0], False),  # never positive
        ([0.0, 1.0, 1.0], False),  # solved
        ([0.0, 1.0 - 1e-9, 1.0 - 1e-9], False),  # solved but for rounding
    ],
)
def test_stagnant(scores, stagnant):
    found = shaped(scores, ["activate stove"] * (len(scores) - 1), diversity_bonus=0.0)
    assert found.stagnant is stagnant
    assert found.reward == pytest.approx(found.raw * (0.5 if stagnant else 1.0))


@pytest.mark.parametrize("command", [None, "focus on bowl", "move bowl to red box", "reading wait"])
def test_no_experiment(command):
    """0.3 → 0.6 on a task that asks for a procedure, without one: a quarter."""
    found = shaped([0.0, 0.3, 0.6], [command, "look around"], "test-conductivity", diversity_bonus=0.0)
    assert found.no_experiment
    assert found.reward == pytest.approx(0.15)


@pytest.mark.parametrize("verb", ["connect", "activate", "deactivate", "use", "mix", "pour", "wait"])
def test_each_experimental_verb_counts(verb):
    assert not shaped([0.0, 0.3, 0.6], [verb, f"{verb} a"], "boil").no_experiment
    assert verb in EXPERIMENTAL_VERBS


def test_no_experiment_begins_at_one_half_of_the_raw_score():
    assert not shaped([0.0, 0.3, 0.499], ["look around"] * 2).no_experiment
    assert shaped([0.0, 0.3, 0.5], ["look around"] * 2).no_experiment
    # stagnant halves 0.6 to 0.3, yet the threshold looks at 0.6: 0.6 · 0.5 · 0.25
    both = shaped([0.0, 0.6, 0.6], ["focus on a", "focus on a"], diversity_bonus=0.0)
    assert both.reward == pytest.approx(0.075)
    assert both.stagnant
    assert both.no_experiment


@pytest.mark.parametrize(
    "task",
    [
        "find-animal",
        "lifespan-longest-lived-then-shortest-lived",
        "identify-life-stages-1",
        "find-living-thing",
    ],
)
def test_exempt_families(task):
    assert not procedure_required(task)
    assert not shaped([0.0, 0.3, 0.6], ["look around"] * 2, task).no_experiment


def test_a_solved_episode_without_an_experiment_is_discounted_too():
    assert shaped([0.0, 1.0], ["focus on a"], diversity_bonus=0.0).reward == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("replies", "penalised"),
    [
        ([THOUGHT, BARE], False),  # half is not fewer than half
        ([THOUGHT, BARE, BARE], True),
        ([BARE], True),
        (["<think>cut"], True),
        (["<think> </think>"], True),
        ([], False),
    ],
)
def test_reasoning(replies, penalised):
    found = shaped([0.0] * (len(replies) + 1), [None] * len(replies), replies=replies)
    assert found.no_reasoning is penalised
    assert found.reward == pytest.approx(-0.1 if penalised else 0.0)


def test_all_terms_together():
    """Raw 0.6: · 0.5 (stagnant) · 0.25 (no experiment) = 0.075; - 0.1; + 0.05 · 3/18."""
    found = shaped(
        [0.0, 0.6, 0.6, -1.0],
        ["look around", "focus on a", "pick up b"],
        "melt",
        replies=[BARE, BARE, THOUGHT],
    )
    assert found.reward == pytest.approx(0.075 - 0.1 + 0.05 / 6)
    assert found.diversity == pytest.approx(3 / 18)


@pytest.mark.parametrize(
    ("command", "verb"),
    [
        ("teleport to kitchen", "teleport"),
        ("Look  Around", "look around"),
        ("look at bee", "look at"),
        ("focus on bee", "focus"),
        ("turn on stove", "activate"),
        ("turn off stove", "deactivate"),
        ("stir bowl", "mix"),
        ("wait1", "wait"),
        ("put a in b", "move"),
        ("put down a", None),
        ("move to kitchen", None),
        ("inventory", None),
        ("user a", None),
    ],
)
def test_verbs(command, verb):
    assert verb_of(command) == verb


def test_every_command_of_the_paper_has_its_verb():
    assert len(COMMANDS) == len(set(VERBS)) == 18
    assert [verb_of(command.replace("[", "").replace("]", "")) for command in COMMANDS] == list(VERBS)
    assert shaped([0.0] * 19, list(COMMANDS)).diversity == 1.0


@given(
    st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=8),
    st.sampled_from(["boil", "find-plant"]),
    st.sampled_from([THOUGHT, BARE]),
    st.sampled_from([None, "wait", "open a", "focus on b"]),
)
def test_bounds(scores, task, reply, command):
    turns = len(scores) - 1
    found = shape(scores, [command] * turns, [reply] * turns, task, Shaping())
    assert -0.1 <= found.reward <= 1.05
    assert 0.0 <= found.raw <= 1.0
    assert found.raw == running_max(scores)[-1]


def test_thoughts_may_span_lines():
    assert reasons("a <think>\nb\n</think> c")
    assert not reasons("</think> b <think>")


def test_taxonomy():
    """Table 5."""
    assert [(s.name, s.weight) for s in SUBTASKS] == [
        ("goal_decomposition", 0.20),
        ("object_identification", 0.20),
        ("action_sequencing", 0.20),
        ("state_tracking", 0.15),
        ("scientific_reasoning", 0.15),
        ("exploration_efficiency", 0.10),
    ]
    assert sum(s.weight for s in SUBTASKS) == pytest.approx(1.0)
    assert all(command in SYSTEM_PROMPT for command in COMMANDS)
