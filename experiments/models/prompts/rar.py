"""Templates of RaR (Gunjal et al., 2025). The wording is ours. Changing it means raising its version."""

from __future__ import annotations

from racelab.experiments.models.prompts.template import RoleTemplate

PROPOSE = RoleTemplate(
    name="rar-propose",
    version=1,
    system="You write grading checklists. You reply with one JSON list and nothing else.",
    user="""Below is a request that somebody will answer. Write the checklist by which a grader, who sees only the \
request, one answer and your checklist, can tell better answers from worse ones. You are not shown any answer.

Rules for the checklist:
- 7 to 20 items, more for a request that asks for more. None is implied by another.
- Each item names one thing that can be checked in the answer itself: the expected value, step, content or limit.
- "title": two to four words.
- "description": one sentence that begins with the item's category and a colon. The categories are
  Essential: an answer without it fails;
  Important: it makes an answer clearly better;
  Optional: it is welcome;
  Pitfall: a likely mistake. Name the mistake itself, as the answer that makes it would show it.
- "weight": 5 for Essential, 3 or 4 for Important, 1 or 2 for Optional, -1 or -2 for Pitfall.

Reply in this form:
[{"title": "<words>", "description": "Essential: <what the answer does>", "weight": 5}, \
{"title": "<words>", "description": "Pitfall: <what a bad answer does>", "weight": -2}]

Request:
{prompt}""",
)
