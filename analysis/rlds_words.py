"""What must be said beside the numbers of RLDS runs: what they are no evidence for, and what they do not pay for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from racelab.configs.schema_rlds import DeepResearchTask, HotpotQaTask, RldsMethodConfig, RldsRunConfig

FEW: Final = 10
"""Fewer validation examples than this give no interval: a bootstrap of so few says nothing about others."""
_STAND_INS: Final = {
    "scripted": "programs that know the solution. Privileged hints: an upper bound, no evidence for self-reflection.",
    "form": "the policy fills in a JSON form by choosing among labels, as it is too small to write one. "
    "No evidence that it can grade or reflect in its own words.",
    "random": "grades and pivots are drawn at random; what SDAE does here it does without a diagnosis.",
}
_SAMPLES_NOTHING: Final = ("scripted", "random")


def counted(n: int, one: str, many: str = "") -> str:
    """A number and what it counts: `1 update`, `2,000 updates`; `many` for words that do not take an s."""
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"


def too_few(n: int) -> str:
    """`1 example is too few for an interval`, `8 examples are too few for an interval`."""
    return f"{counted(n, 'example')} {'is' if n == 1 else 'are'} too few for an interval"


def roles(method: RldsMethodConfig) -> dict[str, str]:
    """Role -> who has it, of those that are asked at all."""
    asked = {"grader": method.grades, "reflector": method.reflect.max_retries > 0}
    who = {"grader": str(method.grader), "reflector": str(method.reflector)}
    return {role: who[role] for role, is_asked in asked.items() if is_asked}


def notes(config: RldsRunConfig) -> list[str]:
    """What a reader must know before the numbers."""
    found = []
    asked = roles(config.method)
    for kind, words in _STAND_INS.items():
        who = " and ".join(role for role, value in asked.items() if value == kind)
        if who:
            found.append(f"{who} = {kind}: {words}")
    if config.model.grid is not None:
        steps = counted(config.model.grid.warmup_steps, "step")
        found.append(
            f"untrained: before RL, after the warm-up of {steps} on random walks"
            if config.model.grid.warmup_steps
            else "untrained: random weights, there is no warm-up (model.grid.warmup_steps=0)"
        )
    if config.task.demonstration:
        found.append(
            "task.demonstration=true: worked examples stand before the first observation (not in the paper)"
        )
    if config.preset == "embedded" and config.model.engine != "grid":
        found.append(
            "preset=embedded on a text task: a mechanism check. The model is too small and the run too short to learn; "
            "no number here says anything about the method."
        )
    return found


def has_tools(config: RldsRunConfig) -> bool:
    """Whether the task offers tools: without a call of one the retriever or the search has done nothing."""
    return isinstance(config.task, HotpotQaTask | DeepResearchTask)


NO_TOOL: Final = "no tool was called in this run: retriever/search were not exercised"


def unpaid(methods: Mapping[str, RldsMethodConfig]) -> list[str]:
    """Which conditions grade or reflect without sampling, so that their sampled tokens leave that work out.

    Args:
        methods: condition -> its config.
    """
    who: dict[str, list[str]] = {}
    for name, method in methods.items():
        free = {role: kind for role, kind in roles(method).items() if kind in _SAMPLES_NOTHING}
        if free:
            who.setdefault(_free(free), []).append(name)
    return [f"{', '.join(names)}: {words}" for words, names in who.items()]


def _free(kinds: Mapping[str, str]) -> str:
    work = {"grader": "grading", "reflector": "reflection"}
    if len(set(kinds.values())) == 1:
        actors = f"the {next(iter(kinds.values()))} {' and '.join(kinds)}"
    else:
        actors = " and ".join(f"the {kind} {role}" for role, kind in kinds.items())
    samples, costs = ("sample", "cost") if len(kinds) > 1 else ("samples", "costs")
    return (
        f"{actors} {samples} nothing, so {' and '.join(work[role] for role in kinds)} {costs} no tokens here; with a "
        "policy that grades and reflects itself they would"
    )
