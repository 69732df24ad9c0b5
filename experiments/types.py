"""The values that move between the rooms.

Shape legend, used as suffixes of array names everywhere:

    N  prompts (rollout groups) per batch        e.g. 4
    G  samples per prompt                        e.g. 8
    T  tokens of one sample                      e.g. 24
    D  width of an encoder embedding             e.g. 384

Example: `rewards_NG[2, 5]` is the judge's score, in [0, 1], of the sixth response to the third prompt;
`adv_NG` its advantage (Eq 3); `emb_GD` the embeddings of one group's responses. NaN in `rewards_NG` means
that the judge or the rubric gave no usable score. It never means 0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task for the policy.

    Attributes:
        prompt_id: stable across runs; unique inside a data source.
        text: what the user says.
        source: `package`, `reasoning-gym`, a file name or a hub name.
        category: explanation, dialogue, rewriting, constrained, math, code, science, ...
        check: a declarative rule that decides success without any model (see `data/checks.py`), or None.
    """

    prompt_id: str
    text: str
    source: str = ""
    category: str = ""
    check: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Criterion:
    """One line of a rubric: (c_k, w_k) of Eq 1."""

    text: str
    weight: float


@dataclass(frozen=True, slots=True)
class Rubric:
    """R_x of Eq 1: the usable criteria, and the text that they were parsed from."""

    criteria: tuple[Criterion, ...]
    text: str

    @property
    def sha(self) -> str:
        """First 12 hex digits of the SHA-256 of the criteria (not of the surrounding text)."""
        body = json.dumps([[c.text, c.weight] for c in self.criteria], ensure_ascii=False)
        return hashlib.sha256(body.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Sample `n` continuations of `prefix`.

    Attributes:
        prefix: token ids, not empty.
        n: number of samples; the prefix is prefilled once for all of them.
        max_tokens: a sample is cut there (then `Sample.finished` is False).
        temperature: > 0 samples; 0 is greedy.
        top_p: nucleus; 1.0 keeps the whole distribution.
        stop: a sample also ends when its text contains one of these strings (however the tokens split it);
            the tokens up to and including the stop are kept.
    """

    prefix: tuple[int, ...]
    n: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One generated sequence.

    Attributes:
        tokens: ids, the end token or stop included.
        logprobs: log-probability of each token under the distribution it was drawn from [T].
        text: decoded, special tokens removed.
        finished: True if it ended by itself (end token or stop string), False if cut at `max_tokens`.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finished: bool


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """G responses to one prompt, scored under one rubric.

    Attributes:
        rubric: None if the text in `rubric_sample` gave no usable rubric.
        rewards: [G] judge scores in [0, 1], NaN where there is none. RLCER adds the outcome: in [-1, 2].
        embeddings: [G, D], rows of unit length.
    """

    prompt: Prompt
    rubric: Rubric | None
    rubric_sample: Sample
    responses: tuple[Sample, ...]
    rewards: FloatArray
    embeddings: FloatArray


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """A rubric failure kept for the rubric phase (Eqs 10-11).

    Attributes:
        entry_id: `<policy_step>:<prompt_id>`.
        preferred: y⁺, the response that the old rubric scored highest.
        rejected: y⁻, the lowest of the others.
        margin: m_old = r⁺ - r⁻ >= 0.
        pushed_step: global step at which it entered the pool.
        rubric_text: the rubric that failed.
    """

    entry_id: str
    prompt: Prompt
    preferred: Sample
    rejected: Sample
    margin: float
    pushed_step: int
    rubric_text: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """A labelled preference: of two answers to a prompt, the better one."""

    prompt: Prompt
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One sequence of a learner batch.

    Attributes:
        tokens: ids [T].
        advantages: A_{i,t} [T].
        weights: the weight of each token in the loss [T]; the loss is the weighted SUM over the whole batch,
            so the chosen normalisation (Eq 4) lives in these numbers alone. A token of weight 0 (an observation, a
            replayed prefix) is context only.
        part: `policy` is trained by the clipped surrogate with KL and entropy. Any other word names a part of an
            auxiliary loss: the weighted negative log-likelihood -sum_t w_t log pi(y_t), without ratio, advantage, KL
            or entropy; its value comes back as `UpdateStats.losses[part]`.
    """

    tokens: tuple[int, ...]
    advantages: FloatArray
    weights: FloatArray
    part: str = "policy"


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """Samples that continue the same prefix; the prefix is computed once."""

    prefix: tuple[int, ...]
    samples: tuple[TrainSample, ...]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """All that a backend needs for one update. It knows neither RACE nor RLDS.

    Attributes:
        groups: may be empty (then the backend takes no step).
        temperature: the samples were drawn from softmax(logits / temperature); log-probs use the same.
    """

    groups: tuple[TrainGroup, ...]
    temperature: float = 1.0

    @property
    def n_samples(self) -> int:
        """Sequences in the batch."""
        return sum(len(g.samples) for g in self.groups)

    @property
    def n_tokens(self) -> int:
        """Completion tokens in the batch (prefixes not counted)."""
        return sum(len(s.tokens) for g in self.groups for s in g.samples)


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What an update did. Means are weighted as the loss is.

    Attributes:
        stepped: False if the batch was empty or the gradient was not finite; the weights are then untouched.
        loss_pg: the policy-gradient part of Eq 4 (value, sign as minimised).
        kl: mean kl3 against the frozen reference (0 where beta = 0 and it was not computed).
        clip_frac: share of tokens whose ratio was clipped.
        entropy: Monte Carlo estimate -mean log pi(y_t).
        grad_norm: before clipping; NaN if not finite.
        losses: value of each auxiliary part (`TrainSample.part`), as it stands in the loss.
    """

    stepped: bool = False
    loss_pg: float = 0.0
    kl: float = 0.0
    clip_frac: float = 0.0
    entropy: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    n_samples: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JudgeItem:
    """Responses to score under one rubric; `rubric` None gives NaN for all, without a call."""

    prompt: Prompt
    rubric: Rubric | None
    responses: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """What a judge that writes said about one response.

    Attributes:
        text: as it came, thinking included; None if nothing came (`error` says why).
        finished: False if it was cut, or never came.
        n_tokens: generated; 0 if unknown.
        error: why there is no score, one line; "" where there is one.
        lost: nothing came for want of a model that answers: another try may give a score.
    """

    text: str | None
    finished: bool = True
    n_tokens: int = 0
    error: str = ""
    lost: bool = False


@dataclass(frozen=True, slots=True)
class JudgeScores:
    """The judge's answer.

    Attributes:
        scores: one array [number of responses] per item, in [0, 1] or NaN.
        calls: judge evaluations made (one per response that had a usable rubric).
        parse_failures: replies that could not be read.
        infra_failures: calls that never got a reply.
        replies: of judges that write, one per score (none where the rubric is None); () of the others.
    """

    scores: tuple[FloatArray, ...]
    calls: int = 0
    parse_failures: int = 0
    infra_failures: int = 0
    replies: tuple[tuple[JudgeReply, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """One answer to be checked against K items."""

    prompt: Prompt
    items: tuple[str, ...]
    answer: Sample


@dataclass(frozen=True, slots=True)
class Verdicts:
    """A verifier's answers.

    Attributes:
        holds: one array [K] of booleans per check; all False where the reply could not be read.
        calls: judge evaluations made: one per check, or one per item where the judge can only score.
        parse_failures: replies that could not be read.
        infra_failures: calls that never got a reply.
    """

    holds: tuple[npt.NDArray[np.bool_], ...]
    calls: int = 0
    parse_failures: int = 0
    infra_failures: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Everything one step wants to be remembered.

    Attributes:
        step: global update step, starting at 1.
        metrics: `section/name` -> value (names as in the tracking design).
        tables: table name -> rows (plain JSON values).
        status: a few values for the terminal panel (phase, reward, routes, ...).
    """

    step: int
    metrics: Mapping[str, float]
    tables: Mapping[str, list[dict[str, object]]] = field(default_factory=dict)
    status: Mapping[str, object] = field(default_factory=dict)
