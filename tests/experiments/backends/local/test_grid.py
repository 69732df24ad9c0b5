"""The grid transformer: tree-shaped computation against plain sequences in float64, and as a model of the backend."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from racelab.experiments.backends.local import grid_tree
from racelab.experiments.backends.local.grid import GridModel, open_grid_model
from racelab.experiments.backends.local.head import LossTerms
from racelab.experiments.backends.local.learner import LocalBackend
from racelab.experiments.backends.local.optim import OptimSettings
from racelab.experiments.backends.local.packing import Group
from racelab.experiments.errors import CheckpointError, DataError, ModelError
from racelab.experiments.models.assets import model_sha256
from racelab.experiments.types import TokenBatch, TrainGroup, TrainSample

from ...grid_models import TURNS, doubles, plain_logits, plain_shares, small_model, some_boards

VOCAB, HEADER = 18, 10  # 3x3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tails(rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
    """Action, position, action, ...; few different ones, so that many begin alike; some hints, some odd tokens."""
    made = []
    for _ in range(count):
        tail = [int(rng.integers(5, 7))]
        for _ in range(int(rng.integers(0, TURNS))):
            hint = int(rng.integers(0, 5)) if rng.random() < 0.2 else 0
            tail += [9 + int(rng.integers(0, 2)) + VOCAB * hint, int(rng.integers(5, 7))]
        if rng.random() < 0.2:
            tail[-1] = int(rng.integers(0, VOCAB))
        made.append(tuple(tail))
    return made


def batch_of_groups(seed: int = 0) -> list[Group]:
    """Boards with several groups (another first token, replayed turns), and boards with one."""
    rng, boards = np.random.default_rng(seed), some_boards(4)
    groups: list[Group] = []
    for b in range(4):
        head = (4, *boards.cells_MC[b].tolist())
        start = 9 + int(boards.start_M[b])
        groups.append(((*head, start), tails(rng, 7)))
        if b % 2:
            groups.append(((*head, start + VOCAB * 3), tails(rng, 3)))
            groups.append(((*head, start, 5, 9), [t[:5] for t in tails(rng, 2)]))
    return groups


def plain(model: GridModel, groups: list[Group], temperature: float) -> torch.Tensor:
    w = doubles(model)
    with torch.no_grad():
        return torch.cat(
            [
                plain_shares(model.spec, w, prefix, tail, temperature)
                .gather(1, torch.tensor([t % VOCAB for t in tail])[:, None])
                .squeeze(1)
                for prefix, some in groups
                for tail in some
            ]
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_log_prob_is_that_of_the_whole_sequence_alone(temperature):
    model, groups = small_model(), batch_of_groups()
    expected = plain(model, groups, temperature)
    assert float(expected.std()) > 0.5
    torch.testing.assert_close(model.score(groups, temperature).double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("most", "close"), [(1, 1.0), (5, 1.0), (30, 9.0)])
def test_how_trees_are_cut_and_binned_changes_nothing(monkeypatch, most, close):
    model, groups = small_model(), batch_of_groups(1)
    monkeypatch.setattr(grid_tree, "_MOST_NODES", most)
    monkeypatch.setattr(grid_tree, "_CLOSE", close)
    torch.testing.assert_close(
        model.score(groups, 1.0).double(), plain(model, groups, 1.0), atol=2e-5, rtol=2e-5
    )


def test_what_begins_alike_is_computed_once():
    model = small_model()
    (prefix, _), *_ = batch_of_groups()
    tail = (5, 9, 6, 10, 5)
    forest = grid_tree.plant(model.spec, [(prefix, [tail] * 9), (prefix, [(*tail, 9, 7), (6,)])])
    # Header, start, and the inputs of (5, 9, 6, 10, 5, 9, 7) but its last.
    assert [len(part.chunk.ids) for part in forest] == [HEADER + 1 + 6]
    assert sum(len(part.rows) for part in forest) == 9 * 5 + 7 + 1


def test_the_port_form_gives_one_array_per_tail_and_empty_ones():
    model = small_model()
    (prefix, some), *_ = batch_of_groups()
    got = model.logprobs([(prefix, [some[0], (), some[1]]), (prefix, [])], 0.7)
    assert [[len(a) for a in row] for row in got] == [[len(some[0]), 0, len(some[1])], []]
    flat = plain(model, [(prefix, [some[0], some[1]])], 0.7).numpy()
    np.testing.assert_allclose(np.concatenate(got[0]), flat, atol=2e-5)


def loss_terms(n: int, seed: int) -> tuple[LossTerms, np.ndarray]:
    """Every part of the loss at once: clipped ratio, KL, entropy; a fifth of the tokens are NLL, a fifth weigh 0."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 5, size=n)
    weights = torch.tensor(np.where(kind == 0, 0.0, rng.uniform(0.01, 0.05, n)), dtype=torch.float32)
    policy = torch.tensor(kind != 1)
    return (
        LossTerms(
            advantages=torch.tensor(rng.normal(size=n), dtype=torch.float32),
            weights=weights,
            old=None,
            reference=None,
            clip=0.05,
            beta=0.3,
            clip_high=0.1,
            policy=policy,
            entropy=0.2 * weights * policy,
        ),
        rng.normal(scale=0.2, size=n),
    )


def test_gradients_are_those_of_a_plain_autograd_of_the_whole_loss():
    model, other, groups, temperature = small_model(), small_model(seed=5), batch_of_groups(), 0.8
    n = sum(len(t) for _, some in groups for t in some)
    terms, shift = loss_terms(n, 0)
    old = (plain(model, groups, temperature) + torch.tensor(shift)).float()

    def coefficient(reference):
        def slope(logp, part):
            full = replace(terms, old=old, reference=reference)
            return full.evaluate(logp, part)[0], full.entropy[part]

        return slope

    flat = model.accumulate(groups, temperature, coefficient, other.frozen_copy())
    torch.testing.assert_close(flat.double(), plain(model, groups, temperature), atol=2e-5, rtol=2e-5)

    w, reference = doubles(model), plain(other, groups, temperature)
    shares = torch.cat([plain_shares(model.spec, w, p, t, temperature) for p, some in groups for t in some])
    targets = torch.tensor([i % VOCAB for _, some in groups for t in some for i in t])
    logp = shares.gather(1, targets[:, None]).squeeze(1)
    entropy = -(shares.exp() * shares).sum(1)
    ratio, a = (logp - old.double()).exp(), terms.advantages.double()
    surrogate = -torch.minimum(ratio * a, ratio.clamp(0.95, 1.1) * a)
    delta = reference - logp
    policy_loss = surrogate + 0.3 * (delta.exp() - delta - 1) - 0.2 * entropy
    (terms.weights.double() * torch.where(terms.policy, policy_loss, -logp)).sum().backward()
    for name, master in model.core.masters.items():
        grad = w[name].grad
        scale = float(grad.abs().max())
        torch.testing.assert_close(
            master.grad.double(),
            grad,
            atol=1e-4 * scale + 1e-9,
            rtol=1e-3,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_gradients_add_up_and_a_weightless_token_gives_none():
    model, groups = small_model(), batch_of_groups()
    zero = lambda _: lambda logp, part: (torch.zeros_like(logp), None)  # noqa: E731
    one = lambda _: lambda logp, part: (torch.ones_like(logp), torch.ones_like(logp))  # noqa: E731
    model.accumulate(groups, 1.0, zero, None)
    assert all(float(w.grad.abs().max()) == 0 for w in model.core.masters.values())
    model.accumulate(groups, 1.0, one, None)
    once = model.core.masters["head"].grad.clone()
    model.accumulate(groups, 1.0, one, None)
    torch.testing.assert_close(model.core.masters["head"].grad, 2 * once)


def test_decoding_gives_the_logits_of_the_whole_sequence():
    """Three boards; leaves split, stop, and whole boards end, so that the cache is cut."""
    model, boards, rng = small_model(), some_boards(4, seed=3), np.random.default_rng(0)
    heads = [(4, *c) for c in boards.cells_MC.tolist()]
    decoder = model.decoder(boards.cells_MC.astype(np.int64), capacity=3 * (2 * TURNS - 1))
    w = doubles(model)
    paths = [list(h) for h in heads]
    for turn in range(TURNS):
        if turn == 0:
            parents = np.array([0, 0, 1, 2, 3, 3])
        else:
            alive = [j for j, p in enumerate(paths) if not (turn >= 2 and tuple(p[:HEADER]) in heads[1:3])]
            parents = np.array(sorted({alive[0], alive[-1], *alive[:2]}))
        new = np.stack([rng.integers(0, VOCAB, len(parents)), 9 + rng.integers(0, 9, len(parents))], axis=1)
        new[:, 1] += VOCAB * rng.integers(0, 5, len(parents))
        if turn == 0:
            new = new[:, 1:]
        logits = decoder.extend(parents, new)
        paths = [paths[p] + row for p, row in zip(parents.tolist(), new.tolist(), strict=True)]
        with torch.no_grad():
            expected = torch.stack([plain_logits(model.spec, w, path)[-1] for path in paths])
        torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-4)


# ---- as a model of the backend ---------------------------------------------------------------------------


def token_batch(seed: int = 0) -> TokenBatch:
    rng = np.random.default_rng(seed)
    groups = []
    for j, (prefix, some) in enumerate(batch_of_groups(seed)):
        samples = [
            TrainSample(
                t,
                rng.normal(size=len(t)),
                np.where(np.arange(len(t)) % 2 == 0, 0.02, 0.0),
                part="retry" if j == 1 else "policy",
            )
            for t in some
        ]
        groups.append(TrainGroup(tuple(prefix), tuple(samples)))
    return TokenBatch(tuple(groups), 0.9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_model().save(tmp_path / "model")


def backend(folder: Path) -> LocalBackend[GridModel]:
    settings = OptimSettings(lr=1e-2, beta=0.01, clip=0.28, entropy_coef=0.03, max_tokens_per_microbatch=256)
    return LocalBackend(open_grid_model(folder), settings)


def test_the_backend_trains_it_and_resumes_it_exactly(folder: Path):
    one = backend(folder)
    stats = [one.update(token_batch(k)) for k in range(2)]
    assert all(s.stepped and s.grad_norm > 0 for s in stats)
    assert stats[0].losses["retry"] > 0
    assert stats[0].kl == pytest.approx(0, abs=1e-6)
    assert stats[1].kl > 1e-5
    tensors = {name: t.clone() for name, t in one.state_tensors().items()}
    two = backend(folder)
    two.load_state(tensors, one.state_meta())
    one.update(token_batch(2))
    two.update(token_batch(2))
    assert all(torch.equal(one.state_tensors()[n], t) for n, t in two.state_tensors().items())
    assert not torch.equal(
        one.policy.core.masters["layers.0.qkv"], one.reference.core.masters["layers.0.qkv"]
    )


def test_a_frozen_copy_does_not_move(folder: Path):
    b = backend(folder)
    groups = batch_of_groups()
    before = b.reference.score(groups, 1.0)
    b.update(token_batch())
    assert torch.equal(b.reference.score(groups, 1.0), before)
    assert not torch.equal(b.policy.score(groups, 1.0), before)
    assert b.reference.core.train_from is None
    assert not any(w.requires_grad for w in b.reference.core.masters.values())


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path):
    other = small_model(seed=1).save(tmp_path / "other")
    assert model_sha256(folder) != model_sha256(other)
    b = backend(folder)
    with pytest.raises(CheckpointError, match="base_sha256"):
        b.load_state(b.state_tensors(), backend(other).state_meta())


def test_saved_weights_come_back_and_equal_ones_give_equal_bytes(folder: Path, tmp_path: Path):
    again = open_grid_model(folder).save(tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    with pytest.raises(ModelError, match="already holds weights"):
        open_grid_model(folder).save(again)
    assert open_grid_model(folder, role="frozen").core.train_from is None


def test_the_parameters_are_counted():
    # 4x4: embeddings (25 + 5 + 38 + 5 + 5) 96 = 7,488; 3 layers of 12 · 96² + 2 · 96 = 110,784; norm 96; head 2,400.
    from racelab.experiments.backends.local.grid import new_grid_model
    from racelab.experiments.backends.local.grid_net import GridSpec

    model = new_grid_model(GridSpec(4, 96, 3, 4, 10), torch.Generator().manual_seed(0))
    assert model.n_parameters == 7_488 + 3 * 110_784 + 96 + 2_400 == 342_336


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "model_type racelab-grid"),
        (lambda f: (f / "model.safetensors").write_bytes(b"no"), "cannot be read"),
        (lambda f: (f / "model.safetensors").unlink(), "cannot be read"),
        (lambda f: _set(f, "side", 4), "do not fit config.json"),
        (lambda f: _set(f, "heads", 3), "width is no size"),
        (lambda f: _set(f, "layers", "2"), "layers is no size"),
    ],
)
def test_a_damaged_folder_is_named(folder: Path, spoil, says):
    spoil(folder)
    with pytest.raises(ModelError, match=says) as error:
        open_grid_model(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def _set(folder: Path, key: str, value: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))


HEAD_3 = (4, 0, 1, 0, 0, 0, 0, 0, 0, 2)


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ((HEAD_3, [(5,)]), "needs 10 for the board and a position"),
        (((5, *HEAD_3[1:], 9), [(5,)]), "does not open with the board's 10 tokens"),
        (((*HEAD_3[:9], 7, 9), [(5,)]), "does not open with the board's 10 tokens"),
        (((*HEAD_3, 9), [(5,) * 13]), "exceeds the grid model's window of 23"),
        (((*HEAD_3, 9), [(90,)]), r"outside 0\.\.89"),
        (((*HEAD_3, 9), [(-1,)]), r"outside 0\.\.89"),
    ],
)
def test_sequences_of_another_kind_are_refused(group: Group, says):
    with pytest.raises(DataError, match=says):
        small_model().check_groups([group])
