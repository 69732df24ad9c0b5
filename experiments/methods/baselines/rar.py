"""RaR (Gunjal et al., 2025): one static rubric per prompt from a strong model, the policy alone is trained.

The rubric is a checklist of 7 to 20 items, each of a category (Essential, Important, Optional, Pitfall) and a weight.

    implicit    the whole rubric in one judge call per answer (RACE's choice, Table 14)
    explicit    every item judged by itself; r = clip(sum_k w_k b_k / sum_k |w_k|, 0, 1), w_k by category
    predefined  as explicit, with four general items of equal weight and no proposal

Deviations:
  * the rubric is written from the prompt alone and kept, as the paper and Table 14 have it; their code shows the
    proposer the G answers and asks anew every time;
  * a pitfall (negative weight, or category) stands in its positive reading, "Avoids: ...", with the weight's size, in
    both aggregations, since a rubric here has weights above 0. Their explicit aggregation adds the weight of a pitfall
    that holds; here what then holds is that the mistake was avoided;
  * thinking and fences around the JSON are ignored; what cannot be read is asked again (`tries`) and then gives no
    reward. Their code takes bullet lines for items, or judges under an empty rubric. `rubric.on_parse_failure` has no
    say here;
  * implicit: the shared judge's own scale, not a rating from 1 to 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from racelab.configs import schema
from racelab.experiments.methods.baselines.static_rubric import Aggregation, StaticRubrics, WholeRubric
from racelab.experiments.methods.baselines.static_sources import ChatSource, Source, Written, open_proposer
from racelab.experiments.models.chat import Calls
from racelab.experiments.models.items import ItemQuestion, judge_items, weighted_share
from racelab.experiments.models.prompts.rar import PROPOSE
from racelab.experiments.models.proposals import RarItem, read_rar
from racelab.experiments.parts import Parts
from racelab.experiments.ports import Judge
from racelab.experiments.types import Criterion, FloatArray, JudgeScores, Prompt, Rubric, Sample

CATEGORY_WEIGHTS: Mapping[str, float] = {"essential": 1.0, "important": 0.7, "optional": 0.3, "pitfall": 0.9}
"""Explicit aggregation: the proposed numbers do not count."""
NEGATIVE_WEIGHT = 0.9
UNKNOWN_WEIGHT = 0.7

PREDEFINED = Rubric(
    tuple(
        Criterion(text, 1.0)
        for text in (
            "What the answer says is correct",
            "The answer covers everything that the request asks for",
            "The answer is as short as the matter allows",
            "The answer helps whoever made the request",
        )
    ),
    "predefined",
)


def explicit_weight(item: RarItem) -> float:
    """The weight of an item by its category; a negative one weighs as a pitfall."""
    return NEGATIVE_WEIGHT if item.negative else CATEGORY_WEIGHTS.get(item.category, UNKNOWN_WEIGHT)


def rar(
    config: schema.RarConfig, parts: Parts, *, policy_updates: int, max_steps: int | None
) -> StaticRubrics:
    """RaR with the aggregation that the config names."""
    source, aggregation = AGGREGATIONS[config.aggregation](config, parts)
    return StaticRubrics(
        config, parts, source, aggregation, policy_updates=policy_updates, max_steps=max_steps
    )


def _implicit(config: schema.RarConfig, parts: Parts) -> tuple[Source, Aggregation]:
    return _proposed(config, parts), WholeRubric(parts.judge)


def _explicit(config: schema.RarConfig, parts: Parts) -> tuple[Source, Aggregation]:
    return _proposed(config, parts), ItemByItem(parts.judge, config.item_threshold)


def _predefined(config: schema.RarConfig, parts: Parts) -> tuple[Source, Aggregation]:
    return Predefined(), ItemByItem(parts.judge, config.item_threshold)


AGGREGATIONS = {"implicit": _implicit, "explicit": _explicit, "predefined": _predefined}
"""`method.aggregation` -> where rubrics come from and how answers are scored under them."""


def _proposed(config: schema.RarConfig, parts: Parts) -> Source:
    limits, explicit = config.rubric, config.aggregation == "explicit"

    def reader(text: str, prompt: Prompt) -> Rubric | None:
        items = read_rar(text, limits.min_criteria, limits.max_criteria)
        if items is None:
            return None
        return Rubric(
            tuple(Criterion(i.text, explicit_weight(i) if explicit else i.weight) for i in items), text
        )

    proposer = open_proposer(config, parts)
    return ChatSource(proposer, PROPOSE, reader, tries=config.tries, name=config.proposer)


class Predefined:
    """The same four items for every prompt."""

    name = "predefined"
    external = False
    per_prompt = 0

    def write(self, prompts: Sequence[Prompt], drawn: Sequence[int]) -> list[Written]:
        """Nobody is asked."""
        return [Written(PREDEFINED.text, PREDEFINED)] * len(prompts)

    def read(self, text: str, prompt: Prompt) -> Rubric | None:
        """See `Source`."""
        return PREDEFINED

    def spent(self) -> tuple[int, Calls]:
        """See `Source`."""
        return 0, Calls()


class ItemByItem:
    """Every item of the rubric judged by itself, and the weighted share of those that hold."""

    def __init__(self, judge: Judge, threshold: float) -> None:
        """`judge` is frozen; an item holds from `threshold` on."""
        self._judge, self._threshold = judge, threshold

    def rewards(
        self,
        prompts: Sequence[Prompt],
        rubrics: Sequence[Rubric | None],
        responses: Sequence[Sequence[Sample]],
    ) -> tuple[tuple[FloatArray, ...], JudgeScores]:
        """See `Aggregation`."""
        criteria = [() if r is None else r.criteria for r in rubrics]
        answers = judge_items(
            self._judge,
            [
                ItemQuestion(p, tuple(c.text for c in cs), tuple(ys))
                for p, cs, ys in zip(prompts, criteria, responses, strict=True)
            ],
            self._threshold,
        )
        rewards = tuple(
            weighted_share(holds_GI, [c.weight for c in cs])
            for holds_GI, cs in zip(answers.holds, criteria, strict=True)
        )
        return rewards, answers.scored

    def per_answer(self, rubric: Rubric | None) -> int:
        """I."""
        return 0 if rubric is None else len(rubric.criteria)

    printed_per_answer = per_answer
