"""RRD (Shen et al., 2026): items are proposed for a prompt and its answers, pruned, split, scored singly and weighted.

The policy alone is trained. `rrd_growth.py` has the course of one prompt and what departs from the public code.

Item scores are weighted by r = clip(sum_k w_k b_k / sum_k w_k, 0, 1), w uniform, the proposer's own, or whitened
(`rrd_weights.py`). No items (reward 0 in the code) can only come of a failed proposal here, and is NaN: a model that is
away must not look like bad answers. So is an answer that no item got a score for (`items.weighted_share`).

In the ledger every request to the proposer is a rubric generation, the checks included. Table 14 prints one proposal a
prompt and G x I item scores, and calls the rest "data-dependent refinement checks".
"""

from __future__ import annotations

from collections.abc import Sequence

from racelab.configs import schema
from racelab.experiments.methods.baselines.common import PolicyOnly, Scored, text_sample
from racelab.experiments.methods.baselines.rrd_growth import Growth, grow
from racelab.experiments.methods.baselines.static_sources import api_costs, open_proposer
from racelab.experiments.methods.ledger import Calls
from racelab.experiments.models.items import weighted_share
from racelab.experiments.models.proposals import Proposer
from racelab.experiments.models.rubric import format_lines
from racelab.experiments.parts import Parts
from racelab.experiments.ports import Judge
from racelab.experiments.types import Criterion, Prompt, Rubric, Sample


class RrdScorer:
    """Grows the items of every prompt anew, since they are made from its answers."""

    def __init__(self, config: schema.RrdConfig, proposer: Proposer, judge: Judge) -> None:
        """Keeps the parts."""
        self._config, self._proposer, self._judge = config, proposer, judge

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Sample]]) -> Scored:
        """See `common.Scorer`."""
        growths = [
            Growth(self._config, self._proposer, p, tuple(ys))
            for p, ys in zip(prompts, responses, strict=True)
        ]
        asked, before = self._proposer.asked, self._proposer.calls
        judged = grow(growths, self._proposer, self._judge, self._config.item_threshold)
        used, requests = self._proposer.calls - before, sum(sum(g.asked.values()) for g in growths)
        rubrics = tuple(_rubric(g) for g in growths)
        cells = sum(len(g.responses) * len(g.items) for g in growths)
        return Scored(
            rewards=tuple(weighted_share(g.holds_GI(), g.weights) for g in growths),
            rubrics=rubrics,
            rubric_samples=tuple(text_sample(r.text if r else "") for r in rubrics),
            judged=judged,
            measured=self._calls(self._proposer.asked - asked, judged.calls, used.made + used.cached),
            expected=self._calls(requests, cells, requests),
            printed=self._calls(len(prompts), cells, len(prompts)),
            tables={"rrd_rounds": [row for g in growths for row in g.rows]},
            metrics=_metrics(growths),
            totals=api_costs(used) if self._config.proposer == "api" else {},
        )

    def _calls(self, rubrics: int, judge: int, external: int) -> Calls:
        calls = {"rubric_gen": rubrics, "judge_eval": judge}
        return {**calls, "external_calls": external} if self._config.proposer == "api" else calls


def rrd(config: schema.RrdConfig, parts: Parts, *, policy_updates: int, max_steps: int | None) -> PolicyOnly:
    """RRD; it keeps nothing from step to step."""
    scorer = RrdScorer(config, open_proposer(config, parts), parts.judge)
    return PolicyOnly(config, parts, scorer, policy_updates=policy_updates, max_steps=max_steps)


def _rubric(growth: Growth) -> Rubric | None:
    """The items and their weights, for the record: the judge never sees them together."""
    if not growth.items:
        return None
    criteria = tuple(Criterion(i, float(w)) for i, w in zip(growth.items, growth.weights, strict=True))
    return Rubric(criteria, format_lines(Rubric(criteria, "")))


def _metrics(growths: Sequence[Growth]) -> dict[str, float]:
    """Means over the prompts."""
    n = len(growths)
    return {
        "train/rrd/items": sum(len(g.items) for g in growths) / n,
        "train/rrd/rounds": sum(len(g.rows) - 1 for g in growths) / n,
        "train/rrd/rejected": sum(g.rejected for g in growths) / n,
        **{f"train/rrd/{kind}_calls": sum(g.asked[kind] for g in growths) / n for kind in growths[0].asked},
    }
