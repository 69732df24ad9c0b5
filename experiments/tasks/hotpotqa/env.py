r"""One HotpotQA episode: search, read, answer (RLDS App. D.2).

What D.2 leaves open is done so:

- What a reply says between <think> tags (or before an end tag without a start) is neither a call nor an answer.
- A reply with a tool call and a boxed answer is refused: nothing is searched, the answer is not taken, the turn is
  spent and the observation says so. A box inside a call's arguments is an argument, no answer.
- One call is made per reply, the first; each further one is answered with an error.
- A whole-number top_k outside [1, 50] is clamped, and the response says so; anything else is an error. An argument that
  is not in the schema is an error.
- A passage is cut to the per-result cap and the response to the per-call cap, notices included; a passage that does not
  fit any more is left out whole, and the notice says how many were.
- Which `\boxed` counts, and what in it: `reward.boxed_answer`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from racelab.experiments.episodes import Observation, Result, Turn
from racelab.experiments.models.retrieval import Hit
from racelab.experiments.models.retriever_client import Retriever, RetrieverError
from racelab.experiments.models.text import defang, strip_thinking
from racelab.experiments.tasks.hermes import (
    ToolCall,
    ToolCallError,
    parse_tool_calls,
    tool_response,
    without_tool_calls,
)
from racelab.experiments.tasks.hotpotqa.reward import Score, boxed_answer, score

TOOL: Final = "search"
CUT: Final = " [truncated]"
GO_ON: Final = r"Use the search tool to find evidence, or give your final answer inside \boxed{}."
REFUSED: Final = (
    "A tool call and a final answer exclude each other in one reply: nothing was searched and the answer was not "
    "taken. Send one of them."
)
_ENDS: Final = {
    "turns": "You gave no answer within the allowed turns.",
    "response_budget": "You gave no answer before the response budget was used up.",
}
_COUNTS: Final = ("tool_calls", "tool_errors", "retriever_faults", "retrieval_s", "refused", "no_action")


@dataclass(frozen=True, slots=True)
class Rules:
    """The numbers of D.2; see `configs.schema_rlds.HotpotQaTask`."""

    default_top_k: int = 5
    max_top_k: int = 50
    result_chars: int = 1200
    total_chars: int = 8000
    f1_threshold: float = 0.3
    official_yes_no: bool = False


@dataclass(slots=True)
class _Step:
    """Facts of one turn: counts that `replay` adds up again, and what the transcript shows."""

    counts: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def count(self, name: str, by: float = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + by


class HotpotQaEnvironment:
    """Implements `ports.Environment`."""

    def __init__(
        self,
        question: str,
        answers: Sequence[str],
        retriever: Retriever,
        rules: Rules,
        titles: Sequence[str] = (),
    ) -> None:
        """Nothing is searched yet.

        Args:
            question: shown as the first observation.
            answers: right ones, at least one.
            retriever: may be shared by several environments.
            rules: caps and scoring.
            titles: of the passages that hold the evidence, for the metric `evidence`; () if unknown.
        """
        self._question, self._answers, self._retriever, self._rules = question, answers, retriever, rules
        self._titles, self._found = frozenset(titles), set[str]()
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        self._score: Score | None = None
        self._end = ""

    def reset(self) -> Observation:
        """The question."""
        return Observation(defang(self._question))

    def step(self, reply: str) -> Observation:
        """A search, an answer, or a hint at both. What the agent or the retriever does wrong is told and counted."""
        if self._end:
            raise RuntimeError("the episode has ended")
        said = strip_thinking(reply)
        calls, answer, step = parse_tool_calls(said), boxed_answer(without_tool_calls(said)), _Step()
        if calls and answer is not None:
            step.count("refused")
            text = REFUSED
        elif calls:
            first = self._call(calls[0], step)
            step.count("tool_errors", len(calls) - 1)
            text = "\n".join([tool_response(first), *map(tool_response, [_ONE_CALL] * (len(calls) - 1))])
        elif answer is not None:
            text = self._answer(answer)
            step.facts["answer"] = answer
        else:
            step.count("no_action")
            text = f"No tool call and no answer found. {GO_ON}"
        self._add(step.counts, step.facts.get("titles", ()))
        return Observation(text, bool(self._end), {"counts": step.counts, **step.facts})

    def replay(self, turns: Sequence[Turn]) -> Observation | None:
        """The state after `turns`, from what they recorded; the retriever is not asked again.

        Returns:
            The last observation, or None where a turn ended the episode or lacks its record.
        """
        last = self.reset()
        for turn in turns:
            counts, titles = turn.info.get("counts"), turn.info.get("titles", ())
            if not isinstance(counts, Mapping) or not set(counts) <= set(_COUNTS) or "answer" in turn.info:
                return None
            self._add(counts, titles)
            last = Observation(turn.observation, False, turn.info)
        return last

    def _add(self, counts: Mapping[str, float], titles: Sequence[str]) -> None:
        for name, value in counts.items():
            self._counts[name] += value
        self._found.update(self._titles.intersection(titles))

    def stop(self, reason: str) -> Observation:
        """Ends the episode without an answer."""
        self._end = self._end or reason
        return Observation(_ENDS.get(reason, "The episode ended before you gave an answer."), True)

    def result(self) -> Result:
        """Reward of the boxed answer, 0 without one; solved: it matches exactly."""
        got = self._score or Score(0.0, False, 0.0)
        numbers = {
            **self._counts,
            "answered": float(self._score is not None),
            "em": float(got.em),
            "f1": got.f1,
        }
        if self._titles:
            numbers["evidence"] = len(self._found) / len(self._titles)
        return Result(got.reward, got.em, self._end, numbers)

    def close(self) -> None:
        """Nothing is held: the retriever is the task's."""

    def _answer(self, answer: str) -> str:
        """Scores it; the terminal text."""
        rules = self._rules
        got = score(
            answer, self._answers, threshold=rules.f1_threshold, official_yes_no=rules.official_yes_no
        )
        self._score, self._end = got, "answer"
        if got.em:
            return "Your answer is correct."
        if got.reward > 0:
            return f"Your answer is partially correct (F1 score: {got.f1:.2f})."
        return "Your answer is incorrect."

    def _call(self, call: ToolCall | ToolCallError, step: _Step) -> str:
        """What one call gives, as text."""
        try:
            query, top_k, note = self._arguments(call)
        except _BadCallError as error:
            step.count("tool_errors")
            return f"Error: {error}."
        step.facts["query"], step.facts["top_k"] = query, top_k
        before = time.perf_counter()
        try:
            hits = self._retriever.search(query, top_k)
        except RetrieverError as error:
            step.count("retriever_faults")
            return f"Error: the search failed ({error}). You may try again."
        finally:
            step.count("tool_calls")
            step.count("retrieval_s", time.perf_counter() - before)
        step.facts["titles"] = [hit.passage.title for hit in hits]
        return render(hits, self._rules.result_chars, self._rules.total_chars, note)

    def _arguments(self, call: ToolCall | ToolCallError) -> tuple[str, int, str]:
        """Query, top_k and a note on a clamped one. Raises _BadCallError with a line for the agent."""
        if isinstance(call, ToolCallError):
            raise _BadCallError(call.message)
        if call.name != TOOL:
            raise _BadCallError(f"there is no tool {call.name[:80]!r}; the only one is {TOOL}")
        unknown = sorted(set(call.arguments) - {"query", "top_k"})
        if unknown:
            raise _BadCallError(f"{TOOL} has no argument {unknown[0][:80]!r}; it takes query and top_k")
        query, top_k = call.arguments.get("query"), call.arguments.get("top_k")
        if not isinstance(query, str) or not query.strip():
            raise _BadCallError("query must be a text that is not blank")
        if top_k is None:
            return query, self._rules.default_top_k, ""
        if not _whole(top_k):
            raise _BadCallError(f"top_k must be a whole number from 1 to {self._rules.max_top_k}")
        clamped = min(max(int(top_k), 1), self._rules.max_top_k)
        return query, clamped, f"[top_k was set to {clamped}]\n" if clamped != top_k else ""


def _whole(value: object) -> bool:
    """3 and 3.0, but neither true nor 1e999."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and value.is_integer()
    )


class _BadCallError(Exception):
    """A call that is not made; one line for the agent, without a full stop."""


_ONE_CALL: Final = "Error: one tool call per reply; this one was not made."


def render(hits: Sequence[Hit], result_chars: int, total_chars: int, note: str = "") -> str:
    """`[1] <title> <snippet>` lines, the title in quotes as in the corpus; at most `total_chars` characters.

    Args:
        hits: best first.
        result_chars: longest passage, its title and the notice of a cut included.
        total_chars: longest text, notices included.
        note: stands before the passages.
    """
    if not hits:
        return cut(f"{note}No passages found; try other words.", total_chars)
    lines, used = [], len(note)
    for number, hit in enumerate(hits, 1):
        line = f"[{number}] {cut(_one_line(hit), result_chars)}"
        left = len(hits) - number
        # room for the line, and for the notice if another one might not fit
        if used + len(line) + (len(_left_out(left, total_chars)) + 1 if left else 0) > total_chars:
            if number == 1:
                lines.append(cut(line, max(0, total_chars - used - len(_left_out(left, total_chars)) - 1)))
            lines.append(_left_out(left + (number > 1), total_chars))
            break
        lines.append(line)
        used += len(line) + 1
    return cut(note + "\n".join(filter(None, lines)), total_chars)


def _left_out(count: int, total_chars: int) -> str:
    return f"[{count} more left out: a response holds {total_chars} characters]" if count else ""


def _one_line(hit: Hit) -> str:
    title = f'"{hit.passage.title}" ' if hit.passage.title else ""
    return title + " ".join(hit.passage.text.split())


def cut(text: str, limit: int) -> str:
    """The text, or as much of it as fits before a notice, in `limit` characters."""
    if len(text) <= limit:
        return text
    return text[: limit - len(CUT)] + CUT if limit > len(CUT) else text[: max(limit, 0)]
