"""Who rates: the model under test by its rubric and a frozen judge, or a scalar reward model.

Three outcomes of a call are kept apart: a score, a reply without one (NaN, marked as the benchmark's authors do it),
and a call that nobody answered (the example is lost and asked again when the evaluation goes on).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from racelab.experiments.evaluation.preference.rating import Item, Plan, Rating
from racelab.experiments.evaluation.types import Answer, Ask, Subject
from racelab.experiments.models.judge import redrawn
from racelab.experiments.models.prompts.template import RoleTemplate
from racelab.experiments.models.rubric import ParsedRubric, RubricSettings, format_lines, parse_rubric
from racelab.experiments.models.text import defang, strip_thinking
from racelab.experiments.ports import Judge
from racelab.experiments.types import FloatArray, JudgeItem, JudgeReply, JudgeScores, Prompt, Rubric, Sample

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Writing:
    """How the model under test writes a rubric.

    Attributes:
        template: of the rubric role.
        parsing: what counts as a usable rubric; a last try that is none is used as raw text.
        max_tokens: of a rubric, thinking included.
        temperature: where a rubric is asked for once.
        top_p: nucleus.
        retry_temperatures: of all tries, the first included, where a benchmark asks again; (): once at `temperature`.
        budgets: benchmark -> a smaller bound on `max_tokens`.
        thinking: `Ask.thinking`.
    """

    template: RoleTemplate
    parsing: RubricSettings
    max_tokens: int
    temperature: float
    top_p: float
    retry_temperatures: tuple[float, ...] = ()
    budgets: Mapping[str, int] = field(default_factory=dict)
    thinking: bool | None = None

    def ask(self, item: Item, temperature: float, purpose: str) -> Ask:
        """The question; the responses are no part of it."""
        return Ask(
            self.template.render(prompt=defang(item.prompt)),
            max_tokens=min(self.max_tokens, self.budgets.get(purpose, self.max_tokens)),
            temperature=temperature,
            top_p=self.top_p,
            system=self.template.system,
            stop=self.template.stop,
            layout=self.template.layout,
            thinking=self.thinking,
        )


@dataclass(slots=True)
class _Pending:
    """An item on its way: what was written for it so far, and the rubric that will be used."""

    rows: list[Row] = field(default_factory=list)
    rubric: Rubric | None = None


class RubricRater:
    """One rubric per prompt, then one judge call per response and game; implements `Rater`."""

    def __init__(
        self,
        subject: Subject,
        judge: Judge,
        writing: Writing,
        *,
        name: str,
        together: int = 1,
    ) -> None:
        """Keeps the parts.

        Args:
            subject: writes the rubrics; the caller closes it.
            judge: frozen, with its scales.
            writing: see there.
            name: of the judge, short.
            together: items judged in one call. More than one only for a judge that answers each response alone, such as
                a server: in this process the batch is part of the draw.
        """
        self._subject, self._judge, self._writing = subject, judge, writing
        self.judge, self._together = name, together

    def describe(self) -> dict[str, Any]:
        """Judge, template and sampling of the rubrics (JSON values)."""
        w = self._writing
        template = {"name": f"{w.template.name}/{w.template.version}", "sha": w.template.sha}
        how = {"max_tokens": w.max_tokens, "temperature": w.temperature, "top_p": w.top_p}
        return {"kind": "rubric", "judge": self._judge.describe(), "template": template, "rubric": how}

    def rate(
        self, items: Sequence[Item], wanted: Sequence[int], plan: Plan, purpose: str
    ) -> Iterator[tuple[int, Rating]]:
        """See the protocol. The tries of a rubric are rounds over all items that still lack one."""
        w = self._writing
        temperatures = (plan.retry and w.retry_temperatures) or (w.temperature,)
        pending = {i: _Pending() for i in wanted}
        todo = list(wanted)
        for number, temperature in enumerate(temperatures):
            asks = [w.ask(item, temperature, purpose) for item in items]
            again: list[int] = []
            ready: list[int] = []
            for i, (answer,) in self._subject.answers(asks, todo, f"{purpose}:rubric:{number}"):
                if answer.text is None:
                    rows = (*pending.pop(i).rows, _rubric_row(number, answer, None))
                    yield i, Rating((), answer.error or "no rubric came", rows)
                    continue
                parsed = self._parse(answer.text, items[i])
                pending[i].rows.append(_rubric_row(number, answer, parsed))
                if not parsed.valid and number + 1 < len(temperatures):
                    again.append(i)
                    continue
                pending[i].rubric = parsed.rubric
                ready.append(i)
                if len(ready) == self._together:
                    yield from self._rated(items, ready, pending, plan)
                    ready.clear()
            if ready:
                yield from self._rated(items, ready, pending, plan)
            todo = sorted(again)
            if not todo:
                return

    def _parse(self, text: str, item: Item) -> ParsedRubric:
        return parse_rubric(text, self._writing.parsing, item.prompt)

    def _rated(
        self, items: Sequence[Item], ready: Sequence[int], pending: Mapping[int, _Pending], plan: Plan
    ) -> list[tuple[int, Rating]]:
        """The ratings of these items under their rubrics, game by game."""
        asked = [_judge_item(items[i], pending[i].rubric) for i in ready]
        games: list[JudgeScores] = []
        for game in range(plan.games):
            judge = redrawn(self._judge, game)
            # one that draws nothing would say the same again
            games.append(games[0] if game and judge is self._judge else judge.score(asked))
        return [
            (i, _rating(pending[i].rows, items[i], [_Game.of(g, k) for g in games]))
            for k, i in enumerate(ready)
        ]


@dataclass(frozen=True, slots=True)
class _Game:
    """One item's part of a judge's answer."""

    scores: tuple[float, ...]
    replies: tuple[JudgeReply, ...]

    @classmethod
    def of(cls, scored: JudgeScores, k: int) -> _Game:
        return cls(tuple(scored.scores[k].tolist()), scored.replies[k] if scored.replies else ())


def _judge_item(item: Item, rubric: Rubric | None) -> JudgeItem:
    responses = tuple(Sample((), (), strip_thinking(text), True) for text in item.responses)
    return JudgeItem(Prompt(item.item_id, item.prompt), rubric, responses)


def _rating(rows: Sequence[Row], item: Item, games: Sequence[_Game]) -> Rating:
    replies = [reply for game in games for reply in game.replies]
    lost = next((reply.error or "no reply" for reply in replies if reply.lost), "")
    judged = [
        _judge_row(number * len(item.responses) + k, score, game.replies[k] if game.replies else None)
        for number, game in enumerate(games)
        for k, score in enumerate(game.scores)
    ]
    return Rating(tuple(game.scores for game in games), lost, (*rows, *judged))


def _rubric_row(number: int, answer: Answer, parsed: ParsedRubric | None) -> Row:
    """A try; `extracted` is the rubric as it was used, whatever the format."""
    rubric = None if parsed is None else parsed.rubric
    why = "" if parsed is None or parsed.valid else parsed.reason
    return _row(
        number,
        "rubric",
        answer.text or "",
        answer.finished,
        answer.n_tokens,
        extracted=None if rubric is None else format_lines(rubric),
        score=None,
        error=answer.error or why,
    )


def _judge_row(idx: int, score: float, reply: JudgeReply | None) -> Row:
    """A score; judges that write nothing have no text."""
    known = None if score != score else float(score)
    said = reply or JudgeReply("", error="no score" if known is None else "")
    return _row(
        idx,
        "judge",
        said.text or "",
        said.finished,
        said.n_tokens,
        extracted=None if known is None else f"{known:g}",
        score=known,
        error=said.error,
    )


def _row(
    idx: int,
    role: str,
    text: str,
    finished: bool,
    n_tokens: int,
    *,
    extracted: str | None,
    score: float | None,
    error: str,
) -> Row:
    return {
        "idx": idx,
        "role": role,
        "text": text,
        "finished": finished,
        "n_tokens": n_tokens,
        "extracted": extracted,
        "score": score,
        "error": error,
    }


class Logits(Protocol):
    """A scalar reward model, as far as it is needed here (`models.reward_model.ClassifierRewardModel`)."""

    def logits(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]]) -> list[FloatArray]:
        """[G] for each prompt's responses, NaN where the conversation is too long."""

    def describe(self) -> dict[str, object]:
        """Model hash and settings (JSON values)."""


class RewardModelRater:
    """The reward model's logit, without a rubric; implements `Rater`. It draws nothing: all games are the same."""

    def __init__(self, model: Logits, *, name: str) -> None:
        """Keeps the parts; `name` of the model, short."""
        self._model, self.judge = model, name

    def describe(self) -> dict[str, Any]:
        """What the model says of itself (JSON values)."""
        return {"kind": "reward-model", "judge": self._model.describe()}

    def rate(
        self, items: Sequence[Item], wanted: Sequence[int], plan: Plan, purpose: str
    ) -> Iterator[tuple[int, Rating]]:
        """See the protocol; an item at a time, so that no other item's length is in its batch. Thinking is kept."""
        for i in wanted:
            item = items[i]
            samples = [Sample((), (), text, True) for text in item.responses]
            (found,) = self._model.logits([Prompt(item.item_id, item.prompt)], [samples])
            scores = tuple(np.asarray(found, dtype=np.float64).tolist())
            reply = JudgeReply("", error="the conversation is longer than the reward model's window")
            rows = tuple(_judge_row(k, s, reply if s != s else None) for k, s in enumerate(scores))
            yield i, Rating((scores,) * plan.games, "", rows)
