"""What happened in an RLDS run, from its spool: numbers first, each with what it may be taken for.

Plain JSON values, so that the terminal, `--json` and the report show the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from racelab.analysis.rlds_validation import validation
from racelab.analysis.rlds_words import NO_TOOL, has_tools, notes, roles
from racelab.configs.schema_rlds import RldsRunConfig
from racelab.experiments.fsio import read_json
from racelab.experiments.runfolder import RunFolder
from racelab.experiments.tracking.spool import read_spool

Metrics = Sequence[Mapping[str, float]]

STAGES: Final = (
    "stage1/sign_disagreement_rows",
    "stage1/sign_disagreement_groups",
    "stage1/subtask_std",
    "stage1/flat_group_frac",
    "stage2/grpo_correlation",
    "stage2/grpo_correlation_raw",
    "stage3/token_adv_std",
    "stage3/pivot_spread",
)
_CALLS: Final = ("policy_gen", "grade_gen", "reflect_gen", "learner_samples")
_ROLES: Final = ("policy", "grade", "reflect")
_STATE: Final = re.compile(r"env_steps_per_s$|tools/(seconds|cache_entries)$|retriever_ms")
"""Rates and gauges of a task itself: what stands at the end of a step, or a mean over its calls."""
_TOTALS: Final = re.compile(
    r"env_steps$|jvm_(?!fault$)|faults/|tools/|judge/|retriever_(calls|failed|retried)$"
)
"""Counters of a task itself, that start again at zero each step; what is neither is a mean over a step's rollouts."""
_END: Final = re.compile(r"end_.*_frac")
_FAULT: Final = re.compile(r"(?!failed$|end_).*(fault|failed|restart|retried)")
"""Of services and simulators; an episode that its agent fails (ScienceWorld's `failed`) is none."""


def summarise_rlds(folder: RunFolder, config: RldsRunConfig) -> dict[str, Any]:
    """The whole summary of an RLDS run that has finished, or of what there is of it."""
    metrics, samples = _read(folder)
    steps = [m for m in metrics if "train/clock/policy_step" in m]
    seed, info = config.run.seed, folder.info()
    unused = bool(steps) and has_tools(config) and not total(steps, "cost/calls/tool_calls")
    return {
        "family": "rlds",
        "run_id": folder.run_id,
        "name": info["name"],
        "path": str(folder.path),
        "task": config.task.name,
        "condition": config.method.condition,
        "preset": config.preset,
        "seed": seed,
        "engine": config.model.engine,
        "roles": roles(config.method),
        "retries_asked": bool(config.method.reflect.max_retries),
        "null_draws": config.method.sdae.null_draws,
        "notes": [*notes(config), *[NO_TOOL] * unused],
        "steps": {"policy": len(steps)},
        "transcripts_every": config.run.transcripts_every,
        "seconds": seconds_by_part(metrics),
        "cpu_s": total(steps, "perf/cpu/step_s"),
        "validation": validation(samples, config.validation.bootstrap, seed),
        "train_reward": _thirds(steps, "train/reward/mean"),
        "retries": retries(steps),
        "parse": parse(steps),
        "collapse_rate": mean(steps, "rlds/group/flat_frac"),
        "mixed_rate": mean(steps, "rlds/group/mixed_frac"),
        "fallbacks": {
            name: int(total(steps, f"rlds/fallback/{name}"))
            for name in ("groups_without_grades", "rows_ungraded", "rows_negative", "pivots_clamped")
            if values(steps, f"rlds/fallback/{name}")
        },
        "stages": stages(steps),
        "subtasks": subtasks(steps, _taxonomy(folder)),
        "costs": costs(steps),
        "task_counters": counters(steps, config.task.name),
        "health": {
            "cost_mismatch": int(total(steps, "health/cost_mismatch")),
            "nonfinite": sorted({k for m in metrics for k in m if k.startswith("health/nonfinite/")}),
        },
    }


def _read(folder: RunFolder) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Metrics by step (ascending) and the rows of `val_examples`; the large tables are passed over."""
    steps: dict[int, dict[str, float]] = {}
    samples: list[dict[str, Any]] = []
    for record in read_spool(folder):
        if record["kind"] == "metrics":
            steps.setdefault(int(record["step"]), {}).update(record["values"])
        elif record["kind"] == "rows" and record["table"] == "val_examples":
            samples += [{"step": record["step"], **row} for row in record["rows"]]
    return [{"step": float(step), **found} for step, found in sorted(steps.items())], samples


def _taxonomy(folder: RunFolder) -> dict[str, float]:
    """Subtask -> φ_k, in the task's order."""
    file = folder.path / "setup.json"
    return {str(n): float(w) for n, w in read_json(file)["subtasks"]} if file.is_file() else {}


def values(metrics: Metrics, name: str) -> list[float]:
    """Of a metric, in the steps that logged it."""
    return [m[name] for m in metrics if name in m]


def mean(metrics: Metrics, name: str) -> float | None:
    """Over the steps that logged it."""
    found = values(metrics, name)
    return sum(found) / len(found) if found else None


def total(metrics: Metrics, name: str) -> float:
    """Over the steps that logged it."""
    return sum(values(metrics, name))


def _weighted(metrics: Metrics, name: str, weight: str) -> float | None:
    """Mean of a metric over what `weight` counts, where both are logged."""
    pairs = [(m[name], m[weight]) for m in metrics if name in m and m.get(weight, 0.0) > 0.0]
    n = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / n if n else None


def _thirds(metrics: Metrics, name: str) -> dict[str, float | int | None]:
    """Mean of the first and of the last third of the steps: single steps swing with their instances.

    `n` is the number of steps in a third, at least 1, and `n_steps` that of all.
    """
    found = values(metrics, name)
    n = max(1, len(found) // 3)
    first, last = found[:n], found[-n:]
    return {
        "first_third": sum(first) / n if found else None,
        "last_third": sum(last) / n if found else None,
        "n": n,
        "n_steps": len(found),
    }


def seconds_by_part(metrics: Metrics) -> dict[str, float]:
    """`perf/time/*` of the whole run; `step_s` holds the parts of the steps, `validate_s` stands beside it."""
    names = dict.fromkeys(
        k.removeprefix("perf/time/") for m in metrics for k in m if k.startswith("perf/time/")
    )
    return {name: total(metrics, f"perf/time/{name}") for name in names}


def retries(steps: Metrics) -> dict[str, Any]:
    """What became of the failures that were tried again; {} for a condition without retries."""
    if not values(steps, "rlds/reflect/n_candidates"):
        return {}
    made = "rlds/reflect/n_retries"
    return {
        "candidates": int(total(steps, "rlds/reflect/n_candidates")),
        "made": int(total(steps, made)),
        "success_frac": _weighted(steps, "rlds/reflect/success_frac", made),
        "solved_frac": _weighted(steps, "rlds/reflect/solved_frac", made),
        "delta_mean": _weighted(steps, "rlds/reflect/reward_delta_mean", made),
        "retry_from_mean": _weighted(steps, "rlds/reflect/retry_from_mean", made),
        "generation_ratio": mean(steps, "rlds/reflect/gen_ratio"),
        "replay_failures": int(total(steps, "rlds/reflect/replay_fail")),
        "reflect_pairs": int(total(steps, "rlds/reflect/n_reflect_pairs")),
        "retry_pairs": int(total(steps, "rlds/reflect/n_retry_pairs")),
    }


def parse(steps: Metrics) -> dict[str, Any]:
    """What the grader's and the reflector's replies were; `failures_counted_as_grades` must be 0."""
    names = sorted({k for m in steps for k in m if k.startswith("rlds/parse/")})
    counts = {
        kind: {
            name.removeprefix(f"rlds/parse/{prefix}_"): int(total(steps, name))
            for name in names
            if name.startswith(f"rlds/parse/{prefix}_")
        }
        for kind, prefix in (("grades", "grade"), ("reflections", "reflect"))
    }
    n_graded = sum(
        m["rlds/parse/graded_frac"] * sum(v for k, v in m.items() if k.startswith("rlds/parse/grade_"))
        for m in steps
        if "rlds/parse/graded_frac" in m
    )
    asked = sum(counts["grades"].values())
    return {
        **counts,
        "graded_frac": n_graded / asked if asked else None,
        "bad_pivots": int(total(steps, "rlds/parse/bad_pivots")),
        "failures_counted_as_grades": round(n_graded) - counts["grades"].get("ok", 0),
    }


def stages(steps: Metrics) -> dict[str, Any]:
    """The stage diagnostics: mean over the steps, and against their permutation null where it was taken.

    Of each null: mean excess (observed - permuted), median p, and how often p was at most 0.05, which under the null
    happens in one of twenty. `informative` is False under uniform φ: the correlation is then forced.
    """
    found: dict[str, Any] = {}
    for name in STAGES:
        average = mean(steps, f"rlds/{name}")
        if average is None:
            continue
        short = name.partition("/")[2]
        excess, p = (values(steps, f"rlds/null/{short}_{what}") for what in ("excess", "p"))
        found[name] = {
            "mean": average,
            "null_excess": sum(excess) / len(excess) if excess else None,
            "null_p_median": float(np.median(p)) if p else None,
            "null_p_low_frac": sum(v <= 0.05 for v in p) / len(p) if p else None,
            "n_nulls": len(p),
        }
    informative = mean(steps, "rlds/stage2/informative")
    return {"metrics": found, "informative": None if informative is None else informative > 0.0}


def subtasks(steps: Metrics, weights: Mapping[str, float]) -> list[dict[str, Any]]:
    """Per subtask: φ, mean grade, mean change of it from a failure to its retry, mean pivot turn; [] without grades."""
    graded = {k.removeprefix("rlds/grade/") for m in steps for k in m if k.startswith("rlds/grade/")}
    order = [*(name for name in weights if name in graded), *sorted(graded - set(weights))]
    return [
        {
            "name": name,
            "weight": weights.get(name),
            "grade": mean(steps, f"rlds/grade/{name}"),
            "retry_delta": mean(steps, f"rlds/retry/{name}"),
            "pivot": mean(steps, f"rlds/pivot/{name}"),
        }
        for name in order
    ]


def costs(steps: Metrics) -> dict[str, Any]:
    """Calls of the whole run by kind (made, and as they follow from the steps), and sampled tokens by role."""
    calls = {
        kind: {
            "measured": int(total(steps, f"cost/calls/{kind}")),
            "expected": int(total(steps, f"cost/calls/{kind}_expected")),
        }
        for kind in _CALLS
        if values(steps, f"cost/calls/{kind}")
    }
    return {
        "calls": calls,
        "tool_calls": int(total(steps, "cost/calls/tool_calls")),
        "judge_calls": int(total(steps, "cost/calls/external_judge_calls")),
        "tokens": {role: int(total(steps, f"cost/tokens/{role}")) for role in _ROLES},
        "mismatches": int(total(steps, "health/cost_mismatch")),
        "mismatch_steps": [int(m["step"]) for m in steps if m.get("health/cost_mismatch", 0.0) > 0.0],
    }


def counters(steps: Metrics, task: str) -> dict[str, dict[str, float]]:
    """What task and environments count, by class.

    Returns:
        faults: of services and simulators, in all (`... a rollout`: a mean over rollouts).
        totals: of the run.
        state: rates and gauges, mean over the steps that logged them.
        means: over rollouts.
    """
    prefix = f"task/{task}/"
    names = sorted({k for m in steps for k in m if k.startswith(prefix)})
    found: dict[str, dict[str, float]] = {"faults": {}, "totals": {}, "state": {}, "means": {}}
    for name in names:
        short = name.removeprefix(prefix)
        is_state = _STATE.match(short) is not None
        is_total = not is_state and _TOTALS.match(short) is not None
        # of a way to end there is no metric in the steps where no episode ended so
        n = len(steps) if _END.fullmatch(short) else len(values(steps, name))
        value = total(steps, name) / (1 if is_total else n)
        if _FAULT.match(short):
            found["faults"][short if is_total else f"{short} a rollout"] = value
        else:
            found["totals" if is_total else "state" if is_state else "means"][short] = value
    return found
