"""The cost ledger of RACE: model calls of one update, beside two expectations (App. E, Tables 14 and 15).

`*_printed` is the paper's formula in N and G. `*_expected` follows from what happened: masked groups are not
learnt from, an unusable rubric costs no judge call, a small pool gives fewer entries. Only a difference from the
second is an error (`health/cost_mismatch`); the gap to the first is what was saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from racelab.configs import schema
from racelab.experiments.methods.race.routing import Route
from racelab.experiments.types import JudgeScores, RolloutGroup, UpdateStats

Calls = Mapping[str, int]


def printed_policy(n: int, g: int) -> dict[str, int]:
    """Table 15, policy update: at (64, 8) 512 generations, 64 rubrics, 512 judge calls, 512 learner samples."""
    return {"policy_gen": n * g, "rubric_gen": n, "judge_eval": n * g, "learner_samples": n * g}


def printed_rubric(n: int, g: int) -> dict[str, int]:
    """Table 15, rubric update: at (64, 8) 0 generations, 512 rubrics, 1,024 judge calls, 512 learner samples."""
    return {"policy_gen": 0, "rubric_gen": n * g, "judge_eval": 2 * n * g, "learner_samples": n * g}


def policy_costs(
    groups: Sequence[RolloutGroup],
    routes: Sequence[Route],
    scored: JudgeScores,
    stats: UpdateStats,
    config: schema.RaceConfig,
) -> dict[str, float]:
    """The `cost/calls` metrics of a policy update."""
    n, g = config.prompts_per_step, config.group_size
    trained = [
        r is Route.INFORMATIVE or (not config.routing.mask_uninformative and r is not Route.INVALID)
        for r in routes
    ]
    measured = {
        "policy_gen": sum(len(group.responses) for group in groups),
        "rubric_gen": len(groups),
        "judge_eval": scored.calls,
        "learner_samples": stats.n_samples,
    }
    expected = {
        "policy_gen": n * g,
        "rubric_gen": n,
        "judge_eval": g * sum(group.rubric is not None for group in groups),
        "learner_samples": g * sum(trained),
    }
    return _ledger(measured, expected, printed_policy(n, g))


def rubric_costs(
    usable_NG: npt.NDArray[np.bool_], scored: JudgeScores, stats: UpdateStats, config: schema.RaceConfig
) -> dict[str, float]:
    """The `cost/calls` metrics of a rubric update."""
    entries, g = usable_NG.shape
    measured = {
        "policy_gen": 0,
        "rubric_gen": usable_NG.size,
        "judge_eval": scored.calls,
        "learner_samples": stats.n_samples,
    }
    expected = {
        "policy_gen": 0,
        "rubric_gen": entries * g,
        "judge_eval": 2 * int(usable_NG.sum()),
        "learner_samples": entries * g,
    }
    return _ledger(measured, expected, printed_rubric(config.entries_per_rubric_step, g))


def _ledger(measured: Calls, expected: Calls, printed: Calls) -> dict[str, float]:
    ledger = {f"cost/calls/{k}": float(v) for k, v in measured.items()}
    ledger |= {f"cost/calls/{k}_expected": float(v) for k, v in expected.items()}
    ledger |= {f"cost/calls/{k}_printed": float(v) for k, v in printed.items()}
    ledger["health/cost_mismatch"] = float(sum(measured[k] != expected[k] for k in measured))
    return ledger
