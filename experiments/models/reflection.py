"""The policy as reflector on its failures (RLDS §3.2, App. E; R3L's report), and ERL's rewrite of the system prompt.

`improvement_suggestion` goes into the context of the retry, `retry_from_step` says from which turn on it is sampled. A
report without a suggestion or without a usable step gives no retry, and the reason is counted; a step is never clipped.
A copy of App. E's own placeholder is no suggestion. Where a failure has no readable grades, the prompt is the
single-pass one: there is nothing to show.

What enters a context is made harmless (`trajectory.harmless`) and capped: a suggestion at 1,000 characters, a whole
prompt at 4,000, cut behind a word. The caps are ours; a suggestion has to fit the system prompt's budget.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from racelab.experiments.episodes import Case, Reflection, ReflectStatus, Subtask
from racelab.experiments.models.generator import SamplingSettings
from racelab.experiments.models.grading import ask, check_room, grading_section, one_reading, whole_number
from racelab.experiments.models.prompts import rlds
from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.text import words
from racelab.experiments.models.trajectory import fitted_prompt, harmless, room_for, trajectory_summary
from racelab.experiments.ports import LanguageModel

if TYPE_CHECKING:
    import torch

SUGGESTION_CHARS = 1_000
"""Cap of a suggestion."""

PROMPT_CHARS = 4_000
"""Cap of a rewritten system prompt."""

_KEYS = {"improvement_suggestion", "retry_from_step"}
_BLOCK = re.compile(
    r"<improved_prompt>((?:(?!<improved_prompt>).)*?)</improved_prompt>", re.IGNORECASE | re.DOTALL
)
_THOUGHT = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n){2,}")


class PolicyReflector:
    """The trained model reflects; implements `ports.Reflector`."""

    def __init__(
        self,
        model: LanguageModel,
        subtasks: Sequence[Subtask],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        single_pass: bool,
        prompt_rewrite: bool,
    ) -> None:
        """Keeps the parts.

        Args:
            model: as it is at each call, not a copy.
            subtasks: the task's taxonomy [K].
            max_tokens: of a reply.
            temperature: of a reply; 0 is greedy.
            top_p: nucleus.
            single_pass: never show grades (App. E, R3L_REFLECTION_PROMPT).
            prompt_rewrite: ask for a whole system prompt instead of a report (ERL); retries then begin at turn 0.

        Raises:
            ConfigError: the window holds no trajectory beside `max_tokens`.
        """
        self._model, self._subtasks = model, tuple(subtasks)
        self._sampling = SamplingSettings(max_tokens, temperature, top_p)
        self._single_pass, self._rewrite = single_pass, prompt_rewrite
        template = rlds.REWRITE if prompt_rewrite else rlds.REFLECTION
        check_room(model, template, max_tokens, **dict.fromkeys(template.slots - {"trajectory_summary"}, ""))

    def reflect(self, cases: Sequence[Case], rng: torch.Generator) -> list[Reflection]:
        """One reply per case; long trajectories are shortened, see `trajectory_summary`."""
        prompts = [self._prompt(case) for case in cases]
        replies = ask(self._model, prompts, self._sampling, rng)
        reflections = []
        for case, prompt, reply in zip(cases, prompts, replies, strict=True):
            if prompt is None or reply is None:
                reflections.append(Reflection("", None, "too_long"))
                continue
            if self._rewrite:
                parsed = parse_rewrite(reply.text, reply.finished)
            else:
                parsed = parse_reflection(reply.text, len(case.episode.turns), reply.finished)
            reflections.append(replace(parsed, prompt=prompt, tokens=reply.tokens))
        return reflections

    def _template(self, case: Case) -> RoleTemplate:
        if self._rewrite:
            return rlds.REWRITE
        if self._single_pass or case.grading is None or case.grading.grades is None:
            return rlds.REFLECTION
        return rlds.GRADED_REFLECTION

    def _prompt(self, case: Case) -> tuple[int, ...] | None:
        """Ids up to the reply, or None if they do not fit. The better attempt gets at most half of the room."""
        template, room = self._template(case), self._sampling.max_tokens
        fields = {"memory_section": memory_section(case.memory), "contrastive_section": ""}
        if "grading_section" in template.slots and case.grading is not None:
            fields["grading_section"] = grading_section(case.grading, self._subtasks)
        if "system_section" in template.slots:
            fields["system_section"] = harmless(case.episode.system)
        if case.best is not None:
            free = room_for(self._model, template, room, **fields)
            shown = trajectory_summary(self._model, case.best, free // 2)
            fields["contrastive_section"] = contrastive_section(shown, bool(case.memory))
        return fitted_prompt(self._model, template, case.episode, room, **fields)


def parse_reflection(text: str, n_turns: int, finished: bool = True) -> Reflection:
    """Reads R3L's report from a reply. Never raises.

    Args:
        text: the reply; thoughts, fences and words around the JSON object do not matter.
        n_turns: of the failed episode; the step is below it.
        finished: the reply ended by itself; an unreadable one that did not is `cut`.

    Returns:
        `ok` with a suggestion and a turn, or no retry and the first reason that holds: bad_json or cut (no object with
        one of the two keys, or several that say different things), no_suggestion, bad_step, out_of_range.
    """
    reading = one_reading(text, _KEYS, lambda found: _read(found, n_turns))
    return replace(reading or _refused("bad_json" if finished else "cut"), text=text)


def parse_rewrite(text: str, finished: bool = True) -> Reflection:
    """Reads ERL's replacement of the system prompt: the last `<improved_prompt>` outside thoughts. Never raises.

    Args:
        text: the reply. The prompt itself may speak of thinking tags.
        finished: as in `parse_reflection`.

    Returns:
        `ok` with the prompt as `addition` and turn 0, or no retry and no_suggestion or cut.
    """
    spoken = [m[1] for m in _BLOCK.finditer(text) if not _thinking_at(text, m.start())]
    prompt = clean_addition(spoken[-1], PROMPT_CHARS) if spoken else ""
    if prompt:
        return Reflection(prompt, 0, text=text)
    return replace(_refused("no_suggestion" if finished or spoken else "cut"), text=text)


def clean_addition(text: str, chars: int) -> str:
    """What may enter a context: harmless, without outer white space and rows of blank lines, at most `chars` long.

    Args:
        text: any.
        chars: a longer text is cut behind the last word that fits, or in the first word if that one is too long.

    Returns:
        "" if there is no word in it.
    """
    text = _BLANK_LINES.sub("\n\n", harmless(text)).strip()
    if len(text) > chars:
        whole_words = text[chars].isspace() or text[chars - 1].isspace()
        text = text[:chars].rstrip() if whole_words else text[:chars].rsplit(maxsplit=1)[0]
    return text if words(text) else ""


def memory_section(memory: Sequence[str]) -> str:
    """`{memory_section}`: earlier suggestions, oldest first; "" without any. The form is ours."""
    if not memory:
        return ""
    lines = [f"- {' '.join(clean_addition(m, SUGGESTION_CHARS).split())}" for m in memory]
    return "\n".join(["## Earlier suggestions on this task", *lines, ""])


def contrastive_section(summary: str | None, after_memory: bool = False) -> str:
    """`{contrastive_section}`: a better attempt at the same task; "" without one. The form is ours.

    Args:
        summary: of that attempt, harmless.
        after_memory: the section follows another one.
    """
    if not summary:
        return ""
    return "\n" * after_memory + f"## A better attempt at the same task\n{summary}\n"


def _read(value: Mapping[str, object], n_turns: int) -> Reflection:
    """One object's report, without its text."""
    said = value.get("improvement_suggestion")
    addition = clean_addition(said, SUGGESTION_CHARS) if isinstance(said, str) else ""
    if not addition or words(addition) == words(rlds.PLACEHOLDER_SUGGESTION):
        return _refused("no_suggestion")
    step = whole_number(value.get("retry_from_step"))
    if step is None or step < 0:
        return _refused("bad_step")
    return Reflection(addition, step) if step < n_turns else _refused("out_of_range")


def _refused(status: ReflectStatus) -> Reflection:
    """No retry."""
    return Reflection("", None, status)


def _thinking_at(text: str, position: int) -> bool:
    """Whether a thought is open there."""
    tags = [found[1] for found in _THOUGHT.finditer(text, 0, position)]
    return bool(tags) and tags[-1] == ""
