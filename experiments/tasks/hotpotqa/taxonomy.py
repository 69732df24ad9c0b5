"""What RLDS publishes of HotpotQA: the taxonomy (Table 4) and the system prompt (App. E), both word for word."""

from __future__ import annotations

from typing import Final

from racelab.experiments.episodes import Subtask

SUBTASKS: Final = (
    Subtask(
        "search_planning",
        "Decomposing the multi-hop question and choosing what to look up first; turning each sub-question into a "
        "focused initial query rather than passing the question verbatim. Load-bearing in the first tool-call turn.",
        0.25,
    ),
    Subtask(
        "evidence_extraction",
        "Pulling the right facts out of retrieved passages; identifying which passage actually contains the bridge "
        "entity or answer span and not over-trusting the first plausible result.",
        0.30,
    ),
    Subtask(
        "search_iteration",
        "Adapting the search plan in response to what came back; feeding bridge entities into the next query, "
        "broadening when too little is returned, narrowing when too much, knowing when to stop.",
        0.30,
    ),
    Subtask(
        "answer_grounding",
        "Tying the boxed answer to specific retrieved evidence; not falling back on prior knowledge when retrieval "
        "came back empty or off-topic.",
        0.15,
    ),
)

SYSTEM_PROMPT: Final = r"""You are a helpful assistant who answers questions directly and efficiently.
When you have enough evidence, provide your final answer inside \boxed{}.

Use the search tool when you need evidence.
You may optionally pass top_k to the search tool when you need broader retrieval,
but prefer smaller top_k values unless more coverage is necessary because long
search responses may be truncated.
When calling tools, pass valid JSON arguments with double-quoted keys and values,
for example: {"query":"who wrote the iliad","top_k":3}.
Do not output tool schemas, pseudo-JSON, or commentary in tool arguments."""

DEMONSTRATION: Final = (
    (
        "Were the writers Ivo Land and Ada Brill born in the same town?",
        '<tool_call>\n{"name": "search", "arguments": {"query": "Ivo Land Ada Brill born"}}\n</tool_call>',
    ),
    ('[1] "Ivo Land" Ivo Land and Ada Brill were both born in Orle.', r"\boxed{yes}"),
    (
        "Which is older, the Blue Bridge or the Salt Gate?",
        '<tool_call>\n{"name": "search", "arguments": {"query": "Blue Bridge Salt Gate age"}}\n</tool_call>',
    ),
    ('[1] "Salt Gate" The Salt Gate is older than the Blue Bridge.', r"\boxed{the Salt Gate}"),
)
"""Ours: the form of a call and of an answer, for `task.demonstration`. Its questions are not in the data.

Passages stand without their tags: a small model copies them instead of the call.
"""
