"""The subtasks of DeepResearch, word for word as in RLDS App. C.4 (Table 6).

Figure 8 of App. A uses other names for them; those have no weights and are not used.
"""

from __future__ import annotations

from racelab.experiments.episodes import Subtask

SUBTASKS = (
    Subtask(
        "search_planning",
        "Issuing focused initial queries that match each sub-question to literature vs. open-web evidence.",
        0.15,
    ),
    Subtask(
        "source_selection",
        "Reading the most authoritative on-topic sources and skipping duplicative or off-topic results.",
        0.20,
    ),
    Subtask(
        "search_iteration",
        "Reformulating queries when results miss the question and broadening or narrowing scope based on what "
        "came back.",
        0.30,
    ),
    Subtask(
        "claim_grounding",
        'Wrapping every substantive claim in <cite id="..."> whose snippet actually supports the wrapped text.',
        0.15,
    ),
    Subtask(
        "synthesis",
        "Covering every sub-question and triangulating across sources rather than stitching quotes from one paper.",
        0.20,
    ),
)
