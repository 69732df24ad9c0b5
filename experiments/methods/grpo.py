"""Group Relative Policy Optimization: advantages (Eq 3) and the clipped surrogate (Eq 4) of the RACE paper.

    A_i = (r_i - mean(r)) / (std(r) + eps),   std = population standard deviation
    L   = -(1/G) sum_i (1/|y_i|) sum_t [ min(rho A_i, clip(rho, 1 - eps_c, 1 + eps_c) A_i) - beta kl3_t ]

A backend computes L as a weighted SUM over the tokens of a `TokenBatch`; every choice of normalisation lives
in `TrainSample.weights` and is made here. Shapes: G samples of a group, T tokens of a sample.

Sums are taken with `math.fsum`, which is correctly rounded: mean and std do not depend on the order of the
samples, not even in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from racelab.experiments.types import FloatArray, Sample, TokenBatch, TrainGroup, TrainSample

Normalisation = Literal["informative_groups", "token_mean", "over_all_groups"]

MIN_VALID = 2
"""Fewest valid scores that make a group: one score alone has nothing to be compared with."""
SCORE_DIGITS = 12
"""Scores have few decimals, binary floats have not: differences, means and deviations of scores are compared with
thresholds after rounding to this many decimals, so that 0.3 - 0.275 is 0.025 and a mean of 0.8 reaches 0.8."""


def valid(rewards_G: FloatArray) -> FloatArray:
    """The usable scores of a group (NaN and infinities left out), in their order.

    Args:
        rewards_G: scores [G].

    Raises:
        ValueError: if the array is not one-dimensional.
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    if rewards_G.ndim != 1:
        raise ValueError(f"rewards of one group must have shape [G], got {rewards_G.shape}")
    return rewards_G[np.isfinite(rewards_G)]


def mean(rewards_G: FloatArray) -> float:
    """Mean over the valid scores; NaN if there is none.

    Kept inside [min, max], where rounding could otherwise leave it: six scores of 0.8 have the mean 0.8.
    """
    scores = valid(rewards_G)
    if not scores.size:
        return math.nan
    return min(max(math.fsum(scores) / scores.size, float(scores.min())), float(scores.max()))


def sigma(rewards_G: FloatArray) -> float:
    """Population standard deviation over the valid scores, as Eqs 3, 8 and 12 use it.

    Exactly 0.0 when all valid scores are equal. `np.std` of six times 0.7 is 1.1e-16, which would be routed
    as informative once the controller has wound the routing threshold down to 0.

    Returns:
        The deviation; NaN if no score is valid.
    """
    scores = valid(rewards_G)
    if not scores.size:
        return math.nan
    if scores.min() == scores.max():
        return 0.0
    centre = math.fsum(scores) / scores.size
    return math.sqrt(math.fsum((scores - centre) ** 2) / scores.size)


def advantages(rewards_G: FloatArray, eps: float = 1e-8) -> FloatArray:
    """Eq 3. Invalid rows get 0; so does everybody when sigma is 0 or fewer than two scores are valid.

    Args:
        rewards_G: scores [G], NaN where there is none.
        eps: the epsilon of Eq 3.

    Returns:
        Advantages [G].
    """
    out_G = np.zeros(len(rewards_G))
    spread = sigma(rewards_G)
    if not spread > 0.0:  # also NaN, and a single valid score (its sigma is 0)
        return out_G
    rows = np.isfinite(rewards_G)
    out_G[rows] = (np.asarray(rewards_G, dtype=np.float64)[rows] - mean(rewards_G)) / (spread + eps)
    return out_G


def _per_sample_mean(lengths: Sequence[Sequence[int]], n_groups: int) -> list[list[FloatArray]]:
    """Mean over tokens, then over the samples of a group, then over `n_groups` groups."""
    return [
        [np.full(n, 1.0 / (n_groups * len(group) * n)) if n else np.zeros(0) for n in group]
        for group in lengths
    ]


def _informative_groups(lengths: Sequence[Sequence[int]], n_all_groups: int) -> list[list[FloatArray]]:
    return _per_sample_mean(lengths, len(lengths))


def _over_all_groups(lengths: Sequence[Sequence[int]], n_all_groups: int) -> list[list[FloatArray]]:
    if n_all_groups < len(lengths):
        raise ValueError(f"n_all_groups = {n_all_groups} is less than the {len(lengths)} groups given")
    return _per_sample_mean(lengths, n_all_groups)


def _token_mean(lengths: Sequence[Sequence[int]], n_all_groups: int) -> list[list[FloatArray]]:
    total = sum(n for group in lengths for n in group)
    return [[np.full(n, 1.0 / total) if n else np.zeros(0) for n in group] for group in lengths]


_NORMALISATIONS: dict[str, Callable[[Sequence[Sequence[int]], int], list[list[FloatArray]]]] = {
    "informative_groups": _informative_groups,
    "over_all_groups": _over_all_groups,
    "token_mean": _token_mean,
}


def token_weights(
    lengths: Sequence[Sequence[int]], kind: Normalisation, n_all_groups: int
) -> list[list[FloatArray]]:
    """Weight of each token, so that the loss of Eq 4 is a plain weighted sum.

    Args:
        lengths: `lengths[j][i]` tokens in sample i of the j-th group that is used.
        kind: `informative_groups` averages over tokens, then samples, then the groups given (Algorithm 1,
            "using groups in I"); `over_all_groups` divides by `n_all_groups` instead, so that masked groups
            shrink the step; `token_mean` weighs every token of the batch alike.
        n_all_groups: groups processed in the step, masked ones included.

    Returns:
        Arrays [T] in the nesting of `lengths`. They sum to 1 (`over_all_groups`: to the share of groups
        used), less the share of samples without a token.

    Raises:
        ValueError: unknown `kind`, or fewer groups in all than used.
    """
    if kind not in _NORMALISATIONS:
        raise ValueError(f"loss normalisation {kind!r} is unknown; use one of {sorted(_NORMALISATIONS)}")
    return _NORMALISATIONS[kind](lengths, n_all_groups)


def grpo_batch(
    groups: Sequence[tuple[Sequence[int], Sequence[Sample], FloatArray]],
    *,
    n_all_groups: int,
    normalisation: Normalisation = "informative_groups",
    temperature: float = 1.0,
    eps: float = 1e-8,
) -> TokenBatch:
    """The learner batch of Eqs 3-4: each token of sample i carries A_i and its weight.

    Masked groups are simply not passed in: they then get neither a policy nor a KL gradient.

    Args:
        groups: (prefix tokens, G samples, rewards [G]) of each group used.
        n_all_groups: groups processed in the step, masked ones included.
        normalisation: see `token_weights`.
        temperature: the one the samples were drawn at.
        eps: the epsilon of Eq 3.

    Raises:
        ValueError: if a group does not have one reward per sample.
    """
    return prefixed_batch(
        [([prefix] * len(samples), samples, rewards) for prefix, samples, rewards in groups],
        n_all_groups=n_all_groups,
        normalisation=normalisation,
        temperature=temperature,
        eps=eps,
    )


def prefixed_batch(
    groups: Sequence[tuple[Sequence[Sequence[int]], Sequence[Sample], FloatArray]],
    *,
    n_all_groups: int,
    normalisation: Normalisation = "informative_groups",
    temperature: float = 1.0,
    eps: float = 1e-8,
) -> TokenBatch:
    """`grpo_batch` for groups whose samples each continue a prefix of their own.

    Advantages (Eq 3) and weights (Eq 4) are those of the whole group; only the prefixes differ (RLCER compares rubrics
    that were written for different answers).

    Args:
        groups: (G prefixes, G samples, rewards [G]) of each group used. Equal prefixes of a group are computed once.
        n_all_groups: see `grpo_batch`, as all that follows.
        normalisation: see `token_weights`.
        temperature: the one the samples were drawn at.
        eps: the epsilon of Eq 3.

    Raises:
        ValueError: if a group does not have one prefix and one reward per sample.
    """
    lengths = [[len(sample.tokens) for sample in samples] for _, samples, _ in groups]
    weights = token_weights(lengths, normalisation, n_all_groups)
    out = []
    for (prefixes, samples, rewards_G), weights_GT in zip(groups, weights, strict=True):
        if len(samples) != len(rewards_G):
            raise ValueError(f"a group has {len(samples)} samples but {len(rewards_G)} rewards")
        adv_G = advantages(rewards_G, eps)
        by_prefix: dict[tuple[int, ...], list[TrainSample]] = {}
        for prefix, s, a, w_T in zip(prefixes, samples, adv_G, weights_GT, strict=True):
            if s.tokens:  # a sample without a token has nothing to learn from
                train = TrainSample(tokens=s.tokens, advantages=np.full(len(s.tokens), a), weights=w_T)
                by_prefix.setdefault(tuple(prefix), []).append(train)
        out += [TrainGroup(prefix=prefix, samples=tuple(train)) for prefix, train in by_prefix.items()]
    return TokenBatch(groups=tuple(out), temperature=temperature)


def kl3(d: npt.ArrayLike) -> FloatArray:
    """The k3 estimator of KL(pi || ref): exp(d) - d - 1 >= 0 with d = log pi_ref - log pi (Eq 4)."""
    d_T = np.asarray(d, dtype=np.float64)
    return np.asarray(np.expm1(d_T) - d_T, dtype=np.float64)


def surrogate(
    batch: TokenBatch,
    logp_new: Sequence[Sequence[FloatArray]],
    logp_old: Sequence[Sequence[FloatArray]],
    logp_ref: Sequence[Sequence[FloatArray]],
    *,
    clip_eps: float = 0.2,
    beta: float = 1e-3,
) -> float:
    """Eq 4 in plain numpy: the value that every backend must reproduce.

    Args:
        batch: samples with advantages and weights.
        logp_new: log-probabilities [T] under the policy being trained, nested as groups and samples.
        logp_old: the same under the policy that sampled.
        logp_ref: the same under the frozen reference.
        clip_eps: eps_c.
        beta: weight of the KL term.

    Returns:
        The loss (to be minimised).
    """
    loss = 0.0
    for group, new_G, old_G, ref_G in zip(batch.groups, logp_new, logp_old, logp_ref, strict=True):
        for sample, new_T, old_T, ref_T in zip(group.samples, new_G, old_G, ref_G, strict=True):
            ratio_T = np.exp(new_T - old_T)
            clipped_T = np.clip(ratio_T, 1.0 - clip_eps, 1.0 + clip_eps)
            gain_T = np.minimum(ratio_T * sample.advantages, clipped_T * sample.advantages)
            loss -= float(np.sum(sample.weights * (gain_T - beta * kl3(ref_T - new_T))))
    return loss
