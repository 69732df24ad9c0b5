"""What a comparison of RLDS conditions says, in sentences; nothing about what was not run, or did not happen.

Each sentence names all that tells its two sides apart: base-reflection differs from rlvr in its retries, in the
auxiliary loss that learns from them, and in the size of its groups, and no difference here takes these apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from racelab.analysis.rlds_words import too_few

if TYPE_CHECKING:
    from racelab.analysis.rlds_curves import Curve

Named = Mapping[str, "Mapping[int, Curve]"]
SDAE, ROLLOUT, RANDOM, NO_AUX, NO_KERNEL = (
    ("rlds", "base-reflection"),
    ("base-reflection", "rlvr"),
    ("rlds", "rlds-random-grades"),
    ("rlds", "rlds-no-aux"),
    ("rlds", "rlds-no-kernel"),
)
"""Each answers a question: what SDAE changes, the reflect-retry rollout, the grades' content, L_aux, the kernel."""
ARMS: Final = (RANDOM, NO_AUX, NO_KERNEL)


def verdicts(differences: Mapping[str, Mapping[str, Any]], by_name: Named) -> list[str]:
    """A sentence for each question that the runs can answer.

    Args:
        differences: "a - b" -> its value and interval.
        by_name: condition -> seed -> curve.
    """
    sdae, rollout, random, no_aux, no_kernel = (
        differences.get(" - ".join(pair)) for pair in (SDAE, ROLLOUT, *ARMS)
    )
    said, parts = [], []
    if sdae is not None and all(_retried(by_name, name) for name in SDAE):
        parts.append(f"by {_said(sdae)} against the same retries with GRPO")
    if random is not None:
        parts.append(f"by {_said(random)} against itself with random grades and pivots")
    if parts:
        said.append(f"SDAE changes the reward {', and '.join(parts)}.")
    if rollout is not None and _retried(by_name, ROLLOUT[0]):
        said.append(f"{_rollout(by_name)} changes the reward by {_said(rollout)} against scalar GRPO.")
    if no_aux is not None and any(curve.pairs for curve in by_name["rlds"].values()):
        said.append(f"Without the auxiliary loss rlds {_lost(no_aux)}.")
    if no_kernel is not None:
        said.append(f"The pivot kernel changes the reward by {_said(no_kernel)}.")
    return said


def without_retries(by_name: Named) -> list[str]:
    """A note on the conditions that would have retried failures and never did."""
    names = [
        name
        for name, of in by_name.items()
        if next(iter(of.values())).condition != "rlvr" and not _retried(by_name, name)
    ]
    words = "no retry was made, so nothing is said of what retries add"
    return [f"{', '.join(names)}: {words}"] if names else []


def _retried(by_name: Named, name: str) -> bool:
    return any(curve.retries for curve in by_name[name].values())


def _rollout(by_name: Named) -> str:
    """What base-reflection has and rlvr has not, with the sizes of the groups."""
    reflect, scalar = (next(iter(by_name[name].values())).config.method for name in ROLLOUT)
    auxiliary = reflect.auxiliary.reflect_coef or reflect.auxiliary.retry_coef
    loss = "with its auxiliary loss" if auxiliary else "without an auxiliary loss"
    return (
        f"The reflect-retry rollout {loss} (G = {reflect.group_size} + retries against {scalar.group_size})"
    )


def _said(found: Mapping[str, Any]) -> str:
    return f"{found['value']:+.3f} {_interval(found, found['low'], found['high'], '+.3f')}"


def _lost(found: Mapping[str, Any]) -> str:
    """The difference rlds - arm as what rlds loses in the arm, or gains there where it is negative."""
    value, low, high = found["value"], found["low"], found["high"]
    if value >= 0:
        return f"loses {value:.3f} {_interval(found, low, high, '.3f')}"
    if low is not None:
        low, high = -high, -low
    return f"gains {-value:.3f} {_interval(found, low, high, '.3f')}"


def _interval(found: Mapping[str, Any], low: float | None, high: float | None, form: str) -> str:
    if low is None or high is None:
        return f"({too_few(found['examples'])})"
    words = f"[{low:{form}}, {high:{form}}]"
    return words if found["resolved"] else f"{words} (not resolved)"
