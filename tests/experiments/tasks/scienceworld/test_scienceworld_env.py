"""Episodes in the real simulator."""

import pytest

from racelab.experiments.episodes import Instance, Turn
from racelab.experiments.tasks.scienceworld.env import FORMAT_REMINDER, NO_ACTION, REFUSED
from racelab.experiments.tasks.scienceworld.task import ScienceWorld
from racelab.experiments.tasks.scienceworld.taxonomy import SUBTASKS, SYSTEM_PROMPT


def say(command, thought="so"):
    return f"<think>{thought}</think>\n<action>{command}</action>"


def run(env, commands):
    env.reset()
    seen = [env.step(say(command)) for command in commands]
    return seen


def turn(reply, observation):
    return Turn(reply, (1,), (0.0,), True, observation)


def test_first_observation(play):
    first = play().reset()
    instruction, _, room = first.text.partition("\n\n")
    assert instruction.startswith("Your task is to find a(n) living thing.")
    assert room.startswith("This room is called the ")
    assert FORMAT_REMINDER not in first.text
    assert not first.done


def test_later_observations_end_with_the_reminder(play):
    seen = run(play(), ["look around", "inventory", "teleport to kitchen"])
    assert all(o.text.endswith(f"\n\n{FORMAT_REMINDER}") for o in seen)
    assert seen[2].text.startswith("You teleport to the kitchen.")
    assert [o.info["status"] for o in seen] == ["ok"] * 3
    assert "<think>...</think><action>...</action>" in FORMAT_REMINDER


def test_free_commands_stop_the_clock_but_use_a_turn(play):
    env = play()
    seen = run(env, ["help", "objects", "task"])
    assert [o.info["status"] for o in seen] == ["free"] * 3
    assert [o.info["moves"] for o in seen] == [0, 0, 0]
    assert seen[0].text.startswith("Possible actions:")
    assert "teleport OBJ" in seen[0].text
    assert "reset task" not in seen[0].text
    assert seen[1].text.startswith("Possible object references:")
    env.stop("turns")
    metrics = env.result().metrics
    assert (metrics["free_turns"], metrics["turns"], metrics["diversity"]) == (3.0, 3.0, 0.0)


def test_the_agent_is_told_that_help_uses_a_turn():
    text = " ".join(SYSTEM_PROMPT.split())
    assert "Two commands cost no time in the world, but a turn: help lists" in text
    assert "free" not in text


@pytest.mark.parametrize("command", ["reset task", "Reset  TASK", "reset\ntask"])
def test_reset_task_is_blocked(play, command):
    env = play()
    seen = run(env, [command])[0]
    assert seen.text.startswith(REFUSED)
    assert (seen.info["status"], seen.info["moves"]) == ("blocked", 0)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "look around",
        "<action></action>",
        "<action> \n</action>",
        "<action>look around",
        "<action>wait</action><action>wait</action>",
    ],
)
def test_a_reply_without_one_action_uses_the_turn(play, reply):
    env = play()
    env.reset()
    seen = env.step(reply)
    assert seen.text == f"{NO_ACTION}\n\n{FORMAT_REMINDER}"
    assert seen.info == {"action": None, "status": "invalid", "score": seen.info["score"], "moves": 0}
    env.stop("turns")
    assert env.result().metrics["invalid_turns"] == 1.0


@pytest.mark.parametrize("odd", ["\x00zz", "\ud800zz", "☕ \\ \" '", "a" * 20_000, "!x\ne\n", "9" * 50])
def test_odd_texts_are_only_rejected(play, odd):
    seen = run(play(), [odd, "inventory"])
    assert [o.info["status"] for o in seen] == ["rejected", "ok"]


def test_rejected_commands_name_what_matches(play):
    look, typo, unknown = run(play(), ["look at zzz", "teleprt to kitchen", "qqq"])
    assert (
        "No known action matches that input.\nValid commands that match: look around, look at OBJ"
        in look.text
    )
    assert "Valid commands that match: teleport OBJ" in typo.text
    assert "Valid commands: activate OBJ" in unknown.text
    assert "reset task" not in unknown.text
    assert {o.info["status"] for o in (look, typo, unknown)} == {"rejected"}


def test_an_ambiguous_request_is_answered_by_a_number(play):
    env = play()
    asked, chosen = run(env, ["look at door", "1"])
    assert asked.info["status"] == "ambiguous"
    assert asked.text.startswith(
        "Ambiguous request: Please enter the number for the action you intended:\n0:\t"
    )  # the simulator's "(or blank to cancel)" is no action here
    assert "1:\tlook at door" in asked.text
    assert chosen.info["status"] == "ok"
    assert chosen.text.startswith("A door to")
    env.stop("turns")
    assert env.result().metrics["diversity"] == pytest.approx(1 / 18)  # `look at`, not `1`


def test_a_command_after_an_ambiguous_request_is_not_swallowed(play):
    seen = run(play(), ["look at door", "objects", "teleport to kitchen", "look at door", "99", "inventory"])
    assert [o.info["status"] for o in seen] == ["ambiguous", "free", "ok", "ambiguous", "rejected", "ok"]
    assert seen[2].text.startswith("You teleport to the kitchen.")
    assert seen[4].text.startswith("Unknown action.")


def test_a_wrong_focus_ends_the_episode_and_keeps_what_was_earned(play):
    env = play()
    first = env.reset()
    assert first.info["score"] == pytest.approx(1 / 12)
    seen = env.step(say("focus on picture"))
    assert seen.done
    result = env.result()
    assert (result.end_reason, result.solved) == ("failed", False)
    assert result.metrics["raw_score"] == pytest.approx(1 / 12)
    assert result.reward == pytest.approx(0.5 / 12 + 0.05 / 18)  # stagnant; one verb
    assert "Outcome: task failed, part of the task done" in seen.text
    assert "Score by step: start +8; 0 at all others" in seen.text
    with pytest.raises(RuntimeError, match="over"):
        env.step(say("wait"))


def test_the_same_action_three_times_ends_the_episode(play):
    env = play()
    seen = run(env, ["inventory", "wait", "look around", "Look  around", "look around"])
    assert [o.done for o in seen] == [False] * 4 + [True]
    assert "the same action too many times in a row" in seen[-1].text
    assert env.result().end_reason == "repeated_action"


def test_a_reply_without_an_action_breaks_the_row(play):
    env = play()
    env.reset()
    for reply in (say("wait"), say("wait"), "hm", say("wait"), "hm", "hm", "hm"):
        assert not env.step(reply).done


def test_thirty_turns(play):
    env = play()
    seen = run(env, ["inventory", "look around"] * 15)
    assert [o.done for o in seen] == [False] * 29 + [True]
    assert env.result().end_reason == "turns"
    assert "Steps used: 30 of 30" in seen[-1].text
    assert "task not solved" in seen[-1].text


def test_stopped_from_outside(play):
    env = play()
    run(env, ["inventory"])
    end = env.stop("response_budget")
    assert end.done
    assert end.text.startswith("In your inventory")
    assert FORMAT_REMINDER not in end.text
    assert env.stop("turns") is end
    assert env.result().end_reason == "response_budget"


def test_two_environments_do_not_disturb_each_other(play):
    def words(env, commands):
        return [o.text for o in run(env, commands)]

    one, other = (
        ["teleport to kitchen", "look around", "open fridge"],
        ["teleport to outside", "look around", "wait"],
    )
    env = play()
    alone = words(env, one)
    env.close()
    first, second = play(), play("boil", 3)
    a, b = [first.reset().text], [second.reset().text]
    for mine, yours in zip(one, other, strict=True):
        a.append(first.step(say(mine)).text)
        b.append(second.step(say(yours)).text)
    assert a[1:] == alone
    assert b[0].startswith("Your task is to boil")
    assert b[1].startswith("You teleport to the outside.")


def test_replay(play):
    """In another simulator, with another history, and in the same one."""
    commands = [
        "look around",
        "look at door",
        "help",
        "teleport to outside",
        "look around",
        "wait",
        "qqq",
        "inventory",
    ]
    env = play("identify-life-stages-2", 1)
    replies = [say(command) for command in commands] + ["no action"]
    env.reset()
    turns = [turn(reply, env.step(reply).text) for reply in replies]
    after = env.step(say("look around")).text
    other = play("identify-life-stages-2", 1)
    for again in (other, env):
        seen = again.replay(turns)
        assert seen is not None
        assert seen.text == turns[-1].observation
        assert again.step(say("look around")).text == after


def test_replay_of_nothing_is_the_first_observation(play):
    env = play()
    assert env.replay([]) == env.reset()


def test_a_replay_that_reads_otherwise_gives_none(play):
    env = play()
    env.reset()
    good = turn(say("look around"), env.step(say("look around")).text)
    assert play().replay([good, turn(say("inventory"), "In your inventory, you see:\n\ta unicorn")]) is None


def test_a_replay_that_ends_too_early_gives_none(play):
    env = play()
    env.reset()
    end = turn(say("focus on picture"), env.step(say("focus on picture")).text)
    env.close()
    again = play()
    assert again.replay([end]).done
    assert play().replay([end, end]) is None


def test_the_task_as_a_whole(make_config, installation, monkeypatch, tmp_path):
    """No simulator runs before one is needed; counters are taken once; closing twice is fine."""
    monkeypatch.setenv("RACELAB_CACHE", str(tmp_path))
    task = ScienceWorld(make_config(jvms=1, repeat_limit=2))
    try:
        assert task.metrics()["jvm_started"] == 0.0
        assert (task.name, task.concurrency, task.tools, task.subtasks) == ("scienceworld", 1, (), SUBTASKS)
        assert task.stops == ("</action>",)
        assert task.system_prompt() == task.system_prompt("  ")
        assert task.system_prompt("Look twice.").endswith("# Additions\nLook twice.")
        env = task.open(Instance("scienceworld", "boil/0", {"task": "boil", "variation": 0}))
        env.reset()
        env.step(say("look around"))
        assert env.step(say("look around")).done
        env.close()
        env.close()
        counts = task.metrics()
        assert (counts["jvm_started"], counts["jvm_restarts"], counts["jvm_faults"]) == (1.0, 0.0, 0.0)
        assert counts["env_steps"] == 3.0
        assert counts["env_steps_per_s"] > 0.0
        assert task.metrics()["env_steps"] == 0.0
    finally:
        task.close()
        task.close()


@pytest.mark.slow
def test_the_gold_path_scores_100_as_in_the_packages_own_environment(play):
    from scienceworld import ScienceWorldEnv as Package

    package = Package("", envStepLimit=100)
    try:
        package.load("find-living-thing", 0, "easy", generateGoldPath=True)
        gold = package.get_gold_action_sequence()
        theirs = [package.reset()[1]["score"]]
        for command in gold:
            _, _, completed, info = package.step(command)
            theirs.append(info["score"])
    finally:
        package.close()
    assert completed
    assert theirs[-1] == 100
    env = play("find-living-thing", 0)
    ours = [round(100 * env.reset().info["score"])]
    for command in gold:
        seen = env.step(say(command))
        ours.append(round(100 * seen.info["score"]))
    assert ours == theirs
    result = env.result()
    assert (seen.done, result.solved, result.end_reason) == (True, True, "completed")
    assert result.metrics["raw_score"] == pytest.approx(1.0)
    assert "Final score: 100/100" in seen.text
    assert "Outcome: task solved" in seen.text
    assert f"Steps used: {len(gold)} of 30" in seen.text
    steps = seen.text.rpartition("Score by step: ")[2]
    gains = [int(part.split("+")[1].split()[0].rstrip(";")) for part in steps.split(", ") if "+" in part]
    assert sum(gains) == 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        "chemistry-mix-paint-tertiary-color",
        "mendelian-genetics-unknown-plant",
        "find-animal",
        "power-component",
    ],
)
def test_equal_variations_are_equal_worlds(play, task):
    """A walk through all rooms, in two processes with different histories, and again in the first: the same words."""
    rooms = [
        "kitchen",
        "art studio",
        "greenhouse",
        "outside",
        "workshop",
        "living room",
        "bedroom",
        "foundry",
    ]
    commands = [c for room in rooms for c in (f"teleport to {room}", "look around")]

    def walk(env):
        return [env.reset().text, *(env.step(say(c)).text for c in [*commands, "wait", *commands[:12]])]

    first, second = play(task, 2), play("boil", 1)
    second.reset()
    second.close()
    told = walk(first)
    assert len(set(told)) > 10
    assert walk(play(task, 2)) == told
    assert walk(first) == told
