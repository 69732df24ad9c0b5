"""A grader and a reflector for a policy too small to write JSON: the policy fills in a form.

SmolLM2-135M, asked for App. E's reports in free form, wrote none in 32 that could be read. Here the prompts are the
same, but the reply is put together from fixed pieces of JSON, and the policy only decides what stands in the gaps:

- a score among 1..5, a pivot among null and the episode's turns, the step of a retry among its turns: drawn from the
  policy's own probabilities p(label | prompt, form so far), taken relative to the allowed labels, at the temperature
  of the config;
- the suggestion: sampled freely up to a quotation mark, a line break or the limit.

Deviations from RLDS App. E:

- `trajectory_outcome`, `root_cause_analysis`, `assessment` and `trajectory_summary` are not written: nothing is
  reasoned before it is decided, and a decision can never be unreadable.
- Scores and pivots do not see each other: each of the 2K values has a form of its own behind the same prompt, which
  names the subtask and the field. So one pass over a prompt gives all of them.
- A suggestion that says nothing or copies App. E's placeholder (SmolLM2: 18 of 32 at temperature 0.7, 6 of 32 at 1.0)
  does not count: four are drawn for every case, and the first that says something is taken. If none does there is no
  retry, counted as `no_suggestion`. Token counts hold what is kept, not the tries beside it.

Runs say that they were made so: `method.grader: form`, `method.reflector: form`.

A label is compared together with the character that ends it ("1}" and "10}"), so that none begins with another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from racelab.experiments.episodes import Case, Episode, Grading, Reflection, Subtask
from racelab.experiments.errors import ConfigError
from racelab.experiments.models.grading import GRADES, check_room
from racelab.experiments.models.prompts import rlds
from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.reflection import SUGGESTION_CHARS, PolicyReflector, clean_addition
from racelab.experiments.models.text import strip_thinking, words
from racelab.experiments.models.trajectory import fitted_prompt, sub_tasks_section
from racelab.experiments.ports import LanguageModel
from racelab.experiments.types import GenerationRequest, Sample

if TYPE_CHECKING:
    import torch

SUGGESTION_TOKENS = 48
"""A suggestion is cut there, or at `max_tokens` if that is less. Ours: the model goes on until something stops it."""

Ids = tuple[int, ...]
Gap = tuple[Ids, Sequence[Ids]]
"""What stands before a gap, behind the prefix, and the labels that may fill it."""

_GRADES_OPEN = '{"sub_task_grades": [{"sub_task":'
_SAID_OPEN = '{"improvement_suggestion": "'
_STEP = '", "retry_from_step":'
_STOPS = ('"', "\n")
_STOP = re.compile(r'["\n]')
_LAST_TURN = 999  # its label is as long as that of any turn
_TRIES = 4  # suggestions drawn at once for a case; the first that says something counts
_CHUNK = 16  # cases reflected on at once


class FormGrader:
    """The trained model grades by filling in a form; implements `ports.Grader`."""

    def __init__(self, model: LanguageModel, subtasks: Sequence[Subtask], *, temperature: float) -> None:
        """Keeps the parts.

        Args:
            model: as it is at each call, not a copy.
            subtasks: the task's taxonomy [K].
            temperature: p(label) is raised to 1/temperature; 0 takes the likeliest label.

        Raises:
            ConfigError: the window holds no trajectory beside the form.
        """
        self._model, self._subtasks, self._temperature = model, tuple(subtasks), temperature
        self._section = sub_tasks_section(self._subtasks)
        self._open = tuple(model.encode(_GRADES_OPEN))
        self._score_frames, self._pivot_frames = (
            [tuple(model.encode(f' {json.dumps(s.name)}, "{key}":')) for s in self._subtasks]
            for key in ("score", "pivot_step")
        )
        self._scores = labels(model, GRADES, ",")
        frames = max(map(len, (*self._score_frames, *self._pivot_frames)))
        label = max(map(len, (*self._scores, *labels(model, [_LAST_TURN, None], "}"))))
        self._room = len(self._open) + frames + label
        _check(model, rlds.GRADING, self._room, sub_tasks_section=self._section)

    def grade(self, episodes: Sequence[Episode], rng: torch.Generator) -> list[Grading]:
        """One form per episode, `ok` or `too_long`, never unreadable.

        `text` is the form as one JSON object and `n_tokens` its ids; 2K of its values were drawn, the rest was given.
        """
        prompts = [
            fitted_prompt(self._model, rlds.GRADING, e, self._room, sub_tasks_section=self._section)
            for e in episodes
        ]
        forms = [
            ((*prompt, *self._open), self._gaps(episode))
            for episode, prompt in zip(episodes, prompts, strict=True)
            if prompt is not None
        ]
        filled = iter(fill(self._model, forms, self._temperature, rng))
        none = (None,) * len(self._subtasks)
        return [
            Grading(None, none, "too_long") if prompt is None else self._grading(next(filled), episode)
            for episode, prompt in zip(episodes, prompts, strict=True)
        ]

    def _gaps(self, episode: Episode) -> list[Gap]:
        """K scores, then K pivots."""
        turns = labels(self._model, _pivots(episode), "}")
        scores: list[Gap] = [(frame, self._scores) for frame in self._score_frames]
        return scores + [(frame, turns) for frame in self._pivot_frames]

    def _grading(self, filled: Sequence[int], episode: Episode) -> Grading:
        """Of the labels' indices [2K]."""
        n_subtasks = len(self._subtasks)
        grades = tuple(list(GRADES)[j] for j in filled[:n_subtasks])
        pivots = tuple(_pivots(episode)[j] for j in filled[n_subtasks:])
        rows = [
            {"sub_task": s.name, "score": grade, "pivot_step": pivot}
            for s, grade, pivot in zip(self._subtasks, grades, pivots, strict=True)
        ]
        text = json.dumps({"sub_task_grades": rows})
        return Grading(grades, pivots, text=text, n_tokens=len(self._model.encode(text)))


class FormReflector(PolicyReflector):
    """The trained model reflects by filling in a form; implements `ports.Reflector`. Prompts: `PolicyReflector`.

    Deviation: `Reflection.tokens` are the ids of the whole form and the end token, the fixed pieces included, so the
    reflection NLL of App. B also teaches the form. Where the suggestion is not what was sampled (white space at its
    ends, something that `clean_addition` changed), its ids are those of the clean text.
    """

    def __init__(
        self,
        model: LanguageModel,
        subtasks: Sequence[Subtask],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        single_pass: bool,
    ) -> None:
        """Keeps the parts.

        Args:
            model: as it is at each call, not a copy.
            subtasks: the task's taxonomy [K].
            max_tokens: of a suggestion; above `SUGGESTION_TOKENS` it counts as that.
            temperature: of the suggestion and of the step; 0 is greedy.
            top_p: nucleus of the suggestion.
            single_pass: never show grades (App. E, R3L_REFLECTION_PROMPT).

        Raises:
            ConfigError: the window holds no trajectory beside the form.
        """
        self._limit = min(max_tokens, SUGGESTION_TOKENS)
        self._open, self._step = tuple(model.encode(_SAID_OPEN)), tuple(model.encode(_STEP))
        self._end = (model.eos_id,) if model.eos_id >= 0 else ()
        step = max(map(len, labels(model, [_LAST_TURN], "}")))
        room = len(self._open) + self._limit + len(self._step) + step + len(self._end)
        for template in (rlds.REFLECTION, rlds.GRADED_REFLECTION):
            _check(model, template, room, **dict.fromkeys(template.slots - {"trajectory_summary"}, ""))
        super().__init__(
            model,
            subtasks,
            max_tokens=room,
            temperature=temperature,
            top_p=top_p,
            single_pass=single_pass,
            prompt_rewrite=False,
        )

    def reflect(self, cases: Sequence[Case], rng: torch.Generator) -> list[Reflection]:
        """All suggestions, then all steps, in the order of the cases: `ok`, `no_suggestion` or `too_long`."""
        prompts = [self._prompt(case) for case in cases]
        samples = iter(self._samples([p for p in prompts if p is not None], rng))
        found: list[Reflection] = []
        forms: dict[int, _Form] = {}
        for i, (case, prompt) in enumerate(zip(cases, prompts, strict=True)):
            found.append(Reflection("", None, "too_long"))
            if prompt is None:
                continue
            sample, addition = next(samples)
            if not addition:
                text, tokens = _SAID_OPEN + sample.text, (*self._open, *sample.tokens)
                found[i] = Reflection("", None, "no_suggestion", text, prompt, tokens)
                continue
            form = _Form(
                prompt,
                (*self._open, *self._said(sample, addition), *self._step),
                addition,
                labels(self._model, range(len(case.episode.turns)), "}"),
            )
            if (
                form.longest + len(self._end) <= self._model.window
            ):  # clean text can have more ids than sampled
                forms[i] = form
        gaps = [((*f.prompt, *f.filled), [((), f.steps)]) for f in forms.values()]
        drawn = fill(self._model, gaps, self._sampling.temperature, rng)
        for (i, form), (step,) in zip(forms.items(), drawn, strict=True):
            found[i] = form.reflection(step, self._end)
        return found

    def _samples(self, prompts: Sequence[Ids], rng: torch.Generator) -> list[tuple[Sample, str]]:
        """What the model puts behind the opening quotation mark, the stop included, and what that says."""
        s = self._sampling
        requests = [
            GenerationRequest((*p, *self._open), _TRIES, self._limit, s.temperature, s.top_p, _STOPS)
            for p in prompts
        ]
        chunks = [requests[i : i + _CHUNK] for i in range(0, len(requests), _CHUNK)]
        tries = [
            [(sample, suggestion(sample.text)) for sample in row]
            for chunk in chunks
            for row in self._model.generate(chunk, rng)
        ]
        return [next((t for t in row if t[1]), row[0]) for row in tries]

    def _said(self, sample: Sample, addition: str) -> Ids:
        """Ids of the suggestion inside its quotation marks: as sampled, if they say exactly that."""
        body = json.dumps(addition, ensure_ascii=False)[1:-1]
        sampled = sample.tokens[:-1] if sample.finished else sample.tokens
        return sampled if self._model.decode(sampled) == body else tuple(self._model.encode(body))


@dataclass(frozen=True, slots=True)
class _Form:
    """A reflection whose step is still open: prompt, ids of the form so far, suggestion, labels of the steps."""

    prompt: Ids
    filled: Ids
    addition: str
    steps: Sequence[Ids]

    @property
    def longest(self) -> int:
        """Ids with the longest step."""
        return len(self.prompt) + len(self.filled) + max(map(len, self.steps))

    def reflection(self, step: int, end: Ids) -> Reflection:
        """The whole form, closed by `end`."""
        value = {"improvement_suggestion": self.addition, "retry_from_step": step}
        text = json.dumps(value, ensure_ascii=False)
        tokens = (*self.filled, *self.steps[step], *end)
        return Reflection(self.addition, step, text=text, prompt=self.prompt, tokens=tokens)


def labels(model: LanguageModel, values: Iterable[int | None], end: str) -> list[Ids]:
    """Ids of each value as JSON writes it, with the space before it and the character that ends it."""
    return [tuple(model.encode(f" {json.dumps(value)}{end}")) for value in values]


def fill(
    model: LanguageModel,
    forms: Sequence[tuple[Ids, Sequence[Gap]]],
    temperature: float,
    rng: torch.Generator,
) -> list[list[int]]:
    """Draws a label for each gap, all gaps independently.

    Each form is a call of `logprobs` of its own: on a CPU that is faster than many at once (2.1 against 3.3 s a form,
    SmolLM2, prefix 1,020), and what a form gets cannot depend on its neighbours.

    p(label l of a gap) = exp(s_l / temperature) / Σ_m exp(s_m / temperature), where s_l is the log-probability of the
    label's ids behind prefix and frame, Σ_t log p(l_t | prefix, frame, l_<t).

    Args:
        model: scores.
        forms: prefix and gaps; a gap is (frame, labels), no label the beginning of another.
        temperature: 0 takes the likeliest label.
        rng: one draw per gap, in order.

    Returns:
        Per form the chosen label's index for each gap.
    """
    chosen = []
    for prefix, gaps in forms:
        tails = [(*frame, *label) for frame, known in gaps for label in known]
        rest = iter(model.logprobs([(prefix, tails)])[0])
        sums = [[float(next(rest)[len(frame) :].sum()) for _ in known] for frame, known in gaps]
        chosen.append([_draw(values, temperature, rng) for values in sums])
    return chosen


def suggestion(text: str) -> str:
    """What a sampled suggestion says, ready for a context; "" if it says nothing or is App. E's placeholder.

    Args:
        text: the inside of a JSON string, up to its end or beyond. JSON's escapes are undone where they are valid; an
            escaped quotation mark ends it as a bare one does.
    """
    inside = _STOP.split(text, maxsplit=1)[0].rstrip("\\")
    with suppress(ValueError):  # a lone backslash: taken as it stands
        inside = json.loads(f'"{inside}"', strict=False)
    addition = clean_addition(strip_thinking(inside), SUGGESTION_CHARS)
    return "" if words(addition) == words(rlds.PLACEHOLDER_SUGGESTION) else addition


def _draw(values: Sequence[float], temperature: float, rng: torch.Generator) -> int:
    """An index with probability softmax(values / temperature)."""
    import torch

    scores = torch.tensor(values, dtype=torch.float64)
    if not temperature:
        return int(scores.argmax())
    return int(torch.multinomial(torch.softmax(scores / temperature, 0), 1, generator=rng))


def _pivots(episode: Episode) -> list[int | None]:
    """What may be a pivot: null and every turn."""
    return [None, *range(len(episode.turns))]


def _check(model: LanguageModel, template: RoleTemplate, room: int, **fields: str) -> None:
    """As `check_room`, but no setting makes a form shorter."""
    try:
        check_room(model, template, room, **fields)
    except ConfigError as e:
        raise ConfigError(
            f"the model's window of {model.window} tokens holds no trajectory beside the form of {template.name}; "
            "choose a model with a longer one"
        ) from e
