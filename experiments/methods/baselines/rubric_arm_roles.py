"""The updates of Rubric-ARM's generator and judge; what is ours in them stands at the top of `rubric_arm.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from racelab.configs import schema
from racelab.experiments.methods import records
from racelab.experiments.methods.baselines.common import RoleUpdate
from racelab.experiments.methods.baselines.rubric_arm_reward import generator_rewards, judge_rewards
from racelab.experiments.methods.grpo import grpo_batch
from racelab.experiments.models.generator import Candidate, SamplingSettings
from racelab.experiments.models.judge_pairwise import Comparison, PairwiseJudge
from racelab.experiments.models.prompts.rubric_arm import Side, parse_verdict
from racelab.experiments.parts import Parts
from racelab.experiments.ports import RoleBackend
from racelab.experiments.types import FloatArray, JudgeScores, Pair, Sample, UpdateStats

SIDES: tuple[Side, Side] = ("A", "B")


@dataclass(frozen=True, slots=True)
class _Line:
    """One comparison of a step, for the tables: what the role wrote, what the judge said, what it earned."""

    group: int
    idx: int
    pair: Pair
    rubric: str
    side: Side
    written: Sample
    winner: Side | None
    reward: float


class RoleTrainer:
    """One update of either role on given pairs; the role that was updated is in the backend afterwards."""

    def __init__(self, config: schema.RubricArmConfig, parts: Parts, roles: RoleBackend) -> None:
        """Keeps the parts."""
        self.config, self.parts, self.roles = config, parts, roles
        how = config.judge
        self.pairwise = PairwiseJudge(
            parts.generator.model,
            rubric_format=config.rubric.format,
            sampling=SamplingSettings(how.max_tokens, how.temperature, how.top_p),
        )

    def generator(self, pairs: Sequence[Pair], step: int, clock: records.Clock) -> RoleUpdate:
        """P G rubrics, and one greedy verdict of each usable one; the preferred answer is A."""
        cfg, rng, generator = self.config, self.parts.rng.sampling, self.parts.generator
        n, g = len(pairs), cfg.group_size
        self.roles.switch("generator")
        written_NG = generator.rubrics([p.prompt for p in pairs], g, rng)
        clock.lap("gen_s")
        self.roles.switch("judge")
        written = [c for group in written_NG for c in group]
        asked = [self._asked(p, c, "A") for p, group in zip(pairs, written_NG, strict=True) for c in group]
        verdicts = self.pairwise.greedy([a for a in asked if a is not None], rng)
        replies = iter(verdicts)
        winners = [None if a is None else parse_verdict(next(replies).text) for a in asked]
        clock.lap("judge_s")
        usable = np.array([c.rubric is not None for c in written])
        fits = np.array([a is not None for a in asked])
        valid = [c.valid for c in written]
        rewards_NG = generator_rewards(winners, valid, usable & ~fits, cfg.format_weight).reshape(n, g)
        self.roles.switch("generator")
        stats = self._learn(
            [
                (generator.rubric_prefix(p.prompt), [c.sample for c in group], rewards_G)
                for p, group, rewards_G in zip(pairs, written_NG, rewards_NG, strict=True)
            ],
            n,
            cfg.rubric.temperature,
        )
        clock.lap("train_s")
        lines = [
            _Line(i // g, i % g, pairs[i // g], c.sample.text, "A", c.sample, w, float(r))
            for i, (c, w, r) in enumerate(zip(written, winners, np.ravel(rewards_NG), strict=True))
        ]
        return RoleUpdate(
            rewards_NG=rewards_NG,
            stats=stats,
            samples=[c.sample for c in written],
            unusable_frac=1.0 - float(usable.mean()),
            judged=_judged(verdicts, beyond=int((usable & ~fits).sum())),
            measured=_calls(len(written), len(verdicts), stats.n_samples),
            expected=_calls(n * g, int(fits.sum()), n * g),
            printed={},
            tables=_tables(step, "rubric", lines),
            metrics={
                "race/arm/win_frac": _share([w == "A" for w, f in zip(winners, fits, strict=True) if f])
            },
            role="generator",
        )

    def judge(self, pairs: Sequence[Pair], step: int, clock: records.Clock) -> RoleUpdate:
        """P rubrics, and G verdicts behind each usable one; the preferred answer is A or B by lot."""
        cfg, rng = self.config, self.parts.rng
        n, g = len(pairs), cfg.group_size
        sides = [SIDES[i] for i in rng.pool.integers(0, 2, n)]
        self.roles.switch("generator")
        written = [c for (c,) in self.parts.generator.rubrics([p.prompt for p in pairs], 1, rng.sampling)]
        self.roles.switch("judge")
        prefixes = [self._asked(*row) for row in zip(pairs, written, sides, strict=True)]
        asked = [(i, prefix) for i, prefix in enumerate(prefixes) if prefix is not None]
        verdicts = self.pairwise.sample([prefix for _, prefix in asked], g, rng.sampling)
        clock.lap("gen_s")
        winners = [[parse_verdict(v.text) for v in group] for group in verdicts]
        rewards = [judge_rewards(w, sides[i]) for w, (i, _) in zip(winners, asked, strict=True)]
        stats = self._learn(
            [(prefix, vs, r) for (_, prefix), vs, r in zip(asked, verdicts, rewards, strict=True)],
            n,
            cfg.judge.temperature,
        )
        clock.lap("train_s")
        lines = [
            _Line(i, k, pairs[i], written[i].sample.text, sides[i], verdict, winner, float(reward))
            for (i, _), *rows in zip(asked, verdicts, winners, rewards, strict=True)
            for k, (verdict, winner, reward) in enumerate(zip(*rows, strict=True))
        ]
        flat = [v for group in verdicts for v in group]
        usable = sum(c.rubric is not None for c in written)
        return RoleUpdate(
            rewards_NG=np.array([line.reward for line in lines], dtype=np.float64),
            stats=stats,
            samples=[*(c.sample for c in written), *flat],
            unusable_frac=1.0 - usable / n,
            judged=_judged(flat, beyond=usable - len(asked)),
            measured=_calls(len(written), len(flat), stats.n_samples),
            expected=_calls(n, len(asked) * g, len(asked) * g),
            printed={},
            tables=_tables(step, "judge", lines),
            metrics={
                "race/arm/judge_accuracy": _share([line.winner == line.side for line in lines]),
                "race/arm/says_a_frac": _share([line.winner == "A" for line in lines]),
            },
            role="judge",
        )

    def _asked(self, pair: Pair, written: Candidate, side: Side) -> tuple[int, ...] | None:
        """The judge's prompt with the preferred answer on `side`; None without a rubric, or beyond the window."""
        if written.rubric is None:
            return None
        return self.pairwise.prefix(Comparison(pair.prompt, written.rubric, *_answers(pair, side)))

    def _learn(
        self,
        groups: Sequence[tuple[Sequence[int], Sequence[Sample], FloatArray]],
        n_all: int,
        temperature: float,
    ) -> UpdateStats:
        batch = grpo_batch(
            groups,
            n_all_groups=n_all,
            normalisation=self.config.loss_normalisation,
            temperature=temperature,
            eps=self.config.advantage_eps,
        )
        return self.roles.update(batch)


def _answers(pair: Pair, side: Side) -> tuple[str, str]:
    """Answers A and B, the preferred one on `side`."""
    return (pair.chosen, pair.rejected) if side == "A" else (pair.rejected, pair.chosen)


def _calls(rubrics: int, verdicts: int, learner_samples: int) -> dict[str, int]:
    return {"rubric_gen": rubrics, "judge_eval": verdicts, "learner_samples": learner_samples}


def _judged(verdicts: Sequence[Sample], beyond: int) -> JudgeScores:
    """Verdicts that cannot be read, and comparisons beyond the window."""
    unread = sum(parse_verdict(v.text) is None for v in verdicts)
    return JudgeScores((), calls=len(verdicts), parse_failures=unread, infra_failures=beyond)


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else math.nan


def _tables(step: int, role: str, lines: Iterable[_Line]) -> dict[str, list[dict[str, object]]]:
    """`samples`: what the role wrote, the judge's under the two answers; `verdicts`: what was said."""
    samples, verdicts = [], []
    for x in lines:
        first, second = _answers(x.pair, x.side)
        prompt = x.pair.prompt.text + (f"\n\nA: {first}\nB: {second}" if role == "judge" else "")
        samples.append(records.sample_row(step, x.group, x.idx, role, prompt, x.written, x.rubric, x.reward))
        verdicts.append(
            {
                "group": x.group,
                "idx": x.idx,
                "role": role,
                "prompt_id": x.pair.prompt.prompt_id,
                "preferred": x.side,
                "winner": x.winner,
                "reward": None if math.isnan(x.reward) else x.reward,
            }
        )
    return {"samples": samples, "verdicts": verdicts}
