"""What RACE's updates cost: measured, expected and printed calls (App. E, Tables 14 and 15) for the ledger."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from racelab.configs import schema
from racelab.experiments.methods.ledger import ledger
from racelab.experiments.methods.race.routing import Route
from racelab.experiments.types import JudgeScores, RolloutGroup, UpdateStats


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
    return ledger(measured, expected, printed_policy(n, g))


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
    return ledger(measured, expected, printed_rubric(config.entries_per_rubric_step, g))
