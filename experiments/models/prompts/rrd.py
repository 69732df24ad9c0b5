"""Templates of RRD (Shen et al., 2026). The wording is ours. Changing one means raising its version."""

from __future__ import annotations

from racelab.experiments.models.prompts.template import RoleTemplate

_WRITER = "You write grading checklists. You reply with one JSON object and nothing else."
_CHECKER = "You compare items of a grading checklist. You reply with YES or NO and nothing else."

PROPOSE = RoleTemplate(
    name="rrd-propose",
    version=1,
    system=_WRITER,
    user="""Below are several answers to a request, and the request. Write a checklist that tells better answers from \
worse ones.

Rules for the checklist:
- Each item is one statement that is either true or false of an answer, and can be decided from the answer itself.
- Prefer what some of the answers do and others do not. Do not speak of an answer by its number.
- No item repeats, contains or contradicts another.

Reply in this form:
{"criteria": [{"criterion": "<statement>"}, {"criterion": "<statement>"}]}

Answers:
{answers}

Request:
{prompt}""",
)

SPLIT = RoleTemplate(
    name="rrd-split",
    version=1,
    system=_WRITER,
    user="""An item of a grading checklist is too coarse: all of the answers below satisfy it, so it does not tell \
them apart. Write two finer items in its place. Each asks for one more particular thing, of which some of these \
answers may fall short.

Rules for the two items:
- Each is one statement that is either true or false of an answer, and can be decided from the answer itself.
- Neither repeats or contradicts the other, the coarse item or one of the other items.

Reply in this form:
{"criteria": [{"criterion": "<statement>"}, {"criterion": "<statement>"}]}

The coarse item:
{item}

The other items:
{others}

Answers:
{answers}

Request:
{prompt}""",
)

OVERLAP = RoleTemplate(
    name="rrd-overlap",
    version=1,
    system=_CHECKER,
    user="""Does the new item overlap with the list? It does if an item of the list has the same intent, contains it, \
is contained in it, or if at least 70 % of what it checks is checked already. Reply with YES or NO.

The list:
{items}

The new item:
{item}""",
)

CONFLICT = RoleTemplate(
    name="rrd-conflict",
    version=1,
    system=_CHECKER,
    user="""Does the new item conflict with the list? It does if an item of the list asks for the opposite, so that no \
answer could satisfy both. Reply with YES or NO.

The list:
{items}

The new item:
{item}""",
)

WEIGHTS = RoleTemplate(
    name="rrd-weights",
    version=1,
    system="You weigh the items of a grading checklist. You reply with one JSON object and nothing else.",
    user="""How much does each item of this checklist matter for the quality of an answer to the request? Give \
{n} numbers from 0 (does not matter) to 1, in the order of the items.

Reply in this form:
{"weights": [0.9, 0.2]}

Items:
{items}

Request:
{prompt}""",
)
