"""The text environment: gymnasium's FrozenLake as oracle, texts, invalid replies, replay, ends."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from racelab.experiments.episodes import Instance, Observation, Turn
from racelab.experiments.errors import DataError
from racelab.experiments.ports import Environment
from racelab.experiments.tasks.common import tagged_actions
from racelab.experiments.tasks.frozenlake.boards import ACTIONS, make_boards, to_instance
from racelab.experiments.tasks.frozenlake.env import INVALID, MALFORMED, FrozenLakeEnv, parse_action

GYM = {"Left": 0, "Down": 1, "Right": 2, "Up": 3}
FIGURE_10 = ["FFFFFFH", "FFHFFFF", "FFGFFHF", "HFFHFFF", "FHHHHSH", "FFFHFHH", "HHFHFFH"]
SMALL = ["SFH", "FHF", "FFG"]


def env_of(rows: list[str], max_turns: int = 10) -> FrozenLakeEnv:
    return FrozenLakeEnv(Instance("frozenlake", "x", {"rows": rows}), max_turns)


def say(action: str) -> str:
    return f"<think>...</think>\n<action>{action}</action>"


def turns_of(env: FrozenLakeEnv, replies: list[str]) -> list[Turn]:
    seen = [env.step(reply) for reply in replies]
    return [Turn(r, (), (), True, o.text, info=o.info) for r, o in zip(replies, seen, strict=True)]


def shown_cell(text: str) -> tuple[int, int]:
    """Where A stands in an observation."""
    grid = text.split("Current Observation:\n")[1].split("\n")
    (at,) = [(r, line.split(" ").index("A")) for r, line in enumerate(grid) if "A" in line.split(" ")]
    return at


@pytest.mark.parametrize("sizes", [(4,), (5, 6, 7, 8)])
def test_random_walks_are_those_of_gymnasium(sizes):
    """Same place, reward and end after every step; the grid shows the agent where gymnasium has it."""
    rng = np.random.default_rng(0)
    boards = make_boards(
        60, sizes=sizes, frozen_probability=(0.65, 0.85), min_path=2, max_path=12, rng=rng, exclude=()
    )
    ends = set()
    for i in range(len(boards)):
        instance = to_instance(boards, i, "train")
        size = len(instance.data["rows"])
        oracle = gymnasium.make("FrozenLake-v1", desc=instance.data["rows"], is_slippery=False)
        for _ in range(4):
            env, max_turns = FrozenLakeEnv(instance, 40), 40
            seen = env.reset()
            cell, _ = oracle.reset()
            assert shown_cell(seen.text) == divmod(cell, size)
            for turn in range(max_turns):
                action = ACTIONS[rng.integers(4)]
                seen = env.step(say(action))
                before = cell
                cell, reward, ended, _, _ = oracle.step(GYM[action])
                assert (seen.info["cell"], seen.info["action"]) == (cell, ACTIONS.index(action))
                assert (seen.info["bump"], seen.info["invalid"]) == (before == cell, False)
                assert seen.done == (ended or turn == max_turns - 1)
                if seen.done:
                    break
                assert shown_cell(seen.text) == divmod(cell, size)
            assert env.result().reward == reward
            assert env.result().solved == (reward == 1)
            ends.add(env.result().end_reason)
    assert {"goal", "hole"} <= ends


def test_the_episode_of_figure_10():
    env = env_of(FIGURE_10)
    assert env.reset() == Observation(
        """\
Current Observation:
D D D D D D C
D D C D D D D
D D B D D C D
C D D C D D D
D C C C C A C
D D D C D C C
C C D C D D C
You have not achieved the goal yet. Please give the next action.""",
        info={"cell": 33},
    )
    seen = env.step(say("Down"))
    assert seen.text == "The agent moved onto a 'C' tile and fell into the hole."
    assert seen.done
    assert env.result().end_reason == "hole"
    assert env.result().metrics == {"turns": 1, "invalid_turns": 0, "bumps": 0, "fell": 1}


def test_texts_of_a_move_a_bump_an_invalid_reply_and_the_goal():
    env = env_of(SMALL)
    env.reset()
    end = "You have not achieved the goal yet. Please give the next action."
    assert env.step(say("Down")).text == (
        f"Current Observation:\nD D C\nA C D\nD D B\n9 of 10 turns are left.\n{end}"
    )
    assert env.step(say("Left")).text == (
        "You moved against the edge of the grid, so you stayed where you were.\n"
        f"Current Observation:\nD D C\nA C D\nD D B\n8 of 10 turns are left.\n{end}"
    )
    seen = env.step("I go down")
    assert seen.text == (
        "Your reply held no valid action, so the turn was used up and nothing changed. Give exactly one of "
        "<action>Up</action>, <action>Down</action>, <action>Left</action>, <action>Right</action>.\n"
        f"Current Observation:\nD D C\nA C D\nD D B\n7 of 10 turns are left.\n{end}"
    )
    assert seen.info == {"action": INVALID, "cell": 3, "invalid": True, "bump": False}
    env.step(say("Down"))
    env.step(say("Right"))
    seen = env.step(say("Right"))
    assert seen.text == "The agent moved onto a 'B' tile and reached the goal."
    result = env.result()
    assert (seen.done, result.reward, result.solved, result.end_reason) == (True, 1.0, True, "goal")
    assert result.metrics == {"turns": 6, "invalid_turns": 1, "bumps": 1, "fell": 0}
    with pytest.raises(RuntimeError, match="over"):
        env.step(say("Up"))
    assert env.stop("turns") is seen, "an ended game stays as it ended"
    assert env.result() == result


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("<action>Up</action>", 0),
        ("<think>a</think> <action> down\n</action> tail", 1),
        ("<action>LEFT</action>", 2),
        ("<action><action>Right</action>", INVALID),
        ("<action>Right", INVALID),
        ("Right</action>", INVALID),
        ("Right", INVALID),
        ("", INVALID),
        ("<action></action>", INVALID),
        ("<action>Up | Down | Left | Right</action>", INVALID),
        ("<action>North</action>", INVALID),
        ("<action>Up</action><action>Up</action>", INVALID),
        ("<action>Up</action> or <action>Right", 0),
        ("<ACTION>Up</ACTION>", INVALID),
        ("The agent moved onto a 'B' tile and reached the goal.", INVALID),
    ],
)
def test_which_replies_are_actions(reply, action):
    assert parse_action(reply) == action


def test_tagged_actions_are_all_closed_tags_in_order():
    assert tagged_actions("<action>a</action>b<action> c </action><action>d") == ["a", "c"]
    assert tagged_actions("<action>" * 5000) == []


def test_the_phrase_of_the_goal_wins_nothing():
    env = env_of(SMALL, max_turns=2)
    env.reset()
    for _ in range(2):
        seen = env.step("The agent moved onto a 'B' tile and reached the goal.")
    assert seen.text == "The agent hit the max step limit and did not reach the goal."
    result = env.result()
    assert (result.reward, result.end_reason, result.metrics["invalid_turns"]) == (0.0, "turns", 2)


def test_the_goal_on_the_last_turn_counts():
    env = env_of(["SG", "FF"], max_turns=1)
    env.reset()
    assert env.step(say("Right")).done
    assert env.result().reward == 1.0


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (
            "response_budget",
            "The response budget is too small for the next observation. The agent did not reach the goal.",
        ),
        ("turns", "The agent hit the max step limit and did not reach the goal."),
        ("elsewhere", "The game was stopped (elsewhere). The agent did not reach the goal."),
    ],
)
def test_ends_from_outside(reason, text):
    env = env_of(SMALL)
    env.reset()
    moved = env.step(say("Down"))
    assert env.stop(reason) == Observation(text, done=True, info=moved.info)
    assert (env.result().reward, env.result().end_reason) == (0.0, reason)
    env.reset()
    assert env.stop(reason).info == {"action": INVALID, "cell": 0, "invalid": True, "bump": False}


def test_replay_restores_the_state_and_the_rest_goes_as_before():
    replies = [say("Down"), "nothing", say("Left"), say("Down"), say("Right"), say("Right")]
    whole = env_of(SMALL)
    whole.reset()
    turns = turns_of(whole, replies)
    for kept in range(len(turns)):
        env = env_of(SMALL)
        seen = env.replay(turns[:kept])
        assert seen is not None
        assert seen.text == (turns[kept - 1].observation if kept else env_of(SMALL).reset().text)
        assert turns_of(env, replies[kept:]) == turns[kept:]
        assert env.result() == whole.result()


def test_replay_of_something_else_is_refused():
    env = env_of(SMALL)
    env.reset()
    turns = turns_of(env, [say("Down"), say("Down")])
    assert env_of(["SFH", "FHF", "FGF"]).replay(turns) is None, "another board"
    assert env_of(SMALL, max_turns=9).replay(turns) is None, "another budget"
    over = turns_of(env, [say("Right"), say("Right")])
    assert env_of(SMALL).replay([*turns, *over]).done
    assert env_of(SMALL).replay([*turns, *over, turns[0]]) is None, "a turn after the end"


def test_it_is_an_environment_and_names_a_bad_board():
    assert isinstance(env_of(SMALL), Environment)
    assert "<action>Up</action>" in MALFORMED
    with pytest.raises(DataError, match=r"^x: `rows` must be"):
        FrozenLakeEnv(Instance("frozenlake", "x", {}), 10)
