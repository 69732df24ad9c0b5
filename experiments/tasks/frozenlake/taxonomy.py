"""What the RLDS paper prints of FrozenLake, word for word: the taxonomy (App. C.1, Table 3), the prompt (Fig. 10)."""

from __future__ import annotations

from racelab.experiments.episodes import Subtask

SUBTASKS = (
    Subtask("path_planning", "Finding a safe route to the goal.", 0.35),
    Subtask("hazard_identification", "Recognizing which tiles are holes.", 0.25),
    Subtask(
        "state_position_tracking", "Maintaining accurate knowledge of current position across steps.", 0.15
    ),
    Subtask(
        "dead_end_detection", "Identifying configurations where the chosen path will lead to no escape.", 0.15
    ),
    Subtask("boundary_awareness", "Avoiding invalid moves at grid edges.", 0.10),
)
"""Table 3: name, description shown to the grader, φ_k."""

SYSTEM_PROMPT = """\
You are an agent playing a game on a grid, acting as a reasoning engine.

# Game Rules
*(To be discovered through play - consult any additions below.)*

# Strategic Playbook
*(To be discovered through play - consult any additions below.)*

# Required response structure
<think>
**1. Rules & Playbook Consulted:** ...
**2. Analysis of the Current State:** ...
**3. Prediction of the Value of Current States:** ...
**4. Prediction of Immediate Consequences:** ...
</think>
<action>Up | Down | Left | Right</action>"""
"""Fig. 10."""

OBSERVATION_HEAD = "Current Observation:"
OBSERVATION_END = "You have not achieved the goal yet. Please give the next action."
FELL = "The agent moved onto a 'C' tile and fell into the hole."
"""Fig. 10: the first and last line of an observation, and the terminal observation of a fall."""

DEMONSTRATION = (
    (
        f"{OBSERVATION_HEAD}\nA D C\nD D D\nC D B\n{OBSERVATION_END}",
        "<think>\nI try a move and look at what it does.\n</think>\n<action>Down</action>",
    ),
    (
        f"{OBSERVATION_HEAD}\nD D C\nA D D\nC D B\n9 of 10 turns are left.\n{OBSERVATION_END}",
        "<think>\nThe move worked. I go on.\n</think>\n<action>Right</action>",
    ),
)
"""Ours: the form of a reply, shown twice, for `task.demonstration`. It does not say what the symbols mean."""
