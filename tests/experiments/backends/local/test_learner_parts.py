"""Auxiliary parts, exact entropy and clip-higher of the learner, against a naive float64 autograd of the whole loss."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from racelab.experiments.backends.local import head, learner
from racelab.experiments.backends.local.fast import split_fused, weight_names
from racelab.experiments.backends.local.kernels import Linear
from racelab.experiments.backends.local.learner import LocalBackend
from racelab.experiments.backends.local.model import LocalModel, open_language_model
from racelab.experiments.backends.local.optim import OptimSettings
from racelab.experiments.errors import ConfigError
from racelab.experiments.types import TokenBatch, TrainGroup, TrainSample, UpdateStats

from ...local_models import VOCAB, write_model

SETTINGS: dict[str, Any] = {
    "lr": 3e-3,
    "beta": 0.3,
    "clip": 0.02,
    "clip_high": 0.05,
    "entropy_coef": 0.2,
    "max_grad_norm": 1e9,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["llama", "gpt2"])  # the fast path, the plain path
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_model(request.param, path)
    return path


def backend(folder: Path, **settings: Any) -> LocalBackend[LocalModel]:
    model = open_language_model(folder, compute_dtype="float32")
    return LocalBackend(model, OptimSettings(**{**SETTINGS, **settings}))


def draw(rng: np.random.Generator, n: int) -> tuple[int, ...]:
    return tuple(int(t) for t in rng.integers(0, VOCAB - 4, n))


def batch(seed: int = 0, temperature: float = 0.8, parts: bool = True) -> TokenBatch:
    """Three groups; some tokens of weight 0 in the middle; `parts`: two kinds of likelihood beside the policy."""
    rng = np.random.default_rng(seed)

    def sample(n: int, part: str = "policy") -> TrainSample:
        weights = rng.uniform(0.01, 0.05, n)
        weights[1 : n // 2] = 0.0
        return TrainSample(draw(rng, n), rng.normal(size=n), weights, part)

    groups = [TrainGroup(draw(rng, 5), (sample(4), sample(9)))]
    if parts:
        groups.append(TrainGroup(draw(rng, 12), (sample(6), sample(20, "retry"), sample(8, "reflect"))))
        groups.append(TrainGroup(draw(rng, 1), (sample(3, "reflect"),)))
    groups.append(TrainGroup(draw(rng, 20), (sample(18), sample(2))))
    return TokenBatch(tuple(groups), temperature)


class Naive:
    """The loss as it is written, one transformers pass per sequence, in float64."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        self.module, self.ref = (
            AutoModelForCausalLM.from_pretrained(folder).eval().double() for _ in range(2)
        )
        self.s = {**SETTINGS, **settings}

    def logps(self, module: Any, prefix: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> Any:
        logits = module(torch.tensor([[*prefix, *tokens]])).logits[0] / temperature
        full = logits[len(prefix) - 1 : -1].log_softmax(-1)
        return full.gather(1, torch.tensor(tokens)[:, None])[:, 0], -(full.exp() * full).sum(-1)

    def old(self, b: TokenBatch) -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                self.logps(self.module, g.prefix, s.tokens, b.temperature)[0]
                for g in b.groups
                for s in g.samples
            ]

    def losses(self, b: TokenBatch, old: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Value of each part as it stands in the loss; `whole` is what is minimised."""
        total: dict[str, Any] = {"policy": 0.0, "whole": 0.0}
        rows = [(g.prefix, s) for g in b.groups for s in g.samples]
        for (prefix, s), before in zip(rows, old, strict=True):
            lp, entropy = self.logps(self.module, prefix, s.tokens, b.temperature)
            w, a = torch.tensor(s.weights), torch.tensor(s.advantages)
            if s.part != "policy":
                value = -(w * lp).sum()
                total[s.part] = total.get(s.part, 0.0) + value
                total["whole"] = total["whole"] + value
                continue
            with torch.no_grad():
                ref = self.logps(self.ref, prefix, s.tokens, b.temperature)[0]
            ratio = (lp - before).exp()
            top = self.s["clip"] if self.s["clip_high"] is None else self.s["clip_high"]
            policy = -torch.minimum(ratio * a, ratio.clamp(1 - self.s["clip"], 1 + top) * a)
            kl = (ref - lp).exp() - (ref - lp) - 1
            total["policy"] = total["policy"] + (w * policy).sum()
            rest = w * (policy + self.s["beta"] * kl - self.s["entropy_coef"] * entropy)
            total["whole"] = total["whole"] + rest.sum()
        return total

    def gradient(self, b: TokenBatch) -> dict[str, torch.Tensor]:
        self.module.zero_grad()
        self.losses(b, self.old(b))["whole"].backward()
        return {n: p.grad.clone() for n, p in self.module.named_parameters()}


def gradient(b: LocalBackend[LocalModel], data: TokenBatch) -> dict[str, torch.Tensor]:
    """Of the first inner step, under Hugging Face names."""
    b._inner(list(data.groups), data.temperature, None, learner._Totals())
    masters = b.policy.core.masters
    if b.policy.engine == "plain":
        return {n: p.grad.clone() for n, p in masters.items() if p.grad is not None}
    out: dict[str, torch.Tensor] = {}
    for fused, names in weight_names(b.policy.core.spec):  # type: ignore[union-attr]
        grad = masters[fused].grad
        assert grad is not None
        out.update(zip(names, split_fused(b.policy.core.spec, fused, grad), strict=True))  # type: ignore[union-attr]
    return out


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    assert set(got) == set(want)
    for name, value in want.items():
        assert (got[name] - value).abs().max() < tolerance * value.abs().max().clamp(min=1e-2), name


@pytest.mark.parametrize(
    "change", [{}, {"beta": 0.0}, {"entropy_coef": 0.0}, {"beta": 0.0, "entropy_coef": 5.0}]
)
def test_the_gradient_of_the_whole_loss(folder: Path, change: dict[str, Any]) -> None:
    """Policy, KL, entropy and both likelihoods, before the first step, where the ratio is 1."""
    same(gradient(backend(folder, **change), batch()), Naive(folder, change).gradient(batch()))


def test_two_updates_of_two_epochs_equal_the_textbook(folder: Path) -> None:
    """The ratio has moved and both clip bounds bite; likelihoods are taken again at every inner step."""
    mine, twin = backend(folder, epochs=2), Naive(folder, {})
    optimizer = torch.optim.AdamW(
        twin.module.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    for seed in range(2):
        b = batch(seed)
        old, values = twin.old(b), []
        for _ in range(2):
            optimizer.zero_grad()
            losses = twin.losses(b, old)
            losses["whole"].backward()
            optimizer.step()
            values.append({k: float(v.detach()) for k, v in losses.items()})
        stats = mine.update(b)
        assert set(stats.losses) == {"retry", "reflect"}
        for part in ("retry", "reflect"):
            assert stats.losses[part] == pytest.approx(np.mean([v[part] for v in values]), rel=2e-3)
        assert stats.loss_pg == pytest.approx(np.mean([v["policy"] for v in values]), rel=2e-2, abs=2e-3)
    assert stats.clip_frac > 0.05
    groups = [(g.prefix, [s.tokens for s in g.samples]) for g in b.groups]
    got = np.concatenate([a for g in mine.policy.logprobs(groups, b.temperature) for a in g])
    np.testing.assert_allclose(got, torch.cat(twin.old(b)).numpy(), atol=5e-3)


def test_policy_statistics_count_policy_tokens_only(folder: Path) -> None:
    """Whatever the likelihood parts are, KL, entropy, clip share and loss_pg are those of the policy alone."""
    both, alone = batch(), batch()
    alone = replace(
        alone,
        groups=tuple(
            replace(g, samples=tuple(s for s in g.samples if s.part == "policy")) for g in alone.groups
        ),
    )
    with_parts, without = (backend(folder).update(b) for b in (both, alone))
    for name in ("loss_pg", "kl", "clip_frac", "entropy"):
        assert getattr(with_parts, name) == pytest.approx(getattr(without, name), rel=1e-5, abs=1e-6), name
    assert without.losses == {}
    rows = zip([s for g in both.groups for s in g.samples], Naive(folder, {}).old(both), strict=True)
    own = [(s.weights, lp.numpy()) for s, lp in rows if s.part == "policy"]
    want = -sum(float((w * lp).sum()) for w, lp in own) / sum(float(w.sum()) for w, _ in own)
    assert with_parts.entropy == pytest.approx(want, rel=1e-4)  # the Monte Carlo estimate, as documented


def test_tokens_of_weight_zero_are_context_only(folder: Path) -> None:
    """Their advantages do not matter, not even infinite ones, and neither does how far the reference is there."""
    b = batch()
    wild = replace(
        b,
        groups=tuple(
            replace(
                g,
                samples=tuple(
                    replace(s, advantages=np.where(s.weights == 0, np.inf, s.advantages)) for s in g.samples
                ),
            )
            for g in b.groups
        ),
    )
    want, got = gradient(backend(folder), b), gradient(backend(folder), wild)
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_zero_weight_stays_silent_where_the_reference_overflows() -> None:
    """ref - logp = 200 overflows exp in float32; at weight 0 slope, KL and clip are 0 all the same."""
    terms = head.LossTerms(
        torch.tensor([1.0, 1.0]),
        torch.tensor([0.5, 0.0]),
        torch.tensor([-1.0, -300.0]),
        torch.tensor([-1.0, 0.0]),
        clip=0.2,
        beta=0.5,
        policy=torch.tensor([True, False]),
    )
    slope, policy, kl, clipped = terms.evaluate(torch.tensor([-1.0, -200.0]), slice(0, 2))
    assert slope.tolist() == [-0.5, 0.0]
    assert policy.tolist() == [-1.0, 200.0]
    assert kl.tolist() == [0.0, 0.0]
    assert clipped.tolist() == [0.0, 0.0]


def test_clip_higher_by_hand() -> None:
    """r = 1.25, A = 1: inside 1 + 0.28 but outside 1 + 0.2; r = 1.5 is outside both; the lower bound stays 0.8."""
    logp = torch.tensor([1.25, 1.5, 0.7]).log()
    adv = torch.tensor([1.0, 1.0, -1.0])
    terms = head.LossTerms(adv, torch.ones(3), torch.zeros(3), None, clip=0.2, beta=0.0, clip_high=0.28)
    slope, policy, _, clipped = terms.evaluate(logp, slice(0, 3))
    np.testing.assert_allclose(policy, [-1.25, -1.28, 0.8], rtol=1e-6)
    np.testing.assert_allclose(slope, [-1.25, 0.0, 0.0], atol=1e-6)
    assert clipped.tolist() == [0.0, 1.0, 1.0]
    _, policy, _, clipped = replace(terms, clip_high=None).evaluate(logp, slice(0, 3))
    np.testing.assert_allclose(policy, [-1.2, -1.2, 0.8], rtol=1e-6)
    assert clipped.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("tokens", [1, 40, 600])
def test_entropy_through_the_chunked_head(tokens: int, temperature: float) -> None:
    """State and weight gradient of sum c log p - h H, over block, chunk and piece borders; some p underflow."""
    g = torch.Generator().manual_seed(tokens)
    h = (8 * torch.randn(tokens, 24, generator=g)).requires_grad_()
    w = torch.randn(150, 24, generator=g, requires_grad=True)
    targets = torch.randint(0, 150, (tokens,), generator=g)
    c, bonus = torch.randn(tokens, generator=g), torch.randn(tokens, generator=g)
    full = (h.double() @ w.double().T / temperature).log_softmax(-1)
    lp = full.gather(1, targets[:, None])[:, 0]
    (lp * c + bonus * (full.exp() * full).sum(-1)).sum().backward()
    grad = torch.zeros(150, 24)
    got, dh = head.head_backward(
        h.detach(),
        Linear(w, None, torch.float32),
        w.detach(),
        targets,
        temperature,
        lambda _, part: (c[part], bonus[part]),
        grad.add_,
    )
    assert h.grad is not None
    assert w.grad is not None
    assert (got - lp).abs().max() < 1e-3
    assert (dh - h.grad).abs().max() < 1e-4 * h.grad.abs().max()
    assert (grad - w.grad).abs().max() < 1e-4 * w.grad.abs().max()


def test_entropy_is_maximised(folder: Path) -> None:
    """With no advantage the bonus alone flattens the distribution."""
    engine = backend(folder, beta=0.0, entropy_coef=1.0)
    b = batch(parts=False)
    flat = replace(
        b, groups=tuple(replace(g, samples=tuple(_without_advantage(s) for s in g.samples)) for g in b.groups)
    )
    twin = Naive(folder, {})
    prefix, sample = flat.groups[0].prefix, flat.groups[0].samples[0]
    before = float(twin.logps(twin.module, prefix, sample.tokens, flat.temperature)[1][-1].detach())
    for _ in range(10):
        engine.update(flat)
    tails = [[(*sample.tokens[:-1], v) for v in range(VOCAB)]]
    lp = engine.policy.logprobs([(prefix, tails[0])], flat.temperature)[0]
    last = np.array([row[-1] for row in lp])
    after = -float((np.exp(last) * last).sum())
    assert after > before + 0.1


def _without_advantage(s: TrainSample) -> TrainSample:
    return replace(s, advantages=np.zeros(len(s.tokens)))


def test_a_batch_of_likelihoods_alone_steps(folder: Path) -> None:
    """No policy token: the step is taken, its statistics are 0, the reference is not run."""
    sample = TrainSample((10, 20, 30, 40), np.full(4, np.nan), np.full(4, 0.25), "reflect")
    engine = backend(folder)
    engine.reference = None  # type: ignore[assignment]
    data = TokenBatch((TrainGroup((1, 2, 3), (sample,)),), 1.0)
    losses = [engine.update(data) for _ in range(5)]
    assert all(s.stepped for s in losses)
    assert (losses[0].loss_pg, losses[0].kl, losses[0].clip_frac, losses[0].entropy) == (0.0, 0.0, 0.0, 0.0)
    values = [s.losses["reflect"] for s in losses]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0] - 0.5


def test_minibatches_scale_each_part_to_its_own_whole(folder: Path) -> None:
    """Two minibatches over four groups: every part has the weight of its own whole wherever it occurs."""
    b = batch()
    whole = learner._weights(b.groups)
    for k in range(2):
        share = learner._scaled(b.groups[k::2], b.groups)
        for part, total in learner._weights(share).items():
            assert total == pytest.approx(whole[part], rel=1e-12)
        assert {s.part for g in share for s in g.samples} == {
            s.part for g in b.groups[k::2] for s in g.samples
        }
    stats = backend(folder, minibatches=2, lr=1e-9).update(b)
    assert stats.stepped
    twin = Naive(folder, {})
    want = twin.losses(b, twin.old(b))
    # `retry` stands in one minibatch only, so its scaled value is exact; `reflect` is a mean over both
    assert stats.losses["retry"] == pytest.approx(float(want["retry"].detach()), rel=1e-3)
    assert math.isfinite(stats.losses["reflect"])


@pytest.mark.parametrize("limit", [1, 15, 40])
def test_micro_batches_do_not_change_gradient_or_losses(folder: Path, limit: int) -> None:
    want, got = (gradient(backend(folder, **c), batch()) for c in ({}, {"max_tokens_per_microbatch": limit}))
    same(got, want, 1e-5)
    a, b = (backend(folder, **c).update(batch()) for c in ({}, {"max_tokens_per_microbatch": limit}))
    for part, value in a.losses.items():
        assert b.losses[part] == pytest.approx(value, rel=1e-5)


def test_what_is_not_used_changes_no_bit(folder: Path) -> None:
    """Entropy 0 and a clip_high equal to clip are the plain loss: weights and statistics bit for bit."""
    plain = {"clip_high": None, "entropy_coef": 0.0, "epochs": 2}
    runs: list[tuple[UpdateStats, dict[str, torch.Tensor]]] = []
    for change in (plain, {**plain, "clip_high": 0.02}):
        engine = backend(folder, **change)
        runs.append((replace(engine.update(batch(parts=False)), seconds=0.0), engine.state_tensors()))
    (stats, weights), (other, others) = runs
    assert stats == other
    assert all(torch.equal(weights[n], others[n]) for n in weights)


@pytest.mark.parametrize(("key", "value"), [("clip_high", 0.0), ("clip_high", -0.1), ("entropy_coef", -1.0)])
def test_settings_that_cannot_work(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match="clip_ratio_high" if key == "clip_high" else key):
        OptimSettings(**{key: value})


def test_the_config_reaches_the_settings() -> None:
    from racelab.configs.compose import compose
    from racelab.experiments.learning import learner_settings

    words = [
        "task=frozenlake",
        "learner.entropy_coef=0.07",
        "learner.clip_ratio_high=0.3",
        "learner.clip_ratio=0.2",
    ]
    got = learner_settings(compose(words).config)
    assert (got.entropy_coef, got.clip, got.clip_high) == (0.07, 0.2, 0.3)
    plain = learner_settings(compose(["method=race"]).config)
    assert (plain.entropy_coef, plain.clip_high) == (0.0, None)
