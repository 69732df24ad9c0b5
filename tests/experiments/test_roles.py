"""Several sets of weights over one backend: each is trained as if it were alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from racelab.experiments.backends.local.learner import LocalBackend, OptimSettings
from racelab.experiments.backends.local.model import open_language_model
from racelab.experiments.backends.roles import RoleBackend
from racelab.experiments.errors import CheckpointError
from racelab.experiments.ports import Backend
from racelab.experiments.ports import RoleBackend as Port
from racelab.experiments.types import TokenBatch, TrainGroup, TrainSample

from .local_models import VOCAB, write_model

ROLES = ("policy", "generator", "judge")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_model(request.param, path)
    return path


def plain(folder: Path, dtype: str = "float32") -> LocalBackend:
    model = open_language_model(folder, compute_dtype=dtype)  # type: ignore[arg-type]
    settings = OptimSettings(
        lr=1e-2, beta=0.1, schedule="linear", warmup_steps=2, total_steps=9, weight_decay=0.1
    )
    return LocalBackend(model, settings)


def batch(seed: int) -> TokenBatch:
    rng = np.random.default_rng(seed)
    draw = lambda n: tuple(int(t) for t in rng.integers(0, VOCAB - 4, n))  # noqa: E731
    samples = tuple(TrainSample(draw(n), rng.normal(size=n), np.full(n, 0.02)) for n in (4, 6))
    return TokenBatch((TrainGroup(draw(5), samples),))


def same(a: Any, b: Any) -> bool:
    left, right = a.state_tensors(), b.state_tensors()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interleaved_roles_are_as_if_each_were_alone(folder, dtype):
    """Weights, moments, step counts and the learning rate of each role are those of a backend of its own."""
    roles = RoleBackend(plain(folder, dtype), ROLES)
    alone = {role: plain(folder, dtype) for role in ROLES}
    stats: dict[str, list[float]] = {}
    for k, role in enumerate(["generator", "judge", "generator", "policy", "judge", "generator"]):
        roles.switch(role)
        mine, theirs = roles.update(batch(k)), alone[role].update(batch(k))
        stats.setdefault(role, []).append(mine.lr)
        assert (mine.lr, mine.kl, mine.grad_norm) == (theirs.lr, theirs.kl, theirs.grad_norm)
    assert stats["generator"] == [5e-3, 1e-2, 1e-2]
    for role in ROLES:
        roles.switch(role)
        assert same(roles._backend, alone[role])
        assert roles._backend.state_meta() == alone[role].state_meta()
        got = roles.policy.logprobs([((1, 2), [(3, 4)])])[0][0]
        np.testing.assert_array_equal(got, alone[role].policy.logprobs([((1, 2), [(3, 4)])])[0][0])


def test_the_reference_is_the_same_for_all(folder):
    roles = RoleBackend(plain(folder), ROLES)
    before = roles.reference.logprobs([((1, 2), [(3, 4)])])[0][0]
    for role in ROLES:
        roles.switch(role)
        roles.update(batch(0))
        np.testing.assert_array_equal(roles.reference.logprobs([((1, 2), [(3, 4)])])[0][0], before)


def test_it_is_a_backend_with_roles(folder):
    roles = RoleBackend(plain(folder), ROLES)
    assert isinstance(roles, Backend)
    assert isinstance(roles, Port)
    assert not isinstance(plain(folder), Port)
    assert roles.role == "policy"


def test_roles_that_were_never_updated_cost_nothing(folder):
    roles = RoleBackend(plain(folder), ROLES)
    for role in (*ROLES, "policy"):
        roles.switch(role)
        roles.update(TokenBatch(()))
    assert roles.state_tensors() == {}
    assert roles.state_meta() == {"role": "policy", "roles": {}}
    roles.switch("judge")
    roles.update(batch(0))
    roles.switch("policy")
    assert {name.split("/")[0] for name in roles.state_tensors()} == {"judge"}


def test_a_checkpoint_in_the_middle_goes_on_bit_by_bit(folder):
    script = ["generator", "judge", "generator", "policy", "generator", "judge", "policy"]
    whole, first, second = (RoleBackend(plain(folder), ROLES) for _ in range(3))
    for k, role in enumerate(script):
        whole.switch(role)
        whole.update(batch(k))
    for k, role in enumerate(script[:3]):
        first.switch(role)
        first.update(batch(k))
    first.switch("policy")  # not updated yet
    tensors = {name: t.clone() for name, t in first.state_tensors().items()}
    meta = json.loads(json.dumps(first.state_meta()))
    assert not any(name.startswith("policy/") for name in tensors)
    second.load_state(tensors, meta)
    assert second.role == "policy"
    assert same(second, first)
    for k, role in enumerate(script[3:], 3):
        second.switch(role)
        second.update(batch(k))
    assert same(second, whole)
    assert second.state_meta() == whole.state_meta()


def test_loading_replaces_what_was_trained_meanwhile(folder):
    """The policy had no update when the state was written: it is at the start again."""
    roles, fresh = RoleBackend(plain(folder), ROLES), plain(folder)
    roles.switch("judge")
    roles.update(batch(0))
    roles.switch("policy")
    tensors = {name: t.clone() for name, t in roles.state_tensors().items()}
    meta = roles.state_meta()
    roles.update(batch(1))
    roles.load_state(tensors, meta)
    assert same(roles._backend, fresh)
    roles.switch("generator")
    assert same(roles._backend, fresh)


def test_stored_states_are_copies(folder):
    """A role that waits does not change with the one that is trained, nor with tensors that were given to load."""
    roles = RoleBackend(plain(folder), ROLES)
    roles.switch("judge")
    roles.update(batch(0))
    roles.switch("policy")
    given = {name: t.clone() for name, t in roles.state_tensors().items()}
    before = {name: t.clone() for name, t in given.items()}
    roles.load_state(given, roles.state_meta())
    roles.switch("judge")
    roles.update(batch(1))
    roles.switch("generator")
    roles.update(batch(2))
    assert all(torch.equal(given[name], before[name]) for name in before)


def test_faults(folder):
    with pytest.raises(ValueError, match="different names"):
        RoleBackend(plain(folder), ["a", "a"])
    with pytest.raises(ValueError, match="slash"):
        RoleBackend(plain(folder), ["a/b"])
    roles = RoleBackend(plain(folder), ROLES)
    with pytest.raises(ValueError, match="no role 'critic'"):
        roles.switch("critic")
    one = plain(folder)
    one.update(batch(0))
    with pytest.raises(CheckpointError, match="resume with the method"):
        roles.load_state(one.state_tensors(), one.state_meta())
    other = RoleBackend(plain(folder), ["policy", "critic"])
    other.switch("critic")
    other.update(batch(0))
    with pytest.raises(CheckpointError, match="roles policy, generator, judge"):
        roles.load_state(other.state_tensors(), other.state_meta())
    roles.switch("judge")
    roles.update(batch(0))
    meta = roles.state_meta()
    meta["roles"]["judge"] = {**meta["roles"]["judge"], "base_sha256": "0"}
    with pytest.raises(CheckpointError, match="base_sha256"):
        roles.load_state(roles.state_tensors(), meta)
