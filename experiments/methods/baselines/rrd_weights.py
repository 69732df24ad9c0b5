"""RRD's weights of a prompt's items (Shen et al., 2026): all alike, given, or whitened.

Whitened uniform weights: X [G, I] says which answer satisfies which item.

    S = X'X / G             second moments, not centred; the identity if G <= 1
    S <- 0.9 S + 0.1 I      shrinkage
    S <- S + 1e-4 I         ridge; eigenvalues at least 1e-8
    w ∝ max(S^(-1/2) 1, 0)  sums to 1; all alike if nothing is above 0

Items that hold on the same answers share the weight that one of them would have.
"""

from __future__ import annotations

import numpy as np

from racelab.experiments.types import FloatArray

SHRINKAGE = 0.1
RIDGE = 1e-4
FLOOR = 1e-8


def uniform(n: int) -> FloatArray:
    """1/I for each of the I items [I]."""
    return np.full(n, 1.0 / n) if n else np.zeros(0)


def normalised(raw_I: FloatArray) -> FloatArray:
    """max(raw, 0) over its sum [I]; all alike if nothing is above 0 or a value is not finite."""
    positive_I = np.maximum(np.asarray(raw_I, dtype=np.float64), 0.0)
    largest = positive_I.max(initial=0.0)
    if not 0.0 < largest < np.inf:  # also NaN
        return uniform(len(positive_I))
    scaled_I = positive_I / largest  # keeps the sum of huge numbers finite
    return np.asarray(scaled_I / scaled_I.sum(), dtype=np.float64)


def whitened(holds_GI: FloatArray) -> FloatArray:
    """The whitened uniform weights of the items.

    Args:
        holds_GI: 0, 1 or NaN (counts as 0) [G, I].

    Returns:
        [I], not negative, sums to 1.
    """
    x_GI = np.nan_to_num(np.asarray(holds_GI, dtype=np.float64), nan=0.0)
    g, n = x_GI.shape
    if n == 0:
        return np.zeros(0)
    eye = np.eye(n)
    moments = x_GI.T @ x_GI / g if g > 1 else eye
    moments = (1.0 - SHRINKAGE) * moments + SHRINKAGE * eye + RIDGE * eye
    values, vectors = np.linalg.eigh(moments)
    scaled = vectors.sum(axis=0) / np.sqrt(np.maximum(values, FLOOR))  # V' 1, by eigenvector
    return normalised(vectors @ scaled)
