"""The learner against a naive autograd implementation of Eq 4, and its bookkeeping."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from racelab.experiments.backends.local import head, learner
from racelab.experiments.backends.local.kernels import Linear
from racelab.experiments.backends.local.learner import LocalBackend, OptimSettings
from racelab.experiments.backends.local.model import open_language_model, split_groups
from racelab.experiments.errors import CheckpointError, ConfigError, DataError
from racelab.experiments.ports import Backend
from racelab.experiments.types import GenerationRequest, TokenBatch, TrainGroup, TrainSample

from .local_models import VOCAB, write_model


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_model(request.param, path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_model("llama", path)
    return path


def backend(folder: Path, train_from: int = 0, dtype: str = "float32", **settings: Any) -> LocalBackend:
    model = open_language_model(folder, compute_dtype=dtype, train_from_layer=train_from)  # type: ignore[arg-type]
    return LocalBackend(model, OptimSettings(**{"lr": 1e-2, **settings}))


def batch(seed: int = 0, temperature: float = 1.0) -> TokenBatch:
    """Three groups of unequal shape; token weights and advantages of both signs, all different."""
    rng = np.random.default_rng(seed)

    def draw(n: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(0, VOCAB - 4, n))

    groups = []
    for p, tails in ((5, (4, 7)), (1, (3,)), (20, (6, 25, 2))):
        samples = tuple(TrainSample(draw(n), rng.normal(size=n), rng.uniform(0.01, 0.05, n)) for n in tails)
        groups.append(TrainGroup(draw(p), samples))
    return TokenBatch(tuple(groups), temperature)


def module_logps(module: nn.Module, b: TokenBatch) -> torch.Tensor:
    out = []
    for g in b.groups:
        for s in g.samples:
            ids = torch.tensor([[*g.prefix, *s.tokens]])
            lp = (module(ids).logits[0] / b.temperature).log_softmax(-1)
            out.append(lp[len(g.prefix) - 1 : -1].gather(1, torch.tensor(s.tokens)[:, None])[:, 0])
    return torch.cat(out)


def eq4(
    lp: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, b: TokenBatch, clip: float, beta: float
) -> Any:
    """The loss written as in the paper, in float32 autograd."""
    samples = [s for g in b.groups for s in g.samples]
    adv = torch.tensor(np.concatenate([s.advantages for s in samples]), dtype=torch.float32)
    w = torch.tensor(np.concatenate([s.weights for s in samples]), dtype=torch.float32)
    ratio = (lp - old).exp()
    policy = -torch.minimum(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    kl = (ref - lp).exp() - (ref - lp) - 1
    return (w * (policy + beta * kl)).sum(), (w * policy).sum(), (w * kl).sum() / w.sum()


class Twin:
    """The same model in transformers with the textbook loss and optimiser."""

    def __init__(self, folder: Path, settings: OptimSettings) -> None:
        from transformers import AutoModelForCausalLM

        self.settings = settings
        self.module, self.ref = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0
        )

    def update(self, b: TokenBatch) -> tuple[float, float, float]:
        s = self.settings
        with torch.no_grad():
            old, ref = module_logps(self.module, b), module_logps(self.ref, b)
        for _ in range(s.epochs):
            self.optimizer.zero_grad()
            loss, policy, kl = eq4(module_logps(self.module, b), old, ref, b, s.clip, s.beta)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), s.max_grad_norm)
            self.optimizer.step()
        return policy.item(), kl.item(), norm.item()


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_updates_equal_the_textbook(folder: Path, temperature: float) -> None:
    """Three updates of two epochs, tight clip, large beta: log-probs and statistics as by autograd."""
    settings = OptimSettings(lr=3e-3, beta=0.3, clip=0.02, epochs=2, max_grad_norm=0.5)
    mine = LocalBackend(open_language_model(folder, compute_dtype="float32"), settings)
    twin = Twin(folder, settings)
    for seed in range(3):
        b = batch(seed, temperature)
        stats = mine.update(b)
        _, _, norm = twin.update(b)
        assert stats.stepped
        assert abs(stats.grad_norm - norm) < 2e-3 * norm
    with torch.no_grad():
        want = module_logps(twin.module, b).numpy()
    groups = [(g.prefix, [s.tokens for s in g.samples]) for g in b.groups]
    got = np.concatenate([a for g in mine.policy.logprobs(groups, temperature) for a in g])
    np.testing.assert_allclose(got, want, atol=5e-3)
    assert stats.clip_frac > 0.05
    assert stats.kl > 1e-3


def test_first_step_has_ratio_one(folder: Path) -> None:
    """loss_pg = -sum w A exactly, nothing clipped however tight the clip, kl 0 before the first step."""
    b = batch()
    stats = backend(folder, clip=1e-9, beta=0.1).update(b)
    want = -sum(float((s.weights * s.advantages).sum()) for g in b.groups for s in g.samples)
    assert abs(stats.loss_pg - want) < 1e-6
    assert stats.clip_frac == 0.0
    assert abs(stats.kl) < 1e-7
    assert (stats.n_samples, stats.n_tokens) == (6, 47)


def test_bf16_reference_equals_policy_before_training(llama: Path) -> None:
    """Both run the same kernels, so kl3 is exactly 0 also in bf16, and with frozen lower layers."""
    for train_from in (0, 2):
        assert backend(llama, train_from, "bfloat16", beta=0.1).update(batch()).kl == 0.0


def grads(b: LocalBackend, data: TokenBatch) -> dict[str, torch.Tensor]:
    b._inner(list(data.groups), data.temperature, None, learner._Totals())
    return {n: p.grad.clone() for n, p in b.policy.core.masters.items()}


@pytest.mark.parametrize("limit", [1, 12, 30])
def test_micro_batches_do_not_change_the_gradient(folder: Path, limit: int) -> None:
    want = grads(backend(folder, beta=0.2), batch())
    got = grads(backend(folder, beta=0.2, max_tokens_per_microbatch=limit), batch())
    for name, value in want.items():
        assert (got[name] - value).abs().max() < 1e-5 * value.abs().max().clamp(min=1.0), name


def test_split_groups_respects_limit_and_order() -> None:
    """Prefix 3, samples 4, 4, 4, limit 11: two samples fit with the prefix, the third starts a new piece."""
    groups = [((1, 1, 1), [(2,) * 4, (3,) * 4, (4,) * 4]), ((5,), [(6,)]), ((7,), [])]
    pieces = split_groups(groups, 11)
    assert [[(len(p), [t[0] for t in tails]) for p, tails in piece] for piece in pieces] == [
        [(3, [2, 3])],
        [(3, [4]), (1, [6])],
    ]


def test_minibatches_each_weigh_as_the_whole(llama: Path) -> None:
    b = batch()
    total = sum(float(s.weights.sum()) for g in b.groups for s in g.samples)
    parts = [learner._scaled(b.groups[k::2], b.groups) for k in range(2)]
    for part in parts:
        assert abs(sum(float(s.weights.sum()) for g in part for s in g.samples) - total) < 1e-12
    engine = backend(llama, minibatches=2, epochs=2, lr=1e-3)
    stats = engine.update(b)
    assert stats.stepped
    assert engine.state_meta()["optimizer_steps"] == 4
    assert engine.updates == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("inner", [{"minibatches": 3}, {"epochs": 4}])
def test_later_inner_steps_run_under_the_updated_policy(
    llama: Path, inner: dict[str, int], dtype: str
) -> None:
    """With lr 0+ the later steps' ratio stays 1; with a large lr it moves and a tight clip bites."""
    assert backend(llama, dtype=dtype, lr=1e-12, clip=1e-3, **inner).update(batch()).clip_frac == 0.0
    assert backend(llama, dtype=dtype, lr=1e-2, clip=1e-3, **inner).update(batch()).clip_frac > 0.1


def test_empty_batch_changes_nothing(folder: Path) -> None:
    engine = backend(folder)
    before = {k: v.clone() for k, v in engine.state_tensors().items()}
    none = TrainGroup((1, 2), ())
    blank = TrainGroup((1, 2), (TrainSample((), np.zeros(0), np.zeros(0)),))
    for data in (TokenBatch(()), TokenBatch((none, blank))):
        assert not engine.update(data).stepped
    after = engine.state_tensors()
    assert set(before) == set(after)
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert engine.updates == 0


def test_gradient_that_is_not_finite_is_not_applied(folder: Path) -> None:
    engine = backend(folder)
    before = {k: v.clone() for k, v in engine.state_tensors().items()}
    b = batch()
    sample = b.groups[0].samples[0]
    bad = replace(sample, advantages=np.array([math.inf, *sample.advantages[1:]]))
    group = replace(b.groups[0], samples=(bad, *b.groups[0].samples[1:]))
    stats = engine.update(replace(b, groups=(group, *b.groups[1:])))
    assert not stats.stepped
    assert math.isnan(stats.grad_norm)
    assert engine.skipped == 1
    assert all(torch.equal(v, engine.state_tensors()[k]) for k, v in before.items())
    assert engine.update(b).stepped


def test_training_raises_the_probability_of_what_was_good(folder: Path) -> None:
    engine = backend(folder, lr=3e-3)
    good = TrainSample((10, 20, 30), np.ones(3), np.full(3, 1 / 6))
    poor = TrainSample((40, 50, 60), -np.ones(3), np.full(3, 1 / 6))
    data = TokenBatch((TrainGroup((1, 2, 3), (good, poor)),))

    def score() -> list[float]:
        return [float(a.sum()) for a in engine.policy.logprobs([((1, 2, 3), [good.tokens, poor.tokens])])[0]]

    start = score()
    for _ in range(5):
        engine.update(data)
    assert score()[0] > start[0]
    assert score()[1] < start[1]
    reference = engine.reference.logprobs([((1, 2, 3), [good.tokens])])[0][0]
    assert abs(float(reference.sum()) - start[0]) < 1e-4


def test_generation_sees_the_update(llama: Path) -> None:
    """Compute copies are repacked: after training one answer hard, greedy decoding gives it, in bf16 too."""
    for dtype, train_from in (("float32", 0), ("bfloat16", 1)):
        engine = backend(llama, train_from, dtype, lr=2e-2)
        sample = TrainSample((10, 20, 30, 40), np.ones(4), np.full(4, 0.25))
        for _ in range(40):
            engine.update(TokenBatch((TrainGroup((1, 2, 3), (sample,)),)))
        out = engine.policy.generate([GenerationRequest((1, 2, 3), 1, 4, 0.0)], torch.Generator())
        assert out[0][0].tokens == (10, 20, 30, 40)
        assert engine.reference.generate([GenerationRequest((1, 2, 3), 1, 4, 0.0)], torch.Generator()) != out


def test_same_seed_bit_equal_and_resumed_equals_uninterrupted(folder: Path) -> None:
    settings = {"beta": 0.1, "schedule": "cosine", "total_steps": 9, "warmup_steps": 2}
    whole, again, first, second = (backend(folder, 1, **settings) for _ in range(4))
    for seed in range(4):
        whole.update(batch(seed))
        again.update(batch(seed))
    for seed in range(2):
        first.update(batch(seed))
    tensors = {k: v.clone() for k, v in first.state_tensors().items()}
    second.load_state(tensors, first.state_meta())
    for seed in range(2, 4):
        second.update(batch(seed))
    for other in (again, second):
        for name, value in whole.state_tensors().items():
            assert torch.equal(value, other.state_tensors()[name]), name
        assert other.state_meta() == whole.state_meta()


def test_state_of_another_model_is_refused(folder: Path) -> None:
    engine = backend(folder, 1)
    meta = engine.state_meta()
    with pytest.raises(CheckpointError, match="base_sha256"):
        engine.load_state(engine.state_tensors(), {**meta, "base_sha256": "0" * 64})
    with pytest.raises(CheckpointError, match="train_from_layer"):
        engine.load_state(engine.state_tensors(), {**meta, "train_from_layer": 0})
    with pytest.raises(CheckpointError, match="missing or misshapen"):
        engine.load_state({}, meta)
    assert isinstance(engine, Backend)


def test_schedules() -> None:
    """Warm-up 2 of lr 1: 1/2, 1. Then 4 updates down: line 1, 3/4, 1/2, 1/4, 0; cosine at half way 1/2."""
    line = OptimSettings(lr=1.0, schedule="linear", warmup_steps=2, total_steps=6)
    assert [line.lr_at(i) for i in range(8)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = replace(line, schedule="cosine", min_lr_ratio=0.2)
    assert abs(cosine.lr_at(4) - 0.6) < 1e-12
    assert abs(cosine.lr_at(6) - 0.2) < 1e-12
    assert OptimSettings(lr=1.0, warmup_steps=4).lr_at(100) == 1.0


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"lr": 0.0}, "lr"),
        ({"clip": -1.0}, "clip"),
        ({"beta": -0.1}, "beta"),
        ({"schedule": "step"}, "schedule"),
        ({"schedule": "linear"}, "total_steps"),
        ({"epochs": 0}, "epochs"),
    ],
)
def test_settings_that_cannot_work(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        OptimSettings(**change)


def test_misfit_samples_are_named(llama: Path) -> None:
    engine = backend(llama)
    bad = TrainSample((1, 2), np.zeros(2), np.zeros(1))
    with pytest.raises(DataError, match="2 tokens, 2 advantages and 1 weights"):
        engine.update(TokenBatch((TrainGroup((1,), (bad,)),)))
    long = TrainSample((1,) * 159, np.zeros(159), np.zeros(159))
    with pytest.raises(DataError, match="window"):
        engine.update(TokenBatch((TrainGroup((1, 2), (long,)),)))


def test_roles_and_layers_are_checked(llama: Path) -> None:
    with pytest.raises(ConfigError, match="role='policy'"):
        LocalBackend(open_language_model(llama, role="frozen"), OptimSettings())
    with pytest.raises(ConfigError, match=r"0\.\.2"):
        open_language_model(llama, train_from_layer=3)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("tokens", [1, 40, 1100])
def test_chunked_head_against_autograd(tokens: int, temperature: float) -> None:
    """Log-probs, state gradient and weight gradient of sum c log p, over chunk and block borders."""
    g = torch.Generator().manual_seed(tokens)
    h = torch.randn(tokens, 24, generator=g, requires_grad=True)
    w = torch.randn(150, 24, generator=g, requires_grad=True)
    targets = torch.randint(0, 150, (tokens,), generator=g)
    c = torch.randn(tokens, generator=g)
    lp = (h @ w.T / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (lp * c).sum().backward()
    grad = torch.zeros(150, 24)
    linear = Linear(w, None, torch.float32)
    got, dh = head.head_backward(
        h.detach(), linear, w.detach(), targets, temperature, lambda _, part: (c[part], None), grad.add_
    )
    assert (got - lp).abs().max() < 1e-4
    assert h.grad is not None
    assert w.grad is not None
    assert (dh - h.grad).abs().max() < 1e-4 * h.grad.abs().max()
    assert (grad - w.grad).abs().max() < 1e-4 * w.grad.abs().max()
    assert (head.token_logprobs(h.detach(), linear, targets, temperature) - lp).abs().max() < 1e-4


def test_loss_terms_by_hand() -> None:
    """r = 1.5, A = 2, clip 0.2: policy -min(3, 2.4) = -2.4 and slope 0; A = -2: -min(-3, -2.4) = 3, slope +3.

    kl3 at ref - logp = ln 2: 2 - ln 2 - 1 = 0.306853; its slope is 1 - 2 = -1, times beta 0.5. Weights 0.1.
    """
    old = torch.zeros(2)
    logp = torch.full((2,), math.log(1.5))
    terms = head.LossTerms(
        torch.tensor([2.0, -2.0]), torch.full((2,), 0.1), old, logp + math.log(2), clip=0.2, beta=0.5
    )
    slope, policy, kl, clipped = terms.evaluate(logp, slice(0, 2))
    np.testing.assert_allclose(policy, [-2.4, 3.0], rtol=1e-6)
    np.testing.assert_allclose(kl, [0.306853, 0.306853], rtol=1e-5)
    np.testing.assert_allclose(slope, [-0.05, 0.25], rtol=1e-5)
    assert clipped.tolist() == [1.0, 0.0]
