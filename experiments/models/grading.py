"""The policy as grader of its own episodes (RLDS §3.2, App. E), and the arm with random grades.

A reply is a grade only if it says so without doubt. `parse_grading` takes the JSON object with `sub_task_grades` from
the reply; thoughts, fences and words around it do not matter. Then

- every subtask stands there exactly once; names are compared without regard to case and white space at the ends;
  rows with other names are ignored;
- a score is a whole number in 1..5, and so are 4.0 and "4" (App. E shows the value as a string), never true;
- a pivot is null or "null", or a whole number >= 0, again as 3, 3.0 or "3". Anything else, an absent pivot too, is a
  bad pivot: it counts as none and is counted. The grades stay.

Whatever fails that gives no grades at all: nothing is filled in and nothing is clipped. Two objects that say different
things (the model goes on with another episode, or copies the format first) are `bad_json`. Of two equal keys in one
object the last one counts, as for every JSON reader.

Open in the paper: how often a grader is asked again. Here once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from racelab.experiments.episodes import Episode, Grading, Subtask
from racelab.experiments.errors import ConfigError
from racelab.experiments.models.generator import SamplingSettings
from racelab.experiments.models.prompts.rlds import GRADING
from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.rubric import json_values
from racelab.experiments.models.text import strip_thinking
from racelab.experiments.models.trajectory import (
    cut_middle,
    fitted_prompt,
    harmless,
    room_for,
    sub_tasks_section,
)
from racelab.experiments.ports import LanguageModel
from racelab.experiments.types import GenerationRequest, Sample

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

GRADES = {1: "critical failure", 2: "poor", 3: "adequate", 4: "good", 5: "excellent"}
"""The scale of App. E."""

_LIST = "sub_task_grades"
_CHUNK = 64  # prompts decoded at once; a step of the paper grades hundreds
_LEAST_ROOM = 64  # tokens for the trajectory; with less every prompt would be too long
_LAST_TURN = 10**9  # a larger pivot names no turn of any episode, and would not fit an array
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_NULLS = ("null", "none")
_THOUGHT = re.compile(r"</?think(?:ing)?>", re.IGNORECASE)
_ASSESSMENT_CHARS = 300


class PolicyGrader:
    """The trained model grades; implements `ports.Grader`."""

    def __init__(
        self,
        model: LanguageModel,
        subtasks: Sequence[Subtask],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
    ) -> None:
        """Keeps the parts.

        Args:
            model: as it is at each call, not a copy.
            subtasks: the task's taxonomy [K].
            max_tokens: of a reply.
            temperature: of a reply; 0 is greedy.
            top_p: nucleus.

        Raises:
            ConfigError: the window holds no trajectory beside `max_tokens`.
        """
        self._model, self._subtasks = model, tuple(subtasks)
        self._sampling = SamplingSettings(max_tokens, temperature, top_p)
        self._section = sub_tasks_section(self._subtasks)
        check_room(model, GRADING, max_tokens, sub_tasks_section=self._section)

    def grade(self, episodes: Sequence[Episode], rng: torch.Generator) -> list[Grading]:
        """One reply per episode; the longest trajectories are shortened, see `trajectory_summary`."""
        room = self._sampling.max_tokens
        prompts = [
            fitted_prompt(self._model, GRADING, e, room, sub_tasks_section=self._section) for e in episodes
        ]
        replies = ask(self._model, prompts, self._sampling, rng)
        return [self._graded(reply) for reply in replies]

    def _graded(self, reply: Sample | None) -> Grading:
        if reply is None:
            return Grading(None, (None,) * len(self._subtasks), "too_long")
        grading = parse_grading(reply.text, self._subtasks, reply.finished)
        return replace(grading, n_tokens=len(reply.tokens))


class RandomGrader:
    """Uniform grades in 1..5 and uniform pivots among the episode's turns; implements `ports.Grader`.

    The arm `rlds-random-grades`: what is left of SDAE where its grades say nothing.
    """

    def __init__(self, subtasks: Sequence[Subtask]) -> None:
        """Keeps the number K of subtasks."""
        self._k = len(subtasks)

    def grade(self, episodes: Sequence[Episode], rng: torch.Generator) -> list[Grading]:
        """Draws for each episode first K grades, then K pivots."""
        import torch

        def draw(low: int, high: int) -> tuple[int, ...]:
            return tuple(int(v) for v in torch.randint(low, high, (self._k,), generator=rng))

        return [Grading(draw(1, 6), draw(0, len(episode.turns))) for episode in episodes]


def parse_grading(text: str, subtasks: Sequence[Subtask], finished: bool = True) -> Grading:
    """Reads a grader's reply by the rules at the top of this file. Never raises.

    Args:
        text: the reply.
        subtasks: [K].
        finished: the reply ended by itself; an unreadable one that did not is `cut`.

    Returns:
        `ok` with K grades and K pivots (`bad_pivots` of them unreadable), or no grades and the reason.
    """
    value = one_reading(text, {_LIST}, lambda found: _read(found, subtasks))
    if value is None:
        value = Grading(None, (None,) * len(subtasks), "bad_json" if finished else "cut")
    return replace(value, text=text)


def grading_section(grading: Grading, subtasks: Sequence[Subtask]) -> str:
    """`{grading_section}` of App. E: per subtask its grade, its pivot and the grader's sentence, if it wrote one.

    Args:
        grading: with grades.
        subtasks: [K].

    Raises:
        ValueError: there are no grades to show.
    """
    if grading.grades is None:
        raise ValueError("this episode has no grades; take the prompt without them")
    said = {
        name: row.get("assessment")
        for value in objects_with(grading.text, {_LIST})
        for name, row in _rows(value[_LIST])
    }
    lines = ["## Grades"]
    for k, (s, grade, pivot) in enumerate(zip(subtasks, grading.grades, grading.pivots, strict=True), 1):
        step = "no pivotal step" if pivot is None else f"pivotal step {pivot}"
        lines.append(f"{k}. {s.name} ({s.description}): {grade}/5 ({GRADES[grade]}), {step}")
        if isinstance(sentence := said.get(_key(s.name)), str) and sentence.strip():
            lines.append(f"   {cut_middle(' '.join(harmless(sentence).split()), _ASSESSMENT_CHARS)}")
    return "\n".join(lines)


def check_room(model: LanguageModel, template: RoleTemplate, max_tokens: int, **fields: str) -> None:
    """Raises ConfigError if the window holds no trajectory to speak of beside `max_tokens` of reply."""
    room = room_for(model, template, max_tokens, **fields)
    if room < _LEAST_ROOM:
        raise ConfigError(
            f"method.reflect.max_tokens={max_tokens}: with the prompt {template.name} it fills the model's window of "
            f"{model.window}; take at most {max(max_tokens + room - _LEAST_ROOM, 0)}"
        )


def ask(
    model: LanguageModel,
    prompts: Sequence[tuple[int, ...] | None],
    sampling: SamplingSettings,
    rng: torch.Generator,
) -> list[Sample | None]:
    """One reply to each prompt, decoded in chunks of 64 in their order; None where there is no prompt."""
    asked = [i for i, prompt in enumerate(prompts) if prompt is not None]
    replies: list[Sample | None] = [None] * len(prompts)
    for start in range(0, len(asked), _CHUNK):
        chunk = asked[start : start + _CHUNK]
        requests = [
            GenerationRequest(prompt, 1, sampling.max_tokens, sampling.temperature, sampling.top_p)
            for i in chunk
            if (prompt := prompts[i]) is not None
        ]
        for i, samples in zip(chunk, model.generate(requests, rng), strict=True):
            replies[i] = samples[0]
    return replies


def one_reading(text: str, keys: set[str], read: Callable[[dict[str, object]], T]) -> T | None:
    """What a reply's JSON says; None if it has no object with one of `keys`, or several that read differently."""
    readings = [read(value) for value in objects_with(text, keys)]
    return readings[0] if readings and all(r == readings[0] for r in readings) else None


def objects_with(text: str, keys: set[str]) -> list[dict[str, object]]:
    """The outermost JSON objects of a reply that have at least one of `keys`, in order; thoughts do not count.

    A reply about an agent that thinks may quote its tags. So where nothing is left outside the thoughts, and all tags
    lie inside a JSON object that opened before the first of them, the reply is read with them.
    """
    for body in (strip_thinking(text), _quoting(text)):
        found = [v for v in json_values(body) if isinstance(v, dict) and not keys.isdisjoint(v)]
        if found:
            return found
    return []


def whole_number(value: object) -> int | None:
    """The value as an integer if it is a whole number: 3, 3.0 or "3"; None otherwise, for true and false too."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value)
    return None


def _quoting(text: str) -> str:
    """The text if all its thinking tags lie in one JSON object, else nothing."""
    tags = [found.start() for found in _THOUGHT.finditer(text)]
    if not tags or tags[-1] > text.rfind("}"):
        return ""
    before = text[: tags[0]]
    return text if "{" in before and next(json_values(before), None) is None else ""


def _read(value: Mapping[str, object], subtasks: Sequence[Subtask]) -> Grading:
    """One object's grading, without its text."""
    none = (None,) * len(subtasks)
    listed = value.get(_LIST)
    if not isinstance(listed, list):
        return Grading(None, none, "bad_json")
    rows: dict[str, list[Mapping[str, object]]] = {_key(s.name): [] for s in subtasks}
    for name, row in _rows(listed):
        rows.get(name, []).append(row)
    if any(len(found) != 1 for found in rows.values()):
        return Grading(None, none, "incomplete")
    ordered = [rows[_key(s.name)][0] for s in subtasks]
    scores = [whole_number(row.get("score")) for row in ordered]
    grades = tuple(s for s in scores if s is not None and s in GRADES)
    if len(grades) != len(scores):
        return Grading(None, none, "bad_grade")
    pivots = [_pivot(row) for row in ordered]
    return Grading(grades, tuple(p for p, _ in pivots), bad_pivots=sum(bad for _, bad in pivots))


def _rows(listed: object) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(name to compare, row) of all rows that name a subtask."""
    for row in listed if isinstance(listed, list) else ():
        if isinstance(row, dict) and isinstance(name := row.get("sub_task"), str):
            yield _key(name), row


def _key(name: str) -> str:
    return name.strip().casefold()


def _pivot(row: Mapping[str, object]) -> tuple[int | None, bool]:
    """(turn or None, whether it could not be read)."""
    value = row.get("pivot_step", False)  # absent is not null
    if value is None or (isinstance(value, str) and value.strip().casefold() in _NULLS):
        return None, False
    turn = whole_number(value)
    return (turn, False) if turn is not None and 0 <= turn <= _LAST_TURN else (None, True)
