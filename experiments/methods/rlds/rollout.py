"""The reflect-retry rollout of one step (RLDS §3.2, Algorithm 1, lines 2-6): originals, grades, reflections, retries.

Where the paper is silent or says two things:
  * "bottom-R failures" (§3.2) and "the bottom 50 % of failures" (App. B): min(R, ceil(share * failures)) of a group are
    retried, lowest rewards first, equal rewards in the order in which they were sampled;
  * a failure is an episode that its task does not call solved;
  * a reflection that cannot be read, or names a step that the episode does not have, gives no retry and is counted;
  * a retry whose prefix could not be replayed exactly is dropped and counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from racelab.configs.schema_rlds import ReflectConfig, RldsMethodConfig
from racelab.experiments.episodes import AgentSampling, Case, Episode, Grading, Instance, Reflection, Start
from racelab.experiments.methods.records import Clock
from racelab.experiments.methods.rlds.parts import RldsParts


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout of a step.

    Attributes:
        group: index of its instance in the step.
        idx: place in the group: originals first, then retries.
        episode: what was played.
        grading: None where nothing was graded.
        parent: `idx` of the original that a retry came from; None for an original.
        reflection: that led to the retry.
    """

    group: int
    idx: int
    episode: Episode
    grading: Grading | None
    parent: int | None = None
    reflection: Reflection | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """Everything that was played in a step.

    Attributes:
        rows: all rollouts, group by group, originals first.
        candidates: the failures that were reflected on.
        reflections: one for each of them, whether it led to a retry or not.
        replay_failures: retries whose prefix could not be restored.
    """

    rows: tuple[Row, ...]
    candidates: tuple[Row, ...] = ()
    reflections: tuple[Reflection, ...] = ()
    replay_failures: int = 0


def play(
    config: RldsMethodConfig,
    parts: RldsParts,
    instances: Sequence[Instance],
    sampling: AgentSampling,
    memory: Sequence[str],
    clock: Clock,
) -> Rollout:
    """Originals, their grades, the reflections and the retries of one step.

    Args:
        config: of the method.
        parts: of the run.
        instances: one per group.
        sampling: of the agent.
        memory: earlier suggestions, oldest first.
        clock: laps gen_s, judge_s, reflect_s, gen_retry_s.
    """
    rng = parts.rng.sampling
    size = config.group_size
    played = parts.actor.play([Start(x) for x in instances for _ in range(size)], sampling, rng)
    originals = [e for e in played if e is not None]
    assert len(originals) == len(played), "an original has no prefix that could fail"
    clock.lap("gen_s")
    gradings = _grade(parts, originals, config)
    clock.lap("judge_s")
    rows = [
        Row(j, i, originals[j * size + i], gradings[j * size + i])
        for j in range(len(instances))
        for i in range(size)
    ]
    chosen = [
        row for j in range(len(instances)) for row in candidates(config, rows[j * size : (j + 1) * size])
    ]
    reflections = _reflect(config, parts, rows, chosen, memory)
    clock.lap("reflect_s")
    retries, failures = _retry(parts, chosen, reflections, sampling)
    clock.lap("gen_retry_s")
    graded = _grade(parts, [episode for _, _, episode in retries], config)
    clock.laps["judge_s"] += clock.split()
    taken = dict.fromkeys(range(len(instances)), size)
    for (row, reflection, episode), grading in zip(retries, graded, strict=True):
        rows.append(Row(row.group, taken[row.group], episode, grading, row.idx, reflection))
        taken[row.group] += 1
    rows.sort(key=lambda row: (row.group, row.idx))
    reflected = tuple(chosen) if reflections else ()
    return Rollout(tuple(rows), reflected, tuple(reflections), failures)


def candidates(config: RldsMethodConfig, originals: Sequence[Row]) -> list[Row]:
    """The failures of one group that are retried: min(R, ceil(share * failures)), lowest rewards first."""
    failures = [row for row in originals if not row.episode.result.solved]
    count = wanted_retries(config.reflect, len(failures))
    return sorted(failures, key=lambda row: row.episode.reward)[:count]


def wanted_retries(reflect: ReflectConfig, failures: int) -> int:
    """min(R, ceil(share * failures))."""
    return min(reflect.max_retries, math.ceil(round(reflect.failure_share * failures, 9)))


def _grade(
    parts: RldsParts, episodes: Sequence[Episode], config: RldsMethodConfig
) -> list[Grading] | list[None]:
    if parts.grader is None or not config.grades:
        return [None] * len(episodes)
    return parts.grader.grade(episodes, parts.rng.sampling) if episodes else []


def _reflect(
    config: RldsMethodConfig,
    parts: RldsParts,
    rows: Sequence[Row],
    chosen: Sequence[Row],
    memory: Sequence[str],
) -> list[Reflection]:
    if not chosen or parts.reflector is None:
        return []
    kept = tuple(memory[-config.reflect.memory :]) if config.reflect.memory else ()
    cases = [
        Case(
            row.episode,
            row.grading if config.shows_grades else None,
            _best(row, rows) if config.reflect.contrastive else None,
            kept,
        )
        for row in chosen
    ]
    return parts.reflector.reflect(cases, parts.rng.sampling)


def _best(row: Row, rows: Sequence[Row]) -> Episode | None:
    """The best sibling, if it is better."""
    siblings = [other.episode for other in rows if other.group == row.group]
    best = max(siblings, key=lambda episode: episode.reward)
    return best if best.reward > row.episode.reward else None


def _retry(
    parts: RldsParts, chosen: Sequence[Row], reflections: Sequence[Reflection], sampling: AgentSampling
) -> tuple[list[tuple[Row, Reflection, Episode]], int]:
    """The retries that could be played, and how many could not be replayed."""
    asked = [
        (row, r) for row, r in zip(chosen, reflections, strict=bool(reflections)) if r.retry_from is not None
    ]
    starts = [
        Start(row.episode.instance, row.episode, int(r.retry_from or 0), r.addition) for row, r in asked
    ]
    episodes = parts.actor.play(starts, sampling, parts.rng.sampling) if starts else []
    done = [(row, r, e) for (row, r), e in zip(asked, episodes, strict=True) if e is not None]
    return done, len(asked) - len(done)
