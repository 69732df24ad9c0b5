"""The shaped reward of an episode (RLDS App. D.3), a pure function of what happened.

    R = raw · stagnant_factor[stagnant] · no_experiment_factor[no experiment]
        - reasoning_penalty[too little reasoning] + diversity_bonus · diversity

The discounts multiply first, the two additive terms come after, so R lies in [-0.1, 1.05] with the paper's values.
What D.3 leaves open:

- raw: the running maximum of the simulator's score, each value clipped at 0 from below. A mistake for which the
  simulator says -1 ends the episode but keeps what was earned before; that is what a "monotonic-max" score says.
- stagnant: the running maximum takes one positive value only, at least one turn follows it, and it is below 1. A value
  reached in the very last turn had no time to improve. The world can start with a positive score: it counts.
- procedure-required: every task outside of the three exempt families. The threshold is on raw, before any discount.
- "executes": the simulator took the command. A rejected one is no experiment and no variety. Synonyms of the simulator
  (`turn on`, `stir`, `wait1`) count as the command that they are.
- reasoning: a turn has <think> tags if a closed pair holds something. "Fewer than half" is strict.
- diversity: different commands among D.3's 18 that were executed, over 18. A share of the episode's own turns would pay
  most for the shortest episodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from racelab.experiments.tasks.scienceworld.taxonomy import COMMANDS

SOLVED_FROM: Final = 1.0 - 1e-6
"""The simulator adds fractions: a full score may end a few ulp below 1."""
EXEMPT_FAMILIES: Final = ("find-", "lifespan-", "identify-life-stages")
"""D.3: "focus is the terminal action by design"."""

_SYNONYMS: Final = {
    "turn on": "activate",
    "turn off": "deactivate",
    "look on": "look at",
    "look": "look around",
    "put": "move",
    "get": "pick up",
    "take": "pick up",
    "stir": "mix",
    "wait1": "wait",
}
_FIXED_VERBS: Final = tuple(re.split(r" (?=\[|OBJ|LOCATION)", command)[0] for command in COMMANDS)
VERBS: Final = tuple(
    {"teleport to": "teleport", "focus on": "focus"}.get(verb, verb) for verb in _FIXED_VERBS
)
"""The literal words that open each of D.3's commands."""
EXPERIMENTAL_VERBS: Final = frozenset({"connect", "activate", "deactivate", "use", "mix", "pour", "wait"})
# Longest first: `put down` is the simulator's own and must not be read as `put`.
_OTHER_VERBS: Final = ("put down", "move through", "move to", "move into", "look in", "wait10")
_KNOWN: Final = sorted({*VERBS, *_SYNONYMS, *_OTHER_VERBS}, key=len, reverse=True)
_THOUGHT: Final = re.compile(r"<think>\s*(?!</think>)\S.*?</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Shaping:
    """D.3's numbers; see `schema_rlds.ScienceWorldTask`.

    Attributes:
        stagnant_factor: multiplies the reward of a stagnant episode.
        no_experiment_factor: multiplies where a procedure was required and no experiment was made.
        no_experiment_from: raw score from which that applies.
        reasoning_penalty: subtracted where fewer than half of the turns reason.
        diversity_bonus: for all of the 18 commands.
    """

    stagnant_factor: float = 0.5
    no_experiment_factor: float = 0.25
    no_experiment_from: float = 0.5
    reasoning_penalty: float = 0.1
    diversity_bonus: float = 0.05


@dataclass(frozen=True, slots=True)
class Shaped:
    """A reward and where it comes from.

    Attributes:
        reward: R.
        raw: in [0, 1].
        stagnant: the first discount applied.
        no_experiment: the second did.
        no_reasoning: the penalty did.
        diversity: in [0, 1].
    """

    reward: float
    raw: float
    stagnant: bool
    no_experiment: bool
    no_reasoning: bool
    diversity: float


def running_max(scores: Sequence[float]) -> list[float]:
    """The best score so far at each point, none below 0; of equal length."""
    best, out = 0.0, []
    for score in scores:
        best = max(best, score)
        out.append(best)
    return out


def verb_of(command: str) -> str | None:
    """Which of `VERBS` a command is; None for what is not among D.3's 18."""
    words = " ".join(command.lower().split())
    for verb in _KNOWN:
        if words == verb or words.startswith(f"{verb} "):
            found = _SYNONYMS.get(verb, verb)
            return found if found in VERBS else None
    return None


def reasons(reply: str) -> bool:
    """Whether a reply holds a closed pair of <think> tags with something in it."""
    return _THOUGHT.search(reply) is not None


def procedure_required(task: str) -> bool:
    """Whether a task cannot be done without an experiment."""
    return not task.startswith(EXEMPT_FAMILIES)


def shape(
    scores: Sequence[float],
    commands: Sequence[str | None],
    replies: Sequence[str],
    task: str,
    shaping: Shaping,
) -> Shaped:
    """The reward of an episode.

    Args:
        scores: the simulator's, at the start and after each turn; -1 for a mistake that ends the task.
        commands: what the simulator executed in each turn; None where it executed nothing.
        replies: the agent's, whole, one per turn.
        task: name of the simulator's task.
        shaping: the numbers.
    """
    best = running_max(scores)
    raw = min(best[-1], 1.0) if best else 0.0
    positive = [value for value in best if value > 0.0]
    stagnant = len(positive) > 1 and positive[0] == positive[-1] and raw < SOLVED_FROM
    verbs = {verb_of(command) for command in commands if command is not None} - {None}
    no_experiment = (
        procedure_required(task) and raw >= shaping.no_experiment_from and not verbs & EXPERIMENTAL_VERBS
    )
    no_reasoning = 2 * sum(reasons(reply) for reply in replies) < len(replies)
    diversity = len(verbs) / len(VERBS)
    reward = raw
    reward *= shaping.stagnant_factor if stagnant else 1.0
    reward *= shaping.no_experiment_factor if no_experiment else 1.0
    reward -= shaping.reasoning_penalty if no_reasoning else 0.0
    reward += shaping.diversity_bonus * diversity
    return Shaped(reward, raw, stagnant, no_experiment, no_reasoning, diversity)
