"""Several sets of trained weights over one backend: one is in it, the others wait in memory.

    backend = RoleBackend(LocalBackend(model, settings), ("policy", "generator", "judge"))
    backend.switch("generator")  # `policy` is the generator now; `update` trains it, with its own optimiser state
    backend.switch("policy")

A role is its weights, the optimiser's moments and step counts, and its place in the schedule of the learning rate.
Every role starts at the weights that the backend had when it was wrapped; all share the frozen reference. A role that
was never updated is not stored. A switch copies what the role at hand has become (if it was updated since it came in)
and loads the other, bit by bit as it was; between two roles with the same state it does nothing.

Cost: with AdamW a role has three float32 numbers a parameter, 420 MB at 35 M trained parameters, in memory for every
role that was updated (one set of starting weights besides) and in every checkpoint. A switch there takes 0.1 to 0.2 s
on one thread once the memory is there, 0.5 to 2 s the first time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from racelab.experiments.errors import CheckpointError
from racelab.experiments.ports import Backend, LanguageModel
from racelab.experiments.types import TokenBatch, UpdateStats

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Held:
    """A role's state, owned: no tensor of it is the backend's."""

    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]


class RoleBackend:
    """Implements `ports.RoleBackend` over another backend, which nobody else may update or load.

    Attributes:
        roles: names; the first is the one that the backend starts in.
        role: the one whose weights `policy` has now.
    """

    def __init__(self, backend: Backend, roles: Sequence[str]) -> None:
        """Wraps a backend that was not trained yet.

        Raises:
            ValueError: no role, a name twice, or a name with a slash.
        """
        if not roles or len(set(roles)) < len(roles) or any("/" in r or not r for r in roles):
            raise ValueError(f"roles {list(roles)}: give different names without a slash")
        self.roles, self.role = tuple(roles), roles[0]
        self._backend = backend
        self._start: _Held | None = None  # copied before the first change; None: nothing has changed yet
        self._stored: dict[str, _Held] = {}  # of the roles that were updated
        self._inside: _Held | None = None  # what the backend was last loaded with; None: the start
        self._updated = False  # since then

    @property
    def policy(self) -> LanguageModel:
        """The model, under the weights of the role at hand."""
        return self._backend.policy

    @property
    def reference(self) -> LanguageModel:
        """The model before any training, the same for all roles."""
        return self._backend.reference

    def update(self, batch: TokenBatch) -> UpdateStats:
        """Trains the role at hand; see the port."""
        if batch.groups:  # an empty batch changes nothing
            self._keep_start()
            self._updated = True
        return self._backend.update(batch)

    def switch(self, role: str) -> None:
        """Makes `role` the one at hand.

        Raises:
            ValueError: there is no such role.
        """
        if role not in self.roles:
            raise ValueError(f"no role {role!r}; there are {', '.join(self.roles)}")
        if role == self.role:
            return
        if self._updated:
            self._inside = self._stored[self.role] = _copy(self._backend, self._stored.get(self.role))
            self._updated = False
        self._load(role)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """`<role>/<name>` of every role that was updated; not copied."""
        return {
            f"{role}/{name}": t for role, held in self._states().items() for name, t in held.tensors.items()
        }

    def state_meta(self) -> dict[str, Any]:
        """The role at hand, and the meta of every role that was updated."""
        return {"role": self.role, "roles": {role: held.meta for role, held in self._states().items()}}

    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        """Restores all roles and the one at hand. See the port.

        Raises:
            CheckpointError: roles that this run has not, or a state that the backend refuses.
        """
        roles = meta.get("roles")
        if not isinstance(roles, Mapping) or not {*roles, meta.get("role")} <= {*self.roles}:
            raise CheckpointError(
                f"checkpoint was not written with the roles {', '.join(self.roles)}; resume with the method of the run "
                "that wrote it"
            )
        self._keep_start()
        self._stored = {
            role: _Held(
                {
                    name.removeprefix(f"{role}/"): t.clone()
                    for name, t in tensors.items()
                    if name.startswith(f"{role}/")
                },
                dict(own),
            )
            for role, own in roles.items()
        }
        self._inside, self._updated = _Held({}, {}), False  # whatever is in it is none of these
        for role in self._stored:  # a state that does not fit is an error now, not at the first switch
            self._load(role)
        self._load(str(meta["role"]))

    def _load(self, role: str) -> None:
        """Loads a role's state, unless the backend has it already."""
        wanted = self._stored.get(role)
        if wanted is not self._inside:
            source = wanted or self._start
            assert source is not None  # something is stored, so something has changed
            self._backend.load_state(source.tensors, source.meta)
            self._inside = wanted
        self.role = role

    def _states(self) -> dict[str, _Held]:
        """Role -> its state as it is now, in the order of `roles`."""
        now = dict(self._stored)
        if self._updated:
            now[self.role] = _Held(self._backend.state_tensors(), self._backend.state_meta())
        return {role: now[role] for role in self.roles if role in now}

    def _keep_start(self) -> None:
        """Copies the starting weights before the first change."""
        if self._start is None:
            self._start = _copy(self._backend, None)


def _copy(backend: Backend, old: _Held | None) -> _Held:
    """The backend's state, in the memory of `old` where that fits."""
    found = backend.state_tensors()
    known = {} if old is None else old.tensors
    tensors = {}
    for name, tensor in found.items():
        if name in known and known[name].shape == tensor.shape:
            tensors[name] = known[name].copy_(tensor)
        else:
            tensors[name] = tensor.detach().clone()
    return _Held(tensors, backend.state_meta())
