"""The taxonomy of ScienceWorld word for word (RLDS App. C.3, Table 5), its 18 commands (D.3), and the system prompt.

The paper prints no system prompt for this task; this one is ours, in the manner of Fig. 10: what to answer with, the
commands, and a place for additions.

A deviation: D.3 calls `help` and `objects` free. Here every reply is a turn, so the prompt says that they cost no time
in the world, but a turn.
"""

from __future__ import annotations

from racelab.experiments.episodes import Subtask

SUBTASKS = (
    Subtask("goal_decomposition", "Breaking the experiment into sequential subgoals.", 0.20),
    Subtask("object_identification", "Identifying which objects are needed and where to find them.", 0.20),
    Subtask("action_sequencing", "Performing actions in the correct causal order.", 0.20),
    Subtask("state_tracking", "Monitoring changes in object properties and environment state.", 0.15),
    Subtask("scientific_reasoning", "Applying correct scientific principles to the experiment.", 0.15),
    Subtask("exploration_efficiency", "Navigating and exploring the environment without wasted steps.", 0.10),
)
"""Table 5: name, description shown to the grader, φ_k."""

COMMANDS = (
    "open OBJ",
    "close OBJ",
    "activate OBJ",
    "deactivate OBJ",
    "connect OBJ to OBJ",
    "disconnect OBJ",
    "use OBJ [on OBJ]",
    "look around",
    "examine OBJ",
    "look at OBJ",
    "read OBJ",
    "move OBJ to OBJ",
    "pick up OBJ",
    "pour OBJ into OBJ",
    "mix OBJ",
    "teleport to LOCATION",
    "focus on OBJ",
    "wait",
)
"""D.3's 18 templates. The simulator knows a few more (`look in`, `go`, `inventory`, `eat`, ...), which pass."""

FORMAT_REMINDER = "Answer with <think>...</think><action>...</action>."

SYSTEM_PROMPT = (
    """\
You are an agent in a text world, acting as a scientist who solves the task by experiment.

# Commands
"""
    + "\n".join(COMMANDS)
    + """

OBJ and LOCATION stand for names that an observation mentions. Two commands cost no time in the world, but a turn: help
lists the commands that are valid now, objects lists the names that can be used now. Focus on an object only when the
task asks for it: a wrong focus ends the task.

# Rules and hints
*(To be discovered through play - consult any additions below.)*

# Required response structure
<think>
what you know, what the next subgoal is, and why the action serves it
</think>
<action>one command</action>"""
)

DEMONSTRATION = (
    (
        "Your task is to find the lamp. First, focus on the lamp.\n\nThis room is called the attic. In it, you see: \n"
        "\ta box (that is closed)\n\ta lamp\nYou also see:\n\tA door to the stairs (that is open)\n\n"
        + FORMAT_REMINDER,
        "<think>I look at it first.</think><action>look at lamp</action>",
    ),
    (f"a lamp\n\n{FORMAT_REMINDER}", "<think>I take it.</think><action>pick up lamp</action>"),
    (
        f"You move the lamp to the inventory.\n\n{FORMAT_REMINDER}",
        "<think>Now I focus on it.</think><action>focus on lamp</action>",
    ),
)
"""Ours: the form of a reply, for `task.demonstration`. There is no such room and no such task."""
