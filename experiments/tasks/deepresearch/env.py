"""One DeepResearch episode: search, read, answer with citations, be judged (RLDS App. D.4).

What D.4 leaves open is done so:

- a closed `<answer>` ends the episode; tool calls in the same reply are not made. Thinking is left out first;
- one call is made per reply, the first; each further one is answered with an error;
- on the last turn no tool runs, since nobody would read its result;
- "all terminal paths invoke the rubric judge": without an answer block the last reply is judged as the answer, tool
  calls and tags taken out (r_format still lacks its 0.5); an empty one is 0 without a question to the judge;
- a tool call counts for r_search and r_format if the tool ran, whatever the outside made of it; one with a mistake in
  it does not. Faults of replayed turns count in a retry's metrics as they do in its parent's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from racelab.experiments.episodes import Instance, Observation, Result, Turn
from racelab.experiments.models.text import defang, strip_thinking
from racelab.experiments.tasks.deepresearch import reward, texts
from racelab.experiments.tasks.deepresearch.citations import (
    answer_block,
    cited_ids,
    claims,
    without_answer_tags,
)
from racelab.experiments.tasks.deepresearch.faults import KINDS
from racelab.experiments.tasks.deepresearch.rubric import normalised
from racelab.experiments.tasks.deepresearch.rubric_judge import Case, RubricJudge, Verdict
from racelab.experiments.tasks.deepresearch.tools import Toolbox, ToolResult
from racelab.experiments.tasks.hermes import parse_tool_calls, tool_response, without_tool_calls

_ONE_CALL: Final = "Error: one tool call per reply; this one was not made."
_COUNTS: Final = ("tool_calls", "tool_errors", "tool_failures", "cached", "no_action", "tool_s")


@dataclass(frozen=True, slots=True)
class Rules:
    """The numbers of an episode's end; see `configs.schema_rlds.DeepResearchTask`."""

    max_turns: int
    weights: tuple[float, float, float, float]
    solved_from: float
    length_penalty: float
    length_soft: int
    length_hard: int


class DeepResearchEnv:
    """Implements `ports.Environment`."""

    def __init__(self, instance: Instance, toolbox: Toolbox, judge: RubricJudge, rules: Rules) -> None:
        """Nothing is asked yet.

        Args:
            instance: with `prompt` and a normalised `rubric`.
            toolbox: shared.
            judge: shared.
            rules: of the task.
        """
        self._question = str(instance.data["prompt"])
        self._items = normalised(instance.data["rubric"])
        self._toolbox, self._judge, self._rules = toolbox, judge, rules
        self._turns = 0
        self._sources: dict[str, list[str]] = {}
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        self._faults = dict.fromkeys(KINDS, 0.0)
        self._last = ""  # the last reply, thinking left out
        self._result: Result | None = None
        self._terminal = ""

    def reset(self) -> Observation:
        """The question."""
        return Observation(defang(self._question))

    def step(self, reply: str) -> Observation:
        """A tool's result, or the end."""
        if self._result is not None:
            raise RuntimeError("the episode has ended")
        self._turns += 1
        self._last = strip_thinking(reply)
        if answer_block(without_tool_calls(self._last)) is not None:
            return self._finish("answer")
        if self._turns >= self._rules.max_turns:
            return self._finish("turns")
        text, info = self._act()
        return Observation(f"{text}\n\n{texts.turns_left(self._rules.max_turns - self._turns)}", False, info)

    def replay(self, turns: Sequence[Turn]) -> Observation | None:
        """The state after `turns`, from what they recorded; no service is asked.

        Returns:
            The last observation, or None where a turn ended the episode, or its record does not fit its text.
        """
        if len(turns) >= self._rules.max_turns:
            return None
        last = self.reset()
        for turn in turns:
            if not self._remember(turn.observation, turn.info):
                return None
            self._turns += 1
            self._last = strip_thinking(turn.text)
            last = Observation(turn.observation, False, turn.info)
        return last

    def stop(self, reason: str) -> Observation:
        """Ends the episode; what there is of an answer is judged."""
        return self._finish(reason)

    def result(self) -> Result:
        """The reward of D.4; call it once the episode has ended."""
        if self._result is None:
            raise RuntimeError("the episode has not ended")
        return self._result

    def close(self) -> None:
        """Nothing is held: tools and judge are the task's."""

    def _act(self) -> tuple[str, dict[str, Any]]:
        """Runs the first call of the reply; the text, and the facts that `replay` needs."""
        calls = parse_tool_calls(self._last)
        if not calls:
            info: dict[str, Any] = {"counts": {"no_action": 1}, "faults": {}, "sources": []}
            self._remember("", info)
            return texts.NOTHING_DONE, info
        result = self._toolbox.run(calls[0])
        rest = [tool_response(_ONE_CALL)] * (len(calls) - 1)
        info = {
            "tool": result.name,
            "counts": _counts(result, len(rest)),
            "faults": dict(result.faults),
            "sources": [list(span) for span in result.rendered.spans],
        }
        self._remember(result.rendered.text, info)
        return "\n".join([result.rendered.text, *rest]), info

    def _remember(self, text: str, info: Mapping[str, Any]) -> bool:
        """Adds a turn's sources and counts; False, and nothing is added, where they do not fit the text."""
        spans, counts, faults = info.get("sources"), info.get("counts"), info.get("faults")
        if not isinstance(spans, list) or not isinstance(counts, Mapping) or not isinstance(faults, Mapping):
            return False
        if not set(counts) <= set(_COUNTS) or not set(faults) <= set(KINDS):
            return False
        found = [(name, text[start:end]) for name, start, end in spans]
        if not all(part.startswith(f"[id={name}]") for name, part in found):
            return False
        for name, part in found:
            self._sources.setdefault(name, []).append(part)
        for total, new in ((self._counts, counts), (self._faults, faults)):
            for name, value in new.items():
                total[name] += value
        return True

    def _finish(self, reason: str) -> Observation:
        """Scores the episode, once."""
        if self._result is None:
            block = answer_block(without_tool_calls(self._last))
            answer = block if block is not None else without_answer_tags(without_tool_calls(self._last))
            before = time.monotonic()
            verdict = self._verdict(answer)
            self._score(reason, answer, block is not None, verdict, time.monotonic() - before)
        return Observation(self._terminal, True, {"end_reason": self.result().end_reason})

    def _verdict(self, answer: str) -> Verdict:
        """The judge's; nothing is asked about nothing, which meets no criterion and falls into no pitfall."""
        if not answer:
            return Verdict((0,) * len(self._items), 0.0, 0)
        return self._judge.judge(
            Case(self._question, answer, self._items, tuple(claims(answer)), self._sources)
        )

    def _score(self, reason: str, answer: str, block: bool, verdict: Verdict, judge_s: float) -> None:
        rules, cited = self._rules, cited_ids(answer)
        weights = [item.weight for item in self._items]
        grades = verdict.grades
        rubric = reward.rubric_score(grades, weights) if grades is not None else None
        form = reward.citation_format(cited, self._sources)
        n_calls = int(self._counts["tool_calls"])
        parts = (
            rubric or 0.0,
            reward.citation_reward(form, verdict.f1),
            reward.format_reward(has_answer=block, has_cite=bool(cited), has_tool_call=n_calls > 0),
            reward.search_reward(n_calls),
        )
        penalty = reward.length_penalty(
            len(answer), soft=rules.length_soft, hard=rules.length_hard, largest=rules.length_penalty
        )
        numbers = {
            **dict(zip(("rubric", "citation", "format", "search"), parts, strict=True)),
            "citation_format": form,
            "citations": float(len(cited)),
            "answer_chars": float(len(answer)),
            "length_penalty": penalty,
            "turns": float(self._turns),
            "judge_calls": float(verdict.calls),
            "judge_s": judge_s,
            "judge_fault": float(bool(verdict.fault)),
            "citation_fault": float(bool(verdict.citation_fault)),
            **self._counts,
            **{f"fault_{kind}": n for kind, n in self._faults.items()},
        } | ({} if verdict.f1 is None else {"citation_f1": verdict.f1})
        solved = rubric is not None and rubric >= rules.solved_from
        self._result = Result(reward.total_reward(parts, rules.weights, penalty), solved, reason, numbers)
        counts = reward.buckets(grades, weights) if grades is not None else None
        self._terminal = texts.terminal(reason, rubric, counts)


def _counts(result: ToolResult, refused: int) -> dict[str, float]:
    """What one turn's calls add to the episode's counts."""
    return {
        "tool_calls": int(result.executed),
        "tool_errors": int(not result.executed) + refused,
        "tool_failures": int(result.failed),
        "cached": int(result.cached),
        "tool_s": result.seconds,
    }
