"""Prompts of the policy as grader and reflector (RLDS App. E), and ERL's rewrite of the system prompt.

GRADING and GRADED_REFLECTION are App. E word for word (`rlds_appendix_e.json`; its note names the one change, straight
quotes). They go into the user turn: the paper does not say which role they have.

Deviation: the paper names the single-pass prompt R3L_REFLECTION_PROMPT without printing it ("drops the
{grading_section} block but preserves the same JSON output schema"). REFLECTION is the graded one without that block
and, since there are none, without the two places that speak of grades. REWRITE and the headings of the memory and
contrastive sections are our wording: the paper has the placeholders only.
"""

from __future__ import annotations

import json
from pathlib import Path

from racelab.experiments.errors import DataError
from racelab.experiments.models.prompts.template import RoleTemplate

_PRINTED = json.loads(Path(__file__).with_name("rlds_appendix_e.json").read_text("utf-8"))

_WITHOUT_GRADES = (
    (
        "You are a Reflector analyzing a trajectory that has already been graded\n"
        "across competency dimensions. Use the grades to inform your analysis.\n\n{grading_section}\n\n",
        "You are a Reflector analyzing a trajectory.\n\n",
    ),
    (
        "Analyze the trajectory in light of the grades above. Identify which\n",
        "Analyze the trajectory. Identify which\n",
    ),
)


def _replaced(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """The text with each left side, which stands in it exactly once, replaced by the right side."""
    for old, new in pairs:
        if text.count(old) != 1:
            raise DataError(
                f"rlds_appendix_e.json: expected exactly one {old[:60]!r}; put the file back as it shipped"
            )
        text = text.replace(old, new)
    return text


GRADING = RoleTemplate(name="rlds-grading", version=1, user="\n".join(_PRINTED["grading"]))

GRADED_REFLECTION = RoleTemplate(
    name="rlds-graded-reflection", version=1, user="\n".join(_PRINTED["graded_reflection"])
)

REFLECTION = RoleTemplate(
    name="rlds-reflection", version=1, user=_replaced(GRADED_REFLECTION.user, _WITHOUT_GRADES)
)

PLACEHOLDER_SUGGESTION = "Actionable principle for the retry attempt."
"""What App. E shows in place of a suggestion; a reply that copies it suggests nothing."""

REWRITE = RoleTemplate(
    name="rlds-rewrite",
    version=1,
    user="""An agent worked under the system prompt below and failed. Write the system prompt that it should have had.

## System prompt
{system_section}

{memory_section}{contrastive_section}
## Failed trajectory
{trajectory_summary}

Find the earliest mistake and what knowledge or habit would have prevented it. Then write the whole system prompt \
anew: keep every rule about the form of a reply and the tools, and add what helps on this kind of task. The agent \
starts again from the beginning and sees only your prompt, not this trajectory. Do not write down an answer or a \
list of moves.

Put the new prompt, and nothing else, between these tags:
<improved_prompt>
...
</improved_prompt>""",
)
