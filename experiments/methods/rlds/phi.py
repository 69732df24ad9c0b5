"""Dynamic subtask weights: the Dirichlet extension that RLDS §6 sketches in one sentence. Off by default.

"place a Dirichlet prior over the weights and update its concentration from the observed deltas, so subtasks that
consistently benefit from reflection are upweighted online while saturated ones decay." No formula is given. Ours:

    prior          alpha0_k = S phi_k                           S = `phi_prior`, in observations; phi the static weights
    observation    z_jk = phi_k max(d_jk, 0) / sum_l phi_l max(d_jl, 0)      d_jk = grade of retry j less its original's
    concentration  e_k <- (1 - eta) e_k + eta sum_j z_jk,  alpha_k = S phi_k + e_k
    weights        E[phi_k] = alpha_k / sum_l alpha_l

- A retry is one observation, shared out over the subtasks that it improved. One that improved none is none.
- Shares are proportional to phi_k: where every subtask gains alike the weights stay where they are.
- e is a running mean of a step's observations, so it is bounded by the retries of a step: no weight falls below
  S phi_k / (S + retries). A subtask that stops gaining loses its evidence at the rate eta, on steps without retries,
  too; without any gains the weights go back to the static ones.
- eta = 0 is the paper's method: the static weights, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from racelab.experiments.types import FloatArray


@dataclass(frozen=True, slots=True)
class DynamicPhi:
    """Static weights, and what was observed on top.

    Attributes:
        static_K: phi; sums to 1.
        prior: S > 0.
        eta: in [0, 1].
        evidence_K: e; () before the first observation.
    """

    static_K: tuple[float, ...]
    prior: float
    eta: float
    evidence_K: tuple[float, ...] = ()

    @property
    def weights_K(self) -> FloatArray:
        """The weights of the next step [K]; exactly `static_K` while there is no evidence."""
        static_K, evidence_K = np.array(self.static_K), np.array(self.evidence_K)
        if not evidence_K.any():
            return static_K
        concentration_K = self.prior * static_K + evidence_K
        return np.asarray(concentration_K / concentration_K.sum())

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "static": list(self.static_K),
            "prior": self.prior,
            "eta": self.eta,
            "evidence": list(self.evidence_K),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> DynamicPhi:
        """Undoes `state`."""
        return cls(tuple(state["static"]), state["prior"], state["eta"], tuple(state["evidence"]))


def update(phi: DynamicPhi, deltas_RK: FloatArray) -> DynamicPhi:
    """The weights after one step.

    Args:
        phi: those of the step.
        deltas_RK: grades of each retry less those of its original, pairs graded on both sides; may be empty.

    Raises:
        ValueError: not one column per subtask.
    """
    static_K = np.array(phi.static_K)
    if deltas_RK.ndim != 2 or deltas_RK.shape[1] != len(static_K):
        raise ValueError(f"retry grade deltas must have shape [R, {len(static_K)}], got {deltas_RK.shape}")
    if phi.eta == 0.0:
        return phi
    gain_RK = static_K * np.maximum(deltas_RK, 0.0)
    total_R = gain_RK.sum(1)
    observed_K = (gain_RK[total_R > 0] / total_R[total_R > 0, None]).sum(0)
    before_K = np.array(phi.evidence_K) if phi.evidence_K else np.zeros(len(static_K))
    evidence_K = (1.0 - phi.eta) * before_K + phi.eta * observed_K
    return replace(phi, evidence_K=tuple(evidence_K.tolist()))
