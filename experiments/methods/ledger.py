"""The cost ledger: model calls of one update, beside two expectations.

`*_printed` is the formula of RACE App. E (Tables 14 and 15) in N, G and I. `*_expected` follows from what happened:
masked groups are not learnt from, an unusable rubric costs no judge call, a small pool gives fewer entries. Only a
difference from the second is an error (`health/cost_mismatch`, the number of kinds that differ); the gap to the first
is what was saved.
"""

from __future__ import annotations

from collections.abc import Mapping

Calls = Mapping[str, int]
"""Kind of call -> number.

policy_gen and rubric_gen: sequences sampled; judge_eval: answers scored by the frozen judge, the verifier or the reward
model; learner_samples: sequences in the learner's batch; external_calls: requests for an API model, those included
that a cache answered (also counted under what they were made for).
"""

KINDS = ("policy_gen", "rubric_gen", "judge_eval", "learner_samples", "external_calls")


def add(*parts: Calls) -> dict[str, int]:
    """The sum, kind by kind."""
    return {kind: sum(part.get(kind, 0) for part in parts) for part in parts for kind in part}


def ledger(measured: Calls, expected: Calls, printed: Calls) -> dict[str, float]:
    """The `cost/calls` metrics and `health/cost_mismatch`.

    Raises:
        ValueError: an unknown kind, or kinds that are measured and not expected, or the reverse.
    """
    unknown = ({*measured} | {*expected} | {*printed}) - {*KINDS}
    if unknown or {*measured} != {*expected}:
        raise ValueError(f"kinds of calls do not match: {sorted({*measured} ^ {*expected} | unknown)}")
    metrics = {f"cost/calls/{k}": float(v) for k, v in measured.items()}
    metrics |= {f"cost/calls/{k}_expected": float(v) for k, v in expected.items()}
    metrics |= {f"cost/calls/{k}_printed": float(v) for k, v in printed.items()}
    metrics["health/cost_mismatch"] = float(sum(measured[k] != expected[k] for k in measured))
    return metrics
