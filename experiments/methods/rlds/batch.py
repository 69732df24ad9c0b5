"""From rollouts and advantages to one learner batch: the surrogate and L_aux in a single backward pass (RLDS Eq 4).

A row is one sequence: its context (prompt, and for a retry the replayed turns) is the prefix; everything after it are
the sample's tokens, of which the observations weigh 0. Tokens are those that were sampled, never tokenised again.

    policy    every row, under the context that it was sampled in, the reflection included (on-policy)
    reflect   what the reflector saw -> its reflection (R3L)
    retry     the original prompt and the replayed turns, without the reflection -> the retry's turns (ERL)

The paper does not say at which temperature the two likelihoods are taken; here at the batch's, as the surrogate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from racelab.configs.schema_rlds import AuxiliaryConfig
from racelab.experiments.episodes import Episode, IntArray
from racelab.experiments.methods.grpo import SCORE_DIGITS
from racelab.experiments.methods.rlds.auxiliary import Pairs, select_pairs, token_weights
from racelab.experiments.methods.rlds.rollout import Row
from racelab.experiments.types import FloatArray, TokenBatch, TrainGroup, TrainSample

REFLECT, RETRY = "reflect", "retry"


@dataclass(frozen=True, slots=True)
class RetryPairs:
    """The retries of a step and what L_aux takes of them.

    Attributes:
        rows_R: index of each retry among the rows.
        delta_R: its reward less that of its original.
        written_R: ids of the reflection that led to it.
        said_R: ids of its own turns.
        reflect: kept (context, reflection) pairs; `index_M` counts retries.
        retry: kept (original prompt, response) pairs.
    """

    rows_R: tuple[int, ...]
    delta_R: FloatArray
    written_R: IntArray
    said_R: IntArray
    reflect: Pairs
    retry: Pairs


def pairs(rows: Sequence[Row], parent_N: Sequence[int], config: AuxiliaryConfig) -> RetryPairs:
    """Which pairs teach by imitation: none of a kind whose coefficient is 0."""
    at = tuple(n for n, parent in enumerate(parent_N) if parent >= 0)
    raw_R = [rows[n].episode.reward - rows[int(parent_N[n])].episode.reward for n in at]
    delta_R = np.round(np.array(raw_R), SCORE_DIGITS)  # 0.3 - (0.1 + 0.2) is no success
    reflections = [rows[n].reflection for n in at]
    written_R = np.array([len(r.tokens) if r is not None else 0 for r in reflections], dtype=np.int64)
    said_R = np.array([rows[n].episode.n_own_tokens for n in at], dtype=np.int64)
    return RetryPairs(
        at,
        delta_R,
        written_R,
        said_R,
        select_pairs(delta_R, config.max_pairs if config.reflect_coef else 0, written_R),
        select_pairs(delta_R, config.max_pairs if config.retry_coef else 0, said_R),
    )


def token_batch(
    rows: Sequence[Row],
    adv_NU: FloatArray,
    weights_NU: FloatArray,
    kept: RetryPairs,
    config: AuxiliaryConfig,
    temperature: float,
) -> TokenBatch:
    """One batch of everything that is learnt from in a step.

    Args:
        rows: all rollouts.
        adv_NU: Â_it at the tokens of each turn.
        weights_NU: weight of such a token in the loss; 0 where it is masked.
        kept: the pairs of L_aux.
        config: its coefficients.
        temperature: the agent's.
    """
    grouped: dict[tuple[int, ...], list[TrainSample]] = {}
    for n, row in enumerate(rows):
        prefix, sample = _policy(row.episode, adv_NU[n], weights_NU[n])
        if sample.tokens:
            grouped.setdefault(prefix, []).append(sample)
    groups = [TrainGroup(prefix, tuple(samples)) for prefix, samples in grouped.items()]
    groups += _reflections(rows, kept, config.reflect_coef)
    groups += _responses(rows, kept, config.retry_coef)
    return TokenBatch(tuple(groups), temperature)


def _policy(
    episode: Episode, adv_U: FloatArray, weights_U: FloatArray
) -> tuple[tuple[int, ...], TrainSample]:
    """(context, sample) of a row; what was replayed is context."""
    context, tokens, turn_T = split(episode)
    own_T = turn_T >= 0
    index_T = np.where(own_T, turn_T, 0)
    return context, TrainSample(tokens, adv_U[index_T] * own_T, weights_U[index_T] * own_T)


def split(episode: Episode, *, bare: bool = False) -> tuple[tuple[int, ...], tuple[int, ...], IntArray]:
    """The episode cut where its own sampling began.

    Args:
        episode: any.
        bare: without what the reflection added.

    Returns:
        (context, ids after it [T], turn of each of them, -1 for ids that were not sampled [T]).
    """
    start = episode.retry_from
    before, own = episode.turns[:start], episode.turns[start:]
    context = list(episode.bare_prompt if bare else episode.prompt)
    for u, turn in enumerate(before):
        bridge = (
            episode.bare_bridge
            if bare and u == start - 1 and episode.bare_bridge is not None
            else turn.bridge
        )
        context += [*turn.tokens, *bridge]
    tokens = tuple(token for turn in own for part in (turn.tokens, turn.bridge) for token in part)
    lengths = [length for turn in own for length in (len(turn.tokens), len(turn.bridge))]
    turns = [u for k in range(len(own)) for u in (start + k, -1)]
    return tuple(context), tokens, np.repeat(np.array(turns, dtype=np.int64), lengths)


def _reflections(rows: Sequence[Row], kept: RetryPairs, coef: float) -> list[TrainGroup]:
    """R3L's reflection NLL: every token of the reflection, its end token included."""
    groups = []
    for r, weight in zip(
        kept.reflect.index_M, token_weights(kept.reflect, kept.written_R, coef), strict=True
    ):
        reflection = rows[kept.rows_R[int(r)]].reflection
        assert reflection is not None, "a pair has tokens"
        n = len(reflection.tokens)
        sample = TrainSample(
            reflection.tokens, np.zeros(n), np.full(n, float(weight), dtype=np.float64), REFLECT
        )
        groups.append(TrainGroup(reflection.prompt, (sample,)))
    return groups


def _responses(rows: Sequence[Row], kept: RetryPairs, coef: float) -> list[TrainGroup]:
    """ERL's retry distillation: the retry's own turns after the original prompt."""
    groups = []
    for r, weight in zip(kept.retry.index_M, token_weights(kept.retry, kept.said_R, coef), strict=True):
        context, tokens, turn_T = split(rows[kept.rows_R[int(r)]].episode, bare=True)
        sample = TrainSample(tokens, np.zeros(len(tokens)), np.where(turn_T >= 0, float(weight), 0.0), RETRY)
        groups.append(TrainGroup(context, (sample,)))
    return groups
