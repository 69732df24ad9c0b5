"""The end of an RLDS run, for people: what its numbers may be taken for, what rose, what the retries and grades did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from racelab.analysis.rlds_words import FEW, counted, too_few
from racelab.cli.console import number, print_table, seconds

_SHOWN = 10
_FEW_NULLS = 5
_SAME_END = {"end_hole_frac": "fell", "end_failed_frac": "failed"}
"""Ways to end that the environment counts under a name of its own, too: one of two equal numbers is shown."""
_ASKED = {"judge_s": "grader", "reflect_s": "reflector", "gen_retry_s": "reflector"}
"""Seconds that only a condition which asks this role can spend."""
_PARTS = {
    "gen_s": "originals",
    "judge_s": "grading",
    "reflect_s": "reflection",
    "gen_retry_s": "retries",
    "advantage_s": "advantages",
    "train_s": "update",
}
_STAGES = {
    "stage1/sign_disagreement_rows": "stage 1: rows whose subtasks disagree in sign",
    "stage1/sign_disagreement_groups": "stage 1: groups with such a row",
    "stage1/subtask_std": "stage 1: std of A_ik in a group",
    "stage1/flat_group_frac": "stage 1: groups with equal rewards",
    "stage2/grpo_correlation": "stage 2: correlation with GRPO",
    "stage2/grpo_correlation_raw": "stage 2: correlation with R - mean",
    "stage3/token_adv_std": "stage 3: std over the tokens of a row",
    "stage3/pivot_spread": "stage 3: spread of the pivots, turns",
}


def print_rlds(summary: Mapping[str, Any], end: Mapping[str, Any]) -> None:
    """Prints `analysis.rlds_summary.summarise_rlds`'s dict, without where the run lies.

    The dict is what the run left when it ended: one that an older racelab wrote lacks some keys.
    """
    for note in summary["notes"]:
        print(f"  NOTE: {note}")
    _what_happened(summary, end)
    _validation(summary["validation"])
    _groups(summary)
    _stages(summary["stages"], summary.get("null_draws"))
    _subtasks(summary["subtasks"])
    _costs(summary, end)
    _counters(summary["task_counters"])


def _what_happened(summary: Mapping[str, Any], end: Mapping[str, Any]) -> None:
    resumed = " (the last attempt)" if end.get("attempts", 1) > 1 else ""
    print(
        f"  {summary['task']}, {summary['condition']}: {counted(summary['steps']['policy'], 'update')}; "
        f"{seconds(end.get('wall_s'))}, peak memory {number(end.get('peak_gib'), 1)} GiB{resumed}."
    )
    print(f"  Training reward of the originals{_course(summary['train_reward'])}.")
    health = summary["health"]
    if health["nonfinite"]:
        print(f"  WARNING: values that are not finite: {', '.join(health['nonfinite'])}.")


def _course(reward: Mapping[str, Any]) -> str:
    first, last = number(reward["first_third"]), number(reward["last_third"])
    if reward.get("n_steps", 2) <= 1:
        return f": {last}"
    parts = "update" if reward.get("n") == 1 else "third of the updates"
    return f", first and last {parts}: {first} → {last}"


def interval(cell: Mapping[str, Any], value: str = "difference") -> str:
    """`+0.125 [+0.020, +0.230]`; without the brackets where there is no interval; `-` where there is no value."""
    if cell.get(value) is None:
        return "-"
    if cell["low"] is None:
        return f"{cell[value]:+.3f}"
    return f"{cell[value]:+.3f} [{cell['low']:+.3f}, {cell['high']:+.3f}]"


def mean_interval(cell: Mapping[str, Any], value: str) -> str:
    """`0.125 [0.020, 0.230]`, without the brackets where there is no interval."""
    if cell["low"] is None:
        return number(cell[value])
    return f"{number(cell[value])} [{number(cell['low'])}, {number(cell['high'])}]"


def _validation(found: Mapping[str, Any]) -> None:
    if not found["n_evaluations"]:
        return
    print()
    examples = found["curve"][-1]["n"]
    words = "paired over its examples, 95 % interval" if examples >= FEW else too_few(examples)
    print(f"Validation (a fixed slice; {words})")
    rows = []
    for key, name in (("reward", "reward"), ("solved", "solved")):
        cell, five = found[key], found["last_five"][key]
        rows.append(
            [
                name,
                number(cell["before"]),
                number(cell["after"]),
                interval(cell),
                mean_interval(five, "mean"),
                str(cell["n"]),
            ]
        )
    n = found["last_five"]["n_evaluations"]
    heads = ["", "before", "after", "difference", _last(n), "examples"]
    print_table(heads, rows, right=["before", "after", "examples"])
    best, last = found["best"], found["last"]
    checkpoints = found.get("n_checkpoints", found["n_evaluations"])
    if checkpoints > 1:
        print(
            f"Best of {checkpoints} evaluations: reward {number(best['reward'])} after "
            f"{counted(best['step'], 'update')}; the last: {number(last['reward'])} after {last['step']:,}. A maximum "
            f"over noisy evaluations is too high: read the {_last(n)}."
        )


def _last(n: int) -> str:
    return "last evaluation" if n == 1 else f"mean of the last {n} evaluations"


def _groups(summary: Mapping[str, Any]) -> None:
    print()
    print("Groups, retries and grades")
    print(
        f"  Groups with equal rewards (collapse) {number(summary['collapse_rate'])}, with solved and unsolved "
        f"rollouts {number(summary['mixed_rate'])}."
    )
    tried = summary["retries"] if summary.get("retries_asked", True) else {}
    if tried and not tried["candidates"]:
        print("  Retries: none, as no failure was picked.")
    elif tried:
        failed = counted(tried["replay_failures"], "replay")
        print(
            f"  Retries: {number(tried['made'])} made of {counted(tried['candidates'], 'failure')} picked; better than "
            f"the original {number(tried['success_frac'])}, solved {number(tried['solved_frac'])}, mean change of "
            f"the reward {number(tried['delta_mean'])}."
        )
        print(
            f"  L_aux had {counted(tried['retry_pairs'], 'retry', 'retries')} and "
            f"{counted(tried['reflect_pairs'], 'reflection')}; a retry wrote {number(tried['generation_ratio'], 2)} of "
            f"the tokens of its original{f'; {failed} failed' if tried['replay_failures'] else ''}."
        )
    _parse(summary["parse"], summary["fallbacks"])


def _parse(found: Mapping[str, Any], fallbacks: Mapping[str, int]) -> None:
    for kind, counts in (("Gradings", found["grades"]), ("Reflections", found["reflections"])):
        if counts:
            n = sum(counts.values())
            others = ", ".join(
                f"{name} {count:,}" for name, count in counts.items() if name != "ok" and count
            )
            print(
                f"  {kind}: {counts.get('ok', 0):,} of {n:,} could be used ({counts.get('ok', 0) / n:.3f})"
                + (f"; {others}." if others else ".")
            )
    if found["grades"]:
        wrong = found["failures_counted_as_grades"]
        print(
            "  No parse failure is counted as a grade."
            if not wrong
            else f"  ERROR: counted as grades, though they could not be read: {counted(wrong, 'grading')}."
        )
    fell = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in fallbacks.items() if count)
    if fell:
        print(f"  Fallbacks: {fell}.")


def _stages(found: Mapping[str, Any], draws: int | None) -> None:
    metrics = found["metrics"]
    if not metrics:
        return
    print()
    n = max(cell["n_nulls"] for cell in metrics.values())
    if n < _FEW_NULLS:
        print(
            f"Stage diagnostics are left out: {counted(n, 'permutation null')} of at least {_FEW_NULLS} that they need "
            "(method.sdae.null_every); their means are in --json."
        )
        return
    print(
        "Stage diagnostics, means over the updates (excess: over grades and pivots permuted within a group)"
    )
    uniform = found["informative"] is False
    rows = []
    for key, name in _STAGES.items():
        if key in metrics:
            cell = metrics[key]
            flag = " (not informative: φ is uniform)" if uniform and "correlation" in key else ""
            rows.append(
                [
                    f"{name}{flag}",
                    number(cell["mean"]),
                    "-" if cell["null_excess"] is None else f"{cell['null_excess']:+.3f}",
                    number(cell["null_p_median"]),
                    _low_p(cell),
                ]
            )
    heads = ["", "mean", "excess", "median p", "p ≤ 0.05"]
    print_table(heads, rows, right=heads[1:])
    least = "1/(draws + 1)" if draws is None else f"1/(draws + 1) = 1/{draws + 1:,}"
    chance = 0.05 if draws is None else (draws + 1) // 20 / (draws + 1)
    print(
        f"Raw values mislead: random grades disagree in sign, too. By chance p ≤ 0.05 in {chance * n:.2g} of {n}; p is "
        f"two-sided and cannot be below {least}."
    )


def _low_p(cell: Mapping[str, Any]) -> str:
    """`20 of 20`: in how many of the nulls p was low."""
    n = cell["n_nulls"]
    return f"{round(cell['null_p_low_frac'] * n)} of {n}" if n else "-"


def _subtasks(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    print()
    print("Subtasks (grades 1 to 5; change: from a failure to its retry; pivot: turn, from 0)")
    table = [
        [
            str(row["name"]),
            number(row["weight"], 2),
            number(row["grade"], 2),
            "-" if row["retry_delta"] is None else f"{row['retry_delta']:+.2f}",
            number(row["pivot"], 2),
        ]
        for row in rows
    ]
    heads = ["subtask", "φ", "grade", "change", "pivot"]
    print_table(heads, table, right=heads[1:])


def _costs(summary: Mapping[str, Any], end: Mapping[str, Any]) -> None:
    found = summary["costs"]
    print()
    print("Cost")
    print(f"  {_seconds(summary, end)}.")
    print(
        f"  CPU seconds of this process in updates: {summary['cpu_s']:,.1f}; servers and simulators not included."
    )
    tokens = ", ".join(f"{role} {count:,}" for role, count in found["tokens"].items() if count)
    print(f"  Tokens sampled by the trained model: {tokens or 'none'}.")
    calls = ", ".join(
        f"{kind.replace('_', ' ')} {c['measured']:,}"
        for kind, c in found["calls"].items()
        if c["measured"] or c["expected"]
    )
    for key, name in (("tool_calls", "tool calls"), ("judge_calls", "judge calls")):
        calls += f", {name} {found[key]:,}" if found[key] else ""
    print(f"  Calls: {calls}{'' if found['mismatches'] else '; as many as follow from the steps'}.")
    if found["mismatches"]:
        steps = ", ".join(map(str, found["mismatch_steps"][:_SHOWN]))
        print(f"  ERROR: not as many as expected: {counted(found['mismatches'], 'count')}; first at {steps}.")


def _seconds(summary: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    """Where the time went; the rest is known of a run that was never interrupted."""
    spent, roles = summary["seconds"], summary.get("roles")
    parts = ", ".join(
        f"{name} {spent[key]:,.1f}"
        for key, name in _PARTS.items()
        if spent.get(key) and (roles is None or _ASKED.get(key) in (None, *roles))
    )
    updates, looked = spent.get("step_s", 0.0), spent.get("validate_s", 0.0)
    again = end.get("attempts", 1) > 1
    said = f"Seconds{' (all attempts)' if again else ''}: {updates:,.1f} in updates ({parts})"
    said += f"; {looked:,.1f} in validation"
    if again or end.get("wall_s") is None:
        return said
    warm_up = "warm-up, " if summary.get("engine") == "grid" else ""
    return f"{said}; {max(0.0, end['wall_s'] - updates - looked):,.1f} the rest: start, {warm_up}tables"


def _counters(found: Mapping[str, Mapping[str, float]]) -> None:
    print()
    print("The task")
    heads = {
        "means": "Counted, a rollout (mean over all rollouts, retries included)",
        "totals": "Counted, in all",
        "state": "Rates and gauges, mean over the updates",
    }
    if "solved_frac" in found["means"]:
        print(f"  Solved (originals): {number(found['means']['solved_frac'])}.")
    for kind, head in heads.items():
        of = found.get(kind, {})
        shown = ", ".join(
            f"{name} {_short(value)}"
            for name, value in of.items()
            if name != "solved_frac" and not (name in _SAME_END and of.get(_SAME_END[name]) == value)
        )
        if shown:
            print(f"  {head}: {shown}.")
    faults = ", ".join(f"{name} {_short(value)}" for name, value in found["faults"].items() if value)
    if found["faults"]:
        print(f"  FAULTS: {faults}." if faults else "  Faults of services and simulators: none.")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"
